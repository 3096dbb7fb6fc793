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

pytestmark = pytest.mark.newest

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
COPIES = sorted((ROOT / "colab").glob("*.ipynb"))


def cells(path, kind=None):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if kind in (None, cell["cell_type"])]


# One source --------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def tree(tmp_path):
    "A copy of everything that takes part in a sync, free to be spoilt."
    pytest.importorskip("nbdev")
    for path in sync.files(ROOT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tmp_path / path)
    return tmp_path


def test_the_sync_gate_sees_all_that_disagrees(tree):
    "The step before the tests checks the tree as it is; here six files are spoilt, each in another way."
    core, chapters = tree / "xland_minigrid" / "core", tree / "nbs" / "core"
    (core / "tiles.py").write_text((core / "tiles.py").read_text() + "\nEXTRA = 1\n")
    nb = json.loads((chapters / "02_walls.ipynb").read_text())
    next(cell for cell in nb["cells"] if cell["cell_type"] == "code")["execution_count"] = 7
    (chapters / "02_walls.ipynb").write_text(json.dumps(nb))
    (core / "goals.py").unlink()
    (chapters / "12_mazes.ipynb").unlink()
    (tree / "README.md").write_text("# Something else\n")
    (tree / "colab" / "99_left_over.ipynb").write_text("{}")
    assert {"xland_minigrid/core/tiles.py would change", "nbs/core/02_walls.ipynb would change", "xland_minigrid/core/goals.py would be made", "README.md would change",
            "xland_minigrid/core/mazes.py has lost its notebook ../../nbs/core/12_mazes.ipynb", "colab/99_left_over.ipynb would be removed"} <= set(sync.check(tree))


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


def test_links_are_turned_to_where_the_readme_lies():
    for before, after in (("[a](core/00_struct.ipynb)", "[a](nbs/core/00_struct.ipynb)"), ("[a](../LICENSE)", "[a](LICENSE)"), ('<img src="../docs/a.png">', '<img src="docs/a.png">'),
                          ("[a](https://jax.dev) [b](#here) [c](mailto:a@b.c)",) * 2):
        assert readme.rehome(before) == after


# Tutorials and their Colab copies ----------------------------------------------------------------------------------------------------

def test_each_tutorial_has_its_colab_copy():
    assert colab.stale() == []
    assert {path.stem for path in COPIES} == {path.stem for path in TUTORIALS} | colab.ALONE.keys()


def test_each_colab_copy_begins_with_its_own_badge_and_set_up():
    user, repo, branch = (project.settings[key] for key in ("user", "repo", "branch"))
    for path in COPIES:
        first, second, *rest = cells(path)
        assert "".join(first["source"]).endswith(f"(https://colab.research.google.com/github/{user}/{repo}/blob/{branch}/colab/{path.name})"), path
        assert "".join(second["source"]).startswith("#@title Setup") and second["metadata"]["cellView"] == "form", path
        assert not any("colab-badge.svg" in "".join(cell["source"]) for cell in rest), path
        assert len({cell["id"] for cell in cells(path)}) == len(cells(path)), path


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


def test_nbval_learns_the_habits_of_nbdev(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    for source, skipped in (("1 + 1", False), ("#| eval: false\n1 + 1", True), ("#| eval: true\n1 + 1", False), ("#| gpu\n1 + 1", True), ("#| slow\n1 + 1", True), ("#| export\n1 + 1", False)):
        cell = SimpleNamespace(execution_count=None, outputs=[{}], source=source)
        item = SimpleNamespace(cell=cell, options={})
        never_run = SimpleNamespace(cell=SimpleNamespace(execution_count=None, outputs=[], source=source), options={})
        conftest.pytest_collection_modifyitems([item, never_run, SimpleNamespace()])
        assert cell.execution_count == 0 and item.options.get("skip", False) == skipped, source
        assert never_run.cell.execution_count is None


# The import --------------------------------------------------------------------------------------------------------------------------

PROBE = """
import json, sys
import jax
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

sys.addaudithook(watch)
import xland_minigrid
from jax._src import xla_bridge
print(json.dumps(dict(touched=touched, initialized=xla_bridge.backends_are_initialized(), modules=sorted(set(sys.modules) - before))))
"""


def test_import_is_light_and_free_of_side_effects(tmp_path):
    "In a fresh interpreter that has imported JAX, in an empty home: what it adds is Python's own and the rooms that every user needs."
    home = {key: str(tmp_path) for key in ("HOME", "XDG_CACHE_HOME", "XLAND_MINIGRID_DATA")}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))} | home | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-B", "-c", PROBE], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in seen["modules"]} - sys.stdlib_module_names == {"xland_minigrid"}, "importing the package imported others than JAX does"
    rooms = {name.split(".")[1] for name in seen["modules"] if name.startswith("xland_minigrid.")}
    assert rooms <= {"core", "envs", "benchmarks", "interop", "compat", "environment", "registration", "types"}, "import what only some users need inside the function that needs it"
    assert seen["touched"] == [], "importing the package opened files other than code"
    assert not seen["initialized"], "importing the package started a JAX backend: some module makes an array when it is imported"
    assert list(tmp_path.iterdir()) == []


