"""Curricula against a reference in plain Python, and against everything that training does to them: jit, scan, devices, checkpoints, lost outcomes."""
import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from xland_minigrid.baselines import curriculum as cu
from xland_minigrid.baselines.checkpoint import from_arrays, to_arrays
from xland_minigrid.baselines.curriculum import (
    KINDS, SCORES, Curriculum, CurriculumConfig, Outcome, Uniform, combined, empty_buffer, make_curriculum, probabilities,
    reference_returns, uniform_tasks)
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.benchmarks.difficulty import estimated_steps
from xland_minigrid.envs.registration import make

pytestmark = pytest.mark.newest

N, B, K = 9, 6, 4  # tasks, agents, slots: small, so that everything collides
PAR = np.array([5, 10, np.nan, 20, 30, np.nan, 40, 90, 200], np.float32)  # of trials of 100 steps: the last one cannot be done in time
NEEDS = {"maxmc": ("best", "returns"), "value_loss": ("value_loss",), "learnability": ("success",), "regret": ("returns",)}
FIELDS = ("success", "returns", "best", "value_loss", "trials")
CONFIGS = {
    "maxmc": CurriculumConfig("plr", buffer=K, fill=0.5),
    "value_loss": CurriculumConfig("plr", buffer=K, score="value_loss", weights="score", temperature=0.5, staleness=0.1, fill=0.0),
    "learnability": CurriculumConfig("plr", buffer=K, score="learnability", temperature=0.2, staleness=0.0, fill=1.0, candidates=B, period=3, trials=4),
    "regret": CurriculumConfig("regret", buffer=K, fill=0.0, staleness=0.5, replay=0.5),
    "sfl": CurriculumConfig("sfl", buffer=K, candidates=B, period=2, trials=4, replay=1.0),
}


@functools.cache
def made(name: str):
    return make_curriculum(CONFIGS[name], par=PAR, max_steps=100) if name != "uniform" else Uniform()


@functools.cache
def compiled(name: str, what: str):
    return jax.jit(getattr(made(name), what))


def outcome(values: dict) -> Outcome:
    return Outcome(**{name: jnp.asarray(x, jnp.float32) for name, x in values.items()})


def some_outcome(n: int, seed: int = 0) -> Outcome:
    random = np.random.default_rng(seed)
    return outcome({"success": random.integers(0, 9, n) / 8, "returns": random.random(n), "best": random.random(n), "value_loss": random.random(n), "trials": np.full(n, 8)})


def same(a, b):
    x, y = to_arrays(a), to_arrays(b)
    assert x.keys() == y.keys()
    for name in x:
        np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def keys_of(n: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), n)


# ------------------------------------------------------------------------------------------- the reference: one task after another, no arrays


