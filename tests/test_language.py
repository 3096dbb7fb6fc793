"""English and back: the round trip is exact for whatever a ruleset can hold, and what people write is read or refused in one sentence that helps."""
import json
import random
import re
import textwrap
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.benchmarks.generate import identities
from xland_minigrid.core.actions import Actions
from xland_minigrid.core.compose import MAX_PARTS, AllOf, AnyOf, InOrder, Not, compose, several
from xland_minigrid.core.goals import GOALS, AgentHoldGoal, AgentNearGoal, AgentOnPositionGoal, OneTileGoal, TileNearGoal, TwoTileGoal, BaseGoal, goal_kinds, register_goal, tile_at
from xland_minigrid.core.language import LEVELS, describe_goal, describe_rule, describe_ruleset, ruleset_to_dict, thing_name
from xland_minigrid.core.parse import ParseError, parse_goal, parse_rule, parse_ruleset, ruleset_from_dict
from xland_minigrid.core.rules import (
    RULES, AgentHoldRule, OneTileRule, TileNearRule, TwoTileRule, beside_agent, beside_object, in_pocket, on_cells, register_rule, rule_kinds,
)
from xland_minigrid.core.ruleset import RuleSet, make_ruleset, pad_ruleset, stack_rulesets
from xland_minigrid.core.tiles import COLOR_NAMES, NUM_COLORS, NUM_TILES, PICKABLE, Colors, Tiles, tile_name
from xland_minigrid.viz.tree import draw_ruleset

pytestmark = pytest.mark.newest

RED_BALL, BLUE_KEY, PINK_STAR, FLOOR = (5, 3), (9, 5), (14, 13), (3, 9)
COMPLETE = [level for level in LEVELS if level != "goal"]
FIGURE = SimpleNamespace(goal=[4, 5, 3, 5, 4], rules=[[3, 7, 5, 6, 6, 5, 3], [3, 6, 6, 5, 7, 3, 9], [0] * 7], init_tiles=[[7, 5], [6, 6], [5, 4], [5, 7], [0, 0]])

# Kinds of one's own: declared, worded by hand, and two that say the same ---------------------------------------------------------------------

@register_rule
class Unlock(TwoTileRule):
    when, looks = (Actions.TOGGLE,), on_cells("ahead", "ahead ahead").while_carrying(used_up=True)

@register_rule
class Split(TwoTileRule):
    when, looks = (Actions.TOGGLE, Actions.PUT_DOWN), beside_object("left", "down")

@register_rule
class Scorch(OneTileRule):
    when, looks = tuple(range(6)), beside_agent("up", "right", "left")

@register_rule
class ScorchAgain(OneTileRule):
    when, looks = Scorch.when, Scorch.looks

@register_rule
class Proverb(TwoTileRule):
    when, looks = (Actions.TOGGLE,), beside_object()

    def describe(self):
        return f"If a {tile_name(*self.tile_a)} or,\nthen: meets the {tile_name(*self.tile_b)}. All shall become one {tile_name(*self.prod_tile)}"

@register_rule
class Mimic(OneTileRule):
    "Says word for word what a built-in rule says."
    when, looks = (Actions.TOGGLE,), in_pocket()

    def describe(self):
        return describe_rule(AgentHoldRule(self.tile, self.prod_tile))

@register_rule
class Mumble(TwoTileRule):
    "Its words leave out a tile."
    when, looks = (Actions.TOGGLE,), beside_object()

    def describe(self):
        return f"mumble about a {tile_name(*self.tile_a)} and a {tile_name(*self.prod_tile)}"

@register_goal
class Watch(OneTileGoal):
    when, looks = (Actions.TURN_CLOCKWISE, Actions.TURN_COUNTERCLOCKWISE), on_cells("ahead", "ahead left")

@register_goal
class WatchStill(OneTileGoal):
    "The same place, asked after another action: as a part of a composed goal it would say the same."
    when, looks = (Actions.TOGGLE,), Watch.looks

@register_goal
class Shelve(BaseGoal):
    when, looks = (Actions.PUT_DOWN,), tile_at()
    tile: jax.Array
    position: jax.Array

@register_goal
class Wish(TwoTileGoal):
    when, looks = (Actions.TOGGLE,), beside_agent().while_carrying()

    def describe(self):
        return f"wish upon a {tile_name(*self.tile_a)} or first, then, not dream of a {tile_name(*self.tile_b)}"

ONE_TILE, TWO_TILES = (Scorch, ScorchAgain, Mimic), (Unlock, Split, Proverb)


