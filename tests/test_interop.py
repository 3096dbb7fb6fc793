"""Other people's interfaces, judged by their own checkers, by each other, and by the plain environment.

One small grid and a handful of tasks that are reached by walking about serve all tests, so that few programs are compiled.
"""
import copy
import importlib
import pickle
import re
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import xland_minigrid
from xland_minigrid.benchmarks import Benchmark
from xland_minigrid.core.goals import AgentNearGoal
from xland_minigrid.core.ruleset import RuleSet
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.sampling import RulesetSamplingWrapper, SampledParams, cumulate, draw, sample_tasks
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper
from xland_minigrid.interop import bridge, upstream

from worlds import refusals

NAME = "XLand-MiniGrid-R1-9x9"
THINGS = np.array([[Tiles.BALL, Colors.RED], [Tiles.KEY, Colors.GREEN], [Tiles.PYRAMID, Colors.BLUE], [Tiles.STAR, Colors.PINK]], np.uint8)
TASKS = RuleSet(goal=np.stack([np.asarray(AgentNearGoal(thing).encode()) for thing in THINGS]), rules=np.zeros((4, 2, 7), np.uint8),
                init_tiles=np.stack([THINGS, THINGS[::-1]], 1))
LIMIT = 9                                    # steps of a trial: most run out of time, many reach the goal
SMALL = dict(height=5, width=5, max_steps=LIMIT)


def one(number):
    return jax.tree.map(lambda x: x[number], TASKS)


def benchmark():
    return Benchmark.from_arrays(TASKS.goal, TASKS.rules, TASKS.init_tiles)


def same(a, b):
    "Equal structures with equal arrays; None only where the other is None."
    leaves = [jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (a, b)]
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.array_equal(x, y) for x, y in zip(*leaves))


def plain(seed, actions, **kwargs):
    "What the plain environment shows of a world that goes on after each end, with dm_env's custom: a list of time steps."
    world = bridge.build(NAME, **SMALL, **kwargs)
    env = _restarting(world.env)
    reset, step = env
    timestep = reset(world.params, jax.random.key(seed))
    steps = [timestep]
    for action in actions:
        timestep = step(world.params, timestep, action)
        steps.append(timestep)
    return jax.device_get(steps)


_MADE = {}


def _restarting(env):
    if env not in _MADE:
        around = DmEnvAutoResetWrapper(env)
        _MADE[env] = jax.jit(around.reset), jax.jit(around.step)
    return _MADE[env]


def test_axes_of_parameters():
    "Names of the parameters and of those inside; what is no data is refused."
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    sampling, drawn = sample_tasks(env, params, TASKS, np.ones(4))
    keys = jax.random.split(jax.random.key(0), 4)
    alone = jax.vmap(env.reset, (params.axes("ruleset"), 0))(params.replace(ruleset=TASKS), keys)
    assert (alone.state.goal_encoding == TASKS.goal).all()
    weights = jax.vmap(lambda w: sampling.weigh(drawn, w))(jnp.eye(4))  # each world draws its own task
    sampled = jax.vmap(sampling.reset, (drawn.axes("bounds"), 0))(drawn.replace(bounds=weights.bounds), keys)
    assert sampled.state.carry.ruleset_id.tolist() == [0, 1, 2, 3]
    assert sample_tasks(GymAutoResetWrapper(sampling), drawn, TASKS)[0].unwrapped is env, "an environment that draws already is not wrapped again"
    for wrong in (params, drawn):
        with pytest.raises(ValueError, match="no data 'height'; choose from ruleset"):
            wrong.axes("height")


# A new task at each reset ------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def inside():
    return xland_minigrid.make(NAME, **SMALL)


@pytest.mark.parametrize("around, tasks", [(GymAutoResetWrapper, TASKS), pytest.param(DmEnvAutoResetWrapper, benchmark(), marks=pytest.mark.slow)],
                         ids=["gym", "dm_env"])
def test_every_trial_of_a_batch_draws_a_task(inside, around, tasks):
    sampling = RulesetSamplingWrapper(inside[0])
    env, params = around(DirectionObservationWrapper(sampling)), sampling.with_tasks(inside[1], tasks, [1, 0, 2, 1])

    @jax.jit
    def walk(params, keys, actions):
        timestep = jax.vmap(env.reset, (None, 0))(params, keys)
        keep = lambda t: (t.last(), t.state.step_num, t.state.carry.ruleset_id, t.state.goal_encoding, t.state.cells)
        step = lambda t, a: (lambda n: (n, keep(n)))(jax.vmap(env.step, (None, 0, 0))(params, t, a))
        return jax.lax.scan(step, timestep, actions)[1]

    keys, actions = jax.random.split(jax.random.key(0), 24), jax.random.randint(jax.random.key(1), (60, 24), 0, 4)
    last, age, number, goal, cells = map(np.asarray, walk(params, keys, actions))
    began = age == 0
    assert (goal == TASKS.goal[number]).all() and set(number.ravel()) == {0, 2, 3}
    assert (number[1:] == number[:-1])[~began[1:]].all() and (number[1:] != number[:-1])[began[1:]].mean() > 0.4


