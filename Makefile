# The usual commands; each is one line that can be typed as well.
PYTHON = .venv/bin/python

.PHONY: help install format lint test test-all test-legacy figures

help:          ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/	/'

install:       ## create .venv with all that development needs
	bash setup_venv.sh requirements-dev.txt

format: install  ## format the code and fix what ruff can fix
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lint: install  ## check style and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:          ## lint, and run the fast tests
	bash test.sh

test-all:      ## lint, and run all tests
	bash test.sh --all

test-legacy:   ## run the tests of the legacy stack
	bash test.sh --legacy

figures: install  ## redraw all figures and tables from the committed logs
	$(PYTHON) -m figures.draw
