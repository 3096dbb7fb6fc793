"""The Colab copies of the tutorials: colab/NAME.ipynb from tutorials/NAME.ipynb.

    python .ci/colab.py           write them
    python .ci/colab.py --check   write nothing, fail where one is stale, missing or left over

A copy starts with a badge and one set-up cell, asks for a GPU, and keeps no outputs: it is for running, the tutorial is for
reading. Owner, repository and branch come from settings.ini.
"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import GITHUB, ROOT, badge, settings

SETUP = f'''\
#@title Setup {{ display-mode: "form" }}
import sys
from importlib.metadata import version

ON_COLAB = "google.colab" in sys.modules
if ON_COLAB:
    # Colab's own JAX, NumPy and widgets stay as they are: they fit its drivers and its front end.
    with open("/tmp/colab-constraints.txt", "w") as constraints:
        constraints.writelines(f"{{name}}=={{version(name)}}\\n" for name in ("jax", "jaxlib", "numpy", "ipywidgets"))
    %pip install --quiet --constraint /tmp/colab-constraints.txt "{settings["lib_name"]}[train,pool] @ git+https://github.com/{GITHUB}@{settings["branch"]}"

import jax
import {settings["lib_name"]}

if ON_COLAB:
    print(f"{settings["lib_name"]} {{version('{settings["lib_name"]}')}}, JAX {{jax.__version__}}, {{jax.default_backend()}}: {{jax.devices()[0].device_kind}}")
    if jax.default_backend() == "cpu":
        print("No accelerator is attached. All of this notebook runs without one, only slower. To get one: in the menu choose "
              "Runtime > Change runtime type, pick T4 GPU, press Save, and run this cell again.")'''

METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": [], "toc_visible": True},
    "kernelspec": {"display_name": "python3", "language": "python", "name": "python3"},
}

BADGE_LINE = re.compile(r"^\s*\[!\[[^\]]*\]\([^)]*colab-badge\.svg\)\]\([^)]*\)[ \t]*\n?", re.MULTILINE)


def lines(text):
    return text.splitlines(keepends=True)


def copied(cell):
    "A tutorial's cell without what was computed, and without the badge that now stands above it."
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        source = BADGE_LINE.sub("", source).strip("\n")
    kept = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": cell["metadata"], "source": lines(source)}
    return kept | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {})


def convert(tutorial, name):
    "The Colab copy of a tutorial (a notebook as a dict), as the text of its file."
    cells = [
        {"cell_type": "markdown", "id": "colab-badge", "metadata": {}, "source": [badge(name)]},
        {"cell_type": "code", "id": "colab-setup", "metadata": {"cellView": "form"}, "source": lines(SETUP),
         "execution_count": None, "outputs": []},
        *(cell for cell in map(copied, tutorial["cells"]) if cell["source"]),
    ]
    wishes = {key: tutorial["metadata"][key] for key in ("accelerator", "colab") if key in tutorial["metadata"]}
    notebook = {"cells": cells, "metadata": METADATA | wishes, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def wanted():
    "Every Colab copy there should be: path -> text."
    return {ROOT / "colab" / path.name: convert(json.loads(path.read_text(encoding="utf-8")), path.stem)
            for path in sorted((ROOT / "tutorials").glob("*.ipynb"))}


def stale():
    "The Colab copies that are not what they should be, in words."
    copies, found = wanted(), set((ROOT / "colab").glob("*.ipynb"))
    return ([f"{path.relative_to(ROOT)} has no tutorial" for path in sorted(found - copies.keys())]
            + [f"{path.relative_to(ROOT)} is {'stale' if path in found else 'missing'}" for path, text in copies.items()
               if path not in found or path.read_text(encoding="utf-8") != text])


def main(*flags):
    if flags == ("--check",):
        if complaints := stale():
            sys.exit("\n".join([*complaints, "Run `make sync`."]))
        return
    if flags:
        sys.exit(__doc__)
    copies = wanted()
    (ROOT / "colab").mkdir(exist_ok=True)
    for path in set((ROOT / "colab").glob("*.ipynb")) - copies.keys():
        path.unlink()
    for path, text in copies.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
