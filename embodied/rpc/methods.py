"""What a server offers, and one call on its way through it. The server's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from embodied.rpc import layout, wire
from embodied.rpc.pool import Pool
from embodied.rpc.session import Session


class Method(NamedTuple):
    """A function that clients can call."""

    name: str
    workfn: Callable
    postfn: Callable | None
    pool: Pool
    schema: dict | None
    once: bool
    output: bool
    batching: Any  # What a BatchServer needs; None for a plain method.
    checked: set[tuple[layout.Spec, int]]  # What was found to fit the schema.


class Job(NamedTuple):
    """One call that waits for a worker, or is worked on."""

    session: Session
    seq: int
    method: Method
    arguments: tuple
    reply_memory: Any  # Where the client wants large replies, or None.
    ticket: int | None
    received: float


class Output:
    """Memory for a reply's arrays, so that a function can write them in place."""

    def __init__(self, codec: wire.Codec, reply_memory: Any):
        self._codec = codec
        self._memory = reply_memory
        self.made = False  # Whether arrays lie where the client wants them.

    def empty(self, fields: dict[str, tuple[Any, tuple[int, ...]]]) -> dict:
        """Returns uninitialised arrays for {key: (dtype, shape)}.

        A function that returns this dict has its arrays sent without another copy.
        """
        leaves = tuple(
            ("a", wire.dtype_name(np.dtype(dtype)), tuple(shape))
            for dtype, shape in fields.values()
        )
        spec = self._codec.spec("", ("d", tuple(fields), leaves))
        if self._memory is not None and len(self._memory) >= spec.nbytes:
            self.made = True
            return dict(zip(fields, layout.payload_arrays(spec, self._memory)))
        return dict(zip(fields, layout.payload_arrays(spec, bytearray(spec.nbytes))))
