"""Faults that once were in sessions, slots, server and client, each with the attack that showed it; and the state machines of session and slot, checked step by step."""
import ast
import asyncio
import contextlib
import functools
import gc
import json
import logging
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pool_faults import HANG, HOUR, LiveServer, soon
from worlds import compiled

import xland_minigrid
from xland_minigrid.core.goals import AgentNearGoal
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.wrappers import Wrapper
from xland_minigrid.pool import EnvPool, start_server
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.errors import BadRequest, ConnectFailed, EnvFault, PoolExhausted, ResetRequired, SessionBusy, SessionLost
from xland_minigrid.pool.sessions import Host, SlotBackend, TextBackend, write_reply
from xland_minigrid.pool.slots import DONE, Slots

pytestmark = pytest.mark.newest

TOKEN, EMPTY = "a-token-for-tests", "MiniGrid-Empty-5x5"


def connect(live, size=1, **options) -> EnvPool:
    return EnvPool.connect(getattr(live, "url", live), size, **{"token": TOKEN, "resume_for": HOUR, "connect_timeout": HANG, "ping": HOUR, "timeout": HANG, **options})


def fault_in(step, **attributes) -> type[Env]:
    "A text environment whose `step` calls a function of the conversation."
    class Faulty(Env):
        async def reset(self, config):
            return "go", {}, ""

        async def step(self, messages):
            found = step(messages)
            return await found if asyncio.iscoroutine(found) else found
    return Faulty


@contextlib.asynccontextmanager
async def raw(live, path="/session"):
    "A connection to a server by hand, after its first frame."
    from websockets.asyncio.client import connect
    async with connect(live.url + path, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None, max_size=None, ping_interval=None) as ws:
        await ws.recv()
        yield ws


# ---------------------------------------------------------------- a repeated request


def test_a_repeated_pending_request_keeps_one_deliverer():
    "As a client would that reconnects again and again: each repetition comes with another way to deliver."
    gate = asyncio.Event()
    async def wait(messages):
        await gate.wait()
        return "done", 0.0, True, {}

    async def main():
        host, kept, told = Host({"slow": TextBackend(fault_in(wait), 1)}), [], []
        seat = host.open()
        await host.ask(seat, 1, "reset", None)
        for _ in range(10_000):
            class Deliver:
                def __call__(self, reply):
                    told.append(reply)
            deliver = Deliver()
            kept.append(weakref.ref(deliver))
            host.submit(seat, 2, "step", "x", deliver)
        del deliver, Deliver
        gc.collect()
        assert sum(ref() is not None for ref in kept) <= 1
        gate.set()
        assert await soon(lambda: told) and len(told) == 1 and seat.n == 1
        await host.close()
    asyncio.run(main())


@pytest.mark.parametrize("repeats, size", [(2_000, 1 << 14), pytest.param(100_000, 1 << 20, marks=pytest.mark.slow)])
def test_a_repeated_pending_request_is_answered_once_on_a_connection(repeats, size):
    gate = threading.Event()
    async def wait(messages):
        while not gate.is_set():
            await asyncio.sleep(0.002)
        return "x" * size, 0.0, True, {}

    async def main():
        with LiveServer({"slow": TextBackend(fault_in(wait), 1, step_timeout=HOUR)}) as live:
            async with raw(live) as ws:
                await ws.send('{"id": 1, "op": "reset", "value": null}')
                await ws.recv()
                for _ in range(repeats):
                    await ws.send('{"id": 2, "op": "step", "value": "x"}')
                await ws.send('{"id": 3, "op": "state"}')
                assert json.loads(await ws.recv())["id"] == 3            # all repetitions have been read
                gate.set()
                replies = [json.loads(await ws.recv())]
                await ws.send('{"id": 4, "op": "state"}')
                replies.append(json.loads(await ws.recv()))
                assert [reply["id"] for reply in replies] == [2, 4] and len(replies[0]["obs"]) == size
            assert live.counts["replayed"] == repeats - 1
    asyncio.run(main())