# Exactly back: tasks within the tables -------------------------------------------------------------------------------------------------------

def random_task(rng) -> SimpleNamespace:
    "A goal of any kind, up to 8 rules of any kind and 9 objects, with padding among them; any tile in any colour."
    def thing():
        if rng.random() < 0.02:
            return rng.integers(0, NUM_TILES), rng.integers(0, NUM_COLORS)
        return FLOOR if rng.random() < 0.1 else (rng.integers(Tiles.FLOOR, NUM_TILES), rng.integers(Colors.RED, NUM_COLORS))
    kind = rng.integers(0, 15)
    place = rng.integers(0, 256 if rng.random() < 0.2 else 20, 2)
    goal = [kind, *((0,) * 4 if kind == 0 else (*place, 0, 0) if kind == 5 else (*thing(), *place) if kind == 6 else
                    (*thing(), *thing()) if goal_kinds.two[kind] else (*thing(), 0, 0))]
    rules = []
    for kind in rng.integers(0, 12, rng.integers(1, 9)):
        rules.append([0] * 7 if kind == 0 else [kind, *thing(), *thing(), *(thing() if rule_kinds.two[kind] else (0, 0))])
    tiles = [thing() if rng.random() < 0.9 else (0, 0) for _ in range(rng.integers(1, 10))]
    return SimpleNamespace(goal=np.array(goal, np.uint8), rules=np.array(rules, np.uint8), init_tiles=np.array(tiles, np.uint8))

def no_padding(task) -> list:
    "What a task holds, without rows of padding (an object that is nothing is placed nowhere)."
    rules, tiles = np.asarray(task.rules), np.asarray(task.init_tiles)
    return [np.asarray(task.goal).tolist(), rules[rules[:, 0] != 0].tolist(), tiles[~np.isin(tiles[:, 0], (Tiles.END_OF_MAP, Tiles.EMPTY))].tolist()]

def check_round_trips(n: int, seed: int) -> None:
    rng, kinds = np.random.default_rng(seed), set()
    for i in range(n):
        task = random_task(rng)
        levels = COMPLETE if i % 10 == 0 else COMPLETE[:1]
        for level in levels:
            again = parse_ruleset(describe_ruleset(task, level))
            assert no_padding(again) == no_padding(task), (level, describe_ruleset(task, level))
            assert again.extended is None and again.goal.dtype == again.rules.dtype == again.init_tiles.dtype == np.uint8
        kinds |= {("goal", int(task.goal[0])), *(("rule", int(r[0])) for r in task.rules)}
    assert kinds == {("goal", i) for i in range(15)} | {("rule", i) for i in range(12)}

def test_describe_and_parse_are_inverse():
    check_round_trips(2_000, 0)

@pytest.mark.slow
def test_describe_and_parse_are_inverse_on_20_000():
    check_round_trips(20_000, 1)

def test_generated_tasks_keep_their_identity():
    for preset in ("trivial", "high"):
        made = generate_benchmark(preset, n=12)
        for i in range(12):
            task = made.get_ruleset(i)
            again = parse_ruleset(task.describe()).validate()
            room = pad_ruleset(again, task.rules.shape[0], task.init_tiles.shape[0])
            ids = [identities(*(np.asarray(getattr(t, f))[None] for f in ("goal", "rules", "init_tiles"))) for t in (task, room)]
            assert all((a == b).all() for a, b in zip(*ids, strict=True))

def test_no_two_things_share_a_name():
    names = {thing_name(t, c) for t in range(NUM_TILES) for c in range(NUM_COLORS)}
    assert len(names) == NUM_TILES * NUM_COLORS
    for tile in range(NUM_TILES):
        for color in range(NUM_COLORS):
            code = [1, tile, color, 0, 0]
            assert np.asarray(parse_goal(describe_goal(code)).encode()).tolist() == code

def test_saved_text_is_pinned():
    "Notebooks, the README and other people's prompts hold this text: change it knowingly."
    assert describe_ruleset(FIGURE) == textwrap.dedent("""\
        Your goal: put a red ball and a green ball next to each other.
        In this world:
          1. A blue pyramid and a purple square next to each other become a red ball.
          2. A purple square and a yellow ball next to each other disappear.
        At the start there are: a blue pyramid, a purple square, a green ball, a yellow ball.""")
    assert describe_ruleset(FIGURE, "short") == textwrap.dedent("""\
        Goal: put red ball and green ball next to each other
        1. blue pyramid and purple square next to each other become red ball
        2. purple square and yellow ball next to each other disappear
        Objects: blue pyramid, purple square, green ball, yellow ball""")
    assert describe_ruleset(FIGURE, "goal") == "Your goal: put a red ball and a green ball next to each other."


