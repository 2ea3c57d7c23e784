"""Replay: keeps what environments send, and samples sequences of it to train on.

    replay = Replay(length=65, capacity=1e6, directory=logdir / 'replay', context=1)
    replay.add_batch(steps, workers)
    batch = replay.sample(16)

Where to look: `buffer` is the interface and says how threads get along; `index` knows
streams and sequences, `chunk` the memory, `fields` and `latents` what a step holds,
`access` copies; `durable` has the files, `saving` writes, and `finding`, `reading` and
`restoring` load them; `selectors` decide what is drawn, and `limiters` when.
"""

from embodied.replay import limiters, selectors
from embodied.replay.buffer import Replay
from embodied.replay.settings import ReplayMemoryError

__all__ = ["Replay", "ReplayMemoryError", "limiters", "selectors"]
