"""Rollouts and groups against everything that spoils a mean, a token sequence or a log: failures, cancellations, budgets, torn files, many writers."""
import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
from html.parser import HTMLParser
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_faults import HANG, soon, turns_of_the_loop

from xland_minigrid.core import helpers
from xland_minigrid.core.helpers import append_lines, read_jsonl
from xland_minigrid.pool.errors import DeadlineExceeded, EnvFault, PoolError, ResetRequired, SessionBusy, SessionLost
from xland_minigrid.pool.group import (
    Answers,
    PrefixMismatch, Rollout, RolloutGroup, TokenBudget, TokenTrack, group_advantages, group_result, pad)

pytestmark = pytest.mark.newest


class Step(NamedTuple):
    observation: Any
    reward: float | None
    done: bool
    n: int
    info: dict


class ScriptedSession:
    "Answers from a list: a reward (the last one ends the episode), an exception to raise, or a coroutine function to await before a reward of 1."
    def __init__(self, *script, observation="go on", info=None, jump=0):
        self.script, self.n, self.observation, self.info, self.jump, self.log = list(script), 0, observation, info or {}, jump, []

    def first(self):
        return Step(self.observation, None, False, 0, {"system_message": "Play."})

    async def step(self, action):
        await asyncio.sleep(0)
        said = self.script[self.n]
        if isinstance(said, BaseException):
            raise said
        if callable(said):
            await said()
            said = 1.0
        self.n += 1
        self.log.append(action)
        return Step(self.observation, said, self.n == len(self.script), self.n + self.jump, dict(self.info))


def episode(*script, index=0, task=7, max_total_tokens=None, **options):
    session = ScriptedSession(*script, **options)
    return Rollout(session, task, index, session.first(), max_total_tokens)


async def to_the_end(rollout):
    while not rollout.done:
        await rollout.step("on")


def played(*script, fn=to_the_end, **options):
    rollout = episode(*script, **options)

    async def main():
        return (await asyncio.gather(rollout.run(fn), return_exceptions=True))[0]
    rollout.raised = asyncio.run(main())
    return rollout


# Advantages

def test_masked_rows_do_not_touch_the_mean():
    group = RolloutGroup(1, [played(1.0), played(SessionLost()), played(0.0), played(0.0)])
    assert group.rewards == [1, None, 0, 0] and group.valid.tolist() == [True, False, True, True]
    assert np.allclose(group.advantages(), [2 / 3, 0, -1 / 3, -1 / 3]) and group.advantages().dtype == np.float32
    assert np.allclose(group.advantages(scale=True), np.array([2, 0, -1, -1]) / 2**0.5)
    assert np.allclose(group.advantages(scale=True, ddof=1), np.array([2, 0, -1, -1]) / 3**0.5)
    assert list(group.errors) == [1] and "SessionLost" in group.errors[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.floats(-1e300, 1e300, allow_subnormal=True) | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -float("inf")]), min_size=1, max_size=9),
       st.booleans(), st.sampled_from([0, 1]))
def test_advantages_are_never_nan_and_never_leak(rewards, scale, ddof):
    found = group_advantages(rewards, scale=scale, ddof=ddof)
    known = np.array([r is not None and np.isfinite(r) for r in rewards])
    assert found.dtype == np.float32 and np.isfinite(found).all() and not found[~known].any()
    x = np.array([r for r in rewards if r is not None and np.isfinite(r)])
    if len(x) < 2:
        assert not found.any()
    if len(x):
        fresh = group_advantages(list(x), scale=scale, ddof=ddof)  # masked rows are as if they were not there
        assert np.array_equal(found[known], fresh)
        if np.abs(x).max() < 1e30:
            if not scale and np.ptp(x) > max(1e-5 * np.abs(x).max(), 1e-7):
                assert np.allclose(found[known], (x - x.mean()), rtol=1e-4, atol=1e-5 * np.abs(x).max())
            if scale and found.any():
                assert np.isclose((found[known].astype(float)**2).sum(), len(x) - ddof, rtol=1e-3) and abs(found.sum()) < 1e-3


