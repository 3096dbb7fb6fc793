"""Checkpoints: whole or not there, whatever happens to the process, the disk and the files."""
import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xland_minigrid.baselines import checkpoint as module
from xland_minigrid.baselines.checkpoint import CheckpointError, Checkpoints, first_says, load_together, to_arrays

TREE = {"w": jnp.arange(1000.), "n": jnp.int32(2)}


def same_bits(a, b):
    a, b = to_arrays(a), to_arrays(b)
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a)


def count(n):
    return {**TREE, "n": jnp.int32(n)}


# What comes back ------------------------------------------------------------------------------------------------------------------------

def test_every_kind_of_array_comes_back_bit_for_bit(tmp_path):
    tree = {"bf16": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16), "nan": jnp.array([jnp.nan, jnp.inf, -0.0]), "bool": jnp.array([True, False]),
            "byte": jnp.arange(256, dtype=jnp.uint8), "scalar": jnp.float32(3), "empty": jnp.zeros((0, 4), jnp.int16), "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3), "raw": jax.random.PRNGKey(0), "numpy": np.arange(3, dtype=np.int32)[::-1],
            "nested": [(jnp.ones(2), {"a": jnp.zeros((2, 3))}), None]}
    Checkpoints(tmp_path / "c").save(0, tree)
    loaded, record = Checkpoints(tmp_path / "c").load(tree)
    assert same_bits(loaded, tree) and jax.random.key_impl(loaded["keys"]) == jax.random.key_impl(tree["keys"])
    assert record["about"] == {} and set(record["versions"]) >= {"jax", "flax", "xland_minigrid"}
    assert Checkpoints(tmp_path / "c").check() == record


def test_the_tree_may_be_donated_or_overwritten_as_soon_as_save_returns(tmp_path):
    use_up = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    mine, about = np.arange(5.), {"list": [1]}
    with Checkpoints(tmp_path / "c") as kept:
        state = {"w": jnp.arange(100_000.), "mine": mine}
        kept.save(1, state, about)
        use_up({"w": state["w"]})
        mine[:] = -1
        about["list"].append(2)
    like = {"w": jax.ShapeDtypeStruct((100_000,), jnp.float32), "mine": np.zeros(5)}
    assert state["w"].is_deleted()
    with pytest.raises(CheckpointError, match="float64"):
        kept.load(jax.tree.map(jnp.asarray, like | {"w": jnp.zeros(100_000)}))
    arrays = kept.read(1)[2]
    assert (arrays["['w']"] == np.arange(100_000.)).all() and (arrays["['mine']"] == np.arange(5.)).all() and kept.record()["about"] == {"list": [1]}
    loaded, _ = kept.load({"w": state["w"]})
    assert (loaded["w"] == jnp.arange(100_000.)).all(), "what was donated still says what fits"


# In the background ----------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def held(kept):
    "The background stands still in the middle of a checkpoint, everything written and nothing renamed, until the event is set."
    kept.save(0, count(0))
    kept.wait()
    there, go = threading.Event(), threading.Event()
    replace = os.replace

    def slow(*args):
        there.set()
        assert go.wait(30)
        return replace(*args)

    os.replace = slow
    try:
        yield there, go
    finally:
        go.set()
        os.replace = replace


def test_saving_goes_on_beside_training_and_deletes_nothing_too_early(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1) as kept, held(kept) as (there, go):
        kept.save(1, count(1))
        assert there.wait(30) and kept.steps() == [0], "save has returned; the new one is not listed and the old one is not deleted"
        assert any(p.name.endswith(".part") for p in kept.folder.iterdir())
        assert Checkpoints(kept.folder).load(TREE)[0]["n"] == 0, "others can read meanwhile"
        second = threading.Thread(target=kept.save, args=(2, count(2)))
        second.start()
        assert kept._writing[0] == 1, "the second waits for the first"
        go.set()
        second.join(30)
    assert kept.steps() == [2] and kept.load(TREE)[0]["n"] == 2


def test_without_with_it_is_whole_on_return(tmp_path):
    kept = Checkpoints(tmp_path / "c", keep=2)
    for step in (3, 5, 5, 9):
        assert kept.save(step, count(step)).is_file() and kept.check(step)
    assert kept.steps() == [5, 9] and kept._thread is None
    kept.wait(), kept.close()
    assert kept.save(5, count(100)) == kept.path(5) and kept.load(TREE, 5)[0]["n"] == 5, "the same number twice changes nothing"
    kept.save(1, count(1))
    assert kept.steps() == [1, 9], "what was just written stays, even with a low number"


