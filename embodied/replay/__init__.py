"""Replay buffer: stores environment steps and samples sequences to train on.

    replay = Replay(length=65, capacity=1e6, directory=logdir / 'replay', context=1)
    replay.add_batch(steps, workers)
    batch = replay.sample(16)

Where to look: `buffer` is the interface and documents threads and locks; `index` tracks
streams and sequences, `chunks` defines steps and holds their memory, `sizing` decides
how much; `writer` saves `chunkfiles`, `catalog` finds them and `reader` loads them;
`selectors` (with `slots`) decide what is drawn, and `limiters` when.
"""

from embodied.replay import limiters, selectors
from embodied.replay.buffer import Replay
from embodied.replay.sizing import ReplayMemoryError
from embodied.replay.writer import ReplayCut

__all__ = [
    "Replay",
    "ReplayCut",
    "ReplayMemoryError",
    "limiters",
    "selectors",
]
