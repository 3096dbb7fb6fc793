"""The widgets that people play and look at: what their methods and buttons do, what remains without a kernel, and what they refuse."""
import re
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import xland_minigrid
from xland_minigrid.benchmarks import generate_benchmark, solve_from
from xland_minigrid.benchmarks.benchmark import Benchmark
from xland_minigrid.core.goals import AgentHoldGoal
from xland_minigrid.core.rules import AgentHoldRule
from xland_minigrid.core.ruleset import make_ruleset
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.viz.control import Trial, view_of
from xland_minigrid.viz.images import RGBImgObservationWrapper
from xland_minigrid.viz.widgets import base

pytest.importorskip("ipywidgets")
from xland_minigrid.viz.widgets.env_player import EnvPlayer, trials_html  # noqa: E402
from xland_minigrid.viz.widgets.explorer import Facts, RulesetExplorer, find, matches, read_search  # noqa: E402
from worlds import CLASSES  # noqa: E402

R1 = "XLand-MiniGrid-R1-9x9"


@pytest.fixture(scope="module")
def tasks():
    return generate_benchmark("medium", n=300)


# ---------------------------------------------------------------- base


class Note(base.Shown):
    _name = "note"

    def still(self):
        return base.still_page("<b>still</b>", "note", "a <note>")

    def _build(self):
        return [base.html("live", "live")]


def test_three_forms_at_once():
    note = Note()
    bundle = note._repr_mimebundle_()
    assert bundle["text/plain"] == "Note()" and "<b>still</b>" in bundle["text/html"] and "a &lt;note&gt;" in bundle["text/html"]
    assert bundle[base.VIEW] == {"version_major": 2, "version_minor": 0, "model_id": note.widget.model_id}
    assert {"xmg-w", "xmg-w-note"} <= set(note.widget._dom_classes) and note.widget is note.widget


def test_without_ipywidgets_the_still_remains():
    with mock.patch.dict(sys.modules, {"ipywidgets": None}):
        with pytest.raises(ImportError, match=r"xland_minigrid\[notebook\]"):
            _ = Note().widget
        player = EnvPlayer("MiniGrid-Empty-5x5")
        player.step("forward")
        bundle = player._repr_mimebundle_()
    assert base.VIEW not in bundle and "xland_minigrid[notebook]" in bundle["text/html"] and "data:image/png" in bundle["text/html"]


def test_a_button_says_what_went_wrong():
    said = []

    def fails():
        raise KeyError("no such thing")
    base.button("do", "do", fails, say=said.append).click()
    assert said == ["no such thing"]
    with pytest.raises(KeyError):
        base.spoken(fails)
    with pytest.raises(ZeroDivisionError):  # a fault of the program is not spoken softly
        base.spoken(lambda: 1 / 0, said.append)


def test_scripts_run_in_a_frame_and_text_is_escaped():
    framed = base.framed('<script>let a = "<b>";</script>', 'a "title"')
    assert framed.count("<script") == 0 and 'title="a &quot;title&quot;"' in framed and "&lt;script&gt;" in framed
    assert "<i>" not in base.folded("<i>", "body") and "<i>" not in base.words_html("<i>")


def test_keys_answer_every_press():
    if base._keys_class() is None:
        pytest.skip("no anywidget here")
    heard = []
    pad = base.key_pad(["a"], heard.append)
    pad.pressed, pad.pressed = [1, "a"], [2, "b"]
    assert heard == ["a"] and pad.answered == 2


# ---------------------------------------------------------------- the player


@pytest.mark.parametrize("env", [R1, "MiniGrid-DoorKey-6x6"])  # one of each kind
def test_the_player_does_what_the_environment_does(env):
    "The same keys and actions as by hand."
    player = EnvPlayer(env, seed=5)
    world, params = player.env, player.params
    key, first = jax.random.split(jax.random.key(5))
    timestep = jax.jit(world.reset)(params, first)
    step = jax.jit(world.step)
    for action in np.random.default_rng(0).integers(6, size=25):
        jax.tree.map(np.testing.assert_array_equal, player.timestep.observation, timestep.observation)
        player.step(int(action))
        timestep = step(params, timestep, int(action))
        if bool(timestep.last()):
            break
    assert (np.asarray(player.timestep.state.cells) == np.asarray(timestep.state.cells)).all()
    assert len(player.film()) == len(player.moments)


