"""The exact search: lengths worked out by hand, every action sequence tried, spaces counted, and the planner and prover before it."""
import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid import make
from xland_minigrid.benchmarks import exact
from xland_minigrid.benchmarks.exact import NO_ACTION, Shortest, shortest
from xland_minigrid.benchmarks.planner import Failure
from xland_minigrid.benchmarks.solve import Reason
from xland_minigrid.core.actions import AgentState
from xland_minigrid.core.compose import AllOf, Composed, InOrder
from xland_minigrid.core.goals import (
    AgentHoldGoal, AgentNearGoal, AgentNearUpGoal, AgentOnPositionGoal, AgentOnTileGoal, EmptyGoal, TileNearGoal, TileNearRightGoal, TileOnPositionGoal,
)
from xland_minigrid.core.rules import (
    AgentHoldRule, AgentNearRightRule, AgentNearRule, OneTileRule, TileNearRule, on_cells, register_rule, rule_kinds,
)
from xland_minigrid.core.ruleset import RuleSet, empty_ruleset, make_ruleset, stack_rulesets
from xland_minigrid.core.tiles import EMPTY, FLOOR, WALL, Colors, Tiles, pack, unpack
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.measure.tables.exact import SMALL, Cases, Compared, compare, judge_prover, small_cases
from worlds import compiled, refusals

pytestmark = pytest.mark.newest

BALL, STAR, KEY, HEX, GOAL = ((t, Colors.RED) for t in (Tiles.BALL, Tiles.STAR, Tiles.KEY, Tiles.HEX, Tiles.GOAL))
GREY_WALL, NOTHING = (Tiles.WALL, Colors.GREY), (Tiles.FLOOR, Colors.BLACK)
SYMBOLS = {"#": WALL, ".": FLOOR, "b": pack(*BALL), "s": pack(*STAR), "k": pack(*KEY), "h": pack(*HEX), "G": pack(*GOAL), "~": pack(Tiles.LAVA, Colors.ORANGE),
           "D": pack(Tiles.DOOR_CLOSED, Colors.RED), "L": pack(Tiles.DOOR_LOCKED, Colors.RED)}


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    "The searches here have a few states at a time; a batch is always filled up."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_BATCH", 128)
        yield


@lru_cache(maxsize=None)
def room(height, width):
    env, params = make("XLand-MiniGrid-R1-9x9", height=height, width=width)
    return env, params, jax.jit(env.reset)(params, jax.random.key(0))


def drawn(text):
    "A world of up to 2 x 5 cells with walls all around: `(env, params, start)`."
    rows = text.split()
    env, params, start = room(4, 7)
    cells = np.full((4, 7), WALL, np.uint8)
    cells[1:1 + len(rows), 1:1 + len(rows[0])] = [[SYMBOLS.get(x, FLOOR) for x in row] for row in rows]
    (r, c, d), = ((r, c, "^>v<".index(x)) for r, row in enumerate(rows) for c, x in enumerate(row) if x in "^>v<")
    agent = AgentState(position=np.array([r + 1, c + 1], np.int32), direction=np.int32(d), pocket=np.asarray(unpack(EMPTY)))
    return env, params, start.replace(state=start.state.replace(cells=cells, agent=agent))


def search(text, goal, rules=(), **options):
    env, params, start = drawn(text)
    return shortest(make_ruleset(goal, rules), start, env, params, **options)


@lru_cache(maxsize=None)
def stepper(env):
    return jax.jit(env.step)


def reaches(ruleset, start, env, params, actions):
    "Whether the actions reach the goal with the last one and not before."
    state = exact._with_task(exact._plain_state(start), ruleset) if ruleset is not None else start.state
    now = start.replace(state=state.replace(key=start.state.key, step_num=np.int32(0)))
    for i, action in enumerate(actions):
        assert not now.last()
        now = stepper(env)(params, now, int(action))
    return bool((now.reward > 0) & (now.discount == 0))


# ---------------------------------------------------------------- by hand

