"""The file format: what goes in comes out, what is damaged is refused by name, and nobody ever sees half a file."""
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import xland_minigrid.benchmarks.files as files
from xland_minigrid.benchmarks import (
    PRESETS, Benchmark, BenchmarkFileError, digest, generate_benchmark, generate_rulesets, load_benchmark_from_path)
from worlds import no_hang

FORMS = {"cache": False, "packed": True}


def arrays_of(made):
    return {name: np.asarray(getattr(made, name)) for name in files.FIELDS}


@pytest.fixture(scope="module")
def made():
    return generate_rulesets(PRESETS["medium"], 60)


@pytest.fixture(scope="module")
def wholes(made, tmp_path_factory):
    "The same tasks as a file of each form."
    folder = tmp_path_factory.mktemp("whole")
    return {form: files.write_file(folder / form, arrays_of(made), packed=packed, recipe=PRESETS["medium"]).read_bytes() for form, packed in FORMS.items()}


def manifest_of(path):
    return files.read_file(path)[1]


def equal(one, two):
    return all(one[name].dtype == np.uint8 and np.array_equal(one[name], two[name]) for name in files.FIELDS)


# ---------------------------------------------------------------- what goes in comes out


def test_both_are_read(wholes, made, tmp_path):
    for name, content in wholes.items():
        (tmp_path / name).write_bytes(content)
        arrays, manifest = files.read_file(tmp_path / name)
        assert equal(arrays, arrays_of(made)) and manifest["digest"] == digest(made) and manifest["num_rulesets"] == 60
        assert manifest["recipe"]["chain_depth"] == 2
        with safe_open(tmp_path / name, "numpy") as file:  # any reader of safetensors opens them
            assert json.loads(file.metadata()["benchmark"])["digest"] == digest(made)
    assert equal(load_file(tmp_path / "cache"), arrays_of(made))
    assert len(parts_of(wholes["packed"])[2]) < len(parts_of(wholes["cache"])[2]) / 2


encodings = st.integers(0, 2**32).flatmap(lambda seed: st.tuples(st.just(seed), st.integers(0, 9), st.integers(0, 6), st.integers(0, 5), st.booleans(), st.floats(0, 1)))


@settings(max_examples=60, deadline=None)
@given(encodings)
def test_anything_the_arrays_can_hold_survives(tmp_path_factory, case):
    "Empty rows in the middle, no rules at all, no tasks at all, goals that name positions beyond 15."
    seed, n, width, objects, positions, full = case
    rng = np.random.default_rng(seed)
    goals = rng.integers(0, 15, (n, 5), np.uint8)
    goals[:, 1:] = rng.integers(0, 256 if positions else 16, (n, 4))
    rules, init_tiles = rng.integers(0, 12, (n, width, 7), np.uint8), rng.integers(0, 16, (n, objects, 2), np.uint8)
    rules[rng.random((n, width)) > full] = 0
    init_tiles[rng.random((n, objects)) > full] = 0
    arrays = dict(goals=goals, rules=rules, init_tiles=init_tiles, num_rules=(rules[..., 0] != 0).sum(1).astype(np.uint8))
    folder = tmp_path_factory.mktemp("any")
    for form, packed in FORMS.items():
        again, manifest = files.read_file(files.write_file(folder / form, arrays, packed=packed))
        assert equal(again, arrays) and manifest["form"] == form and [again[f].shape for f in files.FIELDS] == [arrays[f].shape for f in files.FIELDS]


