"""The reference player against brute force, scores against NumPy, and that what an agent perceives says nothing about its goal."""
import asyncio
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from websockets.asyncio.client import connect

from xland_minigrid import make
from xland_minigrid.baselines.encoders import first_inputs, next_inputs
from xland_minigrid.baselines.evaluation import Evaluation, RandomPolicy, evaluate, reference_player
from xland_minigrid.benchmarks.benchmark import generate_benchmark
from xland_minigrid.benchmarks.probes import probes_benchmark
from xland_minigrid.benchmarks.reference import ExpertPlayer, Knowledge, ReferencePlayer, candidates
from xland_minigrid.core.actions import NUM_ACTIONS
from xland_minigrid.core.tiles import unpack
from xland_minigrid.compat import pictures
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper
from xland_minigrid.pool.server import EnvServer
from xland_minigrid.pool.text.xland import XLandText
from xland_minigrid.viz.images import RGBImgObservationWrapper

gym_adapter = pytest.importorskip("xland_minigrid.interop.gymnasium")
dm_adapter = pytest.importorskip("xland_minigrid.interop.dm_env")

pytestmark = pytest.mark.newest
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
def acting(knows_map: bool):
    "One compiled program of the player for all tests that step it by hand; the batch is always `BATCH`."
    player = ReferencePlayer(knows_map=knows_map)
    return jax.jit(lambda inputs, memory: player.act(None, SimpleNamespace(**inputs), memory, None))


@functools.cache
def played(knows_map: bool):
    "A trial of each task: what the player knew after each step, the states, its actions, and how the trial went; leading axis of steps."
    player, rulesets = ReferencePlayer(knows_map=knows_map), tasks().get_rulesets(np.arange(BATCH))
    reset = jax.vmap(lambda task, key: env.reset(params.replace(ruleset=task), key))
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    act, timestep = acting(knows_map), reset(rulesets, jax.random.split(jax.random.key(3), BATCH))
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
    memory, states, actions, reward, last = played(True)
    won = [(t, i) for i in range(BATCH) for t in [last[:, i].argmax()] if last[t, i] and reward[t, i] > 0]
    assert won
    rows = np.array((won * BATCH)[:BATCH]).T
    at = lambda tree: jax.tree.map(lambda x: x[tuple(rows)], tree)
    view = jnp.zeros((BATCH, 5, 5, 2), jnp.uint8) + jnp.array([3, 9], jnp.uint8)
    inputs = dict(view=view, direction=jnp.zeros(BATCH, jnp.int32), action=jnp.asarray(at(actions)), reward=jnp.asarray(at(reward)),
                  done=jnp.ones(BATCH, bool))
    known = jax.tree.map(jnp.asarray, at(memory)).replace(shown=(jnp.asarray(at(states).cells), jnp.asarray(at(states).agent.position)))
    alive = np.asarray(acting(True)(inputs, known)[1].alive)
    goals = np.stack([goals_of(objects) for objects in at(memory).objects])
    reached = np.asarray(other_worlds()(at(states), goals, at(actions)))
    np.testing.assert_array_equal(alive, at(memory).alive & reached)


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


# ------------------------------------------------------------------------------------------- what is perceived


PATHS = {
    "cells, gym resets": (GymAutoResetWrapper,), "cells, dm_env resets": (DmEnvAutoResetWrapper,),
    "direction, rules and goal, images": (GymAutoResetWrapper, RGBImgObservationWrapper, DirectionObservationWrapper, RulesAndGoalsObservationWrapper),
    "images with xminigrid's identifiers": (GymAutoResetWrapper, pictures.RGBImgObservationWrapper)}
SHOWN = {"goal_encoding"}  # what RulesAndGoalsObservationWrapper is there to show; the two worlds have the same rules


@functools.cache
def two_goals():
    "A task without rules, and the same with another goal."
    one = tasks().get_ruleset(0)
    other = tasks().get_ruleset(next(i for i in range(1, BATCH) if not np.array_equal(tasks().goals[i], tasks().goals[0])))
    return one, one.replace(goal=other.goal)


def alike_until(one, other):
    "Compare two lists of pairs (what is perceived, what tells them apart): equal until reward or end differ. How many were compared."
    for count, ((seen, outcome), (seen_too, outcome_too)) in enumerate(zip(one, other, strict=True)):
        if outcome != outcome_too:
            return count
        assert jax.tree.structure(seen) == jax.tree.structure(seen_too)
        for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(seen_too)):
            np.testing.assert_array_equal(a, b)
    return len(one)


