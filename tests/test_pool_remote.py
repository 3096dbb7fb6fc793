"""The OpenEnv client against a server that plays its protocol, faults included: every fault has a type, and no call ever reaches another environment."""
import asyncio
import contextlib
import http
import json
import random
import threading

import pytest
from pool_faults import HANG, HOUR, Clock, soon
from worlds import refusals
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.interop.swift import GymScheduler, OpenEnvScheduler
from xland_minigrid.pool.episodes import envs, make_env
from xland_minigrid.pool.errors import (BadRequest, ConnectFailed, DeadlineExceeded, EnvFault, PoolClosed, PoolError, PoolExhausted, ResetRequired, SessionBusy,
                                        SessionLost, Unauthorized, WrongThread)
from xland_minigrid.pool.remote import OpenEnvClient, OpenEnvWrapper, observation_to_text, socket_address, text_to_action

serve = pytest.importorskip("websockets.asyncio.server").serve
ConnectionClosed = pytest.importorskip("websockets.exceptions").ConnectionClosed


def frame(kind="observation", **data):
    return json.dumps({"type": kind, "data": data})


def seen(n, reward=1.0, done=False):
    return frame(observation={"n": n}, reward=reward, done=done)


class Fake:
    """An OpenEnv server: an environment counts its steps and is done after `turns`. `fault(self, socket, n, asked)` may answer a request in place of the environment: it returns frames, or None."""

    def __init__(self, fault=None, capacity=None, status=None, turns=3, **options):
        self.fault, self.capacity, self.status, self.turns, self.options = fault, capacity, status, turns, options
        self.live, self.most, self.connections, self.asked, self.requests, self.headers = set(), 0, 0, 0, [], None

    async def __aenter__(self):
        def answer(socket, request):
            self.headers, self.asked = request.headers, self.asked + 1
            if self.status:
                response = socket.respond(http.HTTPStatus(self.status), "no\n")
                response.headers["Retry-After"] = "1"
                return response
            return None if request.path == "/ws" else socket.respond(http.HTTPStatus.NOT_FOUND, "no\n")
        self.server = await serve(self.handle, "127.0.0.1", 0, process_request=answer, compression=None, close_timeout=0.2, **self.options)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def handle(self, socket):
        self.connections += 1
        if self.capacity is not None and len(self.live) >= self.capacity:
            return await socket.send(frame("error", message=f"Server at capacity: {len(self.live)}/{self.capacity}", code="CAPACITY_REACHED"))
        self.live.add(socket)
        self.most = max(self.most, len(self.live))
        n = 0
        try:
            async for raw in socket:
                asked = json.loads(raw)
                self.requests.append(asked)
                if asked["type"] == "close":
                    break
                n = 0 if asked["type"] == "reset" else n + 1 if asked["type"] == "step" else n
                frames = self.fault and self.fault(self, socket, n, asked)
                if asyncio.iscoroutine(frames):
                    frames = await frames
                if frames is None:
                    frames = [frame("state", step_count=n) if asked["type"] == "state" else seen(n, 1.0 if asked["type"] == "step" else None, n >= self.turns)]
                for said in frames:
                    await socket.send(said)
        except ConnectionClosed:
            pass
        finally:
            self.live.discard(socket)


def on_step(which, *frames):
    "A fault that answers step number `which` with frames."
    return lambda fake, socket, n, asked: list(frames) if asked["type"] == "step" and n == which else None


def cut(fake, socket, n, asked):
    if asked["type"] == "step" and n == 2:
        socket.transport.abort()
        return []


def row(url, **config):
    return {"messages": [{"role": "user", "content": "Play"}], "env_config": {"name": "openenv", "base_url": url, "wait": 0, **config}}


async def act(messages, request):
    return '{"move": 1}'


def run(coroutine):
    async def main():
        async with asyncio.timeout(HANG):
            result = await coroutine
        assert await soon(lambda: len(asyncio.all_tasks()) == 1), asyncio.all_tasks()  # the server's side of what was closed a moment ago
        return result
    return asyncio.run(main())


def with_client(test, fault=None, *, server=None, **options):
    async def main():
        async with Fake(fault, **(server or {})) as fake:
            client = OpenEnvClient(fake.url, **{"connect_timeout": HANG, "request_timeout": HANG, "close_timeout": HANG, **options})
            async with client:
                result = await test(client, fake)
            assert await soon(lambda: not fake.live)
            return result
    return run(main())


