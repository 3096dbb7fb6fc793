"""A pool as a Gymnasium vector environment, compared with Gymnasium's own around single worlds."""
import threading

import numpy as np
import pytest
from pool_faults import until

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils import env_checker
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from xland_minigrid.interop.pool_vector import PoolVectorEnv, spaces_of
from xland_minigrid.pool.errors import BadRequest, EnvFault, PoolClosed, SessionBusy, SessionLost
from xland_minigrid.pool.pool import EnvPool
from xland_minigrid.pool.server import start_server

WORLD, STEPS = "XLand-MiniGrid-R1-9x9", 7
GOAL = {"goal": [0, 0, 0, 0, 0], "rules": [[0] * 7], "init_tiles": [[0, 0]]}


def pool(n=3, env="MiniGrid-Empty-6x6", **more):
    return EnvPool.local(env, slots=n, **{"max_steps": STEPS, **more})


class One(gymnasium.Env):
    "One world of a pool as a plain environment, with the stream of seeds that the vector environment promises."
    def __init__(self, pool, number):
        self.pool, self.session, self.stream = pool, pool.sessions[number], None
        self.observation_space, self.action_space = spaces_of(self.session)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.stream = np.random.default_rng(seed)
        seed = int(self.stream.integers(2**32)) if seed is None else seed
        return self.pool.sync.reset(self.session, seed).observation.copy(), {"seed": seed}

    def step(self, action):
        s = self.pool.sync.step(self.session, int(action))
        terminated = s.done and s.info.get("terminated", True)
        return s.observation.copy(), s.reward, terminated, s.done and not terminated, {}


@pytest.fixture(scope="module")
def two():
    "Two pools of three, open for all tests of this file."
    with pool(3).sync as a, pool(3).sync as b:
        yield a.pool, b.pool


def actions_to_end(rng, n):
    "Actions that reach the goal of an empty room now and then: forward, mostly."
    return rng.choice([0, 0, 0, 1, 2], n)


@pytest.fixture(scope="module")
def server():
    with start_server(env="MiniGrid-Empty-6x6", slots=6, params={"max_steps": STEPS}, uvloop="off") as server:
        yield server


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_as_gymnasiums_own_around_single_worlds(mode, two):
    ours, theirs = PoolVectorEnv(two[0], autoreset_mode=mode), SyncVectorEnv([lambda i=i: One(two[1], i) for i in range(3)], autoreset_mode=mode)
    rng, ends = np.random.default_rng(1), 0
    try:
        (a, i), (b, j) = ours.reset(seed=[5, 6, 5]), theirs.reset(seed=[5, 6, 5])
        assert (a == b).all() and (i["seed"] == j["seed"]).all()
        for t in range(60):
            actions = actions_to_end(rng, 3)
            (*mine, i), (*other, j) = ours.step(actions), theirs.step(actions)
            for x, y in zip(mine, other, strict=True):
                assert (x == y).all(), t
            done = mine[2] | mine[3]
            ends += done.sum()
            if "seed" in j:
                assert (i["_seed"] == j["_seed"]).all() and (i["seed"][i["_seed"]] == j["seed"][j["_seed"]]).all()
            if mode is AutoresetMode.SAME_STEP and done.any():
                assert (i["_final_obs"] == j["_final_obs"]).all()
                assert all((x == y).all() for x, y in zip(i["final_obs"], j["final_obs"]) if y is not None)
            if mode is AutoresetMode.DISABLED and done.any():
                with pytest.raises(ResetNeeded, match="reset_mask"):
                    ours.step(actions)
                (a, i), (b, j) = ours.reset(options={"reset_mask": done}), theirs.reset(options={"reset_mask": done.copy()})
                assert (a == b).all() and (i["_seed"] == done).all()
        assert ends >= 10
    finally:
        ours.close()
        theirs.close()


def test_the_same_on_a_server(server, two):
    for mode in AutoresetMode:
        far, near = PoolVectorEnv(EnvPool.connect(server, size=3), autoreset_mode=mode), PoolVectorEnv(two[0], autoreset_mode=mode)
        rng = np.random.default_rng(2)
        assert far.observation_space == near.observation_space and far.action_space == near.action_space
        assert (far.reset(seed=9)[0] == near.reset(seed=9)[0]).all()
        for _ in range(20):
            actions = actions_to_end(rng, 3)
            assert all((x == y).all() for x, y in zip(near.step(actions)[:4], far.step(actions)[:4]))
            if mode is AutoresetMode.DISABLED and near._ended.any():
                mask = near._ended.copy()
                assert (far.reset(options={"reset_mask": mask})[0] == near.reset(options={"reset_mask": mask})[0]).all()
        far.close(), near.close()
    assert until(lambda: server.stats()["live"] == 0)


