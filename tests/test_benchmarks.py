"""Tasks and benchmarks: what the generator promises, the identities, the files, and wrong input at every door."""
import json
import pickle
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xland_minigrid.benchmarks.benchmark as together
import xland_minigrid.benchmarks.registry as keeping
import xland_minigrid.benchmarks.files as files
import xland_minigrid.benchmarks.generate as making
from xland_minigrid.benchmarks import (
    GOAL_KINDS, PRESETS, RULE_KINDS, Benchmark, BenchmarkFileError, Recipe, benchmark_file, benchmark_info, canonical,
    data_folder, digest, generate_benchmark, generate_rulesets, identities, load_benchmark, load_benchmark_from_path,
    max_init_tiles, max_rules, recipe_of, registered_benchmarks)
from xland_minigrid.core.tiles import PICKABLE, Colors, Tiles
from worlds import refusals

pytestmark = pytest.mark.newest

TWO_TILE_GOALS, TWO_TILE_RULES = {4, 7, 8, 9, 10}, {3, 4, 5, 6, 7}
FLOOR = (Tiles.FLOOR, Colors.BLACK)
RULE_OF_GOAL = dict(zip(GOAL_KINDS, RULE_KINDS))
VARIANTS = {
    **{name: recipe_of(name, solvable=False) for name in PRESETS},  # the proof, a program for each shape, only leaves tasks out
    "full": recipe_of("medium", solvable=False, prune_chain=False, sample_distractor_rules=False),
    "drawn depth": recipe_of("high", solvable=False, sample_depth=True, num_distractor_objects=4),
    "hold": recipe_of("small", solvable=False, goal_kinds=(1,), rule_kinds=(1, 2), num_distractor_objects=5),
    "crowded": recipe_of("high", solvable=False, num_distractor_rules=12, num_distractor_objects=6, sample_distractor_rules=False),
    "even": recipe_of("small", solvable=False, even_goals=True),
    "deep": recipe_of("high", solvable=False, chain_depth=5, prune_prob=0.15),  # many candidates run out of objects
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "data"))


@pytest.fixture
def tiny(monkeypatch):
    "A registered benchmark small enough for tests."
    expected = digest(generate_benchmark("small", n=300))
    monkeypatch.setitem(keeping._REGISTERED, "tiny", keeping._Named("small", 300, {}, expected))
    return expected


@pytest.fixture(scope="module")
def bench():
    return generate_benchmark("medium", n=400, seed=1)


# ---------------------------------------------------------------- the generator, against a slow reading of the paper


def read_goal(row):
    kind, *rest = map(int, row)
    return kind, [(rest[0], rest[1])] + ([(rest[2], rest[3])] if kind in TWO_TILE_GOALS else [])


def read_rule(row):
    kind, *rest = map(int, row)
    pairs = [tuple(rest[i:i + 2]) for i in (0, 2, 4)]
    return (kind, pairs[:2], pairs[2]) if kind in TWO_TILE_RULES else (kind, pairs[:1], pairs[1])


def check_task(recipe, goal, rules, init_tiles, num_rules):
    "One task, taken apart rule by rule."
    kind, wanted = read_goal(goal)
    rows = [read_rule(r) for r in rules if r.any()]
    placed = [tuple(map(int, t)) for t in init_tiles if t.any()]
    assert len(rows) == num_rules and not rules[num_rules:].any() and not init_tiles[len(placed):].any()
    assert kind in recipe.goal_kinds and all(k in recipe.rule_kinds for k, _, _ in rows)

    # Which objects may stand where.
    assert kind != 1 or wanted[0][0] in PICKABLE
    for inputs, spelled in [(wanted, kind in TWO_TILE_GOALS)] + [(i, True) for _, i, _ in rows]:
        assert sum(t == Tiles.GOAL for t, _ in inputs) <= (len(inputs) - 1 if spelled else 1)
        assert inputs == sorted(set(inputs)) and all(t in PICKABLE or t == Tiles.GOAL for t, _ in inputs)

    # The main tree: follow what is wanted to what produces it.
    producer = {product: (k, inputs) for k, inputs, product in rows if product != FLOOR}
    assert len(producer) == sum(product != FLOOR for _, _, product in rows)
    tree_objects, tree_rules, leaves, level = list(wanted), 0, [], wanted
    for depth in range(recipe.chain_depth + 1):
        below = []
        for thing in level:
            if thing in producer:
                assert depth < recipe.chain_depth
                below += producer[thing][1]
                tree_rules += 1
            else:
                leaves.append((thing, depth))
        tree_objects += below
        level = below
    assert not level and len(set(tree_objects)) == len(tree_objects)
    if not recipe.prune_chain and not recipe.sample_depth:
        assert all(depth == recipe.chain_depth for _, depth in leaves)

    # Distractors: what is left.
    spoilers = [(inputs, product) for k, inputs, product in rows if product == FLOOR or product not in tree_objects]
    assert len(spoilers) == len(rows) - tree_rules
    if recipe.sample_distractor_rules:
        assert len(spoilers) <= recipe.num_distractor_rules
    else:
        assert len(spoilers) == recipe.num_distractor_rules
    all_inputs = {t for _, inputs, _ in rows for t in inputs}
    for _, product in spoilers:
        assert product not in placed and product not in all_inputs and (product == FLOOR or product[0] in PICKABLE)

    # Every object once; every input placed or produced; exactly so many objects that nothing uses.
    assert placed == sorted(set(placed))
    fresh = {t for inputs, _ in spoilers for t in inputs} - set(tree_objects)
    idle = set(placed) - {t for t, _ in leaves} - fresh
    assert len(idle) == recipe.num_distractor_objects and not idle & (all_inputs | set(wanted) | set(producer))
    assert {t for t, _ in leaves} | fresh | idle == set(placed)

    # No two rules on one event, none that forestalls the goal.
    events = [(k, tuple(inputs)) for k, inputs, _ in rows]
    assert len(set(events)) == len(events) and (RULE_OF_GOAL[kind], tuple(wanted)) not in events
    assert kind not in TWO_TILE_GOALS or (3, tuple(wanted)) not in events


