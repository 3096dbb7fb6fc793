"""The promises of the pool, each proved by breaking what it is about. The numbers P1 to P12 are those of the documentation."""
import asyncio
import base64
import contextlib
import gc
import http.client
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_faults import HANG, HOUR, Clock, FaultProxy, LiveServer, sockets, soon, turns_of_the_loop, until

import xland_minigrid
from worlds import compiled, refusals
from xland_minigrid import cli
from xland_minigrid.envs.wrappers import Wrapper
from xland_minigrid.pool import EnvPool, client, start_server
from xland_minigrid.pool import server as server_module
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.errors import (BadRequest, ConnectFailed, EnvFault, PoolClosed, PoolError, PoolExhausted, ResetRequired, SessionBusy, SessionLost,
                                        Unauthorized, WrongThread)
from xland_minigrid.pool.sessions import Host, SlotBackend, TextBackend
from xland_minigrid.pool.slots import Slots

pytestmark = pytest.mark.newest

ENV, TOKEN = "XLand-MiniGrid-R1-9x9", "a-token-for-tests"
LEFT = 1                                                     # an action that changes what is seen and ends nothing


@pytest.fixture(scope="module")
def server():
    "One server for all tests that leave it as it was."
    with LiveServer(env=ENV, slots=8, text=("frozen_lake",), token=TOKEN) as live:
        yield live


@pytest.fixture(autouse=True)
def nothing_left(request):
    "Whatever a test does, it leaves no session on the common server, and no pool thread."
    before = set(pool_threads())
    yield
    if "server" in request.fixturenames:
        live = request.getfixturevalue("server")
        freed = live.freed()                                 # at once, since the grace of this server is an hour
        found = f"{live.live} sessions and {live.used} places are still held: {live.counts}"
        if not freed:                                        # the next test is not to suffer from this one
            live.io.call(lambda: [live.host.release(seat, "test") for seat in list(live.host.seats.values())])
        assert freed, found
    assert until(lambda: set(pool_threads()) <= before), "a thread is left"


def pool_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name in ("xland-pool-io", "xland-pool-caller")]


def connect(live, size=1, **options) -> EnvPool:
    return EnvPool.connect(getattr(live, "url", live), size, **{"token": TOKEN, "resume_for": HOUR, "connect_timeout": HANG, "ping": HOUR, "timeout": HANG, **options})


class Twin:
    "The same environment without any pool: what a session has to agree with, to the bit."
    def __init__(self, seed: int):
        _, self.params, reset, self._step = compiled(ENV)
        self.timestep, self.n = reset(self.params, jax.random.key(seed)), 0

    @property
    def observation(self):
        return np.asarray(self.timestep.observation)

    def step(self, action: int):
        self.timestep, self.n = self._step(self.params, self.timestep, action), self.n + 1
        return self

    def agrees(self, step) -> None:
        assert step.n == self.n, f"the session is at step {step.n} where {self.n} were done"
        np.testing.assert_array_equal(step.observation, self.observation)
        assert step.done == bool(self.timestep.last())
        if self.n:
            assert step.reward == float(self.timestep.reward)


class Counting(Env):
    "A text environment that counts its lives; its actions are orders to misbehave. What waits, waits until `gate` is opened; `waiting` counts what does."
    alive, closed, effects, waiting, gate = set(), 0, 0, 0, threading.Event()

    def __init__(self, env_config=None):
        super().__init__(env_config)
        self.steps = 0

    async def wait(self, stubborn=False):
        Counting.waiting += 1
        try:
            while not Counting.gate.is_set():
                with contextlib.suppress(*[asyncio.CancelledError] * stubborn):
                    await asyncio.sleep(0.002)
        finally:
            Counting.waiting -= 1

    async def reset(self, config):
        Counting.alive.add(self)
        if self.env_config.get("break"):
            raise OSError("the engine is gone")
        if self.env_config.get("stuck_reset"):
            await self.wait()
        return f"begin {self.env_config.get('seed', 0)}", {}, "be good"

    async def step(self, action):
        order, _, value = action[-1]["content"].partition(" ")
        if order == "raise":
            raise OSError("the engine is gone")
        if order in ("wait", "stubborn"):
            await self.wait(order == "stubborn")
        self.steps += 1
        Counting.effects += 1
        if order == "words":
            return 7, 0.0, False, {}
        return f"step {self.steps}", float(value) if order == "reward" else 0.0, order == "end", {}

    async def close(self):
        if self.env_config.get("slow_close"):
            await asyncio.sleep(0.02)
        if self.env_config.get("stuck_close"):
            await self.wait()
        if self.env_config.get("broken_close"):
            raise OSError("cannot")
        Counting.alive.discard(self)
        Counting.closed += 1


@pytest.fixture
def counting():
    Counting.alive, Counting.closed, Counting.effects, Counting.waiting = set(), 0, 0, 0
    Counting.gate.clear()
    yield Counting
    Counting.gate.set()


# ---------------------------------------------------------------- P1: refused before the upgrade, all or nothing


def test_p1_all_or_nothing(server):
    async def main():
        async with connect(server, 5):
            assert server.used == 5
            with pytest.raises(PoolExhausted) as caught:
                await connect(server, 8).start()             # three places are free
            assert caught.value.retryable and caught.value.detail["retry_after"] > 0
            assert until(lambda: server.used == 5), f"{server.used} places are held, 5 belong to somebody"
            async with connect(server, 3) as three:          # and the three can be had
                assert len(three.sessions) == 3 and server.used == 8
    asyncio.run(main())


def test_p1_wait_for_places(server):
    async def main():
        first, refused = await connect(server, 8).start(), server.counts.get("refused_503", 0)
        async def leave():
            assert await soon(lambda: server.counts.get("refused_503", 0) > refused)
            await first.close()
        leaving = asyncio.ensure_future(leave())
        async with connect(server, 8, wait=HANG) as second:
            assert len(second.sessions) == 8
        await leaving
    asyncio.run(main())


def test_p1_cancelled_while_connecting(server):
    "The collector is off: sockets are to be closed, not to be found."
    async def main(after):
        task = asyncio.ensure_future(connect(server, 8).start())
        await asyncio.sleep(after)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).close()
    gc.disable()
    try:
        for after in (0.0, 0.001, 0.003, 0.006, 0.012, 0.03):
            before = sockets()
            asyncio.run(main(after))
            assert server.freed(), f"{server.live} sessions were leaked by a start that was cancelled after {after} s"
            assert until(lambda: sockets() <= before), f"sockets were leaked by a start that was cancelled after {after} s"
    finally:
        gc.enable()


def test_p1_refusals_take_nothing(server):
    good = {"Authorization": f"Bearer {TOKEN}"}
    cases = [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer \xe9\xff"}, 401), ({"Authorization": "Basic YTpi"}, 401), ({**good, "Origin": "http://evil.example"}, 403),
             ({**good, "Origin": "null"}, 403), ({**good, "X-Pool-Session": "0123456789abcdef", "X-Pool-Resume": "x"}, 410), ("/session?env=nothing", 404), ("/elsewhere", 404)]
    answers = [raw_upgrade(server.port, good, case).status if isinstance(case, str) else raw_upgrade(server.port, case).status for case, _ in cases]
    assert answers == [status for _, status in cases] and server.used == 0
    async def main():
        with pytest.raises(BadRequest, match="Unknown environment"):
            await connect(server, 1, env="nothing").start()
        with pytest.raises(Unauthorized):
            await connect(server, 1, token="wrong").start()
    asyncio.run(main())


class Answer:
    def __init__(self, data: bytes):
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}


def raw_upgrade(port, headers, path="/session"):
    "A handshake by hand. Returns the answer."
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: " + base64.b64encode(bytes(16)).decode(),
             "Sec-WebSocket-Version: 13", *(f"{k}: {v}" for k, v in headers.items())]
    sock = socket.create_connection(("127.0.0.1", port), HANG)
    sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data and (more := sock.recv(65536)):
            data += more
    answer = Answer(data)
    if answer.status != 101:
        with contextlib.suppress(OSError):
            while more := sock.recv(65536):
                answer.body += more
    sock.close()
    return answer


def test_p1_503_before_the_upgrade(server):
    async def main():
        async with connect(server, 8):
            for path in ("/session", "/ws"):
                answer = await asyncio.to_thread(raw_upgrade, server.port, {"Authorization": f"Bearer {TOKEN}"}, path)
                assert answer.status == 503 and float(answer.headers["retry-after"]) > 0 and b"8" in answer.body
                assert server.used == 8
    asyncio.run(main())


def test_p1_vanished_in_mid_handshake(server):
    "A client that is gone before, during or right after the upgrade holds nothing, and not for as long as the grace lasts."
    lines = (f"GET /session HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
             "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n").encode()
    for cut in (1, 20, len(lines) - 1, len(lines), len(lines), len(lines), len(lines), len(lines), len(lines)):
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(lines[:cut])
        sock.close()                                         # RST
    assert until(lambda: server.used == 0), f"{server.used} places are held by clients that are gone"
    async def main():
        async with connect(server, 8, wait=HANG):             # a handshake may still be on its way; the grace is an hour
            pass
    asyncio.run(main())


def test_p1_several_servers():
    "A group stays on one server; a full server or a dead one is passed over; if there is no room, nothing is held."
    async def main():
        with LiveServer() as one, LiveServer() as two:
            dead = f"ws://127.0.0.1:{free_port()}"
            async with EnvPool.connect([dead, one.url, two.url], 10, group_size=5, token=TOKEN) as pool:
                assert {s.endpoint for s in pool.sessions[:5]} != {s.endpoint for s in pool.sessions[5:]} and len({s.endpoint for s in pool.sessions[:5]}) == 1
                with pytest.raises(PoolExhausted):           # six places are free, three here and three there
                    await EnvPool.connect([one.url, two.url], 4, group_size=4, token=TOKEN).start()
            assert one.freed() and two.freed()
            with pytest.raises(PoolExhausted):
                await EnvPool.connect([one.url, two.url], 15, group_size=5, token=TOKEN).start()
            assert one.freed() and two.freed()
    asyncio.run(main())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# ---------------------------------------------------------------- P2: never another environment without saying so


def test_p2_server_restarted_in_mid_episode():
    live = LiveServer()
    async def main():
        async with connect(live, 2) as pool:
            for session in pool.sessions:
                await session.reset(3)
                assert (await session.step(LEFT)).n == 1
            await asyncio.to_thread(live.vanish)
            with LiveServer(port=live.port) as again:
                with pytest.raises(SessionLost):
                    await pool.sessions[0].step(LEFT)
                with pytest.raises(SessionLost):             # it stays lost: no reset brings back an environment by stealth
                    await pool.sessions[0].reset(3)
                with pytest.raises(SessionLost):
                    await pool.sessions[1].step(LEFT)
                assert again.counts.get("steps", 0) == 0, "a step was done in an environment that nobody had reset"
                group = await pool.run_group(two_steps, 5)   # a new group says that it begins anew
                assert group.rewards == [0.0, 0.0] and pool.stats()["replaced"] == 2
    asyncio.run(main())