def each(cases, test):
    "Run a test for each case, and name those that fail."
    failed = {}
    for name, case in cases.items():
        try:
            test(*case)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    assert failed == {}


async def always_lost(client, fake, kind=SessionLost):
    "From now on every call raises, and none opens another connection."
    for call in (lambda: client.step({"move": 1}), lambda: client.reset(), lambda: client.state(), lambda: client.step({"move": 2})):
        with pytest.raises(kind) as caught:
            await call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert fake.connections == 1


# ---- as it should be ----------------------------------------------------------------------------

def test_a_session():
    async def test(client, fake):
        assert await client.reset(seed=7, level="hard") == ({"n": 0}, None, False, {})
        assert await client.step({"move": 1}) == ({"n": 1}, 1.0, False, {})
        assert await client.state() == {"step_count": 1}
        await client.step({})
        assert (await client.step({})).done
        with pytest.raises(ResetRequired):
            await client.step({})
        assert (await client.reset()).observation == {"n": 0}
        await client.close()
        await client.close()
        return fake
    fake = with_client(test)
    assert fake.requests[0] == {"type": "reset", "data": {"seed": 7, "level": "hard"}} and fake.requests[1] == {"type": "step", "data": {"move": 1}}
    assert [asked["type"] for asked in fake.requests] == ["reset", "step", "state", "step", "step", "reset", "close"]


def test_step_before_reset_is_not_even_sent():
    async def test(client, fake):
        with pytest.raises(ResetRequired):
            await client.step({"move": 1})
        assert fake.requests == []
        await client.reset()
        await client.step({"move": 1})
    with_client(test)


def test_many_at_once_stay_apart():
    async def main():
        async with Fake(turns=99) as fake:
            clients = [await OpenEnvClient(fake.url).connect() for _ in range(8)]
            await asyncio.gather(*(client.reset(seed=i) for i, client in enumerate(clients)))
            for i, client in enumerate(clients):
                for _ in range(i):
                    await client.step({})
            replies = await asyncio.gather(*(client.step({}) for client in clients))
            assert [reply.observation["n"] for reply in replies] == [i + 1 for i in range(8)]
            await asyncio.gather(*(client.close() for client in clients))
            assert await soon(lambda: not fake.live)
    run(main())


# ---- the handshake ------------------------------------------------------------------------------

def test_refused_handshakes():
    async def main(status, error):
        async with Fake(status=status) as fake:
            with pytest.raises(error) as caught:
                await OpenEnvClient(fake.url, token="hunter2").connect()
            assert fake.headers["Authorization"] == "Bearer hunter2" and "hunter2" not in str(caught.value) and "\n" not in str(caught.value)
            assert error is not PoolExhausted or caught.value.detail["retry_after"] == 1.0
            assert error is not ConnectFailed or f"HTTP {status}" in str(caught.value)
    cases = (503, PoolExhausted), (401, Unauthorized), (403, Unauthorized), (404, ConnectFailed), (500, ConnectFailed), (410, ConnectFailed), (200, ConnectFailed)
    each({case[0]: case for case in cases}, lambda *case: run(main(*case)))


@pytest.mark.parametrize("late", [False, True])
def test_refused_after_the_handshake(late):
    async def main():
        async with Fake(capacity=1) as fake:
            async with OpenEnvClient(fake.url) as first:
                await first.reset()
                async with OpenEnvClient(fake.url) as second:
                    assert not late or await second._ws.wait_closed() is None
                    for _ in range(3):
                        with pytest.raises(PoolExhausted, match="1/1"):
                            await second.reset()
                assert fake.connections == 2 and (await first.step({})).observation == {"n": 1}
    run(main())


