"""Plans of tasks: what they claim is checked by other means than those that found them, and the generator keeps what it promises."""
import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid import AnyOf, make_ruleset
from xland_minigrid.benchmarks import generate as making
from xland_minigrid.benchmarks import solve
from xland_minigrid.benchmarks.generate import Recipe, generate_rulesets, recipe_of
from xland_minigrid.benchmarks.solve import Reason, plan_of, prove
from xland_minigrid.core.goals import AgentHoldGoal, AgentNearGoal, AgentOnPositionGoal, AgentOnTileGoal, EmptyGoal, TileNearGoal
from xland_minigrid.core.rules import AgentHoldRule, AgentNearRule, AgentNearUpRule, TileNearRule
from xland_minigrid.core.tiles import Colors, Tiles
from worlds import refusals

pytestmark = pytest.mark.newest

BALL, KEY, STAR, HEX = ((t, Colors.RED) for t in (Tiles.BALL, Tiles.KEY, Tiles.STAR, Tiles.HEX))
PATCH = (Tiles.GOAL, Colors.RED)


@pytest.fixture(scope="module")
def drawn():
    "Tasks as the procedure draws them, with and without a plan, and their plans."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "_CHUNK", 1 << 10)
        made = generate_rulesets(recipe_of("high", solvable=False), 3_000)
        yield made, prove(made.goals, made.rules, made.init_tiles)


def tiles_of(row, count):
    return [tuple(map(int, row[i:i + 2])) for i in (1, 3)[:count]]


def inputs_and_product(rule):
    two = 3 <= rule[0] <= 7
    return tiles_of(rule, 2 if two else 1), tuple(map(int, rule[5:7] if two else rule[3:5]))


def test_a_plan_makes_everything_it_uses_in_time(drawn):
    made, plans = drawn
    for i in np.flatnonzero(plans.solvable):
        have = Counter(tuple(map(int, t)) for t in made.init_tiles[i] if t[0])
        levels = {}
        steps = plans.steps[i, :plans.num_steps[i]]
        assert len(set(steps.tolist())) == len(steps) and (plans.steps[i, plans.num_steps[i]:] == 255).all()
        for step in steps:
            inputs, product = inputs_and_product(made.rules[i, step])
            for tile in inputs:
                have[tile] -= 1
                assert have[tile] >= 0, (i, tile)
            have[product] += 1
            levels[product] = 1 + max(levels.get(t, 0) for t in inputs)
        goal = made.goals[i]
        asked = tiles_of(goal, 2 if goal[0] in (4, 7, 8, 9, 10) else 1)
        assert all(have[t] > 0 for t in asked)
        assert plans.depth[i] == max(levels.get(t, 0) for t in asked)
        assert plans.num_steps[i] == len(levels)  # no rule is triggered for nothing


def test_what_is_rejected_has_a_rule_that_spoils_it(drawn):
    made, plans = drawn
    assert 20 < (~plans.solvable).sum() < 100
    assert set(plans.reason[~plans.solvable].tolist()) <= {Reason.SPOILED_NEAR, Reason.SPOILED_HELD, Reason.SPOILED_AT_BIRTH, Reason.SPOILED_PAIR}
    assert (plans.dead_ends[~plans.solvable] > 0).all() and (plans.risk[~plans.solvable] > 0).all()
    calm = made.rules.copy()
    for i in np.flatnonzero(~plans.solvable):  # without the rules outside the tree there is a way
        needed, wanted = set(), [t for t in tiles_of(made.goals[i], 2 if made.goals[i, 0] in (4, 7, 8, 9, 10) else 1)]
        while wanted:
            tile = wanted.pop()
            for number, rule in enumerate(made.rules[i]):
                if rule[0] and inputs_and_product(rule)[1] == tile and number not in needed:
                    needed.add(number)
                    wanted += inputs_and_product(rule)[0]
        calm[i, [n for n in range(len(calm[i])) if n not in needed]] = 0
    rows = ~plans.solvable
    assert prove(made.goals[rows], calm[rows], made.init_tiles[rows]).solvable.all()


