# The usual commands; each is one line that can be typed as well.
VENV_PYTHON = .venv/bin/python

.PHONY: help install format lint test test-all test-legacy figures

help:          ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/	/'

install:       ## create .venv with all that development needs
	bash setup_venv.sh requirements-dev.txt

format: install  ## format the code and fix what ruff can fix
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

lint: install  ## check style and types
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

test:          ## lint, and run the fast tests
	bash test.sh

test-all:      ## lint, and run all tests
	bash test.sh --all

test-legacy:   ## run the tests of the legacy stack
	bash test.sh --legacy

figures: install  ## redraw all figures and tables from the committed logs
	$(VENV_PYTHON) -m figures.draw