def test_a_drawn_trial_is_the_one_of_its_task(inside):
    env, (plain_env, params) = RulesetSamplingWrapper(inside[0]), inside
    drawn = env.with_tasks(params, TASKS)
    draws, alone_reset = jax.jit(env.reset), jax.jit(plain_env.reset)
    for seed in range(4):
        timestep = draws(drawn, jax.random.key(seed))
        alone = alone_reset(params.replace(ruleset=one(int(timestep.state.carry.ruleset_id))), jax.random.split(jax.random.key(seed))[1])
        assert (timestep.state.cells == alone.state.cells).all() and same(timestep.observation, alone.observation)
        assert same(draws(drawn, jax.random.PRNGKey(seed)).state.cells, timestep.state.cells)
    assert env.num_actions(drawn) == 6 and env.observation_shape(drawn) == (5, 5, 2) and env.render(drawn, timestep).shape[-1] == 3


def test_tasks_are_data_not_constants(inside):
    env = RulesetSamplingWrapper(inside[0])
    many = jax.tree.map(lambda x: np.repeat(x, 25_000, 0), TASKS)
    reset = jax.jit(env.reset)
    size = lambda tasks: len(reset.lower(env.with_tasks(inside[1], tasks, np.ones(len(tasks.goal))), jax.random.key(0)).as_text())
    assert size(many) < 1.2 * size(TASKS), "the tasks are inside the program"


def test_a_curriculum_inside_jit(inside):
    env = RulesetSamplingWrapper(inside[0])
    params = env.with_tasks(inside[1], TASKS, np.ones(4))
    number = lambda weights, key: env.reset(env.weigh(params, weights), key).state.carry.ruleset_id
    share = jax.jit(lambda weights: jax.vmap(number, (None, 0))(weights, jax.random.split(jax.random.key(0), 400)))
    for weights in ([0, 0, 1, 0], [5, 0, 0, 5], [1e-8, 0, 0, 3e-8], [1e30, 1e30, 0, 0]):
        shares = np.bincount(share(jnp.array(weights, jnp.float32)), minlength=4) / 400
        assert np.abs(shares - np.array(weights) / np.sum(weights)).max() < 0.1, weights
    assert share._cache_size() == 1


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 1.0, 3.0, 1e6]), min_size=12, max_size=12).filter(any))
@settings(max_examples=50)
def test_every_weight_gets_its_share_and_no_other(weights):
    parts = np.diff(np.asarray(cumulate(np.array(weights)), np.int64), prepend=0)
    assert ((parts > 0) == (np.array(weights) > 0)).all() and parts.sum() < 2**32
    np.testing.assert_allclose(parts / parts.sum(), np.array(weights) / np.sum(weights), atol=1e-6)


def test_tasks_beyond_the_tables_are_drawn_whole(inside):
    from xland_minigrid.core.ruleset import stack_rulesets
    opened = stack_rulesets([one(i).extend() for i in range(4)])
    env = GymAutoResetWrapper(RulesetSamplingWrapper(inside[0]))
    params = env._env.with_tasks(inside[1], opened)
    assert params.tasks.extended is not None
    closed = env._env.with_tasks(inside[1], TASKS)
    reset = jax.jit(env.reset)
    for seed in range(6):
        a, b = reset(params, jax.random.key(seed)), reset(closed, jax.random.key(seed))
        assert same((a.observation, a.state.cells, a.state.carry), (b.observation, b.state.cells, b.state.carry))


def test_sampled_parameters_read_and_change_like_those_inside(inside):
    params = RulesetSamplingWrapper(inside[0]).with_tasks(inside[1], TASKS)
    assert params.height == 5 and params.replace(max_steps=3).inner.max_steps == 3 and params.replace(bounds=None).max_steps == LIMIT
    assert same(pickle.loads(pickle.dumps(params)), params) and isinstance(copy.deepcopy(params), SampledParams)
    with pytest.raises(AttributeError):
        params.hight


WRONG_TASKS = [
    (lambda env, p: RulesetSamplingWrapper(GymAutoResetWrapper(env)), "inside GymAutoResetWrapper would not"),
    (lambda env, p: RulesetSamplingWrapper(DirectionObservationWrapper(DmEnvAutoResetWrapper(env))), "inside DmEnvAutoResetWrapper would not"),
    (lambda env, p: RulesetSamplingWrapper(env).reset(p, jax.random.key(0)), "sample_tasks"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, one(0)), r"goals \(n, 5\)"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, jax.tree.map(lambda x: x[:0], TASKS)), "tasks are empty"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, [1, 2]), "Cannot draw tasks from list"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, TASKS.replace(init_tiles=np.tile(THINGS[:, None], (1, 9, 1)))), "do not fit"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, TASKS, [1, 2]), "one weight per task"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, TASKS, [1, 2, 3, -1]), "none negative"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, TASKS, [0, 0, 0, 0]), "at least one above zero"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(p, TASKS, [0, 0, 0, np.nan]), "one finite number per task"),
    (lambda env, p: RulesetSamplingWrapper(env).with_tasks(xland_minigrid.make("MiniGrid-Empty-5x5")[1], TASKS), "no ruleset"),
]


def test_wrong_tasks_are_refused_in_one_sentence(inside):
    assert refusals({words: (partial(call, *inside), words) for call, words in WRONG_TASKS}) == {}


# Gymnasium ---------------------------------------------------------------------------------------------------------------------------

gymnasium = pytest.importorskip("gymnasium", reason="pip install 'xland_minigrid[gym]'")
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.utils.env_match import check_environments_match
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from xland_minigrid.interop.gymnasium import XLandEnv, XLandVectorEnv, register_envs

ID = f"xland_minigrid/{NAME}"


