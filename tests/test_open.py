"""Beyond the tables: registered rules and goals, composed goals, several products, lava.

The judges are plain Python: a dictionary of cells for the rules, a walk over the tree of a composed goal for the goals. Tasks within the tables must not
notice any of it.
"""
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xland_minigrid
from xland_minigrid.benchmarks import Benchmark, generate_benchmark, load_benchmark_from_path
from xland_minigrid.core import goals, rules
from xland_minigrid.core.actions import Actions, AgentState
from xland_minigrid.core.compose import BUILT_IN, AllOf, AnyOf, Composed, ExtendedTask, InOrder, Not, begin, compose, decompose, extend_task, pad_table, several
from xland_minigrid.core.goals import (
    AgentHoldGoal, AgentNearGoal, AgentNearUpGoal, AgentOnPositionGoal, AgentOnTileGoal, EmptyGoal, OneTileGoal, TileNearGoal, TileNearUpGoal,
    TileOnPositionGoal, TwoTileGoal, register_goal,
)
from xland_minigrid.core.walls import DIRECTIONS, room
from xland_minigrid.core.rules import (
    AgentHoldRule, AgentNearRule, BaseRule, OneTileRule, TileNearRule, TwoTileRule, beside_agent, beside_object, check_rule, compile_rules,
    in_pocket, on_cells, patch_offsets, register_rule,
)
from xland_minigrid.core.ruleset import RuleSet, empty_ruleset, make_ruleset, pad_ruleset, print_ruleset, stack_rulesets
from xland_minigrid.core.tiles import EMPTY, FLOOR, Colors, Tiles, pack_pairs, unpack
from xland_minigrid.envs.environment import EnvCarry, Environment, EnvParams, State, StepType
from xland_minigrid.envs.wrappers import GymAutoResetWrapper

from worlds import jit_for_long, refusals

pytestmark = pytest.mark.newest

T = lambda tile, color=Colors.RED: np.array((tile, color), np.uint8)
BALL, KEY, STAR, HEX, SQUARE = (T(t) for t in (Tiles.BALL, Tiles.KEY, Tiles.STAR, Tiles.HEX, Tiles.SQUARE))
TOGGLE, TURNS = (Actions.TOGGLE,), (Actions.TURN_CLOCKWISE, Actions.TURN_COUNTERCLOCKWISE)


@register_rule
class ToggleAhead(OneTileRule):
    when, looks = TOGGLE, on_cells("ahead")

@register_rule
class TurnBeside(OneTileRule):
    when, looks = TURNS, beside_agent("up", "left")

@register_rule
class ToggleWithTool(TwoTileRule):
    when, looks = (*TOGGLE, Actions.MOVE_FORWARD), on_cells("ahead", "right", "behind", "ahead ahead").while_carrying()

@register_rule
class SpendTool(TwoTileRule):
    when, looks = TOGGLE, beside_agent().while_carrying(used_up=True)

@register_rule
class TogglePair(TwoTileRule):
    when, looks = TOGGLE, beside_object("right", "up")

@register_rule
class WarmInHand(OneTileRule):
    when, looks = (Actions.MOVE_FORWARD,), in_pocket()

@register_goal
class Facing(OneTileGoal):
    when, looks = (*TURNS, Actions.MOVE_FORWARD), on_cells("ahead")

@register_goal
class ShowTool(TwoTileGoal):
    when, looks = TOGGLE, beside_agent().while_carrying()

class Unregistered(OneTileGoal):
    when, looks = TOGGLE, on_cells("ahead")

class ChildOfRegistered(ToggleAhead):
    looks = beside_agent()

MINE = (ToggleAhead, TurnBeside, ToggleWithTool, SpendTool, TogglePair, WarmInHand)


# Registered rules: against a dictionary ------------------------------------------------------------------------------------------------

