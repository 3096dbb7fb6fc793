"""What is in benchmarks, and benchmarks without repetitions: against slow readings, spoiled files, and wrong input."""
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xland_minigrid.benchmarks.statistics as looking
from xland_minigrid.benchmarks import Benchmark, digest, generate_benchmark, load_benchmark
from xland_minigrid.benchmarks.generate import all_goals
from xland_minigrid.benchmarks.solve import prove
from xland_minigrid.benchmarks.splits import task_trees
from xland_minigrid.benchmarks.statistics import (
    benchmark_statistics, deduplicate, object_roles)
from xland_minigrid.core.actions import Actions
from xland_minigrid.core.goals import goal_kinds
from xland_minigrid.core.rules import OneTileRule, beside_agent, register_rule, rule_kinds
from xland_minigrid.core.tiles import TILE_NAMES

pytestmark = pytest.mark.newest

TWO_TILE_GOALS, TWO_TILE_RULES = {4, 7, 8, 9, 10}, {3, 4, 5, 6, 7}
MIRROR_GOAL, MIRROR_RULE = {4: 4, 7: 9, 9: 7, 8: 10, 10: 8}, {3: 3, 4: 6, 6: 4, 5: 7, 7: 5}


def bench_of(goals, rules, tiles):
    return Benchmark.from_arrays(*(np.asarray(a, np.uint8) for a in (goals, rules, tiles))).to_numpy()


def joined(*parts):
    return jax.tree.map(lambda *a: np.concatenate(a), *parts)


def same(x, y):
    return all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


@pytest.fixture(scope="module")
def bench():
    return generate_benchmark("medium", n=400, seed=2).to_numpy()


# ---------------------------------------------------------------- counting


def slow_statistics(bench):
    "Everything that is counted, one task and one rule at a time."
    counted = {name: Counter() for name in looking._COUNTED}
    trees = task_trees(bench.goals, bench.rules, bench.init_tiles)  # itself tested against a slow reading
    for i, (goal, rules, tiles) in enumerate(zip(bench.goals.tolist(), bench.rules.tolist(), bench.init_tiles.tolist())):
        rules = [(tuple(r), n in np.flatnonzero(trees.in_tree[i])) for n, r in enumerate(rules) if r[0]]
        tiles = [tuple(t) for t in tiles if t[0]]
        inputs = lambda r: {r[1:3]} | ({r[3:5]} if r[0] in TWO_TILE_RULES else set())
        wanted = {tuple(goal[1:3])} | ({tuple(goal[3:5])} if goal[0] in TWO_TILE_GOALS else set())
        needed = wanted.union(*(inputs(r) for r, in_tree in rules if in_tree))
        taken = set().union(*(inputs(r) for r, _ in rules))
        numbers = {"rules_per_task": len(rules), "depth": int(trees.depth[i]), "tree_rules": sum(t for _, t in rules), "distractor_rules": sum(not t for _, t in rules),
                   "objects": len(tiles), "needed_objects": sum(t in needed for t in tiles), "objects_of_distractor_rules": sum(t in taken - needed for t in tiles),
                   "distractor_objects": sum(t not in taken | needed for t in tiles), "goal_kinds": goal_kinds.classes[goal[0]].__name__}
        for name, value in numbers.items():
            counted[name][value] += 1
        for r, _ in rules:
            counted["rule_kinds"][rule_kinds.classes[r[0]].__name__] += 1
            counted["products"][TILE_NAMES[r[5] if r[0] in TWO_TILE_RULES else r[3]]] += 1
    return {name: dict(counter) for name, counter in counted.items()}