BY_HAND = [
    ("near", ">..b", AgentNearGoal(BALL), [], 2),                             # two steps forward
    ("near, at once", "<b", AgentNearGoal(BALL), [], 1),                      # walking into the wall counts as moving
    ("hold", ">..b", AgentHoldGoal(BALL), [], 3),
    ("hold, behind", "b..>", AgentHoldGoal(BALL), [], 5),                     # turn, turn, forward, forward, pick up
    ("two tiles", ">b.s", TileNearGoal(BALL, STAR), [], 3),                   # pick up, forward, put down
    ("two tiles, a trick", "G.^ b..", TileNearGoal(GOAL, BALL), [], 3),       # they lie side by side: turn, go, and put down nothing, facing one of them
    ("a side", ">b.s", TileNearRightGoal(BALL, STAR), [], 3),
    ("the other side is no way", ">b.s", TileNearRightGoal(STAR, BALL), [], -1),
    ("stand on", ">.G", AgentOnTileGoal(GOAL), [], 2),
    ("a place", ">..", AgentOnPositionGoal(np.array([1, 1], np.uint8)), [], 1),  # any action will do
    ("a tile at a place", ">b.", TileOnPositionGoal(BALL, np.array([1, 3], np.uint8)), [], 3),
    ("above", "..b .^.", AgentNearUpGoal(BALL), [], 2),                       # turn clockwise, forward
    ("held becomes", ">b", AgentHoldGoal(STAR), [AgentHoldRule(BALL, STAR)], 1),
    ("near becomes", ">.b", AgentHoldGoal(STAR), [AgentNearRule(BALL, STAR)], 2),
    ("two become one", ">b.s", AgentHoldGoal(HEX), [TileNearRule(BALL, STAR, HEX)], 5),  # pick up, go, put down; the hex is where the star was: go, pick up
    ("a shy ball", ">.b", AgentHoldGoal(BALL), [AgentNearRule(BALL, KEY)], -1),
    ("a shy ball, by luck", ">b", AgentHoldGoal(BALL), [AgentNearRule(BALL, KEY)], 1),
    ("it disappears", ">.b", AgentHoldGoal(BALL), [AgentNearRule(BALL, NOTHING)], -1),
    ("a door", ">D.G", AgentOnTileGoal(GOAL), [], 4),                         # toggle, three steps
    ("a locked door and its key", ">kLG", AgentOnTileGoal(GOAL), [], 5),      # pick up, forward, toggle, forward, forward
    ("a locked door", ">bLG", AgentOnTileGoal(GOAL), [], -1),
    ("a door that a rule makes", ">.kG", AgentOnTileGoal(GOAL), [AgentNearRule(KEY, (Tiles.DOOR_CLOSED, Colors.RED))], 4),  # forward, toggle, forward, forward
    ("lava", ">~G ...", AgentOnTileGoal(GOAL), [], 7),                        # down, along, up
    ("lava all around", ">~G", AgentOnTileGoal(GOAL), [], -1),
    ("a wall that goes away", ">#G", AgentOnTileGoal(GOAL), [AgentNearRightRule(GREY_WALL, NOTHING)], 3),
    ("a wall that is one", ">#G", AgentOnTileGoal(GOAL), [], -1),
    ("no goal", ">b.", EmptyGoal(), [], -1),
    ("in order", ">b.s", InOrder(AgentNearGoal(STAR), AgentHoldGoal(BALL)), [], 4),  # pick up, two steps, and then the ball has its turn: any action
    ("both at once", ">b.s", AllOf(AgentHoldGoal(BALL), AgentNearGoal(STAR)), [], 3),
]