def reference_rule(rule, more, cells, agent, action):
    "What a registered rule does, written as one would say it. `cells` is a dict of (row, column) to packed tile; returns cells and pocket."
    looks, cells, pocket = rule.looks, dict(cells), int(pack_pairs(np.asarray(agent.pocket)))
    if action not in rule.when:
        return cells, pocket
    code = lambda field: int(pack_pairs(np.asarray(getattr(rule, field))))
    two = hasattr(rule, "tile_b")
    a, b, product = code("tile_a" if two else "tile"), code("tile_b") if two else None, code("prod_tile")
    position, offsets = tuple(np.asarray(agent.position).tolist()), patch_offsets()[int(agent.direction)].tolist()
    at = lambda i: (position[0] + offsets[i][0], position[1] + offsets[i][1])
    step = lambda spot, d: (spot[0] + int(DIRECTIONS[d][0]), spot[1] + int(DIRECTIONS[d][1]))
    hits, gone, carried = set(), None, False
    if looks.tool == 0 or pocket == b:
        hits |= {step(position, d) for d in range(4) if looks.near >> d & 1 and cells.get(step(position, d)) == a}
        hits |= {at(i) for i in range(8) if looks.cells >> i & 1 and cells.get(at(i)) == a}
    ahead = at(1)
    for d in range(4):
        if looks.pair >> d & 1:
            if cells.get(ahead) == a and cells.get(step(ahead, d)) == b:
                hits.add(step(ahead, d)); gone = ahead
            if cells.get(ahead) == b and cells.get(step(ahead, (d + 2) % 4)) == a:
                hits.add(step(ahead, (d + 2) % 4)); gone = ahead
    if not (looks.near or looks.cells or looks.pair) and pocket == a:
        carried = True
    if not hits and not carried:
        return cells, pocket
    for spot in hits:
        cells[spot] = product
    if gone:
        cells[gone] = int(FLOOR)
    if carried:
        pocket = int(EMPTY) if product >> 4 == Tiles.FLOOR else product
    if looks.tool == 2:
        pocket = int(EMPTY)
    for extra in pack_pairs(np.asarray(more)).tolist():
        free = [at(i) for i in (1, 2, 3, 4) if cells.get(at(i)) == int(FLOOR)]
        if extra and free:
            cells[free[0]] = extra
    return cells, pocket


def test_registered_rules_do_what_they_declare():
    rng, n = np.random.default_rng(0), 1000
    things = np.array([BALL, KEY, STAR, unpack(FLOOR), unpack(FLOOR)])
    grids = np.broadcast_to(unpack(np.uint8(Tiles.WALL << 4 | Colors.GREY)), (n, 7, 7, 2)).copy()
    grids[:, 1:-1, 1:-1] = things[rng.integers(0, 5, (n, 5, 5))]
    agent = AgentState(rng.integers(1, 6, (n, 2)).astype(np.int32), rng.integers(0, 4, n).astype(np.int32),
                       np.array([BALL, KEY, unpack(EMPTY)])[rng.integers(0, 3, n)])
    kinds = rng.integers(0, len(MINE), n)
    actions = np.array([rng.choice(MINE[k].when) if rng.random() < 0.8 else rng.integers(-1, 7) for k in kinds])
    made, extras = [], np.zeros((n, 1, 2, 2), np.uint8)
    for i in range(n):
        tiles = things[rng.integers(0, 3, 2)].tolist() + [things[rng.integers(2, 4)].tolist()]
        two = issubclass(MINE[kinds[i]], TwoTileRule)
        made.append(MINE[kinds[i]](*map(np.uint8, tiles if two else tiles[1:])))
        extras[i, 0, : rng.integers(0, 3)] = HEX
    compiled = compile_rules(np.stack([np.asarray(r.encode())[None] for r in made]), extras, rules.rule_kinds.declared)
    after, agents = jax.jit(jax.vmap(check_rule))(compiled, grids, agent, actions)
    after, pockets, changed = pack_pairs(np.asarray(after)), pack_pairs(np.asarray(agents.pocket)), np.zeros(len(MINE), int)
    for i in range(n):
        one = jax.tree.map(lambda x: x[i], agent)
        cells = {spot: int(code) for spot, code in np.ndenumerate(pack_pairs(grids[i]))}
        expected, pocket = reference_rule(made[i], extras[i, 0], cells, one, actions[i])
        assert expected == {spot: int(code) for spot, code in np.ndenumerate(after[i])} and pocket == pockets[i], (made[i], actions[i], one)
        changed[kinds[i]] += expected != cells or pocket != pack_pairs(one.pocket)
    assert changed.min() >= 8, dict(zip([c.__name__ for c in MINE], changed))


def test_several_products_need_room():
    "They appear ahead, right, behind, left, in this order; what finds no floor is lost."
    rule = several(AgentHoldRule(BALL, STAR), HEX, KEY)
    compiled = compile_rules(rule.encode()[None], rule.more[None])
    agent = AgentState(jnp.array([2, 2]), jnp.int32(1), jnp.asarray(BALL))
    check = jax.jit(lambda grid: check_rule(compiled, grid, agent, Actions.PICK_UP))
    for walls, there in (((), {(2, 3): HEX, (3, 2): KEY}), (((2, 3), (3, 2), (2, 1)), {(1, 2): HEX}), (((2, 3), (3, 2), (2, 1), (1, 2)), {})):
        grid = np.asarray(room(5, 5)).copy()
        for spot in walls:
            grid[spot] = SQUARE
        after, then = jax.tree.map(np.asarray, check(grid))
        assert then.pocket.tolist() == STAR.tolist()
        changed = {tuple(s): after[tuple(s)].tolist() for s in np.argwhere((after != grid).any(-1)).tolist()}
        assert changed == {spot: tile.tolist() for spot, tile in there.items()}


