"""The live table: it follows, it ends with what it follows, and what stays in the notebook needs no widget."""
import ast
import gc
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool_faults import until
from worlds import refusals

from xland_minigrid.pool import EnvPool, EnvServer
from xland_minigrid.pool import status as module
from xland_minigrid.pool.client import IOThread
from xland_minigrid.pool.errors import ConnectFailed
from xland_minigrid.pool.server import ServerProcess
from xland_minigrid.pool.status import server_stats, watch


def threads():
    return [t for t in threading.enumerate() if t.name == "xland-pool-watch"]


def soon(condition):
    assert until(condition)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    soon(lambda: not threads())


@pytest.fixture
def screen(monkeypatch):
    "A notebook without a browser: what is displayed, and each value that a widget got."
    seen = SimpleNamespace(outputs={}, values=[])

    class HTML:
        model_id = "abc"

        def __init__(self, value):
            self.value = value

        def __setattr__(self, name, value):
            seen.values.append(value)

    def display(bundle, raw, display_id, update):
        assert raw and (display_id in seen.outputs) == update
        seen.outputs[display_id] = bundle

    monkeypatch.setitem(sys.modules, "ipywidgets", SimpleNamespace(HTML=HTML))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return seen


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_it_follows_a_pool_and_ends_with_it(screen, monkeypatch):
    read = module._read
    with EnvPool.local("frozen_lake", slots=2).sync as pool:
        table = watch(pool, every=0.02)
        table._ipython_display_()
        (output,) = screen.outputs.values()
        assert output[WIDGET]["model_id"] == "abc" and "<table" in output["text/html"]
        pool.reset_group(1)
        pool.run_group_step(["up", "up"])
        soon(lambda: "<b>steps</b> 2" in screen.values[-1])
        assert table.running and 'data-watch="live"' in table.html
        calm, looks = len(screen.values), []
        monkeypatch.setattr(module, "_read", lambda target: looks.append(target) or read(target))
        soon(lambda: len(looks) > 3)
        assert len(screen.values) == calm                    # nothing changed, nothing was sent
    soon(lambda: not table.running)
    soon(lambda: 'data-watch="ended"' in table.html)
    (output,) = screen.outputs.values()
    assert WIDGET not in output and "<b>steps</b> 2" in output["text/html"] and "closed" in output["text/html"]
    table.stop()
    assert 'data-watch="ended"' in table.html


def test_stop_looks_once_more_and_leaves_plain_html(screen):
    with EnvPool.local("frozen_lake", slots=1).sync as pool, watch(pool, every=60) as table:
        table._ipython_display_()
        table._ipython_display_()                            # shown twice: one widget, two places
        pool.reset_group(1)
        table.stop()
        assert not table.running and "<b>resets</b> 1" in table.html and 'data-watch="stopped"' in table.html
        assert len(screen.outputs) == 2 and all(WIDGET not in output and output["text/html"] == table.html for output in screen.outputs.values())
        assert not threads()
        table._ipython_display_()
        assert len(screen.outputs) == 3 and WIDGET not in list(screen.outputs.values())[-1]


def test_watching_a_pool_does_not_keep_it():
    pool = EnvPool.local("frozen_lake", slots=1)
    table = watch(pool, every=0.02)
    del pool
    gc.collect()
    soon(lambda: not table.running)


@pytest.mark.parametrize("missing", ["ipywidgets", "IPython.display"])
def test_without_widgets_or_without_ipython_it_still_works(screen, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    table = watch(EnvPool.local("frozen_lake", slots=1), every=60)
    table._ipython_display_()
    table.stop()
    assert "<table" in table._repr_html_() or "size</b> 1" in table._repr_html_()
    assert all(WIDGET not in output for output in screen.outputs.values())


def test_with_the_widgets_that_are_installed_here():
    pytest.importorskip("ipywidgets")
    table = watch(EnvPool.local("frozen_lake", slots=1), every=60)
    table._ipython_display_()
    if table._widget is not None:                            # ipywidgets 7 needs a kernel
        assert table._widget.value == table.html
        assert table._bundle()[WIDGET]["model_id"] == table._widget.model_id
    table.stop()
    assert WIDGET not in table._bundle()


def test_a_server_in_this_process():
    io = IOThread("test-server")
    server = io.wait(EnvServer(env="MiniGrid-Empty-5x5", slots=2, text=("frozen_lake",)).start())
    table = watch(server, every=0.02)
    with EnvPool.connect(server.url, size=2, token=server.config.token).sync as pool:
        pool.reset_group(1)
        soon(lambda: table.stats.get("resets") == 2)
        assert table.stats["sessions"][0] == {"environment": "MiniGrid-Empty-5x5", "in use": 2, "places": 2, "free": 0}
    assert server.config.token not in table.html
    io.wait(server.stop(0))
    soon(lambda: not table.running)
    io.stop()


class Process(ServerProcess):
    "A server process that can be made to die."

    def __init__(self):
        self.token, self.url, self.alive, self.answers = "", "ws://127.0.0.1:1", True, True

    running = property(lambda self: self.alive)

    def stats(self):
        if not self.answers:
            raise ConnectFailed("The server does not answer.")
        return {"live": 1, "attached": 1, "draining": False, "capacity": {"a": 2}, "used": {"a": 1}, "batches": {"1": 3}, "steps": 3}


@pytest.mark.parametrize("how", ["alive", "answers"])
def test_the_end_of_a_server_process_is_the_end_of_the_watch(how):
    server = Process()
    table = watch(server, every=0.02)
    assert table.running and table.stats["ticks"] == 3
    setattr(server, how, False)
    soon(lambda: not table.running)
    table.stop()
    assert "<b>steps</b> 3" in table.html                    # the last table stays


def test_names_are_text():
    said = {"live": 0, "attached": 0, "draining": True, "capacity": {"<script>x": 1}, "used": {}, "batches": {}}
    table = server_stats(said)
    assert "<script>" not in table._repr_html_() and table["server"] == "draining" and table["requests_per_tick"] == 0


def test_wrong_arguments_are_refused():
    pool = EnvPool.local("frozen_lake", slots=1)
    cases = (None, 0.5, TypeError), ("ws://127.0.0.1:8000", 0.5, TypeError), (pool, 0, ValueError), (pool, float("nan"), ValueError), (pool, float("inf"), ValueError), (pool, True, ValueError), (pool, "1", ValueError)
    assert refusals({f"{target} {every!r}": (partial(watch, target, every), error, "") for target, every, error in cases}) == {} and not threads()


def test_widgets_are_imported_only_when_something_is_shown():
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names} | {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("ipywidgets", "IPython")) for name in names)
