"""Tutorials and widgets in JupyterLab, in a real browser: cells are run, buttons pressed, and what is drawn is compared with what the kernel holds.

Skipped where Chromium, Playwright or JupyterLab is missing. `XLAND_SCREENSHOTS=FOLDER` keeps a picture of each step.
"""
import base64
import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("jupyterlab")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow
SCREENSHOTS = os.environ.get("XLAND_SCREENSHOTS")
READY = "() => { const s = window.jupyterapp?.shell?.currentWidget?.sessionContext; return s && s.isReady && s.session?.kernel?.status == 'idle' }"


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    "A JupyterLab on loopback over a folder of its own, without news, without pop-ups; (address, folder)."
    folder, user = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("user")
    for name, settings in {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
                           "notebook-extension/tracker": {"windowingMode": "none"}}.items():  # cells off the screen exist as well
        path = user / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    port = free_port()
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(user / "config"), "JUPYTER_DATA_DIR": str(user / "data"), "JUPYTER_RUNTIME_DIR": str(user / "runtime"), "PYTHONPATH": str(ROOT),
                        "XLAND_FAST": "1", "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", env.get("XLA_FLAGS", ""))  # readers have one device; what the tutorials compiled is in the cache
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with (user / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.token=", "--ServerApp.password=",
                                   "--ServerApp.allow_root=True", "--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True", f"--LabApp.user_settings_dir={user / 'settings'}",
                                   f"--LabApp.workspaces_dir={user / 'workspaces'}", f"--ServerApp.root_dir={folder}"], env=env, stdout=log, stderr=log, cwd=folder)
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}/api/status"), 60, lambda: (user / "log").read_text()[-2000:])
            yield f"http://127.0.0.1:{port}", folder
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:  # a busy machine: it waits for its kernels
                server.kill()
                server.wait()


def answers(url):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=1).status == 200


PATIENCE = 5  # on a slow machine that does other work, everything takes longer than the seconds below


def wait_for(what, seconds, otherwise=lambda: ""):
    end = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(.1)
    pytest.fail(f"waited {PATIENCE * seconds} s in vain. {otherwise()}")


class Notebook:
    "A notebook that is open in JupyterLab."

    def __init__(self, page, name):
        self.page, self.name, self.errors = page, name, []
        page.set_default_timeout(60_000 * PATIENCE)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, address):
        self.page.goto(f"{address}/doc/tree/{self.name}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.page.wait_for_function(READY)
        return self

    def command(self, name):
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name); return null }", name)  # a promise would never be answered

    def theme(self, scheme):
        self.page.evaluate("theme => { window.jupyterapp.commands.execute('apputils:change-theme', {theme}); return null }", f"JupyterLab {scheme.title()}")
        self.page.wait_for_function("light => document.body.dataset.jpThemeLight == light", arg=str(scheme == "light").lower())

    def run_all(self, seconds=300):
        "Run every cell, wait for the end, and fail with the first error."
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.ran = true }) && null")
        self.page.wait_for_function("() => window.ran", timeout=1000 * PATIENCE * seconds)
        self.page.wait_for_function(READY)
        wrong = [f"{output['ename']}: {output['evalue']}" for cell in self.saved()["cells"] for output in cell.get("outputs", ()) if output["output_type"] == "error"]
        assert wrong == []

    def saved(self):
        "The notebook as it would be saved now."
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON()")

    def python(self, expression):
        "What an expression in the notebook's kernel is, through JSON."
        code = f"import json as _j; print('<<' + _j.dumps({expression}) + '>>')"
        return json.loads(self.page.evaluate("""code => new Promise((resolve, reject) => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel, future = kernel.requestExecute({code, store_history: false});
            let text = '';
            future.onIOPub = message => { if (message.header.msg_type === 'stream') text += message.content.text;
                                          if (message.header.msg_type === 'error') reject(message.content.ename + ': ' + message.content.evalue); };
            future.done.then(() => { const m = text.match(/<<(.*)>>/s); m ? resolve(m[1]) : reject('no answer: ' + text); });
        })""", code))

    def cells(self):
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.length")

    def shot(self, name, element=None):
        if SCREENSHOTS:
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            (element or self.page).screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))


@pytest.fixture
def notebook(lab, browser):
    "Open a notebook, or one of these sources of cells."
    address, folder = lab
    pages = []

    def open_(what, width=1300):
        page = browser.new_page(viewport={"width": width, "height": 1000})
        pages.append(page)
        name = f"probe_{len(list(folder.glob('probe_*')))}.ipynb"
        if isinstance(what, list):
            what = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in what], metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
        nbformat.write(what, folder / name)
        return Notebook(page, name).open(address)

    yield open_
    for page in pages:
        with contextlib.suppress(Exception):
            page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        page.close()


