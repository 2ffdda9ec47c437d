# make demo    a virtual environment with lowp, then the main job
# make test    what CI runs: style, types, layers, tests
# make docs    the site of docs/ in build/site: every link, notebook and docstring, strictly and without a network
# make wheels    dist/: the sdist and a wheel for every Linux with glibc 2.28 or later, checked by auditwheel
# make test-portable    the tests as other processors would run them: each library held to less than this machine has
# make test-versions    the tests with the newest torch, and a part of them with others (build/versions, 5 GB each)
# make test-integrations    the tests of lowp.integrations with Keras and fastai, too, and with the oldest versions that it takes
# make test-nightly    the tests with the nightly build of torch
# make mutants    faults planted in every room, 10 each, and those its tests miss; MUTANTS="--room ops --count 50 --seed 1"
# make test-arm    the kernel tests on the C++ library built for AArch64, under qemu
# make sanitize    the kernel tests on a C++ library with AddressSanitizer and UndefinedBehaviorSanitizer (GCC)
# PYTHON=python3.12 make test  chooses another interpreter; make test CXX=clang++  another compiler

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
EXTRAS := recipes,plot
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt src/lowp/__init__.py $(wildcard src/lowp/kernels/cpu/*.[chi]*) \
  $(VENV)/modules
# pip reads the constraints for lowp's own dependencies and for the packages that build it.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet -e

# The main job: a minute or two on two cores. The numbers and the pictures are left in build/demo.
define DEMO
mkdir -p build/demo
$(BIN)/lowp explain 1.12156456132 --to fp16
$(BIN)/lowp compare digits --precision fp32,fp16,bf16,bf16-tpu,e4m3fn --out build/demo/digits.json
$(BIN)/lowp compare digits-hard --precision fp32,fp16,fp16-naive --out build/demo/digits-hard.json
endef

# The interpreter is not built with the sanitizers, so their runtime is loaded before it, and libstdc++ with it, so that
# exceptions are seen. CPython leaks by design. Tests that compile C++ would run the compiler under the sanitizers, too.
CXX := g++
runtime = $(shell $(CXX) -print-file-name=$(1))
SANITIZED := LOWP_CPU_LIBRARY=$(CURDIR)/build/sanitize/liblowp_cpu.so OMP_NUM_THREADS=1 \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  LD_PRELOAD="$(call runtime,libasan.so) $(call runtime,libubsan.so) $(call runtime,libstdc++.so)"
CMAKE := cmake

.PHONY: demo docs wheels test lint style types layers pytest slow test-portable test-versions test-nightly test-integrations
.PHONY: test-arm mutants sanitize clean

demo: $(VENV)/installed
	$(DEMO)

# Types and layers, a process each, are checked beside the tests and told after them.
test: style
	@mkdir -p build; $(MAKE) --no-print-directory -k types layers > build/lint.log 2>&1 & lint=$$!; \
	trap "kill $$lint" INT TERM; \
	$(MAKE) --no-print-directory pytest; tests=$$?; \
	wait $$lint; lint=$$?; cat build/lint.log; \
	test $$tests = 0 || echo "the tests failed, see above"; \
	test $$lint = 0 || echo "types or layers are broken, see above"; \
	exit $$((tests | lint))

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check.py

wheels: $(BIN)/python
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python .ci/wheels.py

lint: style types layers

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy --strict src tests/public_types.py

layers: $(VENV)/installed-dev
	$(BIN)/lint-imports

# Byte code is kept, or every process compiles lowp and the tests anew.
pytest: $(VENV)/installed-dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -m "slow and not gpu"

test-portable: $(VENV)/installed-dev
	$(BIN)/python tests/portable.py

test-versions: $(VENV)/installed-dev
	$(BIN)/python tests/versions.py

test-nightly: $(VENV)/installed-dev
	$(BIN)/python tests/versions.py nightly

# The oldest versions come after the pinned ones, and those again: the environment is left as it was.
test-integrations: $(VENV)/installed-dev
	$(INSTALL) ".[dev,keras,fastai]"
	$(BIN)/python -m pytest -q -m "not gpu" tests/integrations
	$(BIN)/python -m pip install --quiet accelerate==1.10.1 lightning==2.5.5 pytorch-lightning==2.5.5 transformers==4.57.3
	$(BIN)/python -m pytest -q tests/integrations; tests=$$?; $(INSTALL) ".[dev]"; exit $$tests

mutants: $(VENV)/installed-dev
	$(BIN)/python tests/mutants.py --workers $(WORKERS) $(MUTANTS)

test-arm: $(VENV)/installed-dev
	$(BIN)/python tests/arm.py

sanitize: $(VENV)/installed-dev
	$(CMAKE) -S . -B build/sanitize -DLOWP_SANITIZE=ON -DCMAKE_CXX_COMPILER=$(CXX)
	$(CMAKE) --build build/sanitize --parallel $(WORKERS)
	$(SANITIZED) $(BIN)/python -m pytest -q tests/kernels --ignore tests/kernels/test_compile.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lowp needs Python 3.10 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=22"

# The installation maps every module to its file: it is made anew when one has come, gone or moved.
$(VENV)/modules: FORCE | $(BIN)/python
	@find src -name '*.py' | LC_ALL=C sort | cmp -s - $@ || find src -name '*.py' | LC_ALL=C sort > $@

FORCE:

$(VENV)/installed: $(BUILD_INPUTS) | $(BIN)/python
	$(INSTALL) ".[$(EXTRAS)]"
	touch $@

$(VENV)/installed-dev: $(BUILD_INPUTS) | $(BIN)/python
	$(INSTALL) ".[dev]"
	touch $(VENV)/installed $@

$(VENV)/installed-docs: $(BUILD_INPUTS) | $(BIN)/python
	$(INSTALL) ".[docs]"
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) build src/lowp/kernels/cpu/liblowp_cpu.so