@pytest.mark.slow
@pytest.mark.parametrize("env", CLASSES)
def test_every_environment_can_be_played(env):
    player = EnvPlayer(env)
    player.play("wdwapxt")
    assert "data:image/png" in player.still() and player.widget is not None


def test_trials_end_in_four_ways():
    key = (Tiles.KEY, Colors.GREEN)
    easy = make_ruleset(AgentHoldGoal(key), [], [key])
    env, params = xland_minigrid.make(R1, max_steps=40)
    player = EnvPlayer(env, easy, params=params, seed=3)
    for action in solve_from(easy, player.timestep, params).actions:
        player.step(action)
    steps = int(player.timestep.state.step_num)
    assert player.trials == [Trial(1, "won", steps, pytest.approx(1 - 0.9 * steps / 40))] and player.rewards == [player.trials[0].reward]
    assert "goal reached" in player.message and "begins trial 2" in player.message
    player.step(0)
    assert player.trial == 2 and int(player.timestep.state.step_num) == 0 and len(player.trials) == 1
    player.new_trial()  # nothing was done: nothing was given up
    player.step("left")
    player.new_trial()
    assert player.trials[1:] == [Trial(3, "given up", 1, 0.0)] and player.trial == 4
    player.play("left " * 40)
    assert player.trials[-1] == Trial(4, "out of time", 40, 0.0) and len(player.rewards) == 2
    html = trials_html(player.trials)
    assert html.index(">out of time<") < html.index(">given up<") < html.index(">won<") and "1 of 3 won" in html


def test_lava_loses():
    player = EnvPlayer("MiniGrid-LavaGapS5")
    cells = np.asarray(player.timestep.state.cells)
    (row, col), = np.argwhere(cells >> 4 == Tiles.LAVA)[:1]
    agent = player.timestep.state.agent.replace(position=np.array([row, col - 1], np.int32), direction=np.int32(1))
    player.timestep = player.timestep.replace(state=player.timestep.state.replace(agent=jax.tree.map(lambda new, old: jax.numpy.asarray(new, old.dtype), agent, player.timestep.state.agent)))
    player.step("forward")
    assert player.trials == [Trial(1, "lost", 1, 0.0)] and "lost" in player.message


def test_hints_lead_to_the_goal():
    player = EnvPlayer("XLand-MiniGrid-R1-9x9", seed=4)
    _ = player.widget
    player.buttons["hint"].click()
    assert player.message.startswith("hint: ") and "steps to go" in player.message
    while not player.timestep.last():
        player.step(player.hint().removeprefix("hint: ").split(";")[0])
    assert player.timestep.reward > 0 and player.hint() == "no hint: this trial is over"
    assert "no hint" in EnvPlayer("MiniGrid-Empty-5x5").hint()


def test_goals_that_are_still_possible():
    "As the reference player concludes from what was seen and done, whether it was asked before or later."
    ball, key = (Tiles.BALL, Colors.RED), (Tiles.KEY, Colors.GREEN)
    task = make_ruleset(AgentHoldGoal(key), [], [ball, key])
    player, later = (EnvPlayer("XLand-MiniGrid-R1-9x9", task, seed=1) for _ in range(2))
    _ = player.widget
    assert player._parts["possible"].value == "" and not player.show_goals
    player.buttons["goals"].click()
    first = player.goals()
    assert f">{len(first)}</span>" in player._parts["possible"].value and "about something unseen" in first
    for _ in range(2):
        for action in solve_from(task, player.timestep, player.params).actions.tolist():
            for each in (player, later):
                each.step(action)
        left = player.goals()
        assert "hold a green key" in left and len(left) < len(first) and "about something unseen" not in left
        for each in (player, later):
            each.step(0)
    assert "hold a red ball" not in left and later.goals() == left and "hold a green key" in player.still()
    assert all(name in player._parts["possible"].value for name in left[:5])
    many = EnvPlayer("XLand-MiniGrid-R1-9x9", task, seed=1)
    many.play("wd reset aa")  # a trial given up concludes nothing more
    assert set(left) < set(many.goals())
    assert player.buttons["goals"].click() is None and player._parts["possible"].value == ""
    for other in (EnvPlayer("MiniGrid-Empty-5x5"), EnvPlayer("XLand-MiniGrid-R1-9x9")):  # no goal in words; rules
        _ = other.widget
        other.buttons["goals"].click()
        assert "only in tasks without rules" in other._parts["message"].value and not other.show_goals