@pytest.mark.parametrize("preset", ["trivial", "small", "medium", "high"])
def test_statistics_against_a_slow_reading(preset, monkeypatch):
    monkeypatch.setattr(looking, "_PIECE", 64)
    bench = generate_benchmark(preset, n=150, seed=9, solvable=False).to_numpy()
    found, slow = benchmark_statistics(bench), slow_statistics(bench)
    for name, histogram in slow.items():
        assert found[name] == histogram, name
    assert (found["num_rulesets"], found["duplicates"], found["distinct_ruleset_ids"], found["not_canonical"]) == (150, 0, 150, 0)
    assert found["distinct_goal_ids"] == len(np.unique(bench.goal_ids())) and found["distinct_goals"] == len({g.tobytes() for g in bench.goals})
    assert found["nbytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(bench))
    json.dumps(found)
    roles = object_roles(bench.goals, bench.rules, bench.init_tiles)
    assert (roles.sum(axis=1) == (bench.init_tiles[..., 0] != 0).sum(axis=1)).all()


def test_pieces_change_nothing(bench, monkeypatch):
    whole = benchmark_statistics(bench)
    for piece, tasks in ((33, bench), (400, bench.to_device())):
        monkeypatch.setattr(looking, "_PIECE", piece)
        assert whole == benchmark_statistics(tasks)
    assert same(bench, generate_benchmark("medium", n=400, seed=2).to_numpy())  # nothing was written to


def test_repetitions_and_other_spellings_are_counted(bench, monkeypatch):
    monkeypatch.setattr(looking, "_PIECE", 50)
    twice = joined(bench, bench.take(np.arange(10)))
    twice.init_tiles[:5] = twice.init_tiles[:5, ::-1]
    found = benchmark_statistics(twice)
    assert (found["duplicates"], found["not_canonical"]) == (10, 5)


def test_depths_are_those_of_the_plans(bench):
    plans = prove(bench.goals, bench.rules, bench.init_tiles)
    assert (plans.depth == task_trees(bench.goals, bench.rules, bench.init_tiles).depth)[plans.solvable].all()


def test_registered_kinds_are_counted_by_name():
    @register_rule
    class Knock(OneTileRule):
        when, looks = (Actions.TOGGLE,), beside_agent()

    try:
        bench = generate_benchmark("small", n=200, rule_kinds=(1, Knock), solvable=False)
        assert set(benchmark_statistics(bench)["rule_kinds"]) == {"AgentHoldRule", "Knock"}
        again, merged = deduplicate(jax.tree.map(lambda a: a, bench).shuffle(jax.random.key(0)))
        assert len(again) == 200 and not len(merged.rows) and again.sets is not None
        strange = bench.to_numpy()
    finally:
        rule_kinds.remove(Knock.ID)
    with pytest.raises(ValueError, match="is not a rule"):
        benchmark_statistics(strange)


# ---------------------------------------------------------------- repetitions


def slow_key(goal, rules, tiles):
    "What a task is, by the book: one hashable thing, equal exactly for tasks that are the same."
    def spell(kind, a, b, mirror):
        return (kind, a, b) if kind not in mirror else min((kind, a, b), (mirror[kind], b, a), key=lambda x: (x[1:], x[0]))

    pair = lambda row, i: tuple(map(int, row[i:i + 2]))
    kind = int(goal[0])
    goal = (kind,) if kind == 0 else spell(kind, pair(goal, 1), pair(goal, 3), MIRROR_GOAL) if kind in TWO_TILE_GOALS else (kind, pair(goal, 1))
    read = []
    for r in rules:
        if int(r[0]) in TWO_TILE_RULES:
            read.append((spell(int(r[0]), pair(r, 1), pair(r, 3), MIRROR_RULE), pair(r, 5)))
        elif r[0]:
            read.append(((int(r[0]), pair(r, 1)), pair(r, 3)))
    matters = any(set(x[0][1:]) & {*y[0][1:], y[1]} or x[1] in y[0][1:] for i, x in enumerate(read) for y in read[:i])
    return goal, tuple(read if matters else sorted(read, key=repr)), tuple(sorted(pair(t, 0) for t in tiles if t[0]))


def respell(goal, rules, tiles, rng):
    "The same task in another spelling: a goal (5,), rules (R, 7), tiles (N, 2)."
    goal, rules, tiles = goal.copy(), rules.copy(), rng.permutation(tiles)
    if goal[0] in MIRROR_GOAL and rng.random() < 0.5:
        goal[:] = MIRROR_GOAL[goal[0]], *goal[3:5], *goal[1:3]
    elif goal[0] not in TWO_TILE_GOALS and rng.random() < 0.5:
        goal[3:] = rng.integers(0, 16, 2)
    for r in rules:
        if r[0] in MIRROR_RULE and rng.random() < 0.5:
            r[:5] = MIRROR_RULE[r[0]], *r[3:5], *r[1:3]
        elif r[0] and r[0] not in TWO_TILE_RULES and rng.random() < 0.5:
            r[5:] = rng.integers(0, 16, 2)
    for _ in range(8):  # any order of rules that leaves the task what it is
        order = rng.permutation(len(rules))
        if slow_key(goal, rules[order], tiles) == slow_key(goal, rules, tiles):
            return goal, rules[order], tiles
    return goal, rules, tiles


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["trivial", "small", "medium"]))
def test_respelled_tasks_are_merged_and_no_others(seed, preset):
    rng = np.random.default_rng(seed)
    bench = prepared(preset)
    source = np.concatenate([rng.choice(60, 25, replace=False), rng.integers(0, 60, 40)])
    arrays = zip(*(respell(bench.goals[i], bench.rules[i], bench.init_tiles[i], rng) for i in source))
    spoiled = bench_of(*map(np.stack, arrays))
    clean, merged = deduplicate(spoiled)
    first = {int(s): row for row, s in reversed(list(enumerate(source)))}
    kept = sorted(first.values())
    assert same(clean, spoiled.take(np.array(kept)))
    assert merged.rows.tolist() == [row for row in range(65) if row not in kept] and merged.first.tolist() == [first[int(source[row])] for row in merged.rows]
    assert (merged.before, merged.after) == (65, len(kept)) and len(merged.rows) == 65 - len(kept)
    assert deduplicate(clean)[1].rows.size == 0


_prepared = {}


def prepared(preset):
    if preset not in _prepared:
        _prepared[preset] = generate_benchmark(preset, n=60, seed=4, solvable=False).to_numpy()
    return _prepared[preset]