def test_many_blocks(monkeypatch, made, tmp_path):
    "Blocks cut the tasks anywhere, and pieces the bytes."
    for block in (1, 7, 59, 60, 61):
        monkeypatch.setattr(files, "_BLOCK", block)
        path = files.write_file(tmp_path / "packed", arrays_of(made), packed=True)
        assert equal(files.read_file(path)[0], arrays_of(made))
        assert len(files.open_container(path, "benchmark").arrays) == -(-60 // block)
    monkeypatch.setattr(files, "_PIECE", 100)
    path = files.write_file(tmp_path / "cache", arrays_of(made))
    assert equal(files.read_file(path)[0], arrays_of(made))


def test_cache_files_are_mapped_and_aligned(made, tmp_path):
    import jax
    path = files.write_file(tmp_path / "odd", {name: array[:59] for name, array in arrays_of(made).items()})
    arrays = files.read_file(path)[0]
    for array in arrays.values():
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable
    assert jax.device_put(arrays["rules"], jax.devices("cpu")[0]).unsafe_buffer_pointer() == arrays["rules"].ctypes.data
    assert load_benchmark_from_path(path, as_numpy=True).rules.ctypes.data % 64 == 0
    files.write_file(path, {name: array[:5] for name, array in arrays_of(made).items()})  # replaced, not overwritten: the old arrays stay
    assert np.array_equal(arrays["rules"], made.rules[:59])


def test_the_canonical_hash_is_of_the_tasks(made, tmp_path):
    wide = Benchmark(**arrays_of(made)).pad_to(rules=20, tiles=30)
    mixed = wide.take(np.random.default_rng(0).permutation(60))
    hashes = {manifest_of(b.save(tmp_path / "file", packed=packed))["canonical_hash"] for b in (wide, mixed) for packed in (False, True)}
    assert hashes == {files.counted_identities(made.ruleset_ids, made.goal_ids)["canonical_hash"]}
    assert manifest_of(wide.take([0, 0, 1]).save(tmp_path / "file"))["distinct_ruleset_ids"] == 2
    assert manifest_of(wide.take(range(59)).save(tmp_path / "file"))["canonical_hash"] not in hashes


def test_registered_kinds_travel(tmp_path):
    "In both shapes, with their names; where the name means something else, the file is refused; drawn tasks are open wherever the benchmark is."
    import jax

    from xland_minigrid.core.actions import Actions
    from xland_minigrid.core.rules import OneTileRule, on_cells, register_rule, rule_kinds
    def cell(action):
        return register_rule(type("Travelled", (OneTileRule,), {"__module__": __name__, "__qualname__": "Travelled", "when": (action,), "looks": on_cells("ahead")}))
    mine = cell(Actions.TOGGLE)
    try:
        tasks = generate_benchmark("small", n=30, rule_kinds=(mine, 1), solvable=False)
        paths = [tasks.save(tmp_path / form, packed=packed) for form, packed in FORMS.items()]
        for path in paths:
            again, at_home = load_benchmark_from_path(path), load_benchmark_from_path(path, as_numpy=True)
            assert digest(again) == digest(tasks) and manifest_of(path)["kinds"][0][:3] == ["rule", mine.ID, "Travelled"]
            leaves = [jax.tree.leaves(b.sample_rulesets(jax.random.key(0), 4)) for b in (again, at_home)]
            assert again.sample_rulesets(jax.random.key(0), 4).extended is not None and all((x == y).all() for x, y in zip(*leaves, strict=True))
        cell(Actions.PICK_UP)
        for path in paths:
            with pytest.raises(BenchmarkFileError, match="Travelled as declared"):
                files.read_file(path)
    finally:
        rule_kinds.remove(mine.ID)


def test_what_cannot_be_written_is_said(made, tmp_path):
    arrays = arrays_of(made)
    wide = np.zeros((60, 256, 7), np.uint8)
    for wrong, says in [(dict(rules=wide, num_rules=np.zeros(60, np.uint8)), "255"), (dict(num_rules=arrays["num_rules"] + 1), "num_rules"),
                        (dict(init_tiles=arrays["init_tiles"] + 16), "above 15")]:
        with pytest.raises(ValueError, match=says):
            files.write_file(tmp_path / "file", arrays | wrong, packed=True)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the sizes of Table 5

PAPER = {"trivial": 5.7, "small": 13.7, "medium": 17.7, "high": 31.6}  # MB for a million tasks, compressed


@pytest.mark.slow
@pytest.mark.parametrize("preset", PAPER)
def test_packed_files_are_as_small_as_the_papers(preset, tmp_path):
    tasks = generate_benchmark(preset, n=70_000)
    assert tasks.save(tmp_path / "packed", packed=True).stat().st_size / 70_000 <= 1.1 * PAPER[preset]


# ---------------------------------------------------------------- ten thousand ways to be wrong

NASTY = [0, 1, -1, 7, 63, 64, 65, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**48, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), True, False, None, "", "x", "0" * 32, "\ud800", [], {}, [[]],
         [0], [2**62, 2**62], [-1, 1], {"a": 1}, [[[[[]]]]], "goals", "cache", "packed", 2, 3, 99]