def test_a_reply_that_comes_after_a_resume_goes_to_the_new_connection():
    "The client repeats its request there; it gets one reply, after the first frame."
    gate = threading.Event()
    async def wait(messages):
        while not gate.is_set():
            await asyncio.sleep(0.002)
        return "done", 0.0, True, {}

    async def main():
        with LiveServer({"slow": TextBackend(fault_in(wait), 1, step_timeout=HOUR)}) as live:
            async with connect(live) as pool:
                session = pool.sessions[0]
                await session.reset()
                step = asyncio.ensure_future(session.step("x"))
                assert await soon(lambda: any(seat.pending for seat in live.host.seats.values()))
                for resumes in (1, 2, 3):
                    session._io.loop.call_soon_threadsafe(session._link.ws.transport.abort)
                    assert await soon(lambda: session.resumes == resumes)
                gate.set()
                assert (await step).observation == "done" and session.n == 1
    asyncio.run(main())


# ---------------------------------------------------------------- plug-ins that print


CHATTY = """
import os, sys
from xland_minigrid.pool import Env, register_env
def chatter():
    print("x" * 1_000_000)
    os.write(1, b"y" * 200_000)
    sys.stderr.write("z" * 1_000_000)
chatter()
class Chatty(Env):
    async def reset(self, config):
        chatter()
        return "go", {}, ""
    async def step(self, messages):
        chatter()
        return "on", 1.0, False, {}
register_env("chatty", Chatty)
"""


@pytest.mark.parametrize("logged", [False, True])
def test_a_plugin_that_prints_a_megabyte_stops_nothing(tmp_path, logged):
    plugin = tmp_path / "chatty.py"
    plugin.write_text(CHATTY)
    async def main(server):
        async with EnvPool.connect(server, 1, timeout=HANG) as pool:
            await pool.sessions[0].reset()
            assert [(await pool.sessions[0].step("x")).n for _ in range(3)] == [1, 2, 3]
    with start_server(env=None, plugin=str(plugin), text=("chatty",), log=tmp_path / "log" if logged else None, timeout=HANG) as server:
        asyncio.run(main(server))
    assert not logged or (tmp_path / "log").read_text().count("x" * 1_000_000) == 5


# ---------------------------------------------------------------- tracebacks


def hidden_place(messages):
    raise KeyError("the reason")


def logged(caplog) -> list[dict]:
    return [json.loads(record.message) for record in caplog.records if record.name == "xland_minigrid.pool"]


def test_a_broken_text_environment_leaves_its_traceback(caplog):
    caplog.set_level(logging.INFO, "xland_minigrid.pool")
    async def main():
        async with EnvPool.local(fault_in(hidden_place), 1) as pool:
            await pool.sessions[0].reset()
            with pytest.raises(EnvFault, match="KeyError") as caught:
                await pool.sessions[0].step("x")
            assert isinstance(caught.value.__cause__, KeyError) and "the reason" not in str(caught.value)
        caplog.clear()
        with LiveServer({"broken": TextBackend(fault_in(hidden_place), 1)}) as live:
            async with connect(live) as pool:
                await pool.sessions[0].reset()
                with pytest.raises(EnvFault, match="KeyError"):
                    await pool.sessions[0].step("x")
    asyncio.run(main())
    (said,) = [line for line in logged(caplog) if "traceback" in line]
    assert "hidden_place" in said["traceback"] and "the reason" in said["traceback"] and said["error"] == "KeyError"