# When writing fails ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def failing(monkeypatch):
    "Writing fails in the middle, until it is called with None."
    really = module.write_checkpoint

    def fail(error):
        def write(path, *args):
            with module.appearing(path) as part:
                Path(part).write_bytes(b"half")
                raise error
        monkeypatch.setattr(module, "write_checkpoint", really if error is None else write)

    return fail


@pytest.mark.parametrize("error, words", [
    (OSError(errno.ENOSPC, "No space left on device"), r"No space left for the checkpoint of step 2 in .*: free some or choose another out; .* step 1\.$"),
    (ValueError("I/O error: No space left on device (os error 28)\nmore"), r"No space left .* step 1\.$"),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "No space left .* step 1"),
    (PermissionError(errno.EACCES, "Permission denied"), r"step 2 could not be written to .* \(Permission denied\).* step 1\.$"),
    (RuntimeError("something\nelse"), r"\(something\)")])
def test_a_failed_write_is_one_sentence_and_loses_nothing(tmp_path, failing, error, words):
    with Checkpoints(tmp_path / "c", keep=1) as kept:
        kept.save(1, count(1))
        kept.wait()
        failing(error)
        kept.save(2, count(2))
        with pytest.raises(CheckpointError, match=words) as caught:
            kept.wait()
        assert caught.value.__cause__ is error and "\n" not in str(caught.value)
        kept.wait()  # it is said once
        assert [p.name for p in kept.folder.iterdir() if p.name != ".writer"] == ["1.safetensors"], "the space is given back, the old one stays"
        kept.save(2, count(2))
        with pytest.raises(CheckpointError, match=words):
            kept.save(3, count(3))
        failing(None)
        kept.save(2, count(2))
    assert kept.steps() == [2] and kept.load(TREE)[0]["n"] == 2, "once there is room again, it goes on"


def test_what_ended_the_block_is_not_hidden_by_a_failed_write(tmp_path, failing):
    kept = Checkpoints(tmp_path / "c")
    for step, ending, expected in ((1, lambda: None, CheckpointError), (2, lambda: 1 / 0, ZeroDivisionError)):
        with pytest.raises(expected) as caught, kept:
            kept.save(step, TREE)
            kept.wait()
            failing(OSError(errno.ENOSPC, "No space left on device"))
            kept.save(step + 1, TREE)
            ending()
        failing(None)
        assert "No space left" in str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
        assert kept._thread is None and kept.steps()[-1] == step, "and it is closed"


