"""Edit notebooks as text.

    python .ci/nb.py get NOTEBOOK SCRIPT   write the notebook as a jupytext percent script
    python .ci/nb.py put SCRIPT NOTEBOOK   bring the script back, export the package, run the notebook, clean it
    python .ci/nb.py run NOTEBOOK ...      run notebooks in a fresh kernel, keep the outputs, clean them
    python .ci/nb.py update                take over what was edited in the modules of the package, then sync

`put` and `run` keep the saved outputs real: whatever a reader sees was just computed. Where the notebook is a tutorial,
its Colab copy follows; notebooks in colab/ are run to see whether they do, and keep no outputs.
"""
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import colab
import sync
from settings import ROOT

BIN = Path(sys.executable).parent


def sh(*args, cwd=ROOT):
    done = subprocess.run([str(a) for a in args], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))} failed\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")


def export(nb):
    # One exporter at a time: nbdev rewrites the shared module index.
    with open(Path(tempfile.gettempdir()) / "xland_minigrid_export.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sync.clean(nb)
        if ROOT / "nbs" in nb.parents:
            sh(BIN / "nbdev_export")
        if {ROOT / "tutorials", ROOT / "colab"} & set(nb.parents):
            colab.main()


def run(nb):
    sh(BIN / "jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace",
       "--ExecutePreprocessor.record_timing=False", "--ExecutePreprocessor.timeout=1200", nb)
    export(nb)


def update():
    from nbdev.doclinks import _build_modidx
    _build_modidx()  # nbdev_update reads its index of modules, which sync does not keep
    sh(BIN / "nbdev_update")
    sync.sync()


def main(verb=None, *paths):
    paths = [Path(p).resolve() for p in paths]
    os.chdir(ROOT)
    if verb == "get":
        sh(BIN / "jupytext", "--to", "py:percent", "--output", paths[1], paths[0])
    elif verb == "put":
        script, nb = paths
        nb.parent.mkdir(parents=True, exist_ok=True)
        # Ids are kept, and with them the history of cells; not in colab/, where the first two cells are put there by their ids.
        keep = nb.exists() and ROOT / "colab" not in nb.parents
        sh(BIN / "jupytext", *(["--update"] if keep else []), "--to", "ipynb", "--output", nb, script)
        export(nb)
        run(nb)
    elif verb == "run":
        for nb in paths:
            run(nb)
    elif verb == "update":
        update()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
