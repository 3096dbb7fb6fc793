"""Groups on several servers, groups at the same time, and what happens when callers are impatient or servers die."""
import asyncio
import contextlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pool_faults import HANG, HOUR, LiveServer, soon, turns_of_the_loop, until

from xland_minigrid.pool import EnvPool, start_server
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.errors import BadRequest, ConnectFailed, PoolClosed, PoolExhausted, ResetRequired, SessionBusy, WrongThread
from xland_minigrid.pool.pool import Roster, Servers

pytestmark = pytest.mark.newest

ENV, TOKEN, LEFT = "XLand-MiniGrid-R1-9x9", "a-token-for-tests", 1


def connect(servers, size=1, **options) -> EnvPool:
    return EnvPool.connect([getattr(server, "url", server) for server in servers], size, **{"token": TOKEN, "resume_for": 0.05, "connect_timeout": HANG, "ping": HOUR, "timeout": HANG, **options})


async def two_steps(episode):
    for _ in range(2):
        await episode.step(LEFT)


class Gate(Env):
    "A text environment whose step `wait` lasts until the gate is opened."
    gate, waiting = threading.Event(), 0

    async def reset(self, config):
        return f"begin {self.env_config.get('seed')}", {}, ""

    async def step(self, action):
        if action[-1]["content"] == "wait":
            Gate.waiting += 1
            while not Gate.gate.is_set():
                await asyncio.sleep(0.002)
            Gate.waiting -= 1
        return "", 1.0, True, {}


@pytest.fixture
def gate():
    Gate.gate.clear()
    Gate.waiting = 0
    yield Gate
    Gate.gate.set()


async def done(episode):
    await episode.step("go")


# -- groups at the same time


def test_groups_at_the_same_time_draw_different_seeds():
    "A text task without seed gets one for each group: whether groups run one after the other, together, or turn by turn."
    async def main():
        async with EnvPool.local("frozen_lake", 8) as pool:
            async def rollout(episode):
                await episode.step("<action>up</action>")
            together = await asyncio.gather(*(pool.run_group(rollout, size=2) for _ in range(4)))
            later = await pool.run_groups(rollout, [None] * 4, 2)
            seeds = [group.task["seed"] for group in [*together, *later]]
            assert len(set(seeds)) == 8, seeds
            maps = [tuple(step.observation for step in await pool.reset_group(size=2)) for _ in range(4)]
            assert all(len(set(one)) == 1 for one in maps) and len(set(maps)) > 1, "every group of reset_group is the same task"
    asyncio.run(main())


def test_a_curriculum_is_not_asked_when_there_is_no_room():
    class Counts:
        asked = 0
        def next_task(self):
            self.asked += 1
            return self.asked
        def record_result(self, task, achieved, mean):
            self.told = task
    async def main():
        async with EnvPool.local(Gate, 2, curriculum=Counts()) as pool:
            Gate.gate.clear()
            async def waits(episode):
                await episode.step("wait")
            first = asyncio.ensure_future(pool.run_group(waits))
            assert await soon(lambda: Gate.waiting == 2)
            with pytest.raises(PoolExhausted):
                await pool.run_group(done)
            Gate.gate.set()
            await pool.record_group_result(await first)
            assert pool.curriculum.asked == 1 and pool.curriculum.told == 1
    asyncio.run(main())


def test_a_curriculum_gets_back_the_task_that_it_gave():
    "A row of a benchmark, to which the pool adds a seed."
    class Rows:
        told = []
        def next_task(self):
            return {"name": "row"}
        def record_result(self, task, achieved, mean):
            self.told.append(task)
    async def main():
        async with EnvPool.local(Gate, 2, curriculum=Rows()) as pool:
            group = await pool.run_group(done)
            assert group.task == {"name": "row", "seed": 0}
            await pool.record_group_result(group)
            await pool.record_group_result(group.task, group)
            assert pool.curriculum.told == [{"name": "row"}] * 2
    asyncio.run(main())