# Exactly back: beyond the tables -------------------------------------------------------------------------------------------------------------

def bare(table) -> list:
    "A table of goals without its rows of padding."
    rows = np.asarray(table).tolist()
    while len(rows) > 1 and rows[-1] == [0, 0, AnyOf.OP, 1 << len(rows) - 2]:
        rows.pop()
    return rows

def same_task(a: RuleSet, b: RuleSet) -> bool:
    if a.extended is None and b.extended is None:
        return no_padding(a) == no_padding(b)
    a, b = a.extend(), b.extend()
    compiled = [np.asarray(t.extended.rules)[np.asarray(t.rules)[:, 0] != 0].tolist() for t in (a, b)]
    return compiled[0] == compiled[1] and bare(a.extended.goals) == bare(b.extended.goals) and no_padding(a) == no_padding(b)

things = st.tuples(st.sampled_from((*PICKABLE, Tiles.GOAL, Tiles.WALL, Tiles.DOOR_LOCKED)), st.integers(Colors.RED, Colors.PINK))
objects = st.tuples(st.sampled_from(PICKABLE), st.integers(Colors.RED, Colors.PINK))
places = st.tuples(st.integers(0, 255), st.integers(0, 255))
leaves = st.one_of(
    st.just(GOALS[0]()), objects.map(GOALS[1]), places.map(GOALS[5]), st.builds(GOALS[6], things, places), st.builds(Shelve, things, places),
    *(st.builds(GOALS[i], things) for i in (2, 3, 11, 12, 13, 14)), *(st.builds(GOALS[i], things, things) for i in (4, 7, 8, 9, 10)),
    st.builds(Watch, things), st.builds(WatchStill, things), st.builds(Wish, things, objects))

@st.composite
def nests(draw, room=MAX_PARTS, in_order=False):
    "A composed goal of at most `room` parts, as deep as that allows; no order within the parts of an order."
    cls = draw(st.sampled_from([AllOf, AnyOf, Not] + [InOrder] * (not in_order)))
    room, parts = room - 1, []
    for _ in range(1 if cls is Not else draw(st.integers(1, 4))):
        if room < 1:
            break
        part = draw(nests(room=room, in_order=in_order or cls is InOrder)) if room >= 2 and draw(st.booleans()) else draw(leaves)
        parts.append(part)
        room -= len(compose(part))
    return cls(*parts)

@settings(max_examples=60)
@given(nests())
def test_composed_goals_come_back(goal):
    text = describe_goal(goal)
    again = parse_goal(text)
    assert bare(again.table()) == bare(goal.table()), text
    assert bare(parse_goal(text.upper()).table()) == bare(goal.table())

@settings(max_examples=150)
@given(leaves)
def test_registered_and_plain_goals_come_back(goal):
    again = parse_goal(describe_goal(goal))
    assert type(again) is type(goal) and np.asarray(again.encode()).tolist() == np.asarray(goal.encode()).tolist()
    assert parse_goal(f"({describe_goal(goal)})").ID == goal.ID

def test_the_deepest_and_the_widest():
    deep = AgentHoldGoal(RED_BALL)
    for _ in range(MAX_PARTS - 1):
        deep = Not(deep)
    assert parse_goal(describe_goal(deep)) == deep
    for cls in (AllOf, AnyOf, InOrder):
        wide = cls(*[AgentNearGoal((5, 3 + i % 10)) for i in range(MAX_PARTS - 1)])
        assert parse_goal(describe_goal(wide)) == wide
    layered = AgentNearGoal(BLUE_KEY)
    for i in range(15):
        layered = (AllOf, AnyOf)[i % 2](layered, AgentHoldGoal((9, 3 + i % 10)))
    assert parse_goal(describe_goal(layered)) == layered
    with pytest.raises(ParseError, match="at most 32"):
        parse_goal(" or ".join(["hold a red ball"] * 32))
    with pytest.raises(ParseError, match="InOrder"):
        parse_goal("first hold a red ball, then (hold a blue key or (first hold a red ball, then hold a blue key))")

