"""Demonstrations: what the environment says when it is stepped again, what the files survive, and scores against the oracle."""
import dataclasses
import functools
import json
import os
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import xland_minigrid.benchmarks.demonstrations as module
from xland_minigrid.benchmarks.files import blake
from xland_minigrid.baselines.demo import OBJECTS, hold_tasks
from xland_minigrid.baselines.evaluation import Evaluation, RandomPolicy, bootstrap_mean, bootstrap_quantile, evaluate
from xland_minigrid.baselines.report import table
from xland_minigrid.benchmarks import Benchmark, BenchmarkFileError, generate_benchmark
from xland_minigrid.benchmarks.demonstrations import (
    Demonstrations, check_demonstrations, concatenate, demonstrations, load_demonstrations, save_demonstrations, trial_starts)
from xland_minigrid.core.goals import OneTileGoal, register_goal
from xland_minigrid.core.rules import on_cells
from xland_minigrid.core.tiles import EMPTY, FLOOR, pack_pairs, unpack
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, GymAutoResetWrapper
from worlds import refusals

pytestmark = pytest.mark.newest

ONE_SENTENCE = r"^(?!.*\. ).*\.$"
MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
STEP_FIELDS = [name for name, (per, *_) in module._TABLE.items() if per == "step"]


def holder(ruleset, state, params):
    "An expert of its own, for tasks 'hold that': the shortest way to the object, found by breadth-first search; an object in the pocket is laid down first."
    cells, wanted = np.asarray(state.cells), int(pack_pairs(np.asarray(ruleset.goal)[1:3]))
    pocket = int(pack_pairs(np.asarray(state.agent.pocket)))
    target = FLOOR if pocket != EMPTY else wanted
    start = (*map(int, state.agent.position), int(state.agent.direction))
    came, todo = {start: None}, deque([start])
    while todo:
        here = todo.popleft()
        r, c, d = here
        ahead = (r + MOVES[d][0], c + MOVES[d][1])
        if cells[ahead] == target:
            path = []
            while came[here] is not None:
                here, action = came[here]
                path.append(action)
            path = path[::-1] + [4 if pocket != EMPTY else 3]
            if pocket == EMPTY:
                return np.array(path, np.uint8)
            after = state.replace(cells=np.where((np.indices(cells.shape) == np.array(ahead)[:, None, None]).all(0), pocket, cells).astype(np.uint8),
                                  agent=state.agent.replace(position=np.array([r, c]), direction=np.int32(d), pocket=unpack(np.uint8(EMPTY))))
            rest = holder(ruleset, after, params)
            return None if rest is None else np.concatenate([np.array(path, np.uint8), rest])
        walks = [((*ahead, d), 0)] if cells[ahead] == FLOOR else []
        for new, action in walks + [((r, c, (d + 1) % 4), 1), ((r, c, (d - 1) % 4), 2)]:
            if new not in came:
                came[new] = here, action
                todo.append(new)


def helpless(ruleset, state, params):
    return None


record = functools.partial(demonstrations, batch=8)  # one program for all of them; fewer lanes than trials
NOISY = dict(trials=4, epsilon=np.linspace(0.9, 0, 4), seed=5)


@pytest.fixture(scope="module")
def tasks():
    return hold_tasks(OBJECTS, 40, seed=3)


@pytest.fixture(scope="module")
def world():
    return make("XLand-MiniGrid-R1-9x9", height=6, width=6, max_steps=40)


@pytest.fixture(scope="module")
def noisy(tasks, world):
    return record(tasks, [0, 5, 7, 5, 39, 2, 11], *world, **NOISY)


@pytest.fixture
def file(noisy, tmp_path):
    return save_demonstrations(tmp_path / "demos.safetensors", noisy)


def same_history(a: Demonstrations, i: int, b: Demonstrations, j: int) -> bool:
    rows = lambda demos, h: slice(*demos.history_start[h:h + 2])
    return all(np.array_equal(x, b.history(j)[name]) for name, x in a.history(i).items()) and all(
        np.array_equal(getattr(a, name)[rows(a, i)], getattr(b, name)[rows(b, j)]) for name, (per, *_) in module._TABLE.items() if per == "trial")


def same(a: Demonstrations, b: Demonstrations) -> bool:
    return all(getattr(a, name).dtype == getattr(b, name).dtype and np.array_equal(getattr(a, name), getattr(b, name)) for name in module._TABLE)


