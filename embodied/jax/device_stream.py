"""Batches on their way to the devices. Agent process, in the threads of streams.

source -> Seeded -> Prefetch(transform=Placer) -> agent.train
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from embodied import streams
from embodied.base import Array, Stream, Tree
from embodied.jax.devices import Layout

logger = logging.getLogger(__name__)

SEED = "seed"
AHEAD = 2  # Batches that wait on the devices.


def seed_words(*entropy: int) -> np.ndarray:
    """Mixes numbers into the data of a random key, [2] uint32."""
    return np.random.SeedSequence(entropy).generate_state(2, np.uint32)


class Seeded(streams.StreamWrapper):
    """Adds `seed` to every batch; its position is saved with that of the source.

    Args:
      source: the stream of batches.
      entropy: numbers that seeds depend on, beside the index of the batch.
    """

    def __init__(self, source: Stream, *entropy: int):
        super().__init__([source])
        self._source = source
        self._entropy = entropy
        self._index = 0

    def __next__(self) -> dict[str, Array]:
        batch = next(self._source)
        seed = seed_words(*self._entropy, self._index)
        self._index += 1
        return {**batch, SEED: seed}

    def save(self) -> Tree:
        """Returns the source's position, and entropy and index of the next seed."""
        entropy = list(self._entropy)
        return {"source": self._source.save(), "entropy": entropy, "index": self._index}

    def load(self, data: Tree) -> None:
        """Restores the source, and continues with the seed after the last one."""
        self._source.load(data["source"])
        self._entropy = tuple(int(word) for word in data["entropy"])
        self._index = int(data["index"])


class Placer:
    """Moves batches to the devices. May be called from several threads.

    A reward that is not finite, which would make its batch useless, becomes zero; it
    is counted, and reported the first time. `_lock` guards the count.

    Args:
      layout: layout of the devices.
      keys: keys of the arrays to move.
    """

    def __init__(self, layout: Layout, keys: Iterable[str]):
        self.bad_rewards = 0
        self._layout = layout
        self._keys = tuple(keys)
        self._lock = threading.Lock()

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Moves a batch to the devices, and waits until it is there.

        The caller must not change the arrays afterwards: on the cpu they may be used
        without a copy.

        Raises:
          ValueError: a key is missing, or the rows cannot be divided among devices.
        """
        missing = [key for key in self._keys if key not in batch]
        if missing:
            raise ValueError(
                f"Expected a batch with the keys {', '.join(self._keys)}, got "
                f"{', '.join(sorted(batch))}: {', '.join(missing)} is missing."
            )
        chosen = {key: np.asarray(batch[key]) for key in self._keys}
        if "reward" in chosen:
            chosen["reward"] = self._clean(chosen["reward"])
        placed = self._layout.place(chosen)
        if SEED in batch:
            placed[SEED] = self._layout.copy(np.asarray(batch[SEED], np.uint32))
        return jax.block_until_ready(placed)

    def _clean(self, reward: np.ndarray) -> np.ndarray:
        bad = ~np.isfinite(reward)
        if not bad.any():
            return reward
        with self._lock:
            first, self.bad_rewards = not self.bad_rewards, self.bad_rewards + bad.sum()
        if first:
            logger.warning(
                "A reward in the replay is not finite (%s). It is trained on as zero; "
                "further ones are only counted. Check the environment.",
                reward[bad][0],
            )
        return np.where(bad, 0, reward)


def open_stream(
    source: Iterable[dict[str, Array]], placer: Placer, *entropy: int
) -> Iterator[dict[str, Array]]:
    """Opens a stream whose batches are moved to the devices ahead of the reader.

    Args:
      source: a stream, or any other iterable, which has no position to save.
      placer: moves the batches.
      *entropy: numbers that seeds depend on.
    """
    stream: Any = source
    if not all(hasattr(source, name) for name in ("__next__", "save", "load")):
        stream = streams.Stateless(iter(source))
    seeded = Seeded(stream, *entropy)
    return streams.Prefetch(seeded, transform=placer, amount=AHEAD)
