# Two commands are all a fresh machine needs: `make run` and `make test`.
# Everything is installed into .venv; stamp files in it make a second call do nothing.

PYTHON ?= $(firstword $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p; done))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := smollm2-135m
SPEC ?=
WORKERS ?= 2 # processes the tests run in
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help run test test-slow bench lock clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

run: $(VENV)/.installed ## install, fetch the model, run the built-in quickstart (or SPEC=file.yaml) and print the ladder
	$(BIN)/python -m profiler models fetch $(MODEL)
	$(BIN)/python -m profiler run $(SPEC) $(ARGS)

test: $(VENV)/.test ## install what tests need; lint, types, import contracts, tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONPATH=.ci $(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(VENV)/.test ## the tests that need the real model or more than a few seconds
	$(BIN)/python -m profiler models fetch $(MODEL)
	$(BIN)/python -m pytest -m slow $(ARGS)

bench: $(VENV)/.installed ## every benchmark, one after the other
	$(BIN)/python -m profiler models fetch $(MODEL)
	set -e; for file in $(filter-out benchmarks/claims.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

clean: ## remove the environment and caches, not runs
	rm -rf $(VENV) .lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "No python3 found. Install Python 3.11 (Debian: apt-get install python3 python3-venv)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Gatewise needs Python 3.11 or later and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.11 run" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes first and with its own dependencies: which they are (none on a CPU build, gigabytes on a CUDA
# build) is for its wheel to say, at the versions of the lock where that names them. All else is locked whole.
$(VENV)/.locked: $(VENV)/.created requirements.lock
	$(PIP) install --constraint requirements.lock torch
	$(PIP) install --no-deps --requirement requirements.lock
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed requirements-test.lock
	$(PIP) install --no-deps --requirement requirements-test.lock
	@touch $@

# Resolve pyproject.toml afresh, on a machine where this exact pin takes a CPU build: a looser one takes a CUDA
# build of gigabytes, and a CUDA build's libraries have no place in the lock.
TORCH ?= torch==2.13.0
FREEZE = .lock/bin/python -m pip freeze --all --exclude pip --exclude gatewise | sed 's/^\(torch==[^+]*\)+.*/\1/'
HEADER = "\# Exact versions of $(1), made by 'make lock' from pyproject.toml. Not edited by hand."
lock: ## resolve the dependencies again and write both lock files
	rm -rf .lock && $(PYTHON) -m venv .lock
	echo '$(TORCH)' > .lock/torch.txt
	.lock/bin/python -m pip install --upgrade 'setuptools>=77' '$(TORCH)'
	.lock/bin/python -m pip install --constraint .lock/torch.txt --no-build-isolation --editable .
	{ echo $(call HEADER,all that gatewise needs); $(FREEZE); } > .lock/requirements.lock
	.lock/bin/python -m pip install --constraint .lock/requirements.lock --no-build-isolation --editable '.[test]'
	{ echo $(call HEADER,what the tests need beyond requirements.lock); $(FREEZE) | grep -vxFf .lock/requirements.lock; } > .lock/requirements-test.lock
	mv .lock/requirements.lock .lock/requirements-test.lock .
	rm -rf .lock
