"""Checks what a run has stored, and accounts for what it has lost.

Two witnesses are compared: the traces that the environments left, and the files of the
logdir. A transition that is in a trace and not in the newest checkpoint is lost; every
loss must be explained by a fault: it came after the save that the run went back to.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from benchmarks.chaos import reader
from benchmarks.chaos.numbered_env import episode_length, reward_of

REPLAYS = ("replay", "replay_eval")
KEPT = 3  # Checkpoints that a run keeps by default.
IN_FLIGHT = 16  # Steps of an environment on their way when a save begins.
STALE = 5.0  # Seconds after the last step of a life when none is on its way any more.
EXPLAIN = frozenset(("agent", "replay", "launcher", "end"))


@dataclasses.dataclass(frozen=True)
class Window:
    """A time in which transitions may be lost, and the kind of fault that explains it.

    Args:
      kind: of the fault.
      begin: when the save began that the run, or a role, went back to.
      fault: when the fault happened.
      end: when the run trained again.
      roles: roles that went back to that save; "launcher" for all of them, "end" for
        the end of the run.
    """

    kind: str
    begin: float
    fault: float
    end: float
    roles: tuple[str, ...] = ()

    @property
    def loses_transitions(self) -> bool:
        """Whether one of these roles had transitions that were not saved."""
        return not EXPLAIN.isdisjoint(self.roles)


@dataclasses.dataclass
class Stored:
    """The transitions of a checkpoint."""

    manifest: reader.Manifest | None
    streams: dict[str, list[reader.Stream]]
    problems: list[str]
    counts: collections.Counter[str]

    def counters(self, shortest: int = 0) -> dict[int, np.ndarray]:
        """Returns the counters of transitions by life, of both replays together.

        Streams that are shorter than `shortest` are left out.
        """
        found: dict[int, list[np.ndarray]] = {}
        for streams in self.streams.values():
            for stream in streams:
                if len(stream.where) < shortest:
                    continue
                lives = stream.where[:, 1]
                for life in np.unique(lives).tolist():
                    rows = stream.where[lives == life]
                    found.setdefault(life, []).append(rows[:, 4])
        return {life: np.concatenate(parts) for life, parts in found.items()}

    def total(self, replay: str) -> int:
        """Returns how many transitions a replay has."""
        return sum(len(stream.where) for stream in self.streams.get(replay, []))


def read_stored(logdir: pathlib.Path, damaged: Collection[str] = ()) -> Stored:
    """Reads the newest whole checkpoint, and checks its files and transitions.

    Args:
      logdir: of the run.
      damaged: paths of files that were damaged on purpose.
    """
    found, problems = reader.manifests(logdir)
    problems = [x for x in problems if not any(path in x for path in damaged)]
    counts: collections.Counter[str] = collections.Counter()
    whole = []
    # Older ones may lack files: a kill can come between their removal and that of the
    # manifest.
    for manifest in found[-KEPT:]:
        damage = reader.damage(logdir, manifest)
        if not any(manifest.files[path]["required"] for path in damage):
            whole.append(manifest)
        for path, problem in damage.items():
            if path not in damaged:
                problems.append(f"{path} of {manifest.tag}: {problem}")
    if not whole:
        return Stored(None, {}, [*problems, "there is no checkpoint"], counts)
    newest = whole[-1]
    stored = Stored(newest, {}, problems, counts)
    for replay in REPLAYS:
        streams, wrong = reader.read_streams(logdir, newest, replay)
        stored.streams[replay] = streams
        problems += wrong
        for stream in streams:
            counts.update(check_stream(stream))
        part = reader.read_part(logdir, newest, replay)
        inserts = part["counters"]["inserts"] - part["counters"]["evicted"]
        counts["stored"] += stored.total(replay)
        if part["counters"]["evicted"] == 0 and inserts < stored.total(replay):
            problems.append(f"{replay} has more transitions than it has counted")
    for life, counters in stored.counters().items():
        if twice := len(counters) - len(np.unique(counters)):
            counts["duplicates"] += twice
            problems.append(f"life {life} has {twice} transitions twice")
    return stored


def check_stream(stream: reader.Stream) -> collections.Counter[str]:
    """Counts the irregular steps of a stream, by kind.

    These are `gaps`, steps that do not follow the one before and are not marked as
    first; `mixed`, transitions whose parts do not belong together; `breaks`, steps that
    do not follow the one before but are marked as first; and `torn_episodes`, steps
    that are marked as first in the middle of an episode of the environment.
    """
    where, first = stream.where, stream.arrays["is_first"].astype(bool)
    env, life, episode, step, counter = where.T
    same = (env[1:] == env[:-1]) & (life[1:] == life[:-1])
    follows = same & (counter[1:] == counter[:-1] + 1)
    inside = (episode[1:] == episode[:-1]) & (step[1:] == step[:-1] + 1)
    begins = (episode[1:] > episode[:-1]) & (step[1:] == 0)
    last = stream.arrays["is_last"].astype(bool)
    lengths = [episode_length(*pair) for pair in where[:, 1:3].tolist()]
    rewards = [reward_of(*pair) for pair in where[:, [1, 4]].tolist()]
    mixed = (
        (last != (step >= lengths))
        | (first < (step == 0))
        | ~np.isclose(stream.arrays["reward"], rewards, atol=1e-5)
    )
    return collections.Counter(
        streams=1,
        gaps=int((~follows & ~first[1:]).sum()) + int((env != env[0]).sum()),
        mixed=int(mixed.sum()) + int((follows & ~inside & ~begins).sum()),
        breaks=int((~follows & first[1:]).sum()),
        torn_episodes=int((first & (step > 0)).sum()),
    )


def read_traces(folder: pathlib.Path) -> dict[int, tuple[int, np.ndarray]]:
    """Returns env and times [n] of all steps that were made, by life."""
    found = {}
    for path in folder.glob("*.trace"):
        env, life = map(int, path.stem.split("-"))
        data = path.read_bytes()
        found[life] = env, np.frombuffer(data[: len(data) // 8 * 8], np.float64)
    return found


@dataclasses.dataclass
class Losses:
    """Transitions that were made and are not stored.

    Args:
      made: how many were made in all.
      by_kind: how many each kind of fault explains.
      worst: the most that one fault explains.
      seconds: the longest time between a lost transition and its fault, by kind.
      unexplained: descriptions of those that nothing explains.
    """

    made: int = 0
    by_kind: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    worst: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    unexplained: list[str] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of all lost transitions."""
        return self.by_kind.total()