# A small world for goals -----------------------------------------------------------------------------------------------------------------

class Crowd(Environment):
    "A room full of balls, keys and stars, for any task."
    def default_params(self, **kwargs):
        return EnvParams(height=7, width=7, view_size=5, max_steps=1000).replace(**kwargs)

    def _generate_problem(self, params, key):
        a, b, c = jax.random.split(key, 3)
        inner = jax.random.choice(a, jnp.array([unpack(FLOOR)] * 4 + [BALL, KEY, STAR], jnp.uint8), (5, 5))
        inner = inner.at[2, 2].set(jnp.asarray(unpack(FLOOR)))
        return State(key=b, step_num=jnp.int32(0), grid=room(7, 7).at[1:-1, 1:-1].set(inner),
                     agent=AgentState(position=jnp.array([3, 3], jnp.int32), direction=jax.random.randint(c, (), 0, 4)),
                     goal_encoding=jnp.zeros(5, jnp.uint8), rules=jnp.zeros((1, 2), jnp.uint32), carry=EnvCarry())


WORLDS, WIDTH = 200, 16                      # of every batch, so that all tests about goals share two programs


@lru_cache
def crowd():
    """Compiled `start(table, key, cells=None, direction=None)` and `step(timestep, action)` of `WORLDS` worlds.

    A table of one goal serves all worlds; `cells` and `direction`, where given, too.
    """
    env = Crowd()
    params = env.default_params()
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))

    @jax.jit
    def begun(timestep, table):
        extended = jax.vmap(lambda t, c: begin(ExtendedTask(rules=None, goals=t), c))(table, timestep.state.cells)
        return timestep.replace(state=timestep.state.replace(extended=extended))

    resets = jax.jit(lambda key: jax.vmap(env.reset, (None, 0))(params, jax.random.split(key, WORLDS)))

    def start(table, key, cells=None, direction=None):
        timestep = resets(key)
        state, every = timestep.state, lambda x, like: jnp.asarray(np.broadcast_to(x, like.shape).astype(like.dtype))
        if cells is not None:
            state = state.replace(cells=every(cells, state.cells))
        if direction is not None:
            state = state.replace(agent=state.agent.replace(direction=every(direction, state.agent.direction)))
        return begun(timestep.replace(state=state), every(table, np.zeros((WORLDS, WIDTH, 4), np.uint32)))

    return start, lambda timestep, action: step(params, timestep, every_action(action))


def every_action(action):
    return jnp.asarray(np.broadcast_to(action, WORLDS).astype(np.int32))


def condition(goal, grid, agent) -> bool:
    "Whether a leaf holds now, from the declaration of its goal, on an unpacked NumPy grid."
    looks, same = goal.looks, lambda spot, tile: 0 <= spot[0] < 7 and 0 <= spot[1] < 7 and tuple(grid[tuple(spot)]) == tuple(tile)
    position, pocket = np.asarray(agent.position), tuple(np.asarray(agent.pocket))
    if looks is None:
        return False
    if looks.at == 1:
        return tuple(position) == tuple(goal.position)
    if looks.at == 2:
        return same(np.asarray(goal.position, int), goal.tile)
    a = goal.tile_a if hasattr(goal, "tile_a") else goal.tile
    if looks.pair:
        return any(same((r, c), a) and same((r + DIRECTIONS[d][0], c + DIRECTIONS[d][1]), goal.tile_b)
                   for r in range(7) for c in range(7) for d in range(4) if looks.pair >> d & 1)
    if looks.tool and pocket != tuple(goal.tile_b):
        return False
    offsets = patch_offsets()[int(agent.direction)]
    if looks.near:
        return any(same(position + DIRECTIONS[d], a) for d in range(4) if looks.near >> d & 1)
    if looks.cells:
        return any(same(position + offsets[i], a) for i in range(8) if looks.cells >> i & 1)
    return pocket == tuple(a)


def holds(goal, grid, agent, done: dict) -> bool:
    "Whether a composed goal holds; `done` remembers how far each order has come."
    if not isinstance(goal, Composed):
        return condition(goal, grid, agent)
    values = [holds(p, grid, agent, done.setdefault(i, {})) for i, p in enumerate(goal.parts)]
    if isinstance(goal, InOrder):
        turn = done.get("turn", 0)
        if turn < len(values) and values[turn]:
            done["turn"] = turn + 1
        return done.get("turn", 0) == len(values)
    return {AllOf: all(values), AnyOf: any(values), Not: not values[0]}[type(goal)]


