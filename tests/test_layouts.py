"""Layouts as data and layouts that are drawn: the same trials as the static ones, one program for all, and no cell that cannot be reached."""
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from scipy.ndimage import label

import xland_minigrid
from xland_minigrid.core import goals, layouts, rules
from xland_minigrid.core.layouts import Layout, draw_doors, layout, pad_layout, stack_layouts
from xland_minigrid.core.mazes import random_maze, random_rooms, spanning_tree
from xland_minigrid.core.ruleset import RuleSet
from xland_minigrid.core.struct import field_names
from xland_minigrid.core.tiles import END_OF_MAP, FLOOR, WALL, Tiles, pack_pairs
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.envs.xland import XLandMiniGrid

from worlds import refusals

pytestmark = pytest.mark.newest

ENV = XLandMiniGrid()
OBJECTS = np.array([(Tiles.BALL, 3), (Tiles.SQUARE, 4), (0, 0), (Tiles.KEY, 5)], np.uint8)   # with a row of padding, as benchmarks have them
TASK = RuleSet(goal=goals.AgentNearGoal((Tiles.KEY, 5)).encode(), init_tiles=OBJECTS,
               rules=rules.TileNearRule((Tiles.BALL, 3), (Tiles.SQUARE, 4), (Tiles.STAR, 5)).encode()[None])
# One of each kind; all five static programs run at length, and of these the two whose doors say most in every test run.
FIVE = [("R1", 9), ("R2", 9), ("R4", 9), ("R6", 13), ("R9", 10)]


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


# The same trials -----------------------------------------------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def run(static: bool, kind: str = "", n: int = 0):
    "Forty steps of auto-reset under fixed actions, of three worlds per layout; static in a program of its own, or as data, all in one batch."
    env, keys = GymAutoResetWrapper(ENV), jax.random.split(jax.random.key(0), 3 * len(FIVE))
    actions = jax.random.randint(jax.random.key(1), (40, 3 * len(FIVE)), 0, 6)
    if static:
        mine = FIVE.index((kind, n)) + len(FIVE) * np.arange(3)
        keys, actions = keys[mine], actions[:, mine]
        params, axes = ENV.default_params(grid_type=kind, height=n, width=n, ruleset=TASK, max_steps=15), None
    else:
        stack = stack_layouts([layout(k, m, m) for k, m in FIVE] * 3, height=14, width=15)
        params = ENV.default_params(layout=stack, ruleset=TASK, max_steps=15)
        axes = params.axes("layout")
    reset, step = jax.vmap(env.reset, (axes, 0)), jax.vmap(env.step, (axes, 0, 0))

    @jax.jit
    def play(params, keys, actions):
        first = reset(params, keys)
        return first, jax.lax.scan(lambda t, a: (step(params, t, a),) * 2, first, actions)[1]

    return play(params, keys, actions)


