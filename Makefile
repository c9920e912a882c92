# Every command of daily work. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
SOURCES := client storage cluster jepsen-like tests
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# A package index may hiccup once; what fails twice is a real failure.
RETRY = retry() { "$$@" || { echo "retrying: $$*" >&2; sleep 5; "$$@"; }; }; retry

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: .venv/.installed .venv/.installed-spark ## make .venv with everything

.PHONY: up
up: install ## a local cluster of three with a live demonstration; Ctrl-C stops it
	$(BIN)/holdfast up --demo

.PHONY: test
test: install tools lint types ## what CI runs: format, lint, types, every test
	$(BIN)/python -m pytest tests -rs

# One test counts system calls from outside. Without strace it is skipped, and says so.
.PHONY: tools
tools: ## strace, for the tests: installed where that is allowed (Debian, as root)
	@if command -v strace >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing strace"; \
	    { apt-get install -qq -y strace || { apt-get update -qq && apt-get install -qq -y strace; }; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "strace is missing: the test that counts syncs per confirm is skipped (on Debian, as root: apt install strace)" >&2

.PHONY: check
check: format lint types ## format, lint, types and the fast tests
	$(BIN)/python -m pytest tests -m "not slow"

.PHONY: format
format: .venv/.installed ## rewrite the sources in the one format
	$(BIN)/ruff format $(SOURCES)

.PHONY: lint
lint: .venv/.installed ## ruff: rules and format, changing nothing
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

.PHONY: types
types: .venv/.installed ## mypy, strict, over the packages and the tests
	@mkdir -p build/types/holdfast
	@ln -sfn ../../../client build/types/holdfast/client
	@ln -sfn ../../../storage build/types/holdfast/storage
	@ln -sfn ../../../cluster build/types/holdfast/cluster
	@ln -sfn ../../../jepsen-like build/types/holdfast/jepsen
	$(BIN)/mypy -p holdfast -p tests

.PHONY: mutants
mutants: .venv/.installed ## show that the tests catch every deliberate defect
	$(BIN)/python -m holdfast.jepsen.mutants --jobs 2

.PHONY: bench
bench: .venv/.installed ## measure the state machine alone
	$(BIN)/holdfast bench apply

.PHONY: fuzz
fuzz: .venv/.installed ## property tests with fresh seeds, for longer
	HOLDFAST_HYPOTHESIS=fresh $(BIN)/python -m pytest tests -m fuzz

.PHONY: clean
clean: ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The interpreter: PYTHON=... if given, else the first below that is 3.11 or newer.
.venv/bin/python:
	@for candidate in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.14; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$candidate" -m venv .venv && exit 0; \
	        rm -rf .venv; \
	        echo "$$candidate cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "Holdfast needs Python 3.11 or newer, and none was found: install one or pass PYTHON=..." >&2; \
	exit 1

# Two stamps, for PySpark is large: lint, types and the fast tests do without it.
.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing into .venv"
	@$(RETRY) $(PIP_INSTALL) -e '.[dev]'
	@touch $@

.venv/.installed-spark: .venv/.installed
	@echo "installing PySpark into .venv (about 400 MB)"
	@$(RETRY) $(PIP_INSTALL) -e '.[dev,spark-local]'
	@touch $@
