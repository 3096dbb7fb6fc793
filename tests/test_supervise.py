"""The supervisor: started again from the last checkpoint, never for ever, and nothing left behind."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xland_minigrid.baselines import supervise as module
from xland_minigrid.baselines.checkpoint import Checkpoints
from xland_minigrid.baselines.supervise import supervise

pytestmark = pytest.mark.newest

# A make-believe training. PLAN lists, for each start, what happens: "save N" makes the checkpoint N, "exit N" and "kill N" end it, "hang" waits for ever,
# "see PATH" waits until the other process has made it, "stop" waits for SIGINT, saves and ends in order, "deaf" waits and obeys nothing. Words and process
# ids of all starts are noted. Nothing here depends on how fast a process is: what has to come first is waited for.
FAKE = """
import json, os, pathlib, signal, subprocess, sys, time
folder, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
mine = sys.argv.index("--process") if "--process" in sys.argv else None
number = "" if mine is None else sys.argv[mine + 1]
starts = folder / f"starts{number}"
before = starts.read_text().count("\\n") if starts.exists() else 0
with open(starts, "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "words": sys.argv[3:], "session": os.getsid(0)}) + "\\n")
save = lambda n: (folder / "checkpoints" / n).mkdir(parents=True, exist_ok=True)
for what in plan[number or "0"][before]:
    verb, _, n = what.partition(" ")
    if verb == "save": save(n)
    if verb == "exit": sys.exit(int(n))
    if verb == "kill": os.kill(os.getpid(), int(n))
    if verb == "ask": os.kill(os.getppid(), int(n))
    if verb == "child": (folder / "grandchild").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    if verb == "see":
        while not (folder / n).exists(): time.sleep(0.01)
    if verb == "hang": time.sleep(1000)
    if verb == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), int(n)); time.sleep(1000)
    if verb == "stop":
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        (folder / f"listening{number}").touch()
        os.kill(os.getppid(), int(n))
        while not seen: time.sleep(0.01)
        time.sleep(0.2)
        (folder / "interrupts").write_text(str(len(seen)))
        save("77"); sys.exit(0)
