# make demo    a virtual environment with lowp, then the main job
# make test    what CI runs: style, types, layers, tests
# PYTHON=python3.12 make test  chooses another interpreter

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
EXTRAS := recipes,plot
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/lowp/kernels/cpu/*)
# pip reads the constraints for lowp's own dependencies and for the packages that build it.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet -e

# The main job: a minute or two on two cores. The numbers and the pictures are left in build/demo.
define DEMO
mkdir -p build/demo
$(BIN)/lowp explain 1.12156456132 --to fp16
$(BIN)/lowp compare digits --precision fp32,fp16,bf16,bf16-tpu,e4m3fn --out build/demo/digits.json
$(BIN)/lowp compare digits-hard --precision fp32,fp16,fp16-naive --out build/demo/digits-hard.json
endef

.PHONY: demo test lint pytest slow clean

demo: $(VENV)/installed
	$(DEMO)

test: lint pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

pytest: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m "slow and not gpu"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lowp needs Python 3.10 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=22"

$(VENV)/installed: $(BUILD_INPUTS) | $(BIN)/python
	$(INSTALL) ".[$(EXTRAS)]"
	touch $@

$(VENV)/installed-dev: $(BUILD_INPUTS) | $(BIN)/python
	$(INSTALL) ".[dev]"
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) build src/lowp/kernels/liblowp_cpu.so
