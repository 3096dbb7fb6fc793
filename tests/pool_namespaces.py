"""Three servers, each in a network namespace of its own, joined by a bridge: what a pool sees when one of them dies or is cut off.

Run it in a namespace that may be changed: `unshare --net --map-root-user python tests/pool_namespaces.py killed`. All links vanish with it.
"""
import asyncio
import contextlib
import json
import os
import subprocess
import sys

from pool_faults import HANG, soon

from xland_minigrid.pool import EnvPool
from xland_minigrid.pool.server import ServerProcess

MOVES, TOKEN = ["up", "down", "left", "right"], "a-token-for-tests"


def ip(*words, inside=None):
    subprocess.run([*(["nsenter", "--target", str(inside), "--net"] if inside else []), "ip", *words], check=True)


def start(number: int) -> ServerProcess:
    "A server behind a veth pair, at 10.77.0.10 and on. It waits for its address before it starts."
    address, serve = f"10.77.0.{10 + number}", [sys.executable, "-m", "xland_minigrid", "serve", "--env", "none", "--text", "frozen_lake", "--text-slots", "4", "--announce", "--with-parent"]
    process = subprocess.Popen(["unshare", "--net", "sh", "-c", 'echo && read go && exec "$@"', "serve", *serve, "--host", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "XLAND_POOL_TOKEN": TOKEN, "JAX_PLATFORMS": "cpu"})
    process.stdout.readline()                                # it is in its namespace
    ip("link", "add", f"hub{number}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    ip("link", "set", f"hub{number}", "master", "bridge", "up")
    ip("addr", "add", f"{address}/24", "dev", "eth0", inside=process.pid)
    ip("link", "set", "eth0", "up", inside=process.pid)
    process.stdin.write(b"\n")
    process.stdin.flush()
    return ServerProcess(process, json.loads(process.stdout.readline())["url"], TOKEN)


async def rewards_without_sockets(rollout, tasks):
    async with EnvPool.local("frozen_lake", 4) as pool:
        return [(await pool.run_group(rollout, task)).rewards for task in tasks]


async def main(servers, how):
    by_url, tasks, lost = {server.url: server for server in servers}, [{"seed": seed} for seed in range(3)], []

    def end(server):
        server.kill() if how == "killed" else ip("link", "set", f"hub{servers.index(server)}", "down")
        lost.append(server)

    async def steady(episode):
        for _ in range(3):
            if not episode.done:
                await episode.step(f"<action>{MOVES[episode.index]}</action>")

    async def rollout(episode):
        await episode.step(f"<action>{MOVES[episode.index]}</action>")
        if episode.task["seed"] == 1 and episode.index == 0:
            end(by_url[episode.session.endpoint])
        assert await soon(lambda: lost)                      # the others are in the middle of their episodes, too
        for _ in range(2):
            if not episode.done:
                await episode.step(f"<action>{MOVES[episode.index]}</action>")

    expected = await rewards_without_sockets(steady, tasks)
    async with EnvPool.connect(servers, 12, group_size=4, resume_for=1.0, connect_timeout=1.0, ping=0.5, timeout=HANG) as pool:
        assert {session.endpoint for session in pool.sessions} == set(by_url)
        groups = await pool.run_groups(rollout, tasks, 4)
        assert [group.rewards for group in groups] == [expected[0], [None] * 4, expected[2]], [group.errors for group in groups]
        assert not groups[1].valid.any() and not groups[1].advantages().any() and all("SessionLost" in error for error in groups[1].errors.values()), groups[1].errors
        assert not groups[0].errors and not groups[2].errors and pool.stats()["unscorable"] == 4
        again = await pool.run_groups(steady, tasks, 4)      # two servers are left, and play all three groups
        assert [group.rewards for group in again] == expected
        assert {session.endpoint for session in pool.sessions if not session.lost} == set(by_url) - {lost[0].url}
        print(how, json.dumps({"rewards": [group.rewards for group in groups], "errors": groups[1].errors}))


if __name__ == "__main__":
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", "10.77.0.1/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")
    with contextlib.ExitStack() as stack:
        asyncio.run(main([stack.enter_context(start(number)) for number in range(3)], sys.argv[1]))
