# Everything happens in .venv, made from constraints.txt; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each test process takes whole files; one takes all tests that start Ray (tests/conftest.py).
PARALLEL := -n logical --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-cluster docs format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Python compiles what it imports, a fraction of the 18,000 files that pip would compile one after another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info < (3, 14); sys.exit(0 if ok else f"rayfl needs Python 3.10 to 3.13, {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "creating $(VENV) (once; a few minutes, torch and ray are large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv with rayfl and everything it needs

demo: $(STAMP)  ## compare MT-HFL, FedAvg and SOLO on scikit-learn's digits; a minute once all is installed
	@$(BIN)/rayfl run digits-demo --beside fedavg,solo

test: $(STAMP)  ## lint, types, tests (without the slow ones)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then $(BIN)/mypy; \
	else echo "types are not checked on Python 3.10, for which there are only old stubs of SciPy"; fi
	@$(BIN)/pytest $(PARALLEL)

test-all: $(STAMP)  ## all tests, the slow ones too
	@$(BIN)/pytest $(PARALLEL) -m 'not cluster'

test-cluster: $(STAMP)  ## ray up, cut links, lost and late nodes on machines made of network namespaces (root; some minutes)
	@$(BIN)/pytest -n 0 -m cluster tests/cluster

docs: $(STAMP)  ## build the documentation into site/; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP)  ## format the code, and fix what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and caches; runs/ is kept
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache *.egg-info