class Slow:
    "The buffer as a list of slots, with loops. Arithmetic is float32, so that ties fall alike."

    def __init__(self, score: str):
        self.score, self.round, self.slots = score, 0, [None] * K
        self.reference = reference_returns(PAR, 100) if score == "regret" else None

    def value(self, task, o):
        one = np.float32(1)
        return {"maxmc": lambda: o["best"] - o["returns"], "value_loss": lambda: o["value_loss"], "learnability": lambda: o["success"] * (one - o["success"]),
                "regret": lambda: max(self.reference[task] - o["returns"], np.float32(0))}[self.score]()

    def merged(self, tasks, o) -> dict:
        "What is known of each task in a batch."
        found = {}
        for i, task in enumerate(tasks):
            if not 0 <= task < N or not o["trials"][i] > 0 or any(np.isnan(o[name][i]) for name in NEEDS[self.score]):
                continue
            if self.reference is not None and np.isnan(self.reference[task]):
                continue
            found.setdefault(int(task), []).append({name: np.float32(o[name][i]) for name in FIELDS})
        out = {}
        for task, agents in sorted(found.items()):
            trials = np.float32(sum(a["trials"] for a in agents))
            by_trial = lambda name: np.float32(sum((a[name] * a["trials"] for a in agents), np.float32(0))) / trials
            by_agent = lambda values: np.float32(sum(values, np.float32(0))) / np.float32(len(agents))
            out[task] = {"success": by_trial("success"), "returns": by_trial("returns"), "best": max(a["best"] for a in agents),
                         "value_loss": by_agent([a["value_loss"] for a in agents])}
        return out

    def record(self, tasks, o):
        self.round += 1
        fresh = []
        for task, now in self.merged(tasks, o).items():
            mine = [slot for slot in self.slots if slot and slot["task"] == task]
            assert len(mine) <= 1, "a task is in one slot only"
            if mine:
                best = max(mine[0]["best"], now["best"]) if self.score == "maxmc" else now["best"]
                mine[0].update(score=self.value(task, {**now, "best": best}), best=best, seen=self.round)
            else:
                fresh.append({"task": task, "score": self.value(task, now), "best": now["best"], "seen": self.round})
        fresh.sort(key=lambda new: (-new["score"], new["task"]))
        worth = lambda k: -np.inf if self.slots[k] is None else self.slots[k]["score"]
        for new, k in zip(fresh, sorted(range(K), key=lambda k: (worth(k), k))):
            if new["score"] > worth(k):
                self.slots[k] = new

    def probabilities(self, c: CurriculumConfig) -> np.ndarray:
        full = np.array([slot is not None for slot in self.slots])
        p = np.zeros(K)
        if not full.any():
            return p
        score = np.array([slot["score"] for slot in self.slots if slot], np.float64)
        weight = {"rank": (1 / stats.rankdata(-score)) ** (1 / c.temperature), "score": np.maximum(score, 0) ** (1 / c.temperature), "equal": np.ones(len(score))}[c.weights]
        weight = weight if weight.sum() else np.ones(len(score))
        age = np.array([self.round - slot["seen"] for slot in self.slots if slot], float)
        stale = c.staleness if age.sum() else 0
        p[full] = (1 - stale) * weight / weight.sum() + (stale * age / age.sum() if stale else 0)
        return p


EIGHTH = st.integers(0, 8).map(lambda x: x / 8)
UNSURE = st.one_of(EIGHTH, EIGHTH, EIGHTH, st.just(float("nan")))
BATCH = st.fixed_dictionaries({"tasks": st.lists(st.integers(-1, N), min_size=B, max_size=B), "trials": st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=B, max_size=B),
                               **{name: st.lists(UNSURE, min_size=B, max_size=B) for name in FIELDS[:-1]}})


@pytest.mark.parametrize("name", ["maxmc", "value_loss", "learnability", "regret"])
@settings(max_examples=25)
@given(batches=st.lists(BATCH, min_size=1, max_size=6))
def test_the_buffer_is_what_loops_would_make_of_it(name, batches):
    slow, state, config = Slow(CONFIGS[name].score), made(name).start(N), CONFIGS[name]
    for batch in batches:
        tasks, values = batch["tasks"], {f: np.array(batch[f], np.float32) for f in FIELDS}
        before = {slot["task"]: slot["score"] for slot in slow.slots if slot}
        slow.record(tasks, values)
        state = compiled(name, "record")(state, jnp.array(tasks), outcome(values))
        assert state.task.tolist() == [slot["task"] if slot else -1 for slot in slow.slots]
        for field in ("score", "seen"):
            found = np.asarray(getattr(state, field))
            np.testing.assert_array_equal(found[state.task >= 0], np.array([slot[field] for slot in slow.slots if slot], found.dtype))
        if config.score == "maxmc":
            np.testing.assert_array_equal(np.asarray(state.best)[state.task >= 0], np.array([slot["best"] for slot in slow.slots if slot], np.float32))
        expected = slow.probabilities(config)
        ready = sum(slot is not None for slot in slow.slots) >= config.fill * K
        np.testing.assert_allclose(np.diff(state.ends, prepend=0) / 2**30, expected * ready, atol=2e-6)
        held = state.task[state.task >= 0].tolist()
        assert len(held) == len(set(held)), "no task is in the buffer twice"
        now = slow.merged(tasks, values)
        if not set(before) & set(now):  # nothing was scored anew: what remains is the best of old and new
            union = sorted([*before.values(), *(slow.value(task, o) for task, o in now.items())], reverse=True)[:K]
            assert sorted(np.asarray(state.score)[state.task >= 0].tolist(), reverse=True) == [float(x) for x in union]
    assert int(state.round) == len(batches)


