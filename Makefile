# kvchat's tasks. `make` alone lists them.

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt
SOURCES := kvchat kernels tests demo_recipe
# What is measured on a GPU; make test-gpu GPU_SHAPE=0.4b for a small one. So many tests run at once: compiling
# kernels keeps a core busy, and each process takes half a gigabyte of the GPU. The limits are in seconds: a GPU may be
# lent for minutes, and what was found until then is printed.
GPU_SHAPE ?= 8b
GPU_DEVICE ?= cuda
GPU_JOBS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n : 16)))
GPU_LIMIT ?= 480
GPU_FIGURES_LIMIT ?= 240
GPU_BENCH ?= --repeats 3
# A machine with a GPU may have no package index, but torch, triton, transformers and pytest in its own Python:
# there `make test-gpu PYTHON=python3 VENV=` makes no environment. What that Python lacks comes from the wheels of
# `make gpu-wheels`, run on a machine with an index and copied along with the checkout.
GPU_TESTS := tests/gpu tests/unit/model/test_spec.py
WHEELS := .gpu/wheels
GPU_PACKAGES := platformdirs diskcache gguf httpx2 httpcore2 truststore prompt-toolkit wcwidth llguidance starlette uvicorn \
	websockets zstandard
GPU_PLATFORM := --python-version 3.12 --implementation cp $(foreach tag,2_31_x86_64 2_28_x86_64 2_17_x86_64 2014_x86_64 \
	1_x86_64,--platform manylinux$(if $(findstring 2_,$(tag)),_)$(tag))
SITE := .gpu/site
ifeq ($(VENV),)
GPU_STAMP := $(SITE)/.installed
GPU_PYTHON = PYTHONPATH="$(CURDIR)/$(SITE):$(CURDIR):$(CURDIR)/kernels" $(PYTHON)
else
GPU_STAMP = $(DEV_STAMP)
GPU_PYTHON = $(BIN)/python
endif

.DEFAULT_GOAL := help
.PHONY: help chat test test-all test-gpu gpu-wheels soak model-table llama-server peers test-clients bench check fmt recording demo-model test-demo-model clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

chat: $(STAMP)  ## install on first use, and chat with the shipped demo model
	@$(BIN)/kvchat || { code=$$?; [ $$code -eq 130 ] || exit $$code; }  # Ctrl-C twice is no failure

# In their own order the files with few and long tests come first; xdist would put them last, one after the other.
# Compiled modules are kept, whatever the environment says: hundreds of processes import the same ones.
TEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	-m "not soak and not gpu" --ignore tests/gpu
# Whose share of the combinations marked `matrix` runs (tests/support/matrix.py).
MATRIX_OF ?= $(or $(shell git rev-parse HEAD 2>/dev/null),none)

test: $(DEV_STAMP)  ## what needs no GPU; of families times formats, a share that changes with the commit
	$(TEST) --budgets --matrix-of $(MATRIX_OF)

test-all: $(DEV_STAMP)  ## the same, with all families in all formats: before a release
	$(TEST)

# The figures are worth having where a test fails, too.
test-gpu: $(GPU_STAMP)  ## the same kernels and engine on a CUDA device, and its figures into .gpu/figures
	@status=0; limited="timeout -s INT -k 20"; set -x; \
	$$limited $(GPU_LIMIT) env $(GPU_PYTHON) -m pytest -q --tb=short -m gpu -n $(GPU_JOBS) --dist worksteal \
		$(GPU_TESTS) || status=1; \
	$$limited $(GPU_FIGURES_LIMIT) env $(GPU_PYTHON) -m kvchat bench kernels decode prefill --device $(GPU_DEVICE) \
		--shape $(GPU_SHAPE) $(GPU_BENCH) --record .gpu/figures || status=1; \
	exit $$status

gpu-wheels:  ## fetch what a GPU machine without a package index lacks, into .gpu/wheels
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: $(GPU_PLATFORM) -c .ci/constraints.txt \
		-d $(WHEELS) $(GPU_PACKAGES)

$(SITE)/.installed: $(wildcard $(WHEELS)/*.whl)
	@mkdir -p $(SITE)
	@test -z "$^" || $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target $(SITE) $^
	@touch $@

soak: $(DEV_STAMP)  ## the long random, fault and kill runs
	$(BIN)/python -m pytest -m soak

model-table: $(DEV_STAMP)  ## try every model type of transformers (15 minutes), and write docs/models.md
	PYTHONPATH=tests $(BIN)/python -m support.models_page --measure

llama-server: $(DEV_STAMP)  ## build llama.cpp's server (20 minutes, needs cmake and a C++ compiler), for a test with it
	.ci/build-llama-server $(BIN)/python .llama-server

# ik_llama.cpp has no package: IK_LLAMA is a directory with its sources.
peers: $(DEV_STAMP)  ## build what kvchat bench compares with: llama.cpp, and ik_llama.cpp of IK_LLAMA=DIR (30 minutes)
	$(PIP_INSTALL) llama-cpp-python==0.3.36
	@test -n "$(IK_LLAMA)" || { echo "ik_llama.cpp: not built; give its sources by IK_LLAMA=DIR"; exit 0; }; \
	cmake -S "$(IK_LLAMA)" -B .peers -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DGGML_NATIVE=ON && \
	cmake --build .peers --target llama-bench --parallel 2 && echo "kvchat bench --peer .peers/bin/llama-bench"

# Their packages and kvchat's do not suit each other.
# The browser comes in a package of its own: no system's browser is asked for.
test-clients: $(DEV_STAMP)  ## install agents, other clients and a browser beside kvchat, and let them use its server
	npm install --silent --no-audit --no-fund --prefix .clients/browser @sparticuz/chromium puppeteer-core
	npm install --silent --no-audit --no-fund --prefix .clients/agents \
		@anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code
	for name in llm aider-chat ollama; do test -x .clients/$$name/bin/pip || $(PYTHON) -m venv .clients/$$name; \
		.clients/$$name/bin/pip install --quiet --disable-pip-version-check $$name || exit 1; done
	PATH="$(CURDIR)/.clients/llm/bin:$(CURDIR)/.clients/aider-chat/bin:$$PATH" \
		"$(CURDIR)/$(BIN)/python" -m pytest $(addprefix tests/contract/test_,agent_clients.py browser.py open_webui.py programs.py sdks.py)

bench: $(STAMP)  ## measure this machine, beside its peers and ceilings
	$(BIN)/kvchat bench

check: $(DEV_STAMP)  ## what has to hold before every commit: style, types, floors, tests
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	@$(MAKE) --no-print-directory test
	.ci/check-wheel $(BIN)/python

fmt: $(DEV_STAMP)  ## format the sources
	$(BIN)/ruff check --fix --quiet $(SOURCES) || true
	$(BIN)/ruff format $(SOURCES)

recording: $(DEV_STAMP)  ## record docs/screen.svg, the picture of the first page
	PYTHONPATH=.:kernels:tests $(BIN)/python docs/record_screen.py

demo-model: $(STAMP)  ## train the demo models again (hours on two cores)
	$(BIN)/python -m demo_recipe.recipe

test-demo-model: $(DEV_STAMP)  ## test the recipe that trains them
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not soak" demo_recipe/tests

clean:  ## remove everything the other targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .demo-build .llama-server .peers .clients

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || \
		{ echo "kvchat needs Python 3.11, 3.12 or 3.13; try: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version); installing takes a few minutes once"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml .ci/constraints.txt | $(VENV)/bin/python
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV_STAMP): $(STAMP)
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@