def test_a_file_size_limit_of_the_system(tmp_path):
    "A real write that the operating system refuses in the middle, not a pretended one."
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path / "c", keep=1) as kept:
        kept.save(1, TREE)
        kept.wait()
        large = {**TREE, "w": jnp.asarray(np.random.default_rng(0).random(1_000_000), jnp.float32)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            kept.save(2, large)
            with pytest.raises(CheckpointError, match=r"step 2 could not be written .*File too large.*make room.* step 1\.$"):
                kept.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert kept.steps() == [1] and same_bits(kept.load(TREE)[0], TREE)
        kept.save(2, large)
    assert kept.steps() == [2] and same_bits(kept.load(large)[0], large)


FULL_DISK = """
import numpy as np, sys
from xland_minigrid.baselines.checkpoint import CheckpointError, Checkpoints
noise = {"w": np.random.default_rng(0).random(25_000)}
with Checkpoints(sys.argv[1] + "/run", keep=1) as kept:
    kept.save(1, noise)
    kept.wait()
    try:
        kept.save(2, {"w": np.random.default_rng(0).random(1_000_000)})
        kept.wait()
    except CheckpointError as error:
        print(error)
    print(kept.steps(), kept.check()["about"])
    kept.save(3, noise)
print(kept.steps())
try:
    with open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
        for size in [4096] * 300 + [1] * 5000:
            file.write(bytes(size))
except OSError as error:
    print(error.strerror)
try:
    kept.save(4, noise)
except CheckpointError as error:
    print(error)
print(kept.steps(), kept.check()["about"])
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    "A file system of one megabyte, where this machine lets us make one."
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run([*mount, sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("No space left for the checkpoint of step 2 in") and lines[0].endswith("the last whole checkpoint is step 1."), done
    assert lines[1:4] == ["[1] {}", "[3]", "No space left on device"] and lines[5:] == ["[3] {}"]
    assert lines[4].startswith("No space left for the checkpoint of step 4") and lines[4].endswith("step 3.") and "Traceback" not in done.stderr


def test_folders_that_cannot_be_written_to_are_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    hopeless = [tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")]
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        hopeless.append(tmp_path / "locked" / "run")
    for folder in hopeless if sys.platform == "linux" else hopeless[:2]:
        for call in (Checkpoints(folder).open, lambda: Checkpoints(folder).save(1, TREE), Checkpoints(folder).__enter__):
            with pytest.raises(CheckpointError, match="cannot be written to .*choose another out"):
                call()


def test_two_writers_do_not_share_a_folder(tmp_path):
    pytest.importorskip("fcntl")
    with Checkpoints(tmp_path / "c") as kept:
        kept.save(1, TREE)
        kept.wait()
        (kept.folder / ".2.safetensors.x.part").touch()
        for call in (Checkpoints(kept.folder).open, lambda: Checkpoints(kept.folder).save(5, TREE)):
            with pytest.raises(CheckpointError, match=rf"Another process \({os.getpid()}\) writes"):
                call()
        assert (kept.folder / ".2.safetensors.x.part").exists(), "nobody clears away what another is writing"
        assert Checkpoints(kept.folder).load(TREE)
    Checkpoints(kept.folder).save(5, TREE)
    assert Checkpoints(kept.folder).steps() == [1, 5]


# What lies in the folder ----------------------------------------------------------------------------------------------------------------

def test_only_whole_numbers_count_and_leftovers_are_cleared(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    kept.save(4, TREE)
    others = {"4.damaged", "007.safetensors", "².safetensors", "-1.safetensors", "notes"}
    for name in {".7.safetensors.abc.part", ".8.safetensors.def.part", *others}:
        (kept.folder / name).touch()
    (kept.folder / "12.safetensors").mkdir()
    assert kept.steps() == [4]
    with kept:
        assert {p.name for p in kept.folder.iterdir()} == {"4.safetensors", "12.safetensors", ".writer", *others}
        kept.save(7, TREE)
    assert kept.steps() == [4, 7]


def test_whatever_happens_to_a_file_is_noticed_or_harmless(tmp_path):
    "A checkpoint cut, emptied, changed at any place, deleted: the values are exactly right or the sentence names the older checkpoint."
    kept = Checkpoints(tmp_path / "c")
    for step in (1, 2):
        kept.save(step, count(step), {"step": step})
    data, refused = kept.path(2).read_bytes(), 0
    places = [*range(0, len(data), 97), len(data) - 1]
    for content in (b"", *(data[:place] for place in places), *(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1:] for place in places)):
        kept.path(2).write_bytes(content)
        try:
            loaded, record = kept.load(TREE)
            assert same_bits(loaded, count(2))
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and ("is damaged" in str(error) and "the older one, step 1" in str(error) or "has no" in str(error) or "in this run" in str(error))
    assert refused > 1.8 * len(places), "little in the file may be changed without harm: the versions, and what the run says about itself"
    kept.path(2).unlink()
    assert kept.load(TREE)[0]["n"] == 1
    kept.path(2).write_bytes(data)
    assert kept.load(TREE)[0]["n"] == 2


def damage(kept, step):
    kept.path(step).write_bytes(kept.path(step).read_bytes()[:-1])


def test_a_damaged_one_is_never_skipped_silently(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    for step in (1, 2):
        kept.save(step, count(step))
    for _ in range(2):
        damage(kept, 2)
        for call in (kept.check, lambda: kept.load(TREE)):
            with pytest.raises(CheckpointError, match="damaged.*older one, step 1"):
                call()
        kept.path(2).unlink()
        assert kept.steps() == [1] and kept.load(TREE)[0]["n"] == 1
        kept.save(2, count(2))
        assert kept.check(2)
    damage(kept, 1)
    with pytest.raises(CheckpointError, match="no older one, so train again"):
        kept.check(1)


def test_a_record_that_was_rewritten_is_damage(tmp_path):
    from safetensors.numpy import load_file, save_file
    kept = Checkpoints(tmp_path / "c")
    kept.save(1, TREE)
    arrays, record = load_file(kept.path(1)), kept.record()
    for changed in ([], {"about": {}}, record | {"arrays": {k: [[3], "float32", "0"] for k in record["arrays"]}}):
        save_file(arrays, kept.path(1), metadata={"record": json.dumps(changed)})
        with pytest.raises(CheckpointError):
            kept.load(TREE)


@pytest.mark.parametrize("call, error, words", [
    (lambda f: Checkpoints(f, keep=0), ValueError, "at least 1"), (lambda f: Checkpoints(f, keep=2.5), ValueError, "keep is 2.5"),
    (lambda f: Checkpoints(f, keep=None), ValueError, "integer"), (lambda f: Checkpoints(f).save(-1, TREE), ValueError, "step is -1"),
    (lambda f: Checkpoints(f).save("3", TREE), ValueError, "step is '3'"), (lambda f: Checkpoints(f).save(1, {}), ValueError, "something to save"),
    (lambda f: Checkpoints(f).save(1, {"x": jnp.zeros(0)}), ValueError, "something to save"),
    (lambda f: Checkpoints(f).save(1, TREE, {"x": object()}), TypeError, "about is not JSON"), (lambda f: Checkpoints(f).check(), CheckpointError, "no checkpoint"),
    ])
def test_wrong_arguments(tmp_path, call, error, words):
    with pytest.raises(error, match=words):
        call(tmp_path / "c")
    assert Checkpoints(tmp_path / "c").steps() == []


# Several processes ----------------------------------------------------------------------------------------------------------------------

def test_a_process_that_does_not_write_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Checkpoints(tmp_path / "c") as silent:
        assert silent.save(1, TREE) == tmp_path / "c" / "1.safetensors"
        silent.wait()
    assert not (tmp_path / "c").exists() and first_says(lambda: {"a": 1}) == {"a": 1}
    monkeypatch.undo()
    Checkpoints(tmp_path / "c").save(1, TREE)
    assert same_bits(load_together(silent, TREE)[0], TREE)


TWO = """
import sys
import jax, jax.numpy as jnp, numpy as np
i, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, i)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from xland_minigrid.baselines.checkpoint import CheckpointError, Checkpoints, first_says, load_together, to_arrays
everywhere = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec())
tree = jax.jit(lambda: {"w": jnp.arange(6.), "zero": -jnp.zeros(3), "key": jax.random.key(5), "b": jnp.full(3, 1.5, jnp.bfloat16), "empty": jnp.zeros((0, 3))},
               out_shardings=everywhere)()