def test_a_single_part_is_not_the_goal_itself():
    "A goal of Table 2 is asked after its actions, a part of a composed goal after every step: the words must differ."
    hold = AgentHoldGoal(RED_BALL)
    texts = {describe_goal(g) for g in (hold, AllOf(hold), AnyOf(hold), InOrder(hold), Not(hold))}
    assert len(texts) == 5
    for cls in (AllOf, AnyOf, InOrder, Not):
        assert parse_goal(describe_goal(cls(hold))) == cls(hold)
        task = make_ruleset(cls(hold), [], [RED_BALL])
        for level in COMPLETE:
            assert same_task(parse_ruleset(describe_ruleset(task, level)), task), (cls, level)
        assert same_task(ruleset_from_dict(ruleset_to_dict(task)), task)

rules = st.one_of(
    st.builds(RULES[1], objects, things | st.just(FLOOR)), *(st.builds(c, things, things | st.just(FLOOR)) for c in (RULES[2], *RULES[8:], *ONE_TILE[:2])),
    st.builds(Mimic, objects, things | st.just(FLOOR)), *(st.builds(c, things, things, things | st.just(FLOOR)) for c in RULES[3:8]),
    *(st.builds(c, things, objects, things | st.just(FLOOR)) for c in TWO_TILES))

@st.composite
def open_tasks(draw):
    made = [several(r, *extra) if (extra := draw(st.lists(things, max_size=2))) else r for r in draw(st.sampled_from([0, 3]).flatmap(lambda n: st.lists(rules, min_size=n, max_size=n)))]  # few shapes, few programs
    return make_ruleset(draw(leaves | nests(room=8)), made, draw(st.lists(things, max_size=5)))

@settings(max_examples=15)
@given(open_tasks())
def test_open_tasks_come_back(task):
    for level in COMPLETE:
        text = describe_ruleset(task, level)
        assert same_task(parse_ruleset(text), task), (level, text)
    data = json.loads(json.dumps(ruleset_to_dict(task)))
    assert same_task(ruleset_from_dict(data), task), data

@pytest.mark.slow
@settings(max_examples=600)
@given(open_tasks())
def test_open_tasks_come_back_600(task):
    for level in COMPLETE:
        assert same_task(parse_ruleset(describe_ruleset(task, level)), task)
    assert same_task(ruleset_from_dict(json.loads(json.dumps(ruleset_to_dict(task)))), task)

def test_padding_of_an_open_task_is_not_told():
    task = make_ruleset(InOrder(AgentHoldGoal(RED_BALL), AgentNearGoal(BLUE_KEY)), [several(AgentHoldRule(RED_BALL, BLUE_KEY), PINK_STAR)], [RED_BALL])
    padded = pad_ruleset(task, 5, 4, 9)
    assert describe_ruleset(padded) == describe_ruleset(task) and same_task(parse_ruleset(describe_ruleset(padded)), task)

def test_kinds_that_say_the_same_are_told_apart():
    assert describe_rule(ScorchAgain(RED_BALL, BLUE_KEY)) == describe_rule(Scorch(RED_BALL, BLUE_KEY)) + " (ScorchAgain)"
    assert describe_rule(Mimic(RED_BALL, BLUE_KEY)) == "a red ball in your hands becomes a blue key (Mimic)"
    assert "(WatchStill)" not in describe_goal(WatchStill(RED_BALL)) and "(WatchStill)" in describe_goal(Not(WatchStill(RED_BALL)))
    assert type(parse_goal("have a red ball in front of you or ahead of you to the left (asked after toggling)")) is WatchStill

def test_words_that_leave_out_a_tile_are_refused_by_name():
    with pytest.raises(ParseError, match="Mumble.*describe"):
        parse_rule(describe_rule(Mumble(RED_BALL, BLUE_KEY, PINK_STAR)))

def test_a_class_registered_anew_is_not_guessed():
    def cell(action):
        return register_rule(type("Anew", (OneTileRule,), {"__module__": __name__, "__qualname__": "Anew", "when": (action,), "looks": on_cells("behind")}))
    task = make_ruleset(None, [cell(Actions.TOGGLE)(RED_BALL, BLUE_KEY)], [RED_BALL])
    assert same_task(parse_ruleset(task.describe()), task)
    cell(Actions.PICK_UP)
    with pytest.raises(ParseError, match="make the task again"):
        parse_ruleset(task.describe())
    with pytest.raises(ValueError, match="make the task again"):
        ruleset_to_dict(task)