def test_buttons_and_methods_are_one(tasks):
    player = EnvPlayer(R1, ruleset=tasks.get_ruleset(2))
    _ = player.widget
    before = player._parts["world"].value
    player.buttons["left"].click()
    assert int(player.timestep.state.step_num) == 1 and player._parts["world"].value != before and "Turn counter-clockwise" in player._parts["message"].value
    shown = player._parts["view"].value
    player.step("right")
    assert player._parts["view"].value != shown and "<b>2 of 243</b>" in player._parts["facts"].value
    rules = player._parts["task"].value
    assert "<details" in rules and "open" not in re.findall(r"<details[^>]*>", rules)[0] and "Your goal" in rules and "Task tree" in rules
    player.buttons["new-trial"].click()
    assert player.trial == 2 and player._parts["task"].value is rules


def test_keys_play(tasks):
    if base._keys_class() is None:
        pytest.skip("no anywidget here")
    player = EnvPlayer(R1, ruleset=tasks.get_ruleset(2))
    def pads(widget):
        return [widget] if hasattr(widget, "pressed") else [p for child in getattr(widget, "children", ()) for p in pads(child)]
    pad, = pads(player.widget)
    pad.pressed = [1, "d"]
    pad.pressed = [2, "d"]
    assert [m.done for m in player.moments] == ["start", "turn clockwise", "turn clockwise"] and pad.answered == 2
    pad.pressed = [3, "r"]
    assert player.trial == 2
    pad.pressed = [4, "h"]
    assert player.message.startswith("hint: ") and len(player.moments) == 4


@pytest.mark.parametrize("see_through_walls", [True, False])
def test_what_the_agent_sees_survives_wrappers(tasks, see_through_walls):
    env, params = xland_minigrid.make("XLand-MiniGrid-R4-9x9", see_through_walls=see_through_walls)
    plain = jax.jit(env.reset)(params.replace(ruleset=tasks.get_ruleset(1)), jax.random.key(1))
    seen = np.asarray(plain.observation)
    assert (seen[..., 0] == Tiles.UNSEEN).any() != see_through_walls
    for other in (seen, {"img": seen, "direction": np.zeros(4)}, np.zeros((224, 224, 3), np.uint8), {"img": np.zeros((224, 224, 3), np.uint8)}, np.zeros(7)):
        assert (view_of(env, params, plain.replace(observation=other)) == seen).all()


def test_the_film_shows_what_was_played(tasks):
    player = EnvPlayer(R1, ruleset=tasks.get_ruleset(2))
    player.play("w reset d")
    film = player.film(tile_size=8)
    assert [c.split(": ")[1] for c in film.captions] == ["start", "move forward", "start", "turn clockwise"]
    assert film.captions[3].startswith("trial 2, step 1") and film.markers == {0: "trial 1", 2: "2"} and film.frames.shape == (4, 72, 72, 3)


def test_what_cannot_be_played():
    table = [
        (("XLand-R1",), "Unknown environment"), ((None,), "give the name"), ((R1, "a task"), "RuleSet"), ((R1, None, {"params": 3}), "params"), ((R1, None, {"seed": -1}), "seed"),
        ((R1, None, {"seed": 1.5}), "seed"), (("MiniGrid-Empty-5x5", "small"), "no rulesets"),
    ]
    for arguments, words in table:
        *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
        with pytest.raises((TypeError, ValueError), match=words):
            EnvPlayer(*positional, **options)


def test_batches_and_automatic_resets_cannot_be_played(tasks):
    env, params = xland_minigrid.make(R1)
    with pytest.raises(ValueError, match="one at a time"):
        EnvPlayer(env, tasks.get_rulesets([0, 1]))
    with pytest.raises(ValueError, match="without it"):
        EnvPlayer(RGBImgObservationWrapper(GymAutoResetWrapper(env)), params=params)
    with pytest.raises(ValueError, match="no rulesets"):
        EnvPlayer("MiniGrid-Empty-5x5", tasks.get_ruleset(0))


def test_what_is_no_action():
    player = EnvPlayer("MiniGrid-Empty-5x5")
    for action in (6, -1, 2.5, True, None, "jump", "forward left", "reset", [0], "", float("nan"), "a b", b"w", np.array([0])):
        with pytest.raises((TypeError, ValueError)):
            player.step(action)
    with pytest.raises(ValueError):
        player.play("forward quit")
    assert len(player.moments) == 1 and int(player.timestep.state.step_num) == 0