def make_one(**kwargs):
    return XLandEnv(NAME, **{**SMALL, **kwargs})


def make_many(num_envs=3, **kwargs):
    return XLandVectorEnv(NAME, num_envs, **{**SMALL, **kwargs})


@pytest.mark.parametrize("kwargs", [dict(), dict(ruleset=one(1), direction=True, rules_and_goals=True), dict(benchmark=benchmark())],
                         ids=["view", "dictionary", "benchmark"])
def test_gymnasium_finds_nothing_wrong(kwargs, recwarn):
    env = gymnasium.make(ID, **SMALL, **kwargs).unwrapped
    check_env(env)
    assert [str(w.message) for w in recwarn if "gymnasium" in w.filename or "WARN" in str(w.message)] == []
    assert gymnasium.make(ID, render_mode="ansi", **SMALL).unwrapped.spec.kwargs["env_id"] == NAME


def test_spaces_are_tight():
    env = make_one(direction=True, rules_and_goals=True)
    img = env.observation_space["img"]
    assert img.shape == (5, 5, 2) and img.dtype == np.uint8 and (img.high == [15, 13]).all() and (img.low == 0).all()
    assert env.observation_space["direction"] == gymnasium.spaces.Box(0, 1, (4,), np.float32) and env.action_space == gymnasium.spaces.Discrete(6)
    assert env.observation_space["rule_encoding"].shape == (1, 7)
    many = make_many(5)
    assert many.observation_space.shape == (5, 5, 5, 2) and many.action_space == gymnasium.spaces.MultiDiscrete([6] * 5)
    assert many.single_action_space == env.action_space


def test_every_environment_is_registered():
    assert {f"xland_minigrid/{name}" for name in xland_minigrid.registered_environments()} <= set(gymnasium.registry)
    env = gymnasium.make(f"xland_minigrid.interop.gymnasium:{ID}", **SMALL)
    assert env.unwrapped.params.height == 5 and env.spec.id == ID
    before = len(gymnasium.registry)
    register_envs()
    assert len(gymnasium.registry) == before


@pytest.mark.parametrize("kwargs", [dict(ruleset=one(0)), dict(benchmark=TASKS, weights=[1, 0, 1, 1])], ids=["task", "tasks"])
def test_a_seed_is_a_key_and_a_trial_follows_another(kwargs):
    rng, env = np.random.default_rng(0), make_one(**kwargs)
    actions = rng.integers(0, 4, 60)
    obs, info = env.reset(seed=11)
    over, ends = False, []
    for t, (action, truth) in enumerate(zip([None, *actions], plain(11, actions, **kwargs))):
        if t and over:
            obs, info = env.reset()
            over = False
            assert truth.step_type == 0
        elif t:
            obs, reward, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            ends += [(terminated, truncated)] * over
            assert reward == truth.reward and over == (truth.step_type == 2) and terminated == (over and truth.discount == 0)
            assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        assert obs.dtype == np.uint8 and (obs == truth.observation).all() and obs.flags.writeable
        assert info == ({"ruleset_id": int(truth.state.carry.ruleset_id)} if "benchmark" in kwargs else {})
    assert (True, False) in ends and (False, True) in ends


def test_lava_terminates_without_reward():
    env = make_one(ruleset=one(0).replace(init_tiles=np.full((7, 2), [Tiles.LAVA, Colors.RED], np.uint8)))
    env.reset(seed=0)
    for action in np.random.default_rng(3).integers(0, 3, 200):
        _, reward, terminated, truncated, _ = env.step(action)
        if terminated:
            assert reward == 0 and not truncated
            break
        if truncated:
            env.reset()
    else:
        pytest.fail("the agent never walked into lava")


@pytest.mark.parametrize("direction", [False, True])
def test_observations_may_be_pictures(direction):
    env = make_one(images="rgb", direction=direction, ruleset=one(0))
    space = env.observation_space["img"] if direction else env.observation_space
    obs, _ = env.reset(seed=0)
    assert space.shape == (160, 160, 3) and space.dtype == np.uint8 and space.high.min() == 255 and obs in env.observation_space


def test_large_seeds_differ():
    firsts = [make_one(ruleset=one(0)).reset(seed=seed)[0].tobytes() for seed in (5, 5, 2**32 + 5, 2**64 + 5, 2**32 - 1)]
    assert firsts[0] == firsts[1] and len(set(firsts)) >= 3


MODES = list(AutoresetMode)


@pytest.mark.parametrize("mode, kwargs", [*((mode, dict(benchmark=TASKS)) for mode in MODES),
                                          pytest.param(AutoresetMode.NEXT_STEP, dict(ruleset=one(2), direction=True), marks=pytest.mark.slow)],
                         ids=[*map(str, MODES), "dictionary"])
