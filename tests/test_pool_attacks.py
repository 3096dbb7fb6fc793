"""The pool under attack: whatever one client does, the others step on, the server's memory stays as it was, and the attacker gets an answer that says what is wrong.

`XLAND_ATTACK=1000000` is the long form; `XLAND_ATTACK_REPORT=FILE` writes what happened as a page.
"""
import asyncio
import base64
import collections
import contextlib
import itertools
import json
import math
import os
import random
import resource
import select
import socket
import subprocess
import sys
import time

import pytest
from attacks import (BINARY, CLOSE, LENGTH, LONG, MANY, MB, PAUSE, PING, PONG, SCALE, TOKEN, Bystander, Episodes, Siege, Target, Wire, frame, handshake, request, stopped, write_report)
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_faults import HANG, HOUR, FaultProxy, Loop, sockets, until

from xland_minigrid.pool import EnvPool
from xland_minigrid.pool.errors import BadRequest, PoolError, SessionLost
from xland_minigrid.pool.sessions import MAX_ID, Reply, read_reply, read_request

pytestmark = [pytest.mark.slow, pytest.mark.newest]

BEARER = {"Authorization": f"Bearer {TOKEN}"}
FIELDS = ["id", "op", "value", "ok", "n", "obs", "reward", "done", "info", "error", "code", "message", "retryable", "detail", "seed", "ruleset", "ruleset_id", "goal", "rules", "init_tiles", "type", "data", "__class__"]


@pytest.fixture(scope="module", autouse=True)
def report():
    yield
    if path := os.environ.get("XLAND_ATTACK_REPORT"):
        write_report(path, f"XLAND_ATTACK={SCALE} XLAND_ATTACK_REPORT={path} python -m pytest -p no:nbval -n 0 -m slow tests/test_pool_attacks.py", os.environ.get("XLAND_ATTACK_ABOUT", ""))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "The server of most attacks. It ends nothing by time; at the end it stops as it should, and its log holds no traceback and no token."
    target = Target(tmp_path_factory.mktemp("server"))
    bystander = Bystander(target)
    target.bystander = bystander
    yield target
    bystander.stop()
    assert target.stop() == 0
    log = (target.folder / "log").read_text()
    assert "Traceback" not in log and TOKEN not in log, log[-3000:]


@pytest.fixture(scope="module")
def brisk(tmp_path_factory):
    "A server that ends connections which do not answer two pings in two seconds, and sessions a second later."
    target = Target(tmp_path_factory.mktemp("brisk"), ping=1.0, grace=1.0)
    yield target
    assert target.stop() == 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    "A server with many places, which keeps sessions for an hour and pings twice a second."
    target = Target(tmp_path_factory.mktemp("wide"), slots=80, ping=0.5)
    yield target
    assert target.stop() == 0


def siege(target, name: str, done: str) -> Siege:
    return Siege(target, target.bystander, name, done)


def told(counts) -> str:
    return ", ".join(f"{what} ({count:,} times)" for what, count in sorted(counts.items(), key=str))


# ---------------------------------------------------------------- before a session: handshakes, tokens, origins, floods


def test_tokens_and_origins(server):
    "Who may not come in takes nothing."
    coded = base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")
    cases = [({}, 401), ({"Authorization": "Bearer"}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": f"Bearer {TOKEN}x"}, 401), ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
             ({"Authorization": f"Basic {TOKEN}"}, 401), ({"Authorization": TOKEN}, 401), ({"Authorization": "Bearer \xff\xfe"}, 401), ({"Authorization": "Bearer " + "x" * 4000}, 401),
             ({"Sec-WebSocket-Protocol": "token.wrong"}, 401), ({"Sec-WebSocket-Protocol": f"token.{coded[:-2]}"}, 401), ({"Sec-WebSocket-Protocol": "token.%%%"}, 401), ({"X-Token": TOKEN}, 401),
             ({**BEARER, "Origin": "http://evil.example"}, 403), ({**BEARER, "Origin": "null"}, 403), ({**BEARER, "Origin": f"http://127.0.0.1:{server.port}"}, 403),
             ({"Sec-WebSocket-Protocol": f"xland-pool, token.{coded}", "Origin": "https://evil.example"}, 403)]
    paths = ["/session", "/ws", "/session?env=patient", f"/session?token={TOKEN}", "/stats", "/metrics"]
    seen = collections.Counter()

    def once():
        for headers, status in cases:
            for path in paths[:4] if status == 403 else paths:
                with Wire(server, path, headers) as wire:
                    assert wire.status == status and TOKEN.encode() not in wire.body, (path, headers, wire.status)
                    seen[wire.status] += 1

    with siege(server, "Missing and wrong tokens, foreign origins", f"{len(cases)} kinds of headers on {len(paths)} addresses") as attack:
        attack.rounds(once)
        attack.got = f"HTTP {told(seen)}, before anything is accepted"


def test_handshakes_that_are_none(server):
    "Cut at every byte, too long, never ending, in another language: no place is taken, nobody waits."
    good, seen = handshake(server.port, "/session", BEARER), collections.Counter()
    strange = {"too many headers": good[:-2] + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n", "a header of a megabyte": good[:-2] + b"X: " + b"y" * MB + b"\r\n\r\n",
               "an address of a megabyte": good.replace(b"/session", b"/" + b"s" * MB), "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), "POST": good.replace(b"GET", b"POST"),
               "a body": good[:-2] + b"Content-Length: 5\r\n\r\nhello", "HTTP/9": good.replace(b"HTTP/1.1", b"HTTP/9"), "zeros": bytes(5000), "version 7": good.replace(b"Version: 13", b"Version: 7"),
               "no key": good.replace(b"Sec-WebSocket-Key", b"X-Key"), "two lengths": good[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "bare newlines": good.replace(b"\r\n", b"\n")}

    def once():
        for cut in range(0, len(good), 1 if LONG else 5):
            wire = Wire(server, speak=False)
            wire.send(good[:cut])
            wire.close(reset=cut % 2 == 0)
        for reset in (True, False):
            wire = Wire(server, speak=False)
            wire.send(good)
            wire.close(reset)                                # gone before the answer
        for name, data in strange.items():
            with Wire(server, speak=False) as wire:
                wire.send(data)
                with contextlib.suppress(OSError):
                    wire.sock.shutdown(socket.SHUT_WR)
                wire._answer()
                assert wire.status is None or 400 <= wire.status < 600, (name, wire.status)
                seen[f"HTTP {wire.status}" if wire.status else "the connection ends"] += 1

    with siege(server, "Broken handshakes", f"cut at every byte, with FIN and RST; {len(strange)} kinds of invalid requests: {', '.join(strange)}") as attack:
        attack.rounds(once)
        attack.got = told(seen)


def test_flood_beyond_the_places(server):
    "All places taken, and many more want one, at once: 503 before the connection is accepted. Those inside notice nothing, and a place that is given back can be had."
    seen = collections.Counter()

    def once():
        inside = []
        while (wire := Wire(server)).status == 101:
            inside.append(wire)
        waiting = [Wire(server, "/ws" if i % 2 else "/session", speak=False) for i in range(MANY)]
        for wire in waiting:
            wire.send(wire.handshake)
        for wire in waiting:
            wire._answer()
            assert wire.status == 503 and float(wire.headers["retry-after"]) > 0
            seen["503 with Retry-After"] += 1
            wire.close()
        assert all(wire.ask(1, "reset", i)["ok"] for i, wire in enumerate(inside)) and len(inside) == 15
        inside[0].free()
        with Wire(server) as wire:
            assert wire.status == 101
            inside[0] = wire
            for wire in inside:
                wire.free()

    with siege(server, "Flood of connections, no place free", f"{MANY} handshakes at once, in each round, when all places are taken") as attack:
        attack.rounds(once)
        attack.got = f"HTTP {told(seen)}; the next one after a place was given back is let in"


def test_flood_beyond_the_files(server):
    "More sockets than the server may open. The bystander steps on, and when the flood is over everybody can come in again."
    limit = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    with siege(server, "Flood of sockets beyond the limit of open files", "300 silent connections where the server may open 100 more") as attack:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (server.files + 100, limit[1]))
        try:
            silent = [Wire(server, speak=False) for _ in range(300)]
            assert until(lambda: server.files >= attack.files + 90 or any(gone(wire) for wire in silent))
            attack.meanwhile(100)
            ended = sum(map(gone, silent))
            for wire in silent:
                wire.close(reset=True)
        finally:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limit)
        with Wire(server) as wire:
            assert wire.status == 101 and wire.ask(1, "reset", 0)["ok"]
            wire.free()
        attack.got = f"{ended} of 300 connections end at once, the others wait; when the flood is over everybody can come in"


