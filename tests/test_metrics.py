"""What a run writes down: nothing lost, nothing twice, and no copy of it can stop the training."""
import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xland_minigrid.baselines import metrics
from xland_minigrid.baselines.metrics import LOGGERS, MetricsError, open_loggers, read_metrics

FLOATS = st.floats(width=64)
ROWS = st.lists(st.dictionaries(st.sampled_from(["return", "loss/belief", "é λ", "seconds", "x" * 200]), FLOATS), max_size=8).map(
    lambda rows: [{"steps": 7 * i**9, **row} for i, row in enumerate(rows, 1)])


@pytest.fixture(autouse=True)
def no_account(monkeypatch):
    "No test may meet the W&B account of whoever runs it."
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def row(i):
    return {"steps": 100 * i, "seconds": 2.0 * i, "return": 0.125 * i}


def log(loggers, rows):
    with loggers:
        for one in rows:
            loggers.log(one)


def same(a, b):
    return [{name: repr(x) for name, x in row.items()} for row in a] == [{name: repr(x) for name, x in row.items()} for row in b]


def board(folder):
    "What TensorBoard sees: points `(step, value)` by name."
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="reads event files as TensorBoard does")
    seen = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(x.step, x.value) for x in seen.Scalars(name)] for name in seen.Tags()["scalars"]}


# JSON lines ---------------------------------------------------------------------------------------------------------------------------

def strict(text):
    "JSON as everybody else reads it."
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")
    return json.loads(text, parse_constant=refuse)


@given(ROWS)
def test_what_is_logged_is_read(tmp_path_factory, rows):
    out = tmp_path_factory.mktemp("run")
    loggers = open_loggers(out, names=["jsonl"])
    log(loggers, rows)
    for line in (out / "metrics.jsonl").read_text().splitlines():
        strict(line)
    finite = lambda rows: [{name: x if math.isfinite(x) else math.nan for name, x in row.items()} for row in rows]
    assert same(read_metrics(out), finite(rows)) and same(read_metrics(out / "metrics.jsonl"), finite(rows)) and same(loggers.rows, rows)


def test_numbers_of_numpy_and_jax(tmp_path):
    log(open_loggers(tmp_path), [{"steps": np.int32(5), "a": jnp.float32(0.5), "b": np.bool_(True), "c": np.float16(2), "d": jnp.int32(-3)}])
    assert same(read_metrics(tmp_path), [{"steps": 5, "a": 0.5, "b": True, "c": 2.0, "d": -3}])


def test_cut_off_anywhere(tmp_path):
    "A file that ends after any of its bytes gives the rows that are whole in it."
    log(open_loggers(tmp_path, names=["jsonl"]), [{**row(i), "entropy": math.nan, "é": -1e-7} for i in (1, 2, 3)])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    rows, cut = read_metrics(tmp_path), tmp_path / "cut.jsonl"
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for n in range(len(whole) + 1):
        cut.write_bytes(whole[:n])
        assert same(read_metrics(cut), rows[: sum(n >= end for end in ends)]), n