def parts_of(content):
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + length])
    return header, json.loads(header["__metadata__"]["benchmark"]), content[8 + length:]


def file_of(header, manifest, data, sign=True):
    "Put a file together again, with a manifest that matches its digest (a forger would)."
    text = json.dumps(manifest, sort_keys=True)
    if sign and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"] |= {"benchmark": text, "benchmark_digest": files.blake(text.encode("utf-8", "surrogatepass"))}
    head = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + data


def places(value, path=()):
    "Every place in a JSON value."
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value, rng):
    "A JSON value with something wrong at a random place: replaced, removed, doubled, one more or less."
    value = json.loads(json.dumps(value))
    *way, last = rng.choice([p for p in places(value) if p])
    at = value
    for key in way:
        at = at[key]
    how = rng.randrange(5)
    if how == 0:
        del at[last]
    elif how == 1 and type(at[last]) is int:
        at[last] += rng.choice([-1, 1, 64, 2**40])
    elif how == 2 and isinstance(at[last], list):
        at[last] = at[last] * 2
    elif how == 3 and isinstance(at[last], dict):
        at["extra"] = at[last]
    else:
        at[last] = rng.choice(NASTY)
    return value


def raw_mutant(content, rng):
    "Damage that knows nothing of the format."
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    b = min(b, a + rng.choice([1, 4, 64, 1000]))
    noise = bytes(rng.randrange(256) for _ in range(b - a))
    if rng.random() < 0.4:  # in the header, where it hurts
        a = rng.randrange(8 + int.from_bytes(content[:8], "little"))
        b, noise = a + 1, bytes([rng.randrange(256)])
    return rng.choice([lambda: content[:a], lambda: content[a:], lambda: content[:a] + content[b:], lambda: content[:b] + content[a:], lambda: content[:a] + noise + content[b:],
                       lambda: content[:a] + bytes(b - a) + content[b:], lambda: content + noise, lambda: content[:a] + b"\xff\xfe" + content[a + 2:],
                       lambda: flipped(content, rng), lambda: flipped(content, rng),
                       lambda: rng.choice([0, 1, a, len(content), 2**22, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + content[8:]])()


def flipped(content, rng):
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def forged_mutant(content, rng):
    "Damage by somebody who knows the format and signs the manifest anew."
    header, manifest, data = parts_of(content)
    how = rng.randrange(6)
    if how == 0:
        return file_of(changed(header, rng), manifest, data, sign=rng.random() < 0.5)
    if how == 1:  # nested as deep as the header may be long
        depth = rng.choice([50, 2_000, 100_000])
        head = b'{"a":' * depth if rng.random() < 0.5 else b"[" * depth
        return len(head).to_bytes(8, "little") + head + data
    if how == 2:  # counts that are huge everywhere they are told
        n = rng.choice([2**20, 2**31, 2**40, 10**12])
        manifest["num_rulesets"] = n
        for name in ("max_rules", "max_init_tiles"):
            manifest[name] = rng.choice([manifest.get(name, 1), 255])
        return file_of(header, manifest, data)
    if how == 3 and "block.0" in header:  # a block that unfolds into more than it should, or into something else
        bomb = bytes(rng.choice([0, 59, 60, 420, 10**6]))
        return with_block(header, manifest, rng.choice([zlib.compress(bomb), zlib.compress(bomb) * 2, b"", b"no block"]))
    if how == 4:  # tensors that overlap or leave gaps
        name = rng.choice([n for n in header if n != "__metadata__"])
        header[name]["data_offsets"] = [rng.choice([0, 1, len(data), o]) for o in header[name]["data_offsets"]]
        return file_of(header, manifest, data)
    return file_of(header, changed(manifest, rng), data)


def with_block(header, manifest, packed):
    "The file of one block with another block in its place."
    header = {"__metadata__": header["__metadata__"], "block.0": {"dtype": "U8", "shape": [len(packed)], "data_offsets": [0, len(packed)]}}
    return file_of(header, manifest, packed)


def fuzz(wholes, made, folder, seeds, monkeypatch):
    "Read mutants: each is refused with the one error, or holds exactly the tasks it says. Returns how many were refused."
    rooms, refused, sentences, real = [], 0, set(), files._room
    monkeypatch.setattr(files, "_room", lambda shape: rooms.append(int(np.prod(shape, dtype=object))) or real(shape))
    path, before = folder / "mutant", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        rng = random.Random(seed)
        content = wholes[rng.choice(sorted(wholes))]
        mutant = rng.choice([raw_mutant, forged_mutant])(content, rng)
        path.unlink(missing_ok=True)
        path.write_bytes(mutant)
        try:
            arrays, manifest = files.read_file(path)
            assert equal(arrays, arrays_of(made)) and manifest["digest"] == digest(made), f"seed {seed} was accepted"
        except BenchmarkFileError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 500, f"seed {seed}: {error}"
            sentences.add(str(error)[len(str(path)):][:100])
    assert max(rooms, default=0) <= files._MOST_GROWTH * 2**16 + files._SMALL
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB
    return refused, sentences


def test_mutants_are_refused(wholes, made, tmp_path, monkeypatch):
    with no_hang():
        refused, sentences = fuzz(wholes, made, tmp_path, range(500), monkeypatch)
    assert 425 <= refused <= 500 and len(sentences) >= 10, sentences  # some change what does not matter: a key nobody reads


@pytest.mark.slow
def test_ten_thousand_mutants_are_refused(wholes, made, tmp_path, monkeypatch):
    with no_hang(1800):
        refused, sentences = fuzz(wholes, made, tmp_path, range(500, 10_500), monkeypatch)
    assert 8_700 <= refused <= 10_000 and len(sentences) >= 14, sentences


def test_every_flipped_bit_of_the_contents_is_found(wholes, tmp_path):
    "Not a sample: one bit of every 23rd byte, in all three files."
    for name, content in wholes.items():
        for place in range(0, len(content), 23):
            path = tmp_path / "file"
            path.unlink(missing_ok=True)
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1:])
            try:
                files.read_file(path)
            except BenchmarkFileError:
                continue
            raise AssertionError(f"byte {place} of {name}")