def test_equal_rewards_teach_nothing():
    assert not group_advantages([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6], scale=True).any()
    assert not group_advantages([0, 0, 0], scale=True).any() and not group_advantages([5e-324, 5e-324], scale=True).any()
    assert not group_advantages([3, None], scale=True).any()
    assert not group_advantages([0.1 + 0.2 - 0.3, 0], scale=True).any() and not group_advantages([0, 1e-300], scale=True).any()
    assert group_advantages([0, 1e-6], scale=True).tolist() == [-1, 1] and group_advantages([1, 1 + 1e-5], scale=True).tolist() == pytest.approx([-1, 1], rel=1e-3)


@pytest.mark.parametrize("rewards, error", [(["much"], TypeError), ([[1, 2]], (TypeError, ValueError)), (3, TypeError), ([{}], TypeError)])
def test_what_are_no_rewards(rewards, error):
    with pytest.raises(error):
        group_advantages(rewards)
    with pytest.raises(error):
        group_result(rewards)


def test_options_are_checked():
    with pytest.raises(ValueError, match="ddof"):
        group_advantages([1, 2], ddof=2)
    with pytest.raises(ValueError, match="at least one"):
        RolloutGroup(1, [])


def test_result_for_the_curriculum():
    assert group_result([1.0, None, 0.0]) == (True, 0.5) and group_result([0.5, 0.0]) == (False, 0.25)
    assert group_result([0.5, 0.0], 0.5) == (True, 0.25) and group_result([None]) is None


# One episode

