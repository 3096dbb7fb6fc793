"""Splits: what they mean, that nothing leaks, that they are stable, and wrong input at every door."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xland_minigrid.benchmarks.splits as splitting
from xland_minigrid.benchmarks import load_benchmark
from xland_minigrid.benchmarks.generate import PRESETS, generate_rulesets, identities, recipe_of
from xland_minigrid.benchmarks.splits import (
    NAMED_SPLITS, NEVER, SPLITS, SplitLeakError, check_apart, first_groups, goal_objects, named_split, rule_objects,
    seeded, split_rows, task_trees)
from xland_minigrid.core.actions import Actions
from xland_minigrid.core.goals import AgentHoldGoal, AgentNearGoal, TileNearGoal, goal_kinds
from xland_minigrid.core.rules import OneTileRule, TwoTileRule, beside_agent, register_rule, rule_kinds
from xland_minigrid.core.tiles import Colors, Tiles
from worlds import refusals

pytestmark = pytest.mark.newest

ARGUMENTS = {  # every split with something to hold out
    "random": {"share": 0.7, "seed": 5}, "hash": {"share": 0.7, "seed": 5},
    "goal_kind": {}, "depth": {"test": 2}, "rule_kind": {"test": (1, 8)}, "colour": {"test": "red"}, "shape": {"test": Tiles.KEY},
    "object": {"test": [(Tiles.KEY, Colors.RED), (Tiles.BALL, Colors.PINK)]},
}


@pytest.fixture(scope="module")
def made():
    return generate_rulesets(recipe_of("medium"), 3_000)


@pytest.fixture(scope="module")
def trivial():
    return generate_rulesets(recipe_of("trivial"), 3_000)


def rows(made, numbers):
    return tuple(part[numbers] for part in made[:3])


# ---------------------------------------------------------------- trees, against a slow reading of the encodings

ONE_TILE_RULES, TWO_TILE_GOALS = {1, 2, 8, 9, 10, 11}, {4, 7, 8, 9, 10}


def read_task(goal, rules, tiles):
    "Needed objects, rules as (number, inputs, product), placed objects: plain Python."
    pair = lambda x: (int(x[0]), int(x[1]))
    kind = int(goal[0])
    wanted = [] if kind in (0, 5) else [pair(goal[1:3])] + [pair(goal[3:5])] * (kind in TWO_TILE_GOALS)
    read = []
    for number, r in enumerate(rules):
        if r[0]:
            one = int(r[0]) in ONE_TILE_RULES
            read.append((number, [pair(r[1:3])] + [pair(r[3:5])] * (not one), pair(r[3:5] if one else r[5:7])))
    return wanted, read, {pair(t) for t in tiles if t[0]}


def slow_tree(goal, rules, tiles):
    wanted, rules, placed = read_task(goal, rules, tiles)
    since = {tile: 0 for tile in placed} | {(3, int(Colors.BLACK)): 0}
    late = lambda objects: max((since.get(x, NEVER) for x in objects), default=0)
    for _ in range(len(rules) + 1):
        for _, inputs, product in rules:
            if late(inputs) < NEVER:
                since[product] = min(since.get(product, NEVER), late(inputs) + 1)
    tree, queue = set(), list(wanted)
    while queue:
        x = queue.pop()
        if since.get(x, NEVER) == 0:
            continue
        for number, inputs, product in rules:
            level = late(inputs) + 1 if late(inputs) < NEVER else NEVER
            if product == x and level == since.get(x, NEVER) and number not in tree:
                tree.add(number)
                queue += inputs
    return late(wanted), tree


@pytest.mark.parametrize("name", PRESETS)
def test_trees_of_generated_tasks(name):
    made = generate_rulesets(recipe_of(name, seed=3), 300)
    trees = task_trees(*made[:3], chunk=64)
    for i in range(300):
        depth, tree = slow_tree(*(part[i] for part in made[:3]))
        assert trees.depth[i] == depth <= PRESETS[name].chain_depth and set(np.flatnonzero(trees.in_tree[i])) == tree


TILE = st.sampled_from([(4, 2), (4, 3), (5, 2), (6, 4), (9, 1), (10, 2), (3, int(Colors.BLACK))])  # few, so that rules meet, circle and compete
RULE = st.tuples(st.integers(0, 11), TILE, TILE, TILE).map(lambda r: [r[0], *r[1], *r[2], *(r[3] if r[0] not in ONE_TILE_RULES else (0, 0))] if r[0] else [0] * 7)
TASK = st.tuples(st.tuples(st.integers(0, 14), TILE, TILE), st.lists(RULE, min_size=5, max_size=5), st.lists(TILE, min_size=3, max_size=3))


@settings(max_examples=60)
@given(st.lists(TASK, min_size=1, max_size=20))
def test_trees_of_any_tasks(tasks):
    goals = np.array([[g[0], *g[1], *g[2]] for g, _, _ in tasks], np.uint8)
    rules, tiles = (np.array([task[i] for task in tasks], np.uint8) for i in (1, 2))
    trees = task_trees(goals, rules, tiles)
    for i in range(len(tasks)):
        depth, tree = slow_tree(goals[i], rules[i], tiles[i])
        assert (trees.depth[i], set(np.flatnonzero(trees.in_tree[i]).tolist())) == (depth, tree)


def test_tasks_without_rules_or_objects_have_trees_too():
    goals = np.array([[1, 4, 2, 0, 0], [5, 3, 3, 0, 0]], np.uint8)
    for rules, tiles in ((0, 0), (1, 0), (0, 2)):
        trees = task_trees(goals, np.zeros((2, rules, 7), np.uint8), np.zeros((2, tiles, 2), np.uint8))
        assert trees.depth.tolist() == [NEVER, 0] and trees.in_tree.shape == (2, rules)


def test_positions_and_disappearance_are_no_objects():
    assert goal_objects(np.array([[5, 4, 2, 0, 0], [6, 4, 2, 7, 7], [0, 0, 0, 0, 0]], np.uint8)).T.tolist() == [[0, 0], [0x42, 0], [0, 0]]
    a, b, product = rule_objects(np.array([[[2, 4, 2, 3, 10, 0, 0], [3, 4, 2, 5, 3, 6, 4]]], np.uint8))
    assert (a[:, 0].tolist(), b[:, 0].tolist(), product[:, 0].tolist()) == ([0x42, 0x42], [0, 0x53], [0x3A, 0x64])


# ---------------------------------------------------------------- every split


@pytest.mark.parametrize("by", SPLITS)
def test_nothing_leaks(by, made, trivial):
    for tasks in (made, trivial):
        if tasks is trivial and by in ("depth", "rule_kind"):
            continue  # there are no rules
        split = split_rows(*tasks[:3], by, **ARGUMENTS[by])
        ids = identities(*tasks[:3])[1]
        train, test = set(ids[split.train].tolist()), set(ids[split.test].tolist())
        assert train and test and not train & test and split.goal_ids == (len(train), len(test))
        assert sorted([*split.train, *split.test, *split.left_out]) == list(range(3_000))
        assert all((np.diff(part) > 0).all() for part in split[:3]) and f"{len(split.left_out):,} left out" in repr(split)


@pytest.mark.parametrize("by", SPLITS)
def test_the_order_of_tasks_does_not_matter(by, made):
    order = np.random.default_rng(0).permutation(3_000)
    split, mixed = split_rows(*made[:3], by, **ARGUMENTS[by]), split_rows(*rows(made, order), by, **ARGUMENTS[by])
    for mine, theirs in zip(split[:3], mixed[:3]):
        assert sorted(order[theirs].tolist()) == mine.tolist()


def test_a_leak_is_seen(made, monkeypatch):
    monkeypatch.setattr(splitting.np, "isin", lambda *_: np.zeros(3_000, bool))  # the side that should give way does not
    monkeypatch.setattr(splitting, "first_groups", lambda keys, *_: np.arange(len(keys)) % 2 == 0)
    with pytest.raises(SplitLeakError, match="both sides"):
        split_rows(*made[:3], "random", goal_ids=np.zeros(3_000, np.uint64))
    with pytest.raises(SplitLeakError, match="2 goal_ids"):
        check_apart(np.array([1, 2, 3, 3], np.uint64), np.array([3, 9, 1], np.uint64))


# ---------------------------------------------------------------- shares


@settings(max_examples=40)
@given(st.integers(1, 3_000), st.floats(0.05, 0.95), st.integers(0, 2**64 - 1), st.sampled_from(["goal_id", "goal"]))
def test_a_hash_split_survives_growth(n, share, seed, group):
    whole = generate()
    split = split_rows(*whole[:3], "hash", share=share, seed=seed, group=group)
    try:
        early = split_rows(*rows(whole, slice(n)), "hash", share=share, seed=seed, group=group)
    except ValueError as error:  # so few tasks that one side is empty: then it is the other that holds them all
        assert "side is empty" in str(error) and min((split.train < n).sum(), (split.test < n).sum()) == 0
        return
    assert early.train.tolist() == split.train[split.train < n].tolist() and early.test.tolist() == split.test[split.test < n].tolist()


_made = []


def generate():
    if not _made:
        _made.append(generate_rulesets(recipe_of("small"), 3_000))
    return _made[0]


def test_a_hash_split_depends_on_the_goal_id_only(made, trivial):
    keys = np.concatenate([made.goal_ids, trivial.goal_ids])
    side = {}
    for tasks in (made, trivial):
        split = split_rows(*tasks[:3], "hash", share=0.5)
        side |= dict.fromkeys(tasks.goal_ids[split.train].tolist(), 1) | dict.fromkeys(tasks.goal_ids[split.test].tolist(), 2)
    wide = np.zeros((3_000, 30, 7), np.uint8)
    wide[:, :trivial.rules.shape[1]] = trivial.rules
    again = split_rows(trivial.goals, wide, trivial.init_tiles[:, ::-1], "hash", share=0.5)  # wider, objects the other way round
    assert all(side[k] == 1 for k in trivial.goal_ids[again.train].tolist()) and len(side) == len(np.unique(keys))
    more = split_rows(*trivial[:3], "hash", share=0.6)
    assert set(again.train) < set(more.train)  # a larger share only adds


def test_the_hash_is_pinned():
    "A published split must not move. These sides were computed once, and are a promise."
    sides = splitting.below_share(splitting.seeded(np.arange(16, dtype=np.uint64), 0), 0.5)
    assert sides.astype(int).tolist() == [1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]


def test_shares_are_met(made, trivial):
    for by, error in (("random", 0.002), ("hash", 0.03)):
        for share in (0.2, 0.8):
            assert abs(len(split_rows(*made[:3], by, share=share).train) / 3_000 - share) < error
    for by in ("random", "hash"):
        assert len(split_rows(*made[:3], by, share=1).train) == len(split_rows(*made[:3], by, share=0.0).test) == 3_000
    seeds = [split_rows(*made[:3], "random", seed=s).test.tolist() for s in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]
    held = split_rows(*trivial[:3], "random", group="goal")
    goals = lambda numbers: {g.tobytes() for g in trivial.goals[numbers]}
    assert not goals(held.train) & goals(held.test)


def test_groups_go_whole_in_the_order_of_their_ranks():
    def slow(keys, share):
        order, taken, best = sorted(set(keys), reverse=True), set(), None
        sizes = [keys.count(k) for k in order]
        ends = [sum(sizes[:i]) for i in range(len(order) + 1)]
        best = min(range(len(ends)), key=lambda i: abs(ends[i] - share * len(keys)))
        taken = set(order[:best])
        return [k in taken for k in keys]

    rng = np.random.default_rng(1)
    for _ in range(50):
        keys, share = rng.integers(0, 9, rng.integers(1, 30)), float(rng.random())
        assert first_groups(keys, share, -keys).tolist() == slow(keys.tolist(), share)


# ---------------------------------------------------------------- values


def mentions(made, row):
    "All objects of a task, those it needs, and the kinds of its rules, all and in the tree."
    wanted, rules, placed = read_task(*(part[row] for part in made[:3]))
    _, tree = slow_tree(*(part[row] for part in made[:3]))
    floor = (3, int(Colors.BLACK))
    seen = {*wanted, *placed, *(x for _, inputs, p in rules for x in (*inputs, p))} - {floor}
    needed = {*wanted, *(x for n, inputs, p in rules if n in tree for x in (*inputs, p))} - {floor}
    kinds = made.rules[row, :, 0]
    return seen, needed, {int(k) for k in kinds if k}, {int(kinds[n]) for n in tree}


ASPECTS = {"colour": lambda x: x[1], "shape": lambda x: x[0], "object": lambda x: x}


@pytest.mark.parametrize("by, held", [("colour", {int(Colors.RED), int(Colors.PINK)}), ("shape", {int(Tiles.KEY)}), ("object", {(int(Tiles.KEY), int(Colors.RED))}), ("rule_kind", {1, 8})])
@pytest.mark.parametrize("distractors", ["leave out", "train", "test"])
def test_held_out_values_against_a_slow_reading(by, held, distractors, made):
    tasks = type(made)(*(part[:400] for part in made))
    split = split_rows(*tasks[:3], by, test=list(held), distractors=distractors)
    where = {int(r): name for name, part in (("train", split.train), ("test", split.test), ("leave out", split.left_out)) for r in part}
    found = set()
    for row in range(400):
        seen, needed, kinds, tree_kinds = mentions(tasks, row)
        seen, needed = ({ASPECTS[by](x) for x in values} for values in (seen, needed)) if by in ASPECTS else (kinds, tree_kinds)
        right = "test" if needed & held else distractors if seen & held else "train"
        found.add(right)
        assert where[row] == right, row
    assert len(found) >= 2


def test_the_paper_trains_on_three_goals(made):
    split = split_rows(*made[:3], "goal_kind")
    assert set(made.goals[split.train, 0]) == {1, 3, 4} and set(made.goals[split.test, 0]) == {7, 8, 9, 10, 11, 12, 13, 14} and not len(split.left_out)
    classes = split_rows(*made[:3], "goal_kind", train=[AgentHoldGoal, AgentNearGoal, TileNearGoal], test=None)
    assert classes.train.tolist() == split.train.tolist()
    some = split_rows(*made[:3], "goal_kind", train=(1, 3), test=7)
    assert set(made.goals[some.test, 0]) == {7} and set(made.goals[some.left_out, 0]) == {4, 8, 9, 10, 11, 12, 13, 14}


def test_depths(made):
    depth = task_trees(*made[:3]).depth
    split = split_rows(*made[:3], "depth", train=(0, 1))
    assert set(depth[split.train]) == {0, 1} and set(depth[split.test]) == {2}
    unreachable = made.init_tiles.copy()
    unreachable[:100] = 0
    split = split_rows(made.goals, made.rules, unreachable, "depth", test=2)
    assert set(range(100)) <= set(split.left_out.tolist())


def test_tasks_that_differ_in_placed_objects_only_never_part():
    goals, rules = np.array([[1, 4, 2, 0, 0]] * 3 + [[1, 4, 1, 0, 0]], np.uint8), np.zeros((4, 1, 7), np.uint8)
    tiles = np.array([[(4, 2), (5, 2)], [(4, 2), (5, 1)], [(4, 2), (6, 2)], [(4, 1), (5, 2)]], np.uint8)  # red is 1; the second task has a red distractor
    split = split_rows(goals, rules, tiles, "colour", test=1, distractors="test")
    assert (split.train.tolist(), split.test.tolist(), split.left_out.tolist()) == ([0, 2], [3], [1])
    assert split_rows(goals, rules, tiles, "colour", test=1, distractors="train").train.tolist() == [0, 1, 2]


# ---------------------------------------------------------------- registered kinds and wrong input


def test_registered_kinds_are_split_too():
    @register_rule
    class Knock(OneTileRule):
        when, looks = (Actions.TOGGLE,), beside_agent("up")

    @register_rule
    class Unlock(TwoTileRule):
        when, looks = (Actions.TOGGLE,), beside_agent().while_carrying()

    try:
        made = generate_rulesets(recipe_of("small", rule_kinds=(1, 3, Knock, Unlock), solvable=False), 600)
        trees = task_trees(*made[:3])
        assert trees.depth.max() == 1 and ((trees.depth == 0) == ~trees.in_tree.any(axis=1)).all()
        split = split_rows(*made[:3], "rule_kind", test=[Knock, Unlock])
        assert np.isin(made.rules[split.train][..., 0], (0, 1, 3)).all() and np.isin(made.rules[split.test][..., 0], (Knock.ID, Unlock.ID)).any(axis=1).all()
        assert "Knock" in split.description
    finally:
        for cls in (Knock, Unlock):
            rule_kinds.remove(cls.ID)
    with pytest.raises(ValueError, match="is not a rule"):
        split_rows(*made[:3], "depth", test=1)


WRONG = [
    ("size", {}, ValueError, "Unknown split 'size'"), (None, {}, ValueError, "Unknown split None"), (["hash"], {}, ValueError, "Unknown split"),
    *[(by, {"share": share}, ValueError, "from 0 to 1") for by in ("hash", "random") for share in (-0.1, 1.1, float("nan"), "half", True)],
    *[("hash", {"seed": seed}, ValueError, "seed is") for seed in (-1, 2**64, 0.5, True)],
    ("random", {"group": "tree"}, ValueError, "goal_id"), ("depth", {"seed": 1}, TypeError, "no option seed"), ("goal_kind", {"share": 0.8}, TypeError, "no option share"),
    ("goal_kind", {"distractors": "train"}, TypeError, "distractors"), ("depth", {}, ValueError, "needs train or test"), ("colour", {}, ValueError, "needs train or test"),
    ("goal_kind", {"train": 99}, ValueError, "not a valid kind of goal"), ("goal_kind", {"train": 0}, ValueError, "not a valid kind of goal"), ("rule_kind", {"test": 251}, ValueError, "not a valid kind of rule"),
    ("rule_kind", {"test": "AgentHold"}, ValueError, "not a valid kind of rule"), ("rule_kind", {"test": 1.5}, ValueError, "not a valid kind of rule"), ("goal_kind", {"test": ()}, ValueError, "empty"),
    ("colour", {"test": "crimson"}, ValueError, "not a valid colour"), ("shape", {"test": 16}, ValueError, "not a valid shape"), ("object", {"test": (4, 99)}, ValueError, "not a valid object"),
    ("object", {"test": 5}, ValueError, "not a valid object"), ("object", {"test": [("ball", "red"), ("ball",)]}, ValueError, "not a valid object"), ("object", {"test": (4, 300)}, ValueError, "not a valid object"),
    ("depth", {"test": 254}, ValueError, "not a valid depth"), ("depth", {"test": -1}, ValueError, "not a valid depth"), ("colour", {"train": ("red", "blue"), "test": "red"}, ValueError, "both train and test"),
    ("colour", {"test": "red", "distractors": "both"}, ValueError, "leave out"), ("depth", {"test": 9}, ValueError, "test side is empty"), ("depth", {"train": 9}, ValueError, "train side is empty"),
    ("goal_kind", {"test": 2}, ValueError, "test side is empty"),
]


def test_what_makes_no_sense_is_refused(made):
    assert refusals({f"{by!r}, {options}": (lambda by=by, options=options: split_rows(*made[:3], by, **options), error, words) for by, options, error, words in WRONG}) == {}


def test_arrays_that_are_no_tasks_are_refused(made):
    goals, rules, tiles = made[:3]
    for wrong in ((goals[:, :4], rules, tiles), (goals[:5], rules, tiles), (goals, rules * 1.0, tiles), (goals, rules[0], tiles), (goals, rules, tiles.astype(int) - 1)):
        for by in ("random", "depth"):
            with pytest.raises(ValueError, match="must be"):
                split_rows(*wrong, by, **ARGUMENTS[by])
    with pytest.raises(ValueError, match="up to 15"):
        task_trees(goals, rules + np.uint8(16) * (np.arange(7) == 2).astype(np.uint8), tiles)
    with pytest.raises(ValueError, match="up to 15"):
        task_trees(goals, rules, tiles + np.uint8(16))
    with pytest.raises(ValueError, match="goal_ids for"):
        split_rows(*made[:3], "hash", goal_ids=made.goal_ids[:5])
    composed, unknown = goals.copy(), goals.copy()
    composed[0, 0], unknown[0, 0] = 255, 77
    for wrong, words in ((composed, "composed goal"), (unknown, "77 is not a goal")):
        with pytest.raises(ValueError, match=words):
            split_rows(wrong, rules, tiles, "colour", test="red")
    for by in ("random", "hash"):
        with pytest.raises(ValueError, match="side is empty"):
            split_rows(*rows(made, slice(1)), by)
        with pytest.raises(ValueError, match="side is empty"):
            split_rows(*rows(made, slice(0)), by)


def test_names_and_spellings(made):
    by_name = split_rows(*made[:3], "color", test=["Red"])
    assert by_name.test.tolist() == split_rows(*made[:3], "colour", test=int(Colors.RED)).test.tolist() and "red" in by_name.description
    assert split_rows(*made[:3], "object", test=("key", "red")).test.tolist() == split_rows(*made[:3], "object", test=[(Tiles.KEY, Colors.RED)]).test.tolist()
    assert goal_kinds.two[4]
    lists = split_rows(*(np.asarray(part, np.int64) for part in made[:3]), "hash", goal_ids=made.goal_ids)
    assert lists.train.tolist() == split_rows(*made[:3], "hash").train.tolist()


@pytest.mark.slow
def test_60_000_tasks_part():
    made = load_benchmark("high-1m", as_numpy=True, progress=False).take(np.arange(60_000))
    for by in SPLITS:
        split = split_rows(made.goals, made.rules, made.init_tiles, by, goal_ids=made.goal_ids(), **({"test": 3} if by == "depth" else ARGUMENTS[by]))
        assert len(split.train) + len(split.test) + len(split.left_out) == 60_000


@pytest.mark.parametrize("name", [
    "trivial-21k", "trivial-1m",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("small-1m", "medium-1m", "high-1m"))])
def test_named_splits_are_those_committed(name):
    "The benchmark made here has the committed hash; a tenth of its tasks is held out, by the order of hashes alone."
    ids = load_benchmark(name).goal_ids()
    split, hashes = named_split(name, ids), seeded(np.asarray(ids), 0)
    assert len(split.test) > 1024 and abs(len(split.test) / len(ids) - 0.1) < 0.001 and len(split.left_out) == 0
    assert hashes[split.train].max() < hashes[split.test].min()
    shuffled = np.random.default_rng(0).permutation(len(ids))
    again = shuffled[named_split(name, ids[shuffled]).test]
    assert set(again.tolist()) == set(split.test.tolist()), "whatever the order of the tasks"


def test_other_tasks_do_not_pass_for_a_benchmark_with_a_named_split():
    ids = load_benchmark("trivial-21k").goal_ids()
    without_one = ids[ids != ids[named_split("trivial-21k", ids).test[0]]]
    for name, wrong, says in [("trivial-1m", ids, "not those of trivial-1m"),
                              ("trivial-21k", without_one, "not those of"), ("probes-30", ids, "no named split")]:
        with pytest.raises(ValueError, match=says):
            named_split(name, wrong)