assert not tree["w"].is_fully_addressable
with Checkpoints(folder, keep=2) as kept:
    for step in range(4 if i == 0 else 2):  # nobody waits for anybody
        kept.save(step, tree, {"step": step})
mine = Checkpoints(folder if i == 0 else "/nowhere")
loaded, record = load_together(mine, tree)
a, b = to_arrays(loaded), to_arrays(tree)
assert a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() and a[k].dtype == b[k].dtype for k in a) and record["about"] == {"step": 3}
assert first_says(lambda: mine.steps()) == [2, 3]
try:
    load_together(mine, {"other": jnp.zeros(3)})
except CheckpointError as error:
    print(error)
if i == 1:
    assert Checkpoints(folder).load(tree)[1] == record, "each may also read by itself"
"""


@pytest.mark.slow
def test_two_processes_one_writes_both_get_the_same(tmp_path):
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [subprocess.Popen([sys.executable, "-c", TWO, str(i), str(port), str(tmp_path / "c")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for i in range(2)]
    try:
        told = [p.communicate(timeout=120) for p in start]
    finally:
        [p.kill() for p in start]
    assert [p.returncode for p in start] == [0, 0], told
    said = [[line for line in out.splitlines() if "checkpoint" in line] for out, _ in told]
    assert said[0] == said[1] and "has no ['other']" in said[0][0]


# Killed ---------------------------------------------------------------------------------------------------------------------------------

# Everything that the process does to its files shows up on stdout, and takes a little longer than it would: whoever reads along can kill at any of these
# moments, or a moment later, and many of them lie inside a write.
WATCHED = """
import os, sys, time
folder = os.path.abspath(sys.argv[1])
def note(event, args):
    if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"} and args and isinstance(args[0], (str, os.PathLike)) \\
            and os.path.abspath(args[0]).startswith(folder + os.sep):
        os.write(1, b".")
        time.sleep(0.001)
"""

TOY = WATCHED + """
import numpy as np
from xland_minigrid.baselines.checkpoint import Checkpoints
kept, last = Checkpoints(folder, keep=2), int(sys.argv[2])
state = {"w": np.arange(20_000, dtype=np.float32) % 7, "n": np.int32(0)}
if kept.steps():
    state = {name: np.array(x) for name, x in kept.load({"w": np.zeros(20_000, np.float32), "n": np.int32(0)})[0].items()}
