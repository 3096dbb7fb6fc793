"""XLand in words against the environment itself: the same world step for step, a view that can be read back, and nothing told that was to be hidden."""
import asyncio
import json
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.benchmarks import Benchmark, generate_benchmark
from xland_minigrid.core.language import describe_rule, describe_ruleset, ruleset_to_dict, thing_name
from xland_minigrid.core.parse import parse_ruleset
from xland_minigrid.core.tiles import COLOR_NAMES, TILE_NAMES, Tiles, pack
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.pool.episodes import RolloutRequest, make_env
from xland_minigrid.pool.errors import ResetRequired
from xland_minigrid.pool.text import xland
from xland_minigrid.pool.text.xland import (
    ACTION_WORDS, XLandText, cell_words, describe_view, find_task, legal_actions, parse_actions, place_words, programs, rules_in_reach, text_map, things_in)

ENV = "XLand-MiniGrid-R1-9x9"
TASK = "Goal: hold a green star. 1. A red ball and a blue key next to each other become a green star. Objects: red ball, blue key."
COLORS = ("blue", "green", "purple", "yellow", "grey")
WORDS = [TASK.replace("red ball", f"{color} ball").replace("hold", verb) for color in COLORS for verb in ("hold", "stand on", "stand next to", "hold")]
TASKS = Benchmark.from_arrays(*(np.stack([np.asarray(getattr(parse_ruleset(words), name)) for words in WORDS]) for name in ("goal", "rules", "init_tiles")))  # one shape: one program
STEPS = 12  # of a trial, everywhere: a number that is compiled in
ENDS = ("goal", "lost", "timeout")


def say(text):
    return [{"role": "assistant", "content": text}]


async def play(env, replies):
    turns = [await env.reset(RolloutRequest(messages=[]))]
    for reply in replies:
        turns.append(await env.step(say(reply)))
        if turns[-1][2]:
            break
    return turns


def config(number=0, **more):
    return {"benchmark": TASKS, "ruleset_id": number, "max_steps": STEPS, **more}


# ---------------------------------------------------------------- the same world

@pytest.mark.parametrize("seed, trials, number", [(0, 1, 0), (2**32 - 1, 3, 7)])
def test_the_same_seed_and_actions_are_the_environments_own_trajectory(seed, trials, number):
    env, params = make(ENV, ruleset=TASKS.get_ruleset(number), max_steps=STEPS)
    env = GymAutoResetWrapper(env)
    begin, follow = jax.jit(env.reset), jax.jit(env.step)
    actions = np.random.default_rng(seed).choice(6, STEPS * trials, p=[0.4, 0.15, 0.15, 0.15, 0.1, 0.05])

    async def run():
        text = XLandText(config(number, seed=seed, trials=trials, reward="sum"))
        observation, _, _ = await text.reset(None)
        timestep, ended = begin(params, jax.random.key(seed)), 0
        for action in actions:
            view, pocket = np.asarray(timestep.observation), np.asarray(timestep.state.agent.pocket)
            assert observation.endswith(f"steps left.\n{describe_view(view, pocket)}") and text.trials.world.view.tobytes() == view.tobytes()
            reply = [f"<action>{ACTION_WORDS[action]}</action>", str(action)][action % 2]
            observation, reward, done, info = await text.step(say(reply))
            timestep = follow(params, timestep, action)
            ended += bool(timestep.last())
            assert reward == float(timestep.reward) and (info["status"] in ENDS) == bool(timestep.last()) and done == (ended == trials)
            if done:
                return info
            assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), jax.random.key_data(text.trials.world.timestep.state.key), jax.random.key_data(timestep.state.key)))
    info = asyncio.run(run())
    assert len(info["trial_rewards"]) == trials and info["trial"] == trials


