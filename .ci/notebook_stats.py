"""What tutorials and Colab notebooks are made of, counted, beside notebooks of others.

    python .ci/notebook_stats.py           write docs/results/notebooks.md
    python .ci/notebook_stats.py --check   write nothing, fail where the page is not what would be written

Words are counted in text cells, without code, links' addresses, HTML tags and formulas. Lines of code are those that are not empty. A figure is a picture among the outputs, or an output of HTML that holds one.
"""
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import colab
from settings import ROOT

PAGE = ROOT / "docs" / "results" / "notebooks.md"
COLUMNS = ("notebook", "code cells", "text cells", "lines a code cell: median", "longest", "words", "outputs", "figures", "exercises")

# Counted in the same way over snapshots of the public repositories, stored in August 2026; a dash where it was not counted.
OTHERS = (
    ("UvA, JAX/tutorial2/Introduction_to_JAX", 69, 96, 3, 37, 8244, 39, "–", "–"),
    ("UvA, JAX/tutorial6/Transformers_and_MHAttention", 47, 54, 16, 128, 7343, 21, "–", "–"),
    ("fastcore, nbs/03a_parallel", 39, 16, 6, 22, 513, 8, "–", "–"),
    ("fastcore, nbs/01_basics", 440, 159, 4, 46, 3734, 61, "–", "–"),
    ("xland-minigrid, examples/walkthrough", 36, 42, 6, 34, 2038, 0, 0, 0),
    ("xland-minigrid, examples/train_meta_standalone", 8, 7, 49.5, 274, 55, 0, 0, 0),
)


def text_of(cell):
    return "".join(cell["source"])


def words(markdown):
    "How many words of prose."
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$\n]+\$|<[^>]+>", " ", markdown, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "] ", text)
    return len(re.findall(r"[^\W\d_][\w'’-]*", text))


def has_figure(cell):
    return any(kind.startswith("image/") or kind == "text/html" and re.search(r"<(img|svg|canvas)\b", "".join(data))
               for output in cell["outputs"] for kind, data in output.get("data", {}).items())


def count(path):
    "The row of a notebook."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code" and text_of(cell).strip()]
    lines = [sum(bool(line.strip()) for line in text_of(cell).splitlines()) for cell in code if cell["id"] != "colab-setup"]
    text = "\n\n".join(text_of(cell) for cell in cells if cell["cell_type"] == "markdown")
    middle = statistics.median(lines)
    return (path.stem, len(code), sum(cell["cell_type"] == "markdown" for cell in cells), f"{middle:g}", max(lines), words(text),
            sum(bool(cell["outputs"]) for cell in code), sum(map(has_figure, code)), sum(map(colab.is_exercise, code)))


def table(rows):
    return "\n".join(["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *("| " + " | ".join(f"{x:,}" if isinstance(x, int) else str(x) for x in row) + " |" for row in rows)])


def page():
    tutorials = [count(path) for path in sorted((ROOT / "tutorials").glob("*.ipynb"))]
    alone = [count(path) for path in (ROOT / "colab" / f"{name}.ipynb" for name in colab.ALONE) if path.exists()]
    total = ("all tutorials", *(sum(row[i] for row in tutorials) for i in (1, 2)), "", max(row[4] for row in tutorials), *(sum(row[i] for row in tutorials) for i in (5, 6, 7, 8)))
    parts = ["# Notebooks, counted", "", "Made by `python .ci/notebook_stats.py`; a test sees to it that the table is that of the notebooks beside it.", "",
             "Words are those of the text cells, without code and formulas. Lines of code are those that are not empty. How long the tutorials take to run stands in [tutorials.md](tutorials.md)."
             if (PAGE.parent / "tutorials.md").exists() else
             "Words are those of the text cells, without code and formulas. Lines of code are those that are not empty.", "",
             "## Tutorials", "", table([*tutorials, total]), ""]
    if alone:
        parts += ["## Notebooks for Colab alone", "", "They keep no outputs: they are run on an accelerator, by whoever opens them.", "", table(alone), ""]
    parts += ["## Notebooks of others", "", "Counted over stored snapshots of their public repositories, of August 2026; they may have changed since. A dash: not counted.", "", table(OTHERS), ""]
    return "\n".join(parts)


def main(*flags):
    if flags == ("--check",):
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE.relative_to(ROOT)} is not that of the notebooks: run `python .ci/notebook_stats.py`.")
    elif flags:
        sys.exit(__doc__)
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
