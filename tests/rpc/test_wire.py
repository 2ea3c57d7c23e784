"""Frames arrive as they were sent, and the decoder refuses malformed ones."""

from __future__ import annotations

import math
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rpc_testing import same
from wire_testing import (
    array_node,
    decode_tree,
    encode,
    frame_with,
    trees,
    tuple_node,
)

from embodied.rpc import wire
from embodied.rpc.batching import row_frames
from embodied.rpc.wire import Codec, WireError


def test_arrays_that_are_elsewhere():
    array = np.arange(1000)
    frame = encode(array, request=5, open=[3, 4], in_memory=True)
    assert len(frame) < 200
    message = Codec().decode(frame)
    assert message.flags & wire.IN_MEMORY
    assert (message.request, message.reply, message.open) == (5, 0, (3, 4))
    (result,) = message.spec.views(array.tobytes())
    assert same(result, array)


@pytest.mark.parametrize("rows", [-1, 1 << 16])
def test_rows_out_of_range(rows):
    with pytest.raises(WireError, match="rows"):
        encode(np.zeros(1), rows=rows)


class TestBadFrames:
    @settings(max_examples=100)
    @given(st.data())
    def test_changed_bytes(self, data):
        """Mutations raise WireError or decode to something, and allocate little."""
        frame = bytearray(encode(data.draw(trees), rows=2, reply=1, open=[5, 6]))
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
        plain = st.one_of(
            st.integers(-(2**63), 2**64 - 1),
            st.text(max_size=3),
            st.sampled_from(["<f4", "|O", "bfloat16", "U4"]),
            st.none(),
        )
        leaf = st.one_of(
            plain,
            st.builds(array_node, plain, st.lists(plain, max_size=3)),
            st.builds(msgpack.ExtType, st.integers(0, 3), st.binary(max_size=9)),
        )
        node = st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=4).map(tuple_node),
                st.dictionaries(plain, inner, max_size=4),
            ),
        )
        header = data.draw(st.tuples(st.text(max_size=3), node))
        extra = data.draw(st.binary(max_size=40))
        self.decode_safely(frame_with(header, extra, data.draw(st.binary(max_size=99))))

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
        frame = encode(np.zeros(1000), request=1, in_memory=True)
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


class TestLengths:
    @pytest.mark.parametrize("size", [1, 8, 15, 17, 23])
    def test_places_and_open_calls_that_are_cut_off(self, size):
        Codec().decode(frame_with(["m", 1], bytes(24)))
        with pytest.raises(WireError, match="cut off"):
            Codec().decode(frame_with(["m", 1], bytes(size)))

    @pytest.mark.parametrize("change", [-64, -1, 1, 64])
    def test_the_length_of_the_arrays_must_be_right(self, change):
        node = [array_node(shape=[20]), array_node("|u1", [3])]
        payload = bytes(128 + 64)
        assert len(decode_tree(frame_with(["m", node], payload=payload))) == 2
        with pytest.raises(WireError, match=f"192 bytes of arrays, {192 + change}"):
            wrong = bytes(192 + change)
            Codec().decode(frame_with(["m", node], payload=wrong))

    def test_the_limit_of_bytes_holds_for_all_arrays_together(self):
        node = [array_node("|u1", [600]), array_node("|u1", [600])]
        frame = frame_with(["m", node], payload=bytes(2 * 640))
        Codec(max_bytes=1280).decode(frame)
        for codec in (Codec(max_bytes=1279), Codec(max_bytes=600)):
            for _ in range(2):  # Also when the header is cached.
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
                codec.decode(frame_with([f"m{x}", msgpack.ExtType(5, b"")]))
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


class TestKnownLooks:
    """The spec of a dict of arrays is cached by its keys, dtypes and shapes."""

    @given(trees, trees)
    def test_the_short_way_gives_the_same(self, first, second):
        codec = Codec()
        for tree in (first, first, second, first, {"x": first}, {"x": first}):
            encoded, expected = wire.flatten("m", [tree])
            spec, arrays = codec.flatten("m", [tree])
            assert spec.encoded == encoded
            assert same([np.asarray(x) for x in arrays], expected)

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
        for data in [*([other] for other in others), [base, base], []]:
            for method in ("m", ""):
                codec.flatten("m", [base])
                spec, _ = codec.flatten(method, data)
                assert spec.encoded == wire.flatten(method, data)[0]

    def test_rows_of_a_batch_have_frames_like_any_other(self):
        codec = Codec()
        arrays = [
            np.arange(12, dtype=np.int32).reshape(4, 3),
            np.arange(8.0).reshape(2, 4).T,
            np.zeros((4, 0)),
            np.array([True, False, True, False]),
        ]
        spec, _ = codec.flatten("", [{str(i): x[0] for i, x in enumerate(arrays)}])
        frames = row_frames(spec, arrays, [(7, 2), (9, 0)])
        for (seq, index), frame in zip([(7, 2), (9, 0)], frames):
            chosen = [np.asarray(x[index]) for x in arrays]
            assert frame == wire.encode(wire.REPLY, seq, spec, chosen)


def table_sizes(codec):
    """Returns the number of entries in a codec's largest table."""
    return max(len(x) for x in vars(codec).values() if isinstance(x, dict))