def test_groups_wait_for_room_and_one_group_says_so(gate):
    "`run_groups` waits while other groups have the sessions; `run_group` raises at once."
    async def main():
        async with EnvPool.local(Gate, 4) as pool:
            async def waits(episode):
                await episode.step("wait")
            first = asyncio.ensure_future(pool.run_group(waits, 1))
            assert await soon(lambda: gate.waiting == 4)
            more = asyncio.ensure_future(pool.run_groups(done, [2, 3], 4))
            await turns_of_the_loop()
            assert not more.done()
            with pytest.raises(PoolExhausted):
                await pool.run_group(done, 4)
            gate.gate.set()
            assert [group.rewards for group in [await first, *await more]] == [[1.0] * 4] * 3
    asyncio.run(main())


def test_groups_that_wait_learn_that_the_pool_is_closed(gate):
    async def main():
        pool = await EnvPool.local(Gate, 2).start()
        async def waits(episode):
            await episode.step("wait")
        first = asyncio.ensure_future(pool.run_group(waits, 1))
        assert await soon(lambda: gate.waiting == 2)
        more = asyncio.ensure_future(pool.run_groups(done, [2]))
        await turns_of_the_loop()
        await pool.close()
        with pytest.raises(PoolClosed):
            await asyncio.wait_for(more, HANG)
        assert (await first).rewards == [None, None]
    asyncio.run(main())


def test_over_provision_means_the_same_in_one_group_and_in_several():
    async def main():
        async with EnvPool.local(ENV, 4) as pool:
            assert len(await pool.run_group(two_steps, 0, over_provision=1)) == 3
            assert [len(group) for group in await pool.run_groups(two_steps, [0, 1], over_provision=1)] == [3, 3]
    asyncio.run(main())


# -- turn by turn


def test_a_group_whose_sessions_were_taken_is_not_stepped():
    "`run_group_step` after another group used the sessions would step in that group's world."
    async def main():
        async with EnvPool.local(ENV, 4) as pool:
            await pool.reset_group(1)
            await pool.run_group(two_steps, 2)
            with pytest.raises(ResetRequired, match="reset_group"):
                await pool.run_group_step([LEFT] * 4)
            stop = asyncio.Event()
            async def waits(episode):
                await episode.step(LEFT)
                await stop.wait()
                await episode.step(LEFT)
            await pool.reset_group(1)
            group = asyncio.ensure_future(pool.run_group(waits, 2))
            assert await soon(lambda: all(s.n == 1 and s.resets == 4 for s in pool.sessions))
            with pytest.raises((ResetRequired, SessionBusy)):
                await pool.run_group_step([LEFT] * 4)
            stop.set()
            assert (await group).rewards == [0.0] * 4
    asyncio.run(main())


# -- send and recv


def test_waiting_is_for_an_event(gate, monkeypatch):
    "Nothing in the pool or its adapters looks at the clock again and again."
    naps, sleep, blocking_sleep = [], asyncio.sleep, time.sleep

    def who():
        name = sys._getframe(2).f_globals.get("__name__", "")
        if name in ("xland_minigrid.pool.pool", "xland_minigrid.interop.pool_vector"):
            naps.append(name)

    async def noted(*arguments):
        who()
        await sleep(*arguments)

    def noted_too(seconds):
        who()
        blocking_sleep(seconds)

    async def main():
        async with EnvPool.local(Gate, 2) as pool:
            monkeypatch.setattr(asyncio, "sleep", noted)
            monkeypatch.setattr(time, "sleep", noted_too)
            pool.async_reset()
            assert len((await pool.recv()).env_id) == 2
            pool.send(["wait", "wait"])
            batch = asyncio.ensure_future(pool.recv())
            assert await soon(lambda: gate.waiting == 2)
            gate.gate.set()
            assert (await batch).reward.tolist() == [1.0, 1.0]
            gate.gate.clear()
            pool.async_reset()
            await pool.recv()
            pool.send(["wait", "wait"])
            threading.Timer(0.05, gate.gate.set).start()
            assert (await asyncio.to_thread(pool.sync.recv)).reward.tolist() == [1.0, 1.0]
            gate.gate.clear()

            async def waits(episode):                        # and run_group, behind one that was cancelled
                await episode.step("wait")
            group = asyncio.ensure_future(pool.run_group(waits, 1))
            assert await soon(lambda: gate.waiting == 2)
            group.cancel()
            await turns_of_the_loop(1)
            after = asyncio.ensure_future(pool.run_group(done, 1))
            with contextlib.suppress(asyncio.CancelledError):
                await group
            gate.gate.set()
            assert (await after).rewards == [1.0, 1.0]
    asyncio.run(main())
    assert not naps


