# Everything below makes its own environment in .venv the first time it is needed and again when pyproject.toml or
# constraints.txt change. To use an environment you already have instead: make test PY=/path/to/python
# (and PY36=... for the one with Triton 3.6.0)
#
#   make demo            the main job on real text; pictures go to demo/out   (make demo SHORT=1: about a minute)
#   make test            the fast tests; gpu tests run by themselves where a GPU is present
#   make test-triton36   kernels compiled by Triton 3.6.0, in an environment of its own (.venv-triton36)
#   make test-all        the slow ones too: every kernel, configuration and target under both Tritons
#   make fuzz            10,000 random problems against float64, on a Hopper GPU   (make fuzz FUZZ="--problems 500")
#                        of gradients too: make fuzz FUZZ=--backward
#   make notebooks       executes the notebooks
#   make lint types      ruff (rules and format), mypy
#   make bench           the benchmarks, and the README's section from their results   (make bench BENCH=--quick)
#   make clean           removes the environments, caches and demo/out

PYTHON ?= python3
VENV   := .venv
ifdef PY
  READY :=
else
  PY    := $(VENV)/bin/python
  READY := $(VENV)/.ready
endif
VENV36 := .venv-triton36
ifdef PY36
  READY36 :=
else
  PY36    := $(VENV36)/bin/python
  READY36 := $(VENV36)/.ready
endif

# Threads that wait by spinning make a machine that also does something else many times slower (measured: a training step
# of 0.8 s took 8 s with two busy neighbours on two cores); this asks them to sleep.
export OMP_WAIT_POLICY ?= PASSIVE

SHORT  ?=
BENCH  ?=
FUZZ   ?=
# Two workers on two cores, one thread each: torch would otherwise start a pool per worker.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
JOBS   ?= 2

.PHONY: help demo test test-all test-main test-interpret test-triton36 fuzz notebooks lint types bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '4,/^$$/s/^# *//p' Makefile

# --- environment -----------------------------------------------------------------------------------------------------

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "flexattn needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "[1/2] environment in $(VENV) ($$($(PYTHON) --version 2>&1))"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed. Try: install your system's python3-venv package"; rm -rf $(VENV); exit 1; }
	@echo "[2/2] installing PyTorch and the tools: two or three minutes, once"
	@$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev]' & job=$$!; s=0; \
	  while kill -0 $$job 2>/dev/null; do sleep 1; s=$$((s+1)); test $$((s % 15)) -ne 0 || echo "      ... $$s s"; done; \
	  wait $$job
	@touch $@

$(VENV36)/.ready: constraints-triton36.txt
	@echo "[1/2] environment in $(VENV36), with Triton 3.6.0"
	@test -x $(VENV36)/bin/pip || $(PYTHON) -m venv $(VENV36)
	@echo "[2/2] installing PyTorch and Triton 3.6.0: about two minutes, once"
	@$(VENV36)/bin/python -m pip install -q -c constraints-triton36.txt torch triton numpy sympy pytest pytest-xdist
	@touch $@

# --- the main job ----------------------------------------------------------------------------------------------------

demo: $(READY)
	@$(PY) -m demo $(if $(SHORT),--short)

# --- tests -----------------------------------------------------------------------------------------------------------

test: test-main test-interpret

test-main: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not notebook"

# The interpreter is chosen when Triton's decorators run, so its tests need a process in which nothing else is compiled.
test-interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not notebook" tests/interpret

# What Triton compiles depends on its version, so the compile set also runs under the oldest one.
test-triton36: $(READY36)
	OMP_NUM_THREADS=1 $(PY36) -m pytest -n $(JOBS) --dist worksteal -m "not slow" tests/codegen/test_compile*.py

test-all: notebooks $(READY36)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not notebook"
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) --dist worksteal tests/interpret
	OMP_NUM_THREADS=1 $(PY36) -m pytest -n $(JOBS) --dist worksteal tests/codegen/test_compile*.py

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(FUZZ)

notebooks: $(READY)
	$(PY) -m pytest -m notebook tests/test_notebooks.py

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(READY)
	@$(PY) -m mypy

bench: $(READY)
	$(PY) -m benchmarks cpu --out benchmarks/results/cpu.json $(BENCH)
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(PY) -m benchmarks gpu --what forward backward memory decode host masks first_call ceilings --out benchmarks/results/gpu.json; \
	else echo "no GPU here: the benchmarks of the kernels are left out"; fi
	$(PY) -m benchmarks report

clean:
	rm -rf $(VENV) $(VENV36) demo/out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
