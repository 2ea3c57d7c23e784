"""Copies steps into and out of a buffer's memory. Replay's process.

The module `buffer` says which lock guards what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embodied.replay.fields import STEPID, STEPID_BYTES, Schema
from embodied.replay.index import Index

Batch = dict[str, np.ndarray]
Output = Callable[[dict[str, tuple[np.dtype, tuple[int, ...]]]], Batch]
Workers = Sequence[int] | np.ndarray

PRIORITY = "priority"


def as_workers(workers: Workers) -> list[int]:
    """Returns the ids of workers, or raises ValueError."""
    array = np.asarray(workers)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            "Expected workers as a vector of integers, one per step, got "
            f"{array.dtype} of shape {array.shape}."
        )
    return array.tolist()


def append(
    index: Index, changed: threading.Condition, packed: Batch, workers: list[int]
) -> None:
    """Appends a step [n, ...] to each worker's stream. The writing lock is held."""
    firsts = packed.get("is_first")
    with changed:
        streams = index.streams.find(workers)
        if firsts is not None:
            firsts = firsts.astype(bool) | (index.streams.cut[streams] > 0)
            packed["is_first"] = firsts.astype(packed["is_first"].dtype)
        rows = index.reserve(streams, firsts)
    for key, values in packed.items():
        index.chunks.arrays[key][rows] = values
    with changed:
        index.publish(streams, rows)


def copy_sequences(
    index: Index, latents: threading.Lock, slots: np.ndarray, out: Output | None
) -> Batch:
    """Returns the sequences that begin at pinned slots [n]."""
    chunks, schema = index.chunks, index.schema
    fields = schema.outputs(len(slots), index.length)
    batch = empty_arrays(fields) if out is None else out(fields)
    rows = chunks.expand(slots, index.length)
    for key, codec in schema.codecs.items():
        if key not in schema.latents:
            codec.gather(chunks.arrays[key], rows, batch[key])
    if schema.latents:
        context = np.ascontiguousarray(rows[:, : schema.context])
        with latents:
            for key in schema.latents:
                schema.codecs[key].gather(chunks.arrays[key], context, batch[key])
    chunks.write_stepids(rows, batch[STEPID])
    if "is_last" in batch:
        batch["is_last"][chunks.abandoned[rows]] = True
    if "is_first" in batch:
        batch["is_first"][:, 0] = True
    return batch


def empty_arrays(fields: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> Batch:
    """Returns new arrays, for {key: (dtype, shape)}."""
    return {key: np.empty(shape, dtype) for key, (dtype, shape) in fields.items()}


class Update(NamedTuple):
    """What training has found out about n steps."""

    stepids: np.ndarray  # [n, 20] uint8
    latents: Batch  # [n, ...], as stored.
    priorities: np.ndarray | None  # [n] float32


def parse_stepids(data: Mapping[str, Any]) -> np.ndarray:
    """Returns the ids [..., 20] that an update is for, or raises ValueError."""
    stepids = np.asarray(data.get(STEPID, ()))
    if stepids.dtype != np.uint8 or stepids.shape[-1:] != (STEPID_BYTES,):
        raise ValueError(
            f"Expected {STEPID} as uint8 of shape [..., {STEPID_BYTES}], got "
            f"{stepids.dtype} of shape {stepids.shape}."
        )
    return stepids


def parse_update(schema: Schema, data: Mapping[str, Any]) -> Update:
    """Checks what `Replay.update` was given, or raises ValueError."""
    stepids = parse_stepids(data)
    lead = stepids.shape[:-1]
    amount = int(np.prod(lead))
    known = {STEPID, PRIORITY, *schema.latents}
    if surplus := sorted(data.keys() - known):
        raise ValueError(
            f"Expected an update of {sorted(known)}, got {surplus} in addition. Only "
            "latents that were stored with the steps can be refreshed; for these, the "
            "replay context must be at least 1."
        )
    latents = {
        key: schema.pack_key(key, data[key], lead).reshape(
            amount, *schema.codecs[key].shape
        )
        for key in schema.latents
        if key in data
    }
    priorities = None
    if PRIORITY in data:
        priorities = np.asarray(data[PRIORITY], np.float32)
        if priorities.shape != lead:
            raise ValueError(
                f"Expected {PRIORITY} of shape {lead}, got {priorities.shape}."
            )
        priorities = priorities.reshape(amount)
    return Update(stepids.reshape(amount, STEPID_BYTES), latents, priorities)


def refresh(
    index: Index,
    changed: threading.Condition,
    latents: threading.Lock,
    update: Update,
    is_current: Callable[[], bool],
) -> int:
    """Applies an update; returns how many of its steps were gone.

    `is_current` says, under the index lock, whether the selector belongs to `index`.
    """
    with changed:
        rows, present = index.chunks.locate(update.stepids)
        chunks = np.unique(rows // index.chunks.size)
        index.pin(chunks)
    try:
        with latents:
            for key, values in update.latents.items():
                index.chunks.arrays[key][rows] = values[present]
    finally:
        with changed:
            index.updates += 1
            index.chunks.refreshed[chunks] = index.updates
            if update.priorities is not None and is_current():
                index.prioritize(rows, update.priorities[present])
            index.unpin(chunks)
    return int((~present).sum())
