"""Nested data arrives unchanged, and the checks refuse malformed data."""

from __future__ import annotations

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_testing import same
from wire_testing import (
    array_node,
    arrays,
    decode_tree,
    encode,
    frame_with,
    trees,
    tuple_node,
)

from embodied.rpc import wire
from embodied.rpc.wire import Codec, WireError


class TestRoundTrips:
    @given(trees)
    def test_trees(self, tree):
        message = Codec().decode(encode(tree, method="méthode", rows=3))
        assert same(message.value(), tree)
        assert (message.kind, message.seq, message.rows) == (wire.CALL, 7, 3)
        assert message.spec.method == "méthode"

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
        _, result = message.spec.views(message.frame, message.start)
        leaf = message.spec.leaves[1]
        assert (message.start + leaf.offset) % wire.ALIGN == 0
        if result.nbytes:
            assert np.shares_memory(result, np.frombuffer(frame, np.uint8))

    def test_large_arrays_of_every_layout(self):
        array = np.random.default_rng(0).standard_normal((30, 40, 50))
        tree = [array, array.T, array[::2, ::-1], np.asfortranarray(array)]
        assert same(decode_tree(encode(tree)), tree)

    def test_subclasses_arrive_as_what_they_are_based_on(self):
        class Number(int):
            pass

        class Table(dict):
            pass

        tree = Table(a=Number(3), b=np.float64(2.5))
        assert same(decode_tree(encode(tree)), {"a": 3, "b": np.array(2.5)})


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
            encode({"a": {1}})
        with pytest.raises(WireError, match=r"dtype object .*numbers"):
            encode(np.array([None]))
        with pytest.raises(WireError, match="keys must be strings"):
            encode({1: 2})

    def test_too_many_arrays(self):
        with pytest.raises(WireError, match="4096 arrays"):
            encode([np.zeros(1)] * (wire.MAX_ARRAYS + 1))

    def test_a_list_that_holds_itself(self):
        endless: list = []
        endless.append(endless)
        with pytest.raises(WireError):
            encode(endless)

    @pytest.mark.parametrize("kind", [list, tuple])
    @pytest.mark.parametrize("leaf", [0, np.zeros(1), "text"], ids=repr)
    def test_the_limit_of_depth_is_the_same_on_both_sides(self, leaf, kind):
        def nested(levels):
            tree = leaf
            for _ in range(levels):
                tree = kind([tree])
            return tree

        deepest = nested(wire.MAX_DEPTH)
        assert same(decode_tree(encode(deepest)), deepest)
        with pytest.raises(WireError, match="level"):
            encode(nested(wire.MAX_DEPTH + 1))


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
            msgpack.ExtType(5, b"data"),
            msgpack.Timestamp(5),
            msgpack.ExtType(1, b""),
            msgpack.ExtType(1, msgpack.packb("<f4")),
            msgpack.ExtType(1, msgpack.packb(["<f4"])),
            msgpack.ExtType(1, msgpack.packb(["<f4", 2])),
            msgpack.ExtType(1, msgpack.packb([4, [2]])),
            msgpack.ExtType(1, msgpack.packb(["<f4", [2], 3])),
            msgpack.ExtType(2, b""),
            msgpack.ExtType(2, msgpack.packb(3)),
            msgpack.ExtType(2, b"\xc1"),
            {1: 2},
            {b"x": 2},
            {None: 2},
        ],
        ids=str,
    )
    def test_nodes(self, node):
        with pytest.raises(WireError):
            Codec().decode(frame_with(["m", [node]]))

    def test_a_key_that_comes_twice_harms_nobody(self):
        twice = b"\x82\xa1a" + msgpack.packb(array_node("|u1", [1])) + b"\xa1a\x07"
        frame = frame_with(b"\x92\xa1m" + twice)
        assert decode_tree(frame) == {"a": 7}

    @pytest.mark.parametrize(
        "header", [[], [1, 2], "m", None, {"m": 1}, [b"m", 1], [["m"], 1]]
    )
    def test_headers(self, header):
        with pytest.raises(WireError):
            Codec().decode(frame_with(header))

    @pytest.mark.parametrize("count", [0, 2])
    def test_a_message_that_is_no_call_has_one_value(self, count):
        with pytest.raises(WireError, match="one value"):
            Codec().decode(frame_with(["", *range(count)])).value()

    def test_depth(self):
        for leaf in (1, array_node(shape=[0])):
            node = leaf
            for _ in range(wire.MAX_DEPTH):
                node = [node]
            Codec().decode(frame_with(["m", node]))
            with pytest.raises(WireError, match="deeper"):
                Codec().decode(frame_with(["m", [node]]))

    def test_very_deep(self):
        header = msgpack.packb(["m", 0])[:-1] + b"\x91" * 100_000 + b"\x00"
        with pytest.raises(WireError):
            Codec().decode(frame_with(header))

    def test_very_deep_tuples(self):
        node: object = 0
        for _ in range(500):
            node = tuple_node([node])
        with pytest.raises(WireError):
            Codec().decode(frame_with(["m", node]))

    def test_count_of_arrays(self):
        leaf, most = array_node(shape=[0]), wire.MAX_ARRAYS
        assert len(decode_tree(frame_with(["m", [leaf] * most]))) == most
        with pytest.raises(WireError, match="4096 arrays"):
            Codec().decode(frame_with(["m", [leaf] * (most + 1)]))

    def test_extended_dtypes_by_their_names(self):
        array = np.ones(3, ml_dtypes.float8_e5m2)
        assert same(decode_tree(encode({"a": array})), {"a": array})


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
        spec, _ = Codec().flatten("act", args)
        wire.check_schema(SCHEMA, spec, rows)

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
                r"got uint8 of shape \(8, 9, 3\)",
            ),
            (
                {"reward": np.zeros((), np.float64)},
                r"'reward': expected float32 of shape \(\), got float64 of shape \(\)",
            ),
            (
                {"reward": np.zeros((), ml_dtypes.bfloat16)},
                r"'reward': expected float32 .* got bfloat16",
            ),
            ({"reward": 1.0}, r"'reward': expected float32 .* got no array"),
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


def test_plain_values_are_limited(monkeypatch):
    monkeypatch.setattr(wire, "MAX_VALUES", 100)
    assert decode_tree(encode([None] * 100)) == [None] * 100
    with pytest.raises(WireError, match="more than 100 values"):
        Codec().decode(frame_with(["method", [None] * 101]))


def test_numbers_of_open_calls_are_limited():
    Codec().decode(frame_with(["method"], bytes(wire.MAX_EXTRA)))
    with pytest.raises(WireError, match="too many"):
        Codec().decode(frame_with(["method"], bytes(wire.MAX_EXTRA + 8)))
