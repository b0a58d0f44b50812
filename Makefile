# Everything is installed into .venv, from constraints/; `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Use the installed packages and tests, even if the shell's PYTHONPATH points to another checkout.
unexport PYTHONPATH
# Write bytecode: otherwise each of the hundreds of processes of a test run compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

DEVICE ?= cpu
ifeq ($(filter cpu gpu,$(DEVICE)),)
$(error DEVICE must be cpu or gpu (seen: $(DEVICE)); it may come from your shell's environment)
endif
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(DEVICE)
PACKAGES := crds/src cli/src operator/src trainer/src tests/support e2e/cluster examples/worker_groups.py examples/notebook.py proof tools
UV := .cache/bootstrap/bin/uv
COMPILE := $(UV) pip compile -q --python-version 3.11 --universal --generate-hashes --no-annotate --no-header

.PHONY: help install lint check test test-long programs browser demo e2e cluster cluster-down bench proof bench-constraints constraints clean

help: ## Print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

install: $(INSTALLED) ## Install everything into .venv (DEVICE=gpu on GPU machines); does nothing if it is up to date

$(INSTALLED): constraints/bootstrap.txt constraints/build.txt constraints/$(DEVICE).txt tools/install.sh \
		crds/pyproject.toml cli/pyproject.toml operator/pyproject.toml trainer/pyproject.toml
	@rm -f $(VENV)/.installed-*
	@tools/install.sh $(DEVICE) $(VENV)
	@touch $@

# The cache of mypy is kept outside of the clone, so that a fresh clone does not check every library again.
lint: export MYPY_CACHE_DIR := $(or $(RLJOB_CACHE),$(HOME)/.cache/rljob)/mypy
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/python -m rljob_api.crdgen --check

check: lint ## Run linters, type checks, and checks of generated files, links, imports and the repository's rules
	$(BIN)/python -m pytest tests/architecture

# A test spends half of its time waiting for processes that load libraries, so several test processes run in parallel; a
# test file runs in one of them. Long tests start more processes, so fewer run at once. One thread per process, because
# several thread pools slow each other down on few cores.
test: TEST_PROCESSES ?= 3
test-long: TEST_PROCESSES ?= 2
# The profile makes hypothesis use the same examples in every run. PYTEST_ARGS="--hypothesis-profile rljob" uses new ones.
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--hypothesis-profile same-examples
test: export OMP_NUM_THREADS := 1
test: lint programs browser ## Run check and the short tests (PYTEST_ARGS="-k name" selects tests, TEST_PROCESSES=0 runs them one after the other)
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-long: export OMP_NUM_THREADS := 1
test-long: $(INSTALLED) programs ## Run the long tests: whole runs, outages, kills, restarts (same variables)
	$(PYTEST) -m long $(PYTEST_ARGS)

# Builds etcd, kube-apiserver, Helm and an S3 server (versitygw) from Go modules; minutes the first time.
# KUBEBUILDER_ASSETS names a folder that has etcd and kube-apiserver already.
programs: $(INSTALLED)
	@PYTHONPATH=tests/support $(BIN)/python -m rljob_testing.cluster.go_programs $(if $(KUBEBUILDER_ASSETS),,etcd kube-apiserver) helm versitygw

browser: # Chromium, for the tests of a run's page
	@tools/install_browser.sh

demo: $(INSTALLED) ## Train the small model of examples/quickstart.yaml on this machine (about two minutes); results in runs/
	@$(BIN)/python -m rljob_cli run examples/quickstart.yaml --run-folder runs/demo-$$(date +%Y%m%d-%H%M%S)

# A real kind cluster. Images and programs that cannot be downloaded are built; see e2e/cluster/README.md.
KIND := PYTHONPATH=e2e/cluster:tests/support $(BIN)/python -m rljob_kind

e2e: $(INSTALLED) ## Run jobs on a real kind cluster (KEEP=1 keeps the cluster afterwards; PYTEST_ARGS="-k name" selects tests)
	@$(BIN)/python -m pytest e2e $(PYTEST_ARGS)

cluster: $(INSTALLED) ## Create the cluster of make e2e, with KubeRay, our images and our chart, and keep it
	@$(KIND) install

cluster-down: $(INSTALLED) ## Delete that cluster; programs and images that were built for it stay in ~/.cache/rljob
	@$(KIND) down

# The programs install verl and TRL themselves, into .cache/bench. Without a package index they report what is missing.
bench: export PYTHONPATH := $(CURDIR)/tests/support
bench: $(INSTALLED) ## Run the benchmarks of bench/ beside verl and TRL, about an hour (BENCH_ARGS=--quick only tries them); JSON in runs/bench
	@mkdir -p runs/bench
	@for program in bench/*.py; do \
		echo "== $$program"; name=$${program##*/}; \
		$(BIN)/python "$$program" --json "runs/bench/$${name%.py}.json" $(BENCH_ARGS); done

