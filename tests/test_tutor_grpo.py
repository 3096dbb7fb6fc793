"""The exercises of the tutorial about GRPO: its own solutions pass, and a wrong answer is told what is wrong with it."""
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from xland_minigrid.pool import grpo
from xland_minigrid.tutor import all_exercises
from xland_minigrid.tutor import grpo as check

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "tutorials" / "09_grpo.ipynb"
sys.path.insert(0, str(ROOT / ".ci"))
import colab

NAMES = ("advantages", "kl_estimate", "teaching")


def answers(how):
    "The answers in the tutorial, by name: our solutions (`colab.solution`), or what students find (`colab.stub`)."
    scope = {"np": np}
    for cell in json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]:
        if colab.is_exercise(cell):
            exec(how("".join(cell["source"])), scope)
    return scope


def test_there_are_three():
    assert [number for number in all_exercises() if number.startswith("9.")] == ["9.1", "9.2", "9.3"]


@pytest.mark.parametrize("name", NAMES)
def test_the_solutions_of_the_tutorial_are_right(name):
    verdict = getattr(check, name)(answers(colab.solution)[name])
    assert verdict and verdict.message.startswith("Right"), verdict


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_an_answer_and_gives_no_traceback(name):
    verdict = getattr(check, name)(answers(colab.stub)[name])
    assert not verdict and "Error" not in verdict.message, verdict


def test_the_librarys_advantages_are_right():
    assert check.advantages(grpo.advantages)


@pytest.mark.parametrize("answer, says", [
    (lambda returns, floor: [r or 0 for r in returns], "not"), (lambda returns, floor: [0.0], "one number per episode"), (lambda returns, floor: None, "return"), (7, "no function"),
    (lambda returns, floor: "ab", "numbers"), (lambda returns, floor: [float("nan")] * len(returns), "nan"), (lambda returns: returns, "other arguments"),
    (lambda returns, floor: grpo.group_advantages(returns), "divide it by the deviation"), (lambda returns, floor: grpo.advantages([r or 0 for r in returns], floor), "failure"),
    (lambda returns, floor: grpo.advantages(returns, 0.0), "add the floor")])
def test_advantages_that_are_wrong(answer, says):
    verdict = check.advantages(answer)
    assert not verdict and re.search(says, verdict.message), verdict


def test_a_learner_uses_the_advantages_it_is_given():
    seen = []

    def mine(returns, floor):
        seen.append((list(returns), floor))
        return grpo.advantages(returns, floor)

    async def steps(config, **given):
        learner = grpo.lake_learner(config, count=20, **given)
        async with grpo.EnvPool.local("frozen_lake", slots=8) as pool:
            return await grpo.train(learner, pool, progress=False)

    from xland_minigrid.pool.pool import run_here
    config = grpo.GRPOConfig(steps=1, groups=2, group_size=4, warmup=0)
    rows = run_here(lambda: steps(config, advantages=mine))
    assert len(seen) == 2 and all(len(returns) == 4 and floor == config.floor for returns, floor in seen)
    assert rows[0]["loss"] == run_here(lambda: steps(config))[0]["loss"]
    assert run_here(lambda: steps(config, advantages=lambda returns, floor: np.ones(4)))[0]["loss"] != rows[0]["loss"]