def random_goal(rng, depth=2, order_ok=True):
    tile, pos = lambda: (BALL, KEY, STAR)[rng.integers(3)], lambda: rng.integers(2, 5, 2).astype(np.uint8)
    leaves = [lambda: AgentHoldGoal(tile()), lambda: AgentNearGoal(tile()), lambda: TileNearGoal(tile(), tile()), lambda: TileNearUpGoal(tile(), tile()),
              lambda: AgentOnPositionGoal(pos()), lambda: TileOnPositionGoal(tile(), pos()), lambda: AgentNearUpGoal(tile()), lambda: Facing(tile()),
              lambda: ShowTool(tile(), tile()), EmptyGoal]
    if depth == 0:
        return leaves[rng.integers(len(leaves))]()
    kind = [AllOf, AnyOf, Not, InOrder][rng.integers(4 if order_ok else 3)]
    parts = [random_goal(rng, rng.integers(0, depth), order_ok and kind is not InOrder) for _ in range(1 if kind is Not else rng.integers(2, 4))]
    return kind(*parts)


def test_composed_goals_mean_what_they_say():
    "200 random goals of up to three levels over 30 steps, against a walk over the tree on the grid after each step."
    rng, n = np.random.default_rng(1), WORLDS
    made = [random_goal(rng, 2) for _ in range(n)]
    for goal in made:
        assert decompose(goal.table()) == goal
    start, step = crowd()
    timestep = start(np.stack([pad_table(g.table(), WIDTH) for g in made]), jax.random.key(0))
    memory, reached, over = [{} for _ in made], np.zeros(n, int), np.zeros(n, bool)
    for t in range(30):
        carries = np.asarray(timestep.state.agent.pocket)[:, 0] != Tiles.EMPTY
        action = np.where(rng.random(n) < 0.4, np.where(carries, 4, 3), rng.integers(0, 6, n))
        timestep = step(timestep, action)
        grids, agents, discount = unpack(np.asarray(timestep.state.cells)), jax.tree.map(np.asarray, timestep.state.agent), np.asarray(timestep.discount)
        for i in np.flatnonzero(~over):
            expected = holds(made[i], grids[i], jax.tree.map(lambda x: x[i], agents), memory[i])
            assert expected == (discount[i] == 0), (t, made[i])
            reached[i] += expected
            over[i] = expected
    assert 60 < reached.sum() < 180, "goals that are sometimes reached and sometimes not"


def test_orders_count_one_part_a_step_and_keep_it():
    goal = InOrder(AgentHoldGoal(BALL), AnyOf(AgentHoldGoal(KEY), AgentHoldGoal(BALL)))
    start, step = crowd()
    world = pack_pairs(np.asarray(room(7, 7))).copy()
    world[3, 4] = pack_pairs(BALL)
    timestep, seen = start(pad_table(goal.table(), WIDTH), jax.random.key(0), world, 1), []
    for action in (3, 1):   # picks the ball up: first part; turns, still carrying: second part
        timestep = step(timestep, action)
        seen.append(bool(timestep.last()[0]))
    assert seen == [False, True]


def test_a_plain_goal_is_asked_as_always_and_a_part_after_every_step():
    "Two stars beside each other from the start: the plain goal waits for something to be put down, the composed one does not."
    start, step = crowd()
    world = pack_pairs(np.asarray(room(7, 7))).copy()
    world[1, 1:3] = pack_pairs(STAR)
    for goal, reached in ((TileNearGoal(STAR, STAR), False), (AllOf(TileNearGoal(STAR, STAR)), True)):
        timestep = start(pad_table(compose(goal), WIDTH), jax.random.key(0), world)
        assert bool(step(timestep, 1).last()[0]) == reached


# Tasks of the tables in the general form ------------------------------------------------------------------------------------------------

