"""What the pool is attacked with: WebSocket frames written by hand, a bystander who only wants to step, and a page that tells what became of both."""
import asyncio
import base64
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
from pool_faults import HANG, HOUR, until
from worlds import compiled

from xland_minigrid.pool import EnvPool, start_server
from xland_minigrid.pool.errors import PoolError

ENV, TOKEN, LENGTH = "XLand-MiniGrid-R1-9x9", "a-token-for-attacks", 200
SCALE = int(os.environ.get("XLAND_ATTACK", 10_000))          # frames of a fuzzer; 1,000,000 is the long form, in which everything is repeated more often and waits a minute where it waits
LONG = SCALE >= 1_000_000
MANY = 1000 if LONG else 100                                 # how often a round repeats its attack
PAUSE = 60.0 if LONG else 2.0                                # seconds that somebody is away
MB = 1 << 20
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10

# In the server's process: an environment that waits until a file exists and then says much, and a wall clock that runs `jump` seconds ahead.
PLUGIN = """
import asyncio, os, time
from xland_minigrid.pool.episodes import Env, register_env

folder = {folder!r}

class Patient(Env):
    async def reset(self, config):
        return "begin", {{}}, ""

    async def step(self, messages):
        order, _, size = messages[-1]["content"].partition(" ")
        while order == "wait" and not os.path.exists(os.path.join(folder, "gate")):
            await asyncio.sleep(0.01)
        return "x" * int(size or 1), 0.0, False, {{}}

    async def close(self):
        pass

register_env("patient", Patient)

def ahead():
    try:
        return float(open(os.path.join(folder, "jump")).read() or 0)
    except OSError:
        return 0.0

real, real_ns = time.time, time.time_ns
time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + int(ahead() * 1e9)
"""


