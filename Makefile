# make demo            train a small language model once per recipe, and compare (about 5 minutes)
# make test            the default test suite
# make test-slow       the tests that take longer
# make lint            ruff and mypy
# make sanitize        the C++ tests under the address and undefined-behaviour sanitizers
# make exhaustive      every FP32 value through the FP8 and E2M1 casts (minutes)
# make arm64-check     cross-build for arm64 and run the C++ tests under qemu-user
# make kernels-check   compile the CUDA code for every architecture (needs nvcc, no GPU)
# make clean           remove what was built (distclean: the environment too)
#
# Everything runs in .venv, made by the first target that needs it. Stamp files in it remember what
# is installed: a second call installs again only if the build's inputs have changed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# For example: make demo ARGS="--steps 50 --recipes bf16,mxfp8"
ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
# One process per core, each with one thread: the tests are many and small.
PYTEST_JOBS ?= -n auto --maxprocesses=8

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)

# The installation is editable, so that Python sources are no input of it.
BUILD_INPUTS := pyproject.toml CMakeLists.txt src/hybridq/_version.py \
  $(shell find csrc cmake -type f 2>/dev/null)

# The version is in the name: another TORCH is another stamp.
empty :=
space := $(empty) $(empty)
TORCH_STAMP := $(VENV)/.installed-$(subst /,_,$(subst =,-,$(subst $(space),_,$(TORCH))))
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
TOOLS_STAMP := $(VENV)/.installed-build-tools

.DELETE_ON_ERROR:
.PHONY: demo test test-slow lint sanitize exhaustive arm64-check kernels-check clean distclean

demo: $(DEMO_STAMP)
	$(BIN)/python -m hybridq train $(ARGS)

# Without echo, and with nothing after it: pytest's closing line is the last one.
test: $(DEV_STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(PYTEST_JOBS) $(PYTEST_ARGS)

test-slow: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# $(call cmake_core,<build folder>,<options>): the core and its C++ tests, without Python and CUDA.
define cmake_core
	$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" \
	  -DHYBRIDQ_CUDA=OFF -DHYBRIDQ_BUILD_PYTHON=OFF $(2)
	$(BIN)/cmake --build $(1)
endef

# Not float-divide-by-zero: the scale rules divide by zero on purpose, as IEEE 754 defines it.
UNDEFINED := undefined,float-cast-overflow

# Two builds: a report of one sanitizer must not depend on the other.
sanitize: $(TOOLS_STAMP)
	$(call cmake_core,build/sanitize-address,-DHYBRIDQ_BUILD_TESTS=ON -DHYBRIDQ_SANITIZE=address)
	$(BIN)/ctest --test-dir build/sanitize-address --output-on-failure
	$(call cmake_core,build/sanitize-undefined,-DHYBRIDQ_BUILD_TESTS=ON \
	  -DHYBRIDQ_SANITIZE=$(UNDEFINED))
	$(BIN)/ctest --test-dir build/sanitize-undefined --output-on-failure

exhaustive: $(TOOLS_STAMP)
	$(call cmake_core,build/exhaustive,-DHYBRIDQ_BUILD_EXHAUSTIVE=ON)
	$(BIN)/ctest --test-dir build/exhaustive -L exhaustive --output-on-failure --verbose

# Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user
arm64-check: $(TOOLS_STAMP)
	$(call cmake_core,build/arm64,-DHYBRIDQ_BUILD_TESTS=ON \
	  --toolchain cmake/aarch64-linux-gnu.cmake)
	$(BIN)/ctest --test-dir build/arm64 --output-on-failure

kernels-check: $(TOOLS_STAMP)
	$(BIN)/cmake -S . -B build/kernels-check -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DHYBRIDQ_CUDA=ON -DHYBRIDQ_BUILD_PYTHON=OFF
	$(BIN)/cmake --build build/kernels-check

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hybridq: needs Python 3.10 or newer, got " + sys.version.split()[0] + "; make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# First and by itself: the package's own requirement would take any version.
$(TORCH_STAMP): | $(BIN)/python
	$(PIP) "$(TORCH)"
	@rm -f "$(VENV)"/.installed-torch*
	@touch "$@"

$(DEMO_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[demo]"
	@touch $@

# The extra "dev" contains "demo".
$(DEV_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[dev]"
	@touch $(DEMO_STAMP) $@

$(TOOLS_STAMP): | $(BIN)/python
	$(PIP) cmake ninja
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(DEMO_STAMP) $(DEV_STAMP)
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