async def two_steps(episode):
    for _ in range(2):
        await episode.step(LEFT)


def test_p2_grace_over(server):
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1) as pool:
                session = pool.sessions[0]
                await session.reset(1)
                await session.step(LEFT)
                proxy.refuse = True
                proxy.abort_all()
                await asyncio.to_thread(server.forget, 1)
                assert await asyncio.to_thread(server.freed)
                proxy.refuse = False
                with pytest.raises(SessionLost):
                    await session.step(LEFT)
    asyncio.run(main())
    assert server.counts["released_detached"] >= 1


def test_p2_cannot_come_back_in_time(server, monkeypatch):
    "A broken connection is tried again and again as long as `resume_for` says, and then the session is lost."
    ahead = [0.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1000.0 + ahead[0]))
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1, resume_for=30.0) as pool:
                await pool.sessions[0].reset(1)
                proxy.refuse = True
                proxy.abort_all()
                step = asyncio.ensure_future(pool.sessions[0].step(LEFT))
                for ahead[0] in (0.0, 30.0):
                    tried = proxy.connections
                    assert await soon(lambda: proxy.connections > tried + 2 or step.done()) and not step.done()
                ahead[0] = 30.1
                with pytest.raises(SessionLost, match="30 s"):
                    await step
    asyncio.run(main())
    server.forget(1)


@pytest.mark.parametrize("where", ["sockets", "local"])
def test_p2_order_of_things(server, where):
    async def main():
        async with (connect(server, 1) if where == "sockets" else EnvPool.local(ENV, 8)) as pool:
            session = pool.sessions[0]
            with pytest.raises(ResetRequired):
                await session.step(LEFT)
            await session.reset(0)
            for _ in range(243):                             # max_steps of this environment
                step = await session.step(LEFT)
            assert step.done and step.n == 243
            with pytest.raises(ResetRequired):
                await session.step(LEFT)
            with pytest.raises(ResetRequired):
                await session.step(LEFT)
            assert (await session.reset(0)).n == 0 and (await session.step(LEFT)).n == 1
    asyncio.run(main())


def test_p2_stolen_session_id(server):
    async def main():
        async with connect(server, 1) as pool:
            session = pool.sessions[0]
            await session.reset(0)
            for secret in ({}, {"X-Pool-Resume": ""}, {"X-Pool-Resume": session._link.secret[:-1]}, {"X-Pool-Resume": "\xff" * 32}):
                answer = await asyncio.to_thread(raw_upgrade, server.port, {"Authorization": f"Bearer {TOKEN}", "X-Pool-Session": session.id, **secret})
                assert answer.status in (400, 410)
            assert server.used == 1 and (await session.step(LEFT)).n == 1 and session.resumes == 0
    asyncio.run(main())


def test_p2_taken_over_by_the_one_with_the_secret(server):
    "A client that comes back before the server has noticed the cut takes its session over; the half-open connection is closed."
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1) as pool:
                session, twin = pool.sessions[0], Twin(4)
                twin.agrees(await session.reset(4))
                await pool._io.call(abort(session))          # the proxy does not tell the server
                twin.step(LEFT).agrees(await session.step(LEFT))
                assert session.resumes == 1 and server.used == 1
    asyncio.run(main())


async def abort(session):
    session._link.ws.transport.abort()


def test_p2_idle():
    with LiveServer() as live:
        async def main():
            async with connect(live, 2) as pool:
                await pool.sessions[0].reset(0)
                live.later(live.IDLE - HANG)
                assert live.io.call(live.host.reap) == []
                live.later(HANG + 1)
                assert await asyncio.to_thread(live.freed)
                with pytest.raises(SessionLost):
                    await pool.sessions[0].step(LEFT)
                with pytest.raises((SessionLost, ResetRequired)):
                    await pool.sessions[1].step(LEFT)
        asyncio.run(main())


def test_p2_a_long_step_is_not_idleness(counting):
    "The time that an environment needs for a step does not count against its session."
    with LiveServer({"local": TextBackend(Counting, 1, step_timeout=HANG)}) as live:
        async def main():
            async with connect(live, 1) as pool:
                session = pool.sessions[0]
                await session.reset(0)
                step = asyncio.ensure_future(session.step("wait"))
                assert await soon(lambda: counting.waiting)
                live.later(2 * live.IDLE)
                assert live.io.call(live.host.reap) == []
                counting.gate.set()
                assert (await step).n == 1
                live.later(live.IDLE - HANG)                 # it may be silent as long as ever
                assert live.io.call(live.host.reap) == [] and (await session.step("go")).n == 2
        asyncio.run(main())


# ---------------------------------------------------------------- P3: one effect per step, wherever the cut is


async def play_with_cuts(proxy, session, twin, way, offsets, reset=False):
    "A step with a cut after k bytes for every k; each has to have had exactly one effect."
    for k in offsets:
        if twin is None or twin.n >= 240:
            twin = Twin(k)
            twin.agrees(await session.reset(k))
        proxy.cut(**{way: k}, reset=reset)
        action = (k * 7) % 3
        twin.step(action).agrees(await session.step(action))
    return twin


@pytest.mark.parametrize("way", ["up", "down"])
def test_p3_cut_at_every_byte(server, way):
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1) as pool:
                session, twin = pool.sessions[0], Twin(9)
                twin.agrees(await session.reset(9))
                before = proxy.passed[way]
                twin.step(0).agrees(await session.step(0))
                length = proxy.passed[way] - before
                assert length > 30
                twin = await play_with_cuts(proxy, session, twin, way, range(length + 2))
                cut = proxy.cuts
                proxy.cut()
                twin.step(0).agrees(await session.step(0))   # and without any cut it is where it should be
                assert cut >= length and session.resumes >= length
                assert server.counts["steps"] - begun == session.steps
    begun = server.counts.get("steps", 0)
    asyncio.run(main())


@pytest.mark.parametrize("way", ["up", "down"])
def test_p3_cut_with_rst(server, way):
    "A reset may also destroy what had arrived already."
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1) as pool:
                await play_with_cuts(proxy, pool.sessions[0], None, way, range(0, 130, 5), reset=True)
    asyncio.run(main())


def test_p3_counted_by_the_environment(counting):
    "The environment itself counts its steps: as many as were asked for, with the reply to each of them lost once and every request sent twice."
    with LiveServer({"local": TextBackend(Counting, 1, step_timeout=HANG)}) as live:
        async def main():
            with FaultProxy(live.url) as proxy:
                async with connect(proxy.url, 1) as pool:
                    session = pool.sessions[0]
                    await session.reset(0)
                    for n in range(1, 41):
                        proxy.cut_next_reply(reset=n % 2 == 0)
                        step = await session.step("go")
                        assert (step.n, step.observation, counting.effects) == (n, f"step {n}", n)
                    assert session.resumes == 40 and live.counts["replayed"] == 40
                    for n in range(41, 44):                  # cut while the environment is still at it
                        counting.gate.clear()
                        task = asyncio.ensure_future(session.step("wait"))
                        assert await soon(lambda: counting.waiting)
                        proxy.abort_all()
                        assert await soon(lambda: session.resumes == n)
                        counting.gate.set()
                        step = await task
                        assert (step.n, step.observation, counting.effects) == (n, f"step {n}", n)
        asyncio.run(main())


@pytest.mark.parametrize("way", ["up", "down"])
def test_p3_cut_in_the_first_request(server, way):
    "The first request of a session is as safe as any other."
    async def main():
        with FaultProxy(server.url) as proxy:
            for k in (0, 1, 5, 20, 37, 45):
                async with connect(proxy.url, 1) as pool:
                    session, twin = pool.sessions[0], Twin(k)
                    proxy.cut(**{way: k})
                    twin.agrees(await session.reset(k))
                    proxy.cut()
                    twin.step(LEFT).agrees(await session.step(LEFT))
    asyncio.run(main())


def test_p3_cut_again_and_again(server):
    "Also the way back is cut: in the handshake, before the hello, in the hello."
    async def main():
        with FaultProxy(server.url) as proxy:
            async with connect(proxy.url, 1) as pool:
                session, twin = pool.sessions[0], Twin(1)
                twin.agrees(await session.reset(1))
                for k in (1, 40, 120, 129, 131, 180, 250, 400, 520, 560):
                    await pool._io.call(abort(session))
                    proxy.cut(down=k)
                    twin.step(LEFT).agrees(await session.step(LEFT))
                    proxy.cut()
                    await pool._io.call(abort(session))
                    proxy.cut(up=k)
                    twin.step(0).agrees(await session.step(0))
                    proxy.cut()
    asyncio.run(main())


def test_p3_cancelled_steps(server):
    "A cancelled step is done once or not at all, and the session can tell: it goes on from where the environment is."
    async def main():
        async with connect(server, 1) as pool:
            session, rng = pool.sessions[0], random.Random(0)
            await session.reset(6)
            asked = 0
            for _ in range(60):
                task = asyncio.ensure_future(session.step(LEFT))
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                task.cancel()
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                asked += 1
            final = await session.step(LEFT)
            assert 1 <= final.n <= asked + 1
            twin = Twin(6)
            for _ in range(final.n):
                twin.step(LEFT)
            twin.agrees(final)
    asyncio.run(main())


# ---------------------------------------------------------------- P4: a cell that blocks


def blocked(block, ping: float) -> None:
    with LiveServer(ping=ping) as live:
        async def main():
            async with connect(live, 2, ping=2 * ping) as pool:
                assert {(c.ping_interval, c.ping_timeout) for c in live.server._connections} == {(ping, ping)}
                assert {(s._link.ws.ping_interval, s._link.ws.ping_timeout) for s in pool.sessions} == {(2 * ping, 2 * ping)}
                steps = await pool.reset_group(2)
                twin = Twin(2)
                twin.agrees(steps[0])
                block(live)                                  # nobody runs this loop
                twin.step(LEFT)
                for step in await pool.run_group_step([LEFT, LEFT]):
                    twin.agrees(step)
                assert [s.resumes for s in pool.sessions] == [0, 0]
        asyncio.run(main())
        assert live.counts.get("released_detached", 0) == 0 and live.counts["opened"] == 2


def test_p4_blocked_cell():
    "The server pings twice while this thread waits, and is answered."
    blocked(lambda live: live.ping(2), HOUR)


@pytest.mark.slow
def test_p4_blocked_cell_for_22_seconds():
    "The same with the server's own pings."
    blocked(lambda live: time.sleep(22.0), 10.0)


