"""The command that starts environments of a run on another host. Main process.

`--script host_command` prints it, with the settings of the run, the addresses of its
actor and logger, and free ids of environments.
"""

from __future__ import annotations

import contextlib
import pathlib
import shlex
import socket
import sys
from collections.abc import Sequence
from typing import Any

import elements

from dreamerv3.cli.config import (
    ConfigError,
    flatten,
    make_args,
    read_blocks,
    run_config,
    to_arguments,
)
from embodied.run.settings import RunSettings

ANSWER_SECONDS = 10.0
EVERY_INTERFACE = ("0.0.0.0", "*", "[::]")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Keys, and prefixes of keys, that a host with environments needs, beside those that
# are computed.
HOST_KEYS = (
    *("task", "seed", "ipv6", "env.", "run.transport", "run.insecure"),
    *("run.envs_per_worker", "run.env_timeout", "run.stall_timeout"),
    *("run.restarts.env", "run.log_every", "run.usage."),
    # Images are resized for the networks, if there are any.
    *("random_agent", "agent.enc.simple."),
    *("agent.dec.simple.mults", "agent.dec.simple.outer"),
)


def run_host_command(config: elements.Config) -> None:
    """Prints the command, and notes on it to stderr.

    Args:
      config: configuration of the run in `logdir`, with the flags of this program;
        `run.envs` is the number of environments to start on the host.

    Raises:
      ConfigError: the logdir has no run whose actor answers.
    """
    run = run_config(config.logdir).run
    addresses = _live_addresses(config)
    taken = _env_ids(config, addresses["actor_addr"])
    # Eval environments go to the first host, unless the run has its own.
    evaluating = config.run.eval_envs if run.remote_envs and not taken else 0
    if not run.remote_envs:  # Its own workers may be restarting.
        taken = [*taken, *range(run.envs + run.eval_envs)]
    flags: dict[str, Any] = {
        "script": "parallel_envs",
        **host_settings(config),
        "run.envs": config.run.envs,
        "run.eval_envs": evaluating,
        "run.env_offset": first_free(taken, config.run.envs + evaluating),
        **{f"run.{key}": _for_others(addr) for key, addr in addresses.items()},
    }
    keyfile = config.run.keyfile and str(pathlib.Path(config.run.keyfile).resolve())
    if keyfile:
        flags["run.keyfile"] = keyfile
    for note in _notes(addresses["actor_addr"], keyfile):
        print(note, file=sys.stderr)
    print(shlex.join(["dreamerv3", *to_arguments(flags)]))


def first_free(taken: Sequence[int], count: int) -> int:
    """Returns the first of `count` consecutive ids that are free."""
    start = 0
    for envid in sorted(set(taken)):
        if envid >= start + count:
            break
        start = envid + 1
    return start


def _live_addresses(config: elements.Config) -> dict[str, str]:
    """Returns the addresses of actor and logger of the run."""
    from embodied.run.parallel import wiring

    found = wiring.read_addresses(config.logdir)
    addresses = {
        key: found.get(key, str(config.run[key]))
        for key in ("actor_addr", "logger_addr")
    }
    if any(wiring.AUTO in address for address in addresses.values()):
        raise ConfigError(
            "logdir: expected that of a run with an actor for --script host_command, "
            f"got {config.logdir}, whose actor has never started. Start the run with "
            "--script parallel, and wait until it says that it trains, or waits for "
            "environments."
        )
    return addresses


def _env_ids(config: elements.Config, address: str) -> list[int]:
    """Asks the actor of the run for the ids of its environments."""
    from embodied.rpc import AuthError, Disconnected
    from embodied.run.parallel import wiring

    host, _, port = address.rpartition(":")
    here = f"localhost:{port}" if host in EVERY_INTERFACE else address
    settings = RunSettings.from_args(make_args(config))
    try:
        with wiring.make_client(here, "host_command", settings) as client:
            client.connect(ANSWER_SECONDS)
            return [int(x) for x in client.env_ids().result(ANSWER_SECONDS)]
    except (TimeoutError, Disconnected, AuthError) as error:
        raise ConfigError(
            f"logdir: expected the logdir of a live run, but the actor of "
            f"{config.logdir} does not answer at {address} ({error})."
        ) from error


def host_settings(config: elements.Config) -> dict[str, Any]:
    """Returns the settings for a host that differ from the defaults."""
    defaults = flatten(read_blocks()["defaults"])
    return {
        key: value
        for key, value in config.flat.items()
        if key.startswith(HOST_KEYS) and value != defaults.get(key)
    }


def _for_others(address: str) -> str:
    """Returns an address at which other machines reach this one."""
    host, _, port = address.rpartition(":")
    if host not in EVERY_INTERFACE:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # Sends nothing, but chooses the interface.
            return f"{probe.getsockname()[0]}:{port}"
    return f"{socket.gethostname()}:{port}"


def _notes(address: str, keyfile: str) -> list[str]:
    if address.rpartition(":")[0] in LOOPBACK:
        return [
            "The run listens at this machine's loopback address alone, so the command "
            "is for this machine. For others, start it with --run.keyfile FILE and "
            "--run.actor_addr HOST:PORT --run.logger_addr HOST:PORT."
        ]
    if keyfile:
        return [f"Copy {keyfile} to the other host first, with mode 0600."]
    return []