"""


def command(folder, plan, *words):
    plan = plan if isinstance(plan, dict) else {"0": plan}
    return [sys.executable, "-S", "-c", FAKE, str(folder), json.dumps({k: [start.split(", ") if start else [] for start in v] for k, v in plan.items()}), *words]


def starts(folder, number=""):
    file = folder / f"starts{number}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def events(folder):
    return [json.loads(line) for line in (folder / "supervisor.jsonl").read_text().splitlines()]


def alive(pid):
    "Whether a process exists; a zombie does."
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def soon(condition):
    "Whether something that must happen does, however slow the machine."
    for _ in range(30_000):  # ten minutes: only a hang takes that long
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    "Supervise a make-believe training; afterwards no process is left, no handler is changed, and every event was said on stderr in one line."
    monkeypatch.setattr(module, "_fall_back", lambda *_: False)

    def call(plan, *words, processes=1, **options):
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        options = {"grace": 600, **options}  # time enough on any machine; tests that wait for its end set their own
        status = supervise(command(tmp_path, plan, *words), folder=tmp_path, pause=0, processes=processes, **options)
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
        pids = [s["pid"] for name in ("", "0", "1") for s in starts(tmp_path, name)]
        assert not any(map(alive, pids)), "nobody is left, not even a zombie"
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("supervisor: ")]
        assert lines == [f"supervisor: {row['sentence']}" for row in events(tmp_path)] and all(line.endswith(".") for line in lines)
        return status, [row["event"] for row in events(tmp_path)], events(tmp_path)[-1]

    return call


def resumed(folder):
    return ["--resume" in s["words"] for s in starts(folder)]


# Started again --------------------------------------------------------------------------------------------------------------------------

def test_what_goes_well_runs_once(run, tmp_path):
    status, said, last = run(["save 10"], "--seed", "3")
    assert (status, said, last["step"]) == (0, ["start", "end"], 10)
    assert [s["words"] for s in starts(tmp_path)] == [["--seed", "3"]] and starts(tmp_path)[0]["session"] == starts(tmp_path)[0]["pid"]


def test_it_goes_on_from_the_last_checkpoint_after_every_kind_of_death(run, tmp_path):
    plan = ["kill 9", "save 10, kill 9", "save 20, exit 1", "save 30, kill 11", "kill 6", "save 40, kill 15", ""]
    status, said, last = run(plan)
    assert status == 0 and said == ["start", "restart"] * 6 + ["start", "end"] and last["step"] == 40
    assert resumed(tmp_path) == [False, False, True, True, True, True, True], "only once there is a checkpoint"
    assert [row["step"] for row in events(tmp_path) if row["event"] == "start"] == [None, None, 10, 20, 30, 30, 40]
    assert [row["status"] for row in events(tmp_path) if row["event"] == "restart"] == [-9, -9, 1, -11, -6, -15]


def test_the_first_start_is_the_command_as_given(run, tmp_path):
    "A run that was there before is not gone on with unless the command says so, however often it is refused."
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    assert run(["exit 1"] * 3)[0] == 1 and resumed(tmp_path) == [False] * 3
    (tmp_path / "starts").unlink()
    (tmp_path / "supervisor.jsonl").unlink()
    assert run(["kill 9", "save 20, kill 9", ""], "--resume", "--seed", "1")[0] == 0
    assert [s["words"] for s in starts(tmp_path)] == [["--seed", "1", "--resume"]] * 3, "said once"


def test_resume_without_anything_to_resume_from_stays_an_error(run, tmp_path):
    assert run(["exit 1"] * 3, "--resume")[0] == 1 and resumed(tmp_path) == [True] * 3


def test_without_a_folder_every_start_begins_anew(tmp_path, capfd):
    assert supervise(command(tmp_path, ["kill 9", "save 10, kill 9", ""]), pause=0) == 0
    assert resumed(tmp_path) == [False] * 3 and not (tmp_path / "supervisor.jsonl").exists()


# Given up -------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("death, status", [("exit 5", 5), ("kill 9", 137), ("kill 11", 139)])
def test_starts_that_come_no_further_are_given_up(run, tmp_path, death, status):
    found, said, last = run(["save 10, " + death] + [death] * 3)
    assert (found, last["event"], last["step"]) == (status, "give up", 10) and len(starts(tmp_path)) == 4
    assert "3 starts in a row made no new checkpoint" in last["sentence"] and "last checkpoint is step 10" in last["sentence"]


def test_a_wrong_call_is_not_repeated(run, tmp_path):
    status, said, last = run(["exit 2"])
    assert status == 2 and said == ["start", "give up"] and "called wrongly" in last["sentence"]


def test_too_many_deaths_in_a_window(run, tmp_path, monkeypatch):
    plan = [f"save {i}, kill 9" for i in range(1, 6)] + [""]
    status, said, last = run(plan, max_restarts=3)
    assert status == 137 and said.count("start") == 4 and "died 4 times within 3600 s: raise max_restarts" in last["sentence"] and last["step"] == 4


def test_deaths_that_lie_far_apart_do_not_add_up(run, tmp_path):
    assert run([f"save {i}, kill 9" for i in range(1, 6)] + [""], max_restarts=1, window=1e-6)[0] == 0
    assert len(starts(tmp_path)) == 6


# Asked to stop --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_passes_that_on_once_and_starts_nothing_again(run, tmp_path, number):
    status, said, last = run([f"stop {number.value}"])
    assert (status, said, last["step"]) == (0, ["start", "end"], 77) and number.name in last["sentence"]
    assert (tmp_path / "interrupts").read_text() == "1"


def test_all_processes_are_asked(run, tmp_path):
    status, said, last = run({"0": ["see listening1, stop 2"], "1": ["stop 0"]}, processes=2)
    assert status == 0 and said == ["start", "end"] and len(starts(tmp_path, 1)) == 1


def test_who_does_not_listen_is_killed_after_the_grace(run):
    status, said, last = run([f"deaf {signal.SIGTERM.value}"], grace=0.1)
    assert status == 137 and said == ["start", "end"] and "0.1 s of grace" in last["sentence"]


def test_asked_twice_it_waits_for_nobody(run, tmp_path, monkeypatch):
    passed = []
    monkeypatch.setattr(module, "_interrupt", lambda processes: passed.append(1) or os.kill(os.getpid(), signal.SIGINT))
    status, said, last = run([f"deaf {signal.SIGINT.value}"], grace=1000)
    assert status == 137 and passed == [1] and "asked twice" in last["sentence"]


def test_asked_between_two_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_wait", lambda seconds, asked: asked.note(signal.SIGTERM, None))
    status, said, last = run(["save 10, kill 9", "save 20"])
    assert status == 137 and said == ["start", "restart", "end"] and "SIGTERM it is not started again" in last["sentence"] and len(starts(tmp_path)) == 1


# Several processes, and those that hang -------------------------------------------------------------------------------------------------

def test_if_one_of_two_dies_both_are_started_again(run, tmp_path):
    "The second process dies only when the first one has come so far in the same start: the file of an earlier start would not tell."
    plan = {"0": ["save 10, hang", "save 20, hang", "save 30"], "1": ["see checkpoints/10, kill 9", "see checkpoints/20, exit 3", ""]}
    status, said, last = run(plan, "--seed", "3", processes=2)
    assert status == 0 and said == ["start", "restart"] * 2 + ["start", "end"]
    assert [(r["process"], r["status"]) for r in events(tmp_path) if r["event"] == "restart"] == [(1, -9), (1, 3)]
    for i in "01":
        words = [s["words"] for s in starts(tmp_path, i)]
        assert all(w[:2] == ["--seed", "3"] and w[-4:] == ["--processes", "2", "--process", i] for w in words)
    meeting = [[s["words"][s["words"].index("--coordinator") + 1] for s in starts(tmp_path, i)] for i in "01"]
    assert meeting[0] == meeting[1] and all(m.startswith("127.0.0.1:") for m in meeting[0])


def test_if_one_is_done_and_the_other_never_is(run, tmp_path, monkeypatch):
    "The clock runs in the first start alone, so that the second one has all the time it needs."
    now = [0.0]

    def clock():
        now[0] += 100 if (tmp_path / "supervisor.jsonl").read_text().count('"start"') == 1 else 0
        return now[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep, strftime=time.strftime))
    status, said, last = run({"0": ["see starts1, save 10", "save 20"], "1": ["hang", ""]}, processes=2, grace=200)
    assert status == 0 and said == ["start", "restart", "start", "end"] and "process 1 still running" in events(tmp_path)[1]["sentence"]


def test_what_a_process_has_started_ends_with_it(run, tmp_path):
    run(["child, save 10, kill 9", ""])
    grandchild = int((tmp_path / "grandchild").read_text())
    assert soon(lambda: not alive(grandchild) or "Z" in Path(f"/proc/{grandchild}/stat").read_text().split(")")[-1])


def test_silence_counts_from_the_last_sign_of_life(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    silent = module._watch_silence(tmp_path, 60)
    for seconds, sign, expected in ((59, None, 0), (2, None, 61), (300, None, 361), (0, "metrics.jsonl", 0), (59, None, 0), (0, "checkpoints/1", 0), (61, None, 61), (100, None, 161)):
        now[0] += seconds + 1e-3
        if sign:
            (tmp_path / sign).parent.mkdir(exist_ok=True)
            (tmp_path / sign).mkdir() if "/" in sign else (tmp_path / sign).write_text("row")
            now[0] += 1
        assert silent() == pytest.approx(expected, abs=1.5) and bool(silent()) == bool(expected)
    assert module._watch_silence(tmp_path, None)() == 0


def test_what_shows_no_sign_of_life_is_started_again(run, tmp_path, monkeypatch):
    watches = []

    def watch(folder, patience):
        watches.append(patience)
        return (lambda: 61 if (folder / "checkpoints" / "10").exists() else 0) if len(watches) == 1 else lambda: 0

    monkeypatch.setattr(module, "_watch_silence", watch)
    status, said, last = run(["save 10, hang", "save 20"], patience=60)
    assert status == 0 and said == ["start", "restart", "start", "end"] and "no sign of life for 61 s" in events(tmp_path)[1]["sentence"]
    assert watches == [60, 60], "each start is watched anew"


# Killed itself --------------------------------------------------------------------------------------------------------------------------

SUPERVISOR = "import json, sys; from xland_minigrid.baselines.supervise import supervise; supervise(json.loads(sys.argv[1]), folder=sys.argv[2], processes=2)"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_supervisor_that_is_killed_leaves_no_orphans(tmp_path):
    words = command(tmp_path, {"0": ["hang"], "1": ["hang"]})
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, json.dumps(words), str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        assert soon(lambda: starts(tmp_path, 0) and starts(tmp_path, 1))
        pids = [starts(tmp_path, i)[0]["pid"] for i in (0, 1)]
        assert all(map(alive, pids))
    finally:
        supervisor.kill()
        supervisor.wait()
    # Orphans are reaped by process 1, in some containers late: a zombie has ended.
    gone = lambda pid: not alive(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert soon(lambda: all(map(gone, pids)))


def test_a_parent_that_died_before_the_launch_launches_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-I", "-S", "-c", module._LAUNCH, "1", "touch", str(tmp_path / "x")], start_new_session=True)
    assert done.returncode == 0 and not (tmp_path / "x").exists()


# Wrong input ----------------------------------------------------------------------------------------------------------------------------

def test_wrong_arguments_start_nothing(tmp_path):
    for options, error, words in [
            (dict(command="train"), TypeError, "list of strings"), (dict(command=[]), TypeError, "list of strings"), (dict(command=["train", 3]), TypeError, "list of strings"),
            (dict(command=["no-such-program"]), ValueError, "no program no-such-program"), (dict(max_restarts=-1), ValueError, "max_restarts is -1"),
            (dict(processes=0), ValueError, "processes is 0"), (dict(tries=0), ValueError, "tries is 0"), (dict(tries=2.0), ValueError, "whole number"),
            (dict(window=0), ValueError, "window is 0"), (dict(grace=-1), ValueError, "grace is -1"), (dict(grace="9"), ValueError, "grace is '9'"),
            (dict(patience=5), ValueError, "give folder"), (dict(patience=0, folder="x"), ValueError, "patience is 0")]:
        with pytest.raises(error, match=words):
            supervise(**{"command": [sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"], **options})
        assert not (tmp_path / "x").exists()


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert supervise(command(tmp_path, ["exit 0"]), folder=tmp_path / "file", pause=0) == 0
    assert "training ended in order" in capfd.readouterr().err


# Real checkpoints, real training --------------------------------------------------------------------------------------------------------

def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(tmp_path, capfd):
    kept = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        kept.save(step, {"x": np.arange(3.)})
    shutil.rmtree(kept.path(20) / "state")
    assert supervise(command(tmp_path, ["exit 1", ""], "--resume"), folder=tmp_path, pause=0) == 0
    assert [row["event"] for row in events(tmp_path)] == ["start", "restart", "fall back", "start", "end"]
    assert kept.steps() == [10] and (tmp_path / "checkpoints" / "20.damaged").is_dir() and events(tmp_path)[3]["step"] == 10
    assert "step 20 is damaged" in capfd.readouterr().err and "older one, step 10" in events(tmp_path)[2]["reason"]


TRAIN = """
import os, sys
from xland_minigrid.baselines import demo
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, train
config = TrainConfig(size=5, max_steps=12, total_steps=15 * 32 * 40, num_envs=32, steps_per_task=40, steps_per_update=20, out=sys.argv[1], checkpoint_minutes=0.0,
                     ppo=PPOConfig(num_minibatches=4), network=NetworkConfig(embedding=4, encoder=32, event=8, memory=16, head=32))
