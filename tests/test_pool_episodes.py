"""Text environments and their scheduler: every way out closes, no failure is a reward, wrong input is refused in one sentence."""
import asyncio
import contextlib
import contextvars
import functools
import itertools
import json
import math
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_faults import HANG, HOUR, Clock, soon, turns_of_the_loop
from worlds import refusals

from xland_minigrid.interop.swift import Choice, GymScheduler, LiveLimit, Trajectory
from xland_minigrid.pool.episodes import Env, RolloutRequest, blocking, envs, find_env, make_env, read_rows, register_env, request_from_row
from xland_minigrid.pool.errors import DeadlineExceeded, EnvFault
from xland_minigrid.pool.pool import EnvPool

pytestmark = pytest.mark.newest


class Counts(Env):
    "Done after `turns` answers; `break_in`, `hang_in`, `say` inject faults."
    live = opened = closed = most = 0
    hear = deaf = ignored = False

    def __init__(self, env_config=None):
        super().__init__(env_config)
        self.faults = {"turns": 3, **self.env_config}
        self.n = self.mine = 0

    async def fault(self, where):
        if self.faults.get("break_in") == where:
            raise self.faults.get("with", ConnectionError("broken on purpose"))
        if self.faults.get("hang_in") == where:
            await asyncio.sleep(3600)
        if self.faults.get("deaf_in") == where:  # swallows cancellations, until it may hear
            Counts.deaf = True
            while not Counts.hear:
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    Counts.ignored = True

    async def reset(self, config):
        cls = type(self)
        cls.live, cls.opened = cls.live + 1, cls.opened + 1
        cls.most, self.mine = max(cls.most, cls.live), 1
        await self.fault("reset")
        return "go", {"seed": self.env_config.get("seed")}, "count"

    async def step(self, action):
        await asyncio.sleep(0)
        await self.fault("step")
        self.n += 1
        action[-1]["content"] = "an environment may scribble on what it is given"
        return self.faults.get("say", f"seen {self.n}"), self.faults.get("reward", 0.5), self.n >= self.faults["turns"], {"n": self.n}

    async def close(self):
        cls = type(self)
        cls.live, cls.closed, self.mine = cls.live - self.mine, cls.closed + 1, 0
        await self.fault("close")


@pytest.fixture(autouse=True)
def fresh():
    Counts.live, Counts.opened, Counts.closed, Counts.most = 0, 0, 0, 0
    Counts.hear = Counts.deaf = Counts.ignored = False
    yield


def row(**config):
    return {"messages": [{"role": "user", "content": "<placeholder>"}], "env_config": config}


async def talk(messages, request):
    await asyncio.sleep(0)
    return f"answer {sum(m['role'] == 'assistant' for m in messages) + 1}"


def play(rows, infer=talk, scheduler=GymScheduler, env=Counts, **kwargs):
    async def main():
        before = asyncio.all_tasks()
        made = scheduler(env, **kwargs)
        played = await made.run(rows, infer)
        await asyncio.sleep(0)
        return made, played, asyncio.all_tasks() - before
    return asyncio.run(main())


# ---- the conversation ---------------------------------------------------------------------------

def test_a_conversation_in_order():
    scheduler, t, left = play(row(seed=7))
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in t.messages] == ["count", "go", "answer 1", "seen 1", "answer 2", "seen 2", "answer 3"]
    assert [[m["content"] for m in turn.prompt] for turn in t.turns][1] == ["count", "go", "answer 1", "seen 1"]
    infos = t.rollout_infos
    assert infos["total_reward"] == t.reward == 1.5 and infos["step_rewards"] == [0.5] * 3 and infos["num_turns"] == 3 and infos["gym_done"] is True
    assert infos["n"] == 3 and infos["trajectory_info"][0] == {"seed": 7}
    assert t.stopped == "done" and t.episode.observation == "seen 3" and t.error is None is t.close_error
    assert (Counts.opened, Counts.closed, scheduler.limit.live, scheduler.live, left) == (1, 1, 0, {}, set())


def test_the_request_of_the_caller_stays_as_it_was():
    request = request_from_row(row(seed=1))
    _, t, _ = play(request)
    assert request.messages == [{"role": "user", "content": "<placeholder>"}] and t.request.uuid == request.uuid


def test_reset_gets_the_whole_row():
    seen = []
    class Reads(Counts):
        async def reset(self, config):
            seen.append((config.messages, config.data_dict, config.uuid))
            return await super().reset(config)
    request = request_from_row({**row(seed=1), "answer": "42"})
    play(request, env=Reads)
    assert seen == [(request.messages, {"answer": "42", "env_config": {"seed": 1}}, request.uuid)]


def test_the_first_turn_sees_the_environment_and_not_the_placeholder():
    seen = []
    async def look(messages, request):
        seen.append(messages)
        return "ok"
    play(row(), look, max_turns=1)
    assert seen == [[{"role": "system", "content": "count"}, {"role": "user", "content": "go"}]]


@pytest.mark.parametrize("system, kept", [("", ["mine", "go"]), (None, ["mine", "go"]), ("theirs", ["theirs", "go"])])
def test_the_rows_own_system_message_stands_where_the_environment_has_none(system, kept):
    class Silent(Counts):
        async def reset(self, config):
            observation, info, _ = await super().reset(config)
            return observation, info, system
    _, t, _ = play({"messages": [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]}, env=Silent, max_turns=1)
    assert [m["content"] for m in t.messages[:2]] == kept


def test_max_turns_and_length():
    _, t, _ = play(row(turns=99), max_turns=2)
    assert t.stopped == "max_turns" and t.reward == 1.0 and not t.rollout_infos["gym_done"] and t.rollout_infos["num_turns"] == 2
    async def cut(messages, request):
        return Choice("I go", [1, 2], [-0.1, -0.2], "length")
    _, t, _ = play(row(turns=99), cut)
    assert t.stopped == "finished" and len(t.turns) == 1 and t.turns[0].choice.token_ids == [1, 2]
    _, t, _ = play(row(turns=30), max_turns=None)
    assert len(t.turns) == 30 and Counts.closed == 3


def test_order_of_a_batch_is_that_of_the_requests_whatever_finishes_first():
    async def uneven(messages, request):
        await asyncio.sleep(0.001 * (5 - request.env_config["seed"]))
        return "x"
    _, played, _ = play([row(seed=i) for i in range(5)], uneven)
    assert [t.request.env_config["seed"] for t in played] == list(range(5))


def test_one_for_one_and_none_for_none():
    assert isinstance(play(row())[1], Trajectory) and isinstance(play([row()])[1], list) and play([])[1] == []


# ---- hooks --------------------------------------------------------------------------------------

def test_hooks_may_be_plain_or_coroutines_and_come_in_order():
    calls = []
    class Spy(GymScheduler):
        async def on_trajectory_start(self, requests):
            calls.append("start")
            await super().on_trajectory_start(requests)
        async def on_turn_end(self, request, choice, turn):
            assert request.messages[-1] == {"role": "assistant", "content": choice.text}
            calls.append(f"turn {turn}")
            return await super().on_turn_end(request, choice, turn)
        async def check_finished(self, request, choice, turn):
            calls.append("check")
            return False
        async def step(self, request, choice, turn):
            calls.append("step")
            return super().step(request, choice, turn)
    _, t, _ = play(row(turns=2), scheduler=Spy)
    assert calls == ["start", "turn 1", "check", "step", "turn 2"] and t.reward == 1.0


def test_compression_shortens_the_prompt_and_not_the_log():
    class Short(GymScheduler):
        def step(self, request, choice, turn):
            super().step(request, choice, turn)
            return {"infer_request": RolloutRequest(request.messages[:2][:1] + request.messages[-1:], request.data_dict, request.uuid), "rollout_infos": {"cut": turn}}
    class Same(Counts):  # two observations that say the same are two
        async def step(self, action):
            return ("wall", *(await super().step(action))[1:])
    _, t, _ = play(row(turns=4), scheduler=Short, env=Same)
    assert [len(turn.prompt) for turn in t.turns] == [2, 2, 2, 2] and t.infos["cut"] == 3
    assert [m["content"] for m in t.messages] == ["count", "go", "answer 1", "wall", "answer 1", "wall", "answer 1", "wall", "answer 1"]


def test_a_scheduler_may_compute_its_own_reward():
    class Own(GymScheduler):
        async def on_turn_end(self, request, choice, turn):
            told = await super().on_turn_end(request, choice, turn)
            return {**told, "rollout_infos": {"total_reward": 10.0 * turn}}
    _, t, _ = play(row(), scheduler=Own)
    assert t.reward == 30.0 == t.rollout_infos["total_reward"]


@pytest.mark.parametrize("told", [5, "done", [True]])
def test_a_hook_that_returns_nonsense_is_a_failure_and_no_reward(told):
    class Odd(GymScheduler):
        async def on_turn_end(self, request, choice, turn):
            return told
    _, t, _ = play(row(), scheduler=Odd)
    assert t.reward is None and "on_turn_end" in t.error and Counts.live == 0


def test_step_may_not_change_the_uuid():
    class Other(GymScheduler):
        def step(self, request, choice, turn):
            return {"infer_request": RolloutRequest(request.messages)}
    _, t, _ = play(row(), scheduler=Other)
    assert t.reward is None and "uuid" in t.error and Counts.live == 0


def test_an_own_run():
    class Best(GymScheduler):
        async def run(self, requests, infer):
            tries = [await asyncio.gather(*(self.run_one(copy, infer) for copy in request.copies(3))) for request in requests]
            return [max(group, key=lambda t: t.reward) for group in tries]
    _, played, _ = play([request_from_row(row(seed=i)) for i in range(2)], scheduler=Best)
    assert len(played) == 2 and Counts.closed == 6


# ---- faults: no reward, and closed --------------------------------------------------------------

@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("error", [ConnectionError("broken"), OSError(28, "disk"), ValueError(), EnvFault("gone"), asyncio.CancelledError(), TimeoutError()])
def test_a_broken_environment_is_never_rewarded(where, error):
    scheduler, t, left = play(row(break_in=where, **{"with": error}))
    assert t.reward is None and t.total_reward is None and t.rollout_infos["total_reward"] is None and t.error and t.stopped == "error"
    assert Counts.live == 0 and Counts.closed == 1 and not left and t.close_error is None


def test_rewards_before_the_failure_are_kept_as_facts_only():
    class Late(Counts):
        async def step(self, action):
            if self.n == 2:
                raise ConnectionError
            return await super().step(action)
    _, t, _ = play(row(turns=9), env=Late)
    assert t.episode.step_rewards == [0.5, 0.5] and t.reward is None


def test_a_reward_that_is_no_finite_number_is_a_failure():
    for reward in (math.nan, math.inf, -math.inf, None, "1", b"1", [1.0], 1j, 10**400, np.nan, np.array([1.0, 2.0])):
        _, t, _ = play(row(reward=reward))
        assert t.reward is None and t.error.startswith("EnvFault") and Counts.live == 0, repr(reward)


def test_every_kind_of_number_is_a_reward():
    for reward in (True, 1, 1.0, np.float32(1), np.array(1.0), np.int8(1)):
        _, t, _ = play(row(reward=reward, turns=1))
        assert t.reward == 1.0 and type(t.reward) is float and json.dumps(t.to_dict()), repr(reward)


def test_reset_that_returns_nonsense():
    class Odd(Counts):
        async def reset(self, config):
            await super().reset(config)
            return brought
    for brought in (None, ("a", {}), ("a", {}, "", 1), (1, {}, ""), ("a", None, ""), ["a", {}, ""], ("a", {}, 3)):
        _, t, _ = play(row(), env=Odd)
        assert t.reward is None and "reset must return" in t.error and Counts.live == 0 and t.messages == [], brought


def test_step_that_returns_nonsense():
    class Odd(Counts):
        async def step(self, action):
            return brought
    for brought in (None, ("a", 0.0, True), (1, 0.0, True, {}), ("a", 0.0, True, None)):
        _, t, _ = play(row(), env=Odd)
        assert t.reward is None and "step must return" in t.error and Counts.live == 0, brought


def test_methods_that_block_are_refused():
    class Plain(Counts):
        def step(self, action):
            return "x", 0.0, True, {}
    _, t, _ = play(row(), env=Plain)
    assert t.reward is None and "async def" in t.error and Counts.live == 0


def test_a_failing_model_is_a_failure_of_machinery():
    async def fails(messages, request):
        raise ConnectionError("CUDA")
    async def silent(messages, request):
        return None
    assert play(row(), fails)[1].reward is None
    t = play(row(), silent)[1]
    assert t.reward is None and "Choice" in t.error and Counts.live == 0
    t = play(row(), lambda messages, request: "text")[1]
    assert t.reward is None and "async def" in t.error


def test_one_failure_leaves_the_others_alone():
    _, played, _ = play([row(seed=0), row(seed=1, break_in="step"), row(seed=2)])
    assert [t.reward for t in played] == [1.5, None, 1.5] and Counts.live == 0


def test_cancel_policy_ends_the_others_and_raises():
    async def main():
        scheduler = GymScheduler(Counts, on_error="cancel")
        async def slow(messages, request):
            await asyncio.sleep(0.001 if request.env_config.get("break_in") else 3600)
            return "x"
        with pytest.raises(EnvFault, match="on purpose") as caught:
            await scheduler.run([row(), row(break_in="step"), row()], slow)
        assert isinstance(caught.value.__cause__, ConnectionError)
        return scheduler, asyncio.all_tasks()
    scheduler, tasks = asyncio.run(main())
    assert Counts.live == 0 and Counts.closed == 3 and scheduler.limit.live == 0 and len(tasks) == 1


# ---- closing: raise, hang, deaf -----------------------------------------------------------------

@pytest.mark.parametrize("error", [ConnectionError("broken on purpose"), asyncio.CancelledError("odd")])
def test_a_close_that_raises_is_reported_and_the_reward_stands(error, caplog):
    scheduler, t, _ = play(row(break_in="close", **{"with": error}))
    assert t.reward == 1.5 and type(error).__name__ in t.close_error and scheduler.close_errors == [t.close_error] and "did not close properly" in caplog.text


@pytest.mark.parametrize("how", ["hang_in", "deaf_in"])
def test_a_close_that_hangs_is_bounded_and_reported(how, caplog):
    async def main():
        scheduler = GymScheduler(Counts, close_timeout=0.05, max_live=1)
        async with asyncio.timeout(HANG):  # the environment would take for ever
            played = await scheduler.run([row(turns=1, **{how: "close"}), row(turns=1)], talk)
        Counts.hear = True
        return scheduler, played
    scheduler, played = asyncio.run(main())
    assert [t.reward for t in played] == [0.5, 0.5] and "0.05 s" in played[0].close_error and played[1].close_error is None
    assert scheduler.limit.live == 0 and "did not close within" in caplog.text


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("how", ["hang_in", "deaf_in"])
def test_a_deadline_ends_what_hangs(where, how):
    async def main():
        scheduler = GymScheduler(Counts, deadline=0.03, close_timeout=0.03 if how == "deaf_in" else HANG)
        async with asyncio.timeout(HANG):
            t = await scheduler.run(row(**{how: where}), talk)
        Counts.hear = True
        assert await soon(lambda: Counts.live == 0)  # the deaf one hears at last, and closes too
        return t
    t = asyncio.run(main())
    assert t.stopped == "deadline" and t.reward is None and t.error.startswith(DeadlineExceeded.__name__)


def test_nothing_goes_on_after_the_deadline(monkeypatch):
    clock = Clock(monkeypatch)
    async def main():
        scheduler = GymScheduler(Counts, deadline=HANG, close_timeout=HOUR)
        playing = asyncio.create_task(scheduler.run(row(turns=9, deaf_in="step"), talk))
        assert await soon(lambda: Counts.deaf)               # inside its first step, on the pool's own loop
        clock.jump(1.1 * HANG)
        assert await soon(lambda: Counts.ignored)            # the deadline has come
        Counts.hear = True
        return await playing
    t = asyncio.run(main())
    assert len(t.turns) == 1 and t.stopped == "deadline" and t.close_error is None and Counts.live == 0


# ---- cancellation -------------------------------------------------------------------------------

@pytest.mark.parametrize("cancels", [1, 2, 5])
@pytest.mark.parametrize("where", ["reset", "step", "infer"])
def test_cancelled_anywhere_and_again(where, cancels):
    async def main():
        scheduler = GymScheduler(Counts, max_live=2)
        async def infer(messages, request):
            await asyncio.sleep(3600 if where == "infer" else 0)
            return "x"
        running = asyncio.create_task(scheduler.run([row(hang_in=where) for _ in range(4)], infer))
        assert await soon(lambda: Counts.live == 2)
        await turns_of_the_loop()
        assert Counts.live == 2
        for _ in range(cancels):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (Counts.opened, Counts.closed, Counts.live, scheduler.limit.live, scheduler.live) == (2, 2, 0, 0, {})
        return asyncio.all_tasks()
    assert len(asyncio.run(main())) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_cancelled_again_while_it_closes_slowly(alone):
    class Slow(Counts):
        async def close(self):
            assert await soon(lambda: may_close)
            await super().close()
    may_close = []
    async def main():
        scheduler, request = GymScheduler(Slow), request_from_row(row(hang_in="step"))
        running = asyncio.create_task(scheduler.run_one(request, talk) if alone else scheduler.run(request, talk))
        while not Slow.live:
            await asyncio.sleep(0.001)
        for _ in range(6):
            running.cancel()
            await turns_of_the_loop(5)
        may_close.append(True)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert Slow.closed == 1 and Slow.live == 0
    asyncio.run(main())