def test_lengths_worked_out_by_hand():
    "All of them in two searches, composed goals apart."
    env, params, _ = room(4, 7)
    for composed in (False, True):
        cases = [case for case in BY_HAND if isinstance(case[2], Composed) == composed]
        tasks = jax.tree.map(np.asarray, stack_rulesets([make_ruleset(goal, rules) for _, _, goal, rules, _ in cases]))
        starts = [drawn(case[1])[2] for case in cases]
        answers = shortest(tasks, starts, env, params)
        assert {case[0]: steps for case, steps in zip(cases, answers.steps.tolist())} == {case[0]: case[-1] for case in cases}
        for i, (name, *_, steps) in enumerate(cases):
            found = answers[i]
            assert found.solved == (steps > 0) and found.exhausted == (steps < 0) and len(found.actions) == max(steps, 0), name
            assert steps < 0 or reaches(jax.tree.map(lambda x: x[i], tasks), starts[i], env, params, found.actions), name


def test_spaces_counted_by_hand():
    assert search(">..", EmptyGoal()).states == 3 * 4
    assert search(">b.", EmptyGoal()).states == 3 * 2 * 4 + 3 * 4  # the ball on one of three cells and the agent on another, or the ball carried
    assert search(">bG", EmptyGoal()).states == 2 * 2 * 4 + 3 * 4  # nothing can be put on the patch
    assert search(">~.", EmptyGoal()).states == 4                  # a trial that is lost leads nowhere
    found = search(">..", EmptyGoal())
    assert found.frontier.tolist() == [1, 3, 4, 3, 1] and found.frontier.sum() == found.states  # forward or a turn either way, and so on


# ---------------------------------------------------------------- every action sequence

LENGTH = 5
EVERYTHING = np.stack(np.unravel_index(np.arange(6 ** LENGTH), (6,) * LENGTH), axis=1)


@lru_cache(maxsize=None)
def tried_out():
    "A compiled function: the number of steps after which each of all sequences reaches the goal, 99 for never."
    env, params, _ = room(4, 7)

    def follow(start, actions):
        def step(carry, action):
            now, alive, t = carry
            now = env.step(params, now, action)
            won = alive & (now.reward > 0)
            return (now, alive & (now.discount > 0), t + 1), jnp.where(won, t + 1, 99)
        return jax.lax.scan(step, (start, jnp.bool_(True), 0), actions)[1].min()
    return jax.jit(lambda start: jax.vmap(follow, (None, 0))(start, jnp.asarray(EVERYTHING)).min())


def random_task(rng):
    "A task of a few tiles with any rules and any goal, most of them nonsense."
    tiles = [BALL, STAR, HEX, GOAL]
    pick = lambda: tiles[rng.integers(len(tiles))]
    rules = np.zeros((3, 7), np.uint8)
    for rule in rules:
        kind = rng.integers(1, 12)
        rule[:] = [kind, *pick(), *pick(), *(pick() if 3 <= kind <= 7 else (0, 0))]
        if rng.random() < .2:
            rule[5 if 3 <= kind <= 7 else 3:][:2] = NOTHING
    kind = rng.integers(1, 15)
    goal = np.array([kind, *pick(), *(pick() if kind in (4, 7, 8, 9, 10) else (0, 0))], np.uint8)
    goal = np.array([5, 1, rng.integers(1, 4), 0, 0], np.uint8) if kind == 5 else np.array([6, *pick(), 1, 2], np.uint8) if kind == 6 else goal
    return RuleSet(goal=goal, rules=rules, init_tiles=np.zeros((1, 2), np.uint8))


def random_drawing(rng):
    things = list(rng.choice(list(".bshG"), 5)) + ["^>v<"[rng.integers(4)]]
    rng.shuffle(things)
    return "".join(things[:3]) + " " + "".join(things[3:])


