"""The notebooks in colab/: a student's copy of each tutorial, and notebooks for an accelerator that exist only there.

    python .ci/colab.py           write them
    python .ci/colab.py --check   write nothing; fail if a notebook is stale, missing or left over

A copy starts with a badge and a set-up cell, and has no outputs: students read the tutorial and work in the copy. It
runs anywhere, because its set-up cell does nothing outside Colab. Its exercises are open: the lines of a tutorial
between `### BEGIN SOLUTION` and `### END SOLUTION` are left out, and follow folded below the check. To put something in
their place, write it after the opening mark, as in `### BEGIN SOLUTION: forge = ...`.

The notebooks of `ALONE` are written by hand in colab/. This program adds their badge and set-up cell and removes their
outputs. Owner, repository and branch come from settings.ini.
"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import GITHUB, ROOT, badge, badge_url, settings

def setup(name):
    "The set-up cell of a notebook."
    text = SETUP.replace("[train,pool]", f"[{EXTRAS.get(name, 'train,pool')}]")
    if name in ALONE:
        text = text.rstrip("\n") + ACCELERATOR
    if "trl" in EXTRAS.get(name, ""):
        # PyTorch needs the memory of the GPU, of which JAX would reserve most, and cannot use a TPU.
        text = text.replace("import subprocess\n", "import os\nimport subprocess\n", 1).replace(
            "\nimport jax\n", '\nos.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")\nimport jax\n', 1)
        text = text.replace("pick T4 GPU or v5e-1 TPU", "pick T4 GPU")
    return text


def source(branch):
    "The address that the set-up cells install: the branch, or the release's wheel if `branch` is a tag."
    if re.fullmatch(r"v\d+(\.\d+)*", branch):
        return f"https://github.com/{GITHUB}/releases/download/{branch}/{settings['lib_name']}-{branch[1:]}-py3-none-any.whl"
    return f"git+https://github.com/{GITHUB}@{branch}"


PYTHON = tuple(map(int, settings["min_python"].split(".")))
JAX = re.search(r'"jax>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]

SETUP = f'''\
#@title Setup {{ display-mode: "form" }}
SOURCE = "{source(settings["branch"])}"  #@param {{type: "string"}}
MADE_FOR = "{settings["version"]}"
import subprocess
import sys
from importlib.metadata import version

def install(source):
    "Install the package from a repository or a wheel. Keep Colab's JAX, NumPy and widgets."
    here = f"Python {{sys.version_info[0]}}.{{sys.version_info[1]}} and JAX {{version('jax')}}"
    if sys.version_info < {PYTHON} or tuple(map(int, version("jax").split(".")[:3])) < {tuple(map(int, JAX.split(".")))}:
        raise RuntimeError(f"This runtime has {{here}}; the notebook needs Python {settings["min_python"]} and JAX {JAX} or newer. "
                           "Choose Runtime > Change runtime type in the menu, pick the latest runtime version, and run "
                           "this cell again.")
    with open("/tmp/colab-constraints.txt", "w") as constraints:  # Colab's own versions fit its drivers and front end
        constraints.writelines(f"{{name}}=={{version(name)}}\\n" for name in ("jax", "jaxlib", "numpy", "ipywidgets"))
    address = source if ":" in source else f"file://{{source}}"
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet",
                           "--constraint", "/tmp/colab-constraints.txt",
                           f"{settings["lib_name"]}[train,pool] @ {{address}}"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{{done.stderr[-2000:]}}\\nThe installation failed; the lines above say why. SOURCE must be "
                           f"the address of a repository or a wheel: check that {{source}} exists, and run this cell "
                           "again.")

ON_COLAB = "google.colab" in sys.modules
if ON_COLAB:
    install(SOURCE)

import jax
import {settings["lib_name"]}

if ON_COLAB:
    found = version("{settings["lib_name"]}")
    print(f"{settings["lib_name"]} {{found}}, JAX {{jax.__version__}}, {{jax.default_backend()}}: {{jax.devices()[0].device_kind}}")
    if found != MADE_FOR:
        print(f"This notebook was made for version {{MADE_FOR}}. If a cell fails, open the notebook of version {{found}} "
              "from the repository.")'''

# Added for the notebooks that request an accelerator.
ACCELERATOR = '''
    if jax.default_backend() == "cpu":
        print("No accelerator is attached. Every cell also runs on a CPU, with smaller sizes. To get an accelerator, "
              "choose Runtime > Change runtime type in the menu, pick T4 GPU or v5e-1 TPU, press Save, and run this "
              "cell again.")'''

METADATA = {
    "colab": {"provenance": [], "toc_visible": True},
    "kernelspec": {"display_name": "python3", "language": "python", "name": "python3"},
}

BADGE_LINE = re.compile(r"^\s*\[!\[[^\]]*\]\([^)]*colab-badge\.svg\)\]\([^)]*\)[ \t]*\n?", re.MULTILINE)


# Notebooks without a tutorial, and the accelerator that each of them requests.
ALONE = {"train_rl2_gpu": "T4", "train_rl2_tpu": "V5E1", "train_grpo_llm": "T4", "standalone_ppo": "T4", "standalone_rl2": "T4", "figures": "T4"}
EXTRAS = {"train_grpo_llm": "train,pool,trl"}  # extras to install instead of [train,pool]

SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION(?::[ ]*([^\n]*))?\n(.*?)^[ \t]*### END SOLUTION[ \t]*\n?", re.MULTILINE | re.DOTALL)


def lines(text):
    return text.splitlines(keepends=True)


def stub(source):
    "A cell without its solution."
    return SOLUTION.sub(lambda m: f"{m[1]}{m[2] or '...'}  # your answer here\n", source).rstrip("\n")


def solution(source):
    "A cell with its solution, without the marks."
    return SOLUTION.sub(lambda m: m[3], source).rstrip("\n")


def folded(cell):
    "A folded text cell with the solution of an exercise."
    text = f"<details><summary>Solution</summary>\n\n```python\n{solution(''.join(cell['source']))}\n```\n\n</details>"
    return {"cell_type": "markdown", "id": f"{cell['id'][:55]}-solution", "metadata": {}, "source": lines(text)}


def is_exercise(cell):
    return cell["cell_type"] == "code" and "exercise" in cell["metadata"].get("tags", ())


def opened(cells):
    "The cells of a student's copy: each exercise is a stub, and its folded solution follows the cell that checks it."
    out, waiting = [], None
    for cell in cells:
        if waiting and cell["cell_type"] != "code":
            out, waiting = [*out, waiting], None
        out.append(cell | {"source": lines(stub("".join(cell["source"])))} if is_exercise(cell) else cell)
        if is_exercise(cell):
            out, waiting = (out if waiting is None else [*out[:-1], waiting, out[-1]]), folded(cell)
    return out + ([waiting] if waiting else [])


RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")


def address(link):
    "The full address of a tutorial's relative link: another notebook on Colab, or a file in the repository."
    path = (ROOT / "tutorials" / link).resolve()
    if path.parent == ROOT / "tutorials" and path.suffix == ".ipynb":
        return badge_url(path.stem)
    return f"https://github.com/{GITHUB}/blob/{settings['branch']}/{path.relative_to(ROOT).as_posix()}"


def copied(cell):
    "A tutorial's cell without outputs and without its badge, with links that work from anywhere."
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        source = RELATIVE.sub(lambda m: address(m[1]), BADGE_LINE.sub("", source).strip("\n"))
    kept = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": cell["metadata"], "source": lines(source)}
    return kept | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {})


def dressed(cells, name, wishes):
    "The text of a notebook's file: its badge, the set-up cell, then `cells`."
    cells = [
        {"cell_type": "markdown", "id": "colab-badge", "metadata": {}, "source": [badge(name)]},
        {"cell_type": "code", "id": "colab-setup", "metadata": {"cellView": "form"}, "source": lines(setup(name)),
         "execution_count": None, "outputs": []},
        *cells,
    ]
    notebook = {"cells": cells, "metadata": METADATA | wishes, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def convert(tutorial, name):
    "The text of the file of a tutorial's Colab copy. tutorial: a notebook as a dict."
    wishes = {key: tutorial["metadata"][key] for key in ("accelerator", "colab") if key in tutorial["metadata"]}
    return dressed(opened([cell for cell in map(copied, tutorial["cells"]) if cell["source"]]), name, wishes)


def redress(notebook, name):
    "The text of the file of a notebook of `ALONE`, with its badge, set-up cell and accelerator, and without outputs."
    card = ALONE[name]
    wishes = {"accelerator": "TPU" if card.startswith("V") else "GPU", "colab": METADATA["colab"] | {"gpuType": card}}
    own = [cell for cell in map(copied, notebook["cells"]) if cell["source"] and not "".join(cell["source"]).startswith("#@title Setup {")]
    return dressed(own, name, wishes)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def wanted():
    "All notebooks that belong in colab/: path -> text."
    alone = [path for path in (ROOT / "colab" / f"{name}.ipynb" for name in ALONE) if path.exists()]
    return ({ROOT / "colab" / path.name: convert(read(path), path.stem) for path in sorted((ROOT / "tutorials").glob("*.ipynb"))}
            | {path: redress(read(path), path.stem) for path in alone})


def stale():
    "A sentence for each notebook in colab/ that is stale, missing or left over."
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