# As people write -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, code", [
    ("Hold the red ball!", [1, 5, 3, 0, 0]), ("pick up a red circle", [1, 5, 3, 0, 0]), ("carry one red ball", [1, 5, 3, 0, 0]), ("Your goal is to hold a red ball", [1, 5, 3, 0, 0]),
    ("stand beside a gray hexagon", [3, 13, 8, 0, 0]), ("stand near a grey hex", [3, 13, 8, 0, 0]), ("stand adjacent to the grey hex", [3, 13, 8, 0, 0]),
    ("place the red ball beside the blue key", [4, 5, 3, 9, 5]), ("put red ball next to blue key", [4, 5, 3, 9, 5]), ("put red balls and blue keys next to each other", [4, 5, 3, 9, 5]),
    ("have the blue key to the left of the red ball", [10, 5, 3, 9, 5]), ("stand so that\n the red ball\tis below you", [13, 5, 3, 0, 0]), ("hold a locked violet door", [1, 10, 6, 0, 0]),
])
def test_goals_as_people_write_them(text, code):
    assert np.asarray(parse_goal(text).encode()).tolist() == code
    assert np.asarray(parse_goal(f"  {text.upper()}\n").encode()).tolist() == code

@pytest.mark.parametrize("text, code", [
    ("a red circle in your hands turns into a blue key.", [1, 5, 3, 9, 5]), ("a red ball beside you becomes a blue key", [2, 5, 3, 9, 5]),
    ("a red ball beside a blue key becomes a pink star", [3, 5, 3, 9, 5, 14, 13]), ("red balls and blue keys next to each other vanish", [3, 5, 3, 9, 5, 3, 9]),
    ("A blue key above a red ball: together they turn into a pink star", [4, 5, 3, 9, 5, 14, 13]), ("the red ball above you becomes a blue key", [8, 5, 3, 9, 5]),
    ("a red ball to the left of you vanishes", [11, 5, 3, 3, 9]),
])
def test_rules_as_people_write_them(text, code):
    assert np.asarray(parse_rule(text).encode()).tolist() == [*code, *[0] * (7 - len(code))]

@pytest.mark.parametrize("text, goal", [
    ("hold a red ball and at the same time stand near a blue key", AllOf(AgentHoldGoal(RED_BALL), AgentNearGoal(BLUE_KEY))),
    ("hold a red ball, then stand at row 1, column 2", InOrder(AgentHoldGoal(RED_BALL), AgentOnPositionGoal((1, 2)))),
    ("First hold a red ball and then put the red ball next to the blue key", InOrder(AgentHoldGoal(RED_BALL), TileNearGoal(RED_BALL, BLUE_KEY))),
    ("hold a red ball or do not stand near a blue key", AnyOf(AgentHoldGoal(RED_BALL), Not(AgentNearGoal(BLUE_KEY)))),
    ("do not (hold a red ball or hold a blue key)", Not(AnyOf(AgentHoldGoal(RED_BALL), AgentHoldGoal(BLUE_KEY)))),
])
def test_composed_goals_as_people_write_them(text, goal):
    assert parse_goal(text) == goal

STUDENT = """
Goal: put the red circle beside the green ball.

Rules:
1. A blue triangle next to a purple box becomes a red ball
2. Purple square and yellow ball next to each other vanish.

Objects: blue pyramid, purple square, a green ball and a yellow ball
"""

def test_tasks_as_people_write_them():
    wanted = no_padding(FIGURE)
    full = describe_ruleset(FIGURE)
    versions = [full.lower(), full.replace("\n", " "), textwrap.fill(full, 40), re.sub(r"\ba ", "", full), full.replace("Your goal:", "Goal:"), STUDENT, full.replace("\n", "\r\n"),
                full.replace("In this world:", "Rules:").replace("At the start there are:", "Objects:"), full.replace("In this world:\n", ""),
                "\n".join(full.split("\n")[i] for i in (1, 2, 3, 4, 0)), describe_ruleset(FIGURE, "short").upper()]
    for text in versions:
        assert no_padding(parse_ruleset(text)) == wanted, text
    assert no_padding(parse_ruleset("hold a red ball")) == [[1, 5, 3, 0, 0], [], []]


