"""How long each tutorial takes: docs/results/tutorials.md, a row for each tutorial and a column for each set of packages.

    python .ci/times.py [--fast] [NAME ...]     run the tutorials in fresh kernels of this Python, in full or as the tests do; keep the seconds, write the page
    python .ci/times.py --page                  only write the page again

The seconds are those from the start of the kernel to its end, one tutorial at a time, with a compilation cache that is empty at first and is the tutorial's own.
"""
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import ROOT

KEPT, PAGE = ROOT / "docs" / "results" / "tutorials.json", ROOT / "docs" / "results" / "tutorials.md"


def package_set():
    return "newest" if version("jax") != "0.7.2" else "floor"


def seconds(path, fast):
    "Run a notebook; the seconds that it took. Raises where a cell fails."
    import nbformat
    from nbclient import NotebookClient
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "XLAND_FAST": "1" if fast else ""}
        begin = time.perf_counter()
        NotebookClient(nbformat.read(path, as_version=4), timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
        return time.perf_counter() - begin


def measured():
    return json.loads(KEPT.read_text()) if KEPT.exists() else {"about": {}, "rows": {}}


def keep(name, packages, fast, took):
    found = measured()
    found["about"][packages] = f"JAX {version('jax')}, ipywidgets {version('ipywidgets')}, Python {sys.version_info[0]}.{sys.version_info[1]}, {os.cpu_count()} CPU cores"
    found["rows"].setdefault(name, {})[f"{packages} {'fast' if fast else 'full'}"] = round(took, 1)
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


COLUMNS = {f"{packages} {how}": f"{label}, {how}" for how in ("full", "fast")
           for packages, label in (("newest", "newest packages"), ("floor", "Colab's oldest"))}


def page():
    found = measured()
    columns = [column for column in COLUMNS if all(column in row for row in found["rows"].values())]
    line = lambda name, row: f"| {name} | {' | '.join(f'{row[column]:.0f}' for column in columns)} |"
    total = {column: sum(row[column] for row in found["rows"].values()) for column in columns}
    lines = ["# How long the tutorials take", "",
             "Seconds on a machine with two CPU cores, from the start of a kernel to its end, one tutorial at a time, with an empty",
             "compilation cache and little other work. *Full* is what a reader runs, and *fast*, where it was measured, what `make",
             "test` runs (`XLAND_FAST=1`). The second run is quicker, because compiled programs are kept.", "",
             f"| tutorial | {' | '.join(COLUMNS[column] for column in columns)} |", f"|---|{'--:|' * len(columns)}",
             *(line(f"[{name}](../../tutorials/{name}.ipynb)", row) for name, row in sorted(found["rows"].items())), line("**all**", total), "",
             *(f"* {packages}: {about}" for packages, about in sorted(found["about"].items(), reverse=True)
               if any(column.startswith(packages) for column in columns)), "", "```sh", "python .ci/times.py; python .ci/times.py --fast     # with the Python of either environment",
             "```", ""]
    PAGE.write_text("\n".join(lines), encoding="utf-8")


def main(*words):
    if words != ("--page",):
        fast, names = "--fast" in words, [word for word in words if word != "--fast"]
        if unknown := [name for name in names if not (ROOT / "tutorials" / f"{name}.ipynb").exists()]:
            sys.exit(f"There is no tutorial {unknown[0]}.")
        for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
            if not names or path.stem in names:
                took = seconds(path, fast)
                print(f"{path.stem}: {took:.1f} s", flush=True)
                keep(path.stem, package_set(), fast, took)
    page()


if __name__ == "__main__":
    main(*sys.argv[1:])
