"""FrozenLake in letters against Gymnasium's table of transitions, against other processes, and against replies that make no sense."""
import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.pool.episodes import RolloutRequest, make_env
from xland_minigrid.pool.errors import ResetRequired
from xland_minigrid.pool.text.frozen_lake import MOVES, FrozenLakeEnv, find, go, parse_action, random_map, random_success, shortest_path, shortest_path_success, slip
from xland_minigrid.pool.text.helpers import last_reply, probability, whole_number

pytestmark = pytest.mark.newest

GYM_MOVES = ("left", "down", "right", "up")  # Gymnasium's numbers 0 to 3
sizes, seeds = st.integers(2, 8), st.integers(0, 2**63 - 1)


def peer(grid, slippery=False):
    toy = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    return toy.FrozenLakeEnv(desc=grid, is_slippery=slippery)


def say(text):
    return [{"role": "assistant", "content": text}]


async def play(env_config, replies):
    "All that an episode says: the reset, and each step until it is done."
    env = make_env({"name": "frozen_lake", **env_config})
    turns = [await env.reset(RolloutRequest(messages=[]))]
    for reply in replies:
        turns.append(await env.step(say(reply)))
        if turns[-1][2]:
            break
    await env.close()
    return turns


# ---------------------------------------------------------------- maps

@settings(max_examples=40)
@given(sizes, st.floats(0.3, 1), seeds)
def test_maps_are_what_they_should_be_and_solvable_as_gymnasium_sees_it(size, p, seed):
    grid = random_map(size, p, seed)
    assert [len(row) for row in grid] == [size] * size and set("".join(grid)) <= set("SGHF")
    assert "".join(grid).count("S") == "".join(grid).count("G") == 1
    distance = {find(grid, "S"): 0}  # by Gymnasium's own transitions, in rounds over all cells: another algorithm
    table = peer(grid).P
    for _ in range(size * size):
        for (row, column), d in list(distance.items()):
            for (_, to, _, _), in table[row * size + column].values():
                cell = divmod(to, size)
                if grid[cell[0]][cell[1]] != "H":
                    distance[cell] = min(distance.get(cell, 10**6), d + 1)
    path = shortest_path(grid)
    cell = find(grid, "S")
    for move in path:
        cell = go(grid, cell, move)
        assert grid[cell[0]][cell[1]] != "H"
    assert cell == find(grid, "G") and len(path) == distance[cell]


def test_one_seed_is_one_map_everywhere():
    "Each run of the tests hashes strings with another seed, and finds the maps that were published."
    assert random_map(seed=7) == ["FFFF", "FFFF", "FFSF", "FHFG"]  # published: learning curves are about these maps
    assert len({tuple(random_map(seed=s)) for s in range(300)}) > 290


def test_start_and_goal_are_anywhere_and_p_is_the_share_of_ice():
    maps = [random_map(4, 0.8, s) for s in range(1500)]
    for letter in "SG":
        where = np.bincount([4 * r + c for r, c in (find(grid, letter) for grid in maps)], minlength=16)
        assert where.min() > 1500 / 16 * 0.5  # a corner is as good as the middle, almost: only maps without a way are drawn again
    holes = sum("".join(grid).count("H") for grid in maps) / (1500 * 14)
    assert 0.12 < holes < 0.2


@pytest.mark.parametrize("wrong", [dict(size=1), dict(size=33), dict(size=0), dict(seed=-1), dict(seed=2**63), dict(p=-0.1), dict(p=1.1), dict(p=float("nan")), dict(size=32, p=0.0, seed=35)])
def test_impossible_settings_are_refused_with_a_sentence(wrong):
    with pytest.raises(ValueError, match=r"(give|raise) .*\.$"):
        random_map(**wrong)
    with pytest.raises(ValueError):
        FrozenLakeEnv(wrong)


@pytest.mark.parametrize("wrong", [dict(size="4"), dict(size=True), dict(size=4.5), dict(seed="0"), dict(seed=0.5), dict(p="0.8"), dict(p=True), dict(slippery="no"), dict(slippery=2)])
def test_settings_of_a_wrong_type_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="give"):
        FrozenLakeEnv(wrong)


