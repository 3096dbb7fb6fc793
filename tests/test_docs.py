"""What people read: links lead somewhere, words are spelt, pictures are described, notebooks are light and on the site."""
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import apidocs
import docs
import settings as project
import slides

pytestmark = pytest.mark.newest

NOTEBOOKS = sorted(path for folder in ("nbs", "tutorials", "colab") for path in (ROOT / folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".ci" / "site").glob("*.md")])
READ = [*PAGES, *NOTEBOOKS]


def failing(paths, wrong):
    "What `wrong` finds in each path that has anything wrong, by name."
    found = {path.relative_to(ROOT).as_posix(): wrong(path) for path in paths}
    return {name: what for name, what in found.items() if what}


def text_of(path):
    "Everything of a page or notebook that is Markdown."
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "markdown")


def without_code(markdown):
    return re.sub(r"`[^`\n]+`", "`code`", re.sub(r"^([ \t]*)(```|~~~).*?^\1\2", "", markdown, flags=re.DOTALL | re.MULTILINE))


def home(path):
    "Where a page's links start: those of the landing page at the root of the site, which mirrors the repository."
    return ROOT if path.parent.name == "site" else path.parent


# Links -------------------------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)>?(?:\s+"[^"]*")?\s*\)|\b(?:src|href)=["']([^"']+)["']|^\[[^\]]+\]:\s+(\S+)""", re.MULTILINE)


def links(path):
    return [next(filter(None, groups)) for groups in LINK.findall(without_code(text_of(path)))]


def anchors(markdown):
    "The anchors of a page's headings, as GitHub and MyST make them."
    found = set(re.findall(r'\b(?:id|name)="([^"]+)"', markdown))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(markdown.replace("`", "")), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return found


def broken(link, path):
    "What is wrong with a link, or None."
    if re.match(r"[a-z][a-z+.-]*:", link) or link.startswith("//"):
        return external(link)
    target, mark, anchor = link.partition("#")
    where = (home(path) / target).resolve() if target else path
    if target.endswith(".html") and path.parent.name == "site":  # pages that are made: the site's own names
        made = {"tutorials/index.html", "nbs/library.html", "api/index.html", "gallery/environments.html", "docs/results/index.html", "slides.html"}
        return None if target in made or target.startswith("slides/") or (ROOT / target).with_suffix(".md").exists() else "no such page"
    if not where.exists():
        return "leads nowhere"
    if not where.is_relative_to(ROOT):
        return "leads out of the repository"
    if mark and where.suffix in (".md", ".ipynb") and anchor.lower() not in anchors(text_of(where)):
        return "no such heading"
    return None


def external(link):
    if link.startswith("mailto:"):
        return None
    if not re.match(r"https://[\w-]+(\.[\w-]+)+(/|$|#|\?)", link):
        return "no address with https"
    if re.search(r"[\s<>{}|\\^`]|\.\.|//.*//|localhost|127\.0|0\.0\.0|utm_|\.$", link):
        return "junk in the address"
    return None


def test_links_lead_somewhere():
    assert len(READ) > 100
    assert failing(READ, lambda path: [f"{link}: {why}" for link in links(path) if not link.startswith(("COLAB_FIRST", "GITHUB", "data:")) and (why := broken(link, path))]) == {}


def test_a_broken_link_is_found():
    table = [
        ("README.md", False), ("docs/pool.md#settings", False), ("docs/pool.md#no-such", True), ("docs/nothing.md", True), ("#two-commands", True), ("../../../etc", True), ("http://arxiv.org/abs/1", True),
        ("https://arxiv.org/abs/2312.12044", False), ("https://x", True), ("ftp://a.org/b", True), ("https://localhost/a", True), ("https://a.org/{b}", True), ("https://a.org/b.", True), ("mailto:a@b.c", False),
    ]
    page = ROOT / "CONTRIBUTING.md"
    assert [link for link, wrong in table if bool(broken(link, page)) != wrong] == []


def test_links_are_found_in_every_spelling():
    page = ROOT / "docs" / "pool.md"
    text = '[a](b.md) ![c](d.png "t") <img src="e.png"> <a href=\'f\'> `[no](g)`\n```\n[no](h)\n```\n[ref]: i.md'
    assert [next(filter(None, m)) for m in LINK.findall(without_code(text))] == ["b.md", "d.png", "e.png", "f", "i.md"] and links(page)


