# make demo   install into .venv, chat once, compare with stock llama.cpp
# make test   everything that CI runs: lint, native tests, sanitizers, pytest
#
# PYTHON, VENV and TORCH can be set: make test VENV=/tmp/venv. Switches for the native build go through
# CMAKE_ARGS: make demo CMAKE_ARGS=-DGGML_CUDA=ON (docs/building.md).

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV   ?= .venv
# Only the fit tests need torch. Plain "torch" brings gigabytes of CUDA on Linux; this one is small where a
# CPU build of it is offered first.
TORCH  ?= torch==2.13.0

CMAKE_ARGS ?=
EXTRAS     :=
BIN        := $(abspath $(VENV))/bin
PIP        := $(BIN)/python -m pip --disable-pip-version-check
PACKAGE    := build/package
SANITIZE   := build/sanitize
# The build tools of the environment come first, but an environment is never "activated".
export PATH := $(BIN):$(PATH)
export PYTHONUNBUFFERED := 1

say = @echo; echo "==> $(1)"

.PHONY: demo test lint tools llama-cpp-python install torch test-tools native-test sanitize pytest clean

demo: install
	$(call say,the default model)
	$(BIN)/specee-pc models get smollm2
	$(call say,a chat with early exits)
	$(BIN)/specee-pc chat -p "Explain in two sentences why the sky is blue." --stats
	$(call say,stock llama.cpp against exact and calibrated early exits)
	$(BIN)/specee-pc bench --quick

test: test-tools lint native-test sanitize pytest

# ---- the environment ----

$(BIN)/python:
	$(call say,a new environment in $(VENV))
	$(PYTHON) -m venv $(VENV)

# Build tools in the environment itself spare pip a separate one for each of the two packages.
tools: $(BIN)/python
	$(call say,build tools)
	$(PIP) install --quiet "scikit-build-core>=0.10" ninja
	command -v cmake > /dev/null || $(PIP) install --quiet cmake

# llama-cpp-python's Python layer alone: the library under it is ours.
llama-cpp-python: tools
	$(call say,llama-cpp-python without its library)
	sdist=$$($(BIN)/python scripts/patches.py fetch); \
	version=$$(basename $$sdist .tar.gz | sed 's/.*-//'); \
	$(PIP) freeze | grep "llama_cpp_python.*$$version" || \
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(PIP) install --no-build-isolation "$$sdist"

install: llama-cpp-python
	$(call say,specee-pc: compiles llama.cpp twice (patched and stock). Some minutes)
	CMAKE_ARGS="$(CMAKE_ARGS)" $(PIP) install --verbose --no-build-isolation ".$(EXTRAS)"

torch: tools
	$(call say,torch for the tests of fit)
	$(PIP) install $(TORCH)

# The package with the native tests built, and with warnings in our C++ as errors.
test-tools: EXTRAS     := [fit,test]
test-tools: CMAKE_ARGS += -DSPECEE_BUILD_TESTS=ON -DSPECEE_WERROR=ON
test-tools: torch install

# ---- checks ----

lint: CPP := $(wildcard native/include/*.h native/src/*.h native/src/*.cpp native/tests/*.h \
                        native/tests/*.cpp cmake/*.c)
lint: test-tools
	$(call say,lint: ruff - mypy - clang-format - the patch series)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/python scripts/patches.py check

# Where the native tests find ONNX Runtime and a real model.
TEST_ENV = SPECEE_TEST_ONNXRUNTIME="$$($(BIN)/python -c \
    'from specee_pc._native import onnxruntime_file as f; print(f())')"

native-test: test-tools
	$(call say,native tests)
	$(TEST_ENV) ctest --test-dir $(PACKAGE) --output-on-failure

sanitize: test-tools
	$(call say,native tests with the address and the undefined-behaviour sanitizer)
	cmake -S . -B $(SANITIZE) -G Ninja -DSPECEE_SANITIZE=address,undefined -DSPECEE_STOCK=OFF \
	    -DSPECEE_BUILD_TESTS=ON -DSPECEE_WERROR=ON -DPython3_EXECUTABLE=$(BIN)/python
	cmake --build $(SANITIZE)
	$(TEST_ENV) ctest --test-dir $(SANITIZE) --output-on-failure

pytest: test-tools
	$(call say,pytest)
	$(BIN)/pytest

clean:
	rm -rf build dist