def test_timeout_around_a_run():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HANG) as limit:
                playing = asyncio.create_task(GymScheduler(Counts).run([row(hang_in="step")] * 3, talk))
                assert await soon(lambda: Counts.live == 3)
                limit.reschedule(asyncio.get_running_loop().time())
                await playing
        for waited, live in ((0.0, 0), (0.02, 0)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(GymScheduler(Counts).run(row(hang_in="reset"), talk), waited)
            assert Counts.live == live
        assert Counts.closed == Counts.opened >= 3
    asyncio.run(main())


def test_a_loop_that_shuts_down_closes_what_is_open():
    async def main():
        asyncio.create_task(GymScheduler(Counts).run([row(hang_in="step")] * 3, talk))
        while Counts.live < 3:
            await asyncio.sleep(0.001)
    asyncio.run(main())  # cancels the forgotten task
    assert Counts.live == 0 and Counts.closed == 3


def test_cancelled_conversations_are_not_logged(tmp_path):
    async def main():
        running = asyncio.create_task(GymScheduler(Counts, completions=tmp_path / "c.jsonl").run([row(turns=1), row(hang_in="step")], talk))
        assert await soon((tmp_path / "c.jsonl").exists)
        await turns_of_the_loop()
        running.cancel()
        await asyncio.wait([running])
    asyncio.run(main())
    assert len((tmp_path / "c.jsonl").read_text().splitlines()) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_random_cancels_leak_nothing(seed):
    rng = random.Random(seed)
    Counts.live = Counts.opened = Counts.closed = 0
    kinds = [{}, {"break_in": "step"}, {"break_in": "reset"}, {"break_in": "close"}, {"hang_in": "step"}, {"hang_in": "reset"}]
    async def infer(messages, request):
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return "x"
    async def main():
        scheduler = GymScheduler(Counts, max_live=rng.randint(1, 5), close_timeout=HANG)
        running = asyncio.create_task(scheduler.run([row(**rng.choice(kinds)) for _ in range(rng.randint(1, 8))], infer))
        for _ in range(rng.randint(1, 3)):
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            running.cancel()
        await asyncio.wait([running], timeout=HANG)
        assert running.done() and Counts.live == 0 and Counts.opened == Counts.closed and scheduler.limit.live == 0 and not scheduler.live
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
    asyncio.run(main())


# ---- how many live ------------------------------------------------------------------------------

def test_the_limit_holds_for_the_whole_life():
    scheduler, played, _ = play([row(seed=i) for i in range(9)], max_live=2)
    assert Counts.most == 2 and Counts.opened == 9 and scheduler.limit.live == 0


def test_the_limit_holds_across_calls_loops_and_threads():
    scheduler = GymScheduler(Counts, max_live=2)
    class Locked(Counts):
        lock, now, top = threading.Lock(), 0, 0
        async def reset(self, config):
            with Locked.lock:
                Locked.now += 1
                Locked.top = max(Locked.top, Locked.now)
            await asyncio.sleep(0.002)
            return "go", {}, ""
        async def close(self):
            with Locked.lock:
                Locked.now -= 1
    scheduler.env, results = Locked, []
    def loop():
        for _ in range(2):
            results.extend(asyncio.run(scheduler.run([row(turns=1) for _ in range(3)], talk)))
    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert len(results) == 18 and all(t.reward == 0.5 for t in results) and Locked.top == 2 and Locked.now == 0 == scheduler.limit.live


def test_the_limit_is_fair_and_survives_who_gives_up():
    async def main():
        limit, order = LiveLimit(1), []
        async def visit(i):
            async with limit:
                order.append(i)
                await asyncio.sleep(0)
        async with limit:
            waiting = [asyncio.create_task(visit(i)) for i in range(5)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            waiting[3].cancel()
        waiting[1].cancel()  # it has been given the place, and has not yet taken it
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [2, 4] and limit.live == 0
    asyncio.run(main())


def test_a_place_is_not_given_to_a_dead_loop():
    limit = LiveLimit(1)
    loop = asyncio.new_event_loop()
    async def enter():
        await limit.__aenter__()
    loop.run_until_complete(enter())
    waiting = loop.create_task(enter())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    waiting._log_destroy_pending = False
    limit.leave()
    async def main():
        async with asyncio.timeout(HANG):
            async with limit:
                assert limit.live == 1
    asyncio.run(main())
    assert limit.live == 0


def test_odd_limits():
    for make in (LiveLimit, lambda most: GymScheduler(Counts, max_live=most)):
        assert refusals({repr(most): (functools.partial(make, most), ValueError, f"max_live is {most!r}") for most in (0, -1, 1.5, True, "4", None)}) == {}


# ---- rewards ------------------------------------------------------------------------------------

def test_blended_rewards():
    async def politeness(trajectory):
        return 2.0
    def length(trajectory):
        return len(trajectory.turns)
    _, t, _ = play(row(), reward_funcs=[politeness, length], reward_weights=[0.1, 0.01, 1.0])
    assert t.rewards == {"politeness": 2.0, "length": 3.0, "gym": 1.5} and math.isclose(t.reward, 0.2 + 0.03 + 1.5)
    _, t, _ = play(row(), reward_funcs=[length, length])
    assert len(t.rewards) == 3 and t.reward == 7.5
    length.__name__ = "gym"  # takes no other's place
    _, t, _ = play(row(), reward_funcs=[length], reward_weights=[0.0, 1.0])
    assert len(t.rewards) == 2 and t.reward == 1.5


def test_the_last_weight_belongs_to_the_environment():
    assert play(row(), reward_weights=[2.0])[1].reward == 3.0
    assert play(row(), reward_funcs=[lambda t: 1], reward_weights=[0, 2.0])[1].reward == 3.0


@pytest.mark.parametrize("value", [None, math.nan, "1"])
def test_an_unknown_part_leaves_the_whole_unknown(value):
    _, t, _ = play(row(), reward_funcs=[lambda trajectory: value])
    assert t.reward is None and t.rollout_infos["num_turns"] == 3 and (t.error is None) == (value is None)


def test_a_reward_function_that_fails():
    def fails(trajectory):
        raise ConnectionError("judge")
    _, t, _ = play(row(), reward_funcs=[fails])
    assert t.reward is None and "judge" in t.error and Counts.live == 0
    called = []
    play(row(break_in="step"), reward_funcs=[called.append])
    assert called == []


def test_odd_arguments():
    cases = (
        ({"reward_weights": [1, 2]}, ValueError), ({"reward_funcs": [len], "reward_weights": [1]}, ValueError), ({"reward_weights": [math.nan]}, ValueError),
        ({"reward_funcs": ["format"]}, TypeError), ({"max_turns": 0}, ValueError), ({"max_turns": True}, ValueError), ({"max_turns": 2.0}, ValueError),
        ({"close_timeout": 0}, ValueError), ({"close_timeout": math.inf}, ValueError), ({"close_timeout": "1"}, ValueError), ({"close_timeout": None}, ValueError),
        ({"timeout": 0}, ValueError), ({"deadline": -1}, ValueError), ({"deadline": math.nan}, ValueError), ({"on_error": "ignore"}, ValueError), ({"maxturns": 3}, TypeError))
    assert refusals({repr(kwargs): (functools.partial(GymScheduler, Counts, **kwargs), error, "") for kwargs, error in cases}) == {}


# ---- what cannot be played is refused before anything is opened ----------------------------------

def test_refused_at_once():
    cases = (
        ([row(), row(name="frozen_pond")], talk, ValueError), ([row(), 5], talk, TypeError), ([row(), {"env_config": {}}], talk, ValueError),
        ([row(), {"messages": "x"}], talk, TypeError), ([row(), {"messages": [], "env_config": "x"}], talk, TypeError),
        ([row()], None, TypeError), ([row()], "model", TypeError), (None, talk, TypeError), ("rows", talk, TypeError))
    assert refusals({f"{requests} {infer}": (functools.partial(play, requests, infer), error, "") for requests, infer, error in cases}) == {} and Counts.opened == 0


def test_a_plain_infer_is_refused_and_blocking_is_the_remedy():
    def plain(messages, request):
        time.sleep(0.001)
        return "x"
    with pytest.raises(TypeError, match=r"blocking\(plain\)"):
        play(row(), plain)
    assert play(row(), blocking(plain))[1].reward == 1.5


def test_callables_of_every_kind_may_answer():
    class Model:
        async def __call__(self, messages, request):
            return "x"
        async def answer(self, messages, request):
            return "x"
    async def extra(messages, request, temperature):
        return "x"
    for infer in (Model(), Model().answer, functools.partial(extra, temperature=1), lambda m, r: talk(m, r)):
        assert play(row(), infer)[1].reward == 1.5


def test_a_request_is_played_once_at_a_time():
    request = request_from_row(row())
    with pytest.raises(ValueError, match="copies"):
        play([request, request])
    async def main():
        scheduler = GymScheduler(Counts)
        first = asyncio.create_task(scheduler.run(request, talk))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already"):
            await scheduler.run(request, talk)
        assert (await first).reward == 1.5
        assert (await scheduler.run(request, talk)).reward == 1.5
    asyncio.run(main())
    unseeded = RolloutRequest([], {"env_config": {"seed": None}}).copies(3)  # as a data set fills in what a row lacks
    assert len({c.env_config["seed"] for c in unseeded}) == 1 and unseeded[0].env_config["seed"] is not None
    copies = request.copies(4)
    assert len({c.uuid for c in copies} | {request.uuid}) == 5 and all(c.messages == request.messages and c.messages is not request.messages for c in copies)


def test_no_environment_and_no_start_hook():
    with pytest.raises(ValueError, match="default"):
        play(row(), env=None)
    class Lost(GymScheduler):
        async def on_trajectory_start(self, requests):
            pass
    _, t, _ = play(row(), scheduler=Lost)
    assert t.reward == 1.5 and t.messages[0]["content"] == "<placeholder>"  # the model's first prompt is the row's


def test_a_scheduler_whose_hooks_reward_and_whose_environment_says_nothing():
    class Silent(Counts):
        async def reset(self, config):
            return "", {}, ""
    class Once(GymScheduler):
        def on_trajectory_start(self, requests):
            pass
        def on_turn_end(self, request, choice, turn):
            return {"done": True, "rollout_infos": {"total_reward": float(len(choice.text))}}
    t = asyncio.run(Once(Silent).run({"messages": [{"role": "user", "content": "hi"}]}, talk))
    assert t.reward == 8.0 and t.messages[0]["content"] == "hi"


# ---- the loop stays free ------------------------------------------------------------------------

def test_blocking_functions_do_not_stop_the_others():
    class Sleeps(Counts):
        @blocking
        def step(self, action):
            asleep.release()
            assert wake.wait(HANG)
            return "x", 1.0, True, {}
    asleep, wake = threading.Semaphore(0), threading.Event()
    async def main():
        running = asyncio.create_task(GymScheduler(Sleeps).run([row(), row()], talk))
        for _ in range(2):  # both sleep, and this loop goes on
            assert await soon(lambda: asleep.acquire(blocking=False))
        wake.set()
        return await running
    assert all(t.reward == 1.0 for t in asyncio.run(main()))


def test_blocking_passes_everything_on():
    @blocking
    def divide(a, *, by):
        "Divide."
        return a / by
    assert asyncio.run(divide(6, by=2)) == 3 and divide.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        asyncio.run(divide(1, by=0))
    for odd in (talk, 5):
        with pytest.raises(TypeError):
            blocking(odd)


def test_six_hung_calls_do_not_stall_a_seventh():
    wake = threading.Event()
    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(6))  # what two cores have
        stuck = [asyncio.ensure_future(blocking(wake.wait)()) for _ in range(6)]
        await turns_of_the_loop()
        try:
            async with asyncio.timeout(HANG):
                return await blocking(lambda: "seventh")()
        finally:
            wake.set()
            await asyncio.gather(*stuck)
    assert asyncio.run(main()) == "seventh"


def test_six_hung_environments_do_not_stall_a_seventh_nor_the_end_of_the_pool():
    made, wake = itertools.count(), threading.Event()
    class Hangs(Counts):
        def __init__(self, env_config):
            super().__init__(env_config)
            self.number = next(made)
        @blocking
        def step(self, action):
            if self.number < 6:
                wake.wait()
            return "x", 1.0, True, {}
    async def main():
        async def rollout(episode):
            await episode.step("go")
        async with asyncio.timeout(HANG), EnvPool.local(Hangs, slots=7) as pool:
            group = await pool.run_group(rollout, size=1, over_provision=6)
        assert not wake.is_set() and group.rewards == [1.0]
    try:
        asyncio.run(main())
    finally:
        wake.set()
    assert Hangs.closed == Hangs.opened == 7


@pytest.mark.slow
def test_a_hung_call_does_not_keep_the_program_from_ending():
    program = "import asyncio, threading; from xland_minigrid.pool.episodes import blocking\nasync def main():\n    asyncio.ensure_future(blocking(threading.Event().wait)())\n    await asyncio.sleep(0)\nasyncio.run(main())"
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG, capture_output=True).returncode == 0