def test_the_twelve_and_fifteen_are_the_same_in_both_forms():
    "Every rule and goal of the tables, in crowded worlds: a task in the general form does what the plain one does, in the same batch as open ones."
    parity = pytest.importorskip("test_parity", reason="the tasks of the parity tests")
    n = 600
    state, _ = parity.hard_starts("XLand-MiniGrid-R4-9x9", parity.random_tasks(np.random.default_rng(7), parity.NUM_TASKS), n, seed=7)
    start, (env, params) = parity.first_of(state, 5), xland_minigrid.make("XLand-MiniGrid-R4-9x9")

    @jit_for_long
    def run(ours, uniforms):
        s = ours.state
        task = extend_task(s.goal_encoding, s.rule_encoding, declared=BUILT_IN)
        task = task.replace(goals=jax.vmap(lambda t: pad_table(t, 4))(task.goals))
        general = ours.replace(state=s.replace(rules=task.rules, extended=jax.vmap(begin)(task, s.cells)))
        begun = ours, general

        def body(carry, u):
            ours, general = carry
            action = jax.vmap(parity.choose)(ours.state, u)
            ours, general = (jax.vmap(env.step, (None, 0, 0))(params, t, action) for t in (ours, general))
            plain = general.replace(state=general.state.replace(rules=general.state.rules[..., :1], extended=None))
            differ = jax.tree.map(lambda a, b: (a != b).reshape(len(a), -1).any(1), *(t.replace(state=t.state.replace(key=None)) for t in (ours, plain)))
            won, back = ours.discount == 0, ours.last()
            return tuple(parity.where_rows(back, first, now) for first, now in zip(begun, (ours, general))), (jnp.stack(jax.tree.leaves(differ)).any(0), won)
        return jax.lax.scan(body, begun, uniforms)[1]

    differ, reached = map(np.asarray, run(start, np.random.default_rng(0).random((80, n, 3), np.float32)))
    assert not differ.any() and reached.sum() > 200


def test_identifiers_never_move():
    assert [r.ID for r in rules.RULES] == list(range(12)) and [g.ID for g in goals.GOALS] == list(range(15))
    assert min(c.ID for c in MINE) >= 12 and min(Facing.ID, ShowTool.ID) >= 15
    for i, cls in enumerate(rules.RULES):
        assert rules.rule_kinds[i] is cls


# Registering -------------------------------------------------------------------------------------------------------------------------------

def test_running_a_cell_again_replaces_the_class():
    def cell(action):
        @register_rule
        class Again(OneTileRule):
            when, looks = (action,), on_cells("ahead")
        return Again
    first, second = cell(Actions.TOGGLE), cell(Actions.PICK_UP)
    assert first.ID == second.ID and rules.rule_kinds[second.ID] is second
    assert int(compile_rules(second(BALL, STAR).encode(), declared=rules.rule_kinds.declared)[1] & 63) == 1 << Actions.PICK_UP


def test_a_class_that_is_registered_again_reaches_programs_that_were_compiled_before():
    "What a class declares is data: one program, two declarations. Under jit nothing reads the registry."
    def cell(action):
        @register_rule
        class Anew(OneTileRule):
            when, looks = (action,), on_cells("ahead")
        return Anew
    count, agent, grid = [], AgentState(jnp.array([2, 2]), jnp.int32(0)), room(5, 5).at[1, 2].set(jnp.asarray(BALL))

    @jax.jit
    def changes(rows, declared):
        count.append(1)
        return (check_rule(compile_rules(rows, declared=declared), grid, agent, Actions.TOGGLE)[0] != grid).any()

    for action in (Actions.TOGGLE, Actions.PICK_UP):
        rows = cell(action)(BALL, STAR).encode()[None]
        assert bool(changes(rows, rules.rule_kinds.declared)) == (action == Actions.TOGGLE) and len(count) == 1
    bare = jax.tree.map(jnp.asarray, RuleSet(goal=np.zeros(5, np.uint8), rules=rows, init_tiles=BALL[None]))
    with pytest.raises(TypeError, match="pass declarations as an argument"):
        jax.jit(lambda task: task.extend())(bare)


def test_an_identifier_can_be_asked_for():
    @register_goal(id=199)
    class Asked(OneTileGoal):
        when, looks = TOGGLE, on_cells("ahead")
    assert Asked.ID == 199
    with pytest.raises(ValueError, match="199 is taken or out of range"):
        register_goal(type("Other", (OneTileGoal,), {"__module__": __name__, "when": TOGGLE, "looks": on_cells("ahead")}), id=199)
    with pytest.raises(ValueError, match="from 12 to 253"):
        register_rule(type("Low", (OneTileRule,), {"__module__": __name__, "when": TOGGLE, "looks": on_cells("ahead")}), id=3)


def declared(base=OneTileRule, **parts):
    return type("Wrong", (base,), {"__module__": __name__, **parts})