def account(
    traces: dict[int, tuple[int, np.ndarray]],
    stored: dict[int, np.ndarray],
    windows: list[Window],
    excused: set[tuple[int, int]],
    sequence: int,
) -> Losses:
    """Finds the lost transitions and their causes.

    Args:
      traces: of the environments.
      stored: counters of the stored transitions by life.
      windows: times in which transitions may be lost.
      excused: transitions, as life and counter, whose files were damaged on purpose.
      sequence: steps of a sequence; streams that are shorter are dropped.
    """
    losses = Losses()
    each: collections.Counter[int] = collections.Counter()
    for life, (_, times) in traces.items():
        losses.made += len(times)
        there = np.zeros(len(times), bool)
        counters = stored.get(life, np.zeros(0, np.int64))
        if len(counters) and counters.max() >= len(times):
            losses.unexplained.append(f"life {life} has steps that nobody made")
        there[counters[counters < len(times)]] = True
        missing = np.flatnonzero(~there)
        causes = _causes(times, missing, windows, sequence)
        for counter, cause in zip(missing.tolist(), causes.tolist()):
            if cause >= 0:
                window = windows[cause]
                each[cause] += 1
                losses.by_kind[window.kind] += 1
                before = losses.seconds.get(window.kind, 0.0)
                age = float(window.fault - times[counter])
                losses.seconds[window.kind] = max(before, age)
            elif (life, counter) in excused:
                losses.by_kind["damaged_file"] += 1
            elif counter >= len(times) - 2:
                losses.by_kind["last_of_life"] += 1
            else:
                losses.by_kind["unexplained"] += 1
                losses.unexplained.append(
                    f"step {counter} of {len(times)} of life {life}, "
                    f"at {times[counter]:.2f}"
                )
    losses.worst = max(each.values(), default=0)
    return losses


