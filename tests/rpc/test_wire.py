"""The wire format: what goes in comes out, and nothing bad gets past the decoder."""

from __future__ import annotations

import math
import struct
import tracemalloc

import ml_dtypes
import msgpack
import numpy as np
import pytest
from conftest import same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied.rpc import structures, wire
from embodied.rpc.wire import Codec, WireError

EXTENDED = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]

plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)


@st.composite
def extended_arrays(draw):
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    values = draw(hnp.arrays(np.int8, shape, elements=st.integers(-8, 7)))
    return values.astype(draw(st.sampled_from(EXTENDED)))


@st.composite
def views(draw):
    """Arrays that are not contiguous."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=5))
    array = draw(hnp.arrays(np.int32, shape))
    return array[draw(hnp.basic_indices(shape, allow_ellipsis=False))].T


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
arrays = st.one_of(hnp.arrays(plain_dtypes, shapes), extended_arrays(), views())
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.binary(),
)
trees = st.recursive(
    st.one_of(arrays, values),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    max_leaves=12,
)


def encode(tree, method="act", codec=None, **kwargs):
    codec = codec or Codec()
    structure, arrays, values = wire.flatten(tree)
    spec = codec.spec(method, structure)
    return codec.encode(wire.CALL, 7, spec, values, arrays, **kwargs)


def frame_with(spec, extra=b"", payload=b""):
    """A frame whose header is what it likes to be."""
    header = spec if isinstance(spec, bytes) else msgpack.packb(spec)
    sizes = len(header), len(extra)
    head = wire.PRELUDE.pack(wire.MAGIC, wire.CALL, 0, 0, *sizes, 7)
    frame = head + header + extra
    if payload:
        frame += bytes(-len(frame) % structures.ALIGN) + payload
    return frame


def decode_tree(frame, codec=None):
    return wire.message_tree((codec or Codec()).decode(frame))


class TestRoundTrips:
    @given(trees)
    def test_trees(self, tree):
        message = Codec().decode(encode(tree, method="méthode", rows=3))
        assert same(wire.message_tree(message), tree)
        assert (message.kind, message.seq, message.rows) == (wire.CALL, 7, 3)
        assert message.spec.method == "méthode"

    @given(trees)
    def test_flatten_and_unflatten(self, tree):
        assert same(structures.unflatten(*wire.flatten(tree)), tree)

    @given(trees, st.sampled_from([bytes, bytearray, memoryview]))
    def test_any_buffer_can_be_decoded(self, tree, kind):
        assert same(decode_tree(kind(encode(tree))), tree)

    @given(trees)
    def test_a_second_time_with_the_tables_filled(self, tree):
        sender, receiver = Codec(), Codec()
        for _ in range(3):
            assert same(decode_tree(encode(tree, codec=sender), receiver), tree)

    @given(arrays)
    def test_arrays_are_aligned_views_of_the_frame(self, array):
        frame = encode([np.zeros(1, np.uint8), array])
        message = Codec().decode(frame)
        _, result = structures.payload_arrays(
            message.spec, message.frame, message.start
        )
        leaf = message.spec.leaves[1]
        assert (message.start + leaf.offset) % structures.ALIGN == 0
        if result.nbytes:
            assert np.shares_memory(result, np.frombuffer(frame, np.uint8))

    def test_arrays_that_are_elsewhere(self):
        array = np.arange(1000)
        places = (wire.PLACE.pack(5), wire.NOWHERE)
        frame = encode(array, places=places, open=[3, 4], in_memory=True)
        assert len(frame) < 200
        message = Codec().decode(frame)
        assert message.flags & wire.BULK
        assert (message.places, message.open) == (places, (3, 4))
        (result,) = structures.payload_arrays(message.spec, array.tobytes())
        assert same(result, array)

    def test_large_arrays_of_every_layout(self):
        array = np.random.default_rng(0).standard_normal((30, 40, 50))
        tree = [array, array.T, array[::2, ::-1], np.asfortranarray(array)]
        assert same(decode_tree(encode(tree)), tree)


class TestWhatCannotBeSent:
    @pytest.mark.parametrize(
        "value",
        [
            np.array([None]),
            np.zeros(2, [("a", "i4"), ("b", "f4")]),
            np.zeros(2, "V8"),
            {1: 2},
            {b"key": 2},
            2**64,
            -(2**63) - 1,
            range(3),
            {1, 2},
            1j,
            "\ud800",
            {"\ud800": 1},
        ],
        ids=repr,
    )
    def test_values(self, value):
        with pytest.raises(WireError):
            encode({"key": [value]})

    def test_the_error_names_the_type_and_what_is_possible(self):
        with pytest.raises(WireError, match=r"type set .*NumPy arrays.*dicts"):
            wire.flatten({"a": {1}})
        with pytest.raises(WireError, match=r"dtype object .*numbers"):
            wire.flatten(np.array([None]))

    @pytest.mark.parametrize(
        "tree",
        [
            [0] * structures.MAX_LEAVES,
            [np.zeros(1)] * structures.MAX_LEAVES,
            [[] for _ in range(structures.MAX_LEAVES)],
            {"k" * (wire.MAX_SPEC_BYTES + 1): 0},
        ],
        ids=["values", "arrays", "lists", "key"],
    )
    def test_what_the_other_side_would_not_decode(self, tree):
        with pytest.raises(WireError):
            encode(tree)

    @pytest.mark.parametrize("leaf", [0, np.zeros(1), "text"], ids=repr)
    def test_the_limit_of_depth_is_the_same_on_both_sides(self, leaf):
        def nested(levels):
            tree = leaf
            for _ in range(levels):
                tree = [tree]
            return tree

        deepest = nested(structures.MAX_DEPTH)
        assert same(decode_tree(encode(deepest)), deepest)
        with pytest.raises(WireError, match="level"):
            encode(nested(structures.MAX_DEPTH + 1))

    @pytest.mark.parametrize("rows", [-1, 1 << 16])
    def test_rows_out_of_range(self, rows):
        with pytest.raises(WireError, match="rows"):
            encode(np.zeros(1), rows=rows)


class TestBadFrames:
    @settings(max_examples=300)
    @given(st.data())
    def test_changed_bytes(self, data):
        """Mutations raise WireError or decode to something, and allocate little."""
        places = (wire.NOWHERE, wire.PLACE.pack(1))
        frame = bytearray(encode(data.draw(trees), rows=2, places=places, open=[5, 6]))
        for _ in range(data.draw(st.integers(1, 4))):
            end = len(frame)
            match data.draw(st.sampled_from(["set", "cut", "grow", "insert", "flags"])):
                case "set" if end:
                    frame[data.draw(st.integers(0, end - 1))] = data.draw(
                        st.integers(0, 255)
                    )
                case "cut":
                    del frame[data.draw(st.integers(0, end)) :]
                case "grow":
                    frame += data.draw(st.binary(max_size=200))
                case "insert":
                    place = data.draw(st.integers(0, end))
                    frame[place:place] = data.draw(st.binary(max_size=9))
                case "flags" if end > 5:
                    frame[5] ^= data.draw(st.integers(1, 255))
        self.decode_safely(bytes(frame))

    @given(st.binary(max_size=300), st.binary(max_size=300))
    def test_random_headers(self, spec, extra):
        self.decode_safely(frame_with(spec, extra))

    @given(st.data())
    def test_random_structures(self, data):
        leaf = st.one_of(
            st.integers(-1, 3),
            st.integers(),
            st.text(max_size=3),
            st.sampled_from(["a", "d", "l", "t", "v", "<f4", "|O", "bfloat16", "U4"]),
            st.none(),
        ).filter(lambda x: type(x) is not int or -(2**63) <= x < 2**64)
        node = st.recursive(leaf, lambda inner: st.lists(inner, max_size=4))
        spec = data.draw(st.tuples(st.text(max_size=3), node))
        extra = msgpack.packb(data.draw(node))
        self.decode_safely(frame_with(spec, extra, data.draw(st.binary(max_size=99))))

    @staticmethod
    def decode_safely(frame, limit=1 << 20):
        tracemalloc.start()
        try:
            try:
                decode_tree(frame, Codec(max_bytes=limit))
            except WireError:
                pass
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < limit + 64 * len(frame)

    def test_arrays_in_memory_are_not_looked_for_in_the_frame(self):
        places = (wire.PLACE.pack(1), wire.NOWHERE)
        frame = encode(np.zeros(1000), places=places, in_memory=True)
        with pytest.raises(WireError):
            decode_tree(frame)

    def test_truncated_anywhere(self):
        frame = encode({"a": np.arange(10), "b": ["text", 5]})
        for size in range(len(frame)):
            with pytest.raises(WireError):
                decode_tree(frame[:size])

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"EMB1",
            b"HTTP" + bytes(60),
            struct.pack("<4s", wire.MAGIC) + b"\xff" * 60,
        ],
        ids=["empty", "short", "other", "ones"],
    )
    def test_not_our_frames(self, frame):
        with pytest.raises(WireError):
            Codec().decode(frame)


def array_node(dtype="<f4", shape=(2,)):
    return ["a", dtype, list(shape)]


class TestLimits:
    @pytest.mark.parametrize(
        "dtype",
        [
            *("O", "|O", "object", "V8", "|V8", "f4,f4", "(2,)f4", "<f4,<i4"),
            *("U", "S", "<U0", "S0", "U9999999999", "f99", "i3", "<f", "", "float32"),
            *("M8[nope]", "M8[us]O", "bfloat", "float8_e4m3fn ", "\0", "f4\n"),
        ],
        ids=repr,
    )
    def test_dtypes_outside_of_the_list(self, dtype):
        with pytest.raises(WireError):
            Codec().decode(frame_with(["m", array_node(dtype)]))

    @pytest.mark.parametrize(
        "shape",
        [
            [1 << 40],
            [1 << 63, 2],
            [2**64 - 1],
            [1 << 16] * 8,
            [-1],
            [2, -3],
            [0, 1 << 62],
            [0] * 33,
            [1] * 33,
            [1.0],
            [True],
            ["2"],
            [None],
            [[2]],
        ],
        ids=str,
    )
    def test_shapes(self, shape):
        with pytest.raises(WireError):
            decode_tree(frame_with(["m", array_node(shape=shape)]))

    @pytest.mark.parametrize(
        "node",
        [
            [],
            "v",
            None,
            7,
            ["v", 1],
            ["x"],
            ["a", "<f4"],
            ["a", "<f4", 2],
            ["a", 4, [2]],
            ["d", ["x"], []],
            ["d", [], [["v"]]],
            ["d", ["x", "x"], [["v"], ["v"]]],
            ["d", [1], [["v"]]],
            ["d", [b"x"], [["v"]]],
            ["d", "x", [["v"]]],
            ["l"],
            ["l", "x"],
            ["t", [["v"], 3]],
            {"d": 1},
        ],
        ids=str,
    )
    def test_structures(self, node):
        with pytest.raises(WireError):
            Codec().decode(frame_with(["m", node], msgpack.packb([1])))

    @pytest.mark.parametrize(
        "header", [[], ["m"], [1, ["v"]], ["m", ["v"], 1], "m", None, {"m": ["v"]}]
    )
    def test_headers(self, header):
        with pytest.raises(WireError):
            Codec().decode(frame_with(header))

    @pytest.mark.parametrize(
        "extra",
        [
            [],
            [1, 2],
            1,
            None,
            "1",
            {"a": 1},
        ],
        ids=str,
    )
    def test_values_that_do_not_fit(self, extra):
        good = frame_with(["m", ["v"]], msgpack.packb([1]))
        assert decode_tree(good) == 1
        with pytest.raises(WireError):
            decode_tree(frame_with(["m", ["v"]], msgpack.packb(extra)))

    @pytest.mark.parametrize(
        ("flags", "extra"),
        [
            (wire.PLACES, bytes(15)),
            (wire.PLACES | wire.OPEN, bytes(16)),
            (wire.OPEN, b"\1"),
            (wire.OPEN, struct.pack("<H", 1)),
            (wire.OPEN, struct.pack("<HQ", 2, 5)),
            (wire.OPEN, struct.pack("<H", 0xFFFF) + bytes(100)),
        ],
    )
    def test_places_and_open_calls_that_are_cut_off(self, flags, extra):
        frame = bytearray(frame_with(["m", ["t", []]], extra))
        frame[5] = flags
        with pytest.raises(WireError, match="cut off"):
            Codec().decode(bytes(frame))

    def test_extension_types(self):
        bad = msgpack.packb([msgpack.ExtType(5, b"data")])
        with pytest.raises(WireError):
            decode_tree(frame_with(["m", ["v"]], bad))

    def test_depth(self):
        for leaf in (["v"], array_node(shape=[0])):
            node = leaf
            for _ in range(structures.MAX_DEPTH):
                node = ["l", [node]]
            Codec().decode(frame_with(["m", node], msgpack.packb([1])))
            with pytest.raises(WireError, match="deeper"):
                Codec().decode(frame_with(["m", ["l", [node]]]))

    def test_very_deep(self):
        header = msgpack.packb(["m", 0])[:-1] + b"\x91" * 100_000 + b"\x00"
        with pytest.raises(WireError):
            Codec().decode(frame_with(header))

    def test_count_of_nodes(self):
        leaf = array_node(shape=[0])
        most = ["l", [leaf] * (structures.MAX_LEAVES - 1)]
        assert len(decode_tree(frame_with(["m", most]))) == structures.MAX_LEAVES - 1
        with pytest.raises(WireError, match="4096 nodes"):
            Codec().decode(frame_with(["m", ["l", [leaf] * structures.MAX_LEAVES]]))

    def test_length_of_the_header(self):
        with pytest.raises(WireError, match="header"):
            Codec().decode(frame_with(["m" * wire.MAX_SPEC_BYTES, ["v"]]))

    @pytest.mark.parametrize("change", [-64, -1, 1, 64])
    def test_the_length_of_the_arrays_must_be_right(self, change):
        node = ["l", [array_node(shape=[20]), array_node("|u1", [3])]]
        payload = bytes(128 + 64)
        assert len(decode_tree(frame_with(["m", node], payload=payload))) == 2
        with pytest.raises(WireError, match=f"192 bytes of arrays, {192 + change}"):
            wrong = bytes(192 + change)
            Codec().decode(frame_with(["m", node], payload=wrong))

    def test_the_limit_of_bytes_holds_for_all_arrays_together(self):
        node = ["l", [array_node("|u1", [600]), array_node("|u1", [600])]]
        frame = frame_with(["m", node], payload=bytes(2 * 640))
        Codec(max_bytes=1280).decode(frame)
        for codec in (Codec(max_bytes=1279), Codec(max_bytes=600)):
            for _ in range(2):  # Also when the header is known.
                with pytest.raises(WireError, match="1280 bytes"):
                    codec.decode(frame)

    @example([2**20, 2**20])
    @given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
    def test_a_frame_never_claims_more_than_it_has(self, shape):
        frame = frame_with(["m", array_node("|u1", shape)], payload=bytes(64))
        if math.prod(shape) and -(-math.prod(shape) // 64) * 64 == 64:
            assert decode_tree(frame).shape == tuple(shape)
        elif math.prod(shape):
            with pytest.raises(WireError):
                decode_tree(frame)


class TestTables:
    def test_they_are_bounded_in_the_receiver(self):
        codec = Codec()
        for x in range(3 * wire.MAX_CACHED_SPECS):
            assert decode_tree(encode([x], method=f"m{x}"), codec) == [x]
            assert table_sizes(codec) <= wire.MAX_CACHED_SPECS

    def test_they_are_bounded_in_the_sender(self):
        codec = Codec()
        for x in range(3 * wire.MAX_CACHED_SPECS):
            frame = encode(np.zeros(x), codec=codec)
            assert decode_tree(frame).shape == (x,)
            assert table_sizes(codec) <= wire.MAX_CACHED_SPECS

    def test_bad_headers_are_not_kept(self):
        codec = Codec()
        for x in range(50):
            with pytest.raises(WireError):
                codec.decode(frame_with([f"m{x}", ["x"]]))
        assert table_sizes(codec) == 0

    def test_structures_that_look_alike_are_kept_apart(self):
        codec = Codec()
        alike = [[1], (1,), {"a": 1}, [[1]], np.zeros(1), np.zeros((1, 1)), [True]]
        for _ in range(2):
            for tree in alike:
                assert same(decode_tree(encode(tree, codec=codec), codec), tree)
        frames = {encode(1, method=name, codec=codec) for name in ("a", "b")}
        methods = {codec.decode(frame).spec.method for frame in frames}
        assert methods == {"a", "b"}


class TestLastShapes:
    """Data that looks like the last of its method takes a shorter way."""

    @given(trees, trees)
    def test_the_short_way_gives_the_same(self, first, second):
        codec = Codec()
        for tree in (first, first, second, first, {"x": first}, {"x": first}):
            expected = wire.flatten((tree,))
            spec, arrays, values = codec.call("m", (tree,))
            assert (spec.structure, list(values)) == (expected[0], expected[2]) or any(
                value != value for value in values
            )
            assert same([np.asarray(x) for x in arrays], expected[1])
            spec, arrays, _ = codec.result("m", tree)
            assert spec.structure == wire.flatten(tree)[0]
            assert all(isinstance(x, np.ndarray) for x in arrays)

    def test_what_looks_a_little_different_is_noticed(self):
        codec = Codec()
        base = {"a": np.zeros(3, np.float32), "b": np.float32(1)}
        others = [
            {"b": base["b"], "a": base["a"]},
            {**base, "a": np.zeros(4, np.float32)},
            {**base, "a": np.zeros(3, np.float64)},
            {**base, "a": np.zeros((3, 1), np.float32)},
            {**base, "a": np.zeros(3, ">f4")},
            {**base, "b": 1.0},
            {**base, "c": np.zeros(1)},
            {"a": base["a"]},
            [base],
            (base,),
        ]
        for other in others:
            codec.call("m", (base,))
            spec, _, _ = codec.call("m", (other,))
            assert spec.structure == wire.flatten((other,))[0]
        codec.call("m", (base,))
        spec, _, _ = codec.call("m", (base, base))
        assert spec.structure == wire.flatten((base, base))[0]

    def test_rows_of_a_batch_have_frames_like_any_other(self):
        codec = Codec()
        arrays = [
            np.arange(12, dtype=np.int32).reshape(4, 3),
            np.arange(8.0).reshape(2, 4).T,
            np.zeros((4, 0)),
            np.array([True, False, True, False]),
        ]
        structure, _, _ = wire.flatten({str(i): x[0] for i, x in enumerate(arrays)})
        spec = codec.spec("", structure)
        frames = wire.row_frames(wire.REPLY, spec, arrays, [(7, 2), (9, 0)])
        for (seq, index), frame in zip([(7, 2), (9, 0)], frames):
            chosen = [np.asarray(x[index]) for x in arrays]
            assert frame == codec.encode(wire.REPLY, seq, spec, (), chosen)


def table_sizes(codec):
    """The entries of a codec's largest table, whatever it is called."""
    return max(len(x) for x in vars(codec).values() if isinstance(x, dict))