# Errors --------------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("read, text, says", [
    (parse_goal, "hold a crimson ball", r"'crimson'.*not a colour: the colours are red, green"), (parse_goal, "stand next to a red pyarmid", r"'pyarmid'.*did you mean 'pyramid'"),
    (parse_goal, "hold a ball", "no colour"), (parse_goal, "hold a red", "no shape: the shapes are ball"), (parse_goal, "hold a red green ball", "2 colours"),
    (parse_goal, "eat a red ball", r"'eat red ball'; the nearest I know is 'hold a red ball'"), (parse_goal, "", "The goal is missing"), (parse_goal, " .\n", "The goal is missing"),
    (parse_goal, "stand at row 300, column 2", "0 to 255"), (parse_goal, "hold a red ball or hold a blue key, then hold a pink star", "add brackets"),
    (parse_goal, "(hold a red ball", "every '\\(' needs"), (parse_goal, "first hold a red ball or hold a blue key", "has 'first'"), (parse_goal, "first hold a red wall, then hold a red ball", "cannot be carried"),
    (parse_rule, "a red ball in your hands becomes a bleu key", r"'bleu'.*did you mean 'blue'"), (parse_rule, "a red ball", "the nearest I know"), (parse_rule, "", "The rule is missing"),
    (parse_rule, "a red ball in your foot becomes a blue key", "in your foot"), (parse_rule, "a red ball in your hands becomes a blue key, and a red key, a red ball and a red hex appear beside you", "up to three things"),
    (parse_ruleset, "Rules: 1. a red ball in your hands becomes a blue key.", "begin with 'Your goal"), (parse_ruleset, "Your goal: hold a red ball.\nIn this world:\n  1. Pigs fly.\nAt the start there are: a red ball.", "pigs fly"),
    (parse_ruleset, "Your goal: hold a red ball.\nIn this world nothing ever changes by itself.\nAt the start there are: a red ball, a red elephant.", "elephant"), (parse_ruleset, "", "The goal is missing"),
    (parse_ruleset, "Goal: hold a red ball. Objects: 9999 red balls.", "9999"), (parse_goal, "stand at row 2, column 9999", "0 to 255"),
])
def test_errors_name_the_words_and_the_remedy(read, text, says):
    with pytest.raises(ParseError, match=says) as caught:
        read(text)
    message = str(caught.value)
    assert "\n" not in message and message[-1] in ".?'" and len(message) < 330 and isinstance(caught.value, ValueError)

@pytest.mark.parametrize("read", [parse_goal, parse_rule, parse_ruleset])
@pytest.mark.parametrize("what", [None, 3, b"hold a red ball", ["hold a red ball"], np.zeros(5)])
def test_what_is_no_text(read, what):
    with pytest.raises(TypeError, match="is read from a str"):
        read(what)

def test_a_misspelt_word_is_found():
    "Two letters swapped in a name: the error shows the word, and mostly the right one."
    found = total = 0
    for name in (*COLOR_NAMES[3:], "ball", "square", "pyramid", "star"):
        for i in range(len(name) - 1):
            wrong = name[:i] + name[i + 1] + name[i] + name[i + 2:]
            if wrong == name or wrong in COLOR_NAMES:
                continue
            with pytest.raises(ParseError) as caught:
                parse_goal(f"hold a {wrong} ball" if name in COLOR_NAMES else f"hold a red {wrong}")
            assert f"'{wrong}'" in str(caught.value)
            total, found = total + 1, found + (f"did you mean '{name}'" in str(caught.value))
    assert found > 0.8 * total, (found, total)

def test_mutilated_texts_are_read_or_refused():
    "Words dropped, doubled, swapped, letters changed: a ruleset that describes itself and comes back, or a ParseError of one line; nothing else."
    chance, read, refused = random.Random(0), 0, 0
    texts = [describe_ruleset(random_task(np.random.default_rng(i)), COMPLETE[i % len(COMPLETE)]) for i in range(40)] + [STUDENT]
    for i in range(200):
        words = re.split(r"(\s+)", texts[i % len(texts)])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(words))
            words[at:at + 1] = chance.choice([[], [words[at]] * 2, [words[chance.randrange(len(words))]], [words[at][::-1]], [chance.choice(["(", ")", "7.", "then", "or", ":", "é", "\n", " and ", "first"])]])
        text = "".join(words)
        try:
            task = parse_ruleset(text)
        except ParseError as error:
            refused += 1
            assert "\n" not in str(error), text
        else:
            read += 1
            assert same_task(parse_ruleset(task.describe()), task)
    assert read > 20 and refused > 50, (read, refused)

@pytest.mark.parametrize("text", [
    "(" * 5_000 + "hold a red ball" + ")" * 5_000, "do not " * 5_000 + "hold a red ball", "hold a red ball and " * 2_000, "a red ball next to " * 3_000, "or " * 9_000, "first " * 3_000,
    "stand at row " + "9" * 5_000 + ", column 1", "hold " + "x" * 50_000, "Goal: hold a red ball. Objects: " + "9" * 5_000 + " red balls", "\x00", "\u202e", "goal " * 5_000, "1. " * 5_000, "hold a red ball " * 20, "do not " * 1_000 + "hold a red ball",
])
def test_huge_and_odd_texts_are_refused_soon(text):
    for read in (parse_goal, parse_rule, parse_ruleset):
        try:
            read(text)
        except ParseError as error:
            assert len(str(error)) < 400 and "\n" not in str(error)