def test_the_readme_leads_to_the_site_and_to_every_notebook():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"({project.settings['doc_host'].replace('%(user)s', project.settings['user'])}{project.settings['doc_baseurl']}/)" in text
    names = {path.stem for path in (ROOT / "colab").glob("*.ipynb")}
    assert names and [name for name in sorted(names) if project.badge(name) not in text] == []


# Pictures ----------------------------------------------------------------------------------------------------------------------------

class Pictures(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.bare = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img" and not (dict(attributes).get("alt") or "").strip():
            self.bare.append(self.get_starttag_text()[:120])


def undescribed(markdown):
    markdown = without_code(markdown)
    return Pictures(markdown).bare + [m[0] for m in re.finditer(r"!\[\s*\]\([^)]*\)", markdown)]


def test_pictures_are_described():
    assert failing(READ, lambda path: undescribed(text_of(path))) == {}


def test_a_picture_without_words_is_found():
    assert len(undescribed('<img src="a"> <img alt="" src="b"> ![](c) ![ ](d) ![e](f) <img src="g" alt="h">')) == 4


def test_pictures_in_outputs_are_described():
    "What is drawn as HTML. (Pictures of matplotlib have no place for words; the text around them has.)"
    def bare(path):
        html = ["".join(output["data"].get("text/html", "")) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] for output in cell.get("outputs", []) if "data" in output]
        return [bare for text in html for bare in Pictures(text).bare]
    assert failing(NOTEBOOKS, bare) == {}


# Words -------------------------------------------------------------------------------------------------------------------------------

def misspelt(texts, folder):
    "What codespell finds in texts (name -> text), one line each."
    pytest.importorskip("codespell_lib")
    for name, text in texts.items():
        (folder / name.replace("/", "__")).write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "codespell_lib", "--ignore-words", str(ROOT / "docs" / "spelling.txt"), str(folder)], capture_output=True, text=True)
    return done.stdout.replace(f"{folder}/", "").splitlines()


def test_spelling(tmp_path):
    texts = {path.relative_to(ROOT).as_posix(): re.sub(r"\]\([^)]*\)", "]", without_code(text_of(path))) for path in READ if ROOT / "colab" not in path.parents}
    assert len(texts) > 100 and misspelt(texts, tmp_path) == []


def test_a_slip_is_found(tmp_path):
    assert len(misspelt({"a.md": "An enviroment that recieves an acton."}, tmp_path)) == 1 or len(misspelt({"a.md": "An enviroment that recieves."}, tmp_path)) == 2


# Notebooks ---------------------------------------------------------------------------------------------------------------------------

def test_saved_notebooks_are_light_and_keep_no_widgets():
    def heavy(path):
        nb = json.loads(path.read_text(encoding="utf-8"))
        views = [output["data"] for cell in nb["cells"] for output in cell.get("outputs", []) if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
        found = {"state of widgets": "widgets" in nb["metadata"], "more than 1.5 MB": path.stat().st_size > 1_500_000,
                 "a view that is gone, which hides what the widget says without a kernel": any("text/html" in data for data in views)}
        return [what for what, there in found.items() if there]
    assert failing(NOTEBOOKS, heavy) == {}


# The site ----------------------------------------------------------------------------------------------------------------------------

def test_every_figure_has_a_caption():
    names = {path.stem for path in (ROOT / "docs" / "figures").iterdir()}
    assert names - docs.CAPTIONS.keys() == set() and docs.CAPTIONS.keys() - names == set()


def test_every_room_is_on_the_site():
    assert set(docs.ROOMS) - {"cli"} == {path.name for path in (ROOT / "nbs").iterdir() if path.is_dir() and any(path.rglob("*.ipynb"))}


def test_links_on_the_site():
    table = [
        ("../nbs/core/06_rules.ipynb", "tutorials", "../nbs/core/06_rules.ipynb"), ("../README.md", "docs", "../index.md"), ("../nbs/core", "docs", "../nbs/core/index.md"),
        ("../figures/probes.png", "docs/results", "../figures/probes.png"), ("../LICENSE", "docs", f"{docs.BLOB}/LICENSE"), ("../tests", "docs", docs.BLOB.replace("/blob/", "/tree/") + "/tests"),
    ]
    assert [link for link, home, there in table if docs.where(link, home) != there] == []


def test_a_page_folds_solutions_and_drops_directives():
    code = lambda source, *tags: {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}, "outputs": [{"data": {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "x"}}]}
    nb = {"cells": [code("#| hide\n1"), code("#| export\ndef f(): pass"), code("### BEGIN SOLUTION: a = ...\na = 1\n### END SOLUTION", "exercise")], "metadata": {"widgets": {}}}
    first, second = docs.prepare(nb, "tutorials")["cells"]
    assert first["source"] == "def f(): pass" and first["outputs"] == [{"data": {"text/plain": "x"}}]
    assert second["source"] == "a = 1" and "hide-input" in second["metadata"]["tags"]