@given(batch=BATCH, order=st.permutations(range(B)))
@settings(max_examples=25)
def test_the_order_of_the_agents_does_not_matter(batch, order):
    order = np.array(order)
    values = {f: np.array(batch[f], np.float32) for f in FIELDS}
    a = compiled("maxmc", "record")(made("maxmc").start(N), jnp.array(batch["tasks"]), outcome(values))
    b = compiled("maxmc", "record")(made("maxmc").start(N), jnp.array(batch["tasks"])[order], outcome({f: x[order] for f, x in values.items()}))
    same(a, b)


@given(st.lists(st.sampled_from([-np.inf, 0.0, 0.25, 0.5, 1.0]), min_size=7, max_size=7))
@settings(max_examples=40)
def test_ranks_are_those_of_scipy(score):
    np.testing.assert_array_equal(RANKS(-jnp.array(score, jnp.float32)), stats.rankdata(-np.array(score)))


RANKS, PROBABILITIES = jax.jit(cu.rankdata), jax.jit(probabilities, static_argnums=1)


def test_outcomes_of_one_task_are_put_together():
    o = outcome({"success": [1, 0, .5, 1], "returns": [.8, 0, .4, .5], "best": [.8, 0, .9, 1], "trials": [1, 3, 4, 5], "value_loss": [.1, .3, 0, 0]})
    put_together = jax.jit(combined)
    task, found = put_together(jnp.array([7, 7, 3, 1]), o, jnp.array([True, True, True, False]))
    assert task.tolist()[:2] == [3, 7] and (task[2:] == 2**31 - 1).all()
    np.testing.assert_allclose(found.success[:2], [.5, .25])
    np.testing.assert_allclose(found.returns[:2], [.4, .2])
    np.testing.assert_allclose(found.best[:2], [.9, .8])
    np.testing.assert_allclose(found.trials[:2], [4, 4])
    np.testing.assert_allclose(found.value_loss[:2], [0, .2])


# ------------------------------------------------------------------------------------------- what is unknown


@pytest.mark.parametrize("name", ["maxmc", "value_loss", "learnability", "regret"])
def test_unknown_outcomes_change_nothing(name):
    record, state = compiled(name, "record"), made(name).start(N)
    state = record(state, jnp.array([0, 1, 3, 4, 6, 7]), some_outcome(B))
    nothing = record(state, jnp.full(B, -1), some_outcome(B))
    same(nothing.replace(round=state.round, ends=state.ends), state)
    tasks = jnp.array([0, 1, 8, 8, 6, 4])
    needed = NEEDS[name]
    for lost in [{"trials": 0}, {"trials": np.nan}, {needed[0]: np.nan}, {needed[-1]: np.nan if name == "regret" else np.inf}]:
        o = some_outcome(B, 1)
        same(record(state, tasks, o.replace(**{f: jnp.full(B, x, jnp.float32) for f, x in lost.items()})), nothing)
    half = some_outcome(B, 1)
    half = half.replace(trials=half.trials.at[::2].set(0))
    lies = half.replace(**{f: jnp.where(half.trials > 0, getattr(half, f), jnp.nan) for f in FIELDS[:4]})
    same(record(state, tasks, half), record(state, tasks, lies))


def test_where_par_is_unknown_or_out_of_reach():
    regret = made("regret")
    assert regret.reference[8] == 0 and np.isnan(regret.reference[[2, 5]]).all()
    everything = outcome({f: np.full(N, 0.0) for f in FIELDS[:4]} | {"trials": np.full(N, 3)})
    state = jax.jit(cu.learnt, static_argnums=3)(empty_buffer(N, N, jnp.asarray(regret.reference)), jnp.arange(N), everything, SCORES["regret"])
    assert set(state.task.tolist()) == {0, 1, 3, 4, 6, 7, 8, -1}, "tasks without par stay outside"
    score = dict(zip(state.task.tolist(), state.score.tolist()))
    assert score[8] == 0 and score[0] == pytest.approx(1 - .9 * 5 / 100) and score[0] > score[1] > score[7] > 0
    better = jax.jit(cu.learnt, static_argnums=3)(state, jnp.arange(N), everything.replace(returns=jnp.ones(N)), SCORES["regret"])
    assert (better.score[better.task >= 0] == 0).all(), "who beats the reference has no regret"