def test_describing_what_cannot_be_described():
    task = make_ruleset(AgentHoldGoal(RED_BALL), [AgentHoldRule(RED_BALL, BLUE_KEY)], [RED_BALL])
    with pytest.raises(ValueError, match="choose from full, short"):
        describe_ruleset(task, "long")
    with pytest.raises(ValueError, match="one at a time"):
        describe_ruleset(stack_rulesets([task, task]))
    with pytest.raises(ValueError, match="one at a time"):
        ruleset_to_dict(stack_rulesets([task, task]))

def test_several_products_are_described_by_the_rule():
    rule = several(TileNearRule(RED_BALL, BLUE_KEY, PINK_STAR), RED_BALL, BLUE_KEY)
    again = parse_rule(describe_rule(rule))
    assert (again.more == rule.more).all() and (np.asarray(again.encode()) == np.asarray(rule.encode())).all()
    assert describe_rule(rule).endswith("and a red ball and a blue key appear beside you")


# Dictionaries --------------------------------------------------------------------------------------------------------------------------------

def test_dictionaries_come_back():
    rng = np.random.default_rng(5)
    for _ in range(300):
        task = random_task(rng)
        again = ruleset_from_dict(json.loads(json.dumps(ruleset_to_dict(task))))
        assert no_padding(again) == no_padding(task)
    assert ruleset_to_dict(FIGURE)["rules"][1] == {"kind": "TileNearRule", "tile_a": "purple square", "tile_b": "yellow ball", "prod_tile": "black floor"}

@pytest.mark.parametrize("change, says", [
    (lambda d: d.pop("objects"), "has the keys"), (lambda d: d["goal"].pop("tile"), "needs 'tile'"), (lambda d: d["goal"].update(kind="AgentHoldGaol"), "did you mean 'AgentHoldGoal'"),
    (lambda d: d["goal"].update(tile="crimson ball"), "crimson"), (lambda d: d["rules"].append("x"), "is not a rule"), (lambda d: d["rules"][0].update(more=["red ball"] * 3), "up to three"),
    (lambda d: d["objects"].append("red elephant"), "elephant"), (lambda d: d.update(goal={"kind": "AllOf", "parts": 3}), "list is needed"), (lambda d: d.update(goal={"kind": "AllOf", "parts": []}), "at least one part"),
    (lambda d: d.update(goal={"kind": "AgentOnPositionGoal", "position": [1, -2]}), "0 to 255"), (lambda d: d.update(goal={"kind": "AgentOnPositionGoal", "position": 7}), "a row and a column"),
    (lambda d: d.update(rules=3), "list"), (lambda d: d.update(objects="red ball"), "list"), (lambda d: d["rules"][0].update(more="red ball"), "list"), (lambda d: d["goal"].update(kind=["x"]), "not a goal"),
])
def test_wrong_dictionaries(change, says):
    data = ruleset_to_dict(make_ruleset(AgentHoldGoal(RED_BALL), [AgentHoldRule(RED_BALL, BLUE_KEY)], [RED_BALL]))
    change(data)
    with pytest.raises(ValueError, match=says):
        ruleset_from_dict(data)
    with pytest.raises(TypeError, match="is read from a str"):
        ruleset_from_dict({"goal": {"kind": "AgentHoldGoal", "tile": 7}, "rules": [], "objects": []})


# The task tree as a drawing -----------------------------------------------------------------------------------------------------------

def text_box(element):
    "The box of a word in DejaVu Sans, which is wider than most fonts."
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    (left, bottom), (right, top) = TextPath((0, 0), element.text, size=10, prop=FontProperties(family="DejaVu Sans", weight=element.get("font-weight"))).get_extents().get_points()
    x = float(element.get("x")) - {"middle": (left + right) / 2, "start": left}[element.get("text-anchor")]
    return x + left, float(element.get("y")) - top, x + right, float(element.get("y")) - bottom

