"""The reference player against brute force, scores against NumPy, and that what an agent perceives says nothing about its goal."""
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xland_minigrid import make
from xland_minigrid.baselines.encoders import first_inputs, next_inputs
from xland_minigrid.baselines.evaluation import Evaluation, RandomPolicy, evaluate, reference_player
from xland_minigrid.benchmarks.benchmark import generate_benchmark
from xland_minigrid.benchmarks.probes import probes_benchmark
from xland_minigrid.benchmarks.reference import ExpertPlayer, Knowledge, ReferencePlayer, candidates
from xland_minigrid.core.actions import NUM_ACTIONS
from xland_minigrid.core.tiles import unpack
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, GymAutoResetWrapper
from xland_minigrid.experimental.img_obs import RGBImgObservationWrapper

BATCH, STEPS = 16, 60
env, params = make("XLand-MiniGrid-R1-9x9")
params = params.replace(max_steps=STEPS)


@functools.cache
def tasks():
    return generate_benchmark("trivial", BATCH, seed=7, progress=False)


def goals_of(objects: np.ndarray) -> np.ndarray:
    "The candidates as encodings, in plain Python."
    tiles = unpack(objects)
    rows = []
    for kind, first, second in zip(*candidates(len(objects))):
        rows.append([kind, *tiles[first], *(tiles[second] if first != second else (0, 0))])
    return np.array(rows, np.uint8)


@functools.cache
def played(knows_map: bool):
    "A trial of each task: what the player knew after each step, the states, its actions, and how the trial went; leading axis of steps."
    player, rulesets = ReferencePlayer(knows_map=knows_map), tasks().get_rulesets(np.arange(BATCH))
    reset = jax.vmap(lambda task, key: env.reset(params.replace(ruleset=task), key))
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    act = jax.jit(lambda inputs, memory: player.act(None, SimpleNamespace(**inputs), memory, None))
    timestep = reset(rulesets, jax.random.split(jax.random.key(3), BATCH))
    before, memory, seen = None, player.start(BATCH), []
    inputs = first_inputs(timestep, NUM_ACTIONS)
    for _ in range(STEPS - 1):
        given = {name: getattr(inputs, name) for name in ("view", "direction", "action", "reward")}
        action, memory = act(given | {"done": jnp.zeros(BATCH, bool)}, player.shown(memory, timestep.state))
        before, timestep = timestep, step(params, timestep, action)
        inputs = next_inputs(inputs, action, timestep)
        seen.append(jax.device_get((memory.replace(shown=None), before.state.replace(key=None), action, timestep.reward, timestep.last())))
    return jax.tree.map(lambda *x: np.stack(x), *seen)


@functools.cache
def other_worlds():
    "`ends(states, goals, actions)`: whether an action ends the trial if the goal is another one; for one state and many goals."
    one = lambda state, goal, action: env.step(params, time_of(state.replace(goal_encoding=goal, key=jax.random.key(0))), action).reward > 0
    return jax.jit(jax.vmap(jax.vmap(one, (None, 0, None))))


def time_of(state):
    timestep = env.reset(params, jax.random.key(0))
    return timestep.replace(state=state)


@pytest.mark.parametrize("knows_map", [True, False])
def test_the_posterior_is_that_of_brute_force(knows_map):
    """A goal is possible exactly if the environment, with that goal, would have gone on whenever the trial went on.

    A player that does not know the map may keep goals about what it has not seen; it never strikes out one that is possible.
    """
    memory, states, actions, _, last = played(knows_map)
    struck = np.zeros(memory.alive.shape[1:], bool)
    compared = 0
    for t in range(30):
        going = ~last[t] & (t == 0 or ~last[:t].any(0) if t else True)
        after = memory.alive[t + 1]
        goals = np.stack([goals_of(memory.objects[t + 1, i]) for i in range(BATCH)])
        reached = np.asarray(other_worlds()(jax.tree.map(lambda x: x[t], states), goals, actions[t]))
        listed = np.stack([(memory.objects[t + 1][:, which] != 0) for which in candidates(5)[1:]]).all(0)
        same_list = (memory.objects[t + 1] == memory.objects[0]).all(1) if knows_map else np.ones(BATCH, bool)
        struck |= reached
        rows = going & same_list
        compared += rows.sum()
        if knows_map:
            np.testing.assert_array_equal(after[rows][listed[rows]], ~struck[rows][listed[rows]])
        else:
            newly = memory.alive[t] & ~memory.alive[t + 1]
            assert (reached | ~newly)[rows].all(), "struck out, and it would not have ended the trial"
    assert compared > 100 and struck.any()


