# Everything a person needs on a fresh machine with Python 3.11+: `make demo`, `make test`.
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
# TORCH=2.11.0: with that torch in a venv of its own, so `make test TORCH=2.11.0`.
VENV ?= .venv$(TORCH:%=-torch-%)
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ROOMS := instrument profiler estimators advisors enforcers reports cli
SOURCES := memopt $(ROOMS) tests tools benchmarks examples
# Each process of the tests would compile them again, 4 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test quick lint format types docs bench bench-estimate bench-gpu bench-advise bench-run clean

help: ## Show what there is to make
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("memopt needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	grep -v -E '$(if $(TORCH),^(torch|setuptools)==,^$$)' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/pip install --quiet --quiet -c $(VENV)/constraints.txt --group dev $(TORCH:%=torch==%) -e .
	@touch $@

install: $(READY) ## Make .venv with memopt and everything it is tested with

demo: $(READY) ## Profile, advise and apply on an example; predicted beside measured
	@PATH="$(abspath $(BIN)):$$PATH" examples/demo.sh

test: $(READY) ## Run the tests (ARGS="-k name" for some of them)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quick: $(READY) ## Run the tests that start no process, train nothing and ask no solver: the quick ones
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not script and not solver and not loop and not slow" $(ARGS)

lint: $(READY) ## Check style, formatting and the rules of the house (tools/house.py)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python -m tools.house

format: $(READY) ## Format the code
	$(BIN)/ruff format $(SOURCES)

types: $(READY) ## Check types (mypy --strict) through a view in which the rooms lie inside the package
	@mkdir -p build/types/memopt && find build/types -xtype l -delete
	@ln -sfn $(addprefix $(CURDIR)/,$(ROOMS)) $(wildcard $(CURDIR)/memopt/*.py) $(CURDIR)/memopt/codecs $(CURDIR)/memopt/integrations $(CURDIR)/memopt/py.typed build/types/memopt/
	$(BIN)/mypy

docs: $(READY) ## Write what the docs have from the code: the help of every command, manual pages, completions, torch's private names
	$(BIN)/python -m tests.support.command_pages
	$(BIN)/python -m tests.support.man_pages
	$(BIN)/python -m tests.support.internals_page

bench: $(READY) ## Models x budgets: predicted and measured peak and step time, same losses or not (ARGS="--models resnet50")
	$(BIN)/python -m benchmarks.bench $(ARGS)

bench-estimate: $(READY) ## Estimated against measured peaks, all parts of benchmarks/estimate.py (ARGS="lm litgpt")
	$(BIN)/python -m benchmarks.estimate $(ARGS)

bench-gpu: $(READY) ## On a GPU: is it right, fast, and as estimated? ARGS="correctness --out DIR"; benchmarks/gpu says more
	$(BIN)/python -m benchmarks.gpu.campaign $(ARGS)

bench-advise: $(READY) ## Strategies against each other: every benchmarks/advise*.py
	@for file in benchmarks/advise*.py; do echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py) $(ARGS) || exit 1; done

bench-run: $(READY) ## Scripts of many kinds under memopt run: planned, held, same bits (ARGS="--kinds language lora")
	$(BIN)/python -m benchmarks.run $(ARGS)

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
