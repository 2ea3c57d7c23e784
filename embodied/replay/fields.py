"""What a step holds: its keys, dtypes and shapes, fixed by the first one. Replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from embodied.replay.latents import OneHot, Plain, is_latent, make_codec

LOG_PREFIX = "log/"
STEPID = "stepid"
FLAGS = ("is_first", "is_last")
STEPID_BYTES = 20  # 16 of the chunk, 4 of the step's index in it, the largest first.

_CONTEXT_HINT = (
    " Steps that were loaded have no latents if they are from a run with "
    "replay_context 0: use that again, or another logdir."
)
_EXTENSIONS = {
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a step, as it arrives and leaves."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def codec(self) -> Plain | OneHot:
        """Returns how it is stored."""
        return make_codec(self.key, self.dtype, self.shape)


class Schema:
    """The keys of all steps in a buffer.

    Args:
      fields: of a step, in the order in which batches have them.
      context: steps at the start of a sequence whose latents are sampled. With 0,
        latents are not stored.
    """

    def __init__(self, fields: Iterable[Field], context: int):
        self.fields = {
            field.key: field for field in fields if context or not is_latent(field.key)
        }
        if not self.fields:
            raise ValueError("Expected a step with at least one key, got none.")
        for field in self.fields.values():
            _check_storable(field)
        self.context = context
        self.codecs = {key: field.codec() for key, field in self.fields.items()}
        self.latents = [key for key in self.fields if is_latent(key)]
        self.step_bytes = sum(self._bytes(key) for key in self.fields)
        self.latent_bytes = sum(self._bytes(key) for key in self.latents)

    @classmethod
    def of(cls, batch: Mapping[str, Any], context: int) -> Schema:
        """Returns the schema of the first steps [B, ...]."""
        fields = []
        for key, value in _relevant(batch, context).items():
            if value.ndim < 1:
                raise ValueError(f"Expected {key} with a batch dimension, got none.")
            fields.append(Field(key, value.dtype, value.shape[1:]))
        return cls(fields, context)

    def pack(self, batch: Mapping[str, Any], amount: int) -> dict[str, np.ndarray]:
        """Checks steps [amount, ...] and returns them as they are stored.

        Raises:
          ValueError: they differ from the schema in keys, dtypes or shapes.
        """
        values = _relevant(batch, self.context)
        if values.keys() != self.fields.keys():
            missing = sorted(self.fields.keys() - values.keys())
            surplus = sorted(values.keys() - self.fields.keys())
            raise ValueError(
                f"Expected steps with the keys {sorted(self.fields)}, as the first "
                f"step had, got {f'none of {missing}' if missing else ''}"
                f"{' and ' if missing and surplus else ''}"
                f"{f'{surplus} in addition' if surplus else ''}."
                f"{_CONTEXT_HINT if any(map(is_latent, surplus)) else ''}"
            )
        return {key: self.pack_key(key, values[key], (amount,)) for key in self.fields}

    def pack_key(self, key: str, value: Any, lead: tuple[int, ...]) -> np.ndarray:
        """Checks values [*lead, ...] of one key and returns them as stored."""
        field = self.fields[key]
        value = np.asarray(value)
        if value.dtype != field.dtype or value.shape != lead + field.shape:
            raise ValueError(
                f"Expected {key} as {field.dtype} of shape {lead + field.shape}, as "
                f"the first step had it, got {value.dtype} of shape {value.shape}."
            )
        return self.codecs[key].pack(value)

    def outputs(
        self, batch: int, length: int
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of every key of a sampled batch."""
        fields = {
            key: (
                field.dtype,
                (batch, self.context if is_latent(key) else length, *field.shape),
            )
            for key, field in self.fields.items()
        }
        fields[STEPID] = (np.dtype(np.uint8), (batch, length, STEPID_BYTES))
        return fields

    def to_json(self) -> list[list[Any]]:
        """Returns the fields as plain values."""
        return [[x.key, x.dtype.name, list(x.shape)] for x in self.fields.values()]

    @classmethod
    def from_json(cls, data: Any, context: int) -> Schema:
        """Returns the schema that `to_json` described, or raises ValueError."""
        try:
            fields = [
                Field(str(key), np.dtype(name), tuple(int(x) for x in shape))
                for key, name, shape in data
            ]
        except TypeError as error:
            raise ValueError(
                f"Expected a list of fields, got {data!r:.200}."
            ) from error
        return cls(fields, context)

    def _bytes(self, key: str) -> int:
        codec = self.codecs[key]
        return codec.dtype.itemsize * int(np.prod(codec.shape, dtype=np.int64))


def _relevant(batch: Mapping[str, Any], context: int) -> dict[str, np.ndarray]:
    return {
        key: np.asarray(value)
        for key, value in batch.items()
        if not key.startswith(LOG_PREFIX) and (context or not is_latent(key))
    }


def _check_storable(field: Field) -> None:
    if field.key == STEPID:
        raise ValueError(f"The key {STEPID!r} is added by sampling; rename yours.")
    if field.key in FLAGS and field.shape:
        raise ValueError(f"Expected {field.key} as a scalar, got shape {field.shape}.")
    plain = field.dtype.isbuiltin == 1 and field.dtype.kind in "biuf"
    if field.dtype.itemsize > 8 or not (plain or field.dtype in _EXTENSIONS):
        raise ValueError(
            f"Expected {field.key} as bool, integer or float of at most 8 bytes in "
            f"native byte order, got dtype {field.dtype}. Convert it first."
        )
