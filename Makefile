# inferdbg: `make demo` shows it, `make test` checks it. Both work on a fresh machine with Python >= 3.11 and make.
# TORCH_INDEX: an extra package index for torch, for instance the public one of CPU-only wheels.

PYTHON ?= python3
VENV := .venv
TORCH_VERSION := 2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS := --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint bench gpu-check docs lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Build .venv from requirements.lock (the other targets do it by themselves)

$(STAMP): requirements.lock pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "inferdbg needs Python 3.11 or newer: try 'make PYTHON=python3.12 $(MAKECMDGOALS)'" >&2; exit 4; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment: install its venv package (python3-venv)" >&2; exit 4; }
	@echo "installing the locked packages into $(VENV) (a few minutes the first time) ..." >&2
	@$(BIN)/pip install $(PIP_FLAGS) -r requirements.lock
	@$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## Serve a real small model, record a burst of requests, look at the run, compare two runs
	@$(BIN)/inferdbg demo

test: setup ## Run the tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## Format, lint, types, import contracts; changes nothing
	@$(BIN)/ruff format --check --quiet . || { echo "run '$(BIN)/ruff format .'" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@PYTHONPATH=.typing $(BIN)/lint-imports

check: lint test ## All that must hold before a commit: lint, then the tests

bench: setup ## Measure against named peers; one JSON line each (see benchmarks/README.md)
	@$(BIN)/python -m benchmarks

gpu-check: setup ## On a machine with a GPU: correctness, graph against eager, throughput
	@$(BIN)/python benchmarks/gpu_check.py

docs: setup ## Write the generated reference pages again
	@$(BIN)/python -m inferdbg.cli.reference

lock: ## Resolve pyproject.toml's dependencies anew into requirements.lock
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install $(PIP_FLAGS) --upgrade pip
	build/lock/bin/pip install $(PIP_FLAGS) torch==$(TORCH_VERSION)
	build/lock/bin/pip install $(PIP_FLAGS) '.[demo,fast]' --group dev 'setuptools>=77'
	{ echo "# Made by 'make lock' from pyproject.toml. torch has no local version, URL or hash, so that each index serves its own build."; \
	  build/lock/bin/pip freeze --exclude inferdbg --exclude pip | sed -E 's/^(torch==[^+]*)\+.*/\1/'; \
	  build/lock/bin/pip freeze --all | grep '^setuptools=='; } > requirements.lock

clean: ## Remove what was built (runs and pulled models stay)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
