# Every target makes $(VENV) first where there is none, `make demo` without what tests, lint, docs and benchmarks need (the extra dev). PYTHON
# picks the interpreter (3.11 or 3.12), VLLM another vLLM for the CPU: `make test VLLM=0.32.0` has .venv-0.32.0 for it.
PYTHON ?= python3
VLLM ?=
VENV ?= .venv$(addprefix -,$(VLLM))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.qlora-rl-setup
DEV := $(VENV)/.qlora-rl-setup-dev

.PHONY: setup setup-dev demo test unit test-stack test-full gpu gpu-check bench dist docs lint format clean

setup: $(STAMP)             ## what a user needs
setup-dev: $(DEV)           ## what tests, lint, docs and benchmarks need as well

$(STAMP) $(DEV): pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) QLORA_RL_VLLM=$${QLORA_RL_VLLM:-$(VLLM)} $(if $(filter $@,$(DEV)),EXTRAS=dev )bash scripts/setup.sh
	touch $(STAMP) $@

demo: $(STAMP)              ## the whole thing on this machine: a 4-bit model learns by RL
	$(VENV)/bin/qlora-rl demo $(ARGS)

# Files in two processes of one thread each: on two cores half the time of one process with two. `make test WORKERS=0` is one.
WORKERS ?= 2
ACROSS := $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadfile)
# `make test PROCESSOR=avx2`: as on a processor without AVX-512 and bf16 instructions; torch, vLLM, MKL and bitsandbytes take their other kernels.
PROCESSOR ?=
# tests/children is on the path of every test's processes and imitates nothing.
IMITATED := $(filter-out children,$(patsubst tests/%/sitecustomize.py,%,$(wildcard tests/*/sitecustomize.py)))
AS = $(if $(filter-out $(IMITATED),$(PROCESSOR)),$(error PROCESSOR=$(PROCESSOR): no test imitates this processor. Use one of: $(IMITATED)))$(if \
	$(PROCESSOR),PYTHONPATH=$(CURDIR)/tests/$(PROCESSOR))

# A test that waits for ever fails with its stack, and the others go on. What a signal does not interrupt says where it is
# a minute later. Not in pyproject.toml: a GPU host without network may lack pytest-timeout.
LIMITS := --timeout=600 -o timeout_method=signal -o faulthandler_timeout=660

test: $(DEV)                ## unit tests, then real vLLM and real bitsandbytes
	$(AS) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(LIMITS) $(ACROSS) $(ARGS)

unit: $(DEV)                ## no vLLM, two minutes
	$(AS) $(PY) -m pytest tests/unit $(ARGS)

test-stack: $(DEV)          ## a selection of the tests, recorded for benchmarks/details.md: `make test-stack VLLM=0.32.0`
	$(PY) scripts/test_stack.py $(ARGS)

test-full: $(DEV)           ## long matrices and soak runs
	$(AS) QLORA_RL_TEST_EXAMPLES=sampled OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(ACROSS) -m "not gpu" $(ARGS)

gpu: $(DEV)                 ## what needs an NVIDIA GPU
	$(PY) -m pytest -m gpu $(ARGS)

gpu-check:                  ## all that needs a GPU, in pieces that can be stopped; works without network: docs/gpu.md
	$(if $(wildcard $(STAMP)),$(PY),$(PYTHON)) scripts/gpu_check.py $(ARGS)

bench: $(DEV)               ## against TRL, TorchRL and vLLM as it comes, ten minutes on two idle cores; then the tables of the docs
	$(PY) benchmarks/field.py $(ARGS)
	$(PY) benchmarks/tables.py

dist: $(DEV)                ## sdist and wheel in dist/, tried out in a fresh environment
	rm -rf dist
	$(PY) -m build
	PYTHON=$(PYTHON) bash scripts/smoke_wheel.sh dist/*.whl dist/*.tar.gz

docs: $(DEV)                ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) benchmarks/tables.py --check
	$(PY) benchmarks/claims.py

format: $(DEV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* build *.egg-info