def test_a_batch_does_what_its_worlds_do_one_by_one(mode, kwargs):
    rng = np.random.default_rng(1)
    ours, theirs = make_many(autoreset_mode=mode, **kwargs), SyncVectorEnv([lambda: make_one(**kwargs)] * 3, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is mode and ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    mine, other = ours.reset(seed=21), theirs.reset(seed=21)
    assert data_equivalence(mine, other, exact=True)
    kinds = set()
    for t in range(60):
        actions = rng.integers(0, 4, 3)
        mine, other = ours.step(actions), theirs.step(actions)
        assert mine[1].dtype == np.float32 and data_equivalence((mine[0], mine[1].astype(float), *mine[2:]), other, exact=True), t
        kinds |= {name for name, flag in (("terminated", mine[2]), ("truncated", mine[3])) if flag.any()}
        over = mine[2] | mine[3]
        if mode is AutoresetMode.DISABLED and over.any():
            with pytest.raises(ResetNeeded, match="reset_mask"):
                ours.step(actions)
            seed = [None, 5, None] if t % 2 else None
            mine, other = (env.reset(seed=seed, options={"reset_mask": over.copy()}) for env in (ours, theirs))
            assert data_equivalence(mine, other, exact=True), t
    assert kinds == {"terminated", "truncated"}
    for seed in (None, [4, 4, 9]):
        assert data_equivalence(ours.reset(seed=seed), theirs.reset(seed=seed), exact=True)


def test_made_by_name_it_matches_the_plain_one():
    check_environments_match(gymnasium.make(ID, **SMALL, benchmark=TASKS), make_one(benchmark=benchmark()), num_steps=40, seed=3)
    vector = gymnasium.make_vec(ID, num_envs=2, vectorization_mode="vector_entry_point", **SMALL)
    assert isinstance(vector, XLandVectorEnv) and vector.spec.kwargs["num_envs"] == 2
    assert isinstance(gymnasium.make_vec(ID, num_envs=2, vectorization_mode="sync", **SMALL), SyncVectorEnv)


def test_each_world_may_have_its_own_task():
    numbers = [2, 0, 1]
    batch = make_many(ruleset=jax.tree.map(lambda x: x[np.array(numbers)], TASKS), rules_and_goals=True, autoreset_mode="SameStep")
    alone = [make_one(ruleset=one(number), rules_and_goals=True) for number in numbers]
    obs, _ = batch.reset(seed=0)
    for i, env in enumerate(alone):
        assert same(jax.tree.map(lambda x: x[i], obs), env.reset(seed=i)[0])
    for action in np.random.default_rng(0).integers(0, 4, 25):
        obs, reward, *_ = batch.step([action] * 3)
        for i, env in enumerate(alone):
            seen, one_reward, terminated, truncated, _ = env.step(action)
            assert one_reward == reward[i] and same(jax.tree.map(lambda x: x[i], obs), env.reset()[0] if terminated or truncated else seen)
    assert (obs["goal_encoding"] == TASKS.goal[numbers]).all()


def test_wrappers_of_gymnasium_work_around_a_batch():
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_many(autoreset_mode=mode, benchmark=TASKS))
        if mode is AutoresetMode.NEXT_STEP:     # Gymnasium's observation wrappers refuse SAME_STEP
            envs = gymnasium.wrappers.vector.FlattenObservation(envs)
        obs, _ = envs.reset(seed=0)
        assert obs.shape == ((3, 50) if mode is AutoresetMode.NEXT_STEP else (3, 5, 5, 2))
        for _ in range(LIMIT):
            obs, reward, terminated, truncated, info = envs.step(np.full(3, 1))
        assert truncated.all() and (info["episode"]["l"] == LIMIT).all()