def test_bombs_are_not_unfolded(wholes, tmp_path):
    "128 MB of zeros in a few kilobytes, in place of a block: refused, and never in memory."
    header, manifest, _ = parts_of(wholes["packed"])
    packer, zeros = zlib.compressobj(9), bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(128)) + packer.flush()
    path = tmp_path / "bomb"
    path.write_bytes(with_block(header, manifest, bomb))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BenchmarkFileError, match="another length"):
        files.read_file(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000


def test_named_mistakes(wholes, tmp_path, made):
    "The sentences for what people meet: each says what is wrong."
    def said(content):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(BenchmarkFileError) as caught:
            files.read_file(tmp_path / "file")
        return str(caught.value)

    header, manifest, data = parts_of(wholes["cache"])
    copy = lambda value: json.loads(json.dumps(value))
    assert "newer version" in said(file_of(copy(header), manifest | {"format_version": 3}, data))
    assert "does not match its digest" not in said(file_of(copy(header), manifest | {"num_rulesets": 61}, data))
    assert "contents do not match its digest" in said(file_of(copy(header), manifest | {"digest": "0" * 32}, data))
    assert "from its beginning to its end" in said(wholes["cache"][:-10]) or "describe" in said(wholes["cache"][:-10])
    assert "header" in said(b"") and "header" in said(b"1234567") and "header" in said((2**63).to_bytes(8, "little") * 9)
    assert "not JSON" in said((4).to_bytes(8, "little") + b"\xff\xfe{}")
    assert "rule 200, which is not built in" in said(file_of_kind(made, 200, tmp_path))
    renamed = {name.replace("goals", "steps"): entry for name, entry in header.items()}
    assert "not those that it announces" in said(file_of(renamed, manifest, data))
    assert "other arrays" in said(files.write_container(tmp_path / "other", "numbers", {}, {}).read_bytes())
    with pytest.raises(FileNotFoundError, match="no file"):
        files.read_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="no file"):
        files.read_file(tmp_path / "pipe")  # and nobody waits for what comes out of it


