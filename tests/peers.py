"""Virtual environments for packages that ours is tested against, and that are too large to live beside it.

A test asks for one with `python_of(...)` and runs its own file there. The environment is made once, outside the repository, and used again. Where it cannot be made
(no room, no time, no package index) the test is skipped and says why; with XLAND_PEERS=1 (`make test-peers`) it fails.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("jax>=0.7.2", "flax>=0.11.2", "optax>=0.2.5", "numpy>=2.0", "tqdm", "safetensors", "platformdirs", "pillow", "rich", "websockets>=15,<18", "pytest")
CHECK = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def place_of(name: str) -> Path:
    "Where the environment of a peer is: `XLAND_NAME_VENV`, or the user's cache folder."
    import platformdirs
    return Path(os.environ.get(f"XLAND_{name.upper()}_VENV") or Path(platformdirs.user_cache_dir("xland_minigrid")) / "venvs" / name)


def works(python: Path, modules) -> bool:
    return python.exists() and subprocess.run([python, "-c", CHECK, *modules], capture_output=True, timeout=300).returncode == 0


def python_of(name: str, *attempts, modules: tuple, gigabytes: float, seconds: float = 1800.0) -> str:
    """The interpreter of a peer's environment, made if need be; skips the test where that cannot be.

    attempts: lists of requirements, tried one after the other. modules: what has to be importable then.
    """
    place = place_of(name)
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if works(python, modules):
        return str(python)
    if os.environ.get("XLAND_PEERS") == "0":
        pytest.skip(f"{name}: XLAND_PEERS=0 says that no environments are to be made, and there is none at {place}")
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free / 1e9
    if free < gigabytes:
        pytest.skip(f"{name}: {free:.1f} GB are free at {place.parent}, and the environment needs {gigabytes:g}; point XLAND_{name.upper()}_VENV elsewhere")
    if place.exists() and any(place.iterdir()) and not (place / "pyvenv.cfg").exists():
        pytest.skip(f"{name}: {place} is no virtual environment, and is left alone")
    why = "?"
    for requirements in attempts:
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True, capture_output=True, timeout=120)
            subprocess.run([python, "-m", "pip", "install", "-q", *OURS, *requirements], check=True, capture_output=True, text=True, timeout=seconds)
            if works(python, modules):
                return str(python)
            why = f"installed, but {', '.join(modules)} cannot be imported"
        except subprocess.TimeoutExpired:
            why = f"not ready within {seconds:g} s; make it by hand at {place}"
            break
        except subprocess.CalledProcessError as error:
            said = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
            why = ([line for line in said.splitlines() if "ERROR" in line] or [type(error).__name__])[-1][:200]
    shutil.rmtree(place, ignore_errors=True)
    missing = f"{name}: its environment could not be made ({why})"
    pytest.fail(missing) if os.environ.get("XLAND_PEERS") == "1" else pytest.skip(missing)


def run_there(python: str, file: str, select: str, **environ) -> str:
    "Run the tests of a file that match `select` with another interpreter. Fails with their output where they fail, or where none of them ran."
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environ}
    env.pop("XLA_FLAGS", None)
    done = subprocess.run([python, "-m", "pytest", "-q", "-rs", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT), "-W", "ignore", file, "-k", select],
                          cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-8000:] + done.stderr[-3000:]
    return done.stdout
