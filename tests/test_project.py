"""The project itself: one source for everything, quick to import, and no trace of the machine it was made on."""
import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import colab
import readme
import settings as project
import sync

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
COPIES = sorted((ROOT / "colab").glob("*.ipynb"))


def cells(path, kind=None):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if kind in (None, cell["cell_type"])]


def name(path):
    return path.name


# One source --------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def tree(tmp_path):
    "A copy of everything that takes part in a sync, free to be spoilt."
    pytest.importorskip("nbdev")
    for path in sync.files(ROOT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tmp_path / path)
    return tmp_path


def test_clean_and_export_change_nothing(tree):
    assert sync.check(tree) == []


def spoil_module(tree):
    path = tree / "xland_minigrid" / "core" / "tiles.py"
    path.write_text(path.read_text() + "\nEXTRA = 1\n")
    return "xland_minigrid/core/tiles.py would change"


def spoil_notebook(tree):
    path = tree / "nbs" / "core" / "01_tiles.ipynb"
    nb = json.loads(path.read_text())
    next(cell for cell in nb["cells"] if cell["cell_type"] == "code")["execution_count"] = 7
    path.write_text(json.dumps(nb))
    return "nbs/core/01_tiles.ipynb would change"


def spoil_by_deleting_a_module(tree):
    (tree / "xland_minigrid" / "core" / "tiles.py").unlink()
    return "xland_minigrid/core/tiles.py would be made"


def spoil_by_deleting_a_notebook(tree):
    (tree / "nbs" / "core" / "01_tiles.ipynb").unlink()
    return "xland_minigrid/core/tiles.py has lost its notebook ../../nbs/core/01_tiles.ipynb"


def spoil_readme(tree):
    (tree / "README.md").write_text("# Something else\n")
    return "README.md would change"


def spoil_colab(tree):
    (tree / "colab").mkdir(exist_ok=True)
    (tree / "colab" / "99_left_over.ipynb").write_text("{}")
    return "colab/99_left_over.ipynb would be removed"


@pytest.mark.parametrize("spoil", [spoil_module, spoil_notebook, spoil_by_deleting_a_module, spoil_by_deleting_a_notebook, spoil_readme, spoil_colab])
def test_the_sync_gate_sees(spoil, tree):
    assert spoil(tree) in sync.check(tree)


def test_settings_and_pyproject_agree():
    ini, toml = configparser.ConfigParser(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ini.read(ROOT / "settings.ini")
    ini = ini["DEFAULT"]
    assert toml["name"] == ini["lib_name"]
    assert toml["description"] == ini["description"]
    assert toml["requires-python"] == f">={ini['min_python']}"
    assert toml["keywords"] == ini["keywords"].split()
    assert toml["authors"] == [{"name": ini["author"]}]
    init = ast.parse((ROOT / "xland_minigrid" / "__init__.py").read_text())
    versions = [node.value.value for node in init.body if isinstance(node, ast.Assign) and node.targets[0].id == "__version__"]
    assert versions == [ini["version"]] and "version" in toml["dynamic"]


def test_the_description_opens_the_readme():
    assert f"> {project.settings['description']}\n" in (ROOT / "README.md").read_text()


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = [link.partition("#")[0] for _, link in readme.LINK.findall(text)]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("before, after", [
    ("[a](core/00_struct.ipynb)", "[a](nbs/core/00_struct.ipynb)"),
    ("[a](../LICENSE)", "[a](LICENSE)"),
    ('<img src="../docs/a.png">', '<img src="docs/a.png">'),
    ("[a](https://jax.dev) [b](#here) [c](mailto:a@b.c)", "[a](https://jax.dev) [b](#here) [c](mailto:a@b.c)"),
])
def test_links_are_turned_to_where_the_readme_lies(before, after):
    assert readme.rehome(before) == after


# Tutorials and their Colab copies ----------------------------------------------------------------------------------------------------

def test_each_tutorial_has_its_colab_copy():
    assert colab.stale() == []
    assert {path.stem for path in COPIES} == {path.stem for path in TUTORIALS} | colab.ALONE.keys()


@pytest.mark.parametrize("path", COPIES, ids=name)
def test_colab_copy_begins_with_its_own_badge_and_set_up(path):
    first, second, *rest = cells(path)
    user, repo, branch = (project.settings[key] for key in ("user", "repo", "branch"))
    assert "".join(first["source"]).endswith(f"(https://colab.research.google.com/github/{user}/{repo}/blob/{branch}/colab/{path.name})")
    assert "".join(second["source"]).startswith("#@title Setup") and second["metadata"]["cellView"] == "form"
    assert not any("colab-badge.svg" in "".join(cell["source"]) for cell in rest)
    assert len({cell["id"] for cell in cells(path)}) == len(cells(path))


@pytest.mark.parametrize("path", TUTORIALS, ids=name)
def test_tutorial_keeps_its_outputs(path):
    "nbval compares nothing where nothing was kept."
    code = cells(path, "code")
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) / 3
    failed = [cell["source"] for cell in code if "raises-exception" not in cell["metadata"].get("tags", ())
              and any(output["output_type"] == "error" for output in cell["outputs"])]
    assert failed == []