def file_of_kind(made, kind, folder):
    "A well-formed file that uses a kind and says nothing of it."
    arrays = {name: array.copy() for name, array in arrays_of(made).items()}
    arrays["rules"][arrays["rules"][..., 0] > 0, 0] = kind
    manifest = {"form": "cache", "num_rulesets": 60, "max_rules": arrays["rules"].shape[1], "max_init_tiles": arrays["init_tiles"].shape[1],
                "distinct_ruleset_ids": 60, "distinct_goal_ids": 60, "canonical_hash": "0" * 32, "digest": files.array_digest(arrays)}
    return files.write_container(folder / "kind", "benchmark", manifest, arrays).read_bytes()


# ---------------------------------------------------------------- never half a file


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("packed", FORMS.values(), ids=FORMS)
def test_whatever_fails_leaves_the_old_file_and_nothing_else(made, tmp_path, monkeypatch, fails, error, packed):
    path = files.write_file(tmp_path / "kept", arrays_of(made), packed=packed)
    before = path.read_bytes()

    def break_off(*_):
        raise error

    if fails == "write":
        monkeypatch.setattr(files, "_header", break_off)
    else:
        monkeypatch.setattr(files.os, fails, break_off)
    with pytest.raises(type(error)):
        files.write_file(path, {name: array[:9] for name, array in arrays_of(made).items()}, packed=packed)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk(made, tmp_path):
    "The operating system itself refuses to write on, in the middle of the arrays."
    path = files.write_file(tmp_path / "kept", arrays_of(made))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        for target in (path, tmp_path / "new"):
            with pytest.raises(OSError, match="large"):
                files.write_file(target, arrays_of(made))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["kept"]


WRITERS = """
import os, sys, numpy as np
import xland_minigrid.benchmarks.files as files
path, rows = sys.argv[1], (20_000, 30_000) if os.fork() else (25_000,)
made = [{"goals": np.full((n, 5), 1, np.uint8), "rules": np.full((n, 9, 7), 2, np.uint8), "init_tiles": np.full((n, 16, 2), 3, np.uint8), "num_rules": np.full(n, 9, np.uint8)} for n in rows]
ids = (np.zeros(0, np.uint64),) * 2
while True:
    for arrays in made:
        files.write_file(path, arrays, identities=ids)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_killed_writers_and_many_of_them(tmp_path):
    "Two processes write different tasks to one place until they are killed; whoever reads finds one of the two, whole."
    path, seen = tmp_path / "file", Counter()
    writers = subprocess.Popen([sys.executable, "-c", WRITERS, str(path)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with no_hang(300):
            while len(seen) < 3 or seen.total() < 200:
                if path.exists():
                    seen[len(files.read_file(path)[0]["goals"])] += 1
                elif writers.poll() is not None:
                    raise RuntimeError("the writers ended")
    finally:
        os.killpg(writers.pid, signal.SIGKILL)
        writers.wait()
    assert set(seen) == {20_000, 25_000, 30_000} and len(files.read_file(path)[0]["goals"]) in seen


def test_what_the_killed_leave_is_tidied_an_hour_later(made, tmp_path):
    for name, age in ((".kept.abc.part", 7200), (".kept.new.part", 60), (".other.abc.part", 7200)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    files.write_file(tmp_path / "kept", arrays_of(made))
    assert {p.name for p in tmp_path.iterdir()} == {"kept", ".kept.new.part", ".other.abc.part"}


def test_the_umask_is_respected(made, tmp_path):
    before = os.umask(0o027)
    try:
        assert files.write_file(tmp_path / "file", arrays_of(made)).stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_threads_write_side_by_side(made, tmp_path):
    few = {name: array[:7] for name, array in arrays_of(made).items()}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: files.write_file(tmp_path / "file", few if i % 2 else arrays_of(made), packed=i % 3 == 0), range(24)))
    assert len(files.read_file(tmp_path / "file")[0]["goals"]) in (7, 60) and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_to(made, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "deeper", Path("/proc/nowhere/file")):
        with pytest.raises(OSError):
            files.write_file(path, arrays_of(made))
    assert (tmp_path / "file").read_text() == "in the way"
