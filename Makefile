# What a reader and a developer type. Needs python3 (3.11 or newer), git and make; all else goes into .venv.
# Another Python: make PYTHON=python3.12 notebooks

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.hpnb-installed

.DEFAULT_GOAL := help
.PHONY: help notebooks outputs bench docs test test-all lab clean

# A kernel is this venv's Python, never one that the user has registered, and `!torchrun` in a cell is
# this venv's torchrun. A PYTHONPATH from outside would shadow what constraints.txt pins.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export JUPYTER_PREFER_ENV_PATH := 1
export JUPYTER_PATH :=
unexport PYTHONPATH

help:
	@echo "make notebooks   run the series in order; executed copies go to executed/"
	@echo "make outputs     run the series on this machine's GPUs and write the pages as they are committed"
	@echo "make bench       hpnb beside PyTorch's programs on this machine's GPUs, layout by layout: files, tables and a chart of them"
	@echo "make docs        the API reference, from the docstrings: build/docs/index.html"
	@echo "make lab         open the notebooks in JupyterLab"
	@echo "make test        lint, types, tests and all notebooks on the CPU: what continuous integration runs"
	@echo "make test-all    the same with every case of the sweeps, of which make test draws some"
	@echo "make clean       remove what the others wrote, except $(VENV)"
	@echo "The first of them makes $(VENV) and installs hpnb with its dependencies (up to 6 GB, a few minutes)."

# Made once, and again when the requirements change.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "hpnb needs Python 3.11 or newer and there is no '$(PYTHON)'; name yours: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hpnb needs Python 3.11 or newer and '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1);" \
		"name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || "$(PYTHON)" -m venv $(VENV)
	@echo "Installing hpnb and its dependencies into $(VENV) (up to 6 GB the first time) ..."
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

notebooks: $(STAMP)
	@$(VENV)/bin/python -m hpnb.lesson.pages.execute notebooks executed

# On a GPU machine without network there may be no $(VENV), but an environment that has all of pyproject.toml:
# make OUTPUTS_PYTHON=python3 outputs. Nothing is looked up on the hub, so that the pages can be made again.
OUTPUTS_PYTHON ?= $(VENV)/bin/python
outputs: $(if $(filter $(VENV)/%,$(OUTPUTS_PYTHON)),$(STAMP))
	@HF_HUB_OFFLINE=1 $(OUTPUTS_PYTHON) -m hpnb.lesson.pages.committed --all

# A file of results a run, in the package; a layout that fails costs its own row. Half an hour on four GPUs.
RANKS ?= 4
bench: $(if $(filter $(VENV)/%,$(OUTPUTS_PYTHON)),$(STAMP))
	@$(OUTPUTS_PYTHON) -m hpnb.bench gpt2-xl --ranks $(RANKS) --out hpnb/bench/results
	@$(OUTPUTS_PYTHON) -m hpnb.bench vit-l16 --ranks $(RANKS) --out hpnb/bench/results
	@$(OUTPUTS_PYTHON) -m hpnb.bench table --write
	@$(OUTPUTS_PYTHON) -m hpnb.bench chart

# Any warning fails it: a public name that does not exist, a type that cannot be read.
docs: $(STAMP)
	@$(VENV)/bin/python docs/make_reference.py build/docs

lab: $(STAMP)
	@cd notebooks && python -m jupyterlab

# Two at once: the ranks of one test wait for each other while those of the other compute. Tests of a file stay
# together, and share their ranks; in the order of names the long ones do not come last.
WORKERS ?= 2

# SWEEPS=--slow runs every case of every sweep; without it a fixed seed draws some of each.
SWEEPS ?=

# Every step runs even when one before it failed; the last line says which did. Nothing is fetched, and
# nothing is written to the user's home.
test: $(STAMP)
	@failed=; \
	step() { name=$$1; shift; echo "== $$name"; "$$@" || failed="$$failed $$name"; }; \
	step lint python -m ruff check .; \
	step types python -m mypy; \
	step tests python -m pytest -q -p no:nbmake -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SWEEPS); \
	if ls notebooks/*.ipynb >/dev/null 2>&1; then \
		step notebooks env HPNB_HOME="$(CURDIR)/build/home" HF_HUB_OFFLINE=1 python -m pytest -q --timeout=0 -n $(WORKERS) \
			--nbmake --nbmake-kernel=python3 --nbmake-timeout=600 notebooks; \
	fi; \
	if [ -n "$$failed" ]; then echo "== FAILED:$$failed"; exit 1; fi; \
	echo "== all passed"

test-all:
	@$(MAKE) test SWEEPS=--slow

clean:
	rm -rf executed build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -exec rm -rf {} +