proof: export PYTHONPATH := $(CURDIR)/tests/support:$(CURDIR)/e2e/cluster:$(CURDIR)/proof:$(CURDIR)/examples/guess_letter:$(CURDIR)/examples/calculator
proof: export OMP_NUM_THREADS := 1
proof: PARTS := algorithms buckets distillation environments gang golden kueue large-dataset old-logprobs pass-rate reward-model rollout-correction smolagents-session smollm2-calculator survival textarena-games trackers verifiers-session
proof: $(INSTALLED) ## Run experiments that take too long for tests (PART=algorithms, buckets, distillation, environments, gang, golden, kueue, large-dataset, old-logprobs, pass-rate, reward-model, rollout-correction, smolagents-session, smollm2-calculator, survival, textarena-games, trackers or verifiers-session); results in runs/proof, resumable
	@$(BIN)/python "proof/$(subst -,_,$(or $(filter $(PARTS),$(PART)),$(error PART must be one of $(PARTS) (seen: $(PART)); use for example PART=golden))).py" $(PROOF_ARGS)

bench-constraints: $(INSTALLED) ## Resolve bench/peers/*.txt again (verl and TRL), with our versions where they allow them
	for peer in verl trl; do \
		cp constraints/cpu.txt bench/peers/$$peer.new.txt; \
		$(COMPILE) $(UV_UPGRADE_ARGS) bench/peers/$$peer.in -o bench/peers/$$peer.new.txt; \
		mv bench/peers/$$peer.new.txt bench/peers/$$peer.txt; done

constraints: $(INSTALLED) ## Resolve constraints/*.txt again from the pins (UV_UPGRADE_ARGS=--upgrade upgrades dependencies)
	for name in bootstrap build; do \
		$(COMPILE) $(UV_UPGRADE_ARGS) constraints/$$name.in -o constraints/$$name.txt; done
	for device in cpu gpu; do \
		$(COMPILE) $(UV_UPGRADE_ARGS) --override constraints/overrides.txt pyproject.toml --group dev \
			crds/pyproject.toml cli/pyproject.toml operator/pyproject.toml trainer/pyproject.toml --extra $$device --extra examples \
			--extra gymnasium --extra mlflow --extra skyrl-gym --extra wandb \
			constraints/pins-$$device.txt -o constraints/$$device.txt \
			--no-emit-package rljob --no-emit-package rljob-api --no-emit-package rljob-operator --no-emit-package rljob-trainer; done
	$(COMPILE) $(UV_UPGRADE_ARGS) --no-deps proof/other_packages/textarena.in -o proof/other_packages/textarena.txt
	$(COMPILE) $(UV_UPGRADE_ARGS) proof/other_packages/smolagents.in -o proof/other_packages/smolagents.txt
	$(COMPILE) $(UV_UPGRADE_ARGS) proof/other_packages/mlflow.in -o proof/other_packages/mlflow.txt
	$(COMPILE) $(UV_UPGRADE_ARGS) proof/other_packages/verifiers.in -o proof/other_packages/verifiers.txt
	$(COMPILE) $(UV_UPGRADE_ARGS) --constraint constraints/cpu.txt crds/pyproject.toml cli/pyproject.toml operator/pyproject.toml \
		-o constraints/operator.txt --no-emit-package rljob --no-emit-package rljob-api --no-emit-package rljob-operator

clean: ## Delete caches of tools, but not .venv and runs/
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