# ---------------------------------------------------------------- P6: a failure of machinery is not a reward


class Poison(Wrapper):
    "An environment whose last action gives a reward that is no number."

    def step(self, params, timestep, action):
        after = self._env.step(params, timestep, action)
        return after.replace(reward=jnp.where(action == 5, jnp.nan, after.reward))


@pytest.fixture(scope="module")
def poison():
    env, params = xland_minigrid.make(ENV)
    return Poison(env), params


async def poisoned(episode):
    for _ in range(3):
        await episode.step(5 if episode.index == 1 else LEFT)


def check_masked(group, bad: int) -> None:
    assert group.rewards[bad] is None and all(isinstance(r, float) and math.isfinite(r) for i, r in enumerate(group.rewards) if i != bad), group.rewards
    advantages = group.advantages()
    assert np.isfinite(advantages).all() and advantages[bad] == 0 and group[bad].error and not group.valid[bad]
    assert all(r is None or math.isfinite(r) for rollout in group for r in rollout.step_rewards)


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p6_reward_that_is_no_number(poison, where):
    async def main():
        with contextlib.ExitStack() as stack:
            if where == "local":
                pool = EnvPool.local(poison, 8)
            else:
                pool = connect(stack.enter_context(LiveServer({"local": SlotBackend(Slots(poison, 8))})), 8)
            async with pool:
                check_masked(await pool.run_group(poisoned, 0, size=3), bad=1)
                session = pool.sessions[0]
                await session.reset(0)
                with pytest.raises(EnvFault):                # the session itself says so, and does not hand out the number
                    await session.step(5)
                with pytest.raises(ResetRequired):           # the episode is void
                    await session.step(LEFT)
                await session.reset(0)
                assert math.isfinite((await session.step(LEFT)).reward)
    asyncio.run(main())


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p6_batch_with_a_reward_that_is_no_number(poison, where):
    async def main():
        with contextlib.ExitStack() as stack:
            pool = EnvPool.local(poison, 8) if where == "local" else connect(stack.enter_context(LiveServer({"local": SlotBackend(Slots(poison, 8))})), 8)
            async with pool:
                pool.async_reset()
                await pool.recv()
                pool.send([LEFT, 5, LEFT], [0, 1, 2])
                batch = await pool.recv()
                assert np.isfinite(batch.reward).all(), "send and recv hand out a reward that is no number"
                assert sorted(batch.env_id.tolist()) == [0, 2] and isinstance(batch.errors[1], EnvFault) and not (batch.done | batch.terminated).any()
    asyncio.run(main())


@pytest.mark.parametrize("order", ["raise", "words", "reward nan", "reward inf", "reward much"])
@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p6_text_environment_breaks(counting, order, where):
    async def rollout(episode):
        await episode.step("reward 1")
        await episode.step(order if episode.index == 2 else "end")

    async def main():
        with contextlib.ExitStack() as stack:
            pool = EnvPool.local(Counting, 3) if where == "local" else connect(stack.enter_context(LiveServer({"local": TextBackend(Counting, 3)})), 3)
            async with pool:
                group = await pool.run_group(rollout, 0)
                check_masked(group, bad=2)
                assert [group.rewards[0], group.rewards[1]] == [1.0, 1.0]
                assert (await pool.run_group(rollout, 0, size=2)).rewards == [1.0, 1.0]
        assert until(lambda: not counting.alive)
    asyncio.run(main())


def test_p6_reset_breaks(counting):
    async def rollout(episode):
        await episode.step("reward 1")

    async def main():
        async with EnvPool.local(Counting, 2) as pool:
            group = await pool.run_group(rollout, {"break": True})
            assert group.rewards == [None, None] and not group.advantages().any()
            assert (await pool.run_group(rollout, 0)).rewards == [1.0, 1.0]
    asyncio.run(main())


def broken(slots, when):
    "Let the compiled step of slots fail after it has taken its memory, when `when()` says so."
    step, begin = slots._step, slots._begin
    def wrapped(program, name):
        def run(*arguments):
            out = program(*arguments)
            if when(name):
                raise RuntimeError("the device is gone")
            return out
        return run
    slots._step, slots._begin = wrapped(step, "step"), wrapped(begin, "begin")


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p6_tick_fails(where):
    "All memory of the slots is gone: every episode is void and says so, and the next group is as if nothing had been."
    slots, orders = Slots(ENV, 8), []
    broken(slots, lambda name: bool(orders) and orders[0] == name and orders.pop(0))

    async def rollout(episode):
        for i in range(4):
            if i == 2 and episode.index == 0:
                orders.append("step")
            await episode.step(LEFT)

    async def main():
        with contextlib.ExitStack() as stack:
            backend = SlotBackend(slots)
            if where == "sockets":
                pool = connect(stack.enter_context(LiveServer({"local": backend})), 8)
            else:
                pool = EnvPool.local(ENV, 8)
                pool._host.backends["local"] = backend
                assert pool._slots is slots
            async with pool:
                group = await pool.run_group(rollout, 0)
                assert group.rewards == [None] * 8 and "EnvFault" in str(group.errors) and not group.advantages().any(), group.rewards
                async def fine(episode):
                    twin = Twin(8)
                    for _ in range(5):
                        twin.step(LEFT).agrees(await episode.step(LEFT))
                assert (await pool.run_group(fine, 8)).rewards == [0.0] * 8
                orders.append("begin")
                with pytest.raises(EnvFault):
                    await pool.reset_group(0)
                await pool.reset_group(0)
                if where == "local":
                    orders.append("step")
                    pool.async_reset()
                    await pool.recv()
                    pool.send([LEFT] * 8)
                    batch = await pool.recv()
                    assert len(batch.env_id) == 0 and sorted(batch.errors) == list(range(8)) and all(isinstance(e, EnvFault) for e in batch.errors.values())
    asyncio.run(main())


@pytest.mark.parametrize("batch", [True, False])
def test_p6_no_step_in_a_world_made_anew(batch):
    "A reset fails in the same turn in which others step: their worlds are gone too, and what comes back must not be a reward."
    async def main():
        slots, orders = Slots(ENV, 8), []
        broken(slots, lambda name: bool(orders) and orders[0] == name and orders.pop(0))
        host = Host({"local": SlotBackend(slots, batch=batch)})
        seats = [host.open() for _ in range(3)]
        for number, seat in enumerate(seats):
            assert (await host.ask(seat, 1, "reset", number)).error is None
        orders.append("begin")
        replies = await asyncio.gather(host.ask(seats[0], 2, "reset", 5), host.ask(seats[1], 2, "step", LEFT), host.ask(seats[2], 2, "step", LEFT))
        assert isinstance(replies[0].error, EnvFault)
        for reply in replies[1:]:
            assert isinstance(reply.error, EnvFault), f"a step in a world that was made anew was answered with {reply.outcome and reply.outcome[1:]}"
        await host.close()
    asyncio.run(main())


def test_p6_server_dies():
    live = LiveServer()
    dead = []
    async def rollout(episode):
        await episode.step(LEFT)
        if episode.index == 0:
            try:
                await asyncio.to_thread(live.vanish)
            finally:
                dead.append(True)
        while not dead:
            await asyncio.sleep(0.01)
        await episode.step(LEFT)

    async def main():
        async with connect(live, 3, resume_for=0.05) as pool:
            group = await pool.run_group(rollout, 0)
            assert group.rewards == [None] * 3 and not group.advantages().any() and not group.valid.any()
            assert all("SessionLost" in error for error in group.errors.values())
            assert await pool.record_group_result(0, group) is None
    asyncio.run(main())


# ---------------------------------------------------------------- P5: every way out frees the places


def turns(most):
    async def rollout(episode):
        while not episode.done and episode.num_turns < most:
            await episode.step(LEFT)
    return rollout


async def wrong(episode):
    await episode.step(LEFT)
    raise KeyError("a slip of the user's")


@pytest.mark.parametrize("way", ["done", "max_turns", "exception in the rollout", "exception in the body", "cancelled", "cancelled twice", "nobody closed it", "collected on its own thread"])
def test_p5_ways_out(server, way):
    async def main():
        pool = await connect(server, 8).start()
        assert server.used == 8
        if way == "nobody closed it":
            await pool.run_group(turns(2), 0)
            del pool
            return
        if way == "collected on its own thread":
            io, cell, alive = pool._io, [pool], weakref.ref(pool)
            cell.append(cell)                                # a cycle, as a traceback makes one
            del pool, cell
            async def collect():
                for _ in range(100):                         # a collection does nothing while another thread is in one
                    gc.collect()
                    if alive() is None:
                        return
                    await asyncio.sleep(0)
            await io.call(collect())
            await asyncio.sleep(0)
            return
        with contextlib.suppress(KeyError, asyncio.CancelledError):
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(pool.close)
                if way == "done":
                    await pool.run_group(turns(500), 0)
                elif way == "max_turns":
                    await pool.run_group(turns(3), 0)
                elif way == "exception in the rollout":
                    await pool.run_group(wrong, 0)
                elif way == "exception in the body":
                    await pool.reset_group(0)
                    raise KeyError
                else:
                    done = server.counts.get("steps", 0)
                    task = asyncio.ensure_future(pool.run_group(turns(10**6), 0))
                    assert await soon(lambda: server.counts.get("steps", 0) > done + 8)
                    task.cancel()
                    if way == "cancelled twice":
                        await asyncio.sleep(0)
                        task.cancel()
                    await task
    asyncio.run(main())
    assert server.freed(), f"{server.used} places are held after: {way}"


def test_p5_group_gives_its_sessions_back():
    "Whatever became of a group, the next one has the whole pool."
    async def main():
        async with EnvPool.local(ENV, 8) as pool:
            for attempt in range(12):
                task = asyncio.ensure_future(pool.run_group(turns(10**6), attempt))
                await asyncio.sleep(0.003 * attempt)
                task.cancel()
                for _ in range(attempt % 3):
                    await asyncio.sleep(0)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await pool.run_group(two_steps, attempt)).rewards == [0.0] * 8
            with pytest.raises(KeyError):
                await pool.run_group(wrong, 0)
            assert not pool.roster.taken and (await pool.run_group(two_steps, 1)).rewards == [0.0] * 8
    asyncio.run(main())


def test_p5_text_environments_are_closed(counting):
    "Closed once each: after the episode's end, after a limit of turns, after an exception, and when nobody closes the pool."
    async def main():
        async with EnvPool.local(Counting, 3) as pool:
            async def rollout(episode):
                await episode.step(["end", "go", "raise"][episode.index])
            for _ in range(3):
                await pool.run_group(rollout, 0)
        assert not counting.alive and counting.closed == 9
        pool = await EnvPool.local(Counting, 2).start()
        await pool.reset_group({"slow_close": True})
        assert len(counting.alive) == 2
        del pool
    asyncio.run(main())
    gc.collect()
    assert until(lambda: not counting.alive), "environments of a pool that nobody closed were not closed"