def _causes(
    times: np.ndarray, missing: np.ndarray, windows: list[Window], sequence: int
) -> np.ndarray:
    """Returns the index of the window that explains each missing step, or -1."""
    causes = np.full(len(missing), -1)
    for number, window in enumerate(windows):
        if not window.loses_transitions or times[-1] < window.begin - STALE:
            continue  # Nothing was lost, or the environment had ended long before.
        begin = np.searchsorted(times, window.begin) - IN_FLIGHT
        end = np.searchsorted(times, window.end) + sequence
        causes[(causes < 0) & (missing >= begin) & (missing < end)] = number
    return causes


def forgotten(
    before: dict[int, np.ndarray],
    after: dict[int, np.ndarray],
    excused: set[tuple[int, int]],
) -> int:
    """Returns how many transitions of one checkpoint a later one lacks."""
    count = 0
    for life, counters in before.items():
        missing = np.setdiff1d(counters, after.get(life, counters[:0]))
        count += sum((life, int(counter)) not in excused for counter in missing)
    return count


def made_within(
    traces: dict[int, tuple[int, np.ndarray]],
    envs: Iterable[int],
    begin: float,
    end: float,
) -> int:
    """Returns how many steps some environments made between two times."""
    chosen = set(envs)
    return sum(
        int(((times >= begin) & (times <= end)).sum())
        for env, times in traces.values()
        if env in chosen
    )


def lost_together(windows: Iterable[Window], *roles: str) -> list[tuple[float, float]]:
    """Returns the time spans that all of some roles have lost, whether at once or not.

    Args:
      windows: of the faults.
      roles: names of roles, which have all gone back to the same save.
    """
    groups: dict[float, list[Window]] = {}
    for window in windows:
        groups.setdefault(window.begin, []).append(window)
    return [
        (begin, max(window.end for window in group))
        for begin, group in groups.items()
        if set(roles) <= {role for window in group for role in window.roles}
    ]


def check_leftovers(logdir: pathlib.Path, started: float) -> tuple[list[str], int]:
    """Looks for files that a run should not have left after ending in order.

    Args:
      logdir: of the run.
      started: when its programs were last started; a start removes leftovers.

    Returns:
      What is wrong, and the number of files that roles killed since then have left.
    """
    found, _ = reader.manifests(logdir)
    listed = {path for manifest in found for path in manifest.files}
    problems, recent = [], 0
    for path in sorted(logdir.rglob("*")):
        name = path.relative_to(logdir).as_posix()
        temporary = "partial" in path.name or path.name.endswith((".tmp", "~"))
        unlisted = name.startswith(("replay/", "replay_eval/")) and name not in listed
        if path.is_file() and (temporary or unlisted):
            if path.stat().st_mtime > started:
                recent += 1
            else:
                problems.append(f"{name} was left by a run before")
    if not (logdir / "config.yaml").is_file():
        problems.append("there is no config.yaml")
    return problems, recent


def check_metrics(logdir: pathlib.Path) -> dict[str, int]:
    """Returns the number of torn lines, and how often steps go back."""
    result = {"torn_lines": 0, "timeline_jumps": 0}
    for name in ("metrics.jsonl", "scores.jsonl"):
        lines, torn = reader.read_lines(logdir / name)
        steps = [line.get("step", 0) for line in lines]
        result["torn_lines"] += torn
        result["timeline_jumps"] += sum(b < a for a, b in itertools.pairwise(steps))
    return result


def read_counts(logdir: pathlib.Path, manifest: reader.Manifest) -> dict[str, Any]:
    """Returns the step of the logger and the updates of the agent in a checkpoint."""
    agent = reader.read_part(logdir, manifest, "agent")
    return {
        "step": int(manifest.meta["step"]),
        "updates": int(agent["counters"]["updates"]),
    }