def shapes(svg) -> dict:
    "Boxes (x0, y0, x1, y1) of all elements of a drawing, by what they are."
    found = {"card": [], "sprite": [], "text": [], "box": [], "frame": [], "edge": []}
    for element in ElementTree.fromstring(svg).iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "text":
            found["text"].append(text_box(element))
        elif kind == "path" and "H" not in element.get("d"):  # control points: their box is the curve's or larger; the line with an H separates the distractors
            points = np.reshape(re.findall(r"[\d.]+", element.get("d")), (-1, 2)).astype(float)
            found["edge"].append((*points.min(0), *points.max(0)))
        elif kind in ("rect", "image"):
            x, y, width, height = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
            name = "sprite" if kind == "image" else "card" if not found["card"] else "frame" if element.get("fill") == "none" else "box"
            found[name].append((x, y, x + width, y + height))
    return found

def overlap(a, b) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > .01 and min(a[3], b[3]) - max(a[1], b[1]) > .01

def inside(a, b) -> bool:
    return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3]

def check_picture(task):
    found = shapes(draw_ruleset(task).svg)
    card, = found.pop("card")
    everything = [b for boxes in found.values() for b in boxes]
    assert all(inside(b, card) for b in everything), "all is on the card"
    solid = found["sprite"] + found["text"]
    assert not [(a, b) for i, a in enumerate(solid) for b in solid[:i] if overlap(a, b)], "no word or picture covers another"
    for a in found["box"]:
        assert not [b for b in found["box"] if b is not a and overlap(a, b)], "no box covers another"
        assert all(inside(t, a) for t in found["text"] if overlap(t, a)), "words stand in a box or outside it"
        assert not [s for s in found["sprite"] + found["frame"] if overlap(a, s)]
    for frame in found["frame"]:
        assert not [t for t in found["text"] + found["box"] if overlap(frame, t)]
        assert all(inside(s, frame) for s in found["sprite"] if overlap(s, frame)) and not [f for f in found["frame"] if f is not frame and overlap(f, frame)]
    for edge in found["edge"]:
        assert not [s for s in found["sprite"] + found["text"] if overlap(edge, s)], "lines run between the levels"
    return found

def test_nothing_overlaps_in_the_largest_task():
    made = generate_benchmark("high", n=300, seed=1, prune_prob=0.0, sample_distractor_rules=False)
    counts = (np.asarray(made.rules)[..., 0] > 0).sum(1)
    assert counts.max() == 18, "the largest tasks there are"
    check_picture(made.get_ruleset(int(counts.argmax())))

@pytest.mark.slow
def test_nothing_overlaps_in_generated_tasks():
    for preset, parameters in (("trivial", {}), ("small", {}), ("medium", {}), ("high", {}), ("trivial", dict(num_distractor_rules=16, num_distractor_objects=20))):
        made = generate_benchmark(preset, n=8, **parameters)
        for i in range(8):
            check_picture(made.get_ruleset(i))

def test_nothing_overlaps_in_tasks_that_make_no_sense():
    "Circles, several makers of one object, missing objects, every goal and rule, things that disappear."
    rng = np.random.default_rng(3)
    for i in range(0, 15, 2):
        pick = lambda: (rng.integers(5, 8), rng.integers(3, 6)) if rng.random() < .9 else FLOOR
        rules = [[k, *pick(), *pick(), *(pick() if 3 <= k <= 7 else (0, 0))] for k in rng.integers(1, 12, rng.integers(0, 9))]
        check_picture(SimpleNamespace(goal=np.array([i, *pick(), *pick()], np.uint8), rules=np.array([*rules, [0] * 7], np.uint8), init_tiles=np.array([pick(), (0, 0)], np.uint8)))

@settings(max_examples=4)
@given(open_tasks())
def test_nothing_overlaps_in_open_tasks(task):
    check_picture(task)

def test_the_picture_shows_the_task():
    task = make_ruleset(InOrder(AgentHoldGoal(PINK_STAR), AgentNearGoal((13, 6))),
                        [several(TileNearRule(RED_BALL, BLUE_KEY, PINK_STAR), (13, 6)), AgentHoldRule(RED_BALL, FLOOR), Unlock((10, 3), BLUE_KEY, (12, 3))], [RED_BALL, BLUE_KEY])
    found = check_picture(task)
    assert len(found["box"]) == 1 + 3 and len(found["sprite"]) == 4 + 1 + 1 + 3  # goals, inputs; what appears besides; distractors

def test_one_picture_at_a_time():
    task = make_ruleset(AgentHoldGoal(RED_BALL), [AgentHoldRule(RED_BALL, BLUE_KEY)], [RED_BALL])
    with pytest.raises(ValueError, match="one at a time"):
        draw_ruleset(stack_rulesets([task, task]))