def test_an_episode_is_written_down():
    rollout = played(0.25, 0.5, info={"status": "ok"})
    assert rollout.reward == rollout.total_reward == 0.75 and rollout.step_rewards == [0.25, 0.5] and rollout.num_turns == 2
    assert [m["role"] for m in rollout.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert rollout.messages[0]["content"] == "Play." and rollout.infos[1:] == [{"status": "ok"}] * 2 and len(rollout.infos) == 3
    assert rollout.done and rollout.settled and rollout.valid and not rollout.truncated and rollout.seconds >= 0
    rollout.messages[0]["content"] = "spoilt"
    assert rollout.messages[0]["content"] == "Play."


@pytest.mark.parametrize("value, reward", [(None, 0.5), (2, 2.0), (True, 1.0), (np.float32(0.25), 0.25), (np.array(3), 3.0), (0, 0.0)])
def test_a_returned_number_is_the_reward(value, reward):
    async def fn(rollout):
        await rollout.step("on")
        return value
    assert played(0.5, 9.0, fn=fn).reward == reward and played(0.5, 9.0, fn=fn).truncated


@pytest.mark.parametrize("value, error", [("1.0 points", TypeError), (float("nan"), ValueError), (float("inf"), ValueError), ([1], TypeError), ({}, TypeError)])
def test_a_returned_oddity_is_no_reward(value, error):
    async def fn(rollout):
        return value
    rollout = played(0.5, fn=fn)
    assert isinstance(rollout.raised, error) and rollout.reward is None and rollout.error


@pytest.mark.parametrize("failure", [SessionLost("gone"), EnvFault("broke"), DeadlineExceeded("late"), RuntimeError("bug"), asyncio.CancelledError()])
def test_a_failed_step_voids_the_episode_for_good(failure):
    rollout = played(1.0, failure, 1.0)
    assert isinstance(rollout.raised, type(failure)) and rollout.reward is None and not rollout.valid and rollout.done

    async def swallows(rollout):
        with pytest.raises(type(failure)):
            await rollout.step("on")
        return 100.0
    rollout = played(failure, 1.0, fn=swallows)
    assert rollout.reward is None and rollout.error and rollout.total_reward == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_voids_the_episode(reward):
    rollout = played(1.0, reward, 1.0)
    assert isinstance(rollout.raised, EnvFault) and rollout.reward is None


def test_steps_without_a_reward_need_a_returned_one():
    assert played(None, None).reward is None and "no reward" in played(None, 1.0).error

    async def judge(rollout):
        await to_the_end(rollout)
        return 0.5
    rollout = played(None, 1.0, fn=judge)
    assert rollout.reward == 0.5 and rollout.total_reward is None and rollout.valid


def test_an_error_of_the_function_is_no_reward():
    async def fn(rollout):
        await rollout.step("on")
        raise KeyError("bug in the rollout function")
    rollout = played(1.0, fn=fn)
    assert rollout.reward is None and rollout.error.startswith("KeyError") and isinstance(rollout.raised, KeyError)


def test_a_plain_function_is_refused():
    rollout = played(1.0, fn=lambda rollout: 3)
    assert isinstance(rollout.raised, TypeError) and "async def" in rollout.error and rollout.reward is None


def test_no_step_after_the_end():
    rollout = played(1.0)
    with pytest.raises(ResetRequired, match="over"):
        asyncio.run(rollout.step("on"))
    assert rollout.reward == 1 and rollout.num_turns == 1


def test_two_steps_at_once_are_refused_and_the_first_goes_on():
    async def fn(rollout):
        found = await asyncio.gather(rollout.step("a"), rollout.step("b"), return_exceptions=True)
        assert isinstance(found[0], Step) and isinstance(found[1], SessionBusy)
    rollout = played(0.5, 0.5, fn=fn)
    assert rollout.raised is rollout and rollout.session.log == ["a"] and rollout.reward == 0.5


def test_a_cancelled_step_is_unknown_and_voids_the_episode():
    async def main():
        rollout = episode(lambda: asyncio.sleep(3600), 1.0)
        task = asyncio.create_task(rollout.run(to_the_end))
        await turns_of_the_loop()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return rollout
    rollout = asyncio.run(main())
    assert rollout.reward is None and "unknown" in rollout.error and rollout.done


def test_the_first_reason_stays():
    async def main():
        rollout = episode(lambda: asyncio.sleep(3600), 1.0)
        task = asyncio.create_task(rollout.run(to_the_end))
        await turns_of_the_loop()
        rollout.fail("deadline of 0.01 s")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return rollout
    assert asyncio.run(main()).error == "deadline of 0.01 s"
    rollout = played(1.0)
    rollout.fail("too late")
    rollout.finish(5)
    assert rollout.error is None and rollout.reward == 1


def test_a_step_left_behind_changes_nothing():
    async def main():
        rollout = episode(turns_of_the_loop, 1.0)

        async def leaves(rollout):
            rollout.left = asyncio.create_task(rollout.step("on"))
            await asyncio.sleep(0)
        await rollout.run(leaves)
        assert rollout.reward is None and "under way" in rollout.error
        with pytest.raises(ResetRequired, match="under way"):
            await rollout.left
        return rollout
    rollout = asyncio.run(main())
    assert rollout.num_turns == 0 and rollout.reward is None


def test_a_step_behind_its_back_is_noticed():
    async def fn(rollout):
        await rollout.session.step("secretly")
        await rollout.step("on")
    rollout = played(1.0, 1.0, 1.0, fn=fn)
    assert isinstance(rollout.raised, SessionLost) and rollout.reward is None
    assert isinstance(played(1.0, 1.0, jump=5).raised, SessionLost)  # another environment


def test_observations_are_copies_and_become_text():
    grid = np.arange(4).reshape(2, 2)
    session = ScriptedSession(1.0, 1.0, observation={"grid": grid})
    rollout = Rollout(session, 1, 0, session.first())
    grid[:] = 9
    assert rollout.messages[-1]["content"] == '{"grid": [[0, 1], [2, 3]]}'
    asyncio.run(rollout.step(np.int64(3)))
    asyncio.run(rollout.step(2, text="turn left"))
    assert [m["content"] for m in rollout.messages if m["role"] == "assistant"] == ["3", "turn left"]
    assert episode(1.0, observation=grid).messages[1]["content"] == "[[9, 9], [9, 9]]"
    rollout = episode(1.0, observation=grid, info={"text": "a wall"})
    asyncio.run(rollout.step(0))
    assert rollout.messages[-1]["content"] == "a wall"


def test_wrong_arguments_of_a_rollout():
    for wrong in (0, 1, -3, True, 2.5, "many"):
        with pytest.raises(ValueError, match="max_total_tokens"):
            episode(1.0, max_total_tokens=wrong)
    rollout = episode(1.0)
    with pytest.raises(TypeError, match="text"):
        asyncio.run(rollout.step(0, text=5))
    assert not rollout.done  # nothing was done, so nothing is lost


class EpisodeStates(RuleBasedStateMachine):
    "The states of the chapter (running, over, full, scored, failed), walked through at random and compared with the code."

    @initialize(most=st.none() | st.integers(3, 9))
    def reset(self, most):
        self.session = ScriptedSession(*[0.0] * 50)
        self.session.script.append(0.0)
        self.episode = Rollout(self.session, 7, 0, self.session.first(), most)
        self.state, self.rewards, self.early, self.most, self.tokens, self.reward = "running", [], False, most, 0, 0.0

    def attempt(self, action):
        try:
            return action()
        except (Exception, asyncio.CancelledError) as error:
            return error

    @rule(reward=st.sampled_from([0.0, 0.5, -1.0]), last=st.booleans())
    def step(self, reward, last):
        self.session.script = [*self.rewards, reward] + [0.0] * (not last)
        found = self.attempt(lambda: asyncio.run(self.episode.step("on")))
        if self.state == "running":
            assert isinstance(found, Step) and found.reward == reward
            self.rewards.append(reward)
            self.state = "over" if last else "running"
        else:
            assert isinstance(found, TokenBudget if self.episode.tokens.full else ResetRequired)

    @rule(failure=st.sampled_from([SessionLost("gone"), EnvFault("broke"), asyncio.CancelledError(), float("nan")]))
    def failing_step(self, failure):
        self.session.script = [*self.rewards, failure, 0.0]
        asked = self.session.n
        found = self.attempt(lambda: asyncio.run(self.episode.step("on")))
        if self.state == "running":
            assert isinstance(found, EnvFault if isinstance(failure, float) else type(failure))
            self.state = "failed"
        else:
            assert isinstance(found, (TokenBudget, ResetRequired)) and self.session.n == asked

    @rule(count=st.integers(1, 3))
    def turn(self, count):
        ids = list(self.episode.tokens.ids) or [0]
        fits = self.attempt(lambda: self.episode.add_tokens(ids, [1] * count))
        if self.state == "running":
            room = count if self.most is None else self.most - len(ids)
            assert fits is (count <= room)
            if not fits:
                self.state = "full"
        else:
            assert isinstance(fits, TokenBudget if self.state == "full" else ResetRequired)

    @rule(value=st.none() | st.sampled_from([1.0, 0, np.float32(0.25), "much", float("inf"), [1]]))
    def function_returns(self, value):
        found = self.attempt(lambda: self.episode.finish(value))
        if self.state in ("scored", "failed"):
            assert found is None
        elif isinstance(value, (str, list)) or value == float("inf"):
            assert isinstance(found, (TypeError, ValueError))
            self.state = "failed"
        else:
            self.early, self.reward = self.state != "over", sum(self.rewards) if value is None else float(value)
            self.state = "scored"

    @rule()
    def deadline(self):
        self.episode.fail("deadline")
        self.state = self.state if self.state == "scored" else "failed"

    @invariant()
    def the_code_agrees(self):
        e, state = self.episode, self.state
        assert e.done == (state != "running") and e.settled == (state in ("scored", "failed")) and e.valid == (state != "failed")
        assert (e.error is None) == (state != "failed") and e.num_turns == len(self.rewards) and e.step_rewards == self.rewards
        assert e.reward == {"failed": None, "scored": self.reward}.get(state, sum(self.rewards))
        if state == "scored":
            assert e.truncated == self.early


TestEpisodeStates = EpisodeStates.TestCase
TestEpisodeStates.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


# Tokens

def test_turns_make_one_sequence():
    rollout = episode(0.0, 1.0)
    assert rollout.add_tokens([1, 2], [3, 4], [-0.5, -0.25])
    assert rollout.add_tokens(np.array([1, 2, 3, 4, 9, 9]), [5], [-1.0])
    s = rollout.sequence()
    assert s.prompt_ids == [1, 2] and s.completion_ids == [3, 4, 9, 9, 5] and s.mask == [1, 1, 0, 0, 1] and s.logprobs == [-0.5, -0.25, 0, 0, -1]
    s.mask[0] = 7
    assert rollout.sequence().mask[0] == 1


@settings(max_examples=200, deadline=None)
@given(st.data(), st.none() | st.integers(2, 40), st.booleans())
def test_sequences_whatever_the_turns(data, most, with_logprobs):
    "Against a reference that builds the whole sequence and then cuts it."
    track, have, mask, prompt_length, fits = TokenTrack(most), [], [], None, True
    for turn in range(data.draw(st.integers(1, 5))):
        told, said = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)), data.draw(st.lists(st.integers(0, 9), max_size=8))
        prompt = have + told
        logprobs = [-1.0 - i for i in range(len(said))] if with_logprobs else None
        if not fits:
            with pytest.raises(TokenBudget):
                track.add(prompt, said, logprobs)
            break
        room = len(said) if most is None else most - len(prompt)
        if turn == 0 and (room < 0 or room < 1 and said):
            with pytest.raises(TokenBudget):
                track.add(prompt, said, logprobs)
            return
        fits = track.add(prompt, said, logprobs)
        assert fits == (len(said) <= room)
        if room >= (1 if said else 0):
            have, mask = prompt + said[:room], mask + [0] * len(told) * (turn > 0) + [1] * len(said[:room])
            prompt_length = prompt_length or len(prompt)
        assert track.full == (not fits) and (most is None or len(track.ids) <= most and track.left == most - len(have))
        s = track.sequence()
        assert s.prompt_ids + s.completion_ids == have and s.mask == mask and len(s.prompt_ids) == prompt_length
        assert len(s.completion_ids) == len(s.mask) and (s.logprobs is None) == (not with_logprobs)
        if with_logprobs:
            assert [x == 0 for x in s.logprobs] == [m == 0 for m in s.mask]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(0, 11), st.booleans())