WRONG = [
    (lambda: register_rule(declared(looks=in_pocket())), "when is"),
    (lambda: register_rule(declared(when=(9,), looks=in_pocket())), "when is"),
    (lambda: register_rule(declared(when=TOGGLE)), "looks is None"),
    (lambda: register_rule(declared(when=TOGGLE, looks="ahead")), "looks is 'ahead'"),
    (lambda: register_rule(declared(TwoTileRule, when=TOGGLE, looks=on_cells("ahead"))), "2 inputs, but its `looks` needs 1"),
    (lambda: register_rule(declared(OneTileRule, when=TOGGLE, looks=beside_object())), "1 input, but its `looks` needs 2"),
    (lambda: register_rule(declared(TwoTileRule, when=TOGGLE, looks=in_pocket().while_carrying())), "pocket holds one thing"),
    (lambda: register_rule(declared(TwoTileRule, when=TOGGLE, looks=beside_object().while_carrying())), "uses? both inputs"),
    (lambda: register_rule(declared(OneTileRule, when=TOGGLE, looks=goals.agent_at())), "only goals can"),
    (lambda: register_rule(declared(OneTileRule, when=TOGGLE, looks=on_cells("ahead"), __call__=lambda self: None)), "defines __call__"),
    (lambda: register_rule(declared(BaseRule, when=TOGGLE, looks=on_cells("ahead"))), "has the fields none"),
    (lambda: register_rule(Facing), "derived from BaseRule"),
    (lambda: register_rule(AgentHoldRule), "built in"),
    (lambda: register_goal(declared(OneTileRule, when=TOGGLE, looks=on_cells("ahead"))), "derived from BaseGoal"),
    (lambda: register_goal(declared(TwoTileGoal, when=TOGGLE, looks=on_cells("ahead").while_carrying(used_up=True))), "changes nothing"),
    (lambda: on_cells("above"), "Unknown cell 'above'"), (lambda: on_cells(), "needs one or more"), (lambda: beside_agent("north"), "Unknown direction 'north'"),
    (lambda: make_ruleset(goal="hold"), "is not a goal"), (lambda: make_ruleset(rules=[3]), "is not a rule"), (lambda: AllOf(), "at least one part"),
    (lambda: Not(EmptyGoal(), EmptyGoal()), "exactly one"), (lambda: AllOf(3), "is not a goal"), (lambda: several(AgentHoldRule(BALL, STAR)), "0 further"),
    (lambda: AllOf(*[AgentHoldGoal(BALL)] * 40), "at most 32"), (lambda: InOrder(AnyOf(InOrder(AgentHoldGoal(BALL)))), "before its turn"),
    (lambda: stack_rulesets([]), "nothing to stack"), (lambda: goals.decode_goal(np.full(5, 250)), "250 is not a goal"),
    (lambda: several(AgentHoldRule(BALL, STAR), HEX, HEX, HEX), "3 further"), (lambda: several(AgentHoldRule(BALL, STAR), [HEX, HEX]), "is not a product"),
    (lambda: make_ruleset(Unregistered(BALL)), "@register_goal above the class"), (lambda: AllOf(Unregistered(BALL)), "@register_goal above the class"),
    (lambda: make_ruleset(rules=[ChildOfRegistered(BALL, STAR)]), "@register_rule above the class"),
    (lambda: make_ruleset(rules=AgentHoldRule(BALL, STAR)), "put it in a list"), (lambda: make_ruleset(init_tiles=BALL), "list the objects"), (lambda: make_ruleset(init_tiles=[3]), "list the objects"),
    (lambda: make_ruleset(AgentHoldGoal(Tiles.BALL)), "a tile is a pair"), (lambda: make_ruleset(AgentHoldGoal((Colors.RED, Tiles.BALL))), "never lies on a grid"),
    (lambda: make_ruleset(AgentHoldGoal(T(Tiles.WALL))), "cannot be carried"), (lambda: AllOf(Facing("red ball")), "a tile is a pair"),
    (lambda: stack_rulesets([Facing(BALL)]), "is not a ruleset"), (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9", ruleset="trivial"), "give a RuleSet"),
    (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9", colour=3), "its parameters are height"),
    (lambda: xland_minigrid.make("XLand-MiniGrid-R1-9x9")[0].reset(xland_minigrid.make("XLand-MiniGrid-R1-9x9")[1], 0), "int is not a random key"),
    (lambda: generate_benchmark("small", n=10, rule_kinds=("Forge",)), "identifiers or classes"), (lambda: pad_table(compose(EmptyGoal()), 33), "does not fit"),
]


def test_wrong_declarations_and_goals_are_refused():
    assert refusals({(n, words): (call, words) for n, (call, words) in enumerate(WRONG)}, one_line=False) == {}


# In the real environment -------------------------------------------------------------------------------------------------------------------

TASKS = (
    make_ruleset(AgentNearGoal(STAR), [AgentNearRule(BALL, STAR)], [BALL, KEY]),
    make_ruleset(Facing(BALL), [], [BALL]),
    make_ruleset(InOrder(AgentHoldGoal(KEY), AllOf(AgentHoldGoal(KEY), AgentNearGoal(BALL))), [several(TileNearRule(KEY, BALL, STAR), HEX)], [KEY, BALL]),
    make_ruleset(AgentHoldGoal(STAR), [ToggleAhead(BALL, STAR), SpendTool(HEX, KEY, STAR)], [KEY, BALL, HEX]),
)


@lru_cache
def xland():
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    env = GymAutoResetWrapper(env)
    return params, jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))