def test_a_best_return_is_not_forgotten():
    "MaxMC: what was once reached still counts when it is not reached again."
    record, never = compiled("maxmc", "record"), np.zeros(B)
    once = {"success": never + .25, "returns": never + .25, "best": never + .75, "trials": never + 4, "value_loss": never}
    state = record(made("maxmc").start(N), jnp.full(B, 3), outcome(once))
    state = record(state, jnp.full(B, 3), outcome({**once, "returns": never, "best": never}))
    assert state.task.tolist().count(3) == 1 and state.score[state.task == 3].tolist() == [.75]


# ------------------------------------------------------------------------------------------- draws


def a_state(name: str):
    state = made(name).start(N)
    for seed in range(3):
        if made(name).candidates:
            state = compiled(name, "refresh")(state, jnp.array([0, 1, 3, 4, 6, 8]), some_outcome(B, seed))
        state = compiled(name, "record")(state, jnp.array([0, 1, 3, 4 + seed, 7, 8]), some_outcome(B, seed))
    return state


@pytest.mark.parametrize("name", ["maxmc", "value_loss", "learnability", "regret", "sfl"])
def test_draws_follow_the_probabilities(name):
    state, config, n = a_state(name), CONFIGS[name], 20_000
    same_state, tasks = compiled(name, "draw")(state, keys_of(n, 3))
    same(state, same_state)
    assert tasks.dtype == jnp.int32 and tasks.shape == (n,)
    expected = np.full(N, (1 - config.replay) / N)
    p = np.asarray(PROBABILITIES(state, config.weights, config.temperature, config.staleness), np.float64)
    assert p.sum() == pytest.approx(1, abs=1e-5) and len(set(np.round(p, 4))) > (1 if name != "sfl" else 0)
    np.add.at(expected, np.asarray(state.task), config.replay * p)
    counts = np.bincount(tasks, minlength=N)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 1e-9
    assert stats.chisquare(counts[likely], expected[likely] / expected[likely].sum() * n).pvalue > 1e-3


def test_a_uniform_curriculum_is_uniform_and_the_draw_of_the_benchmark():
    state = Uniform().start(13)
    tasks = np.asarray(Uniform().draw(state, keys_of(20_000))[1])
    assert stats.chisquare(np.bincount(tasks, minlength=13)).pvalue > 1e-3
    keys = keys_of(50, 1)
    assert (uniform_tasks(3_000_000, keys) == jax.jit(uniform_tasks)(jnp.int32(3_000_000), keys)).all()
    benchmark = generate_benchmark("trivial", 30, seed=0)
    drawn = Uniform().draw(Uniform().start(30), keys)[1]
    assert (benchmark.get_rulesets(drawn).goal == jax.vmap(benchmark.sample_ruleset)(keys).goal).all()
    assert int(Uniform().start(2**31 - 2).num_tasks) == 2**31 - 2 and (uniform_tasks(2**31 - 2, keys) >= 0).all()


def test_nothing_is_replayed_before_the_buffer_is_filled():
    config = CurriculumConfig("plr", buffer=6, fill=0.5, replay=1.0)
    plr = make_curriculum(config)
    state, keys, draw, record = plr.start(1000), keys_of(200), jax.jit(plr.draw), jax.jit(plr.record)
    fresh = draw(state, keys)[1]
    assert len(set(fresh.tolist())) > 100
    two = record(state, jnp.arange(2), some_outcome(2))
    assert (draw(two, keys)[1] == fresh).all() and int(two.ends[-1]) == 0
    three = record(two, jnp.array([2, -1]), some_outcome(2))
    assert set(draw(three, keys)[1].tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("name", ["uniform", "regret", pytest.param("maxmc", marks=pytest.mark.slow), pytest.param("sfl", marks=pytest.mark.slow)])
def test_draws_do_not_depend_on_the_number_of_devices(name):
    state = a_state(name) if name != "uniform" else Uniform().start(N)
    keys = keys_of(16, 5)
    draw = compiled(name, "draw")
    whole = np.array(draw(state, keys)[1])
    parts = np.concatenate([draw(state, part)[1] for part in (keys[:8], keys[8:])])
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(whole[::-1], draw(state, keys[::-1])[1])
    np.testing.assert_array_equal(whole, draw(state, jax.random.key_data(keys))[1])  # raw keys
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip("the tests' four devices are not there")
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("agents",))
    P = jax.sharding.PartitionSpec

    def shard(state, keys, outcome):
        drawn = made(name).draw(state, keys)[1]
        gather = lambda x: jax.lax.all_gather(x, "agents", tiled=True)
        return made(name).record(state, gather(drawn), jax.tree.map(gather, outcome)), drawn

    several = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("agents"), P("agents")), out_specs=(P(), P("agents")), check_vma=False))
    after, drawn = several(state, keys, some_outcome(16))
    np.testing.assert_array_equal(whole, drawn)
    same(after, compiled(name, "record")(state, jnp.asarray(whole), some_outcome(16)))