def test_two_recvs_at_once(gate):
    "The second has nothing to wait for: it says so instead of waiting for ever."
    async def main():
        async with EnvPool.local(Gate, 2) as pool:
            pool.async_reset()
            await pool.recv()
            pool.send(["wait", "wait"])
            first = asyncio.ensure_future(pool.recv())
            await turns_of_the_loop(3)
            with pytest.raises(SessionBusy):
                await asyncio.wait_for(pool.recv(), 5)
            first.cancel()                                   # a recv that was cancelled loses nothing
            with pytest.raises(asyncio.CancelledError):
                await first
            gate.gate.set()
            assert len((await pool.recv()).env_id) == 2
    asyncio.run(main())


@pytest.mark.parametrize("where", ["local", "sockets"])
def test_send_means_the_same_here_and_over_sockets(where):
    "What the client can know is refused at once, and nothing is sent."
    async def main():
        with contextlib.ExitStack() as stack:
            pool = EnvPool.local(ENV, 4) if where == "local" else connect([stack.enter_context(LiveServer())], 4)
            async with pool:
                with pytest.raises(ResetRequired):
                    pool.send([LEFT] * 4)
                pool.async_reset()
                await pool.recv()
                for actions in ([0, 1, 2, 6], [0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0], ["left"] * 4, [None] * 4):
                    with pytest.raises(BadRequest):
                        pool.send(actions)
                pool.send([LEFT] * 4)
                assert (await pool.recv()).n.tolist() == [1] * 4
    asyncio.run(main())


# -- impatient callers


@pytest.mark.parametrize("several", [False, True])
def test_a_second_cancel_leaves_no_task(several, monkeypatch):
    "However often a group is cancelled: when it raises, all of its tasks have ended, or were given up after `patience`."
    async def main():
        async with EnvPool.local(ENV, 4) as pool:
            before, going, holds = asyncio.all_tasks(), [], asyncio.Event()

            async def reluctant(episode):
                going.append(episode)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await holds.wait()                       # it tidies up
                    raise
            task = asyncio.ensure_future(pool.run_groups(reluctant, [0, 1], 2) if several else pool.run_group(reluctant, 0))
            assert await soon(lambda: len(going) == 4)
            for _ in range(3):
                task.cancel()
                await turns_of_the_loop(5)
            asyncio.get_running_loop().call_later(0.05, holds.set)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() == before and not pool.roster.taken
            assert (await pool.run_group(two_steps, 1)).rewards == [0.0] * 4
    asyncio.run(main())


def test_batches_after_a_stubborn_coroutine_lost_its_session():
    "The pool has another session in its place, which gets an environment when it is reset."
    async def main():
        async with EnvPool.local(ENV, 2) as pool:
            pool.patience, stepped, let_go = 0.05, asyncio.Event(), asyncio.Event()

            async def stubborn(episode):
                await episode.step(LEFT)
                stepped.set()
                while not let_go.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await let_go.wait()
            try:
                group = asyncio.ensure_future(pool.run_group(stubborn, 0))
                await stepped.wait()
                group.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await group
                pool.async_reset()
                assert (await pool.recv()).n.tolist() == [0, 0]
                pool.send([LEFT, LEFT])
                assert (await pool.recv()).n.tolist() == [1, 1] and pool.stats()["replaced"] >= 1
            finally:
                let_go.set()
                await turns_of_the_loop()
    asyncio.run(main())