def test_a_tick_that_fails_leaves_its_traceback(caplog):
    caplog.set_level(logging.INFO, "xland_minigrid.pool")
    def hidden_tick(*_):
        raise FloatingPointError("out of nothing")

    async def main():
        host = Host({"slots": SlotBackend(Slots(EMPTY, 2))})
        host.backends["slots"].slots._step = hidden_tick
        seats = [host.open(), host.open()]
        for seat in seats:
            await host.ask(seat, 1, "reset", 0)
        replies = await asyncio.gather(*(host.ask(seat, 2, "step", 0) for seat in seats))
        assert all(isinstance(reply.error, EnvFault) and isinstance(reply.error.__cause__, FloatingPointError) for reply in replies)
    asyncio.run(main())
    (said,) = [line for line in logged(caplog) if "traceback" in line]    # one tick, one traceback, however many sessions shared it
    assert "hidden_tick" in said["traceback"]


def test_a_connection_and_a_picture_that_fail_leave_their_tracebacks(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "xland_minigrid.pool")
    def hidden(*_):
        raise ZeroDivisionError("in a handler")

    async def main():
        with LiveServer(env=EMPTY, playground=True) as live:
            monkeypatch.setattr(Slots, "picture", hidden)
            async with raw(live, "/session?env=playground") as ws:
                await ws.send('{"id": 1, "op": "render"}')
                assert not json.loads(await ws.recv())["ok"]
            async with raw(live) as ws:
                monkeypatch.setattr(Host, "submit", hidden)
                await ws.send('{"id": 1, "op": "reset"}')
                with contextlib.suppress(Exception):
                    await ws.recv()
                assert ws.close_code == 1011
            assert live.freed()
    asyncio.run(main())
    assert sum("hidden" in line.get("traceback", "") for line in logged(caplog)) == 2


@pytest.mark.parametrize("short", (True, False))
def test_requests_are_answered_once_whether_or_not_a_task_carries_them_out(short, monkeypatch):
    "One at a time, cut into fragments, of the wrong type, forty in one piece, and after one that has to wait for the task."
    from websockets.frames import Frame, Opcode

    from xland_minigrid.pool import server
    short_ways, carry_out = [], server.carry_out
    monkeypatch.setattr(server, "carry_out", lambda *a: short and short_ways.append(carry_out(*a)) or bool(short and short_ways[-1]))

    def frame(content, opcode=Opcode.TEXT, fin=True):
        return Frame(opcode, content.encode() if isinstance(content, str) else content, fin).serialize(mask=True)

    async def main():
        with LiveServer(env=EMPTY) as live:
            async with raw(live) as ws:
                async def ask(*frames):
                    ws.transport.write(b"".join(frames))
                    return json.loads(await asyncio.wait_for(ws.recv(), HANG))

                step = lambda number, op="step", value="0": f'{{"id": {number}, "op": "{op}", "value": {value}}}'
                assert (await ask(frame(step(1, "reset"))))["n"] == 0
                for number in range(2, 80):
                    reply = await ask(frame(step(number)))
                    assert (reply["id"], reply["n"], reply["ok"]) == (number, number - 1, True)
                assert short_ways.count(True) == 77 * short    # all but one of 32
                text = step(80)
                assert (await ask(frame(text[:5], fin=False), frame(text[5:9], Opcode.CONT, False), frame("", Opcode.PING), frame(text[9:], Opcode.CONT)))["n"] == 79
                assert (await ask(frame(step(81), Opcode.BINARY)))["id"] is None
                assert (await ask(frame(step(81, "state", "null"))))["last"] == 80
                first = await ask(*(frame(step(number)) for number in range(81, 121)))    # as long as one is under way, the others are refused
                replies = [first, *[json.loads(await asyncio.wait_for(ws.recv(), HANG)) for _ in range(39)]]
                assert sorted(reply["id"] for reply in replies) == list(range(81, 121))
                done = [reply for reply in replies if reply["ok"]]
                assert {reply["error"]["code"] for reply in replies if not reply["ok"]} <= {"busy"} and max(reply["n"] for reply in replies) == 79 + len(done)
                first, then = await ask(frame(step(121, "state", "null")), frame(step(122))), json.loads(await asyncio.wait_for(ws.recv(), HANG))
                assert (first["id"], first["last"], then["id"], then["ok"]) == (121, max(reply["id"] for reply in done), 122, True)    # none overtakes an earlier one
                ws.transport.write(frame(b"\xff"))
                with contextlib.suppress(Exception):
                    await ws.recv()
                assert ws.close_code == 1007
    asyncio.run(main())


