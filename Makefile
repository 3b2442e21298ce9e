# The two commands of the README, and what a contributor runs. Everything happens in a
# virtual environment of the checkout's own; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NEWEST_PYTHON ?= $(firstword $(foreach v,3.14 3.13 3.12 3.11,$(shell python$(v) -c 'import sys; print(sys.executable)' 2>/dev/null)) $(PYTHON))
WHEEL_PACKAGES := qemu-user-static libc6-arm64-cross
XRT_PACKAGES := libxrt1 libxrt-dev uuid-dev binutils g++
SOURCES := pyproject.toml setup.py $(shell find jaxinf hls models -name '*.py' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.h')

# A machine without a C++ compiler gets one from the package index.
comma := ,
COMPILER := $(if $(shell command -v c++ || command -v g++ || command -v clang++),,$(comma)compiler)

# Only these are collected by stages of few tests; importing all takes each process seconds.
files-with = $(shell grep -rlE --include='test_*.py' --exclude-dir=repro '$1' tests)
LONG := mark\.long|family\(
# Tests that pytest has rewritten are kept for the next stage, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train big test test-long test-long-all test-models test-compilers test-accelerators test-accelerators-all test-newest test-oldest test-hls test-cards test-xrt test-distributed test-object-store test-repro test-faults faults wheels test-wheels docs docs-check docs-links coverage lint clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxinf needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version); use make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# An earlier build must not bring back a module that is gone.
define forget-build
@find build -path 'build/lib*' -name '*.py' -delete 2>/dev/null || true
endef

# Without kernels and bytecode: a run compiles the kernel and the modules that it uses.
$(VENV)/package: $(SOURCES) $(VENV)/made
	$(forget-build)
	CXX=none $(BIN)/python -m pip install --quiet --no-compile '.[report$(COMPILER)]'
	@touch $@

# The dependencies change seldom and take minutes; the package itself takes seconds.
$(VENV)/dependencies: pyproject.toml $(VENV)/made
	$(BIN)/python -m pip install --quiet --upgrade '.[test$(COMPILER)]'
	@touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/dependencies
	$(forget-build)
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall .
	@touch $@

train: $(if $(wildcard $(VENV)/installed),$(VENV)/installed,$(VENV)/package)  ## train a small GPT-2 on source code, its state on the drive
	$(BIN)/python -m jaxinf.train --store runs/quickstart/store \
	  --log-dir runs/quickstart --steps $(or $(STEPS),380)

big: $(VENV)/installed  ## GPT-2 XL under a limit of 2 GiB: trained, killed, resumed (44 GB)
	$(BIN)/python scripts/big.py --store runs/big

# Workers wait for drives and other processes a quarter of the time.
test: $(VENV)/installed  ## the test suite, on the installed package
	$(BIN)/pytest -n $(shell expr $$(nproc) \* 3 / 2) --dist loadfile -m 'not faults and not hls and not cards and not long' \
	  --ignore tests/models --ignore tests/faults --ignore tests/distributed --ignore tests/object_store --ignore tests/accelerators tests

test-long: $(VENV)/installed  ## tests that take over a second, more members of families
	$(BIN)/pytest -n auto --dist worksteal -m 'long and not every' $(call files-with,$(LONG))

test-long-all: $(VENV)/installed  ## the same for all members
	$(BIN)/pytest -n auto --dist worksteal -m long $(call files-with,$(LONG))

test-models: $(VENV)/installed  ## the models, and their PyTorch originals (installs torch)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet '.[test-models]'
	$(BIN)/pytest -n auto tests/models

test-compilers: $(VENV)/installed  ## kernels: same bits from g++, clang++ (installs clang)
	command -v clang++ >/dev/null || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends clang; }
	JAXINF_TEST_COMPILERS='g++ clang++' $(BIN)/pytest -n auto -rs -k levels tests/kernels/test_compiled.py

test-accelerators: $(VENV)/installed  ## compiles for CUDA and TPU, without one (0.5 GB, once)
	plugins=$$($(BIN)/python tests/accelerators/wheels.py) && JAX_PLATFORMS=cpu \
	  JAXINF_TEST_ACCELERATORS=$$plugins $(BIN)/pytest -n 2 -m 'not every' tests/accelerators

test-accelerators-all: $(VENV)/installed  ## the same for every variant and device
	plugins=$$($(BIN)/python tests/accelerators/wheels.py) && JAX_PLATFORMS=cpu \
	  JAXINF_TEST_ACCELERATORS=$$plugins $(BIN)/pytest -n 2 tests/accelerators

test-newest:  ## what newer JAX, Flax, optax, Orbax, tensorstore break; reports only
	$(NEWEST_PYTHON) scripts/try_versions.py newest .venv-newest

test-oldest:  ## the oldest JAX, Flax, optax, Orbax, tensorstore of pyproject.toml
	$(PYTHON) scripts/try_versions.py oldest .venv-oldest

test-hls: $(VENV)/installed  ## card kernels: testbenches, and every variant against the host
	$(MAKE) -j $(shell nproc) -C hls lint csim PYTHON=$(abspath $(BIN)/python)
	$(BIN)/pytest -n auto -m hls tests/hls

test-cards: $(VENV)/installed  ## emulated cards: every kind of update, crashes, damage
	$(BIN)/pytest -n auto -m cards tests/csd $(call files-with,mark.cards)
	JAXINF_TEST_CSD=emulated $(BIN)/pytest -n auto -m 'not cards' $(addprefix \
	  tests/engine/test_,$(addsuffix .py,durability failures integrity steps))

test-xrt: $(VENV)/installed  ## cards' code on the real XRT runtime (installs it; Debian 12)
	dpkg-query --show $(XRT_PACKAGES) >/dev/null 2>&1 || ! command -v apt-get >/dev/null || { \
	  $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends $(XRT_PACKAGES); }
	$(BIN)/python -m pip install --quiet '.[test-xrt]'
	JAXINF_TEST_XRT=$(VENV)/xrt $(BIN)/python tests/xrt/run.py $(wildcard tests/xrt/test_*.py) \
	  $(addprefix tests/engine/test_,$(addsuffix .py,durability failures integrity steps)) -- --timeout 900 -m 'not cards'

test-distributed: $(VENV)/installed  ## runs in several processes (JAXINF_FAULTS=long: more, and kills)
	$(BIN)/pytest -n 2 --dist worksteal -rP tests/distributed

test-object-store: $(VENV)/installed  ## exports to an S3-compatible server of its own (installs moto)
	$(BIN)/python -m pip install --quiet '.[test-object-store]'
	$(BIN)/pytest -n 2 -rP tests/object_store

test-repro: $(VENV)/installed  ## scripts that print figures of papers, each at its smallest
	$(BIN)/pytest -n auto --dist worksteal tests/repro

test-faults: $(VENV)/installed  ## crashes, kills, bad drives; mounts (SUDO=sudo)
	$(SUDO) env JAXINF_REQUIRE_MOUNTS=1 $(BIN)/pytest -n auto tests/faults

faults: $(VENV)/installed  ## the long fault campaign: more of the same, an hour or so
	$(SUDO) env JAXINF_REQUIRE_MOUNTS=1 JAXINF_FAULTS=long \
	  $(BIN)/pytest -n auto --timeout 7200 -rP tests/faults

wheels: $(VENV)/installed  ## sdist, wheels for x86-64 and aarch64, and their tests (installs qemu)
	dpkg-query --show $(WHEEL_PACKAGES) >/dev/null 2>&1 || ! command -v apt-get >/dev/null || { \
	  $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends $(WHEEL_PACKAGES); }
	$(MAKE) test-wheels MACHINES='x86_64 aarch64'

test-wheels: $(VENV)/installed  ## this machine's wheel, installed and run without a compiler
	$(BIN)/python -m pip install --quiet '.[wheels]'
	$(BIN)/python scripts/build_wheels.py dist $(or $(MACHINES),$(shell uname -m))
	JAXINF_TEST_WHEELS=dist $(BIN)/pytest -rP tests/wheels

coverage: $(VENV)/installed  ## lines that make test runs, as pages in build/coverage
	$(BIN)/python -m pip install --quiet '.[dev]'
	$(BIN)/pytest -n auto --dist loadfile -m 'not faults and not hls and not cards and not long' \
	  --ignore tests/models --ignore tests/faults --ignore tests/distributed --ignore tests/object_store --ignore tests/accelerators \
	  --cov --cov-report html:build/coverage --cov-report term:skip-covered $(or $(TESTS),tests)

docs: $(VENV)/installed  ## the documentation's site, in build/docs; runs its notebooks
	$(BIN)/python -m pip install --quiet '.[docs,test]'
	PATH=$(abspath $(BIN)):$$PATH JAX_PLATFORMS=cpu $(BIN)/sphinx-build -q -W --keep-going -j 2 \
	  -d build/doctrees -b html docs build/docs

docs-check: docs  ## every link within the site
	$(BIN)/python scripts/check_site.py build/docs

docs-links: $(VENV)/installed  ## links that leave the site; needs the network
	$(BIN)/python -m pip install --quiet '.[docs,test]'
	$(BIN)/sphinx-build -q -b linkcheck -D nb_execution_mode=off \
	  -d build/doctrees-links docs build/links

lint: $(VENV)/installed  ## ruff and pyright
	$(BIN)/python -m pip install --quiet '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## remove what make made, runs excepted
	rm -rf $(VENV) build dist *.egg-info hls/build