def test_each_ended_trial_needs_its_own_reset(two):
    venv = PoolVectorEnv(two[0], autoreset_mode=AutoresetMode.DISABLED)
    venv.reset(seed=0)
    for _ in range(STEPS):
        *_, truncated, _ = venv.step([1, 1, 1])
    assert truncated.all()
    last, _ = venv.reset(options={"reset_mask": np.array([True, False, True])})
    with pytest.raises(ResetNeeded, match=r"\[1\]"):
        venv.step([1, 1, 1])
    seen, info = venv.reset(seed=[None, 5, None], options={"reset_mask": np.array([False, True, False])})
    assert (seen[0] == last[0]).all() and (seen[2] == last[2]).all() and info["seed"][1] == 5 and info["_seed"].tolist() == [False, True, False]
    venv.step([1, 1, 1])


@pytest.mark.slow
def test_a_trial_depends_on_its_own_seeds_only():
    "Whatever the others do, and however many they are."
    def trials(n, others):
        venv, rng, seen = PoolVectorEnv(pool(n)), np.random.default_rng(3), []
        venv.reset(seed=[4] + [others + i for i in range(n - 1)])
        for t in range(25):
            obs, reward, terminated, truncated, _ = venv.step([[0, 1, 0, 0, 2][t % 5], *rng.integers(0, 6, n - 1)])
            seen.append((obs[0].tolist(), float(reward[0]), bool(terminated[0]), bool(truncated[0])))
        venv.close()
        return seen
    assert trials(1, 0) == trials(3, 50) == trials(4, 90)


def test_gymnasiums_checks(two):
    venv = PoolVectorEnv(two[0])
    for check in (env_checker.check_reset_return_type, env_checker.check_reset_options, env_checker.check_reset_seed_determinism, env_checker.check_seed_deprecation):
        check(venv)
    env_checker.check_space_limit(venv.observation_space, "observation")
    a, _ = venv.reset(seed=1)
    b, _ = venv.reset()
    c, _ = venv.reset(seed=1)
    d, _ = venv.reset()
    assert env_checker.data_equivalence(a, c, exact=True) and env_checker.data_equivalence(b, d, exact=True)
    for _ in range(20):
        obs, reward, terminated, truncated, info = venv.step(venv.action_space.sample())
        assert obs in venv.observation_space and reward.dtype == np.float32 and reward.shape == terminated.shape == truncated.shape == (3,) and terminated.dtype == truncated.dtype == bool
        assert not (terminated & truncated).any() and obs.flags.writeable
    venv.close()
    for mode in ("SameStep", "NextStep"):                        # as `check_returned_data_not_reused`, which is for single environments
        venv = PoolVectorEnv(two[0], autoreset_mode=mode)
        returned = [venv.reset(seed=1)[0]]
        kept = [returned[0].copy()]
        for _ in range(STEPS + 2):
            returned.append(venv.step([0, 1, 2])[0])
            kept.append(returned[-1].copy())
        assert all((a == b).all() for a, b in zip(returned, kept)) and not any(np.shares_memory(a, b) for i, a in enumerate(returned) for b in returned[:i])
        venv.close()


def test_gymnasiums_wrappers_count_episodes(two):
    from gymnasium.wrappers.vector import RecordEpisodeStatistics
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        venv = RecordEpisodeStatistics(PoolVectorEnv(two[0], autoreset_mode=mode))
        venv.reset(seed=0)
        for _ in range(STEPS):
            *_, info = venv.step(np.array([1, 1, 1]))
        assert info["episode"]["l"].tolist() == [STEPS] * 3
        venv.close()


@pytest.mark.slow
def test_tasks_of_a_benchmark():
    from xland_minigrid.benchmarks import generate_benchmark
    benchmark = generate_benchmark("trivial", n=5, seed=0, workers=1)
    with EnvPool.local(WORLD, slots=3, benchmark=benchmark, max_steps=4).sync as p:
        venv = PoolVectorEnv(p, task=[{"ruleset_id": 1}, {"ruleset_id": 1}, None])
        obs, info = venv.reset(seed=[3, 3, 3])
        assert (obs[0] == obs[1]).all() and (obs[0] == p.reset(p.sessions[0], {"seed": 3, "ruleset_id": 1}).observation).all()
        assert venv.single_observation_space.shape == (5, 5, 2) and venv.single_observation_space.high.max() == 15
        with pytest.raises(BadRequest):
            PoolVectorEnv(p, task={"ruleset_id": 99}).reset(seed=0)
        venv.close()
        assert p.sessions[0].n == 0                              # the pool is still there