EXAMPLE = {
    "cells": [
        {"cell_type": "markdown", "id": "t", "metadata": {}, "source": [
            "# Title\n", "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/x)\n", "\n", "Text."]},
        {"cell_type": "code", "id": "c", "metadata": {"tags": ["nbval-ignore-output"]}, "source": ["1 + 1"], "execution_count": 3,
         "outputs": [{"output_type": "execute_result", "data": {"text/plain": ["2"]}, "execution_count": 3, "metadata": {}}]},
    ],
    "metadata": {"accelerator": "TPU", "widgets": {"state": {}}, "kernelspec": {"name": "other", "display_name": "other", "language": "python"}},
    "nbformat": 4, "nbformat_minor": 5,
}


def test_colab_copy_of_an_example():
    made = json.loads(colab.convert(EXAMPLE, "07_name"))
    badge, setup, title, code = made["cells"]
    assert badge["source"] == [project.badge("07_name")] and project.badge_url("07_name").endswith("/colab/07_name.ipynb")
    assert "".join(title["source"]) == "# Title\n\nText."
    assert code == {"cell_type": "code", "id": "c", "metadata": {"tags": ["nbval-ignore-output"]}, "source": ["1 + 1"], "execution_count": None, "outputs": []}
    assert made["metadata"]["accelerator"] == "TPU" and made["metadata"]["colab"]["toc_visible"] and "widgets" not in made["metadata"]
    assert colab.convert(EXAMPLE, "07_name") == colab.convert(EXAMPLE, "07_name")


@pytest.mark.parametrize("source, count, skipped", [
    ("1 + 1", 0, False),
    ("#| eval: false\n1 + 1", 0, True),
    ("#| eval: true\n1 + 1", 0, False),
    ("#| gpu\n1 + 1", 0, True),
    ("#| export\n1 + 1", 0, False),
])
def test_nbval_learns_the_habits_of_nbdev(source, count, skipped, pytestconfig):
    cell = SimpleNamespace(execution_count=None, outputs=[{}], source=source)
    item = SimpleNamespace(cell=cell, options={})
    never_run = SimpleNamespace(cell=SimpleNamespace(execution_count=None, outputs=[], source=source), options={})
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    conftest.pytest_collection_modifyitems([item, never_run, SimpleNamespace()])
    assert cell.execution_count == count and item.options.get("skip", False) == skipped
    assert never_run.cell.execution_count is None


class Shell:
    "Enough of IPython and of Colab to run the set-up cell."

    def __init__(self, backend):
        self.pip, self.backend = [], backend

    def run(self, source, monkeypatch, capsys, tmp_path, on_colab):
        import jax
        monkeypatch.setattr(jax, "default_backend", lambda: self.backend)
        monkeypatch.setitem(sys.modules, "google.colab", object()) if on_colab else monkeypatch.delitem(sys.modules, "google.colab", raising=False)
        source = source.replace("/tmp/", f"{tmp_path}/")
        source = re.sub(r"^(\s*)%pip (.*)$", lambda m: f"{m[1]}PIP.append({m[2]!r})", source, flags=re.MULTILINE)
        exec(compile(source, "set-up cell", "exec"), {"PIP": self.pip})
        return capsys.readouterr().out


def test_set_up_cell_does_nothing_off_colab(monkeypatch, capsys, tmp_path):
    shell = Shell("cpu")
    assert shell.run(colab.SETUP, monkeypatch, capsys, tmp_path, on_colab=False) == ""
    assert shell.pip == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_set_up_cell_on_colab_leaves_jax_alone_and_says_what_to_click(backend, monkeypatch, capsys, tmp_path):
    pytest.importorskip("ipywidgets")
    import jax
    shell = Shell(backend)
    said = shell.run(colab.SETUP, monkeypatch, capsys, tmp_path, on_colab=True)
    constraints = (tmp_path / "colab-constraints.txt").read_text().splitlines()
    assert f"jax=={jax.__version__}" in constraints and any(line.startswith("numpy==") for line in constraints)
    (pip,) = shell.pip
    assert f"[train,pool] @ git+https://github.com/{project.GITHUB}@{project.settings['branch']}" in pip and "colab-constraints.txt" in pip
    assert jax.__version__ in said and f" {backend}: " in said and "Change runtime type" in said and ("No accelerator" in said) == (backend == "cpu")


