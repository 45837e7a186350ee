# Every target makes its own environment in .venv when there is none; only Python 3.11 or newer,
# git and a C compiler are needed. Nothing is installed again until pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
QUICKSTART := out/quickstart
SHEET := $(QUICKSTART).png

# Tests run in two processes; more threads than cores would slow both down.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help quickstart test test-slow test-chaos test-slurm test-ray lint format bench clean

help:
	@echo "make quickstart   draw a small manifest with the model of the package, and a contact sheet"
	@echo "make test         the tests that run on any machine"
	@echo "make test-slow    the long ones"
	@echo "make test-chaos   workers of a job killed and stopped many times: the dataset is the undisturbed one"
	@echo "make test-slurm   a job on a Slurm cluster of one node; as root it installs Slurm's packages"
	@echo "make test-ray     a job on a Ray cluster of two workers; installs ray"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make bench        benchmarks; needs a CUDA GPU"
	@echo "make clean        remove outputs and caches, not the environment"

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-gpu: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[gpu]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-test: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/installed $(VENV)/installed-test

$(VENV)/installed-ray: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[ray,test]'
	@touch $@ $(VENV)/installed $(VENV)/installed-test

quickstart: $(VENV)/installed
	$(BIN)/offdiff run manifests/quickstart.jsonl --out $(QUICKSTART)
	$(BIN)/python scripts/contact_sheet.py $(QUICKSTART) $(SHEET)
	@echo
	@echo "all pictures on one sheet: $(SHEET)"
	@echo "the pictures:              $(QUICKSTART)/images"
	@echo "the dataset:               $(QUICKSTART), its columns in $(QUICKSTART)/README.md"

test: $(VENV)/installed-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not slurm and not ray and not chaos"

test-slow: $(VENV)/installed-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu"

# OFFDIFF_STORM_KILLS=200 makes it a longer storm, OFFDIFF_STORM_SEED=5 another one.
test-chaos: $(VENV)/installed-test
	$(ONE_THREAD) $(BIN)/python -m pytest -m chaos tests/chaos

# Where Slurm cannot be installed its tests say so and are skipped.
test-slurm: $(VENV)/installed-test
	-timeout 600 tests/slurm/install.sh
	$(ONE_THREAD) $(BIN)/python -m pytest -m slurm tests/slurm

test-ray: $(VENV)/installed-ray
	$(ONE_THREAD) $(BIN)/python -m pytest -m ray tests/ray_cluster

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict offline_diffusion
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed-gpu
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make bench needs a CUDA GPU")'
	$(BIN)/python benchmarks/bench_qwen_image.py

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
