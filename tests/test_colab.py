"""The notebooks that live in colab/ alone: their form, what they may import, and what they choose on which device."""
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from xland_minigrid.baselines.device import agents_for, config_for, find_run, precision_of, read_device, run_folder
from xland_minigrid.baselines import load_agent, train
from xland_minigrid.benchmarks import generate_benchmark

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import colab
from colab_sizes import SHORT
from settings import badge

NAMES = tuple(colab.ALONE)
each = pytest.mark.parametrize("name", NAMES)


def notebook(name):
    return json.loads((ROOT / "colab" / f"{name}.ipynb").read_text(encoding="utf-8"))


def code(name):
    "The code of a notebook, without what is generated."
    return ["".join(cell["source"]) for cell in notebook(name)["cells"] if cell["cell_type"] == "code" and cell["id"] != "colab-setup"]


def plain(text):
    "Code without the lines that only IPython reads, and without `await` at the top level, which it allows."
    return re.sub(r"^(\s*)%.*$", r"\1pass", text, flags=re.MULTILINE)


def tree(text):
    return compile(plain(text), "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def imported(text):
    "Modules that a piece of code imports."
    found = set()
    for node in ast.walk(tree(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_all_six_are_there():
    assert set(NAMES) == {"train_rl2_gpu", "train_rl2_tpu", "train_grpo_llm", "standalone_ppo", "standalone_rl2", "figures"}
    assert all((ROOT / "colab" / f"{name}.ipynb").exists() for name in NAMES)


@each
def test_badge_set_up_and_accelerator(name):
    nb, card = notebook(name), colab.ALONE[name]
    first, setup = nb["cells"][:2]
    assert "".join(first["source"]) == badge(name) and f"/colab/{name}.ipynb)" in badge(name)
    assert "".join(setup["source"]) == colab.setup(name)
    assert nb["metadata"]["accelerator"] == ("TPU" if name.endswith("tpu") else "GPU") and nb["metadata"]["colab"]["gpuType"] == card
    assert (ROOT / "colab" / f"{name}.ipynb").read_text(encoding="utf-8") == colab.redress(nb, name), "stale: run `make sync`"


@each
def test_nothing_is_kept_that_was_computed(name):
    nb = notebook(name)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in nb["cells"]) and "widgets" not in nb["metadata"]
    assert (ROOT / "colab" / f"{name}.ipynb").stat().st_size <= 1_500_000


@each
def test_it_reads_like_a_tutorial(name):
    cells = notebook(name)["cells"][2:]
    head = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and re.match(r"# \S.*\n\n\*\d+ minutes to read[^*]*comput[^*]*\. You\s+need [^*]*\*\n\n", head), "title, time, what you need"
    assert "cccc" not in "".join(cell["cell_type"][0] for cell in cells)
    assert max(text.count("\n") + 1 for text in code(name)) <= 40
    assert not [word for cell in cells for word in ("/work", "/tmp/", "localhost") if word in "".join(cell["source"])]
    for text in code(name):
        tree(text)


@each
def test_it_leaves_colabs_own_packages_alone(name):
    for text in code(name):
        for line in re.findall(r"^\s*[%!]\s*pip.*$", text, re.MULTILINE):
            assert "--no-deps" in line and not re.search(r"\b(jax|jaxlib|numpy|ipywidgets|flax|optax)\b", line), line


@each
def test_it_is_short_where_tests_run_it(name):
    "Each size of a test stands for one that a cell contains, once; otherwise tests would silently run those of a reader."
    source = "\n".join(code(name))
    assert {long: source.count(long) for long in SHORT[name] if source.count(long) != 1} == {}
    assert not re.search(r"XLAND_FAST|\bfast\b", source)


def test_gpu_and_tpu_share_their_code():
    gpu, tpu = notebook("train_rl2_gpu"), notebook("train_rl2_tpu")
    assert code("train_rl2_gpu") == code("train_rl2_tpu")
    text = lambda nb: ["".join(cell["source"]) for cell in nb["cells"] if cell["cell_type"] == "markdown"]
    assert text(gpu)[2:] == text(tpu)[2:], "only badge and title differ"
    assert "GPU" in text(gpu)[1].split("\n")[0] and "TPU" in text(tpu)[1].split("\n")[0]


@pytest.mark.parametrize("name", ["standalone_ppo", "standalone_rl2"])
def test_the_standalone_ones_stand_alone(name):
    modules = set().union(*map(imported, code(name)))
    allowed = ("functools", "os", "time", "dataclasses", "typing", "jax", "numpy", "matplotlib", "flax", "optax", "xland_minigrid")
    assert not {module for module in modules if module.split(".")[0] not in allowed}
    ours = {module for module in modules if module.startswith("xland_minigrid.")}
    assert ours and all(re.match(r"xland_minigrid\.(wrappers|benchmarks|core)\b", module) for module in ours), ours
    functions = {node.name for text in code(name) for node in ast.walk(tree(text)) if isinstance(node, ast.FunctionDef)}
    assert {"collect", "advantages", "update"} <= functions


# The set-up cell, on a Colab that is made up ------------------------------------------------------------------------------------------------

class Colab:
    "Runs a set-up cell where `google.colab` exists and pip and the versions are those of a test."

    def __init__(self, monkeypatch, capsys):
        self.patch, self.out, self.commands, self.status = monkeypatch, capsys, [], 0
        self.versions = {"jax": "0.9.1", "jaxlib": "0.9.1", "numpy": "2.1.0", "ipywidgets": "7.7.1", "xland_minigrid": colab.settings["version"]}
        monkeypatch.setitem(sys.modules, "google.colab", object())
        monkeypatch.setattr("importlib.metadata.version", self.versions.__getitem__)
        monkeypatch.setattr(subprocess, "run", self.pip)

    def pip(self, command, **how):
        self.commands.append(command)
        return SimpleNamespace(returncode=self.status, stderr="ERROR: could not find it")

    def run(self, name="05_ppo_from_scratch", source=None):
        text = colab.setup(name)
        exec(text if source is None else re.sub(r'^SOURCE = ".*?"', f'SOURCE = "{source}"', text, flags=re.MULTILINE), {})
        return self.out.readouterr().out


@pytest.fixture
def runtime(monkeypatch, capsys):
    return Colab(monkeypatch, capsys)


def test_set_up_does_nothing_off_colab(runtime):
    runtime.patch.delitem(sys.modules, "google.colab")
    assert runtime.run() == "" and not runtime.commands


def test_set_up_installs_next_to_what_colab_has(runtime):
    said = runtime.run()
    (command,) = runtime.commands
    assert command[-1] == f"xland_minigrid[train,pool] @ {colab.source('main')}" and Path(command[command.index("--constraint") + 1]).read_text().split("\n")[:2] == ["jax==0.9.1", "jaxlib==0.9.1"]
    assert said.startswith(f"xland_minigrid {colab.settings['version']}, JAX") and "made for" not in said and "accelerator" not in said
    assert "No accelerator is attached" in runtime.run("train_rl2_gpu")


@pytest.mark.parametrize("source, address", [("https://example.org/xland_minigrid-0.1.0-py3-none-any.whl",) * 2, ("/content/a.whl", "file:///content/a.whl")])
def test_set_up_takes_a_wheel(runtime, source, address):
    runtime.run(source=source)
    assert runtime.commands[0][-1].endswith(f"] @ {address}")


def test_set_up_stops_at_the_first_failure_and_says_what_helps(runtime):
    runtime.status = 1
    with pytest.raises(RuntimeError, match="(?s)could not find it.*The installation failed.*SOURCE"):
        runtime.run()
    runtime.commands.clear()
    runtime.versions["jax"] = "0.6.2"
    with pytest.raises(RuntimeError, match="Python 3.* and JAX 0.6.2; the notebook needs Python 3.11 and JAX 0.7.2 or newer.*Change runtime type"):
        runtime.run()
    runtime.versions["jax"] = "0.9.1"
    runtime.patch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(RuntimeError, match="Python 3.10"):
        runtime.run()
    assert not runtime.commands, "nothing is installed where it cannot work"


def test_set_up_names_the_version_it_was_made_for(runtime):
    runtime.versions["xland_minigrid"] = "9.0"
    assert f"made for version {colab.settings['version']}" in runtime.run() and runtime.commands


def test_no_accelerator_is_asked_for_where_none_is_needed():
    for path in (ROOT / "tutorials").glob("*.ipynb"):
        asked = json.loads((ROOT / "colab" / path.name).read_text(encoding="utf-8"))["metadata"]
        assert "accelerator" not in asked and "gpuType" not in asked["colab"], path


# What is chosen on which device --------------------------------------------------------------------------------------------------------

def card(platform, kind, gigabytes=None, **more):
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: None if gigabytes is None else {"bytes_limit": int(gigabytes * 2**30)}, **more)


CARDS = [  # platform, name, compute capability, GB that JAX may use, agents, precision
    ("gpu", "Tesla T4", "7.5", 11.0, 4096, "float16"), ("gpu", "NVIDIA L4", "8.9", 16.6, 4096, "bfloat16"), ("gpu", "NVIDIA A100-SXM4-40GB", "8.0", 29.7, 8192, "bfloat16"),
    ("gpu", "NVIDIA H100 80GB HBM3", "9.0", 59.4, 16_384, "bfloat16"), ("tpu", "TPU v5 lite", None, 15.75, 8192, "bfloat16"),
    ("tpu", "TPU v6 lite", None, 31.25, 16_384, "bfloat16"), ("cpu", "cpu", None, None, 256, "float32")]


@pytest.mark.parametrize("platform, kind, capability, gigabytes, agents, dtype", CARDS, ids=[row[1] for row in CARDS])
def test_sizes_for_a_device(platform, kind, capability, gigabytes, agents, dtype):
    device = read_device(card(platform, kind, gigabytes, compute_capability=capability))
    config = config_for(device, out="somewhere")
    assert (config.num_envs, config.network.dtype, config.out) == (agents, dtype, "somewhere")
    assert config.num_envs % config.ppo.num_minibatches == 0 and config.device is None and kind in repr(device)
    assert config.total_steps == {"gpu": 200_000_000, "tpu": 500_000_000, "cpu": 2_000_000}[platform]


def test_strange_devices():
    assert read_device(card("cuda", "NVIDIA Something New", 10)).platform == "gpu"
    assert agents_for(read_device(card("gpu", "a very small card", 0.5))) == 1024 and agents_for(read_device(card("gpu", "a very large card", 500))) == 16_384
    broken = card("gpu", "Tesla T4")
    broken.memory_stats = lambda: 1 / 0
    assert read_device(broken).memory == read_device(card("gpu", "silent")).memory == 8
    for capability, right in [("7.5", "float16"), ("8.0", "bfloat16"), ("6.1", "float32"), ("gfx90a", "bfloat16"), (None, "bfloat16")]:
        assert precision_of("gpu", capability) == right, capability
    assert read_device().platform == jax.default_backend()


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "/etc", None])
def test_a_run_has_the_name_of_a_folder(name):
    with pytest.raises((ValueError, TypeError)):
        run_folder(name)


