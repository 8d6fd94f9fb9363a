# make demo   train a small model on real text, on 8 simulated CPU devices
# make test   lint, types and tests
# make docs   the site, in build/site
# make gpu    where an NVIDIA GPU is at hand: kernels, speeds and predictions, measured (docs/benchmarks.md)
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,docs,hf,data,tensorboard
# A file of versions that pip keeps to: `make test-newest CONSTRAINTS=.ci/newest.txt` takes those that CI has seen.
CONSTRAINTS ?=
RUN ?= runs/tiny
DEMO_FLAGS ?=
BIN := $(VENV)/bin
# Tests that follow one another run in one process, which has what they share made already; one that is done takes from
# the other, so that all end together.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-slow test-users-flags test-kernels test-newest newest-checks presets notebooks docs docs-serve release lint types clean

setup:
	rm -f $(STAMP)
	$(MAKE) $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxpar needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) \
		--editable '.[$(EXTRAS)]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/jaxpar train tiny --run $(RUN) $(DEMO_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) types

# pyright cannot see through the hook of an editable install, so it reads a regular one.
types: $(STAMP)
	rm -rf build/typecheck build/lib build/bdist*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/typecheck .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Three tiers of tests: those without a marker for every change, `slow` in CI too, `long` by hand (pyproject.toml).
test: lint
	$(PYTEST)

# DEADLINE=20 begins no test after 20 minutes, takes first what the last commits changed, and names what it has left out.
DEADLINE ?=
IN_ORDER := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder
test-slow: $(STAMP)
	$(if $(DEADLINE),$(IN_ORDER) --deadline $(DEADLINE),$(PYTEST)) -m "slow and not long"

# What bears the marker `users_flags`, with the options of XLA that users have and not those that tests/conftest.py sets.
test-users-flags: $(STAMP)
	XLA_FLAGS= $(PYTEST) -m "users_flags and not long"

test-kernels: $(STAMP)
	$(PYTEST) -m long

# The sdist, the wheel from it, and the demo from that wheel in an empty environment.
release: $(STAMP)
	$(BIN)/python tests/installed.py $(RELEASE_FLAGS)

# What CI runs with the newest interpreter and the newest jax, libtpu and CUDA plugin: types, a half of the tests that is drawn
# anew for each commit, and tiny steps compiled for every kind of chip (tests/rehearse/test_chip_matrix.py has all of them). Where pyenv manages the interpreters, it is told which
# one. NEWEST=1 goes past the bounds of pyproject.toml, to what has come out since.
NEWEST ?=
NEWEST_PYTHON ?= 3.13
NEWEST_OF := jax jaxlib libtpu jax-cuda12-plugin jax-cuda12-pjrt flax optax orbax-checkpoint grain
DRAWN ?= 0.5
test-newest:
	PYENV_VERSION=$$(pyenv latest $(NEWEST_PYTHON) 2>/dev/null) $(MAKE) VENV=.venv-newest PYTHON=python$(NEWEST_PYTHON) \
		EXTRAS=dev,hf,data,tensorboard,rehearse newest-checks

newest-checks: $(STAMP)
	$(if $(NEWEST),$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade $(NEWEST_OF))
	$(BIN)/jaxpar doctor
	$(MAKE) types
	$(PYTEST) --drawn $(DRAWN) -m "matrix or not slow and not long"

# What the notebooks print and draw, kept in them, as GitHub shows it.
notebooks: $(STAMP)
	$(BIN)/python tests/run_notebooks.py

# Every preset on its target, by the compilers at hand; AGAINST=FILE.json sets those of another version beside them.
presets: $(STAMP)
	mkdir -p build
	$(BIN)/jaxpar bench presets --json build/presets.json $(if $(AGAINST),--against $(AGAINST))

# Every warning of mkdocs is an error; build/site is read without a server too.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build

docs-serve: $(STAMP)
	$(BIN)/python -m mkdocs serve

# Half an hour with a GPU: on the jax that is there, with no network and nothing installed, so from a copy laid out as an
# install would be. PIECES="kernels step" are some of it; SMALL=1 is a tiny form of all of it on the CPU.
GPU_OUT ?= build/gpu
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
GPU_NEEDS := jax jaxlib numpy flax optax jaxtyping rich
GPU_CHECK := import sys; from importlib.util import find_spec as found; absent = [x for x in sys.argv[1:] if not found(x)]; \
	sys.exit("make gpu needs " + ", ".join(absent) + " in this Python: docs/benchmarks.md says how to carry them" if absent else 0)

.PHONY: gpu
gpu:
	@$(GPU_PYTHON) -c '$(GPU_CHECK)' $(GPU_NEEDS)
	@rm -rf build/gpu_install && mkdir -p build/gpu_install
	@cp -R jaxpar build/gpu_install && cp -R models meshes configs build/gpu_install/jaxpar
	PYTHONPATH=$(CURDIR)/build/gpu_install:$(CURDIR)/tests:$$PYTHONPATH $(GPU_PYTHON) -P tests/on_gpu/measure.py --out $(GPU_OUT) \
		$(if $(PIECES),--pieces $(PIECES)) $(if $(SMALL),--small)

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info runs