CLIENT = """
import asyncio, os, sys, time
from xland_minigrid.pool import EnvPool
async def main():
    pool = await EnvPool.connect(sys.argv[1], 2, token=os.environ["TOKEN"], ping=3600.0).start()
    await pool.reset_group(0)
    print("ready", flush=True)
    if sys.argv[2] == "hold":
        await asyncio.sleep(600)
    raise SystemExit(3)
asyncio.run(main())
"""


def clients(live, *what):
    "Programs that hold two sessions each."
    programs = [subprocess.Popen([sys.executable, "-c", CLIENT, live.url, one], env={**os.environ, "TOKEN": TOKEN}, stdout=subprocess.PIPE) for one in what]
    for program in programs:
        assert program.stdout.readline() == b"ready\n"
    return programs


@pytest.mark.slow
def test_p5_client_stopped_or_killed():
    "SIGSTOP: found out by two pings, then the grace. SIGKILL: the grace. sys.exit: at once."
    with LiveServer(ping=3.0) as live:
        ending, stopped, killed = programs = clients(live, "exit", "hold", "hold")
        try:
            assert ending.wait(HANG) == 3 and until(lambda: live.used == 4), live.used
            killed.kill()
            live.forget(2)
            assert until(lambda: live.used == 2)
            stopped.send_signal(signal.SIGSTOP)
            live.forget(2)
            assert live.freed()
        finally:
            for program in programs:
                program.kill()
                program.wait()
                program.stdout.close()


KERNEL = f"""
import asyncio, time, nest_asyncio
nest_asyncio.apply()
from xland_minigrid.pool import EnvPool
LEFT = {LEFT}
async def forever(episode):
    while True:
        if episode.done:
            await episode.session.reset(0)
        await asyncio.sleep(0.001)
        await episode.step(LEFT)
"""


class Kernel:
    "A real notebook kernel."

    def __init__(self):
        from jupyter_client.manager import KernelManager
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(env={**os.environ, "JUPYTER_PLATFORM_DIRS": "1"}, stderr=subprocess.DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=HANG)

    def send(self, code: str) -> str:
        return self.client.execute(textwrap.dedent(code), stop_on_error=False)

    def wait(self, message: str):
        while True:
            reply = self.client.get_shell_msg(timeout=HANG)
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"]

    def run(self, code: str):
        "Run a cell; it has to go well."
        self.went_well(self.send(code))

    def went_well(self, message: str):
        said = self.wait(message)
        assert said["status"] == "ok", "\n".join(said.get("traceback", []))[-3000:]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    pytest.importorskip("ipykernel")
    kernel = Kernel()
    kernel.run(KERNEL)
    yield kernel
    kernel.close()


def test_p4_blocked_cell_in_a_kernel(kernel):
    "Under nest_asyncio too: a cell that blocks while the server pings twice, awaited and plain calls mixed."
    with LiveServer() as live, socket.create_server(("127.0.0.1", 0)) as gate:
        gate.settimeout(HANG)
        cell = kernel.send(f"""
            import socket
            pool = await EnvPool.connect({live.url!r}, 4, token={TOKEN!r}, ping={HOUR}).start()
            await pool.reset_group(0)
            with socket.create_connection({gate.getsockname()}) as gate:
                gate.recv(1)                                 # blocks until the test says a word
            assert [s.n for s in await pool.run_group_step([LEFT] * 4)] == [1] * 4
            assert [s.n for s in pool.sync.run_group_step([LEFT] * 4)] == [2] * 4
            assert asyncio.get_event_loop().run_until_complete(pool.sessions[0].step(LEFT)).n == 3
            assert [s.resumes for s in pool.sessions] == [0] * 4
            async def two(episode):
                await episode.step(LEFT)
                time.sleep(0.01)
                await episode.step(LEFT)
            assert (await pool.run_group(two, 1)).rewards == [0.0] * 4
            assert pool.sync.run_group(two, 1).rewards == [0.0] * 4
            await pool.close()
        """)
        with gate.accept()[0] as blocked_cell:
            live.ping(2)
            blocked_cell.sendall(b"x")
        kernel.went_well(cell)
        assert live.counts["opened"] == 4 and live.counts.get("resumed", 0) == 0 and live.freed()


@pytest.mark.parametrize("cell", ["await pool.run_group(forever, 0)", "pool.sync.run_group(forever, 0)"])
def test_p5_kernel_interrupted(kernel, cell):
    "The cell ends, its group gives its sessions back, and leaving the pool frees the places."
    with LiveServer() as live:
        kernel.run(f"pool = await EnvPool.connect({live.url!r}, 4, token={TOKEN!r}).start()\nawait pool.reset_group(0)")
        message = kernel.send(cell)
        assert until(lambda: live.counts.get("steps", 0) > 20)
        kernel.manager.interrupt_kernel()
        assert kernel.wait(message)["status"] == "error"
        kernel.run("""
            assert not pool.roster.taken, pool.roster.taken
            async def two(episode):
                await episode.step(LEFT); await episode.step(LEFT)
            group = await pool.run_group(two, 1)
            assert group.rewards == [0.0] * 4, group.errors
            await pool.close()
        """)
        assert live.freed()


def test_p5_kernel_interrupted_in_async_with(kernel):
    with LiveServer() as live:
        message = kernel.send(f"""
            async with EnvPool.connect({live.url!r}, 4, token={TOKEN!r}) as pool:
                await pool.run_group(forever, 0)
        """)
        assert until(lambda: live.counts.get("steps", 0) > 20)
        kernel.manager.interrupt_kernel()
        assert kernel.wait(message)["status"] == "error"
        assert live.freed(), f"{live.used} places are held after an interrupt"


def test_p5_kernel_restarted(kernel):
    "Last of the kernel's tests: afterwards it has forgotten everything."
    with LiveServer() as live:
        kernel.run(f"pool = await EnvPool.connect({live.url!r}, 4, token={TOKEN!r}).start()\nawait pool.reset_group(0)")
        assert live.used == 4
        kernel.manager.shutdown_kernel(now=True)             # as a restart does
        live.forget(4)
        assert live.freed()


# ---------------------------------------------------------------- P7: closing is bounded and leaves nothing


def held() -> tuple:
    return sockets(), set(threading.enumerate())


def children() -> set[int]:
    found = set()
    for name in os.listdir(f"/proc/{os.getpid()}/task"):
        with contextlib.suppress(OSError):
            found |= set(map(int, Path(f"/proc/{os.getpid()}/task/{name}/children").read_text().split()))
    return found


@pytest.mark.parametrize("kind", ["local", "text", "sockets"])
def test_p7_nothing_is_left(server, kind, counting):
    async def main():
        before, mine = held(), asyncio.all_tasks()
        pool = {"local": lambda: EnvPool.local(ENV, 8), "text": lambda: EnvPool.local(Counting, 8), "sockets": lambda: connect(server, 8)}[kind]()
        async with pool:
            await pool.run_group(text_turn if kind == "text" else turns(2), 0)
            loop, thread = pool._io.loop, pool._io.thread
        assert asyncio.all_tasks() == mine
        assert not thread.is_alive() and loop.is_closed() and not asyncio.all_tasks(loop)
        assert await asyncio.to_thread(until, lambda: sockets() <= before[0]), "a socket is left"
        assert not {t for t in threading.enumerate() if t.name.startswith("xland")} - before[1]
        assert not pool.roster.taken and all(s.closed for s in pool.sessions)
        await pool.close()                                   # harmless when repeated
        pool.sync.close()
    asyncio.run(main())


async def text_turn(episode):
    await episode.step("go")


def test_p7_close_with_environments_that_do_not_close(counting):
    async def main():
        for config in ({"stuck_close": True}, {"broken_close": True}):
            threads = set(pool_threads())
            pool = await EnvPool.local(Counting, 2, close_timeout=0.1).start()
            await pool.reset_group(config)
            await asyncio.wait_for(pool.close(), HANG)       # the environments would take for ever
            assert not set(pool_threads()) - threads
    asyncio.run(main())


def test_p7_close_with_a_stubborn_environment(counting):
    "A step that swallows its cancellation cannot hold the pool or the server for longer than they allow."
    with LiveServer({"local": TextBackend(Counting, 2, close_timeout=0.05)}) as live:
        async def main():
            pool = await connect(live, 1).start()
            await pool.sessions[0].reset(0)
            step = asyncio.ensure_future(pool.sessions[0].step("stubborn"))
            assert await soon(lambda: counting.waiting)
            await asyncio.wait_for(pool.close(), HANG)
            with pytest.raises(PoolError):
                await asyncio.wait_for(step, HANG)
        asyncio.run(main())
        assert live.freed()
        live.io.run(live.server.stop(0))
        assert counting.waiting == 1, "the step was to go on for longer than the server"
        counting.gate.set()
        live.stop()


def test_p7_close_with_a_dead_server():
    live = LiveServer()
    async def main():
        with FaultProxy(live.url) as proxy:
            pool = await connect(proxy.url, 8).start()
            await pool.reset_group(0)
            await asyncio.to_thread(live.vanish)
            steps = [asyncio.ensure_future(s.step(LEFT)) for s in pool.sessions]
            assert await soon(lambda: proxy.connections > 16)        # each tries to come back
            await asyncio.wait_for(pool.close(), HANG)
            for result in await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), HANG):
                assert isinstance(result, PoolError), repr(result)
    asyncio.run(main())


def test_p7_close_into_a_black_hole(server, monkeypatch):
    "A goodbye that nobody hears takes each session two seconds at most."
    async def main():
        threads = set(pool_threads())
        with FaultProxy(server.url) as proxy:
            pool = await connect(proxy.url, 8, close_timeout=HANG).start()
            await pool.reset_group(0)
            proxy.blackhole = True
            clock, closing = Clock(monkeypatch), asyncio.ensure_future(pool.close())
            assert await soon(lambda: all(session._link.closed for session in pool.sessions))
            clock.jump(2.1, pool._io.loop)
            await asyncio.wait_for(closing, HANG)
            assert not set(pool_threads()) - threads
    asyncio.run(main())
    server.forget(8)


@pytest.mark.parametrize("where", ["local", "text", "sockets"])
def test_p7_close_during_a_step(server, counting, where):
    async def main():
        for turn in (0, 1, 4):
            pool = {"local": lambda: EnvPool.local(ENV, 8), "text": lambda: EnvPool.local(Counting, 8), "sockets": lambda: connect(server, 8)}[where]()
            await pool.start()
            await pool.reset_group(0)
            steps = [asyncio.ensure_future(s.step("wait" if where == "text" else LEFT)) for s in pool.sessions]
            for _ in range(turn):
                await asyncio.sleep(0)
            await asyncio.wait_for(pool.close(), HANG)
            for result in await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), HANG):
                assert isinstance(result, PoolError) or getattr(result, "n", None) == 1, f"a step that was under way ended with {result!r}"
    asyncio.run(main())


