# `make help` lists what there is. Python 3.11 or newer and make are all that is assumed; each target makes the environment it
# needs, and makes it again when the directory was moved.
#
# To choose the Python: make PYTHON=/path/to/python3.12 demo

BIN := .venv/bin
export PYTHON

.PHONY: help demo lab test quick mutants test-slow test-floor test-peers test-accelerators sync docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       train an agent here and see it adapt to tasks it never met (some minutes)'
	@echo 'make lab        open the tutorials in JupyterLab'
	@echo 'make test       what every change has to pass: notebooks in sync, notebooks, tutorials, tests'
	@echo 'make quick      the checks nearest to what changed (since SINCE=COMMIT), for three minutes'
	@echo 'make test-slow  the tests that take minutes, and all of test-floor'
	@echo 'make test-floor the same on the oldest supported packages, those of Colab'
	@echo 'make test-peers the adapters against OpenEnv, TRL and ms-swift, each in an environment of its own'
	@echo 'make test-accelerators  six programs compiled for a GPU and a TPU that are not here, against the committed table'
	@echo 'make mutants    seed sixty small faults, one at a time: do the fast tests notice?'
	@echo 'make sync       clean the notebooks; make the package, README.md and colab/ from them'
	@echo 'make docs       the notebooks as a site, in _docs/html'
	@echo 'make wheel      the wheel and the source archive in dist/, tried in an environment of their own'
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

# What trains, searches or draws millions of tasks (marked `optimized`) is compiled as it is for users: there an optimised program is worth its compilation.
AS_FOR_USERS := JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=
PYTEST := -m pytest -p no:nbval --quiet --durations 10 --durations-min 5
# Two workers. Each begins with one half of the tests, in order, because neighbours share what they compiled; an idle one takes some from the other.
TWO := -n 2 --dist worksteal
# Many slow tests wait, so there are three.
THREE := -n 3 --dist worksteal
# The cells of a notebook stay together.
NOTEBOOKS := -n 2 --dist loadfile
# Library notebooks share two processes. XLA's flags come from the environment that .ci/venv made; conftest.py does the same for pytest.
CHAPTERS = XLA_FLAGS="$${XLA_FLAGS-$$(cat .venv/xla-flags)}" .ci/step 'Library notebooks' $(BIN)/nbdev_test --n_workers 2 --timing
# Every notebook gets a kernel of its own, of this environment.
NBVAL := -m pytest --quiet --nbval-current-env --nbval-cell-timeout 600

# Programs that were compiled a week ago are compiled again, so that the cache does not grow for ever.
test:
	@.ci/venv .venv dev
	@[ ! -d "$$JAX_COMPILATION_CACHE_DIR" ] || find "$$JAX_COMPILATION_CACHE_DIR" -type f -mtime +7 -delete
	@.ci/step 'Notebooks and what is made from them agree' $(BIN)/python .ci/sync.py --check
	@$(CHAPTERS) $(if $(CI),--flags slow)
	@.ci/step 'Tutorials, outputs compared' $(BIN)/python $(NBVAL) $(NOTEBOOKS) --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg tutorials
	@.ci/step 'Tests' $(BIN)/python $(PYTEST) $(TWO) -m 'not slow' tests

# Chapters with cells flagged slow. In continuous integration, `make test` runs these cells with the others, and no chapter runs twice.
SLOW_CHAPTERS = $(shell grep -l '"\#| slow' -r nbs --include=*.ipynb | xargs -n1 basename | paste -sd '|')

test-slow: test-floor
	@.ci/venv .venv dev,docs
	@$(if $(CI),,$(CHAPTERS) --flags slow --file_re '^($(SLOW_CHAPTERS))$$')
	@$(AS_FOR_USERS) .ci/step 'Slow tests, optimised' $(BIN)/python $(PYTEST) $(THREE) -m 'slow and optimized' tests
	@.ci/step 'The other slow tests' $(BIN)/python $(PYTEST) $(THREE) -m 'slow and not optimized' tests

# The packages of Colab, as far as they can be had elsewhere. They stop at Python 3.13. All notebooks of colab/ run there, and all fast tests but those that say nothing about versions, or
# nothing that these notebooks do not (marked `newest`).
test-floor:
	@.ci/venv .venv-floor train,notebook,gym,dm,hub,server,peers,test .ci/colab-floor.txt 13
	@.ci/step 'Colab floor: requirements' .venv-floor/bin/python -m pip check
	@.ci/step 'Colab floor: the notebooks of colab/, exercises open' .venv-floor/bin/python $(NBVAL) $(NOTEBOOKS) --nbval-lax colab
	@.ci/step 'Colab floor: tests' .venv-floor/bin/python $(PYTEST) $(TWO) -m 'not slow and not newest' tests

# The compilers for GPUs and TPUs run without them. Their two environments are made once and kept; a gigabyte.
test-accelerators:
	@.ci/venv .venv dev
	@.ci/accelerators
	@$(BIN)/python $(PYTEST) -rs -m slow tests/test_compiled.py </dev/null

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

wheel:
	@.ci/venv .venv dev
	@$(BIN)/python .ci/wheel.py $(TAG)

clean:
	rm -rf .venv .venv-floor .cache .pytest_cache .hypothesis _docs _proc build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