# ------------------------------------------------------------------------------------------- what was recorded is what happens


def test_the_stream_of_the_environment_gives_the_same_bytes(noisy, tasks, world):
    "An environment with auto-reset, one history after the other: observations, rewards, discounts, ends and resets."
    env, params = world
    auto = GymAutoResetWrapper(env)
    reset, step = jax.jit(auto.reset), jax.jit(auto.step)
    for h in (0, 3, 6):
        steps, own = noisy.history(h), params.replace(ruleset=tasks.get_ruleset(int(noisy.task[h])))
        timestep = reset(own, jax.random.wrap_key_data(jnp.asarray(noisy.key[noisy.history_start[h]])))
        trial = 0
        for i in range(len(steps["action"])):
            np.testing.assert_array_equal(unpack(steps["observation"][i]), timestep.observation)
            assert steps["trial"][i] == trial
            timestep = step(own, timestep, int(steps["action"][i]))
            assert np.float32(timestep.reward).tobytes() == steps["reward"][i].tobytes()
            assert steps["discount"][i] == timestep.discount and steps["done"][i] == timestep.last()
            if timestep.last():
                e = noisy.history_start[h] + trial
                np.testing.assert_array_equal(unpack(noisy.final_observation[e]), timestep.final_observation)
                assert noisy.success[e] == (timestep.discount == 0) and noisy.returns[e] == timestep.reward
                trial += 1
        assert trial == 4


def test_starts_do_not_depend_on_what_is_done(tasks, world):
    env, params = world
    keys, rulesets = jax.random.split(jax.random.key(9), 3), jax.vmap(tasks.get_ruleset)(jnp.arange(3))
    starts, reset_keys = trial_starts(env, params, rulesets, keys, 5)
    reset = jax.jit(env.reset)
    for i in range(3):
        key = keys[i]
        for k in range(5):
            timestep = reset(params.replace(ruleset=tasks.get_ruleset(i)), key)
            assert (timestep.state.cells == starts.state.cells[i, k]).all() and (timestep.observation == starts.observation[i, k]).all()
            assert (jax.random.key_data(key) == jax.random.key_data(reset_keys[i, k])).all()
            key = timestep.state.key


def test_noise_is_as_much_as_asked_for(tasks, world):
    demos = record(tasks, range(16), *world, trials=3, epsilon=[1, 0.5, 0], seed=1)
    shares = [(~demos.expert[demos.trial == k]).mean() for k in range(3)]
    assert shares[0] == 1 and 0.42 < shares[1] < 0.75 and shares[2] < 0.4
    assert demos.success[demos.epsilon == 0.5].mean() > demos.success[demos.epsilon == 1].mean()
    drawn = np.bincount(demos.action[demos.trial == 0], minlength=6) / (demos.trial == 0).sum()
    assert (abs(drawn - 1 / 6) < 0.05).all(), "random actions are even"


def test_a_history_depends_on_its_seed_and_number_only(noisy, tasks, world):
    alone = record(tasks, [7], *world, **NOISY)
    assert same_history(alone, 0, noisy, 2) and (alone.goals[0] == noisy.goals[2]).all()
    assert not np.array_equal(noisy.key[4], noisy.key[12]), "the second history of task 5 has starts of its own"
    again = record(tasks, [5, 5], *world, **NOISY)
    assert same_history(again, 0, noisy, 1) and same_history(again, 1, noisy, 3)
    other = record(tasks, [7], *world, **NOISY | {"seed": 6})
    assert not np.array_equal(other.key, alone.key) and not np.array_equal(other.action[:20], alone.action[:20])
    wrapped = record(tasks.to_numpy(), np.array([7], np.uint8), GymAutoResetWrapper(world[0]), world[1], **NOISY)
    assert same(alone, wrapped)


@pytest.fixture(scope="module")
def compiled(tasks, world):
    "By the compiled expert: task 0 has no plan, since what it wants to hold is not there."
    tiles = np.asarray(tasks.init_tiles).copy()
    tiles[0] = 0
    broken = Benchmark.from_arrays(tasks.goals, tasks.rules, tiles)
    return broken, record(broken, [0, *range(1, 24), 5], *world, trials=4, seed=7, epsilon=[1, 0.4, 0.2, 0])