def test_p7_cancelled_close(server):
    "A close that is interrupted closes nevertheless."
    async def main(after, cancels):
        before, threads = sockets(), set(pool_threads())
        pool = await connect(server, 8).start()
        await pool.reset_group(0)
        task = asyncio.ensure_future(pool.close())
        await turns_of_the_loop(after)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), HANG)
        assert await asyncio.to_thread(until, lambda: set(pool_threads()) <= threads)
        assert await asyncio.to_thread(until, lambda: sockets() <= before), "sockets are left by a close that was cancelled"
    gc.disable()
    try:
        for after, cancels in itertools.product((1, 2, 5, 20), (1, 2)):
            asyncio.run(main(after, cancels))
            assert server.freed(), f"places are held after a close that was cancelled {cancels} times after {after} turns"
    finally:
        gc.enable()


def test_p7_close_from_many_threads(server):
    "Plain calls that are under way on threads end, with a typed error, when the pool is closed."
    for turn in range(3):
        pool = connect(server, 8)
        ended = []
        with pool.sync as sync:
            sync.reset_group(0)
            def work(session):
                try:
                    while True:
                        if sync.step(session, LEFT).done:
                            sync.reset(session, 0)
                except BaseException as error:
                    ended.append(error)
            workers = [threading.Thread(target=work, args=(s,), daemon=True) for s in pool.sessions]
            for worker in workers:
                worker.start()
            assert until(lambda: sum(s.steps for s in pool.sessions) > 16 + turn)
        for worker in workers:
            worker.join(HANG)
        assert not any(worker.is_alive() for worker in workers), "a plain call waits for ever on a closed pool"
        assert len(ended) == 8 and all(isinstance(error, PoolError) for error in ended), ended


def test_p7_server_leaves_nothing():
    before = held()
    live = LiveServer(text=("frozen_lake",))
    half_open = socket.create_connection(("127.0.0.1", live.port))
    async def main():
        async with connect(live, 4) as pool, connect(live, 4, env="frozen_lake") as texts:
            await pool.run_group(turns(2), 0)
            await texts.reset_group(0)
            await asyncio.to_thread(live.io.run, live.server.stop(0))
            await asyncio.to_thread(live.io.run, live.server.stop(0))
            for session in (*pool.sessions, *texts.sessions):
                with pytest.raises(SessionLost):
                    await session.reset(0)
        assert await asyncio.to_thread(live.io.call, lambda: len(asyncio.all_tasks())) == 1
        assert live.used == live.live == 0
    asyncio.run(main())
    half_open.close()
    live.stopped = True
    live.io.end()
    assert until(lambda: sockets() <= before[0])


# ---------------------------------------------------------------- P8: the same seed and actions, the same to the bit


def plain(seed, actions):
    twin = Twin(seed)
    seen = [(twin.observation.tobytes(), None, False)]
    for action in actions:
        twin.step(action)
        seen.append((twin.observation.tobytes(), float(twin.timestep.reward), bool(twin.timestep.last())))
        if twin.timestep.last():
            break
    return seen


def of(step):
    return (np.asarray(step.observation).tobytes(), step.reward, step.done)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_p8_any_interleaving(both_pools, data):
    "Episodes of several sessions, stepped in any order and any company, over sockets and in process, with cuts in between."
    local, remote, proxy = both_pools
    seeds = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4))
    moves = data.draw(st.lists(st.lists(st.tuples(st.integers(0, len(seeds) - 1), st.integers(0, 5)), min_size=1, max_size=4, unique_by=lambda pair: pair[0]), min_size=1, max_size=12))
    cuts = data.draw(st.sets(st.integers(0, len(moves)), max_size=3))
    asked = {i: [a for company in moves for who, a in company if who == i] for i in range(len(seeds))}
    expected = {i: plain(seed, asked[i]) for i, seed in enumerate(seeds)}
    for pool in (local, remote):
        async def play():
            seen, over = {}, set()
            for i, seed in enumerate(seeds):
                seen[i] = [of(await pool.sessions[i].reset(seed))]
            for at, company in enumerate(moves):
                if at in cuts and pool is remote:
                    proxy.abort_all()
                live = [(who, action) for who, action in company if who not in over]
                for (who, _), step in zip(live, await asyncio.gather(*(pool.sessions[who].step(action) for who, action in live))):
                    seen[who].append(of(step))
                    if step.done:
                        over.add(who)
            return seen
        assert asyncio.run(play()) == expected


@pytest.fixture(scope="module")
def both_pools():
    with LiveServer() as live, FaultProxy(live.url) as proxy, EnvPool.local(ENV, 8).sync as local, connect(proxy.url, 8).sync as remote:
        yield local.pool, remote.pool, proxy


def test_p8_every_way_to_step(server):
    "Plain environment, sessions, groups, send and recv, in process and over sockets: 40 steps of 8 seeds."
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 6, (40, 8))
    expected = [plain(seed, actions[:, seed]) for seed in range(8)]
    assert all(len(one) == 41 for one in expected)

    async def main():
        for pool in (EnvPool.local(ENV, 8), connect(server, 8)):
            async with pool:
                async def alone(i):
                    return [of(await pool.sessions[i].reset(i))] + [of(await pool.sessions[i].step(a)) for a in actions[:, i].tolist()]
                assert await asyncio.gather(*map(alone, range(8))) == expected
                assert [await alone(i) for i in (3, 5)] == [expected[3], expected[5]]
                pool.async_reset(list(range(8)))
                first, seen = await pool.recv(), [[] for _ in range(8)]
                for row, i in enumerate(first.env_id):
                    seen[i].append((first.observation[row].tobytes(), None, False))
                for company in actions:
                    for part in (np.array([6, 1, 3]), np.array([0, 2, 4, 5, 7])):
                        pool.send(company[part], part)
                        batch = await pool.recv()
                        assert not batch.errors
                        for row, i in enumerate(batch.env_id.tolist()):
                            seen[i].append((batch.observation[row].tobytes(), float(batch.reward[row]), bool(batch.done[row])))
                assert seen == expected
                for seed in (2, 7):
                    assert [of(s) for s in await pool.reset_group(seed)] == [expected[seed][0]] * 8
                    for n, action in enumerate(actions[:5, seed].tolist(), 1):
                        assert [of(s) for s in await pool.run_group_step([action] * 8)] == [expected[seed][n]] * 8
    asyncio.run(main())


def test_p8_text(server):
    "The same for text, with its conversation."
    async def rollout(episode):
        for move in ("right", "down", "left", "down", "right", "up"):
            if episode.done:
                break
            await episode.step(f"<action>{move}</action>")
    async def main():
        found = []
        for pool in (EnvPool.local("frozen_lake", 2), connect(server, 2, env="frozen_lake")):
            async with pool:
                for _ in range(2):
                    group = await pool.run_group(rollout, {"seed": 11})
                    found += [(r.messages, r.step_rewards, r.done) for r in group]
        assert all(one == found[0] for one in found) and len(found) == 8
    asyncio.run(main())


# ---------------------------------------------------------------- P9: misuse has a typed error


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p9_misuse_of_a_session(server, where):
    async def main():
        pool = EnvPool.local(ENV, 8) if where == "local" else connect(server, 8)
        with pytest.raises(PoolClosed):
            await pool.run_group(two_steps, 0)               # not open yet
        await pool.start()
        with pytest.raises(PoolClosed):
            await pool.start()
        with pytest.raises(PoolClosed):
            pool.sync.start()
        session = pool.sessions[0]
        await pool.reset_group(0)
        results = await asyncio.gather(session.step(LEFT), session.step(LEFT), session.reset(0), return_exceptions=True)
        assert results[0].n == 1 and [type(r) for r in results[1:]] == [SessionBusy, SessionBusy]
        task = asyncio.ensure_future(session.step(LEFT))
        await asyncio.sleep(0)
        for misuse in (lambda: pool.run_group_step([LEFT] * 8), lambda: pool.reset_group(0)):
            with pytest.raises(SessionBusy):
                await misuse()
        assert (await task).n == 2
        for action in (6, -1, 1.0, "1", None, True, [1], {}, float("nan"), 10**400, object(), np.float32(1)):
            with pytest.raises(BadRequest):
                await session.step(action)
        assert (await session.step(np.int64(1))).n == 3      # and none of these has done anything
        for task in (-1, 2**32, 1.5, "x", [1], {"sede": 1}, {"seed": None}, {"ruleset_id": 3}, {"ruleset": 3}, {"ruleset": {"goal": [1, 2]}}, {"ruleset": {"goal": "a", "rules": [[]], "init_tiles": [[1]]}},
                     {"ruleset": {"goal": [500] * 5, "rules": [[0] * 7], "init_tiles": [[0, 0]]}}, {"ruleset": {"goal": [0] * 5, "rules": [[[0]]], "init_tiles": 7}}, object()):
            with pytest.raises(BadRequest):
                await session.reset(task)
        assert (await session.step(1)).n == 4, "a refused reset has ended the episode"
        await pool.close()
        for late in (lambda: session.step(LEFT), lambda: session.reset(0), lambda: pool.reset_group(0), lambda: pool.run_group_step([LEFT] * 8), lambda: pool.run_group(two_steps, 0),
                     lambda: pool.run_groups(two_steps, [0]), lambda: pool.recv(), lambda: pool.start()):
            with pytest.raises(PoolClosed):
                await late()
        for late in (lambda: pool.send([LEFT] * 8), lambda: pool.async_reset(), lambda: pool.sync.reset_group(0), lambda: pool.sync.step(session, LEFT), lambda: pool.sync.recv()):
            with pytest.raises(PoolClosed):
                late()
        await session.close()
    asyncio.run(main())


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_p9_misuse_of_send_and_recv(server, where):
    async def main():
        async with (EnvPool.local(ENV, 8) if where == "local" else connect(server, 8)) as pool:
            with pytest.raises(ResetRequired):
                await pool.recv()
            pool.async_reset()
            with pytest.raises(SessionBusy):
                pool.send([LEFT] * 8)
            await pool.recv()
            for actions, ids in (([LEFT], None), ([LEFT, LEFT], [0, 0]), ([LEFT], [8]), ([LEFT], [-1]), ([LEFT], [0.5])):
                with pytest.raises(BadRequest):
                    pool.send(actions, ids)
            with pytest.raises(BadRequest):
                pool.async_reset([0, 1])
            task = asyncio.ensure_future(pool.sessions[3].step(LEFT))
            await asyncio.sleep(0)
            with pytest.raises(SessionBusy):                 # one thing at a time, whichever door it comes through
                pool.send([LEFT] * 8)
            assert (await task).n == 1
            if pool._batcher.sent:                                   # what of it was sent must not have been done by half
                batch = await pool.recv()
                assert batch is None, f"a send that was refused was done in {len(batch.env_id)} environments"
            pool.send([LEFT] * 8)
            with pytest.raises(BadRequest):
                await pool.recv(9)
            with pytest.raises(SessionBusy):
                await pool.sessions[2].step(LEFT)
            assert sorted((await pool.recv()).n.tolist()) == [1] * 7 + [2]
            group = asyncio.ensure_future(pool.run_group(turns(50), 0))
            await asyncio.sleep(0.005)
            with pytest.raises(PoolError):                   # these belong to the group
                pool.send([LEFT] * 8)
            with contextlib.suppress(PoolError):
                if pool._batcher.sent:
                    await pool.recv()
            assert (await group).rewards == [0.0] * 8
    asyncio.run(main())


