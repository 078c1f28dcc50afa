# Every target does its own set-up: a virtual environment in .venv and a pinned install, once.
#   make test        everything that proves the project (5 to 15 minutes on 2 cores); part of it: make test ARGS="-k predictor" JOBS=1
#   make quickstart  a trained MoE through harvest, fit, profile, tune, export and decode (10 to 20 minutes)
#   make reference   train a reference target and drafter like the committed ones (under three hours); from the committed
#                    one, with FAMILY=gpt-oss or FAMILY=deepseek-v3, a reference of that architecture (within 90 minutes)
#   make lint        ruff and mypy
#   make kernels-aot compile every Triton kernel for sm_80, sm_90, sm_100 and gfx942; a table of registers, spills and
#                    shared memory (some minutes; needs no GPU)
#   make gpu-check   on a machine with a GPU: correctness and times of every Triton kernel, a decode (5 minutes; installs
#                    nothing: PYTHON_GPU=... is a Python that has torch, triton, transformers and onnxruntime)
# PYTHON=...   another interpreter (3.11 to 3.13).  PIP_ARGS=...  for example another index of torch builds.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_ARGS ?=
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)

RUN := runs/quickstart
MODEL := pipelines/reference/model
JOBS ?= auto
PYTHON_GPU ?= python3

.PHONY: install test quickstart reference lint format kernels-aot gpu-check constraints clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  [ -n "$(PYTHON)" ] || { echo "no Python 3.11-3.13 with venv found: install one, or make PYTHON=/path/to/python" >&2; exit 2; }; \
	  $(PYTHON) -m venv $(VENV); fi
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt -e '.[train,cpu,dev]'
	@touch $@

test: $(STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(JOBS) --maxprocesses 8 tests $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels-aot: $(STAMP)
	$(BIN)/python -m ecospec_kernels.aot $(ARGS)

gpu-check:
	@PYTHONPATH=.:kernels $(PYTHON_GPU) -m pipelines.benchmark.gpu_check $(ARGS)

constraints: $(STAMP)
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude ecospec | sed 's/+cpu$$//' | grep -v '^-e'; } > constraints.new
	@mv constraints.new constraints.txt

quickstart: $(STAMP)
	@VENV=$(VENV) MODEL=$(MODEL) RUN=$(RUN) bash pipelines/quickstart.sh

reference: export MALLOC_TOP_PAD_ := 1000000000
reference: export MALLOC_MMAP_MAX_ := 0
reference: export OMP_NUM_THREADS := 1
reference: $(STAMP)
ifdef FAMILY
	$(BIN)/python -m pipelines.reference.family --family pipelines/reference/families/$(FAMILY).yaml --out runs/reference/$(FAMILY)
else
	$(BIN)/python -m pipelines.reference.corpus --out runs/reference/corpus
	$(BIN)/python -m pipelines.reference.target --corpus runs/reference/corpus --out runs/reference/base
	$(BIN)/python -m pipelines.reference.unlikelihood --corpus runs/reference/corpus --init runs/reference/base --out runs/reference/mixed
	$(BIN)/python -m pipelines.reference.unlikelihood --corpus runs/reference/corpus --init runs/reference/mixed --out runs/reference/target --minutes 4 --lr 1e-3 --every 2 --seed 4
	$(BIN)/python -m pipelines.reference.own_text --corpus runs/reference/corpus --target runs/reference/target --out runs/reference/own.npy
	$(BIN)/python -m pipelines.reference.head --corpus runs/reference/corpus --target runs/reference/target --own runs/reference/own.npy --out runs/reference/drafter --minutes 60
	$(BIN)/python -m pipelines.reference.report --corpus runs/reference/corpus --target runs/reference/target --head runs/reference/drafter --out runs/reference
endif

clean:
	rm -rf runs/quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis
