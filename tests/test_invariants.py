"""What must hold in every world: laws of conservation over many random steps, the same result however one computes it, honest errors."""
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import xland_minigrid
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.core import goals, grid, layouts, rules, tiles
from xland_minigrid.core.actions import AgentState
from xland_minigrid.core.layouts import layout, sample_without_replacement, stack_layouts
from xland_minigrid.core.observation import hide, look
from xland_minigrid.core.rules import compile_rules, decompile_rules
from xland_minigrid.core.ruleset import RuleSet, pad_ruleset
from xland_minigrid.core.struct import field_names
from xland_minigrid.core.tiles import EMPTY, END_OF_MAP, FLOOR, WALL, Tiles, pack, pack_pairs, unpack
from xland_minigrid.envs.environment import EnvParams, reward_table
from xland_minigrid.envs.registration import register
from xland_minigrid.envs.wrappers import (
    DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper,
)
from xland_minigrid.envs.xland import XLandMiniGrid

from worlds import CLASSES, compiled, jit_for_long, refusals

ALL = xland_minigrid.registered_environments()
LAYOUTS = [("R1", 9), ("R2", 9), ("R4", 9), ("R6", 13), ("R9", 16)]
SIDE = 16                                    # all of them fit into arrays of this size
OBJECTS = np.array([(t, c) for t, c in zip(tiles.PICKABLE * 2, range(3, 15)) if c < 14][:9], np.uint8)   # nine objects, all different


def some_ruleset(goal=goals.AgentNearGoal((Tiles.BALL, 3))):
    "Two objects, one rule, a goal that happens now and then."
    return RuleSet(goal=goal.encode(), rules=rules.TileNearRule(tuple(OBJECTS[0]), tuple(OBJECTS[1]), (Tiles.STAR, 5)).encode()[None],
                   init_tiles=jnp.asarray(OBJECTS[:2]))


def bits(tree):
    "All arrays of a tree as NumPy, keys as their data."
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(x)) for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def all_layouts(worlds, **changes):
    "An environment, and parameters and their axes for `worlds` worlds in each of `LAYOUTS`, padded to one size: one program runs all of them."
    env, plans = XLandMiniGrid(), [layout(kind, n, n) for kind, n in LAYOUTS]
    params = env.default_params(layout=stack_layouts([plan for plan in plans for _ in range(worlds)], SIDE, SIDE), **changes)
    return env, params, jax.tree.map(lambda _: None, params).replace(layout=0)


# Many steps ----------------------------------------------------------------------------------------------------------------------

LAWS = ("every object exists once, on the grid or in the pocket", "walls stay", "doors stay where they are, in their colour",
        "the agent stands on something one can stand on", "direction and pocket are valid", "every cell is a tile, and what is beyond the map stays so",
        "step numbers count", "step types say what happened", "discount says why it ended", "the reward is that of the table",
        "the observation is that of the state, and within a trial also the final one")


def lawful(params, ruled, before, after, action):
    "Each of `LAWS` for one step of one world under auto-reset; bool (11,). `ruled` worlds have rules that make and destroy objects."
    cells, agent, pocket = after.state.cells, after.state.agent, pack_pairs(after.state.agent.pocket)
    things = jnp.asarray(pack_pairs(OBJECTS))
    tile = cells >> 4
    number = (cells.ravel()[None] == things[:, None]).sum(1) + (pocket == things)
    in_all = tiles.is_one_of(tile, tiles.tile_set(tiles.PICKABLE)).sum() + (pocket != EMPTY)
    door = lambda c: jnp.where(((c >> 4) == Tiles.DOOR_CLOSED) | ((c >> 4) == Tiles.DOOR_OPEN), (c & 15) + 1, 0)
    here = tile[agent.position[0], agent.position[1]]
    standing = tiles.is_one_of(here, tiles.tile_set(tiles.WALKABLE)) | (ruled & (here != Tiles.WALL))
    ended, reached, count = after.last(), after.discount == 0, before.state.step_num + 1
    view = look(cells, agent.position, agent.direction, params.view_size)[:-1].reshape(params.view_size, params.view_size)
    return jnp.stack([
        ruled | ((number == 1).all() & (in_all == len(OBJECTS))),
        ended | ((cells == WALL) == (before.state.cells == WALL)).all(),
        ended | (door(cells) == door(before.state.cells)).all(),
        standing,
        (agent.direction >= 0) & (agent.direction < 4) & ((pocket == EMPTY) | tiles.is_one_of(pocket >> 4, tiles.tile_set(tiles.PICKABLE))),
        jnp.where(params.layout.cells == END_OF_MAP, cells == END_OF_MAP,
                  (tile >= Tiles.FLOOR) & (tile <= Tiles.STAR) & ((cells & 15) >= 3) & ((cells & 15) <= 13)).all(),
        after.state.step_num == jnp.where(ended, 0, count),
        (after.step_type == jnp.where(reached | (count >= params.max_steps), 2, 1)),
        jnp.where(ended, reached | (count == params.max_steps), ~reached) & ((after.discount == 0) | (after.discount == 1)),
        after.reward == jnp.where(reached, jnp.asarray(reward_table(params.max_steps))[count], 0),
        (unpack(view) == after.observation).all() & (ended | (after.observation == after.final_observation).all())])