def picture(locator):
    "The pixels of an <img> as it came, (H, W, 3)."
    data = locator.evaluate("""async img => { await img.decode(); const c = document.createElement('canvas'); c.width = img.naturalWidth; c.height = img.naturalHeight;
        c.getContext('2d').drawImage(img, 0, 0); return c.toDataURL('image/png').split(',')[1]; }""")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def test_the_harness_runs_cells_and_reads_the_kernel(notebook):
    book = notebook(["a = 20 + 1", "a * 2"])
    book.run_all(60)
    assert book.python("a * 2") == 42 and book.cells() == 2


def test_the_harness_sees_errors(notebook):
    book = notebook(["1 / 0"])
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        book.run_all(60)


# The player --------------------------------------------------------------------------------------------------------------------------

# What EnvPlayer is to draw, made in the kernel from the environment's state by the functions that draw grids.
DRAWN = """
import base64, jax, numpy as np
from xland_minigrid.core.tiles import Tiles
from xland_minigrid.viz import render, render_observation, to_png, view_to_world
def drawn(player, tile_size):
    state = jax.tree.map(np.asarray, player.timestep.state.replace(key=None))
    seen = np.asarray(player.timestep.observation)
    world = render(state.cells, state.agent, tile_size=tile_size, visible=view_to_world(seen[..., 0] != Tiles.UNSEEN, state.agent, state.cells.shape))
    return base64.b64encode(to_png(world)).decode()
"""
TASK = """
import jax.numpy as jnp
from xland_minigrid import make_ruleset, make
from xland_minigrid.core.goals import AgentHoldGoal
from xland_minigrid.core.rules import TileNearRule
from xland_minigrid.core.tiles import Colors, Tiles
ball, key, star = (Tiles.BALL, Colors.RED), (Tiles.KEY, Colors.GREEN), (Tiles.STAR, Colors.YELLOW)
task = make_ruleset(goal=AgentHoldGoal(star), rules=[TileNearRule(ball, key, star)], init_tiles=[ball, key])
env, params = make("XLand-MiniGrid-R1-9x9", ruleset=task, height=6, width=6)
"""
PLAYER = "from xland_minigrid.viz.widgets import EnvPlayer\nplayer = EnvPlayer(env, params=params, seed=3)\nplayer"
BUTTONS = ("forward", "right", "left", "pick-up", "put-down", "toggle")
PLAN = "__import__('xland_minigrid.benchmarks', fromlist=['x']).solve_from({player}.params.ruleset, {player}.timestep, {player}.params).actions.tolist()"


def play_to_the_goal(book, player="player"):
    "Click what the oracle would do; what is on the screen is compared with the state after every click. Returns the number of clicks."
    root = book.page.locator(".xmg-w-player").first
    root.scroll_into_view_if_needed()
    plan, trial = book.python(PLAN.format(player=player)), book.python(f"{player}.trial")
    world, message = root.locator("img.xmg-w-world"), root.locator(".xmg-w-message")
    for count, action in enumerate(plan, 1):
        root.locator(f"button.xmg-w-{BUTTONS[action]}").click()
        root.locator(".xmg-w-facts", has_text=f"step {count} of").wait_for()
        wanted = book.python(f"drawn({player}, {len(picture(world))} // {player}.timestep.state.cells.shape[0])")
        wanted = np.asarray(Image.open(io.BytesIO(base64.b64decode(wanted))).convert("RGB"))
        wait_for(lambda: (picture(world) == wanted).all(), 10, lambda: f"The picture after click {count} is not the state's.")  # it follows the words by a moment
    assert "goal reached" in message.inner_text() and book.python(f"float({player}.timestep.reward)") > 0
    root.locator("button.xmg-w-forward").click()
    root.locator(".xmg-w-facts", has_text=f"trial {trial + 1}").wait_for()
    return len(plan)


def test_a_task_is_played_to_its_goal_by_clicking(notebook):
    book = notebook([DRAWN + TASK, PLAYER])
    book.run_all(120)
    assert play_to_the_goal(book) > 3
    assert book.python("player.rewards")[0] > 0 and book.page.locator(".xmg-w-trials").first.inner_text().split()[-3:][0] == "won"
    assert book.errors == []