SCHEMA = {"image": (np.uint8, (8, 8, 3)), "reward": (np.float32, ())}


class TestSchema:
    @staticmethod
    def obs(rows=(), **changes):
        good = {
            "image": np.zeros((*rows, 8, 8, 3), np.uint8),
            "reward": np.zeros(rows, np.float32),
        }
        return {**good, **changes}

    def check(self, *args, rows=0):
        structure, _, _ = wire.flatten(args)
        structures.check_schema(SCHEMA, structure, rows)

    def test_what_fits(self):
        self.check(self.obs())
        self.check(self.obs((5,)), rows=5)
        self.check(dict(reversed(self.obs().items())))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"image": np.zeros((8, 9, 3), np.uint8)},
                r"'image': expected uint8 of shape \(8, 8, 3\), "
                r"got \|u1 of shape \(8, 9, 3\)",
            ),
            (
                {"reward": np.zeros((), np.float64)},
                r"'reward': expected float32 of shape \(\), got <f8 of shape \(\)",
            ),
            (
                {"reward": np.zeros((), ml_dtypes.bfloat16)},
                r"'reward': expected float32 .* got bfloat16",
            ),
            ({"reward": 1.0}, r"'reward': expected float32 .* got a plain value"),
            ({"reward": [np.float32(1)]}, r"'reward': expected float32"),
            ({"extra": 1}, r"missing keys \[\], surplus keys \['extra'\]"),
        ],
    )
    def test_messages_say_what_was_expected_and_what_came(self, changes, message):
        with pytest.raises(WireError, match=message):
            self.check(self.obs(**changes))

    def test_missing_keys(self):
        obs = self.obs()
        del obs["reward"]
        with pytest.raises(WireError, match=r"missing keys \['reward'\], surplus"):
            self.check(obs)

    def test_stacks_have_one_more_dimension(self):
        with pytest.raises(WireError, match=r"expected uint8 of shape \(4, 8, 8, 3\)"):
            self.check(self.obs((5,)), rows=4)
        with pytest.raises(WireError, match=r"expected uint8 of shape \(8, 8, 3\)"):
            self.check(self.obs((5,)))

    def test_arguments_that_are_not_one_dict(self):
        for args in [(), (self.obs(), 1), ([1],), (np.zeros(3),), (None,)]:
            with pytest.raises(WireError, match="expected one argument, a dict"):
                self.check(*args)
