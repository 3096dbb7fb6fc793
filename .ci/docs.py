"""The site, in _docs/html, by Sphinx and MyST-NB: tutorials, chapters, reference, galleries, tables, slides.

    python .ci/docs.py             build it; a warning is an error
    python .ci/docs.py --lenient   warnings are only shown
    python .ci/docs.py --links     build nothing; check that the external links still work

No notebook is executed: a page shows the saved outputs of its notebook. Pages have the same layout as their sources, so a relative link works in both places. A link to a file that is not a page of the site
leads to GitHub. The pictures of the environments are drawn here, once (.cache/docs keeps them), and signatures and docstrings are read from the source (apidocs.py).
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import apidocs
import colab
from settings import GITHUB, ROOMS, ROOT, badge, badge_url, settings

SITE = ROOT / "_docs"
SOURCE, HTML = SITE / "source", SITE / "html"
HOUSE = Path(__file__).parent / "site"  # the landing page and what all pages look like
BLOB = f"https://github.com/{GITHUB}/blob/{settings['branch']}"
PICTURES = (".png", ".svg", ".gif", ".jpg")

# A caption for each figure; a test checks that every figure has one.
CAPTIONS = {
    "figure_01_rule": "Figure 1 of the paper, redrawn: a near rule takes effect. The agent puts one object next to another, and both become a third.",
    "figure_02_path": "Figure 2: the shortest solution of a task.",
    "figure_03_tree": "Figure 3: the same task as a tree, from the goal at its root to the objects that lie in the room at the start.",
    "figure_04_rules": "Figure 4: numbers of rules in the tasks of each benchmark.",
    "figure_14_layouts": "Figure 14: the five layouts, with their doors and objects.",
    "figure_15_minigrid": "Figure 15: environments of the MiniGrid family.",
    "grpo_frozen_lake": "A small transformer learns FrozenLake by GRPO: success on maps that it was not trained on, and the length of its answers, during training.",
    "probes": "The starts of the thirty probes.",
    "statistics_trivial_1m": "The million tasks of `trivial-1m`: goals, rules, objects, depth.",
    "statistics_small_1m": "The same for `small-1m`.",
    "statistics_medium_1m": "The same for `medium-1m`.",
    "statistics_high_1m": "The same for `high-1m`.",
}

CONF = f"""\
project = {settings["lib_name"]!r}
author = {settings["author"]!r}
copyright = {settings["copyright"]!r}
release = version = {settings["version"]!r}
html_title = project
html_baseurl = "{settings["doc_host"]}{settings["doc_baseurl"]}/"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_theme_options = dict(light_logo="mark.svg", dark_logo="mark.svg", footer_icons=[dict(name="GitHub", url="https://github.com/{GITHUB}", html="GitHub", **{{"class": ""}})])
html_copy_source = False
html_show_sphinx = False
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_code_prompt_show = "Show the solution"  # the only cells that are folded
nb_code_prompt_hide = "Hide the solution"
myst_enable_extensions = ["dollarmath", "html_image", "colon_fence"]
myst_heading_anchors = 4
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries = False
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure", "mystnb.mime_priority", "ref.python"]
"""


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def text_of(cell):
    return "".join(cell["source"])


def write(path, text):
    path = SOURCE / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def toctree(pages, caption="", depth=1):
    "A hidden table of contents."
    return "\n".join(["```{toctree}", *([f":caption: {caption}"] if caption else []), ":hidden:", f":maxdepth: {depth}", "", *pages, "```", ""])


# Links -------------------------------------------------------------------------------------------------------------------------------

TARGET = re.compile(r'(\]\(|\b(?:src|href)=")(?![a-z]+:|#|/)([^)"\s]+)(?=[)"])')


def relink(markdown, home):
    "Markdown of a file in the folder `home` of the repository, with what is no page of the site linked on GitHub."
    return TARGET.sub(lambda m: m[1] + where(m[2], home), markdown)


def where(link, home):
    "A relative link, as the site has it."
    target, mark, anchor = link.partition("#")
    path = (ROOT / home / target).resolve()
    if not path.is_relative_to(ROOT):
        return link
    name = path.relative_to(ROOT).as_posix()
    up = "../" * len(Path(home).parts)
    if name in ("README.md", "nbs/index.ipynb"):
        return f"{up}index.md"
    if path.is_dir() and (name.removeprefix("nbs/") in ROOMS or name in ("docs/results", "docs/figures", "tutorials")):
        return f"{up}{name}/index.md"
    if is_page(name) or (path.suffix in PICTURES and name.startswith("docs/")):
        return link
    return f"https://github.com/{GITHUB}/{'tree' if path.is_dir() else 'blob'}/{settings['branch']}/{name}{mark}{anchor}"


def is_page(name):
    return bool(re.fullmatch(r"(nbs|tutorials)/.*\.ipynb|docs/.*\.md|CHANGELOG\.md|CONTRIBUTING\.md", name)) and (ROOT / name).exists()


# Notebooks ---------------------------------------------------------------------------------------------------------------------------

def prepare(nb, home):
    "A notebook without directives and hidden cells, its solutions folded. `home` is its folder in the repository."
    kept, above = [], ""
    for cell in nb["cells"]:
        source, made = text_of(cell), {}
        if cell["cell_type"] == "raw" or re.search(r"^#\|\s*(hide|default_exp)\b", source, re.MULTILINE):
            continue
        if colab.is_exercise(cell):
            source = colab.solution(source)
            made["metadata"] = cell["metadata"] | {"tags": [*cell["metadata"]["tags"], "hide-input"]}
        if cell["cell_type"] == "code":
            source = re.sub(r"^#[|@].*\n?", "", source, flags=re.MULTILINE)
            made["outputs"] = [shown(output) for output in cell["outputs"]]
            if has_picture(cell):
                made["metadata"] = made.get("metadata", cell["metadata"]) | {"mystnb": {"image": {"alt": described(above)}}}
        else:
            above = source
            source = relink(source, home)
        if source.strip():
            kept.append(cell | {"source": source.strip("\n")} | made)
    return nb | {"cells": kept, "metadata": {"language_info": {"name": "python", "pygments_lexer": "ipython3"}, "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}}


def described(text):
    "A description for the figures of a cell: the end of the text above it, since that says what they show."
    text = re.sub(r"<[^>]+>|[*`#$]", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    said = paragraphs[-1] if paragraphs else ""
    return f"Output of the cell above. {said[:177] + '...' if len(said) > 180 else said}".strip()


def has_picture(cell):
    return any(kind.startswith("image/") for output in cell["outputs"] for kind in output.get("data", {}))


def shown(output):
    "An output without the view of a widget, whose kernel is gone."
    return output | {"data": {kind: data for kind, data in output["data"].items() if "widget" not in kind}} if "data" in output else output


def under_the_title(nb, line):
    "The notebook with a line below its title."
    first = nb["cells"][0]
    title, _, rest = text_of(first).partition("\n")
    return nb | {"cells": [first | {"source": f"{title}\n\n{line}\n\n{rest}"}, *nb["cells"][1:]]}


def title_of(path):
    "The first heading of a notebook or of a Markdown file."
    text = text_of(read(path)["cells"][0]) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]


def put_notebook(path, line):
    name = path.relative_to(ROOT)
    nb = under_the_title(prepare(read(path), name.parent.as_posix()), line)
    write(name, json.dumps(nb))
    return name


def tutorials():
    "Pages of the tutorials, and the one that lists them."
    rows = ["| | tutorial | time | |", "|---|---|---|---|"]
    pages = []
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        name = put_notebook(path, f"{badge(path.stem)}  [notebook]({BLOB}/tutorials/{path.name})")
        told = re.search(r"^\*((?:\d+|[A-Z]\w+) minutes)\b", text_of(read(path)["cells"][0]), re.MULTILINE)
        rows.append(f"| {path.stem[:2] if path.stem[:2].isdigit() else 'appendix'} | [{title_of(path)}]({path.name}) | {told[1] if told else ''} | [Colab]({badge_url(path.stem)}) |")
        pages.append(name.stem)
    text = ["# Tutorials", "", "Each is a notebook that runs on a laptop or on Colab, with questions, and exercises that check themselves. They build on each other a little. If you are in a hurry, read 00, 01 and 06.", "",
            *rows, "", "In Colab, exercises are open and their solutions folded. Here every exercise shows its check; the solution is behind *Show the solution*.", "",
            "If you teach, the [instructor's guide](../docs/instructors.md) has schedules, set-ups and grading.", "", "## Notebooks for Colab alone", "", *colab_alone(), "", toctree(pages)]
    write("tutorials/index.md", "\n".join(text))


def colab_alone():
    found = [(ROOT / "colab" / f"{name}.ipynb", card) for name, card in colab.ALONE.items() if (ROOT / "colab" / f"{name}.ipynb").exists()]
    rows = []
    for path, card in found:
        title = next((m[1] for cell in read(path)["cells"] if (m := re.search(r"^# (.+)$", text_of(cell), re.MULTILINE)) and cell["cell_type"] == "markdown"), path.stem)
        rows.append(f"| [{title}]({BLOB}/colab/{path.name}) | {card} | [Colab]({badge_url(path.stem)}) |")
    return ["| notebook | accelerator | |", "|---|---|---|", *rows] if rows else []


def chapters():
    "Pages of the library's notebooks, a page for each subpackage, and one for all of them."
    for room, about in ROOMS.items():
        folder, pages, rows = ROOT / "nbs" / room, [], ["| chapter | |", "|---|---|"]
        for path in sorted(folder.rglob("*.ipynb")):
            inside = path.relative_to(folder).with_suffix("").as_posix()
            put_notebook(path, links_of(path))
            said = re.search(r"^> (.+)$", text_of(read(path)["cells"][0]), re.MULTILINE)
            rows.append(f"| [{inside}]({inside}.ipynb) | {said[1] if said else ''} |")
            pages.append(inside)
        if pages:
            write(f"nbs/{room}/index.md", "\n".join([f"# {room}", "", about, "", *rows, "", toctree(pages)]))
    put_notebook(ROOT / "nbs" / "90_cli.ipynb", links_of(ROOT / "nbs" / "90_cli.ipynb"))
    rooms = [room for room in ROOMS if (SOURCE / "nbs" / room / "index.md").exists()]
    write("nbs/library.md", "\n".join([
        "# Library", "", "The notebooks *are* the source of the package: each is a chapter that explains one module, shows what it does and tests it. They follow the data:", "",
        "| subpackage | contents |", "|---|---|", *(f"| [{room}]({room}/index.md) | {ROOMS[room]} |" for room in rooms),
        f"| [cli](90_cli.ipynb) | {ROOMS['cli']} |", "", toctree([*(f"{room}/index" for room in rooms), "90_cli"])]))


def links_of(path):
    "What belongs to a chapter: its module's page, its source."
    name = path.relative_to(ROOT).as_posix()
    exported = re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(text_of(cell) for cell in read(path)["cells"]), re.MULTILINE)
    module = exported and f"{settings['lib_name']}.{exported[1]}"
    known = module in apidocs.modules()
    up = "../" * (name.count("/"))
    return " · ".join([*([f"[`{module}`]({up}api/{module}.md)"] if known else []), f"[notebook]({BLOB}/{name})"])


# Reference ---------------------------------------------------------------------------------------------------------------------------

def reference():
    "The pages of apidocs, by subpackage."
    found, parts = apidocs.modules(), []
    for module, path in found.items():
        write(f"api/{module}.md", apidocs.page(module, path))
    for room in ROOMS:
        rows = [f"| [`{module}`]({module}.md) | {apidocs.plain(apidocs.summary(path))} |" for module, path in found.items() if module.split(".")[1] == room]
        if rows:
            parts += [f"## {room}", "", "| module | |", "|---|---|", *rows, ""]
    top = apidocs.reexports(apidocs.PACKAGE / "__init__.py")
    names = ", ".join(f"{{py:obj}}`{name} <{home_of(name, found)}>`" for name in top if home_of(name, found))
    write("api/index.md", "\n".join(["# Reference", "", f"Signatures and docstrings of every module. These names are in `{settings['lib_name']}` itself: {names}.", "", *parts, toctree(found)]))


def home_of(name, found):
    "The full name of what the package re-exports."
    for module, path in found.items():
        if name in apidocs.exports(apidocs.parsed(path)):
            return f"{module}.{name}"
    return None


def tables():
    "Pages of docs/, the list of measured tables, the figures with their captions."
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT)
        write(name, relink(path.read_text(encoding="utf-8"), name.parent.as_posix()))
    shutil.copytree(ROOT / "docs", SOURCE / "docs", dirs_exist_ok=True, ignore=lambda folder, names: [n for n in names if Path(n).suffix not in (*PICTURES, "")])
    results = sorted((ROOT / "docs" / "results").glob("*.md"))
    write("docs/results/index.md", "\n".join(["# Measured", "", "Each table names the command that made it, the machine and the date.", "", *(f"* [{title_of(path)}]({path.name})" for path in results), "",
                                               toctree([path.stem for path in results])]))
    parts = ["# Figures", "", "`python .ci/figures.py` redraws those of the paper that show the world, `python .ci/gallery.py` the probes.", ""]
    for path in sorted((ROOT / "docs" / "figures").iterdir()):
        if path.suffix == ".png" or path.suffix == ".svg" and not path.with_suffix(".png").exists():
            caption = CAPTIONS.get(path.stem, path.stem.replace("_", " "))
            parts += [f":::{{figure}} {path.name}", f":alt: {re.sub('[`]', '', caption)}", ":class: on-white", "", caption, ":::", ""]
    write("docs/figures/index.md", "\n".join(parts))


def environments():
    "A picture of the start of every registered environment, drawn once and kept in .cache/docs."
    code = sorted([*(apidocs.PACKAGE / "core").glob("*.py"), *(apidocs.PACKAGE / "envs").glob("*.py"), apidocs.PACKAGE / "viz" / "render.py"])
    kept = ROOT / ".cache" / "docs" / hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:12]
    if not (kept / "names.json").exists():  # in a process of its own: Sphinx forks, and JAX must not be forked
        subprocess.run([sys.executable, str(Path(__file__).resolve()), "--draw", str(kept)], check=True, cwd=ROOT)
    names = json.loads((kept / "names.json").read_text(encoding="utf-8"))
    kinds = {"XLand": "The layouts R1 to R9 of the paper and more sizes, procedural mazes and random rooms. The task is drawn from `medium`; every reset places its objects in new cells.",
             "MiniGrid": "Tasks of the MiniGrid family, each with a goal of its own, and gaps in lava."}
    parts = ["# Environments", "", f"The start of each of the {len(names)} registered environments, `env.reset(params, jax.random.key(0))`; "
             "the steps per second of each are [measured](../docs/results/environments.md).", ""]
    for kind, about in kinds.items():
        parts += [f"## {kind}", "", about, "", '<div class="pictures">', *(
            f'<figure><img src="pictures/{name}.png" alt="The start of {name}, seen from above" loading="lazy"><figcaption><code>{name}</code></figcaption></figure>'
            for name in names if name.startswith(kind)), "</div>", ""]
    write("gallery/environments.md", "\n".join(parts))
    shutil.copytree(kept, SOURCE / "_extra" / "gallery" / "pictures", ignore=shutil.ignore_patterns("*.json"))  # raw HTML: Sphinx does not see these pictures


def draw(folder):
    "Draw the start of every environment into a folder, then write names.json, which says that all are there."
    import jax
    import numpy as np
    import xland_minigrid
    from PIL import Image
    from xland_minigrid.benchmarks import generate_benchmark
    from xland_minigrid.viz.render import render
    task, names = generate_benchmark("medium", n=8).get_ruleset(1), xland_minigrid.registered_environments()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (folder / f"{name}.png").exists():
            env, params = xland_minigrid.make(name, **({"ruleset": task} if name.startswith("XLand") else {}))
            state = jax.jit(env.reset)(params, jax.random.key(0)).state
            tile = max(4, 288 // max(params.height, params.width))
            Image.fromarray(np.asarray(render(state.cells, jax.tree.map(np.asarray, state.agent), None, tile))).save(folder / f"{name}.png", optimize=True)
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")


# All of it ---------------------------------------------------------------------------------------------------------------------------

def landing():
    "The first page, and the contents of the whole site."
    text = (HOUSE / "index.md").read_text(encoding="utf-8")
    text = text.replace("DESCRIPTION", settings["description"]).replace("COLAB_FIRST", badge_url("00_five_minutes")).replace("GITHUB", f"https://github.com/{GITHUB}")
    trees = [toctree(["tutorials/index", "docs/instructors", "slides"], "Learn"),
             toctree(["nbs/library", "api/index"], "Library"),
             toctree(["gallery/environments", "docs/probes", "docs/figures/index", "docs/results/index", "docs/differences", "docs/pool"], "Look up"),
             toctree(["CHANGELOG", "CONTRIBUTING"], "Project")]
    write("index.md", relink(text, ".") + "\n\n" + "\n".join(trees))
    write("slides.md", (HOUSE / "slides.md").read_text(encoding="utf-8"))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        write(name, relink((ROOT / name).read_text(encoding="utf-8"), "."))


def sources():
    "Write all that Sphinx reads."
    shutil.rmtree(SITE, ignore_errors=True)
    for make in (tutorials, chapters, reference, tables, environments, landing):
        make()
    shutil.copytree(HOUSE, SOURCE / "_static", ignore=shutil.ignore_patterns("*.md", "*.j2"))
    (SOURCE / "conf.py").write_text(CONF + 'html_extra_path = ["_extra"]\nexclude_patterns = ["_extra"]\n', encoding="utf-8")


def main(*flags):
    if flags[:1] == ("--draw",) and len(flags) == 2:
        return draw(Path(flags[1]))
    if set(flags) - {"--lenient", "--links"}:
        sys.exit(__doc__)
    from sphinx.cmd.build import main as sphinx
    begin = time.monotonic()
    sources()
    if "--links" in flags:
        return sphinx(["-q", "-b", "linkcheck", str(SOURCE), str(SITE / "links")])
    status = sphinx(["-q", *([] if "--lenient" in flags else ["-W", "--keep-going"]), "-b", "html", str(SOURCE), str(HTML)])
    if status == 0:
        import slides
        slides.main()
        pages = len(list(HTML.rglob("*.html")))
        print(f"{pages} pages in {time.monotonic() - begin:.0f} s. Open {os.path.relpath(HTML / 'index.html', ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
