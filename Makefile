# The workspace's commands. Each one sets up what it needs in .venv; `make help` lists them.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3 …` chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
TORCH := $(VENV)/.torch
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu
JOBS ?= 2
# One more than the cores, because some tests wait for other processes.
TESTERS ?= $(shell expr $(JOBS) + 1)
# Other engines that benchmarks measure against, each in an environment of its own.
PEERS ?= .cache/peers
VLLM := $(PEERS)/vllm
HOSTED := $(PEERS)/kvframe-in-vllm
HARNESS := $(PEERS)/lm_eval
# Small tensors: more threads than one only fight over the cores that the test processes use.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, and each would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Versions to compare, as pip takes them, and what the names of the suites to run contain; all unless given.
VERSIONS ?=
SUITES ?=

.PHONY: help setup quick test whole lint docs site demo bench compat dist wheels peer harness vllm clean

help: ## list these commands
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## make .venv with every package of the workspace and the test tools

# torch comes first and alone: its CPU build is a tenth of the usual one, which is of use with an NVIDIA GPU only. Where
# its index cannot be reached, the next command of pip takes torch from the usual index.
$(TORCH):
	@test -n "$(PYTHON)" || { echo "kvframe needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }
	@echo "Making $(VENV) with torch, the largest part: it may take a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || $(PIP) --retries 0 --no-deps --index-url $(CPU_INDEX) -c constraints.txt torch >/dev/null 2>&1 || true
	@touch $@

$(READY): requirements.txt requirements-dev.txt constraints.txt pyproject.toml kernels/pyproject.toml $(wildcard plugins/*/pyproject.toml) | $(TORCH)
	@echo "Installing every package of the workspace in $(VENV), and the tools"
	@$(PIP) -r requirements-dev.txt
	@touch $@ $(DEMO)

# The part of the workspace that the demo runs. `make setup` installs it too, and may come later.
$(DEMO): examples/demo/requirements.txt constraints.txt pyproject.toml | $(TORCH)
	@echo "Installing what the demo runs in $(VENV)"
	@$(PIP) -r examples/demo/requirements.txt
	@touch $@

lint: $(READY) ## ruff and mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict -n $(JOBS)

quick: $(READY) ## lint and tests of what changed, or of one package: make quick PACKAGE=cache
	@BIN=$(BIN) JOBS=$(JOBS) PACKAGE=$(PACKAGE) .ci/quick

test: lint ## lint, then every test: core, plugins, examples
	$(BIN)/pytest -n $(TESTERS) --dist worksteal

whole: $(READY) ## all cases of the grids of which usual runs compute a part; takes hours
	$(BIN)/pytest -n $(TESTERS) --dist worksteal -m whole --hypothesis-profile=whole --timeout 3600

docs: $(READY) ## build the documentation as a site in build/site, with a page of each public name
	$(BIN)/sphinx-build -j $(JOBS) -q -W --keep-going -b html -c docs . build/site
	@echo "open build/site/index.html"

site: $(READY) ## check the built site in Chromium, on wide and narrow screens, light and dark
	$(BIN)/pytest -m site tests/project/test_site.py

demo: $(DEMO) ## train a small hybrid model (once), serve 32 prompts that share a prefix, and check every token
	$(BIN)/python examples/demo/demo.py

bench: $(READY) $(VLLM)/.ready ## measure against transformers and vLLM, and parts by themselves; record the results
	$(BIN)/python -m benchmarks.engine.generate
	$(BIN)/python -m benchmarks.engine.beside_vllm
	$(BIN)/python -m benchmarks.engine.drafts
	$(BIN)/python -m benchmarks.engine.server
	$(BIN)/python -m benchmarks.engine.skipping
	$(BIN)/python -m benchmarks.attention.metadata
	$(BIN)/python -m benchmarks.attention.formats
	$(BIN)/python -m benchmarks.attention.chosen
	$(BIN)/python -m benchmarks.engine.profile_step
	$(BIN)/python -m benchmarks.memory.plans
	$(BIN)/python -m benchmarks.memory.traffic
	$(BIN)/python -m benchmarks.cache.eviction
	$(BIN)/python -m benchmarks.cache.hints
	$(BIN)/python -m benchmarks.attention.cpu
	$(BIN)/python -m benchmarks.cache.core
	$(BIN)/python -m benchmarks.cache.growth
	$(BIN)/python -m benchmarks.cache.event_costs
	$(BIN)/python -m benchmarks.engine.soak
	$(BIN)/python -m benchmarks.engine.soak_stores
	$(BIN)/python -m benchmarks.engine.tiers
	$(BIN)/python -m benchmarks.engine.tier_steps
	$(BIN)/python -m benchmarks.memory.tier_hits
	$(BIN)/python -m benchmarks.serving.routing

# Versions of vLLM are laid over the environment of `make vllm`.
ALL_OR_VLLM := $(if $(VERSIONS),$(findstring vllm,$(VERSIONS)),all)
compat: $(READY) $(if $(ALL_OR_VLLM),$(HOSTED)/.ready) ## compare with each tested version of transformers, vLLM, torch and Python; write plugins/COMPATIBILITY.md
	$(BIN)/python -m tests.compatibility $(VERSIONS) --suites "$(SUITES)"

dist: ## build every wheel and sdist in build/packages, install the wheels elsewhere and run what READMEs show
	@PYTHON=$(PYTHON) JOBS=$(JOBS) .ci/dist

wheels: ## build kvframe-kernels with compiled kernels in build/wheels, for this machine's processor; needs docker
	@$(PYTHON) -m venv --clear .cache/cibuildwheel
	@.cache/cibuildwheel/bin/python -m pip install -qq --disable-pip-version-check cibuildwheel
	.cache/cibuildwheel/bin/cibuildwheel kernels --output-dir build/wheels

peer: $(VLLM)/.ready ## make .cache/peers/vllm, vLLM's CPU build in an environment of its own, to measure against

$(VLLM)/.ready: benchmarks/requirements-vllm.txt
	@test -n "$(PYTHON)" || { echo "vLLM needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }
	@echo "Setting up $(VLLM): 2 GB, allow a few minutes"
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r $<
	@$(VLLM)/bin/python -c 'import vllm.v1.core.kv_cache_manager'
	@touch $@

vllm: $(HOSTED)/.ready ## tests of kvframe inside vLLM, in an environment of their own beside that of `make peer`
	$(HOSTED)/bin/python -m pytest plugins/vllm

harness: $(HARNESS)/.ready ## make .cache/peers/lm_eval, an evaluation harness that scores a served model

$(HARNESS)/.ready: $(READY) benchmarks/requirements-harness.txt
	@$(PYTHON) -m venv --clear $(HARNESS)
	@$(BIN)/python -c 'import os, site; print(os.path.abspath(site.getsitepackages()[0]))' > $$($(HARNESS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvframe.pth
	@$(HARNESS)/bin/python -m pip install -qq --disable-pip-version-check -r benchmarks/requirements-harness.txt
	@touch $@

# The peer's packages by a path file, and what kvframe and its tests need besides.
$(HOSTED)/.ready: $(VLLM)/.ready plugins/vllm/requirements-test.txt
	@$(PYTHON) -m venv --clear $(HOSTED)
	@$(VLLM)/bin/python -c 'import os, site; print(os.path.abspath(site.getsitepackages()[0]))' > $$($(HOSTED)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm.pth
	@$(HOSTED)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r plugins/vllm/requirements-test.txt
	@touch $@

clean: ## remove .venv, caches and the trained demo model
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name '*.egg-info' -prune -exec rm -rf {} +