# ------------------------------------------------------------------------------------------- weights at their edges


def filled(score, seen, round=5):
    state = empty_buffer(len(score), 100)
    return state.replace(task=jnp.where(jnp.array(score) > -np.inf, jnp.arange(len(score)), -1), score=jnp.array(score, jnp.float32), seen=jnp.array(seen), round=jnp.int32(round))


@pytest.mark.parametrize("how,score,temperature,staleness,expected", [
    ("rank", [.5, .25, .25, -np.inf], 1.0, 0.0, [1 / (1 + .4 + .4), .4 / 1.8, .4 / 1.8, 0]),  # ranks 1, 2.5, 2.5
    ("rank", [.1, .2, .3, .4], 0.001, 0.0, [0, 0, 0, 1]),
    ("rank", [.3, .3, .3, .3], 0.001, 0.0, [.25] * 4),
    ("rank", [.1, .2, .3, .4], 1e9, 0.0, [.25] * 4),
    ("rank", [.1, .2, .3, .4], 1.0, 1.0, [1 / 10, 2 / 10, 3 / 10, 4 / 10]),
    ("score", [.0, .1, .3, -np.inf], 1.0, 0.0, [0, .25, .75, 0]),
    ("score", [.0, .1, .3, -np.inf], 0.5, 0.0, [0, .1, .9, 0]),
    ("score", [-.5, .0, .0, -np.inf], 1.0, 0.0, [1 / 3, 1 / 3, 1 / 3, 0]),
    ("score", [1e-20, 3e-20, 0, 0], 1.0, 0.0, [.25, .75, 0, 0]),
    ("equal", [.1, .2, .3, -np.inf], 1.0, 0.0, [1 / 3, 1 / 3, 1 / 3, 0]),
    ("rank", [-np.inf] * 4, 1.0, 0.3, [0] * 4),
])
def test_probabilities(how, score, temperature, staleness, expected):
    np.testing.assert_allclose(PROBABILITIES(filled(score, [4, 3, 2, 1]), how, temperature, staleness), expected, atol=1e-6)


def test_forty_thousand_shares_add_up():
    state = filled(np.random.default_rng(0).random(40_000), np.random.default_rng(1).integers(0, 5, 40_000))
    share_out = jax.jit(cu._shared_out, static_argnums=(1, 4))
    for how, temperature, stale in [("rank", 1.0, .3), ("rank", .1, 0.0), ("score", 1.0, 0.0), ("equal", 1.0, 0.0)]:
        ends = np.asarray(share_out(state, how, temperature, stale, 1.0).ends)
        assert (np.diff(ends) >= 0).all() and 0.99 * 2**30 < ends[-1] < 2**31 - 1, "no overflow, no share lost"
        top = np.argmax(state.score)
        p = PROBABILITIES(state, how, temperature, stale)
        assert (ends[top] - (ends[top - 1] if top else 0)) / ends[-1] == pytest.approx(float(p[top]), rel=1e-3)
    alike = share_out(state, "equal", 1.0, 0.0, 1.0).replace(task=state.task % 10)
    assert stats.chisquare(np.bincount(jax.jit(cu.drawn_tasks)(alike, keys_of(5000), 1.0))).pvalue > 1e-3


# ------------------------------------------------------------------------------------------- SFL and trying out


