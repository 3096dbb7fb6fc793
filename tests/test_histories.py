"""Histories: what the environment says when it is stepped again, what the files survive, and what learners are given."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import xland_minigrid.benchmarks.histories as module
from xland_minigrid.baselines.demo import OBJECTS, hold_tasks
from xland_minigrid.benchmarks import Benchmark, BenchmarkFileError
from xland_minigrid.benchmarks.expert import consult, plan_steps, task_plan
from xland_minigrid.benchmarks.files import blake
from xland_minigrid.benchmarks.histories import (
    ENDED, NO_ADVICE, NO_STEPS, STEP_FIELDS, TASK_FIELDS, TIME_OUT, Histories, NoisyExpert, Windows, check_histories, load_histories, record,
    returns_by_tenth, sample, watch_history)
from xland_minigrid.core.goals import OneTileGoal, register_goal
from xland_minigrid.core.rules import on_cells
from xland_minigrid.core.tiles import pack_pairs, unpack
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, GymAutoResetWrapper
from worlds import refusals

pytestmark = pytest.mark.newest

ONE_SENTENCE = r"^(?!.*\. ).*\.$"
NUMBERS = [0, 5, 7, 5, 39, 2, 11]
ASKED = dict(steps=200, seed=5, batch=8)  # one program for all: it plays eight worlds, also where fewer are asked for


def played(tasks, numbers, world, **more):
    "As `record`, but never with a smaller batch."
    several = [*numbers, *[numbers[-1]] * (8 - len(numbers))]
    histories = record(NoisyExpert(), *world, tasks, several, **ASKED | more)
    return Histories([{name: array[:len(numbers)] for name, array in histories.parts[0].items()}], histories.about)


@pytest.fixture(scope="module")
def tasks():
    return hold_tasks(OBJECTS, 40, seed=3)


@pytest.fixture(scope="module")
def world():
    return make("XLand-MiniGrid-R1-9x9", height=6, width=6, max_steps=40)


@pytest.fixture(scope="module")
def noisy(tasks, world):
    return played(tasks, NUMBERS, world)


def in_folder(folder, tasks, world, **more):
    return record(NoisyExpert(), *world, tasks, NUMBERS + [1], folder=folder, per_file=8, **ASKED | more)


@pytest.fixture
def file(tasks, world, tmp_path, noisy):
    path = tmp_path / "part.safetensors"
    module._write_part(path, noisy.parts[0], noisy.about | {"part": 0})
    return path


def same(a: Histories, b: Histories) -> bool:
    return len(a) == len(b) and all(a.array(name).dtype == b.array(name).dtype and np.array_equal(a.array(name), b.array(name)) for name in STEP_FIELDS | TASK_FIELDS)


# ------------------------------------------------------------------------------------------- what was recorded is what happens


def test_the_environment_gives_the_same_bytes(noisy, tasks, world):
    "An environment with auto-reset, stepped by hand, and the expert asked by hand."
    env, params = world
    auto = GymAutoResetWrapper(env)
    reset, step, ask = jax.jit(auto.reset), jax.jit(auto.step), jax.jit(consult)
    for h in (0, 3):
        history, own = noisy[h], params.replace(ruleset=tasks.get_ruleset(NUMBERS[h]))
        plan = task_plan(own.ruleset, plan_steps(tasks.take([NUMBERS[h]]).to_numpy().plans())[0])
        timestep = reset(own, jax.random.split(jax.random.wrap_key_data(jnp.asarray(history["key"])))[0])
        for i in range(noisy.num_steps):
            agent, advice = timestep.state.agent, ask(timestep.state, plan)
            np.testing.assert_array_equal(unpack(history["observation"][i]), timestep.observation)
            assert history["direction"][i] == agent.direction and (unpack(history["pocket"][i]) == agent.pocket).all()
            assert history["expert_action"][i] == (advice.action if advice.found else NO_ADVICE)
            assert history["steps_to_go"][i] == (np.round(advice.steps) if advice.found else NO_STEPS)
            timestep = step(own, timestep, int(history["action"][i]))
            assert history["reward"][i] == np.float16(timestep.reward)
            assert history["done"][i] == (0 if not timestep.last() else TIME_OUT if timestep.discount else ENDED)
    assert {0, TIME_OUT, ENDED} == set(np.unique(noisy.array("done")))


def test_noise_falls_and_random_actions_are_even(tasks, world):
    histories = record(NoisyExpert(1.0, 0.2, 0.5), *world, tasks, range(40), **ASKED | {"batch": 40})
    same_action = histories.array("action") == histories.array("expert_action")
    first, last = same_action[:, :40], same_action[:, 160:]
    assert abs(first.mean() - 1 / 6) < 0.04 and abs(last.mean() - (0.8 + 0.2 / 6)) < 0.05
    assert (abs(np.bincount(histories.array("action")[:, :40].ravel(), minlength=6) / 1600 - 1 / 6) < 0.04).all()
    ended = histories.array("done") == ENDED
    assert ended[:, 150:].sum() > 3 * ended[:, :50].sum() and returns_by_tenth(histories)[-1] > 0.7


def test_a_history_depends_on_its_seed_and_number_only(noisy, tasks, world):
    twice = played(tasks, [5, 5, 7], world)
    for mine, its in ((0, 1), (1, 3), (2, 2)):
        assert all(np.array_equal(x, noisy[its][name]) for name, x in twice[mine].items())
    assert not np.array_equal(noisy[1]["key"], noisy[3]["key"]), "the second history of task 5 has a start of its own"
    wrapped = record(NoisyExpert(), GymAutoResetWrapper(world[0]), world[1], tasks, NUMBERS + [1], **ASKED)
    assert all(np.array_equal(x, noisy[2][name]) for name, x in wrapped[2].items())
    other = played(tasks, [7], world, seed=6)
    assert not np.array_equal(other[0]["action"], noisy[2]["action"]) and not np.array_equal(other[0]["key"], noisy[2]["key"])


def test_a_task_without_a_plan_is_played_at_random(tasks, world):
    "What it wants to hold is not there."
    tiles = np.asarray(tasks.init_tiles).copy()
    tiles[0] = 0
    histories = played(Benchmark.from_arrays(tasks.goals, tasks.rules, tiles), [0, 1], world)
    assert (histories[0]["expert_action"] == NO_ADVICE).all() and (histories[0]["steps_to_go"] == NO_STEPS).all() and not histories[0]["reward"].any()
    assert (histories[1]["expert_action"] != NO_ADVICE).mean() > 0.9
    check_histories(histories, *world, batch=2)


@pytest.mark.slow  # another program to compile
def test_registered_kinds_are_kept(world, tmp_path):
    "A goal of your own is recorded, saved, loaded and played again; it is refused where it is not registered or is another one."
    @register_goal(id=201)
    class HistoryFacing(OneTileGoal):
        when, looks = (1, 2), on_cells("ahead")
    plain = hold_tasks(OBJECTS, 8)
    goals = np.asarray(plain.goals).copy()
    goals[:, 0] = HistoryFacing.ID
    tasks = Benchmark.from_arrays(goals, plain.rules, plain.init_tiles)
    histories = record(NoisyExpert(), *world, tasks, range(8), folder=tmp_path, **ASKED)
    assert (histories.array("reward") > 0).any() and (histories.array("expert_action") == NO_ADVICE).all()
    check_histories(load_histories(tmp_path), *world, batch=8)
    rewritten(tmp_path / "part-00000.safetensors", change_manifest=lambda m: m["kinds"][0].__setitem__(2, "Another"))
    with pytest.raises(BenchmarkFileError, match="register"):
        load_histories(tmp_path)


# ------------------------------------------------------------------------------------------- windows


def test_windows_are_pieces_of_one_history(noisy):
    parts = Histories([{name: array[rows] for name, array in noisy.parts[0].items()} for rows in (slice(0, 2), slice(2, 3), slice(3, 7))], noisy.about)
    for histories in (noisy, parts):
        found = sample(histories, 50, 30, seed=(1, 2))
        assert found["observation"].shape == (50, 30, 5, 5) and len(np.unique(found["start"])) > 20
        keys = noisy.array("key")
        for i in range(50):
            h = next(h for h in range(7) if np.array_equal(keys[h], found["key"][i]))
            for name in STEP_FIELDS:
                np.testing.assert_array_equal(found[name][i], noisy[h][name][found["start"][i]:found["start"][i] + 30])
    assert len(parts) == 7 and same(parts, noisy) and np.array_equal(parts[-1]["action"], noisy[6]["action"])
    a, b = (sample(noisy, 20, 200, seed=s) for s in (0, 1))
    assert not np.array_equal(a["task"], b["task"]) and not a["start"].any()


def test_windows_in_order(noisy):
    windows = Windows(noisy, 60, 35)
    assert len(windows) == 7 * 5
    for i in (0, 4, 5, 34, -1):
        h, k = divmod(i % 35, 5)
        assert np.array_equal(windows[i]["action"], noisy[h]["action"][35 * k:35 * k + 60]) and windows[i]["task"] == NUMBERS[h]
    with pytest.raises(IndexError):
        windows[35]
    assert [len(window["done"]) for window in windows] == [60] * 35, "iteration ends, as PyTorch's loader asks"


def test_only_what_is_asked_for(noisy):
    "Fields and histories; the windows are those of a call that asks for everything."
    whole, some = (sample(noisy, 20, 30, seed=4, **more) for more in ({}, {"fields": ("action", "task")}))
    assert set(some) == {"start", "action", "task"} and all(np.array_equal(some[name], whole[name]) for name in some)
    among = sample(noisy, 50, 30, among=[2, -1])
    assert set(among["task"]) == {7, 11} and {NUMBERS[2], NUMBERS[-1]} == {7, 11}
    windows = Windows(noisy, 60, 35, fields=("reward", "task"), among=[1, 4])
    assert len(windows) == 10 and set(windows[9]) == {"reward", "task"} and windows[9]["task"] == NUMBERS[4]
    assert np.array_equal(windows[9]["reward"], noisy[4]["reward"][140:200])


# ------------------------------------------------------------------------------------------- files


def test_folders_come_back_as_views(noisy, tasks, world, tmp_path):
    made = in_folder(tmp_path / "h", tasks, world, command="make it")
    again = load_histories(tmp_path / "h", verify=True)
    assert same(made, again) and all(np.array_equal(again[i]["observation"], noisy[i]["observation"]) for i in range(7))
    assert sorted(os.listdir(tmp_path / "h")) == ["card.json", "part-00000.safetensors"]
    with pytest.raises(ValueError, match="read-only"):
        again[0]["action"][0] = 1
    card = json.loads((tmp_path / "h/card.json").read_text())
    assert card["command"] == "make it" and card["steps"] == 1600 and card["about"]["seed"] == 5 and "NoisyExpert" in card["about"]["player"]
    with safe_open(tmp_path / "h/part-00000.safetensors", framework="numpy") as other:
        assert (other.get_tensor("steps_to_go") == made.array("steps_to_go")).all()
    (tmp_path / "h/part-00000.safetensors").unlink()
    with pytest.raises(BenchmarkFileError, match="missing"):
        load_histories(tmp_path / "h")
    with pytest.raises(ValueError, match="other histories"):
        in_folder(tmp_path / "h", tasks, world)
        in_folder(tmp_path / "h", tasks, world, seed=6)
    (tmp_path / "h/card.json").write_text("{}")
    with pytest.raises(BenchmarkFileError, match="card"):
        load_histories(tmp_path / "h")


def test_large_files_are_verified_on_request(file, monkeypatch):
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    content[8 + size + json.loads(content[8:8 + size])["action"]["data_offsets"][0] + 700] ^= 1
    file.write_bytes(content)
    with pytest.raises(BenchmarkFileError, match="action does not match"):
        load_histories(file)
    monkeypatch.setattr(module, "_SMALL_FILE", 0)
    load_histories(file)
    with pytest.raises(BenchmarkFileError, match="action does not match"):
        load_histories(file, verify=True)


def rewritten(file, change_header=None, change_manifest=None):
    "The file with another header or manifest, its digests made to fit: what an attacker would write."
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    if change_manifest:
        manifest = json.loads(header["__metadata__"]["histories"])
        manifest = change_manifest(manifest) or manifest
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        header["__metadata__"] = {"histories": text, "histories_digest": blake(text.encode())}
    if change_header:
        change_header(header)
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size:])


FORGED = {
    "newer": lambda m: m.update(format_version=99), "no version": lambda m: m.pop("format_version") and None, "digests are a list": lambda m: m.update(digests=[]),
    "no digests": lambda m: m.pop("digests") and None, "no digest": lambda m: m["digests"].pop("key") and None, "wrong digest": lambda m: m["digests"].update(reward="0" * 32),
    "null": lambda m: "null", "deep": lambda m: "[" * 50_000 + "]" * 50_000, "no about": lambda m: m.pop("about") and None, "about is a number": lambda m: m.update(about=3),
    "unknown kind": lambda m: m.update(kinds=[["goal", 77, "FlyGoal"]])}
FORGED_HEADERS = {
    "missing array": lambda h: h.pop("done") and None, "other type": lambda h: h["action"].update(dtype="I8"), "other shape": lambda h: h["action"].update(shape=[1]),
    "three axes": lambda h: h["action"].update(shape=[*h["action"]["shape"], 1]), "beyond the end": lambda h: h["action"].update(data_offsets=[0, 10**12], shape=[10**12]),
    "no metadata": lambda h: h.pop("__metadata__") and None, "digest of another": lambda h: h["__metadata__"].update(histories_digest="00")}


@pytest.mark.parametrize("name", [*FORGED, *FORGED_HEADERS])
def test_forged_files(file, name):
    rewritten(file, FORGED_HEADERS.get(name), FORGED.get(name))
    with pytest.raises(BenchmarkFileError):
        load_histories(file)


def mutants(content: bytes, count: int):
    random = np.random.default_rng(0)
    size = int.from_bytes(content[:8], "little")
    for i in range(count):
        changed, a, b = bytearray(content), *np.sort(random.integers(0, len(content), 2))
        bit = lambda high: changed.__setitem__(at := random.integers(high), changed[at] ^ 1 << random.integers(8))
        if i % 4 < 2:
            bit(len(changed) if i % 4 else 8 + size)
        yield [changed, changed, changed[:a], changed[:a] + changed[b + 1:]][i % 4]


def test_mutated_files(file, noisy):
    "Each is refused, or is the same data (a blank of the header changed)."
    refused = 0
    for changed in mutants(file.read_bytes(), 300):
        file.write_bytes(changed)
        try:
            found = load_histories(file)
        except BenchmarkFileError:
            refused += 1
        else:
            assert same(found, noisy) and found.about == noisy.about | {"part": 0}
    assert refused >= 270


def test_an_interrupted_recording_goes_on(tasks, world, tmp_path, monkeypatch):
    "Ctrl-C while the second of three files is played: the first stays, and calling again gives the bytes of a recording in one go."
    ask = lambda folder: record(NoisyExpert(), *world, tasks, range(24), folder=folder, per_file=8, **ASKED)
    ask(tmp_path / "whole")
    play, calls = module._play, []

    def stopped(*given):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return play(*given)
    monkeypatch.setattr(module, "_play", stopped)
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path / "cut")
    assert os.listdir(tmp_path / "cut") == ["part-00000.safetensors"]
    with pytest.raises(FileNotFoundError, match="goes on where it ended"):
        load_histories(tmp_path / "cut")
    monkeypatch.setattr(module, "_play", play)
    ask(tmp_path / "cut")
    shutil.copy(tmp_path / "cut/part-00000.safetensors", tmp_path / "copied.safetensors")
    assert {p.name: p.read_bytes() for p in (tmp_path / "cut").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}
    (tmp_path / "copied.safetensors").rename(tmp_path / "cut/part-00001.safetensors")
    with pytest.raises(BenchmarkFileError, match="another place"):
        load_histories(tmp_path / "cut")
    with pytest.raises(ValueError, match="other histories"):
        ask(tmp_path / "cut")
    card = json.loads((tmp_path / "whole/card.json").read_text())
    card["files"].popitem()
    (tmp_path / "whole/card.json").write_text(json.dumps(card))
    with pytest.raises(BenchmarkFileError, match="those that it lists"):
        load_histories(tmp_path / "whole")


def test_the_card_says_who_made_it(tasks, world, tmp_path):
    "A command that Python continues stays on the card, which says so; making the card again changes nothing."
    ask = lambda folder, **more: record(NoisyExpert(), *world, tasks, range(16), folder=tmp_path / folder, per_file=8, **ASKED | more)
    told = lambda folder: json.loads((tmp_path / folder / "card.json").read_text())["command"]
    ask("h", command="xland-minigrid histories h")
    assert told("h") == "xland-minigrid histories h"
    ask("h")
    assert told("h") == "xland-minigrid histories h", "nothing was recorded by the second call"
    (tmp_path / "h/part-00001.safetensors").unlink()
    ask("h")
    assert told("h") == "xland-minigrid histories h; continued by record, called from Python"
    ask("python")
    assert told("python") is None and same(load_histories(tmp_path / "h"), load_histories(tmp_path / "python"))


@pytest.mark.slow
def test_a_recording_that_is_killed_goes_on(tmp_path):
    "SIGKILL at random moments, again and again."
    program = textwrap.dedent("""
        import sys
        from xland_minigrid.baselines.demo import OBJECTS, hold_tasks
        from xland_minigrid.benchmarks.histories import NoisyExpert, record
        from xland_minigrid.envs.registration import make
        world = make("XLand-MiniGrid-R1-9x9", height=6, width=6, max_steps=40)
        print("begins", flush=True)
        record(NoisyExpert(), *world, hold_tasks(OBJECTS, 40, seed=3), range(40), steps=200, folder=sys.argv[1], per_file=4, batch=4)
    """)
    run = lambda folder: subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run(tmp_path / "whole").wait(300) == 0
    random, kills = np.random.default_rng(0), 0
    for _ in range(40):
        process = run(tmp_path / "killed")
        process.stdout.readline()
        before = len(list((tmp_path / "killed").glob("part-*"))) if (tmp_path / "killed").exists() else 0
        while process.poll() is None and len(list((tmp_path / "killed").glob("part-*"))) < before + 3:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
    assert kills >= 2 and run(tmp_path / "killed").wait(300) == 0
    seen = lambda folder: {p.name: p.read_bytes() for p in Path(folder).iterdir() if not p.name.endswith(".part")}
    assert seen(tmp_path / "killed") == seen(tmp_path / "whole")
    assert same(load_histories(tmp_path / "killed", verify=True), load_histories(tmp_path / "whole", verify=True))


# ------------------------------------------------------------------------------------------- checking, and wrong input


def test_any_forgery_is_found_by_playing_again(noisy, world):
    for name in ("observation", "direction", "pocket", "action", "reward", "done", "key"):
        array = noisy.array(name).copy()
        if name == "key":
            array[4] = array[5]
        else:
            array[4, 120] = (array[4, 120] + 1) % 3
        with pytest.raises(ValueError, match="history 4 .* differently"):
            check_histories(Histories([noisy.parts[0] | {name: array}], noisy.about), *world, batch=7)
    told = check_histories(noisy, *world, batch=7)
    assert re.match(r"All 1,400 steps of 7 histories happened again .*Not compared: the expert's action", told)
    with pytest.raises(ValueError, match="another world"):
        check_histories(noisy, *make("XLand-MiniGrid-R1-9x9", view_size=7))


def test_a_history_is_watched(noisy, world):
    "Moments as `watch` gives them: each recorded step, and the end of every trial before its reset."
    moments, history = watch_history(noisy, 3, *world), noisy[3]
    acted = [m for m in moments if m.action is not None]
    assert np.array_equal([m.action for m in acted], history["action"]) and moments[0].trial == 1
    assert all(np.array_equal(pack_pairs(m.timestep.observation), seen) for m, seen in zip(acted, history["observation"]))
    ends = [m for m in moments if m.action is None]
    assert len(ends) == (history["done"] > 0).sum() == len(moments) - 200 and all(m.timestep.last() for m in ends) and not any(m.timestep.last() for m in acted)
    assert np.array_equal([np.float16(m.timestep.reward) for m in ends], history["reward"][history["done"] > 0])
    assert len([m for m in watch_history(noisy, 3, *world, stop=50) if m.action is not None]) == 50
    swapped = Histories([noisy.parts[0] | {"key": noisy.array("key")[::-1].copy()}], {})
    wrong = {"other key": (lambda: watch_history(swapped, 1, *world), ValueError, r"\.$"), "stop": (lambda: watch_history(noisy, 0, *world, stop=201), ValueError, r"\.$"),
             "number": (lambda: watch_history(noisy, 7, *world), IndexError, r"\.$")}
    assert refusals(wrong) == {}


WRONG = {
    "one number": (TypeError, dict(numbers=5)), "no number": (ValueError, dict(numbers=[])), "half": (TypeError, dict(numbers=[0.5])), "beyond": (IndexError, dict(numbers=[40])),
    "below": (IndexError, dict(numbers=[-1])), "no steps": (ValueError, dict(steps=0)), "half a step": (ValueError, dict(steps=1.5)), "no batch": (ValueError, dict(batch=0)),
    "no file": (ValueError, dict(per_file=0)), "seed": (ValueError, dict(seed=-1)), "seed is text": (ValueError, dict(seed="a")), "seed is huge": (ValueError, dict(seed=2**31))}


class Unhashable(NoisyExpert):
    __hash__ = None


def test_wrong_requests(tasks, world, noisy):
    ask = lambda given: record(**{"player": NoisyExpert(), "env": world[0], "params": world[1], "benchmark": tasks, "numbers": [0], "steps": 10} | given)
    assert refusals({name: (lambda given=given: ask(given), error, ONE_SENTENCE) for name, (error, given) in WRONG.items()}) == {}
    assert refusals({f"{name} {value}": (lambda name=name, value=value: NoisyExpert(**{name: value}), ValueError, ONE_SENTENCE)
                     for name in ("start", "end", "ramp") for value in (-0.1, 1.1, float("nan"), "a", None)}) == {}
    part = noisy.parts[0]
    assert refusals({
        "seed": (lambda: sample(noisy, 1, 20, seed="a"), ValueError, ONE_SENTENCE), "seed below 0": (lambda: sample(noisy, 1, 20, seed=(1, -1)), ValueError, ONE_SENTENCE),
        "field": (lambda: sample(noisy, 1, 20, fields=["view"]), ValueError, r"'view'.*\.$"), "no field": (lambda: noisy.array("view"), ValueError, r"'view'.*\.$"),
        "field of windows": (lambda: Windows(noisy, 20, 20, fields=[3]), ValueError, r"\.$"), "among": (lambda: sample(noisy, 1, 20, among=[7]), IndexError, r"\.$"),
        "among nothing": (lambda: sample(noisy, 1, 20, among=[]), ValueError, ONE_SENTENCE), "one part": (lambda: Histories(part, {}), ValueError, r"\[part\]\.$"),
        "no dictionary": (lambda: Histories([3], {}), ValueError, r"\.$"), "lists": (lambda: Histories([part | {"action": [[0]]}], {}), ValueError, ONE_SENTENCE),
        "a class": (lambda: ask({"player": NoisyExpert}), TypeError, r"\.$"), "no player": (lambda: ask({"player": None}), TypeError, r"\.$"),
        "not hashable": (lambda: ask({"player": Unhashable()}), TypeError, r"\.$")}) == {}
    assert refusals({"long": (lambda: sample(noisy, 1, 201), ValueError, r"\.$"), "none": (lambda: sample(noisy, 0, 20), ValueError, r"\.$"),
                     "stride": (lambda: Windows(noisy, 20, 0), ValueError, r"\.$"), "beyond": (lambda: noisy[7], IndexError, r"\.$"), "half": (lambda: noisy[0.0], TypeError, r"\.$")}) == {}
    with pytest.raises(TypeError, match="ruleset"):
        record(NoisyExpert(), *make("MiniGrid-Empty-5x5"), tasks, [0], steps=10)
    for env in (DirectionObservationWrapper(world[0]), DirectionObservationWrapper(GymAutoResetWrapper(world[0]))):
        with pytest.raises(TypeError, match="wrapper"):
            record(NoisyExpert(), env, world[1], tasks, [0], steps=10)


@pytest.mark.slow
def test_composed_goals_are_refused():
    from xland_minigrid.benchmarks import load_benchmark
    probes, world = load_benchmark("probes-30"), make("XLand-MiniGrid-R1-9x9")
    composed = np.flatnonzero(np.asarray(probes.goals)[:, 0] == 255)
    with pytest.raises(ValueError, match="composed"):
        record(NoisyExpert(), *world, probes, [1, int(composed[0])], steps=10)
    check_histories(record(NoisyExpert(), *world, probes, [1, 2, 3], steps=64), *world)