def test_nobody_there():
    async def main():
        async def quiet(reader, writer):
            await asyncio.sleep(3600)
        async def rude(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            writer.close()
        for handler in (quiet, rude):
            server = await asyncio.start_server(handler, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            async with asyncio.timeout(HANG):
                with pytest.raises(ConnectFailed):
                    await OpenEnvClient(f"http://127.0.0.1:{port}", connect_timeout=0.05 if handler is quiet else HANG).connect()
            server.close()
        with pytest.raises(ConnectFailed, match="environment server"):
            await OpenEnvClient(f"http://127.0.0.1:{port}").connect()
    async def cleaned():
        await main()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    asyncio.run(cleaned())


def test_odd_addresses_and_options():
    urls = (None, 5, "", "127.0.0.1:8000", "ftp://host", "http://", "http://:80", "http://host:99999999", "http://host:x", "http://user:pw@host", "http://a b", "http://host/#x", "http://[::1")
    options = (dict(token=""), dict(token="a b"), dict(token="a\r\nX: y"), dict(token=5), dict(headers="x"), dict(headers={"a": 5}), dict(headers={"a": "b\r\nc: d"}),
               dict(request_timeout=0), dict(request_timeout=True), dict(connect_timeout=None), dict(close_timeout=float("inf")))
    assert issubclass(BadRequest, ValueError)
    found = refusals({repr(url): (lambda url=url: OpenEnvClient(url), BadRequest, "^(?!.*pw)") for url in urls})
    assert found | refusals({repr(some): (lambda some=some: OpenEnvClient("http://h", **some), BadRequest, next(iter(some))) for some in options}) == {}


def test_addresses():
    cases = {"http://h:8000": "ws://h:8000/ws", "https://h/": "wss://h/ws", "ws://h/ws": "ws://h/ws", "wss://h/a/b/": "wss://h/a/b/ws",
             "http://h?session_id=3": "ws://h/ws?session_id=3", "http://[::1]:80": "ws://[::1]:80/ws"}
    assert {url: socket_address(url) for url in cases} == cases


# ---- the connection goes ------------------------------------------------------------------------

def test_cut_while_waiting():
    async def test(client, fake):
        await client.reset()
        await client.step({})
        with pytest.raises(SessionLost):
            await client.step({})
        await always_lost(client, fake)
    with_client(test, cut)


@pytest.mark.parametrize("when", ["connected", "reset"])
def test_cut_between_requests(when):
    async def test(client, fake):
        if when == "reset":
            await client.reset()
        assert await soon(lambda: fake.live)
        for socket in list(fake.live):
            socket.transport.abort()
        await always_lost(client, fake, (SessionLost, ResetRequired) if when == "connected" else SessionLost)
    with_client(test)


def test_closed_by_the_server():
    def closed_with(code):
        async def bye(fake, socket, n, asked):
            if n == 2:
                await socket.close(code, "keepalive ping timeout")
                return []
        async def test(client, fake):
            await client.reset()
            await client.step({})
            with pytest.raises(SessionLost, match=f"{code}"):
                await client.step({})
            await always_lost(client, fake)
        with_client(test, bye)
    each({code: (code,) for code in (1000, 1001, 1011, 1012)}, closed_with)


def test_a_session_whose_loop_was_blocked_is_lost_aloud():
    async def test(client, fake, gone):
        await client.reset()
        assert gone.wait(HANG)  # blocks the loop, until the server's patience with pings is over
        await always_lost(client, fake)
    async def main():
        started, gone = threading.Event(), threading.Event()
        box = {}
        async def serve_elsewhere():
            async with Fake(ping_interval=None) as fake:
                box["fake"], box["loop"], box["stop"] = fake, asyncio.get_running_loop(), asyncio.Event()
                started.set()
                assert await soon(lambda: fake.requests)
                (socket,) = fake.live
                await socket.ping()  # as websockets does for `ping_interval`, and then after `ping_timeout`:
                socket.protocol.fail(1011, "keepalive ping timeout")
                socket.send_data()
                socket.transport.abort()
                gone.set()
                await box["stop"].wait()
        thread = threading.Thread(target=lambda: asyncio.run(serve_elsewhere()))
        thread.start()
        await asyncio.to_thread(started.wait)
        try:
            async with OpenEnvClient(box["fake"].url) as client:
                await test(client, box["fake"], gone)
        finally:
            box["loop"].call_soon_threadsafe(box["stop"].set)
            await asyncio.to_thread(thread.join)
    run(main())


# ---- answers that do not belong -----------------------------------------------------------------

def test_a_late_answer_reaches_nobody():
    late, sent = asyncio.Event(), []
    async def slow(fake, socket, n, asked):
        if asked["type"] == "step" and n == 1:
            await late.wait()
            sent.append(n)
    async def test(client, fake):
        await client.reset()
        client.request_timeout = 0.02
        with pytest.raises(DeadlineExceeded):
            await client.step({"move": "first"})
        with pytest.raises(SessionLost):
            await client.step({"move": "second"})
        late.set()
        assert await soon(lambda: sent)
        await always_lost(client, fake)
        assert [asked["data"] for asked in fake.requests[1:]] == [{"move": "first"}]
    with_client(test, slow)


def test_a_cancelled_request_leaves_no_answer_behind():
    late, sent = asyncio.Event(), []
    async def slow(fake, socket, n, asked):
        if asked["type"] == "step":
            await late.wait()
            sent.append(n)
    async def test(client, fake):
        await client.reset()
        step = asyncio.create_task(client.step({}))
        assert await soon(lambda: len(fake.requests) == 2)
        step.cancel()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        late.set()
        assert await soon(lambda: sent)
        await always_lost(client, fake)
    with_client(test, slow)


def test_a_doubled_answer_does_not_shift_the_others():
    async def test(client, fake):
        await client.reset()
        assert (await client.step({})).observation == {"n": 1}
        await (await client._ws.ping())                     # the second of the two answers has arrived
        await always_lost(client, fake)
    with_client(test, on_step(1, seen(1), seen(1)))


def test_an_answer_of_another_kind():
    async def test(client, fake):
        await client.reset()
        with pytest.raises(SessionLost, match="state"):
            await client.step({})
        await always_lost(client, fake)
    with_client(test, on_step(1, frame("state", step_count=1)))


def test_frames_that_are_none():
    async def test(client, fake):
        await client.reset()
        with pytest.raises(SessionLost, match="protocol"):
            await client.step({})
        await always_lost(client, fake)
    frames = ["[1]", "5", "null", '"text"', "{", "", "{}", '{"type": 5, "data": {}}', '{"type": "observation", "data": [1]}', '{"type": "observation", "data": null}',
              '{"type": "observation", "data": {"observation": 1, "reward": NaN, "done": false}}', "[" * 100_000, b'{"type": "observation"}', b"\xff"]
    each({said[:90]: (test, on_step(1, said)) for said in frames}, with_client)


def test_observations_without_their_parts():
    async def test(client, fake):
        await client.reset()
        with pytest.raises(EnvFault):
            await client.step({})
        with pytest.raises(ResetRequired):
            await client.step({})
        assert (await client.reset()).observation == {"n": 0}
    parts = ['{}', '{"reward": 1, "done": true}', '{"observation": 1, "reward": "1", "done": true}', '{"observation": 1, "reward": [1]}', '{"observation": 1, "reward": 1, "done": "yes"}',
             '{"observation": 1, "reward": 1, "done": 1}', '{"observation": 1, "reward": 1e999}', '{"observation": 1, "reward": -1e999}', '{"observation": 1, "reward": 1' + "0" * 400 + "}"]
    each({data: (test, on_step(1, '{"type": "observation", "data": ' + data + "}")) for data in parts}, with_client)


def test_rewards():
    def paid(reward, number):
        async def test(client, fake):
            await client.reset()
            reply = await client.step({})
            assert reply.reward == number and (number is None or type(reply.reward) is float)
        with_client(test, on_step(1, seen(1, reward)))
    each({repr(case): case for case in ((None, None), (True, 1.0), (2, 2.0), (-0.5, -0.5))}, paid)


def test_errors_of_the_server():
    def said(code, error, goes_on):
        async def test(client, fake):
            await client.reset()
            with pytest.raises(error) as caught:
                await client.step({})
            assert "what it says" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600
            if goes_on:
                assert (await client.step({})).observation == {"n": 2}
            else:
                with pytest.raises(ResetRequired):
                    await client.step({})
                assert (await client.reset()).observation == {"n": 0}
        with_client(test, on_step(1, frame("error", message="what it\nsays " * 200, code=code, errors=[{"input": "x"}])))
    each({code: (code, BadRequest, True) for code in ("VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE")}
         | {code: (code, EnvFault, False) for code in ("EXECUTION_ERROR", "FACTORY_ERROR", "SESSION_ERROR", "NEW", None)}, said)


def test_an_error_frame_without_a_word():
    async def test(client, fake):
        await client.reset()
        with pytest.raises(EnvFault):
            await client.step({})
    with_client(test, on_step(1, '{"type": "error"}'))


def test_a_frame_too_large():
    async def test(client, fake):
        await client.reset()
        with pytest.raises(SessionLost):
            await client.step({})
        await always_lost(client, fake)
    with_client(test, on_step(1, seen("x" * 5000)), max_size=1000)


def test_any_frame_ends_in_a_type():
    rng = random.Random(0)
    pieces = ['{', '}', '"type"', ':', '"observation"', '"error"', ',', '"data"', '[', ']', '1', 'null', 'true', '"reward"', '"done"', '"code"', '"\\ud800"', '1e999', ' ', 'é', '"CAPACITY_REACHED"']
    async def main():
        def noise(fake, socket, n, asked):
            if asked["type"] == "step":
                return ["".join(rng.choice(pieces) for _ in range(rng.randrange(12))) if rng.random() < 0.5
                        else json.dumps({"type": rng.choice(["observation", "error", "state", 3]), "data": rng.choice([{}, [], {"observation": 1, "reward": rng.choice([1, "a", None, []])}, {"code": 5}])})]
        async with Fake(noise) as fake:
            kinds = set()
            for _ in range(150):
                async with OpenEnvClient(fake.url) as client:
                    await client.reset()
                    try:
                        await client.step({})
                    except PoolError as error:
                        kinds.add(type(error))
            assert {SessionLost, EnvFault} <= kinds
            assert await soon(lambda: not fake.live)
    run(main())


# ---- misuse -------------------------------------------------------------------------------------

def test_two_at_once():
    late = asyncio.Event()
    async def slow(fake, socket, n, asked):
        if asked["type"] == "step":
            await late.wait()
    async def test(client, fake):
        await client.reset()
        first = asyncio.create_task(client.step({"move": "a"}))
        assert await soon(lambda: len(fake.requests) == 2)
        with pytest.raises(SessionBusy):
            await client.step({"move": "b"})
        late.set()
        assert (await first).observation == {"n": 1} and (await client.step({})).observation == {"n": 2}
    with_client(test, slow)


def test_not_open_and_not_again():
    async def test(client, fake):
        with pytest.raises(PoolClosed):
            await client.connect()
        await client.reset()
        await client.close()
        for call in (client.step({}), client.reset(), client.connect(), client.state()):
            with pytest.raises((PoolClosed, ResetRequired)):
                await call
        with pytest.raises(PoolClosed):
            await OpenEnvClient(fake.url).reset()
    with_client(test)


def test_actions_that_are_none():
    async def test(client, fake):
        await client.reset()
        for action in (None, 5, "up", ["up"], {"a": object()}, {"a": float("nan")}, {"a": {1, 2}}, {(1, 2): 3}):
            with pytest.raises(BadRequest):
                await client.step(action)
                pytest.fail(f"{action!r} was sent")
        assert (await client.step({"a": "\ud800 é"})).observation == {"n": 1}
    with_client(test)


def test_another_loop():
    async def main():
        async with Fake() as fake:
            client = await OpenEnvClient(fake.url).connect()
            await client.reset()
            def elsewhere():
                async def use():
                    with pytest.raises(WrongThread):
                        await client.step({})
                    await client.close()
                asyncio.run(use())
            await asyncio.to_thread(elsewhere)
            assert await soon(lambda: not fake.live)
            with pytest.raises((PoolClosed, ResetRequired)):
                await client.step({})
    run(main())


def test_close_after_its_loop_is_gone():
    loop = asyncio.new_event_loop()
    async def opened():
        fake = await Fake().__aenter__()
        client = await OpenEnvClient(fake.url).connect()
        await client.reset()
        return fake, client
    fake, client = loop.run_until_complete(opened())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0))
    async def later():
        with pytest.raises(WrongThread):
            await client.step({})
        await client.close()
    asyncio.run(later())
    loop.run_until_complete(fake.__aexit__())
    loop.close()
    asyncio.run(later_close(client))


