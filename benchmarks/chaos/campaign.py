"""Harms one run after the other, checks each, and prints a summary as JSON.

python -m benchmarks.chaos --minutes 20 --seed 0
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos import audit, faults
from benchmarks.chaos.programs import Failure, poll, signals_as_interrupts
from benchmarks.chaos.site import (
    AGAIN,
    BATCH,
    ENVS,
    LENGTH,
    RATIO,
    SAVE_EVERY,
    SEQUENCE,
    START,
    Site,
    Topology,
)

TOPOLOGIES = (
    Topology("threads", disk=True),
    Topology("remote_envs", remote_envs=True),
    Topology("dreamer_process", dreamer=True, process=True),
    Topology("process", process=True, disk=True),
    Topology("remote_replay", remote_replay=True),
    Topology("dreamer_remote_envs", dreamer=True, remote_envs=True),
)
ENDING = 12.0  # Seconds that the end of a run and its audit take.
LONGEST = 150.0  # Seconds of one run.
# Samples by which training and collecting may differ at any moment: what the limiter
# tolerates, batches and steps on their way, and what comes before training begins.
IN_BETWEEN = int(2 * (4 * BATCH + 6 * BATCH + 5 * RATIO * ENVS) + BATCH * LENGTH)
# Samples by which that difference may change when a role goes back to a save without
# the others: in the replay's save, counts may differ by as much as at any moment; when
# an agent is lost, steps on their way may reach only one of replay and logger.
DRIFT = collections.Counter(replay=IN_BETWEEN // 2, agent=int(5 * RATIO * ENVS))
LATE = 10.0  # Seconds that a save may take, or wait for a busy machine.
# Faults that keep a run from saving, or destroy its last save.
WITHOUT_SAVES = ("fill_disk", "damage_file")
MEMORY = 2.0  # Factor by which memory and descriptors may grow within a run.
# Counts that must be zero. The others are only reported.
MUST_BE_ZERO = (
    *("gaps", "duplicates", "mixed", "unexplained"),
    *("torn_lines", "timeline_jumps"),
)


@dataclasses.dataclass
class Record:
    """The results of a campaign.

    Args:
      faults: seconds until training went on after each fault, by kind.
      counts: sums over all runs.
      lost: transitions that are not in the last checkpoint, by kind of fault.
      lost_seconds: the longest time between a lost transition and its fault, by kind.
      worst: the largest value of each measure over all runs.
      runs: how often each topology was run.
      failures: promises that were not kept.
      notes: what could not be done on this machine.
    """

    faults: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    lost: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    lost_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    worst: dict[str, float] = dataclasses.field(default_factory=dict)
    runs: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def raise_to(self, **values: float) -> None:
        """Keeps the largest value of each measure."""
        for name, value in values.items():
            self.worst[name] = round(max(self.worst.get(name, value), value), 2)

    def summary(self) -> dict[str, Any]:
        """Returns the content of the last line of output."""
        every = [seconds for found in self.faults.values() for seconds in found]
        kinds = sorted(self.faults.items())
        return {
            "faults": {kind: len(found) for kind, found in kinds},
            "seconds_to_training": {
                kind: _median_and_worst(found) for kind, found in kinds if found
            },
            "all_seconds_to_training": _median_and_worst(every) if every else None,
            "runs": dict(self.runs),
            **{name: self.counts[name] for name in MUST_BE_ZERO},
            "counts": dict(self.counts),
            "lost": {"all": self.lost.total(), **self.lost},
            "lost_seconds": self.lost_seconds,
            "worst": self.worst,
            "notes": sorted(set(self.notes)),
            "failures": self.failures,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chaos test; the exit code is 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    names = [topology.name for topology in TOPOLOGIES]
    parser.add_argument("--topologies", nargs="+", choices=names, default=names)
    parser.add_argument("--faults", nargs="+", default=[], help="only these kinds")
    parser.add_argument("--keep", default="", help="folder for logdirs of failed runs")
    options = parser.parse_args(argv)
    record = Record()
    with signals_as_interrupts():
        try:
            run_campaign(options, record)
        except KeyboardInterrupt:
            record.failures.append("interrupted")
    settings = {"minutes": options.minutes, "seed": options.seed}
    print(json.dumps({**settings, **record.summary()}), flush=True)
    return 1 if record.failures else 0


def run_campaign(options: argparse.Namespace, record: Record) -> None:
    """Runs all topologies by turns until the time is over."""
    choose = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    chosen = [x for x in TOPOLOGIES if x.name in options.topologies]
    share = min(60 * options.minutes / len(chosen), LONGEST)
    turns = itertools.cycle(chosen)
    for _ in range(options.seed % len(chosen)):
        next(turns)
    while (left := end - time.monotonic()) >= min(x.shortest for x in chosen):
        topology = next(turns)
        if topology.shortest > left:
            continue
        seconds = max(share, topology.shortest)
        if left - seconds < topology.shortest:
            seconds = min(left, LONGEST)  # The rest is too short for another run.
        folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            failed = len(record.failures)
            run_once(topology, folder, seconds, choose, record, options)
            if len(record.failures) > failed and options.keep:
                kept = pathlib.Path(options.keep) / folder.name
                shutil.copytree(folder, kept)
                say(f"kept as {kept}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def run_once(
    topology: Topology,
    folder: pathlib.Path,
    seconds: float,
    choose: random.Random,
    record: Record,
    options: argparse.Namespace,
) -> None:
    """Starts a run, harms it for a while, ends it, and checks what it leaves."""
    end = time.monotonic() + seconds - ENDING
    record.runs[topology.name] += 1
    say(f"run {topology.name} for {seconds:.0f} s")
    with Site(topology, folder, record.notes) as site:
        try:
            site.start()
            took = site.wait_for_training(START)
            record.raise_to(start_seconds=took)
            level = site.mark.usage()
            harm(site, end, choose, record, options.faults)
            site.wait_for_save(time.time())
            check_usage(site, level, record)
            site.leave()
            check_left(site, record)
        except Failure as failure:
            fail(record, site, str(failure))
            for name in site.programs:
                print(f"--- {name}\n{site.shown(name)[-3000:]}", flush=True)
            site.close_windows()
            return
        finally:
            if options.keep and site.limited:  # The logdir goes with the disk.
                shutil.copytree(site.logdir, folder / "logdir", dirs_exist_ok=True)
        check_stored(site, record)


def harm(
    site: Site, end: float, choose: random.Random, record: Record, only: Sequence[str]
) -> None:
    """Harms a run until the time is over; the rarest kinds of faults come first."""
    possible = faults.applicable(site)
    kinds = [kind for kind in possible if not only or kind in only]
    while time.monotonic() < end and kinds:
        time.sleep(choose.uniform(0.2, 3.0))
        rarest = min(len(record.faults.get(kind, [])) for kind in kinds)
        kind = choose.choice(
            [x for x in kinds if len(record.faults.get(x, [])) == rarest]
        )
        taken = record.faults.setdefault(kind, [])
        try:
            note, since = possible[kind](site, choose)
            site.wait_for_training(AGAIN)
            took = time.time() - since
            if kind == "damage_file":  # From now on all files must be whole again.
                site.wait_for_save(time.time())
        except Failure as failure:
            raise Failure(f"{kind}: {failure}") from failure
        site.close_windows()
        taken.append(took)
        say(f"{kind:18} training again after {took:5.1f} s  {note}")


def check_usage(site: Site, level: dict[str, float], record: Record) -> None:
    """Compares memory, descriptors and processes with those at the beginning."""
    poll(lambda: site.mark.usage()["processes"] <= level["processes"], 10)
    now = site.mark.usage()
    site.shared_files = site.mark.shared_files()
    record.raise_to(
        memory_mb=now["mb"],
        memory_growth=now["mb"] / level["mb"],
        descriptor_growth=now["files"] / level["files"],
    )
    if now["processes"] > level["processes"]:
        fail(record, site, f"{now['processes']} processes, {level['processes']} before")
    for name in ("mb", "files"):
        if now[name] > MEMORY * level[name]:
            fail(record, site, f"{name} rose from {level[name]:.0f} to {now[name]:.0f}")


def check_left(site: Site, record: Record) -> None:
    """Checks that a run that has ended has left nothing but its logdir."""
    if "proxy" in site.programs:
        site.programs["proxy"].destroy()
    # Sockets and shared memory have no names, so they end with their processes.
    if not poll(lambda: not site.mark.processes(), 10):
        left = [" ".join(x.cmdline())[-80:] for x in site.mark.processes()]
        fail(record, site, f"processes are left: {left}")
    temporary = [str(path) for path in (site.folder / "tmp").iterdir()]
    temporary += [path for path in site.shared_files if os.path.exists(path)]
    if temporary:
        fail(record, site, f"temporary files are left: {temporary[:5]}")
    started = min(
        program.started
        for name, program in site.programs.items()
        if name in ("launcher", "replay")
    )
    problems, recent = audit.check_leftovers(site.logdir, started)
    record.counts["left_until_next_start"] += recent
    if recent:
        fail(record, site, f"{recent} files of killed roles are left")
    for problem in problems:
        fail(record, site, problem)


def check_stored(site: Site, record: Record) -> None:
    """Compares what was stored, logged and trained with the steps that were made."""
    try:
        stored = site.audit()
    except Failure as failure:
        fail(record, site, str(failure))
        stored = audit.read_stored(site.logdir)
        if stored.manifest is None:
            return
    counts = stored.counts
    traces = audit.read_traces(site.traces)
    losses = audit.account(
        traces, stored.counters(), site.windows, site.excused, SEQUENCE
    )
    counts["unexplained"] += len(losses.unexplained)
    counts["made"] += losses.made
    counts.update(audit.check_metrics(site.logdir))
    record.counts.update(counts)
    record.lost.update(losses.by_kind)
    record.raise_to(lost_by_a_fault=losses.worst)
    for kind, seconds in losses.seconds.items():
        oldest = max(record.lost_seconds.get(kind, 0.0), seconds)
        record.lost_seconds[kind] = round(oldest, 1)
        if seconds > SAVE_EVERY + LATE and kind not in WITHOUT_SAVES:
            fail(record, site, f"{kind}: what was lost is {seconds:.1f} s older")
    for text in losses.unexplained[:5]:
        fail(record, site, f"lost without a reason: {text}")
    for name in MUST_BE_ZERO:
        if counts[name]:
            fail(record, site, f"{name}: {counts[name]}")
    check_ratio(site, stored, traces, record)
    say(
        f"  made {losses.made}, stored {counts['stored']}, lost {losses.total}, gaps "
        f"{counts['gaps']}, duplicates {counts['duplicates']}"
    )


def check_ratio(
    site: Site, stored: audit.Stored, traces: dict[int, Any], record: Record
) -> None:
    """Compares steps of the logger, transitions of the replay, and updates.

    Roles that were killed alone have gone back to their last save without the others;
    their counts may differ by the steps made since. The updates in the weights still
    match the steps: an agent repeats the updates that it has lost, unless the replay
    has gone back to the same save and thus lost the steps to train on.
    """
    assert stored.manifest is not None
    found = audit.read_counts(site.logdir, stored.manifest)
    training = {int(x.where[0, 0]) for x in stored.streams["replay"] if len(x.where)}
    alone = collections.Counter[str]()
    for window in site.windows:
        for role in window.roles:
            alone[role] += audit.made_within(traces, training, window.begin, window.end)
    kept = stored.total("replay")
    damaged = len(site.excused)
    difference = found["step"] - kept
    slack = IN_BETWEEN / RATIO
    if (
        not -alone["logger"] - slack
        <= difference
        <= alone["replay"] + damaged + (alone["agent"] + slack)
    ):
        fail(
            record,
            site,
            f"the logger counts {found['step']} steps, the replay has {kept}",
        )
    ahead = BATCH * found["updates"] - RATIO * found["step"]
    both = audit.lost_together(site.windows, "agent", "replay")
    lost = sum(audit.made_within(traces, training, *window) for window in both)
    drift = sum(DRIFT[role] for window in site.windows for role in window.roles)
    most = IN_BETWEEN + drift + RATIO * alone["logger"]
    least = IN_BETWEEN + drift + RATIO * lost
    record.raise_to(
        samples_ahead=ahead, samples_behind=-ahead, samples_may_be_behind=least
    )
    if not -least <= ahead <= most:
        fail(
            record,
            site,
            f"{found['updates']} updates of {BATCH} sequences at step {found['step']}: "
            f"{ahead:.0f} samples ahead, expected {-least:.0f} to {most:.0f}",
        )


def fail(record: Record, site: Site, text: str) -> None:
    """Records a promise that was not kept."""
    record.failures.append(f"{site.topology.name}: {text}")
    say(f"FAILED {record.failures[-1]}")


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _median_and_worst(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 1),
        "worst": round(max(seconds), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
