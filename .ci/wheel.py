"""Build the wheel and the source archive in dist/, and try the wheel where nothing else is installed.

    python .ci/wheel.py          build and check
    python .ci/wheel.py TAG      the same, for a release: TAG has to be v and the version of settings.ini
"""
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from settings import ROOT, settings

TRY = """
import sys
from importlib.metadata import version
import jax
import xland_minigrid
import xland_minigrid.compat as xminigrid

assert xland_minigrid.__version__ == version("xland_minigrid") == sys.argv[1]
for package in (xland_minigrid, xminigrid):
    env, params = package.make("XLand-MiniGrid-R1-9x9")
    timestep = jax.jit(env.reset)(params, jax.random.key(0))
    assert jax.jit(env.step)(params, timestep, 0).observation.shape == (5, 5, 2)
assert xland_minigrid.load_benchmark("trivial-21k").num_rulesets() == 21_000
"""


def sh(*args, **kwargs):
    subprocess.run([str(arg) for arg in args], check=True, **kwargs)


def build() -> Path:
    for folder in ("dist", "build"):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    (ROOT / settings["lib_path"] / "_modidx.py").unlink(missing_ok=True)
    sh(sys.executable, "-m", "build", "--outdir", ROOT / "dist", ROOT, stdout=subprocess.DEVNULL)
    return next((ROOT / "dist").glob("*.whl"))


def check(wheel: Path) -> None:
    "Install the wheel into a fresh environment and use it from another folder."
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/env", with_pip=True)
        python = f"{folder}/env/bin/python"
        sh(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        sh(python, "-c", TRY, settings["version"], cwd=folder, env={**os.environ, "JAX_PLATFORMS": "cpu", "XLAND_MINIGRID_DATA": folder})
        sh(f"{folder}/env/bin/xland-minigrid", "--help", cwd=folder, stdout=subprocess.DEVNULL)


def main(tag=None):
    if tag not in (None, f"v{settings['version']}"):
        sys.exit(f"The tag is {tag} and the version in settings.ini {settings['version']}: raise the version, or tag v{settings['version']}.")
    wheel = build()
    check(wheel)
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size:,} bytes; it installs and runs.")


if __name__ == "__main__":
    main(*sys.argv[1:])