@pytest.mark.parametrize("output", ["jax", "torch"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_other_arrays_hold_the_same(output, mode):
    if output == "torch":
        torch = pytest.importorskip("torch", reason="pip install 'xland_minigrid[torch]'")
    ours, other = make_many(autoreset_mode=mode, benchmark=TASKS), make_many(autoreset_mode=mode, benchmark=TASKS, output=output)
    kind = jax.Array if output == "jax" else torch.Tensor
    wrap = jnp.asarray if output == "jax" else torch.tensor
    mine, seen = ours.reset(seed=0), other.reset(seed=0)
    for t in range(25):
        assert isinstance(seen[0], kind) and same(mine[0], np.asarray(seen[0])) and same(mine[-1]["_ruleset_id"], np.asarray(seen[-1]["_ruleset_id"]))
        assert ((mine[-1]["ruleset_id"] == np.asarray(seen[-1]["ruleset_id"])) | ~mine[-1]["_ruleset_id"]).all()
        actions = np.random.default_rng(t).integers(0, 4, 3)
        mine, seen = ours.step(actions), other.step(wrap(actions))
        assert all(isinstance(x, kind) and (a == np.asarray(x)).all() for a, x in zip(mine[1:4], seen[1:4]))
        over = mine[2] | mine[3]
        if mode is AutoresetMode.SAME_STEP and over.any():
            assert (over == np.asarray(seen[4]["_final_obs"])).all() and (over == mine[4]["_final_obs"]).all()
            for i in np.flatnonzero(over):
                assert (mine[4]["final_obs"][i] == np.asarray(seen[4]["final_obs"][i])).all()
                assert mine[4]["final_info"]["ruleset_id"][i] == int(seen[4]["final_info"]["ruleset_id"][i])
        if mode is AutoresetMode.DISABLED and over.any():
            mine, seen = (env.reset(options={"reset_mask": over}) for env in (ours, other))


@pytest.mark.parametrize("make", [lambda: make_one(benchmark=TASKS), lambda: make_many(benchmark=TASKS)], ids=["one", "batch"])
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_a_copy_goes_on_alike(make, twin):
    env = make()
    env.reset(seed=1)
    action = 1 if isinstance(env, XLandEnv) else [1, 2, 0]
    env.step(action)
    other = twin(env)
    for _ in range(3):
        assert same(env.step(action), other.step(action))
    assert same(env.reset(), other.reset())


def test_what_is_returned_belongs_to_the_caller():
    env = make_many()
    first, _ = env.reset(seed=0)
    kept = first.copy()
    first[:] = 0
    second, *_ = env.step([1, 1, 1])
    second[:] = 7
    assert (env.reset(seed=0)[0] == kept).all()


WRONG = {
    "step first": (lambda: make_one().step(0), "call reset"),
    "batch step first": (lambda: make_many().step([0, 0, 0]), "call reset"),
    "unknown id": (lambda: XLandEnv("XLand-7"), "choose one of"),
    "no id": (lambda: XLandEnv(7), "registered id"),
    "unknown parameter": (lambda: make_one(hight=3), "hight"),
    "render mode": (lambda: make_one(render_mode="human"), "choose 'rgb_array'"),
    "images": (lambda: make_one(images="gif"), "choose 'rgb'"),
    "two sources": (lambda: make_one(ruleset=one(0), benchmark=TASKS), "Give either"),
    "number without benchmark": (lambda: make_one(ruleset_id=3), "give benchmark="),
    "weights without benchmark": (lambda: make_one(weights=[1]), "give benchmark="),
    "no such number": (lambda: make_one(benchmark=benchmark(), ruleset_id=9), "no ruleset number 9"),
    "a batch for one": (lambda: make_one(ruleset=TASKS), "give one task"),
    "a batch of another size": (lambda: make_many(3, ruleset=TASKS), "each of the 3 worlds"),
    "not a ruleset": (lambda: make_one(ruleset="ball"), "give a RuleSet"),
    "crowded": (lambda: make_one(ruleset=one(0).replace(init_tiles=np.tile(THINGS[:1], (9, 1)))), "do not fit"),
    "invalid ruleset": (lambda: make_one(ruleset=one(0).replace(goal=np.full(5, 99, np.uint8))), "99|nknown goal"),
    "no worlds": (lambda: make_many(0), "at least 1"),
    "mode": (lambda: make_many(autoreset_mode="sometimes"), "choose one of"),
    "output": (lambda: make_many(output="tf"), "choose 'numpy'"),
    "number of seeds": (lambda: make_many().reset(seed=[1, 2]), "one for each"),
    "negative seed": (lambda: make_one().reset(seed=-1), "is negative"),
    "unknown option": (lambda: make_one().reset(options={"level": 3}), "level"),
    "mask before reset": (lambda: make_many().reset(options={"reset_mask": np.ones(3, bool)}), "without a reset_mask first"),
    "render first": (lambda: make_one(render_mode="ansi").render(), "call reset"),
}


def test_wrong_use_of_gymnasium_is_refused_in_one_sentence():
    assert refusals(WRONG, (ValueError, TypeError, IndexError, ResetNeeded, gymnasium.error.Error)) == {}


def test_wrong_actions_are_refused():
    env = make_one()
    env.reset(seed=0)
    wrong = [(action, f"action is {re.escape(repr(action))}: give an integer") for action in (6, -1, 1.0, [1], None, "0")]
    assert refusals({repr(action): (partial(env.step, action), words) for action, words in wrong}) == {}
    assert env.timestep.state.step_num == 0


def test_wrong_batches_of_actions_are_refused():
    env = make_many()
    env.reset(seed=0)
    wrong = [([0, 0, 6], "action is 6"), ([0, -1, 0], "action is -1"), ([0, 0], "one for each"), ([0.0, 1, 2], "integers"),
             (jnp.array([0, 7, 0]), "action is 7"), (3, "one for each")]
    assert refusals({repr(actions): (partial(env.step, actions), words) for actions, words in wrong}) == {}
    masks = np.zeros(3, bool), np.ones(2, bool), [0, 1, 1]
    assert refusals({repr(mask): (partial(env.reset, options={"reset_mask": mask}), "reset_mask") for mask in masks}, ValueError) == {}


def test_a_trial_that_is_over_wants_a_reset():
    env = make_one(render_mode="ansi")
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step(1)[3] for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True] and isinstance(env.render(), str)
        with pytest.raises(ResetNeeded, match="call reset"):
            env.step(1)
    pictures = make_many(render_mode="rgb_array")
    pictures.reset(seed=0)
    assert len(pictures.render()) == 3 and pictures.render()[0].shape[-1] == 3


# dm_env ------------------------------------------------------------------------------------------------------------------------------

dm_env = pytest.importorskip("dm_env", reason="pip install 'xland_minigrid[dm]'")
import unittest

from dm_env import test_utils

from xland_minigrid.interop.dm_env import XLandDmEnv


class Contract(test_utils.EnvironmentTestMixin):
    kwargs = {}

    def make_object_under_test(self):
        return XLandDmEnv(NAME, seed=0, **SMALL, **self.kwargs)

    def make_action_sequence(self):
        return iter(np.random.default_rng(0).integers(0, 4, 40).astype(np.int32))


class TestDmEnv(Contract, unittest.TestCase):
    pass


class TestDmEnvWithDictionary(Contract, unittest.TestCase):
    kwargs = dict(ruleset=one(1), direction=True)


class TestDmEnvWithTasks(Contract, unittest.TestCase):
    kwargs = dict(benchmark=TASKS)


def test_dm_env_does_what_the_plain_environment_does():
    actions = np.random.default_rng(0).integers(0, 4, 60)
    env, discounts = XLandDmEnv(NAME, seed=11, benchmark=TASKS, **SMALL), set()
    for t, (action, truth) in enumerate(zip([5, *actions], plain(11, actions, benchmark=TASKS))):
        step = env.step(action)     # the first one resets
        assert step.step_type == truth.step_type and (step.observation == truth.observation).all(), t
        assert env.ruleset_id == truth.state.carry.ruleset_id
        assert (step.reward is None and step.discount is None) if step.first() else (step.reward == truth.reward and step.discount == truth.discount)
        discounts |= {float(step.discount)} if step.last() else set()
    assert discounts == {0.0, 1.0}
    for wrong in (6, -1, 0.5, None):
        with pytest.raises((ValueError, TypeError)):
            env.step(wrong)
    with pytest.raises(ValueError, match="negative"):
        XLandDmEnv(NAME, seed=-3)


# torch -------------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="pip install 'xland_minigrid[torch]'")


DTYPES = [np.uint8, bool, np.int32, np.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_shared_both_ways(torch, dtype):
    from xland_minigrid.interop.torch import from_torch, to_torch
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 16)).astype(dtype))
    tensor = to_torch({"a": (array, None)})["a"][0]
    assert tensor.data_ptr() == array.unsafe_buffer_pointer() and tensor.numpy().dtype == array.dtype and (tensor.numpy() == np.asarray(array)).all()
    mine = to_torch(array, copy=True)
    mine.zero_()
    assert mine.data_ptr() != array.unsafe_buffer_pointer() and np.asarray(array).any()
    back = from_torch(tensor)
    assert back.unsafe_buffer_pointer() == tensor.data_ptr() and back.dtype == array.dtype and (back == array).all()
    assert from_torch([tensor], copy=True)[0].unsafe_buffer_pointer() != tensor.data_ptr()