async def later_close(client):
    await client.close()


# ---- closing ------------------------------------------------------------------------------------

def test_close_is_bounded():
    async def main():
        async def deaf(fake, socket, n, asked):
            socket.transport.pause_reading()  # no goodbye will be heard
        async with Fake(deaf) as fake:
            client = await OpenEnvClient(fake.url, close_timeout=0.05).connect()
            await client.reset()
            await client.close()
            for socket in list(fake.live):
                socket.transport.abort()
            assert await soon(lambda: not fake.live)
    run(main())


def test_close_while_another_task_waits():
    closed = asyncio.Event()
    async def never(fake, socket, n, asked):
        if asked["type"] == "step":
            await closed.wait()
    async def test(client, fake):
        await client.reset()
        step = asyncio.create_task(client.step({}))
        assert await soon(lambda: len(fake.requests) == 2)
        await client.close()
        with pytest.raises(PoolClosed):
            await step
        closed.set()
    with_client(test, never)


def test_secrets_stay_secret(tmp_path):
    async def main():
        async with Fake(turns=1) as fake:
            scheduler = OpenEnvScheduler(completions=tmp_path / "c.jsonl")
            t = await scheduler.run(row(fake.url, token="hunter2", headers={"X-Key": "hunter3"}), act)
            assert t.reward == 1.0 and fake.headers["X-Key"] == "hunter3" and fake.headers["Authorization"] == "Bearer hunter2"
            assert not any("hunter" in text for text in ((tmp_path / "c.jsonl").read_text(), repr(t), t._repr_html_(), repr(OpenEnvClient(fake.url, token="hunter2"))))
    run(main())