def test_the_parting_is_found(ids, at, shorten):
    at = min(at, len(ids) - 1)
    track = TokenTrack()
    track.add(ids[:1], ids[1:])
    wrong = ids[:at] if shorten else ids[:at] + [9] + ids[at + 1:] + [5]
    if not wrong:
        return
    with pytest.raises(PrefixMismatch, match=f"token {at}:") as caught:
        track.add(wrong, [1])
    assert caught.value.detail == {"at": at, "turn": 2} and isinstance(caught.value, (ValueError, PoolError))
    assert track.add(ids, [1])  # a refused turn leaves no trace


@pytest.mark.parametrize("arguments, error", [
    (([], [1]), ValueError), (([[1, 2]], [1]), TypeError), (([1.5], [1]), TypeError), ((["a"], [1]), TypeError), (([-1], [1]), ValueError), (([1], [True]), TypeError),
    (([1], [1, 2], [-0.5]), ValueError), (([1], [1], [float("nan")]), ValueError), (([1], [1], [-float("inf")]), ValueError), (([1], None), TypeError)])
def test_what_are_no_tokens(arguments, error):
    rollout = episode(1.0)
    with pytest.raises(error):
        rollout.add_tokens(*arguments)
    assert rollout.add_tokens([1], [2])


def test_log_probabilities_in_every_turn_or_in_none():
    rollout = episode(1.0)
    rollout.add_tokens([1], [2], [-1])
    with pytest.raises(ValueError, match="every turn"):
        rollout.add_tokens([1, 2], [3])
    with pytest.raises(ValueError, match="no tokens"):
        episode(1.0).sequence()