def test_awkward_tensors_come_over_too(torch):
    from xland_minigrid.interop.torch import from_torch, to_torch
    whole = torch.arange(101, dtype=torch.float32)
    square = whole[:100].reshape(10, 10)
    for tensor in (whole[1:], whole[::2], square.T, whole.clone().requires_grad_(), torch.tensor(3), torch.zeros(0, 4), torch.arange(5)):
        assert np.asarray(from_torch(tensor)).tolist() == tensor.tolist()
    frozen = np.asarray(jnp.arange(3))
    to_torch(frozen)[0] = 9
    assert frozen.tolist() == [0, 1, 2]
    for wrong, sentence in [(jax.random.key(0), "key_data"), (3, "cannot become"), (["a"], "cannot become")]:
        with pytest.raises(TypeError, match=sentence):
            to_torch(wrong)
    with pytest.raises(TypeError, match="is not a tensor"):
        from_torch(np.zeros(3))


# Packages that are missing -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("package, extra, use", [
    ("gymnasium", "gym", lambda: importlib.import_module("xland_minigrid.interop.gymnasium")),
    ("dm_env", "dm", lambda: importlib.import_module("xland_minigrid.interop.dm_env")),
    ("torch", "torch", lambda: importlib.import_module("xland_minigrid.interop.torch").to_torch(np.zeros(3))),
    ("torch", "torch", lambda: importlib.import_module("xland_minigrid.interop.torch").from_torch(np.zeros(3))),
    ("torch", "torch", lambda: make_many(output="torch")),
])
def test_a_missing_package_is_named_with_its_pip_command(monkeypatch, package, extra, use):
    if package != "torch":
        monkeypatch.delitem(sys.modules, f"xland_minigrid.interop.{package}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as refusal:
        use()
    assert str(refusal.value) == f"This needs {package}: pip install 'xland_minigrid[{extra}]'"


# Adapters that others wrote ----------------------------------------------------------------------------------------------------------
#
# Each is written as their authors write it, against the names of xminigrid; the package is the only thing that changes.

PACKAGES = ["xminigrid", "xland_minigrid"]


def names(package):
    "What the adapters import, from the paths where xminigrid has it."
    pytest.importorskip(package)
    module = lambda path: importlib.import_module(f"{package}.{path}")
    types, wrappers = module("types"), module("wrappers")
    return SimpleNamespace(
        make=importlib.import_module(package).make, RuleSet=types.RuleSet, StepType=types.StepType, TimeStep=types.TimeStep, State=types.State,
        Environment=module("environment").Environment, EnvParams=module("environment").EnvParams,
        Wrapper=wrappers.Wrapper, GymAutoResetWrapper=wrappers.GymAutoResetWrapper, DmEnvAutoResetWrapper=wrappers.DmEnvAutoResetWrapper,
        DirectionObservationWrapper=wrappers.DirectionObservationWrapper,
        RulesAndGoalsObservationWrapper=wrappers.RulesAndGoalsObservationWrapper,
        Benchmark=module("benchmarks").Benchmark, NUM_ACTIONS=module("core.constants").NUM_ACTIONS,
        registered=module("registration").registered_environments())


class KShotGym:
    "A batch of worlds, each with a task of its own that it meets in k trials: dm_env's auto-reset, the end of a trial marked in the observation."

    def __init__(self, x, tasks, num_envs, k, max_steps, seed):
        env, params = x.make("XLand-MiniGrid-R1-9x9")
        self.env = x.RulesAndGoalsObservationWrapper(x.DirectionObservationWrapper(x.DmEnvAutoResetWrapper(env)))
        self.k, self.n, self.tasks = k, num_envs, tasks
        self.key = jax.random.key(seed)
        self.sample = jax.jit(jax.vmap(tasks.sample_ruleset))
        self.x_reset, self.x_step = jax.jit(jax.vmap(self.env.reset)), jax.jit(jax.vmap(self.env.step))
        self.params = params.replace(max_steps=max_steps)
        self.shapes = self.env.observation_shape(self.params)
        self.num_actions = self.env.num_actions(self.params)

    def keys(self):
        self.key, *keys = jax.random.split(self.key, self.n + 1)
        return jnp.stack(keys)

    def reset(self):
        rulesets = self.sample(self.keys())
        self.params = self.params.replace(ruleset=rulesets)
        self.timestep, self.trial = self.x_reset(self.params, self.keys()), np.zeros(self.n, int)
        return self.observe()

    def observe(self):
        seen = self.timestep.observation
        done = np.asarray(self.timestep.last(), np.float32)[:, None]
        direction = np.concatenate([np.asarray(seen["direction"]), done], -1)
        return {"grid": np.array(seen["img"]), "direction_done": direction, "goal": np.array(seen["goal_encoding"])}

    def step(self, actions):
        ended = np.asarray(self.timestep.last())
        self.timestep = self.x_step(self.params, self.timestep, jnp.asarray(actions))
        self.trial += ended
        done = self.trial >= self.k
        if done.any():
            fresh = self.x_reset(self.params, self.keys())
            pick = lambda new, old: jnp.where(jnp.expand_dims(done, tuple(range(1, old.ndim))), new, old)
            self.timestep = jax.tree.map(pick, fresh, self.timestep)
            self.trial[done] = 0
        return self.observe(), np.array(self.timestep.reward, np.float32), done


class Gymnax:
    "`reset(key, params) -> obs, state` and `step(key, state, action, params) -> obs, state, reward, done, info`; the state is the time step."

    def __init__(self, x, name):
        env, self.default_params = x.make(name)
        self.env = x.GymAutoResetWrapper(env)

    def reset(self, key, params):
        timestep = self.env.reset(params, key)
        return timestep.observation, timestep

    def step(self, key, state, action, params):
        timestep = self.env.step(params, state, action)
        return timestep.observation, timestep, timestep.reward, timestep.last(), {"discount": timestep.discount}


def dm_like(x, name):
    "An `Environment` of its own that translates for whoever speaks dm_env: a subclass of the package's wrapper, flat float observations."
    class Flat(x.Wrapper):
        def observation_shape(self, params):
            return (int(np.prod(self._env.observation_shape(params))),)

        def _flat(self, timestep):
            return timestep.replace(observation=timestep.observation.astype(jnp.float32).ravel())

        def reset(self, params, key):
            return self._flat(self._env.reset(params, key))

        def step(self, params, timestep, action):
            return self._flat(self._env.step(params, timestep, action))

    env, params = x.make(name)
    return Flat(x.DmEnvAutoResetWrapper(env)), params


def like(tree):
    "Shapes and dtypes, keys aside: 0.9.3 hands on whatever key it gets."
    return jax.tree.map(lambda leaf: (np.shape(leaf), str(np.asarray(leaf).dtype)), tree)


@pytest.fixture(scope="module")
def both():
    return [names(package) for package in PACKAGES]


# Nothing like it exists: trials run out of time.
FAR = TASKS.replace(goal=np.tile(np.asarray(AgentNearGoal(np.array([Tiles.HEX, Colors.GREY])).encode()), (4, 1)))


@pytest.mark.slow
def test_a_k_shot_gym_runs_on_both(both):
    tasks = Benchmark.from_arrays(FAR.goal, FAR.rules, FAR.init_tiles)
    their_tasks = both[0].Benchmark(**jax.tree.map(jnp.asarray, upstream.benchmark_to_upstream(tasks)))
    theirs, ours = KShotGym(both[0], their_tasks, 3, 2, 4, 0), KShotGym(both[1], tasks, 3, 2, 4, 0)
    assert like(theirs.reset()) == like(ours.reset()) and theirs.num_actions == ours.num_actions == 6
    assert ours.shapes["img"] == theirs.shapes["img"] and ours.shapes["goal_encoding"] == theirs.shapes["goal_encoding"]
    ours.timestep = upstream.timestep_from_upstream(theirs.timestep)     # the same worlds
    ours.params = ours.params.replace(ruleset=upstream.ruleset_from_upstream(theirs.params.ruleset))
    dones = []
    for t, actions in enumerate(np.random.default_rng(0).integers(0, 6, (15, 3))):
        (a, reward_a, done_a), (b, reward_b, done_b) = theirs.step(actions), ours.step(actions)
        assert like((a, reward_a, done_a)) == like((b, reward_b, done_b)) and (done_a == done_b).all() and (reward_a == reward_b).all(), t
        assert (a["direction_done"][:, 4] == b["direction_done"][:, 4]).all()
        assert (a["goal"] == np.asarray(upstream.goal_to_upstream(b["goal"]))).all()
        if t < 4:     # after that each draws its own next trial
            assert (a["direction_done"] == b["direction_done"]).all() and (a["grid"] == upstream.observation_to_upstream(b["grid"])).all()
        dones.append(done_b.all())
    assert dones.count(True) == 1 and dones[9], "two trials of four steps, each with its reset"


@pytest.mark.parametrize("adapter", ["gymnax", "dm_env"])
def test_adapters_see_the_same_arrays_on_both(both, adapter):
    "Both are traced: shapes, dtypes and structures of all that they return. What they return is compared at length."
    seen = []
    for x in both:
        if adapter == "gymnax":
            env = Gymnax(x, "MiniGrid-EmptyRandom-5x5")
            obs, state = jax.eval_shape(env.reset, jax.random.key(0), env.default_params)
            obs, _, *rest = jax.eval_shape(env.step, jax.random.key(0), state, 0, env.default_params)
            seen.append((obs, *rest))
        else:
            env, params = dm_like(x, "MiniGrid-EmptyRandom-5x5")
            first = jax.eval_shape(env.reset, params, jax.random.key(0))
            seen.append([(t.observation, t.reward, t.discount, t.step_type) for t in (first, jax.eval_shape(env.step, params, first, 0))])
            assert isinstance(env, x.Environment) and env.observation_shape(params) == seen[-1][0][0].shape
    theirs, ours = (jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree) for tree in seen)
    assert theirs == ours and both[1].StepType.LAST == both[0].StepType.LAST == 2


