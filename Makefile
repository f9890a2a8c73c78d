# `make demo` runs the quickstart recipe on the bundled model; `make test` runs every check; `make fast` the quick ones.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One more than there are cores: tests wait for disks and for processes of their own.
PYTEST = $(BIN)/python -m pytest -n $$(( $$($(PYTHON) -c 'import os; print(os.cpu_count())') + 1 )) --dist loadfile
FAST := tests/tensors tests/model tests/text tests/analysis tests/methods/*/test_plan.py tests/test_docs.py
INSTALLED := $(VENV)/.installed

.PHONY: demo test fast lint types imports docs pytest gpu coverage families clean

demo: $(INSTALLED)
	$(BIN)/prunecli run quickstart

test: lint types imports docs pytest

fast: lint types imports
	$(PYTEST) $(FAST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plot]'
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check prunecli tests benchmarks tools
	$(BIN)/ruff format --check prunecli tests benchmarks tools

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

docs: $(INSTALLED)  # with --quiet mkdocs would not count the warnings that fail it
	$(BIN)/mkdocs build

pytest: $(INSTALLED)
	$(PYTEST)

gpu: $(INSTALLED)  # on the card at hand, and on pretended ones
	$(BIN)/python -m pytest -rs tests/gpu

families: $(INSTALLED)  # what can be removed from which type; writes docs/reference/families.md
	.venv/bin/python -m tests.families

coverage: $(INSTALLED)
	$(PYTEST) --cov --cov-report=term-missing

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output