def test_one_by_one_in_a_batch_padded_and_in_any_number_of_threads(drawn):
    made, plans = drawn
    arrays = made[:3]
    again = prove(*arrays)
    wide = prove(arrays[0], np.pad(arrays[1], ((0, 0), (0, 3), (0, 0))), np.pad(arrays[2], ((0, 0), (0, 4), (0, 0))))
    for name in plans._fields:
        assert (getattr(plans, name) == getattr(again, name)).all()
        if name != "steps":
            assert (getattr(plans, name) == getattr(wide, name)).all(), name
    assert (wide.steps[:, :plans.steps.shape[1]] == plans.steps).all()
    for rows in ([0], [1_500], range(2_936, 3_000), range(0, 3_000, 100)):  # a few have another program, with room for more rules and objects
        few = prove(*(a[list(rows)] for a in arrays))
        assert all((getattr(few, name) == getattr(plans, name)[list(rows)]).all() for name in plans._fields)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_names_and_the_order_of_objects_do_not_matter(drawn, seed):
    made, plans = drawn
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(made.goals), 64, replace=False)
    shapes, colors = np.arange(256), np.arange(256)
    pickable = [Tiles.BALL, Tiles.SQUARE, Tiles.PYRAMID, Tiles.KEY, Tiles.STAR, Tiles.HEX]
    shapes[pickable], colors[3:13] = rng.permutation(pickable), rng.permutation(np.arange(3, 13))

    def renamed(encodings, first):
        out = encodings.copy()
        for i in range(first, out.shape[-1] - 1, 2):
            tile = out[..., i] >= Tiles.GOAL
            out[..., i + 1] = np.where(tile, colors[out[..., i + 1]], out[..., i + 1])
            out[..., i] = shapes[out[..., i]]
        return out.astype(np.uint8)
    tiles = rng.permuted(renamed(made.init_tiles[rows], 0).view(np.uint16)[..., 0], axis=1)[..., None].view(np.uint8)
    other = prove(renamed(made.goals[rows], 1), renamed(made.rules[rows], 1), tiles)
    for name in plans._fields:
        assert (getattr(other, name) == getattr(plans, name)[rows]).all(), name


def why(goal, rules, tiles):
    "The reason, from a padded task, so that all of them share one program; objects as encodings, where the constructors refuse."
    rows, objects = np.zeros((4, 7), np.uint8), np.zeros((4, 2), np.uint8)
    for i, rule in enumerate(rules):
        rows[i] = rule.encode()
    objects[:len(tiles)] = np.reshape(tiles, (-1, 2))
    return Reason(prove(np.asarray(goal.encode())[None], rows[None], objects[None]).reason[0])


def test_goals_outside_the_generator():
    assert why(AgentOnPositionGoal(np.array([2, 3])), [], []) == Reason.PROVED
    assert why(AgentOnTileGoal(PATCH), [], [PATCH]) == Reason.PROVED
    assert why(AgentOnTileGoal(BALL), [], [BALL]) != Reason.PROVED
    assert why(AgentOnTileGoal(PATCH), [AgentNearRule(PATCH, KEY)], [PATCH]) == Reason.SPOILED_NEAR
    assert why(AgentOnTileGoal(PATCH), [AgentHoldRule(BALL, PATCH)], [BALL]) == Reason.PROVED  # put it down, step on it
    assert why(EmptyGoal(), [], [BALL]) == Reason.NO_GOAL
    assert why(AgentHoldGoal(PATCH), [], [PATCH]) == Reason.STUCK
    assert why(AgentHoldGoal(PATCH), [AgentHoldRule(BALL, PATCH)], [BALL]) == Reason.PROVED
    assert why(TileNearGoal(PATCH, (Tiles.GOAL, Colors.BLUE)), [], [PATCH, (Tiles.GOAL, Colors.BLUE)]) == Reason.STUCK


