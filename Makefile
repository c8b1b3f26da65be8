# `make quickstart` and `make test` are the two commands of the README; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
NEXT := .venv-next/bin
GPU := .venv-gpu/bin
INSTALL := -m pip install -qq --disable-pip-version-check --no-input
PYTEST := -m pytest -q -n 2 --dist loadfile

# The second leg: the newest JAX asks for Python 3.12. A pyenv shim may stand on PATH and fail, so each is tried.
PYENV := $${PYENV_ROOT:-$$HOME/.pyenv}/versions
FIND_NEXT = for python in python3.13 python3.12 $(PYENV)/3.13.*/bin/python $(PYENV)/3.12.*/bin/python; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	&& command -v "$$python" && break; done
NEXT_PYTHON ?= $(shell $(FIND_NEXT))
NEXT_TESTS := tests/test_config_file.py tests/config tests/arch tests/rules tests/mesh tests/ops tests/model tests/parallel tests/optim tests/train

.DEFAULT_GOAL := help
.PHONY: help install install-gpu quickstart test verify format check-format lint types next next-python locks clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart    train a small model on the standard library's source, sample from it"
	@echo "make install-gpu   an environment with CUDA, in .venv-gpu, if a Python >= 3.12 is found"
	@echo "make test          the whole test suite"
	@echo "make verify        the full test matrices"
	@echo "make format        rewrite the code as ruff formats it"
	@echo "make check-format lint types"
	@echo "make next          core tests on the newest JAX, if a Python >= 3.12 is found"
	@echo "make locks         resolve both lock files anew"
	@echo "make clean         remove the environments and runs/quickstart*"
	@echo "another interpreter: make PYTHON=python3.12 ..."

install: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); olmo_jax needs Python >= 3.11; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv; install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "installing into .venv (once, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python $(INSTALL) --no-deps -r requirements.lock
	@$(BIN)/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# The locked versions, and what CUDA needs beside them: jax's plugin has jax's version.
install-gpu: .venv-gpu/installed

.venv-gpu/installed: requirements-next.lock pyproject.toml
	@test -n "$(NEXT_PYTHON)" || { echo "no Python >= 3.12 found, which jax with CUDA 13 needs; name one: make install-gpu NEXT_PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into .venv-gpu (once): jax with CUDA 13, a download of 2.5 GB, 6 GB on the disk; no CUDA is needed here, a driver >= 580 where it runs"
	@test -x $(GPU)/python || $(NEXT_PYTHON) -m venv .venv-gpu
	@$(GPU)/python $(INSTALL) --no-deps -r requirements-next.lock
	@$(GPU)/python $(INSTALL) --constraint requirements-next.lock --no-build-isolation -e '.[cuda13]'
	@touch $@

runs/quickstart-data/manifest.json: | .venv/installed
	@$(BIN)/olmo-jax data tokenize --vocab-size 4096 --skip-bad --output runs/quickstart-data \
		--suffix .py --exclude site-packages dist-packages --input \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

quickstart: .venv/installed runs/quickstart-data/manifest.json
	@rm -rf runs/quickstart
	@$(BIN)/olmo-jax train configs/quickstart.yaml
	@echo; echo 'olmo-jax sample runs/quickstart "def main("'
	@$(BIN)/olmo-jax sample runs/quickstart "def main(" --tokens 96 --temperature 0.7

test: .venv/installed
	@$(BIN)/python $(PYTEST) -m "not matrix"

# The matrices share little, and a file of them may be longer than all others together.
verify: .venv/installed
	@$(BIN)/python $(PYTEST) --dist worksteal -m matrix

format: .venv/installed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check-format: .venv/installed
	@$(BIN)/ruff format --check .

# The second deptry reads the tests too, which may import what only the extra `dev` declares.
lint: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/deptry .
	@$(BIN)/deptry . --exclude '\.venv' --ignore DEP002,DEP004

types: .venv/installed
	@$(BIN)/basedpyright

next-python:
	@echo $(NEXT_PYTHON)

.venv-next/installed: requirements-next.lock pyproject.toml
	@test -n "$(NEXT_PYTHON)" || { echo "no Python >= 3.12 found; name one: make next NEXT_PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into .venv-next (once, a few minutes)"
	@test -x $(NEXT)/python || $(NEXT_PYTHON) -m venv .venv-next
	@$(NEXT)/python $(INSTALL) --no-deps -r requirements-next.lock
	@$(NEXT)/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

next: .venv-next/installed
	@$(NEXT)/python $(PYTEST) -m "not matrix" $(NEXT_TESTS)

# Plain `==` lines, so that the locks name no registry and install in any environment.
RESOLVE = -m piptools compile --quiet --extra dev --strip-extras --allow-unsafe --no-header --no-annotate \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --upgrade pyproject.toml --output-file -

locks:
	@rm -rf .locks && $(PYTHON) -m venv .locks/oldest && $(NEXT_PYTHON) -m venv .locks/newest
	@.locks/oldest/bin/python $(INSTALL) pip-tools && .locks/newest/bin/python $(INSTALL) pip-tools
	@.locks/oldest/bin/python $(RESOLVE) | grep '==' > requirements.lock
	@.locks/newest/bin/python $(RESOLVE) | grep '==' > requirements-next.lock
	@rm -rf .locks

clean:
	@rm -rf .venv .venv-next .venv-gpu .locks runs/quickstart runs/quickstart-data