def test_settings_of_others_pass_misspelt_ones_do_not():
    assert FrozenLakeEnv({"name": "frozen_lake", "base_url": "x", "size": None, "seed": 3.0}).seed == 3
    for wrong in ({"sed": 1}, {"sizes": 4}, {"slipery": True}):
        with pytest.raises(ValueError, match="did you mean"):
            FrozenLakeEnv(wrong)
    with pytest.raises(TypeError, match="env_config"):
        FrozenLakeEnv([("seed", 1)])
    assert whole_number(np.int64(3), "n", 0, 3) == 3 and probability(1, "p") == 1.0


def test_a_map_needs_one_start_and_one_goal():
    for grid in (["FG", "FF"], ["SF", "FF"], ["SF", "SG"], ["SG", "GF"]):
        with pytest.raises(ValueError, match="one S and one G"):
            shortest_path(grid)
    assert shortest_path(["SH", "HG"]) is None and shortest_path_success(["SH", "HG"]) == 0.0


# ---------------------------------------------------------------- what the thoughtless reach

@settings(max_examples=15)
@given(st.integers(2, 5), seeds, st.integers(0, 25), st.booleans())
def test_random_success_is_exact(size, seed, turns, slippery):
    grid = random_map(size, 0.7, seed)
    table, goal = peer(grid, slippery).P, size * find(grid, "G")[0] + find(grid, "G")[1]
    chance = np.zeros(size * size)
    chance[size * find(grid, "S")[0] + find(grid, "S")[1]] = 1
    for _ in range(turns):  # Gymnasium's ends stay where they are, slippery or not
        after = np.zeros_like(chance)
        for cell, outcomes in table.items():
            for moves in outcomes.values():
                for p, to, _, _ in moves:
                    after[to] += chance[cell] * p / 4
        chance = after
    assert random_success(grid, turns) == pytest.approx(chance[goal], abs=1e-12)


def test_shortest_path_success_counts_turns():
    grid = ["SFF", "HHF", "GFF"]
    assert len(shortest_path(grid)) == 6 and shortest_path_success(grid, 6) == 1.0 and shortest_path_success(grid, 5) == 0.0


# ---------------------------------------------------------------- replies

@pytest.mark.parametrize("reply, move", [
    ("<action>up</action>", "up"), ("<ACTION>\nDown\n</Action>", "down"), ("<action>go left</action>", "left"), ("up, no: RIGHT", "right"), ("<action>left", "left"),
    ("<action>up</action> or rather <action>down</action>", "down"), ("<action>up", "up"), ("<action><action>up</action>", "up"), ("I think up. <action></action>", None),
    ("<action>up|down|left|right</action>", None), ("<action>up down</action>", None), ("<action>up up</action>", "up"), ("upwards downtown leftover", None), ("", None), ("↑", None), ("<action>north</action>", None)])
def test_replies(reply, move):
    assert parse_action(reply) == move


@given(st.text() | st.text(alphabet="<>/action updownleftright\n"))
def test_no_reply_breaks_the_parser(text):
    assert parse_action(text) in (None, *MOVES)


def test_a_reply_of_half_a_million_brackets_is_read_in_time():
    assert parse_action("<action>" * 60_000) is None


@pytest.mark.parametrize("wrong", [None, "up", [], [{"role": "user", "content": "up"}], ["up"], [{"role": "assistant", "content": ["up"]}], {"role": "assistant", "content": "up"}])
def test_what_is_no_conversation_is_refused_and_not_scored(wrong):
    async def run():
        env = FrozenLakeEnv({"seed": 0})
        await env.reset()
        with pytest.raises((TypeError, ValueError)):
            await env.step(wrong)
        return (await env.step(say("up")))[3]
    assert asyncio.run(run())["step"] == 1
    assert last_reply([{"role": "assistant", "content": None}]) == ""


# ---------------------------------------------------------------- episodes

