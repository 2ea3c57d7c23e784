"""Trees of arrays and plain values on disk: safetensors and JSON. Any process."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from embodied.base import Tree
from embodied.checkpoint.files import (
    CheckpointError,
    FileRecord,
    HashedReader,
    Root,
    locate,
    read_file,
    require_space,
    seal,
    unseal,
    write_file,
)

Table = list[tuple[str, str, tuple[int, ...]]]  # Name, dtype and shape of arrays.

_FORMAT = 1
_MAX_DEPTH = 100  # A deeper tree is assumed to contain itself.
_MAX_DIMENSIONS = 32
_MAX_INTEGER = 1 << 63

# Extension types have no byte order, so their names identify them.
EXTENSIONS = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_DTYPES = EXTENSIONS | {
    text: np.dtype(text)
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    for text in (
        np.dtype(code).newbyteorder("<").str,
        np.dtype(code).newbyteorder(">").str,
    )
}
_SAFETENSORS = {"|b1": "BOOL", "|u1": "U8", "|i1": "I8"} | {
    f"<{code}{size}": f"{code.upper()}{8 * size}"
    for code in "uif"
    for size in (2, 4, 8)
}
_UNSIGNED = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def save_tree(root: Root, path_stem: str, tree: Tree) -> list[FileRecord]:
    """Writes a tree as `path_stem`.safetensors and `path_stem`.json.

    Args:
      root: folder that `path_stem` is relative to.
      path_stem: where to write, without the ending.
      tree: nested dicts with str keys, lists and tuples of NumPy arrays and scalars
        (bool, int, float, complex, and the types of ml_dtypes), int, float, str,
        bytes, bool and None. `load_tree` restores their types; arrays in C order.

    Raises:
      CheckpointError: the tree holds another type, or could not be written.
    """
    encoder = _Encoder()
    structure = encoder.encode(tree, "tree", ())
    require_space(root, sum(array.nbytes for array in encoder.arrays))
    data = _safetensors(encoder.table, encoder.arrays)
    arrays = write_file(root, f"{path_stem}.safetensors", data)
    content = {
        "format": _FORMAT,
        "size": arrays.size,
        "digest": arrays.digest,
        "arrays": encoder.table,
        "tree": structure,
    }
    try:
        rest = write_file(root, f"{path_stem}.json", seal(content))
    except BaseException:
        locate(root, arrays.path).unlink(missing_ok=True)
        raise
    return [arrays, rest]


def load_tree(
    root: Root, path_stem: str, records: Iterable[FileRecord] | None = None
) -> Tree:
    """Reads what `save_tree` wrote; never runs code from the files.

    The JSON file holds the digests of both files, so damage is found even without
    `records`; these prove in addition that the files are those of a manifest.
    """
    array_path, rest_path = f"{path_stem}.safetensors", f"{path_stem}.json"
    listed = {record.path: record for record in records or ()}
    if records is not None and not {array_path, rest_path} <= listed.keys():
        raise CheckpointError(f"Expected records of {array_path} and {rest_path}.")
    content = unseal(rest_path, read_file(root, rest_path, listed.get(rest_path)))
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {content['format']}")
        own = FileRecord(array_path, content["size"], content["digest"])
        arrays = _read_arrays(
            root, _check_table(content["arrays"]), own, listed.get(array_path, own)
        )
        return _decode(content["tree"], arrays)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{rest_path} holds no tree that this version can read: {error!r}. "
            "Load it with the version that wrote it."
        ) from error


class _Encoder:
    """Turns a tree into JSON values and a list of arrays.

    None, bool, str, and int and float that JSON can hold are encoded as they are.
    Everything else becomes an object with one key, the name of its type.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.table: Table = []
        self._names = {"", "__metadata__"}  # Reserved, or of no help to a reader.

    def encode(self, value: Any, where: str, keys: tuple[str, ...]) -> Any:
        """Returns the JSON for `value`, which lies at `where` under `keys`."""
        kind = type(value)  # Exact, since a subclass would come back as its base.
        if len(keys) > _MAX_DEPTH:
            raise CheckpointError(
                f"Trees of at most {_MAX_DEPTH} levels can be saved; this one is "
                f"deeper, or holds itself, at {where[:200]}."
            )
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < _MAX_INTEGER else {"int": hex(value)}
        if kind is float:
            finite = math.isfinite(value)
            return value if finite else {"float": struct.pack("<d", value).hex()}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is list or kind is tuple:
            items = enumerate(value)
            nodes = [self.encode(x, f"{where}[{i}]", (*keys, str(i))) for i, x in items]
            return {kind.__name__: nodes}
        if kind is dict:
            return {"dict": [self._encode_item(x, where, keys) for x in value.items()]}
        if kind is np.ndarray:
            return self._encode_array(value, where, keys)
        if isinstance(value, np.generic):
            code = _dtype_code(value.dtype, where)
            return {"scalar": [code, np.asarray(value).tobytes().hex()]}
        raise CheckpointError(
            f"Cannot save {where}: expected a dict, list, tuple, NumPy array or "
            f"scalar, int, float, str, bytes, bool or None, got {kind.__module__}."
            f"{kind.__qualname__}. Convert it to one of these first."
        )

    def _encode_item(
        self, item: tuple[Any, Any], where: str, keys: tuple[str, ...]
    ) -> list[Any]:
        key, value = item
        if type(key) is not str:
            raise CheckpointError(
                f"Cannot save {where}: expected str as keys, got {key!r:.100} "
                f"({type(key).__name__})."
            )
        return [key, self.encode(value, f"{where}[{key!r}]", (*keys, key))]

    def _encode_array(
        self, array: np.ndarray, where: str, keys: tuple[str, ...]
    ) -> dict[str, int]:
        code = _dtype_code(array.dtype, where)
        # Keys may hold slashes, so different paths may have the same name.
        path = "/".join(keys).encode("utf-8", "replace").decode()
        name, count = path, 1
        while name in self._names:
            count += 1
            name = f"{path}~{count}"
        self._names.add(name)
        self.arrays.append(array)
        self.table.append((name, code, array.shape))
        return {"array": len(self.arrays) - 1}


