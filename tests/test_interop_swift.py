"""ms-swift: our environments under its class, and the scheduler that closes what it opened.

Where ms-swift is not installed the tests run against a stand-in with the same interfaces, written from their description; `test_in_an_environment_of_its_own` runs all of them against the
real package.
"""
import asyncio
import importlib.util
import math
import sys
import threading
import types
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import peers
from pool_faults import soon

from xland_minigrid.interop import swift as adapter
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.errors import EnvFault

HERE = "tests/test_interop_swift.py"
REAL = importlib.util.find_spec("swift") is not None


def stand_in():
    "Modules with ms-swift's names: `Env`, `envs`, `multi_turns`, and a `GYMScheduler` with its hooks, its tables and its loop, leaks included."
    gym_env, multi_turn = types.ModuleType("swift.rollout.gym_env"), types.ModuleType("swift.rollout.multi_turn")

    class BaseEnv:
        def __init__(self, env_config):
            self.env_config = env_config

    class GYMScheduler:
        def __init__(self, infer_engine=None, max_turns=None, **kwargs):
            self.infer_engine, self.max_turns, self.gym_env_name = infer_engine, max_turns, kwargs.get("gym_env")
            self._envs, self._total_rewards, self._step_rewards, self._pending_obs = {}, {}, {}, {}

        def _create_env(self, env_config):
            name = env_config.get("name", self.gym_env_name)
            if name not in gym_env.envs:
                raise ValueError(f"Environment '{name}' not found.")
            return gym_env.envs[name](env_config)

        async def on_turn_end(self, infer_request, response_choice, current_turn):
            uuid = infer_request.uuid
            if uuid not in self._envs:
                return {"done": True, "rollout_infos": {}}
            seen, reward, done, _ = await self._envs[uuid].step(deepcopy(infer_request.messages))
            self._total_rewards[uuid] += reward
            self._step_rewards[uuid].append(reward)
            self._pending_obs[uuid] = None if done else seen
            infos = {"total_reward": self._total_rewards[uuid], "step_rewards": list(self._step_rewards[uuid]), "gym_done": done}
            if done:
                await self._close_and_remove(uuid)
            return {"done": done, "rollout_infos": infos}

        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({"role": "user", "content": self._pending_obs[infer_request.uuid]})
            return {"infer_request": infer_request}

        async def run(self, infer_request, request_config, **kwargs):
            await self.on_trajectory_start([infer_request])
            turn, infos = 1, {}
            while True:
                choice = (await self.infer_engine.infer_async(infer_request, request_config)).choices[0]
                infer_request.messages.append({"role": "assistant", "content": choice.message.content})
                result = await self.on_turn_end(infer_request, choice, turn)
                infos.update(result["rollout_infos"])
                if result["done"] or self.max_turns and turn >= self.max_turns:
                    return SimpleNamespace(messages=infer_request.messages, rollout_infos={**infos, "num_turns": turn})
                self.step(infer_request, choice, turn)
                turn += 1

    gym_env.Env, gym_env.envs = BaseEnv, {"math_env": BaseEnv}
    multi_turn.GYMScheduler, multi_turn.multi_turns = GYMScheduler, {"gym_scheduler": GYMScheduler}
    swift, rollout = types.ModuleType("swift"), types.ModuleType("swift.rollout")
    swift.__path__ = rollout.__path__ = []
    return {"swift": swift, "swift.rollout": rollout, "swift.rollout.gym_env": gym_env, "swift.rollout.multi_turn": multi_turn}


@pytest.fixture(autouse=True)
def swift(monkeypatch):
    "ms-swift or its stand-in, with the probe environment in its table."
    if not REAL:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    adapter.swift_env.cache_clear()
    adapter.swift_scheduler.cache_clear()
    import importlib
    gym_env, multi_turn = importlib.import_module("swift.rollout.gym_env"), importlib.import_module("swift.rollout.multi_turn")
    gym_env.envs["probe"] = adapter.swift_env(Probe)
    Probe.opened = Probe.closed = Probe.slow = 0
    yield SimpleNamespace(gym_env=gym_env, multi_turn=multi_turn)
    adapter.swift_env.cache_clear()
    adapter.swift_scheduler.cache_clear()


