"""What the tests of the pool break things with: a proxy that cuts, swallows and delays, and servers on threads of their own."""
import asyncio
import concurrent.futures
import contextlib
import functools
import os
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

from xland_minigrid.pool import slots
from xland_minigrid.pool.server import EnvServer, ServerConfig, make_host
from xland_minigrid.pool.sessions import Host

HANG = 300.0                                               # seconds after which a test gives up; nothing that works takes so long, however busy the machine is
HOUR = 3600.0


@functools.cache
def _made(name, params, make=slots.make):
    return make(name, **dict(params))


slots.make = lambda name, **params: _made(name, tuple(sorted(params.items())))           # one environment of each kind: its programs are traced once, however many pools and servers hold it


def until(true, every: float = 0.005) -> bool:
    "Wait for something to become true. Returns False only where it never does."
    end = REAL() + HANG
    while not true():
        if REAL() > end:
            return bool(true())
        time.sleep(every)
    return True


async def soon(true, every: float = 0.001) -> bool:
    "Wait as `until` does, without blocking the loop."
    end = REAL() + HANG
    while not true():
        if REAL() > end:
            return bool(true())
        await asyncio.sleep(every)
    return True


REAL = time.monotonic


class Clock:
    """A clock for `time.monotonic`, and so for every event loop: it runs as the real one does, and jumps when it is told to.

    Use it where a deadline is the subject: give a deadline that no machine reaches, and let it pass with `jump`.
    """

    def __init__(self, monkeypatch):
        self.ahead = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: REAL() + self.ahead)

    def jump(self, seconds: float, *loops) -> None:
        "Let so many seconds pass, here and on the given loops of other threads."
        self.ahead += seconds
        for loop in loops:
            loop.call_soon_threadsafe(lambda: None)          # a loop that sleeps looks at the clock again


async def turns_of_the_loop(count: int = 50) -> None:
    "Let everything on this loop that needs no more than a few turns come to its end."
    for _ in range(count):
        await asyncio.sleep(0)


def sockets() -> set[str]:
    "The sockets that this process holds."
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("socket:"):
                found.add(what)
    return found


def threads() -> set[threading.Thread]:
    "The threads that run, without those that were told to end and need a moment."
    return {thread for thread in threading.enumerate() if thread.is_alive()}


class Loop:
    "An event loop on a thread."

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG)

    def call(self, function, *arguments):
        "Run a plain function there and return what it returns."
        async def here():
            return function(*arguments)
        return self.run(here())

    def end(self) -> None:
        async def cancel():
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(HANG)
        if not self.thread.is_alive():
            self.loop.close()