# ---- as a text environment ----------------------------------------------------------------------

def test_rows_and_their_keys():
    async def main():
        async with Fake(turns=2) as fake:
            t = await OpenEnvScheduler().run(row(fake.url, seed=5, reset_kwargs={"level": 2}, system_message="Play well."), act)
            assert fake.requests[0]["data"] == {"seed": 5, "level": 2} and fake.requests[1] == {"type": "step", "data": {"move": 1}}
            assert [m["content"] for m in t.messages] == ["Play well.", '{"n": 0}', '{"move": 1}', '{"n": 1}', '{"move": 1}']
            assert t.reward == 2.0 and t.rollout_infos["gym_done"] and t.episode.observation == '{"n": 2}'
            base = await OpenEnvScheduler(fake.url).run({"messages": [{"role": "system", "content": "mine"}]}, act)
            assert base.reward == 2.0 and base.messages[0]["content"] == "mine"
            mixed = await GymScheduler("openenv").run(row(fake.url), act)
            assert mixed.reward == 2.0 and await soon(lambda: not fake.live)
    run(main())


def test_by_name():
    assert envs["openenv"] is OpenEnvWrapper and isinstance(make_env({"name": "openenv", "base_url": "http://h"}), OpenEnvWrapper)


def test_odd_rows_are_refused_before_anything_is_opened():
    async def main():
        async with Fake() as fake:
            for config in ({"base_url": None}, {"base_url": "x"}, {"reset_kwargs": 5}, {"reset_kwargs": {1: 2}}, {"system_message": 5}, {"wait": -1}, {"wait": "x"}, {"on_invalid": "guess"},
                           {"token": 5}, {"request_timeout": "x"}):
                with pytest.raises(BadRequest):
                    await OpenEnvScheduler().run([row(fake.url), {"messages": [], "env_config": {"base_url": fake.url, **config}}], act)
                    pytest.fail(f"{config} was played")
            assert fake.connections == 0
    run(main())