@settings(max_examples=40)
@given(st.integers(2, 5), seeds, st.lists(st.sampled_from([*MOVES, "what?"]), max_size=30))
def test_an_episode_is_gymnasiums_episode(size, seed, replies):
    turns = asyncio.run(play({"size": size, "p": 0.6, "seed": seed}, [f"<action>{r}</action>" for r in replies]))
    gym = peer(random_map(size, 0.6, seed))
    at, _ = gym.reset(seed=0)
    errors = 0
    for i, (reply, (observation, reward, done, info)) in enumerate(zip(replies, turns[1:]), 1):
        if reply in MOVES:
            before = at
            at, gym_reward, ended, _, _ = gym.step(GYM_MOVES.index(reply))
            status = {"G": "goal", "H": "hole"}.get(gym.desc.ravel()[at].decode(), "wall" if at == before else "ok")
        else:
            errors, gym_reward, ended, status = errors + 1, 0, False, "invalid_action"
        assert (reward, done) == (gym_reward, ended) and isinstance(reward, float)
        assert info == {"seed": seed, "step": i, "parsed_action": reply if reply in MOVES else None, "status": status, "format_errors": errors}
        cells = "".join(observation.splitlines()[-size:]).replace(" ", "")
        assert cells.find("*" if status == "goal" else "P") == at and len(cells) == size * size


def test_the_letters_of_the_map():
    turns = asyncio.run(play({"seed": 7}, ["what?", "down", "up", "right", "right", "down"]))
    assert turns[0][0] == "F F F F\nF F F F\nF F P F\nF H F G" and "<action>up</action>" in turns[0][2]
    assert turns[2][0] == "F F F F\nF F F F\nF F S F\nF H P G"
    assert [t[3]["status"] for t in turns[1:]] == ["invalid_action", "ok", "ok", "ok", "wall", "goal"]
    assert turns[-1][0].endswith("F F S F\nF H F *") and json.loads(json.dumps(turns[-1][3])) == turns[-1][3]


def test_before_the_reset_after_the_end_and_after_closing_nothing_is_stepped():
    async def run():
        env = FrozenLakeEnv({"seed": 7})
        with pytest.raises(ResetRequired, match="reset"):
            await env.step(say("up"))
        for _ in range(2):  # a second reset begins the same lake again
            observation, info, _ = await env.reset()
            assert "P" in observation and info["step"] == 0
            await env.step(say("down"))
            assert (await env.step(say("right")))[2]
            with pytest.raises(ResetRequired):
                await env.step(say("right"))
        await env.reset()
        await env.close()
        await env.close()
        with pytest.raises(ResetRequired):
            await env.step(say("up"))
    asyncio.run(run())


def test_without_a_seed_each_reset_is_a_new_lake_and_tells_its_seed():
    async def run():
        env = FrozenLakeEnv()
        seen = [(await env.reset())[:2] for _ in range(5)]
        assert len({info["seed"] for _, info in seen}) == 5
        for observation, info in seen:
            assert (await FrozenLakeEnv({"seed": info["seed"]}).reset())[0] == observation
    asyncio.run(run())


# ---------------------------------------------------------------- slippery ice

def test_slippery_ice_slips_the_same_way_for_everyone():
    replies = ["up", "hm", "left", "down", "right"] * 6
    config = {"seed": 3, "size": 8, "p": 1.0, "slippery": True}
    async def at_once():
        return await asyncio.gather(*(play(config, replies) for _ in range(4)))
    first, *others = asyncio.run(at_once())
    assert all(other == first for other in others)
    moved = [t[3]["moved"] for t in first[1:]]
    assert moved != [r if r in MOVES else None for r in replies[:len(moved)]] and "slippery" in first[0][2]
    assert all(m != {"up": "down", "down": "up", "left": "right", "right": "left"}.get(t[3]["parsed_action"], 0) for m, t in zip(moved, first[1:]))
    assert asyncio.run(play({**config, "seed": 4}, replies)) != first


def test_slips_are_gymnasiums():
    gym = peer(["FFF", "FSF", "FFG"], slippery=True)
    class Rng:
        def __init__(self, x): self.x = x
        def random(self): return self.x
    for number, move in enumerate(GYM_MOVES):
        theirs = {divmod(to, 3): p for p, to, _, _ in gym.P[4][number]}
        ours = [go(["FFF", "FSF", "FFG"], (1, 1), slip(move, Rng(x))) for x in (0.1, 0.5, 0.9)]
        assert set(ours) == set(theirs) and slip(move, Rng(0.0)) == move
