"""README.md from nbs/index.ipynb, without Quarto.

    python .ci/readme.py

Cells marked `#| hide` are left out, directives are dropped, and links are turned to where README.md lies. Pictures are linked
(`../docs/...`), never kept as outputs: a README must not change because a figure was drawn again.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTICE = "<!-- Made from nbs/index.ipynb by `make sync`: edit that. -->\n\n"

LINK = re.compile(r'(\]\(|(?:src|href)=")(?![a-z]+:|#|/)([^)"\s]+)')
DIRECTIVE = re.compile(r"^#\|.*\n?", re.MULTILINE)


def rehome(markdown):
    "Links in the notebook start in nbs/, links in README.md one folder higher."
    return LINK.sub(lambda m: m[1] + (m[2].removeprefix("../") if m[2].startswith("../") else f"nbs/{m[2]}"), markdown)


def readable(cell):
    "The cell as a reader of README.md sees it; None where it is hidden."
    if cell.cell_type == "raw" or re.search(r"^#\|\s*hide\b", cell.source, re.MULTILINE):
        return None
    for output in cell.get("outputs", []):
        if any(kind.startswith("image/") for kind in output.get("data", {})):
            sys.exit("nbs/index.ipynb keeps a picture as an output: save it under docs/ and link it.")
    cell.source = DIRECTIVE.sub("", cell.source)
    if cell.cell_type == "markdown":
        cell.source = rehome(cell.source)
    return cell


def render(notebook):
    import nbformat
    from nbconvert import MarkdownExporter
    nb = nbformat.read(notebook, as_version=4)
    nb.metadata.setdefault("language_info", {"name": "python", "pygments_lexer": "ipython3"})
    nb.cells = [cell for cell in map(readable, nb.cells) if cell and cell.source.strip()]
    body, _ = MarkdownExporter().from_notebook_node(nb)
    return NOTICE + re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


def main():
    (ROOT / "README.md").write_text(render(ROOT / "nbs" / "index.ipynb"), encoding="utf-8")


if __name__ == "__main__":
    main()