def test_a_success_leaves_only_what_would_have_ended_the_trial():
    player, found = ReferencePlayer(knows_map=True), 0
    memory, states, actions, reward, last = played(True)
    for i in range(BATCH):
        ends = np.flatnonzero(last[:, i])
        if not len(ends) or reward[ends[0], i] == 0:
            continue
        t = ends[0]
        known = jax.tree.map(lambda x: jnp.asarray(x[t, i])[None], memory)
        state = jax.tree.map(lambda x: x[t:t + 1, i], states)
        inputs = SimpleNamespace(view=jnp.zeros((1, 5, 5, 2), jnp.uint8) + jnp.array([3, 9], jnp.uint8), direction=jnp.zeros(1, jnp.int32),
                                 action=jnp.asarray(actions[t, i])[None], reward=jnp.asarray(reward[t, i])[None], done=jnp.ones(1, bool))
        _, after = jax.jit(lambda i, m: player.act(None, SimpleNamespace(**i), m, None))(vars(inputs), known)
        reached = np.asarray(other_worlds()(state, goals_of(memory.objects[t, i])[None], actions[t, i][None]))[0]
        np.testing.assert_array_equal(np.asarray(after.alive)[0], memory.alive[t, i] & reached)
        found += 1
        if found == 2:
            break
    assert found


def test_scores_lie_between_a_random_policy_and_the_reference():
    world = GymAutoResetWrapper(env), params.replace(max_steps=30)
    found = evaluate(ReferencePlayer(), tasks(), world=world, num_trials=3, num_tasks=None, anchors=True)
    assert found.score() == (1, 1, 1) and found.per_trial()["score"].tolist() == [1, 1, 1]
    assert found.anchor("reference").returns.mean() > found.anchor("random").returns.mean()
    random = evaluate(RandomPolicy(), tasks(), world=world, num_trials=3, num_tasks=None).beside(found)
    assert random.score() == (0, 0, 0)
    middle = Evaluation(found.success, found.steps, (found.returns + random.returns) / 2, found.task_ids).beside(found)
    np.testing.assert_allclose(middle.score(), 0.5, atol=1e-6)
    assert {"score", "score_lo", "score_hi"} <= middle.per_trial().keys() and "score" in middle.overall()
    with pytest.raises(ValueError, match="evaluate with anchors"):
        Evaluation(found.success, found.steps, found.returns, found.task_ids).score()


def test_who_is_the_reference():
    assert reference_player(tasks(), env, params) == ReferencePlayer(9, 5)
    assert reference_player(generate_benchmark("small", 8, progress=False), env, params) == ExpertPlayer()
    assert reference_player(tasks(), RGBImgObservationWrapper(env), params) == ExpertPlayer()
    assert reference_player(probes_benchmark(), env, params) is reference_player(None, env, params) is None
    with pytest.raises(ValueError, match="at least 1"):
        ReferencePlayer(num_objects=0)
    with pytest.raises(ValueError, match="no plan"):
        ExpertPlayer().begin(None, SimpleNamespace(rulesets=None))
    assert isinstance(ReferencePlayer().start(2), Knowledge)


@pytest.mark.parametrize("wrap", [lambda e: e, DirectionObservationWrapper, RGBImgObservationWrapper])
def test_what_an_agent_perceives_says_nothing_about_the_goal(wrap):
    "Two worlds that differ in the goal alone look alike until reward or end differ, whatever the agent does."
    world, one = wrap(GymAutoResetWrapper(env)), tasks().get_ruleset(0)
    other = tasks().get_ruleset(next(i for i in range(1, BATCH) if not np.array_equal(tasks().goals[i], tasks().goals[0])))
    both = [params.replace(ruleset=one), params.replace(ruleset=one.replace(goal=other.goal))]
    batch = jax.vmap(lambda key, p: world.reset(p, key), (0, None))
    times = [batch(jax.random.split(jax.random.key(1), 4), p) for p in both]
    cells = wrap is not RGBImgObservationWrapper
    inputs, step = [first_inputs(t, NUM_ACTIONS, neighbors=cells) for t in times], jax.jit(jax.vmap(world.step, (None, 0, 0)))
    alike = np.ones(4, bool)
    for t in range(40):
        for a, b in zip(*map(jax.tree.leaves, inputs)):
            np.testing.assert_array_equal(np.asarray(a)[alike], np.asarray(b)[alike])
        action = jax.random.randint(jax.random.fold_in(jax.random.key(2), t), (4,), 0, NUM_ACTIONS)
        times = [step(p, time, action) for p, time in zip(both, times)]
        inputs = [next_inputs(i, action, time) for i, time in zip(inputs, times)]
        alike &= np.asarray((times[0].reward == times[1].reward) & (times[0].last() == times[1].last()))
    assert alike.any()
