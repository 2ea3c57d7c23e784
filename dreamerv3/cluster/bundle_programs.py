"""The programs of bundles, which run scripts of the command line. Child processes.

Each start of a program is a child process of the bundle's actor, because it has its own
signals, roles and perhaps an accelerator. It always ends with the actor.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import elements

from dreamerv3.cluster.run_keys import remove_keyfiles

BundleProgram = Callable[[elements.Config, Mapping[str, Any]], None]


def run_head(
    config: elements.Config, host: Mapping[str, Any], patience: float = 0.0
) -> None:
    """Runs agent, replay and logger of a run, or of one of its replicas.

    Args:
      config: of the run.
      host: keys of its `run` block that hold for this start.
      patience: seconds for which a lost head may still hold the lock of the logdir.
    """
    from dreamerv3.cli.logdir import wait_until_free
    from dreamerv3.cli.scripts import SCRIPTS

    logdir = pathlib.Path(config.logdir)
    owns = config.replica == 0
    if owns:
        wait_until_free(logdir, patience)
    SCRIPTS["parallel"](config, host=host)
    if owns:
        remove_keyfiles(logdir)  # Also those of runs that were killed.


def run_env_bundle(config: elements.Config, host: Mapping[str, Any]) -> None:
    """Runs the environments of a bundle; the arguments are those of `run_head`."""
    from dreamerv3.cli.scripts import SCRIPTS

    flags = {f"run.{key}": value for key, value in host.items()}
    SCRIPTS["parallel_envs"](config.update({"script": "parallel_envs", **flags}))


def run_bundle(
    program: BundleProgram,
    config: elements.Config,
    host: Mapping[str, Any],
    report: int,
) -> None:
    """Runs a program and ends the process with its exit code.

    Args:
      program: of the bundle.
      config: of the run.
      host: keys of its `run` block that hold for this start.
      report: descriptor of a file for the lines that are printed about a failure.
    """
    from dreamerv3.main import exit_code, run_script

    def write(problems: Sequence[str]) -> None:
        os.write(report, json.dumps(list(problems)).encode())

    script = functools.partial(program, config, host)
    try:
        code = exit_code(functools.partial(run_script, config, script), write)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def read_problems(report: int) -> list[str]:
    """Returns the lines about a failure that `run_bundle` has written."""
    content = os.pread(report, os.fstat(report).st_size, 0)
    try:
        return json.loads(content or b"[]")
    except ValueError:  # The program was killed while it wrote them.
        return []