def test_a_reset_value_that_is_no_json():
    async def main():
        async with Fake() as fake:
            t = await OpenEnvScheduler().run(row(fake.url, reset_kwargs={"a": object()}), act)
            assert t.reward is None and "BadRequest" in t.error and await soon(lambda: not fake.live)
    run(main())


FAULTS = {"cut": cut, "no object": on_step(2, "[1]"), "execution": on_step(2, frame("error", message="boom", code="EXECUTION_ERROR")), "odd reward": on_step(2, seen(2, "1")),
          "validation": on_step(2, frame("error", message="no", code="VALIDATION_ERROR")), "capacity": on_step(2, frame("error", message="full", code="CAPACITY_REACHED")),
          "silence": on_step(2), "doubled": on_step(2, seen(2), seen(2))}


def test_no_fault_is_a_reward_and_none_leaks():
    class Kept(OpenEnvScheduler):
        def _create_env(self, env_config):
            self.world = super()._create_env(env_config)
            return self.world
    def play(name, fault):
        async def main():
            async with Fake(fault, turns=4) as fake:
                scheduler = Kept()
                async def thinks(messages, request):
                    if name == "doubled" and len(messages) > 4:
                        await (await scheduler.world.client._ws.ping())  # the second of the two answers has arrived
                    return '{"move": 1}'
                t = await scheduler.run(row(fake.url, request_timeout=0.05 if name == "silence" else HANG), thinks)
                assert t.reward is None and t.total_reward is None and t.error and t.close_error is None and fake.connections == 1
                assert await soon(lambda: not fake.live)
        run(main())
    each({name: (name, fault) for name, fault in FAULTS.items()}, play)