@pytest.mark.parametrize("kind, n", [(k, n) if k in ("R4", "R6") else pytest.param(k, n, marks=pytest.mark.slow) for k, n in FIVE])
def test_a_layout_as_data_gives_the_same_trials_as_the_static_one(kind, n):
    "Bit for bit, through rules, goals, time limits and resets, from the middle of a batch of other layouts, padded in every way."
    mine = FIVE.index((kind, n)) + len(FIVE) * np.arange(3)
    take = lambda tree, axis: jax.tree.map(lambda x: x[(slice(None),) * axis + (mine,)], tree)
    for axis, (one, all_) in enumerate(zip(run(True, kind, n), run(False))):
        other = take(all_, axis)
        for name in ("step_type", "reward", "discount", "observation", "final_observation"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        cells = np.asarray(other.state.cells)
        assert np.array_equal(one.state.cells, cells[..., :n, :n])
        assert (cells[..., n:, :] == END_OF_MAP).all() and (cells[..., n:] == END_OF_MAP).all()
        assert np.array_equal(jax.random.key_data(one.state.key), jax.random.key_data(other.state.key))
        for a, b in zip(jax.tree.leaves(one.state.agent), jax.tree.leaves(other.state.agent)):
            assert np.array_equal(a, b)
    assert (np.asarray(one.step_type) == 2).any(), "trials ended on the way"


KNOWN = ([1, 6], 2, [31, 37, 43, 67], [52, 28, 25], [2895194379, 4185947648])   # agent, direction, doors, objects, next key

def test_a_seed_begins_the_trial_that_it_always_began():
    "Known starting states of the static program; whoever changes them changes every published result of a seed."
    params = ENV.default_params(grid_type="R4", height=9, width=9, ruleset=TASK)
    state = jax.jit(lambda key: ENV.reset(params, key).state)(jax.random.key(7))
    found = (state.agent.position.tolist(), int(state.agent.direction), np.flatnonzero(np.asarray(state.cells >> 4) == Tiles.DOOR_CLOSED).tolist(),
             [int(np.flatnonzero(np.asarray(state.cells) == pack_pairs(o))[0]) for o in OBJECTS[[0, 1, 3]]], jax.random.key_data(state.key).tolist())
    assert found == KNOWN


def test_one_program_serves_every_layout():
    "The compiler is asked once, whatever is in the stack."
    drawn = [maze_program(13, 13)(jax.random.key(0), 13, 13, 0.), rooms_program(13, 13)(jax.random.key(0), 10, 13, 13)]
    stack = stack_layouts([layout("R1", 13, 13), layout("R9", 13, 13), *drawn])
    params = ENV.default_params(layout=stack, ruleset=TASK)
    reset = jax.jit(jax.vmap(ENV.reset, (params.axes("layout"), 0)))
    traced = []
    step = jax.jit(lambda *args: (traced.append(1), jax.vmap(ENV.step, (params.axes("layout"), 0, 0))(*args))[1])
    for order in ([0, 1], [2, 3], [3, 0]):
        some = params.replace(layout=row(stack, np.array(order)))
        timestep = reset(some, jax.random.split(jax.random.key(1), 2))
        jax.eval_shape(step, some, timestep, jnp.zeros(2, int))   # traced only where no program fits
        for i, which in enumerate(order):
            cells = np.asarray(timestep.state.cells[i])
            walls, doors = np.asarray(stack.cells[which]) == WALL, cells >> 4 == Tiles.DOOR_CLOSED
            assert np.array_equal(cells == WALL, walls & ~doors) and doors.sum() == int((stack.num_places[which] > 0).sum())
    assert reset._cache_size() == len(traced) == 1


# Laws of every layout --------------------------------------------------------------------------------------------------------------------

def check_laws(plan: Layout, rows: int, cols: int):
    "What every layout must satisfy; `plan` concrete."
    plan = jax.tree.map(np.asarray, plan)
    cells, (height, width) = plan.cells, plan.cells.shape
    inside = cells[:rows, :cols]
    assert (cells[rows:] == END_OF_MAP).all() and (cells[:, cols:] == END_OF_MAP).all() and np.isin(inside, (WALL, FLOOR)).all()
    border = np.ones_like(inside, bool)
    border[1:-1, 1:-1] = False
    assert (inside[border] == WALL).all()
    assert np.array_equal(plan.free[: plan.num_free], np.flatnonzero(cells == FLOOR))
    assert (plan.free[plan.num_free :] == plan.free[plan.num_free - 1]).all()
    real = plan.num_places > 0
    assert (np.sort(~real) == ~real).all(), "real doors come first"
    assert (plan.num_places <= plan.doors.shape[1]).all()
    passable = cells == FLOOR
    for door, count in zip(plan.doors[real], plan.num_places[real]):
        assert len(set(door[:count])) == count
        for y, x in zip(*np.divmod(door[:count], width)):
            assert cells[y, x] == WALL and 0 < y < rows - 1 and 0 < x < cols - 1
            assert (cells[y - 1, x] == cells[y + 1, x] == FLOOR) != (cells[y, x - 1] == cells[y, x + 1] == FLOOR), "joins two floor cells"
    for pick in range(3):   # wherever the doors are, first, last or between
        ways = passable.copy()
        for door, count in zip(plan.doors[real], plan.num_places[real]):
            ways.ravel()[door[[0, count - 1, count // 2][pick]]] = True
        assert label(ways)[1] == 1, "all floor is connected"


@pytest.mark.parametrize("kind", layouts.GRID_TYPES)
def test_fixed_layouts_obey_the_laws_padded_or_not(kind):
    for n in range(3, 27):
        if layouts.valid_size(kind, n, n):
            check_laws(layout(kind, n, n), n, n)
            check_laws(pad_layout(layout(kind, n, n), n + 2, n + 5, free=700, doors=13, places=30), n, n)


SIZES = [(13, 13), (9, 17)]

@lru_cache(maxsize=None)
def maze_program(height, width):
    return jax.jit(lambda key, rows, cols, loops: random_maze(key, height, width, rows, cols, loops))

@lru_cache(maxsize=None)
def rooms_program(height, width):
    return jax.jit(lambda key, rooms, rows, cols: random_rooms(key, height, width, rooms, 10, rows, cols))

odd = lambda limit: st.integers(1, limit // 2).map(lambda i: 2 * i + 1)
anywhere = st.sampled_from(SIZES).flatmap(lambda s: st.tuples(st.just(s), odd(s[0]), odd(s[1])))


@given(anywhere, st.integers(0, 2**32 - 1), st.sampled_from([0., 0., .3, 1.]))
@settings(max_examples=150, deadline=None)
def test_mazes_of_any_size_are_connected(size, seed, loops):
    (height, width), rows, cols = size
    plan = maze_program(height, width)(jax.random.key(seed), rows, cols, loops)
    check_laws(plan, rows, cols)
    nodes, edges = (rows // 2) * (cols // 2), (rows // 2) * (cols // 2 - 1) + (rows // 2 - 1) * (cols // 2)
    openings = int(plan.num_free) - nodes
    assert {0.: openings == nodes - 1, 1.: openings == edges}.get(loops, nodes - 1 <= openings <= edges)
    assert not plan.num_places.size
    assert maze_program(height, width)._cache_size() == 1


@given(anywhere, st.integers(0, 2**32 - 1), st.integers(1, 10))
@settings(max_examples=150, deadline=None)
def test_rooms_of_any_size_are_connected(size, seed, rooms):
    (height, width), rows, cols = size
    plan = rooms_program(height, width)(jax.random.key(seed), rooms, rows, cols)
    check_laws(plan, rows, cols)
    areas, found = label(np.asarray(plan.cells) == FLOOR)
    assert found == int((plan.num_places > 0).sum()) + 1 <= rooms
    for area in range(1, found + 1):
        ys, xs = np.nonzero(areas == area)
        h, w = np.ptp(ys) + 1, np.ptp(xs) + 1
        assert h * w == len(ys), "a room is a rectangle"
        assert min(h, w) >= min(3, rows - 2, cols - 2)
        assert found == rooms or max(h, w) < 7, "fewer rooms than asked for only where no other cut is possible"
    assert rooms_program(height, width)._cache_size() == 1


def test_drawn_layouts_do_not_depend_on_the_batch():
    keys = jax.random.split(jax.random.key(3), 4)
    for draw in (lambda k: maze_program(13, 13)(k, 13, 9, .3), lambda k: rooms_program(13, 13)(k, 7, 9, 13)):
        together, alone = jax.jit(jax.vmap(draw))(keys), draw(keys[2])
        for a, b in zip(jax.tree.leaves(row(together, 2)), jax.tree.leaves(alone)):
            assert a.dtype == b.dtype and np.array_equal(a, b)


def test_all_spanning_trees_of_a_small_maze_occur():
    "A grid of three by three nodes has 192 spanning trees."
    mazes = jax.jit(jax.vmap(lambda k: random_maze(k, 7, 7).cells))(jax.random.split(jax.random.key(0), 6000))
    trees, counts = np.unique(np.asarray(mazes).reshape(6000, -1), axis=0, return_counts=True)
    assert len(trees) == 192 and counts.max() < 6000 / 40


def test_the_tree_is_that_of_scipy():
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import minimum_spanning_tree
    rng = np.random.default_rng(0)
    pairs = np.array([(i, j) for i in range(9) for j in range(i)], np.int32)
    tree = jax.jit(lambda bits, exists: spanning_tree(bits, pairs, exists, 9))
    for _ in range(30):
        bits, exists = rng.integers(1, 2**32, len(pairs), np.uint32), rng.random(len(pairs)) < .6
        exists |= (pairs[:, 0] == pairs[:, 1] + 1)   # a path, so that the graph is connected
        weights = ((bits & ~np.uint32(63)) | np.arange(len(pairs), dtype=np.uint32)).astype(float) + 1
        theirs = minimum_spanning_tree(coo_array((weights[exists], pairs[exists].T), (9, 9))).data
        assert set(weights[np.asarray(tree(bits, exists))]) == set(theirs)


# Tasks in them -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["Maze", "Rooms"])
def test_tasks_in_drawn_layouts(kind):
    "Objects complete and on floor, the agent too, another layout in every trial, also after an automatic reset; sizes as data."
    env, worlds = GymAutoResetWrapper(ENV), 200
    params = ENV.default_params(grid_type=kind, height=11, width=13, ruleset=TASK, max_steps=3)
    assert params.replace(max_steps=None).max_steps is None and ENV.default_params(grid_type=kind, height=11, width=13).max_steps == 3 * 11 * 13
    extents = jnp.asarray(np.random.default_rng(0).choice([5, 7, 9, 11], (worlds, 2)).astype(np.int32))
    params = params.replace(extent=extents)
    axes = jax.tree.map(lambda _: None, params).replace(extent=0)
    turn = lambda params, t: jax.vmap(env.step, (axes, 0, None))(params, t, 1)   # on the spot until time runs out

    @jax.jit
    def two_trials(params, keys):
        first = jax.vmap(env.reset, (axes, 0))(params, keys)
        second = jax.lax.fori_loop(0, 3, lambda _, t: turn(params, t), first)
        return first.state.replace(key=None), second.state.replace(key=None)

    seen = []
    for state in jax.tree.map(np.asarray, two_trials(params, jax.random.split(jax.random.key(0), worlds))):
        assert (state.step_num == 0).all()
        cells = state.cells
        for world, (rows, cols) in enumerate(extents.tolist()):
            one = cells[world]
            assert (one[rows:] == END_OF_MAP).all() and (one[:, cols:] == END_OF_MAP).all() and (one[:rows, [0, cols - 1]] == WALL).all()
            y, x = state.agent.position[world].tolist()
            assert one[y, x] == FLOOR
            assert label(one[:rows, :cols] != WALL)[1] == 1
        for thing in OBJECTS[[0, 1, 3]]:
            assert ((cells == int(pack_pairs(thing))).sum((1, 2)) == 1).all()
        walls = (cells == WALL) | (cells >> 4 == Tiles.DOOR_CLOSED)
        seen.append(walls)
    large = np.asarray(extents).min(1) >= 9
    assert (seen[0] != seen[1]).any((1, 2))[large].mean() > (.95 if kind == "Maze" else .7)


def test_layouts_are_drawn_on_many_devices():
    draw = jax.vmap(lambda key: (random_maze(key, 9, 9), random_rooms(key, 9, 9)))
    mesh, spec = Mesh(np.array(jax.devices()[:4]), ("worlds",)), PartitionSpec("worlds")
    keys = jax.random.split(jax.random.key(5), 8)
    many = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=spec, out_specs=spec))(keys)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(jax.jit(draw)(keys))):
        assert np.array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Maze", "Rooms", "data"])
def test_layouts_on_many_devices(kind):
    "Under shard_map every world goes as it goes in one batch, with resets on the way."
    env, keys = GymAutoResetWrapper(ENV), jax.random.split(jax.random.key(5), 8)
    plans = stack_layouts([layout("R4", 9, 9), layout("R1", 9, 9)] * 4)
    params = ENV.default_params(**(dict(layout=plans) if kind == "data" else dict(grid_type=kind, height=9, width=9)), ruleset=TASK, max_steps=2)
    actions = jax.random.randint(jax.random.key(6), (8, 5), 0, 6)

    def play(plan, key, actions):
        here = params.replace(layout=plan) if kind == "data" else params
        return jax.lax.scan(lambda t, a: (env.step(here, t, a), t.state.cells), env.reset(here, key), actions)[1]

    mesh, spec = Mesh(np.array(jax.devices()[:4]), ("worlds",)), PartitionSpec("worlds")
    batch, many = jax.jit(jax.vmap(play)), jax.jit(jax.shard_map(jax.vmap(play), mesh=mesh, in_specs=spec, out_specs=spec))
    assert np.array_equal(batch(plans, keys, actions), many(plans, keys, actions))


def test_doors_of_a_layout_as_data_reach_all_their_places():
    plan = pad_layout(layout("R4", 9, 9), 11, 11, doors=7, places=6)
    draw = jax.jit(jax.vmap(lambda key, plan: draw_doors(plan, jax.random.bits(key, (2, 7), jnp.uint32)), (0, None)))
    where, _ = draw(jax.random.split(jax.random.key(0), 600), plan)
    for door, places in enumerate(plan.doors[:4, :3]):
        found, counts = np.unique(np.asarray(where[:, door]), return_counts=True)
        assert found.tolist() == sorted(places.tolist()) and counts.min() > 130
    assert (where[:, 4:] == 121).all(), "doors that do not exist fall off the grid"


def test_the_edge_of_the_map_is_like_a_wall():
    "A floor without outer walls plays like a walled room: agent, pocket and cells are the same after many random steps."
    walled, n = layout("R1", 7, 7), 5
    bare = Layout(cells=np.full((n, n), FLOOR, np.uint8), free=np.arange(n * n, dtype=np.int32),
                  doors=np.zeros((0, 1), np.int32), num_free=np.int32(n * n), num_places=np.zeros(0, np.int32))
    keys, actions = jax.random.split(jax.random.key(0), 20), jax.random.randint(jax.random.key(1), (400,), 0, 6)

    def played(plan):
        params = ENV.default_params(layout=plan, ruleset=TASK, max_steps=1000)
        step = lambda timestep, action: (ENV.step(params, timestep, action),) * 2
        run = lambda key: jax.lax.scan(step, ENV.reset(params, key), actions)[1].state
        return jax.jit(jax.vmap(run))(keys)

    a, b = played(walled), played(bare)
    assert (a.cells[..., 1:-1, 1:-1] == b.cells).all() and (a.agent.pocket == b.agent.pocket).all()
    assert (a.agent.position - 1 == b.agent.position).all() and (a.agent.direction == b.agent.direction).all()
    assert (b.agent.position == 0).any() and (b.agent.position == n - 1).any()


# Errors --------------------------------------------------------------------------------------------------------------------------------

PLAN = layout("R4", 9, 9)
FITS = dict(height=9, width=9)
ERRORS = {
    "no Layout": (lambda: ENV.default_params(layout=np.zeros((9, 9))), "must be a Layout"),
    "other size": (lambda: ENV.default_params(layout=PLAN, height=13), "layout is 9x9, not 13x9"),
    "other size in make": (lambda: xland_minigrid.make("XLand-MiniGrid-R4-13x13", layout=PLAN), "layout is 9x9, not 13x13"),
    "replaced": (lambda: reset_with(layout("R1", 8, 9)), "use pad_layout"),
    "a batch without vmap": (lambda: reset_with(stack_layouts([PLAN, PLAN])), "batch of 2: use jax.vmap"),
    "dtype of cells": (lambda: reset_with(PLAN.replace(cells=PLAN.cells.astype(np.int32))), "wrong dtype"),
    "dtype of free": (lambda: reset_with(PLAN.replace(free=PLAN.free.astype(np.float32))), "wrong dtype"),
    "shape of doors": (lambda: reset_with(PLAN.replace(doors=PLAN.doors[0])), "arrays of shapes"),
    "shape of num_places": (lambda: reset_with(PLAN.replace(num_places=PLAN.num_places[:2])), "arrays of shapes"),
    "shape of num_free": (lambda: reset_with(PLAN.replace(num_free=np.array([64]))), "arrays of shapes"),
    "too many objects": (lambda: reset_with(pad_layout(layout("R1", 3, 3), 9, 9), ruleset=TASK), "do not fit on 1"),
    "nothing to stack": (lambda: stack_layouts([]), "nothing to stack"),
    "padding that cuts": (lambda: pad_layout(PLAN, 9, 8), "does not fit into 9x8"),
    "a drawn layout has no constants": (lambda: layout("Maze", 9, 9), "random_maze"),
    "even maze": (lambda: random_maze(jax.random.key(0), 9, 10), "odd sides"),
    "even maze environment": (lambda: ENV.default_params(grid_type="Maze", height=9, width=10), "Maze has no 9x10 grid"),
    "small rooms": (lambda: random_rooms(jax.random.key(0), 9, 7), "Rooms has no 9x7 grid"),
    "even rows": (lambda: random_maze(jax.random.key(0), 9, 9, rows=8), "rows is 8"),
    "too many columns": (lambda: random_rooms(jax.random.key(0), 9, 9, cols=11), "cols is 11"),
    "too many rooms": (lambda: random_rooms(jax.random.key(0), 9, 9, rooms=9, max_rooms=8), "rooms is 9"),
    "loops out of range": (lambda: random_maze(jax.random.key(0), 9, 9, loops=1.5), "loops is 1.5"),
    "extent of a fixed layout": (lambda: reset_with(None, extent=jnp.array([9, 9])), "extent is for Maze"),
    "extent of another shape": (lambda: reset_with(None, grid_type="Maze", extent=jnp.array([9])), "extent has shape"),
}


def reset_with(plan, jit=False, **changes):
    params = ENV.default_params(grid_type="R4", **FITS).replace(layout=plan, **changes)
    return (jax.jit(ENV.reset) if jit else ENV.reset)(params, jax.random.key(0))   # refused before anything is compiled


def test_wrong_input_is_refused_in_one_sentence():
    assert refusals(ERRORS, ValueError) == {}


def test_shapes_are_checked_under_jit_as_well():
    with pytest.raises(ValueError, match="use pad_layout"):
        reset_with(layout("R1", 8, 9), jit=True)


def test_a_traced_size_that_does_not_fit_is_rounded():
    "Under jit nothing can be refused: the size goes into the array and down to an odd number."
    for rows, cols, expected in [(8, 100, (7, 13)), (-5, 4, (3, 3)), (13, 12, (13, 11))]:
        check_laws(maze_program(13, 13)(jax.random.key(0), rows, cols, 0.), *expected)


def test_fields_of_layouts_and_parameters():
    "Optional data is None by default, so that the axes of `vmap` that users write for their rulesets stay as they are."
    params = ENV.default_params()
    assert params.layout is params.extent is None and len(jax.tree.leaves(params)) == len(jax.tree.leaves(params.ruleset))
    assert field_names(Layout) == ("cells", "free", "doors", "num_free", "num_places")
