"""The exercises of the tutorial about GRPO: its own solutions pass, and a wrong answer is told what is wrong with it."""
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from tutorial_answers import answers, colab

from xland_minigrid.pool import grpo
from xland_minigrid.tutor import all_exercises
from xland_minigrid.tutor import grpo as check

pytestmark = pytest.mark.newest

NAMES = ("advantages", "loss", "group_size", "batch")


def given(how):
    return answers("09_grpo", how, np=np, jnp=jnp)


def test_there_are_four():
    assert [number for number in all_exercises() if number.startswith("9.")] == ["9.1", "9.2", "9.3", "9.4"]


@pytest.mark.parametrize("name", NAMES)
def test_the_solutions_of_the_tutorial_are_right(name):
    verdict = getattr(check, name)(given(colab.solution)[name])
    assert verdict and verdict.message.startswith("Right"), verdict


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_an_answer_and_gives_no_traceback(name):
    verdict = getattr(check, name)(given(colab.stub)[name])
    assert not verdict and "Error" not in verdict.message, verdict


def test_the_librarys_functions_are_right():
    assert check.advantages(grpo.advantages) and check.loss(grpo.token_loss)


@pytest.mark.parametrize("answer, says", [
    (lambda returns, floor: [r or 0 for r in returns], "not"), (lambda returns, floor: [0.0], "one number per episode"), (lambda returns, floor: None, "return"), (7, "function: begin"),
    (lambda returns, floor: "ab", "numbers"), (lambda returns, floor: [float("nan")] * len(returns), "nan"), (lambda returns: returns, "other arguments"),
    (lambda returns, floor: grpo.group_advantages(returns), "divide it by the deviation"), (lambda returns, floor: grpo.advantages([r or 0 for r in returns], floor), "failure"),
    (lambda returns, floor: grpo.advantages(returns, 0.0), "add the floor")])
def test_advantages_that_are_wrong(answer, says):
    verdict = check.advantages(answer)
    assert not verdict and re.search(says, verdict.message), verdict


def test_a_warning_about_an_empty_mean_is_an_answer_to_refuse():
    def unguarded(returns, floor):
        known = np.array([r for r in returns if r is not None])
        mean, scale = known.mean(), known.std() + floor
        return [0.0 if r is None else (r - mean) / scale for r in returns]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none reaches the reader
        verdict = check.advantages(unguarded)
    assert not verdict and "Nothing could be scored" in verdict.message, verdict


@pytest.mark.parametrize("name", NAMES)
def test_the_page_goes_on_with_our_function(name):
    stub, ours = given(colab.stub)[name], given(colab.solution)[name]
    assert check.or_ours(ours) is ours and check.or_ours(stub) is not stub


def test_a_loss_that_jax_cannot_trace_is_told_so():
    def loss(new, old, advantage, kl, beta, clip):
        return beta * kl - np.minimum(np.exp(new - old) * advantage, np.clip(np.exp(new - old), 1 - clip, 1 + clip) * advantage)

    verdict = check.loss(loss)
    assert not verdict and "jnp instead of np" in verdict.message and check.or_ours(loss) is not loss, verdict


def test_a_learner_uses_the_functions_it_is_given():
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
    called, loss = [], given(colab.solution)["loss"]
    mine = lambda *args: called.append(len(args)) or loss(*args)
    assert run_here(lambda: steps(config, loss=mine))[0] | {"seconds": 0, "cpu_seconds": 0} == rows[0] | {"seconds": 0, "cpu_seconds": 0} and set(called) == {6}
    assert run_here(lambda: steps(config, loss=lambda new, old, advantage, *_: -new * advantage))[0]["loss"] != rows[0]["loss"]