def test_settings_of_the_plain_pool_are_those_of_the_pool():
    with EnvPool.local(ENV, 2).sync as pool:
        pool.curriculum = curriculum = object()
        assert pool.pool.curriculum is curriculum


def test_plain_calls_from_many_threads_share_one_loop():
    with EnvPool.local(ENV, 8).sync as pool:
        groups, barrier = [], threading.Barrier(4)

        def play():
            barrier.wait()
            groups.append(pool.run_group(two_steps, 0, size=2).rewards)
        threads = [threading.Thread(target=play) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert groups == [[0.0, 0.0]] * 4 and sum(t.name == "xland-pool-caller" for t in threading.enumerate()) == 1
    assert until(lambda: not [t for t in threading.enumerate() if t.name == "xland-pool-caller"])


def test_plain_calls_cannot_wait_for_their_own_thread():
    "A rollout that calls the plain pool would stop the loop that it runs on."
    with EnvPool.local(ENV, 2).sync as pool:
        async def rollout(episode):
            for call in (pool.close, pool.recv, lambda: pool.reset_group(0)):
                with pytest.raises(WrongThread):
                    call()
            await episode.step(LEFT)
        assert pool.run_group(rollout, 0).rewards == [0.0, 0.0]


# -- several servers


def where(sessions):
    return {session.endpoint for session in sessions}


def test_no_group_spans_two_servers():
    async def main():
        with LiveServer() as one, LiveServer() as two:
            async with connect([one, two], 8, group_size=4) as pool:
                assert len(where(pool.sessions)) == 2
                seen = []
                async def rollout(episode):
                    seen.append((episode.task, episode.session.endpoint))
                    await two_steps(episode)
                groups = await pool.run_groups(rollout, list(range(6)), 4)
                assert all(len({url for task, url in seen if task == i}) == 1 for i in range(6)) and {url for _, url in seen} == {one.url, two.url}
                assert [group.rewards for group in groups] == [[0.0] * 4] * 6
                assert len(await pool.reset_group(3)) == 4 and len(where(s for s in pool.sessions if s.n == 0)) == 1, "reset_group spans two servers"
                with pytest.raises(PoolExhausted, match="one server"):
                    await pool.reset_group(3, 5)
                with pytest.raises(PoolExhausted, match="one server"):
                    await pool.run_group(two_steps, 3, size=5)
    asyncio.run(main())


def test_servers_with_different_environments_are_refused():
    async def main():
        with LiveServer() as one, LiveServer(env="XLand-MiniGrid-R1-13x13") as two:
            with pytest.raises(BadRequest, match="different environments"):
                await connect([one, two], 16, group_size=8).start()
            assert one.freed() and two.freed()
    asyncio.run(main())


def test_more_than_all_servers_have_is_an_error_at_once():
    async def main():
        with LiveServer() as one, LiveServer() as two:
            with pytest.raises(PoolExhausted, match="16 places"):
                await connect([one, two], 24, group_size=8, wait=HANG).start()
            with pytest.raises(PoolExhausted, match="8 places"):
                await connect([one], 9, wait=HANG).start()
            assert one.freed() and two.freed()
    asyncio.run(main())


def test_a_server_dies_and_the_pool_heals():
    "Its episodes have no reward and the others go on; lost sessions move to a server that has room, and back to the one that returns."
    one, two, dead = LiveServer(slots=4), LiveServer(slots=4), []

    async def main():
        async with connect([one, two], 8, group_size=4) as pool:
            async def rollout(episode):
                await episode.step(LEFT)
                if episode.task == 0 and episode.index == 0:
                    victim = {one.url: one, two.url: two}[episode.session.endpoint]
                    await asyncio.to_thread(victim.vanish)
                    dead.append(victim)
                assert await soon(lambda: dead)
                await episode.step(LEFT)
            first, second = await pool.run_groups(rollout, [0, 1], 4)
            assert first.rewards == [None] * 4 and all("SessionLost" in error for error in first.errors.values()) and second.rewards == [0.0] * 4
            left = two if dead[0] is one else one
            groups = await pool.run_groups(two_steps, [0, 1, 2], 4)          # four places are left: one group after the other
            assert [group.rewards for group in groups] == [[0.0] * 4] * 3 and len(where(s for s in pool.sessions if not s.lost)) == 1
            with pytest.raises(ConnectFailed):                               # and none is left
                await asyncio.to_thread(left.vanish)
                await pool.run_group(two_steps, 0)
                await pool.run_group(two_steps, 0)
            with LiveServer(slots=8, port=dead[0].port) as again:            # one comes back, with room for all
                groups = await pool.run_groups(two_steps, [0, 1], 4)
                assert [group.rewards for group in groups] == [[0.0] * 4] * 2 and where(pool.sessions) == {again.url} and again.used == 8
                assert pool.stats()["replaced"] == 8
    asyncio.run(main())


def test_one_lost_session_does_not_move_its_group():
    async def main():
        with LiveServer() as one, LiveServer() as two:
            async with connect([one, two], 8, group_size=4) as pool:
                lost = pool.sessions[1]
                home = lost.endpoint
                server = one if home == one.url else two
                server.io.call(lambda: server.host.release(next(seat for seat in server.host.seats.values() if seat.id == lost.id), "test"))
                groups = await pool.run_groups(two_steps, [0, 1], 4)
                assert sum(reward is None for group in groups for reward in group.rewards) <= 1
                assert [group.rewards for group in await pool.run_groups(two_steps, [0, 1], 4)] == [[0.0] * 4] * 2 and lost.endpoint == home
    asyncio.run(main())


MOVES = ["up", "down", "left", "right"]


def test_three_servers_and_one_is_killed():
    "Three processes, a token of its own each: SIGKILL costs the episodes of one group; the next groups run on the two that remain, or on one that was started again."
    settings = dict(env=None, text=("frozen_lake",), text_slots=4)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_server(**settings)) for _ in range(3)]
        by_url, killed = {server.url: server for server in servers}, []

        async def main():
            async with EnvPool.connect(servers, 12, group_size=4, resume_for=0.05) as pool:
                assert where(pool.sessions) == set(by_url)

                async def rollout(episode):
                    for turn in range(3):
                        if turn == 1 and episode.task["seed"] == 1:
                            if episode.index == 0:
                                killed.append(by_url[episode.session.endpoint])
                                killed[0].kill()
                            assert await soon(lambda: killed and not killed[0].running)
                        if not episode.done:
                            await episode.step(f"<action>{MOVES[episode.index]}</action>")
                groups = await pool.run_groups(rollout, [{"seed": seed} for seed in range(3)], 4)
                assert [[reward is None for reward in group.rewards] for group in groups] == [[False] * 4, [True] * 4, [False] * 4]
                assert not groups[1].advantages().any() and groups[1].rewards == [None] * len(groups[1])
                again = await pool.run_groups(rollout, [{"seed": 0}, {"seed": 2}], 4)
                assert [group.rewards for group in again] == [groups[0].rewards, groups[2].rewards]
                port = int(killed[0].url.rpartition(":")[2])
                stack.enter_context(start_server(**settings, port=port, token=killed[0].token))
                final = await pool.run_groups(rollout, [{"seed": 0}, {"seed": 2}, {"seed": 3}], 4)
                assert [group.valid.all() for group in final] == [True] * 3 and len(where(pool.sessions)) == 3
        asyncio.run(main())


