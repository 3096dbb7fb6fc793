"""Files from the hub: the real loading code against a local server that speaks the hub's protocol and misbehaves on request."""
import errno
import hashlib
import os
import socket
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub", minversion="1.0")  # older ones work, and take minutes over trouble
import huggingface_hub.constants  # noqa: E402

from xland_minigrid.benchmarks import hub  # noqa: E402
from xland_minigrid.benchmarks.hub import (  # noqa: E402
    HubAccessError, HubChecksumError, HubError, HubNotFoundError, HubOfflineError, HubServerError, HubSpaceError, fetch)
from worlds import refusals  # noqa: E402

SPEC = "hub:someone/tasks/folder/tiny.safetensors"
COMMIT = "c0ffee" + "0" * 34
OLD, NEW = os.urandom(400_000), os.urandom(350_000)
sha = lambda data: hashlib.sha256(data).hexdigest()
git = lambda data: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of huggingface.co as a download sees. `server.world` holds the files and what is to go wrong.

    A large file is answered with 302, X-Linked-Size and X-Linked-Etag (its SHA-256) and a place in the content network, which here has another host
    name; a small one is sent by the hub itself, with git's name as ETag.
    """
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, status, headers=(), body=b"", announce=None, cut=None):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": len(body) if announce is None else announce, "Connection": "close"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        self.close_connection = True

    def do_HEAD(self):
        world = self.server.world
        if "/resolve/" not in self.path and not self.path.startswith("/cdn/"):
            return self.send(404)
        world.log.append((self.command, self.path, dict(self.headers)))
        fault = world.faults.pop(0) if world.faults else world.always
        if fault is not None and fault(self) is not False:
            return
        self.answer()

    do_GET = do_HEAD

    def answer(self, cut=None, ranges=True, headers=()):
        world = self.server.world
        if self.path.startswith("/cdn/"):
            return self.deliver(world.blobs[self.path.split("/")[2]], cut, ranges, dict(headers))
        repo, revision, name = self.split()
        if repo not in world.repos:
            return self.send(401 if not self.headers.get("Authorization") else 404, {"X-Error-Code": "RepoNotFound"})
        if revision not in world.revisions:
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        if name not in world.files:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data = world.files[name]
        about = {"X-Repo-Commit": COMMIT, **dict(headers)}
        if not world.large:
            return self.deliver(data, cut, ranges, {"ETag": f'"{world.etag or git(data)}"', **about})
        world.blobs[sha(data)] = data
        self.send(302, {"ETag": f'"{git(data)}"', "X-Linked-Size": len(data), "X-Linked-Etag": f'"{sha(data)}"',
                        "Location": f"http://localhost:{self.server.server_port}/cdn/{sha(data)}/file", **about})

    def split(self):
        repo, rest = self.path.removeprefix("/datasets/").split("/resolve/")
        revision, name = rest.split("/", 1)
        return repo, revision.replace("%2F", "/"), name

    def deliver(self, data, cut, ranges, headers):
        first = int(self.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
        if first >= len(data) > 0:
            return self.send(416, {"Content-Range": f"bytes */{len(data)}"})
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.send(206 if first else 200, headers, data[first:], cut=cut)


def status(code, **headers):
    return lambda h: h.send(code, {name.replace("_", "-"): value for name, value in headers.items()})

def hang(h):
    h.server.world.released.wait(120)
    h.close_connection = True

def cut(at):
    return lambda h: h.answer(cut=at) if h.command == "GET" else False

fine = lambda h: False


@pytest.fixture
def world(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.world = SimpleNamespace(
        log=[], faults=[], always=None, blobs={}, repos={"someone/tasks"}, revisions={"main", "v2", "refs/pr/1", COMMIT}, large=True, etag=None,
        files={"folder/tiny.safetensors": OLD, "notes": b"small"}, released=threading.Event(), cache=tmp_path / "kept")
    server.world.gets = lambda: [(h.get("Range"), p) for c, p, h in server.world.log if c == "GET"]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub, "_PAUSES", (0.01,) * 4)
    constants = huggingface_hub.constants
    for name, value in [("HF_HUB_DOWNLOAD_TIMEOUT", 120), ("HF_HUB_ETAG_TIMEOUT", 120), ("HF_HUB_CACHE", str(tmp_path / "theirs")), ("HF_HUB_OFFLINE", False),
                        ("HF_TOKEN_PATH", str(tmp_path / "token"))]:
        monkeypatch.setattr(constants, name, value)
    server.world.stop = lambda: (server.shutdown(), server.server_close())
    yield server.world
    server.world.released.set()
    server.world.stop()

def get(world, spec=SPEC, sha256=None, **options):
    return fetch(spec, sha256, **{"progress": False, "cache": world.cache, **options})

def leftovers(world):
    return [p for p in world.cache.rglob("*") if p.is_file() and p.name.endswith(".part")]


@pytest.mark.parametrize("large", [True, False], ids=["content network", "from the hub itself"])
def test_a_file_arrives_and_is_fetched_once(world, large, capfd):
    world.large = large
    path = get(world, progress=True)
    assert path.read_bytes() == OLD and path.name == "tiny.safetensors" and world.cache in path.parents
    assert "tiny.safetensors" in capfd.readouterr().err
    assert len(world.gets()) == 1 and not leftovers(world)
    assert get(world) == path and len(world.gets()) == 1 and world.log[-1][0] == "HEAD"
    asked = len(world.log)
    assert get(world, sha256=sha(OLD).upper()) == path and len(world.log) == asked, "with its sum the hub need not be asked"
    assert capfd.readouterr().err == ""


def test_revisions_and_folders(world):
    for revision in ("v2", "refs/pr/1", COMMIT):
        assert get(world, f"{SPEC}@{revision}").read_bytes() == OLD
        assert any(f"/resolve/{revision.replace('/', '%2F')}/folder/tiny" in path for _, path, _ in world.log)
    asked = len(world.log)
    get(world, f"{SPEC}@{COMMIT}")
    assert len(world.log) == asked, "a commit never changes"
    assert get(world, "hub:someone/tasks/notes").read_bytes() == b"small"


def test_an_empty_file(world):
    world.files["notes"] = b""
    for world.large in (True, False):
        assert get(world, "hub:someone/tasks/notes", cache=world.cache / str(world.large)).read_bytes() == b""


def test_a_new_version_replaces_the_old_one_only_where_it_is_asked_for(world):
    before = get(world)
    world.files["folder/tiny.safetensors"] = NEW
    assert get(world).read_bytes() == NEW and before.read_bytes() == OLD
    assert get(world, sha256=sha(NEW)).read_bytes() == NEW


@pytest.mark.parametrize("large", [True, False])
def test_a_cut_download_goes_on_where_it_stopped(world, large):
    world.large = large
    place = 150_000
    world.faults = [fine, cut(place), fine, cut(100_000)]
    assert get(world, sha256=sha(OLD)).read_bytes() == OLD
    ranges = [asked for asked, _ in world.gets()]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(r[6:-1]) for r in ranges[1:]]
    # Whatever had arrived was kept, up to the buffer of the HTTP client.
    assert place - 65_536 <= starts[0] <= place and starts[0] < starts[1] <= starts[0] + 100_000
    assert not leftovers(world)


def test_many_cuts_are_survived_as_long_as_something_arrives(world):
    world.always = cut(70_000)
    assert get(world).read_bytes() == OLD and len(world.gets()) >= 5


def test_the_next_call_goes_on_too(world):
    world.faults = [fine, cut(200_000)] + [status(503)] * 20
    with pytest.raises(HubServerError, match="503"):
        get(world)
    have = leftovers(world)[0].stat().st_size
    assert have >= 130_000 and not list(world.cache.rglob("tiny.safetensors"))
    world.faults, world.log[:] = [], []
    assert get(world).read_bytes() == OLD
    assert world.gets()[0][0] == f"bytes={have}-"


def test_an_interrupted_download_goes_on(world, monkeypatch):
    bar = hub._bar

    def stopping(*args):
        made = bar(*args)
        made.update = lambda n: (_ for _ in ()).throw(KeyboardInterrupt)
        return made
    monkeypatch.setattr(hub, "_bar", stopping)
    with pytest.raises(KeyboardInterrupt):
        get(world)
    assert leftovers(world)[0].stat().st_size > 0 and not list(world.cache.rglob("tiny.safetensors"))
    monkeypatch.setattr(hub, "_bar", bar)
    assert get(world).read_bytes() == OLD and world.gets()[-1][0] is not None


def test_a_server_that_ignores_ranges_starts_over(world):
    world.faults = [fine, cut(200_000), fine, lambda h: h.answer(ranges=False)]
    assert get(world).read_bytes() == OLD and world.gets()[1][0] is not None


def test_a_server_that_sends_another_range_is_not_believed(world):
    def wrong(h):
        h.send(206, {"Content-Range": f"bytes 5-{len(OLD) - 1}/{len(OLD)}"}, OLD[5:])
    world.large, world.etag = False, "no-checksum"
    world.faults = [fine, cut(200_000), fine, wrong]
    assert get(world).read_bytes() == OLD


def test_a_part_that_is_too_long_is_started_over(world):
    world.faults = [fine, cut(200_000)] + [status(503)] * 20
    with pytest.raises(HubServerError):
        get(world)
    leftovers(world)[0].write_bytes(bytes(len(OLD) + 1))
    world.faults = []
    assert get(world).read_bytes() == OLD


def test_a_part_with_other_bytes_is_noticed(world):
    world.faults = [fine, cut(200_000)] + [status(503)] * 20
    with pytest.raises(HubServerError):
        get(world)
    leftovers(world)[0].write_bytes(bytes(100_000))
    world.faults = []
    assert get(world).read_bytes() == OLD


@pytest.mark.parametrize("large", [True, False])
def test_wrong_checksums(world, large):
    world.large = large
    with pytest.raises(HubChecksumError, match=sha(OLD)) as caught:
        get(world, sha256="0" * 64)
    assert isinstance(caught.value, ValueError) and not leftovers(world) and not list(world.cache.rglob("tiny.safetensors"))
    assert len(world.gets()) == (0 if large else 1), "where the hub tells the sum, nothing needs to be downloaded"
    get(world)
    with pytest.raises(HubChecksumError):
        get(world, sha256="0" * 64)


@pytest.mark.parametrize("large", [True, False])
def test_damage_on_the_way_is_found_without_a_sum(world, large):
    world.large = large
    damaged = OLD[:1000] + bytes([OLD[1000] ^ 1]) + OLD[1001:]
    broken = lambda h: h.send(200, {}, damaged) if h.command == "GET" else False
    world.faults = [fine, broken]
    assert get(world).read_bytes() == OLD and len(world.gets()) == 2
    world.cache, world.log[:], world.always = world.cache / "again", [], broken
    with pytest.raises(HubChecksumError, match="damaged"):
        get(world)
    assert not leftovers(world) and not list(world.cache.rglob("tiny.safetensors")) and len(world.gets()) <= 6


@pytest.mark.parametrize("body", [OLD[:-1], OLD + b"x", b""], ids=["short", "long", "empty"])
def test_a_body_of_another_length_than_announced(world, body):
    "The header of the answer fits its body, but not the file: some proxies do that."
    world.always = lambda h: h.send(200, {}, body) if h.command == "GET" else False
    with pytest.raises((HubServerError, HubChecksumError)):
        get(world)
    assert not list(world.cache.rglob("tiny.safetensors"))
    world.always = None
    assert get(world).read_bytes() == OLD


def test_replaced_between_two_tries(world):
    def replaced(h):
        world.files["folder/tiny.safetensors"] = NEW
        h.answer(cut=150_000)  # still of the old one: the content network goes by contents
    world.faults = [fine, replaced]
    assert get(world).read_bytes() == NEW
    world.files["folder/tiny.safetensors"] = OLD
    world.cache = world.cache / "again"
    world.faults = [fine, replaced]
    with pytest.raises(HubChecksumError, match=sha(NEW)):
        get(world, sha256=sha(OLD))


def test_replaced_between_question_and_answer(world):
    world.large = False

    def replaced(h):
        world.files["folder/tiny.safetensors"] = NEW
        h.send(200, {"ETag": f'"{git(OLD)}"', "X-Repo-Commit": COMMIT}, announce=len(OLD))
    world.faults = [replaced]
    assert get(world).read_bytes() == NEW


@pytest.mark.parametrize("spec, error, says", [
    ("hub:someone/tasks/nothing", HubNotFoundError, "no file nothing in someone/tasks"),
    (f"{SPEC}@v3", HubNotFoundError, "no branch, tag or commit v3"),
    ("hub:someone/else/file", HubAccessError, "no dataset someone/else on the hub, or it is private")])
def test_what_does_not_exist(world, spec, error, says):
    with pytest.raises(error, match=says):
        get(world, spec)
    assert len(world.log) == 1, "there is no point in asking again"


def test_a_missing_repository_with_a_token(world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(HubNotFoundError, match="no dataset"):
        get(world, "hub:someone/else/file")


@pytest.mark.parametrize("answer, error, says", [
    (status(403, X_Error_Code="GatedRepo"), HubAccessError, "gated: accept"), (status(403), HubAccessError, "403.*HF_TOKEN"),
    (status(401, X_Error_Message="Invalid credentials in Authorization header"), HubAccessError, "401.*HF_TOKEN"),
    (status(404), HubNotFoundError, "no file folder/tiny"), (status(418), HubServerError, "418"), (status(200), HubServerError, "HF_ENDPOINT")])
def test_answers_that_end_it(world, answer, error, says):
    world.always = answer
    with pytest.raises(error, match=says):
        get(world)
    assert len(world.log) == 1


@pytest.mark.parametrize("code", [500, 502, 503, 504, 429, 408])
def test_trouble_that_passes(world, code):
    world.faults = [status(code), status(code), fine, status(500)]
    assert get(world).read_bytes() == OLD


def test_trouble_that_stays(world):
    world.always = status(500)
    with pytest.raises(HubServerError, match="500.*later.*xland-minigrid benchmark generate") as caught:
        get(world)
    assert len(world.log) == 5 and isinstance(caught.value, ConnectionError)
    world.log[:], world.always = [], lambda h: h.send(500) if h.command == "GET" else False
    with pytest.raises(HubServerError, match="500"):
        get(world)
    assert len(world.gets()) == 5


def test_the_pauses_grow_and_the_server_may_ask_for_more(world, monkeypatch):
    slept = []
    monkeypatch.setattr(hub, "_PAUSES", (1.0, 2.0, 4.0, 8.0))
    monkeypatch.setattr(hub.time, "sleep", slept.append)
    world.always = status(503)
    with pytest.raises(HubServerError):
        get(world)
    assert slept == [1, 2, 4, 8]
    slept.clear()
    world.always, world.faults = None, [status(503, Retry_After="20"), status(503, Retry_After="9999"), status(503, Retry_After="soon")]
    get(world)
    assert slept == [20, 60, 4]


def impatient(monkeypatch, seconds):
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, name, seconds)


def test_a_server_that_hangs_is_given_up(world, monkeypatch):
    impatient(monkeypatch, 0.1)
    world.always = hang
    with pytest.raises(HubServerError, match="timed out|broke off"):
        get(world)


def test_a_server_that_hangs_in_the_middle(world, monkeypatch):
    "Patience ends where the server stalls, and is back for the next try."
    def stalls(h):
        data = h.server.world.blobs[sha(OLD)]
        h.send_response(200)
        h.send_header("Content-Length", str(len(data)))
        h.end_headers()
        h.wfile.write(data[:200_000])
        hang(h)
    real = hub._ask

    def ask(spec):
        found = real(spec)
        impatient(monkeypatch, 120 if leftovers(world) else 2)
        return found
    monkeypatch.setattr(hub, "_ask", ask)
    world.faults = [fine, stalls]
    assert get(world).read_bytes() == OLD and world.gets()[1][0] is not None


def closed_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_no_network(world, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(HubOfflineError, match="(?s)offline.*xland-minigrid benchmark generate --preset") as caught:
        get(world)
    assert isinstance(caught.value, ConnectionError) and "\n" not in str(caught.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(HubOfflineError, match="no-such-host"):
        get(world)


def test_the_network_goes_away_in_the_middle_and_comes_back(world, monkeypatch):
    """After something has arrived, a refused connection is worth waiting for."""
    good, real = os.environ["HF_ENDPOINT"], hub._ask
    gone = []

    def ask(spec):
        if leftovers(world) and len(gone) < 2:
            gone.append(1)
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
        else:
            monkeypatch.setenv("HF_ENDPOINT", good)
        return real(spec)
    monkeypatch.setattr(hub, "_ask", ask)
    world.faults = [fine, cut(200_000)]
    assert get(world).read_bytes() == OLD and len(gone) == 2


def test_without_a_network_the_last_copy_serves(world, monkeypatch):
    path = get(world)
    world.stop()
    with pytest.warns(UserWarning, match="copy from last time"):
        assert get(world) == path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(world, sha256=sha(OLD)) == path
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert get(world) == path
        with pytest.raises(HubOfflineError):
            get(world, sha256=sha(NEW))
    path.write_bytes(OLD[:-1])
    with pytest.raises(HubOfflineError):
        get(world)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(world, "stop", lambda: None)


def test_offline_mode_is_obeyed(world, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubOfflineError, match="HF_HUB_OFFLINE forbids.*benchmark generate"):
        get(world)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubOfflineError, match="HF_HUB_OFFLINE"):
        get(world)
    assert not world.log


def test_a_file_that_huggingface_hub_has_is_used(world, monkeypatch):
    theirs = Path(huggingface_hub.constants.HF_HUB_CACHE) / "datasets--someone--tasks"
    place = theirs / "snapshots" / COMMIT / "folder" / "tiny.safetensors"
    place.parent.mkdir(parents=True)
    place.write_bytes(OLD)
    (theirs / "refs").mkdir()
    (theirs / "refs" / "main").write_text(COMMIT)
    assert get(world) == place and not world.gets()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get(world) == place and get(world, sha256=sha(OLD)) == place
    monkeypatch.delenv("HF_HUB_OFFLINE")
    place.write_bytes(NEW)
    assert get(world).read_bytes() == OLD, "a damaged copy there is not used"


def test_the_token_goes_to_the_hub_alone(world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(world)
    tokens = {path.split("/")[1]: headers.get("Authorization") or headers.get("authorization") for _, path, headers in world.log}
    assert tokens == {"datasets": "Bearer hf_secret", "cdn": None}
    assert "hf_secret" not in "".join(p.read_text(errors="replace") for p in world.cache.rglob("*.json"))


def test_no_room(world, monkeypatch):
    usage = hub.shutil.disk_usage
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: usage(folder)._replace(free=1000))
    with pytest.raises(HubSpaceError, match="XLAND_MINIGRID_DATA"):
        get(world)
    monkeypatch.setattr(hub.shutil, "disk_usage", usage)

    class Full:
        def __init__(self, file):
            self.file = file
        def write(self, data):
            self.file.write(data[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")
        def __enter__(self):
            return self
        def __exit__(self, *_):
            self.file.close()
    monkeypatch.setattr(hub, "open", lambda path, mode: Full(open(path, mode)), raising=False)
    with pytest.raises(HubSpaceError, match="no room"):
        get(world)
    monkeypatch.delattr(hub, "open")
    assert get(world).read_bytes() == OLD and world.gets()[-1][0] == "bytes=1000-"


def test_a_folder_that_cannot_be_written_to_is_not_the_networks_fault(world, monkeypatch):
    world.cache.write_text("a file is in the way")
    with pytest.raises(OSError) as caught:
        get(world)
    assert not isinstance(caught.value, HubError)


def test_announcements_that_lie(world):
    def huge(h):
        h.send(302, {"ETag": '"x"', "X-Repo-Commit": COMMIT, "X-Linked-Size": 1 << 60, "X-Linked-Etag": f'"{"a" * 64}"', "Location": f"http://localhost:{h.server.server_port}/cdn/x/y"})
    world.always = huge
    with pytest.raises(HubSpaceError):
        get(world)
    world.always, world.large = None, False
    for etag in ("../../../out", "/etc/out", "a" * 300, "..", "con:"):
        world.etag = etag
        path = get(world)
        assert path.read_bytes() == OLD and world.cache.resolve() in path.resolve().parents
    assert not (world.cache.parent / "out").exists()


def test_two_at_once_download_once(world):
    paths, begin = [], threading.Barrier(3)
    threads = [threading.Thread(target=lambda: (begin.wait(120), paths.append(get(world)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 3 and paths[0].read_bytes() == OLD and len(world.gets()) == 1


def test_names_that_are_none(tmp_path):
    wrong = ["someone/tasks/file", "hub:tasks/file", "hub:", "hub:a/b/", "hub:a/b/../c", "hub:a/b//c", "hub:../b/c", "hub:a/../c/d", "hub:a/b/c@",
                                  "hub:a/b/c@../x", "hub:a/b/c@/x", "hub:a/b/c\\d", "hub:a/b/c\nd", "hub:a/b/./c", "https://x/y", "", "hub:ä/b/c", "hub:a/b/c@x y"]
    assert refusals({spec: (lambda spec=spec: fetch(spec, cache=tmp_path), ValueError, "write hub:OWNER/REPO/FILE") for spec in wrong}) == {}
    assert not list(tmp_path.iterdir())


def test_names_that_the_library_refuses(world):
    with pytest.raises(ValueError, match="names no file"):
        get(world, "hub:some--one/ta..sks/file")


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="hub:OWNER/REPO/FILE"):
        fetch(tmp_path / "file")
    for wrong in ("abc", "g" * 64, "", 7):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            fetch(SPEC, wrong, cache=tmp_path)


def test_without_the_package(monkeypatch, tmp_path):
    import builtins
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.split(".")[0] == "huggingface_hub":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        fetch(SPEC, cache=tmp_path)


def test_the_default_folder(world, monkeypatch, tmp_path):
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "data"))
    assert tmp_path / "data" / "hub" in fetch(SPEC, progress=False).parents


def test_a_benchmark_from_the_hub(world, monkeypatch, tmp_path):
    "The whole way: cut, resumed, checked, loaded; and a file that arrives well and is no benchmark."
    from xland_minigrid.benchmarks import BenchmarkFileError, generate_benchmark, load_benchmark
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "data"))
    tasks = generate_benchmark("small", n=2000)
    data = tasks.save(tmp_path / "tiny.safetensors").read_bytes()
    world.files["folder/tiny.safetensors"] = data
    world.faults = [status(503), fine, cut(len(data) // 2)]
    loaded = load_benchmark(SPEC, sha256=sha(data), progress=False)
    assert all((getattr(loaded, name) == getattr(tasks, name)).all() for name in ("goals", "rules", "init_tiles", "num_rules"))
    with pytest.raises(HubChecksumError):
        load_benchmark(SPEC, sha256=sha(OLD), progress=False)
    world.files["folder/tiny.safetensors"] = OLD
    with pytest.raises(BenchmarkFileError):
        load_benchmark(SPEC, progress=False)
    world.files["folder/tiny.safetensors"] = data
    assert len(load_benchmark(SPEC, progress=False)) == 2000
