"""The grid oracle against the real environment, an exhaustive search, and hand-made worlds in which the answer is known."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xland_minigrid
from xland_minigrid.benchmarks import oracle
from xland_minigrid.benchmarks.benchmark import Benchmark, generate_benchmark
from xland_minigrid.benchmarks.oracle import reference_steps, replay, solve_tasks
from xland_minigrid.benchmarks.planner import Failure, Solution, solve_from
from xland_minigrid.benchmarks.world import SmallWorld, act
from xland_minigrid.core.actions import AgentState
from xland_minigrid.core.compose import AllOf
from xland_minigrid.core.goals import (
    AgentHoldGoal, AgentNearGoal, AgentNearUpGoal, AgentOnPositionGoal, AgentOnTileGoal, TileNearGoal, TileNearLeftGoal, TileNearUpGoal, TileOnPositionGoal,
)
from xland_minigrid.core.rules import (
    AgentHoldRule, AgentNearLeftRule, AgentNearRule, AgentNearUpRule, TileNearUpRule, compile_rules,
)
from xland_minigrid.core.ruleset import RuleSet, make_ruleset
from xland_minigrid.core.tiles import EMPTY, FLOOR, WALL, Colors, Tiles, pack, unpack
from xland_minigrid.envs.environment import EnvCarry, State, advance
from xland_minigrid.measure.tables.exact import Cases, compare, small_cases
from xland_minigrid.measure.tables.oracle import measure as measure_oracle
from worlds import refusals

pytestmark = pytest.mark.newest

R1, R4 = "XLand-MiniGrid-R1-13x13", "XLand-MiniGrid-R4-13x13"
T = lambda tile, color=Colors.RED: np.array((tile, color), np.uint8)
BALL, SQUARE, STAR, HEX, PYRAMID, KEY, PATCH = (T(t) for t in (Tiles.BALL, Tiles.SQUARE, Tiles.STAR, Tiles.HEX, Tiles.PYRAMID, Tiles.KEY, Tiles.GOAL))
LETTERS = {".": FLOOR, "#": WALL, "b": pack(*BALL), "s": pack(*SQUARE), "*": pack(*STAR), "h": pack(*HEX), "p": pack(*PYRAMID), "k": pack(*KEY),
           "g": pack(*PATCH), "D": pack(Tiles.DOOR_CLOSED, Colors.RED), "L": pack(Tiles.DOOR_LOCKED, Colors.RED), "~": pack(Tiles.LAVA, Colors.ORANGE)}


ONE_SENTENCE = r"^(?!.*\. )"

def world(picture: str, pocket=EMPTY):
    "A start from a drawing; the agent is one of ^ > v <."
    rows = picture.split()
    cells = np.full((8, 11), WALL, np.uint8)  # one size for all drawings, so that one compiled program judges them
    cells[:len(rows), :len(rows[0])] = [[LETTERS.get(c, FLOOR) for c in row] for row in rows]
    (y, x), = [(y, x) for y, row in enumerate(rows) for x, c in enumerate(row) if c in "^>v<"]
    agent = AgentState(jnp.array([y, x], jnp.int32), jnp.int32("^>v<".index(rows[y][x])), jnp.asarray(unpack(np.uint8(pocket))))
    return cells, agent

@functools.cache
def small_room(height, width):
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", height=height, width=width)
    return env, params, jax.jit(env.reset)(params, jax.random.key(0))

def timestep_of(task, cells, agent):
    "A real time step (a batch of one) with that map and agent."
    env, params, first = small_room(*cells.shape)
    rules = np.zeros((4, 7), np.uint8)
    rules[:len(task.rules)] = task.rules
    state = first.state.replace(cells=cells, agent=agent, goal_encoding=np.asarray(task.goal), rules=jax.jit(compile_rules)(rules))
    return env, params, oracle.rows_of(jax.tree.map(jnp.asarray, first.replace(state=state)), None)

def outcome(task, picture, pocket=EMPTY, **options):
    "Solve a drawing; whatever is called solved is replayed."
    cells, agent = world(picture, pocket)
    answer = solve_from(task, (cells, agent), **options)
    assert answer.solved == (answer.failure == Failure.SOLVED) == (len(answer.actions) > 0)
    if answer.solved:
        env, params, timesteps = timestep_of(task, cells, agent)
        won, steps = replay(env, params, timesteps, [answer])
        assert won[0] and steps[0] == len(answer.actions)
    return answer


# ---------------------------------------------------------------------------------------------------------------------- the small world

def random_worlds(n, seed, size=(5, 6), rules=6):
    "Crowded little worlds with all kinds of rules and goals, few kinds of tiles, so that a lot happens."
    rng, (h, w) = np.random.default_rng(seed), size
    codes = np.array([pack(t, Colors.RED) for t in (Tiles.BALL, Tiles.SQUARE, Tiles.GOAL, Tiles.KEY, Tiles.DOOR_LOCKED, Tiles.DOOR_CLOSED, Tiles.LAVA)], np.uint8)
    cells = np.where(rng.random((n, h, w)) < .45, FLOOR, rng.choice(np.append(codes, WALL), (n, h, w))).astype(np.uint8)
    pair, many = lambda code: (code >> 4, code & 15), lambda *shape: rng.choice(codes[:4], shape)
    kind = rng.integers(0, 12, (n, rules))
    product = np.where(rng.random((n, rules)) < .3, FLOOR, many(n, rules))
    a, b = many(n, rules), many(n, rules)
    two = (kind >= 3) & (kind <= 7)
    rows = np.stack([kind, *pair(a), *pair(np.where(two, b, product)), *pair(np.where(two, product, 0))], -1).astype(np.uint8) * (kind > 0)[..., None]
    goal, ga, gb = rng.integers(0, 15, n), many(n), many(n)
    where = np.stack([rng.integers(0, h, n), rng.integers(0, w, n)])
    args = np.where(goal == 5, [*where, *where], np.where(goal == 6, [*pair(ga), *where], [*pair(ga), *pair(gb)]))
    goals = np.stack([goal, *args], -1).astype(np.uint8)
    position = np.stack([rng.integers(0, h, n), rng.integers(0, w, n)], 1).astype(np.int32)
    return cells, position, rng.integers(0, 4, n).astype(np.int32), rng.choice(np.append(codes[:4], EMPTY), n).astype(np.uint8), goals, rows.astype(np.uint8)

@functools.partial(jax.jit, static_argnames="steps")
def real_steps(cells, position, direction, pocket, goals, rules, actions, steps):
    make = lambda c, p, d, k, g, r: State(key=jax.random.key(0), step_num=jnp.int32(0), cells=c, agent=AgentState(p, d, unpack(k)), goal_encoding=g,
                                          rules=compile_rules(r), carry=EnvCarry())
    def one(states, column):
        states, reached, _ = jax.vmap(lambda s, a: advance(s, a, 5))(states, column)
        here = jax.vmap(lambda s: s.cells[s.agent.position[0], s.agent.position[1]])(states)
        return states, (states.cells, states.agent.position, states.agent.direction, states.agent.pocket, reached & (here >> 4 != Tiles.LAVA))
    return jax.lax.scan(one, jax.vmap(make)(cells, position, direction, pocket, goals, rules), actions.T)[1]

def check_small_world(n, steps, seed):
    "How often rules fired and goals were met, after checking that the small world agrees with the real one at every step."
    cells, position, direction, pocket, goals, rules = random_worlds(n, seed)
    actions = np.random.default_rng(seed + 1).choice(6, (n, steps), p=(.3, .12, .12, .18, .18, .1))
    real = [np.asarray(x) for x in real_steps(cells, position, direction, pocket, goals, rules, actions, steps)]
    fired = met = 0
    for i in range(n):
        small = SmallWorld(RuleSet(goal=goals[i], rules=rules[i], init_tiles=np.zeros((1, 2), np.uint8)), *cells.shape[1:])
        c, pos, facing, held = small.load(cells[i]), small.cell(*position[i].tolist()), int(direction[i]), int(pocket[i])
        for t in range(steps):
            pos, facing, held, event, reached = act(small, c, pos, facing, held, int(actions[i, t]))
            now = np.frombuffer(bytes(c), np.uint8).reshape(small.height + 4, small.stride)[2:-2, 1:-1]
            np.testing.assert_array_equal(now, real[0][t, i], err_msg=f"world {i}, step {t}, action {actions[i, t]}")
            assert (pos // small.stride - 2, pos % small.stride - 1) == tuple(real[1][t, i]) and facing == real[2][t, i]
            assert (held >> 4, held & 15) == tuple(real[3][t, i]) and reached == real[4][t, i]
            fired, met = fired + event, met + reached
    return fired, met

def test_the_small_world_is_the_real_one():
    fired, met = check_small_world(400, 40, 0)
    assert fired > 200 and met > 200, (fired, met)


# -------------------------------------------------------------------------------------------------------------------------- known answers

@pytest.mark.parametrize("goal, picture, steps", [
    (AgentHoldGoal(BALL), "##### #>.b# #####", 2),
    (AgentHoldGoal(BALL), "##### #v.b# #####", 3),
    (AgentNearGoal(BALL), "##### #>.b# #####", 1),
    (AgentNearGoal(BALL), "##### #.>b# #####", 1),                       # beside it already: bumping into it counts as moving
    (AgentOnTileGoal(PATCH), "##### #>.g# #####", 2),
    (AgentOnPositionGoal(np.array([1, 3])), "##### #>..# #####", 2),
    (TileOnPositionGoal(BALL, np.array([1, 1])), "###### #.>b.# ######", 4),
    (TileNearGoal(BALL, STAR), "###### #.>b*# ######", 1),               # side by side already: an empty put-down asks
    (TileNearGoal(BALL, PATCH), "###### #>b.g# ######", 3),
    (AgentNearUpGoal(BALL), "##### #b..# #>..# #####", 1),               # below it already
])
def test_shortest_ways(goal, picture, steps):
    answer = outcome(make_ruleset(goal), picture)
    assert answer.solved and len(answer.actions) == steps

def test_doors_are_opened_and_locked_ones_want_their_key():
    assert outcome(make_ruleset(AgentHoldGoal(BALL)), "####### #>.D.b# #######").solved
    locked = "####### #.>...# #k##L## ##..b.# #######"
    answer = outcome(make_ruleset(AgentHoldGoal(BALL)), locked)
    assert answer.solved and 5 in answer.actions and (answer.actions == 3).sum() == 2 and (answer.actions == 4).sum() == 1
    assert outcome(make_ruleset(AgentHoldGoal(BALL)), locked.replace("k", ".")).failure == Failure.IMPOSSIBLE_START

def test_what_stands_in_the_way_is_put_aside():
    assert outcome(make_ruleset(AgentHoldGoal(BALL)), "######## #.>.h.b# ########").solved
    assert outcome(make_ruleset(AgentHoldGoal(BALL)), "########## #..>.hkpb# ##########").solved

def test_lava_is_walked_around():
    task = make_ruleset(AgentOnTileGoal(PATCH))
    answer = outcome(task, "###### #>~g.# #.~..# #....# ######")
    assert answer.solved and len(answer.actions) > 4
    assert outcome(task, "###### #>~g.# #.~..# #.~..# ######").failure == Failure.IMPOSSIBLE_START

def test_dead_ends_are_avoided():
    "Coming near the ball from below destroys it; picking up the star does as well, so the ball has to be carried."
    task = make_ruleset(TileNearGoal(BALL, STAR), [AgentNearUpRule(BALL, HEX), AgentHoldRule(STAR, HEX)])
    answer = outcome(task, "####### #.....# #..b..# #.....# #..^..# #*....# #######")
    assert answer.solved

def test_the_side_is_right():
    for goal in (TileNearUpGoal(BALL, STAR), TileNearLeftGoal(BALL, STAR)):
        assert outcome(make_ruleset(goal), "###### #b...# #.>..# #...*# ######").solved

def test_a_chain_of_rules():
    task = make_ruleset(AgentHoldGoal(STAR), [AgentNearRule(HEX, SQUARE), TileNearUpRule(SQUARE, BALL, PYRAMID), AgentHoldRule(PYRAMID, STAR)])
    answer = outcome(task, "####### #h....# #.....# #..>..# #....b# #######")
    assert answer.solved and len(answer.actions) < 30

def test_moving_a_thing_that_may_not_stay_where_it_is():
    "A patch made at the bottom could never have the agent below it, so the square is carried up before it is turned into one."
    task = make_ruleset(AgentNearUpGoal(PATCH), [AgentNearLeftRule(SQUARE, PATCH)])
    assert outcome(task, "###### #....# #..>.# #....# #s...# ######").solved

@pytest.mark.parametrize("goal, rules, picture", [
    (AgentNearUpGoal(PATCH), [], "##### #.>.# #...# #.g.# #####"),                    # nobody can stand below it
    (TileNearUpGoal(PATCH, BALL), [], "##### #.g.# #.>b# #####"),                     # nothing can lie above it
    (AgentHoldGoal(BALL), [], "###### #>.#b# ######"),                                # walled in
    (AgentHoldGoal(BALL), [], "###### #>.Lb# ######"),                                # no key
    (AgentHoldGoal(STAR), [TileNearUpRule(PATCH, BALL, STAR)], "##### #.g.# #.>b# #####"),  # through a rule
    (TileNearGoal(PATCH, T(Tiles.GOAL, Colors.BLUE)), [AgentNearRule(BALL, T(Tiles.GOAL, Colors.BLUE))], "####### #>#g#b# #######"),
    (AgentHoldGoal(STAR), [AgentNearUpRule(BALL, STAR), AgentHoldRule(BALL, HEX)], "##### #.>.# #...# #.b.# #####"),  # not to be lifted, and at the bottom
])
def test_proofs(goal, rules, picture):
    answer = outcome(make_ruleset(goal, rules), picture)
    assert answer.failure == Failure.IMPOSSIBLE_START and answer.detail

@pytest.mark.parametrize("goal, rules, picture", [
    (AgentNearUpGoal(PATCH), [], "##### #.>.# #.g.# #...# #####"),
    (AgentNearUpGoal(BALL), [], "##### #.>.# #...# #.b.# #####"),                     # can be carried, so there is a way
    (TileNearUpGoal(PATCH, BALL), [], "##### #...# #.g.# #.>b# #####"),
    (AgentHoldGoal(BALL), [], "###### #>.Db# ######"),
    (AgentHoldGoal(STAR), [AgentNearUpRule(BALL, STAR)], "##### #.>.# #...# #.b.# #####"),
    (TileNearUpGoal(BALL, PATCH), [], "##### #.g.# #.b^# #####"),                     # there already, at the wall
])
def test_what_resembles_a_hopeless_start_and_is_none(goal, rules, picture):
    assert outcome(make_ruleset(goal, rules), picture).solved

def test_other_failures():
    nothing = outcome(make_ruleset(AgentHoldGoal(BALL)), "##### #>..# #####")
    assert nothing.failure == Failure.NO_PLAN
    assert outcome(RuleSet(goal=np.zeros(5, np.uint8), rules=np.zeros((1, 7), np.uint8), init_tiles=np.zeros((1, 2), np.uint8)), "##### #>..# #####").failure == Failure.NO_PLAN
    assert outcome(make_ruleset(AllOf(AgentHoldGoal(BALL), AgentNearGoal(STAR))), "##### #>.b# #####").failure == Failure.UNSUPPORTED
    assert outcome(make_ruleset(TileNearUpGoal(BALL, STAR)), "###### #b...# #.>..# #...*# ######", budget=0).failure == Failure.BUDGET

def test_too_long_for_the_trial():
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", max_steps=1)
    task = make_ruleset(AgentHoldGoal(BALL))
    assert outcome(task, "##### #>.b# #####", params=params).failure == Failure.TOO_LONG
    assert outcome(task, "##### #.>b# #####", params=params).solved

def test_something_in_the_pocket_at_the_start():
    assert outcome(make_ruleset(TileNearGoal(BALL, STAR)), "###### #>..*# ######", pocket=pack(*BALL)).solved
    assert outcome(make_ruleset(AgentHoldGoal(STAR)), "###### #>..*# ######", pocket=pack(*BALL)).solved

def test_duplicates_are_told_apart():
    assert outcome(make_ruleset(TileNearGoal(BALL, BALL)), "###### #>b.b# ######").solved


# ------------------------------------------------------------------------------------------------------- against an exhaustive search

@pytest.mark.parametrize("cases", [Cases("small", 5, 5, 40)], ids=lambda c: c.preset)
def test_no_contradiction_with_exhaustive_search(cases):
    compared = compare(*small_cases(cases, seed=21))
    assert not len(compared.contradictions())
    assert compared.ratio.mean() < 1.2 and (compared.optimal.solved & (compared.steps < 0)).sum() <= 1

@given(st.integers(0, 2**31 - 1))
@settings(max_examples=25)
def test_random_worlds_have_no_false_proof_and_no_false_solution(seed):
    "Crowded rooms of 4 x 5 with a task of one or two rules: what is solved replays; nothing proved impossible is found by random play."
    rng = np.random.default_rng(seed)
    codes = [BALL, STAR, HEX, PATCH]  # the last cannot be carried
    rules = [[AgentNearRule, AgentHoldRule, AgentNearUpRule][rng.integers(3)](codes[rng.integers(3)], codes[rng.integers(4)]) for _ in range(rng.integers(1, 3))]
    kind = rng.integers(3)
    goal = [AgentHoldGoal, AgentNearUpGoal, AgentNearGoal][kind](codes[rng.integers(3 if kind == 0 else 4)])
    cells = np.full((8, 11), WALL, np.uint8)
    cells[1:5, 1:6] = rng.choice([FLOOR] * 6 + [pack(*c) for c in codes], (4, 5))
    free = np.argwhere(cells == FLOOR)
    agent = AgentState(jnp.asarray(free[rng.integers(len(free))], jnp.int32), jnp.int32(rng.integers(4)), jnp.asarray(unpack(EMPTY)))
    task = make_ruleset(goal, rules)
    answer = solve_from(task, (cells, agent), efforts=((4, False), (8, True)), budget=300)
    if answer.solved:
        env, params, timesteps = timestep_of(task, cells, agent)
        assert replay(env, params, timesteps, [answer])[0][0]
    if answer.failure in (Failure.NO_PLAN, Failure.IMPOSSIBLE_START):
        small = SmallWorld(task, *cells.shape)
        for _ in range(8):
            c, pos, facing, pocket = small.load(cells), small.cell(*np.asarray(agent.position).tolist()), int(agent.direction), int(EMPTY)
            for action in rng.choice(5, 120, p=(.4, .15, .15, .15, .15)).tolist():
                pos, facing, pocket, _, reached = act(small, c, pos, facing, pocket, action)
                assert not reached


# ------------------------------------------------------------------------------------------------------------------ many at once, the judge

STEPS = [20, 75, 6, 48, 37, 35, 45, 36, 21, 30, 20, 20, 11, 27, 15, 30, 21, 20, 34, 24, 16, 21, 11, 27, 32, 27, 6, 4, 22, 24, 19, 41, 41, 48, 8, 26, 8, 24, 24, 23]

@functools.cache
def some_attempts():
    benchmark, (env, params) = generate_benchmark("small", 60, seed=3).to_numpy(), xland_minigrid.make(R4)
    return benchmark, env, params, solve_tasks(benchmark, np.arange(40), env, params)

def test_almost_all_starts_are_solved():
    _, _, params, attempts = some_attempts()
    hopeless = np.isin(attempts.failure, (Failure.NO_PLAN, Failure.IMPOSSIBLE_START))
    assert attempts.solved[~hopeless].mean() >= 0.97 and hopeless.mean() < 0.15
    assert attempts.steps.max() < params.max_steps / 2 and ((attempts.steps > 0) == attempts.solved).all()
    assert attempts.steps.tolist() == STEPS, "the planner plays differently: if it plays better, write down what it needs now"

@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("preset, name", [("medium", R1), ("high", R4)])
def test_at_least_995_of_1000(preset, name):
    row = measure_oracle(preset, name, 120, seed=17)
    assert row.attempts.solved[row.possible].mean() >= 0.995
    assert np.corrcoef(row.estimate[row.attempts.solved], row.attempts.steps[row.attempts.solved])[0, 1] > 0.5

def test_the_judge_is_not_fooled():
    benchmark, env, params, attempts = some_attempts()
    good = np.flatnonzero(attempts.solved & (attempts.steps > 3))[:8]
    keys = jax.random.wrap_key_data(jnp.asarray(attempts.key[good]))
    timesteps = oracle.starts_of(env, params, benchmark.goals[attempts.task[good]], benchmark.rules[attempts.task[good]], benchmark.init_tiles[attempts.task[good]], keys)
    right = [attempts.actions[i] for i in good]
    count = len(right)
    assert replay(env, params, timesteps, right)[0].all()
    for wrong in ([a[:-1] for a in right], [np.append(a, 1) for a in right], [np.zeros(0, np.int8)] * count, right[1:] + right[:1], [np.full(400, 1)] * count):
        won, steps = replay(env, params, timesteps, wrong)
        assert not won.any() and not steps.any()
    with pytest.raises(ValueError, match="one solution for each start"):
        replay(env, params, timesteps, right[:-1])
    with pytest.raises(ValueError, match="no batch"):
        replay(env, params, jax.tree.map(lambda x: x[0], timesteps), right[:1])

def test_a_task_has_its_starts_whatever_the_company():
    benchmark, env, params, attempts = some_attempts()
    alone = solve_tasks(benchmark, [7], env, params, starts=2)
    np.testing.assert_array_equal(alone.key[0], attempts.key[7])
    np.testing.assert_array_equal(alone.actions[0], attempts.actions[7])
    assert (alone.key[0] != alone.key[1]).any() and alone.start.tolist() == [0, 1]

def test_par_is_the_mean_over_starts():
    benchmark, env, params, _ = some_attempts()
    attempts = solve_tasks(benchmark, np.arange(4), env, params, starts=2, seed=5)
    par = reference_steps(benchmark, np.arange(4), env, params, starts=2, seed=5)
    for i in range(4):
        mine = attempts.steps[attempts.task == i][attempts.solved[attempts.task == i]]
        assert np.isnan(par[i]) if not len(mine) else par[i] == pytest.approx(mine.mean())
    nothing = Benchmark.from_arrays(np.array([[1, 5, 3, 0, 0]]), np.zeros((1, 1, 7), int), np.zeros((1, 1, 2), int))
    assert np.isnan(reference_steps(nothing.pad_to(rules=4, tiles=10), [0], env, params, starts=1)).all()

def test_wrong_input_is_refused_in_one_sentence():
    benchmark, env, params, attempts = some_attempts()
    batch = oracle.starts_of(env, params, *(x[:2] for x in (benchmark.goals, benchmark.rules, benchmark.init_tiles)), jax.random.split(jax.random.key(0), 2))
    state, task = oracle.rows_of(batch, 0), benchmark.get_ruleset(0)
    assert refusals({
        "no task": (lambda: solve_from(None, state), TypeError, ONE_SENTENCE), "a batch of starts": (lambda: solve_from(task, batch), ValueError, ONE_SENTENCE),
        "a batch of tasks": (lambda: solve_from(RuleSet(benchmark.goals, benchmark.rules, benchmark.init_tiles), state), ValueError, ONE_SENTENCE),
        "beyond": (lambda: solve_tasks(benchmark, [60], env, params), IndexError, ONE_SENTENCE), "below": (lambda: solve_tasks(benchmark, [-1], env, params), IndexError, ONE_SENTENCE),
        "half": (lambda: solve_tasks(benchmark, [0.5], env, params), TypeError, ONE_SENTENCE),
        "no start": (lambda: solve_tasks(benchmark, [0], env, params, starts=0), ValueError, ONE_SENTENCE)}) == {}
    assert len(solve_tasks(benchmark, [], env, params).task) == 0
    assert isinstance(solve_from(task, state), Solution) and solve_from(task, state.state).solved == solve_from(task, (state.state.grid, state.state.agent)).solved

