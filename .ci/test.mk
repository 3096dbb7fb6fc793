# What every test sees, unless the environment says otherwise. The Makefile includes this file, and conftest.py reads it where pytest is called by hand.

export JAX_PLATFORMS ?= cpu
# Notebooks and tests compile the same programs, many of them small, and so does every clone on this machine.
export JAX_COMPILATION_CACHE_DIR ?= $(HOME)/.cache/xland_minigrid/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
# Most of the time goes into compiling what then runs for a moment. (So do the flags of XLA that .ci/venv finds.)
export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
# Never the reader's own benchmarks.
export XLAND_MINIGRID_DATA ?= $(CURDIR)/.cache/data
# Tutorials train for seconds, not for minutes.
export XLAND_FAST ?= 1
export PYDEVD_DISABLE_FILE_VALIDATION ?= 1
# Bytecode is kept, even where the environment says otherwise: every notebook and many tests start a Python of their own, and compiling what it imports takes longer than running it.
export PYTHONDONTWRITEBYTECODE =
