"""Difficulty: strata and samples, the numbers of tasks, what was measured and what is estimated, and wrong input."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xland_minigrid.benchmarks.difficulty as module
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.benchmarks.difficulty import QUANTITIES, Difficulty, difficulty, difficulty_curve, strata, stratified, take
from xland_minigrid.benchmarks.solve import Plans, prove
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
        with pytest.raises(ValueError, match="cannot be drawn"):
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


# ------------------------------------------------------------------------------------------- tasks


def by_hand():
    "Three tasks: hold what lies there, make it by one rule, make one of its parts by another; and one that cannot be solved."
    red, blue, green, pink = ((Tiles.BALL, c) for c in (Colors.RED, Colors.BLUE, Colors.GREEN, Colors.PINK))
    first = AgentHoldRule(red, blue)
    second = TileNearRule(blue, green, pink)
    return stack_rulesets([make_ruleset(AgentHoldGoal(red), [], [red]), make_ruleset(AgentHoldGoal(blue), [first], [red]),
                           make_ruleset(AgentHoldGoal(pink), [first, second], [red, green]), make_ruleset(TileNearGoal(pink, red), [], [red])])


def test_depth_of_tasks_whose_depth_is_plain():
    from xland_minigrid.benchmarks import Benchmark
    rulesets = by_hand()
    bench = Benchmark.from_arrays(rulesets.goal, rulesets.rules, rulesets.init_tiles)
    found = difficulty(bench)
    assert found.depth.tolist() == [0, 1, 2, 0] and found.num_steps.tolist()[:3] == [0, 1, 2] and found.solvable.tolist() == [True] * 3 + [False]
    assert np.isnan(found.par).all() and np.isnan(found.estimate).all() and not found.fit
    assert found.order("depth").tolist() == [0, 1, 2] and np.isnan(found.values("depth")[3])
    assert found.between(depth=(1, 9)).tolist() == [1, 2] and found.between(depth=(0, 9), num_steps=(0, 0)).tolist() == [0]
    assert len(found.order("reference")) == 0, "nothing was measured"


def test_measured_steps_are_those_of_the_oracle(tasks):
    from xland_minigrid.benchmarks.oracle import reference_steps
    env, params = make("XLand-MiniGrid-R1-9x9")
    few = take(tasks, np.arange(20))
    found = difficulty(few, env, params, measure=[3, 1, 7, 3], starts=1, seed=2)
    assert np.flatnonzero(~np.isnan(found.par)).tolist() == [1, 3, 7]
    np.testing.assert_array_equal(found.par[[1, 3, 7]], reference_steps(few, [1, 3, 7], env, params, 1, 2))
    assert (found.reference[[1, 3, 7]] == found.par[[1, 3, 7]]).all() and not np.isnan(found.estimate[found.solvable]).any()
    assert found.fit["measured"] == 3 and "steps measured of 3" in repr(found)


def test_estimates_find_what_depends_on_plans(tasks, monkeypatch):
    "Steps that are a sum over what is to be done, with noise: the estimate is right on tasks that were not measured."
    arrays = [np.asarray(x) for x in (tasks.goals, tasks.rules, tasks.init_tiles)]
    plans = prove(*arrays)
    truth = module._demands(arrays[0], arrays[1], plans) @ np.array([6, 5, 4, 9, 14, 17, 1.0])
    random = np.random.default_rng(0)
    monkeypatch.setattr(module, "reference_steps", lambda benchmark, numbers, *rest, **more: (truth[numbers] + random.normal(0, 2, len(numbers))).astype(np.float32))
    found = difficulty(tasks, *make("XLand-MiniGrid-R1-9x9"), measure=100, plans=plans)
    rest = np.isnan(found.par) & plans.solvable
    assert rest.sum() == plans.solvable.sum() - 100
    assert abs(found.estimate - truth)[rest].mean() < 3 and found.fit["explained"] > 0.9
    none = difficulty(tasks, *make("XLand-MiniGrid-R1-9x9"), measure=0, plans=plans)
    assert np.isnan(none.reference).all()


def test_an_oracle_that_solves_nothing(tasks, monkeypatch):
    monkeypatch.setattr(module, "reference_steps", lambda benchmark, numbers, *rest, **more: np.full(len(numbers), np.nan, np.float32))
    found = difficulty(tasks, *make("XLand-MiniGrid-R1-9x9"), measure=10)
    assert np.isnan(found.reference).all() and "nan" in found.table()


def test_sorting_and_sampling(hard, tasks):
    order = hard.order()
    values = hard.reference[order]
    assert (np.diff(values) >= 0).all() and len(order) == hard.solvable.sum()
    rows = hard.stratified(30, by="num_steps", bins=5)
    assert len(rows) == 30 and len(take(tasks, rows)) == 30
    for name in QUANTITIES:
        assert hard.values(name).shape == (300,)
    counts = np.bincount(hard.num_steps[hard.stratified(24, by="num_steps", bins=16)])
    some = np.bincount(hard.num_steps)[:len(counts)]
    assert ((counts >= counts.max() - 1) | (counts == some)).all()


def test_table_and_figure(hard):
    pytest.importorskip("matplotlib")
    lines = hard.table("num_steps", 16, success=np.linspace(0, 1, 300)).splitlines()
    assert lines[0].split()[:2] == ["num_steps", "tasks"] and lines[0].split()[-1] == "success" and len(lines) == 1 + len(np.unique(hard.num_steps[hard.solvable]))
    assert sum(int(line.split()[1]) for line in lines[1:]) == hard.solvable.sum()
    axis = difficulty_curve(hard, {"par": hard.par}, by="num_steps", bins=16).axes[0]
    x, y = axis.lines[0].get_data()
    np.testing.assert_allclose(y, 10 + 12 * x, rtol=1e-6)
    assert axis.get_xlabel() == "num steps" and axis.get_ylabel()


def test_rows_are_taken_in_order(tasks):
    rows = [5, 2, 2]
    some = take(tasks, rows)
    assert (np.asarray(some.rules) == np.asarray(tasks.rules)[rows]).all() and len(take(tasks, [])) == 0
    assert (np.asarray(take(tasks.to_numpy(), rows).goals) == np.asarray(tasks.goals)[rows]).all()


WRONG = {
    "plans of others": (ValueError, lambda t, h: difficulty(t, plans=Plans(*(np.zeros(3) for _ in Plans._fields)))),
    "no params": (ValueError, lambda t, h: difficulty(t, make("XLand-MiniGrid-R1-9x9")[0])), "measure": (ValueError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=-2)),
    "measure a share": (ValueError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=0.5)),
    "measure halves": (TypeError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[0.5])),
    "measure beyond": (IndexError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[300])),
    "measure below": (IndexError, lambda t, h: difficulty(t, *make("XLand-MiniGrid-R1-9x9"), measure=[-1])),
    "quantity": (ValueError, lambda t, h: h.values("beauty")), "quantity to sort by": (ValueError, lambda t, h: h.order("fit")), "one limit": (ValueError, lambda t, h: h.between(depth=2)),
    "limits crossed": (ValueError, lambda t, h: h.between(depth=(2, 1))), "limit of nothing": (ValueError, lambda t, h: h.between(size=(1, 2))),
    "no such row": (IndexError, lambda t, h: take(t, [300])), "row below": (IndexError, lambda t, h: take(t, [-1])), "half a row": (TypeError, lambda t, h: take(t, [0.5])),
    "one row": (TypeError, lambda t, h: take(t, 3)), "no curve": (ValueError, lambda t, h: difficulty_curve(h, {})), "short curve": (ValueError, lambda t, h: difficulty_curve(h, {"a": [1]}))}


def test_wrong_requests(tasks, hard):
    assert refusals({name: (lambda call=call: call(tasks, hard), error, ONE_SENTENCE) for name, (error, call) in WRONG.items()}) == {}