@pytest.mark.parametrize("name", VARIANTS)
def test_every_task_is_as_the_paper_says(name):
    recipe = VARIANTS[name]
    made = generate_rulesets(recipe, 600)
    assert made.rules.shape == (600, max_rules(recipe), 7) and made.init_tiles.shape == (600, max_init_tiles(recipe), 2)
    for goal, rules, init_tiles, num_rules in zip(*made[:4]):
        check_task(recipe, goal, rules, init_tiles, num_rules)
    assert len(np.unique(made.ruleset_ids)) == 600


def test_the_checker_notices(bench):
    "A broken task fails the check above: a leaf missing, an object doubled, a useful distractor."
    recipe, made = PRESETS["medium"], generate_rulesets(PRESETS["medium"], 50)
    task = [a[next(i for i in range(50) if made.num_rules[i] > 4)] for a in made[:4]]
    check_task(recipe, *task)
    goal, rules, tiles, count = task
    for broken in ((goal, rules, np.concatenate([tiles[1:], tiles[:1] * 0]), count),
                   (goal, rules, np.concatenate([tiles[:1], tiles[:-1]]), count),
                   (goal, np.concatenate([rules[1:2], rules[1:]]), tiles, count)):
        with pytest.raises(AssertionError):
            check_task(recipe, *broken)


def slow_number_of_rules(recipe, rng):
    "How many rules one task has, by the procedure of Section 3 in plain Python (objects play no part in this)."
    def grow(level):
        if level == recipe.chain_depth or (recipe.prune_chain and rng.random() < recipe.prune_prob):
            return 0
        return 1 + sum(grow(level + 1) for _ in range(2 if rng.choice(RULE_KINDS) in TWO_TILE_RULES else 1))
    tree = sum(grow(0) for _ in range(2 if rng.choice(GOAL_KINDS) in TWO_TILE_GOALS else 1))
    return tree + rng.randint(0, recipe.num_distractor_rules)


@pytest.mark.parametrize("name", ["small", "medium", "high"])
def test_number_of_rules_is_distributed_as_in_plain_python(name):
    recipe, n = PRESETS[name], 40_000
    rng, width = random.Random(0), max_rules(PRESETS[name]) + 1
    slow = np.bincount([slow_number_of_rules(recipe, rng) for _ in range(n)], minlength=width) / n
    made, sound = making._chunk(recipe, 0, n)
    fast = np.bincount(made.num_rules[sound], minlength=width) / n
    assert np.abs(slow - fast).max() < 0.012 and sound.mean() > 0.97


def test_kinds_and_objects_are_uniform():
    made, _ = making._chunk(PRESETS["small"], 0, 66_000)
    kinds = np.bincount(made.goals[:, 0], minlength=15)[list(GOAL_KINDS)]
    assert np.abs(kinds / 6_000 - 1).max() < 0.05
    held = made.goals[made.goals[:, 0] == 1][:, 1:3]
    assert len(np.unique(held, axis=0)) == 60
    assert np.unique(held, axis=0, return_counts=True)[1].min() > 60
    rule_kinds = np.bincount(made.rules[..., 0].ravel(), minlength=12)[1:]
    assert np.abs(rule_kinds / rule_kinds.mean() - 1).max() < 0.04


def test_patches_are_drawn_like_any_other_object():
    "A held goal leaves 59 carried objects and 10 patches: distractor objects and first inputs are uniform over them."
    crowd = recipe_of("trivial", goal_kinds=(1,), num_distractor_objects=32)
    patches = (making._chunk(crowd, 0, 5_000)[0].init_tiles[..., 0] == Tiles.GOAL).sum(1)
    assert abs(patches.mean() - 32 * 10 / 69) < 0.08
    spoiler = recipe_of("trivial", goal_kinds=(1,), rule_kinds=(3,), num_distractor_objects=0, num_distractor_rules=1)
    rules = making._chunk(spoiler, 0, 20_000)[0].rules[:, 0]
    assert abs((rules[:, [1, 3]] == Tiles.GOAL).any(1).mean() - 10 / 69) < 0.01
    assert 0.01 < (rules[:, 5] == Tiles.FLOOR).mean() < 0.025  # one product in sixty


def test_distractor_rules_use_the_tree_as_well_as_other_objects():
    recipe = recipe_of("high", prune_chain=False, num_distractor_rules=1, sample_distractor_rules=False)
    made, sound = making._chunk(recipe, 0, 4_000)
    leaves_only, _ = making._chunk(recipe_of("high", prune_chain=False, num_distractor_rules=0), 0, 4_000)
    extra = (made.init_tiles[..., 0] > 0).sum(1).astype(int) - (leaves_only.init_tiles[..., 0] > 0).sum(1)
    assert set(extra[sound]) == {0, 1, 2}  # inputs that the tree did not have
    assert 0.1 < (extra[sound] == 0).mean() < 0.5


# ---------------------------------------------------------------- the same everywhere