def test_an_environments_own_timeout_is_not_the_pools():
    "Nor is its own cancellation the end of the session."
    async def times_out(messages):
        raise TimeoutError("the database") if messages[-1]["content"] == "time" else asyncio.CancelledError()

    async def main():
        host = Host({"text": TextBackend(fault_in(times_out), 1)})
        seat = host.open()
        for number, (word, kind) in enumerate((("time", TimeoutError), ("cancel", asyncio.CancelledError))):
            await host.ask(seat, 2 * number + 1, "reset", None)
            error = (await host.ask(seat, 2 * number + 2, "step", word)).error
            assert isinstance(error, EnvFault) and isinstance(error.__cause__, kind) and "longer" not in str(error)
        await host.close()
    asyncio.run(main())


def test_an_environment_that_exits_does_not_end_the_server():
    async def main():
        with LiveServer({"text": TextBackend(fault_in(lambda messages: sys.exit(3)), 2)}) as live:
            async with connect(live, 2) as pool:
                for session in pool.sessions:
                    await session.reset()
                    with pytest.raises(EnvFault, match="SystemExit"):
                        await session.step("x")
    asyncio.run(main())


@pytest.mark.parametrize("info", [{"n": 10**5000, "good": 1}, {"f": float("nan"), "good": 1}, {"o": object(), "good": 1}, {"deep": json.loads("[" * 900 + "]" * 900), "good": 1}])
def test_an_info_that_is_no_json_does_not_keep_the_reply(info):
    async def main():
        host = Host({"text": TextBackend(fault_in(lambda messages: ("on", 0.5, False, info)), 1)})
        seat = host.open()
        await host.ask(seat, 1, "reset", None)
        said = json.loads(write_reply(await host.ask(seat, 2, "step", "x")))
        assert said["reward"] == 0.5 and said["info"]["good"] == 1
        await host.close()
    asyncio.run(main())


# ---------------------------------------------------------------- readiness


def readiness(live) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(live.url.replace("ws", "http", 1) + "/readyz") as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as answer:
        return answer.code, json.loads(answer.read())


def test_readyz_answers_from_the_last_tick_and_does_none():
    def broken(*_):
        raise FloatingPointError("out of nothing")

    async def main():
        with LiveServer(env=EMPTY, slots=2) as live:
            live.server._reaper.get_loop().call_soon_threadsafe(live.server._reaper.cancel)    # it mends what is broken, and this test looks at the time before
            slots = live.host.backends[EMPTY].slots
            before = slots.ticks
            for _ in range(20):
                assert (await asyncio.to_thread(readiness, live))[0] == 200
            assert slots.ticks == before, "readiness stepped the environments"
            async with connect(live) as pool:
                await pool.sessions[0].reset()
                good, slots._step = slots._step, broken
                with pytest.raises(EnvFault):
                    await pool.sessions[0].step(0)
                status, said = await asyncio.to_thread(readiness, live)
                assert status == 503 and not said["ready"] and said["free"] == {EMPTY: 1}
                slots._step = good
                await pool.sessions[0].reset()
                await pool.sessions[0].step(0)
                assert (await asyncio.to_thread(readiness, live))[0] == 200
    asyncio.run(main())


def test_a_server_without_sessions_finds_out_that_it_works_again():
    "Nobody steps in a server that says it is not ready, so it tries by itself."
    async def main():
        with LiveServer(env=EMPTY, slots=2) as live:
            slots = live.host.backends[EMPTY].slots
            good = slots._step
            def once(*arguments):
                slots._step = good
                raise FloatingPointError("out of nothing")
            slots._step = once
            with pytest.raises(EnvFault):
                slots.step([], [])
            assert await soon(lambda: readiness(live)[0] == 200)
    asyncio.run(main())