class Meddler(Env):
    "An environment that calls the pool it lives in."
    pool = None

    async def reset(self, config):
        return "", {}, ""

    async def step(self, action):
        name = action[-1]["content"]
        calls = {"nothing": lambda p: None, "reset_group": lambda p: p.reset_group(0), "run_group_step": lambda p: p.run_group_step(["a"]), "run_group": lambda p: p.run_group(text_turn, 0), "recv": lambda p: p.recv(),
                 "step": lambda p: p.step(p.sessions[1], "a"), "close": lambda p: p.close()}
        if name == "recv":
            Meddler.pool.send(["nothing"], [1])
        try:
            calls[name](Meddler.pool.sync)
        except WrongThread:
            return "wrong thread", 1.0, True, {}
        return "it did", 0.0, True, {}


def test_p9_plain_call_on_the_pools_thread():
    async def main():
        for call in ("reset_group", "run_group_step", "run_group", "recv", "step", "close"):
            async with EnvPool.local(Meddler, 2, timeout=HANG) as pool:
                Meddler.pool = pool
                await pool.reset_group(0)
                session = pool.sessions[0]
                assert ((await session.step(call)).observation, pool._state) == ("wrong thread", "open"), call
    try:
        asyncio.run(main())
    finally:
        Meddler.pool = None


def test_p9_misuse_of_groups(server):
    async def main():
        async with EnvPool.local(ENV, 8) as pool:
            with pytest.raises(ValueError):
                await pool.run_group(two_steps, 0, size=9)
            with pytest.raises(ValueError):
                await pool.run_group(two_steps, 0, size=8, over_provision=1)
            for wrong_options in ({"size": 0}, {"size": -1}, {"deadline": 0}, {"deadline": float("nan")}, {"on_error": "ignore"}, {"over_provision": -1}, {"over_provision": 8}, {"over_provision": True}):
                with pytest.raises(ValueError):
                    await pool.run_group(two_steps, 0, **wrong_options)
            for not_a_rollout in (None, 3, "two_steps"):
                with pytest.raises(TypeError):
                    await pool.run_group(not_a_rollout, 0)
            with pytest.raises(TypeError):
                await pool.run_group(lambda episode: 1.0, 0)
            for options in ({"size": 1.5}, {"size": "2"}, {"deadline": "soon"}):
                with pytest.raises((TypeError, ValueError)):
                    await pool.run_group(two_steps, 0, **options)
            assert not pool.roster.taken, "a refused group keeps its sessions"
            with pytest.raises(ResetRequired):
                await pool.run_group_step([LEFT] * 8)
            for size in (0, -1, 1.5, "2"):
                with pytest.raises((TypeError, ValueError)):
                    await pool.reset_group(0, size)
            with pytest.raises((ValueError, PoolExhausted)):
                await pool.reset_group(0, 9)
            await pool.reset_group(0)
            with pytest.raises(BadRequest):
                await pool.run_group_step([LEFT] * 7)
            with pytest.raises(ValueError):
                await pool.run_group_step([LEFT] * 8, on_error="x")
            running = asyncio.ensure_future(pool.run_group(turns(30), 0, size=5))
            await asyncio.sleep(0)
            with pytest.raises(PoolExhausted):
                await pool.run_group(two_steps, 0, size=4)
            assert (await running).rewards == [0.0] * 5
            async def two_at_once(episode):
                await asyncio.gather(episode.step(LEFT), episode.step(LEFT))
            group = await pool.run_group(two_at_once, 0, size=2)
            assert group.rewards == [None, None] and "SessionBusy" in group.errors[0]
            with pytest.raises(ValueError):
                await pool.record_group_result(0, [1.0, float("nan")])
    asyncio.run(main())


def test_p9_settings_of_connect():
    cases = [("size", 0), ("size", True), ("size", 2.0), ("group_size", 3), ("group_size", -2), ("group_size", 1.5), ("group_size", "4"), ("timeout", 0), ("timeout", math.nan), ("close_timeout", -1),
             ("max_total_tokens", 0), ("wait", -1.0), ("wait", math.nan), ("resume_for", math.nan), ("connect_timeout", 0), ("ping", 0), ("ping", -3.0)]
    addresses = ["http://127.0.0.1:9", "127.0.0.1:9", [], [3], "", b"ws://x"]
    found = refusals({f"{name}={value!r}": (partial(EnvPool.connect, "ws://127.0.0.1:9", **{name: value}), "group" if name == "group_size" else name) for name, value in cases})
    assert found | refusals({repr(urls): (partial(EnvPool.connect, urls), "urls") for urls in addresses}) == {}


def test_p9_impossible_addresses():
    def start(urls):
        return asyncio.run(EnvPool.connect(urls, 1, connect_timeout=HANG).start())
    addresses = ["ws://127.0.0.1:99999", "ws://", "ws://[::1", "ws://exa mple:1"]
    assert refusals({urls: (partial(start, urls), "") for urls in addresses}, (ValueError, ConnectFailed)) == {}


def test_p9_text_where_a_number_is_wanted(server):
    async def main():
        async with connect(server, 1, env="frozen_lake") as pool:
            session = pool.sessions[0]
            await session.reset({"seed": 1})
            for action in (1, None, ["up"], {"a": 1}, True):
                with pytest.raises(BadRequest):
                    await session.step(action)
            for task in ("x", [1], True, 1.5, {"size": 10**9}, {"name": "nothing"}, {"name": ["a"]}, {"seed": -1}, {"p": "x"}):
                with pytest.raises(BadRequest):
                    await session.reset(task)
            await session.reset({"seed": 1})
            assert (await session.step("<action>left</action>")).n == 1
    asyncio.run(main())


# ---------------------------------------------------------------- P10: safe by default


def test_p10_settings():
    from xland_minigrid.pool.server import ServerConfig
    config = ServerConfig()
    assert config.host == "127.0.0.1" and len(config.token) >= 32 and config.token != ServerConfig().token and config.origins == ()
    assert config.token not in repr(config) and config.max_size <= 1 << 16 and not config.playground
    for host in ("0.0.0.0", "::", "", "192.168.1.5", "example.org", "127.0.0.1.example.org", "localhost.example.org"):
        with pytest.raises(ValueError):
            ServerConfig(host=host, token="")
    assert ServerConfig(host="0.0.0.0").token                # made, not left out
    assert ServerConfig(token="").token == ""                # wanted on loopback


def test_p10_listens_on_loopback_only(server):
    assert server.server._server.sockets[0].getsockname()[0] == "127.0.0.1"
    assert server.url.startswith("ws://127.0.0.1:")


def test_p10_a_frame_that_is_too_large(server):
    "Refused with a typed error; the session goes on, or is lost and says so."
    async def main():
        for env in (None, "frozen_lake"):
            async with connect(server, 1, env=env) as pool:
                session = pool.sessions[0]
                await session.reset(0)
                with pytest.raises(PoolError) as caught:
                    await asyncio.wait_for(session.step("x" * (1 << 17)), HANG)
                if isinstance(caught.value, BadRequest):
                    assert (await session.step(LEFT if env is None else "<action>up</action>")).n == 1
                assert session.resumes < 5, f"the frame was sent {session.resumes} times"
    asyncio.run(main())