# -- failures, misuse

def test_misuse_is_typed_and_changes_nothing():
    venv, twin = PoolVectorEnv(pool()), PoolVectorEnv(pool())
    with pytest.raises(ResetNeeded):
        venv.step([0, 0, 0])
    with pytest.raises(ResetNeeded):
        venv.reset(options={"reset_mask": np.array([True, False, True])})
    assert (venv.reset(seed=3)[0] == twin.reset(seed=3)[0]).all()
    for wrong, kind in (([0], ValueError), ([0, 6, 0], ValueError), ([0, 0, -1], ValueError), ([0.0, 1.0, 0.0], TypeError), ([True, False, True], TypeError), (None, ValueError), ([[0], [0], [0]], ValueError)):
        with pytest.raises(kind):
            venv.step(wrong)
    for wrong in ([1], [1, 2, 3, 4], [1, 1, -1], [1, 1, 2**32], -4, 2**32):
        with pytest.raises(ValueError):
            venv.reset(seed=wrong)
    with pytest.raises(TypeError):
        venv.reset(seed=1.5)
    for options in ({"mask": 1}, {"reset_mask": [1, 0, 1]}, {"reset_mask": np.zeros(3, bool)}, {"reset_mask": np.ones(4, bool)}):
        with pytest.raises(ValueError):
            venv.reset(options=options)
    assert all((x == y).all() for x, y in zip(venv.step([0, 1, 2])[:4], twin.step([0, 1, 2])[:4]))
    venv.close()
    venv.close()
    for late in (lambda: venv.step([0, 0, 0]), venv.reset):
        with pytest.raises(ClosedEnvironmentError):
            late()
    twin.close()


def test_what_cannot_be_shown_is_refused():
    for wrong, kind in ((lambda: PoolVectorEnv("pool"), TypeError), (lambda: PoolVectorEnv(EnvPool.local("frozen_lake", slots=1)), TypeError), (lambda: PoolVectorEnv(pool(), autoreset_mode="never"), ValueError),
                        (lambda: PoolVectorEnv(pool(1, autoreset=True)), ValueError), (lambda: PoolVectorEnv(pool(), task=[{}]), ValueError), (lambda: PoolVectorEnv(pool(), task={"seed": 1}), TypeError)):
        before = threading.active_count()
        with pytest.raises(kind):
            wrong()
        assert threading.active_count() == before                 # a pool that was opened for nothing is closed
    closed = pool()
    with closed.sync:
        pass
    with pytest.raises(PoolClosed):
        PoolVectorEnv(closed)


def test_a_failure_is_raised_and_no_reward(server):
    with EnvPool.connect(server, size=2).sync as p:
        venv = PoolVectorEnv(p)
        venv.reset(seed=0)
        p.sessions[1].lost = True
        with pytest.raises(SessionLost) as caught:
            venv.step([1, 1])
        assert caught.value.detail["env_id"] == 1
        with pytest.raises(ResetNeeded):
            venv.step([1, 1])
        with pytest.raises(ResetNeeded):
            venv.reset(options={"reset_mask": np.array([False, True])})
        venv.reset(seed=0)                                        # a new environment in its place
        assert venv.step([1, 1])[1].tolist() == [0.0, 0.0] and p.stats()["replaced"] == 1


def test_a_failed_tick_is_raised():
    with pool().sync as p:
        venv = PoolVectorEnv(p)
        venv.reset(seed=0)
        p._slots.epoch += 1                                       # as after a program that failed
        with pytest.raises(EnvFault):
            venv.step([1, 1, 1])
        with pytest.raises(ResetNeeded):
            venv.step([1, 1, 1])
        venv.reset()
        venv.step([1, 1, 1])


def test_a_session_that_somebody_else_uses(server):
    with EnvPool.connect(server, size=3).sync as p:
        venv = PoolVectorEnv(p)
        venv.reset(seed=0)
        p.sessions[2]._claim()                                    # as a call of somebody else that is under way
        with pytest.raises(SessionBusy):
            venv.step([1, 1, 1])
        p.sessions[2]._busy.release()
        assert not p._batcher.sent                                        # the two that were sent have been taken in
        with pytest.raises(ResetNeeded):
            venv.step([1, 1, 1])
        venv.reset(seed=0)
        venv.step([1, 1, 1])
        venv.close()
        assert not p._batcher.sent and p.reset_group(3)                   # in order for its next user