def test_as_trying_every_sequence():
    rng, found = np.random.default_rng(5), []
    cases = [(random_task(rng), drawn(random_drawing(rng))) for _ in range(24)]
    env, params, first = cases[0][1]
    answers = shortest([task for task, _ in cases], [start for _, (_, _, start) in cases], env, params, max_steps=LENGTH)
    compiled_rules = np.asarray(exact.compile_rules(np.stack([task.rules for task, _ in cases])))
    for i, (task, (_, _, start)) in enumerate(cases):
        state = start.state.replace(goal_encoding=task.goal, rules=compiled_rules[i], step_num=np.int32(0))
        best = int(tried_out()(first.replace(state=state)))
        assert answers[i].steps == (best if best < 99 else -1), (i, best, answers[i])
        assert not (answers[i].exhausted and best < 99)
        found.append(best)
    assert len(set(found)) >= 4 and 99 in found  # lengths of many kinds, and none


# ---------------------------------------------------------------- batches, limits, wrappers

@lru_cache(maxsize=None)
def some_cases():
    tasks, states, env, params = small_cases(Cases("small", 5, 4, 12), seed=3)
    states = jax.tree.map(np.asarray, states.replace(key=None)).replace(key=states.key)
    return jax.tree.map(np.asarray, tasks), states, env, params

@lru_cache(maxsize=None)
def some_answers():
    return shortest(*some_cases())

def one_of(tree, i):
    "Member i of a batch, without its key."
    return jax.tree.map(lambda x: x[i], tree.replace(key=None) if hasattr(tree, "key") else tree)


def same(a: Shortest, b: Shortest) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Shortest))


def test_a_batch_is_its_members():
    tasks, states, env, params = some_cases()
    many = some_answers()
    for i in range(0, 12, 3):
        one = shortest(*(one_of(tree, i) for tree in (tasks, states)), env, params)
        assert same(many[i], one) and one.frontier.sum() == one.states
    assert same(shortest(None, states, env, params), many)  # the states hold their tasks
    part = many[2:5]
    assert len(part) == 3 and same(part[1], many[3])
    assert (many.actions[np.arange(many.actions.shape[1]) >= many.steps[:, None]] == NO_ACTION).all()


def test_groups_and_batches_change_nothing(monkeypatch):
    tasks, states, env, params = some_cases()
    whole = shortest(tasks, states, env, params, max_states=2000)
    monkeypatch.setattr(exact, "_MOST", 2000 * 5)  # three searches of up to five tasks
    assert same(shortest(tasks, states, env, params, max_states=2000), whole)
    monkeypatch.setattr(exact, "_BATCH", 37)
    assert same(shortest(tasks, states, env, params, max_states=2000), whole)


def test_every_way_reaches_the_goal_and_no_prefix_does():
    tasks, states, env, params = some_cases()
    found, start = some_answers(), room(5, 5)[2]
    assert found.solved.sum() >= 8
    for i in np.flatnonzero(found.solved):
        task, state = (one_of(tree, i) for tree in (tasks, states))
        assert reaches(task, start.replace(state=state.replace(key=start.state.key)), env, params, found[i].actions)


def test_one_task_from_many_starts_and_many_tasks_from_one_start():
    env, params, start = drawn(">.b.s")
    _, _, other = drawn("..b>s")
    task = make_ruleset(AgentHoldGoal(BALL))
    assert shortest(task, [start, other], env, params).steps.tolist() == [2, 3]
    tasks = stack_rulesets([task, make_ruleset(AgentNearGoal(STAR)), make_ruleset(AllOf(AgentHoldGoal(BALL), AgentNearGoal(STAR)))])
    assert shortest(tasks, start, env, params).steps.tolist() == [2, 4, 4]  # the ball is in the way, so it is carried along
    assert len(shortest([task], start, env, params)) == 1 and np.ndim(shortest(task, start, env, params).steps) == 0


def test_a_limit_is_no_proof():
    whole = search(">..b", AgentHoldGoal(BALL))
    assert search(">..b", AgentHoldGoal(BALL), max_steps=3).steps == 3
    for limits in (dict(max_steps=2), dict(max_states=3)):
        short = search(">..b", AgentHoldGoal(BALL), **limits)
        assert not short.solved and not short.exhausted and short.steps == -1 and len(short.actions) == 0
        assert "Given up" in short.describe() and "raise max_states or max_steps" in short.describe()
    assert "3 steps are needed" in whole.describe() and "1 step is needed" in search(">b", AgentHoldGoal(BALL)).describe()
    assert "cannot be reached" in search(">..", AgentHoldGoal(BALL)).describe()


