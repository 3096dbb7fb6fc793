"""The supervisor: started again from the last checkpoint, never for ever, and nothing left behind."""
import json
import os
import signal
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
# "see PATH" waits until the other process has made it ("startedP.N": until process P has noted its start number N), "stop" waits for SIGINT, saves and ends in
# order, "deaf" waits and obeys nothing. Words and process ids of all starts are noted. Nothing here depends on how fast a process is: what has to come first
# is waited for.
FAKE = """
import json, os, pathlib, signal, subprocess, sys, time
folder, plan = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
mine = sys.argv.index("--process") if "--process" in sys.argv else None
number = "" if mine is None else sys.argv[mine + 1]
starts = folder / f"starts{number}"
before = starts.read_text().count("\\n") if starts.exists() else 0
with open(starts, "a") as file:
    file.write(json.dumps({"pid": os.getpid(), "words": sys.argv[3:], "session": os.getsid(0)}) + "\\n")
(folder / f"started{number}.{before}").touch()
def save(n):
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"{n}.safetensors").touch()
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
    "Supervise a make-believe training; afterwards no process is left and no handler is changed. The status, and what was said on stderr."
    monkeypatch.setattr(module, "_fall_back", lambda *_: False)

    def call(plan, *words, processes=1, **options):
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        options = {"grace": 600, **options}  # time enough on any machine; tests that wait for its end set their own
        status = supervise(command(tmp_path, plan, *words), folder=tmp_path, pause=0, processes=processes, **options)
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
        pids = [s["pid"] for name in ("", "0", "1") for s in starts(tmp_path, name)]
        assert not any(map(alive, pids)), "nobody is left, not even a zombie"
        return status, [line for line in capfd.readouterr().err.splitlines() if line.startswith("supervisor: ")]

    return call


def resumed(folder):
    return ["--resume" in s["words"] for s in starts(folder)]


# Started again --------------------------------------------------------------------------------------------------------------------------

def test_what_goes_well_runs_once(run, tmp_path):
    status, said = run(["save 10"], "--seed", "3")
    assert status == 0 and len(said) == 2 and "the last checkpoint is step 10" in said[-1]
    assert [s["words"] for s in starts(tmp_path)] == [["--seed", "3"]] and starts(tmp_path)[0]["session"] == starts(tmp_path)[0]["pid"]


def test_it_goes_on_from_the_last_checkpoint_after_every_kind_of_death(run, tmp_path):
    plan = ["kill 9", "save 10, kill 9", "save 20, exit 1", "save 30, kill 11", "kill 6", "save 40, kill 15", ""]
    status, said = run(plan)
    assert status == 0 and sum("starting again" in line for line in said) == 6 and "step 40" in said[-1]
    assert resumed(tmp_path) == [False, False, True, True, True, True, True], "only once there is a checkpoint"
    assert [line.rpartition(" ")[2] for line in said if "starting 1 process" in line] == ["beginning.", "beginning.", "10.", "20.", "30.", "30.", "40."]


def test_the_first_start_is_the_command_as_given(run, tmp_path):
    "A run that was there before is not gone on with unless the command says so, however often it is refused."
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "10.safetensors").touch()
    assert run(["exit 1"] * 3)[0] == 1 and resumed(tmp_path) == [False] * 3
    (tmp_path / "starts").unlink()
    assert run(["kill 9", "save 20, kill 9", ""], "--resume", "--seed", "1")[0] == 0
    assert [s["words"] for s in starts(tmp_path)] == [["--seed", "1", "--resume"]] * 3, "said once"


def test_resume_without_anything_to_resume_from_stays_an_error(run, tmp_path):
    assert run(["exit 1"] * 3, "--resume")[0] == 1 and resumed(tmp_path) == [True] * 3


# Given up -------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("death, status", [("exit 5", 5), ("kill 9", 137), ("kill 11", 139)])
def test_starts_that_come_no_further_are_given_up(run, tmp_path, death, status):
    found, said = run(["save 10, " + death] + [death] * 3)
    assert found == status and len(starts(tmp_path)) == 4 and f"status {status}" in said[-1] and "step 10; giving up" in said[-1]


def test_a_wrong_call_is_not_repeated(run, tmp_path):
    status, said = run(["exit 2"])
    assert status == 2 and len(starts(tmp_path)) == 1 and "giving up" in said[-1]


# Asked to stop --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_passes_that_on_once_and_starts_nothing_again(run, tmp_path, number):
    status, said = run([f"stop {number.value}"])
    assert status == 0 and len(said) == 2 and "step 77" in said[-1] and (tmp_path / "interrupts").read_text() == "1"


def test_all_processes_are_asked(run, tmp_path):
    status, said = run({"0": ["see listening1, stop 2"], "1": ["stop 0"]}, processes=2)
    assert status == 0 and len(said) == 2 and len(starts(tmp_path, 1)) == 1


def test_a_process_that_does_not_listen_is_killed_after_the_grace(run):
    status, said = run([f"deaf {signal.SIGTERM.value}"], grace=0.1)
    assert status == 137 and len(said) == 2 and "giving up" not in said[-1]


def test_asked_between_two_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(seconds) if seconds else os.kill(os.getpid(), signal.SIGTERM)))
    status, said = run(["save 10, kill 9", "save 20"])
    assert status == 137 and len(starts(tmp_path)) == 1


# Several processes ----------------------------------------------------------------------------------------------------------------------

def test_if_one_of_two_dies_both_are_started_again(run, tmp_path):
    "The second process dies only when the first one has come so far in the same start: the file of an earlier start would not tell."
    plan = {"0": ["save 10, hang", "save 20, hang", "save 30"], "1": ["see checkpoints/10.safetensors, kill 9", "see checkpoints/20.safetensors, exit 3", ""]}
    status, said = run(plan, "--seed", "3", processes=2)
    assert status == 0 and ["status 137" in line for line in said if "starting again" in line] == [True, False]
    for i in "01":
        words = [s["words"] for s in starts(tmp_path, i)]
        assert all(w[:2] == ["--seed", "3"] and w[-4:] == ["--processes", "2", "--process", i] for w in words)
    meeting = [[s["words"][s["words"].index("--coordinator") + 1] for s in starts(tmp_path, i)] for i in "01"]
    assert meeting[0] == meeting[1] and all(m.startswith("127.0.0.1:") for m in meeting[0])


def test_if_one_is_done_and_the_other_never_is(run, tmp_path):
    status, said = run({"0": ["see started1.0, save 10", "see started1.1, save 20, exit 2"], "1": ["hang", "hang"]}, processes=2, grace=1)
    assert status == 2 and "status 137" in said[1] and len(starts(tmp_path, 1)) == 2


def test_what_a_process_has_started_ends_with_it(run, tmp_path):
    run(["child, save 10, kill 9", ""])
    grandchild = int((tmp_path / "grandchild").read_text())
    assert soon(lambda: not alive(grandchild) or "Z" in Path(f"/proc/{grandchild}/stat").read_text().split(")")[-1])


# Wrong input ----------------------------------------------------------------------------------------------------------------------------

def test_wrong_arguments_start_nothing(tmp_path):
    for options, error, words in [
            (dict(command="train"), TypeError, "list of strings"), (dict(command=[]), TypeError, "list of strings"), (dict(command=["train", 3]), TypeError, "list of strings"),
            (dict(command=["no-such-program"]), ValueError, "begins with .no-such-program."), (dict(processes=0), ValueError, "processes is 0"),
            (dict(tries=0), ValueError, "tries is 0"), (dict(tries=2.0), ValueError, "integer")]:
        with pytest.raises(error, match=words):
            supervise(**{"command": [sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"], "folder": tmp_path, **options})
        assert not (tmp_path / "x").exists()


# Real checkpoints, real training --------------------------------------------------------------------------------------------------------

def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(tmp_path, capfd):
    kept = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        kept.save(step, {"x": np.arange(3.)})
    kept.path(20).write_bytes(kept.path(20).read_bytes()[:-1])
    assert supervise(command(tmp_path, ["exit 1", ""], "--resume"), folder=tmp_path, pause=0) == 0
    assert kept.steps() == [10] and (tmp_path / "checkpoints" / "20.damaged").is_file()
    said = capfd.readouterr().err
    assert "is damaged" in said and "older one, step 10" in said and "from step 10" in said


TRAIN = """
import os, sys
from xland_minigrid.baselines import demo
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, train
config = TrainConfig(size=5, max_steps=12, total_steps=15 * 32 * 40, num_envs=32, steps_per_task=40, steps_per_update=20, out=sys.argv[1], checkpoint_minutes=0.0,
                     ppo=PPOConfig(num_minibatches=4), network=NetworkConfig(embedding=4, encoder_width=32, event=8, memory=16, head=32))
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
    assert capfd.readouterr().err.count("supervisor: starting 1") == 5 and len((tmp_path / "run" / "deaths").read_text()) == 3
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
from xland_minigrid.baselines.checkpoint import Checkpoints, load_together
kept, state = Checkpoints(folder + "/checkpoints", keep=2), {"w": jnp.zeros(3), "n": jnp.int32(0)}
if "--resume" in sys.argv:
    state = load_together(kept, state)[0]
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
    assert capfd.readouterr().err.count("status 137") == 1
    whole, run = (Checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "run"))
    assert whole.steps() == run.steps() == [11, 12] and whole.check()["arrays"] == run.check()["arrays"]