def namespaces() -> bool:
    "Whether this machine lets us make network namespaces and links in them."
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    tried = ["unshare", "--net", "--map-root-user", "sh", "-c", "ip link add x type veth peer name y && ip link add z type bridge && ip link set x master z up"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_three_servers_in_three_network_namespaces(how):
    "One is killed, or its link goes down, in the middle of a group: only its own episodes are lost, as failures of machinery, and two servers go on."
    if not namespaces():
        pytest.skip("this machine allows no network namespaces with a bridge")
    script = Path(__file__).with_name("pool_namespaces.py")
    done = subprocess.run(["unshare", "--net", "--map-root-user", sys.executable, script, how], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and done.stdout.startswith(how), done.stderr[-5000:]


class Rosters(RuleBasedStateMachine):
    "Groups take sessions and give them back, sessions are lost, servers die and come back: no session is in two groups, no group is on two servers, no place is promised twice."
    PLACES = {"a": 4, "b": 4, "c": 6}

    def __init__(self):
        super().__init__()
        self.sessions = [FakeSession("ab"[i // 4]) for i in range(8)]
        self.pool = FakePool(self.sessions, list(self.PLACES))
        self.roster, self.groups, self.begun, self.alive = Roster(self.pool), [], [], set(self.PLACES)

    def room(self):
        "What a survey of the servers says."
        return {url: self.PLACES[url] - sum(s.endpoint == url and not s.lost for s in self.sessions) for url in self.alive}

    @rule(count=st.integers(1, 6), asks=st.booleans())
    def take(self, count, asks):
        room = self.room() if asks else None
        try:
            group = self.roster.pick(count, room)
        except (PoolExhausted, SessionBusy):
            free = [s for s in self.sessions if s not in self.roster.taken and not s._busy.locked()]
            assert all(sum(s.endpoint == url and not s.lost for s in free) < count for url in self.PLACES), "a server had enough"
            return
        assert len(group) == len(set(group)) == count and not any(s._busy.locked() for s in group)
        self.groups.append(group)
        self.begun.append(False)

    @precondition(lambda self: not all(self.begun))
    @rule()
    def begin(self):
        "The lost sessions of a group are replaced where the roster said."
        at = self.begun.index(False)
        self.begun[at] = True
        for s in self.groups[at]:
            if s.lost and (home := self.roster.homes.get(s)) in self.alive:
                assert self.room()[home] > 0, "a place was promised twice"
                s.lost, s.endpoint = False, home

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def give_back(self, data):
        at = data.draw(st.integers(0, len(self.groups) - 1))
        self.roster.give_back(self.groups.pop(at))
        self.begun.pop(at)

    @rule(at=st.integers(0, 7))
    def lose(self, at):
        if all(self.sessions[at] not in group for group in self.groups):
            self.sessions[at].lost = True

    @rule(url=st.sampled_from("abc"))
    def die_or_come_back(self, url):
        self.alive ^= {url}
        for s in self.sessions:
            s.lost = s.lost or url not in self.alive and s.endpoint == url

    @rule(at=st.integers(0, 7))
    def by_hand(self, at):
        s = self.sessions[at]
        if s not in self.roster.taken:
            s._busy.release() if s._busy.locked() else s._busy.acquire()

    @invariant()
    def nothing_is_shared(self):
        held = [s for group in self.groups for s in group]
        assert len(held) == len(set(held)) and self.roster.taken == set(held) and set(self.roster.homes) <= set(held)
        for group, begun in zip(self.groups, self.begun):
            assert not begun or len({s.endpoint for s in group if not s.lost}) <= 1, "a group is on two servers"
        assert all(sum(s.endpoint == url and not s.lost for s in self.sessions) <= n for url, n in self.PLACES.items())


class FakeSession:
    def __init__(self, endpoint):
        self.endpoint, self.lost, self._busy = endpoint, False, threading.Lock()


class FakePool:
    def __init__(self, sessions, urls):
        self.sessions, self.size, self.servers = sessions, len(sessions), Servers(urls, None)

    def _need_open(self):
        pass


TestRosters = Rosters.TestCase
TestRosters.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
