# One command each; the first one run makes .venv. Needs python3 (3.11 or newer), git and a C++ compiler.
#   make demo    what this library does, in under three minutes; writes out/demo
#   make check   lint, types and the fast tests: under two minutes on two cores
#   make test    all tests but the heavy ones: about ten minutes on two cores
#   make test-all   all tests: half an hour   make lint   ruff        make types   mypy
#   make bench   all benchmarks   make docs   the site of docs/ in out/site
#   make evidence   the experiments behind docs/evidence.md (hours; DATA=folder)   make clean   remove all that was made

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
LIGHT := .venv/.installed-package
# Each process takes half of the tests, in the order of the files, so that what a file compiles is compiled once.
# The first to end takes over some of what is left to the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint types bench docs evidence clean check-tools

help:
	@sed -n '2,7s/^# //p' Makefile

demo: $(LIGHT)
	@$(BIN)/dpquant demo

check: lint types
	$(PYTEST) -m "not slow"

test: $(STAMP)
	$(PYTEST) -m "not heavy"

test-all: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

bench: $(STAMP)
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Runs that are done are skipped, so this goes on where it was. Without DATA only digits are trained; with PAPER=1 also the
# published settings at their size, which take weeks of two cores.
RUNS := out/evidence
SIGNS := schedules_gtsrb variations_gtsrb schedules_gtsrb_medium schedules_gtsrb_tuned adam_gtsrb
IMAGES := $(SIGNS) schedules_cifar10 schedules_cifar10_tuned
RECIPES := recipes_gtsrb recipes_gtsrb_operands recipes_cifar10 recipes_gtsrb_tuned recipes_cifar10_tuned recipes_snli \
  schedules_int4_gtsrb rate_gtsrb
PAPERS := paper_gtsrb paper_gtsrb_8 paper_cifar10 paper_fashion paper_snli
SWEEPS := recipes_digits degradation schedules_digits variations adam_digits rate_digits $(if $(DATA),$(RECIPES) $(IMAGES) pareto_gtsrb $(if $(PAPER),$(PAPERS)))
evidence: $(STAMP)
	@set -e; for name in $(SWEEPS); do \
	  $(BIN)/dpquant sweep experiments/$$name.toml --out $(RUNS)/$$name --workers 2 $(if $(DATA),--data $(DATA)); \
	  $(BIN)/dpquant report $(RUNS)/$$name -o $(RUNS)/$$name.html --csv $(RUNS)/$$name.csv --markdown $(RUNS)/$$name.md \
	    --times $(if $(DATA),--data $(DATA)); \
	done
	@set -e; for name in estimator_ranks gradient_norms training_signal known_ranks; do \
	  $(BIN)/python experiments/$$name.py --task cnn-digits --out $(RUNS)/$${name}_digits.json; \
	done
ifdef DATA
	$(BIN)/python experiments/estimator_ranks.py --task cnn-gtsrb-small --data $(DATA) --at 2 4 --oracle 4 --repeats 4 \
	  --out $(RUNS)/estimator_ranks_gtsrb.json
	$(BIN)/python experiments/training_signal.py --task cnn-gtsrb-small --data $(DATA) \
	  --out $(RUNS)/training_signal_gtsrb.json
	$(BIN)/python experiments/known_ranks.py --task cnn-gtsrb-small --data $(DATA) --epochs 6 --epsilon 4 \
	  --out $(RUNS)/known_ranks_gtsrb.json
	$(BIN)/python experiments/spared_sites.py --task cnn-gtsrb-small --data $(DATA) --out $(RUNS)/spared_sites_gtsrb.json
endif
	$(BIN)/python experiments/figures.py --results $(RUNS) --out $(RUNS)

clean:
	rm -rf .venv out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, alone and by the range in pyproject.toml: opacus, torchvision and transformers ask for torch
# without an upper bound, and a newer torch brings a CUDA build with it. The demo needs the package alone.
$(LIGHT): pyproject.toml | check-tools
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "error: '$(PYTHON) -m venv' failed; install your system's venv package (python3-venv on Debian)." >&2; exit 1; }
	@echo "installing torch into .venv, once…"
	@$(BIN)/python -m pip install --quiet "$$($(BIN)/python -c 'import tomllib; \
	  deps = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
	  print(next(d for d in deps if d.startswith("torch")))')"
	@echo "installing dpquant-compile and what it needs…"
	@$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(STAMP): $(LIGHT)
	$(BIN)/python -m pip install --quiet -e ".[examples,dev,docs]"
	@touch $@

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed; '$(PYTHON)' is missing or older. Try: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@for cxx in "$$CXX" g++ clang++ c++; do \
	  [ -n "$$cxx" ] && command -v $${cxx%% *} >/dev/null 2>&1 && exit 0; \
	done; echo "error: no C++ compiler (g++, clang++ or c++) was found; torch.compile needs one." >&2; exit 1