def play(tasks, n=16, steps=150, seed=0):
    "Rewards and grids of `n` worlds a task under fixed random actions."
    params, reset, step = xland()
    batch = jax.tree.map(lambda x: jnp.repeat(x, n, 0), stack_rulesets(tasks))
    params = jax.tree.map(lambda x: x, params.replace(ruleset=batch))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.tile(jnp.arange(n), len(tasks)))
    timestep, out = reset(params, keys), []
    rng = np.random.default_rng(seed)
    for action in rng.choice([0, 0, 0, 1, 2, 3, 4, 5], (steps, n)):
        timestep = step(params, timestep, jnp.asarray(np.tile(action, len(tasks))))
        out.append((np.asarray(timestep.reward), np.asarray(timestep.state.cells)))
    rewards, cells = map(np.stack, zip(*out))
    return rewards.reshape(steps, len(tasks), n), cells.reshape(steps, len(tasks), n, 9, 9)


def test_open_and_plain_tasks_share_a_batch():
    "Each task does in a mixed batch what it does among its like, and every one is sometimes solved."
    room = lambda task: pad_ruleset(task, 2, 3, 5 if task.extended is not None else None)  # the number of objects decides the draws
    rewards, cells = play([room(t) for t in TASKS])
    assert ((rewards > 0).sum((0, 2)) > 0).all()
    for i, task in enumerate(TASKS):
        alone, grids = play([room(task)] * len(TASKS))   # as many of them, so that the program is the same
        assert (alone[:, 0] == rewards[:, i]).all() and (grids[:, 0] == cells[:, i]).all(), i


def test_one_more_program_for_everything_beyond_the_tables():
    "The plain program, one for open tasks, and no other when further kinds are registered."
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    step, reset, count = jax.jit(lambda p, t, a: (count.append(1), env.step(p, t, a))[1]), jax.jit(env.reset), []

    def use(task):
        p = params.replace(ruleset=pad_ruleset(task, 2, 3, 8 if task.extended is not None else None))
        jax.eval_shape(step, p, jax.eval_shape(reset, p, jax.random.key(0)), 0)   # traced only where no program fits
        return len(count)

    assert use(TASKS[0]) == 1 and [use(t) for t in TASKS[1:]] == [2, 2, 2]

    @register_rule
    class Newcomer(OneTileRule):
        when, looks = (Actions.PUT_DOWN,), on_cells("behind")
    assert use(make_ruleset(AgentHoldGoal(STAR), [Newcomer(BALL, STAR)], [BALL])) == 2


def test_what_is_not_built_in_must_be_declared_in_the_ruleset():
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    bare = RuleSet(goal=Facing(BALL).encode(), rules=np.asarray(ToggleAhead(BALL, STAR).encode())[None], init_tiles=BALL[None])
    with pytest.raises(ValueError, match="extend"):
        env.reset(params.replace(ruleset=bare), jax.random.key(0))
    with pytest.raises(ValueError, match="extend"):
        bare.validate()
    assert bare.extend().validate().describe() == make_ruleset(Facing(BALL), [ToggleAhead(BALL, STAR)], [BALL]).describe()
    wrong = bare.extend()
    with pytest.raises(ValueError, match="extended holds"):
        wrong.replace(extended=wrong.extended.replace(rules=wrong.extended.rules[:, :1])).validate()


def test_words(capsys):
    text = TASKS[2].describe()
    assert "first hold a red key, then (hold a red key and at the same time stand next to a red ball)" in text and "a red hex appears beside you" in text
    print_ruleset(TASKS[3])
    assert "SpendTool(red hex, red key) -> red star" in capsys.readouterr().out
    assert "while you carry a red key (which is used up)" in TASKS[3].describe()
    for task in TASKS:
        assert repr(task).startswith("RuleSet(") and "0x" not in repr(task)


# Generated -----------------------------------------------------------------------------------------------------------------------------------