def test_one_that_is_given_up_does_not_disturb_the_others():
    env, params, start = drawn(">.b.s")
    answers = shortest([make_ruleset(EmptyGoal()), make_ruleset(AgentHoldGoal(HEX)), make_ruleset(AgentHoldGoal(BALL))], start, env, params, max_states=12)
    assert answers.solved.tolist() == [False, False, True] and not answers.exhausted.any()
    assert answers[2].steps == 2 and "1 solved, 0 proved impossible, 2 given up" in answers.describe()


def test_time_limits_and_auto_reset_do_not_enter():
    env, params, start = drawn(">...b")
    late = start.replace(state=start.state.replace(step_num=jnp.int32(10_000)))
    for where in (env, GymAutoResetWrapper(env)):
        for limit in (1, 500):
            found = shortest(make_ruleset(AgentHoldGoal(BALL)), late, where, params.replace(max_steps=limit))
            assert found.steps == 4 and found.actions.tolist() == [0, 0, 0, 3]
            assert shortest(make_ruleset(AgentHoldGoal(STAR)), late, where, params.replace(max_steps=limit)).exhausted


def test_tasks_that_a_wrapper_drew():
    from xland_minigrid.benchmarks import Benchmark
    from xland_minigrid.envs.sampling import RulesetSamplingWrapper
    tasks, _, inner, params = some_cases()
    env = GymAutoResetWrapper(RulesetSamplingWrapper(inner))
    sampled = env._env.with_tasks(params, Benchmark.from_arrays(tasks.goal, tasks.rules, tasks.init_tiles))
    start = jax.jit(env.reset)(sampled, jax.random.key(4))
    found = shortest(None, start, env, sampled)
    number = int(start.state.carry.ruleset_id)
    plain = start.state.replace(carry=start.state.carry.inner)
    assert same(found, shortest(jax.tree.map(lambda x: x[number], tasks), plain, inner, params))


# ---------------------------------------------------------------- other environments and tasks

@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-5x5", pytest.param("MiniGrid-MemoryS8", marks=[pytest.mark.slow, pytest.mark.optimized])])
def test_minigrid(name):
    env, params, reset, _ = compiled(name)
    start = reset(params, jax.random.key(2))
    found = shortest(None, start, env, params)
    assert found.solved and reaches(None, start, env, params, found.actions)


@pytest.mark.slow  # a program of its own
def test_registered_rules():
    @register_rule(id=251)
    class _TrampledExact(OneTileRule):
        "A patch under the agent becomes something else."
        when, looks = (0,), on_cells("here")
    try:
        found = search(">GG", AgentNearGoal(STAR), [_TrampledExact(GOAL, STAR)])
    finally:
        rule_kinds.remove(251)
    assert found.steps == 2 and found.actions.tolist() == [0, 0]  # the second step leaves a star behind


def test_memory_is_part_of_the_state():
    # The same place with and without the first part done are two states; a search that took them for one would find nothing.
    assert search(">..", InOrder(AgentOnPositionGoal(np.array([1, 3], np.uint8)), AgentOnPositionGoal(np.array([1, 1], np.uint8)))).steps == 6


# ---------------------------------------------------------------- the set of states

@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=6))
def test_of_equal_states_the_first_is_new(batches):
    seen, known = set(), set()
    for batch in batches:
        fresh = []
        for number, value in enumerate(batch):
            if value not in known:
                fresh.append(number)
                known.add(value)
        cells = np.zeros((len(batch), 3, 3), np.uint8)
        cells[:, 1, 2] = batch
        assert exact._add_new(seen, exact._keys(np.zeros(len(batch), np.int32), (cells, None))).tolist() == fresh
    assert len(seen) == len(known)


# ---------------------------------------------------------------- wrong input