def test_what_a_model_gets_wrong_can_be_told():
    async def main():
        async with Fake(on_step(2, frame("error", message="move: a number, please", code="VALIDATION_ERROR"))) as fake:
            t = await OpenEnvScheduler().run(row(fake.url, on_invalid="tell"), act)
            assert t.episode.step_rewards == [1.0, 0.0, 1.0] and "move: a number, please" in t.messages[4]["content"] and t.rollout_infos["trajectory_info"][2] == {"status": "invalid_action"}
    run(main())


def test_a_full_server_is_asked_again_for_a_while():
    async def main():
        for fake in (Fake(capacity=1, turns=1), Fake(status=503)):
            async with fake:
                if fake.status:
                    fake.turns = 1
                else:
                    first = await OpenEnvClient(fake.url).connect()
                    await first.reset()
                playing = asyncio.create_task(OpenEnvScheduler().run(row(fake.url, wait=HANG), act))
                assert await soon(lambda: fake.asked >= 3 or playing.done()) and not playing.done(), playing
                if fake.status:
                    fake.status = None
                else:
                    await first.close()
                t = await playing
                assert t.reward == 1.0, t.error
                assert await soon(lambda: not fake.live)
    run(main())


def test_a_refusal_is_heard_after_the_server_has_hung_up():
    "It arrived a moment after the client had looked, and the connection was closed before the request was sent."
    async def main():
        async with Fake(capacity=0) as fake:
            client = await OpenEnvClient(fake.url).connect()
            await client._ws.wait_closed()
            recv, looks = client._ws.recv, iter([TimeoutError()])

            async def late():
                for nothing_yet in looks:
                    raise nothing_yet
                return await recv()
            client._ws.recv = late
            with pytest.raises(PoolExhausted, match="at capacity"):
                await client.reset()
            await client.close()
    run(main())


def test_but_not_for_ever(monkeypatch):
    async def main():
        async with Fake(capacity=0) as fake:
            t = await OpenEnvScheduler().run(row(fake.url, wait=0), act)
            assert t.reward is None and t.error.startswith("PoolExhausted") and fake.connections == 1
        clock = Clock(monkeypatch)
        async with Fake(capacity=0, ping_interval=None) as fake:
            playing = asyncio.create_task(OpenEnvScheduler(timeout=2 * HOUR).run(row(fake.url, wait=HOUR, close_timeout=2 * HOUR, request_timeout=2 * HOUR, connect_timeout=2 * HOUR), act))
            assert await soon(lambda: fake.connections >= 4 or playing.done()) and not playing.done()
            clock.jump(HOUR)
            t = await playing
            assert t.reward is None and t.error.startswith("PoolExhausted")
    asyncio.run(main())