def test_blocking_passes_on_what_no_future_can_hold():
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(blocking(lambda: next(iter(())))(), HANG))


def test_blocking_sees_the_context_of_the_caller():
    who = contextvars.ContextVar("who")
    async def main():
        who.set("me")
        return await blocking(who.get)()
    assert asyncio.run(main()) == "me"


# ---- registry -----------------------------------------------------------------------------------

@pytest.fixture
def name():
    yield "test counts"
    envs.pop("test counts", None)


def test_registry(name):
    envs[name] = Counts
    assert envs[name] is Counts and name in envs and name in list(envs) and isinstance(make_env({"name": name}), Counts)
    class Other(Counts):
        pass
    assert register_env(name, Other) is Other and find_env({"name": name}) is Other
    assert isinstance(make_env({"name": name}, default=Counts), Other) and isinstance(make_env(None, default=Counts), Counts) and isinstance(make_env({}, name), Other)
    del envs[name]
    assert name not in envs


def test_unknown_names_list_the_known():
    for call in (lambda: make_env({"name": "frozen_pond"}), lambda: envs["frozen_pond"], lambda: make_env({}, "frozen_pond")):
        with pytest.raises(ValueError, match="frozen_lake") as caught:
            call()
        assert isinstance(caught.value, KeyError) and "frozen_pond" in str(caught.value) and "\n" not in str(caught.value)
    assert envs.get("frozen_pond") is None