def test_the_compiled_expert_plays_what_the_environment_says(compiled, world):
    _, demos = compiled
    check_demonstrations(demos, *world)
    assert demos.task.tolist() == [*range(24), 5] and (np.diff(demos.trial_start) <= 40).all()
    assert (np.concatenate([demos.history(h)["trial"] for h in range(25)]) == demos.trial).all() and (demos.done.nonzero()[0] + 1 == demos.trial_start[1:]).all()


def test_the_compiled_expert_is_an_expert(compiled):
    _, demos = compiled
    lost, lengths = demos.lost.reshape(25, 4), np.diff(demos.trial_start)
    hopeless = demos.history(0)
    assert lost[0].all() and not hopeless["expert"].any() and lost[1:].mean() < 0.1
    assert (lengths[:4] == 40).all() and hopeless["discount"].all(), "time running out is no termination"
    np.testing.assert_allclose(demos.returns, np.where(demos.success, 1 - 0.9 * lengths / 40, 0), rtol=1e-6)
    assert demos.success[demos.epsilon == 0][1:].mean() > 0.9 and not demos.expert[np.repeat(demos.epsilon == 1, lengths)].any()
    assert demos.expert[np.repeat((demos.epsilon == 0) & demos.success, lengths)].all()
    noise = 1 - demos.expert[np.repeat((demos.epsilon == np.float32(0.4)) & ~demos.lost, lengths)].mean()
    assert 0.3 < noise < 0.5


@pytest.mark.slow  # another program to compile
def test_probes_some_of_which_have_composed_goals():
    "Plain tasks that share a benchmark with composed ones are played; composed ones are refused as data, and unknown to an evaluation."
    from xland_minigrid.benchmarks import load_benchmark
    probes, world = load_benchmark("probes-30"), make("XLand-MiniGrid-R1-9x9")
    composed = np.flatnonzero(np.asarray(probes.goals)[:, 0] == 255)
    demos = demonstrations(probes, [1, 2, 3], *world)
    assert demos.success.all() and len(composed)
    check_demonstrations(demos, *world)
    with pytest.raises(ValueError, match="composed"):
        demonstrations(probes, [1, int(composed[0])], *world, epsilon=1.0)
    auto = GymAutoResetWrapper(world[0]), world[1]
    found = evaluate(RandomPolicy(), probes, world=auto, num_trials=1, num_tasks=None, anchors="oracle")
    unknown = np.isnan(found.anchor("oracle").returns[:, 0])
    assert unknown[np.isin(found.task_ids, composed)].all() and unknown.sum() < 15


@pytest.mark.slow  # another program to compile
def test_registered_kinds_are_kept(world, tmp_path):
    "A goal of one's own: recorded, saved, loaded and played again; and refused where it is not registered or is another one."
    @register_goal(id=201)
    class DemoFacing(OneTileGoal):
        when, looks = (1, 2), on_cells("ahead")
    plain = hold_tasks(OBJECTS, 4)
    goals = np.asarray(plain.goals).copy()
    goals[:, 0] = DemoFacing.ID
    tasks = Benchmark.from_arrays(goals, plain.rules, plain.init_tiles)
    demos = demonstrations(tasks, range(4), *world, trials=2, epsilon=1.0)
    assert demos.success.any()
    path = save_demonstrations(tmp_path / "own.safetensors", demos)
    check_demonstrations(load_demonstrations(path), *world)
    assert demos.lost.all() and not demos.expert.any(), "nobody told the expert"
    rewritten(path, change_manifest=lambda m: m["kinds"][0].__setitem__(2, "Another"))
    with pytest.raises(BenchmarkFileError, match="register"):
        load_demonstrations(path)


# ------------------------------------------------------------------------------------------- reading


def test_random_access_copies_nothing(noisy):
    for h in (0, -1):
        whole = noisy.history(h)
        parts = [noisy.episode(h, k) for k in range(4)]
        for name in STEP_FIELDS:
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), whole[name])
        assert parts[1]["observation"].base is not None and (parts[2]["trial"] == 2).all()
        assert all(p["done"][-1] and not p["done"][:-1].any() for p in parts)


