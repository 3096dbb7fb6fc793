"""Other people's pickles: arrays come out, nothing else ever happens."""
import bz2
import copyreg
import functools
import importlib
import itertools
import marshal
import operator
import os
import pathlib
import pickle
import pickletools
import random
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import timeit
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xminigrid
import xminigrid.benchmarks as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from xminigrid.core import goals as their_goals
from xminigrid.core import rules as their_rules
from xminigrid.core.grid import pad_along_axis

from xland_minigrid.benchmarks import BenchmarkFileError, generate_benchmark, load_benchmark_from_path
from xland_minigrid.interop import pickles, upstream
from xland_minigrid.interop.pickles import RefusedPickleError, pickled_arrays
from xland_minigrid.interop.upstream import load_upstream_benchmark

from worlds import no_hang

PARTS = ("goals", "rules", "init_tiles")


@pytest.fixture(autouse=True)
def _own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "data"))

def read(data: bytes, tmp_path, **options):
    (tmp_path / "file").write_bytes(data)
    return pickled_arrays(tmp_path / "file", **options)


# What must come out

@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("pack", [bytes, bz2.compress], ids=["plain", "bz2"])
def test_arrays_come_out_as_they_are(tmp_path, library, protocol, pack):
    arrays = {"u1": library.arange(30, dtype=np.uint8).reshape(2, 3, 5), "i4": library.asarray([[-1, 2]], np.int32), "f4": library.asarray(1.5, np.float32),
              "b1": library.asarray([True, False]), "empty": library.zeros((0, 7), np.uint8)}
    if library is np:
        arrays |= {"fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "big": np.arange(3, dtype=">i4"), "part": np.arange(10)[::3], "i8": np.int64([1 << 60])}
    config = {"generation_config": {"chain_depth": 3, "prune_prob": 0.1, "name": "x", "none": None, "list": [1, (2,), True, 1 << 80]}}
    out = read(pack(pickle.dumps(config | arrays, protocol=protocol)), tmp_path)
    assert list(out) == list(arrays)
    for name, array in arrays.items():
        assert out[name].dtype == np.asarray(array).dtype and out[name].shape == array.shape and (out[name] == array).all()
        assert type(out[name]) is np.ndarray and not out[name].flags.writeable


@settings(max_examples=60, deadline=None)
@given(array=st_np.arrays(st.one_of(st_np.integer_dtypes(), st_np.unsigned_integer_dtypes(), st_np.floating_dtypes(sizes=(16, 32, 64)), st_np.boolean_dtypes()),
                          st_np.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
       protocol=st.integers(0, 5), order=st.sampled_from("CF"))
def test_what_comes_out_is_what_pickle_would_load(array, protocol, order):
    data = pickle.dumps({"a": np.asarray(array, order=order)}, protocol=protocol)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        out = pickled_arrays(file.name)["a"]
    np.testing.assert_array_equal(out, pickle.loads(data)["a"])
    assert out.dtype == array.dtype


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickled_benchmark_object(tmp_path, protocol):
    x = jnp.arange(10, dtype=jnp.uint8).reshape(2, 5)
    out = read(pickle.dumps(theirs.Benchmark(x, x + 1, x, x), protocol=protocol), tmp_path)
    assert list(out) == ["goals", "rules", "init_tiles", "num_rules"] and (out["rules"] == x + 1).all()


def test_files_of_older_versions(tmp_path):
    "NumPy 1 had no underscore in `numpy.core`; JAX 0.3 and early 0.4 noted more about an array, and 0.3 kept it elsewhere."
    data = pickle.dumps({"a": jnp.arange(5, dtype=jnp.uint8)}, protocol=2)
    old = data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    older = old.replace(b"cjax._src.array\n_reconstruct_array\n", b"cjax._src.device_array\nreconstruct_device_array\n")
    noted = old.replace(b"X\x09\x00\x00\x00weak_type", b"X\x0b\x00\x00\x00named_shape}sX\x09\x00\x00\x00weak_type")
    assert len({data, old, older, noted}) == 4
    for variant in (data, old, older, noted):
        assert (read(variant, tmp_path)["a"] == range(5)).all()
    five = pickle.dumps({"a": np.arange(5)}, protocol=5)
    five = five.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
    assert (read(five, tmp_path)["a"] == range(5)).all()


# What must not happen. Each payload is first shown to work on `pickle.load`.

class Call:
    "Pickles as a call."
    def __init__(self, function, *arguments, state=None):
        self.parts = (function, arguments) + ((state,) if state is not None else ())

    def __reduce__(self):
        return self.parts

    def __call__(self):
        "The pickler wants what it writes as a function to be one."

class Sub(np.ndarray):
    pass

def _touch_code(marker):
    return f"open({marker!r}, 'w').close()"

def _npy(marker):
    path = f"{marker}.npy"
    np.save(path, np.array([Call(os.system, f"touch {marker}")], object), allow_pickle=True)
    return path

def _script(marker):
    path = f"{marker}.py"
    pathlib.Path(path).write_text(_touch_code(marker))
    return path

CALLS = {
    "posix.system": lambda m: Call(os.system, f"touch {m}"),
    "posix.mkdir": lambda m: Call(os.mkdir, m),
    "posix.open": lambda m: Call(os.open, m, os.O_CREAT | os.O_WRONLY),
    "os.popen": lambda m: Call(os.popen, f"touch {m}; sleep 0.01"),
    "os.makedirs": lambda m: Call(os.makedirs, m),
    "subprocess.Popen": lambda m: Call(subprocess.Popen, ["touch", m]),
    "subprocess.check_call": lambda m: Call(subprocess.check_call, ["touch", m]),
    "subprocess.getoutput": lambda m: Call(subprocess.getoutput, f"touch {m}"),
    "builtins.eval": lambda m: Call(eval, _touch_code(m)),
    "builtins.exec": lambda m: Call(exec, _touch_code(m)),
    "io.open": lambda m: Call(open, m, "w"),
    "codecs.open": lambda m: Call(importlib.import_module("codecs").open, m, "w"),
    "builtins.getattr": lambda m: Call(Call(getattr, Call(importlib.import_module, "os"), "system"), f"touch {m}"),
    "builtins.__import__": lambda m: Call(Call(getattr, Call(__import__, "os"), "system"), f"touch {m}"),
    "importlib.import_module": lambda m: Call(operator.methodcaller("system", f"touch {m}"), Call(importlib.import_module, "os")),
    "functools.partial": lambda m: Call(functools.partial(os.system, f"touch {m}")),
    "operator.methodcaller": lambda m: Call(operator.methodcaller("touch"), pathlib.Path(m)),
    "operator.attrgetter": lambda m: Call(Call(operator.attrgetter("system"), Call(importlib.import_module, "os")), f"touch {m}"),
    "marshal.loads": lambda m: Call(exec, Call(marshal.loads, marshal.dumps(compile(_touch_code(m), "x", "exec")))),
    "numpy.load": lambda m: Call(np.load, _npy(m), None, True),
    "numpy.testing.runstring": lambda m: Call(np.testing.runstring, _touch_code(m), {}),
    "numpy.save": lambda m: Call(np.save, m + "_", Call(np.asarray, [1])),
    "numpy.memmap": lambda m: Call(np.memmap, m, "u1", "w+", 0, (1,)),
    "numpy.fromfile": lambda m: Call(eval, f"({_touch_code(m)}, 1)[1]"),
    "runpy.run_path": lambda m: Call(runpy.run_path, _script(m)),
    "timeit.timeit": lambda m: Call(timeit.timeit, "pass", _touch_code(m), timeit.default_timer, 1),
    "shutil.copyfile": lambda m: Call(shutil.copyfile, _script(m), m),
    "_pickle.loads": lambda m: Call(pickle.loads, pickle.dumps(Call(os.system, f"touch {m}"))),
    "pathlib.Path.touch": lambda m: Call(pathlib.Path.touch, pathlib.Path(m)),
    "builtins.map": lambda m: Call(list, Call(map, os.system, [f"touch {m}"])),
    "subprocess.run": lambda m: Call(subprocess.run, ["touch", m]),
}

# By what name each protocol asks for it first, where that is not the key (protocols 0 to 2 use the modules of Python 2).
FIRST = {"builtins.getattr": "getattr", "builtins.__import__": "getattr", "importlib.import_module": "methodcaller|partial|getattr", "operator.methodcaller": "methodcaller|partial|getattr",
         "operator.attrgetter": "attrgetter", "marshal.loads": "exec", "numpy.load": "numpy.*load", "numpy.testing.runstring": "runstring",
         "numpy.save": "save", "numpy.memmap": "memmap", "numpy.fromfile": "eval", "pathlib.Path.touch": "getattr|touch", "builtins.map": "list",
         "io.open": "open", "functools.partial": "functools.partial", "builtins.eval": "eval", "builtins.exec": "exec",
         "posix.system": r"(posix|nt)\.system", "_pickle.loads": r"_?pickle\.loads",
         **{f"subprocess.{name}": rf"(subprocess|commands)\.{name}" for name in ("Popen", "check_call", "getoutput", "run")}, "posix.mkdir": r"(posix|nt)\.mkdir", "posix.open": r"(posix|nt)\.open"}


def _fires(payload, marker):
    "Whether `pickle.loads` runs it: it really is an exploit."
    before = set(marker.parent.iterdir())
    try:
        held = pickle.loads(payload)
        for _ in range(6000):   # a process of its own may be late on a busy machine
            if set(marker.parent.iterdir()) - before:
                break
            time.sleep(0.01)
        del held
    except Exception:
        pass
    new = set(marker.parent.iterdir()) - before
    for path in new:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return bool(new)


@pytest.mark.parametrize("name", CALLS)
def test_exploits_are_refused_by_name(tmp_path, name):
    marker = tmp_path / "box" / "marker"
    marker.parent.mkdir()
    fired = 0
    for protocol, pack, wrap in itertools.product(range(6), (bytes, bz2.compress), (lambda x: x, lambda x: {"goals": x}, lambda x: [{"a": np.zeros(2)}, (x,)])):
        payload = pickle.dumps(wrap(CALLS[name](str(marker))), protocol=protocol)
        if pack is bytes and (fired == 0 or protocol == 5):
            assert _fires(payload, marker), (name, protocol)
            fired += 1
            payload = pickle.dumps(wrap(CALLS[name](str(marker))), protocol=protocol)  # its helper files have to be there again
        before = set(marker.parent.iterdir())
        with pytest.raises(RefusedPickleError, match=FIRST.get(name, name)) as caught:
            read(pack(payload), tmp_path)
        assert set(marker.parent.iterdir()) == before and "\n" not in str(caught.value)
        with pytest.raises(RefusedPickleError):
            load_upstream_benchmark(tmp_path / "file")
        assert set(marker.parent.iterdir()) == before


def _by_hand(m):
    command = f"touch {m}".encode()
    text = b"\x8c" + bytes([len(command)]) + command
    honest = pickle.dumps({"goals": np.zeros((1, 5), np.uint8)}, protocol=4)[11:]  # without its header and frame
    quoted = b"S'" + command + b"'\n"
    push = lambda s: b"\x8c" + bytes([len(s)]) + s
    return {
        "protocol 0": (b"cos\nsystem\n(" + quoted + b"tR.", "os.system"),
        "instance": (b"(" + quoted + b"ios\nsystem\n.", "os.system"),
        "object": (b"(cos\nsystem\n" + quoted + b"o.", "os.system"),
        "stack global": (b"\x80\x04" + push(b"posix") + push(b"system") + b"\x93" + text + b"\x85R.", "posix.system"),
        "name put together from the memo": (b"\x80\x04" + push(b"posix") + b"\x94" + push(b"system") + b"\x940" b"0" + b"h\x00h\x01\x93" + text + b"\x85R.", "posix.system"),
        "memo with other numbers": (b"\x80\x04" + push(b"system") + b"q\xc8" + push(b"os") + b"r\xff\x00\x00\x000" b"0" + b"j\xff\x00\x00\x00h\xc8\x93" + text + b"\x85R.",
                                    "os.system"),
        "thrown away before an honest end": (b"\x80\x04" + push(b"os") + push(b"system") + b"\x93" + text + b"\x85R0" + honest, "os.system"),
        "thrown away in a mark": (b"\x80\x04(" + push(b"os") + push(b"system") + b"\x93" + text + b"\x85R1" + honest, "os.system"),
        "as a key": (b"\x80\x04}" + push(b"os") + push(b"system") + b"\x93" + text + b"\x85RK\x01s.", "os.system"),
        "dotted": (b"\x80\x04" + push(b"posixpath") + push(b"os.system") + b"\x93" + text + b"\x85R.", "posixpath.os.system"),
        "dotted in a known module": (b"\x80\x04" + push(b"numpy") + push(b"ndarray.__init__.__globals__") + b"\x93.", None),
        "through numpy": (b"\x80\x04" + push(b"numpy") + push(b"os.system") + b"\x93" + text + b"\x85R.", None),
        "new object": (b"\x80\x04" + push(b"subprocess") + push(b"Popen") + b"\x93)\x81.", None),
        "new object with keywords": (b"\x80\x04" + push(b"subprocess") + push(b"Popen") + b"\x93)}\x92.", None),
        "escaped name": (b"V\\u006fs\n0cos\nsystem\n(" + quoted + b"tR.", "os.system"),
    }

HONEST = {"dotted in a known module": "ndarray.__init__", "through numpy": "numpy.os.system", "new object": "subprocess.Popen", "new object with keywords": "subprocess.Popen"}

@pytest.mark.parametrize("name", _by_hand("x"))
def test_payloads_written_by_hand(tmp_path, name):
    marker = tmp_path / "box" / "marker"
    marker.parent.mkdir()
    payload, asks = _by_hand(marker)[name]
    if asks:
        assert name == "through numpy" or _fires(payload, marker)
    for pack in (bytes, bz2.compress):
        with pytest.raises(RefusedPickleError, match=(asks or HONEST[name]).replace(".", r"\.")):
            read(pack(payload), tmp_path)
        assert not marker.exists()


def test_after_the_end(tmp_path):
    "A second pickle behind the first would not be loaded by `pickle.load` either, but such a file is no file of xminigrid."
    honest = pickle.dumps({"goals": np.zeros((1, 5), np.uint8)})
    for tail in (b".", b"cos\nsystem\n.", b"\0"):
        for pack in (bytes, bz2.compress):
            with pytest.raises(BenchmarkFileError, match="more than one object"):
                read(pack(honest + tail), tmp_path)


def test_the_extension_registry(tmp_path):
    marker = tmp_path / "box" / "marker"
    marker.parent.mkdir()
    for code in (200, 50_000, 1 << 20):   # EXT1, EXT2, EXT4
        copyreg.add_extension("posix", "system", code)
        try:
            payload = pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2)
            assert _fires(payload, marker)
            with pytest.raises(RefusedPickleError, match="extension registry"):
                read(payload, tmp_path)
        finally:
            copyreg.remove_extension("posix", "system", code)
    assert not marker.exists()


@pytest.mark.parametrize("payload, says", [
    (b"\x80\x02U\x01xQ.", "persistent"), (b"Pid\n.", "persistent"), (b"\x80\x05\x97.", "buffer"), (b"\x80\x05C\x01x\x98.", "damaged"), (b"\x80\x04\x8f.", "sets"), (b"\x80\x04(\x91.", "sets")])
def test_instructions_that_arrays_do_not_need(tmp_path, payload, says):
    with pytest.raises(BenchmarkFileError, match=says):
        read(payload, tmp_path)


def _array(kind=b"cnumpy\nndarray\n", make=b"cnumpy.core.multiarray\n_reconstruct\n", shape=b"(K\x00t", state=None, code=b"U\x01b"):
    return b"\x80\x02}U\x05goals" + make + b"(" + kind + shape + code + b"tR" + (state or b"") + b"s."

def _state(shape=b"K\x02\x85", kind=b"u1", data=b"U\x02ab", dtype=None, fortran=b"\x89"):
    dtype = dtype or b"cnumpy\ndtype\n(U" + bytes([len(kind)]) + kind + b"\x89\x88tR"
    return b"(K\x01" + shape + dtype + fortran + data + b"tb"

# Byte strings are `U` (STRING of Python 2, text here) or `C` of protocol 3.
RAW = b"C\x02ab"

@pytest.mark.parametrize("name, payload, says", [
    ("objects", lambda: pickle.dumps({"goals": np.array([{}], object)}), "Python objects"),
    ("objects with an exploit inside", lambda: pickle.dumps({"goals": np.array([Call(os.system, "true")], object)}), "Python objects"),
    ("fields", lambda: pickle.dumps({"goals": np.zeros(2, [("a", "u1"), ("b", "O")])}), "something other than numbers"),
    ("text", lambda: pickle.dumps({"goals": np.array(["a"])}), "something other than numbers"),
    ("bytes", lambda: pickle.dumps({"goals": np.array([b"a"])}), "something other than numbers"),
    ("dates", lambda: pickle.dumps({"goals": np.array(["2020"], "M8[D]")}), "something other than numbers"),
    ("complex", lambda: pickle.dumps({"goals": np.zeros(2, complex)}), "something other than numbers"),
    ("a scalar", lambda: pickle.dumps({"goals": np.uint8(3)}), r"multiarray\.scalar"),
    ("a subclass", lambda: pickle.dumps({"goals": np.zeros(2).view(Sub)}), r"Sub"),
    ("a masked array", lambda: pickle.dumps({"goals": np.ma.zeros(2)}), r"numpy\.ma"),
    ("a record array", lambda: pickle.dumps({"goals": np.rec.array([(1, 2)])}), r"record|rec"),
    ("metadata", lambda: pickle.dumps({"goals": np.zeros(2, np.dtype("u1", metadata={"x": Call(os.system, "true")}))}), r"posix\.system|type of number"),
    ("reconstruct of a type that is none", lambda: _array(kind=b"U\x01x", state=_state(data=RAW)), "class other than"),
    ("reconstruct of another known name", lambda: _array(kind=b"cnumpy\ndtype\n", state=_state(data=RAW)), "class other than"),
    ("state of a number", lambda: b"\x80\x02K\x01}b.", "state of something"),
    ("state of a dictionary", lambda: b"\x80\x02}}b.", "state of something"),
    ("state of a name", lambda: b"\x80\x02cnumpy\nndarray\n}U\x0c__setstate__cnumpy\ndtype\nsb.", "state of something"),
    ("state that is a dictionary", lambda: _array(state=b"}U\x0c__setstate__K\x01sb"), "in a way that NumPy does not"),
    ("filled twice", lambda: _array(state=_state(data=RAW) + _state(data=RAW)), "in a way that NumPy does not"),
    ("contents that are no bytes", lambda: _array(state=_state(data=b"]")), "not bytes"),
    ("contents that are text", lambda: _array(state=_state(data=b"U\x02ab")), "not bytes"),
    ("negative shape", lambda: _array(state=_state(shape=b"J\xff\xff\xff\xff\x85", data=RAW)), "shape is invalid"),
    ("shape that is no tuple", lambda: _array(state=_state(shape=b"]", data=RAW)), "shape is invalid"),
    ("shape of floats", lambda: _array(state=_state(shape=b"G" + struct.pack(">d", 2) + b"\x85", data=RAW)), "shape is invalid"),
    ("shape of truths", lambda: _array(state=_state(shape=b"\x88K\x02\x86", data=RAW)), "shape is invalid"),
    ("many axes", lambda: _array(state=_state(shape=b"(" + b"K\x01" * 70 + b"t", data=RAW)), "shape is invalid"),
    ("large shape", lambda: _array(state=_state(shape=b"\x8a\x08" + struct.pack("<q", 1 << 62) + b"\x85", data=RAW)), "shape is invalid"),
    ("type that is no type", lambda: _array(state=_state(dtype=b"U\x02u1", data=RAW)), "not bytes"),
    ("order of bytes", lambda: _array(state=_state(dtype=b"cnumpy\ndtype\n(U\x02u1\x89\x88tR(K\x03U\x01!NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb", data=RAW)), "type of number"),
    ("type with a part", lambda: _array(state=_state(dtype=b"cnumpy\ndtype\n(U\x02u1\x89\x88tR(K\x03U\x01|U\x02u1NNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb", data=RAW)), "type of number"),
    ("encoded otherwise", lambda: b"\x80\x02c_codecs\nencode\nU\x01aU\x05rot13\x86R.", "encodes text"),
    ("encoded bytes", lambda: b"\x80\x03c_codecs\nencode\nC\x01aU\x06latin1\x86R.", "encodes text"),
    ("a key that is no text", lambda: b"\x80\x02}K\x01K\x02s.", "dictionary of names"),
    ("a key that takes for ever", lambda: b"\x80\x02})" + b"\x85" * 9000 + b"K\x02s.", "dictionary of names"),
    ("a JAX array made otherwise", lambda: b"\x80\x02cjax._src.array\n_reconstruct_array\n(cnumpy\ndtype\n)))tR.", "JAX array"),
    ("too many steps", lambda: b"\x80\x02" + b"N0" * 9000 + b"N.", "10,000 instructions")])
def test_hostile_arrays_are_refused(tmp_path, name, payload, says):
    for pack in (bytes, bz2.compress):
        with pytest.raises(RefusedPickleError, match=says):
            read(pack(payload()), tmp_path)


def test_the_same_by_hand_is_accepted():
    "So that the refusals above are not for a slip of the pen."
    with tempfile.NamedTemporaryFile() as file:
        file.write(_array(state=_state(data=RAW)))
        file.flush()
        assert pickled_arrays(file.name)["goals"].tolist() == [97, 98]


@pytest.mark.parametrize("name, payload", [
    ("empty", b""), ("text", b"(hello"), ("no end", b"\x80\x04}"), ("stack too short", b"\x80\x040."), ("unknown memo", b"\x80\x04h\x07."), ("no mark", b"\x80\x04t."),
    ("unknown instruction", b"\x80\x04\xff."), ("nothing on the stack", b"\x80\x04."), ("two things on the stack", b"\x80\x04NN."), ("open mark", b"\x80\x04(N."),
    ("no dictionary", b"\x80\x04]."), ("a number", b"\x80\x04K\x01."), ("protocol 9", b"\x80\x09}\x94"), ("half an array", _array()),
    ("shape beyond the bytes", _array(state=_state(shape=b"J\xff\xff\xff\x7f\x85", data=RAW))),
    ("shape short of the bytes", _array(state=_state(shape=b"K\x01\x85", data=RAW))), ("state too short", _array(state=b"K\x01\x85b")),
    ("wrong number of arguments", b"\x80\x02cnumpy\ndtype\n)R."), ("bad utf-8", b"\x80\x04\x8c\x01\xff."), ("bad number", b"Ix\n."), ("a number of 5,000 digits", b"I" + b"9" * 5000 + b"\n."),
    ("call of what cannot be called", b"\x80\x02cnumpy\nndarray\nK\x02\x85R."),
    ("call of an array", b"\x80\x02K\x01)R."),
    ("arguments that are no tuple", b"\x80\x02cnumpy\ndtype\n]R."),
    ("new ndarray", b"\x80\x02cnumpy\nndarray\nK\x02\x85\x81."),
    ("a dictionary with half an entry", b"\x80\x02(U\x01ad."),
    ("append to a tuple", b"\x80\x02)K\x01a."),
    ("a name that is no text", b"\x80\x04K\x01K\x02\x93."),
    ("text that is not latin-1", b"\x80\x02c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacU\x06latin1\x86R."), ("bz2 header alone", b"BZh9"), ("bz2 nonsense", b"BZh9" + b"x" * 100)])
def test_damaged_pickles(tmp_path, name, payload):
    try:
        out = read(payload, tmp_path)
    except BenchmarkFileError as error:
        assert "\n" not in str(error) and str(tmp_path) in str(error) and ("damaged" in str(error) or isinstance(error, RefusedPickleError))
    else:
        raise AssertionError(f"{name} was read as {out}")


# What it may cost

@pytest.mark.parametrize("name, body", [
    ("bytes", b"\x8e" + struct.pack("<Q", 1 << 40)), ("text", b"\x8d" + struct.pack("<Q", 1 << 40)), ("byte array", b"\x96" + struct.pack("<Q", 1 << 40)),
    ("bytes beyond any memory", b"\x8e" + struct.pack("<Q", (1 << 63) - 1)), ("long number", b"\x8b" + struct.pack("<i", (1 << 31) - 1)), ("short bytes", b"B" + struct.pack("<I", (1 << 32) - 1)),
    ("frame", b"\x95" + struct.pack("<Q", (1 << 64) - 1)), ("memo", b"}r\xff\xff\xff\xff0j\xff\xff\xff\xff")])
def test_claimed_sizes_are_not_believed(tmp_path, name, body):
    tracemalloc.start()
    try:
        with pytest.raises(BenchmarkFileError):
            read(b"\x80\x05" + body, tmp_path)
        with pytest.raises(BenchmarkFileError):
            read(bz2.compress(b"\x80\x05" + body), tmp_path)
        # A frame says nothing that is used, and a place in the memo is an entry of a dictionary.
        assert tracemalloc.get_traced_memory()[1] < 70e6
    finally:
        tracemalloc.stop()


def test_bombs(tmp_path, monkeypatch):
    # Several streams of bz2, one behind the other, unpack to one.
    bomb = bz2.compress(b"\x80\x05\x8e" + struct.pack("<Q", 100 << 20)) + 100 * bz2.compress(bytes(1 << 20)) + bz2.compress(b".")
    assert len(bomb) < 10_000
    with pytest.raises(RefusedPickleError, match="max_bytes"):
        read(bomb, tmp_path)
    with monkeypatch.context() as m:
        m.setattr(pickles, "_RATIO", 1 << 20)
        with pytest.raises(BenchmarkFileError, match="not hold a dictionary"):
            read(bomb, tmp_path)  # it is the budget, and nothing else, that stops it
    honest = bz2.compress(pickle.dumps({"goals": np.zeros((1 << 16, 5), np.uint8)}))
    assert read(honest, tmp_path)["goals"].shape == (1 << 16, 5)
    with pytest.raises(RefusedPickleError, match="max_bytes"):
        read(honest, tmp_path, max_bytes=1 << 18)
    line = b"V" + b"x" * (1 << 20) + b"\n."
    with pytest.raises(RefusedPickleError, match="max_bytes"):
        read(bz2.compress(line), tmp_path, max_bytes=1 << 18)
    text = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", 100_000) + b"x" * 100_000 + b"q\x01U\x06latin1\x86q\x02(" + b"h\x00h\x02R" * 1000 + b"t."
    with pytest.raises(RefusedPickleError, match="max_bytes"):
        read(text, tmp_path, max_bytes=1 << 20)


def test_nesting_and_laughs(tmp_path):
    deep = b"\x80\x02)" + b"\x85" * 9000 + b"."
    laughs = b"\x80\x02)" + b"2\x86" * 4000 + b"."  # a tree of 2**4000 leaves
    for payload in (deep, laughs, b"\x80\x02]" + b"2\x86" * 4000 + b"\x85cnumpy\ndtype\n0."):
        with no_hang(), pytest.raises(BenchmarkFileError):
            read(payload, tmp_path)
        with no_hang(), pytest.raises(BenchmarkFileError):
            read(payload[:-1] + b"cnumpy\ndtype\n2R.", tmp_path)
    hostile = b"\x80\x02cnumpy\ndtype\n)" + b"2\x86" * 4000 + b"\x85R."
    with pytest.raises(RefusedPickleError, match="other than numbers"):
        read(hostile, tmp_path)


# Mutations

def _mutated(data: bytes, rng: random.Random) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind, place = rng.randrange(6), rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[place] = rng.randrange(256)
        elif kind == 2:
            del data[place:place + rng.randrange(1, 9)]
        elif kind == 3:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 4:
            data[place:place] = bytes([rng.choice([ord(op.code) for op in pickletools.opcodes])])
        else:
            del data[rng.randrange(len(data) + 1):]
    return bytes(data)

def _fuzz(tmp_path, count, seed):
    rng = random.Random(seed)
    arrays = {name: np.asarray(a) for name, a in upstream.benchmark_to_upstream(generate_benchmark("small", n=6)).items()}
    honest = [pickle.dumps({"generation_config": {"a": 1}, **tree}, protocol=p) for p in (0, 2, 4, 5) for tree in (arrays, jax.tree.map(jnp.asarray, arrays))]
    honest += [bz2.compress(data) for data in honest]
    marker = tmp_path / "marker"
    honest.append(pickle.dumps(Call(os.system, f"touch {marker}"), protocol=2))
    outcomes = {"read": 0, "damaged": 0, "refused": 0}
    for _ in range(count):
        whole = rng.choice(honest)
        data = _mutated(whole, rng)
        try:
            out = read(data, tmp_path)
            outcomes["read"] += 1
            assert all(type(a) is np.ndarray for a in out.values())
            if whole[:3] == b"BZh" and data[:3] == b"BZh" and len(data) <= len(whole) and data != whole[:len(data)]:
                assert all((out[name] == arrays[name]).all() for name in arrays), "bz2 has checksums"
        except RefusedPickleError:
            outcomes["refused"] += 1
        except BenchmarkFileError:
            outcomes["damaged"] += 1
        try:
            load_upstream_benchmark(tmp_path / "file", cache=False)
        except BenchmarkFileError:
            pass
    assert not marker.exists() and min(outcomes.values()) > count // 100, outcomes


escapes = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # in texts that the mutations made

@escapes
def test_mutated_pickles(tmp_path):
    _fuzz(tmp_path, 300, seed=1)

@escapes
@pytest.mark.slow
def test_many_mutated_pickles(tmp_path):
    _fuzz(tmp_path, 20_000, seed=2)


# xminigrid's own files

def their_tasks(n=30, seed=0):
    """Tasks of every kind of goal and rule, encoded by xminigrid's own classes, in the layout of its generator: padded, with its configuration, and `num_rules` as (n, 1)."""
    rng = np.random.default_rng(seed)
    tile = lambda: jnp.asarray([rng.integers(3, 8), rng.integers(1, 12)], jnp.uint8)
    position = lambda: jnp.asarray(rng.integers(0, 19, 2), jnp.uint8)
    one_tile = ("AgentHoldGoal", "AgentOnTileGoal", "AgentNearGoal", "AgentNearUpGoal", "AgentNearRightGoal", "AgentNearDownGoal", "AgentNearLeftGoal")
    two_tiles = ("TileNearGoal", "TileNearUpGoal", "TileNearRightGoal", "TileNearDownGoal", "TileNearLeftGoal")
    goals = [lambda name=name: getattr(their_goals, name)(tile=tile()) for name in one_tile]
    goals += [lambda name=name: getattr(their_goals, name)(tile_a=tile(), tile_b=tile()) for name in two_tiles]
    goals += [their_goals.EmptyGoal, lambda: their_goals.TileOnPositionGoal(tile=tile(), position=position()), lambda: their_goals.AgentOnPositionGoal(position=position())]
    floor = jnp.asarray([1, 9], jnp.uint8)
    product = lambda: floor if rng.random() < 0.2 else tile()
    rules = [lambda name=name: getattr(their_rules, name)(tile=tile(), prod_tile=product()) for name in
             ("AgentHoldRule", "AgentNearRule", "AgentNearUpRule", "AgentNearRightRule", "AgentNearDownRule", "AgentNearLeftRule")]
    rules += [lambda name=name: getattr(their_rules, name)(tile_a=tile(), tile_b=tile(), prod_tile=product()) for name in
              ("TileNearRule", "TileNearUpRule", "TileNearRightRule", "TileNearDownRule", "TileNearLeftRule")]
    rules += [their_rules.EmptyRule]
    some = lambda low, high: range(rng.integers(low, high))
    rows = [dict(goal=goals[i % len(goals)]().encode(), rules=jnp.vstack([rules[rng.integers(len(rules))]().encode() for _ in some(1, 5)]),
                 init_tiles=jnp.stack([tile() for _ in some(1, 8)]), num_rules=jnp.asarray([rng.integers(0, 3)], jnp.uint8)) for i in range(n)]
    return {"generation_config": {"chain_depth": 2, "sample_depth": True, "prune_prob": 0.3, "save_path": "./tasks", "random_seed": 42},
            "goals": jnp.vstack([r["goal"] for r in rows]), "rules": jnp.stack([pad_along_axis(r["rules"], pad_to=4) for r in rows]),
            "init_tiles": jnp.stack([pad_along_axis(r["init_tiles"], pad_to=7) for r in rows]), "num_rules": jnp.vstack([r["num_rules"] for r in rows])}


@pytest.fixture(scope="module")
def tasks():
    return their_tasks()


def test_a_file_of_xminigrid_ruleset_by_ruleset(tmp_path, tasks):
    path = tmp_path / "high_30_v3"
    theirs.save_bz2_pickle(tasks, str(path), protocol=-1)
    there, here = theirs.load_benchmark_from_path(str(path)), load_upstream_benchmark(path)
    assert there.num_rulesets() == here.num_rulesets() == 30
    get_there, get_here = jax.jit(lambda i: there.get_ruleset(i)), jax.jit(lambda i: here.get_ruleset(i))
    for i in range(30):
        ours, translated = jax.tree.map(np.asarray, (get_here(i), get_there(i)))
        translated = upstream.ruleset_from_upstream(translated)
        assert all((getattr(ours, part) == getattr(translated, k)).all() for part, k in (("goal", "goal"), ("rules", "rules"), ("init_tiles", "init_tiles")))
    back = upstream.benchmark_to_upstream(here)
    assert all((back[part] == np.asarray(tasks[part])).all() for part in PARTS), "nothing is lost"
    assert (here.num_rules == (np.asarray(tasks["rules"])[..., 0] != 0).sum(1)).all(), "theirs counts the levels of the tree, not the rules"


@pytest.mark.slow
def test_its_benchmarks_behave_alike(tmp_path, tasks):
    "One step from the same state in both packages, with tasks from the same file."
    path = tmp_path / "few"
    theirs.save_bz2_pickle(tasks, str(path))
    there, here = theirs.load_benchmark_from_path(str(path)), load_upstream_benchmark(path)
    from xland_minigrid.envs.registration import make
    env, params = make("XLand-MiniGrid-R1-9x9")
    their_env, _ = xminigrid.make("XLand-MiniGrid-R1-9x9")
    reset, step, their_step = jax.jit(env.reset), jax.jit(env.step), jax.jit(their_env.step)
    for i in (0, 7, 20):
        params = params.replace(ruleset=here.get_ruleset(i))
        ours = reset(params, jax.random.key(i))
        their_params, other = upstream.params_to_upstream(params), upstream.timestep_to_upstream(ours)
        assert (their_params.ruleset.rules == there.get_ruleset(i).rules).all()
        for action in (0, 3, 4, 0):
            ours, other = step(params, ours, action), their_step(their_params, other, action)
            assert (upstream.timestep_from_upstream(other).state.cells == ours.state.cells).all()


def test_it_is_converted_once(tmp_path, tasks, monkeypatch):
    path = tmp_path / "high_30_v3"
    theirs.save_bz2_pickle(tasks, str(path))
    first = load_upstream_benchmark(path)
    kept = list((tmp_path / "data").rglob("high_30_v3-*.safetensors"))
    assert len(kept) == 1
    same = lambda a, b: all((np.asarray(getattr(a, p)) == np.asarray(getattr(b, p))).all() for p in (*PARTS, "num_rules"))
    assert same(load_benchmark_from_path(kept[0]), first)
    with monkeypatch.context() as m:
        m.setattr(upstream, "pickled_arrays", lambda *_, **__: pytest.fail("it was converted already"))
        assert same(load_upstream_benchmark(path), first)
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    with pytest.warns(UserWarning, match="converted again"):
        assert same(load_upstream_benchmark(path), first)
    assert same(load_benchmark_from_path(kept[0]), first)
    theirs.save_bz2_pickle({**tasks, "goals": tasks["goals"][::-1]}, str(path))
    assert (load_upstream_benchmark(path).goals == first.goals[::-1]).all(), "another file under the same name is another file"


def test_without_a_place_to_keep_it(tmp_path, tasks, monkeypatch):
    path = tmp_path / "few"
    theirs.save_bz2_pickle(tasks, str(path))
    load_upstream_benchmark(path, cache=False)
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").write_text("a file is in the way")
    with pytest.warns(UserWarning, match="could not be kept"):
        load_upstream_benchmark(path)


# Wrong files

@pytest.mark.parametrize("change, says", [
    (lambda t: {k: v for k, v in t.items() if k != "rules"}, "lacks rules"), (lambda t: {**t, "rules": t["rules"][:-1]}, "rules has shape"),
    (lambda t: {**t, "goals": t["goals"][:, :4]}, "goals has shape"), (lambda t: {**t, "goals": t["goals"].at[3, 0].set(15)}, "beyond"),
    (lambda t: {**t, "rules": t["rules"].at[3, 0, 0].set(12)}, "beyond"), (lambda t: {**t, "init_tiles": t["init_tiles"].at[3, 0, 1].set(12)}, "13 and 12"),
    (lambda t: {**t, "goals": t["goals"].at[0, 1].set(13)}, "13 and 12"), (lambda t: {**t, "goals": np.asarray(t["goals"], np.int32) - 1}, "whole numbers"),
    (lambda t: {**t, "goals": np.asarray(t["goals"], np.float32) + 0.5}, "whole numbers"), (lambda t: {**t, "goals": np.full((30, 5), np.nan)}, "whole numbers"),
    (lambda t: {**t, "goals": np.zeros((30, 5), bool)}, "whole numbers"), (lambda t: {**t, "goals": [1, 2]}, "lacks goals"), (lambda t: {}, "lacks goals, rules, init_tiles")])
def test_pickles_that_hold_no_benchmark(tmp_path, tasks, change, says):
    theirs.save_bz2_pickle(change(tasks), str(tmp_path / "file"))
    with pytest.raises(BenchmarkFileError, match=says):
        load_upstream_benchmark(tmp_path / "file")
    assert not (tmp_path / "data").exists(), "nothing of it is kept"


def test_positions_may_be_larger_than_tiles(tmp_path, tasks):
    goal = their_goals.AgentOnPositionGoal(position=jnp.asarray([60, 200], jnp.uint8)).encode()
    theirs.save_bz2_pickle({**tasks, "goals": tasks["goals"].at[0].set(goal)}, str(tmp_path / "file"))
    assert load_upstream_benchmark(tmp_path / "file").goals[0, 1:3].tolist() == [60, 200]


def test_other_files(tmp_path, tasks):
    for content in [b"", b"hello world", b"PK\x03\x04 and more", b"\x89PNG"]:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(BenchmarkFileError, match="not a pickle of arrays"):
            load_upstream_benchmark(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        load_upstream_benchmark(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        pickled_arrays(tmp_path / "nowhere")
    with pytest.raises(OSError):
        load_upstream_benchmark(tmp_path)


def test_a_benchmark_of_arrays_is_accepted_as_before():
    ours = generate_benchmark("small", n=20)
    again = upstream.benchmark_from_upstream(upstream.benchmark_to_upstream(ours))
    assert (again.rules == ours.rules).all()
    floats = {name: a.astype(np.float64) for name, a in upstream.benchmark_to_upstream(ours).items()}
    assert (upstream.benchmark_from_upstream(floats).rules == ours.rules).all()


def test_what_stays_here():
    ours = generate_benchmark("small", n=20).to_numpy()
    for name, index, value, says in [("goals", (3, 0), 15, "Tables 2 and 3"), ("rules", (3, 0, 0), 12, "Tables 2 and 3"), ("init_tiles", (3, 0), (15, 4), "lava")]:
        array = np.array(getattr(ours, name))
        array[index] = value
        with pytest.raises(ValueError, match=says):
            upstream.benchmark_to_upstream(ours.replace(**{name: array}))


def test_no_name_is_imported(tmp_path):
    "A name that is refused has not been looked up, and a module that was not there is not there afterwards."
    for payload in (b"\x80\x02cantigravity\nfly\n.", b"\x80\x04\x8c\x0bantigravity\x8c\x03fly\x93.", b"(iantigravity\nfly\n."):
        with pytest.raises(RefusedPickleError, match=r"antigravity\.fly"):
            read(payload, tmp_path)
    assert "antigravity" not in sys.modules


def test_nothing_in_the_table_of_names_can_be_changed(tmp_path):
    "BUILD sets attributes, also on functions and classes that a name stands for."
    for name in pickles._NAMES:
        module, _, attribute = name.rpartition(".")
        for state in (b"}U\x08__name__U\x01xs", b"N}U\x0c__defaults__)s\x86"):
            with pytest.raises(RefusedPickleError, match="state of something"):
                read(b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + state + b"b.", tmp_path)
