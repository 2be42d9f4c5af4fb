# kvgate: set-up, tests, benches. `make` or `make help` lists the targets.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules
# One step after the other, also under -j: what may run side by side does so inside one recipe.
.NOTPARALLEL:

# Each is documented in `make help`.
PYTHON ?=
KVGATE_TORCH_INDEX ?=
GATEWAY_ARGS ?=
GPU_PYTHON ?= python3
GPU_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
export PYTHON KVGATE_TORCH_INDEX PYTEST_ARGS
# Mojo's tools report usage otherwise.
export MODULAR_TELEMETRY_ENABLED := 0

GATEWAY_STAMP := .venv/.gateway.stamp
VLLM_STAMP := .venv/.vllm.stamp
SETUP_INPUTS := pyproject.toml requirements/torch.txt tools/setup_env.py
GATEWAY_PYTHON := .venv/gateway/bin/python
VLLM_PYTHON := .venv/vllm/bin/python

.PHONY: help env-gateway env-vllm envs gateway demo demo-server demo-snapkv test test-full test-gpu bench bench-kernels kernels wheel lint format lock clean distclean

help: ## List the targets and the variables
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Variables (make NAME=value TARGET):"
	@echo "  PYTHON              Python 3.11 or 3.12 to build the environments with (default: the first that runs)"
	@echo "  KVGATE_TORCH_INDEX  package index to take torch from, for a CPU build (default: pip's own index,"
	@echo "                      where the same name may bring a CUDA build of several GB)"
	@echo "  GATEWAY_ARGS        more arguments for 'kvgate serve' in 'make gateway'"
	@echo "  BENCH_ARGS          more arguments for 'make bench' and 'make bench-kernels'"
	@echo "  GPU_PYTHON          Python of the environment with vLLM for GPUs, for 'make test-gpu' (default: python3)"
	@echo "  GPU_ARGS            more arguments for 'make test-gpu': names of cases, --out FOLDER"
	@echo "  PYTEST_ARGS         more arguments for pytest in 'make test' and 'make test-full'"
	@echo
	@echo "Set-up happens by itself, into .venv/gateway and .venv/vllm, and again when what it is made from changes."

$(GATEWAY_STAMP): $(SETUP_INPUTS) requirements/gateway.in requirements/gateway.txt
	@tools/setup-env.sh gateway

$(VLLM_STAMP): $(SETUP_INPUTS) requirements/vllm.in requirements/vllm.txt
	@tools/setup-env.sh vllm

env-gateway: $(GATEWAY_STAMP) ## Set up the daemon's environment only

env-vllm: $(VLLM_STAMP) ## Set up the vLLM environment only

envs: ## Set up both, at the same time
	@tools/setup-env.sh gateway & gateway=$$!; tools/setup-env.sh vllm || { wait $$gateway; exit 1; }; wait $$gateway

gateway: $(GATEWAY_STAMP) ## Run the gateway in the foreground (Ctrl-C stops it)
	@exec .venv/gateway/bin/kvgate serve $(GATEWAY_ARGS)

demo: envs kernels ## Run the main path once: two vLLM engines, one shared cache, what was reused and why
	@$(VLLM_PYTHON) demo/main_path.py

demo-server: envs kernels ## The same through vLLM's OpenAI server and curl, with two cache salts
	@$(VLLM_PYTHON) demo/openai_server.py

demo-snapkv: envs kernels ## Compact a long prompt with SnapKV, restore it after a restart, decode from it; and all that must miss
	@$(VLLM_PYTHON) demo/snapkv.py

test: envs kernels ## Run all tests but the slow ones, in both environments
	@tools/run-tests.sh fast

test-full: envs kernels ## Run every test
	@tools/run-tests.sh full

test-gpu: ## Run the GPU tests: real engines on an NVIDIA GPU, ten minutes, no network; skipped where there is none
	@$(GPU_PYTHON) -m tests.gpu $(GPU_ARGS)

bench: $(GATEWAY_STAMP) kernels ## Measure the gateway against the peers
	@$(GATEWAY_PYTHON) -m bench $(BENCH_ARGS)

bench-kernels: $(GATEWAY_STAMP) kernels ## Measure the Mojo kernels against torch
	@$(GATEWAY_PYTHON) -m bench.kernels $(BENCH_ARGS)

kernels: $(GATEWAY_STAMP) ## Build the Mojo kernels
	@$(GATEWAY_PYTHON) kernels/build.py

wheel: kernels ## Build the wheel, compiled kernels included, into dist/
	@$(GATEWAY_PYTHON) -m hatchling build -t wheel

lint: $(GATEWAY_STAMP) ## Check style, format and types
	@tools/lint.sh

format: $(GATEWAY_STAMP) ## Rewrite the sources in the project's format
	@.venv/gateway/bin/ruff check --fix-only --quiet .
	@.venv/gateway/bin/ruff format .

lock: ## Resolve requirements/*.in anew into the pinned lists
	@tools/setup-env.sh lock gateway vllm

clean: ## Remove build output and caches; the environments stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove the environments as well
	@rm -rf .venv
