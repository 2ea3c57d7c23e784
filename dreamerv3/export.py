"""Exports the policy of a run, without its training state; a program of its own.

    python -m dreamerv3.export logdir/run policies/run [--dtype bfloat16]
    python -m dreamerv3.export logdir/run policies/onnx --format onnx

Formats:

    policy       a folder that `dreamerv3.load` and `--script eval_only` can read
    hub          a folder for the Hugging Face Hub, with a card; `load` reads it, too
    stablehlo    for `jax.export`, on any platform, without this package
    onnx         for ONNX Runtime and the like; needs the extra `onnx`

An export has only the weights of encoder, dynamics and policy, and a seventh of the
size of a checkpoint. In bfloat16 it is half as large, and acts the same on
accelerators, which compute with such weights anyway; on the CPU actions differ
slightly. `policies/portable.py` explains the inputs and outputs of `stablehlo` and
`onnx`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dreamerv3.cli.config import FILENAME, ConfigError
from dreamerv3.cli.task_origin import sign_task, started_by_user
from dreamerv3.policies.hub import write_hub
from dreamerv3.policies.spaces import spaces_to_tree
from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.run.saving import AGENT, FOLDER

if TYPE_CHECKING:
    from dreamerv3.policies.portable import PortablePolicy

DTYPES = ("float32", "bfloat16")
FORMATS = ("policy", "hub", "stablehlo", "onnx")


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    format: str = "policy",
    task: str | None = None,
) -> int:
    """Writes the policy of a run's newest checkpoint to a folder.

    Args:
      source: the logdir of a run, or the folder `ckpt` or `ckpt/agent` in it.
      target: a folder that does not exist yet, or is empty.
      dtype: of the matrices, one of `DTYPES`; `stablehlo` and `onnx` take only float32.
      format: one of `FORMATS`.
      task: task of the run; needed only if it names code, see `dreamerv3.load`.

    Returns:
      The number of bytes that the files of the policy take.

    Raises:
      CheckpointError: there is no complete checkpoint, it does not fit its config, or
        the target is not empty.
      ConfigError: there is no config, it cannot be used, or its task is not trusted.
      ImportError: a package of the format is not installed.
    """
    for name, value, known in (("dtype", dtype, DTYPES), ("format", format, FORMATS)):
        if value not in known:
            raise ValueError(
                f"export expected {name} {' or '.join(known)}, got {value!r}."
            )
    folder = pathlib.Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"export expected an empty folder, got {folder}.")
    portable = format in ("stablehlo", "onnx")
    if portable and dtype != DTYPES[0]:
        raise ValueError(
            f"export expected dtype {DTYPES[0]} for {format}, got {dtype}."
        )
    # Imported here, because it imports all of JAX.
    from dreamerv3.policies.portable import WRITERS, load_portable

    policy = load_portable(source, task)
    folder.mkdir(parents=True, exist_ok=True)
    if not portable:
        return _write_weights(policy, folder, dtype, format)
    WRITERS[format](policy, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def _write_weights(
    policy: PortablePolicy, folder: pathlib.Path, dtype: str, format: str
) -> int:
    from embodied.jax.param_names import flat_params

    saved, config = policy.saved, policy.config
    weights = {
        name: np.asarray(value, dtype if value.ndim > 1 else None)
        for name, value in flat_params(policy.params).items()
    }
    spaces = spaces_to_tree(policy.obs_space, policy.act_space)
    if format == "hub":
        write_hub(folder, saved, weights, spaces, config)
    else:
        shutil.copy(saved.logdir / FILENAME, folder / FILENAME)
        if started_by_user(saved.logdir, config.task):
            sign_task(folder, config.task)
        Checkpoint(folder, FOLDER).save(
            {AGENT: {"params": weights, "spaces": spaces}}, {"step": saved.step}
        )
    return sum(value.nbytes for value in weights.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Exports a policy as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dreamerv3.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="logdir of the run")
    parser.add_argument("target", help="folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of weights")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument("--task", help="of the run, if it names code to be trusted")
    options = parser.parse_args(argv)
    source, target, task = options.source, options.target, options.task
    try:
        size = export(source, target, options.dtype, options.format, task)
    except (CheckpointError, ConfigError, ImportError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"The policy is in {options.target}, {size / 1e6:.1f} MB.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