# ---------------------------------------------------------------- inline rulesets


class Traced(Wrapper):
    "Counts how often its reset is traced."
    resets = 0

    def reset(self, params, key):
        type(self).resets += 1
        return self._env.reset(params, key)


def test_inline_rulesets_of_one_shape_are_traced_once():
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9")
    slots, objects = Slots((Traced(env), params), 2, rules=2, objects=60), [(Tiles.BALL, Colors.RED), (Tiles.KEY, Colors.BLUE), (Tiles.SQUARE, Colors.PINK)]
    def given(number, many=2):
        ruleset = xland_minigrid.make_ruleset(AgentNearGoal(objects[number % 3]), [], (objects[number % 3:] + objects)[:2])
        said = {name: getattr(ruleset, name).tolist() for name in ("goal", "rules", "init_tiles")}
        return {**said, "init_tiles": (said["init_tiles"][:2] * many)[:many]}
    before = Traced.resets
    tasks = [slots.task({"seed": seed, "ruleset": given(seed)}) for seed in range(50)]
    assert Traced.resets <= before + 1
    slots.reset([0, 1], tasks[:2])
    for _ in range(2):
        with pytest.raises(BadRequest, match="50 objects"):
            slots.task({"ruleset": given(0, 50)})
    assert Traced.resets <= before + 2


# ---------------------------------------------------------------- nothing runs at import


def test_no_module_of_the_pool_tests_itself_when_it_is_imported():
    folder = Path(xland_minigrid.__file__).parent / "pool"
    found = [f"{path.name}:{node.lineno}" for path in folder.glob("*.py") for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assert)]
    assert found == []


# ---------------------------------------------------------------- a client and what answers it


HELLOS = {"no object": "[1]", "no names": "{}", "no numbers": '{"session": "a", "resume": "b", "kind": "text", "max_size": "many"}', "no JSON": "{", "nothing": None}


@pytest.mark.parametrize("hello", HELLOS.values(), ids=HELLOS)
def test_a_first_frame_that_makes_no_sense_is_a_failed_connection(hello):
    from websockets.asyncio.server import serve
    async def greet(ws):
        if hello is not None:
            await ws.send(hello)

    async def main():
        async with serve(greet, "127.0.0.1", 0) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(ConnectFailed):
                await EnvPool.connect(url, 1, token=TOKEN).start()
    asyncio.run(main())


def test_a_server_that_hangs_up_on_every_request_is_not_stormed():
    "The link waits longer each time, and gives up after `resume_for`."
    from websockets.asyncio.server import serve
    connections = []
    async def hang_up(ws):
        connections.append(ws)
        await ws.send('{"op": "hello", "version": 1, "session": "a", "resume": "b", "n": 0, "kind": "text", "env": "x"}')
        await ws.recv()
        ws.transport.abort()

    async def main():
        async with serve(hang_up, "127.0.0.1", 0) as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with EnvPool.connect(url, 1, token=TOKEN, resume_for=0.5) as pool:
                with pytest.raises(SessionLost):
                    await pool.sessions[0].reset()
    asyncio.run(main())
    assert len(connections) < 20


# ---------------------------------------------------------------- the state machines


class TwoWays(Env):
    "A text environment whose actions say what it does."
    async def reset(self, config):
        if self.env_config.get("break"):
            raise OSError("no reset")
        return "go", {}, ""

    async def step(self, messages):
        word = messages[-1]["content"]
        if word == "break":
            raise OSError("no step")
        if word == "refuse":
            raise BadRequest("not this")
        while word == "wait" and not TwoWays.gate.is_set():
            await asyncio.sleep(0)
        return "on", 0.0, word == "end", {}


def state_of(seat):
    return "closed" if seat.closed else "running" if seat.running else "over" if seat.episodes else "fresh"