class Target:
    "A server in a process of its own, and what can be seen of it from outside. Once it is warm it gets a gigabyte more at most: a hole in its memory ends the server, not the machine."

    def __init__(self, folder: Path, **settings):
        self.folder = folder
        (folder / "plugin.py").write_text(PLUGIN.format(folder=str(folder)))
        self.process = start_server(env=ENV, text=("patient",), plugin=str(folder / "plugin.py"), token=TOKEN, log=folder / "log", timeout=HANG, **{"slots": 16, "grace": HOUR, "idle": 10 * HOUR, "ping": HOUR, **settings})
        self.pid, self.url, self.port = self.process.pid, self.process.url, urlsplit(self.process.url).port
        most = int(self._status("VmSize")) * 1024 + 1024 * MB
        resource.prlimit(self.pid, resource.RLIMIT_AS, (most, most))

    def _status(self, name: str) -> str:
        return next(line.split()[1] for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if line.startswith(name + ":"))

    @property
    def memory(self) -> int:
        "Resident bytes."
        return int(self._status("VmRSS")) * 1024

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stats(self) -> dict:
        return json.loads(self.process.get("/stats", timeout=HANG))

    def settled(self, live: int, files: int) -> None:
        "Wait until no more sessions and sockets are left than there were."
        assert until(lambda: self.files <= files and self.stats()["live"] <= live, 0.02), f"{self.files - files} files and {self.stats()['live'] - live} sessions are left: {self.stats()}"

    def say(self, name: str, text: str = "") -> None:
        "Tell the plug-in something: it reads the file of this name."
        (self.folder / "new").write_text(text)
        os.replace(self.folder / "new", self.folder / name)

    def forget(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def stop(self) -> int:
        return self.process.stop(HANG)


def frame(payload: bytes | str = b"", kind: int = TEXT, *, fin: bool = True, reserved: int = 0, masked: bool = True, length: int | None = None, wide: int | None = None) -> bytes:
    "A frame of a client, its mask zero. `length`: what its head says; `wide`: how many bytes say so."
    payload = payload.encode() if isinstance(payload, str) else payload
    n = len(payload) if length is None else length
    wide = (0 if n < 126 else 2 if n < 1 << 16 else 8) if wide is None else wide
    head = bytes([fin << 7 | reserved << 4 | kind, masked << 7 | {0: n, 2: 126, 8: 127}[wide]])
    return head + (n.to_bytes(wide, "big") if wide else b"") + bytes(4 * masked) + payload


def request(number: int, op: str, value=None) -> bytes:
    return frame(json.dumps({"id": number, "op": op, "value": value}))


class Wire:
    """A connection by hand, after the server's answer to its handshake: `status`, `headers`, `body`, and for 101 `hello`. Waits for ever, and no longer than `HANG`.

    resume: a `Wire` whose session this one takes over. buffer: bytes that its socket takes, if nobody reads.
    """

    def __init__(self, target, path: str = "/session", headers: dict | None = None, *, resume: "Wire | None" = None, buffer: int | None = None, speak: bool = True):
        self.sock, self.data, self.hello, self.status = socket.socket(), bytearray(), None, None
        if buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.sock.settimeout(HANG)
        self.sock.connect(("127.0.0.1", target.port))
        headers = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
        if resume:
            headers = {**headers, "X-Pool-Session": resume.hello["session"], "X-Pool-Resume": resume.hello["resume"]}
        self.handshake = handshake(target.port, path, headers)
        if speak:
            self.send(self.handshake)
            self._answer()
            if self.status == 101 and path.startswith("/session"):
                self.hello = json.loads(self.read()[1])

    def _answer(self) -> None:
        while b"\r\n\r\n" not in self.data and self._more():
            pass
        head, _, rest = bytes(self.data).partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.data = bytearray(rest)
        self.status = int(lines[0].split()[1]) if lines[0] else None
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if self.status != 101:
            while self._more():
                pass
            self.body = bytes(self.data)

    def _more(self) -> bool:
        try:
            more = self.sock.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:
            return False
        self.data += more
        return bool(more)

    def send(self, data: bytes) -> bool:
        "Whether the other side was still there."
        try:
            self.sock.sendall(data)
        except TimeoutError:
            raise
        except OSError:
            return False
        return True

    def _take(self, count: int) -> bytes | None:
        while len(self.data) < count:
            if not self._more():
                return None
        taken = bytes(self.data[:count])
        del self.data[:count]
        return taken

    def read(self) -> tuple[int, bytes]:
        "Kind and content of the next frame; pings are answered. For the end `(CLOSE, code)`, code b'' where there was none."
        while True:
            head = self._take(2)
            if head is None:
                return CLOSE, b""
            n = head[1] & 127
            if n > 125:
                said = self._take(2 if n == 126 else 8)
                n = int.from_bytes(said or b"", "big")
            content = self._take(n)
            if content is None:
                return CLOSE, b""
            if head[0] & 15 != PING:
                return head[0] & 15, content
            self.send(frame(content, PONG))

    def reply(self) -> dict:
        kind, content = self.read()
        assert kind == TEXT, f"the connection ended ({code_of(content)}) where a reply was due"
        return json.loads(content)

    def ask(self, number: int, op: str, value=None) -> dict:
        self.send(request(number, op, value))
        return self.reply()

    def fate(self) -> int | None:
        "Read to the end: the code with which the server closes, None where it just ends."
        while True:
            kind, content = self.read()
            if kind == CLOSE:
                self.close()
                return code_of(content)

    def free(self) -> None:
        "Give the place back, and wait until the server has heard it."
        self.send(request(1 << 40, "close"))
        self.fate()

    def close(self, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def handshake(port: int, path: str, headers: dict) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: " + base64.b64encode(bytes(16)).decode(),
             "Sec-WebSocket-Version: 13", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def code_of(content: bytes) -> int | None:
    return int.from_bytes(content[:2], "big") if len(content) >= 2 else None


@cache
def _play():
    "Many episodes of `LENGTH` steps, in this process: `play(params, seeds (b,), actions (b, LENGTH))` gives observations `(b, LENGTH + 1, ...)`, rewards and ends `(b, LENGTH)`."
    env, *_ = compiled(ENV)

    def one(params, seed, actions):
        def step(timestep, action):
            timestep = env.step(params, timestep, action)
            return timestep, (timestep.observation, timestep.reward, timestep.last())
        first = env.reset(params, jax.random.key(seed))
        _, (seen, rewards, over) = jax.lax.scan(step, first, actions)
        return jnp.concatenate([first.observation[None], seen]), rewards, over
    return jax.jit(jax.vmap(one, (None, 0, 0)))


class Episodes:
    "What sessions have to agree with to the bit: episodes of random turns and walks by seed, played without any pool. Row i has a seed and actions of its own."

    def __init__(self, seeds):
        self.seeds = np.asarray(seeds, np.uint32)
        self.actions = np.stack([np.random.default_rng(seed).integers(3, size=LENGTH) for seed in self.seeds]).astype(np.int32)
        self.seen, self.rewards, self.over = map(np.asarray, _play()(compiled(ENV)[1], self.seeds, self.actions))

    def check(self, row: int, n: int, step) -> None:
        assert step.n == n, f"the session is at step {step.n} where {n} were done"
        assert step.observation.tobytes() == self.seen[row, n].tobytes(), f"step {n} of seed {self.seeds[row]} is another one"
        if n:
            assert (step.reward, step.done) == (self.rewards[row, n - 1], self.over[row, n - 1])


class Bystander:
    """A session that steps all the time on a thread of its own, and compares everything with the same episodes played here. `steps` and `resets` count.

    loses: the server ends sessions so soon that a busy machine may lose one: it then opens another.
    """

    def __init__(self, target, loses: bool = False):
        self.target, self.loses, self.steps, self.resets, self.error, self._over = target, loses, 0, 0, None, False
        self.episodes = Episodes(range(8))
        self.thread = threading.Thread(target=self._run, name="bystander", daemon=True)
        self.thread.start()
        self.advance(1)

    def _run(self) -> None:
        while not self._over and self.error is None:
            try:
                asyncio.run(self._play())
            except PoolError as error:
                self.error = None if self.loses else error
            except BaseException as error:
                self.error = error

    async def _play(self) -> None:
        async with EnvPool.connect(self.target.url, 1, token=TOKEN, resume_for=HOUR, connect_timeout=HANG, ping=HOUR, timeout=HOUR) as pool:
            session, row = pool.sessions[0], 0
            while not self._over:
                self.episodes.check(row, 0, await session.reset(int(self.episodes.seeds[row])))
                self.resets += 1
                for n, action in enumerate(self.episodes.actions[row].tolist(), 1):
                    self.episodes.check(row, n, await session.step(action))
                    self.steps += 1
                    if self._over or self.episodes.over[row, n - 1]:
                        break
                    await asyncio.sleep(0.001)
                row = (row + 1) % len(self.episodes.seeds)

    def advance(self, steps: int = 20) -> None:
        "Wait until it has done so many more steps. Raises what it found."
        goal = self.steps + steps
        moved = until(lambda: self.steps >= goal or self.error is not None)
        if self.error is not None:
            raise AssertionError("the bystander did not get what it should have got") from self.error
        assert moved, f"the bystander stands still at {self.steps} steps"

    def stop(self) -> None:
        self._over = True
        self.thread.join(HANG)
        assert not self.thread.is_alive() and self.error is None, self.error


class Siege:
    "One attack: who else stepped meanwhile, what memory it cost, and a row of the report. `got` says what the attackers got."
    report = []

    def __init__(self, target, bystander, name: str, done: str):
        self.target, self.bystander, self.name, self.done, self.got = target, bystander, name, done, ""

    def __enter__(self):
        self.bystander.advance(1)
        stats = self.target.stats()
        self.live, self.files = stats["live"], self.target.files
        self.steps, self.before, self.grown = self.bystander.steps, self.target.memory, []
        return self

    def meanwhile(self, steps: int = 20) -> None:
        "While the attack goes on: the bystander does so many steps."
        self.bystander.advance(steps)

    def rounds(self, once, most: int = 12, each: int = MB // 4) -> None:
        """Repeat the attack until a round leaves the server's memory as it was.

        A round after the first two may grow by chance; what leaks grows in all of them. Everything the attackers took has to be free again after each.
        """
        last = None
        for turn in range(most):
            once()
            self.target.settled(self.live, self.files)
            now = self.target.memory
            if last is not None:
                self.grown.append(now - last)
            last = now
            if turn >= 2 and self.grown[-1] <= each:
                return
        raise AssertionError(f"every round of {self.name} leaves the server larger: {[f'{grown / 1024:.0f} kB' for grown in self.grown]}")

    def __exit__(self, kind, *_):
        if kind is None:
            if self.bystander.thread.is_alive():
                self.meanwhile()
            self.target.settled(self.live, self.files)
            after = self.target.memory
            self.report.append((self.name, self.done, str(self.got), f"{self.bystander.steps - self.steps:,}", f"{self.before / MB:.1f}", f"{after / MB:.1f}"))


def write_report(path: str, command: str, about: str) -> None:
    "The rows of all attacks as a page."
    head = ("attack", "what was done", "what the client got", "steps of a bystander meanwhile", "memory before (MB)", "after (MB)")
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in (head, ["---"] * len(head), *Siege.report)]
    Path(path).write_text(f"""# The pool under attack

Made by `{command}`.

{about}

Each attack is made on a server in its own process. Meanwhile a bystander steps in a session of the same server. It compares every observation, reward and end, bit for bit, with the same episodes played without a pool.
Memory is the server's resident memory, before the first round of the attack and after the last. Attacks are repeated in rounds, and it is an error if every round leaves the server larger.

""" + "\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def stopped(pid: int):
    "A process that does nothing until the end of the block (SIGSTOP)."
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
