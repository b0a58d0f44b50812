# Everything is installed into .venv, from constraints/; `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Packages and tests are found as they are installed, not where another checkout's shell looks for them.
unexport PYTHONPATH
# Nor is each of the hundreds of processes of a test run to compile all modules again, nor pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(DEVICE)
PACKAGES := crds/src operator/src trainer/src tests/support e2e/cluster examples/worker_groups.py proof tools
UV := .cache/bootstrap/bin/uv
COMPILE := $(UV) pip compile -q --python-version 3.11 --universal --generate-hashes --no-annotate --no-header

.PHONY: help install lint check test test-long programs demo e2e cluster cluster-down bench proof bench-constraints constraints clean

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: $(INSTALLED) ## Install into .venv (DEVICE=gpu for GPU machines); nothing to do when up to date

$(INSTALLED): constraints/bootstrap.txt constraints/build.txt constraints/$(DEVICE).txt tools/install.sh \
		crds/pyproject.toml operator/pyproject.toml trainer/pyproject.toml
	@rm -f $(VENV)/.installed-*
	@tools/install.sh $(DEVICE) $(VENV)
	@touch $@

# Beside the programs that are built: a fresh clone need not look at every library again.
lint: export MYPY_CACHE_DIR := $(or $(RLJOB_CACHE),$(HOME)/.cache/rljob)/mypy
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/python -m rljob_api.crdgen --check

check: lint ## Lint, types, generated CRD up to date, import contracts, repository gates
	$(BIN)/python -m pytest tests/architecture

# Half of the time a test waits for processes that load libraries, so two run side by side, each file of tests in one of
# them. One thread per process: the thread pools of several workers on few cores get in each other's way.
TEST_PROCESSES ?= 2
# Elsewhere hypothesis thinks of other examples every time; PYTEST_ARGS="--hypothesis-profile rljob" does so here.
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--hypothesis-profile same-examples
test: export OMP_NUM_THREADS := 1
test: lint programs ## All of check, and the tests that a change needs (PYTEST_ARGS="-k name" for some, TEST_PROCESSES=0 for one after the other)
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-long: export OMP_NUM_THREADS := 1
test-long: $(INSTALLED) programs ## The tests marked "long": whole runs, outages, kills, restarts (same variables)
	$(PYTEST) -m long $(PYTEST_ARGS)

# Of Kubernetes, built from Go modules where KUBEBUILDER_ASSETS names none; minutes the first time.
programs: $(INSTALLED)
	@PYTHONPATH=tests/support $(BIN)/python -m rljob_testing.cluster.go_programs $(if $(KUBEBUILDER_ASSETS),,etcd kube-apiserver) helm

demo: $(INSTALLED) ## Train the small model of examples/quickstart.yaml on this machine; results in runs/
	@$(BIN)/python -m rljob_cli run examples/quickstart.yaml --run-folder runs/demo-$$(date +%Y%m%d-%H%M%S)

# A real cluster with kind, its images and programs built where they cannot be had; see e2e/cluster/README.md.
KIND := PYTHONPATH=e2e/cluster:tests/support $(BIN)/python -m rljob_kind

e2e: $(INSTALLED) ## Jobs on a real cluster (KEEP=1 leaves it for work by hand; PYTEST_ARGS="-k name" for some)
	@$(BIN)/python -m pytest e2e $(PYTEST_ARGS)

cluster: $(INSTALLED) ## The cluster of make e2e, with KubeRay, our images and our chart, for work by hand
	@$(KIND) install

cluster-down: $(INSTALLED) ## Remove that cluster; what was built for it stays in ~/.cache/rljob
	@$(KIND) down

# verl and TRL are installed by the programs themselves, into .cache/bench; without an index they say what is missing.
bench: export PYTHONPATH := $(CURDIR)/tests/support
bench: $(INSTALLED) ## Measurements of bench/, minutes, beside verl and TRL (BENCH_ARGS=--quick shows that they run); JSON in runs/bench
	@mkdir -p runs/bench
	@for program in bench/*.py; do \
		echo "== $$program"; name=$${program##*/}; \
		$(BIN)/python "$$program" --json "runs/bench/$${name%.py}.json" $(BENCH_ARGS); done

proof: export PYTHONPATH := $(CURDIR)/tests/support:$(CURDIR)/e2e/cluster:$(CURDIR)/proof
proof: export OMP_NUM_THREADS := 1
proof: $(INSTALLED) ## What no test has time for: learning curves, in runs/proof, resumable; faults on the cluster; PART=rollout-correction, algorithms, reward-model, golden or survival
	@$(BIN)/python "proof/$(subst -,_,$(or $(PART),$(error which? PART=rollout-correction, algorithms, reward-model, golden or survival))).py" $(PROOF_ARGS)

bench-constraints: $(INSTALLED) ## Resolve bench/peers/*.txt again, at our versions wherever the peers take them
	for peer in verl trl; do \
		cp constraints/cpu.txt bench/peers/$$peer.new.txt; \
		$(COMPILE) $(UV_UPGRADE_ARGS) bench/peers/$$peer.in -o bench/peers/$$peer.new.txt; \
		mv bench/peers/$$peer.new.txt bench/peers/$$peer.txt; done

constraints: $(INSTALLED) ## Resolve constraints/*.txt again from the pins (upgrades: UV_UPGRADE_ARGS=--upgrade)
	for name in bootstrap build; do \
		$(COMPILE) $(UV_UPGRADE_ARGS) constraints/$$name.in -o constraints/$$name.txt; done
	for device in cpu gpu; do \
		$(COMPILE) $(UV_UPGRADE_ARGS) --override constraints/overrides.txt pyproject.toml --group dev \
			crds/pyproject.toml operator/pyproject.toml trainer/pyproject.toml --extra $$device --extra examples \
			constraints/pins-$$device.txt -o constraints/$$device.txt \
			--no-emit-package rljob-api --no-emit-package rljob-operator --no-emit-package rljob-trainer; done
	$(COMPILE) $(UV_UPGRADE_ARGS) --constraint constraints/cpu.txt crds/pyproject.toml operator/pyproject.toml \
		-o constraints/operator.txt --no-emit-package rljob-api --no-emit-package rljob-operator

clean: ## Remove caches of tools (neither .venv nor runs/)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
