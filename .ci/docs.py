"""The notebooks as a site, in _docs/html, by Sphinx. Nothing is executed: a page shows what its notebook keeps.

    python .ci/docs.py

nbdev's own preparation (`proc_nbs`) is not used. It puts signatures where the code was, and these notebooks are meant to be read
with their code; it also runs every cell that imports something, outside its context.
"""
import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import GITHUB, ROOT, settings

SITE = ROOT / "_docs"
ROOMS = ("core", "envs", "benchmarks", "viz", "baselines", "pool", "interop")
BLOB = f"https://github.com/{GITHUB}/blob/{settings['branch']}"

CONF = f"""\
project = {settings["lib_name"]!r}
author = {settings["author"]!r}
copyright = {settings["copyright"]!r}
release = {settings["version"]!r}
html_title = project
html_theme = "furo"
extensions = ["myst_nb"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type", "myst.xref_missing", "myst.header", "misc.highlighting_failure"]
"""


def contents(source):
    "The table of contents, as Markdown: tutorials first, then the rooms in the order in which the data flows."
    parts = [(name, sorted(source.glob(f"{name}/*.ipynb"))) for name in ("tutorials", *ROOMS)]
    parts.append(("more", sorted(path for path in source.glob("*.ipynb") if path.stem != "index")))
    return "\n".join("\n".join(["```{toctree}", f":caption: {name}", ":hidden:", "",
                                *(path.relative_to(source).with_suffix("").as_posix() for path in pages), "```", ""])
                     for name, pages in parts if pages)


def prepare(nb, home):
    "A notebook without directives and hidden cells; links to what is no page lead to GitHub. `home` is its folder in the repository."
    kept = []
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "raw" or re.search(r"^#\|\s*(hide|default_exp)\b", source, re.MULTILINE):
            continue
        if cell["cell_type"] == "code":
            source = re.sub(r"^#[|@].*\n?", "", source, flags=re.MULTILINE)
        else:
            source = re.sub(r"(\]\()((?!https?:|#|mailto:)[^)]*?)(?<!\.ipynb)(?=\))", lambda m: m[1] + outside(m[2], home), source)
        if source.strip():
            kept.append(cell | {"source": source})
    return nb | {"cells": kept, "metadata": {"language_info": {"name": "python", "pygments_lexer": "ipython3"}} | nb["metadata"]}


def outside(link, home):
    "A relative link, as an address on GitHub; pictures stay, since they are copied."
    path = (ROOT / home / link.partition("#")[0]).resolve()
    if path.suffix in (".png", ".svg", ".gif", ".jpg") or not path.is_relative_to(ROOT):
        return link
    return f"{BLOB}/{path.relative_to(ROOT).as_posix()}"


def main():
    from sphinx.cmd.build import main as sphinx
    source, html = SITE / "source", SITE / "html"
    shutil.rmtree(SITE, ignore_errors=True)
    for path in sorted([*(ROOT / "nbs").rglob("*.ipynb"), *(ROOT / "tutorials").glob("*.ipynb")]):
        page = source / path.relative_to(ROOT / "nbs" if ROOT / "nbs" in path.parents else ROOT)
        page.parent.mkdir(parents=True, exist_ok=True)
        nb = prepare(json.loads(path.read_text(encoding="utf-8")), path.parent.relative_to(ROOT))
        page.write_text(json.dumps(nb), encoding="utf-8")
    if (ROOT / "docs").exists():  # pages reach its pictures as ../docs/...
        shutil.copytree(ROOT / "docs", SITE / "docs", ignore=shutil.ignore_patterns("*.md", "*.json"))
    index = json.loads((source / "index.ipynb").read_text(encoding="utf-8"))
    index["cells"].append({"cell_type": "markdown", "id": "contents", "metadata": {}, "source": contents(source)})
    (source / "index.ipynb").write_text(json.dumps(index), encoding="utf-8")
    (source / "conf.py").write_text(CONF, encoding="utf-8")
    status = sphinx(["-q", "-b", "html", str(source), str(html)])
    if status == 0:
        print(f"Open {(html / 'index.html').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