@pytest.mark.slow
def test_a_gymnax_like_adapter_runs_on_both(both):
    theirs, ours = (Gymnax(x, "MiniGrid-EmptyRandom-5x5") for x in both)
    params_a, params_b = theirs.default_params.replace(max_steps=12), ours.default_params.replace(max_steps=12)
    step_a, step_b = (jax.jit(jax.vmap(adapter.step, (0, 0, 0, None))) for adapter in (theirs, ours))
    keys = jax.random.split(jax.random.key(0), 64)
    obs_a, state_a = jax.jit(jax.vmap(theirs.reset, (0, None)))(keys, params_a)
    obs_b, state_b = jax.jit(jax.vmap(ours.reset, (0, None)))(keys, params_b)
    assert like(obs_a) == like(obs_b)
    state_b = upstream.timestep_from_upstream(state_a)
    state_b = state_b.replace(final_observation=state_b.observation)
    fresh, won = np.ones(64, bool), 0
    for actions in np.random.default_rng(0).integers(0, 3, (14, 64)):
        obs_a, state_a, reward_a, done_a, info_a = step_a(keys, state_a, actions, params_a)
        obs_b, state_b, reward_b, done_b, info_b = step_b(keys, state_b, actions, params_b)
        assert like((obs_a, reward_a, done_a, info_a)) == like((obs_b, reward_b, done_b, info_b))
        np.testing.assert_allclose(np.asarray(reward_b)[fresh], np.asarray(reward_a)[fresh], rtol=1e-5)
        assert (np.asarray(done_a) == np.asarray(done_b))[fresh].all()
        assert (np.asarray(info_a["discount"]) == np.asarray(info_b["discount"]))[fresh].all()
        won += int((np.asarray(reward_b)[fresh] > 0).sum())
        fresh &= ~np.asarray(done_b)     # the next trial is each package's own
        assert (np.asarray(obs_a)[fresh] == np.asarray(upstream.observation_to_upstream(obs_b))[fresh]).all()
    assert won > 3 and not fresh.any()