class Probe(Env):
    "Says what is asked of it, counts what is open, and breaks as it is told to."
    opened = closed = slow = 0

    def __init__(self, env_config):
        super().__init__(env_config)
        if env_config.get("wrong"):
            raise ValueError("wrong setting")
        Probe.opened += 1

    async def reset(self, config):
        self.loop = asyncio.get_running_loop()
        assert config.data_dict["env_config"] is not None and isinstance(config.messages, list)
        if self.env_config.get("slow"):
            Probe.slow += 1
            await asyncio.sleep(self.env_config["slow"])
        if self.env_config.get("at") == 0:
            raise OSError("no disk")
        self.turn = 0
        return "turn 0", {}, "be brief"

    async def step(self, action):
        assert asyncio.get_running_loop() is self.loop                # one loop for its whole life
        self.turn += 1
        await asyncio.sleep(0)
        if self.env_config.get("at") == self.turn:
            raise OSError("cut")
        return f"turn {self.turn}, you said {action[-1]['content']}", float(self.env_config.get("reward", 1.0)), self.turn >= self.env_config.get("turns", 3), {}

    async def close(self):
        Probe.closed += 1
        if self.env_config.get("bad_close"):
            raise OSError("stuck")
        await asyncio.sleep(self.env_config.get("hang", 0))


def left():
    return Probe.opened - Probe.closed


def request(uuid="a", **config):
    fields = dict(messages=[{"role": "user", "content": "x"}], data_dict={"env_config": {"name": "probe", **config}}, uuid=uuid)
    if REAL:
        from swift.infer_engine.protocol import RolloutInferRequest
        return RolloutInferRequest(**fields)
    return SimpleNamespace(**fields)


def response(text):
    ids = [ord(c) for c in text]
    if REAL:
        from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, UsageInfo
        return ChatCompletionResponse(model="m", choices=[ChatCompletionResponseChoice(index=0, message=ChatMessage(role="assistant", content=text), finish_reason="stop", token_ids=ids)],
                                      usage=UsageInfo(1, 1, 2))
    return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text), token_ids=ids, logprobs=None, finish_reason="stop")])


class Engine:
    "A model that says ok, slowly if it is told to."
    template = None
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    async def infer_async(self, request, config, **_):
        await asyncio.sleep(self.seconds)
        return response("ok")


def scheduler(max_turns=10, seconds=0.0, **attributes):
    kind = type("Mine", (adapter.swift_scheduler(),), attributes)
    return kind(Engine(seconds), max_turns=max_turns, gym_env="probe")


def test_says_which_package_this_is():
    print("ms-swift: the real package" if REAL else "ms-swift: a stand-in, the real package is not installed here")


# -- environments

def test_our_environments_are_theirs(swift):
    names = adapter.register()
    assert names == ["frozen_lake", "sudoku", "xland", "xland_gym_scheduler"] == adapter.register()
    assert all(issubclass(swift.gym_env.envs[name], swift.gym_env.Env) for name in names[:3]) and "math_env" in swift.gym_env.envs
    assert swift.multi_turn.multi_turns["xland_gym_scheduler"] is adapter.swift_scheduler() and issubclass(adapter.swift_scheduler(), swift.multi_turn.GYMScheduler)

    async def main():
        made = {"frozen_lake": {"seed": 3, "size": 4}, "sudoku": {"seed": 3}}
        for name, config in made.items():
            env = swift.gym_env.envs[name]({"name": name, **config, "unused": None})
            seen, info, system = await env.reset(request(**config))
            assert isinstance(seen, str) and isinstance(info, dict) and isinstance(system, str)
            seen, reward, done, info = await env.step([{"role": "user", "content": seen}, {"role": "assistant", "content": "<action>down</action>"}])
            assert isinstance(seen, str) and isinstance(reward, float) and isinstance(done, bool) and isinstance(info, dict)
            await env.close()
            await env.close()
    asyncio.run(main())


def test_each_hook_may_come_from_another_loop(swift):
    env = swift.gym_env.envs["probe"]({"turns": 2})
    asyncio.run(env.reset(request()))
    for _ in range(2):
        seen, reward, done, _ = asyncio.run(env.step([{"role": "assistant", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]}]))
    assert seen == "turn 2, you said ok" and done
    asyncio.run(env.close())
    assert left() == 0