# ---------------------------------------------------------------- the explorer


@pytest.fixture(scope="module")
def facts(tasks):
    return Facts(tasks, *xland_minigrid.make(R1))


@pytest.fixture(scope="module")
def one_explorer(tasks):
    return RulesetExplorer(tasks)


@pytest.fixture
def explorer(one_explorer):
    return one_explorer.filter()


@pytest.mark.parametrize("text", ["red ball", "ball", "pink", "star", "grey key"])
def test_a_search_finds_what_the_english_says(tasks, facts, text):
    said = [bool(re.search(rf"\b{text}\b", tasks.get_ruleset(i).describe())) for i in range(150)]
    assert matches(facts, read_search(text)[0])[:150].tolist() == said and 0 < sum(said) < 150


def test_a_search_knows_places(tasks, facts):
    goal, rules, start = (find(facts, text=f"{place}: blue").rows for place in ("goal", "rules", "start"))
    goals, tiles = np.asarray(tasks.goals), np.asarray(tasks.init_tiles)
    assert (goal == [i for i, g in enumerate(goals) if "blue" in tasks.get_ruleset(i).describe("goal")]).all() and len(goal)
    assert (start == np.flatnonzero((tiles[..., 1] == Colors.BLUE).any(1))).all() and len(rules)
    anywhere = find(facts, text="blue").rows
    assert set(anywhere) == {*goal, *rules, *start, *find(facts, text="makes: blue").rows} and goals.shape[0] > len(anywhere)


def test_terms_and_filters_are_all_to_be_met(facts):
    both = find(facts, text="red, key", num_rules=(2, 3)).rows
    one, other, third = find(facts, text="red").rows, find(facts, text="key").rows, find(facts, num_rules=(2, 3)).rows
    assert set(both) == set(one) & set(other) & set(third) and len(both)


def test_filters_that_need_a_proof(tasks, facts):
    plans = tasks.plans()
    for name in ("depth", "num_steps", "dead_ends"):
        wanted = np.flatnonzero(plans.solvable & (getattr(plans, name) >= 1) & (getattr(plans, name) <= 2))
        assert (find(facts, **{name: (1, 2)}).rows == wanted).all() and len(wanted)
    easy, medium, hard = (find(facts, difficulty=d).rows for d in ("easy", "medium", "hard"))
    assert set(easy) | set(medium) | set(hard) == set(np.flatnonzero(plans.solvable)) and facts.steps[easy].max() <= 15 < facts.steps[medium].max()
    assert set(find(facts, solvable=True).rows) | set(find(facts, solvable=False).rows) == set(range(300))


def test_tasks_are_proved_once_and_only_where_needed(tasks):
    facts = Facts(tasks, *xland_minigrid.make(R1))
    few = find(facts, text="goal: red ball", depth=(0, 9))
    assert facts.known.sum() == few.looked_at == few.quick < 100
    part = find(facts, depth=(0, 9), limit=50)
    assert part.looked_at == 50 and part.quick == 300 and part.rows.max() < 50
    with mock.patch("xland_minigrid.viz.widgets.explorer.prove", side_effect=AssertionError):
        assert (find(facts, depth=(0, 9), limit=50).rows == part.rows).all()


def test_goal_kinds_by_name_class_and_number(facts):
    by_name = find(facts, goal_kind="AgentHoldGoal").rows
    assert len(by_name) and all((find(facts, goal_kind=kind).rows == by_name).all() for kind in ("agenthold", AgentHoldGoal, 1, [1], np.int64(1)))


def test_what_is_no_filter(explorer):
    criteria = explorer.filter(num_rules=(0, 3)).criteria
    before, table = explorer.found, [{"text": "dragon"}, {"text": 3}, {"text": "room: key"}, {"text": "red blue ball"}, {"goal_kind": "hug"}, {"goal_kind": 99}, {"goal_kind": True}, {"depth": "2"}, {"depth": (2, 1)},
        {"depth": (1, 2, 3)}, {"num_rules": True}, {"difficulty": "hellish"}, {"difficulty": (3, 1)}, {"limit": 0}, {"limit": 2.5}, {"solvable": "yes"}, {"depth": float("nan")}]
    for wrong in table:
        with pytest.raises((TypeError, ValueError)):
            explorer.filter(**wrong)
            pytest.fail(f"accepted: {wrong}")
        assert explorer.found is before and explorer.criteria is criteria, wrong


