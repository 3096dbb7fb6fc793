# `make help` lists what there is. Python 3.11 or newer and make are all that is assumed; each target makes the environment it
# needs, and makes it again when the directory was moved.
#
# To choose the Python: make PYTHON=/path/to/python3.12 demo

BIN := .venv/bin
export PYTHON

.PHONY: help demo lab test quick mutants test-slow test-floor test-peers sync docs clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       train an agent here and see it adapt to tasks it never met (some minutes)'
	@echo 'make lab        open the tutorials in JupyterLab'
	@echo 'make test       what every change has to pass: notebooks in sync, notebooks, tutorials, tests'
	@echo 'make quick      the checks nearest to what changed (since SINCE=COMMIT), for three minutes'
	@echo 'make test-slow  the tests that take minutes, and all of test-floor'
	@echo 'make test-floor the same on the oldest supported packages, those of Colab'
	@echo 'make test-peers the adapters against OpenEnv, TRL and ms-swift, each in an environment of its own'
	@echo 'make mutants    seed sixty small faults, one at a time: do the fast tests notice?'
	@echo 'make sync       clean the notebooks; make the package, README.md and colab/ from them'
	@echo 'make docs       the notebooks as a site, in _docs/html'
	@echo 'make clean      remove environments, caches and built files; runs/ stays'

demo:
	@.ci/venv .venv train
	@$(BIN)/xland-minigrid demo

# The students' copies, with their exercises open; outside Colab their set-up cell does nothing. The solved ones are beside them, in tutorials/.
lab:
	@.ci/venv .venv lab
	@$(BIN)/jupyter lab colab/00_five_minutes.ipynb

ifneq ($(filter test% quick mutants,$(MAKECMDGOALS)),)
include .ci/test.mk
endif

# What computes for long is compiled as it is for users.
AS_FOR_USERS := JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=
PYTEST := -m pytest --quiet --durations 10 --durations-min 5
# Two workers, each file on one of them: the tests of a file share what they compiled.
TWO := -n 2 --dist loadfile
# Slow tests share little, and a file of them can take half of the time: who has nothing left to do takes some from the other.
STEAL := -n 2 --dist worksteal
# Every notebook gets a kernel of its own, of this environment.
NBVAL := -m pytest --quiet --nbval-current-env --nbval-cell-timeout 600

# Chapters that draw and measure much and that nothing else rests on: make test-slow runs them.
LATER := ^[_.]|^(06_figures|08_gallery|10_demonstrations|11_probes|13_experiments|16_throughput|17_scaling|18_profile|19_layout_cost|20_open_cost|21_trainers)[.]

test:
	@.ci/venv .venv dev
	@.ci/step 'Notebooks and what is made from them agree' $(BIN)/python .ci/sync.py --check
	@.ci/step 'Library notebooks' $(BIN)/nbdev_test --n_workers 2 --timing --skip_file_re '$(LATER)'
	@.ci/step 'Tutorials, outputs compared' $(BIN)/python $(NBVAL) $(TWO) --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg tutorials
	@printf '\n=== Tests\n'
	@$(BIN)/python $(PYTEST) $(TWO) -m 'not slow' tests </dev/null

# Tutorials that train or measure longer for a reader than for a test.
LONGER = $(shell grep -l XLAND_FAST tutorials/*.ipynb)

# What trains, searches or draws millions of tasks is compiled as it is for users: there an optimised program is worth its compilation.
LONG := $(addprefix tests/test_,$(addsuffix .py,baselines benchmarks encoders evaluation exact lab oracle parity pool_grpo))

test-slow: test-floor
	@.ci/venv .venv dev,docs
	@XLAND_FAST= $(AS_FOR_USERS) .ci/step 'Tutorials in full' $(BIN)/python $(NBVAL) $(TWO) --nbval-lax $(LONGER)
	@printf '\n=== Slow tests that compute for long\n'
	@$(AS_FOR_USERS) $(BIN)/python $(PYTEST) $(STEAL) -m slow $(LONG) </dev/null
	@printf '\n=== The other slow tests\n'
	@$(BIN)/python $(PYTEST) $(STEAL) -m slow $(LONG:%=--ignore %) tests </dev/null

# The packages of Colab, as far as they can be had elsewhere. They stop at Python 3.13. All notebooks of colab/ run, and of the library what draws, what is shown in a page, what
# talks to other packages, and the chapters that make test leaves out; the rest of the library is there in its tests. Left out are the comparisons with other packages, whose
# behaviour was settled on the newest packages, networks in all their variants, many devices, and what is only about words, files and searches: minutes that find nothing here.
NOT_ON_THE_FLOOR := parity cores encoders evaluation scale scaling trainers listings minigrid language exact solve oracle difficulty statistics splits pickles probes layouts open demonstrations curriculum \
	docs tutorials colab pool_curriculum pool_docs tutor_sessions pool_frozen_lake pool_group pool_playground pool_sudoku interop_swift
FLOOR_TOO := $(wildcard $(addprefix nbs/,benchmarks/1[01]_* baselines/13_* baselines/1[6-9]_* baselines/2[0-3]_* pool/0[78]_* pool/1[67]_*))
test-floor:
	@.ci/venv .venv-floor train,notebook,gym,dm,hub,server,peers,test .ci/colab-floor.txt 13
	@.ci/step 'Colab floor: requirements' .venv-floor/bin/python -m pip check
	@.ci/step 'Colab floor: library notebooks, each in a fresh kernel' .venv-floor/bin/python $(NBVAL) $(TWO) --nbval-lax nbs/viz nbs/interop $(FLOOR_TOO)
	@.ci/step 'Colab floor: the notebooks of colab/, exercises open' .venv-floor/bin/python $(NBVAL) $(TWO) --nbval-lax colab
	@printf '\n=== Colab floor: tests\n'
	@.venv-floor/bin/python $(PYTEST) $(TWO) -m 'not slow' $(NOT_ON_THE_FLOOR:%=--ignore tests/test_%.py) tests </dev/null

# OpenEnv, TRL and ms-swift want environments of their own, which are made once and kept; the first time takes about ten minutes and six gigabytes.
test-peers: export XLAND_PEERS := 1
test-peers:
	@.ci/venv .venv dev
	@$(BIN)/python $(PYTEST) -m slow tests/test_interop_openenv.py tests/test_interop_trl.py tests/test_interop_swift.py </dev/null

quick:
	@.ci/venv .venv dev
	@$(BIN)/python .ci/quick.py $(SINCE:%=--since %)

mutants:
	@.ci/venv .venv dev
	@$(BIN)/python .ci/mutants.py $(SEED:%=--seed %)

sync:
	@.ci/venv .venv dev
	@$(BIN)/python .ci/sync.py

docs:
	@.ci/venv .venv docs
	@$(BIN)/python .ci/docs.py

clean:
	rm -rf .venv .venv-floor .cache .pytest_cache .hypothesis _docs _proc build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
