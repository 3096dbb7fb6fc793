"""OpenEnv: our server with their clients, and our client.

The tests whose names end in `_real` need the package; here they are skipped, and `test_in_an_environment_of_its_own` runs them there.
"""
import asyncio
import importlib.util
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import peers
from pool_faults import HANG, soon

from xland_minigrid.interop import openenv as adapter
from xland_minigrid.pool.errors import BadRequest, SessionBusy, SessionLost
from xland_minigrid.pool.server import EnvServer

HERE = "tests/test_interop_openenv.py"


@pytest.fixture
def openenv():
    return pytest.importorskip("openenv.core", reason="openenv is not installed here; test_in_an_environment_of_its_own runs this")


# -- what needs nothing of theirs

def test_actions_become_fields():
    assert adapter.action_fields(4) == adapter.action_fields(np.uint8(4)) == {"action": 4}
    assert adapter.action_fields("up") == {"text": "up"} and adapter.action_fields({"x": 1}) == {"x": 1}
    model = types.SimpleNamespace(model_dump=lambda: {"action": 2, "metadata": {}})
    assert adapter.action_fields(model) == {"action": 2}
    for wrong in (1.0, None, [1], object()):
        with pytest.raises(BadRequest, match="give an integer"):
            adapter.action_fields(wrong)


def test_observations_become_arrays():
    seen = adapter.as_arrays({"img": [[1, 2]], "x": [0.5], "flag": [True, False], "n": 3, "info": {"a": [1]}, "text": "hi"})
    assert seen["img"].dtype == np.int32 and seen["x"].dtype == np.float32 and seen["flag"].tolist() == [1, 0]
    assert seen["n"] == 3 and seen["info"] == {"a": [1]} and seen["text"] == "hi"


@pytest.mark.skipif("openenv" in sys.modules or importlib.util.find_spec("openenv") is not None, reason="openenv is installed here")
def test_without_the_package_the_error_names_the_extra():
    for use in (adapter.openenv_client_class, lambda: adapter.XLandOpenEnvClient):
        with pytest.raises(ImportError, match=r"pip install 'xland_minigrid\[openenv\]'"):
            use()
    with pytest.raises(AttributeError, match="no attribute"):
        adapter.NoSuchThing


# -- with the real package

def serving(**settings):
    return EnvServer(**{"env": "MiniGrid-Empty-6x6", "slots": 8, "token": "", "params": {"max_steps": 20}, **settings})


def test_eight_stock_clients_and_the_ninth_is_refused_real(openenv):
    async def main():
        async with serving() as server:
            clients = [openenv.GenericEnvClient(base_url=server.url.replace("ws", "http", 1)) for _ in range(8)]
            await asyncio.gather(*(c.connect() for c in clients))
            first = await asyncio.gather(*(c.reset(seed=i) for i, c in enumerate(clients)))
            assert all(r.reward is None and not r.done and r.observation["n"] == 0 for r in first)
            ninth = openenv.GenericEnvClient(base_url=server.url)
            with pytest.raises(ConnectionError, match="503"):
                await ninth.connect()
            # isolation: client i takes i steps, and each counts its own
            for i, client in enumerate(clients):
                for k in range(i):
                    r = await client.step({"action": 1})
                    assert r.observation["n"] == k + 1
            states = await asyncio.gather(*(c.state() for c in clients))
            assert [s["step_count"] for s in states] == list(range(8)) and len({s["episode_id"] for s in states}) == 8
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                await clients[0].step({"action": 99})
            await clients[0].close()
            assert await soon(lambda: server.host.stats()["live"] == 7)
            await ninth.connect()                               # the freed place
            with pytest.raises(RuntimeError, match="reset first"):
                await ninth.step({"action": 0})                 # never another one's episode
            await asyncio.gather(ninth.close(), *(c.close() for c in clients[1:]))
            assert await soon(lambda: server.host.stats()["live"] == 0)
    asyncio.run(main())


def test_a_token_is_asked_for_real(openenv):
    async def main():
        async with serving(slots=1, token="s3cret") as server:
            with pytest.raises(ConnectionError, match="401"):
                await openenv.GenericEnvClient(base_url=server.url).connect()
            async with adapter.XLandOpenEnvClient(server.url, token="s3cret") as client:
                assert (await client.reset(seed=1)).observation["img"].shape == (7, 7, 2)
    asyncio.run(main())


