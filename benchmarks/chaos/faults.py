"""The harm that can be done to a run: a function for each kind.

Each returns when the harm is over and the programs that it ended are started again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.chaos import reader
from benchmarks.chaos.numbered_env import SLOW
from benchmarks.chaos.programs import Failure, poll
from benchmarks.chaos.site import SEQUENCE, Site


class Harm(NamedTuple):
    """What was done, in words, and the time since which the run can recover."""

    note: str
    since: float


Fault = Callable[[Site, random.Random], Harm]
STATEFUL = ("agent", "replay", "logger")  # Roles that go back to their last save.


def kill_role(site: Site, choose: random.Random, prefix: str) -> Harm:
    """Kills a role with SIGKILL, and waits until it is back."""
    name = choose.choice([x for x in sorted(site.roles()) if x.startswith(prefix)])
    return _kill(site, f"kill_{name.split('-')[0]}", [name])


def kill_several(site: Site, choose: random.Random) -> Harm:
    """Kills some roles at nearly the same time."""
    names = [name for name in sorted(site.roles()) if name not in site.programs]
    if "replay" in site.programs:
        names.append("replay")
    chosen = choose.sample(names, choose.randint(2, min(3, len(names))))
    return _kill(site, "kill_several", chosen, choose.choice([0.0, 0.3]))


def kill_env_host(site: Site, choose: random.Random) -> Harm:
    """Kills the program of the environments, and starts it again."""
    return _kill(site, "kill_env_host", ["envs"])


def stop_role(site: Site, choose: random.Random) -> Harm:
    """Suspends a process for some seconds."""
    name = choose.choice(sorted(site.roles()))
    seconds = choose.uniform(0.5, 5.0)
    pid = site.roles()[name]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
    return Harm(f"{name} for {seconds:.1f} s", time.time())


def kill_launcher(
    site: Site, choose: random.Random, kind: str = "kill_launcher"
) -> Harm:
    """Kills the launcher, and starts the same command again."""
    # A run that is killed again before it has saved goes back to the same save.
    _expect_launcher_loss(site, kind)
    site.crash()
    site.audit()
    return _start_again(site)


def kill_while_starting(site: Site, choose: random.Random) -> Harm:
    """Kills the launcher twice, the second time before the run is on again."""
    kind = "kill_while_starting"
    kill_launcher(site, choose, kind)
    seconds = choose.uniform(0.5, 6.0)
    time.sleep(seconds)
    harm = kill_launcher(site, choose, kind)
    return harm._replace(note=f"again after {seconds:.1f} s")


def kill_while_saving(site: Site, choose: random.Random) -> Harm:
    """Kills the launcher or a role between the first file and the commit of a save."""
    agent = ["agent"] if site.topology.process else []
    name = choose.choice(["launcher", "replay", "logger", *agent])
    if not poll(lambda: _is_saving(site), 30, every=0.001):
        raise Failure("no save began within 30 s")
    if name == "launcher":
        return kill_launcher(site, choose, "kill_while_saving")._replace(note=name)
    return _kill(site, "kill_while_saving", [name])


def restart(site: Site, choose: random.Random) -> Harm:
    """Ends the run in order, and starts the same command again."""
    site.programs["launcher"].send(signal.SIGTERM)
    code = site.programs["launcher"].wait(60)
    if code != 0:
        raise Failure(f"the launcher ended with {code} after SIGTERM")
    if "envs" in site.programs and site.programs["envs"].wait(60) != 0:
        raise Failure("the program of the environments did not end with the run")
    site.expect_loss("restart", ("end",), site.saved())
    site.audit()
    return _start_again(site)


def damage_file(site: Site, choose: random.Random) -> Harm:
    """Kills the launcher, damages one file of the logdir, and starts again."""
    _expect_launcher_loss(site, "damage_file")
    site.wait_for_save(time.time())  # The run may have to go back one more save.
    site.crash()
    if "replay" in site.programs:
        site.programs["replay"].destroy()
    site.audit()
    found, _ = reader.manifests(site.logdir)
    target = choose.choice(["newest", "older", "manifest", "chunk", "chunk"])
    path = _choose_file(found, target, choose)
    if target == "chunk":
        _excuse(site, path)
    elif target != "older":
        site.kept = {}  # The run goes back to an older checkpoint.
    how = choose.choice([_truncate, _delete, _flip])
    how(site.logdir / path, choose)
    site.damaged.add(path)
    before = {name: len(site.shown(name)) for name in ("launcher", "replay")}
    harm = _start_again(site, f"{how.__name__[1:]} {target}: {path}")
    name = pathlib.PurePosixPath(path).name

    def is_told() -> bool:
        return any(name in site.shown(x)[start:] for x, start in before.items())

    # A program that reads the file must name it; older checkpoints are not read.
    must_tell = target != "older" and not (target == "manifest" and how is _delete)
    if must_tell and not poll(is_told, 60):
        raise Failure(f"nobody has warned of {path} ({how.__name__[1:]})")
    return harm


def fill_disk(site: Site, choose: random.Random) -> Harm:
    """Fills the disk, leaves it full during some saves, and frees it again."""
    ballast = site.disk / "ballast"
    room = choose.choice([0, choose.randrange(1, 50_000)])
    try:
        _fill(ballast, room)
        time.sleep(choose.uniform(2.0, 6.0))
        site.check_running()
        if killed := choose.random() < 0.5:
            _expect_launcher_loss(site, "fill_disk")
            site.crash()
    finally:
        ballast.unlink(missing_ok=True)
    note = f"{room} bytes left" + (", launcher killed meanwhile" if killed else "")
    return _start_again(site, note)


def slow_envs(site: Site, choose: random.Random) -> Harm:
    """Slows down all steps of the environments for a while."""
    path = site.traces / SLOW
    path.touch()
    try:
        time.sleep(choose.uniform(3.0, 6.0))
    finally:
        path.unlink()
    return Harm("", time.time())


def harm_connections(site: Site, choose: random.Random, kind: str) -> Harm:
    """Lets the proxy cut, stall or delay the connections of the environments."""
    seconds = choose.uniform(0.2, 6.0)
    site.programs["proxy"].tell(f"{kind} {seconds:.2f}")
    time.sleep(seconds)
    return Harm(f"{seconds:.1f} s", time.time())


def pull_cable(site: Site, choose: random.Random) -> Harm:
    """Loses all packets between the hosts for a while."""
    assert site.hosts is not None
    # Connections that were idle for half a minute are taken for dead.
    seconds = choose.choice([*(choose.uniform(0.5, 8.0) for _ in range(4)), 35.0])
    site.hosts.connect(False)
    try:
        time.sleep(seconds)
    finally:
        site.hosts.connect(True)
    return Harm(f"{seconds:.1f} s", time.time())


def applicable(site: Site) -> dict[str, Fault]:
    """Returns the faults that are possible in a run, by kind."""
    topology = site.topology
    faults: dict[str, Fault] = {
        "kill_env": functools.partial(kill_role, prefix="env-"),
        "kill_replay": functools.partial(kill_role, prefix="replay"),
        "kill_logger": functools.partial(kill_role, prefix="logger"),
        "kill_several": kill_several,
        "stop_role": stop_role,
        "kill_launcher": kill_launcher,
        "kill_while_starting": kill_while_starting,
        "kill_while_saving": kill_while_saving,
        "restart": restart,
        "damage_file": damage_file,
        "slow_envs": slow_envs,
    }
    if topology.process:
        faults["kill_agent"] = functools.partial(kill_role, prefix="agent")
    if site.limited:
        faults["fill_disk"] = fill_disk
    if topology.remote_envs:
        faults["kill_env_host"] = kill_env_host
        for kind in ("cut", "stall", "delay"):
            cut = functools.partial(harm_connections, kind=kind)
            faults[f"{kind}_connections"] = cut
    if site.hosts:
        faults["pull_cable"] = pull_cable
    return faults


def _start_again(site: Site, note: str = "") -> Harm:
    """Starts the programs that have ended, with the same commands."""
    since = time.time()
    site.start()
    return Harm(note, since)


def _kill(site: Site, kind: str, names: list[str], pause: float = 0.0) -> Harm:
    """Kills roles or programs, and waits until all of them are back."""
    since = time.time()
    before = {name: pid for name, pid in site.roles().items() if name in names}
    if lost := [name for name in names if name in STATEFUL]:
        site.expect_loss(kind, lost, site.saved())
    for pid in before.values():
        with contextlib.suppress(ProcessLookupError):  # It ended with another one.
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
    for name in names:
        if name in site.programs:
            site.programs[name].wait(30)
            site.programs[name].destroy()
            site.start_program(name)

    def are_back() -> bool:
        site.check_running()
        roles = site.roles()
        return all(roles.get(name, pid) != pid for name, pid in before.items())

    if not poll(are_back, 60):
        raise Failure(f"{', '.join(names)} did not come back within 60 s")
    return Harm(", ".join(names), since)


def _expect_launcher_loss(site: Site, kind: str) -> None:
    # A replay that is another program keeps its transitions.
    remote = site.topology.remote_replay
    roles = ("agent", "logger") if remote else ("launcher",)
    site.expect_loss(kind, roles, site.saved())


def _is_saving(site: Site) -> bool:
    manifest = site.manifest()
    parts = (site.logdir / "ckpt").glob("*/*.safetensors")
    return manifest is not None and any(path.stem > manifest.tag for path in parts)


def _choose_file(
    found: list[reader.Manifest], target: str, choose: random.Random
) -> str:
    newest = found[-1].files
    if target == "manifest":
        return "ckpt/manifest.json"
    if target == "chunk":
        return choose.choice([x for x in newest if x.startswith("replay/")])
    if target == "older" and len(found) > 1:
        older = [x for x in found[-2].files if x not in newest]
        return choose.choice(older)
    return choose.choice([x for x, entry in newest.items() if entry["required"]])


def _excuse(site: Site, path: str) -> None:
    """Excuses the steps that are lost with a chunk file.

    Steps beside it may be lost too: parts of its stream that are shorter than a
    sequence.
    """
    manifest = site.manifest()
    assert manifest is not None
    streams, _ = reader.read_streams(site.logdir, manifest, path.split("/")[0])
    for stream in streams:
        if path in stream.pieces:
            begin, end = stream.pieces[path]
            rows = stream.where[max(0, begin - SEQUENCE) : end + SEQUENCE]
            site.excused |= {(int(row[1]), int(row[4])) for row in rows}


def _truncate(path: pathlib.Path, choose: random.Random) -> None:
    os.truncate(path, choose.randrange(path.stat().st_size))


def _delete(path: pathlib.Path, choose: random.Random) -> None:
    path.unlink()


def _flip(path: pathlib.Path, choose: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def _fill(path: pathlib.Path, room: int) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
        file.truncate(max(0, file.tell() - room))