sys.addaudithook(note)
with kept:
    while state["n"] < last:
        state = {"w": (state["w"] * np.float32(1.1) + 1) % 7, "n": np.int32(state["n"] + 1)}
        kept.save(int(state["n"]), state)
"""

TRAIN = WATCHED + """
from xland_minigrid.baselines import demo
from xland_minigrid.baselines.checkpoint import Checkpoints
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, train
config = TrainConfig(size=5, max_steps=12, total_steps=int(sys.argv[2]) * 32 * 40, num_envs=32, steps_per_task=40, steps_per_update=20, out=folder, checkpoint_minutes=0.0,
                     ppo=PPOConfig(num_minibatches=4), network=NetworkConfig(embedding=4, encoder_width=32, event=8, memory=16, head=32))
tasks = demo.hold_tasks(demo.OBJECTS, 300)
sys.addaudithook(note)
train(config, tasks, progress=False, resume=bool(Checkpoints(folder + "/checkpoints").steps()), on_round=lambda row: os.write(1, b"r"))
"""


def run_and_kill(program, args, moment: int | None, pause: float, sign=b".r") -> bool:
    "Run until it has shown `moment` signs and a little longer, then kill; None lets it end. Whether it was killed."
    child = subprocess.Popen([sys.executable, "-c", program, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = 0
    while moment is not None and seen < moment and (byte := child.stdout.read(1)):
        seen += byte in sign
    if moment is not None and seen >= moment:
        threading.Event().wait(pause)
        child.kill()
    _, err = child.communicate()
    assert child.returncode in (0, -9), err.decode()
    return child.returncode == -9


def whole(folder, like):
    "The numbers of the checkpoints, each of which is read to the end."
    kept = Checkpoints(folder)
    for step in kept.steps():
        kept.load(like, step)
    return kept.steps()


def kill_the_toy(folder, kills: int, seed: int):
    chance, killed, last = random.Random(seed), 0, 120 * kills  # a process shows at most 90 signs before it is killed, at least one for each checkpoint
    like = {"w": jnp.zeros(20_000), "n": jnp.int32(0)}
    before = []
    while killed < kills:
        killed += run_and_kill(TOY, [folder, last], chance.randrange(3, 90), chance.random() * 0.02)
        now = whole(folder, like)
        assert len(now) <= 3 and (now or [0])[-1] >= (before or [0])[-1], "nothing whole is ever lost; one more may lie there, about to be deleted"
        assert (now or [0])[-1] < last, "this test kills too late to prove anything"
        before = now
    assert not run_and_kill(TOY, [folder, last], None, 0)
    assert whole(folder, like) == [last - 1, last]
    assert {p.name for p in Path(folder).iterdir()} == {".writer", f"{last - 1}.safetensors", f"{last}.safetensors"}, "no leftovers"
    w = np.arange(20_000, dtype=np.float32) % 7
    for _ in range(last):
        w = (w * np.float32(1.1) + 1) % 7
    assert np.asarray(Checkpoints(folder).load(like)[0]["w"]).tobytes() == w.tobytes()


def test_killed_while_it_saves(tmp_path):
    kill_the_toy(tmp_path / "c", kills=1, seed=0)


@pytest.mark.slow
def test_killed_while_it_saves_many_times(tmp_path):
    kill_the_toy(tmp_path / "c", kills=3, seed=1)


@pytest.mark.slow
def test_training_killed_twice_ends_where_it_would_have_ended(tmp_path):
    "Two deaths by SIGKILL, anywhere between two rounds or inside a write; the last parameters are those of a run that nobody killed."
    rounds, steps = 40, 40 * 32 * 40
    assert not run_and_kill(TRAIN, [tmp_path / "whole", rounds], None, 0)
    chance, killed, reached = random.Random(2), 0, []
    while killed < 2:
        assert run_and_kill(TRAIN, [tmp_path / "run", rounds], chance.randrange(1, 40), chance.random() * 0.05), "killed too late to prove anything"
        killed += 1
        reached.append((Checkpoints(tmp_path / "run" / "checkpoints").steps() or [0])[-1])
    assert reached == sorted(reached) and 0 < reached[-1] < steps
    assert not run_and_kill(TRAIN, [tmp_path / "run", rounds], None, 0)
    ends = [Checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "run")]
    records = [end.check() for end in ends]
    assert ends[0].steps()[-1] == ends[1].steps()[-1] == steps
    assert records[0]["arrays"] == records[1]["arrays"], "the same digests of every array: parameters, optimiser, key"
    assert all("[" in name or "." in name for name in records[0]["arrays"]) and len(records[0]["arrays"]) > 20