def talker(turns=5, ask=True):
    async def fn(rollout):
        context = [1, 2]
        for _ in range(turns):
            if not rollout.add_tokens(context, [5, 6], [-1, -1]) and ask:
                return
            await rollout.step("on")
            context += [5, 6, 9]
    return fn


@pytest.mark.parametrize("ask", [True, False])
def test_a_used_up_budget_is_a_regular_end(ask):
    rollout = played(0.5, 0.5, 0.5, 0.5, 0.5, fn=talker(ask=ask), max_total_tokens=9)
    assert rollout.out_of_tokens and rollout.truncated and rollout.done and rollout.reward == 1.0 and rollout.raised is rollout
    assert rollout.sequence() == ([1, 2], [5, 6, 9, 5, 6, 9][:6] + [5], [-1, -1, 0, -1, -1, 0, -1], [1, 1, 0, 1, 1, 0, 1]) and rollout.tokens_left == 0
    assert len(rollout.session.log) == 2  # what was cut off was not played


def test_a_first_prompt_over_the_budget_is_no_episode():
    rollout = played(0.5, fn=talker(), max_total_tokens=2)
    assert isinstance(rollout.raised, TokenBudget) and rollout.reward is None and "raise max_total_tokens" in rollout.error


def test_no_tokens_after_the_end():
    with pytest.raises(ResetRequired):
        played(1.0).add_tokens([1], [2])


# Answers of a model