PINNED = {
    "trivial": "83427020386bcb4811d0589e1284490c", "small": "d8cef41a930c5e2df7bad980cc3612ac", "medium": "838ec8bc9ef8862bb450a0522fdc1258", "high": "29bce15a186a89d4cf222ebbd3ff1bec",
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned(name):
    assert digest(generate_benchmark(name, n=500)) == PINNED[name]


def test_trivial_21k_is_the_pinned_one():
    assert len(load_benchmark("trivial-21k", progress=False)) == 21_000  # raises unless the digest is that in the table


def same(one, two):
    return all((a == b).all() for a, b in zip(one, two))


def test_chunks_threads_and_length_do_not_matter(monkeypatch):
    recipe = PRESETS["high"]
    whole = generate_rulesets(recipe, 700, workers=1)
    monkeypatch.setattr(making, "_CHUNK", 37)
    assert same(generate_rulesets(recipe, 700, workers=3), whole)
    assert same(generate_rulesets(recipe, 200), [a[:200] for a in whole])


def test_seeds_differ_and_repeat():
    one, two, again = (generate_benchmark("small", n=200, seed=s) for s in (3, 4, 3))
    assert digest(one) == digest(again) != digest(two)
    assert digest(generate_benchmark("small", n=200)) == digest(generate_benchmark("small", n=200, seed=42))
    generate_benchmark("trivial", n=5, seed=2**64 - 1)


def test_repetitions_are_dropped_and_the_first_kept():
    recipe = Recipe(goal_kinds=(1, 3), num_distractor_objects=1)  # 130 goals × 69 objects
    made = generate_rulesets(recipe, 5_000)
    candidates, sound = making._chunk(recipe, 0, 20_000)
    _, first = np.unique(candidates.ruleset_ids, return_index=True)
    first = np.sort(first)[:5_000]
    assert sound.all() and first[-1] > 5_100  # there were repetitions
    assert same(made, [a[first] for a in candidates])


def test_all_there_is_can_be_had():
    assert len(np.unique(generate_rulesets(Recipe(goal_kinds=(1, 4)), 2_430).ruleset_ids)) == 60 + 2_370
    with pytest.raises(ValueError, match="found only 2,430"):
        generate_rulesets(Recipe(goal_kinds=(1, 4)), 2_431)


def test_more_objects_than_there_are_is_said_not_tried_for_ever():
    with pytest.raises(ValueError, match="found only 0"):
        generate_benchmark("high", n=20, chain_depth=5, prune_chain=False, goal_kinds=(4,), rule_kinds=(3, 4))


def test_exactly_the_hopeless_candidates_are_thrown_away():
    "Goals on one side of a pair against distractors on any side of it: hopeless are equal pairs, and rules on one event."
    recipe = recipe_of("trivial", goal_kinds=(7,), rule_kinds=(3,), num_distractor_rules=12)
    made, sound = making._chunk(recipe, 0, 4_000)
    forestalled = (made.rules[:, :, 1:5] == made.goals[:, None, 1:5]).all(-1).any(1)
    doubled = np.array([len(np.unique(r[:, :5], axis=0)) < 12 for r in made.rules])
    assert forestalled.sum() > 5 and doubled.sum() > 20
    assert (sound == ~(forestalled | doubled)).all()


def test_even_goals_come_in_turn():
    goals = generate_rulesets(recipe_of("trivial", even_goals=True, goal_kinds=(1,)), 150).goals
    assert len(np.unique(goals[:60], axis=0)) == 60 and (goals[:60] == goals[60:120]).all()


# ---------------------------------------------------------------- one spelling, two identities


def respelled(goals, rules, init_tiles, rng):
    "The same tasks written differently: pairs and their directions swapped, objects and free rules permuted."
    goals, rules, init_tiles = goals.copy(), rules.copy(), init_tiles.copy()
    for i in range(len(goals)):
        for row, mirror in [(goals[i], {4: 4, 7: 9, 8: 10, 9: 7, 10: 8})] + [(r, {3: 3, 4: 6, 5: 7, 6: 4, 7: 5}) for r in rules[i]]:
            if int(row[0]) in mirror and rng.random() < 0.5:
                row[:5] = [mirror[int(row[0])], *row[3:5], *row[1:3]]
        rng.shuffle(init_tiles[i])
        if not making.order_matters(making._to_words(rules[i:i + 1])).any():
            rng.shuffle(rules[i])
    return goals, rules, init_tiles


@pytest.mark.parametrize("name", ["trivial", "small", "medium"])
def test_disguises_are_seen_through(name):
    made = generate_rulesets(PRESETS[name], 300)
    disguised = respelled(*made[:3], np.random.default_rng(0))
    assert not same(disguised, made[:3])
    assert same(canonical(*disguised), made[:3]) and same(identities(*disguised), made[4:])


def test_generated_tasks_are_canonical_already():
    for recipe in VARIANTS.values():
        made = generate_rulesets(recipe, 100)
        assert same(canonical(*made[:3]), made[:3]) and same(identities(*made[:3]), made[4:])


def test_order_is_kept_where_it_matters():
    goal = np.array([[1, Tiles.STAR, Colors.RED, 0, 0]], np.uint8)
    first = [1, Tiles.STAR, Colors.BLUE, Tiles.BALL, Colors.RED, 0, 0]
    feeds = [1, Tiles.BALL, Colors.RED, Tiles.STAR, Colors.RED, 0, 0]
    rival = [2, Tiles.STAR, Colors.BLUE, Tiles.KEY, Colors.RED, 0, 0]
    alien = [200, Tiles.HEX, Colors.PINK, 1, 2, 3, 4]
    alone = [2, Tiles.HEX, Colors.PINK, Tiles.KEY, Colors.RED, 0, 0]
    tiles = np.array([[[Tiles.STAR, Colors.BLUE]]], np.uint8)
    goal_id = lambda *rules: identities(goal, np.array([rules], np.uint8), tiles)[1][0]
    for other in (feeds, rival, alien):
        assert goal_id(first, other) != goal_id(other, first)
    assert goal_id(first, alone) == goal_id(alone, first) == goal_id([0] * 7, first, [0, 9, 9, 9, 9, 9, 9], alone)
    kept = canonical(goal, np.array([[first, alien]], np.uint8), tiles)[1]
    assert kept.tolist() == [[first, alien]]


def test_identities_tell_tasks_apart_but_not_padding(bench):
    ids = identities(bench.goals, bench.rules, bench.init_tiles)
    wide = bench.pad_to(rules=24, tiles=31)
    assert same(identities(wide.goals, wide.rules, wide.init_tiles), ids)
    other = np.array(bench.init_tiles)
    other[:, 0] = [Tiles.DOOR_OPEN, Colors.RED]
    changed = identities(bench.goals, bench.rules, other)
    assert (changed[1] == ids[1]).all() and (changed[0] != ids[0]).all()
    goals = np.array(bench.goals)
    goals[:, 0] = 5
    assert (identities(goals, bench.rules, bench.init_tiles)[1] != ids[1]).all()


def test_equal_pairs_and_unused_bytes():
    tile = [Tiles.BALL, Colors.RED]
    none = np.zeros((2, 1, 7), np.uint8), np.zeros((2, 1, 2), np.uint8)
    assert canonical([[9, *tile, *tile], [7, *tile, *tile]], *none)[0].tolist() == [[7, *tile, *tile]] * 2
    assert canonical([[1, *tile, 9, 9], [5, 20, 30, 9, 9]], *none)[0].tolist() == [[1, *tile, 0, 0], [5, 20, 30, 0, 0]]


# ---------------------------------------------------------------- the benchmark


def test_get_and_sample_alone_in_a_batch_and_compiled(bench):
    rows = [np.asarray(x) for x in (bench.goals, bench.rules, bench.init_tiles)]
    arrays = lambda rulesets: (rulesets.goal, rulesets.rules, rulesets.init_tiles)
    alone = [bench.sample_ruleset(k) for k in jax.random.split(jax.random.key(0), 20)]
    expected = [np.stack([np.asarray(x) for x in column]) for column in zip(*map(arrays, alone))]
    assert len(np.unique(expected[1], axis=0)) > 15
    for place in (bench, bench.to_numpy()):
        for get in (place.get_ruleset, jax.jit(place.get_ruleset)):
            for i in (0, 7, 399):
                got = get(i)
                assert same(arrays(got), [x[i] for x in rows]) and got.rules.dtype == jnp.uint8
        assert same((place.get_ruleset(-1).rules,), (rows[1][399],))
        for make_key in (jax.random.key, jax.random.PRNGKey):
            assert same(arrays(jax.jit(lambda b, k: jax.vmap(b.sample_ruleset)(k))(place, jax.random.split(make_key(0), 20))), expected)
    assert same(arrays(jax.vmap(bench.sample_ruleset)(jax.random.split(jax.random.key(0), 20))), expected)


def test_get_refuses(bench):
    wrong = {400: IndexError, -401: IndexError, 1.0: TypeError, (1, 2): TypeError, None: TypeError, True: TypeError}
    assert refusals({repr(number): (lambda number=number: bench.get_ruleset(number), error, r"\.$") for number, error in wrong.items()}) == {}


def test_one_program_serves_all_benchmarks():
    traces = []

    @jax.jit
    def sample(bench, key):
        traces.append(1)
        return bench.sample_ruleset(key)

    for name in PRESETS:
        wide = generate_benchmark(name, n=64, solvable=False).pad_to(rules=18, tiles=25)
        assert sample(wide, jax.random.key(0)).rules.shape == (18, 7)
    assert len(traces) == 1


def test_shuffle_and_split(bench):
    mixed = bench.shuffle(jax.random.key(3))
    assert set(mixed.ruleset_ids()) == set(bench.ruleset_ids()) and (mixed.ruleset_ids() != bench.ruleset_ids()).any()
    first, rest = mixed.split(0.3)
    assert (len(first), len(rest)) == (120, 280)
    assert np.concatenate([first.ruleset_ids(), rest.ruleset_ids()]).tolist() == mixed.ruleset_ids().tolist()
    for prop in (0, 1, 0.0, 1.0):
        assert sorted(map(len, bench.split(prop))) == [0, 400]
    assert digest(bench.to_numpy().shuffle(jax.random.key(3))) == digest(mixed)


@pytest.mark.parametrize("group", ["goal_id", "goal"])
def test_a_split_by_groups_shares_nothing(group):
    by = dict(by="random", group=group)
    bench = generate_benchmark("trivial", n=3_000).to_numpy().shuffle(jax.random.key(0))
    train, test = bench.split(0.7, **by)
    assert not np.intersect1d(train.goal_ids(), test.goal_ids()).size
    assert not {g.tobytes() for g in np.asarray(train.goals)} & {g.tobytes() for g in np.asarray(test.goals)}
    assert abs(len(train) / 3_000 - 0.7) < 0.03 and len(train) + len(test) == 3_000
    assert list(map(len, bench.split(1.0, **by))) == [3_000, 0]
    kept = set(train.ruleset_ids().tolist())
    assert train.ruleset_ids().tolist() == [i for i in bench.ruleset_ids().tolist() if i in kept]
    plain = bench.split(0.7)
    assert np.intersect1d(plain[0].goal_ids(), plain[1].goal_ids()).size


def test_a_split_by_goal_holds_out_goals_whatever_their_rules():
    train, test = generate_benchmark("small", n=2_000, goal_kinds=(1,), solvable=False).to_numpy().split(0.5, by="random", group="goal")
    goals = lambda b: {g.tobytes() for g in np.asarray(b.goals)}
    assert not goals(train) & goals(test) and len(goals(train)) > 10 and len(goals(test)) > 10


def test_filter_split(bench):
    yes, no = bench.filter_split(lambda goal, rules: (rules[:, 0] == 3).any() & (goal[0] != 1))
    wanted = np.array([(r[:, 0] == 3).any() and g[0] != 1 for g, r in zip(np.asarray(bench.goals), np.asarray(bench.rules))])
    assert 0 < wanted.sum() < 400
    assert yes.ruleset_ids().tolist() == bench.ruleset_ids()[wanted].tolist()
    assert no.ruleset_ids().tolist() == bench.ruleset_ids()[~wanted].tolist()


def test_splitting_refuses(bench):
    for prop in (-0.1, 1.1):
        with pytest.raises(ValueError, match="from 0 to 1"):
            bench.split(prop)
    with pytest.raises(ValueError, match="choose one of random, hash"):
        bench.split(0.5, by="flavour")
    for wrong in (dict(prop=0.5, by="colour"), dict(prop=0.5, seed=3), dict(by="goal_kind", tests=(1,))):
        with pytest.raises(TypeError):
            bench.split(**wrong)
    for prop in (None, True, "half"):
        with pytest.raises(ValueError, match="from 0 to 1"):
            bench.split(prop)
    for fn in (lambda goal, rules: goal, lambda goal, rules: goal[0]):
        with pytest.raises(TypeError, match="one bool per task"):
            bench.filter_split(fn)
    with pytest.raises(ValueError, match="empty"):
        bench.split(0.0)[0].sample_ruleset(jax.random.key(0))


def test_padding_widens_and_narrows_without_loss(bench):
    wide = bench.pad_to(rules=20, tiles=30)
    assert wide.rules.shape == (400, 20, 7) and wide.init_tiles.shape == (400, 30, 2)
    assert digest(wide.pad_to(rules=9, tiles=16)) == digest(bench)
    with pytest.raises(ValueError, match="rules needs 9"):
        wide.pad_to(rules=8)
    with pytest.raises(ValueError, match="init_tiles needs"):
        wide.pad_to(tiles=2)


def test_from_arrays(bench):
    again = Benchmark.from_arrays(*(np.asarray(a, np.int64) for a in (bench.goals, bench.rules, bench.init_tiles)))
    assert digest(again) == digest(bench) and again.goals.dtype == jnp.uint8
    good = [np.array(a) for a in (bench.goals, bench.rules, bench.init_tiles)]
    for i, wrong in [(0, good[0][:, :4]), (0, good[0][:5]), (1, good[1][..., :6]), (1, good[1][0]), (2, good[2][..., :1]), (0, good[0] * 1.0),
                     (0, good[0].astype(int) - 1), (0, good[0].astype(int) + 256), (1, good[1] + 16), (2, good[2] + 16)]:
        with pytest.raises(ValueError):
            Benchmark.from_arrays(*(wrong if i == j else part for j, part in enumerate(good)))


@pytest.mark.slow


@pytest.mark.optimized
def test_it_behaves_like_the_one_of_xminigrid(bench):
    theirs = pytest.importorskip("xminigrid.benchmarks").Benchmark(bench.goals, bench.rules, bench.init_tiles, bench.num_rules)
    key = jax.random.key(5)
    arrays = lambda b: (b.goals, b.rules, b.init_tiles, b.num_rules)
    assert same(arrays(bench.shuffle(key)), arrays(theirs.shuffle(key)))
    for mine, yours in zip(bench.split(0.37), theirs.split(0.37)):
        assert same(arrays(mine), arrays(yours))
    for mine, yours in zip(*(b.filter_split(lambda g, r: g[0] > 4) for b in (bench, theirs))):
        assert same(arrays(mine), arrays(yours))
    assert (bench.sample_ruleset(key).rules == theirs.sample_ruleset(key).rules).all()


def test_it_shows_itself(bench):
    assert repr(bench).startswith("Benchmark(400 rulesets, up to 9 rules and 16 objects")
    assert "<svg" in bench._repr_html_() and "rules per task" in bench._repr_html_()
    assert "0 rulesets" in bench.split(0.0)[0]._repr_html_()
    assert "Benchmark(" in repr(jax.tree.map(lambda leaf: None, bench))


# ---------------------------------------------------------------- files


def test_save_and_load(bench, tmp_path):
    path = bench.save(tmp_path / "deep" / "er" / "mine.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["mine.safetensors"]
    for options in ({}, {"as_numpy": True}):
        again = load_benchmark_from_path(str(path), **options)
        assert digest(again) == digest(bench)
        assert all(isinstance(leaf, np.ndarray if "as_numpy" in options else jax.Array) for leaf in jax.tree.leaves(again))
    bench.split(0.0)[0].save(path)
    assert len(load_benchmark_from_path(path)) == 0


def test_damage_is_noticed(bench, tmp_path):
    path = bench.save(tmp_path / "file")
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 5), header, header + 1, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1:])
        with pytest.raises(BenchmarkFileError):
            load_benchmark_from_path(path)
    for length in (0, 1, 7, 8, 100, header, header + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BenchmarkFileError):
            load_benchmark_from_path(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(BenchmarkFileError):
        load_benchmark_from_path(path)


def test_strangers_are_refused(bench, tmp_path):
    from safetensors.numpy import save_file
    (tmp_path / "pickle").write_bytes(pickle.dumps({"goals": 1}))
    (tmp_path / "bz2").write_bytes(b"BZh91AY&SY...")
    (tmp_path / "text").write_text("goals: 1")
    save_file({"goals": np.zeros(3)}, tmp_path / "other")
    arrays = {name: np.asarray(getattr(bench, name)) for name in files.FIELDS}
    newer = json.dumps({"format_version": 99, "digest": digest(bench)})
    save_file(arrays, tmp_path / "newer", metadata={"benchmark": newer, "benchmark_digest": files.blake(newer.encode())})
    save_file(arrays, tmp_path / "bare", metadata={"benchmark": "[]"})
    for name, says in [("pickle", "ickle"), ("bz2", "ickle"), ("text", "damaged"), ("other", "other arrays"),
                       ("newer", "update"), ("bare", "damaged")]:
        for load in (load_benchmark_from_path, benchmark_info):
            with pytest.raises(BenchmarkFileError, match=says):
                load(tmp_path / name)
    for name in ("nowhere", "."):
        with pytest.raises(FileNotFoundError, match="no file"):
            load_benchmark_from_path(tmp_path / name)


# ---------------------------------------------------------------- the named ones


def test_names():
    assert registered_benchmarks() == ("trivial-1m", "small-1m", "medium-1m", "medium-3m", "high-1m", "high-3m", "trivial-21k", "probes-30")
    for ask in (load_benchmark, benchmark_file):
        with pytest.raises(ValueError, match="trivial-1m, small-1m, medium-1m"):
            ask("huge-1t")
    assert not data_folder().exists()  # asking wrote nothing


def test_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLAND_MINIGRID_DATA", "~/somewhere")
    assert data_folder().is_absolute() and data_folder().name == "somewhere"
    monkeypatch.delenv("XLAND_MINIGRID_DATA")
    import platformdirs
    assert str(data_folder()) == platformdirs.user_cache_dir("xland_minigrid", appauthor=False)


def test_made_once_then_read(tiny, monkeypatch):
    assert digest(load_benchmark("tiny", progress=False)) == tiny
    monkeypatch.setattr(keeping, "generate_rulesets", None)  # whoever makes it again fails
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digest(load_benchmark("tiny", progress=False)) == tiny
    assert [p.name for p in data_folder().iterdir()] == [benchmark_file("tiny").name]


def test_a_bar_is_shown_while_making(tiny, capfd):
    load_benchmark("tiny")
    assert "making tiny" in capfd.readouterr().err
    load_benchmark("tiny")
    assert not capfd.readouterr().err


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_file_is_made_anew(tiny, damage):
    load_benchmark("tiny", progress=False)
    path = benchmark_file("tiny")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="made again"):
        assert digest(load_benchmark("tiny", progress=False)) == tiny
    assert digest(load_benchmark_from_path(path)) == tiny