def test_reference_lists_what_is_exported():
    found = apidocs.modules()
    page = apidocs.page("xland_minigrid.tutor.exercise", found["xland_minigrid.tutor.exercise"])
    for name in ("class} Exercise", "attribute} number\n:type: str", "method} __call__(answer) -> Verdict", "function} rejects(check: Exercise", "data} EXERCISES", "class} WrongAnswer"):
        assert name in page, name
    assert len(found) > 90 and apidocs.plain("a_b `c_d` <x> $y$") == r"a\_b `c_d` \<x\> \$y\$"


def test_slides_begin_at_headings_and_hide_solutions():
    long = "The first sentence says it. " + "And then there is more and more of it, which nobody reads on a slide. " * 4
    cells = [{"cell_type": "markdown", "source": f"# Title\n\n{long}\n\n## Next\n\nShort."}, {"cell_type": "code", "source": "1", "metadata": {}, "outputs": []},
             {"cell_type": "markdown", "source": "### Exercise 1.1 · Try\n\n<details><summary>Hint</summary>\n\nLook.\n\n</details>"},
             {"cell_type": "code", "source": "### BEGIN SOLUTION: a = ...\na = 1\n### END SOLUTION", "metadata": {"tags": ["exercise"]}, "outputs": [{"output_type": "stream", "text": "1"}]}]
    shown = [{"output_type": "display_data", "data": {"image/png": "x"}}]
    cells += [{"cell_type": "code", "source": source, "metadata": {}, "outputs": shown} for source in ("check.a(a)", "draw(a)", "draw()\n" * 6)]
    made = slides.slides_of({"cells": cells})["cells"]
    assert [c["metadata"]["slideshow"]["slide_type"] for c in made] == ["slide", "-", "notes", "slide", "-", "-", "subslide", "-", "-", "-", "-", "-"]
    assert len(made[1]["source"].split()) < 40 and made[2]["source"] == long.strip()
    *_, hint, answer, verdict, its_use, figure = made
    assert answer["source"] == "a = ...  # your answer here" and "<details>" in hint["source"]
    assert not answer["outputs"] + verdict["outputs"] + its_use["outputs"], "the solution shows"
    assert figure["outputs"] == shown and figure["metadata"]["folded"] and not its_use["metadata"]["folded"]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("sphinx"), pytest.importorskip("myst_nb"), pytest.importorskip("furo"), pytest.importorskip("nbconvert")
    for name, path in (("SITE", tmp_path), ("SOURCE", tmp_path / "source"), ("HTML", tmp_path / "html")):
        monkeypatch.setattr(docs, name, path)
    monkeypatch.setattr(slides, "OUT", tmp_path / "html" / "slides")
    assert docs.main() == 0
    for page in ("index", "search", "tutorials/01_anatomy_of_a_ruleset", "nbs/core/06_rules", "api/xland_minigrid.core.rules", "gallery/environments", "docs/instructors", "docs/results/throughput", "slides/06_rl2"):
        assert (tmp_path / "html" / f"{page}.html").exists(), page
    assert "BEGIN SOLUTION" not in (tmp_path / "html" / "tutorials" / "01_anatomy_of_a_ruleset.html").read_text()
    shutil.rmtree(tmp_path)
