"""Episode statistics per environment, pure and without I/O; in the logging process."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Images = Mapping[str, np.ndarray]  # [H, W, C] uint8 by key.

CHANNELS = (1, 3)  # Of images that become videos.
# Rewards that differ by at least this much count as a change in `reward_rate`.
REWARD_CHANGE = np.float32(0.01)


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
      video_length: maximum number of frames kept of an episode, from its start.
      video_bytes: maximum number of bytes kept of an episode per image key.
      clock: returns seconds.
    """

    def __init__(
        self,
        timeout: float = 180.0,
        video_length: int = 500,
        video_bytes: float = 64e6,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._modes = {
            is_eval: _Mode(prefix, timeout or np.inf, video_length, video_bytes)
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
        finished: list[dict[str, float]] = []
        evals = np.broadcast_to(np.asarray(is_eval, bool), (len(envs),))
        for flag, mode in self._modes.items():
            for rows in _without_repeats(envs, np.flatnonzero(evals == flag)):
                finished += mode.add(batch, rows, now)
        return finished

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
    reward: np.ndarray  # [B] float32
    is_first: np.ndarray  # [B] bool
    is_last: np.ndarray  # [B] bool
    logs: dict[str, np.ndarray]  # [B]
    images: dict[str, np.ndarray]  # [B, H, W, C] uint8
    some_images: Mapping[Hashable, Images]


class _Mode:
    """The open and finished episodes of training, or of evaluation.

    Every open episode has a slot, an index into columns of running numbers, so that
    a step of many envs is a few array operations.
    """

    def __init__(
        self, prefix: str, timeout: float, video_length: int, video_bytes: float
    ):
        self._prefix = prefix
        self._timeout = timeout
        self._recorder = _Recorder(video_length, video_bytes, timeout)
        self._slots: dict[Hashable, int] = {}
        self._free = [0]
        self._columns = _Columns()
        self._log_keys: dict[str, None] = {}  # An ordered set.
        self._counts = collections.Counter[str]()
        self._totals: dict[str, tuple[float, int]] = {}
        self._videos: dict[str, np.ndarray] = {}

    def add(
        self, batch: _Batch, rows: np.ndarray, now: float
    ) -> list[dict[str, float]]:
        """Adds the given rows, each from a different env."""
        envs = [batch.envs[row] for row in rows]
        slots = np.array([self._slots.get(env, -1) for env in envs], np.int64)
        stale = (slots >= 0) & (now - self._columns["seen"][slots] > self._timeout)
        for index in np.flatnonzero(stale):
            self._abandon(envs[index])
            slots[index] = -1
        for index in np.flatnonzero(batch.is_first[rows]):
            slots[index] = self._start(envs[index], now)
        known = slots >= 0
        rows = rows[known]
        self._update(batch, rows, slots[known], now)
        if batch.images or batch.some_images:
            self._record(batch, rows, now)
        return [self._finish(batch.envs[row]) for row in rows[batch.is_last[rows]]]

    def abandon(self, envs: Sequence[Hashable]) -> None:
        """Abandons the open episodes of envs."""
        for env in envs:
            if env in self._slots:
                self._abandon(env)

    def expire(self, now: float) -> None:
        """Abandons episodes that made no step within the timeout."""
        seen = self._columns["seen"]
        for env, slot in list(self._slots.items()):
            if now - seen[slot] > self._timeout:
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
        counts = {**self._counts, "states": len(self._slots)}
        self._counts.clear()
        return counts

    def _start(self, env: Hashable, now: float) -> int:
        slot = self._slots.get(env)
        if slot is not None and self._columns["length"][slot] > 0:
            self._abandon(env)
            slot = None
        if slot is None:
            slot = self._allocate(now)
            self._slots[env] = slot
            self._counts["starts"] += 1
        self._columns.clear(slot)
        # Set now, so that an expiry within the same batch does not abandon it.
        self._columns["seen"][slot] = now
        return slot

    def _allocate(self, now: float) -> int:
        if not self._free:
            self.expire(now)
        if not self._free:
            size = len(self._columns)
            self._columns.grow(2 * size)
            self._free = list(range(size, 2 * size))
        return self._free.pop()

    def _abandon(self, env: Hashable) -> None:
        self._free.append(self._slots.pop(env))
        self._recorder.abandon(env)
        self._counts["abandoned"] += 1

    def _update(
        self, batch: _Batch, rows: np.ndarray, slots: np.ndarray, now: float
    ) -> None:
        columns = self._columns
        reward, later = batch.reward[rows], ~batch.is_first[rows]
        with np.errstate(invalid="ignore"):  # The rewards may be infinite.
            changed = np.abs(reward - columns["reward"][slots]) >= REWARD_CHANGE
        columns["seen"][slots] = now
        columns["score"][slots] += reward
        columns["length"][slots] += later
        columns["changes"][slots] += later & changed
        columns["reward"][slots] = reward
        for key, values in batch.logs.items():
            self._log_keys[key] = None
            value = values[rows]
            count, highest = columns[key, "count"], columns[key, "max"]
            higher = np.maximum(highest[slots], value)
            highest[slots] = np.where(count[slots] > 0, higher, value)
            columns[key, "sum"][slots] += value
            count[slots] += 1

    def _record(self, batch: _Batch, rows: np.ndarray, now: float) -> None:
        for row in rows:
            env, first = batch.envs[row], bool(batch.is_first[row])
            if self._recorder.wants(env, first, now, env in batch.some_images):
                frames = {key: value[row] for key, value in batch.images.items()}
                frames.update(batch.some_images.get(env, {}))
                self._recorder.add(env, first, frames, now)

    def _finish(self, env: Hashable) -> dict[str, float]:
        slot = self._slots.pop(env)
        self._free.append(slot)
        self._counts["ends"] += 1
        self._videos.update(self._recorder.finish(env))
        columns = self._columns
        length = int(columns["length"][slot])
        stats = {"reward_rate": columns["changes"][slot] / max(1, length)}
        for key in self._log_keys:
            count = columns[key, "count"][slot]
            if count:
                stats[f"{key}/avg"] = columns[key, "sum"][slot] / count
                stats[f"{key}/max"] = columns[key, "max"][slot]
                stats[f"{key}/sum"] = columns[key, "sum"][slot]
        for name, value in stats.items():
            total, number = self._totals.get(name, (0.0, 0))
            self._totals[name] = (total + float(value), number + 1)
        score = float(columns["score"][slot])
        return {
            f"{self._prefix}episode/score": score,
            f"{self._prefix}episode/length": length,
        }


class _Columns:
    """Running statistics by name and slot, initially zero."""

    def __init__(self) -> None:
        self._size = 1
        self._arrays: dict[Hashable, np.ndarray] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: Hashable) -> np.ndarray:
        if name not in self._arrays:
            self._arrays[name] = np.zeros(self._size, np.float64)
        return self._arrays[name]

    def grow(self, size: int) -> None:
        for name, array in self._arrays.items():
            self._arrays[name] = np.concatenate([array, np.zeros(size - self._size)])
        self._size = size

    def clear(self, slot: int) -> None:
        for array in self._arrays.values():
            array[slot] = 0


_NO_ENV = object()


class _Recorder:
    """Keeps the first frames of the episodes of one env."""

    def __init__(self, max_length: int, max_bytes: float, timeout: float):
        self._max_length = max_length
        self._max_bytes = max_bytes
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
            limit = min(self._max_length, self._max_bytes // value.nbytes)
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
        required["reward"].astype(np.float32),
        required["is_first"].astype(bool),
        required["is_last"].astype(bool),
        logs,
        images,
        some_images,
    )


def _is_image(array: np.ndarray, ndim: int) -> bool:
    shaped = array.ndim == ndim and array.shape[-1] in CHANNELS
    return shaped and array.dtype == np.uint8 and array.size > 0


def _without_repeats(envs: list[Hashable], rows: np.ndarray) -> list[np.ndarray]:
    """Splits rows before repeated envs, so that no part has an env twice."""
    if len({envs[row] for row in rows}) == len(rows):
        return [rows] if len(rows) else []
    starts: list[int] = []
    seen: set[Hashable] = set()
    for index, row in enumerate(rows):
        if envs[row] in seen:
            starts.append(index)
            seen.clear()
        seen.add(envs[row])
    return np.split(rows, starts)