TILE = st.sampled_from([(4, 2), (5, 3), (6, 4)])  # so few that equal tasks and near misses are common
RULE = st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 10]), TILE, TILE, TILE).map(lambda r: [r[0], *r[1], *r[2], *r[3]])
TASK = st.tuples(st.tuples(st.sampled_from([1, 4, 7, 8, 9, 10, 12]), TILE, TILE).map(lambda g: [g[0], *g[1], *g[2]]), st.lists(RULE, min_size=2, max_size=2),
                 st.lists(st.one_of(TILE, st.just((0, 0))), min_size=2, max_size=2))


@settings(max_examples=50)
@given(st.lists(TASK, min_size=2, max_size=40))
def test_merging_is_by_the_book(tasks):
    bench = bench_of(*([task[i] for task in tasks] for i in range(3)))
    keys = [slow_key(*task) for task in zip(bench.goals, bench.rules, bench.init_tiles)]
    for by, cut in (("ruleset_id", 3), ("goal_id", 2)):
        first = {}
        for row, key in enumerate(keys):
            first.setdefault(key[:cut], row)
        merged = deduplicate(bench, by=by)[1]
        assert dict(zip(merged.rows.tolist(), merged.first.tolist())) == {row: first[key[:cut]] for row, key in enumerate(keys) if first[key[:cut]] != row}


def test_a_chain_of_rules_keeps_its_order():
    first, second = [2, 4, 2, 5, 3, 0, 0], [2, 5, 3, 6, 4, 0, 0]  # ball -> square -> pyramid: the other way round it takes two steps
    bench = bench_of([[3, 6, 4, 0, 0]] * 2, [[first, second], [second, first]], [[(4, 2)]] * 2)
    assert len(deduplicate(bench)[0]) == 2


def test_the_goals_of_xminigrid():
    held, near = all_goals((1,))[1].tolist(), all_goals((3,))[1].tolist()
    tile = lambda code: (code >> 4, code & 15)
    goals = [[1, *tile(a), 0, 0] for a in held] + [[k, *tile(a), 0, 0] for k in (3, 11, 12, 13, 14) for a in near]
    goals += [[k, *tile(a), *tile(b)] for k in (4, 7, 8, 9, 10) for a in near for b in held]
    n = len(goals)
    clean, merged = deduplicate(bench_of(goals, np.zeros((n, 1, 7)), np.zeros((n, 1, 2))))
    assert (n, len(clean), len(merged.rows)) == (21_410, 12_440, 8_970)
    assert len({slow_key(g, [], [])[0] for g in np.array(goals)}) == 12_440 and len(all_goals()[0]) == 12_260


def test_generated_benchmarks_have_nothing_to_merge(bench):
    for preset in ("trivial", "high"):
        made = generate_benchmark(preset, n=300, solvable=False)
        clean, merged = deduplicate(made)
        assert digest(clean) == digest(made) and isinstance(clean.goals, jnp.ndarray) and not len(merged.rows) and "0 merged." in repr(merged)
    trivial, merged = deduplicate(generate_benchmark("trivial", n=600), by="goal_id")
    assert len(merged.rows) == 600 - len(trivial) and len(np.unique(trivial.goal_ids())) == len(trivial) < 600


def test_odd_shapes():
    none = bench_of(np.zeros((0, 5)), np.zeros((0, 1, 7)), np.zeros((0, 1, 2)))
    assert len(deduplicate(none)[0]) == 0
    bare = Benchmark(*(np.zeros(s, np.uint8) for s in ((3, 5), (3, 0, 7), (3, 0, 2), (3,))))
    clean, merged = deduplicate(bare)
    assert len(clean) == 1 and merged.first.tolist() == [0, 0]
    assert benchmark_statistics(bare)["depth"] == {0: 3}


def test_refusals(bench):
    with pytest.raises(ValueError, match="'ruleset_id'"):
        deduplicate(bench, by="goal")
    with pytest.raises(ValueError, match="empty"):
        benchmark_statistics(bench.take(np.arange(0)))
    composed = bench.replace(goals=np.full_like(bench.goals, 255))
    with pytest.raises(ValueError, match="composed goal"):
        benchmark_statistics(composed)


# ---------------------------------------------------------------- whole benchmarks


@pytest.mark.slow
@pytest.mark.parametrize("preset, n", [("trivial", 1_000_000), ("high", 250_000)])  # that all tasks of high-1m differ, test_benchmarks says
def test_a_whole_benchmark_repeats_nothing(preset, n):
    bench = load_benchmark(f"{preset}-1m", as_numpy=True, progress=False).take(np.arange(n))
    found = benchmark_statistics(bench)
    assert (found["num_rulesets"], found["duplicates"], found["not_canonical"], found["distinct_ruleset_ids"]) == (n, 0, 0, n)
    assert "none" not in found["depth"] and found["distinct_goals"] <= 12_260
    assert max(found["rules_per_task"]) <= 18 and max(found["depth"]) == {"trivial": 0, "high": 3}[preset]
    assert len({(g.tobytes(), r.tobytes(), t.tobytes()) for g, r, t in zip(bench.goals[:200_000], bench.rules[:200_000], bench.init_tiles[:200_000])}) == 200_000
    clean, merged = deduplicate(bench)
    assert len(clean) == n and not len(merged.rows)