def test_showing_a_task(tasks, explorer):
    explorer.show(-1)
    assert explorer.row == 299 and explorer.example.par == len(explorer.example.film) - 1
    env, params = xland_minigrid.make(R1)
    start = jax.jit(env.reset)(params.replace(ruleset=tasks.get_ruleset(-1)), jax.random.key(0))
    assert explorer.example.par == len(solve_from(tasks.get_ruleset(-1), start, params).actions)
    still = explorer.still()
    assert f"Par {explorer.example.par} steps" in still and "Task tree" in still and 'class="xmg"' in still and "Task 299" in still
    for wrong, error in ((300, IndexError), (1.5, TypeError), ("3", TypeError), ([1], TypeError)):
        with pytest.raises(error):
            explorer.show(wrong)
    with pytest.raises(ValueError, match="seed"):
        explorer.show(1, seed=-1)
    assert explorer.row == 299


def test_controls_lead_and_follow(explorer):
    _ = explorer.widget
    explorer.controls["depth"].value = 2
    assert explorer.criteria["depth"] == 2 and explorer.row == explorer.found[0] == explorer.list.value
    explorer.buttons["next"].click()
    assert explorer.row == explorer.found[1] == explorer.list.value == explorer.number.value
    explorer.buttons["previous"].click()
    explorer.buttons["previous"].click()
    assert explorer.row == explorer.found[-1] == explorer.list.value
    explorer.list.value = explorer.list.options[0][1]
    assert explorer.row == explorer.list.value
    start = explorer.example
    explorer.buttons["another-start"].click()
    assert explorer.row == start.row and (explorer.example.film.frames[0] != start.film.frames[0]).any()
    explorer.number.value = 7
    assert explorer.row == 7 and "Task 7" in explorer._parts["task"].value
    explorer.buttons["random"].click()
    assert explorer.row in explorer.found
    explorer.controls["text"].value = "dragon"
    assert "I do not understand" in explorer._parts["count"].value and explorer.criteria == {"depth": 2, "limit": 50_000}
    explorer.buttons["clear"].click()
    assert len(explorer.found) == 300 and explorer.controls["depth"].value == "any" and explorer.controls["text"].value == ""


def test_the_live_filter_looks_at_a_part_and_says_so(explorer):
    _ = explorer.widget
    with mock.patch("xland_minigrid.viz.widgets.explorer._LOOK", 100):
        explorer.controls["depth"].value = 2
    assert "of the first 100 fit; 200 others" in explorer._parts["count"].value and explorer.buttons["more"].layout.display == ""
    explorer.buttons["more"].click()
    assert "of 300 tasks fit" in explorer._parts["count"].value and explorer.buttons["more"].layout.display == "none"


def test_nothing_fits(explorer):
    explorer.filter(text="goal: white goal, goal: red ball, goal: key")
    assert explorer.row is None and not len(explorer.found) and "No task fits" in explorer.still() and "None" in repr(explorer)
    _ = explorer.widget
    explorer.buttons["next"].click()
    assert "nowhere to go" in explorer._parts["count"].value
    explorer.buttons["random"].click(), explorer.buttons["another-start"].click()
    explorer.filter()
    assert explorer.row == 0


def test_a_task_without_a_plan_says_why(tasks):
    key, ball, hex_ = (Tiles.KEY, Colors.RED), (Tiles.BALL, Colors.RED), (Tiles.HEX, Colors.PINK)
    impossible = make_ruleset(AgentHoldGoal(hex_), [AgentHoldRule(key, ball)], [key])
    lone = Benchmark.from_arrays(impossible.goal[None], impossible.rules[None], impossible.init_tiles[None])
    explorer = RulesetExplorer(lone.pad_to(tasks.rules.shape[1], tasks.init_tiles.shape[1]))
    assert explorer.example.plan is None and explorer.example.par is None and "missing" in explorer.still() and "no plan" in explorer.still()


def test_a_world_without_room_says_so(explorer):
    def full(params, key):
        raise ValueError("There are 50 objects and 49 free cells.")
    with mock.patch("xland_minigrid.viz.widgets.explorer._compiled", lambda env: (full, None)):
        explorer.show(3)
    assert explorer.row == 3 and explorer.example.film is None and explorer.example.plan and "There is no start: There are 50 objects" in explorer.still()