def test_a_whole_file_of_other_tasks_is_made_anew(tiny):
    generate_benchmark("small", n=300, seed=9).save(benchmark_file("tiny"))
    with pytest.warns(UserWarning, match="does not hold the tasks"):
        assert digest(load_benchmark("tiny", progress=False)) == tiny


def test_without_a_place_to_keep_it(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="XLAND_MINIGRID_DATA"):
        assert digest(load_benchmark("tiny", progress=False)) == tiny
    with pytest.warns(UserWarning, match="XLAND_MINIGRID_DATA"):
        assert benchmark_info("tiny")["digest"] == tiny


def test_a_machine_that_makes_other_tasks_says_so(tiny, monkeypatch):
    monkeypatch.setitem(keeping._REGISTERED, "tiny", keeping._REGISTERED["tiny"]._replace(digest="0" * 32))
    with pytest.raises(RuntimeError, match="differs from the reference"):
        load_benchmark("tiny", progress=False)
    assert not benchmark_file("tiny").exists()


def test_many_at_once(tiny):
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda _: digest(load_benchmark("tiny", progress=False)), range(8)))
    assert set(digests) == {tiny} and [p.name for p in data_folder().iterdir()] == [benchmark_file("tiny").name]


def test_an_interrupted_first_use_goes_on(tiny, monkeypatch):
    "The checkpoint is asked for, found where it was left, and a file in its place that is none is no reason to fail."
    part, asked = benchmark_file("tiny").with_suffix(".part"), []
    real = keeping.generate_rulesets

    def breaks_off(*args, resume=None, **options):
        asked.append(resume)
        resume.write_bytes(b"as far as I got")
        raise KeyboardInterrupt

    monkeypatch.setattr(keeping, "generate_rulesets", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        load_benchmark("tiny", progress=False)
    assert asked == [part] and [p.name for p in data_folder().iterdir()] == [part.name]
    monkeypatch.setattr(keeping, "generate_rulesets", real)
    with pytest.warns(UserWarning, match="unusable"):
        assert digest(load_benchmark("tiny", progress=False)) == tiny
    assert [p.name for p in data_folder().iterdir()] == [benchmark_file("tiny").name]


def test_a_real_checkpoint_goes_on(tiny, monkeypatch):
    "The generator leaves its own checkpoint when it is stopped, and does not try again what it tried."
    monkeypatch.setattr(making, "_ROUND", 64)
    real, rounds = making._candidates, []

    def counted(recipe, start, *rest):
        rounds.append(start)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return real(recipe, start, *rest)

    monkeypatch.setattr(making, "_candidates", counted)
    with pytest.raises(KeyboardInterrupt):
        load_benchmark("tiny", progress=False)
    assert benchmark_file("tiny").with_suffix(".part").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert digest(load_benchmark("tiny", progress=False)) == tiny
    assert rounds[3] == rounds[2] > 0


def test_a_cache_of_another_generator_is_left_alone(tiny, monkeypatch):
    load_benchmark("tiny", progress=False)
    old, version = benchmark_file("tiny"), keeping.GENERATOR_VERSION
    before = old.read_bytes()
    monkeypatch.setattr(keeping, "GENERATOR_VERSION", version + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_benchmark("tiny", progress=False)
    assert old.read_bytes() == before and {p.name for p in data_folder().iterdir()} == {f"tiny-v{version}.safetensors", f"tiny-v{version + 1}.safetensors"}


def test_a_cache_that_cannot_be_written_is_read(tiny, monkeypatch):
    "A folder for all, put there by somebody else: reading takes no lock and writes nothing."
    load_benchmark("tiny", progress=False)
    def refuse(*_, **__):
        raise PermissionError("read-only")
    for name in ("_lock", "write_file", "_made"):
        monkeypatch.setattr(keeping, name, refuse)
    assert digest(load_benchmark("tiny", as_numpy=True)) == tiny
    benchmark_file("tiny").unlink()
    monkeypatch.undo()
    monkeypatch.setenv("XLAND_MINIGRID_DATA", "/proc/nowhere")
    monkeypatch.setitem(keeping._REGISTERED, "tiny", keeping._Named("small", 300, {}, tiny))
    with pytest.warns(UserWarning, match="could not be kept"):
        assert digest(load_benchmark("tiny", progress=False)) == tiny


def test_whoever_comes_second_waits(tiny, monkeypatch):
    "Eight at once, and the tasks are made once: the first makes them while the seven others stand at the lock."
    make, lock, times, at_the_lock, everybody = keeping.generate_rulesets, keeping._lock, [], [], threading.Event()

    def counted(path):
        at_the_lock.append(path)
        if len(at_the_lock) == 8:
            everybody.set()
        return lock(path)

    def made(*args, **options):
        times.append(1)
        assert everybody.wait(120)
        return make(*args, **options)

    monkeypatch.setattr(keeping, "_lock", counted)
    monkeypatch.setattr(keeping, "generate_rulesets", made)
    with ThreadPoolExecutor(8) as pool:
        assert {digest(b) for b in pool.map(lambda _: load_benchmark("tiny", progress=False), range(8))} == {tiny}
    assert len(times) == 1 and [p.name for p in data_folder().iterdir()] == [benchmark_file("tiny").name]


def test_hub_names_go_to_the_hub(bench, tmp_path, monkeypatch):
    path, asked = bench.save(tmp_path / "sent", packed=True), []
    monkeypatch.setattr(keeping, "fetch", lambda *args, **options: asked.append((args, options)) or path)
    got = load_benchmark("hub:me/tasks/file", sha256="ab" * 32, progress=False, as_numpy=True)
    assert asked == [(("hub:me/tasks/file",), dict(sha256="ab" * 32, progress=False))] and digest(got) == digest(bench)
    assert benchmark_info("hub:me/tasks/file")["digest"] == digest(bench)
    with pytest.raises(ValueError, match="is only for hub"):
        load_benchmark("trivial-21k", sha256="ab" * 32)


# ---------------------------------------------------------------- where the tasks are


def test_devices(bench):
    for device in (jax.devices("cpu")[0], None):
        got = bench.to_numpy().to_device(device)
        assert isinstance(got.rules, jax.Array) and got.rules.devices() == {jax.devices("cpu")[0]}
        assert digest(got) == digest(bench)


def test_draws_are_the_same_wherever_the_tasks_are(bench):
    at_home, leaves = bench.to_numpy(), jax.tree.leaves
    weights = np.random.default_rng(0).random(400) * (np.arange(400) % 3 > 0)
    for make_key in (jax.random.key, jax.random.PRNGKey):
        key = make_key(7)
        for options in ({}, {"weights": weights}, {"weights": jnp.asarray(weights)}):
            drawn = bench.sample_rulesets(key, 50, **options)
            assert all(isinstance(a, jax.Array) and len(a) == 50 for a in leaves(drawn))
            assert same(leaves(at_home.sample_rulesets(key, 50, **options)), leaves(drawn))
    assert same(leaves(bench.sample_rulesets(key, 50)), leaves(jax.vmap(bench.sample_ruleset)(jax.random.split(key, 50))))
    compiled = jax.jit(lambda b, k: b.sample_rulesets(k, 50, weights=weights))(bench, key)
    assert same(leaves(compiled), leaves(at_home.sample_rulesets(key, 50, weights=weights)))


def test_only_what_is_drawn_is_sent(bench, monkeypatch):
    "Of a benchmark at home no array leaves that has a row for every task."
    sent, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tree, *rest: sent.extend(jax.tree.leaves(tree)) or put(tree, *rest))
    monkeypatch.setattr(together.jnp, "asarray", lambda array, *rest, real=jnp.asarray: sent.append(np.asarray(array)) or real(array, *rest))
    bench.to_numpy().sample_rulesets(jax.random.key(0), 9)
    assert sent and max(len(leaf) for leaf in sent if np.ndim(leaf)) == 9


def test_weights_are_met():
    bench = generate_benchmark("trivial", n=5)
    where = {i: n for n, i in enumerate(bench.ruleset_ids().tolist())}
    def shares(weights):
        drawn = bench.sample_rulesets(jax.random.key(1), 20_000, weights=weights)
        ids = identities(drawn.goal, drawn.rules, drawn.init_tiles)[0]
        return np.bincount([where[i] for i in ids.tolist()], minlength=5) / 20_000
    assert np.abs(shares([0, 1, 2, 0, 5]) - np.array([0, 1, 2, 0, 5]) / 8).max() < 0.015
    assert shares([0, 0, 1e-300, 0, 0]).tolist() == [0, 0, 1, 0, 0] and shares([0, 0, 0, 0, 1e300]).tolist() == [0, 0, 0, 0, 1]
    assert shares([1, 1e-12, 0, 0, 0])[1:].tolist() == [0, 0, 0, 0]


def test_weights_refuse():
    five, key = generate_benchmark("trivial", n=5), jax.random.key(0)
    wrong = [[1] * 4, [1] * 6, [[1] * 5], [0] * 5, [1, 1, 1, 1, -1], [1, 1, 1, 1, np.nan], [1, 1, 1, 1, np.inf], [1e308] * 5, []]
    assert refusals({repr(weights): (lambda weights=weights: five.sample_rulesets(key, 3, weights=weights), ValueError, "weights") for weights in wrong}) == {}


def test_batches_refuse(bench):
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda w: bench.sample_rulesets(jax.random.key(0), 3, weights=w))(np.ones(400))
    with pytest.raises(ValueError, match="empty"):
        bench.split(0.0)[0].sample_rulesets(jax.random.key(0), 3)
    for part in (bench, bench.to_numpy()):
        for ask in (part.get_rulesets, part.take):
            for wrong, error in [([400], IndexError), ([0, -401], IndexError), (3, TypeError), ([[1]], TypeError), ([0.5], TypeError), ([True], TypeError)]:
                with pytest.raises(error):
                    ask(wrong)
        assert len(part.take([])) == 0 and part.take([-1, 0]).ruleset_ids().tolist() == bench.ruleset_ids()[[399, 0]].tolist()


