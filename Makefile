# make demo   train a small model on real text, on 8 simulated CPU devices
# make test   lint, types and tests
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,hf,tensorboard
RUN ?= runs/tiny
DEMO_FLAGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-slow test-kernels test-matrix test-quick lint clean

setup:
	rm -f $(STAMP)
	$(MAKE) $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpar needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/jaxpar train tiny --run $(RUN) $(DEMO_FLAGS)

# pyright cannot see through the hook of an editable install, so it reads a regular one.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck build/lib build/bdist*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/typecheck .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Three tiers of tests, each a marker (pyproject.toml): every change, CI, by hand.
test: lint
	$(BIN)/python -m pytest -n auto

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -m slow

test-kernels: $(STAMP)
	$(BIN)/python -m pytest -n auto -m long

# Where pyenv manages the interpreters, it is told which one.
on = PYENV_VERSION=$$(pyenv latest $(1) 2>/dev/null) $(MAKE) VENV=.venv-$(1) PYTHON=python$(1) test-quick

# The quick tests on both ends of the supported versions: Python 3.11 (jax 0.10.2) and 3.13 (newest jax).
test-matrix:
	$(call on,3.11)
	$(call on,3.13)

test-quick: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "quick and not slow and not long"

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info runs