def test_the_generator_draws_registered_kinds(tmp_path):
    made = generate_benchmark("medium", n=300, goal_kinds=(1, 4, Facing, ShowTool), rule_kinds=(3, 8, ToggleAhead, SpendTool), solvable=False)
    for kinds, own in ((np.asarray(made.goals)[:, 0], (Facing.ID, ShowTool.ID)), (np.asarray(made.rules)[..., 0].ravel(), (ToggleAhead.ID, SpendTool.ID))):
        assert all((kinds == i).sum() > 20 for i in own)
    rows = np.asarray(made.rules).reshape(-1, 7)
    tools = rows[rows[:, 0] == SpendTool.ID][:, 3]
    assert set(tools.tolist()) <= set(xland_minigrid.core.tiles.PICKABLE), "a tool is something that can be carried"
    ruleset = jax.jit(lambda b, k: b.sample_ruleset(k))(made, jax.random.key(1))
    assert ruleset.extended is not None and ruleset.extended.rules.shape == (ruleset.rules.shape[0], 2)
    assert made.get_ruleset(3).describe().startswith("Your goal")
    again = load_benchmark_from_path(made.save(tmp_path / "mine.safetensors"))
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(made.get_ruleset(7)), jax.tree.leaves(again.get_ruleset(7)), strict=True))
    assert len(np.unique(made.ruleset_ids())) == 300
    first, rest = made.split(0.5)
    assert first.sets is not None and len(first) + len(rest) == 300 and rest.get_ruleset(0).extended is not None


def test_a_file_says_which_kinds_it_uses(tmp_path):
    "The same identifier, declared otherwise or named otherwise, is not taken for the kind in the file."
    def cell(name, action):
        return register_rule(type(name, (OneTileRule,), {"__module__": __name__, "__qualname__": name, "when": (action,), "looks": on_cells("ahead")}))
    mine = cell("Filed", Actions.TOGGLE)
    path = generate_benchmark("small", n=20, rule_kinds=(mine,), solvable=False).save(tmp_path / "mine.safetensors")
    task = load_benchmark_from_path(path).get_ruleset(0)
    cell("Filed", Actions.PICK_UP)
    assert "registered again" in load_and_describe(task)
    with pytest.raises(ValueError, match=f"rule Filed under the identifier {mine.ID}, which is Filed as declared here"):
        load_benchmark_from_path(path)
    cell("Filed", Actions.TOGGLE)
    assert "registered again" not in load_and_describe(load_benchmark_from_path(path).get_ruleset(0))


def load_and_describe(task):
    return jax.tree.map(np.asarray, task).describe()


def test_what_is_hidden_can_be_observed():
    "Composed goals and further products show in the observation, with the shapes that the wrapper announces."
    from xland_minigrid.envs.wrappers import RulesAndGoalsObservationWrapper
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", ruleset=TASKS[2])
    env = RulesAndGoalsObservationWrapper(env)
    seen = jax.eval_shape(lambda k: env.reset(params, k).observation, jax.random.key(0))
    assert {k: v.shape for k, v in seen.items()} == env.observation_shape(params)
    assert seen["goal_table"].shape == (5, 4) and seen["compiled_rules"].shape == (1, 2)


def test_a_file_with_kinds_that_are_not_registered_is_refused():
    goals_, rules_ = np.zeros((1, 5), np.uint8), np.full((1, 1, 7), 3, np.uint8)
    rules_[..., 0] = 203
    with pytest.raises(ValueError, match="203 is not a rule.*run the cell that registers it"):
        Benchmark.from_arrays(goals_, rules_, np.zeros((1, 1, 2), np.uint8))
    with pytest.raises(ValueError, match="rule_kinds"):
        generate_benchmark("small", n=10, rule_kinds=(203,), solvable=False)


def test_plain_tasks_carry_nothing_of_it():
    bench = generate_benchmark("small", n=20)
    assert bench.sets is None and bench.get_ruleset(0).extended is None and empty_ruleset().extended is None
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", ruleset=bench.get_ruleset(0))
    state = jax.eval_shape(lambda k: env.reset(params, k).state, jax.random.key(0))
    assert state.extended is None and len(jax.tree.leaves(state)) == 8


# Lava ----------------------------------------------------------------------------------------------------------------------------------------

def test_lava_ends_the_trial_without_reward():
    "Also when standing on it is the goal."
    env = Crowd()
    params, step = env.default_params(), jax.jit(env.step)
    start = jax.jit(env.reset)(params, jax.random.key(0))
    world = pack_pairs(np.asarray(room(7, 7))).copy()
    world[3, 4] = pack_pairs(T(Tiles.LAVA, Colors.ORANGE))
    for goal in (AgentOnTileGoal(T(Tiles.LAVA)), EmptyGoal()):
        state = start.state.replace(cells=jnp.asarray(world), agent=AgentState(jnp.array([3, 3]), jnp.int32(1)), goal_encoding=jnp.asarray(goal.encode()))
        burnt, safe, *same = (step(params, start.replace(state=state), action) for action in (0, 1, 3, 4, 5))
        assert burnt.step_type == StepType.LAST and burnt.discount == 0 and burnt.reward == 0 and burnt.state.agent.position.tolist() == [3, 4]
        assert safe.step_type == StepType.MID and safe.discount == 1
        assert all((np.asarray(t.state.cells) == world).all() for t in same), "lava cannot be picked up, covered or toggled"