def test_sfl_keeps_the_best_candidates_until_the_next_time():
    sfl = made("sfl")
    o = outcome({"success": [0, .5, 1, .25, .125, .5], "returns": [0] * 6, "best": [0] * 6, "trials": [8] * 6, "value_loss": [0] * 6})
    state = compiled("sfl", "refresh")(sfl.start(N), jnp.array([0, 1, 2, 3, 4, 4]), o)  # task 4: 5 of 16 trials
    assert sorted(state.task.tolist()) == [0, 1, 3, 4] and float(state.score[state.task == 4][0]) == .3125 * .6875
    trained = compiled("sfl", "record")(state, jnp.arange(6), some_outcome(6))
    same(trained.replace(round=state.round), state)
    assert set(compiled("sfl", "draw")(trained, keys_of(300))[1].tolist()) == {0, 1, 3, 4}
    anew = compiled("sfl", "refresh")(trained, jnp.array([5, 6, 7, 8, 8, 8]), o)
    assert sorted(anew.task.tolist()) == [5, 6, 7, 8], "the old ones are gone"
    lost = compiled("sfl", "refresh")(trained, jnp.array([5, 6, 7, 8, 8, 8]), o.replace(trials=jnp.zeros(6)))
    assert (lost.task == -1).all() and len(set(compiled("sfl", "draw")(lost, keys_of(300))[1].tolist())) == N, "nothing known: all tasks alike"


def test_a_robust_plr_learns_from_replayed_tasks_alone():
    robust = make_curriculum(CurriculumConfig("plr", buffer=4, replay=1.0, candidates=6, period=1, trials=2, fill=0.0))
    state = robust.start(1000)
    assert robust.wants(0)
    tried = robust.propose(state, keys_of(robust.candidates))
    state = jax.jit(robust.refresh)(state, tried, some_outcome(6))
    assert int(state.round) == 0 and set(jax.jit(robust.draw)(state, keys_of(50))[1].tolist()) <= set(tried.tolist())


@pytest.mark.parametrize("name,period", [("uniform", 0), ("maxmc", 0), ("learnability", 3), ("sfl", 2)])
def test_when_candidates_are_wanted(name, period):
    c = made(name)
    wanted = [bool(c.wants(r)) for r in range(7)]
    assert wanted == [period > 0 and r % period == 0 for r in range(7)] and c.period == period
    assert [bool(jax.jit(c.wants)(jnp.int32(r))) for r in range(7)] == wanted


# ------------------------------------------------------------------------------------------- what training does to a state


def test_sizes():
    plr = make_curriculum(CurriculumConfig("plr", buffer=40_000))
    assert sum(x.nbytes for x in jax.tree.leaves(plr.start(3_000_000))) < 1e6
    regret = make_curriculum(CurriculumConfig("regret", buffer=40_000), par=np.full(3_000_000, 50.0), max_steps=507)
    assert sum(x.nbytes for x in jax.tree.leaves(regret.start(3_000_000))) < 2e7
    assert jax.eval_shape(plr.record, plr.start(5), jnp.zeros(3, jnp.int32), some_outcome(3)) == jax.eval_shape(lambda: plr.start(5))


def test_a_buffer_with_room_for_more_than_there_is():
    plr = make_curriculum(CurriculumConfig("plr", buffer=1000, fill=1.0, replay=1.0))
    state = plr.start(5)
    assert state.task.shape == (5,)
    state = jax.jit(plr.record)(state, jnp.array([4, 0, 3, 3, 9, 1, 2, 2]), some_outcome(8))  # more agents than slots, and a task that does not exist
    assert sorted(state.task.tolist()) == [0, 1, 2, 3, 4] and int(state.ends[-1]) > 0
    one = make_curriculum(CurriculumConfig("sfl", buffer=64, candidates=64, period=1)).start(1)
    assert one.task.shape == (1,)


@pytest.mark.parametrize("name", ["uniform", "regret", pytest.param("maxmc", marks=pytest.mark.slow), pytest.param("sfl", marks=pytest.mark.slow)])
def test_jit_scan_vmap_and_donation(name):
    c = made(name)
    batches = jnp.array([[0, 1, 1, 3, 8, 8], [4, 6, 0, 0, -1, 7], [2, 2, 2, 5, 1, 0]])
    outcomes = [some_outcome(B, seed) for seed in range(3)]
    state = c.start(N)
    for tasks, o in zip(batches, outcomes):
        state = compiled(name, "record")(compiled(name, "refresh")(state, tasks, o), tasks, o)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *outcomes)
    both = lambda s, x: (c.record(c.refresh(s, *x), *x), None)
    same(state, jax.jit(lambda s: jax.lax.scan(both, s, (batches, stacked))[0])(c.start(N)))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), c.start(N))
    mapped = jax.jit(jax.vmap(c.record))(twice, batches[:2], jax.tree.map(lambda x: x[:2], stacked))
    for i in range(2):
        same(jax.tree.map(lambda x: x[i], mapped), compiled(name, "record")(c.start(N), batches[i], outcomes[i]))
    lazy = compiled(name, "record")(c.start(N), batches[0], outcomes[0])
    if name != "regret":  # slow: one operation after another
        for x, y in zip(jax.tree.leaves(c.record(c.start(N), batches[0], outcomes[0])), jax.tree.leaves(lazy)):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=64)  # atol: of shares counted in 2⁻³⁰
    used = c.start(N)
    same(jax.jit(c.record, donate_argnums=0)(used, batches[0], outcomes[0]), lazy)
    same(c.start(N), made(name).start(N))  # a donated state takes nothing from the next