@pytest.mark.parametrize("bad", ["{", "", "7", "null", '{"return": 1}', '{"steps": "many"}', '{"steps": 1, "x": [2]}', "\x00\xff"])
def test_damage_is_said(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join([json.dumps(row(1)), bad, json.dumps(row(2)), ""]).encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(MetricsError, match=r"Line 2 of .* is not a row of metrics: delete it"):
        open_loggers(tmp_path, resume_from=1000)
    assert path.read_bytes() == before, "a refusal changes nothing"


def test_nobody_closed_it(tmp_path):
    "Rows are on their way to the disk as soon as they are logged; and nothing heavy was imported for it."
    program = f"""
import os, signal, sys
from xland_minigrid.baselines import metrics
from xland_minigrid.baselines.metrics import open_loggers
loggers = open_loggers({str(tmp_path)!r})
for i in range(1, 4):
    loggers.log({{"steps": 100 * i, "seconds": 2.0 * i, "return": 0.125 * i}})
heavy = {{"tensorboard", "tensorflow", "torch", "wandb", "matplotlib"}} & set(sys.modules)
os.kill(os.getpid(), signal.SIGTERM if heavy else signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert read_metrics(tmp_path) == [row(i) for i in (1, 2, 3)]
    assert board(tmp_path)["return"] == [(100 * i, 0.125 * i) for i in (1, 2, 3)]


# TensorBoard --------------------------------------------------------------------------------------------------------------------------

@given(ROWS)
def test_tensorboard_reads_what_was_written(tmp_path_factory, rows):
    out = tmp_path_factory.mktemp("run")
    log(open_loggers(out), rows)
    with np.errstate(over="ignore"):
        single = lambda x: repr(float(np.float32(x)))
        points = {name: [(row["steps"], single(row[name])) for row in rows if name in row] for name in {n for row in rows for n in row} - {"steps"}}
    assert {name: [(step, repr(x)) for step, x in seen] for name, seen in board(out).items()} == points


# Resume -------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("checkpoint", [None, 0, 99, 100, 250, 300, 1000])
def test_resume_has_no_row_twice(tmp_path, checkpoint):
    log(open_loggers(tmp_path), map(row, range(1, 6)))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"steps": 600, "ret')
    events = next((tmp_path / "tensorboard").iterdir())
    events.write_bytes(events.read_bytes()[:-3])
    loggers = open_loggers(tmp_path, resume_from=checkpoint)
    kept = [row(i) for i in range(1, 6) if row(i)["steps"] <= (checkpoint or 0)]
    assert loggers.rows == kept == read_metrics(tmp_path)
    log(loggers, map(row, range(len(kept) + 1, 7)))
    assert loggers.rows == read_metrics(tmp_path) == [row(i) for i in range(1, 7)]
    assert board(tmp_path) == {"seconds": [(100 * i, 2.0 * i) for i in range(1, 7)], "return": [(100 * i, 0.125 * i) for i in range(1, 7)]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_resume_under_an_open_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="reads event files as TensorBoard does")
    log(open_loggers(tmp_path), map(row, range(1, 6)))
    seen = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [x.step for x in seen.Scalars("return")] == [100, 200, 300, 400, 500]
    log(open_loggers(tmp_path, resume_from=200), [{**row(3), "return": 9.0}])
    seen.Reload()
    assert [(x.step, x.value) for x in seen.Scalars("return")] == [(100, 0.125), (200, 0.25), (300, 9.0)]


def test_a_logger_that_joins_late_has_the_whole_curve(tmp_path):
    log(open_loggers(tmp_path, names=["jsonl"]), map(row, range(1, 4)))
    assert not (tmp_path / "tensorboard").exists()
    log(open_loggers(tmp_path, resume_from=300), [row(4)])
    assert [step for step, _ in board(tmp_path)["return"]] == [100, 200, 300, 400]


# What can go wrong --------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def small_files():
    "A disk on which no file can grow beyond what is asked for."
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk(tmp_path, small_files):
    loggers, logged = open_loggers(tmp_path), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        small_files(1000)  # the event file is the larger one, and has to give up first
        with pytest.raises(MetricsError) as refusal:
            for i in range(1, 1000):
                loggers.log(row(i))
                logged.append(row(i))
        small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    said = [warning for warning in said if warning.category is UserWarning]  # not that the half-written file is closed late
    assert len(said) == 1 and "tensorboard is not logged to any longer" in str(said[0].message)
    assert "free some space" in str(refusal.value) and "\n" not in str(refusal.value)
    assert len(logged) > 10 and read_metrics(tmp_path) == logged, "all rows but the last are there"
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n"), "and no half of the last"
    loggers.log(row(len(logged) + 1))
    assert len(read_metrics(tmp_path)) == len(logged) + 1


def test_full_disk_at_the_beginning(tmp_path, small_files):
    log(open_loggers(tmp_path), map(row, range(1, 50)))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    small_files(500)
    with pytest.raises(MetricsError, match="cannot be written"):
        open_loggers(tmp_path, resume_from=4000)
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and not (tmp_path / "metrics.jsonl.new").exists()


def test_a_copy_that_cannot_be_opened(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.warns(UserWarning, match="tensorboard is not logged to any longer") as said:
        log(open_loggers(tmp_path), map(row, range(1, 4)))
    assert len(said) == 1 and read_metrics(tmp_path) == [row(1), row(2), row(3)]


def test_wrong_input(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(metrics, "_has_tensorboard", lambda: False)
    (tmp_path / "file").write_text("")
    for kind, text, call in [
        (ValueError, "Unknown logger 'tensorbord': choose from jsonl, tensorboard, wandb", lambda: open_loggers(tmp_path / "a", names=["tensorbord"])),
        (ValueError, "Unknown logger 'csv'", lambda: open_loggers(tmp_path / "a", names="csv", active=False)),
        (ImportError, "pip install 'xland_minigrid[train]'", lambda: open_loggers(tmp_path / "a", names=["tensorboard"])),
        (ImportError, "pip install wandb", lambda: open_loggers(tmp_path / "a", names=["jsonl", "wandb"])),
        (MetricsError, "choose another folder", lambda: open_loggers(tmp_path / "file")),
        (MetricsError, "choose another folder", lambda: open_loggers(tmp_path / "file" / "run")),
        (MetricsError, "choose another folder", lambda: open_loggers("/proc/nowhere")),
    ]:
        with pytest.raises(kind) as refusal:
            call()
        assert text in str(refusal.value) and "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert not (tmp_path / "a").exists(), "refused before anything is made"


@pytest.mark.parametrize("bad", [{}, {"seconds": 1.0}, {"steps": math.nan}, {"steps": 1.5}, {"steps": -1}, {"steps": 2**63}, {"steps": 1, "x": np.zeros(3)},
                                 {"steps": 1, "x": "much"}, {"steps": 1, "x": None}, {"steps": 1, "x": 1j}])
def test_a_row_that_is_none(tmp_path, bad):
    loggers = open_loggers(tmp_path)
    loggers.log(row(1))
    with pytest.raises(ValueError, match="an integer from 0 on|log one number a name"):
        loggers.log(bad)
    loggers.log(row(2))
    assert loggers.rows == read_metrics(tmp_path) == [row(1), row(2)]


def test_only_one_process_writes(tmp_path):
    log(open_loggers(tmp_path / "run"), map(row, range(1, 4)))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = open_loggers(tmp_path / "run", resume_from=200, active=False)
    log(other, [row(3)])
    assert other.rows == [row(1), row(2), row(3)]
    log(open_loggers(tmp_path / "elsewhere", active=False), [row(1)])
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} and not (tmp_path / "elsewhere").exists()


def test_ctrl_c_is_no_failure_of_a_logger(tmp_path):
    loggers = open_loggers(tmp_path)
    def interrupted(_):
        raise KeyboardInterrupt
    loggers._copies["tensorboard"].write = interrupted
    with pytest.raises(KeyboardInterrupt):
        loggers.log(row(1))
    loggers.close()
    loggers.close()
    assert read_metrics(tmp_path) == [row(1)]


# W&B: its client is no dependency, so a stand-in says what it was told ---------------------------------------------------------------------

@dataclasses.dataclass
class StandIn:
    said: list
    fails: str = ""

    def module(self):
        module = types.ModuleType("wandb")
        module.init = self.init
        return module

    def say(self, what, **details):
        if what == self.fails:
            raise ConnectionError("no network")
        self.said.append((what, details))

    def init(self, **details):
        self.say("init", **details)
        self.id = details["id"] or f"run{len(self.said)}"
        return self

    def log(self, values, step):
        self.say("log", step=step, **values)

    def finish(self, exit_code):
        self.say("finish", exit_code=exit_code)


@pytest.fixture
def wandb(monkeypatch):
    stand_in = StandIn([])
    monkeypatch.setitem(sys.modules, "wandb", stand_in.module())
    return stand_in


def told(row):
    return "log", {"step": row["steps"], **{name: x for name, x in row.items() if name != "steps"}}


def test_wandb_is_told(tmp_path, wandb):
    log(open_loggers(tmp_path / "run", {"lr": 1e-3}, LOGGERS), map(row, (1, 2)))
    assert wandb.said == [("init", dict(project="xland_minigrid", name="run", dir=str(tmp_path / "run"), config={"lr": 1e-3}, id=None, resume="allow")),
                          told(row(1)), told(row(2)), ("finish", {"exit_code": 0})]
    del wandb.said[:]
    log(open_loggers(tmp_path / "run", {}, "wandb", resume_from=100), [row(2)])
    assert wandb.said[0][1]["id"] == "run1" and wandb.said[1:] == [told(row(2)), ("finish", {"exit_code": 0})], "the same run goes on"
    del wandb.said[:]
    log(open_loggers(tmp_path / "run", {}, "wandb"), [row(1)])
    assert wandb.said[0][1]["id"] is None, "a run that begins anew is another one"


def test_wandb_joins_late(tmp_path, wandb):
    log(open_loggers(tmp_path), map(row, (1, 2)))
    log(open_loggers(tmp_path, names=["wandb"], resume_from=200), [row(3)])
    assert wandb.said[1:-1] == [told(row(1)), told(row(2)), told(row(3))]


def test_wandb_only_where_a_project_is_named(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "an account is not yet a wish")
    log(open_loggers(tmp_path / "a"), [row(1)])
    assert not wandb.said
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    log(open_loggers(tmp_path / "b"), [row(1)])
    assert wandb.said[0][1]["project"] == "mine"
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # a folder of that name, which W&B leaves where it ran
    log(open_loggers(tmp_path / "c"), [row(1)])
    monkeypatch.setitem(sys.modules, "wandb", None)
    log(open_loggers(tmp_path / "d"), [row(1)])
    with pytest.raises(ImportError, match="pip install wandb"):
        open_loggers(tmp_path / "e", names=["wandb"])


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_wandb_fails(tmp_path, wandb, fails):
    wandb.fails = fails
    with pytest.warns(UserWarning, match="wandb is not logged to any longer .*no network") as said:
        log(open_loggers(tmp_path, names=LOGGERS), map(row, range(1, 5)))
    assert len(said) == 1 and read_metrics(tmp_path) == [row(i) for i in range(1, 5)]
    assert len(board(tmp_path)["return"]) == 4, "the other one goes on"


def test_wandb_hears_of_a_failed_run(tmp_path, wandb):
    with pytest.raises(FloatingPointError), open_loggers(tmp_path, names=["wandb"]):
        raise FloatingPointError
    assert wandb.said[-1] == ("finish", {"exit_code": 1})
