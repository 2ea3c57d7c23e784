"""Measures replay against plain NumPy copies of the same bytes, in one run.

    python -m benchmarks.replay [--quick]

Both sides copy sequences from anywhere in a buffer, the replay into new arrays, and
steps into a buffer that is full. They take turns, and the median of the ratios counts,
so that a noisy machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil

from embodied.replay import Replay

ENVS = 16
BATCH, LENGTH = 16, 65
DETER, STOCH, CLASSES = 2048, 32, 16  # Of size12m.


def main() -> None:
    """Runs all measurements and prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller and noisier")
    quick = parser.parse_args().quick
    steps, rounds, large = (20_000, 40, 200_000) if quick else (100_000, 120, 1_000_000)
    result = {"overhead_bytes_per_step": overhead(large)}
    result |= bandwidth(steps, rounds)
    result |= growth(10_000, large, rounds)
    for compress in ("none", "zstd"):
        files("image", image_steps, steps // 10, compress)
    for compress in ("none", "zstd"):
        files("small", vector_steps, large, compress)
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))


def say(title: str, value: float, unit: str) -> None:
    """Prints one figure."""
    print(f"{title:<58} {value:>10.4g} {unit}")
    sys.stdout.flush()


# The data.


def image_steps(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a step of each of 16 environments, with images and latents."""
    rng = np.random.default_rng(seed)
    # Flat areas with a noisy sprite, as in games.
    image = np.kron(
        rng.integers(0, 255, (ENVS, 8, 8, 3), np.uint8), np.ones((1, 8, 8, 1), np.uint8)
    )
    image[:, 20:30, 20:30] ^= rng.integers(0, 255, (ENVS, 10, 10, 3), np.uint8)
    return {
        "image": image,
        **scalars(),
        "dyn/deter": rng.normal(size=(ENVS, DETER)).astype(ml_dtypes.bfloat16),
        "dyn/stoch": rng.integers(0, CLASSES, (ENVS, STOCH), np.uint8),
    }


def vector_steps(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a step of each of 16 environments, with small observations."""
    rng = np.random.default_rng(seed)
    return {"vector": rng.normal(size=(ENVS, 8)).astype(np.float32), **scalars()}


def scalars() -> dict[str, np.ndarray]:
    """Returns the keys that all environments have."""
    flags = ("is_first", "is_last", "is_terminal")
    return {
        "reward": np.zeros(ENVS, np.float32),
        "action": np.zeros(ENVS, np.int32),
        **{key: np.zeros(ENVS, bool) for key in flags},
    }


def row_bytes(steps: dict[str, np.ndarray]) -> int:
    """Returns the packed bytes of one step."""
    return sum(value.nbytes for value in steps.values()) // ENVS


def fill(replay: Replay, steps: dict[str, np.ndarray], amount: int) -> float:
    """Adds about `amount` steps; returns the seconds per call."""
    calls = amount // ENVS + LENGTH
    start = time.perf_counter()
    for _ in range(calls):
        replay.add_batch(steps, range(ENVS))
    return (time.perf_counter() - start) / calls


# What is measured.


def overhead(amount: int) -> float:
    """Returns the resident bytes per step beyond its packed bytes."""
    steps = vector_steps()
    process = psutil.Process()
    warm = Replay(LENGTH, 10_000)  # For everything that is imported or made once.
    fill(warm, steps, 10_000)
    warm.sample(BATCH)
    before = process.memory_info().rss
    replay = Replay(LENGTH, amount)
    fill(replay, steps, amount)
    used = (process.memory_info().rss - before) / replay.stats()["steps"]
    say("packed bytes a step", row_bytes(steps), "")
    say(f"resident bytes a step, {amount} small steps", used, "")
    return used - row_bytes(steps)


def bandwidth(amount: int, rounds: int) -> dict[str, float]:
    """Compares inserting and sampling of images with plain copies."""
    steps = image_steps()
    replay = Replay(LENGTH, amount, context=1, bytes=4e4 * amount + 1e9)
    seconds = fill(replay, steps, amount)
    size = row_bytes(steps) * ENVS
    say("inserts into memory used for the first time", size / seconds / 1e9, "GB/s")
    fill(replay, steps, 20 * 1024 * ENVS if amount > 50_000 else amount)
    start = time.perf_counter()
    plain = Plain(amount, steps)
    seconds = time.perf_counter() - start
    title = "plain writes into memory used for the first time"
    say(title, amount * row_bytes(steps) / seconds / 1e9, "GB/s")
    insert = compare(
        "insert 16 steps of image and latents",
        rounds,
        50,
        size,
        lambda: replay.add_batch(steps, range(ENVS)),
        plain.insert,
    )
    batch = replay.sample(BATCH)
    size = sum(value.nbytes for value in batch.values())
    sample = compare(
        "sample 16 x 65 images",
        rounds,
        10,
        size,
        lambda: replay.sample(BATCH),
        plain.sample,
    )
    update = {
        "stepid": np.ascontiguousarray(batch["stepid"][:, 1:]),
        "dyn/deter": np.zeros((BATCH, LENGTH - 1, DETER), ml_dtypes.bfloat16),
        "dyn/stoch": np.zeros((BATCH, LENGTH - 1, STOCH), np.uint8),
    }
    milliseconds = 1e3 * seconds_a_call(lambda: replay.update(update), 50)
    say("update of 16 x 64 latents", milliseconds, "ms")
    return {"sample_bandwidth_fraction": sample, "insert_bandwidth_fraction": insert}


class Plain:
    """Copies the same bytes with NumPy alone."""

    def __init__(self, amount: int, steps: dict[str, np.ndarray]):
        self._rng = np.random.default_rng(0)
        self._buffer = np.ones((amount, row_bytes(steps)), np.uint8)
        self._images = self._buffer.reshape(-1)
        self._step = np.ones((ENVS, row_bytes(steps)), np.uint8)
        self._nbytes = LENGTH * steps["image"][0].nbytes
        self._batch = np.ones((BATCH, self._nbytes), np.uint8)

    def insert(self) -> None:
        """Copies 16 steps to random places."""
        for i, row in enumerate(self._rng.integers(0, len(self._buffer), ENVS)):
            self._buffer[row] = self._step[i]

    def sample(self) -> None:
        """Copies 16 sequences of images from random places."""
        last = len(self._images) - self._nbytes
        for i, start in enumerate(self._rng.integers(0, last, BATCH)):
            self._batch[i] = self._images[start : start + self._nbytes]


def compare(
    title: str,
    rounds: int,
    calls: int,
    size: int,
    ours: Callable[[], Any],
    plain: Callable[[], Any],
) -> float:
    """Prints GB/s of both sides; returns the median ratio of replay to plain speed."""
    times = [
        (seconds_a_call(plain, calls), seconds_a_call(ours, calls))
        for _ in range(rounds)
    ]
    theirs, own = np.median(times, axis=0)
    fraction = float(np.median([a / b for a, b in times]))
    say(f"{title}: plain copy", size / theirs / 1e9, "GB/s")
    say(f"{title}: replay", size / own / 1e9, "GB/s")
    say(f"{title}: replay", 1e6 * own, "us a call")
    say(f"{title}: fraction", fraction, "")
    return fraction


def seconds_a_call(function: Callable[[], Any], calls: int) -> float:
    """Returns the mean seconds of a few calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def growth(small: int, large: int, rounds: int) -> dict[str, float]:
    """Compares the cost of a call in a small and in a large buffer, both full."""
    steps = vector_steps()
    buffers = [Replay(LENGTH, capacity) for capacity in (small, large)]
    for replay, capacity in zip(buffers, (small, large)):
        fill(replay, steps, 2 * capacity)
        assert len(replay) == capacity
    result = {}
    calls: dict[str, list[Callable[[], Any]]] = {
        "sample": [partial(replay.sample, BATCH) for replay in buffers],
        "insert": [partial(x.add_batch, steps, range(ENVS)) for x in buffers],
    }
    for name, sides in calls.items():
        times = np.array(
            [[seconds_a_call(side, 50) for side in sides] for _ in range(rounds)]
        )
        for capacity, seconds in zip((small, large), np.median(times, axis=0)):
            say(f"{name} of 16 with {capacity} items", 1e6 * seconds, "us")
        result[f"{name}_growth"] = float(np.median(times[:, 1] / times[:, 0]))
        say(f"{name}: growth", result[f"{name}_growth"], "")
    return result


def files(
    name: str,
    make_steps: Callable[[int], dict[str, np.ndarray]],
    amount: int,
    compress: str,
) -> None:
    """Prints how fast steps are saved and loaded, and how large files are."""
    variety = [make_steps(seed) for seed in range(512)]
    steps = variety[0]
    folder = tempfile.mkdtemp(prefix="replay-benchmark-")
    try:

        def make() -> Replay:
            return Replay(LENGTH, amount, folder, context=1, compress=compress)

        replay = make()
        for call in range(amount // ENVS + LENGTH):
            replay.add_batch(variety[call % len(variety)], range(ENVS))
        size = row_bytes(steps) * replay.stats()["steps"]
        start = time.perf_counter()
        data = replay.save()
        saved = time.perf_counter() - start
        start = time.perf_counter()
        loaded = make()
        loaded.load(data)
        seconds = time.perf_counter() - start
        assert len(loaded) == len(replay)
        disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        title = f"{amount} {name} steps, {compress}"
        say(f"{title}: save", size / saved / 1e6, "MB/s")
        say(f"{title}: load", size / seconds / 1e6, "MB/s")
        say(f"{title}: load", seconds, "s")
        say(f"{title}: size on disk", 100 * disk / size, "%")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