def test_slow_episodes_do_not_hold_up_the_others():
    async def main():
        answers = Answers(lambda asked: [name for name, in asked], patience=0.02)
        answers.expect(3)
        await asyncio.wait_for(asyncio.gather(answers(1), answers(2)), HANG)      # the third never asks
        answers.over()
        assert await asyncio.wait_for(asyncio.gather(answers("a"), answers("b")), HANG) == ["a", "b"]
        cancelled = asyncio.ensure_future(answers(1))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await soon(lambda: not answers._waiting)
        return answers.sizes
    assert asyncio.run(main()) == [2, 2]


@pytest.mark.parametrize("generate, error", [(lambda asked: [1], ValueError), (lambda asked: next(iter([])), RuntimeError), (lambda asked: 1 / 0, ZeroDivisionError)])
def test_what_goes_wrong_reaches_all_who_ask(generate, error):
    async def main():
        answers = Answers(generate)
        return await asyncio.wait_for(asyncio.gather(answers(1), answers(2), return_exceptions=True), HANG)
    assert [type(found) for found in asyncio.run(main())] == [error] * 2


# For trainers

def talking_group():
    short, broken, long = (played(*script, fn=talker(turns), index=i) for i, (turns, script) in enumerate(
        [(1, [1.0]), (2, [0.0, SessionLost()]), (2, [0.0, 0.0])]))
    return RolloutGroup("t", [short, broken, long, played(EnvFault(), index=3)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    groups = [talking_group(), talking_group()]
    batch = pad(groups, 0, side, length=10)
    assert batch.tokens.shape == (8, 10) and batch.tokens.dtype == np.int32 and batch.group.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(batch.advantages, np.tile(groups[0].advantages(), 2)) and batch.advantages.tolist()[:4] == [0.5, 0, -0.5, 0]
    for row, rollout in enumerate(list(groups[0]) + list(groups[1])):
        ids = rollout.tokens.ids
        at = slice(0, len(ids)) if side == "right" else slice(10 - len(ids), 10)
        assert batch.tokens[row, at].tolist() == ids and batch.attention[row].sum() == len(ids) and batch.attention[row, at].all()
        model = batch.mask[row] > 0
        assert (batch.tokens[row, model] >= 5).all() and (batch.tokens[row, model] <= 6).all()
        assert model.sum() == (2 * rollout.num_turns if rollout.valid else 0)
        assert (batch.logprobs[row, model] == -1).all()
    assert not batch.mask[[1, 3]].any() and batch.attention[1].any() and not batch.attention[3].any()


def test_padding_refuses_what_does_not_fit():
    group = talking_group()
    for wrong in (lambda: pad([], 0), lambda: pad(group, 0, "middle"), lambda: pad(group, 0, length=3)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match="no tokens"):
        pad(RolloutGroup(1, [played(1.0)]), 0)
    assert pad(group, 0).tokens.shape == (4, 7)


# Logs

ANYTHING = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.just(object()) | st.just(np.float32("nan"))
                        | st.just(np.arange(3)), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), x, max_size=3), max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(ANYTHING, st.text(st.characters(), max_size=20))
def test_whatever_is_in_the_infos_a_line_is_a_line(info, words):
    group = RolloutGroup(info, [played(1.0, info={"x": info}, observation=words)])
    with tempfile.TemporaryDirectory() as folder:
        path = group.append_jsonl(folder)
        (line,) = path.read_bytes().split(b"\n")[:-1]
        found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert found["messages"][1]["content"] == words and found["reward"] == 1
        assert read_jsonl(path)[0]["messages"][1]["content"] == words


@pytest.mark.parametrize("words", ["half a \ud83d pair", "\udc80", "a\u2028b\x85c\r\nd\0", "\\ud83d"])
def test_odd_characters_come_back(tmp_path, words):
    group = RolloutGroup(words, [played(1.0, observation=words, task=words)])
    (line,) = read_jsonl(group.append_jsonl(tmp_path))
    assert line["messages"][1]["content"] == line["task"] == words