@pytest.mark.parametrize("name", ["uniform", "sfl", "regret"])
def test_a_checkpoint_changes_nothing(name):
    c = made(name)
    state = a_state(name) if name != "uniform" else compiled(name, "record")(c.start(N), jnp.arange(B), some_outcome(B))
    arrays = to_arrays(state)
    assert all(isinstance(x, np.ndarray) for x in arrays.values())
    back = from_arrays({k: v.copy() for k, v in arrays.items()}, c.start(N))
    same(back, state)
    go = lambda s: compiled(name, "record")(s, compiled(name, "draw")(s, keys_of(B, 9))[1], some_outcome(B, 4))
    same(go(back), go(state))


@pytest.mark.parametrize("name", ["uniform", *CONFIGS])
def test_the_interface(name):
    c = made(name)
    assert isinstance(c, Curriculum) and hash(c) == hash(dataclasses.replace(c))
    state = c.start(N)
    later = a_state(name) if name != "uniform" else state
    assert c.stats(state).keys() == c.stats(later).keys()
    for s in (state, later):
        assert all(np.shape(x) == () and np.isfinite(x) for x in c.stats(s).values())
    if name != "uniform":
        start, now = c.stats(state), c.stats(later)
        assert start["curriculum_filled"] == 0 == start["curriculum_tasks"] and now["curriculum_filled"] == 1 and 1 <= now["curriculum_tasks"] <= K + 1e-3
    proposed = c.propose(state, keys_of(500))
    assert stats.chisquare(np.bincount(proposed, minlength=N)).pvalue > 1e-3


def test_how_many_tasks_the_draws_amount_to():
    stats_of = jax.jit(cu.buffer_stats)
    share_out = jax.jit(cu._shared_out, static_argnums=(1, 4))
    state = share_out(filled([.1, .1, .1, .4], [5] * 4), "equal", 1.0, 0.0, 1.0)
    assert float(stats_of(state)["curriculum_tasks"]) == pytest.approx(4, abs=1e-4)
    found = stats_of(share_out(filled([.1, .1, .1, .4], [5] * 4), "rank", 0.001, 0.0, 1.0))
    assert float(found["curriculum_tasks"]) == pytest.approx(1) and float(found["curriculum_score_max"]) == pytest.approx(.4) and found["curriculum_age"] == 0


# ------------------------------------------------------------------------------------------- par


def test_par_of_a_benchmark():
    tasks = generate_benchmark("small", 40, seed=3)
    rules = np.asarray(tasks.rules).copy()
    tiles = np.asarray(tasks.init_tiles).copy()
    tiles[0] = 0  # without objects nothing can be done
    broken = tasks.replace(rules=rules, init_tiles=tiles)
    par = estimated_steps(broken, *make("XLand-MiniGrid-R1-9x9")[::-1])
    assert par.dtype == np.float32 and np.isnan(par[0]) and np.isfinite(par[1:]).all()
    regret = make_curriculum(CurriculumConfig("regret"), broken, world=make("XLand-MiniGrid-R1-9x9"))
    np.testing.assert_array_equal(regret.reference, reference_returns(par, 3 * 81))
    np.testing.assert_array_equal(make_curriculum(CurriculumConfig("regret"), broken, world=make("XLand-MiniGrid-R1-9x9", max_steps=60)).reference, reference_returns(par, 60))
    assert np.isnan(regret.start(40).reference[0])
    with pytest.raises(ValueError, match="par has shape"):
        make_curriculum(CurriculumConfig("regret"), broken.take(np.zeros(0, int)), par=np.zeros(0), max_steps=9)