def test_a_reward_that_is_no_number_is_a_fault(swift):
    env = swift.gym_env.envs["probe"]({"reward": math.nan})
    asyncio.run(env.reset(request()))
    with pytest.raises(EnvFault):
        asyncio.run(env.step([{"role": "assistant", "content": "x"}]))
    with pytest.raises(TypeError, match="text"):
        asyncio.run(env.step([{"role": "assistant", "content": [{"type": "image"}]}]))
    with pytest.raises(TypeError):
        adapter.swift_env(dict)
    with pytest.raises(ValueError, match="nowhere"):
        adapter.swift_env("nowhere")


# -- the scheduler

def test_their_scheduler_leaks_and_ours_does_not(swift):
    "The reason for all this: episodes that run out of turns."
    async def play(kind):
        played = kind(Engine(), max_turns=2, gym_env="probe")
        return await asyncio.gather(*(played.run(request(f"u{i}", turns=99), None) for i in range(20))), played
    if REAL:
        asyncio.run(play(swift.multi_turn.GYMScheduler))
        assert left() == 20
        Probe.opened = Probe.closed = Probe.slow = 0
    outputs, ours = asyncio.run(play(adapter.swift_scheduler()))
    assert left() == 0 and Probe.closed == 20 and not ours._envs and not ours._total_rewards
    assert all(o.rollout_infos["total_reward"] == 2.0 and o.rollout_infos["num_turns"] == 2 and o.rollout_infos["gym_done"] is False for o in outputs)


def test_a_whole_trajectory():
    played = scheduler()
    out = asyncio.run(played.run(request(turns=3), None))
    assert out.rollout_infos == {"total_reward": 3.0, "step_rewards": [1.0] * 3, "gym_done": True, "num_turns": 3} and left() == 0
    assert [m["role"] for m in out.messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"] and out.messages[0]["content"] == "be brief"
    assert out.messages[3]["content"] == "turn 1, you said ok" and not played._own


def test_requests_without_a_name_do_not_meet():
    played = scheduler()
    outs = asyncio.run(_all(*(played.run(request(None, turns=1 + i % 3), None) for i in range(9))))
    assert [o.rollout_infos["total_reward"] for o in outs] == [1.0, 2.0, 3.0] * 3 and left() == 0


async def _all(*coroutines, **options):
    return await asyncio.gather(*coroutines, **options)


def test_a_failure_is_raised_and_everything_is_closed():
    for at in (0, 1, 2):
        with pytest.raises(Exception, match="no disk|cut"):
            asyncio.run(scheduler().run(request(at=at), None))
        assert left() == 0
    # in a server the others go on
    outs = asyncio.run(_all(*(scheduler_.run(request(f"u{i}", at=1 if i == 2 else None), None) for scheduler_ in [scheduler()] for i in range(4)), return_exceptions=True))
    assert isinstance(outs[2], OSError) and [o.rollout_infos["total_reward"] for i, o in enumerate(outs) if i != 2] == [3.0] * 3 and left() == 0


def test_a_mistake_in_the_data_is_raised():
    with pytest.raises(ValueError, match="wrong setting"):
        asyncio.run(scheduler().run(request(wrong=True), None))
    with pytest.raises(ValueError):
        asyncio.run(scheduler().run(request(name="nowhere"), None))
    assert left() == 0


@pytest.mark.parametrize("after", [0.0, 0.03, 0.08])
def test_cancelled(after):
    async def main():
        played = scheduler(seconds=0.02)
        tasks = [asyncio.ensure_future(played.run(request(f"u{i}", turns=99, slow=0.04 * (i % 2)), None)) for i in range(6)]
        await asyncio.sleep(after)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(d, asyncio.CancelledError) for d in done) and not played._envs
        assert await soon(lambda: left() == 0)
    asyncio.run(main())