class SessionMachine(RuleBasedStateMachine):
    "The diagram of `pool.sessions`: two sessions of a host, their requests, replies, repetitions and ends, against a model of a few lines."

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.host = Host({"text": TextBackend(TwoWays, 2)}, remembered=2, grace=10, idle=100)
        TwoWays.gate = asyncio.Event()
        self.model, self.number = {}, 0                       # seat -> its state, n, pending number, replies by number

    def run(self, coroutine):
        async def settle():
            result = await coroutine
            for _ in range(12):
                await asyncio.sleep(0)
            return result
        return self.loop.run_until_complete(settle())

    async def submit(self, seat, number, op, value, replies):
        self.host.submit(seat, number, op, value, replies.append)

    @rule()
    def open(self):
        try:
            seat = self.host.open()
        except PoolExhausted:
            assert len(self.model) == 2
        else:
            assert len(self.model) < 2 and state_of(seat) == "fresh"
            self.model[seat] = SimpleNamespace(state="fresh", n=0, pending=None, answered={}, last=0)

    def expected(self, m, op, value):
        "Error type or None, and the state and counter afterwards, of a request that begins now."
        if m.pending:
            return SessionBusy, m.state, m.n
        if op == "reset":
            return (EnvFault, "fresh" if m.state == "fresh" else "over", m.n) if value == {"break": 1} else (None, "running", 0)
        if m.state != "running":
            return ResetRequired, m.state, m.n
        return {"break": (EnvFault, "over", m.n), "refuse": (BadRequest, "running", m.n), "end": (None, "over", m.n + 1)}.get(value, (None, "running", m.n + 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), request=st.sampled_from([("reset", None), ("reset", {"break": 1}), ("step", "on"), ("step", "end"), ("step", "break"), ("step", "refuse"), ("step", "wait")]))
    def ask(self, data, request):
        seat = data.draw(st.sampled_from(list(self.model)))
        m, (op, value), replies = self.model[seat], request, []
        m.last = number = m.last + 1
        error, state, n = self.expected(m, op, value)
        self.run(self.submit(seat, number, op, value, replies))
        if error is None and value == "wait":
            m.pending, m.asked = number, replies
            assert replies == []
            return
        (reply,) = replies
        assert (type(reply.error) if reply.error else None) is error and reply.id == number and reply.n == n
        m.state, m.n = state, n
        if error not in (SessionBusy, ResetRequired):
            m.answered[number] = reply

    @precondition(lambda self: any(m.pending for m in self.model.values()))
    @rule()
    def repeat_a_pending_request(self):
        seat, m = next((seat, m) for seat, m in self.model.items() if m.pending)
        m.asked = replies = []
        self.run(self.submit(seat, m.pending, "step", "wait", replies))
        assert replies == []

    @precondition(lambda self: any(m.answered for m in self.model.values()))
    @rule(data=st.data())
    def repeat_an_answered_request(self, data):
        seat = data.draw(st.sampled_from([seat for seat, m in self.model.items() if m.answered]))
        m, replies = self.model[seat], []
        number = data.draw(st.sampled_from(sorted(m.answered)))
        self.run(self.submit(seat, number, "step", "on", replies))
        if number in sorted(m.answered)[-2:]:
            assert replies == [m.answered[number]]            # the very reply, whatever has happened since
        else:
            assert isinstance(replies[0].error, BadRequest)

    @rule()
    def let_them_answer(self):
        TwoWays.gate.set()
        async def nothing():
            pass
        self.run(nothing())
        TwoWays.gate.clear()
        for m in self.model.values():
            if m.pending:
                (reply,) = m.asked
                m.n += 1
                assert reply.error is None and (reply.id, reply.n) == (m.pending, m.n)
                m.answered[m.pending], m.pending = reply, None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), why=st.sampled_from(["close", "detached", "idle"]))
    def end(self, data, why):
        seat = data.draw(st.sampled_from(list(self.model)))
        m = self.model[seat]
        async def go():
            if why == "close":
                assert self.host.release(seat, why) and not self.host.release(seat, why)
            else:
                seat.attached, seat.active = why != "detached", seat.active - (11 if why == "detached" else 101)
                ended = self.host.reap()
                assert ended == ([seat] if why == "detached" or not m.pending else [])
                seat.active = time.monotonic()
        self.run(go())
        if seat.closed:
            assert not m.pending or isinstance(m.asked[0].error, SessionLost)
            replies = []
            self.run(self.submit(seat, 10**6, "reset", None, replies))
            assert isinstance(replies[0].error, SessionLost)
            del self.model[seat]

    @invariant()
    def agree(self):
        assert {seat for seat in self.host.seats.values()} == set(self.model)
        for seat, m in self.model.items():
            assert (state_of(seat), seat.n, seat.pending and seat.pending[0]) == (m.state, m.n, m.pending), (m, state_of(seat), seat.n)

    def teardown(self):
        TwoWays.gate.set()
        self.loop.run_until_complete(self.host.close())
        assert self.host.stats()["live"] == 0 and self.host.stats()["used"] == {"text": 0}
        self.loop.close()