def test_many_at_once_are_each_what_they_are_alone_and_share_one_program():
    replies = [ACTION_WORDS[a] for a in np.random.default_rng(0).integers(0, 6, 20)]
    async def run():
        alone = {seed: await play(XLandText(config(2, seed=seed, trials=3)), replies) for seed in (1, 2)}
        both = await asyncio.gather(*(play(XLandText(config(2, seed=1 + i % 2, trials=3)), replies) for i in range(8)))
        assert alone[1] != alone[2] and all(turns == alone[1 + i % 2] for i, turns in enumerate(both))
        stepped = [XLandText(config(2, seed=seed, trials=3)) for seed in (1, 2)]  # turn by turn, one beside the other
        first = [await env.reset(None) for env in stepped]
        for i, reply in enumerate(replies, 1):
            assert [await env.step(say(reply)) for env in stepped] == [alone[1][i], alone[2][i]]
        assert first == [alone[1][0], alone[2][0]]
    asyncio.run(run())
    _, reset, step = programs(ENV)
    before = reset._cache_size(), step._cache_size()
    asyncio.run(play(XLandText(config(11, seed=77)), replies))  # another task of the same shape compiles nothing
    assert (reset._cache_size(), step._cache_size()) == before


@settings(max_examples=25)
@given(st.integers(0, 19), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5), max_size=25), st.data())
def test_useless_replies_change_nothing(number, seed, actions, data):
    noise = ["what?", "", "<action>jump</action>", "The ball is left of me.", "7", "<action>forward|left</action>"]
    replies = [str(a) for a in actions]
    noisy = [r for reply in replies for r in [*data.draw(st.lists(st.sampled_from(noise), max_size=1)), reply]]
    clean, other = (asyncio.run(play(XLandText(config(number, seed=seed)), r)) for r in (replies, noisy))
    understood = [t for t in other[1:] if t[3]["status"] != "invalid_action"]
    hidden = ("replies", "format_errors")
    strip = lambda turns: [(*t[:3], {k: v for k, v in t[3].items() if k not in hidden}) for t in turns]
    assert strip(understood) == strip(clean[1:])
    assert all(t[1] == 0.0 and not t[2] and t[3]["parsed_action"] is None and t[0].startswith("No action") for t in other[1:] if t[3]["status"] == "invalid_action")
    assert other[-1][-1]["format_errors"] == len(other) - len(understood) - 1 if len(other) > 1 else True


def test_no_effect_is_said_exactly_when_the_world_stays_as_it_is():
    async def run():
        env = XLandText({"seed": 4, "trials": 60, "env_id": ENV, "max_steps": STEPS, "ruleset": TASK.replace("A red ball and", "A pink hex and")})  # a law that never comes to bear
        await env.reset(None)
        seen, rng = set(), np.random.default_rng(3)
        for _ in range(400):
            action = rng.choice(legal_actions(env.trials.front, env.trials.world.pocket)) if rng.random() < 0.7 else rng.integers(6)
            before = env.trials.world.timestep.state
            status = (await env.step(say(str(action))))[3]["status"]
            if status in ENDS:
                continue
            after = env.trials.world.timestep.state
            same = jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), (before.cells, before.agent), (after.cells, after.agent)))
            assert (status == "no_effect") == same
            seen.add((int(action), status))
        return seen
    assert {(0, "ok"), (0, "no_effect"), (3, "ok"), (3, "no_effect"), (4, "ok"), (4, "no_effect"), (5, "no_effect"), (1, "ok")} <= asyncio.run(run())


# ---------------------------------------------------------------- the view, there and back

THINGS = [(t, c) for t in range(Tiles.BALL, len(TILE_NAMES)) for c in range(3, len(COLOR_NAMES))] + [(Tiles.FLOOR, 3), (Tiles.FLOOR, 10)]
CELLS = st.sampled_from([(Tiles.FLOOR, 9)] * 5 + [(Tiles.WALL, 8), (Tiles.END_OF_MAP, 0), (Tiles.UNSEEN, 1)]) | st.sampled_from(THINGS)


