"""Steps whose contents identify them, so that a sample can be checked on its own."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

CLASSES = 5


def make_step(worker, count, first=False, last=False, version=0):
    """Returns step number `count` of a worker, determined by the arguments alone."""
    identity = np.array([worker, count], np.int64)
    return {
        "worker": np.int32(worker),
        "count": np.int64(count),
        "checksum": np.uint32(zlib.crc32(identity.tobytes())),
        "image": np.full((3, 2), (7 * worker + count) % 256, np.uint8),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        "log/secret": np.float32(1),
        **make_latents(worker, count, version),
    }


def make_latents(worker, count, version):
    """Returns latents that encode the step and the version of its last refresh."""
    value = np.array([worker % 100, count % 100, version % 100, 1])
    return {
        "dyn/deter": value.astype(ml_dtypes.bfloat16),
        "dyn/stoch": (value[:3] % CLASSES).astype(np.uint8),
    }


def make_steps(workers, counts, **kwargs):
    """The steps of several workers, stacked."""
    steps = [make_step(w, c, **kwargs) for w, c in zip(workers, counts)]
    return {key: np.stack([step[key] for step in steps]) for key in steps[0]}


def check_batch(batch):
    """Raises unless every sequence holds intact, consecutive steps of one worker."""
    workers, counts = batch["worker"], batch["count"]
    assert (workers == workers[:, :1]).all()
    assert (np.diff(counts, axis=1) == 1).all(), counts
    for identity, checksum in zip(
        np.stack([workers.astype(np.int64), counts], -1).reshape(-1, 2),
        batch["checksum"].reshape(-1),
    ):
        assert zlib.crc32(identity.tobytes()) == checksum
    pixels = ((7 * workers + counts) % 256).astype(np.uint8)
    assert (batch["image"] == pixels[..., None, None]).all()
    assert batch["is_first"][:, 0].all()
    if "dyn/deter" in batch:
        check_latents(batch, workers, counts)


def check_latents(batch, workers, counts):
    """Raises unless latents belong to their steps, with all keys of one version."""
    context = batch["dyn/deter"].shape[1]
    deter = batch["dyn/deter"].astype(np.int64)
    assert (deter[..., 0] == workers[:, :context] % 100).all()
    assert (deter[..., 1] == counts[:, :context] % 100).all()
    assert (deter[..., 3] == 1).all()
    assert (batch["dyn/stoch"] == deter[..., :3] % CLASSES).all()


def versions(batch):
    """Returns the version of each context step's latents, at first 0: [B, K]."""
    return batch["dyn/deter"][..., 2].astype(np.int64)


def make_update(batch, version, priority=None):
    """Returns the update that training would send for all steps of a batch."""
    workers, counts = batch["worker"], batch["count"]
    latents = [
        [make_latents(w, c, version) for w, c in zip(*row)]
        for row in zip(workers, counts)
    ]
    update = {
        key: np.array([[step[key] for step in row] for row in latents])
        for key in latents[0][0]
    }
    update["stepid"] = batch["stepid"]
    if priority is not None:
        update["priority"] = np.full(counts.shape, priority, np.float32)
    return update


def write_save(replay):
    """Saves a buffer; returns its data and the cut, which has records."""
    with replay.cut() as cut:
        return cut.write(), cut


def fill(replay, workers, counts):
    """Adds the steps with these counts, in order, to each of the workers."""
    for count in counts:
        replay.add_batch(make_steps(workers, [count] * len(workers)), workers)


def all_starts(replay, selector_draws=None):
    """Returns the (worker, count) of all sequence starts, found by sampling often."""
    draws = selector_draws or 40 * max(1, len(replay))
    batch = replay.sample(draws, "report")
    check_batch(batch)
    return set(zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist()))
