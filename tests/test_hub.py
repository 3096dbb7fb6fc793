"""Files from the hub: the real loading code against a local server that speaks the hub's protocol and misbehaves on request."""
import hashlib
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub", minversion="1.0")  # older ones work, and take minutes over trouble
import huggingface_hub.constants  # noqa: E402

from xland_minigrid.benchmarks.hub import HubError, fetch  # noqa: E402
from worlds import refusals  # noqa: E402

SPEC = "hub:someone/tasks/folder/tiny.safetensors"
COMMIT = "c0ffee" + "0" * 34
OLD = os.urandom(400_000)
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

fine = lambda h: False


@pytest.fixture
def world(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.world = SimpleNamespace(
        log=[], faults=[], always=None, blobs={}, repos={"someone/tasks"}, revisions={"main", "v2", "refs/pr/1", COMMIT}, large=True, etag=None,
        files={"folder/tiny.safetensors": OLD, "notes": b"small"}, cache=tmp_path / "kept")
    server.world.gets = lambda: [(h.get("Range"), p) for c, p, h in server.world.log if c == "GET"]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    constants = huggingface_hub.constants
    for name, value in [("HF_HUB_DOWNLOAD_TIMEOUT", 120), ("HF_HUB_ETAG_TIMEOUT", 120), ("HF_HUB_CACHE", str(tmp_path / "theirs")), ("HF_HUB_OFFLINE", False),
                        ("HF_TOKEN_PATH", str(tmp_path / "token"))]:
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    server.world.stop = lambda: (server.shutdown(), server.server_close())
    yield server.world
    server.world.stop()

def get(world, spec=SPEC, sha256=None, **options):
    return fetch(spec, sha256, **{"progress": False, "cache": world.cache, **options})


@pytest.mark.parametrize("large", [True, False], ids=["content network", "from the hub itself"])
def test_a_file_arrives_and_is_fetched_once(world, large, capfd):
    world.large = large
    path = get(world, progress=True)
    assert path.read_bytes() == OLD and path.name == "tiny.safetensors" and world.cache in path.parents
    assert len(world.gets()) == 1
    capfd.readouterr()
    assert get(world) == path and len(world.gets()) == 1
    asked = len(world.log)
    assert get(world, sha256=sha(OLD).upper()) == path and len(world.log) == asked, "with its sum the hub need not be asked"
    assert capfd.readouterr().err == ""


def test_revisions_and_folders(world):
    for revision in ("v2", "refs/pr/1", COMMIT):
        assert get(world, f"{SPEC}@{revision}").read_bytes() == OLD
    assert get(world, "hub:someone/tasks/notes").read_bytes() == b"small"


def test_a_cut_download_goes_on_where_it_stopped(world, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    world.faults = [fine, lambda h: h.answer(cut=150_000) if h.command == "GET" else False]
    assert get(world, sha256=sha(OLD)).read_bytes() == OLD
    first, second = (asked for asked, _ in world.gets() if "cdn" in _)
    assert first is None and int(second[6:-1]) > 0


@pytest.mark.parametrize("large", [True, False])
def test_a_wrong_sum_throws_the_file_away(world, large):
    world.large = large
    with pytest.raises(HubError, match=sha(OLD)):
        get(world, sha256="0" * 64)
    assert not [p for p in world.cache.rglob("*") if p.is_file() and p.stat().st_size == len(OLD)]
    assert get(world).read_bytes() == OLD


def test_a_damaged_copy_is_replaced_when_its_sum_is_known(world):
    path = get(world)
    path.resolve().write_bytes(OLD[:1000] + bytes([OLD[1000] ^ 1]) + OLD[1001:])
    with pytest.raises(HubError, match="was deleted"):
        get(world, sha256=sha(OLD))
    assert get(world, sha256=sha(OLD)).read_bytes() == OLD


@pytest.mark.parametrize("spec, says", [
    ("hub:someone/tasks/nothing", "file does not exist"), (f"{SPEC}@v3", "branch, tag or commit does not exist"), ("hub:someone/else/file", "dataset does not exist")])
def test_what_does_not_exist(world, spec, says):
    with pytest.raises(HubError, match=says) as caught:
        get(world, spec)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(spec)


@pytest.mark.parametrize("answer, says", [
    (status(403, X_Error_Code="GatedRepo"), "gated: accept"), (status(403), "hf auth login"), (status(418), "try again later")])
def test_answers_that_end_it(world, answer, says):
    world.always = answer
    with pytest.raises(HubError, match=says):
        get(world)


def test_no_network(world, monkeypatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{s.getsockname()[1]}")
    with pytest.raises(HubError, match="cannot be reached.*xland-minigrid benchmark generate --preset") as caught:
        get(world)
    assert isinstance(caught.value, OSError) and "\n" not in str(caught.value)


def test_without_a_network_the_last_copy_serves(world, monkeypatch):
    path = get(world)
    world.stop()
    assert get(world) == path == get(world, sha256=sha(OLD))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert get(world) == path
    with pytest.raises(HubError):
        get(world, "hub:someone/tasks/notes")
    monkeypatch.setattr(world, "stop", lambda: None)


def test_names_that_are_none(tmp_path):
    wrong = ["someone/tasks/file", "hub:tasks/file", "hub:", "hub:a/b/", "hub:a/b/../c", "hub:a/b//c", "hub:../b/c", "hub:a/../c/d", "hub:a/b/c@",
                                  "hub:a/b/c@../x", "hub:a/b/c@/x", "hub:a/b/c\\d", "hub:a/b/c\nd", "hub:a/b/./c", "https://x/y", "", "hub:ä/b/c", "hub:a/b/c@x y"]
    assert refusals({spec: (lambda spec=spec: fetch(spec, cache=tmp_path), ValueError, "write hub:OWNER/REPO/FILE") for spec in wrong}) == {}
    assert not list(tmp_path.iterdir())


def test_names_that_the_library_refuses(world):
    with pytest.raises(ValueError, match="does not name a file"):
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


def test_a_benchmark_from_the_hub(world):
    "The whole way: asked again, checked, loaded; and a file that arrives well and is no benchmark."
    from xland_minigrid.benchmarks import BenchmarkFileError, generate_benchmark, load_benchmark
    tasks = generate_benchmark("small", n=2000)
    data = tasks.save(world.cache / "tiny.safetensors").read_bytes()
    world.files["folder/tiny.safetensors"] = data
    loaded = load_benchmark(SPEC, sha256=sha(data), progress=False)
    assert all((getattr(loaded, name) == getattr(tasks, name)).all() for name in ("goals", "rules", "init_tiles", "num_rules"))
    with pytest.raises(BenchmarkFileError):
        load_benchmark("hub:someone/tasks/notes", progress=False)
    with pytest.raises(HubError):
        load_benchmark("hub:someone/tasks/notes", sha256=sha(data), progress=False)