@settings(max_examples=60)
@given(st.sampled_from([3, 5, 7]).flatmap(lambda v: st.lists(CELLS, min_size=v * v, max_size=v * v)))
def test_the_view_can_be_read_back_from_its_map_and_from_its_words(cells):
    size = int(len(cells) ** 0.5)
    view = np.array(cells, np.uint8).reshape(size, size, 2)
    lines = text_map(view).splitlines()
    rows = [line.split(" ") for line in lines if ":" not in line]
    legend = [line for line in lines if ":" in line]
    names = {thing_name(*thing): thing for thing in THINGS}
    meaning = {".": (Tiles.FLOOR, 9), "#": (Tiles.WALL, 8), "?": (Tiles.UNSEEN, 1), "-": (Tiles.END_OF_MAP, 0)}
    places = {}
    for line in legend:
        letter, rest = line.split(": ", 1)
        name, where = rest.split(", ", 1)
        meaning[letter] = names[name]
        for place in where.split("; "):
            ahead, right = re.search(r"(\d+) ahead", place), re.search(r"(\d+) (left|right)", place)
            places[int(ahead[1]) if ahead else 0, (0 if not right else int(right[1]) * (1 if right[2] == "right" else -1))] = names[name]
    kept = [row for row in range(size) if row == size - 1 or any(t != Tiles.END_OF_MAP for t, _ in view[row])]
    assert len(kept) == len(rows) and rows[-1][size // 2] == "^"
    for row, signs in zip(kept, rows):
        for column, sign in enumerate(signs):
            thing, at = tuple(map(int, view[row, column])), (size - 1 - row, column - size // 2)
            if at != (0, 0):
                assert meaning[sign] == thing and (places.get(at) == thing) == (sign in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert len(meaning) == 4 + len(legend) and sum(map(len, things_in(view).values())) == len(places)


def test_what_is_near_is_said_in_words():
    view = np.full((5, 5, 2), (Tiles.FLOOR, 9), np.uint8)
    view[3, 2], view[4, 1], view[4, 3], view[4, 2] = (Tiles.DOOR_CLOSED, 3), (Tiles.WALL, 8), (Tiles.KEY, 10), (Tiles.GOAL, 4)
    assert describe_view(view, (Tiles.BALL, 5)).splitlines()[0] == (
        "You stand on a green goal. You carry a blue ball. In front of you: a red door closed. To your left: a wall. To your right: an orange key.")
    assert [place_words(*p) for p in ((1, 0), (0, 2), (3, -1), (0, 0))] == ["1 ahead", "2 right", "3 ahead, 1 left", "under you"] and cell_words(Tiles.END_OF_MAP, 0) == "the end of the map"
    crowd = np.array([[THINGS[(9 * r + c) % len(THINGS)] for c in range(9)] for r in range(9)], np.uint8)
    assert "*" in text_map(crowd)  # more kinds of things than letters: all are still listed
    assert len(things_in(crowd)) == 80 and text_map(crowd).count(": ") == 80


# ---------------------------------------------------------------- replies

@pytest.mark.parametrize("text, number", [(word, i) for i, word in enumerate(ACTION_WORDS)] + [(str(i), i) for i in range(6)] + [
    ("Move Forward!", 0), ("go straight", 0), ("turn_right", 1), ("TURN CLOCKWISE", 1), ("turn counter-clockwise", 2), ("counterclockwise", 2), ("pickup", 3), ("take", 3), ("grab", 3),
    ("drop", 4), ("put", 4), ("open", 5), ("close the door", 5), ("pick up the red ball on the left", 3)])
def test_names_of_actions(text, number):
    assert parse_actions(f"Well. <action> {text} </action>") == [number] == parse_actions(f"<action>{text}</action>", most=9)
    if "left" not in text:
        assert parse_actions(f"I see a ball on the left.\n**{text}**") == [number]


@pytest.mark.parametrize("text, expected", [
    ("I turn left and then I pick up the ball.", [3]), ("The key is on the right.", None), ("I could open it.", None), ("3 balls", None), ("There is 1", None), ("6", None), ("-1", None),
    ("<action>forward or left</action>", None), ("<action>forward</action> no, <action>toggle</action>", [5]), ("turn left <action>hm</action>", None), ("<action>0", None), ("", None), ("left\n\n", [2])])
def test_what_is_meant_and_what_is_not(text, expected):
    assert parse_actions(text) == expected


@pytest.mark.parametrize("text, expected", [
    ("<action>forward, left; pick up</action>", [0, 2, 3]), ("<action>forward and then left</action>", [0, 2]), ("<action>0</action><action>1</action>", [0, 1]), ("forward, forward", [0, 0]),
    ("<action>forward, jump</action>", None), ("<action>1,1,1,1,1,1</action>", [1] * 4), ("<action>,</action>", None), ("I go forward, then I turn left.", [2])])
def test_several_actions_in_one_reply(text, expected):
    assert parse_actions(text, most=4) == expected


@given(st.text() | st.text(alphabet="<>/action forwdleftpicku,;0123456|\n"), st.integers(1, 5))
def test_no_reply_breaks_the_parser(text, most):
    actions = parse_actions(text, most)
    assert actions is None or (1 <= len(actions) <= most and all(0 <= a < 6 for a in actions))


# ---------------------------------------------------------------- trials and rewards

def test_a_trial_that_ends_drops_the_rest_and_pays_once():
    async def run(reward, trials):
        env = XLandText({"seed": 1, "ruleset": TASK, "trials": trials, "max_steps": STEPS, "actions_per_reply": 5, "reward": reward})
        return await play(env, ["<action>left, left, left, left, left</action>"] * 9)
    turns = asyncio.run(run("mean", 2))[1:]
    assert [t[3]["parsed_action"] for t in turns] == [["left"] * 5, ["left"] * 5, ["left"] * 2] * 2 and [t[3]["status"] for t in turns] == ["ok", "ok", "timeout"] * 2
    assert [t[3]["trial"] for t in turns] == [1, 1, 1, 2, 2, 2] and [t[3]["step"] for t in turns] == [5, 10, 12] * 2 and [t[2] for t in turns] == [False] * 5 + [True]
    assert "Trial 1 of 2 ended after 12 steps: the time is over. Its reward is 0.000.\nTrial 2 begins" in turns[2][0] and "Trial 2 of 2, 12 steps left" in turns[2][0]
    assert turns[5][0].splitlines() == ["Trial 2 of 2 ended after 12 steps: the time is over. Its reward is 0.000."]


@pytest.mark.parametrize("reward", ["mean", "sum"])
def test_trials_are_paid_as_the_setting_says(reward):
    async def run():
        env = XLandText({"seed": 3, "ruleset": TASK.replace("hold a green star", "stand next to a red ball"), "trials": 9, "reward": reward, "max_steps": STEPS})
        return await play(env, [str(a) for a in np.random.default_rng(2).choice(3, 200, p=[0.7, 0.15, 0.15])])
    turns = asyncio.run(run())[1:]
    info = turns[-1][3]
    assert turns[-1][2] and len(info["trial_rewards"]) == 9 and sum(r > 0 for r in info["trial_rewards"]) > 1
    total = sum(t[1] for t in turns)
    assert total == pytest.approx(sum(info["trial_rewards"]) / (9 if reward == "mean" else 1)) and json.loads(json.dumps(info)) == info
    for observation, paid, done, said in turns:
        assert (paid > 0) == (said["status"] == "goal") and ("you reached the goal" in observation) == (paid > 0)
        if paid:
            assert f"Its reward is {said['trial_rewards'][-1]:.3f}." in observation and said["trial_rewards"][-1] == pytest.approx(1 - 0.9 * said["step"] / STEPS, abs=1e-6)


# ---------------------------------------------------------------- what is told

def talk_of(**more):
    turns = asyncio.run(play(XLandText({"seed": 6, "ruleset": TASK, "hints": True, "max_steps": STEPS, "trials": 12, **more}), [str(a) for a in np.random.default_rng(0).integers(0, 6, 144)]))
    return "\n".join([turns[0][2], *(t[0] for t in turns)])


def test_hidden_rules_and_goals_are_not_told_anywhere():
    rule, goal = "next to each other become", "hold a green star"
    shown, unruled, blind = talk_of(), talk_of(show_rules=False), talk_of(show_rules=False, show_goal=False)
    assert rule in shown.lower() and goal in shown and rule not in unruled and goal in unruled and rule not in blind and goal not in blind
    assert describe_ruleset(parse_ruleset(TASK)) in shown and "ACTIONS WITH AN EFFECT" in blind and "RULES WHOSE THINGS" in shown and "RULES WHOSE THINGS" not in unruled
    assert "TRIED BEFORE WHEN IT LOOKED LIKE THIS" in blind


def test_hints_are_true():
    async def run():
        env = XLandText(config(3, seed=8, hints=True, trials=9))
        observation, _, _ = await env.reset(None)
        tried = {}
        for action in np.random.default_rng(1).integers(0, 6, 60):
            world = env.trials.world
            situation = (world.view.tobytes(), world.pocket.tobytes())
            line = lambda name: (re.search(rf"^{name}: (.*)$", observation, re.MULTILINE) or [None, ""])[1]
            assert line("ACTIONS WITH AN EFFECT").split(", ") == [ACTION_WORDS[a] for a in legal_actions(world.view[-2, 2], world.pocket)]
            assert line("TRIED BEFORE WHEN IT LOOKED LIKE THIS") == ", ".join(ACTION_WORDS[a] for a in sorted(tried.get(situation, ())))
            tried.setdefault(situation, set()).add(int(action))
            observation, _, done, info = await env.step(say(str(action)))
            tried = {} if info["status"] in ENDS else tried
    asyncio.run(run())


RICH = generate_benchmark("small", 20, seed=3)


@settings(max_examples=30)
@given(st.integers(0, 19), st.lists(st.integers(0, 11), max_size=8), st.integers(0, 11))
def test_rules_in_reach_have_all_they_need_in_sight(number, seen, carried):
    rules = np.asarray(RICH.rules)[number]
    tiles = [(Tiles.BALL, 3)] + [tuple(map(int, t)) for row in rules for t in (row[1:3], row[3:5], row[5:7]) if row[0]]
    view = np.full((5, 5, 2), (Tiles.FLOOR, 9), np.uint8)
    for place, i in enumerate(seen):
        view[place // 5, place % 5] = tiles[i % len(tiles)]
    pocket = tiles[carried % len(tiles)]
    there = {tuple(map(int, c)) for c in view.reshape(-1, 2)} | {pocket}
    expected, number = [], 0
    for row in rules:
        if row[0]:
            number += 1
            inputs = [tuple(map(int, row[1:3]))] + [tuple(map(int, row[3:5]))] * int(3 <= row[0] <= 7)  # Table 2: two inputs in kinds 3 to 7
            expected += [f"{number}. {describe_rule(row)}"] * all(i in there for i in inputs)
    assert rules_in_reach(rules, view, pocket) == expected


# ---------------------------------------------------------------- settings

def test_a_task_can_be_given_in_every_form():
    ruleset = parse_ruleset(TASK)
    numbers = {name: np.asarray(getattr(ruleset, name)).tolist() for name in ("goal", "rules", "init_tiles")}
    starts = [asyncio.run(XLandText({"seed": 9, "ruleset": form, "max_steps": STEPS}).reset(None)) for form in (TASK, ruleset_to_dict(ruleset), numbers, ruleset)]
    assert all(start == starts[0] for start in starts) and starts[0][1]["ruleset_id"] is None


def test_the_seed_chooses_what_is_not_said(monkeypatch):
    xland._benchmark.cache_clear()
    same, other = find_task(4, benchmark=TASKS), find_task(5, benchmark=TASKS)
    assert same[1] == int(np.random.default_rng(4).integers(20)) and same[1] != other[1]  # as a slot of the pool draws
    assert describe_ruleset(find_task(1)[0]) == describe_ruleset(find_task(1)[0]) != describe_ruleset(find_task(2)[0])
    asked = []
    monkeypatch.setattr(xland, "load_benchmark", lambda name, **options: asked.append(name) or TASKS)
    for _ in range(2):
        start = asyncio.run(make_env({"name": "xland", "benchmark": "trivial-21k", "ruleset_id": 3, "seed": None, "trials": None, "max_steps": STEPS}).reset(None))
        assert start[1]["ruleset_id"] == 3 and start[1]["seed"] == 0 and describe_ruleset(TASKS.get_ruleset(3)) in start[2]
    assert asked == ["trivial-21k"]  # it is loaded once
    xland._benchmark.cache_clear()


@pytest.mark.parametrize("wrong", [
    dict(env_id="XLand-MiniGrid-R1-8x8"), dict(env_id="MiniGrid-Empty-8x8"), dict(env_id=5), dict(seed=-1), dict(seed=2**32), dict(seed="0"), dict(trials=0), dict(actions_per_reply=0), dict(max_steps=0),
    dict(show_rules="yes"), dict(reward="max"), dict(ruleset=5), dict(ruleset="fly to the moon"), dict(ruleset={"goal": 1}), dict(ruleset={"goal": [99] * 5, "rules": [], "init_tiles": []}),
    dict(ruleset=TASK, benchmark="small-1m"), dict(ruleset=TASK, ruleset_id=1), dict(ruleset_id=1), dict(benchmark="small"), dict(benchmark="/etc/passwd"), dict(benchmark="hub:a/b/c"), dict(benchmark=5),
    dict(preset="tiny"), dict(show_rule=False), dict(trial=3)])
def test_wrong_settings_are_refused_when_the_environment_is_made(wrong):
    with pytest.raises((TypeError, ValueError)) as error:
        XLandText(wrong)
    assert str(error.value).strip().endswith((".", "?"))


def test_what_only_the_reset_can_see_is_refused_there():
    crowd = "Goal: hold a red ball. Objects: " + ", ".join(["red ball"] * 60) + "."
    for wrong, words in ((dict(ruleset=crowd), "do not fit"), (config(20), "ruleset_id")):
        with pytest.raises(ValueError, match=words):
            asyncio.run(XLandText(wrong).reset(None))
    with pytest.raises(TypeError, match="ruleset is"):
        find_task(0, ruleset=[1])


def test_before_the_reset_and_after_the_end_nothing_is_stepped():
    async def run():
        env = XLandText(config())
        with pytest.raises(ResetRequired):
            await env.step(say("0"))
        for _ in range(2):
            assert (await play(env, ["1"] * STEPS))[-1][2]
            with pytest.raises(ResetRequired):
                await env.step(say("0"))
        await env.reset(None)
        for wrong in (None, [], [{"role": "user", "content": "0"}], "0"):
            with pytest.raises((TypeError, ValueError)):
                await env.step(wrong)
        assert (await env.step(say("1")))[3]["replies"] == 1
        assert "<img" in env._repr_html_()
        await env.close()
        with pytest.raises(ResetRequired):
            await env.step(say("0"))
        assert env._repr_html_() is None
    asyncio.run(run())


def test_a_failure_of_the_machinery_is_no_reward(monkeypatch):
    async def run():
        env = XLandText(config())
        await env.reset(None)
        monkeypatch.setattr(env.trials.world, "_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await env.step(say("0"))
    asyncio.run(run())
    assert xland.envs["xland"] is XLandText and pack(5, 3) == 83