def test_keys_play_and_never_reach_the_notebook(notebook):
    book = notebook([DRAWN + TASK, PLAYER, "1", "2"])
    book.run_all(120)
    pad = book.page.locator(".xmg-w-pad").first
    pad.click()
    before = book.cells()
    for key in ("a", "d", "d", "x", "z", "ArrowUp", "ArrowRight", "b", "m", "0", "0"):
        book.page.keyboard.press(key)
        book.page.wait_for_timeout(60)
    book.page.wait_for_function("() => document.querySelector('.xmg-w-facts').innerText.includes('step 6 of')")  # a, d, d, x, up, right
    assert book.cells() == before == 4 and [cell["cell_type"] for cell in book.saved()["cells"]] == ["code"] * 4
    assert book.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status") in ("idle", "busy")
    assert book.python("1 + 1") == 2, "0 0 restarts the kernel of a notebook that hears it"
    book.page.keyboard.press("Tab")
    assert not book.page.evaluate("() => document.activeElement.classList.contains('xmg-w-pad')"), "Tab leads on"
    book.shot("keys")


@pytest.mark.parametrize("width, scheme", [(1300, "light"), (430, "dark")])
def test_the_player_fits(notebook, width, scheme):
    "With a hint and the goals that are still possible, asked for by button and by key."
    book = notebook([TASK.replace("rules=[TileNearRule(ball, key, star)]", "rules=[]").replace("(star)", "(key)"), PLAYER], width=width)
    book.theme(scheme)
    book.run_all(120)
    root = book.page.locator(".xmg-w-player").first
    root.scroll_into_view_if_needed()
    goals = root.locator(".xmg-w-possible")
    assert goals.inner_text().strip() == ""
    root.locator("button.xmg-w-goals").click()
    goals.get_by_text("Goals still possible").wait_for()
    root.locator(".xmg-w-pad").press("h")
    root.locator(".xmg-w-message", has_text="steps to go").wait_for()
    names = book.python("player.goals()")
    assert f"possible {len(names)}" in goals.inner_text() and names[0] in goals.inner_text() and book.cells() == 2
    overflow = root.evaluate("""root => { const area = root.closest('.jp-OutputArea-output').getBoundingClientRect();
        return [...root.querySelectorAll('button, img, .xmg-w-facts, .xmg-w-message')].filter(e => e.getBoundingClientRect().right > area.right + 1).map(e => e.className) }""")
    assert overflow == []
    ink, ground = (np.asarray(root.locator(".xmg-w-facts b").first.evaluate("(e, what) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e)[what].match(/[\\d.]+/g).map(Number); "
                   "if (what == 'color' || c.length == 3 || c[3] > 0) return c.slice(0, 3) } return [255, 255, 255] }", what)) for what in ("color", "backgroundColor"))
    assert (ink.mean() > 200 and ground.mean() < 60) if scheme == "dark" else (ink.mean() < 80 and ground.mean() > 230)
    book.shot(f"player_{width}_{scheme}", root)


def test_what_is_saved_shows_without_a_kernel(notebook):
    book = notebook([TASK, PLAYER])
    book.run_all(120)
    (output,) = book.saved()["cells"][1]["outputs"]
    assert {"text/html", "text/plain", "application/vnd.jupyter.widget-view+json"} <= output["data"].keys()
    assert "data:image/png" in "".join(output["data"]["text/html"]) and "<script" not in "".join(output["data"]["text/html"])


# Training ----------------------------------------------------------------------------------------------------------------------------

SETUP = """
import tempfile
from xland_minigrid.baselines.demo import OBJECTS, held_out_objects, hold_tasks
from xland_minigrid.baselines.live import dashboard
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig
tasks = hold_tasks(OBJECTS[~held_out_objects()], n=1000, seed=0)
long_config = TrainConfig(env_id="XLand-MiniGrid-R1-9x9", size=5, max_steps=12, steps_per_task=120, steps_per_update=60,
                          total_steps=50_000_000, num_envs=64, ppo=PPOConfig(num_minibatches=4), out=tempfile.mkdtemp())
"""
BOARD = "long_board = dashboard(long_config, tasks)\nlong_board"


def train_and_stop(book):
    "Start, watch, stop, resume and stop again, all by clicking; the words on the screen are compared with the board."
    root = book.page.locator(".xmg-w-training").last
    root.scroll_into_view_if_needed()
    click = lambda name: root.locator(f"button.xmg-w-{name}").click()
    state = lambda name, seconds=90: root.locator(f"[data-state={name}]").wait_for(timeout=1000 * PATIENCE * seconds)
    state("idle")
    click("start")
    state("running")
    wait_for(lambda: book.python("len(long_board.rows)") >= 4, 120)
    wait_for(lambda: "steps/s" in root.inner_text() and "left" in root.inner_text(), 20)
    wait_for(lambda: root.locator("img").count() >= 3, 20)
    assert min(picture(root.locator("img").nth(i)).std() for i in range(3)) > 5, "the curves are drawn"
    book.shot("training", root)
    click("stop")
    state("stopped", 20)                                     # a round takes well under a second; the checkpoint some
    steps = book.python("long_board.steps")
    assert f"{steps:,} of" in root.inner_text() and book.python("long_board.state") == "stopped"
    assert book.python("__import__('threading').active_count()") and not book.python("any(t.name == 'xland-training' and t.is_alive() for t in __import__('threading').enumerate())")
    click("resume")
    state("running")
    wait_for(lambda: book.python("long_board.steps") > steps, 90)
    click("stop")
    state("stopped", 20)
    rows = book.python("[row['steps'] for row in long_board.rows]")
    assert rows == sorted(set(rows)) and len(set(np.diff(rows))) == 1, "every round once, before and after the break"


