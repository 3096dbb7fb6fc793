"""Difficulty: strata and samples, the numbers of tasks, what was measured and what is estimated, and wrong input."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xland_minigrid.benchmarks.difficulty as module
from xland_minigrid.benchmarks import Benchmark, generate_benchmark
from xland_minigrid.benchmarks.difficulty import QUANTITIES, Difficulty, difficulty, estimated_steps, strata, stratified
from xland_minigrid.benchmarks.solve import Plans
from xland_minigrid.core.goals import AgentHoldGoal, TileNearGoal
from xland_minigrid.core.rules import AgentHoldRule, TileNearRule
from xland_minigrid.core.ruleset import make_ruleset, stack_rulesets
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.registration import make
from worlds import refusals

pytestmark = pytest.mark.newest

ONE_SENTENCE = r"^(?!.*\. ).*\.$"
NUMBERS = st.lists(st.one_of(st.integers(-50, 50).map(float), st.floats(-1e3, 1e3), st.just(float("nan"))), max_size=60)


@pytest.fixture(scope="module")
def tasks():
    return generate_benchmark("medium", n=300, seed=7)


@pytest.fixture(scope="module")
def hard(tasks):
    "Measured by a stub: ten steps, and twelve more for each rule of the plan."
    plans = tasks.plans()
    par = np.where(np.arange(300) % 3 == 0, 10 + 12 * plans.num_steps.astype(float), np.nan).astype(np.float32)
    return Difficulty(plans.solvable, plans.depth, plans.num_steps, plans.num_needed, plans.dead_ends, plans.risk, par, np.full(300, 30, np.float32))


# ------------------------------------------------------------------------------------------- strata


@given(NUMBERS, st.integers(1, 9))
def test_strata_keep_the_order_and_have_equal_width(values, bins):
    found = strata(np.array(values, float), bins)
    known = [(v, s) for v, s in zip(values, found) if v == v]
    assert all(s == -1 for v, s in zip(values, found) if v != v) and all(0 <= s < bins for _, s in known)
    for (v, s), (w, t) in zip(sorted(known), sorted(known)[1:]):
        assert s <= t, "a larger value is in no lower stratum"
    different = {v for v, _ in known}
    if len(different) <= bins and all(v == round(v) for v in different):
        assert len({s for _, s in known}) == len(different)
    elif known:
        low, high = min(different), max(different)
        for v, s in known:
            width = (high - low) / bins
            assert low + s * width - 1e-6 <= v <= low + (s + 1) * width + 1e-6


@given(NUMBERS, st.integers(1, 9), st.data())
def test_samples_are_as_even_as_they_can_be(values, bins, data):
    values = np.array(values, float)
    available = int((~np.isnan(values)).sum())
    n = data.draw(st.integers(0, available))
    rows = stratified(values, n, bins, seed=1)
    assert len(rows) == n == len(set(rows)) and (np.diff(rows) > 0).all() and not np.isnan(values[rows]).any()
    groups = strata(values, bins)
    for s in set(groups[rows]):
        for t in set(groups[groups >= 0]):
            mine, theirs = (groups[rows] == s).sum(), (groups[rows] == t).sum()
            assert mine - theirs <= 1 or theirs == (groups == t).sum(), "nobody has two more than another who has some left"
    assert (rows == stratified(values, n, bins, seed=np.random.default_rng(1))).all()
    if n:
        with pytest.raises(ValueError, match="number of rows"):
            stratified(values, available + 1, bins)


def test_within_a_stratum_all_are_equally_likely():
    values = np.repeat([0.0, 1.0], [40, 10])
    counts = np.bincount(np.concatenate([stratified(values, 10, seed=s) for s in range(800)]), minlength=50)
    assert (abs(counts[:40] / 800 - 5 / 40) < 0.05).all() and (abs(counts[40:] / 800 - 5 / 10) < 0.07).all()
    assert not np.array_equal(stratified(values, 10, seed=0), stratified(values, 10, seed=1))


def test_wrong_strata():
    wrong = [lambda: strata([[1, 2]]), lambda: strata(["a"]), lambda: strata([1], 0), lambda: strata([1], 1.5), lambda: strata([1], True), lambda: strata([1, 2], [2, 1]),
    lambda: strata([1, 2], [[1]]), lambda: stratified([1, 2], -1), lambda: stratified([1, 2], 1.5), lambda: stratified([1, np.nan], 2)]
    assert refusals({i: (call, ValueError, r"\.$") for i, call in enumerate(wrong)}) == {}


# ------------------------------------------------------------------------------------------- estimates


def test_estimates_follow_the_real_lengths():
    from xland_minigrid.benchmarks.oracle import solve_tasks
    benchmark, (env, params) = generate_benchmark("small", 60, seed=3).to_numpy(), make("XLand-MiniGrid-R4-13x13")
    attempts, estimate = solve_tasks(benchmark, np.arange(40), env, params), estimated_steps(benchmark, params)
    assert estimate.shape == (60,) and estimate.dtype == np.float32 and (estimate >= 1).all()
    assert np.corrcoef(estimate[:40][attempts.solved], attempts.steps[attempts.solved])[0, 1] > 0.5
    assert 0.7 < estimate[:40][attempts.solved].mean() / attempts.steps[attempts.solved].mean() < 1.4


def test_estimates_of_a_task_do_not_depend_on_the_company(tasks):
    params, plans = make("XLand-MiniGrid-R1-9x9")[1], tasks.plans()
    estimate = estimated_steps(tasks, params, plans=plans)
    rows = np.array([299, 5, 17])
    np.testing.assert_array_equal(estimated_steps(tasks.take(rows).pad_to(rules=tasks.rules.shape[1] + 1), params), estimate[rows])
    nothing = Benchmark.from_arrays(np.array([[1, 5, 3, 0, 0]]), np.zeros((1, 1, 7), int), np.zeros((1, 1, 2), int))
    assert np.isnan(estimated_steps(nothing, params)).all()
    with pytest.raises(ValueError, match="plans for"):
        estimated_steps(tasks, params, plans=nothing.plans())


# ------------------------------------------------------------------------------------------- tasks


def by_hand():
    "Three tasks: hold what lies there, make it by one rule, make one of its parts by another; and one that cannot be solved."
    red, blue, green, pink = ((Tiles.BALL, c) for c in (Colors.RED, Colors.BLUE, Colors.GREEN, Colors.PINK))
    first = AgentHoldRule(red, blue)
    second = TileNearRule(blue, green, pink)
    return stack_rulesets([make_ruleset(AgentHoldGoal(red), [], [red]), make_ruleset(AgentHoldGoal(blue), [first], [red]),
                           make_ruleset(AgentHoldGoal(pink), [first, second], [red, green]), make_ruleset(TileNearGoal(pink, red), [], [red])])


def test_depth_of_tasks_whose_depth_is_plain():
    rulesets = by_hand()
    bench = Benchmark.from_arrays(rulesets.goal, rulesets.rules, rulesets.init_tiles)
    found = difficulty(bench)
    assert found.depth.tolist() == [0, 1, 2, 0] and found.num_steps.tolist()[:3] == [0, 1, 2] and found.solvable.tolist() == [True] * 3 + [False]
    assert np.isnan(found.par).all() and np.isnan(found.estimate).all()
    assert found.values("depth")[:3].tolist() == [0, 1, 2] and np.isnan(found.values("depth")[3])
    assert np.isnan(found.values("reference")).all(), "nothing was measured"


def test_measured_steps_are_those_of_the_oracle(tasks):
    from xland_minigrid.benchmarks.oracle import reference_steps
    env, params = make("XLand-MiniGrid-R1-9x9")
    few = tasks.take(np.arange(20))
    found = difficulty(few, env, params, measure=[3, 1, 7, 3], starts=1, seed=2)
    assert np.flatnonzero(~np.isnan(found.par)).tolist() == [1, 3, 7]
    np.testing.assert_array_equal(found.par[[1, 3, 7]], reference_steps(few, [1, 3, 7], env, params, 1, 2))
    assert (found.reference[[1, 3, 7]] == found.par[[1, 3, 7]]).all() and not np.isnan(found.estimate[found.solvable]).any()
    assert "steps measured of 3" in repr(found)


def test_what_was_measured_scales_the_estimates(tasks, monkeypatch):
    "An oracle that needs twice the estimate, with noise: the estimate of the tasks that were not measured is twice as long."
    world, plans = make("XLand-MiniGrid-R1-9x9"), tasks.plans()
    plain = difficulty(tasks, *world, measure=0, plans=plans).estimate
    np.testing.assert_array_equal(plain, estimated_steps(tasks, world[1], world[0], plans=plans))
    random = np.random.default_rng(0)
    monkeypatch.setattr(module, "reference_steps", lambda benchmark, numbers, *rest, **more: (2 * plain[numbers] + random.normal(0, 2, len(numbers))).astype(np.float32))
    found = difficulty(tasks, *world, measure=100, plans=plans)
    rest = np.isnan(found.par) & plans.solvable
    assert rest.sum() == plans.solvable.sum() - 100
    np.testing.assert_allclose(found.estimate[rest], 2 * plain[rest], rtol=.05)
    assert (found.reference[rest] == found.estimate[rest]).all() and (found.reference[~rest & plans.solvable] == found.par[~rest & plans.solvable]).all()


def test_an_oracle_that_solves_nothing(tasks, monkeypatch):
    monkeypatch.setattr(module, "reference_steps", lambda benchmark, numbers, *rest, **more: np.full(len(numbers), np.nan, np.float32))
    found = difficulty(tasks, *make("XLand-MiniGrid-R1-9x9"), measure=10)
    assert np.isnan(found.par).all() and "nan" in found.table() and not np.isnan(found.reference[found.solvable]).any()


def test_quantities(hard):
    for name in QUANTITIES:
        assert hard.values(name).shape == (300,) and np.isnan(hard.values(name)[~hard.solvable]).all()


def test_table(hard):
    lines = hard.table("num_steps", 16, success=np.linspace(0, 1, 300)).splitlines()
    assert lines[0].split()[:2] == ["num_steps", "tasks"] and lines[0].split()[-1] == "success" and len(lines) == 1 + len(np.unique(hard.num_steps[hard.solvable]))
    assert sum(int(line.split()[1]) for line in lines[1:]) == hard.solvable.sum()


WRONG = {
    "plans of others": (ValueError, lambda t, h: difficulty(t, plans=Plans(*(np.zeros(3) for _ in Plans._fields)))),
    "no params": (ValueError, lambda t, h: difficulty(t, make("XLand-MiniGrid-R1-9x9")[0])), "measure": (ValueError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=-2)),
    "measure a share": (ValueError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=0.5)),
    "measure halves": (TypeError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[0.5])),
    "measure beyond": (IndexError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[300])),
    "measure below": (IndexError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[-1])),
    "quantity": (ValueError, lambda t, h: h.values("beauty"))}


def test_wrong_requests(tasks, hard):
    assert refusals({name: (lambda call=call: call(tasks, hard), error, ONE_SENTENCE) for name, (error, call) in WRONG.items()}) == {}
