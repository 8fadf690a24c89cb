# Everything runs in .venv, which is made on the first use and whenever setup.cfg changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test stress docs lint clean

demo: $(INSTALLED)  ## LeNet on MNIST with and without the cache, in a few minutes
	$(BIN)/python benchmarks/lenet_mnist.py --compare --epochs 3 --limit 20000 --data-dir .bench/data --cache-dir .bench/cache --plot .bench/lenet_mnist.png

test: lint  ## lint, type check, tests
	$(BIN)/python -m pytest

stress: $(INSTALLED)  ## the long tests, about five minutes on two cores
	$(BIN)/python -m pytest tests/stress -o python_files='stress_*.py' -o faulthandler_timeout=0

# The variable silences a notice that the theme prints at each start (docs/contributing.md has what it says).
docs: $(INSTALLED)  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): setup.cfg setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .bench site build dist *.egg-info