def test_concatenate(noisy, tasks, world):
    halves = [record(tasks, part, *world, **NOISY) for part in ([0, 5, 7], [39, 2, 11])]
    assert all(same_history(concatenate(halves), i, noisy, j) for i, j in enumerate((0, 1, 2, 4, 5, 6))) and same(concatenate([noisy]), noisy)
    one = record(tasks, [1], *world)
    wide = dataclasses.replace(one, rules=np.pad(one.rules, ((0, 0), (0, 2), (0, 0))))
    mixed = concatenate([noisy, wide])
    assert mixed.rules.shape[1:] == (3, 7) and mixed.about["parts"][0] == noisy.about and len(mixed) == 8
    assert (mixed.history(-1)["observation"] == one.history(0)["observation"]).all() and (mixed.rules[:, :1] == np.concatenate([noisy.rules, one.rules])).all()
    check_demonstrations(concatenate([noisy, one]), *world)
    with pytest.raises(ValueError, match="nothing to concatenate"):
        concatenate([])
    with pytest.raises(ValueError, match="view size"):
        concatenate([noisy, dataclasses.replace(noisy, observation=noisy.observation[:, :3, :3], final_observation=noisy.final_observation[:, :3, :3])])
    assert digest_of(noisy.benchmark()) == digest_of(tasks._rows(np.asarray(noisy.task)))


def digest_of(benchmark: Benchmark):
    from xland_minigrid.benchmarks import digest
    return digest(benchmark)


def test_a_summary(noisy):
    assert "7 histories" in repr(noisy) and "28 trials" in repr(noisy) and len(noisy) == 7


# ------------------------------------------------------------------------------------------- files


def test_files_come_back_and_are_views(noisy, file):
    again = load_demonstrations(file)
    assert same(again, noisy) and again.about == noisy.about and os.listdir(file.parent) == [file.name]
    with pytest.raises(ValueError, match="read-only"):
        again.action[0] = 1
    with safe_open(file, framework="numpy") as other:
        assert {name for name in other.keys() if not name.startswith("padding.")} == set(module._TABLE) and (other.get_tensor("action") == noisy.action).all()
    assert same(load_demonstrations(save_demonstrations(file, again)), noisy), "a file may be written over itself"


def test_opening_does_not_read(file, noisy, monkeypatch):
    "Of a large file only header and offsets are looked at: no other array is hashed."
    hashed, digest_of = [], module.array_digest
    monkeypatch.setattr(module, "array_digest", lambda arrays: hashed.extend(arrays.values()) or digest_of(arrays))
    monkeypatch.setattr(module, "_SMALL_FILE", 0)
    found = load_demonstrations(file)
    assert len(found.action) == len(noisy.action) and len(hashed) == 2 and {id(array) for array in hashed} == {id(found.trial_start), id(found.history_start)}


def test_large_files_are_verified_on_request(file, monkeypatch):
    content = bytearray(file.read_bytes())
    monkeypatch.setattr(module, "_SMALL_FILE", 0)
    reward = next(i for i in range(100) if i)  # somewhere in a step array: found through its offsets
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    content[8 + size + header["action"]["data_offsets"][0] + reward] ^= 1
    file.write_bytes(content)
    load_demonstrations(file)
    with pytest.raises(BenchmarkFileError, match="action does not match"):
        load_demonstrations(file, verify=True)
    content[8 + size + header["history_start"]["data_offsets"][0] + 8] ^= 1
    file.write_bytes(content)
    with pytest.raises(BenchmarkFileError):
        load_demonstrations(file)


def rewritten(file, change_header=None, change_manifest=None):
    "The file with another header or manifest, its digests made to fit: what an attacker would write."
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    if change_manifest:
        manifest = json.loads(header["__metadata__"]["demonstrations"])
        manifest = change_manifest(manifest) or manifest
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        header["__metadata__"] = {"demonstrations": text, "demonstrations_digest": blake(text.encode())}
    if change_header:
        change_header(header)
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size:])


