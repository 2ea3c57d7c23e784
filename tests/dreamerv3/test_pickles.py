"""Untrusted pickles: arrays are read, and code is never run."""

import builtins
import collections
import copyreg
import io
import os
import pickle
import struct
import subprocess
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamerv3.policies import pickles
from dreamerv3.policies.pickles import UnsafePickleError, loads, read_pickle
from embodied.checkpoint import CheckpointError

PLAIN = {
    "params": {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "scalar": np.array(3, np.int32),
        "none": np.zeros((0, 2), np.float16),
        "flags": np.array([True, False]),
        "big-endian": np.arange(3, dtype=">i2"),
    },
    "counters": {"updates": 7, "large": 2**70, "negative": -1},
    "rest": [None, True, 2.5, "text", b"bytes", (1, (2,)), []],
}


class Calls:
    """An object that is pickled as a function call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def assert_same(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert_same(value, two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for pair in zip(one, two):
            assert_same(*pair)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, two, strict=True)
    else:
        assert one == two


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_and_plain_values_come_back(protocol, tmp_path):
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps(PLAIN, protocol))
    found = read_pickle(path)
    assert_same(PLAIN, found)
    with pytest.raises(ValueError, match="read-only"):
        found["params"]["matrix"][:] = 0


def test_names_of_numpy_1_are_known():
    data = pickle.dumps(PLAIN, 3)
    old = data.replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy.core." in old
    assert_same(PLAIN, loads(old))


@pytest.fixture
def marker(tmp_path):
    """Path of a file that code in a pickle would create; the test may not leave it."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


def attacks(path):
    command, code = f"touch {path}", f"open({str(path)!r}, 'w')"
    return {
        "os.system": (os.system, command),
        "eval": (builtins.eval, code),
        "exec": (builtins.exec, code),
        "import": (builtins.__import__, "os"),
        "getattr": (builtins.getattr, "text", "upper"),
        "popen": (subprocess.Popen, ["touch", str(path)]),
        "open": (builtins.open, str(path), "w"),
        "copyreg": (copyreg._reconstructor, object, object, None),
        "type": (type, "Name", (), {}),
        "np.load": (np.load, str(path)),
        "np.save": (np.save, str(path), 1),
        "np.memmap": (np.memmap, str(path), "f4", "w+", 0, (8,)),
        "np.fromfile": (np.fromfile, str(path)),
        "np.zeros": (np.zeros, 10**12),
        "np.arange": (np.arange, 3),
        "runstring": (np.testing._private.utils.runstring, code, {}),
        "OrderedDict": (collections.OrderedDict,),
        "bytearray": (bytearray, 10**12),
        "set": (set, [1]),
    }


@pytest.mark.parametrize("name", list(attacks("")))
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_calls_are_refused_wherever_they_stand(name, protocol, marker):
    call = Calls(*attacks(marker)[name])
    for value in (call, {"params": {"a": PLAIN, "b": [(call,)]}}, {call: 1}):
        with pytest.raises(UnsafePickleError, match=r"asks for .* Nothing was run"):
            loads(pickle.dumps(value, protocol))


def test_arrays_of_objects_are_refused(marker):
    call = Calls(os.system, f"touch {marker}")
    for value in (np.array([call, 1], object), np.array([{"a": call}], object)):
        for protocol in (3, 4, 5):
            with pytest.raises(UnsafePickleError, match=r"dtype.*'O8'|asks for"):
                loads(pickle.dumps({"params": value}, protocol))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, "f4,i4"),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, "c8"),
        np.zeros(2, "V4"),
    ],
)
def test_other_dtypes_are_refused(array):
    with pytest.raises(UnsafePickleError, match=r"[dD]type|asks for"):
        loads(pickle.dumps(array))


def test_subclasses_of_arrays_are_refused():
    with pytest.raises(UnsafePickleError, match="asks for numpy"):
        loads(pickle.dumps(np.ma.masked_array([1, 2])))


def test_a_pickle_within_an_array_stays_bytes(marker):
    inner = pickle.dumps(Calls(os.system, f"touch {marker}"))
    array = np.frombuffer(inner, np.uint8)
    assert loads(pickle.dumps({"a": array}))["a"].tobytes() == inner


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module, name):
    return text(module) + text(name) + b"\x93"