@pytest.mark.parametrize("path", PATHS)
def test_what_an_agent_perceives_says_nothing_about_the_goal(path):
    "Two worlds that differ in the goal alone look alike until reward or end differ, whatever the agent does: observations, and `Inputs`."
    world = functools.reduce(lambda inner, wrap: wrap(inner), PATHS[path], env)
    both, cells = jax.tree.map(lambda *x: jnp.stack(x), *two_goals()), path.startswith("cells")
    each = lambda function: jax.jit(jax.vmap(lambda task, *given: function(params.replace(ruleset=task), *given)))
    key = jax.random.key(1)
    time, step = each(world.reset)(both, jnp.stack([key, key])), each(world.step)
    inputs, found = first_inputs(time, NUM_ACTIONS, neighbors=cells), []
    for t in range(40):
        seen = {k: v for k, v in time.observation.items() if k not in SHOWN} if isinstance(time.observation, dict) else time.observation
        now = jax.device_get(((seen, inputs), (time.reward, time.last())))
        found.append([jax.tree.map(lambda x: x[row], now) for row in range(2)])
        action = jnp.full(2, np.random.default_rng(t).integers(NUM_ACTIONS))
        time = step(both, time, action)
        inputs = next_inputs(inputs, action, time)
    assert alike_until(*zip(*found)) > 5


def through_gym(ruleset, actions):
    world = gym_adapter.XLandEnv((env, params), ruleset=ruleset, direction=True)
    found = [(world.reset(seed=1), None)]
    for action in actions:
        seen, reward, *over, info = world.step(int(action))
        found.append(((seen, info), (reward, over)))
        if any(over):
            break
    return found


def through_vector(ruleset, actions, output="numpy"):
    world = gym_adapter.XLandVectorEnv((env, params), num_envs=2, ruleset=ruleset, output=output)
    found = [(world.reset(seed=1), None)]
    for action in actions:
        seen, reward, ended, cut, info = world.step(np.full(2, action))
        found.append(((seen, info), (reward.tolist(), ended.tolist(), cut.tolist())))
    return found


def through_dm_env(ruleset, actions):
    world = dm_adapter.XLandDmEnv((env, params), seed=1, ruleset=ruleset)
    steps = [world.reset(), *(world.step(int(action)) for action in actions)]
    return [(step.observation, (step.step_type, step.reward, step.discount)) for step in steps]


def through_torch(ruleset, actions):
    pytest.importorskip("torch", reason="torch is not installed")
    return through_vector(ruleset, actions, "torch")


def through_text(ruleset, actions, **more):
    world = XLandText({"ruleset": ruleset, "seed": 1, "show_rules": False, "show_goal": False, "max_steps": STEPS, **more})
    found = [(list(map(str, asyncio.run(world.reset()))), None)]
    for action in actions:
        text, reward, over, info = asyncio.run(world.turn(str(action)))
        found.append((f"{text} {info}", (reward, over)))
        if over:
            break
    return [(np.array(seen), outcome) for seen, outcome in found]


def through_hints(ruleset, actions):
    return through_text(ruleset, actions, hints=True)


def through_openenv(ruleset, actions):
    task = {"goal": ruleset.goal.tolist(), "rules": ruleset.rules.tolist(), "init_tiles": ruleset.init_tiles.tolist()}

    async def play():
        async with EnvServer(env="XLand-MiniGrid-R1-9x9", slots=1, token="", params={"max_steps": STEPS}) as server, connect(f"{server.url}/ws") as ws:
            found = []
            for frame in ({"type": "reset", "data": {"seed": 1, "ruleset": task}}, *({"type": "step", "data": {"action": int(action)}} for action in actions)):
                await ws.send(json.dumps(frame))
                data = json.loads(await ws.recv())["data"]
                found.append((data["observation"], (data["reward"], data["done"])))
                if data["done"]:
                    break
            return found
    return asyncio.run(play())


@pytest.mark.parametrize("through", [through_gym, through_vector, through_torch, through_dm_env, through_text, through_hints, through_openenv])
def test_adapters_and_text_say_nothing_about_the_goal(through):
    actions = np.random.default_rng(0).integers(0, NUM_ACTIONS, 30)
    one, other = (through(task, actions) for task in two_goals())
    n = min(len(one), len(other))
    assert alike_until(one[:n], other[:n]) > 5


def test_the_comparison_would_notice_a_shown_goal():
    one, other = ([({"goal_encoding": task.goal}, None)] for task in two_goals())
    with pytest.raises(AssertionError):
        alike_until(one, other)