def gone(wire) -> bool:
    wire.sock.setblocking(False)
    try:
        return wire.sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        wire.sock.settimeout(HANG)


# ---------------------------------------------------------------- frames


BAD_FRAMES = {
    "text without mask": (frame("{}", masked=False), 1002), **{f"reserved opcode {kind}": (frame("{}", kind), 1002) for kind in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    **{f"reserved bits {bits}": (frame("{}", reserved=bits), 1002) for bits in (1, 2, 4, 7)}, "a continuation of nothing": (frame("{}", 0), 1002),
    "a text within a text": (frame("{", fin=False) + frame("}"), 1002), "a ping in parts": (frame(b"x", PING, fin=False), 1002), "a ping of 126 bytes": (frame(bytes(126), PING), 1002),
    "a close of 126 bytes": (frame(b"\x03\xe8" + b"x" * 124, CLOSE), 1002), "a close of one byte": (frame(b"\x03", CLOSE), 1002),
    **{f"a close with code {code}": (frame(code.to_bytes(2, "big"), CLOSE), 1002) for code in (0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65535)},
    "a close whose reason is no text": (frame(b"\x03\xe8\xff\xfe", CLOSE), 1007), "a text that is no UTF-8": (frame(b'{"id": 1, "op": "\xff\xfe"}'), 1007), "half a character": (frame("\u20ac".encode()[:2]), 1007),
    "a surrogate": (frame(b'{"id": 1, "op": "\xed\xa0\x80"}'), 1007), "a length of 2^63": (frame(b"x", length=1 << 63, wide=8), 1009), "a length of 2^62": (frame(b"x", length=1 << 62, wide=8), 1009),
    "one byte more than max_size": (frame(b"x" * ((1 << 16) + 1)), 1009), "a head that promises it": (frame(b"", length=(1 << 16) + 1, wide=8), 1009),
    "parts that are too much together": (frame(b"x" * 4096, fin=False) + frame(b"x" * 4096, 0, fin=False) * 16, 1009), "ten megabytes": (frame(b"x" * (10 << 20)), 1009)}
ODD_FRAMES = {"an empty text": frame(), "an empty binary": frame(b"", BINARY), "a binary request": frame('{"id": 9, "op": "state"}', BINARY), "max_size of nothing": frame(" " * (1 << 16)),
              "a length with more bytes than it needs": frame("[]", wide=8), "a text in parts, pinged between": frame("[", fin=False) + frame(b"x", PING) + frame("", 0, fin=False) + frame("]", 0)}


def test_frames_that_break_websocket(server):
    "Each ends its own connection with the code of RFC 6455; the session behind it can be resumed, as after any cut."
    seen = collections.Counter()

    def once():
        for name, (data, code) in BAD_FRAMES.items():
            wire = Wire(server)
            first = wire.ask(1, "reset", 3)
            wire.send(data)
            fate = wire.fate()
            assert fate == code or fate is None and len(data) > 1 << 16, f"{name}: {fate} where {code} is due"    # what was not read turns the end into a reset
            seen[f"close {fate}" if fate else "connection reset"] += 1
            with Wire(server, resume=wire) as again:
                assert again.hello["session"] == wire.hello["session"] and again.hello["running"] and again.ask(1, "reset", 3) == first
                again.free()
        with Wire(server) as wire:
            for name, data in ODD_FRAMES.items():
                wire.send(data)
                kind, said = wire.read()
                while kind == PONG:
                    kind, said = wire.read()
                said = json.loads(said)
                assert said["id"] is None and said["error"]["code"] == "bad_request", (name, said)
                seen["bad_request"] += 1
            wire.send(frame(b"hello", PONG) + frame(b"hello", PING))
            assert wire.read() == (PONG, b"hello") and wire.ask(1, "reset", 3)["ok"]
            wire.free()

    with siege(server, "Frames that break WebSocket", f"{len(BAD_FRAMES) + len(ODD_FRAMES)} kinds: unmasked, reserved, fragmented, wrong lengths and closes, no UTF-8, larger than max_size") as attack:
        attack.rounds(once)
        attack.got = f"{told(seen)}; the session is resumed over another connection and remembers its reply"


REQUESTS = ['{"id": 1, "op": "reset", "value": 3}', '{"id": 2, "op": "reset", "value": {"seed": 3, "ruleset_id": 17}}', '{"id": 3, "op": "step", "value": 1}', '{"id": 4, "op": "state"}', '{"id": 5, "op": "close"}', '{"id": 6, "op": "render"}',
            '{"id": 7, "op": "reset", "value": {"seed": 3, "ruleset": {"goal": [1, 3, 4, 0, 0], "rules": [[0, 0, 0, 0, 0, 0, 0]], "init_tiles": [[3, 4]]}}}']
OPENENV = ['{"type": "reset", "data": {"seed": 3}}', '{"type": "step", "data": {"action": 1}}', '{"type": "step", "data": {"message": "say 1"}}', '{"type": "state"}', '{"type": "close"}']
ODD = [None, True, -1, 0, 6, 1.5, 1e308, 10**30, 2**53, "", "x" * 3000, "\ud800", "\x00", [], [[]], {}, {"a": {}}, {"seed": -1}, {"seed": "x"}, {"seed": 1, "ruleset": 5}, {"seed": 1, "ruleset": {"goal": [999], "rules": [], "init_tiles": {}}}, {"ruleset_id": 10**9}]


def frames_of_every_type(requests: list[str]):
    "Every request cut at every byte, without each of its fields, with odd values in each of them, and nested without end."
    numbers = itertools.count(10)
    for text in requests:
        yield from (text[:cut] for cut in range(len(text)))
        whole = json.loads(text)
        for key in whole:
            yield json.dumps({k: v for k, v in whole.items() if k != key})
            yield from (json.dumps({**whole, "id": next(numbers), key: value}) for value in ODD)
    yield from ["[" * 30000, '{"id":' * 5000, '{"id": ' + "9" * 30000 + ', "op": "step"}', '{"id": NaN, "op": "step"}', '{"id": 1e3, "op": "step"}', '{"id": 1, "id": 2}', "null", "true", "3", '"x"', "\ufeff{}"]


@pytest.mark.parametrize("path", ["/session", "/session?env=patient", "/ws", "/ws?env=patient"])
def test_malformed_requests(server, path):
    "Each is answered with an error of the table, or done if it makes sense after all, or ends its connection as `close` does; the session steps on."
    frames, seen, openenv = list(frames_of_every_type(OPENENV if path.startswith("/ws") else REQUESTS)), collections.Counter(), path.startswith("/ws")
    known = ("bad_request", "reset_required", "session_lost") if not openenv else ("INVALID_JSON", "VALIDATION_ERROR", "UNKNOWN_TYPE", "EXECUTION_ERROR")

    def once():
        wire = None
        for text in frames:
            wire = wire or Wire(server, path)
            wire.send(frame(text.encode("utf-8", "surrogatepass")))
            kind, said = wire.read()
            if kind == CLOSE:
                seen["close " + str(int.from_bytes(said[:2], "big"))] += 1
                wire = wire.close()
                continue
            said = json.loads(said)
            error = said.get("error") or (said["data"] if said.get("type") == "error" else None)
            if error:
                assert error["code"] in known and error["message"] and "Traceback" not in error["message"], (text[:200], error)
            seen[error["code"] if error else "a reply"] += 1
            if said.get("closed"):
                wire.fate()
                wire = None
        wire = wire or Wire(server, path)
        wire.send(frame(OPENENV[0]) if openenv else request(MAX_ID, "reset", None if "patient" in path else 3))
        assert '"error"' not in wire.read()[1].decode()
        wire.send(frame(OPENENV[-1]) if openenv else request(1, "close"))
        wire.fate()

    with siege(server, f"Malformed and truncated requests on `{path}`", f"{len(frames):,} in each round: cut at every byte, fields missing or of another type, nested without end") as attack:
        attack.rounds(once)
        attack.got = told(seen)


def test_nothing_but_malformed_frames(server):
    "A thousand are answered; then the server has had enough, and the place is free."
    with siege(server, "Nothing but malformed frames", "frames that are no JSON, as many as the server takes") as attack:
        def once():
            wire, refused = Wire(server), 0
            wire.send(frame("{") * 1000)
            while (said := wire.read())[0] != CLOSE:
                assert json.loads(said[1])["error"]["code"] == "bad_request"
                refused += 1
            assert (refused, int.from_bytes(said[1][:2], "big")) == (1000, 1008)
            wire.close()
        attack.rounds(once)
        attack.got = "bad_request (1,000 times), then close 1008; its session is over"


def test_frames_cut_on_the_wire(server):
    "The connection ends within a frame, after every number of bytes. The session is where it was: a request that did not arrive whole was not done."
    data, count = request(2, "step", 1), 0

    def once():
        nonlocal count
        wire = Wire(server)
        wire.ask(1, "reset", 3)
        for cut in range(len(data)):
            wire.send(data[:cut])
            wire.close(reset=cut % 2 == 0)
            wire = Wire(server, resume=wire)
            count += 1
            assert wire.hello["n"] == 0 and wire.hello["running"]
        assert wire.ask(2, "step", 1)["n"] == 1
        wire.free()

    with siege(server, "Frames cut on the wire", f"a step cut after each of its {len(data)} bytes, with FIN and RST, and the session resumed") as attack:
        attack.rounds(once)
        attack.got = f"its session, where it was ({count:,} times); then the step is done once"


def test_fragments_without_end(server):
    "A message in empty parts never reaches max_size."
    seen = collections.Counter()

    def once():
        wire = Wire(server)
        wire.ask(1, "reset", 3)
        wire.send(frame("{", fin=False))
        part = frame("", 0, fin=False) * 1000
        for _ in range(MANY // 2):
            if not wire.send(part):
                break
        wire.send(frame("}", 0))
        kind, said = wire.read()
        seen[f"close {int.from_bytes(said[:2], 'big')}" if kind == CLOSE and said else "connection reset" if kind == CLOSE else json.loads(said)["error"]["code"]] += 1
        wire.close()
        with Wire(server, resume=wire) as again:
            again.free()

    with siege(server, "A message in parts without end", f"a text in {MANY * 500:,} empty parts") as attack:
        attack.rounds(once)
        attack.got = told(seen)


# ---------------------------------------------------------------- slow and silent


def test_slow_writers(server):
    "Handshakes and requests byte by byte, many at once: they wait for themselves alone."
    count = min(MANY, 14)
    data = request(2, "step", 1)
    with siege(server, "Slow writers", f"{count} sessions that send a step byte by byte, a step of the bystander between any two; {MANY} handshakes that stop in their middle") as attack:
        stuck = [Wire(server, speak=False) for _ in range(MANY)]
        for wire in stuck:
            wire.send(wire.handshake[:60])
        wires = [Wire(server) for _ in range(count)]
        for wire in wires:
            wire.ask(1, "reset", 3)
        for at in range(len(data)):
            for wire in wires:
                wire.send(data[at:at + 1])
            attack.meanwhile(1)
        said = [wire.reply() for wire in wires]
        assert all(reply == said[0] and reply["ok"] and reply["n"] == 1 for reply in said)
        for wire in wires:
            wire.free()
        for wire in stuck:
            assert not LONG or wire.fate() is None           # after ten seconds
            wire.close()
        attack.got = "its reply, when the request is whole; a handshake that takes longer than ten seconds is cut"


def pour(attack, wires: list, data: bytes, most: int) -> int:
    "Send on all connections as long as the server takes it, `most` bytes on each at most: it takes no more when the bystander did 50 steps meanwhile. Returns the most that went."
    sent = dict.fromkeys(wires, 0)
    for wire in wires:
        wire.sock.setblocking(False)
    goal = attack.bystander.steps + 50
    while attack.bystander.steps < goal and min(sent.values()) < most:
        for wire in wires:
            with contextlib.suppress(OSError):
                while sent[wire] < most:
                    sent[wire] += wire.sock.send(data[sent[wire] % len(data):])
                    goal = attack.bystander.steps + 50
        attack.meanwhile(1)
    for wire in wires:
        wire.sock.settimeout(HANG)
    return max(sent.values())


SLOW = {"replies of 64 kB, asked again and again": (request(2, "step", "say 65536"), "/session?env=patient"), "state, asked again and again": (request(3, "state"), "/session"), "frames that make no sense": (frame("{" * 100), "/session"),
        "pings": (frame(b"x" * 125, PING), "/session"), "OpenEnv's state": (frame('{"type": "state"}'), "/ws")}


@pytest.mark.parametrize("what", SLOW)
def test_slow_readers(server, what):
    "Who asks and never reads is not asked on: what waits for it stays small."
    data, path = SLOW[what]
    count, most = 2 if what == "pings" else 1, MB * 64
    sent = []

    def once():
        wires = [Wire(server, path, buffer=4096) for _ in range(count)]
        for wire in wires:
            if path.startswith("/session"):
                assert wire.ask(1, "reset", 3 if path == "/session" else None)["ok"]
                if "patient" in path:
                    wire.ask(2, "step", "say 65536")
        before = server.memory
        sent.append(pour(attack, wires, data * (65536 // len(data) + 1), most))
        grown = server.memory - before
        assert grown < 16 * MB, f"{count} clients that do not read make the server {grown / MB:.0f} MB larger"
        for wire in wires:
            wire.close(reset=True)
            if path.startswith("/session"):
                with Wire(server, path, resume=wire) as again:
                    if again.status == 101:
                        again.free()

    with siege(server, f"Slow readers: {what}", f"in each round {count} that never reads, and sends as long as the server takes it, {most // MB} MB at most") as attack:
        attack.rounds(once, each=MB // 2)
        attack.got = f"nothing more is taken after {max(sent) / 1024:,.0f} kB"


def test_silent_readers_are_cut(brisk, watched):
    "Who neither reads nor answers pings is cut, and its place is free when the grace is over."
    with Siege(brisk, watched, "Clients that answer no ping", "8 sessions; ping 1 s, grace 1 s") as attack:
        wires = [Wire(brisk, "/session?env=patient", buffer=4096) for _ in range(8)]
        for wire in wires:
            wire.send(request(1, "reset") + request(2, "step", "say 65536") + request(2, "step", "say 65536") * 200)
        brisk.settled(attack.live, attack.files)              # without a word from here
        for wire in wires:
            wire.fate()
        with Wire(brisk, resume=wires[0]) as late:
            assert late.status == 410
        attack.got = "the connection ends after two pings, HTTP 410 for who comes back after the grace"


@pytest.fixture(scope="module")
def watched(brisk):
    bystander = Bystander(brisk, loses=True)
    yield bystander
    bystander.stop()


# ---------------------------------------------------------------- numbers of requests


def test_numbers_of_others(server):
    "The number of a request belongs to its session: in another one it is another request. A whole recording played again does to its own session what it did before, and nothing to others."
    def once():
        a, b = Wire(server), Wire(server)
        recorded = [request(1, "reset", 3), *(request(number, "step", number % 3) for number in range(2, 40))]
        said = []
        for data in recorded:
            a.send(data)
            said.append(a.reply())
        assert b.ask(39, "state")["n"] == 0
        assert b.ask(39, "step", 0)["error"]["code"] == "reset_required"          # a's last number, and no reply of a's
        assert b.ask(40, "reset", 4)["n"] == 0
        old = b.ask(39, "step", 0)
        assert not old["ok"] and old["error"]["code"] == "bad_request" and b.ask(41, "step", 0)["n"] == 1
        with Wire(server) as c:                              # a replay of the wire, in a session of its own
            for data, first in zip(recorded, said):
                c.send(data)
                assert c.reply() == first
            assert a.ask(40, "state")["n"] == 38
            c.free()
        a.send(b"".join(recorded))                           # and in the same one: the last four are remembered, the others are too old
        again = [a.reply() for _ in recorded]
        assert again[-4:] == said[-4:] and all(reply["error"]["code"] == "bad_request" for reply in again[:-4]) and a.ask(41, "state")["n"] == 38
        for session, secret in ((a, b), (b, a)):
            with Wire(server, headers={**BEARER, "X-Pool-Session": session.hello["session"], "X-Pool-Resume": secret.hello["resume"]}) as thief:
                assert thief.status == 410
        with Wire(server, resume=a) as taker:                # who knows the secret may; the other connection is told
            assert a.fate() == 4001 and taker.ask(39, "step", 0) == said[-1] and taker.ask(42, "state")["n"] == 38
            taker.free()
        b.free()

    with siege(server, "Numbers of requests from other sessions", "a recording of 39 requests played again in another session, in its own, and with another session's secret") as attack:
        attack.rounds(once)
        attack.got = "in another session its own replies; in its own the remembered ones and bad_request; HTTP 410 with another's secret; 4001 for a connection that is taken over"


@pytest.fixture
def gate(server):
    server.forget("gate")
    yield lambda: server.say("gate")
    server.say("gate")


def test_pending_number_again_and_again(server, gate):
    "The number of a request under way is sent 100,000 times. The one reply is a megabyte: it must not come 100,000 times."
    repeats, got = 100_000, []

    def once():
        server.forget("gate")
        wire = Wire(server, "/session?env=patient")
        wire.ask(1, "reset")
        data = request(2, "step", f"wait {MB - 1}")
        before, replayed = server.memory, server.stats().get("replayed", 0)
        for _ in range(repeats // 1000):
            wire.send(data * 1000)
        attack.meanwhile()
        assert until(lambda: server.stats().get("replayed", 0) - replayed >= repeats - 1)      # all were read while the first was under way
        gate()
        assert until(lambda: select.select([wire.sock], [], [], 0)[0] or server.memory - before > 64 * MB)
        grown = server.memory - before                       # they are written in one turn of the server's loop
        assert grown < 64 * MB, f"{repeats:,} repeats of one number make the server {grown / MB:.0f} MB larger"
        first, replies = wire.reply(), 1
        wire.send(request(3, "state"))
        while (reply := wire.reply())["id"] == 2:
            replies += 1
            assert replies <= 100, "the reply comes again and again"
        assert first["id"] == 2 and reply["n"] == (1 if first["ok"] else 0), first      # after a minute the server gives up on an environment
        got.append(replies)
        wire.free()

    with siege(server, "The number of a request under way, again and again", f"{repeats:,} times, its reply a megabyte") as attack:
        attack.rounds(once, each=MB) if LONG else once()
        attack.got = f"its reply, {max(got)} times at most; the step was done once"


def test_pending_number_on_many_connections(server, gate):
    "A session is taken over again and again while a request is under way, and each connection asks for it: those that are gone are not remembered."
    def once():
        server.forget("gate")
        wire = Wire(server, "/session?env=patient")
        wire.ask(1, "reset")
        data = request(2, "step", f"wait {MB // 4}")
        wire.send(data)
        for _ in range(MANY):
            following = Wire(server, resume=wire)
            following.send(data)
            wire.close(reset=True)
            wire = following
        attack.meanwhile()
        assert until(lambda: server.files <= attack.files + 1), "connections that are gone are still open"
        middle.append(server.memory)
        gate()
        reply = wire.reply()
        assert reply["id"] == 2 and reply["n"] == 1 and len(reply["obs"]) == MB // 4
        wire.free()

    middle = []
    with siege(server, "A request under way, asked for on many connections", f"the session is taken over {MANY} times in each round, each connection asks again and is cut") as attack:
        attack.rounds(once)
        attack.got = "its reply, once, on the last connection"


def test_taken_over_connection_that_asks_on(server, gate):
    "Who lost a session to another connection cannot take its reply away any more."
    def once():
        server.forget("gate")
        old = Wire(server, "/session?env=patient")
        old.ask(1, "reset")
        data = request(2, "step", "wait 10")
        old.send(data)
        new = Wire(server, resume=old)
        new.send(data)
        old.send(data * 3)                                   # it was told 4001, and does not care
        attack.meanwhile()
        gate()
        new.send(request(3, "state"))
        reply = new.reply()
        while reply["id"] == 3 and reply["last"] == 2 and reply["n"] == 0:       # not done yet: ask on
            new.send(request(3, "state"))
            reply = new.reply()
        assert reply["id"] == 2 and reply["n"] == 1, f"the reply went to the other connection; this one is told {reply}"
        new.free()
        old.close()

    with siege(server, "A connection that was taken over and asks on", "it sends the number of the request under way three times after another connection sent it") as attack:
        attack.rounds(once)
        attack.got = "the connection that has the session: its reply"


# ---------------------------------------------------------------- SIGSTOP


CLIENT = """
import asyncio, sys, time
from xland_minigrid.pool import EnvPool
url, token, resume_for = sys.argv[1], sys.argv[2], float(sys.argv[3])
async def main():
    async with EnvPool.connect(url, 1, token=token, resume_for=resume_for, connect_timeout=300, ping=3600, timeout=3600) as pool:
        session = pool.sessions[0]
        print("at", (await session.reset(0)).n, flush=True)
        try:
            for line in iter(lambda: sys.stdin.readline().strip(), ""):
                step = await session.step(int(line))
                print("at", step.n, step.observation.tobytes().hex(), flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
asyncio.run(main())
"""


class Client:
    "A client in a process of its own, which does the actions that it is told."

    def __init__(self, target, resume_for: float = HOUR):
        self.process = subprocess.Popen([sys.executable, "-c", CLIENT, target.url, TOKEN, str(resume_for)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "at 0\n"

    def ask(self, action: int) -> None:
        print(action, file=self.process.stdin, flush=True)

    def answer(self) -> list[str]:
        return self.process.stdout.readline().split()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(HANG)
        self.process.stdout.close()


@pytest.mark.parametrize("over", ["within", "beyond"])
def test_client_stopped(brisk, server, watched, over):
    "A client stands still for longer than its pings may take. Within the grace it goes on where it was; beyond it it is told that its session is lost, and its place is free."
    target, bystander = (server, server.bystander) if over == "within" else (brisk, watched)
    episodes = Episodes([0])
    with Siege(target, bystander, f"SIGSTOP of a client, {over} the grace", f"{PAUSE:g} s at least" + (", until its place is free" if over == "beyond" else "")) as attack:
        client = Client(target)
        with stopped(client.process.pid):
            client.ask(int(episodes.actions[0, 0]))
            stand_still(attack)
            if over == "beyond":
                target.settled(attack.live, attack.files)
        said = client.answer()
        if over == "within":
            assert said == ["at", "1", episodes.seen[0, 1].tobytes().hex()]
        else:
            assert said == ["SessionLost"], said
        client.end()
        attack.got = "its next step, where it was" if over == "within" else "`SessionLost`; its place was freed when two pings and the grace were over"


def stand_still(attack) -> None:
    "The others go on for as long as somebody is away."
    end = time.monotonic() + PAUSE
    while time.monotonic() < end:
        attack.meanwhile(5)


@contextlib.asynccontextmanager
async def closed(pool):
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("patience", [HOUR, 1.0])
def test_server_stopped(wide, patience):
    "The server stands still for longer than pings may take: whoever waits goes on where it was, bit for bit; who does not wait so long is told that its session is lost. Handshakes that were given up meanwhile hold no place."
    bystander, episodes = Bystander(wide), Episodes([1])

    async def begun():
        while True:                                          # on a busy machine more than a second may pass before it has begun
            pool = EnvPool.connect(wide.url, 1, token=TOKEN, resume_for=patience, connect_timeout=1.0, ping=1.0, timeout=HOUR)
            try:
                await pool.start()
                episodes.check(0, 0, await pool.sessions[0].reset(1))
                return pool
            except PoolError:
                await pool.close()

    async def main():
        async with closed(await begun()) as pool:
            session = pool.sessions[0]
            with stopped(wide.pid):
                step = asyncio.ensure_future(session.step(int(episodes.actions[0, 0])))
                for turn in range(30):
                    wire = Wire(wide, speak=False)
                    wire.send(wire.handshake)
                    wire.close(reset=turn % 2 == 0)
                if patience == HOUR:
                    await asyncio.sleep(PAUSE)
                    assert not step.done()
                else:
                    await asyncio.wait([step])
                    with pytest.raises(SessionLost):
                        await step
                    return
            episodes.check(0, 1, await step)
            for n in range(2, LENGTH + 1):
                episodes.check(0, n, await session.step(int(episodes.actions[0, n - 1])))

    with Siege(wide, bystander, f"SIGSTOP of the server; a client that waits {'for it' if patience == HOUR else f'{patience:g} s'}", f"{PAUSE:g} s or until the client is told; ping 0.5 s; 30 handshakes meanwhile that are given up") as attack:
        asyncio.run(main())
        attack.got = "its step, where it was, and the rest of the episode" if patience == HOUR else "`SessionLost`, while the server still stands"
        attack.live += patience != HOUR                      # its session waits to be resumed, and nobody will
    bystander.stop()


# ---------------------------------------------------------------- clocks


def test_clocks_jump(server, brisk, watched, monkeypatch):
    "The wall clock jumps, on two servers and here: pings, grace, idleness and deadlines do not look at it."
    jumps, real = [3.2e9, -1.6e9, *[86400.0, -86400.0] * LONG, 0.0], time.time
    with siege(server, "The wall clock jumps", f"on the servers and on the clients by {', '.join(f'{jump:g}' for jump in jumps)} s; one server has a grace of an hour, one of a second") as attack:
        away = Wire(server)
        away.ask(1, "reset", 0)
        away.close()
        for number, jump in enumerate(jumps, 1):
            for target in (server, brisk):
                target.say("jump", str(jump))
            monkeypatch.setattr(time, "time", lambda: real() + jump)
            live, files = brisk.stats()["live"], brisk.files
            with Wire(brisk) as wire:
                wire.ask(1, "reset", 0)
            brisk.settled(live, files)                        # forgotten after a second, whatever the clock says
            watched.advance()
            attack.meanwhile()
            away = Wire(server, resume=away)                  # and here remembered for an hour
            assert away.status == 101 and away.ask(number + 1, "step", 1)["n"] == number
            away.close()
        Wire(server, resume=away).free()
        for target in (server, brisk):
            logged = [json.loads(line)["time"] for line in (target.folder / "log").read_text().splitlines()]
            assert max(logged) - min(logged) > 3e9, "the server's clock did not jump"
            target.forget("jump")
        attack.got = "its steps; a session without connection is kept for the grace, and no longer"


# ---------------------------------------------------------------- readers of frames, fuzzed


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), inner, max_size=4), max_leaves=12)
REPLIES = ['{"id":8,"ok":true,"n":1,"obs":"AAECAwQ=","reward":0.5,"done":false}', '{"id":8,"ok":true,"n":0,"obs":"AA==","reward":null,"done":true,"info":{"seed":3}}', '{"id":8,"ok":false,"n":1,"error":{"code":"busy","message":"x","retryable":false,"detail":{}}}',
           '{"id": null, "ok": false, "n": 1, "error": {"code": "bad_request", "message": "x"}}', '{"id": 8, "ok": true, "n": 1, "running": true, "episodes": 1, "last": 3}']
TOKENS = ['"', "{", "}", "[", "]", ",", ":", "null", "true", "NaN", "-Infinity", "1e999", "1e5", "-1", "\\ud800", "\\u0000", "9" * 5000, "[" * 2000, '"id"', '"op"', '"obs"', '"reward"', " ", "\n", "\ufeff", "\u20ac", "0x1", "1.5", "8"]


def mutated(rng, text: str) -> str | bytes:
    "A few random edits."
    for _ in range(rng.randrange(4)):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        to = min(to, at + 12)
        text = rng.choice([lambda: text[:at] + text[to:], lambda: text[:at] + rng.choice(TOKENS) + text[at:], lambda: text[:at] + rng.choice(TOKENS) + text[to:], lambda: text[:at] + chr(rng.randrange(0x2000)) + text[to:],
                           lambda: text[:to] + text[at:], lambda: text[:at]])()
    return text if rng.random() < 0.98 else text.encode("utf-8", "surrogatepass")


def fuzz(check, wholes: list[str], fields: list[str], scale: int = SCALE) -> int:
    "Odd values in every field; then Hypothesis makes frames, each is mutated a hundred times. Returns how many of these were checked."
    count = 0
    shaped = st.builds(lambda whole, name, value: json.dumps({**json.loads(whole), name: value}), st.sampled_from(wholes), st.sampled_from(fields), JSON)

    @settings(max_examples=scale // 100, deadline=None)
    @given(st.one_of(st.sampled_from(wholes), shaped, JSON.map(json.dumps), st.text(max_size=60)), st.integers(0, 2**32))
    def run(text, seed):
        nonlocal count
        rng = random.Random(seed)
        for _ in range(100):
            check(mutated(rng, text))
            count += 1
    for whole, name, value in itertools.product(wholes, fields, [*ODD, math.nan, math.inf]):
        check(json.dumps({**json.loads(whole), name: value}))
    run()
    return count


def test_fuzzed_read_request():
    "A frame is a number, an operation and a value, or a `BadRequest`."
    seen = collections.Counter()

    def check(raw):
        try:
            number, op, value = read_request(raw)
        except BadRequest as error:
            assert len(str(error)) < 200
            seen["BadRequest"] += 1
        else:
            assert type(number) is int and 0 < number <= MAX_ID and type(op) is str
            seen["a request"] += 1

    count = fuzz(check, REQUESTS, ["id", "op", "value"])
    assert count >= SCALE and min(seen.values()) > SCALE / 200, seen
    Siege.report.append(("The reader of requests, fuzzed", f"{count:,} frames for `read_request`", told(seen), "", "", ""))


def test_fuzzed_read_reply():
    "A frame is a reply whose parts are what they should be, or a `ValueError`. A reward is a finite number: nothing else may reach a learner."
    seen = collections.Counter()

    def check(raw):
        for binary in (True, False):
            try:
                reply = read_reply(raw, binary)
            except ValueError:
                seen["ValueError"] += 1
                continue
            assert isinstance(reply, Reply) and type(reply.id) is int and type(reply.n) is int and sum(part is not None for part in (reply.outcome, reply.error, reply.extra)) == 1, reply
            if reply.error is not None:
                assert isinstance(reply.error, PoolError), reply
            if reply.outcome is not None:
                seen_, reward, done, info = reply.outcome
                assert isinstance(seen_, bytes if binary else str) and type(done) is bool and isinstance(info, dict), reply
                assert reward is None or type(reward) in (int, float) and math.isfinite(reward), reply
            seen["a reply"] += 1

    count = fuzz(check, REPLIES, ["id", "ok", "n", "obs", "reward", "done", "info", "error"])
    assert count >= SCALE and min(seen.values()) > SCALE / 200, seen
    Siege.report.append(("The reader of replies, fuzzed", f"{count:,} frames for `read_reply`, as bytes and as text", told(seen), "", "", ""))


class Liar:
    "A server that greets as it should, or not, and answers each request with something else before the right reply."

    def __init__(self, hello, answers):
        from websockets.asyncio.server import serve
        self.hello, self.answers, self.io = hello, answers, Loop("liar")
        async def start():
            return await serve(self._talk, "127.0.0.1", 0, ping_interval=None, compression=None)
        self.server = self.io.run(start())
        self.url = f"ws://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _talk(self, ws):
        with contextlib.suppress(Exception):
            await ws.send(self.hello())
            async for raw in ws:
                for said in self.answers(json.loads(raw)):
                    await ws.send(said)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        async def stop():
            self.server.close()
            await self.server.wait_closed()
        self.io.run(stop())
        self.io.end()


HELLO = {"op": "hello", "version": 1, "session": "s", "resume": "secret", "n": 0, "running": False, "kind": "slots", "env": "e", "layout": [["", [5], "|u1"]], "num_actions": 6, "autoreset": False}


def test_client_of_a_lying_server():
    "Whatever a server answers, a client gets a step of the episode or a `PoolError`, and soon. A wrong reply is never a reward."
    rng, seen, wrong, said, others = random.Random(4), collections.Counter(), {}, [], [False]
    odd = [*ODD, float("nan"), float("inf"), "AAECAwQ=", 0, 1]

    def right(asked):
        return {"id": asked["id"], "ok": True, "n": 0, "obs": "AAECAwQ=", "reward": None, "done": False}

    def answers(asked):
        whole = {**right(asked), "obs": "BAMCAQA="}
        kind = rng.randrange(4)
        if kind == 0:
            yield mutated(rng, json.dumps(whole))
        elif kind == 1:
            yield json.dumps({k: v for k, v in whole.items() if k != rng.choice(list(whole))})
        elif kind == 2:
            name = rng.choice(list(whole))
            yield json.dumps({**whole, name: rng.choice([value for value in odd if name != "id" or value != asked["id"]])})
        else:
            yield json.dumps({"id": rng.choice([None, asked["id"]]), "ok": False, "n": 0, "error": rng.choice([*odd, {"code": rng.choice(odd), "message": rng.choice(odd), "detail": rng.choice(odd), "retryable": rng.choice(odd)}])})
        yield json.dumps(right(asked))

    def kept(asked):
        said[:] = list(answers(asked))
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            others[:] = [json.loads(said[0])["id"] != asked["id"]]
        return said

    async def main(url, turns):
        turn = 0
        while turn < turns:
            async with EnvPool.connect(url, 1, resume_for=HOUR, connect_timeout=HANG, ping=HOUR, timeout=HANG) as pool:
                session = pool.sessions[0]
                while turn < turns and not session.lost:
                    turn += 1
                    try:
                        step = await session.reset(0)
                        assert step.n == 0 and type(step.done) is bool and step.observation.shape == (5,) and isinstance(step.info, dict)
                        assert step.reward is None or type(step.reward) in (int, float) and math.isfinite(step.reward)
                        assert not others[0] or step.observation[0] == 0, "the reply to another request was taken for this one's"
                        seen["a step"] += 1
                    except PoolError as error:
                        seen[type(error).__name__] += 1
                    except Exception as error:
                        wrong[type(error).__name__] = f"{error} after {said[0][:200]!r}"
                        break

    with Liar(lambda: json.dumps(HELLO), kept) as liar:
        asyncio.run(main(liar.url, SCALE // 10))
    assert not wrong, "\n".join(f"{kind}: {what}" for kind, what in wrong.items())
    Siege.report.append(("A server that lies", f"{SCALE // 10:,} replies that are wrong: mutated, with fields missing or of another type", told(seen), "", "", ""))


def test_client_of_a_server_with_a_wrong_greeting():
    "A greeting that makes no sense is a server that does not answer."
    odd = [value for value in ODD if isinstance(value, (type(None), bool, int, str, list, dict))]
    greetings = [*(text[:cut] for text in [json.dumps(HELLO)] for cut in range(0, 200, 7)), *(json.dumps({k: v for k, v in HELLO.items() if k != name}) for name in ("session", "resume", "kind", "layout")),
                 *(json.dumps({**HELLO, name: value}) for name in ("session", "resume", "kind", "layout", "max_size") for value in odd), *map(json.dumps, odd), "[" * 30000, b"\xff"]
    seen, wrong = collections.Counter(), {}
    async def main(liar):
        for greeting in greetings:
            liar.hello = lambda: greeting
            pool = EnvPool.connect(liar.url, 1, resume_for=0.01, connect_timeout=HANG, ping=HOUR, timeout=HANG)
            try:
                await pool.start()
                seen["a session"] += 1
            except PoolError as error:
                seen[type(error).__name__] += 1
            except Exception as error:
                wrong[repr(error)] = greeting[:300]
            finally:
                await pool.close()
    with Liar(None, lambda asked: ()) as liar:
        asyncio.run(main(liar))
    assert not wrong, "\n".join(f"{what}: {greeting}" for what, greeting in wrong.items())
    Siege.report.append(("A server with a wrong greeting", f"{len(greetings)} kinds", told(seen), "", "", ""))


# ---------------------------------------------------------------- all of it for long


def test_soak(wide):
    "Steps in 64 sessions, each with episodes of its own, and a cut every 500: nothing lost, doubled, swapped or leaked; memory flat."
    sessions, total, every = 64, max(20_000, SCALE), 500
    first, before = wide.stats(), sockets()
    bystander = Bystander(wide)
    with FaultProxy(wide.url) as proxy, Siege(wide, bystander, "Soak", f"{total:,} steps in {sessions} sessions, and every {every} of them a cut: some connections, or all at some byte, with FIN or RST") as attack:
        async def main():
            rng, done, resets, cuts, sizes = random.Random(0), 0, 0, 0, []
            async with EnvPool.connect(proxy.url, sessions, token=TOKEN, resume_for=HOUR, connect_timeout=HANG, ping=HOUR, timeout=HOUR) as pool:
                await pool.reset_group(0)
                resets += sessions
                while done < total:
                    episodes = Episodes(range(100 + resets, 100 + resets + sessions))
                    for row, step in enumerate(await asyncio.gather(*(session.reset(int(seed)) for session, seed in zip(pool.sessions, episodes.seeds)))):
                        episodes.check(row, 0, step)
                    resets += sessions
                    running = set(range(sessions))
                    for n in range(1, LENGTH + 1):
                        if done >= total or not running:
                            break
                        rows = sorted(running)
                        steps = await asyncio.gather(*(pool.sessions[row].step(int(episodes.actions[row, n - 1])) for row in rows))
                        done += len(rows)
                        for row, step in zip(rows, steps):
                            episodes.check(row, n, step)
                            running -= {row} if step.done else set()
                        if done // every > cuts:
                            cuts = done // every
                            if cuts % 3 == 0:
                                proxy.cut(**{rng.choice(["up", "down"]): rng.randrange(400)}, reset=cuts % 2 == 0)
                            else:
                                proxy.abort_some({rng.randrange(sessions) for _ in range(3)}, reset=cuts % 2 == 0)
                        if done * 10 // total > len(sizes):
                            sizes.append(wide.memory)
                proxy.cut()
                resumed = sum(session.resumes for session in pool.sessions)
                bystander.stop()
                stats = collections.Counter(wide.stats())
                stats.subtract({name: first.get(name, 0) for name in ("steps", "resets", "opened", "replayed")})
                assert stats["steps"] == done + bystander.steps and stats["resets"] == resets + bystander.resets
                assert stats["opened"] == sessions + 1 and sum(session.failures for session in pool.sessions) == 0
                assert resumed >= total // every, resumed
                grown = [after - before for before, after in itertools.pairwise(sizes)]
                assert min(grown[2:]) < MB // 4, f"every tenth of the soak leaves the server larger: {[f'{g / 1024:.0f} kB' for g in grown]}"
                attack.got = f"every step once and in its order, bit for bit; {resumed:,} connections resumed, {stats['replayed']:,} requests answered from memory"
        asyncio.run(main())
    assert until(lambda: sockets() <= before), "sockets are left here"