def test_splits_by_meaning_are_those_of_the_rows(bench):
    bench = bench.to_numpy()
    for options in (dict(prop=0.7, by="random", seed=3), dict(prop=0.7, by="hash"), dict(by="goal_kind", test=(1,)), dict(by="depth", train=(0, 1)), dict(by="color", test="pink")):
        train, test = bench.split(**options)
        rows = bench.split_rows(**{"share" if name == "prop" else name: value for name, value in options.items()})
        assert train.ruleset_ids().tolist() == bench.ruleset_ids()[rows.train].tolist() and test.ruleset_ids().tolist() == bench.ruleset_ids()[rows.test].tolist()
        assert not np.intersect1d(train.goal_ids(), test.goal_ids()).size and len(test) and len(train)


def test_every_generated_task_has_a_plan(bench):
    plans = bench.take(np.arange(60)).plans()
    assert plans.solvable.shape == (60,) and plans.solvable.all()


def test_info(tiny, bench, tmp_path):
    info = benchmark_info("tiny")
    assert info["num_rulesets"] == info["distinct_ruleset_ids"] == sum(info["rules_per_task"].values()) == sum(info["goal_kinds"].values()) == 300
    assert info["recipe"]["chain_depth"] == 1 and info["generator_version"] == making.GENERATOR_VERSION and info["digest"] == tiny
    assert sum(k * v for k, v in info["rules_per_task"].items()) == sum(info["rule_kinds"].values())
    assert "AgentHoldGoal" in info["goal_kinds"] and "TileNearUpRule" in info["rule_kinds"]
    assert benchmark_info(bench)["distinct_goal_ids"] == len(np.unique(bench.goal_ids()))
    path = bench.save(tmp_path / "mine")
    assert benchmark_info(path)["recipe"] is None and benchmark_info(path)["manifest"]["canonical_hash"] == benchmark_info(bench)["canonical_hash"]
    assert benchmark_info(bench.save(tmp_path / "small", packed=True))["manifest"]["form"] == "packed"
    assert benchmark_info(path)["path"] == str(path) and benchmark_info(str(path))["digest"] == digest(bench)
    assert json.loads(json.dumps(info))["num_rulesets"] == 300
    with pytest.raises(ValueError, match="neither a file nor"):
        benchmark_info("nothing")


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", [name for name in keeping._REGISTERED if not name.endswith("-3m")])
def test_the_named_ones_are_the_pinned_ones(name):
    "Of three million the first are the one million, and whoever loads three million has their digest compared: here they would take another five minutes."
    bench = load_benchmark(name, as_numpy=True, progress=False)  # raises unless the digest is that in the table
    assert len(np.unique(bench.ruleset_ids())) == len(bench) == keeping._REGISTERED[name].n