@pytest.mark.slow
def test_a_dm_env_like_adapter_runs_on_both(both):
    (theirs, params_a), (ours, params_b) = (dm_like(x, "MiniGrid-EmptyRandom-5x5") for x in both)
    assert isinstance(ours, both[1].Environment) and theirs.observation_shape(params_a) == ours.observation_shape(params_b)
    params_a, params_b = params_a.replace(max_steps=6), params_b.replace(max_steps=6)
    reset_a, reset_b, step_a, step_b = map(jax.jit, (theirs.reset, ours.reset, theirs.step, ours.step))
    a, b = reset_a(params_a, jax.random.key(1)), reset_b(params_b, jax.random.key(1))
    assert like((a.observation, a.reward, a.discount, a.step_type)) == like((b.observation, b.reward, b.discount, b.step_type)) and b.first()
    b = b.replace(state=upstream.state_from_upstream(a.state))
    kinds = []
    for action in (1, 1, 2, 1, 3, 1, 0, 2):
        a, b = step_a(params_a, a, action), step_b(params_b, b, action)
        assert like((a.observation, a.reward, a.discount, a.step_type)) == like((b.observation, b.reward, b.discount, b.step_type))
        assert a.step_type == b.step_type and a.discount == b.discount and a.reward == b.reward
        kinds.append(int(b.step_type))
    assert kinds == [1, 1, 1, 1, 1, 2, 0, 1] and both[1].StepType.LAST == both[0].StepType.LAST == 2


def test_names_that_adapters_import_are_where_they_were(both):
    assert {name for name in both[0].registered if name.startswith("XLand") and name[-2:] in ("x9", "13", "17")} <= set(both[1].registered)
    assert both[1].NUM_ACTIONS == both[0].NUM_ACTIONS
    from xland_minigrid import wrappers
    assert wrappers.RulesetSamplingWrapper is RulesetSamplingWrapper
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        wrappers.Nonsense


def test_a_gymnasium_that_the_adapter_cannot_use_does_not_spoil_the_import():
    "An old or broken one that is loaded already: the package imports, and only the adapter says what is missing."
    import subprocess
    import sys
    code = ("import sys, types; sys.modules['gymnasium'] = types.ModuleType('gymnasium'); import xland_minigrid as x; assert x.registered_environments()\n"
            "try:\n    import xland_minigrid.interop.gymnasium\nexcept (ImportError, AttributeError):\n    print('refused')")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "refused"
