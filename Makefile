# Needs make and Python 3.11 or newer, nothing else: every target makes .venv from requirements.txt when it has to.
# Another interpreter: make PYTHON=python3.12 ...   Another output folder: STUDY_OUT=/some/folder make reproduce

PYTHON ?= python3
RUN := .venv/bin/python
ARGS ?=

# Nothing is written outside this folder.
export MPLCONFIGDIR := $(CURDIR)/build/study/matplotlib
export XDG_CACHE_HOME := $(CURDIR)/build/cache
export IPYTHONDIR := $(CURDIR)/build/study/ipython
export PYTHONPATH := $(CURDIR)

.DEFAULT_GOAL := help
.PHONY: help venv reproduce test measure accuracy lab figures html bench lint clean

help:  ## this list
	@echo "Where training memory goes. make <target>, with"
	@sed -n 's/^\([a-z]*\): .*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name what; do printf '  %-10s %s\n' "$$name" "$$what"; done

venv:  ## make .venv from requirements.txt (the other targets do so themselves)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "error: $(PYTHON) is not Python 3.11 or newer; install one, or name it: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" gpt2/study/environment.py

reproduce: venv  ## run all notebooks and save them with their tables and figures (ARGS="03 -p batch 4": some, differently)
	@$(RUN) -m gpt2.study.notebooks run $(ARGS)

test: lint  ## all tests and the linter (ARGS="-k allocator": some)
	@$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

measure: venv  ## record everything that needs a real GPU, on the one found here
	@$(RUN) -m gpt2.study.measure $(ARGS)

accuracy: venv  ## predict every committed recording again, and say which are equal to the byte
	@$(RUN) -m gpt2.study.accuracy $(ARGS)

lab: venv  ## open the notebooks in JupyterLab
	@$(RUN) -m gpt2.study.jupyter.lab $(ARGS)

figures: venv  ## run the notebooks again and redraw every figure, also what is up to date
	@$(RUN) -m gpt2.study.notebooks run --force $(ARGS)

html: venv  ## the study as a site to read, in build/site: no kernel, no network, works from a file
	@$(RUN) -m gpt2.study.site.build

bench: venv  ## how quick and how exact a prediction is, beside the other ways to get one without a GPU
	@$(RUN) -m gpt2.study.bench $(ARGS)

lint: venv  ## the linter alone
	@$(RUN) -m ruff check .

clean:  ## remove what a run leaves behind: build/, caches (not .venv, not results)
	@rm -rf build .pytest_cache .ruff_cache
	@find gpt2 tests notebooks -name __pycache__ -o -name .ipynb_checkpoints -o -name '.*.tmp' | xargs rm -rf