def test_a_folder_gets_completions_jsonl(tmp_path):
    group = talking_group()
    path = group.append_jsonl(tmp_path)
    assert path == tmp_path / "completions.jsonl"
    group.append_jsonl(str(tmp_path))
    lines = read_jsonl(path)
    assert len(lines) == 8 and {line["group"] for line in lines} == {group.id} and [line["reward"] for line in lines[:4]] == [1, None, 0, None]
    assert [line["advantage"] for line in lines[:4]] == [0.5, 0, -0.5, 0] and lines[1]["error"].startswith("SessionLost")
    assert read_jsonl(group.append_jsonl(tmp_path / "new" / "x.jsonl"))[0]["num_turns"] == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_crash_at_any_byte_costs_its_own_line_only(data):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log.jsonl")
        lines = [json.dumps({"n": i, "said": "é" * i + '"\\'}, ensure_ascii=False) for i in range(4)]
        append_lines(path, lines[:3])
        whole = open(path, "rb").read()
        cut = data.draw(st.integers(0, len(whole)))
        open(path, "wb").write(whole[:cut])
        append_lines(path, lines[3:])
        kept = [json.loads(line)["n"] for line in whole[:cut].split(b"\n") if line.endswith(b"}")]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [item["n"] for item in read_jsonl(path)]
        assert found == kept + [3]
        torn = cut and not whole[:cut].endswith(b"\n") and not whole[:cut].endswith(b"}")
        assert bool(caught) == bool(torn)


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = append_lines(tmp_path / "log.jsonl", ['{"n": 0}'])
    write, calls = os.write, []

    def fails(file, data):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:5])
    monkeypatch.setattr(helpers.os, "write", fails)
    with pytest.raises(OSError, match="space"):
        append_lines(path, ['{"n": 1, "long": "line"}'])
    monkeypatch.undo()
    assert path.read_bytes() == b'{"n": 0}\n' and len(calls) == 2
    with pytest.raises(ValueError, match="line break"):
        append_lines(path, ["a\nb"])
    with pytest.raises(OSError):
        read_jsonl(tmp_path / "missing.jsonl")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(helpers.os, "write", lambda file, data: write(file, data[:3]))
    assert read_jsonl(append_lines(tmp_path / "log.jsonl", ['{"n": 10000}', '{"n": 2}'])) == [{"n": 10000}, {"n": 2}]


def _writer(path, who, n):
    for i in range(n):
        append_lines(path, [json.dumps({"who": who, "i": i, "part": part, "text": "x" * (3000 * (i % 3))}) for part in range(2)])


def _check(path, writers, n):
    lines = read_jsonl(path)
    assert len(lines) == 2 * writers * n
    for who in range(writers):
        assert [(line["i"], line["part"]) for line in lines if line["who"] == who] == [(i, part) for i in range(n) for part in range(2)]
    assert all((a["who"], a["i"], b["part"]) == (b["who"], b["i"], 1) for a, b in zip(lines[::2], lines[1::2]))  # lines of one call stay together


def test_threads_share_a_file(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(helpers.os, "write", lambda file, data: (write(file, data[:997]), time.sleep(0))[0])  # in pieces, so that without a lock they mix
    threads = [threading.Thread(target=_writer, args=(tmp_path / "log.jsonl", who, 30)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    _check(tmp_path / "log.jsonl", 8, 30)


@pytest.mark.slow
def test_processes_share_a_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_writer, args=(tmp_path / "log.jsonl", who, 100)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    _check(tmp_path / "log.jsonl", 3, 100)


# What people see

class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_tables_are_whole_and_escape_everything():
    group = RolloutGroup("<script>alert(1)</script>", [played(1.0), played(RuntimeError("<img src=x>")), played(0.0, observation="<b>bold</b>")])
    for shown in (group._repr_html_(), group[2]._repr_html_(), RolloutGroup(1, [played(EnvFault())])._repr_html_(), RolloutGroup(1, [episode(1.0)])._repr_html_()):
        parser = Balanced()
        parser.feed(shown)
        assert not parser.open and "script" not in parser.open and "<script" not in shown and "<img" not in shown and "<b>bold" not in shown
        assert "nan" not in "".join(parser.text).lower()
    assert repr(group) == "RolloutGroup(3 rollouts of task <script>alert(1)</script>: mean reward 0.5, 1 not scorable)"
    assert repr(group[0]) == "Rollout(0, 1 turns, reward 1)" and "RuntimeError" in repr(group[1]) and "running" in repr(episode(1.0))
    assert len(group) == 3 and list(group)[0] is group[0]
