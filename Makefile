# Everything works on a fresh clone: each target installs what it needs. ARGS is passed on, as in: make test ARGS="-k law"

PYTHON ?=
ARGS ?=
BIN := .venv/bin
WORKERS ?= 2
# One thread a worker: two OpenMP pools on the same cores wait for each other most of the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
KERNELS := CMakeLists.txt $(wildcard csrc/*.?pp csrc/*/*.?pp)
INPUTS := pyproject.toml constraints.txt constraints-gpu.txt scripts/install.sh scripts/constraints.sh $(KERNELS)

.PHONY: help install install-dev native sanitize demo test test-core test-all mutants smollm2 soak check bench docs page format release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

install: .venv/.user ## make .venv with what this machine needs: torch only with a GPU or without a compiler
install-dev: .venv/.dev ## and what developers need

.venv/.user: $(INPUTS)
	@PYTHON="$(PYTHON)" scripts/install.sh
	@touch $@

.venv/.dev: $(INPUTS)
	@PYTHON="$(PYTHON)" scripts/install.sh dev
	@touch .venv/.user $@

.venv-core/.test: $(INPUTS) .venv/.dev
	@PYTHON="$(PYTHON)" scripts/install.sh test
	@touch $@

# Compiles what has changed; `make install` starts from nothing. LEVELS="portable;avx2" leaves out the other levels.
native: ## compile the kernels again, after a change of theirs, and write their type stub
	@test -e .venv/.dev || $(MAKE) install-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/native -G Ninja --log-level=WARNING \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(if $(LEVELS),-DTRIFORCE_LEVELS="$(LEVELS)")
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native
	@$(BIN)/python scripts/native_stub.py
	@touch .venv/.user .venv/.dev

sanitize: ## the kernels' tests under address, undefined-behaviour and thread sanitizers: half an hour
	@test -e .venv/.dev || $(MAKE) install-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sanitize.sh $(ARGS)

# Without a connection it shows the pair that comes with triforce instead. ARGS="--offline" fetches nothing.
demo: install ## ask a small real model about a book, plainly and in mode auto; 98 MB are fetched once
	@$(BIN)/triforce demo $(ARGS)

test: install-dev ## the tests, a quarter of an hour on two cores
	@$(PYTEST) $(ARGS)

test-core: .venv-core/.test ## the tests that need neither torch nor transformers, in an environment without them
	@OMP_NUM_THREADS=1 .venv-core/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# A run that was cut off goes on behind what has passed, as long as nothing has changed.
test-all: install-dev ## with the long versions of the laws and a real model, which must be had; up to two and a half hours
	@$(MAKE) --no-print-directory smollm2
	@$(PYTEST) -m "slow or not slow" -p tests.helpers.resumed_run --resume build/test-all.passed $(ARGS)

smollm2: build/smollm2/config.json ## a real model of 30 layers to try things with, in build/smollm2; 98 MB are fetched once

build/smollm2/config.json: scripts/smollm2.py $(wildcard src/triforce/checkpoint/gguf/*.py)
	@test -e .venv/.dev || $(MAKE) install-dev
	@$(BIN)/python -m scripts.smollm2 $(@D)
	@touch $@

mutants: install-dev ## the faults that tests plant: what each changes, and which test notices it
	@$(BIN)/python -m tests.helpers.mutants

soak: install-dev ## half an hour of all kinds of requests: the server stays as it is, and running streams go on
	@$(BIN)/python scripts/soak.py $(ARGS)

check: install-dev ## all that must hold before a change is handed in
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(PYTEST) $(ARGS)

bench: install ## all modes against plain decoding in 48 cells, up to 90 minutes; ARGS="--contexts 4096" is less
	@$(BIN)/triforce bench speed $(ARGS)

docs: install-dev ## these pages as a site in build/site, without the network
	@$(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html"

page: ## bundle the page from web/src with node and npm; the bundle is committed, so nothing else needs them
	@npm --prefix web ci --no-audit --no-fund --silent
	@npm --prefix web run --silent build

release: install-dev ## sdist and wheels into dist/, each tried in an empty environment; ten minutes
	@$(BIN)/python -m scripts.release $(ARGS)

format: install-dev ## put the code into shape, and what is generated into README.md and docs/
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/python -m scripts.docs

clean: ## remove what is built and kept for another time (not .venv, not what is trained: build/pair, build/draft)
	@find build -mindepth 1 -maxdepth 1 ! -name pair ! -name draft -exec rm -rf {} + 2>/dev/null || true
	@rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
