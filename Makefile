# `make demo` runs the quickstart recipe on the bundled model; `make test` runs every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types imports docs pytest coverage clean

demo: $(INSTALLED)
	$(BIN)/prunecli run recipes/quickstart.yaml

test: lint types imports docs pytest

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plot]'
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check prunecli tests benchmarks
	$(BIN)/ruff format --check prunecli tests benchmarks

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

docs: $(INSTALLED)  # with --quiet mkdocs would not count the warnings that fail it
	$(BIN)/mkdocs build

pytest: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile

coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile --cov --cov-report=term-missing

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output