# ---------------------------------------------------------------- wrong input


def test_generation_refuses():
    wrong = [
    {"chain_depth": -1}, {"chain_depth": 6}, {"chain_depth": 1.5}, {"num_distractor_rules": 17}, {"num_distractor_objects": -1}, {"prune_prob": 1.01},
    {"prune_prob": float("nan")}, {"random_seed": -1}, {"random_seed": 2**64}, {"seed": "one"}, {"goal_kinds": ()}, {"goal_kinds": (2,)},
    {"rule_kinds": (0,)}, {"rule_kinds": (251,)}, {"n": 0}, {"n": -3}, {"n": 2.5}, {"workers": -1}]
    assert refusals({repr(options): (lambda options=options: generate_benchmark("small", **{"n": 10, **options}), ValueError, "") for options in wrong}) == {}


def test_generation_refuses_unknown_names():
    with pytest.raises(ValueError, match="trivial, small, medium, high"):
        generate_benchmark("huge", n=10)
    with pytest.raises(TypeError, match="chain_depth"):
        generate_benchmark("small", n=10, depth=2)
    with pytest.raises(TypeError, match="random_seed"):
        generate_benchmark("small", n=10, seed=1, random_seed=2)


def test_identities_refuse():
    good = [np.zeros((2, 5), np.uint8), np.zeros((2, 3, 7), np.uint8), np.zeros((2, 4, 2), np.uint8)]
    wrong = [(0, good[0][:1]), (0, good[0][:, :3]), (1, good[1][0]), (2, good[2][..., :1]), (2, good[2] - 0.5), (1, good[1].astype(int) + 300)]
    for ask in (canonical, identities):
        ask(*good)
        assert refusals({n: (lambda i=i, part=part: ask(*good[:i], part, *good[i + 1:]), ValueError, "") for n, (i, part) in enumerate(wrong)}) == {}