def test_only_environments_are_registered_and_by_names():
    odd = [("odd", cls) for cls in (5, "Counts", object, int, Counts(), None, lambda: None)] + [(name, Counts) for name in (5, "", "  ", None, b"x")]
    assert refusals({repr(args): (functools.partial(register_env, *args), TypeError, "") for args in odd}) == {} and "odd" not in envs


def test_odd_configs():
    cases = [(make, config, TypeError) for make in (make_env, Counts) for config in (5, "frozen_lake", ["name"])] + [(make_env, {"name": name}, ValueError) for name in ("", ["a"])]
    assert refusals({f"{make.__name__}({config!r})": (functools.partial(make, config), error, "") for make, config, error in cases}) == {}


def test_an_environment_needs_its_methods():
    class Half(Env):
        async def reset(self, config):
            return "", {}, ""
    with pytest.raises(TypeError):
        Half({})


def test_an_environment_may_keep_and_change_its_config():
    class Greedy(Counts):
        def __init__(self, env_config):
            env_config.pop("seed")
            super().__init__(env_config)
    _, played, _ = play(request_from_row(row(seed=1)).copies(3), env=Greedy)
    assert all(t.reward == 1.5 for t in played) and played[0].request.env_config == {"seed": 1}


def test_the_environments_of_this_package_are_found_by_name():
    for name in ("frozen_lake", "sudoku", "textarena", "xland", "openenv"):
        assert name in envs and issubclass(envs[name], Env)


