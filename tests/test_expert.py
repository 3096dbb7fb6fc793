"""The compiled expert against the grid oracle, shortest solutions, an adversary, and sets of cells against masks."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xland_minigrid
from xland_minigrid.baselines import demo
from xland_minigrid.benchmarks import Benchmark, cellsets, generate_benchmark
from xland_minigrid.benchmarks.exact import shortest
from xland_minigrid.benchmarks.expert import NO_PLAN, consult, expert_action, plan_steps, steps_to_go, task_plan
from xland_minigrid.benchmarks.oracle import solve_tasks, starts_of
from xland_minigrid.core.goals import AgentHoldGoal
from xland_minigrid.core.ruleset import RuleSet
from xland_minigrid.measure.tables.exact import Cases, small_cases

pytestmark = pytest.mark.newest

R1, R4 = "XLand-MiniGrid-R1-9x9", "XLand-MiniGrid-R4-13x13"
SHARES = {"trivial": .99, "small": .98, "medium": .95, "high": .92}  # of what the oracle solves
COUNT, TINY, MOST = 32, 32, 250  # starts of each preset, in tiny worlds, steps


@functools.partial(jax.jit, static_argnames="env")
def play(env, params, timesteps, plans, drawn, random_steps):
    "Up to `MOST` steps, the first `random_steps` of them as `drawn (n, T)`: the last time steps, how many steps each took, and the steps to go before each, NaN after the end, `(MOST, n)`."
    def step(carry):
        t, timesteps, taken, to_go = carry
        advice, over = jax.vmap(consult)(timesteps.state, plans), timesteps.last()
        after = jax.vmap(env.step, (None, 0, 0))(params, timesteps,
                                                 jnp.where(t < random_steps, drawn[:, t], advice.action))
        after = jax.tree.map(lambda new, old: jnp.where(over.reshape(over.shape + (1,) * (new.ndim - 1)), old, new),
                             after, timesteps)
        return t + 1, after, taken + ~over, to_go.at[t].set(jnp.where(over, jnp.nan, advice.steps))

    going = lambda carry: (carry[0] < MOST) & ~carry[1].last().all()
    count = len(timesteps.reward)
    return jax.lax.while_loop(going, step, (jnp.int32(0), timesteps, jnp.zeros(count, jnp.int32),
                                            jnp.full((MOST, count), jnp.nan)))[1:]


_plans = jax.jit(jax.vmap(task_plan))


def by_expert(env, params, timesteps, plans, random_steps=0):
    "Whether the expert reaches the goal, in how many steps, and what it thinks is to go before each of them."
    drawn = np.random.default_rng(0).integers(0, 6, (len(timesteps.reward), 16)).astype(np.int32)
    end, taken, to_go = play(env, params, timesteps, plans, drawn, np.int32(random_steps))
    return np.asarray(end.last() & (end.reward > 0)), np.asarray(taken), np.asarray(to_go)


@functools.cache
def benchmark():
    "`COUNT` tasks of each preset, one after the other."
    made = [generate_benchmark(preset, COUNT, seed=11).to_numpy() for preset in SHARES]
    made = [b.pad_to(max(b.rules.shape[1] for b in made), max(b.init_tiles.shape[1] for b in made)) for b in made]
    return Benchmark.from_arrays(*(np.concatenate([np.asarray(getattr(b, name)) for b in made]) for name in ("goals", "rules", "init_tiles"))).to_numpy()


@functools.cache
def world(name):
    "Environment, parameters, time steps at the start, plans, and what the oracle does from there."
    tasks, (env, params) = benchmark(), xland_minigrid.make(name)
    attempts = solve_tasks(tasks, np.arange(len(tasks)), env, params, seed=1, efforts=((4, False),))
    starts = starts_of(env, params, tasks.goals, tasks.rules, tasks.init_tiles,
                       jax.random.wrap_key_data(jnp.asarray(attempts.key)))
    return env, params, starts, _plans(RuleSet(tasks.goals, tasks.rules, tasks.init_tiles),
                                       plan_steps(tasks.plans())), attempts


@functools.cache
def played(name):
    return by_expert(*world(name)[:4])


@functools.cache
def tiny():
    "Tasks of few objects in rooms of 4 x 4 cells."
    tasks, states, env, params = small_cases(Cases("small", 6, 3, TINY), seed=3)
    timesteps = jax.jit(jax.vmap(lambda task, key: env.reset(params.replace(ruleset=task), key)))(tasks, jax.random.split(jax.random.key(3), TINY))
    assert (timesteps.state.cells == states.cells).all()
    found = Benchmark.from_arrays(tasks.goal, tasks.rules, tasks.init_tiles)
    return tasks, env, params.replace(max_steps=MOST), timesteps, _plans(tasks, plan_steps(found.plans()))


# ------------------------------------------------------------------------------------------- how well it plays


@pytest.mark.parametrize("name", [R1, R4])
def test_it_solves_what_the_oracle_solves_in_about_as_many_steps(name):
    attempts, (solved, taken, _) = world(name)[-1], played(name)
    for i, (preset, share) in enumerate(SHARES.items()):
        rows = slice(i * COUNT, (i + 1) * COUNT)
        also = attempts.solved[rows]
        missed = (also & ~solved[rows]).sum()
        assert missed <= np.ceil((1 - share) * also.sum()), f"{preset}: {missed} of {also.sum()}"
    both = attempts.solved & solved
    assert taken[both].mean() <= 1.25 * attempts.steps[both].mean()


def test_no_way_is_shorter_than_the_shortest_and_most_are_as_short():
    tasks, env, params, timesteps, plans = tiny()
    best, (solved, taken, _) = shortest(tasks, timesteps.state, env, params), by_expert(env, params, timesteps, plans)
    assert not (solved & best.exhausted).any() and (taken >= best.steps)[solved & best.solved].all()
    both = solved & best.solved
    assert both.sum() >= 0.9 * best.solved.sum() and taken[both].mean() <= 1.25 * best.steps[both].mean() and (taken == best.steps)[both].mean() > 0.5


def test_after_an_adversary_it_solves_what_can_still_be_solved():
    "Ten random actions; exact search says from where the goal can still be reached."
    tasks, env, params, timesteps, plans = tiny()
    drawn = np.random.default_rng(0).integers(0, 6, (TINY, 16))
    step, moved = jax.jit(jax.vmap(env.step, (None, 0, 0))), timesteps
    over = np.zeros(TINY, bool)
    for t in range(10):
        moved = step(params, moved, drawn[:, t])
        over |= np.asarray(moved.last())
    best, (solved, _, _) = shortest(tasks, moved.state, env, params), by_expert(env, params, timesteps, plans, 10)
    still = best.solved & ~over
    assert still.sum() > 20 and (solved & still).sum() >= 0.9 * still.sum() and not (solved & best.exhausted & ~over).any()


def test_in_a_crowded_room_it_clears_the_way_to_nearly_every_object():
    "Four objects in a room of three by three cells: often one lies before another, and there is hardly any room to put it."
    tasks, (env, params) = demo.hold_tasks(demo.OBJECTS, 200), xland_minigrid.make(R1, height=5, width=5)
    rulesets = RuleSet(tasks.goals, tasks.rules, tasks.init_tiles)
    start = lambda task, key: env.reset(params.replace(ruleset=task, max_steps=MOST), key)
    timesteps = jax.jit(jax.vmap(start))(rulesets, jax.random.split(jax.random.key(0), 200))
    best = shortest(rulesets, timesteps.state, env, params)
    solved, taken, _ = by_expert(env, params.replace(max_steps=MOST), timesteps, _plans(rulesets, plan_steps(tasks.plans())))
    assert best.solved.all() and solved.mean() >= 0.98 and taken[solved].mean() <= 1.1 * best.steps[solved].mean()


# ------------------------------------------------------------------------------------------- steps to go


def test_steps_to_go_are_the_steps_of_one_walk():
    "Something to hold, no rules: the estimate is what it takes, one less after each step, wherever nothing is in the way."
    env, params, _, plans, attempts = world(R1)
    tiles = benchmark().init_tiles
    tasks = RuleSet(goal=np.pad(tiles[:, 0], ((0, 0), (1, 2)), constant_values=((0, 0), (AgentHoldGoal.ID, 0))),
                    rules=np.zeros_like(benchmark().rules), init_tiles=tiles)
    starts = starts_of(env, params, tasks.goal, tasks.rules, tasks.init_tiles,
                       jax.random.wrap_key_data(jnp.asarray(attempts.key)))
    no_rules = np.full((len(tiles), plans.tile.shape[1] - 1), 255, np.uint8)
    one, taken, to_go = by_expert(env, params, starts, _plans(tasks, no_rules))
    assert one.mean() > 0.95
    exact = to_go[0, one] == taken[one]
    assert exact.mean() > 0.9
    for i in np.flatnonzero(one)[exact]:
        np.testing.assert_array_equal(to_go[:taken[i], i], np.arange(taken[i], 0, -1))


@pytest.mark.parametrize("name", [R1, R4])
def test_steps_to_go_decrease_along_expert_play(name):
    solved, taken, to_go = played(name)
    falls = [np.diff(to_go[:taken[i], i]) < 0 for i in np.flatnonzero(solved)]
    assert np.concatenate(falls).mean() > 0.8
    assert (to_go[taken[solved] - 1, np.flatnonzero(solved)] <= 2).mean() > 0.9, "one step before the goal it knows"
    assert np.corrcoef(to_go[0, solved], taken[solved])[0, 1] > 0.7 and np.isfinite(to_go[0, solved]).all()


# ------------------------------------------------------------------------------------------- company, and tasks without a plan


def test_a_batch_says_what_each_state_alone_would_be_told():
    env, params, starts, plans, _ = world(R1)
    whole = by_expert(env, params, starts, plans)
    for row in (3, 2 * COUNT, 4 * COUNT - 1):
        alone = [jax.tree.map(lambda x: jnp.repeat(x[row][None], 4 * COUNT, axis=0), tree) for tree in (starts, plans)]
        solved, taken, to_go = by_expert(env, params, *alone)
        assert (solved == whole[0][row]).all() and (taken == whole[1][row]).all()
        np.testing.assert_array_equal(to_go, np.repeat(whole[2][:, row:row + 1], 4 * COUNT, axis=1))


def test_without_a_plan_it_does_nothing_and_says_so():
    tasks, env, params, timesteps, _ = tiny()
    goals = np.where(np.arange(TINY)[:, None] == 7, np.uint8([250, 0, 0, 0, 0]), tasks.goal)  # a kind that nobody registered here
    rows = plan_steps(Benchmark.from_arrays(tasks.goal, tasks.rules, tasks.init_tiles).plans()).copy()
    rows[7] = NO_PLAN
    ask = jax.jit(jax.vmap(lambda state, plan: (expert_action(state, plan), steps_to_go(state, plan))))
    action, steps = ask(timesteps.state, _plans(tasks.replace(goal=goals), rows))
    assert action[7] == 0 and np.isinf(steps[7]) and np.isfinite(np.delete(steps, 7)).mean() > 0.8
    nothing = Benchmark.from_arrays(np.array([[3, 1, 1, 0, 0], [1, 5, 3, 0, 0]]), np.zeros((2, 1, 7), int),
                                    np.zeros((2, 1, 2), int))
    np.testing.assert_array_equal(plan_steps(nothing.plans()), [[NO_PLAN], [NO_PLAN]])


# ------------------------------------------------------------------------------------------- sets of cells


SHAPE = 5, 8
MASKS = st.integers(0, 2 ** 40 - 1).map(lambda n: np.array([n >> i & 1 for i in range(40)], bool).reshape(SHAPE))


def as_mask(cells):
    bits = (cells.words[:, None] >> np.arange(32, dtype=np.uint32) & 1 != 0).ravel()
    return bits[:SHAPE[0] * cells.stride].reshape(SHAPE[0], cells.stride)[:, :-1]


@jax.jit
def with_sets(a, b, cells, which):
    sets = cellsets.cells_where(a), cellsets.cells_where(b)
    found = [sets[0] | sets[1], sets[0] & sets[1], sets[0] - sets[1], sets[0].when(which[0]), cellsets.beside(sets[0]),
             cellsets.spread(sets[0], sets[1]),
             cellsets.cells_at(SHAPE, (cells, which)), *[cellsets.ahead(sets[0], d) for d in range(4)], *[cellsets.behind(sets[0], d) for d in range(4)]]
    return [as_mask(x) for x in found], sets[0].any(), sets[0].holds(cells)


def moved(mask, direction):
    "One step up, right, down or left, by padding."
    wide = np.pad(mask, 1)
    rows, cols = {0: (2, 1), 1: (1, 0), 2: (0, 1), 3: (1, 2)}[direction]
    return wide[rows:rows + SHAPE[0], cols:cols + SHAPE[1]]


@settings(deadline=None, max_examples=60)
@given(MASKS, MASKS, st.lists(st.tuples(st.integers(-1, 44), st.booleans()), min_size=6, max_size=6))
def test_sets_of_cells_are_masks(a, b, numbered):
    cells, which = (np.array(x) for x in zip(*numbered))
    reached, grown = np.zeros(SHAPE, bool), a
    while (grown != reached).any():
        reached, grown = grown, grown | np.any([moved(grown, d) for d in range(4)], axis=0) & b
    inside = (cells >= 0) & (cells % 9 < 8)  # number 9 r + c; column 8 lies between the rows
    at = np.zeros(SHAPE, bool)
    at[tuple(np.divmod(cells[inside & which], 9))] = True
    expected = [a | b, a & b, a & ~b, a & which[0], np.any([moved(a, d) for d in range(4)], axis=0), reached, at,
                *[moved(a, d) for d in range(4)], *[moved(a, (d + 2) % 4) for d in range(4)]]
    found, any_, holds = with_sets(a, b, cells.astype(np.int32), which)
    for mine, theirs in zip(expected, found):
        np.testing.assert_array_equal(mine, theirs)
    held = np.zeros(len(cells), bool)
    held[inside] = a[tuple(np.divmod(cells[inside], 9))]
    assert any_ == a.any() and (np.asarray(holds) == held).all()