def test_our_client_is_theirs_and_steps_like_the_pool_real(openenv):
    from xland_minigrid.pool.pool import EnvPool
    assert issubclass(adapter.XLandOpenEnvClient, openenv.EnvClient) and adapter.XLandOpenEnvClient is adapter.openenv_client_class()
    actions = np.random.default_rng(0).integers(0, 6, 30).tolist()

    async def theirs():
        seen = []
        async with serving(slots=2) as server, adapter.XLandOpenEnvClient(server.url) as client:
            r = await client.reset(seed=5)
            for a in actions:
                seen.append((r.observation["img"].tolist(), r.reward, r.done))
                r = await client.reset(seed=6) if r.done else await client.step(a)
        return seen

    seen = asyncio.run(theirs())
    with EnvPool.local("MiniGrid-Empty-6x6", slots=1, max_steps=20).sync as pool:
        session = pool.sessions[0]
        s = pool.reset(session, 5)
        for a, (img, reward, done) in zip(actions, seen, strict=True):
            assert s.observation.tolist() == img and s.reward == reward and s.done == done
            s = pool.reset(session, 6) if s.done else pool.step(session, a)


def test_two_requests_at_once_are_refused_before_they_are_sent_real(openenv):
    async def main():
        async with serving(slots=1) as server, adapter.XLandOpenEnvClient(server.url) as client:
            await client.reset(seed=0)
            done = await asyncio.gather(client.step(1), client.step(1), return_exceptions=True)
            assert sorted(type(d).__name__ for d in done) == ["SessionBusy", "StepResult"]
            assert (await client.step(1)).observation["n"] == 2       # nothing is shifted
    asyncio.run(main())


def test_a_cut_client_never_goes_on_elsewhere_real(openenv):
    async def main():
        async with serving(slots=2) as server, adapter.XLandOpenEnvClient(server.url) as client:
            await client.reset(seed=0)
            await client.step(1)
            client._ws.transport.abort()
            with pytest.raises(Exception):
                for _ in range(3):
                    await client.step(1)                          # whether the library connects anew or not, there is no episode
            assert (await client.reset(seed=0)).observation["n"] == 0
    asyncio.run(main())


def test_a_reply_that_is_not_the_next_is_refused_real(openenv):
    client = adapter.XLandOpenEnvClient("http://127.0.0.1:1")
    def payload(n):
        return {"observation": {"img": [[1]], "n": n}, "reward": 0.0, "done": False}
    assert client._parse_result(payload(0)).observation["n"] == 0
    client._parse_result(payload(1))
    with pytest.raises(SessionLost):
        client._parse_result(payload(3))
    with pytest.raises(SessionLost):
        client._parse_result(payload(2))                          # not even later
    client._parse_result(payload(0))


def test_text_through_stock_clients_real(openenv):
    async def main():
        async with EnvServer(env=None, text=("frozen_lake",), text_slots=2, token="") as server:
            for make in (openenv.GenericEnvClient, adapter.XLandOpenEnvClient):
                client = make(server.url)
                r = await client.reset(seed=4, size=4)
                assert isinstance(r.observation["text"], str)
                r = await client.step({"text": "<action>down</action>"} if make is openenv.GenericEnvClient else "<action>down</action>")
                assert r.observation["n"] == 1 and r.reward is not None
                await client.close()
    asyncio.run(main())


def test_sync_clients_real(openenv):
    ready, stop, box = threading.Event(), threading.Event(), []

    def run():
        async def main():
            async with serving(slots=2) as server:
                box.append(server.url)
                ready.set()
                while not stop.is_set():
                    await asyncio.sleep(0.01)
        asyncio.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(HANG)
    with adapter.XLandOpenEnvClient(box[0]).sync() as client:
        assert client.reset(seed=2).observation["n"] == 0 and client.step(np.int32(1)).observation["n"] == 1
    stop.set()
    thread.join(HANG)
    assert not thread.is_alive()


# -- where the package lives elsewhere

@pytest.mark.slow
def test_in_an_environment_of_its_own():
    python = peers.python_of("openenv", ["openenv>=0.10,<0.11"], modules=("openenv.core", "jax", "pytest"), gigabytes=2)
    peers.run_there(python, HERE, "_real")
