# The two commands are `make train` and `make test`: on a fresh machine with Python 3.11 or newer each
# makes .venv and installs what it needs, and does neither when .venv is already there.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DOCS_READY := $(VENV)/ready-docs
CLIENTS := .venv-clients
# Rooms whose tests on ranks run on simulated devices, too; see docs/devices.md.
ON_DEVICES := tests/gradients tests/tensor_parallel tests/expert_parallel tests/context_parallel tests/pipelining tests/composition tests/recipes
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)

# One compute thread per process: ranks share the cores, and thread pools of their own would fight for them.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv train test test-all soak check format bench docs wheel clients gpu-check gpu-bench clean
.PHONY: check-format check-lint check-types check-programs check-spelling check-architecture

help:
	@echo 'make train      train the default language model on 4 processes of this machine'
	@echo 'make test       run the tests'
	@echo 'make check      formatting, lint, types, spelling, architecture'
	@echo 'make test-all   the tests, the slow ones, and those of some rooms on simulated devices'
	@echo 'make soak       the programs that run for hours, PART by PART'
	@echo 'make bench      the measurements of benchmarks/'
	@echo 'make clients    programs of others on Meshwright, in an environment of their own'
	@echo 'make gpu-check  the check of a machine with a GPU, with the python3 found (no .venv)'
	@echo 'make gpu-bench  the strategies on one GPU against torch, with the python3 found'
	@echo 'make docs       the documentation, as HTML, in docs/_build/html'
	@echo 'make wheel      the package, as a wheel and as an sdist, in dist/'
	@echo 'make format     let ruff format and mend what it can'

venv: $(READY)

# The stamp is written last. A set-up that was interrupted leaves `unfinished` behind, or no pip, and is
# begun again from an empty folder; a .venv that somebody has made already is kept.
$(READY): pyproject.toml constraints.txt
	@for python in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then chosen="$$python"; break; fi; \
	done; \
	if [ -z "$${chosen:-}" ]; then \
	  echo "error: Python 3.11 or newer with its venv module is needed; found $$(python3 --version 2>&1 || echo 'no python3')." >&2; \
	  echo "Install one (on Debian: python3.11 and python3.11-venv) so that it is on PATH, then run this again." >&2; \
	  exit 1; \
	fi; \
	if [ -e $(VENV)/unfinished ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "creating $(VENV) with $$("$$chosen" --version)"; \
	  "$$chosen" -m venv --clear $(VENV); \
	fi; \
	touch $(VENV)/unfinished
	@# torch first and pinned: an unpinned one may fetch gigabytes for another device.
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@rm $(VENV)/unfinished
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

train: $(READY)
	$(BIN)/meshwright train examples/train.toml

# Two tests at once, where one waits for its ranks, a process or a lock; their ranks share RANK_PLACES.
test: export RANK_PLACES := 4
test: $(READY)
	$(BIN)/python -m pytest -m 'not slow and not soak' -n 2 --dist worksteal --durations=10

# Programs of others run in `make clients`.
test-all: export RANK_PLACES := 8
test-all: $(READY)
	$(BIN)/python -m pytest -m 'not soak' --ignore tests/clients -n 2 --dist worksteal --durations=20
	SIMULATED=1 $(BIN)/python -m pytest $(ON_DEVICES) -m 'not slow and not soak' -n 2 --dist worksteal

# Without PART it says what there is.
soak: $(READY)
	$(BIN)/python tests/soak/run.py $(PART)

check: check-format check-lint check-types check-programs check-spelling check-architecture

check-format: $(READY)
	$(BIN)/ruff format --check .

check-lint: $(READY)
	$(BIN)/ruff check .

check-types: $(READY)
	$(BIN)/pyrefly check

# Of README, the tutorial and the examples.
check-programs: $(READY)
	$(BIN)/python tests/typed_programs.py

check-spelling: $(READY)
	$(BIN)/codespell

check-architecture: $(READY)
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# QUICK=1 takes five minutes and not twenty-five; JSON=FILE writes the figures there, too.
bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(if $(JSON),--json $(JSON))

docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

wheel: $(READY)
	$(BIN)/python -m hatchling build --directory dist

# Programs of others in their released versions, which ask for versions of what they share that differ from ours.
# The packages named are those that tests/clients looks for.
CLIENT_PACKAGES := transformers accelerate lightning peft torchao torchmetrics submitit 'ray[train]' torchtitan hatchling uv
$(CLIENTS)/ready: pyproject.toml constraints-clients.txt $(READY)
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints-clients.txt '$(TORCH)'
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints-clients.txt $(CLIENT_PACKAGES) pytest -e .
	@touch $@

clients: $(CLIENTS)/ready
	$(CLIENTS)/bin/python -m pytest tests/clients --durations=10

# Runs under the machine's own python3, whose torch must be a CUDA build; numpy, safetensors and pydantic are
# all else that it needs. It refuses a machine that lacks one of them, or a GPU, in one line.
gpu-check:
	PYTHONPATH=src python3 tests/gpu_check.py

# Under the same python3: against plain, DDP, FSDP1 and FSDP2 on one device.
gpu-bench:
	PYTHONPATH=src python3 benchmarks/devices.py
	PYTHONPATH=src python3 benchmarks/device_ranks.py

clean:
	rm -rf docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
