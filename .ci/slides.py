"""Slides from tutorials, by nbconvert and reveal.js, in _docs/html/slides.

    python .ci/slides.py [NAME ...]   the given tutorials (default: 00, 01 and 06)

Nothing about slides is stored in a tutorial. A heading begins a slide; a section that grows too tall goes on below it. Of a long paragraph the first sentences are shown, and all of it stands in the
speaker's notes (press S); a summary is shown in full. Long code that draws, and code that only imports, is folded. Exercises show their stubs, and neither the solution nor the verdict on it. reveal.js comes
from the package sphinx-revealjs and is copied beside the slides, so that they need no network; formulas do.
"""
import importlib.util
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import colab
from settings import ROOT

OUT = ROOT / "_docs" / "html" / "slides"
TEMPLATE = Path(__file__).parent / "site" / "slides.html.j2"
NAMES = ("00_five_minutes", "01_anatomy_of_a_ruleset", "06_rl2")
ROOM = 20  # lines on a slide

BLOCK = re.compile(r"<details>.*?</details>|```.*?\n```|\$\$.*?\$\$|(?:^[ \t]*(?:[*|-]|\d+\.) .*(?:\n(?!\n).*)*)|^#+ .*$|(?:^(?!#|```|<details>).+\n?)+", re.DOTALL | re.MULTILINE)


def blocks(text):
    "A cell of text in paragraphs, lists, tables, folded parts and headings."
    parts, inside = [], ""
    for piece in re.split(r"\n\s*\n", text):  # what holds empty lines is put together again
        inside = f"{inside}\n\n{piece}" if inside else piece
        if inside.count("<details>") == inside.count("</details>") and inside.count("```") % 2 == 0 and inside.count("$$") % 2 == 0:
            parts, inside = [*parts, inside.strip("\n")], ""
    return [part for part in [*parts, inside] if part.strip()]