def test_what_cannot_be_explored(tasks):
    with pytest.raises(ValueError, match="empty"):
        RulesetExplorer(tasks.take(np.zeros(0, np.int64)))
    with pytest.raises(ValueError, match="no rulesets"):
        RulesetExplorer(tasks, "MiniGrid-Empty-5x5")
    with pytest.raises(ValueError, match="neither"):
        RulesetExplorer("no-such-benchmark")
    with pytest.raises(ValueError, match="seed"):
        RulesetExplorer(tasks, seed="0")


# ---------------------------------------------------------------- in a browser


_PAGE = """<!doctype html><div class="xmg-w" id="box"><div id="pad"></div><button id="button">button</button><input id="input"></div><button id="outside">outside</button>"""
_MODEL = """
window.state = {known: ['d', 'up', ' '], hint: 'hint', pressed: [0, ''], answered: 0}; window.sent = []; window.leaked = []; window.hooks = {};
window.model = {get: k => state[k], set: (k, v) => { state[k] = v; if (k == 'pressed') sent.push(v[1]); }, save_changes: () => {}, on: (name, f) => { (hooks[name] ||= []).push(f); }, off: () => {}};
window.answer = () => { state.answered = state.pressed[0]; (hooks['change:answered'] || []).forEach(f => f()); };
document.addEventListener('keydown', e => { const held = e.target.closest('[data-lm-suppress-shortcuts]'); if (!held) leaked.push(e.key); }, true);
"""


@pytest.fixture
def keys(browser):
    "The key pad in a page that listens as JupyterLab does, with a kernel that answers when told to."
    page = browser.new_page()
    page.set_content(_PAGE)
    page.evaluate(_MODEL)
    page.add_script_tag(content=base._KEYS_SCRIPT.replace("export default { render };", "render({model, el: document.getElementById('pad')});"))
    yield page
    page.close()


def press(page, *names):
    for name in names:
        page.keyboard.press(name)
        page.evaluate("answer()")
    return page.evaluate("sent")


def test_keys_in_a_page(keys):
    keys.click(".xmg-w-pad")
    assert press(keys, "d", "d", "ArrowUp", "x", "b", " ") == ["d", "d", "up", " "]
    assert keys.evaluate("leaked") == []  # not even the keys that nobody knows: they would add or delete cells
    keys.focus("#button")
    assert press(keys, "D")[-1] == "d" and press(keys, " ") == ["d", "d", "up", " ", "d"]  # the space bar presses the button
    keys.focus("#input")
    press(keys, "d")
    assert keys.input_value("#input") == "d" and len(keys.evaluate("sent")) == 5


def test_keys_leave_the_rest_alone(keys):
    keys.click(".xmg-w-pad")
    press(keys, "Control+d", "Alt+d")
    assert keys.evaluate("sent") == [] and {"d"} <= set(keys.evaluate("leaked"))
    press(keys, "Tab")
    assert keys.evaluate("document.activeElement.id") == "button"
    keys.focus("#outside")
    assert press(keys, "d") == []
    keys.click(".xmg-w-pad")
    press(keys, "Escape")
    assert keys.evaluate("document.activeElement.tagName") == "BODY" and press(keys, "d") == []


def test_a_key_held_down_does_not_flood(keys):
    keys.click(".xmg-w-pad")
    for _ in range(30):
        keys.keyboard.down("d")  # the first is a press, the others repeat it
    assert keys.evaluate("sent") == ["d"]
    keys.evaluate("answer()")
    assert keys.evaluate("sent") == ["d"]  # nothing was kept for later
    keys.keyboard.down("d")
    assert keys.evaluate("sent") == ["d", "d"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_stills_fit_a_narrow_page_and_read_on_any(browser, tasks, explorer, scheme):
    player = EnvPlayer("MiniGrid-Empty-5x5")
    player.step("forward")
    page = browser.new_page(color_scheme=scheme, viewport={"width": 400, "height": 800})
    page.set_content(f"<!doctype html><style>:root{{color-scheme:light dark}}</style>{player.still()}{explorer.filter(depth=2).still()}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator(".xmg-w-rules").first.evaluate("e => e.open") is False and page.locator("img:not([alt])").count() == 0
    for selector in (".xmg-w-head", ".xmg-w-words", ".xmg-w-banner"):
        ink = page.locator(selector).first.evaluate("e => getComputedStyle(e).color.match(/\\d+/g).slice(0, 3).map(Number)")
        assert (sum(ink) > 600) if scheme == "dark" else (sum(ink) < 150)
    page.close()
