# Everything runs from .venv; stamp files make a second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install up test test-full check bench

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) $(MODEL) ## make .venv with the pinned versions and the default model

up: $(INSTALLED) $(MODEL) ## serve the default model on 127.0.0.1:8080
	$(BIN)/headrace up

test: $(INSTALLED) $(MODEL) ## run the whole test suite
	$(BIN)/python -m pytest

test-full: $(INSTALLED) $(MODEL) ## the whole matrix of numerical equality too (half an hour)
	HEADRACE_FULL=1 $(BIN)/python -m pytest

check: $(INSTALLED) ## lint, formatting, types and the layers of the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED) $(MODEL) ## start a server of its own and measure it (OPTIONS="--concurrency 1,4")
	$(BIN)/python benchmarks/serve.py $(OPTIONS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "$(PYTHON) is older than 3.11. Next: make install PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	|| { rm -rf $(VENV); echo "No venv module. Next (Debian): apt-get install python3-venv"; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(MODEL): engine/model/default_model.py $(INSTALLED)
	$(BIN)/python -c 'from engine.model.default_model import fetch_default_model as f; f()'
	@touch $@
