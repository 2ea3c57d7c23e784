"""Episode statistics per environment, pure and without I/O; in the logging process."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Images = Mapping[str, np.ndarray]  # [H, W, C] uint8 by key.

CHANNELS = (1, 3)  # Of images that become videos.
# Maximum of the frames, and of their bytes per image key, that are kept of an episode.
VIDEO_FRAMES, VIDEO_BYTES = 500, 64_000_000
# Rewards that differ by at least this much count as a change in `reward_rate`.
REWARD_CHANGE = float(np.float32(0.01))


class Episodes:
    """Assembles episodes from the interleaved transitions of many environments.

        for episode in episodes.add_batch(transitions, envids, is_eval):
          logger.add(episode)             # {'episode/score': …, 'episode/length': …}
        ...
        logger.add(episodes.result())     # {'epstats/…': …, 'parallel/ep_ends': …}

    An episode runs from a transition with `is_first` to one with `is_last`, both
    included; only complete episodes are reported. Per finished episode:

    - `episode/score`: sum of its rewards.
    - `episode/length`: number of actions taken, which is one less than its
      transitions. These are agent steps: with action repeat, an action counts once.

    From `result`, averaged over the episodes finished since its last call:

    - `epstats/reward_rate`: share of the actions after which the reward differed from
      the one before by 0.01 or more.
    - `epstats/log/KEY/{avg,max,sum}`: of scalar `log/KEY` over the transitions.
      Other shapes are ignored.
    - `epstats/policy_KEY`: the last finished video [T, H, W, C] of an image key, from
      one recorded env: the first to start an episode with images. Another env
      replaces it once it makes no step for longer than the timeout.
    - `parallel/ep_{starts,ends,abandoned}`: counts since the last call, and
      `parallel/ep_states`: episodes open now; training and evaluation together.

    Evaluation is reported separately, as `eval_episode/…` and `eval_epstats/…`. The
    same env id may occur in both training and evaluation.

    An episode is abandoned when its env starts another one or makes no step within
    the timeout; resetting an env twice in a row abandons nothing. Steps of an episode
    that was abandoned, or whose start was not seen, are ignored until the env's next
    `is_first`. State is held for open episodes only.

    Not thread-safe: one thread owns it.

    Args:
      timeout: seconds without a step after which an episode is abandoned; 0 for none.
      clock: returns seconds.
    """

    def __init__(
        self,
        timeout: float = 180.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._modes = {
            is_eval: _Mode(prefix, timeout or np.inf)
            for is_eval, prefix in ((False, ""), (True, "eval_"))
        }

    def add(
        self, transition: Mapping[str, Any], env: Hashable, is_eval: bool = False
    ) -> list[dict[str, float]]:
        """Adds one transition; see `add_batch`."""
        batch = {key: np.asarray(value)[None] for key, value in transition.items()}
        return self.add_batch(batch, [env], is_eval)

    def add_batch(
        self,
        transitions: Mapping[str, Any],
        envids: Sequence[Hashable] | np.ndarray,
        is_eval: Any = False,
        images: Mapping[Hashable, Images] | None = None,
    ) -> list[dict[str, float]]:
        """Adds transitions in the order given.

        Args:
          transitions: arrays [B, ...] by key: reward, is_first, is_last, and perhaps
            `log/KEY` [B] and images [B, H, W, C] uint8. Other keys are ignored.
          envids: the env of each row.
          is_eval: one bool for all rows, or an array [B].
          images: images [H, W, C] uint8 by env and key, if only some envs have them;
            each of these envs has one row in the batch.

        Returns:
          Score and length of every episode that these transitions finished.
        """
        envs = envids.tolist() if isinstance(envids, np.ndarray) else list(envids)
        batch = _check(transitions, envs, images or {})
        now = self._clock()
        evals = np.broadcast_to(np.asarray(is_eval, bool), (len(envs),)).tolist()
        finished = [
            self._modes[evals[row]].add(batch, row, now) for row in range(len(envs))
        ]
        return [stats for stats in finished if stats is not None]

    def abandon(self, envids: Sequence[Hashable] | np.ndarray) -> None:
        """Abandons the open episodes of envs, of which steps may be missing."""
        envs = envids.tolist() if isinstance(envids, np.ndarray) else list(envids)
        for mode in self._modes.values():
            mode.abandon(envs)

    def result(self) -> dict[str, Any]:
        """Returns the metrics since the last call."""
        now = self._clock()
        metrics: dict[str, Any] = {}
        counts = {"starts": 0, "ends": 0, "abandoned": 0, "states": 0}
        for mode in self._modes.values():
            mode.expire(now)
            metrics.update(mode.result())
            for key, count in mode.counts().items():
                counts[key] += count
        metrics.update({f"parallel/ep_{key}": count for key, count in counts.items()})
        return metrics


class _Batch(NamedTuple):
    """Checked transitions."""

    envs: list[Hashable]
    reward: list[float]
    is_first: list[bool]
    is_last: list[bool]
    logs: dict[str, list[float]]
    images: dict[str, np.ndarray]  # [B, H, W, C] uint8
    some_images: Mapping[Hashable, Images]


@dataclasses.dataclass
class _Episode:
    """Running statistics of an open episode."""

    seen: float  # Time of the last step.
    score: float = 0.0
    length: int = 0
    changes: int = 0  # Of the reward.
    reward: float = 0.0  # The last one.
    # Count, sum and maximum of the values by `log/` key.
    logs: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, batch: _Batch, row: int, now: float) -> None:
        """Counts a transition."""
        reward = batch.reward[row]
        if not batch.is_first[row]:
            self.length += 1
            self.changes += abs(reward - self.reward) >= REWARD_CHANGE
        self.seen = now
        self.score += reward
        self.reward = reward
        for key, values in batch.logs.items():
            value = values[row]
            if key not in self.logs:
                self.logs[key] = [0, 0, value]
            log = self.logs[key]
            log[0] += 1
            log[1] += value
            if value > log[2] or value != value:  # As NumPy's maximum: NaN stays.
                log[2] = value

    def stats(self) -> dict[str, float]:
        """Returns what is averaged over episodes, by name."""
        stats = {"reward_rate": self.changes / max(1, self.length)}
        for key, (count, total, highest) in self.logs.items():
            stats[f"{key}/avg"] = total / count
            stats[f"{key}/max"] = float(highest)
            stats[f"{key}/sum"] = total
        return stats


class _Mode:
    """The open and finished episodes of training, or of evaluation."""

    def __init__(self, prefix: str, timeout: float):
        self._prefix = prefix
        self._timeout = timeout
        self._recorder = _Recorder(timeout)
        self._open: dict[Hashable, _Episode] = {}  # By env.
        self._counts = collections.Counter[str]()
        self._totals: dict[str, tuple[float, int]] = {}
        self._videos: dict[str, np.ndarray] = {}

    def add(self, batch: _Batch, row: int, now: float) -> dict[str, float] | None:
        """Adds a transition; returns score and length of the episode that it ends."""
        env = batch.envs[row]
        episode = self._open.get(env)
        if episode is not None and now - episode.seen > self._timeout:
            self._abandon(env)
            episode = None
        if batch.is_first[row]:
            episode = self._start(env, now)
        if episode is None:
            return None
        episode.add(batch, row, now)
        if batch.images or batch.some_images:
            self._record(batch, row, now)
        return self._finish(env) if batch.is_last[row] else None

    def abandon(self, envs: Sequence[Hashable]) -> None:
        """Abandons the open episodes of envs."""
        for env in envs:
            if env in self._open:
                self._abandon(env)

    def expire(self, now: float) -> None:
        """Abandons episodes that made no step within the timeout."""
        for env, episode in list(self._open.items()):
            if now - episode.seen > self._timeout:
                self._abandon(env)

    def result(self) -> dict[str, Any]:
        """Returns means and the last videos of finished episodes, and clears them."""
        metrics: dict[str, Any] = {
            name: total / count for name, (total, count) in self._totals.items()
        }
        metrics.update(self._videos)
        self._totals, self._videos = {}, {}
        return {f"{self._prefix}epstats/{k}": v for k, v in metrics.items()}

    def counts(self) -> dict[str, int]:
        """Returns and clears the counts of events; adds the number of open episodes."""
        counts = {**self._counts, "states": len(self._open)}
        self._counts.clear()
        return counts

    def _start(self, env: Hashable, now: float) -> _Episode:
        if env in self._open and self._open[env].length:
            self._abandon(env)
        if env not in self._open:
            self._counts["starts"] += 1
        self._open[env] = _Episode(now)
        return self._open[env]

    def _abandon(self, env: Hashable) -> None:
        del self._open[env]
        self._recorder.abandon(env)
        self._counts["abandoned"] += 1

    def _record(self, batch: _Batch, row: int, now: float) -> None:
        env, first = batch.envs[row], batch.is_first[row]
        if self._recorder.wants(env, first, now, env in batch.some_images):
            frames = {key: value[row] for key, value in batch.images.items()}
            frames.update(batch.some_images.get(env, {}))
            self._recorder.add(env, first, frames, now)

    def _finish(self, env: Hashable) -> dict[str, float]:
        episode = self._open.pop(env)
        self._counts["ends"] += 1
        self._videos.update(self._recorder.finish(env))
        for name, value in episode.stats().items():
            total, number = self._totals.get(name, (0.0, 0))
            self._totals[name] = (total + value, number + 1)
        return {
            f"{self._prefix}episode/score": episode.score,
            f"{self._prefix}episode/length": episode.length,
        }


_NO_ENV = object()


class _Recorder:
    """Keeps the first frames of the episodes of one env."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._env: Hashable = _NO_ENV
        self._seen = 0.0
        self._frames: dict[str, list[np.ndarray]] = {}

    def wants(self, env: Hashable, first: bool, now: float, chosen: bool) -> bool:
        """Returns whether the frames of this step should be added.

        Args:
          env: the env that made the step.
          first: whether the step begins an episode.
          now: time in seconds.
          chosen: whether the sender picked this env as the only one to send frames
            of. It may have picked another one while the recorded env was away.
        """
        if env == self._env:
            return True
        gone = self._env is _NO_ENV or now - self._seen > self._timeout
        return first and (gone or chosen)

    def add(
        self, env: Hashable, first: bool, frames: Mapping[str, np.ndarray], now: float
    ) -> None:
        """Adds frames [H, W, C] by key."""
        if not frames:
            return
        if first:
            self._frames = {}
        self._env, self._seen = env, now
        for key, value in frames.items():
            kept = self._frames.setdefault(key, [])
            limit = min(VIDEO_FRAMES, VIDEO_BYTES // value.nbytes)
            if len(kept) < limit and (not kept or kept[0].shape == value.shape):
                # A copy, since the caller may use its buffers again.
                kept.append(np.array(value))

    def abandon(self, env: Hashable) -> None:
        """Forgets the env, if it is the recorded one."""
        if env == self._env:
            self._env, self._frames = _NO_ENV, {}

    def finish(self, env: Hashable) -> dict[str, np.ndarray]:
        """Returns the videos [T, H, W, C] if `env` is the recorded one, else none."""
        if env != self._env:
            return {}
        frames, self._frames = self._frames, {}
        return {f"policy_{key}": np.stack(kept) for key, kept in frames.items() if kept}


def _check(
    transitions: Mapping[str, Any],
    envs: list[Hashable],
    some_images: Mapping[Hashable, Images],
) -> _Batch:
    """Returns the keys that are used; raises if they do not fit together."""
    required: dict[str, np.ndarray] = {}
    for key in ("reward", "is_first", "is_last"):
        if key not in transitions:
            raise KeyError(
                f"Expected transitions with {key!r}, got {sorted(transitions)}."
            )
        required[key] = np.asarray(transitions[key])
    logs: dict[str, np.ndarray] = {}
    images: dict[str, np.ndarray] = {}
    for key, values in transitions.items():
        array = np.asarray(values)
        if _is_image(array, ndim=4):
            images[key] = array
        elif key.startswith("log/") and array.ndim == 1 and array.dtype.kind in "biuf":
            logs[key] = array
    size = len(envs)
    for key, array in (required | logs | images).items():
        shape = (size, *array.shape[1:]) if key in images else (size,)
        if array.shape != shape:
            raise ValueError(
                f"Expected {key!r} of shape {shape} for {size} env ids, got "
                f"{array.shape}."
            )
    for env, frames in some_images.items():
        for key, frame in frames.items():
            if not _is_image(frame, ndim=3):
                raise ValueError(
                    f"Expected image {key!r} of env {env!r} as [H, W, C] uint8 with 1 "
                    f"or 3 channels, got shape {frame.shape} and dtype {frame.dtype}."
                )
    return _Batch(
        envs,
        required["reward"].astype(np.float32).tolist(),
        required["is_first"].astype(bool).tolist(),
        required["is_last"].astype(bool).tolist(),
        {key: array.tolist() for key, array in logs.items()},
        images,
        some_images,
    )


def _is_image(array: np.ndarray, ndim: int) -> bool:
    shaped = array.ndim == ndim and array.shape[-1] in CHANNELS
    return shaped and array.dtype == np.uint8 and array.size > 0