class SlotMachine(RuleBasedStateMachine):
    "The diagram of `pool.slots`: leases, generations and failing ticks, against plain environments of their own."

    def __init__(self):
        super().__init__()
        self.slots = SLOTS()
        self.held, self.old, self.world, self.epoch = {}, [], {}, self.slots.epoch

    @rule()
    def acquire(self):
        try:
            lease = self.slots.leases.acquire()
        except PoolExhausted:
            assert len(self.held) == 3
        else:
            assert lease not in self.held and lease not in self.old and lease.slot not in {held.slot for held in self.held}
            self.held[lease] = None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(list(self.held)))
        assert self.slots.leases.release(lease) and not self.slots.leases.release(lease)
        del self.held[lease]
        self.old.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def reset(self, data, seed):
        lease = data.draw(st.sampled_from(list(self.held)))
        _, params, reset, _ = compiled(EMPTY)
        self.held[lease] = timestep = reset(params, jax.random.key(seed))
        self.same(self.slots.reset([lease.slot], [self.slots.task(seed)]), timestep)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), actions=st.lists(st.integers(0, 5), min_size=3, max_size=3))
    def step(self, data, actions):
        moving = data.draw(st.lists(st.sampled_from([lease for lease, timestep in self.held.items() if timestep is not None]), unique=True, min_size=1))
        rows = self.slots.step([lease.slot for lease in moving], actions[:len(moving)])
        _, params, _, step = compiled(EMPTY)
        for lease, action in zip(moving, actions):
            self.held[lease] = step(params, self.held[lease], action)
            self.same(rows[lease.slot][None], self.held[lease])

    def same(self, rows, timestep):
        observation, _, flags = self.slots.unpack(rows)
        assert np.array_equal(observation[0], timestep.observation) and bool(flags[0] & DONE) == bool(timestep.last())

    @rule(program=st.sampled_from(["_step", "_begin"]))
    def fail(self, program):
        good = getattr(self.slots, program)
        def broken(*_):
            raise FloatingPointError("out of nothing")
        setattr(self.slots, program, broken)
        try:
            with pytest.raises(EnvFault):
                self.slots.step([], []) if program == "_step" else self.slots.reset([], [])
        finally:
            setattr(self.slots, program, good)
        self.epoch += 1
        self.held = dict.fromkeys(self.held)                  # every world is void; the leases stay

    @invariant()
    def agree(self):
        leases = self.slots.leases
        assert self.slots.epoch == self.epoch and len(leases) == len(self.held) and leases.capacity == 3
        assert all(map(leases.valid, self.held)) and not any(map(leases.valid, self.old))

    def teardown(self):
        for lease in self.held:
            self.slots.leases.release(lease)


SLOTS = functools.cache(lambda: Slots(EMPTY, 3))              # compiled once for all sequences


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", [SessionMachine, SlotMachine])
def test_the_state_machine_of(machine, examples):
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)))
