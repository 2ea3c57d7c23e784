"""Random data and malformed frames, shared by the tests of the wire format."""

from __future__ import annotations

import ml_dtypes
import msgpack
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied.rpc import wire
from embodied.rpc.wire import Codec

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
    """Arrays that need not be contiguous."""
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
    spec, found = codec.flatten(method, [tree])
    return wire.encode(wire.CALL, 7, spec, found, **kwargs)


def frame_with(header, extra=b"", payload=b""):
    """Returns a frame with any header, valid or not."""
    header = header if isinstance(header, bytes) else msgpack.packb(header)
    sizes = len(header), len(extra)
    head = wire.PRELUDE.pack(wire.MAGIC, wire.CALL, 0, 0, *sizes, 7)
    frame = head + header + extra
    if payload:
        frame += bytes(-len(frame) % wire.ALIGN) + payload
    return frame


def decode_tree(frame, codec=None):
    return (codec or Codec()).decode(frame).value()


def array_node(dtype="<f4", shape=(2,)):
    """Returns the header node of an array."""
    return msgpack.ExtType(1, msgpack.packb([dtype, list(shape)]))


def tuple_node(children):
    """Returns the header node of a tuple."""
    return msgpack.ExtType(2, msgpack.packb(children))