def _decode(node: Any, arrays: list[np.ndarray]) -> Tree:
    if node is None or type(node) in (bool, int, float, str):
        return node
    ((kind, value),) = node.items()
    if kind == "list":
        return [_decode(child, arrays) for child in value]
    if kind == "tuple":
        return tuple(_decode(child, arrays) for child in value)
    if kind == "dict":
        return {str(key): _decode(child, arrays) for key, child in value}
    if kind == "array":
        return arrays[value]
    if kind == "scalar":
        code, digits = value
        (scalar,) = np.frombuffer(bytes.fromhex(digits), _DTYPES[code])
        return scalar
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(value))[0]
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    raise ValueError(f"unknown type {kind!r:.100}")


def _dtype_code(dtype: np.dtype, where: str) -> str:
    code = dtype.name if dtype.name in EXTENSIONS else dtype.str
    if _DTYPES.get(code) != dtype:
        raise CheckpointError(
            f"Cannot save {where}: expected a dtype that is bool, integer, float, "
            f"complex, or of ml_dtypes in native byte order, got {dtype}."
        )
    return code


def _check_table(rows: Any) -> Table:
    for name, code, shape in rows:
        if type(name) is not str or code not in _DTYPES:
            raise ValueError(f"unknown array {name!r:.100} of dtype {code!r:.100}")
        if len(shape) > _MAX_DIMENSIONS or any(
            type(size) is not int or size < 0 for size in shape
        ):
            raise ValueError(f"array {name!r:.100} has shape {shape!r:.200}")
    return [(name, code, tuple(shape)) for name, code, shape in rows]


def _safetensors_header(table: Table) -> tuple[bytes, int]:
    """Returns the bytes before the arrays in the file, and the size of the whole file.

    The format is the length of a JSON object in 8 bytes, the object, the arrays. It is
    written here and not by the package `safetensors`, which would hold a copy of all
    arrays at once (several GB at 200m parameters), cannot hash while it writes and
    reads, and refuses some dtypes. The tests read the files with the package.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, code, shape in table:
        dtype = _DTYPES[code]
        little = dtype.newbyteorder("<").str
        stored = list(shape)
        if code in EXTENSIONS or little not in _SAFETENSORS:
            label = _UNSIGNED.get(dtype.itemsize, "U8")
            stored += [] if dtype.itemsize in _UNSIGNED else [dtype.itemsize]
        else:
            label = _SAFETENSORS[little]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": label, "shape": stored, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def _safetensors(table: Table, arrays: list[np.ndarray]) -> Iterator[Any]:
    """Yields the buffers of a safetensors file; copies at most one array at a time."""
    yield _safetensors_header(table)[0]
    for array in arrays:
        array = np.asarray(array, order="C")
        if array.dtype.str.startswith(">"):
            array = array.byteswap()
        yield _raw(array)


def _read_arrays(root: Root, table: Table, *records: FileRecord) -> list[np.ndarray]:
    """Reads every array into memory of its own, in one pass over the file."""
    path = records[0].path
    header, size = _safetensors_header(table)
    # Sizes are compared before anything is allocated, so a forged shape does no harm.
    with HashedReader(root, path) as reader:
        if size != reader.size:
            raise CheckpointError(
                f"{path} is damaged: it has {reader.size} bytes, expected {size}."
            )
        found = bytearray(len(header))
        reader.fill(memoryview(found))
        if found != header:
            raise CheckpointError(f"{path} is damaged: its header is altered.")
        arrays = []
        for _, code, shape in table:
            array = np.empty(shape, _DTYPES[code])
            reader.fill(_raw(array))
            if array.dtype.str.startswith(">"):
                array.byteswap(inplace=True)
            arrays.append(array)
        for record in records:
            reader.check(record)
    return arrays


def _raw(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
