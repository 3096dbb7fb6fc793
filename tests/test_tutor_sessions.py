"""The exercises of the tutorial about many sessions: its own solutions pass, and what is wrong is told so in a sentence."""
import json
import re
import threading
from pathlib import Path

import pytest

from xland_minigrid.pool import exercises
from xland_minigrid.pool.frozen_lake import shortest_path
from xland_minigrid.tutor import WrongAnswer

TUTORIAL = Path(__file__).resolve().parent.parent / "tutorials" / "08_many_sessions_at_once.ipynb"


def solutions():
    "The solutions that stand in the tutorial, by name."
    text = "\n".join("".join(cell["source"]) for cell in json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "markdown")
    scope = {"shortest_path": shortest_path}
    for source in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(source, scope)
    return scope


@pytest.mark.parametrize("check, answer", [("check_guide", "guide"), ("check_advantages", "advantages"), ("check_means", "mean_rewards")])
def test_the_solutions_of_the_tutorial_are_right(check, answer):
    assert getattr(exercises, check)(solutions()[answer]).startswith("Right")
    assert not [t for t in threading.enumerate() if t.name.startswith("xland-pool")]


async def blindly(episode):
    for _ in range(50):
        await episode.step("<action>down</action>")


async def never(episode):
    import asyncio
    await asyncio.sleep(3600)


async def generous(episode):
    for move in shortest_path(episode.observation.replace(" ", "").replace("P", "S").split("\n")):
        await episode.step(f"<action>{move}</action>")
    return 2.0


def plain(episode):
    return 1.0


@pytest.mark.parametrize("guide, says", [(blindly, "hole|ResetRequired|over"), (generous, "the reward 2: return nothing"), (plain, "async def guide"), (7, "async def guide")])
def test_a_guide_that_does_not_arrive(guide, says):
    with pytest.raises(WrongAnswer, match=says):
        exercises.check_guide(guide)


@pytest.mark.slow
def test_a_guide_that_never_ends_is_not_waited_for():
    with pytest.raises(WrongAnswer, match="deadline"):
        exercises.check_guide(never)


@pytest.mark.parametrize("advantages, says", [
    (lambda rewards: rewards, "not"), (lambda rewards: [0.0], "one advantage each"), (lambda rewards: None, "."), (None, "TypeError"),
    (lambda rewards: [r - sum(rewards) / len(rewards) for r in rewards], "TypeError"),
    (lambda rewards: [0 if r is None else (r - m) / (s or 1) for m, s in [(0.5, 0.5)] for r in rewards], "not")])
def test_advantages_that_are_wrong(advantages, says):
    with pytest.raises(WrongAnswer, match=says):
        exercises.check_advantages(advantages)


async def failures_as_zeros(pool, rollout, tasks):
    return [sum(r or 0.0 for r in (await pool.run_group(rollout, task)).rewards) / 4 for task in tasks]


async def stops_at_the_first_failure(pool, rollout, tasks):
    return [sum((await pool.run_group(rollout, task, on_error="cancel")).rewards) / 4 for task in tasks]


async def zero_for_none(pool, rollout, tasks):
    results = [(await pool.run_group(rollout, task)).result() for task in tasks]
    return [0.0 if result is None else result[1] for result in results]


async def too_few(pool, rollout, tasks):
    return [0.5]


@pytest.mark.parametrize("answer, says", [(failures_as_zeros, "a failure is no reward"), (stops_at_the_first_failure, "EnvFault"), (zero_for_none, "there is no mean"), (too_few, "one entry for each"),
                                          (plain, "async def mean_rewards")])
def test_means_that_are_wrong(answer, says):
    with pytest.raises(WrongAnswer, match=says):
        exercises.check_means(answer)
