"""Scores against the oracle, which plays the same trials."""
import dataclasses
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xland_minigrid.baselines.demo import OBJECTS, hold_tasks
from xland_minigrid.baselines.evaluation import Evaluation, RandomPolicy, bootstrap_mean, bootstrap_quantile, evaluate
from xland_minigrid.baselines.report import table
from xland_minigrid.benchmarks.oracle import trial_starts
from xland_minigrid.core.tiles import EMPTY, FLOOR, pack_pairs, unpack
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from worlds import refusals

pytestmark = pytest.mark.newest

MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])


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


@pytest.fixture(scope="module")
def tasks():
    return hold_tasks(OBJECTS, 40, seed=3)


@pytest.fixture(scope="module")
def world():
    return make("XLand-MiniGrid-R1-9x9", height=6, width=6, max_steps=40)


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
        with pytest.raises(ValueError, match="anchor 'oracle' did not play"):
            getattr(e, name)
    assert "regret" not in e.overall() and "regret" not in e.per_trial()


@pytest.mark.slow  # another program to compile
def test_composed_goals_are_unknown_to_the_oracle():
    from xland_minigrid.benchmarks import load_benchmark
    probes, (env, params) = load_benchmark("probes-30"), make("XLand-MiniGrid-R1-9x9")
    composed = np.flatnonzero(np.asarray(probes.goals)[:, 0] == 255)
    found = evaluate(RandomPolicy(), probes, world=(GymAutoResetWrapper(env), params), num_trials=1, num_tasks=None, anchors="oracle")
    unknown = np.isnan(found.anchor("oracle").returns[:, 0])
    assert len(composed) and unknown[np.isin(found.task_ids, composed)].all() and unknown.sum() < 15