# ---- rows ---------------------------------------------------------------------------------------

def test_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + json.dumps(row(name="a", seed=3)) + "\n\n" + json.dumps({"messages": [], "answer": "42"}), encoding="utf-8")
    first, second = read_rows(path)
    assert first.env_config == {"name": "a", "seed": 3} and second.env_config == {} and second.data_dict == {"answer": "42"} and first.uuid != second.uuid


BAD_LINES = [
    "{", "5", "[]", "null", '"text"', "{}", '{"messages": null}', '{"messages": "hi"}', '{"messages": [5]}', '{"messages": [{"role": "user"}]}',
    '{"messages": [{"role": 1, "content": "x"}]}', '{"messages": [{"role": "user", "content": ["x"]}]}', '{"messages": [], "env_config": []}',
    '{"messages": [], "env_config": "lake"}', "[" * 100_000]


def test_malformed_rows_are_refused_with_their_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    def read(line):
        path.write_text(json.dumps(row()) + "\n\n" + line + "\n" + json.dumps(row()))
        return read_rows(path)
    assert refusals({line[:60]: (functools.partial(read, line), ValueError, "line 3") for line in BAD_LINES}) == {}


def test_empty_and_binary_files(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(ValueError, match="no rows"):
        read_rows(tmp_path / "empty")
    with pytest.raises(ValueError, match="UTF-8"):
        read_rows(tmp_path / "binary")
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "missing")


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["messages", "env_config", "role", "content"]), x), max_leaves=8))
def test_no_row_gets_past_but_as_a_request(x):
    try:
        request = request_from_row(x)
    except (TypeError, ValueError) as error:
        assert "\n" not in str(error)
    else:
        assert all(set(m) >= {"role", "content"} for m in request.messages) and isinstance(request.env_config, dict)


def test_odd_requests_and_choices():
    requests = (("x", {}, None), TypeError), (([], None), TypeError), (([], {}, ""), TypeError), (([], {}, 5), TypeError), (([{}],), ValueError)
    choices = ((5,), TypeError), (("x", None, [-0.1]), ValueError), (("x", [1, 2], [-0.1]), ValueError)
    found = refusals({f"request {args}": (functools.partial(RolloutRequest, *args), error, "") for args, error in requests})
    assert found | refusals({f"choice {args}": (functools.partial(Choice, *args), error, "") for args, error in choices}) == {}


# ---- the log ------------------------------------------------------------------------------------

def test_completions(tmp_path):
    path = tmp_path / "new" / "completions.jsonl"
    _, played, _ = play([row(seed=1, token="hunter2"), row(break_in="step")], completions=path)
    lines = {line["uuid"]: line for line in map(json.loads, path.read_text().splitlines())}
    good, bad = (lines[t.request.uuid] for t in played)
    assert good["messages"] == played[0].messages and good["reward"] == 1.5 and good["rollout_infos"]["num_turns"] == 3 and good["final_observation"] == "seen 3"
    assert bad["reward"] is None and "on purpose" in bad["error"] and "hunter2" not in path.read_text()


def test_odd_infos_lose_no_line(tmp_path):
    class Odd(Counts):
        async def step(self, action):
            _, *rest, _ = await super().step(action)
            return "caf\u00e9 \ud800 \u2028", *rest, {1: np.arange(3), "nan": np.float32("nan"), "inf": math.inf, "set": {1}, "object": object(), "big": 10**30, "bytes": b"x"}
    path = tmp_path / "c.jsonl"
    play(row(turns=2), env=Odd, completions=path)
    (line,) = path.read_bytes().splitlines()
    infos = json.loads(line)["rollout_infos"]
    assert infos["1"] == [0, 1, 2] and infos["nan"] is None is infos["inf"] and infos["big"] == 10**30


# ---- how it looks -------------------------------------------------------------------------------

def test_html_shows_the_conversation_and_escapes_it():
    _, t, _ = play(row(turns=1, say="<script>"))
    page = t._repr_html_()
    assert "<script>" not in page and "answer 1" in page and "reward 0.5" in page and "done" in page
    _, t, _ = play(row(break_in="step"))
    assert "unknown" in t._repr_html_() and "on purpose" in t._repr_html_() and "on purpose" in repr(t)
    assert Trajectory(RolloutRequest([]))._repr_html_()


@pytest.mark.slow
def test_a_thousand_trajectories():
    scheduler, played, left = play([row(seed=i, **({"break_in": "step"} if i % 10 == 0 else {})) for i in range(1000)])
    assert sum(t.reward is None for t in played) == 100 and Counts.live == 0 and Counts.most <= 64 and not left
