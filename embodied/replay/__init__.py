"""Replay: keeps what environments send, and samples sequences of it to train on.

    replay = Replay(length=65, capacity=1e6, directory=logdir / 'replay', context=1)
    replay.add_batch(steps, workers)
    batch = replay.sample(16)

Where to look: `buffer` is the interface and says how threads get along; `index` knows
streams and sequences, `chunks` what a step holds and the memory, `sizing` how much of
it; `writer` saves `chunkfiles`, a `catalog` finds them and `reader` loads them;
`selectors` (made of `slots`) decide what is drawn, and `limiters` when.
"""

from embodied.replay import limiters, selectors
from embodied.replay.buffer import Replay
from embodied.replay.sizing import ReplayMemoryError
from embodied.replay.writer import ReplayCut, SavedReplay

__all__ = [
    "Replay",
    "ReplayCut",
    "ReplayMemoryError",
    "SavedReplay",
    "limiters",
    "selectors",
]