def test_rooms_load_what_is_heavy_when_it_is_needed():
    code = """
import sys
loaded = lambda *names: print([name for name in names if name in sys.modules])
import xland_minigrid.benchmarks, xland_minigrid.benchmarks.hub, xland_minigrid.benchmarks.statistics
loaded('safetensors', 'tqdm', 'platformdirs', 'flax', 'matplotlib', 'fastcore', 'huggingface_hub', 'ipywidgets', 'torch')
import xland_minigrid.baselines.demo, xland_minigrid.baselines.curriculum
loaded('orbax', 'tensorboardX', 'matplotlib', 'ipywidgets', 'tensorboard', 'xland_minigrid.viz.player')
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n") == ["[]", "[]", ""]


def test_flax_and_optax_are_needed_for_learning_alone():
    "Without the extra `train`: every public name and every other room; learners say in one sentence what to install."
    code = """
import importlib, sys
sys.modules.update(flax=None, optax=None, tensorboardX=None)
import xland_minigrid
for name in dir(xland_minigrid):
    getattr(xland_minigrid, name)
for room in ("core", "envs", "benchmarks", "viz", "pool", "interop"):
    importlib.import_module(f"xland_minigrid.{room}")
importlib.import_module("xland_minigrid.cli")
for module in ("baselines.rl2", "baselines.cores", "baselines.ppo", "baselines.evaluation", "pool.grpo"):
    try:
        importlib.import_module(f"xland_minigrid.{module}")
    except ModuleNotFoundError as error:
        print(error, error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["Agents that learn need optax: pip install 'xland_minigrid[train]'. optax"] * 5


# The wheel ---------------------------------------------------------------------------------------------------------------------------

WHEEL = 666_700  # bytes without the agents in the box


def test_the_wheel_is_small():
    "What setuptools would pack by pyproject.toml, counted without building: modules of packages and `package-data`, deflated as in a wheel."
    import zlib
    from fnmatch import fnmatch

    import tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    find, data = project["tool"]["setuptools"]["packages"]["find"], project["tool"]["setuptools"]["package-data"]
    assert find == {"include": ["xland_minigrid*"], "exclude": ["xland_minigrid.measure.tables*"]} and list(data) == ["xland_minigrid"]
    package = ROOT / "xland_minigrid"
    names = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    names = [name for name in names if not name.startswith("measure/tables/")]
    packed = [name for name in names if name.endswith(".py") and (package / name).with_name("__init__.py").exists() or any(fnmatch(name, kind) for kind in data["xland_minigrid"])]
    assert "_modidx.py" not in packed, "nbdev's index is not for users: make sync removes it"
    size = sum(len(zlib.compress((package / name).read_bytes())) + 200 for name in packed if not name.startswith("baselines/box/"))  # 200: two headers and a line of RECORD
    assert size < WHEEL, f"{size:,} bytes: what is not for users goes elsewhere"
    assert sorted({Path(name).suffix for name in packed}) == [".html", ".json", ".py", ".safetensors"]


@pytest.mark.slow
def test_the_wheel_installs_and_runs():
    done = subprocess.run([sys.executable, str(ROOT / ".ci" / "wheel.py")], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([sys.executable, str(ROOT / ".ci" / "wheel.py"), "v0.0.0"], capture_output=True, text=True)
    assert done.returncode and "settings.ini" in done.stderr


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


def test_library_notebooks_introduce_themselves():
    "The title and the sentence under it become the module's docstring and the page's head."
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        first = "".join(cells(path)[0]["source"])
        assert re.match(r"# .+\n\n> .+", first), path
        code = "\n".join("".join(cell["source"]) for cell in cells(path, "code"))
        assert not re.search(r"^(?:from|import) (?:nbdev|fastcore)\b", code, re.MULTILINE), path