def test_cancelled_while_it_begins_inside_the_trainer():
    async def main():
        played = scheduler()
        task, begun = asyncio.ensure_future(played.on_trajectory_start([request(f"u{i}", slow=3600 * (i % 2)) for i in range(4)])), Probe.slow
        assert await soon(lambda: Probe.slow == begun + 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await soon(lambda: left() == 0) and not played._envs
    asyncio.run(main())


def test_a_close_that_fails_or_hangs_is_bounded_and_noted():
    played = scheduler(close_timeout=0.2)
    asyncio.run(played.run(request(turns=1, bad_close=True), None))
    asyncio.run(played.run(request(turns=1, hang=3600), None))
    assert len(played.close_errors) == 2 and "stuck" in played.close_errors[0] and "did not close within" in played.close_errors[1] and not played._envs


def test_inside_the_trainer_hooks_run_one_by_one(swift):
    "As the trainer's own process drives it: no `run`, a new loop for each hook, all requests at once."
    def drive(played, requests, turns):
        asyncio.run(played.on_trajectory_start(requests))
        alive, turn = list(requests), 1
        while alive:
            for r in alive:
                r.messages.append({"role": "assistant", "content": "ok"})
            results = asyncio.run(_all(*(played.on_turn_end(r, response("ok").choices[0], turn) for r in alive)))
            alive = [r for r, result in zip(alive, results) if not result["done"] and turn < turns]
            for r in alive:
                played.step(r, response("ok").choices[0], turn)
            turn += 1

    played = scheduler(max_turns=3)
    drive(played, [request(f"u{i}", turns=1 + i) for i in range(6)], 3)
    assert left() == 0 and Probe.closed == 6 and not played._envs
    with pytest.raises(OSError):
        drive(played, [request(f"u{i}", at=2 if i == 3 else None) for i in range(6)], 3)
    assert left() == 0
    with pytest.raises(OSError):
        drive(played, [request(f"u{i}", at=0 if i == 3 else None, slow=0.02 * i) for i in range(6)], 3)
    assert left() == 0 and not played._envs
    drive(played, [request("again", turns=99)], 3)                                           # the same name twice: the first is closed
    asyncio.run(played.on_trajectory_start([request("twice")]))
    asyncio.run(played.on_trajectory_start([request("twice")]))
    assert left() == 1
    asyncio.run(played.on_trajectory_end(request("twice")))
    assert left() == 0


@pytest.mark.skipif(not REAL, reason="ms-swift is not installed here; test_in_an_environment_of_its_own runs this")
def test_their_driver_inside_the_trainer():
    from swift.infer_engine import RequestConfig
    from swift.infer_engine.protocol import RolloutOutput
    from swift.rollout.agent_loop import invoke_async_hook, run_multi_turn
    played = scheduler(max_turns=2)
    requests = [request(f"u{i}", turns=1 + i) for i in range(4)]
    invoke_async_hook(played.on_trajectory_start(requests))
    def infer(batch, config):
        return [RolloutOutput(response=response("ok")) for _ in batch]
    outputs = run_multi_turn(requests, infer(requests, None), played, infer, RequestConfig(), max_turns=2)
    assert [o.rollout_infos["total_reward"] for o in outputs] == [1.0, 2.0, 2.0, 2.0] and left() == 0


# -- the plug-in file

def test_the_plugin_file_is_alone_and_registers(swift, monkeypatch):
    path = Path(adapter.plugin_path())
    assert {p.name for p in path.parent.glob("*.py")} == {"__init__.py", "swift_plugin.py"}      # ms-swift puts this folder first on the import path
    swift.gym_env.envs.pop("frozen_lake", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if REAL:
        from swift.utils import import_external_file
        module = import_external_file(str(path))
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
        loader = importlib.machinery.SourceFileLoader("_swift_external_x", str(path))
        module = types.ModuleType(loader.name)
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    assert module.REGISTERED == ["frozen_lake", "sudoku", "xland", "xland_gym_scheduler"] and "frozen_lake" in swift.gym_env.envs
    out = asyncio.run(swift.multi_turn.multi_turns["xland_gym_scheduler"](Engine(), max_turns=2).run(request(name="frozen_lake", seed=1), None))
    assert out.rollout_infos["num_turns"] == 2 and isinstance(out.rollout_infos["total_reward"], float)


def test_one_thread_for_all_environments():
    asyncio.run(_all(*(scheduler().run(request(f"u{i}"), None) for i in range(5))))
    assert sum(t.name == "xland-swift-io" for t in threading.enumerate()) == 1


@pytest.mark.slow
@pytest.mark.skipif(REAL, reason="this is it")
def test_in_an_environment_of_its_own():
    python = peers.python_of("swift", ["torch==2.13.0+cpu", "ms-swift>=4.6,<5"], ["torch", "ms-swift>=4.6,<5"], modules=("swift", "torch", "swift.rollout.multi_turn", "jax", "pytest"), gigabytes=6)
    print(peers.run_there(python, HERE, "not own"))