def test_all_sides_spoiled_is_spoiled():
    from xland_minigrid.core.rules import AgentNearDownRule, AgentNearLeftRule, AgentNearRightRule
    sides = [AgentNearUpRule(BALL, KEY), AgentNearRightRule(BALL, KEY), AgentNearDownRule(BALL, KEY), AgentNearLeftRule(BALL, KEY)]
    assert why(AgentHoldGoal(BALL), sides[:3], [BALL]) == Reason.PROVED
    assert why(AgentHoldGoal(BALL), sides, [BALL]) == Reason.SPOILED_NEAR
    assert why(AgentNearGoal(BALL), sides[1:], [BALL]) == Reason.PROVED
    assert why(AgentNearGoal(BALL), sides, [BALL]) == Reason.SPOILED_NEAR


def test_one_task_in_words():
    plan = plan_of(make_ruleset(AgentHoldGoal(HEX), [TileNearRule(BALL, STAR, HEX), AgentNearRule(STAR, KEY)], [BALL, STAR]))
    assert plan.steps == (0,) and plan.depth == 1 and plan.dead_ends == (1,)
    assert "Then hold a red hex" in str(plan) and "Avoid this rule: a red star next to you becomes a red key" in str(plan)
    assert str(plan_of(make_ruleset(AgentHoldGoal(BALL), [], [BALL]))) == "1. Hold a red ball.", "nothing comes before it"
    assert plan_of(make_ruleset(AgentHoldGoal(HEX), [], [BALL])) is None
    assert plan_of(make_ruleset(AnyOf(AgentHoldGoal(HEX), AgentHoldGoal(BALL)), [], [BALL])) is None


def test_wrong_input(drawn):
    wrong = [lambda g, r, t: (g[:, :4], r, t), lambda g, r, t: (g, r[:-1], t), lambda g, r, t: (g, r, t[..., 0]), lambda g, r, t: (g * 1.5, r, t),
             lambda g, r, t: (g.astype(int) + 300, r, t)]
    five = [a[:5] for a in drawn[0][:3]]
    assert refusals({i: (lambda spoil=spoil: prove(*spoil(*five)), ValueError, "must be") for i, spoil in enumerate(wrong)}) == {}
    assert refusals({i: (lambda what=what: plan_of(what), TypeError, "give a RuleSet") for i, what in enumerate([None, "a task", np.zeros(5, np.uint8)])}) == {}


# The generator

def test_only_what_has_a_plan_in_the_same_order(drawn):
    made, plans = drawn
    kept = generate_rulesets(recipe_of("high"), 2_500)
    rows = np.flatnonzero(plans.solvable)[:2_500]
    for mine, raw in zip(kept, made):
        assert (mine == raw[rows]).all()


def test_what_was_thrown_away_is_counted():
    tally, more = Counter(), Counter()
    generate_rulesets(recipe_of("medium"), 2_000, tally=tally)
    generate_rulesets(recipe_of("medium"), 2_000, tally=more, workers=1)
    assert tally == more and tally["kept"] == 2_000
    assert tally["candidates"] == sum(c for what, c in tally.items() if what != "candidates")
    assert sum(c for what, c in tally.items() if what.startswith("no plan")) > 0
    raw = Counter()
    generate_rulesets(recipe_of("medium", solvable=False), 2_000, tally=raw)
    assert not any(what.startswith("no plan") for what in raw)


class Stop(BaseException):
    pass


