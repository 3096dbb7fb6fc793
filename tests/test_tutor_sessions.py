"""The exercises of the tutorial about many sessions: its own solutions pass, and what is wrong is told so in a sentence."""
import asyncio
import re
import threading

import numpy as np
import pytest
from tutorial_answers import answers, colab

from xland_minigrid.pool.text.frozen_lake import shortest_path
from xland_minigrid.tutor import all_exercises
from xland_minigrid.tutor import sessions as check

pytestmark = pytest.mark.newest


def same(a, b):
    return np.array_equal(a.observation, b.observation) and a.reward == float(b.reward)


def given(how):
    return answers("08_many_sessions_at_once", how, asyncio=asyncio, shortest_path=shortest_path, same=same)


NAMES = ("crossed", "answer", "guide", "mean_rewards")


def test_there_are_four():
    assert [number for number in all_exercises() if number.startswith("8.")] == ["8.1", "8.2", "8.3", "8.4"]
    assert all(callable(given(colab.solution)[name]) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_solutions_of_the_tutorial_are_right(name):
    verdict = getattr(check, name)(given(colab.solution)[name])
    assert verdict and verdict.message.startswith("Right"), verdict
    assert not [t for t in threading.enumerate() if t.name.startswith("xland-pool")]


@pytest.mark.parametrize("name", NAMES)
def test_what_students_find_is_no_answer_and_no_traceback(name):
    verdict = getattr(check, name)(given(colab.stub)[name])
    assert not verdict and "Error" not in verdict.message, verdict
    assert "Nothing here yet" in getattr(check, name)(...).message


async def blindly(episode):
    for _ in range(50):
        await episode.step("<action>down</action>")


async def never(episode):
    await asyncio.sleep(3600)


async def generous(episode):
    for move in shortest_path(episode.observation.replace(" ", "").replace("P", "S").split("\n")):
        await episode.step(f"<action>{move}</action>")
    return 2.0


async def only_one_lake(episode):
    for move in shortest_path(["SFFF", "FHFH", "FFFH", "HFFG"]):
        if not episode.done:
            await episode.step(f"<action>{move}</action>")


def plain(episode):
    return 1.0


def test_guides_that_do_not_arrive():
    refused(check.guide, (blindly, "`blindly`, line .*(ResetRequired|over)"), (generous, "the reward 2: return nothing"), (only_one_lake, "On the lake {'seed'"),
            (plain, "async def guide"), (7, "async def guide"))


def refused(exercise, *table):
    "Every answer of the table (answer, what is said) is refused."
    verdicts = [(exercise(answer), says) for answer, says in table]
    assert [(verdict, says) for verdict, says in verdicts if verdict or not re.search(says, verdict.message)] == []


@pytest.mark.slow
def test_a_guide_that_never_ends_is_not_waited_for():
    refused(check.guide, (never, "deadline"))


def test_crossed_wires_that_are_not_found():
    refused(check.crossed, (lambda seen, twins: (0, 1, 0), "return None where all agree"), (lambda seen, twins: None, "return three numbers"),
            (lambda seen: None, "other arguments"), (7, "function: begin"))


def test_a_guide_that_reads_two_starts_is_told_so():
    async def reads_again(episode):
        while not episode.done:
            rows = episode.observation.replace(" ", "").replace("P", "S").split("\n")[-4:]
            await episode.step(f"<action>{shortest_path(rows)[0]}</action>")

    refused(check.guide, (reads_again, "shows S and P"))


async def failures_as_zeros(pool, rollout, tasks):
    return [sum(r or 0.0 for r in (await pool.run_group(rollout, task)).rewards) / 4 for task in tasks]


async def zeros_dropped(pool, rollout, tasks):
    return [sum(r) / len(r) if (r := [x for x in (await pool.run_group(rollout, task)).rewards if x]) else None for task in tasks]


async def stops_at_the_first_failure(pool, rollout, tasks):
    return [sum((await pool.run_group(rollout, task, on_error="cancel")).rewards) / 4 for task in tasks]


async def zero_for_none(pool, rollout, tasks):
    results = [(await pool.run_group(rollout, task)).result() for task in tasks]
    return [0.0 if result is None else result[1] for result in results]


async def too_few(pool, rollout, tasks):
    return [0.5]


async def not_a_number(pool, rollout, tasks):
    return [float("nan")] * len(tasks)


async def the_groups(pool, rollout, tasks):
    return list(await pool.run_groups(rollout, tasks))


def test_means_that_are_wrong():
    refused(check.mean_rewards, (failures_as_zeros, "a failure is not a reward"), (zeros_dropped, "a real zero is a score"), (stops_at_the_first_failure, "EnvFault"), (zero_for_none, "there is no mean"), (too_few, "one entry for each"),
            (not_a_number, "nan"), (the_groups, "return a number"), (plain, "async def mean_rewards"))


def test_groups_that_all_begin_at_once_leave_no_tracebacks(capfd):
    import gc

    async def abandoned(pool, rollout, tasks):
        playing = [asyncio.create_task(pool.run_group(rollout, task)) for task in tasks]
        return [(await task).rewards for task in playing]

    refused(check.mean_rewards, (abandoned, "call `run_groups`"))
    gc.collect()
    assert capfd.readouterr().err == ""