def test_drive_is_used_where_it_is_mounted(monkeypatch, tmp_path):
    from xland_minigrid.baselines import device
    assert run_folder("a run") == Path("runs/a run")
    with pytest.raises(ValueError, match="on Colab only"):
        run_folder("rl2", mount_drive=True)
    monkeypatch.setattr(device, "DRIVE", tmp_path)
    assert run_folder("rl2") == run_folder("rl2", mount_drive=True) == tmp_path / "xland_minigrid" / "rl2"


KILLED = """
import os, sys
from xland_minigrid.baselines.device import config_for, find_run, read_device
from xland_minigrid.baselines.rl2 import train
from xland_minigrid.benchmarks import generate_benchmark
config, resume = find_run(config_for(read_device(), fast=True, out=sys.argv[1], checkpoint_minutes=0))
assert not resume
train(config, generate_benchmark("trivial", n=300), progress=False, on_round=lambda row: os._exit(9) if row["steps"] >= 3 * config.steps_per_round else None)
"""


@pytest.mark.slow
def test_a_session_that_is_killed_goes_on_to_the_same_result(tmp_path):
    """Colab takes the machine away without a word. The process ends in the middle; the next session, on another card and with other wishes, finds the run."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], cwd=ROOT, env={**os.environ, "XLA_FLAGS": re.sub(r"\S*device_count=\d+", "", os.environ["XLA_FLAGS"])}, timeout=300)
    assert done.returncode == 9
    tasks, here = generate_benchmark("trivial", n=300), read_device()
    config, resume = find_run(config_for(here, fast=True, out=str(tmp_path / "run"), seed=5, num_envs=128))
    assert resume and (config.seed, config.num_envs, config.out) == (0, 64, str(tmp_path / "run"))
    assert 0 < load_agent(config.out).steps < config.total_steps
    again = train(config, tasks, resume=resume, progress=False)
    whole = train(config_for(here, fast=True, out=str(tmp_path / "whole")), tasks, progress=False)
    assert again.agent.steps == whole.agent.steps == config.total_steps
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), again.agent.parameters, whole.agent.parameters))
    assert [row["steps"] for row in again.metrics] == [row["steps"] for row in whole.metrics]
    assert find_run(config)[1] and not find_run(config_for(here, out=str(tmp_path / "another")))[1]


def test_a_release_is_installed_from_its_wheel():
    "Where `branch` in settings.ini is the tag of a release."
    assert colab.source("main").endswith("@main")
    assert colab.source("v1.2.0").endswith("/releases/download/v1.2.0/xland_minigrid-1.2.0-py3-none-any.whl")