def test_interrupted_anywhere_and_continued(tmp_path, monkeypatch):
    recipe, path = recipe_of("medium"), tmp_path / "tasks.part"
    whole = generate_rulesets(recipe, 2_500, tally=(counted := Counter()))
    monkeypatch.setattr(making, "_ROUND", 500)
    real = making._verdicts
    for after in (1, 3):
        calls = iter(range(100))

        def failing(*args):
            if next(calls) == after:
                raise Stop
            return real(*args)
        monkeypatch.setattr(making, "_verdicts", failing)
        with pytest.raises(Stop):
            generate_rulesets(recipe, 2_500, resume=path)
        assert list(tmp_path.iterdir()) == [path]
        monkeypatch.setattr(making, "_verdicts", real)
        again = generate_rulesets(recipe, 2_500, resume=path, tally=(second := Counter()))
        assert all((a == b).all() for a, b in zip(whole, again)) and second == counted and not path.exists()


def test_checkpoints_of_something_else_are_refused(tmp_path):
    path = tmp_path / "tasks.part"
    state = making._Progress(recipe_of("small"), 100)
    made = generate_rulesets(recipe_of("small", solvable=False), 50)
    state.add(made, np.zeros(50, np.uint8))
    state.write(path)
    before = path.read_bytes()
    for recipe, n, words in ((recipe_of("small", seed=1), 100, "another recipe"), (recipe_of("small"), 50, "ask for more")):
        with pytest.raises(ValueError, match=words):
            generate_rulesets(recipe, n, resume=path)
        assert path.read_bytes() == before
    for spoiled in (before[:-1], before[:200], b"", before[:-400] + bytes([before[-400] ^ 1]) + before[-399:]):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            generate_rulesets(recipe_of("small"), 100, resume=path)


def test_registered_kinds_ask_for_tasks_without_proofs():
    from xland_minigrid import register_rule
    from xland_minigrid.core.actions import Actions
    from xland_minigrid.core.rules import OneTileRule, beside_agent, rule_kinds

    class SolveTestRule(OneTileRule):
        when, looks = (Actions.TOGGLE,), beside_agent()
    register_rule(SolveTestRule)
    try:
        recipe = dataclasses.replace(Recipe(chain_depth=1), rule_kinds=(1, SolveTestRule))
        with pytest.raises(ValueError, match="solvable=False"):
            generate_rulesets(recipe, 10)
        made = generate_rulesets(dataclasses.replace(recipe, solvable=False), 10)
        assert (prove(*made[:3]).reason[(made.rules[..., 0] >= 12).any(1)] == Reason.UNKNOWN_KIND).all()
    finally:
        rule_kinds.remove(SolveTestRule.ID)


def test_flags_are_flags():
    with pytest.raises(ValueError, match="True or False"):
        recipe_of("small", solvable=1)


def test_an_open_form_of_a_plain_task_is_the_same_task():
    "A batch of probes holds every task in the general form; what the tables say whole is planned as ever."
    from xland_minigrid import several
    from xland_minigrid.benchmarks.probes import PROBES, probes_benchmark
    plain = make_ruleset(AgentHoldGoal(HEX), [TileNearRule(BALL, STAR, HEX)], [BALL, STAR])
    assert plan_of(plain.extend()).steps == plan_of(plain).steps == (0,) and plain.extend().reduce().extended is None
    more = make_ruleset(AgentHoldGoal(HEX), [several(TileNearRule(BALL, STAR, HEX), KEY)], [BALL, STAR])
    assert more.reduce() is more and plan_of(more) is None
    probes = probes_benchmark()
    plans = probes.plans()
    for number, one in enumerate(PROBES):
        found = plan_of(probes.get_ruleset(number))
        assert (found is None) == (plan_of(one.ruleset) is None) == (not plans.solvable[number]), one.name
    beyond = [n for n, one in enumerate(PROBES) if one.ruleset.reduce().extended is not None]
    assert len(beyond) >= 5 and (plans.reason[beyond] == Reason.UNKNOWN_KIND).all() and (plans.steps[beyond] == 255).all()


def test_no_threads_are_no_threads():
    with pytest.raises(ValueError, match="workers is 0"):
        generate_rulesets(recipe_of("trivial"), 10, workers=0)