class LiveServer:
    """An `EnvServer` of this process on its own loop; `live` is how many sessions it holds, `used` how many places.

    Its sessions outlive their connection by an hour and silence by ten, so none ends by accident on a busy machine. `later` lets hours pass at once.
    """
    GRACE, IDLE = HOUR, 10 * HOUR

    def __init__(self, backends: dict | None = None, **settings):
        config = ServerConfig(**{"slots": 8, "token": "a-token-for-tests", "grace": 0.08, "ping": HOUR, **settings})    # a short grace: the server then looks often
        self.io = Loop("test-server")
        self.server = EnvServer(config, host=make_host(config) if backends is None else Host(backends))
        self.host, self.token, self.stopped = self.server.host, config.token, False
        self.host.grace, self.host.idle = self.GRACE, self.IDLE
        self.io.run(self.server.start())
        self.url = self.server.url
        self.port = urlsplit(self.url).port

    @property
    def live(self) -> int:
        return len(self.host.seats)

    @property
    def used(self) -> int:
        return sum(backend.live for backend in self.host.backends.values())

    @property
    def counts(self) -> dict:
        return dict(self.host.counts)

    @property
    def detached(self) -> int:
        "How many sessions have no connection."
        return sum(not seat.attached for seat in list(self.host.seats.values()))

    def later(self, seconds: float) -> None:
        "Let time pass for the sessions: each was last heard of so many seconds earlier."
        def age():
            for seat in self.host.seats.values():
                seat.active -= seconds
        self.io.call(age)

    def forget(self, count: int | None = None) -> None:
        "Wait until so many sessions have lost their connection (None: all that are left), then let the grace pass that they have."
        assert until(lambda: self.detached == (self.live if count is None else count)), f"{self.detached} sessions have lost their connection"
        self.later(self.GRACE + 1)

    def ping(self, times: int) -> None:
        "Ping every connection so often, and wait for the answers. The calling thread does nothing else meanwhile."
        async def ping():
            for connection in list(self.server._connections) * times:
                await (await connection.ping())
        self.io.run(ping())

    def freed(self) -> bool:
        "Whether every place becomes free."
        return until(lambda: self.live == 0 and self.used == 0)

    def stop(self, drain: float = 0.0) -> None:
        if not self.stopped:
            self.stopped = True
            try:
                self.io.run(self.server.stop(drain))
            finally:
                self.io.end()

    def vanish(self) -> None:
        "End as a crash would: the listening socket and all connections go, and nobody says goodbye."
        def cut():
            self.server._reaper.cancel()
            server, self.server._server = self.server._server, None
            server.server.close()
            for connection in list(server.connections):
                connection.transport.abort()
        self.stopped = True
        self.io.call(cut)
        self.io.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class _Pair:
    "One connection through the proxy."

    def __init__(self, proxy, number):
        self.proxy, self.number, self.ends, self.over = proxy, number, [], False

    def drop(self, reset: bool) -> None:
        if self.over:
            return
        self.over = True
        self.proxy.pairs.discard(self)
        for writer in self.ends:
            if reset:
                with contextlib.suppress(OSError, AttributeError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()                               # what was written goes out, then the end


class FaultProxy:
    """A TCP proxy to a server, with faults to switch on from any thread. Directions: `up` to the server, `down` to the client.

    cut(up=k) or cut(down=k): after k more bytes in that direction every connection that reaches the limit ends; one fault, then it is over. `reset=True` ends with RST.
    cut_next_reply(): the next bytes from the server are lost, and the connection with them. blackhole: nothing passes any more, and nobody is told.
    delay: seconds that bytes wait. refuse: new connections end at once. abort_all(): all connections end now.
    """

    def __init__(self, url: str):
        at = urlsplit(url)
        self.target, self.pairs, self.io = (at.hostname, at.port), set(), Loop("fault-proxy")
        self.limit, self.reset, self.cuts, self.connections = {}, False, 0, 0
        self.blackhole, self.refuse, self.delay = False, False, 0.0
        self.passed = {"up": 0, "down": 0}
        self.server = self.io.run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}"

    # -- faults

    def cut(self, *, up: int | None = None, down: int | None = None, reset: bool = False) -> None:
        def arm():
            self.limit = {way: k for way, k in (("up", up), ("down", down)) if k is not None}
            self.reset = reset
        self.io.call(arm)

    def cut_next_reply(self, reset: bool = False) -> None:
        self.cut(down=0, reset=reset)

    def abort_all(self, reset: bool = True) -> int:
        def now():
            pairs = list(self.pairs)
            for pair in pairs:
                pair.drop(reset)
            self.cuts += len(pairs)
            return len(pairs)
        return self.io.call(now)

    def abort_some(self, numbers, reset: bool = True) -> int:
        "End those living connections whose place among all living ones is in `numbers`."
        def now():
            pairs = sorted(self.pairs, key=lambda pair: pair.number)
            chosen = [pair for at, pair in enumerate(pairs) if at in numbers]
            for pair in chosen:
                pair.drop(reset)
            self.cuts += len(chosen)
            return len(chosen)
        return self.io.call(now)

    # -- work

    async def _accept(self, reader, writer) -> None:
        self.connections += 1
        pair = _Pair(self, self.connections)
        pair.ends.append(writer)
        self.pairs.add(pair)
        if self.refuse:
            return pair.drop(True)
        if self.blackhole:
            return                                           # accepted, and never a word
        try:
            other_reader, other = await asyncio.open_connection(*self.target)
        except OSError:
            return pair.drop(True)
        pair.ends.append(other)
        if pair.over:
            other.transport.abort()
            return
        for each in (writer, other):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(self._pump("up", reader, other, pair), self._pump("down", other_reader, writer, pair))

    async def _pump(self, way: str, reader, writer, pair: _Pair) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                while self.blackhole:
                    await asyncio.sleep(0.02)
                if pair.over:
                    return
                left = self.limit.get(way)
                if left is not None and left <= len(data):
                    self.limit.pop(way)
                    writer.write(data[:left])
                    self.passed[way] += left
                    self.cuts += 1
                    if not self.reset:                       # the bytes before the cut do arrive
                        with contextlib.suppress(OSError):
                            await writer.drain()
                    return pair.drop(self.reset)
                if left is not None:
                    self.limit[way] = left - len(data)
                self.passed[way] += len(data)
                writer.write(data)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if not pair.over and not self.blackhole:
                pair.drop(False)

    def close(self) -> None:
        self.abort_all()                                     # first, lest a black hole lets go what it swallowed
        self.blackhole = False
        async def end():
            self.server.close()
            await asyncio.sleep(0)
        self.io.run(end())
        self.io.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