def test_p10_pages_need_the_token(server):
    def get(path, token=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, body
    for path in ("/metrics", "/stats"):
        assert get(path)[0] == 401 and get(path, "wrong")[0] == 401 and get(path, TOKEN)[0] == 200
    for path in ("/healthz", "/readyz", "/play", "/", "/../etc/passwd", "/session/x", "/metrics", "/%00"):
        status, body = get(path)
        assert status in (200, 401, 404) and TOKEN not in body and "Traceback" not in body
    for path in ("/stats", "/metrics"):
        assert TOKEN not in get(path, TOKEN)[1]


def test_p10_errors_say_nothing_of_the_inside(counting):
    "What an environment raises may hold secrets; its type is enough."
    class Secretive(Env):
        async def reset(self, config):
            return "", {}, ""
        async def step(self, action):
            raise OSError("password=hunter2 in secret/config")
    async def main():
        with LiveServer({"local": TextBackend(Secretive, 1)}) as live:
            async with connect(live, 1) as pool:
                await pool.sessions[0].reset()
                with pytest.raises(EnvFault) as caught:
                    await pool.sessions[0].step("x")
                assert "hunter2" not in str(caught.value) + str(caught.value.detail)
    asyncio.run(main())


def test_p10_only_what_is_served(server):
    "A client of a server of one kind of text environment cannot have another one made there by its task."
    async def main():
        async with connect(server, 1, env="frozen_lake") as pool:
            for name in ("sudoku", "openenv", "xland"):
                with pytest.raises(BadRequest):
                    await pool.sessions[0].reset({"name": name, "url": "http://127.0.0.1:9", "seed": 1})
    asyncio.run(main())


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    "A server in a process of its own, with its log."
    log = tmp_path_factory.mktemp("server") / "log"
    with start_server(env=ENV, slots=8, drain=2 * HANG, log=log) as running:
        running.log = log
        yield running


def test_p10_the_token_is_no_secret_of_process_lists_or_logs(process):
    async def main():
        async with EnvPool.connect(process, 2) as pool:
            await pool.run_group(two_steps, 0)
        with pytest.raises(Unauthorized):
            await EnvPool.connect(process, 1, token="wrong").start()
    asyncio.run(main())
    argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    assert len(process.token) >= 32 and process.token not in argv and "wrong" not in argv
    log = process.log.read_text()
    assert '"event": "opened"' in log and process.token not in log and process.token not in repr(process)
    for line in log.splitlines():
        assert json.loads(line)["event"]


def test_p10_a_given_token_is_not_printed(monkeypatch, capsys):
    "If you give a token, you know it, and others read the log. A token that was made is shown once."
    served = []
    async def serve(config, **_):
        served.append(config.token)
    monkeypatch.setattr(server_module, "serve", serve)
    monkeypatch.delenv("XLAND_POOL_TOKEN", raising=False)
    command = ["serve", "--env", "none", "--text", "frozen_lake", "--port", "0"]
    assert cli.main(command) == 0 and capsys.readouterr().err == f"token, made for this run: {served[0]}\n"
    monkeypatch.setenv("XLAND_POOL_TOKEN", "given-by-a-user-0123456789abcdef")
    assert cli.main(command) == 0 and served[1].startswith("given") and capsys.readouterr() == ("", "")
    assert cli.main([*command, "--host", "0.0.0.0", "--no-token"]) == 1 and "token" in capsys.readouterr().err and len(served) == 2


# ---------------------------------------------------------------- processes: P5 and P7


def test_p7_sigterm_drains(process):
    "A running episode may end, nobody new is let in, and the exit status is 0. The last test of this process but one."
    async def main():
        async with EnvPool.connect(process, 2) as pool:
            async def rollout(episode):
                await episode.step(LEFT)
                if episode.index == 0:
                    os.kill(process.pid, signal.SIGTERM)
                    assert await asyncio.to_thread(until, lambda: process.stats()["draining"])
                    with pytest.raises(PoolError):
                        await EnvPool.connect(process, 1).start()
                while not episode.done:
                    await episode.step(LEFT)
            assert (await pool.run_group(rollout, 0)).rewards == [0.0, 0.0]
            assert await asyncio.to_thread(process._process.wait, HANG) == 0         # long before the time is over that episodes have
            with pytest.raises(SessionLost):
                await pool.sessions[0].reset(0)
    asyncio.run(main())
    log = process.log.read_text()
    assert '"event": "draining"' in log and '"event": "stopped"' in log and "Traceback" not in log


def test_p5_server_killed_and_restarted_elsewhere():
    "SIGKILL: every session is lost, soon, and says so; a group has no number for it."
    before, threads = children(), set(pool_threads())
    with start_server(env=None, text=("frozen_lake",)) as running:
        async def main():
            async with EnvPool.connect(running, 2, resume_for=0.05) as pool:
                async def rollout(episode):
                    await episode.step("<action>up</action>")
                    if episode.index == 0:
                        running.kill()
                    while running.running:
                        await asyncio.sleep(0.01)
                    await episode.step("<action>up</action>")
                group = await pool.run_group(rollout, {"seed": 1})
                assert group.rewards == [None, None] and all("SessionLost" in error for error in group.errors.values())
                with pytest.raises(PoolError):
                    await pool.reset_group(0)
        asyncio.run(main())
    assert children() <= before and set(pool_threads()) <= threads


PARENT = """
import os, sys, time
from xland_minigrid.pool import start_server
server = start_server(env=None, text=("frozen_lake",))
print(server.pid, flush=True)
time.sleep(600)
"""


def test_p5_death_pipe():
    "A program is killed; the server that it started ends by itself."
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not alive(pid)), "the server outlives its parent"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------- P11: deadlines and more episodes than are wanted


def never():
    return asyncio.get_running_loop().create_future()


def test_p11_deadline(monkeypatch):
    clock = Clock(monkeypatch)
    async def main():
        async with EnvPool.local(ENV, 8, timeout=HOUR) as pool:
            ended = []
            async def rollout(episode):
                await episode.step(LEFT)
                if episode.index < 3:
                    ended.append(episode)
                    return 1.0
                if episode.index == 4:
                    assert await soon(lambda: len(ended) == 3)
                    await turns_of_the_loop()
                    clock.jump(0.9 * HANG)                   # not yet
                    await turns_of_the_loop()
                    ended.append("not yet")
                    clock.jump(0.2 * HANG)
                await never()
            group = await pool.run_group(rollout, 0, size=5, deadline=HANG)
            assert ended[3:] == ["not yet"] and group.rewards == [1.0] * 3 + [None] * 2 and all("deadline" in group.errors[i] for i in (3, 4))
            assert not pool.roster.taken and (await pool.run_group(two_steps, 0)).rewards == [0.0] * 8
    asyncio.run(main())


def test_p11_deadline_counts_the_reset(counting, monkeypatch):
    clock = Clock(monkeypatch)
    async def main():
        async with EnvPool.local(Counting, 2, timeout=HOUR) as pool:
            group = asyncio.ensure_future(pool.run_group(text_turn, {"stuck_reset": True}, deadline=HANG))
            assert await soon(lambda: counting.waiting == 2)
            clock.jump(1.1 * HANG)
            group = await group
            assert group.rewards == [None, None] and all("deadline" in error for error in group.errors.values())
    asyncio.run(main())


def test_p11_too_late_is_too_late(monkeypatch):
    "A rollout that answers its cancellation with a number is late all the same."
    clock = Clock(monkeypatch)
    async def main():
        async with EnvPool.local(ENV, 8, timeout=HOUR) as pool:
            ended = []
            async def rollout(episode):
                if episode.index == 0:
                    ended.append(episode)
                    return 1.0
                try:
                    assert await soon(lambda: ended)
                    await turns_of_the_loop()
                    clock.jump(1.1 * HANG)
                    await never()
                except asyncio.CancelledError:
                    await turns_of_the_loop()
                return 1.0
            group = await pool.run_group(rollout, 0, size=2, deadline=HANG)
            assert group.rewards == [1.0, None], f"an episode that ended after its deadline was scored: {group.rewards}"
    asyncio.run(main())


def test_p11_over_provision_takes_the_first():
    async def main():
        async with EnvPool.local(ENV, 8) as pool:
            async def rollout(episode):
                await (turns_of_the_loop() if episode.index in (1, 4, 6) else never())
                return float(episode.index)
            group = await pool.run_group(rollout, 0, size=3, over_provision=5)
            assert sorted(group.rewards) == [1.0, 4.0, 6.0] and len(group) == 3
            async def failing(episode):                      # those that fail do not count
                if episode.index in (0, 1):
                    raise EnvFault()
                await (turns_of_the_loop() if episode.index in (5, 7) else never())
                return float(episode.index)
            assert sorted((await pool.run_group(failing, 0, size=2, over_provision=6)).rewards) == [5.0, 7.0]
            assert not pool.roster.taken and (await pool.run_group(two_steps, 0)).rewards == [0.0] * 8
    asyncio.run(main())


def test_p11_the_first_are_those_that_ended_first():
    "One that was stopped and then returns a number has not come first."
    async def main():
        async with EnvPool.local(ENV, 8) as pool:
            async def rollout(episode):
                try:
                    await (never() if episode.index == 0 else turns_of_the_loop())
                except asyncio.CancelledError:
                    return -1.0
                return 1.0
            assert (await pool.run_group(rollout, 0, size=1, over_provision=1)).rewards == [1.0]
    asyncio.run(main())


@pytest.mark.parametrize("way", [pytest.param("deadline", marks=pytest.mark.slow), pytest.param("cancel", marks=pytest.mark.slow), "cancel twice"])
def test_p11_stubborn(server, way, monkeypatch):
    "A coroutine that swallows its cancellation and goes on stepping loses its session, and never touches the episode of the next group."
    clock = Clock(monkeypatch)
    async def main():
        async with connect(server, 2) as pool:
            pool.patience, go_on, begun, stepped, ended = 0.1, True, asyncio.Event(), asyncio.Event(), []
            async def stubborn(episode):
                if episode.index == 1:
                    await two_steps(episode)
                    ended.append(episode)
                    return
                await episode.step(0)
                stepped.set()
                while go_on:
                    with contextlib.suppress(asyncio.CancelledError, PoolError):
                        await begun.wait()                   # it goes on when it does most harm
                        await asyncio.sleep(0.001)
                        await episode.step(0)
            task = asyncio.ensure_future(pool.run_group(stubborn, 0, deadline=HANG if way == "deadline" else None))
            await stepped.wait()
            assert await soon(lambda: ended)
            await turns_of_the_loop()
            if way == "deadline":
                clock.jump(1.1 * HANG)
                assert (await task).rewards == [None, 0.0]
            else:
                task.cancel()
                if way == "cancel twice":
                    await turns_of_the_loop(5)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async def careful(episode):
                twin = Twin(5)
                for _ in range(30):
                    twin.step(LEFT).agrees(await episode.step(LEFT))
                    begun.set()
                    await asyncio.sleep(0.005)
            group = await pool.run_group(careful, 5)
            go_on = False
            await asyncio.sleep(0.05)
            assert group.rewards == [0.0, 0.0], f"the next group was disturbed: {group.errors}"
            await pool.sessions[0].close()                   # a typed error or none
            for other in asyncio.all_tasks() - {asyncio.current_task()}:
                other.cancel()
    asyncio.run(main())


def test_p11_close_of_a_session_that_a_stubborn_coroutine_lost():
    async def main():
        async with EnvPool.local(ENV, 8) as pool:
            pool.sessions[0].lost = True                     # as the pool marks it
            await pool.sessions[0].close()
            await pool.sessions[0].close()
    asyncio.run(main())


# ---------------------------------------------------------------- P12: quick to import

IMPORTS = """
import sys
import xland_minigrid
before = set(sys.modules)
from xland_minigrid.pool import EnvPool, start_server, RolloutGroup, Env, TierCurriculum
print(*sys.modules)
print(*(set(sys.modules) - before))
import xland_minigrid.interop.openenv, xland_minigrid.interop.trl, xland_minigrid.interop.swift
print(*sys.modules)
if len(sys.argv) > 1:
    import xland_minigrid.interop.plugins.swift_plugin as plugin
    assert not plugin.REGISTERED
print(*sys.modules)
"""


def test_p12_import():
    "The pool brings nothing that takes time to import, and no adapter imports what it adapts to."
    argv = [sys.executable, "-c", IMPORTS, *["plugin"] * (importlib.util.find_spec("swift") is None)]
    run = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=HANG)
    assert run.returncode == 0, run.stderr[-2000:]
    pool, new, *adapters = (set(line.split()) for line in run.stdout.splitlines())
    assert not {"websockets", "ipywidgets", "flax", "optax", "matplotlib", "IPython", "uvloop", "openenv", "transformers", "torch"} & pool
    assert len(new) < 60 and not {name.partition(".")[0] for name in new} & {"jax", "scipy", "pandas"}, new
    for loaded in adapters:
        assert not {"openenv", "fastapi", "pydantic", "gradio", "torch", "transformers", "trl", "swift"} & loaded


# ---------------------------------------------------------------- beyond single faults


