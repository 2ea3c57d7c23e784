"""Writes the policy of a run without all that only training needs.

    python -m dreamerv3.export logdir/run policies/run [--dtype bfloat16]

`dreamerv3.load` and `--script eval_only` take the new folder as they take a logdir. It
has the weights of encoder, dynamics and policy alone, a seventh of a checkpoint. In
bfloat16 it is half of that, and acts the same on accelerators, which compute with such
weights anyway; on the CPU actions differ slightly.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

import ml_dtypes

from dreamerv3.cli.config import FILENAME, ConfigError, run_config
from dreamerv3.cli.task_origin import is_own, sign_task
from dreamerv3.policies.inference import agent_spaces, must_fit
from dreamerv3.policies.spaces import spaces_to_tree
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import AGENT, FOLDER, read_agent

DTYPES = ("float32", "bfloat16")


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    task: str | None = None,
) -> int:
    """Writes the policy of a run's newest checkpoint to a folder.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      target: a folder that does not exist yet, or is empty.
      dtype: of matrices; one of `DTYPES`.
      task: of the run, if it names code and is not trusted; see `dreamerv3.load`.

    Returns:
      The number of bytes that the weights take.

    Raises:
      CheckpointError: there is no whole checkpoint, it does not fit its config, or
        there is something at the target.
      ConfigError: there is no config, it cannot be used, or its task is not trusted.
    """
    from dreamerv3.policies.acting_agent import ActingAgent, on_one_device

    if dtype not in DTYPES:
        raise ValueError(f"export expected dtype {' or '.join(DTYPES)}, got {dtype!r}.")
    half = dtype == "bfloat16"
    folder = pathlib.Path(target).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"export expected an empty folder, got {folder}.")
    saved = read_agent(source)
    config = run_config(saved.logdir)
    if config.random_agent:
        raise CheckpointError(f"export expected an agent with weights in {source}.")
    obs_space, act_space = agent_spaces(config, saved, task)
    agent = ActingAgent(obs_space, act_space, on_one_device(config, "cpu"))
    with must_fit(saved):
        weights = agent.weights(saved.data)
    weights = {
        name: value.astype(ml_dtypes.bfloat16) if half and value.ndim > 1 else value
        for name, value in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(saved.logdir / FILENAME, folder / FILENAME)
    if is_own(saved.logdir, config.task):
        sign_task(folder, config.task)
    spaces = {"obs": spaces_to_tree(obs_space), "act": spaces_to_tree(act_space)}
    Checkpoint(folder, FOLDER).save(
        {AGENT: {"params": weights, "spaces": spaces}}, {"step": saved.step}
    )
    return sum(value.nbytes for value in weights.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Exports what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m dreamerv3.export", description=__doc__.split("\n")[0]
    )
    parser.add_argument("source", help="logdir of the run")
    parser.add_argument("target", help="folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights")
    parser.add_argument("--task", help="of the run, if it names code to be trusted")
    options = parser.parse_args(argv)
    try:
        size = export(options.source, options.target, options.dtype, options.task)
    except (CheckpointError, ConfigError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"The policy is in {options.target}, {size / 1e6:.1f} MB.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
