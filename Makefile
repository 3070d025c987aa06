# Two commands for a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test versions check gpu-check install clean

quickstart: .venv/.installed
	$(BIN)/fullband quickstart

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2

versions:  # the laws under the oldest and the newest torch and transformers that are allowed; gigabytes, so not part of CI
	.ci/versions

gpu-check: .venv/.installed-dev  # what only a GPU can show, under five minutes; docs/gpu.md
	mkdir -p runs
	$(BIN)/python -m benchmarks.gpu --json runs/gpu-check.json

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/.installed

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fullband needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@ .venv/.installed

clean:  # what `install` can make again; never runs/, which it can't
	rm -rf .venv