class Ledger(Env):
    "A text environment that writes down what was done to it, for the test to read."
    books = {}

    async def reset(self, config):
        self.book = Ledger.books[self.env_config["seed"]] = []
        return "0", {}, ""

    async def step(self, action):
        if random.random() < 0.3:
            await asyncio.sleep(random.random() * 0.004)
        self.book.append(action[-1]["content"])
        return str(len(self.book)), 1.0, False, {}


@pytest.mark.slow
def test_storm_of_cancellations():
    "1,000 random cancellations, many of them twice, and 20 cuts: every action was done once, in its order, or not at all; those that were answered were done."
    rng, cancelled = random.Random(1), [0]

    async def one(pool, number):
        session, asked, answered = pool.sessions[number], [], []
        await session.reset(number)
        for turn in range(2000):
            if turn >= 220 and cancelled[0] >= 1000:   # how many come too late, after the answer, is the machine's affair
                break
            name = f"{number}:{turn}"
            asked.append(name)
            task = asyncio.ensure_future(session.step(name))
            kind = rng.random()
            if kind < 0.2:
                await task
            else:
                await asyncio.sleep(rng.choice([0, 0, 0.0005, 0.002, 0.004]))
                task.cancel()
                if kind > 0.6:
                    await asyncio.sleep(rng.choice([0, 0.0005]))
                    task.cancel()
            try:
                step = await task
                answered.append(name)
                assert Ledger.books[number][step.n - 1] == name and step.observation == str(step.n)
            except asyncio.CancelledError:
                cancelled[0] += 1
        final = await session.step("end")
        book = Ledger.books[number]
        assert final.n == len(book) and len(set(book)) == len(book), "an action was done twice"
        at = iter([*asked, "end"])
        assert all(any(name == found for found in at) for name in book), "actions were done out of order"
        assert set(answered) <= set(book), "an action was answered and not done"

    with LiveServer({"local": TextBackend(Ledger, 8)}) as live, FaultProxy(live.url) as proxy:
        async def main():
            async with connect(proxy.url, 8) as pool:
                async def cutter():
                    for turn in range(20):
                        await asyncio.sleep(0.07)
                        if turn % 2:
                            proxy.abort_all(reset=turn % 4 == 1)
                        else:
                            proxy.cut(**{rng.choice(["up", "down"]): rng.randrange(60)})
                cutting = asyncio.ensure_future(cutter())
                await asyncio.gather(*(one(pool, number) for number in range(8)))
                await cutting
                assert live.used == 8
        asyncio.run(main())
        assert cancelled[0] >= 1000, cancelled
        live.forget()                                        # those that were cut off when they closed; the others may be closing still
        assert live.freed()


@pytest.mark.slow
@pytest.mark.parametrize("taken", [8, 5])
def test_storm_of_connections(server, taken):
    "100 storms of connecting, aborting, resetting and cancelling against a full server, and one with three places: those inside notice nothing, and nothing leaks."
    rng = random.Random(taken)

    async def guest():
        kind = rng.randrange(4)
        if kind == 0:
            await connect(server, rng.choice([4, 8])).start()
        elif kind == 1:
            pool = connect(server, rng.choice([1, 4, 8]))
            task = asyncio.ensure_future(pool.start())
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
                task.cancel()
            await (await task).close()
        else:
            lines = (f"GET /session HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                     "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n").encode()
            for _ in range(6):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                if kind == 2:
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.write(lines[: rng.choice([3, len(lines) - 2, len(lines)])])
                await asyncio.sleep(rng.random() * 0.004)
                writer.transport.abort()

    async def main():
        refused = 0
        async with connect(server, taken) as pool:
            await pool.reset_group(0)
            before = sockets()
            for storm in range(100):
                for result in await asyncio.gather(*(guest() for _ in range(4)), return_exceptions=True):
                    refused += isinstance(result, PoolExhausted)
                    assert result is None or isinstance(result, (PoolExhausted, asyncio.CancelledError, EnvPool)), repr(result)
                    if isinstance(result, EnvPool):
                        await result.close()
                if taken == 8:
                    assert server.used == 8
                assert [s.n for s in await pool.run_group_step([LEFT] * taken)] == [storm + 1] * taken
            assert await asyncio.to_thread(until, lambda: server.used == taken), server.used
            assert refused > 20 and [s.resumes for s in pool.sessions] == [0] * taken
            assert await asyncio.to_thread(until, lambda: len(sockets() - before) == 0), f"{len(sockets() - before)} sockets are left"
    asyncio.run(main())


def strange_frames(rng, count):
    "Frames that no client of ours would send; some are almost right."
    good = ['{"id": 1, "op": "step", "value": 0}', '{"id": 2, "op": "reset", "value": {"seed": 1}}', '{"id": 3, "op": "reset", "value": {"ruleset": {"goal": [1, 2, 3, 4, 5], "rules": [[1, 2, 3, 4, 5, 6, 7]], "init_tiles": [[3, 4]]}}}',
            '{"id": 4, "op": "state"}', '{"type": "reset", "data": {"seed": 1}}', '{"type": "step", "data": {"action": 1}}', '{"type": "state"}', '{"id": 5, "op": "render"}']
    values = [None, True, -1, 0, 1.5, 1e308, 10**30, "", "x" * 50, "\ud800", [], [[]], {}, {"a": 1}, [1, 2, 3], 2**53, 2**63, -0.0, "reset", "step", "\x00"]
    keys = ["id", "op", "value", "type", "data", "seed", "action", "goal", "rules", "init_tiles", "ruleset", "ruleset_id", "name", "self", "message", "__class__"]

    def any_value(depth):
        kind = rng.random()
        if depth and kind < 0.3:
            return {rng.choice(keys): any_value(depth - 1) for _ in range(rng.randrange(4))}
        if depth and kind < 0.5:
            return [any_value(depth - 1) for _ in range(rng.randrange(6))]
        return rng.choice(values) if kind < 0.8 else rng.randrange(-300, 300)

    for number in range(count):
        kind = rng.randrange(8)
        if kind == 0:
            yield bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        elif kind == 1:
            yield "".join(chr(rng.randrange(1, 0x800)) for _ in range(rng.randrange(60)))
        elif kind == 2:
            frame = rng.choice(good)
            yield frame[: rng.randrange(len(frame))]
        elif kind == 3:
            frame = list(rng.choice(good))
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = chr(rng.randrange(32, 127))
            yield "".join(frame)
        elif kind == 4:
            depth = rng.choice([10, 1000, 30000])
            yield rng.choice(['[' * depth, '{"id":' * (depth // 6), '[' * depth + ']' * depth, '{"id": 9, "op": "reset", "value": ' + '[' * (depth // 2) + ']' * (depth // 2) + '}', '{"id": ' + "9" * depth + ', "op": "step"}'])
        elif kind == 5:
            yield json.dumps({"id": rng.randrange(1, 10**6), "op": rng.choice(["reset", "step"]), "value": any_value(3)})
        elif kind == 6:
            yield json.dumps({"type": rng.choice(["reset", "step", "state", "mcp", 3]), "data": any_value(3)})
        else:
            yield json.dumps(any_value(4))


def fuzz(live, path, frames):
    "Send frames one after another; each is answered, or ends its socket. Returns how many were answered with an error."
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect as dial
    ws, errors, answered, ended = None, 0, 0, 0
    with contextlib.ExitStack() as stack:
        for frame in frames:
            if ws is None:
                ws = stack.enter_context(dial(live.url + path, additional_headers={"Authorization": f"Bearer {TOKEN}"}, compression=None, proxy=None, ping_interval=None))
                if path.startswith("/session"):
                    assert json.loads(ws.recv(HANG))["op"] == "hello"
            try:
                try:
                    ws.send(frame)
                except UnicodeEncodeError:
                    continue
                said = json.loads(ws.recv(HANG))
                answered += 1
                error = said.get("error") or (said["data"] if said.get("type") == "error" else None)
                if error:
                    errors += 1
                    assert error["code"] and error["message"] and "Traceback" not in error["message"] and error["code"] not in ("env_fault", "EXECUTION_ERROR") or "reset" in error["message"], (frame, error)
            except ConnectionClosed:
                ended, ws = ended + 1, None
            except TimeoutError:
                raise AssertionError(f"a frame had no answer: {frame[:300]!r}") from None
    assert ended < len(frames) / 20, f"{ended} sockets ended"
    assert answered > len(frames) * 0.9
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/session", "/ws", "/session?env=frozen_lake", "/ws?env=frozen_lake"])
def test_fuzzed_frames(server, path):
    "10,000 malformed frames over the four kinds of session: a typed error each; the server serves the next client."
    frames = list(strange_frames(random.Random(path), 2500))
    assert fuzz(server, path, frames) > 1000
    assert "released_fault" not in server.counts, server.counts
    assert server.freed()
    async def main():
        async with connect(server, 8) as pool:
            for seed, session in enumerate(pool.sessions):
                Twin(seed).agrees(await session.reset(seed))
    asyncio.run(main())


@pytest.mark.slow
def test_fuzzed_http(server):
    "Bytes that are no handshake, and handshakes that are almost right."
    rng = random.Random(3)
    good = (f"GET /session?env=frozen_lake HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {TOKEN}\r\nOrigin: http://x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nX-Pool-Session: abc\r\nX-Pool-Resume: def\r\n\r\n").encode()
    for number in range(1500):
        data, kind = bytearray(good), rng.randrange(5)
        if kind == 0:
            data = bytes(rng.randrange(256) for _ in range(rng.randrange(300)))
        elif kind == 1:
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            at = rng.randrange(len(data))
            data[at:at] = rng.choice([b"\r\n", b"\x00", b"%", b"[", b"//[", b"Authorization: Bearer x\r\n", b"X-Pool-Session: a\r\n", b"Origin: y\r\n", b"A" * 9000])
        elif kind == 3:
            data = data.replace(b"/session?env=frozen_lake", rng.choice([b"//[", b"http://[::1", b"/session?env=%ff%00", b"/\xff", b"/session?env=" + b"a&env=" * 100, b"*", b"/readyz?" + b"x" * 5000, b"/healthz", b"/ws", b"/play"]))
        else:
            data = data.replace(b"GET", rng.choice([b"POST", b"HEAD", b"OPTIONS", b"get", b"PUT", b"\x16\x03\x01"]))
        with socket.create_connection(("127.0.0.1", server.port), HANG) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(bytes(data))
                if b"\r\n\r\n" in data and number % 3 == 0:
                    sock.settimeout(0.2)
                    answer = sock.recv(65536)
                    assert not answer or answer.startswith(b"HTTP/1.1 ") and b"Traceback" not in answer and TOKEN.encode() not in answer
    assert until(lambda: server.used == 0), f"{server.used} places are held by handshakes that were none"
    async def main():
        async with connect(server, 8):
            pass
    asyncio.run(main())