def test_wrong_input():
    env, params, start = drawn(">.b")
    task = make_ruleset(AgentHoldGoal(BALL))
    assert refusals({
        "env is XLandEnvParams": (lambda: shortest(task, start, params, env), TypeError, "env is XLandEnvParams"),
        "params is NoneType": (lambda: shortest(task, start, env, None), TypeError, "params is NoneType"),
        "give a TimeStep or State": (lambda: shortest(task, 3, env, params), TypeError, "give a TimeStep or State"),
        "one or more State": (lambda: shortest(task, [], env, params), TypeError, "one or more State"),
        "a list with others": (lambda: shortest(task, [start, 3], env, params), TypeError, "one or more State"),
        "ruleset is str": (lambda: shortest("hold a ball", start, env, params), TypeError, "ruleset is str"),
        "one or more RuleSet": (lambda: shortest([], start, env, params), TypeError, "one or more RuleSet"),
        "3 tasks and 2 starts": (lambda: shortest([task] * 3, [start] * 2, env, params), ValueError, "3 tasks and 2 starts"),
        "max_states is 0": (lambda: shortest(task, start, env, params, max_states=0), ValueError, "max_states is 0"),
        "max_states is 1.5": (lambda: shortest(task, start, env, params, max_states=1.5), ValueError, "max_states is 1.5"),
        "max_steps is -1": (lambda: shortest(task, start, env, params, max_steps=-1), ValueError, "max_steps is -1"),
        "nothing to search": (lambda: shortest(jax.tree.map(lambda x: np.zeros((0, *np.shape(x)), np.uint8), empty_ruleset()), start, env, params), ValueError, "starts is empty"),
        "beyond Tables 2 and 3": (lambda: shortest(task.replace(goal=np.array([99, 0, 0, 0, 0], np.uint8)), start, env, params), ValueError, "beyond Tables 2 and 3"),
        "cannot be traced": (lambda: jax.jit(lambda s: shortest(task, s, env, params).steps)(start.state), TypeError, "cannot be traced"),
        "which has no length": (lambda: len(shortest(task, start, env, params)), TypeError, "has no length"),
        "ask for fewer cases": (lambda: small_cases(Cases("trivial", 5, 1, 10)), ValueError, "ask for fewer cases"),
    }) == {}


# ---------------------------------------------------------------- planner and prover

def test_contradictions_are_found():
    tasks, states, env, params = some_cases()
    truth = some_answers()
    steps, failure = np.where(truth.solved, truth.steps + 1, -1).astype(np.int32), np.where(truth.solved, Failure.SOLVED, Failure.BLOCKED).astype(np.uint8)
    assert not len(Compared(truth, steps, failure).contradictions())
    i, j = np.flatnonzero(truth.solved)[:2]
    steps[i] -= 2
    steps[j], failure[j] = -1, Failure.IMPOSSIBLE_START
    assert set(Compared(truth, steps, failure).contradictions()) == {i, j}


@pytest.mark.slow
@pytest.mark.optimized
def test_planner_is_near_the_optimum():
    found = [compare(*small_cases(cases)) for cases in SMALL]
    ratio = np.concatenate([f.ratio for f in found])
    assert len(ratio) >= 500 and 1 <= ratio.min() and ratio.mean() <= 1.3
    assert sum(len(f.contradictions()) for f in found) == 0
    missed = sum((f.optimal.solved & (f.steps < 0)).sum() for f in found)
    assert missed <= .01 * len(ratio)


@pytest.mark.slow
@pytest.mark.optimized
def test_prover_is_sound():
    for preset in ("small", "medium"):
        accepted, rejected = (judge_prover(Cases(preset, 5, 3, 10), word) for word in (True, False))
        assert not len(accepted.surprises()) and accepted.answers.solved.mean() > .9
        assert rejected.answers.solved.mean() < .3 and (rejected.reasons != Reason.PROVED).all()  # some are, by luck, or because the prover is careful
