# Two commands set everything up, on a machine with Python 3.11 to 3.13, git, make and a C compiler:
#   make demo    make a virtual environment, install, run the main job, write holdfast-report/
#   make test    the same environment, run the tests

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := rl,engines,hf,s3,obstore,etcd,dashboard,top,metrics,otel,docs,dev
MINUTES ?= 60

.PHONY: help demo test adapters gpu soak explore check docs format install clean matrix

help:
	@echo "make demo    run the main job under injected kills (arguments: ARGS='--quick')"
	@echo "make test    run the tests                         (arguments: ARGS='tests/unit')"
	@echo "make adapters the tests with other libraries, each in an environment of its own"
	@echo "make gpu     tests and figures of the CUDA path, on a machine with a device"
	@echo "make soak    half an hour of random faults         (arguments: ARGS='--minutes 5 --seed 7')"
	@echo "make explore property tests with new examples    (arguments: MINUTES=60 ARGS='tests/property/rl')"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make docs    the documentation, into site/; a broken link or an undocumented name fails"
	@echo "make format  let ruff rewrite what it can"
	@echo "make matrix  the tests of the seams with torch, under several versions of it"
	@echo "make clean   remove the virtual environment and the caches"

demo: $(STAMP)
	$(BIN)/holdfast demo $(ARGS)

# A thousand processes read the same modules: they are compiled once, even where Python is told to keep nothing.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# The environments are made on first use, outside of the repository: tests/adapters/environments.py.
adapters: $(STAMP)
	HOLDFAST_ADAPTERS=1 $(BIN)/python -m pytest tests/adapters $(ARGS)

# About five minutes; the environment needs a torch with CUDA. See docs/explanation/cuda.md.
gpu: $(STAMP)
	$(BIN)/python tests/gpu/prove.py $(ARGS)

soak: $(STAMP)
	$(BIN)/holdfast chaos soak $(ARGS)

explore: $(STAMP)
	$(BIN)/python tests/explore.py --minutes $(MINUTES) --jobs $(JOBS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The setting silences a notice on the successor of MkDocs, which says nothing on these pages.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the documentation is in site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# By hand: PyPI's torch brings gigabytes of CUDA along. See docs/reference/versions.md.
matrix: $(STAMP)
	$(BIN)/python tests/matrix.py $(ARGS)

install: $(STAMP)

# Installed again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 11) <= v < (3, 14) and \
	  "Holdfast needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.11 ..." % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made: install the" \
	  "venv module of $(PYTHON) (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "installing into $(VENV); the first time this takes minutes, torch is large"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) .explore .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