RECONSTRUCT = named("numpy._core.multiarray", "_reconstruct")
NDARRAY, DTYPE = named("numpy", "ndarray"), named("numpy", "dtype")
EMPTY = RECONSTRUCT + NDARRAY + b"K\x00\x85C\x01b\x87R"
FLOAT = DTYPE + text("f4") + b"\x89\x88\x87R"


def crafted(body, protocol=4):
    return b"\x80" + bytes([protocol]) + body + b"."


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(X\x02\x00\x00\x00idtR",
        b"(X\x02\x00\x00\x00idios\nsystem\n",  # INST
        b"(" + named("os", "system") + text("id") + b"o",  # OBJ
        named("numpy", "ndarray") + b")\x81",  # NEWOBJ
        named("numpy", "ndarray") + b")}\x92",  # NEWOBJ_EX
        b"\x82\x01",  # EXT1
        b"\x84\x01\x00\x00\x00",  # EXT4
        b"P0\n",  # PERSID
        text("0") + b"Q",  # BINPERSID
        b"\x97",  # NEXT_BUFFER
        b"I1\n",  # INT: a number as text, as in protocol 0.
        b"S'text'\n",
        b"\x8f",  # EMPTY_SET
        named("numpy", "ndarray.tofile"),
        named("numpy", "dtype.type.__class__"),
        named("numpy._core.multiarray", "scalar"),
        named("numpy._core.multiarray", "fromfile"),
        named("dreamerv3.policies.pickles", "loads"),
        named("builtins", "dict"),
        b"K\x01K\x02\x93",  # STACK_GLOBAL of numbers.
    ],
)
def test_instructions_and_names_beside_those_of_arrays_are_refused(body):
    with pytest.raises(UnsafePickleError):
        loads(crafted(body))


@pytest.mark.parametrize(
    "body",
    [
        # State for stand-ins without one: it would change the reader for later files.
        DTYPE + b"}" + text("_make") + b"Nsb",
        DTYPE + b"N}" + text("__call__") + b"Ns\x86b",
        RECONSTRUCT + b"(" + text("x") + b"tb",
        NDARRAY + b"}" + text("x") + b"Nsb",
        # Calls with other arguments than those of pickled arrays.
        RECONSTRUCT + b")R",
        RECONSTRUCT + DTYPE + b"K\x00\x85C\x01b\x87R",
        RECONSTRUCT + NDARRAY + b"K\x09\x85C\x01b\x87R",
        RECONSTRUCT + RECONSTRUCT + b"\x85R",
        DTYPE + b"N\x85R",
        DTYPE + text("O") + b"\x89\x88\x87R",
        DTYPE + text("object") + b"\x89\x88\x87R",
        NDARRAY + b")R",
        # Arrays without a state, with two states, or with one that does not fit.
        EMPTY,
        EMPTY + b")b",
        EMPTY + b"}b",
        EMPTY + b"(K\x01)" + FLOAT + b"\x89C\x04abcdtb" * 2,
        EMPTY + b"(K\x01)" + FLOAT + b"\x89C\x03abctb",
        EMPTY + b"(K\x01)" + b"N" + b"\x89C\x04abcdtb",
        EMPTY + b"(K\x01)" + FLOAT + b"\x89Ntb",
        EMPTY + b"(K\x01)" + FLOAT + b"\x89]tb",
        EMPTY + b"(K\x01N" + FLOAT + b"\x89C\x04abcdtb",
        EMPTY + b"(K\x01J\xff\xff\xff\xff\x85" + FLOAT + b"\x89C\x04abcdtb",
        EMPTY + b"(K\x01\x88\x85" + FLOAT + b"\x89C\x04abcdtb",
        # Parts of arrays as values, and numbers as names.
        FLOAT,
        DTYPE,
        NDARRAY,
        b"}K\x01K\x02s",
        b"}]K\x02s",
    ],
)
def test_stand_ins_take_nothing_but_arrays(body):
    with pytest.raises(UnsafePickleError):
        loads(crafted(body))
    assert_same(PLAIN, loads(pickle.dumps(PLAIN)))


def test_the_crafted_array_would_be_one():
    found = loads(crafted(EMPTY + b"(K\x01)" + FLOAT + b"\x89C\x04\x00\x00\x80?tb"))
    np.testing.assert_array_equal(found, np.float32(1))