def test_a_training_is_started_watched_stopped_and_resumed(notebook):
    book = notebook([SETUP, BOARD])
    book.run_all(120)
    train_and_stop(book)
    assert book.errors == []


# A rollout ---------------------------------------------------------------------------------------------------------------------------

TWO = """
from xland_minigrid.baselines.evaluation import RandomPolicy, watch
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.viz.widgets import RolloutViewer
world = GymAutoResetWrapper(env), params.replace(max_steps=20)
viewer = RolloutViewer({name: watch(RandomPolicy(actions), num_trials=3, world=world) for name, actions in (("six actions", 6), ("three actions", 3))})
viewer
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_players_advance_in_step(notebook, scheme):
    book = notebook([TASK, TWO, "1"])
    book.theme(scheme)
    book.run_all(120)
    root = book.page.locator(".xmg[data-frame]").first
    root.scroll_into_view_if_needed()
    root.locator("canvas").click()
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 62)):
        book.page.keyboard.press(key)
        assert root.get_attribute("data-frame") == str(wanted) == str(book.python("len(viewer.player) - 1") if key == "End" else wanted)
    book.page.keyboard.press("b")
    book.page.keyboard.press("x")
    assert book.cells() == 3, "keys never reach the notebook"
    root.get_by_label("step back").click()
    said = root.locator(".xmg-say span").all_inner_texts()
    assert len(said) == 2 and all(words.startswith("trial 3, step 19") for words in said)
    boxes = [part.bounding_box() for part in (*root.locator(".xmg-note b").all(), *root.locator(".xmg-say span").all())]
    assert all(left["x"] + left["width"] <= right["x"] + 1 for left, right in (boxes[:2], boxes[2:]))
    book.shot(f"two_{scheme}", root)
    assert book.errors == []


# Tutorials ---------------------------------------------------------------------------------------------------------------------------

def tutorial(name, *more):
    "A tutorial with more cells at its end."
    nb = nbformat.read(ROOT / "tutorials" / f"{name}.ipynb", as_version=4)
    nb.cells = [cell for cell in nb.cells if cell.cell_type != "code" or "raises-exception" not in cell.metadata.get("tags", [])]
    nb.cells += [nbformat.v4.new_code_cell(source) for source in more]
    return nb


def scrub(book, viewer):
    "Step and jump through a rollout; the canvas shows the frames that the kernel holds."
    page = book.page
    roots = page.locator(".xmg[data-frame]")
    roots.first.wait_for()
    goal = book.python(f"len({viewer}.player)")
    index = next(i for i in range(roots.count()) if roots.nth(i).locator(".xmg-count").inner_text().endswith(f"/ {goal}"))
    root = roots.nth(index)
    root.scroll_into_view_if_needed()
    canvas = """e => { const c = e.querySelector('canvas'); return [c.toDataURL('image/png').split(',')[1]] }"""
    for k in (0, 1, 2, goal // 2, goal - 1):
        root.locator("input[type=range]").fill(str(k))
        page.wait_for_function("([e, k]) => e.dataset.frame == k", arg=[root.element_handle(), str(k)])
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(root.evaluate(canvas)[0]))).convert("RGB"))
        kept = book.python(f"__import__('base64').b64encode(__import__('xland_minigrid').viz.to_png({viewer}.player.frames[{k}])).decode()")
        kept = np.asarray(Image.open(io.BytesIO(base64.b64decode(kept))).convert("RGB"))
        assert shown.shape == kept.shape and (shown == kept).all(), f"frame {k}"
    marks = root.locator(".xmg-ticks button")
    if marks.count() > 1:
        marks.nth(1).click()
        assert root.get_attribute("data-frame") == marks.nth(1).get_attribute("data-at")
    book.shot(f"rollout_{book.name}", root)


def test_tutorial_0_runs_and_its_rollout_is_scrubbed(notebook):
    book = notebook(tutorial("00_five_minutes", "import xland_minigrid.viz\nthe_viewer = [v for v in globals().values() if type(v).__name__ == 'RolloutViewer'][-1]\nthe_viewer"))
    book.run_all(240)
    scrub(book, "the_viewer")
    book.shot("tutorial_0")
    assert book.errors == []