# The import --------------------------------------------------------------------------------------------------------------------------

PROBE = """
import json, sys, time
start = time.perf_counter()
import jax
middle = time.perf_counter()
before, touched = set(sys.modules), []
WRITES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.copyfile", "tempfile.mkstemp")

def watch(event, args):
    if event == "open":
        path, mode, flags = args
        writing = any(c in (mode or "") for c in "wax+") or (isinstance(flags, int) and flags & 3)
        if writing or not str(path).endswith((".py", ".pyc", ".so", ".pyd", ".dylib")):
            touched.append(("write" if writing else "read", str(path)))
    elif event in WRITES:
        touched.append((event, str(args[0])))

if "audit" in sys.argv: sys.addaudithook(watch)
import xland_minigrid
end = time.perf_counter()
from jax._src import xla_bridge
print(json.dumps(dict(added=end - middle, touched=touched, initialized=xla_bridge.backends_are_initialized(),
                      modules=sorted({m.partition(".")[0] for m in set(sys.modules) - before}))))
"""


def probe(tmp_path, *argv):
    "A fresh interpreter that imports JAX, then the package, in an empty home."
    home = {key: str(tmp_path) for key in ("HOME", "XDG_CACHE_HOME", "XLAND_MINIGRID_DATA")}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))} | home | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-B", "-c", PROBE, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_adds_little_to_that_of_jax(tmp_path):
    probe(tmp_path)  # the first one warms the file cache
    times = []
    for _ in range(9):  # other work on the machine only ever adds: the least of several is the cost
        times.append(probe(tmp_path)["added"])
        if len(times) >= 3 and min(times) <= 0.3:
            return
    pytest.fail(f"import xland_minigrid adds {min(times):.2f} s to import jax; 0.3 s are allowed. `python -X importtime -c 'import xland_minigrid'` says where.")


def test_import_is_free_of_side_effects(tmp_path):
    seen = probe(tmp_path, "audit")
    heavy = {"flax", "optax", "matplotlib", "ipywidgets", "IPython", "orbax", "tyro", "websockets", "xminigrid", "nbdev", "fastcore", "gymnasium", "dm_env", "torch"}
    assert heavy & set(seen["modules"]) == set()
    assert seen["touched"] == [], "importing the package opened files other than code"
    assert not seen["initialized"], "importing the package started a JAX backend: some module makes an array when it is imported"
    assert list(tmp_path.iterdir()) == []


# What is committed -------------------------------------------------------------------------------------------------------------------

def committed():
    "The files that are, or would be, committed; outside git, all that is not ignored by name."
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]
    hidden = re.compile(r"(^|/)(\.git|\.venv[^/]*|\.cache|\.pytest_cache|\.hypothesis|__pycache__|build|dist|runs|_proc|_docs|[^/]*\.egg-info)(/|$)")
    return [path for path in ROOT.rglob("*") if path.is_file() and not hidden.search(path.relative_to(ROOT).as_posix())]


PERSONAL = re.compile(rb"/(?:(?:home|Users)/[a-z0-9_.]+/|root/\w)|[A-Z]:\\\\?Users\\|(?<![\w./-])" + re.escape(str(ROOT)).encode() + rb"/")


def test_no_file_knows_the_machine_it_was_made_on():
    found = [f"{path.relative_to(ROOT)}: {match[0].decode()}" for path in committed() for match in [PERSONAL.search(path.read_bytes())] if match]
    assert len(committed()) > 20 and found == []


def test_the_search_for_such_paths_finds_them():
    for path in ("/".join(["", "home", "ada", "x"]), "/".join(["", "Users", "ada", "x"]), "/".join(["", "root", "x"]), f"see {ROOT}/x"):
        assert PERSONAL.search(path.encode()), path
    for text in ("https://example.com/home/index.html", "Home/Users/", "/".join(["a square", "root", ""])):
        assert not PERSONAL.search(text.encode()), text


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").rglob("*.ipynb")), ids=name)
def test_library_notebook_introduces_itself(path):
    "The title and the sentence under it become the module's docstring and the page's head."
    first = "".join(cells(path)[0]["source"])
    assert re.match(r"# .+\n\n> .+", first)
    code = "\n".join("".join(cell["source"]) for cell in cells(path, "code"))
    assert not re.search(r"^(?:from|import) (?:nbdev|fastcore)\b", code, re.MULTILINE)
