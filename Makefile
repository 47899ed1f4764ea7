# make demo | make test: each sets up everything it needs in .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null && \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
PY := $(VENV)/bin/python
TORCH_VERSION ?= 2.13.0
# The address of a wheel index that has CPU-only torch, if you want one: a smaller download.
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
STEP := bash scripts/step.sh
STAMPS := $(VENV)/.stamps
CXX_FILES = $(shell git ls-files '*.cpp' '*.cc' '*.h' '*.hpp' '*.cuh' '*.cu')

.PHONY: help setup build demo test format check-format lint types budgets clean

help:
	@echo "make demo     set up, then run the main job on this machine and check it"
	echo "make test     set up, then run the tests"
	echo "make setup    the virtual environment in $(VENV), the package and its tools"
	echo "make build    the host extension only"
	echo "make format | check-format | lint | types | budgets | clean"

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: install it or name it with PYTHON=..."; exit 1; }
	$(STEP) "virtual environment in $(VENV)" $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/torch-$(TORCH_VERSION): $(STAMPS)/venv
	@$(STEP) "torch $(TORCH_VERSION)" $(PY) -m pip install -q --disable-pip-version-check \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) "torch==$(TORCH_VERSION)"
	touch $@

$(STAMPS)/tools: $(STAMPS)/torch-$(TORCH_VERSION)
	@$(STEP) "build tools" $(PY) -m pip install -q --disable-pip-version-check "setuptools>=77,<90" "ninja>=1.11,<2"
	touch $@

$(STAMPS)/package: $(STAMPS)/tools pyproject.toml setup.py
	@$(STEP) "deep_gemm_k3 and its tools (the host extension is compiled)" $(PY) -m pip install -q \
		--disable-pip-version-check --no-build-isolation -e ".[dev]" "torch==$(TORCH_VERSION)"
	touch $@

setup: $(STAMPS)/package build

# ninja decides what is out of date.
build: $(STAMPS)/package
	@$(STEP) "host extension" $(PY) setup.py -q build_ext --inplace

demo: setup
	@$(PY) -m deep_gemm_k3 demo

test: setup
	@$(PY) -m pytest $(PYTEST_ARGS)

format: setup
	@$(PY) -m ruff format .
	$(PY) -m ruff check --fix -q . || true
	$(if $(CXX_FILES),$(VENV)/bin/clang-format -i $(CXX_FILES))

check-format: setup
	@$(PY) -m ruff format --check .
	$(if $(CXX_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES))

lint: setup
	@$(PY) -m ruff check .

types: setup
	@$(PY) -m mypy

budgets: setup
	@$(PY) scripts/check_budgets.py

clean:
	@rm -rf build dist $(VENV) *.egg-info deep_gemm_k3/_C.so