def laughs():
    body = b"]\x94"
    for level in range(40):
        body += b"](" + b"h" + bytes([level]) + b"h" + bytes([level]) + b"e\x94"
    return body


def nested(levels):
    return b"]" * levels + b"a" * (levels - 1)


def repeated_array():
    array = pickle.dumps(np.zeros(1000, np.float32), 4)
    body = array[2:-1]  # Without the header and the end.
    return b"](" + body + b"q\x14" + b"h\x14" * 20_000 + b"e"


SIZE = struct.Struct("<Q")
BOMBS = {
    "huge bytes": b"\x8e" + SIZE.pack(2**40) + b"x",
    "huge text": b"\x8d" + SIZE.pack(2**40) + b"x",
    "huge bytearray": b"\x96" + SIZE.pack(2**40) + b"x",
    "negative size": b"\x8e" + SIZE.pack(2**64 - 1) + b"x",
    "huge frame": b"\x95" + SIZE.pack(2**40) + b"N",
    "huge memo": b"Nr\xff\xff\xff\x7f",
    "huge number": b"\x8b\xff\xff\xff\x7f1",
    "huge shape": EMPTY
    + b"(K\x01\x8a\x08"
    + SIZE.pack(2**50)
    + b"\x85"
    + FLOAT
    + b"\x89C\x04abcdtb",
    "empty shape": EMPTY
    + b"(K\x01"
    + b"\x8a\x08"
    + SIZE.pack(2**40)
    + b"\x8a\x08"
    + SIZE.pack(2**40)
    + b"K\x00\x87"
    + FLOAT
    + b"\x89C\x00tb",
    "laughs": laughs(),
    "nested": nested(100_000),
    "holds itself": b"]\x94h\x00a",
    "same array": repeated_array(),
}


REASONS = {
    "huge memo": "places to remember",
    "huge shape": "as large as its data",
    "empty shape": "array is too big",
    "laughs": "as many values",
    "nested": "levels deep",
    "holds itself": "as many values",
    "same array": "as large as the file",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_small_files_do_not_become_large(name):
    data = crafted(BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(UnsafePickleError, match=REASONS.get(name, "Expected")):
            loads(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6


def test_files_of_too_many_instructions_are_refused(monkeypatch):
    monkeypatch.setattr(pickles, "MOST_INSTRUCTIONS", 1000)
    with pytest.raises(UnsafePickleError, match="at most 1000 instructions"):
        loads(pickle.dumps([None] * 1000))


def test_files_that_are_too_large_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "file.pkl"
    path.write_bytes(pickle.dumps(PLAIN))
    monkeypatch.setattr(pickles, "MOST_BYTES", 100)
    with pytest.raises(UnsafePickleError, match="at most 100 bytes"):
        read_pickle(path)


def test_files_that_are_none_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read_pickle(tmp_path / name)


def test_every_truncation_is_noticed(tmp_path):
    data = pickle.dumps(PLAIN, 4)
    for size in range(len(data)):
        with pytest.raises(UnsafePickleError):
            loads(data[:size])
    with pytest.raises(UnsafePickleError, match="1 bytes behind its end"):
        loads(data + b"x")
    path = tmp_path / "half.pkl"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UnsafePickleError, match=r"half.pkl: Expected a whole pickle"):
        read_pickle(path)


def fuzz(data, changes):
    data = bytearray(data)
    for place, value in changes:
        data[place % len(data)] = value
    try:
        found = loads(bytes(data))
    except UnsafePickleError:
        return
    # Values that are accepted are plain, whatever the bytes were.
    pickle.dump(found, io.BytesIO())


def test_what_is_refused_is_not_warned_of():
    with pytest.raises(UnsafePickleError, match="STRING"):
        loads(b"S'\\u'\n.")


CHANGES = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8
)


@given(CHANGES)
@settings(max_examples=300)
def test_altered_files_are_refused_or_plain(changes):
    fuzz(pickle.dumps(PLAIN, 4), changes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(CHANGES, st.sampled_from([3, 4, 5]))
@settings(max_examples=100_000)
def test_altered_files_are_refused_or_plain_many_times(changes, protocol):
    fuzz(pickle.dumps(PLAIN, protocol), changes)