def shortened(paragraph, words=34):
    "Its first sentences, about so many words; None where that is all of it."
    if re.match(r"\s*([#|<>!$`*]|- |\d+\. )", paragraph):
        return None
    sentences = re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z(*`\[¿\"])", " ".join(paragraph.split()))
    kept = sentences[0]
    for sentence in sentences[1:]:
        if len(kept.split()) + len(sentence.split()) > words or sentence.count("(") != sentence.count(")"):
            break
        kept += " " + sentence
    return kept if len(kept) < len(" ".join(paragraph.split())) else None


PICTURES = ("image/png", "image/svg+xml", "text/html")


def draws(cell):
    return any(kind in output.get("data", {}) for output in cell["outputs"] for kind in PICTURES)


def is_folded(cell):
    "Whether the code is shown on request only: it draws and is long, or it only imports."
    lines = [line for line in cell["source"].splitlines() if line.strip()]
    return len(lines) > 5 and draws(cell) or all(re.match(r"import |from \S+ import ", line) for line in lines)


def height(cell):
    "How many lines of text a cell takes, about: 35 of the 700 pixels of a slide each, where a line of code has 22."
    if cell["cell_type"] == "markdown":
        text = re.sub(r"<details>.*?</details>", "folded", cell["source"], flags=re.DOTALL)
        return 0.8 + 0.85 * sum(1 + len(line) // 100 for line in text.splitlines()) + (11 if re.search(r"<img|!\[", text) else 0)
    code = 1.8 if cell["metadata"].get("folded") else 0.7 + 0.62 * sum(1 + len(line) // 115 for line in cell["source"].splitlines())
    for output in cell["outputs"]:
        data = output.get("data", {})
        text = "".join(output.get("text", data.get("text/plain", "")))
        code += 13 if "text/html" in data else 10 if "image/png" in data or "image/svg+xml" in data else 0.4 + 0.62 * (text.count("\n") + 1)
    return code


def cell_of(kind, source, slide, outputs=()):
    made = {"cell_type": kind, "metadata": {"slideshow": {"slide_type": slide}}, "source": source}
    return made | ({"outputs": list(outputs), "execution_count": None} if kind == "code" else {})


def pieces(nb):
    "The cells of a notebook as smaller ones: (cell, notes) each."
    import docs
    exercise, summary, above, values = False, False, "", []  # values: the names of answers that are no functions
    for cell in nb["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            above = source
            for part in blocks(colab.BADGE_LINE.sub("", source)):
                if part.startswith("#"):
                    exercise, summary = (part.lstrip("# ").startswith(word) for word in ("Exercise", "Summary"))
                short = None if exercise or summary else shortened(part)
                yield cell_of("markdown", short or part, ""), part.strip() if short else None
        elif cell["cell_type"] == "code" and source.strip():
            if colab.is_exercise(cell):
                values += re.findall(r"^(\w+) = \.\.\.", colab.stub(source), re.MULTILINE)
                yield cell_of("code", colab.stub(source), ""), None
            else:
                verdict, shows_answer = re.match(r"check\.\w+\(.*\)$", source), any(re.search(rf"(?<!\.)\b{name}\b", source) for name in values)
                made = cell_of("code", source, "", () if verdict or shows_answer else cell["outputs"])
                made["metadata"] |= {"alt": docs.described(above), "folded": is_folded(made)}
                yield made, None


def slides_of(nb):
    "The same notebook with what nbconvert needs to make slides of it."
    made, notes, filled, bare = [], [], 0, False  # bare: so far the slide is a heading alone
    for cell, note in pieces(nb):
        heading = re.match(r"(#+) ", cell["source"]) if cell["cell_type"] == "markdown" else None
        tall = height(cell)
        full = filled > 5 and filled + tall > ROOM and not cell["source"].startswith("<details>")  # an answer stays with its question
        kind = "slide" if heading and len(heading[1]) <= 2 else "subslide" if not bare and (heading or full) else "-"
        if kind != "-":
            made, notes, filled = [*made, *notes], [], 0
        cell["metadata"]["slideshow"]["slide_type"] = kind
        made.append(cell)
        filled, bare = filled + tall, bool(heading)
        notes += [cell_of("markdown", note, "notes")] if note else []
    return {"cells": [*made, *notes], "metadata": {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}, "nbformat": 4, "nbformat_minor": 4}


def linked(source, name):
    "Relative links and pictures as they are two floors up on the site: slides/ lies beside docs/."
    import docs
    source = re.sub(r'(src="|\]\()\.\./docs/((?:[\w./-]+)\.(?:png|gif|svg))', r"\1../_images/\2", source)
    return docs.TARGET.sub(lambda m: m[1] + (m[2] if m[2].startswith("../_images") else re.sub(r"\.(ipynb|md)(?=#|$)", ".html", docs.where(m[2], "tutorials"))), source)


def reveal():
    "Copy reveal.js beside the slides; its address, which is that of the copy or, where sphinx-revealjs is not installed, on the network."
    spec = importlib.util.find_spec("sphinx_revealjs")
    if spec is None:
        print("sphinx-revealjs is not installed: the slides will load reveal.js from unpkg.com.", file=sys.stderr)
        return "https://unpkg.com/reveal.js@5.2.1"
    home = Path(spec.origin).parent / "_static" / "revealjs"
    for name in ("LICENSE", "dist/reveal.css", "dist/reset.css", "dist/reveal.js", "dist/theme/white.css", "plugin/notes/notes.js", "plugin/notes/speaker-view.html"):
        if (home / name).exists():
            (OUT / "reveal" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(home / name, OUT / "reveal" / name)
    for folder in (home / "dist" / "theme" / "fonts",):
        if folder.exists():
            shutil.copytree(folder, OUT / "reveal" / "dist" / "theme" / "fonts", dirs_exist_ok=True)
    return "reveal"


def render(nb, name, prefix):
    import nbformat
    from nbconvert import SlidesExporter
    nb = slides_of(nb)
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = linked(cell["source"], name)
    title = nb["cells"][0]["source"].splitlines()[0].lstrip("# ")
    nb["metadata"]["title"] = title
    exporter = SlidesExporter(template_file=str(TEMPLATE), reveal_url_prefix=prefix, reveal_theme="white")
    math = any(re.search(r"\$[^$\n]+\$", cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "markdown")
    body, _ = exporter.from_notebook_node(nbformat.from_dict(nb), resources={"math": math, "metadata": {"name": name}})
    return body


def main(*names):
    import nbformat
    OUT.mkdir(parents=True, exist_ok=True)
    prefix = reveal()
    for name in names or NAMES:
        path = ROOT / "tutorials" / f"{name}.ipynb"
        if not path.exists():
            if names:
                sys.exit(f"There is no tutorial {name}.")
            continue
        (OUT / f"{name}.html").write_text(render(nbformat.read(path, as_version=4), name, prefix), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