def test_no_more_than_max_live_over_calls_loops_and_threads():
    async def main():
        async with Fake(capacity=3, turns=2) as fake:
            scheduler, rewards = OpenEnvScheduler(fake.url, max_live=3), []
            def loop():
                for _ in range(2):
                    rewards.extend(t.reward for t in asyncio.run(scheduler.run([{"messages": [], "env_config": {"wait": HANG}} for _ in range(4)], act)))
            threads = [threading.Thread(target=loop) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            assert rewards == [2.0] * 24 and fake.most <= 3 and scheduler.limit.live == 0
            assert await soon(lambda: not fake.live)
    asyncio.run(main())
    assert OpenEnvScheduler("http://h").limit.most == 4


def test_cancelled_anywhere_frees_the_server():
    async def main():
        rng = random.Random(1)
        async def slow(fake, socket, n, asked):
            await asyncio.sleep(0.002 * rng.random())
        async with Fake(slow, turns=3) as fake:
            scheduler = OpenEnvScheduler(fake.url, max_live=4)
            for _ in range(12):
                running = asyncio.create_task(scheduler.run([row(fake.url) for _ in range(6)], act))
                await asyncio.sleep(0.015 * rng.random())
                running.cancel()
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                    running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
                assert scheduler.limit.live == 0 and not scheduler.live
            assert await soon(lambda: not fake.live)
    run(main())


def test_own_parsing_and_formatting():
    class Mine(OpenEnvScheduler):
        async def parse_action(self, text):
            return {"letters": len(text)}
        def format_observation(self, observation):
            return f"Step {observation['n']}."
    class Broken(OpenEnvScheduler):
        def parse_action(self, text):
            return text
    async def main():
        async with Fake(turns=1) as fake:
            t = await Mine(fake.url).run({"messages": []}, act)
            assert fake.requests[1]["data"] == {"letters": 11} and t.messages[0]["content"] == "Step 0."
            t = await Broken(fake.url).run({"messages": [], "env_config": {"on_invalid": "tell"}}, act)
            assert t.reward is None and "dict" in t.error
    run(main())


# ---- text and actions ---------------------------------------------------------------------------

def test_text_to_action():
    for text in ('{"a": 1}', ' \n{"a": 1}\n', '```json\n{"a": 1}\n```', '```\n{"a": 1}```', 'So:\n```json\n{"a": 1}\n```\nYes.'):
        assert text_to_action(text) == {"a": 1}, text
    for text in ("up", "[1, 2]", "5", "", "```\nup\n```", '{"a": NaN}', "{" * 5000, "[" * 100_000, "null"):
        assert text_to_action(text) == {"message": text}, text[:90]


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text("{}[]\"`:,1ajson\n "))
def test_every_text_is_an_action(text):
    action = text_to_action(text)
    assert isinstance(action, dict) and json.dumps(action)


def test_observation_to_text():
    assert observation_to_text("plain") == "plain" and json.loads(observation_to_text({"a": [1, "é"]})) == {"a": [1, "é"]}


# ---- with the package's own server --------------------------------------------------------------

def test_the_same_game_near_and_far():
    from xland_minigrid.pool.server import EnvServer
    class Reads(OpenEnvScheduler):
        def format_observation(self, observation):
            return observation["text"]
    async def wanders(messages, request):
        return f"<action>{('right', 'down', 'left', 'up')[(sum(m['role'] == 'assistant' for m in messages) + request.env_config['seed']) % 4]}</action>"
    def rows(**config):
        return [{"messages": [], "env_config": {"seed": seed, **config}} for seed in range(6)]
    async def main():
        async with EnvServer(env=None, slots=0, text=("frozen_lake",), text_slots=2, token="hunter2") as server:
            far = await Reads(server.url + "?env=frozen_lake", max_live=2, max_turns=5).run(rows(token="hunter2"), wanders)
            with pytest.raises(Unauthorized):
                await OpenEnvClient(server.url + "?env=frozen_lake").connect()
        near = await GymScheduler("frozen_lake", max_turns=5).run(rows(), wanders)
        talk = lambda t: [m for m in t.messages if m["role"] != "system"]
        assert [(talk(t), t.episode.step_rewards, t.stopped) for t in far] == [(talk(t), t.episode.step_rewards, t.stopped) for t in near]
        assert all(t.error is None for t in far)
    asyncio.run(main())


@pytest.mark.slow
def test_a_storm_of_cancels_and_cuts():
    async def main():
        rng = random.Random(2)
        async def slow(fake, socket, n, asked):
            await asyncio.sleep(0.002 * rng.random())
            if rng.random() < 0.03:
                socket.transport.abort()
                return []
        async with Fake(slow, capacity=6, turns=4) as fake:
            scheduler = OpenEnvScheduler(fake.url, max_live=6)
            for _ in range(300):
                running = asyncio.create_task(scheduler.run([row(fake.url, wait=HANG) for _ in range(8)], act))
                await asyncio.sleep(0.02 * rng.random())
                for _ in range(rng.randrange(4)):
                    running.cancel()
                    await asyncio.sleep(0)
                with contextlib.suppress(asyncio.CancelledError):
                    for t in await running:
                        assert t.reward == (None if t.error else 4.0)
                assert scheduler.limit.live == 0 and not scheduler.live and not scheduler.close_errors
            assert await soon(lambda: not fake.live) and fake.most <= 6
    run(main())
