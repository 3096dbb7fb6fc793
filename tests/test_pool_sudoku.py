"""Sudoku against a solver of another kind, rewards against a recount from the replies, and games that misbehave."""
import asyncio
import json
import random
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.pool.episodes import make_env
from xland_minigrid.pool.errors import EnvFault, ResetRequired
from xland_minigrid.pool.text import sudoku
from xland_minigrid.pool.text.sudoku import (
    Score, SudokuEnv, candidates, checked_puzzle, hints, objection, parse_move, random_puzzle, read_board, render, solutions, write_board)
from xland_minigrid.pool.text.textarena import TextArenaEnv, new_part

pytestmark = pytest.mark.newest

CLASSIC = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
UNITS = [[(r, c) for c in range(9)] for r in range(9)] + [[(r, c) for r in range(9)] for c in range(9)] + \
        [[(3 * (b // 3) + i // 3, 3 * (b % 3) + i % 3) for i in range(9)] for b in range(9)]


def breaks_the_rules(board):
    "Straight from the definition."
    return any(len(filled := [board[9 * r + c] for r, c in unit if board[9 * r + c]]) != len(set(filled)) for unit in UNITS)


def covers(board, most):
    "Solutions by Knuth's Algorithm X on sets: 324 constraints, 729 placements, nothing in common with ours."
    rows = {(r, c, n): [("cell", r, c), ("row", r, n), ("column", c, n), ("box", r // 3 * 3 + c // 3, n)] for r in range(9) for c in range(9) for n in range(1, 10)}
    open_ = {}
    for move, constraints in rows.items():
        for constraint in constraints:
            open_.setdefault(constraint, set()).add(move)

    def select(move):
        removed = []
        for j in rows[move]:
            for other in open_[j]:
                for k in rows[other]:
                    if k != j:
                        open_[k].discard(other)
            removed.append(open_.pop(j))
        return removed

    def deselect(move, removed):
        for j in reversed(rows[move]):
            open_[j] = removed.pop()
            for other in open_[j]:
                for k in rows[other]:
                    if k != j:
                        open_[k].add(other)

    found, chosen = [], []

    def search():
        if not open_:
            found.append(sorted(chosen))
            return
        for move in sorted(open_[min(open_, key=lambda j: len(open_[j]))]):
            chosen.append(move)
            removed = select(move)
            search()
            deselect(move, removed)
            chosen.pop()
            if len(found) >= most:
                return

    for i, n in enumerate(board):
        if n:
            if any(j not in open_ for j in rows[i // 9, i % 9, n]):
                return []
            chosen.append((i // 9, i % 9, n))
            select((i // 9, i % 9, n))
    search()
    return [[n for _, _, n in cover] for cover in found]


def say(text):
    return [{"role": "assistant", "content": text}]


async def play(env, replies):
    turns = [await env.reset(None)]
    for reply in replies:
        turns.append(await env.step(say(reply)))
        if turns[-1][2]:
            break
    return turns


def answers(puzzle, solution):
    return [f"[{i // 9 + 1} {i % 9 + 1} {solution[i]}]" for i in range(81) if puzzle[i] == "."]


# ---------------------------------------------------------------- puzzles

@pytest.mark.parametrize("seed, clues", [(0, 36), (1, 30), (2, 26), (3, 50), (2**63 - 1, 28), (5, 80)])
def test_a_puzzle_has_its_clues_and_one_solution(seed, clues):
    puzzle, solution = random_puzzle(seed, clues)
    board = read_board(puzzle)
    assert sum(n > 0 for n in board) == clues and covers(board, 2) == [read_board(solution)]
    assert not breaks_the_rules(read_board(solution)) and 0 not in read_board(solution)


@pytest.mark.slow
def test_many_puzzles_have_one_solution():
    for seed in range(60):
        puzzle, solution = random_puzzle(1000 + seed, 26 + seed % 30)
        assert covers(read_board(puzzle), 2) == [read_board(solution)]


@settings(max_examples=12)
@given(st.integers(0, 9), st.integers(24, 45), st.randoms(use_true_random=False), st.booleans())
def test_solutions_are_those_of_another_solver(seed, left, rng, spoilt):
    board = read_board(random_puzzle(seed, 60)[1])
    for cell in rng.sample(range(81), 81 - left):
        board[cell] = 0
    if spoilt:  # a legal number that need not be the right one
        cell = rng.choice([i for i in range(81) if not board[i]])
        if candidates(board, cell):
            board[cell] = rng.choice(candidates(board, cell))
    ours, theirs = solutions(board, 3), covers(board, 3)
    assert len(ours) == len(theirs) and all(solution in covers(solution, 1) for solution in ours)
    assert len(theirs) > 2 or sorted(ours) == sorted(theirs)


def test_one_seed_is_one_puzzle_everywhere():
    "Each run of the tests hashes strings with another seed, and finds the puzzle that was published."
    assert len({random_puzzle(s, 40)[1] for s in range(30)}) == 30
    assert random_puzzle(0, 40)[0] == "...2.17..2.1......7968..421.57.12.4..2.9...17.1.5....89..1.5...56374.182142.8.9.."  # published


@pytest.mark.parametrize("text, words", [("1" * 81, "no solution"), ("." * 81, "fewer than 17"), ("123", "81"), ("x" * 81, "81"), (CLASSIC.replace("53", "55", 1), "no solution"),
                                         (random_puzzle(0, 36)[1], "filled"), ("." * 30 + CLASSIC[30:], "more than one|fewer"), ("٣" + CLASSIC[1:], "81")])
def test_puzzles_that_are_none_are_refused(text, words):
    with pytest.raises(ValueError, match=words if text != "1" * 81 else "filled|no solution"):
        SudokuEnv({"puzzle": text})
    with pytest.raises(TypeError):
        read_board(5)
    assert checked_puzzle(CLASSIC)[1].startswith("534678912")


def test_a_search_that_would_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(sudoku, "_MOST_NODES", 20)
    with pytest.raises(ValueError, match="more clues"):
        checked_puzzle(CLASSIC)


@pytest.mark.parametrize("wrong", [dict(clues=25), dict(clues=81), dict(seed=-1), dict(observation="brief"), dict(hints=3), dict(clues="36"), dict(clue=30), dict(puzzle=5), dict(observation=1)])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=r"\.$|\?$"):
        SudokuEnv(wrong)


# ---------------------------------------------------------------- rules

@settings(max_examples=60)
@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=30))
def test_a_move_is_refused_exactly_if_the_rules_refuse_it(seed, moves):
    clues = read_board(random_puzzle(seed, 36)[0])
    board = list(clues)
    for row, column, number in moves:
        why = objection(board, clues, (row, column, number))
        on = 1 <= row <= 9 and 1 <= column <= 9 and 0 <= number <= 9
        cell = 9 * row + column - 10
        after = [number if i == cell else n for i, n in enumerate(board)]
        allowed = on and not clues[cell] and board[cell] != number and not breaks_the_rules(after)
        assert (why == "") == allowed and (allowed or why.endswith("."))
        if on and not board[cell]:
            assert candidates(board, cell) == [n for n in range(1, 10) if not breaks_the_rules([n if i == cell else m for i, m in enumerate(board)])]
        board = after if allowed else board


@pytest.mark.parametrize("reply, move", [("[5 3 7]", (5, 3, 7)), ("[5,3,7]", (5, 3, 7)), ("no [1 1 1] but [ 2 , 2 2 ]", (2, 2, 2)), ("5 3 7", (5, 3, 7)), ("<action>5 3 7</action> of 81", (5, 3, 7)),
                                         ("row 5, column 3: 7", (5, 3, 7)), ("[5 3]", None), ("[5 3 7 1]", None), ("5 3 7 1", None), ("[a b c]", None), ("", None), ("[99999 1 1]", None), ("[1 2 0]", (1, 2, 0)), ("[٣ 1 1]", None)])
def test_replies(reply, move):
    assert parse_move(reply) == move


@given(st.text() | st.text(alphabet="[]0123456789 ,<action>/"))
def test_no_reply_breaks_the_parser(text):
    assert parse_move(text) is None or len(parse_move(text)) == 3


# ---------------------------------------------------------------- rewards

def recount(clues, moves):
    "The five parts of an episode from its moves alone, as the table of the seed says it."
    board, seen, empty, valid, repeated = list(clues), [], [], [], []
    for move in moves:
        repeats = seen.count(move)
        repeated.append(0 if not repeats else -min(2**repeats, 10))
        seen.append(move)
        if move is None:
            empty.append(0)
            valid.append(0)
            continue
        row, column, number = move
        on = 1 <= row <= 9 and 1 <= column <= 9
        empty.append(0 if not on else 1 if not board[9 * row + column - 10] else -1)
        allowed = not objection(board, clues, move)
        valid.append(-0.5 if not allowed else 0 if repeats else 1)
        if allowed:
            board[9 * row + column - 10] = number
    to_fill, left = clues.count(0), board.count(0)
    mean = lambda x: sum(x) / max(len(x), 1)
    return mean(empty), mean(valid), mean(repeated), (to_fill - left) / to_fill, float(left == 0)


@settings(max_examples=40)
@given(st.integers(0, 5), st.lists(st.one_of(st.none(), st.integers(0, 20), st.tuples(st.integers(0, 10), st.integers(1, 9), st.integers(0, 10))), max_size=25))
def test_the_steps_are_paid_what_they_add(seed, plan):
    puzzle, solution = random_puzzle(seed, 70)
    right = answers(puzzle, solution)
    replies = ["hm" if p is None else right[p % len(right)] if isinstance(p, int) else "[%d %d %d]" % p for p in plan]
    turns = asyncio.run(play(SudokuEnv({"seed": seed, "clues": 70}), replies))[1:]
    moves = [parse_move(reply) for reply in replies[:len(turns)]]
    parts = recount(read_board(puzzle), moves)
    assert sum(t[1] for t in turns) == pytest.approx(sum(parts), abs=1e-9)
    if turns:
        info = turns[-1][3]
        names = ("empty_cell_reward", "valid_move_reward", "repetition_reward", "progress_reward", "correct_reward")
        assert [info[name] for name in names] == pytest.approx(parts) and info["combined_reward"] == pytest.approx(sum(parts)) and info["combined_reward"] <= 4
        assert info["format_errors"] == moves.count(None) and info["step"] == len(turns) and json.loads(json.dumps(info)) == info
        assert turns[-1][2] == (info["status"] == "solved") == (parts[4] == 1)


def test_repeats_cost_more_and_more_up_to_ten():
    score = Score(10)
    for expected in (0, -2, -4, -8, -10, -10, -10):
        before = score.repetition
        score.turn((1, 1, 1), was_empty=False, allowed=False, filled=0, solved=False)
        assert score.repetition - before == expected
    for _ in range(2000):  # and never overflow
        score.turn((1, 1, 1), was_empty=False, allowed=False, filled=0, solved=False)
    assert score.parts()["repetition_reward"] > -10


def test_saying_nothing_again_and_again_does_not_pay():
    silent = asyncio.run(play(SudokuEnv({"seed": 1}), ["[1 1 1]", "[1 1 1]"] + ["hm"] * 6))[1:]
    assert sum(t[1] for t in silent[2:]) < 0 and [t[3]["status"] for t in silent[2:]] == ["invalid_action"] * 6


# ---------------------------------------------------------------- episodes

def test_whoever_follows_the_guaranteed_moves_solves_an_easy_puzzle():
    async def run():
        env = SudokuEnv({"seed": 2, "clues": 45, "observation": "diff"})
        text, total, done, told = (await env.reset(None))[0], 0.0, False, []
        while not done:
            sure = re.search(r"GUARANTEED MOVES \(one number fits\): (\[\d \d \d\])", text)[1]
            text, reward, done, info = await env.step(say(sure))
            total += reward
            told.append(text)
        return total, info, told
    total, info, told = asyncio.run(run())
    assert total == pytest.approx(4) and info["status"] == "solved" and info["filled"] == 36
    assert max(map(len, told)) < 600  # however long the game: no text grows with it


def test_differences_and_full_boards_tell_the_same_game():
    puzzle, solution = random_puzzle(3, 60)
    right = answers(puzzle, solution)
    replies = [right[0], "[1 1 1]", "hm", right[1], right[1], right[0][:-2] + "0]", *right]
    full, diff = (asyncio.run(play(SudokuEnv({"seed": 3, "clues": 60, "observation": how, "hints": False}), replies)) for how in ("full", "diff"))
    assert [t[1:] for t in full[1:]] == [t[1:] for t in diff[1:]] and full[0] == diff[0]
    board = read_board(puzzle)
    for (whole, *_), (change, *_) in zip(full[1:], diff[1:]):
        if found := re.match(r"Row (\d), column (\d) is (\d|empty) now\.", change):
            board[9 * int(found[1]) + int(found[2]) - 10] = 0 if found[3] == "empty" else int(found[3])
        assert whole.endswith(render(board)) and "R1" not in change and len(change) < 200
    assert write_board(board) == solution and full[-1][2]


def test_a_wrong_number_can_be_replaced_or_erased_and_a_clue_cannot():
    puzzle, solution = random_puzzle(8, 30)
    board = read_board(puzzle)
    cell = next(i for i in range(81) if not board[i] and len(candidates(board, i)) > 2)
    first, second = [n for n in candidates(board, cell) if str(n) != solution[cell]][:1] + [int(solution[cell])]
    row, column = cell // 9 + 1, cell % 9 + 1
    clue = next(i for i in range(81) if board[i])
    turns = asyncio.run(play(SudokuEnv({"seed": 8, "clues": 30}), [f"[{row} {column} {n}]" for n in (first, second, 0, 0)] + [f"[{clue // 9 + 1} {clue % 9 + 1} 0]"]))[1:]
    assert [t[3]["status"] for t in turns] == ["ok", "ok", "ok", "illegal", "illegal"] and [t[3]["filled"] for t in turns] == [1, 1, 0, 0, 0]
    assert "clue" in turns[-1][0]


def test_hints_are_short_true_and_say_when_it_is_too_late():
    board = read_board(CLASSIC)
    text = hints(board, [(1, 3, 9)] * 3 + [(5, 5, 5)] + [(9, 9, n) for n in range(1, 10)] + [(0, 99, 1)])
    solution = solutions(board)[0]
    for row, column, number in re.findall(r"\[(\d) (\d) (\d)\]", text.splitlines()[0]):
        assert solution[9 * int(row) + int(column) - 10] == int(number)
    assert text.count("\n") == 2 and "[1 3 9]" not in text.splitlines()[2] and "[0 99 1]" in text and "[9 9 9]" not in text.splitlines()[2]
    assert "TRIED" not in hints(board) and hints(solution) == ""
    dead = list(board)  # row 1 column 3 may be 1, 2 or 4: use them up around it
    for cell, number in ((3, 2), (6, 1), (12 - 1, 4)):
        dead[cell] = number
    assert not candidates(dead, 2) and hints(dead).startswith("DEAD END: no number fits row 1 column 3") and "GUARANTEED" not in hints(dead)


def test_before_the_reset_and_after_the_end_nothing_is_stepped():
    async def run():
        env = make_env({"name": "sudoku", "clues": 80, "seed": 1})
        with pytest.raises(ResetRequired):
            await env.step(say("[1 1 1]"))
        for _ in range(2):
            turns = await play(env, answers(*random_puzzle(1, 80)))
            assert turns[-1][2] and turns[-1][1] == 4
            with pytest.raises(ResetRequired):
                await env.step(say("[1 1 1]"))
        for wrong in (None, [], [{"role": "user", "content": "x"}]):
            await env.reset(None)
            with pytest.raises((TypeError, ValueError)):
                await env.step(wrong)
        await env.close()
        with pytest.raises(ResetRequired):
            await env.step(say("[1 1 1]"))
        unseeded = SudokuEnv({"clues": 60})
        seeds = [(await unseeded.reset(None))[1]["seed"] for _ in range(3)]
        assert len(set(seeds)) == 3
    asyncio.run(run())


# ---------------------------------------------------------------- TextArena's games

class Guess:
    "A game of TextArena's interface: it draws from the shared generator, as they do, and repeats everything."
    def reset(self, num_players, seed=None):
        assert num_players == 1
        if seed is not None:
            random.seed(seed)
        self.secret, self.told, self.done = random.random(), "[GAME] Guess.", False

    def get_observation(self):
        return 0, self.told

    def step(self, action):
        if action == "crash":
            raise RuntimeError("the game broke")
        self.told += f"\n[Player] [{action}]\n[GAME] {random.random()} {self.secret}"
        return action == "stop", {}

    def close(self):
        return {0: self.secret}, {0: {"reason": "stopped", "turn_count": 2}}


def test_a_game_of_textarena_is_told_in_parts_and_is_its_seeds_whoever_plays_beside_it():
    async def run():
        make = lambda env_id: Guess()
        async def one(seed):
            return await play(TextArenaEnv({"env_id": "Guess-v0", "seed": seed}, make=make), ["a", "b", "stop"])
        alone = await one(3)
        assert alone[0][0] == "[GAME] Guess." and all("Player" not in t[0] and t[0].count("GAME") == 1 for t in alone[1:-1])
        assert alone[-1][0] == "stopped" and alone[-1][2] and alone[-1][1] == random.Random(3).random() and [t[1] for t in alone[1:-1]] == [0.0, 0.0]
        together = await asyncio.gather(*(one(seed) for seed in [3, 4] * 10))
        assert all(turns == alone for turns in together[::2]) and together[1] != alone
        assert (await one(None)) != (await one(None))
    random.seed(0)
    outside = random.getstate()
    asyncio.run(run())
    assert random.getstate() == outside  # the caller's random numbers are left alone


def test_a_broken_game_is_no_reward():
    class Mute(Guess):
        def close(self):
            return {}, {}
    async def run():
        env = TextArenaEnv({"seed": 1}, make=lambda env_id: Guess())
        await env.reset(None)
        with pytest.raises(RuntimeError, match="broke"):
            await env.step(say("crash"))
        env = TextArenaEnv({"seed": 1}, make=lambda env_id: Mute())
        await env.reset(None)
        with pytest.raises(EnvFault, match="without a reward"):
            await env.step(say("stop"))
        await env.close()
        with pytest.raises(ResetRequired):
            await env.step(say("a"))
    asyncio.run(run())


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match="pip install textarena"):
        asyncio.run(TextArenaEnv().reset(None))
    for wrong in (dict(env_id=5), dict(seed="x"), dict(system_message=5), dict(env_ids="x")):
        with pytest.raises((TypeError, ValueError)):
            TextArenaEnv(wrong)


def test_the_new_part_is_what_follows():
    assert new_part("abc", "ab") == "c" and new_part("xbc", "ab") == "xbc" and new_part("ab", "abc") == "ab"
    assert new_part("[GAME] a\n[Player 0] go\n[GAME] b", "[GAME] a", "go") == "[GAME] b"
    for said, reply in (("going", "go"), ("go", "g."), ("go", "(")):  # only the reply itself is left out, and no pattern is made of it
        assert new_part(f"[GAME] a\n[Player 0] {said}\n[GAME] b", "[GAME] a", reply) == f"[Player 0] {said}\n[GAME] b"