def test_reference_returns():
    np.testing.assert_allclose(reference_returns([0, 50, 100, 100.5, np.nan], 100), [1, .55, .1, 0, np.nan], rtol=1e-6)
    for par, steps in [([1, 2], 0), ([1, 2], True), ([1, 2], 2.5), ([1, 2], None), ([-1, 2], 10), ([np.nan] * 2, 10), ([np.inf, np.nan], 10), ([[1]], 10), ([], 10)]:
        with pytest.raises(ValueError, match="par has shape|max_steps is"):
            reference_returns(par, steps)


# ------------------------------------------------------------------------------------------- settings


def test_settings_are_complete_and_survive_json():
    for kind in KINDS:
        config = CurriculumConfig(kind)
        assert CurriculumConfig(**dataclasses.asdict(config)) == config
        assert kind == "uniform" or all(getattr(config, f.name) is not None for f in dataclasses.fields(config))
        assert dataclasses.replace(CurriculumConfig(), kind=kind) == config


@pytest.mark.parametrize("settings,word", [
    (dict(kind="accel"), "uniform, plr, sfl, regret"), (dict(kind=None), "kind"), (dict(kind="plr", buffer=0), "buffer"), (dict(kind="plr", buffer=2.5), "integer"), (dict(kind="plr", buffer=True), "integer"),
    (dict(kind="plr", replay=1.1), "lie in"), (dict(kind="plr", replay=float("nan")), "lie in"), (dict(kind="plr", staleness=-.1), "lie in"), (dict(kind="plr", fill=2), "lie in"),
    (dict(kind="plr", temperature=0), "lie in"), (dict(kind="plr", temperature=float("nan")), "lie in"), (dict(kind="plr", temperature=float("inf")), "lie in"),
    (dict(kind="plr", score="luck"), "choose from maxmc"), (dict(kind="plr", score="regret"), "kind 'regret'"), (dict(kind="sfl", score="maxmc"), "leave it out"), (dict(kind="regret", score="maxmc"), "leave it out"),
    (dict(kind="plr", weights="size"), "rank, score, equal"), (dict(kind="plr", candidates=5), "both"), (dict(kind="plr", period=5), "both"),
    (dict(kind="plr", candidates=5, period=5), "trial"), (dict(kind="sfl", trials=1), "at least 2"), (dict(kind="sfl", candidates=0, period=0), "trying"),
    (dict(kind="sfl", candidates=10), "raise it"), (dict(kind="plr", candidates=-1), "of at least 0"), (dict(kind="sfl", period=0), "both"),
])
def test_wrong_settings(settings, word):
    with pytest.raises(ValueError, match=word) as error:
        CurriculumConfig(**settings)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("wrong,kind,word", [
    (lambda: make_curriculum(CurriculumConfig("regret")), ValueError, "par"),
    (lambda: make_curriculum(CurriculumConfig("regret"), par=PAR), ValueError, "max_steps"),
    (lambda: make_curriculum(CurriculumConfig("regret"), range(4), par=PAR, max_steps=9), ValueError, "this very benchmark"),
    (lambda: made("regret").start(N + 1), ValueError, "this very benchmark"),
    (lambda: cu.PLR(CONFIGS["regret"]).start(3), ValueError, "this very benchmark"),
    (lambda: made("maxmc").start(0), ValueError, "from 1"),
    (lambda: made("maxmc").start(2**31 - 1), ValueError, "from 1"),
    (lambda: made("maxmc").start(3.0), ValueError, "integer"),
    (lambda: Uniform().start(True), ValueError, "integer"),
    (lambda: made("maxmc").record(made("maxmc").start(N), jnp.zeros(B), some_outcome(B)), ValueError, "integers"),
    (lambda: made("maxmc").record(made("maxmc").start(N), jnp.arange(B + 1), some_outcome(B)), ValueError, "outcome.success"),
    (lambda: made("maxmc").record(made("maxmc").start(N), jnp.zeros((2, 3), int), some_outcome(B)), ValueError, "one task number for each agent"),
    (lambda: made("maxmc").record(made("maxmc").start(N), jnp.zeros(0, int), some_outcome(0)), ValueError, "one task number for each agent"),
])
def test_wrong_input(wrong, kind, word):
    with pytest.raises(kind, match=word) as error:
        wrong()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


