"""Portal's messages: calls, answers and errors, to and from our data. Any process.

    request: number 8 B | length of the name 8 B | name | packed arguments
    reply:   number 8 B | status 8 B, 0 if it went well | packed result, or a text

A stack of n rows is called by the name METHOD:n. What portal's packing cannot carry
(dtypes such as bfloat16, empty strings) travels as a frame of `wire`.
"""

from __future__ import annotations

import importlib
import struct
import threading
from typing import Any

import numpy as np

from embodied.rpc import wire
from embodied.rpc.calls import RemoteError
from embodied.rpc.sockets import MESSAGE_SLACK

HEAD = struct.Struct("<QQ")
REFUSED, FAILED = 3, 4  # Status of error replies, as portal has them.

_ESCAPE = "__wire__"  # Key of data that portal itself cannot carry.
_TRACEBACK = "\n\nOn the server:\n"


def import_portal() -> Any:
    """Returns the portal package, or raises an ImportError that says what to do."""
    try:
        return importlib.import_module("portal")
    except ImportError as error:
        raise ImportError(
            "The portal transport needs the portal package. Install it with "
            "`pip install 'dreamerv3-parallel[portal]'`, or use --run.transport zmq."
        ) from error


class PortalThreads:
    """Lets portal make threads in one that it has not made, without its warning.

    Portal keeps a list in every thread from which it starts others; plain threads
    have none.
    """

    def __enter__(self) -> None:
        thread = threading.current_thread()
        if not hasattr(thread, "children"):
            setattr(thread, "children", [])  # noqa: B010

    def __exit__(self, *error: object) -> None:
        pass


def encode_call(portal: Any, name: str, args: tuple) -> bytes:
    """Returns a request without its number.

    Raises:
      WireError: the arguments cannot be sent.
    """
    wire.check(args)
    try:
        parts = portal.pack(to_portal(args))
    except UnicodeEncodeError as error:
        raise wire.WireError(f"text that is not Unicode: {error}") from None
    encoded = name.encode()
    # A copy, since the caller may change its arrays before portal's thread sends.
    return b"".join((len(encoded).to_bytes(8, "little"), encoded, *parts))


def decode_call(portal: Any, data: memoryview, limit: int) -> tuple[str, int, list]:
    """Returns method, rows and arguments of a request.

    Raises:
      WireError: it is over the limit, or cannot be decoded.
    """
    if not HEAD.size <= len(data) <= limit + MESSAGE_SLACK:
        raise wire.WireError(
            f"expected at least {HEAD.size} bytes and arrays of at most {limit} bytes, "
            f"got {len(data)} bytes"
        )
    _, length = HEAD.unpack_from(data)
    end = HEAD.size + length
    try:
        method, _, rows = bytes(data[HEAD.size : end]).decode().partition(":")
        return method, int(rows or 0), from_portal(portal.unpack(data[end:]))
    except Exception as error:
        # Portal's decoder raises whatever the bytes lead it to.
        raise wire.WireError(f"it cannot be decoded: {error!r}") from None


def encode_error(error: RemoteError) -> tuple[int, bytes]:
    """Returns the status and the text of an error reply."""
    text = error.args[0]
    if error.traceback:
        text = f"{error.type}: {text}{_TRACEBACK}{error.traceback}"
    return FAILED if error.kind == "exception" else REFUSED, text.encode()


def decode_error(status: int, payload: memoryview) -> RemoteError:
    """Returns the error of a reply, from our server or from portal's own."""
    text = bytes(payload).decode(errors="replace")
    head, _, traceback = text.partition(_TRACEBACK)
    kind = "exception" if status >= FAILED else "bad"
    if not traceback:
        return RemoteError(kind, head)
    type_name, _, message = head.partition(": ")
    return RemoteError(kind, message, type_name, traceback)


def to_portal(tree: Any) -> Any:
    """Puts what portal cannot carry into frames of our own; the rest stays as it is.

    The tree must be one that `wire.flatten` accepts.
    """
    if isinstance(tree, dict):
        return {key: to_portal(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_portal(value) for value in tree]
    if isinstance(tree, np.ndarray | np.generic):
        array = np.asarray(tree, order="C")
        dtype = array.dtype
        if dtype.isbuiltin == 1 and dtype.kind in "biuf" and dtype.itemsize <= 8:
            return array
    elif tree not in ("", b""):
        return tree
    structure, arrays, values = wire.flatten(tree)
    codec = wire.Codec()
    spec = codec.spec("", structure)
    return {_ESCAPE: codec.encode(wire.REPLY, 0, spec, values, arrays)}


def from_portal(tree: Any) -> Any:
    """Undoes `to_portal`; tuples and plain numbers stay lists and arrays."""
    if isinstance(tree, dict):
        if tree.keys() == {_ESCAPE}:
            return wire.message_tree(wire.Codec().decode(bytes(tree[_ESCAPE])))
        return {key: from_portal(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [from_portal(value) for value in tree]
    return bytes(tree) if isinstance(tree, memoryview) else tree
