# Everything here needs Python 3.11 or later and the Python package index, and nothing else: each target does its set-up.

PYTHON ?= $(shell for v in python3.11 python3.12 python3.13 python3; do \
	$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$v && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := 2.13.0
ARGS ?=
SECONDS ?= 60
SEED ?= 1

.DELETE_ON_ERROR:
.PHONY: help venv model serve test chaos lint format bench-transfer clean

help:
	@echo 'make serve           set up and serve a model on http://127.0.0.1:8000 (ARGS="--port 9000" adds options)'
	@echo 'make test            set up and run all tests (ARGS="-k pool" adds options)'
	@echo 'make chaos           random faults under load (SECONDS=600 SEED=1), judged by an oracle'
	@echo 'make venv            set up only: .venv with Baton and its tools, .venv/bin/baton'
	@echo 'make lint            ruff and mypy --strict'
	@echo 'make format          rewrite the code as lint wants it, docs/configuration.md and docs/metrics.md'
	@echo 'make bench-transfer  measure the transports of this machine'
	@echo 'make clean           remove what was set up'

venv: $(VENV)/.ready

# torch comes first and by itself: taken as a dependency it would bring gigabytes of CUDA to machines without a GPU.
# The ucx extra has wheels for Linux alone; without it transfers use ZMQ.
$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo 'Baton needs Python 3.11 or later: none found; name one with PYTHON=...' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'setting up $(VENV) (first time: a few minutes)'
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(TORCH_INSTALL)
	$(PIP) install --editable '.[$(EXTRAS)]'
	@$(PIP) install --editable '.[ucx]' || echo 'no UCX for this machine: transfers will use ZMQ'
	@$(BIN)/python -m kernels.native || echo 'no kernels in C for this machine: PyTorch will compute'
	@touch $@

ifneq ($(shell command -v nvidia-smi),)
EXTRAS := dev,gpu
TORCH_INSTALL = $(PIP) install 'torch==$(TORCH)'
else
EXTRAS := dev
TORCH_INSTALL = { $(PIP) install 'torch==$(TORCH)+cpu' 2>/dev/null \
	|| $(PIP) install --retries 1 --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)' 2>/dev/null \
	|| $(PIP) install 'torch==$(TORCH)'; }
endif

model: venv
	@$(BIN)/python -c 'from common import config, model_source; print(model_source.resolve(config.DEFAULT_MODEL).name, "is in the cache")'

serve: venv
	@exec $(BIN)/baton serve $(ARGS)

# Two files at a time.
test: venv model
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

chaos: venv
	@$(BIN)/python -m tests.faults.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python -m common.option_docs > docs/configuration.md
	@$(BIN)/python -m proxy.metric_docs > docs/metrics.md

bench-transfer: venv
	@$(BIN)/baton bench transfer $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
