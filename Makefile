# One command a target, the same ones that CI calls. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
ifdef INTERMODAL_PYTHON
PY := $(INTERMODAL_PYTHON)
READY :=
else
PY := .venv/bin/python
READY := .venv/.ready
endif
# Two processes, or one where there is a single GPU. Asked when it is needed, after the setup.
NPROC ?= $(shell $(PY) -c 'from launch import gpus; print(min(2, len(gpus.visible())) or 2)' 2>/dev/null || echo 2)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 \2/p' $(MAKEFILE_LIST) | awk '{ name = $$1; $$1 = ""; printf "  make %-14s%s\n", name, $$0 }'

setup: $(READY)  ## create .venv and install everything into it, once

.venv/.ready: containers/host.lock pyproject.toml
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null || { echo >&2 \
	    'error: $(PYTHON) is not a Python 3.10 or newer with venv. HINT: apt install python3-venv, or make setup PYTHON=...'; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --disable-pip-version-check --quiet --require-hashes -r containers/host.lock
	.venv/bin/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --no-index --editable .
	touch $@

setup-launcher:  ## only what launching needs (no torch), for the login node of a cluster
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null || { echo >&2 \
	    'error: $(PYTHON) is not a Python 3.10 or newer with venv. HINT: module load python, or make setup-launcher PYTHON=...'; exit 1; }
	[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	.venv/bin/pip install --disable-pip-version-check --quiet --require-hashes -r containers/launcher.lock

train: setup  ## train on handwritten digits with two processes
	$(PY) -m invoke local-run --nproc-per-node $(NPROC) -- --workload mnist

test: setup  ## run the hermetic tests (no Docker, no network, under 3 minutes)
	$(PY) -m pytest tests/unit

integration: setup  ## run the tests that need a Docker engine and a Slurm cluster made of containers
	$(PY) -m pytest tests/integration

lint: setup  ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --diff trainer launch tasks.py tests benchmarks

types: setup  ## mypy, strict
	$(PY) -m mypy

bench: setup  ## measure every figure of the README (needs Docker, build/cluster/intermodal.sif and slurm-up)
	$(PY) -m benchmarks

lock: setup  ## write the lock files anew (needs uv: pip install uv)
	sh containers/lock.sh

clean:  ## remove what was built; runs/ and data/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.PHONY: help setup setup-launcher train test integration lint types bench lock clean