@lru_cache
def many_tasks(worlds):
    "Worlds without rules (nine different objects) and worlds with generated tasks, half and half, in one shape; and which are ruled."
    tasks = generate_benchmark("high", n=worlds // 2, seed=5)
    ruled = jax.tree.map(np.asarray, RuleSet(tasks.goals, tasks.rules, tasks.init_tiles))
    width = max(ruled.init_tiles.shape[1], len(OBJECTS))
    grow = lambda a, n: np.pad(a, ((0, 0), (0, n - a.shape[1]), (0, 0)))
    ruled = ruled.replace(init_tiles=grow(ruled.init_tiles, width))
    kinds = [goals.AgentNearGoal, goals.AgentHoldGoal, goals.TileNearGoal, goals.AgentNearUpGoal, goals.TileNearLeftGoal]
    calm_goals = np.stack([kinds[i % 5](*OBJECTS[[i % 9, (i + 1) % 9]][: len(field_names(kinds[i % 5]))]).encode() for i in range(45)])
    calm = RuleSet(goal=np.resize(calm_goals, (worlds // 2, 5)), rules=np.zeros_like(ruled.rules),
                   init_tiles=np.tile(grow(OBJECTS[None], width), (worlds // 2, 1, 1)))
    return jax.tree.map(lambda a, b: jnp.asarray(np.concatenate([a, b])), calm, ruled), jnp.arange(worlds) >= worlds // 2


@pytest.mark.newest
@pytest.mark.parametrize("each, steps", [(60, 400), pytest.param(200, 1000, marks=[pytest.mark.slow, pytest.mark.optimized])])
def test_laws_over_many_random_steps(each, steps):
    "Five layouts in one batch: 120,000 steps, and at length a million."
    worlds = each * len(LAYOUTS)
    env, params, axes = all_layouts(each, max_steps=150)
    rulesets, ruled = jax.tree.map(lambda x: jnp.tile(x, (len(LAYOUTS),) + (1,) * (x.ndim - 1)), many_tasks(each))
    env, axes, params = GymAutoResetWrapper(env), axes.replace(ruleset=jax.tree.map(lambda _: 0, rulesets)), params.replace(ruleset=rulesets)

    @jit_for_long
    def run(params, key):
        reset_key, key = jax.random.split(key)
        start = jax.vmap(env.reset, (axes, 0))(params, jax.random.split(reset_key, worlds))

        def body(carry, key):
            before, broken, ends = carry
            actions = jax.random.choice(key, jnp.array([0, 0, 0, 1, 2, 3, 3, 4, 5]), (worlds,))
            after = jax.vmap(env.step, (axes, 0, 0))(params, before, actions)
            kept = jax.vmap(lawful, (axes, 0, 0, 0, 0))(params, ruled, before, after, actions)
            return (after, broken + ~kept, ends + jnp.stack([after.last(), after.discount == 0])), None

        last, *counts = jax.lax.scan(body, (start, jnp.zeros((worlds, len(LAWS)), int), jnp.zeros((2, worlds), int)), jax.random.split(key, steps))[0]
        return last.state.cells, *counts

    last, broken, (ends, successes) = jax.tree.map(np.asarray, run(params, jax.random.key(1)))
    for (kind, _), found, over, won, cells in zip(LAYOUTS, *(np.split(x, len(LAYOUTS)) for x in (broken, ends, successes, last))):
        assert {law: int(n) for law, n in zip(LAWS, found.sum(0)) if n} == {}, kind
        assert over.sum() >= each * (steps // 150) and won.sum() > each * steps // 10_000, kind
        assert (cells >> 4 == Tiles.WALL).any((1, 2)).all()


# What the agent sees -------------------------------------------------------------------------------------------------------------------

def slow_view(cells, position, direction, size):
    "The view by padding, cropping and turning, cell by cell nowhere clever."
    padded = np.pad(cells, size)
    turned = np.rot90(padded, direction)
    (row,), (col,) = (v.ravel() for v in np.where(np.rot90(np.arange(padded.size).reshape(padded.shape), direction)
                                                  == (position[0] + size) * padded.shape[1] + position[1] + size))
    return turned[row - size + 1 : row + 1, col - size // 2 : col + size // 2 + 1]


def slow_hidden(view):
    "MiniGrid's rule of sight, as loops over cells."
    size, mask = len(view), np.zeros(view.shape, bool)
    mask[-1, size // 2] = True
    for y in reversed(range(size)):
        for xs, step in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
            for x in xs:
                if mask[y, x] and view[y, x] >> 4 not in tiles.LOS_BLOCKING:
                    mask[y, x + step] = True
                    if y > 0:
                        mask[y - 1, x] = mask[y - 1, x + step] = True
    return np.where(mask, view, tiles.UNSEEN)


@lru_cache
def eyes(size):
    see = jax.vmap(lambda c, p, d: look(c, p, d, size)[:-1].reshape(size, size))
    return jax.jit(lambda c, p, d: (see(c, p, d), jax.vmap(hide)(see(c, p, d))))


@pytest.mark.parametrize("size", [3, 5, 7, 9])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_observation_equals_a_slow_reference(size, seed):
    "Random worlds, all directions, positions up to the very corner, transparent and occluded."
    rng = np.random.default_rng(seed)
    things = np.array([FLOOR] * 6 + [WALL, pack(11, 3), pack(12, 4), pack(10, 5), pack(5, 6), pack(8, 4)], np.uint8)
    cells = things[rng.integers(0, len(things), (16, 9, 11))]
    position, direction = rng.integers(0, (9, 11), (16, 2)).astype(np.int32), (np.arange(16) % 4).astype(np.int32)
    clear, hidden = eyes(size)(cells, position, direction)
    for i in range(16):
        expected = slow_view(cells[i], position[i], direction[i], size)
        assert (clear[i] == expected).all() and (hidden[i] == slow_hidden(expected)).all()


@pytest.mark.parametrize("size, occluded", [(5, False), (9, True)])
def test_environments_observe_that(size, occluded):
    "In every layout the observation of reset and step is the slow reference, at the default view size and, with sight blocked, a larger one."
    env, params, axes = all_layouts(24, view_size=size, see_through_walls=not occluded)
    worlds = len(LAYOUTS) * 24

    @jax.jit
    def run(params, keys, actions):
        start = jax.vmap(env.reset, (axes, 0))(params, keys)
        both = (start, jax.vmap(env.step, (axes, 0, 0))(params, start, actions))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *((t.observation, t.state.cells, t.state.agent) for t in both))

    seen, cells, agent = jax.tree.map(np.asarray, run(params, jax.random.split(jax.random.key(size), worlds), jnp.arange(worlds) % 6))
    seen = pack_pairs(seen)
    for i in range(2 * worlds):
        expected = slow_view(cells[i], agent.position[i], agent.direction[i], size)
        assert (seen[i] == (slow_hidden(expected) if occluded else expected)).all()


# Encodings ------------------------------------------------------------------------------------------------------------------------------

things = st.tuples(st.integers(2, 14), st.integers(2, 13))


@given(st.lists(st.tuples(st.sampled_from(rules.RULES[1:]), things, things, things), min_size=50, max_size=50))
@settings(max_examples=10)
def test_rules_survive_compilation(made):
    rows = np.array([_row(cls, parts) for cls, *parts in made], np.uint8)
    assert (np.asarray(_there_and_back(rows)) == rows).all()
    cls, *parts = made[0]
    row = cls(*parts[: len(field_names(cls))]).encode()
    assert row.dtype == jnp.uint8 and (row == rows[0]).all() and (rules.decode_rule(row).encode() == row).all()


def _row(cls, parts):
    "A rule's encoding, by hand."
    return np.pad(np.ravel([cls.ID, *np.ravel(parts[: len(field_names(cls))])]), (0, 6 - 2 * len(field_names(cls))))


_there_and_back = jax.jit(lambda rows: decompile_rules(compile_rules(rows)))


@given(st.integers(0, 14), st.integers(0, 13))
def test_a_cell_is_a_byte(tile, color):
    assert unpack(pack(tile, color)).tolist() == [tile, color]
    assert tiles.is_one_of(np.uint8(tile), tiles.tile_set(tiles.WALKABLE)) == (tile in tiles.WALKABLE)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@settings(max_examples=40)
def test_places_are_distinct(seed, size):
    draws = np.asarray(_distinct(np.random.default_rng(seed).integers(0, 2**32, 12, np.uint32), size))[:size]
    assert len(set(draws.tolist())) == len(draws) and draws.min() >= 0 and draws.max() < size


_distinct = jax.jit(sample_without_replacement)


# The same, however one computes it -----------------------------------------------------------------------------------------------------

def _trajectory(env, params, key, actions):
    "One world over a scan, every time step of it."
    step = lambda t, a: (lambda n: (n, n))(env.step(params, t, a))
    return jax.lax.scan(step, env.reset(params, key), actions)[1]


@pytest.mark.parametrize("wrapper", [GymAutoResetWrapper, DmEnvAutoResetWrapper])
def test_alone_in_a_batch_in_a_scan_and_on_many_devices(wrapper):
    """Eight worlds with auto-reset, of two tasks and two layouts: stepped alone, as a scan, under vmap, under nested vmap and under shard_map, bit for bit.

    Both wrappers restart worlds by one function, so one of them is enough for the scan alone, for nesting and for many devices.
    """
    tasks = [pad_ruleset(some_ruleset(goal((Tiles.BALL, 3))), 3, 4) for goal in (goals.AgentNearGoal, goals.AgentHoldGoal)]
    worlds = [compiled(f"XLand-MiniGrid-{kind}-9x9", wrapper, max_steps=9) for kind in ("R4", "R2")]
    env, *_, reset, step = worlds[0]
    assert reset is worlds[1][2], "one program for both layouts"
    pair = [w[1].replace(ruleset=task) for w, task in zip(worlds, tasks)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *pair)
    keys, actions = jax.random.split(jax.random.key(0), 8), jax.random.randint(jax.random.key(1), (8, 30), 0, 6)
    one, every = partial(_trajectory, env), jax.tree.map(lambda x: jnp.repeat(x, 4, 0), params)
    batch = jax.jit(jax.vmap(one))(every, keys, actions)
    assert batch.last().sum() >= 8 * 2

    for i in (2, 7):
        timestep = reset(pair[i // 4], keys[i])
        for t in range(30):
            timestep = step(pair[i // 4], timestep, actions[i, t])
            assert_same(jax.tree.map(lambda x: x[i, t], batch), timestep)
    if wrapper is DmEnvAutoResetWrapper:
        return
    assert_same(jax.tree.map(lambda x: x[5], batch), jax.jit(one)(pair[1], keys[5], actions[5]))

    nested = jax.jit(jax.vmap(jax.vmap(one, (None, 0, 0))))(params, keys.reshape(2, 4), actions.reshape(2, 4, 30))
    assert_same(jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), nested), batch)

    devices = jax.devices()[:4]
    assert len(devices) == 4, "conftest.py forces four host devices"
    mesh, spec = Mesh(np.array(devices), ("worlds",)), PartitionSpec("worlds")
    many = jax.jit(jax.shard_map(jax.vmap(one), mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec))(every, keys, actions)
    assert len(many.reward.sharding.device_set) == 4
    assert_same(many, batch)


def kind(timestep):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), timestep)


ALL_SEEN = lambda env: GymAutoResetWrapper(RulesAndGoalsObservationWrapper(DirectionObservationWrapper(env)))


@pytest.mark.parametrize("name, wrap", [
    *(("XLand-MiniGrid-R4-9x9", w) for w in (GymAutoResetWrapper, ALL_SEEN, lambda env: DirectionObservationWrapper(DmEnvAutoResetWrapper(env)))),
    ("MiniGrid-EmptyRandom-5x5", ALL_SEEN)], ids=["gym", "all the observations", "dm_env, direction outside", "without a ruleset"])
def test_no_type_drifts_in_a_scan(name, wrap):
    "What a step returns can be the carry of a scan, to the weak types; `observation_shape` tells the truth."
    env, params = xland_minigrid.make(name)
    env = wrap(env)
    start = jax.eval_shape(env.reset, params, jax.random.key(0))
    assert kind(start) == kind(jax.eval_shape(env.step, params, start, jnp.int32(0)))
    shapes = jax.tree.map(lambda x: x.shape, start.observation)
    said = jax.tree.map(lambda x: x if isinstance(x, tuple) else (x,), env.observation_shape(params), is_leaf=lambda x: isinstance(x, tuple))
    assert shapes == said


def check_scan(name, **changes):
    "The bare environment begins with a grid of its size, and its step returns what it takes; traced, not compiled."
    env, params = xland_minigrid.make(name, **changes)
    start = jax.eval_shape(env.reset, params, jax.random.key(0))
    after = jax.eval_shape(env.step, params, start, jnp.int32(0))
    assert kind(start) == kind(after) and start.observation.shape == env.observation_shape(params) == (params.view_size, params.view_size, 2), name
    assert start.state.cells.shape == (params.height, params.width) and env.num_actions(params) == 6, name


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_can_be_scanned(name):
    check_scan(name)


def test_every_environment_is_of_a_class_that_is_tested():
    "Each registered id makes valid parameters, and the tests above trace its class."
    of = lambda name: (type(xland_minigrid.make(name)[0]), getattr(xland_minigrid.make(name)[1], "grid_type", None) in layouts.PROCEDURAL)
    assert {of(name) for name in ALL} == {of(name) for name in CLASSES} and len(ALL) == 55


@pytest.mark.slow
@pytest.mark.parametrize("name, occluded", [*((name, False) for name in [name for name in ALL if name not in CLASSES][::2]), *((name, True) for name in CLASSES)])
def test_every_environment_can_be_scanned(name, occluded):
    "Every other one, whose steps are all compared with those of upstream as well; one of each class with blocked sight."
    check_scan(name, see_through_walls=not occluded)


# Keys and gradients --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, wrapper", [("XLand-MiniGrid-R4-9x9", GymAutoResetWrapper), ("XLand-MiniGrid-Maze-9x9", DmEnvAutoResetWrapper),
                                           ("MiniGrid-EmptyRandom-5x5", DmEnvAutoResetWrapper)])
def test_no_key_is_used_twice(name, wrapper):
    "JAX's own checker watches resets, steps and auto-resets, alone, in a scan and in batches, while it traces; and it does watch."
    env, params = xland_minigrid.make(name, max_steps=3)
    run = partial(_trajectory, wrapper(env), params)
    trace = lambda f, keys: jax.eval_shape(jax.jit(f), keys)
    with jax.debug_key_reuse(True):
        trace(lambda key: run(key, jnp.zeros(7, int)), jax.random.key(1))
        trace(lambda keys: jax.vmap(lambda key: run(key, jnp.zeros(7, int)))(keys), jax.random.split(jax.random.key(2), 5))
        with pytest.raises(jax.errors.KeyReuseError):
            trace(lambda key: (env.reset(params, key), env.reset(params, key)), jax.random.key(3))


# On every machine -----------------------------------------------------------------------------------------------------------------------

def played(name, steps, worlds, **changes):
    "Time steps of random play with auto-reset in an environment, all in one tree; XLand's tasks have up to eighteen rules in the larger grids."
    env, params = xland_minigrid.make(name, **changes)
    env, axes = GymAutoResetWrapper(env), None
    if hasattr(params, "ruleset"):
        tasks = generate_benchmark("small" if params.height < 10 else "high", worlds, seed=3, progress=False)
        params = params.replace(ruleset=jax.vmap(tasks.get_ruleset)(np.arange(worlds)))
        axes = params.axes("ruleset")

    @jax.jit
    def play(params, key):
        timestep = jax.vmap(env.reset, (axes, 0))(params, jax.random.split(key, worlds))
        actions = jax.random.randint(key, (steps, worlds), -1, 7)
        follow = lambda timestep, action: (jax.vmap(env.step, (axes, 0, 0))(params, timestep, action),) * 2
        return timestep, jax.lax.scan(follow, timestep, actions)[1]

    return play(params, jax.random.key(1))


@pytest.mark.newest
@pytest.mark.parametrize("name, changes", [
    ("XLand-MiniGrid-R4-9x9", dict(see_through_walls=False)), *(pytest.param(name, {}, marks=pytest.mark.slow) for name in CLASSES[::2])])
def test_every_platform_gives_the_same_bytes(name, changes, monkeypatch):
    "The straight-line programs of accelerators, run on this machine, against those of a CPU: both in one world, a TPU's (a GPU's without gathers) in all."
    expected = played(name, 60, 48, max_steps=25, **changes)
    assert int((expected[1].step_type == 2).sum()) >= 96, "trials end, so resets are compared as well"
    for platform in ("gpu", "tpu") if changes else ("tpu",):
        monkeypatch.setenv("XLAND_MINIGRID_PLATFORM", platform)
        assert_same(played(name, 60, 48, max_steps=25, **changes), expected)


def test_gradients_flow_around_the_world():
    "A policy gradient through a scan with `env.step` inside: the world is not differentiable, the policy is. Run with one wrapper, traced with the other."
    def gradient(wrapper):
        env, params, *_ = compiled("XLand-MiniGrid-R1-9x9", wrapper, max_steps=5)
        params = params.replace(ruleset=some_ruleset())

        def loss(weights, key):
            def act(carry, _):
                timestep, key = carry
                key, draw = jax.random.split(key)
                logits = timestep.observation.ravel().astype(jnp.float32) @ weights
                action = jax.random.categorical(draw, logits)
                following = env.step(params, timestep, action)
                return (following, key), (jax.nn.log_softmax(logits)[action], following.reward + 0.1 * following.discount)

            _, (chances, returns) = jax.lax.scan(act, (env.reset(params, key), key), None, length=12)
            return -(chances * returns).mean()

        return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, jax.random.split(jax.random.key(0), 6)).mean())

    weights = jnp.full((50, 6), 0.01)
    found = np.asarray(jax.jit(gradient(GymAutoResetWrapper))(weights))
    assert np.isfinite(found).all() and np.abs(found).max() > 1e-4
    assert jax.eval_shape(gradient(DmEnvAutoResetWrapper), weights).shape == (50, 6)


# Errors --------------------------------------------------------------------------------------------------------------------------------

def _reset(**overrides):
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", **overrides)
    return jax.eval_shape(env.reset, params, jax.random.key(0))


def _started():
    "A time step to go on from."
    _, params, reset, _ = compiled("XLand-MiniGrid-R1-9x9")
    return reset(params, jax.random.key(0))


WRONG = {
    "unknown environment": (lambda: xland_minigrid.make("XLand-MiniGrid-R5-9x9"), ValueError, "choose one of XLand-MiniGrid-R1-9x9"),
    "unknown parameter": (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9", hight=9), TypeError, "hight"),
    "unknown layout": (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9", grid_type="R3"), ValueError, "choose one of R1, R2"),
    "six rooms of a wrong size": (lambda: xland_minigrid.make("XLand-MiniGrid-R6-13x13", height=15, width=15), ValueError, "13, 17, 19"),
    "nine rooms of a wrong size": (lambda: xland_minigrid.make("XLand-MiniGrid-R9-16x16", height=17, width=17), ValueError, "16, 19"),
    "a grid that coordinates cannot address": (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9", height=300, width=300), ValueError, "square of side"),
    "an empty room without space": (lambda: xland_minigrid.make("MiniGrid-Empty-5x5", height=3, width=3), ValueError, "at least 4x4"),
    "taken id": (lambda: register("XLand-MiniGrid-R1-9x9", "a:B"), ValueError, "registered already"),
    "foreign id": (lambda: register("Breakout", "a:B"), ValueError, "must begin with"),
    "no entry point": (lambda: register("MiniGrid-X", "a.B"), ValueError, "module:Class"),
    "even view": (lambda: _reset(view_size=4), ValueError, "odd number"),
    "no time": (lambda: XLandMiniGrid().step(XLandMiniGrid().default_params().replace(max_steps=None), _started(), 0), ValueError, "max_steps"),
    "no such action": (lambda: XLandMiniGrid().step(XLandMiniGrid().default_params(), _started(), 6), ValueError, "actions are 0 to 5"),
    "fractional action": (lambda: XLandMiniGrid().step(XLandMiniGrid().default_params(), _started(), 1.0), TypeError, "integer 0 to 5"),
    "unknown goal": (lambda: goals.decode_goal([250, 0, 0, 0, 0]), ValueError, "0 to 14"),
    "unknown rule": (lambda: rules.decode_rule([250, 0, 0, 0, 0, 0, 0]), ValueError, "0 to 11"),
    "unknown tile": (lambda: tiles.tile_name(16, 0), ValueError, "0 to 15"),
    "padding too short": (lambda: pad_ruleset(some_ruleset(), 0, 2), ValueError, "pad to at least"),
    "render mode": (lambda: XLandMiniGrid().render(XLandMiniGrid().default_params(render_mode="ascii"), _started()), ValueError, "rgb_array"),
    "unknown field": (lambda: EnvParams().replace(depth=3), TypeError, "depth"),
    "oblong view": (lambda: _oblong(), ValueError, "same number twice"),
}


def _oblong():
    from xland_minigrid.core.observation import transparent_field_of_view
    return transparent_field_of_view(grid.room(5, 5), AgentState(), 5, 3)


def test_wrong_input_is_refused_in_one_sentence():
    assert refusals(WRONG) == {}


# Outside of jit ------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrap", [lambda env: env, GymAutoResetWrapper, DmEnvAutoResetWrapper])
def test_outside_of_jit_only_the_first_step_compiles(wrap):
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    env, compiled = wrap(env), []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None)
    timestep = env.step(params, env.reset(params, jax.random.key(0)), 0)
    compiled.clear()
    env, params = wrap(xland_minigrid.make("XLand-MiniGrid-R1-9x9")[0]), params.replace(ruleset=params.ruleset)  # made again: the same programs
    timestep = env.reset(params, jax.random.key(1))
    for action in (0, 1, 3):
        timestep = env.step(params, timestep, action)
    assert compiled == []


def test_weights_are_as_exact_as_the_docstring_says():
    from xland_minigrid.envs.sampling import SampledParams, cumulate
    weights = np.random.default_rng(0).random(1000) ** 8
    parts = np.diff(np.asarray(cumulate(weights)).astype(np.int64), prepend=0)
    wanted = weights / weights.sum()
    assert (np.abs(parts / parts.sum() - wanted) <= wanted * 2.0**-22 + 2.0**-30).all()
    assert isinstance(SampledParams(inner=xland_minigrid.make("XLand-MiniGrid-R1-9x9")[1]), EnvParams)