FORGED_MANIFESTS = {
    "newer": lambda m: m.update(format_version=99), "no version": lambda m: m.pop("format_version") and None, "version is text": lambda m: m.update(format_version="1"),
    "digests are a list": lambda m: m.update(digests=[]), "no digests": lambda m: m.pop("digests") and None, "no digest": lambda m: m["digests"].pop("key") and None,
    "wrong digest": lambda m: m["digests"].update(reward="0" * 32), "a list": lambda m: "[]", "null": lambda m: "null", "a number": lambda m: "7",
    "deep": lambda m: "[" * 50_000 + "]" * 50_000, "no JSON": lambda m: "{", "no about": lambda m: m.pop("about") and None, "about is a number": lambda m: m.update(about=3),
    "kinds without words": lambda m: m.update(kinds=[["goal", 77]]), "unknown kind": lambda m: m.update(kinds=[["goal", 77, "FlyGoal"]]), "kinds are wrong": lambda m: m.update(kinds=[1])}


@pytest.mark.parametrize("name", FORGED_MANIFESTS)
def test_forged_manifests(file, name):
    rewritten(file, change_manifest=FORGED_MANIFESTS[name])
    with pytest.raises(BenchmarkFileError):
        load_demonstrations(file)


FORGED_HEADERS = {
    "missing array": lambda h: h.pop("lost") and None, "other type": lambda h: h["action"].update(dtype="I8"), "other shape": lambda h: h["action"].update(shape=[1]),
    "two dimensions": lambda h: h["action"].update(shape=[h["action"]["shape"][0], 1]), "overlap": lambda h: h["action"].update(data_offsets=h["done"]["data_offsets"]),
    "beyond the end": lambda h: h["action"].update(data_offsets=[0, 10**12], shape=[10**12]), "backwards": lambda h: h["action"].update(data_offsets=[10, 5]),
    "no metadata": lambda h: h.pop("__metadata__") and None, "digest of another": lambda h: h["__metadata__"].update(demonstrations_digest="00")}


@pytest.mark.parametrize("name", FORGED_HEADERS)
def test_forged_headers(file, name):
    rewritten(file, change_header=FORGED_HEADERS[name])
    with pytest.raises(BenchmarkFileError):
        load_demonstrations(file)


def test_other_files(tmp_path, tasks):
    with pytest.raises(FileNotFoundError):
        load_demonstrations(tmp_path / "nothing")
    for content in (b"", b"\x00" * 7, b"BZh91AY", b"\x80\x04\x95", b"\xff" * 100, (2**63).to_bytes(8, "little") + b"{}"):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(BenchmarkFileError):
            load_demonstrations(tmp_path / "f")
    with pytest.raises(BenchmarkFileError, match="other arrays"):
        load_demonstrations(tasks.save(tmp_path / "tasks.safetensors"))
    with pytest.raises(FileNotFoundError):
        load_demonstrations(tmp_path)


def mutants(content: bytes, count: int, seed: int = 0):
    random = np.random.default_rng(seed)
    size = int.from_bytes(content[:8], "little")
    for i in range(count):
        changed = bytearray(content)
        match i % 5:
            case 0:
                yield changed[:random.integers(len(changed))]
            case 1:
                changed[random.integers(len(changed))] ^= 1 << random.integers(8)
                yield changed
            case 2:
                changed[random.integers(8 + size)] ^= 1 << random.integers(8)
                yield changed
            case 3:
                a, b = np.sort(random.integers(0, len(changed), 2))
                yield changed[:a] + changed[b + 1:]
            case 4:
                yield changed + bytes(random.integers(1, 50))


def fuzz(file, count):
    "Every mutant is refused, or is (a blank of the header changed) the same data."
    whole, original, refused = load_demonstrations(file), file.read_bytes(), 0
    whole = dataclasses.replace(whole, **{name: np.array(getattr(whole, name)) for name in module._TABLE})
    for changed in mutants(original, count):
        file.write_bytes(changed)
        try:
            found = load_demonstrations(file)
        except BenchmarkFileError:
            refused += 1
        else:
            assert same(found, whole) and found.about == whole.about
    return refused


def test_mutated_files(file):
    assert fuzz(file, 400) >= 370


@pytest.mark.slow
def test_many_mutated_files(file):
    assert fuzz(file, 10_000) >= 9_300