deaths = [int(x) for x in sys.argv[2].split(",") if x]
mark = os.path.join(sys.argv[1], "deaths")
def on_round(row):
    seen = os.path.getsize(mark) if os.path.exists(mark) else 0
    if seen < len(deaths) and row["steps"] >= deaths[seen] * config.steps_per_round:
        open(mark, "a").write("x")
        os.kill(os.getpid(), 9)
train(config, demo.hold_tasks(demo.OBJECTS, 300), progress=False, resume="--resume" in sys.argv, on_round=on_round)
"""


@pytest.mark.slow
def test_supervised_training_ends_where_it_would_have_ended(tmp_path, capfd):
    for name, deaths in (("whole", ""), ("run", "1,5,9")):
        words = [sys.executable, "-c", TRAIN, str(tmp_path / name), deaths]
        assert supervise(words, folder=tmp_path / name, pause=0) == 0
    assert [row["event"] for row in events(tmp_path / "run")].count("start") == 4 and len((tmp_path / "run" / "deaths").read_text()) == 3
    whole, run = (Checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "run"))
    assert whole.steps()[-1] == run.steps()[-1] and whole.check()["arrays"] == run.check()["arrays"]


# Two processes that need each other in every step, as training over many hosts does. In the first start the second one is killed in the middle.
TOGETHER = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
folder, fatal = sys.argv[1], int(sys.argv[2])
value = lambda name: sys.argv[sys.argv.index(name) + 1]
me = int(value("--process"))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(value("--coordinator"), int(value("--processes")), me)
from jax.experimental.multihost_utils import process_allgather
from xland_minigrid.baselines.checkpoint import Checkpoints
kept, state = Checkpoints(folder + "/checkpoints", keep=2), {"w": jnp.zeros(3), "n": jnp.int32(0)}
if "--resume" in sys.argv:
    state = kept.load_together(state)[0]
with kept:
    while state["n"] < 12:
        gathered = process_allgather(state["w"] * 0.9 + me + 1)
        state = {"w": gathered.sum(0), "n": state["n"] + 1}
        kept.save(int(state["n"]), state)
        if me == 1 and state["n"] == fatal and "--resume" not in sys.argv:
            os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_one_of_two_real_processes_is_killed(tmp_path, capfd):
    for name, fatal in (("whole", 0), ("run", 7)):
        words = [sys.executable, "-c", TOGETHER, str(tmp_path / name), str(fatal)]
        assert supervise(words, folder=tmp_path / name, processes=2, pause=0) == 0, capfd.readouterr().err
    assert [(r["event"], r.get("process"), r.get("status")) for r in events(tmp_path / "run")][1] == ("restart", 1, -9)
    whole, run = (Checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "run"))
    assert whole.steps() == run.steps() == [11, 12] and whole.check()["arrays"] == run.check()["arrays"]
    assert events(tmp_path / "run")[2]["step"] >= 1, "not from the beginning"
