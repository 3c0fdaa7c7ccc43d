# Every target installs what it needs by itself; `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# TORCH=2.11.0 runs everything on another torch, in an environment of its own beside the usual one.
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python that is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PYTEST_ARGS ?=

.PHONY: help install demo quick test contracts lint format types unit coverage fuzz golden docs snippets wheel notes bench gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## create .venv and install Plimsoll with its development tools

# Runs again only when the dependencies changed.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Plimsoll needs Python 3.11 or newer, with venv and ensurepip."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (the first time this fetches torch)"
	@# Another torch brings its own triton. It comes first, alone, and is pinned as it came: beside everything else pip would
	@# fetch one triton after the other to find it.
	@$(if $(TORCH),$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)',true)
	@$(if $(TORCH),{ grep -vE '^(torch|triton)==' constraints.txt; $(BIN)/python -m pip freeze | grep -E '^(torch|triton)=='; },cat constraints.txt) \
		> $(VENV)/constraints.txt
	@PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a small Llama with and without a memory budget, and compare
	@$(BIN)/plimsoll demo $(DEMO_ARGS)

# Lint and types are checked on the pinned torch alone: another version's annotations differ.
test: $(if $(TORCH),,lint types) unit  ## lint, types and the main suite (TORCH=2.11.0: on that torch)

# Tests are small: a file per worker on one thread each is faster than workers whose threads wait for each other. Files come in
# the order of tests/conftest.py, those of few tests that take long first.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

contracts: $(STAMP)  ## run the long tests: compilers, ranks, frameworks, documents, examples
	$(PYTEST) -m long $(PYTEST_ARGS)

lint: $(STAMP)  ## lint and check the formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## check the types
	$(BIN)/mypy

# What a change is tried with while it is made: the heart of the rooms that need one process, without files that take seconds.
QUICK = tests/{artifacts,distributed,test_architecture.py,test_errors.py,test_long_tests.py,test_metering.py,test_units.py} \
	tests/planning/costing tests/planning/test_{choice,cut,describe,expressions,replay_schedule,sending,simulate,solve,strategies}.py \
	tests/tracing/recorder tests/tracing/test_{peaks,regions,rows,trace,workspaces}.py \
	tests/engine/{chunked_loss,offload,optimizer_state} \
	tests/engine/test_{layouts,lifecycle,memory,replay_rng,tiles,transfers}.py
quick: lint types  ## lint, types, and the quick tests (90 seconds)
	$(PYTEST) -m "not long" $(PYTEST_ARGS) $(QUICK)

unit: $(STAMP)  ## run the main suite alone (PYTEST_ARGS="-k budget")
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

# Tests run in processes that they start are not counted: ranks, commands, forks.
coverage: $(STAMP)  ## run the main suite, and report the share of lines and branches that it runs, by package
	@PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check pytest-cov
	$(PYTEST) -m "not long" --cov=plimsoll --cov-branch --cov-report= $(PYTEST_ARGS)
	@for room in $$(dirname src/plimsoll/*/__init__.py) src/plimsoll; do printf '%-24s' "$$room"; \
		$(BIN)/python -m coverage report --include="$$room/*" --format=total; done

# The suite draws the same examples in every run.
fuzz: $(STAMP)  ## run the property tests on a thousand new examples each
	PLIMSOLL_EXAMPLES=new OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile \
		$$(grep -rlE '^(from|import) hypothesis' tests --include='test_*.py') $(PYTEST_ARGS)

golden: $(STAMP)  ## write the expected --help texts anew
	PLIMSOLL_WRITE_GOLDEN=1 $(BIN)/python -m pytest tests/ui/cli/test_golden_help.py

docs: $(STAMP)  ## build the documentation as a site in build/site, which opens from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# The suite runs what is quick of it. Half an hour on two cores; PAGES="docs/report.md README.md" runs some.
snippets: $(STAMP)  ## run every command and snippet of the documentation as written
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/snippets.py $(PAGES)

# Twice, since two builds of one tree must be the same bytes; then the wheel alone in an environment with nothing else in it.
wheel: $(STAMP)  ## build wheel and sdist twice, compare them, and install the wheel in a bare environment
	@rm -rf dist build/again build/bare
	@for to in dist build/again; do $(BIN)/python -m hatchling build --target wheel --target sdist --directory $$to > /dev/null; done
	@cd dist && sha256sum * && sha256sum * | (cd ../build/again && sha256sum --check --quiet)
	@$(PYTHON) -m venv build/bare
	@PIP_CONSTRAINT=constraints.txt build/bare/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@cd build && bare/bin/plimsoll --version && bare/bin/plimsoll plan --help > /dev/null
	@cd build && ! bare/bin/plimsoll plan llama-tiny --budget 90MiB || { echo "llama-tiny needs the extra hf"; exit 1; }
	@PIP_CONSTRAINT=constraints.txt build/bare/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[hf]"
	@cd build && bare/bin/plimsoll plan llama-tiny --budget 90MiB

notes:  ## print the notes of the newest release, from CHANGELOG.md
	@awk '/^## / { count++ } count == 1' CHANGELOG.md

bench: $(STAMP)  ## measure Plimsoll beside its peers (BENCH_ARGS="--help")
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

DEVICE ?= cuda
RUNS_ON_DEVICE = -c 'import torch; torch.ones(1, device="$(DEVICE)")' > /dev/null 2>&1
# A Python that has torch for the device is taken as it is: nothing is installed, nothing is fetched.
gpu:  ## measure on a GPU in nine minutes and write the page (PYTHON=python3; DEVICE=cpu: a dry run)
	@for python in $(PYTHON) $(BIN)/python; do \
		if $$python $(RUNS_ON_DEVICE); then chosen=$$python; break; fi; done; \
	if test -z "$${chosen:-}"; then $(MAKE) install; chosen=$(BIN)/python; fi; \
	$$chosen -m benchmarks.gpu_session --device $(DEVICE) $(GPU_ARGS); \
	$$chosen -m benchmarks.gpu_session.page

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