def test_an_interrupted_write_leaves_the_old_file(file, noisy, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_demonstrations(file, noisy)
    assert file.read_bytes() == before and os.listdir(file.parent) == [file.name]


# ------------------------------------------------------------------------------------------- checking, and wrong input


def test_any_forgery_is_found_by_playing_again(noisy, world):
    for name in ("observation", "action", "reward", "discount", "final_observation", "key"):
        array = np.array(getattr(noisy, name))
        flat = array.reshape(-1).view(np.uint8 if array.dtype != np.float32 else np.float32)
        position = len(flat) // 3 if name != "action" else int(noisy.trial_start[20])
        flat[position] = (flat[position] + 1) % 3 if name == "action" else flat[position] + 1
        if name == "key":
            array[5] = array[6]
        with pytest.raises(ValueError, match="differently"):
            check_demonstrations(dataclasses.replace(noisy, **{name: array}), *world)
    check_demonstrations(noisy, *world, batch=5)
    with pytest.raises(ValueError, match="another world"):
        check_demonstrations(noisy, *make("XLand-MiniGrid-R1-9x9", view_size=7))


WRONG = {
    "one number": (TypeError, dict(numbers=5)), "no number": (ValueError, dict(numbers=[])), "half": (TypeError, dict(numbers=[0.5])), "beyond": (IndexError, dict(numbers=[40])),
    "below": (IndexError, dict(numbers=[-1])), "a table": (TypeError, dict(numbers=[[1]])), "trials": (ValueError, dict(trials=0)), "many trials": (ValueError, dict(trials=10**6)),
    "half a trial": (ValueError, dict(trials=1.5)), "epsilon": (ValueError, dict(epsilon=1.1)), "epsilon below": (ValueError, dict(epsilon=-0.1)),
    "epsilon NaN": (ValueError, dict(epsilon=float("nan"))), "epsilons": (ValueError, dict(epsilon=[0, 1], trials=3)),
    "seed": (ValueError, dict(seed=-1)), "seed is text": (ValueError, dict(seed="a")), "seed is huge": (ValueError, dict(seed=2**31))}


def test_wrong_requests(tasks, world):
    ask = lambda given: demonstrations(**{"benchmark": tasks, "numbers": [0], "env": world[0], "params": world[1]} | given)
    assert refusals({name: (lambda given=given: ask(given), error, ONE_SENTENCE) for name, (error, given) in WRONG.items()}) == {}


def test_wrong_worlds(tasks, world):
    with pytest.raises(TypeError, match="ruleset"):
        demonstrations(tasks, [0], *make("MiniGrid-Empty-5x5"))
    for env in (DirectionObservationWrapper(world[0]), DirectionObservationWrapper(GymAutoResetWrapper(world[0]))):
        with pytest.raises(TypeError, match="wrapper"):
            demonstrations(tasks, [0], env, world[1])


def test_wrong_access(noisy):
    for call in (lambda: noisy.history(7), lambda: noisy.episode(0, 4), lambda: noisy.history(-8)):
        with pytest.raises(IndexError):
            call()
    for call in (lambda: noisy.history(0.0), lambda: noisy.history(True), lambda: noisy.episode(0, None)):
        with pytest.raises(TypeError):
            call()


# ------------------------------------------------------------------------------------------- against the oracle


@pytest.fixture(scope="module")
def auto(world):
    return GymAutoResetWrapper(world[0]), world[1]


PLAYED = dict(num_trials=3, num_tasks=14, seed=4)

@pytest.fixture(scope="module")
def at_random(tasks, auto):
    "Somebody who plays at random, with the oracle beside."
    return evaluate(RandomPolicy(), tasks, world=auto, anchors="oracle", expert=holder, **PLAYED)


def by_hand(tasks, world, found, seed, num_tasks, trials):
    "For each task and trial the actions of the expert from where the trial begins, None where it has none."
    env, params = world
    reset = jax.jit(env.reset)
    for task, key in zip(found.task_ids, jax.random.split(jax.random.key(seed), num_tasks)):
        own, key, plans = params.replace(ruleset=tasks.get_ruleset(int(task))), jax.random.split(key)[0], []
        for _ in range(trials):
            timestep = reset(own, key)
            plans.append(holder(own.ruleset, timestep.state, params))
            key = timestep.state.key
        yield plans


def test_the_oracle_begins_where_the_agent_begins(tasks, world, auto, at_random):
    found, alone = at_random, evaluate(RandomPolicy(), tasks, world=auto, **PLAYED)
    assert (found.steps == alone.steps).all() and (found.returns == alone.returns).all(), "the oracle does not disturb the agent"
    expected = np.array([[np.nan if p is None else len(p) for p in plans] for plans in by_hand(tasks, world, found, 4, 14, 3)])
    success, steps, returns = found.anchor("oracle")
    np.testing.assert_array_equal(steps, expected)
    np.testing.assert_allclose(returns, 1 - 0.9 * expected / 40, rtol=1e-6)
    assert (success == ~np.isnan(expected)).all()


@dataclasses.dataclass(frozen=True, eq=False)
class Script:
    "Plays what it was told: actions (B, T)."
    actions: np.ndarray

    def start(self, batch):
        return jnp.arange(batch), jnp.zeros(batch, jnp.int32)

    def act(self, parameters, inputs, memory, keys):
        row, t = memory
        return jnp.asarray(self.actions)[row, jnp.minimum(t, self.actions.shape[1] - 1)].astype(jnp.int32), (row, t + 1)


IDLE = Script(np.ones((14, 1), np.uint8))


def test_whoever_plays_like_the_oracle_has_no_regret(tasks, world, auto, at_random):
    "And whoever wastes three steps each time, as in every other task here, has just that."
    plans = list(by_hand(tasks, world, at_random, 4, 14, 3))
    solvable, waste = np.array([all(p is not None for p in ps) for ps in plans]), np.arange(14) % 2 * 3
    assert solvable.sum() >= 11
    script = np.zeros((14, 120), np.uint8)
    for row, ps in enumerate(plans):
        actions = np.concatenate([[1, 2, 5][:waste[row]] + list(p) for p in ps if p is not None] or [[1]]).astype(np.uint8)
        script[row, :len(actions)] = actions
    found = evaluate(Script(script), tasks, world=auto, anchors="oracle", expert=holder, **PLAYED)
    steps, more = found.anchor("oracle").steps[solvable], waste[solvable, None]
    np.testing.assert_allclose(found.regret[solvable], np.broadcast_to(0.9 * more / 40, steps.shape), atol=1e-6)
    assert found.success[solvable].all() and (found.steps[solvable] - steps == more).all()
    np.testing.assert_allclose(found.spl[solvable], steps / (steps + more))
    perfect = solvable & (waste == 0)
    assert (found.normalised[perfect] == 1).all() and (found.spl[perfect] == 1).all() and (found.regret[perfect] == 0).all()


def test_later_trials_are_compared_with_the_average_of_the_first(tasks, auto, at_random):
    settings_ = dict(world=auto, expert=holder, **PLAYED)
    played = lambda **more: evaluate(RandomPolicy(), tasks, anchors="oracle", **settings_ | more)
    whole, some = at_random.anchors["oracle"], played(oracle_trials=2).anchors["oracle"]
    np.testing.assert_array_equal(some[:, :2], whole[:, :2])
    np.testing.assert_allclose(some[:, 2, 1:], np.nanmean(whole[:, :2, 1:], axis=1))
    assert np.isnan(some[:, 2, 0]).all(), "it was not there in the third"
    assert evaluate(RandomPolicy(), tasks, **settings_).anchors == {}
    assert played(oracle_trials=9).anchors["oracle"].shape == (14, 3, 3)
    lost = played(oracle_trials=2, expert=helpless)
    assert np.isnan(lost.anchor("oracle").returns).all() and not np.nan_to_num(lost.anchor("oracle").success).any()
    overall, lines = lost.overall(), table({"x": lost})
    assert np.isnan(overall["regret"]).all() and np.isnan(overall["normalised_p20"]).all() and "–" in lines
    assert overall["return"][0] == at_random.overall()["return"][0]


def test_a_plan_that_fails_is_no_reference(tasks, auto):
    "The expert promises to reach the goal and does not, or chance does it for it afterwards."
    found = evaluate(RandomPolicy(), tasks, world=auto, num_trials=3, num_tasks=14, anchors="oracle",
                     expert=lambda *_: np.array([1], np.uint8))
    assert np.isnan(found.anchor("oracle").returns).all()


def some_evaluation(reference):
    won = np.array([[0., 1.], [1., 1.], [0., 1.], [1., 1.]])
    oracle = np.stack([np.ones((4, 2)), np.full((4, 2), 3.0), np.asarray(reference, float)], axis=-1)
    return Evaluation(won, 12 - 6 * won, 0.5 * won, np.arange(4), {"oracle": oracle})


def test_scores_by_hand():
    e = some_evaluation(np.full((4, 2), 0.8))
    np.testing.assert_allclose(e.normalised, e.returns / 0.8)
    np.testing.assert_allclose(e.regret, 0.8 - e.returns)
    np.testing.assert_allclose(e.spl, [[0, .5], [.5, .5], [0, .5], [.5, .5]])
    overall, curve = e.overall(), e.per_trial()
    np.testing.assert_allclose([overall[k][0] for k in ("normalised", "normalised_p20", "regret", "spl")], [0.375 / 0.8, 0.25 / 0.8, 0.425, 0.375])
    np.testing.assert_allclose(curve["regret"], [0.55, 0.3])
    assert curve["regret_lo"][0] < 0.55 < curve["regret_hi"][0] and curve["regret_lo"][1] == curve["regret_hi"][1]
    lines = table({"agent": e, "plain": Evaluation(e.success, e.steps, e.returns, e.task_ids)}).splitlines()
    assert "of oracle" in lines[0] and lines[0].index("agent") < lines[0].index("plain")
    assert lines[2].startswith("| 1     | 50%") and " 0.31 " in lines[2] and len(lines) == 2 + 2 + 1 + 2 + 2
    assert "| 0.42 [" in lines[7] and lines[8].startswith("| plain") and lines[8].count("–") == 4


def test_unknown_references_are_left_out():
    reference = np.full((4, 2), 0.8)
    reference[0] = reference[1, 0] = np.nan
    e = some_evaluation(reference)
    curve, overall = e.per_trial(), e.overall()
    np.testing.assert_allclose(curve["regret"], [0.55, 0.3])
    np.testing.assert_allclose(overall["regret"][0], np.mean([0.3, 0.55, 0.3]))
    assert overall["return"][0] == 0.375, "what is known stays as it was"
    assert np.isfinite(curve["regret_lo"]).all()


def test_intervals_with_holes_cover_the_truth():
    random = np.random.default_rng(0)
    holed = lambda: np.where(random.random(200) < 0.3, np.nan, random.random(200) < 0.3)
    covered = [low <= 0.3 <= high for low, high in (bootstrap_mean(holed(), 400, seed=i)[1:] for i in range(200))]
    assert 0.90 <= np.mean(covered) <= 0.99
    values = random.random((50, 3))
    assert all(np.array_equal(a, b) for a, b in zip(bootstrap_mean(np.pad(values, ((0, 0), (0, 1)), constant_values=np.nan))[0][:3], bootstrap_mean(values)[0]))
    assert bootstrap_quantile([1.0, np.nan, 1.0]) == (1, 1, 1) and np.isnan(bootstrap_quantile([np.nan])).all()


def test_wrong_references(tasks, auto):
    same_ = dict(world=auto, num_trials=2, num_tasks=4, anchors="oracle")
    ask = lambda given: evaluate(RandomPolicy(), tasks, **same_ | given)
    wrong = [dict(anchors=("random", "par")), dict(oracle_trials=0), dict(oracle_trials="yes"), dict(oracle_trials=1.5)]
    assert refusals({i: (lambda given=given: ask(given), ValueError, r"\.$") for i, given in enumerate(wrong)}) == {}


def test_one_oracle_for_several_agents(tasks, auto, at_random):
    same_, with_oracle = dict(world=auto, **PLAYED), at_random
    lent = evaluate(IDLE, tasks, **same_).beside(with_oracle)
    own = evaluate(IDLE, tasks, anchors="oracle", expert=holder, **same_)
    for name in ("success", "steps", "returns", "task_ids"):
        np.testing.assert_array_equal(getattr(lent, name), getattr(own, name))
    np.testing.assert_array_equal(lent.anchors["oracle"], own.anchors["oracle"])
    with pytest.raises(ValueError, match="different tasks"):
        evaluate(IDLE, tasks, **same_ | {"seed": 5}).beside(with_oracle)
    np.testing.assert_array_equal(own.regret, own.anchor("oracle").returns)
    assert not np.nan_to_num(own.normalised).any() and not np.nan_to_num(own.spl).any()


def test_no_reference_no_regret():
    e = Evaluation(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), np.arange(2))
    for name in ("regret", "normalised", "spl"):
        with pytest.raises(ValueError, match="no 'oracle'"):
            getattr(e, name)
    assert "regret" not in e.overall() and "regret" not in e.per_trial()
