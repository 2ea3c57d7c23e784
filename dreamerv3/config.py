"""The configuration: blocks and flags, checked, and its file in the logdir.

Any process:

    config = load_config(['--configs', 'debug', '--run.envs', '8'])
    prepare_logdir(config)
    args = make_args(config)
"""

from __future__ import annotations

import io
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import elements
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dreamerv3 import checks, flags
from dreamerv3.logdirs import FILENAME, LogdirInUse, claim

CONFIGS = pathlib.Path(__file__).with_name("configs.yaml")

# What the roles get beside the `run` block.
ARGS = (
    "replica",
    "replicas",
    "logdir",
    "batch_size",
    "batch_length",
    "report_length",
    "consec_train",
    "consec_report",
    "replay_context",
    "errfile",
    "ipv6",
    "clock_addr",
    "clock_port",
)

# What an evaluation does not take from the configuration of the run it evaluates.
NOT_EVALUATED = (
    *("script", "logdir", "replica", "replicas", "run.steps", "run.duration"),
    *("run.from_checkpoint", "run.from_checkpoint_regex"),
)


class ConfigError(ValueError):
    """The configuration cannot be used; the message says what to change.

    Attributes:
      problems: one sentence or more for each thing that is wrong.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def load_config(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> elements.Config:
    """Builds the configuration from command line arguments.

    Args:
      argv: `--configs NAME ...` and `--KEY VALUE ...`; by default those of the process.
      environ: environment variables; by default those of the process. In them
        JOB_COMPLETION_INDEX sets `replica`.

    Returns:
      All keys, checked, with `logdir` filled in.

    Raises:
      ConfigError: all that is wrong with it, at once.
    """
    values = merge(sys.argv[1:] if argv is None else argv)
    index = (os.environ if environ is None else environ).get("JOB_COMPLETION_INDEX")
    if index:
        values.set("replica", [index])
    flat = values.flat
    # Combinations of values that are wrong by themselves would only repeat that.
    problems = values.problems or checks.combination_problems(flat)
    if problems:
        raise ConfigError(*problems)
    logdir = flat["logdir"].replace("{timestamp}", elements.timestamp())
    flat["logdir"] = os.path.expanduser(logdir)
    return elements.Config(flat)


def merge(argv: Sequence[str]) -> flags.Values:
    """Applies blocks and then flags to the defaults, without checking combinations.

    With `--script eval_only`, the configuration of the run that is evaluated comes
    between the defaults and the blocks.
    """
    blocks = read_blocks()
    values = flags.Values(flags.flatten(blocks.pop("defaults")))
    arguments, strays = flags.split_arguments(argv)
    values.problems += strays
    run = _evaluated_run(arguments)
    if run is not None:
        _apply_run(values, run, without=NOT_EVALUATED)
    for name in [
        name for flag, names in arguments if flag == "configs" for name in names
    ]:
        if name not in blocks:
            near = checks.nearest(name, blocks)
            hint = f" Did you mean {near}?" if near else ""
            values.problems.append(
                f"--configs {name}: expected one or more of {', '.join(blocks)}.{hint}"
            )
            continue
        for key, value in flags.flatten(blocks[name]).items():
            values.set(key, value if isinstance(value, tuple) else [value])
    for name, given in arguments:
        if name != "configs":
            values.set(name, given)
        elif not given:
            values.problems.append(
                f"--configs: expected one or more of {', '.join(blocks)}, got no value."
            )
    return values


def read_blocks() -> dict[str, Any]:
    """Reads `configs.yaml`: the `defaults` and the named blocks."""
    return YAML(typ="safe").load(CONFIGS.read_text(encoding="utf-8"))


def make_args(config: elements.Config) -> elements.Config:
    """Returns what the loops and roles get: the `run` block and some keys beside it."""
    return elements.Config({**config.run, **{key: config[key] for key in ARGS}})


def prepare_logdir(config: elements.Config) -> pathlib.Path:
    """Creates the logdir and writes `config.yaml` into it.

    Only the first replica of a program that owns the run writes; hosts that merely
    step environments leave the file of the run as it is.

    Returns:
      The logdir.

    Raises:
      ConfigError: it belongs to another task, is damaged, in use, or cannot be
        written.
    """
    # Here, because help and errors should not wait for the libraries behind it.
    from embodied.checkpoint import CheckpointError, write_file

    logdir = pathlib.Path(config.logdir)
    try:
        logdir.mkdir(parents=True, exist_ok=True)
        if (logdir / FILENAME).exists():
            task = read_config(logdir / FILENAME).task
            if task != config.task:
                raise ConfigError(
                    f"logdir: {logdir} belongs to a run of task {task!r}, not "
                    f"{config.task!r}. Choose another --logdir."
                )
        if config.replica == 0 and config.script in checks.OWNING_SCRIPTS:
            claim(logdir)
        if config.replica == 0 and config.script not in checks.ENV_SCRIPTS:
            write_file(logdir, FILENAME, _to_yaml(config))
    except LogdirInUse as error:
        raise ConfigError(f"logdir: {error}") from error
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"logdir: expected a folder that can be written, got {logdir} ({error}). "
            f"Choose another --logdir."
        ) from error
    return logdir


def read_config(filename: str | os.PathLike[str]) -> elements.Config:
    """Reads a `config.yaml` that `prepare_logdir` wrote.

    Raises:
      ConfigError: the file is damaged.
      OSError: the file cannot be read.
    """
    try:
        content = YAML(typ="safe").load(pathlib.Path(filename).read_text("utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("task"), str):
            raise ValueError("it has no task")
        return elements.Config(content)
    except (
        YAMLError,
        UnicodeDecodeError,
        ValueError,
        TypeError,
        AssertionError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"logdir: {filename} is not a configuration of this program ({reason}). "
            f"Restore or delete it, or choose another --logdir."
        ) from error


def run_config(logdir: str | os.PathLike[str]) -> elements.Config:
    """Returns the configuration of a run, with defaults for keys that it lacks.

    Raises:
      ConfigError: there is none, or it cannot be used.
    """
    path = pathlib.Path(logdir, FILENAME)
    if not path.is_file():
        raise ConfigError(
            f"logdir: expected the logdir of a run, got {logdir}, which has no "
            f"{FILENAME}."
        )
    values = flags.Values(flags.flatten(read_blocks()["defaults"]))
    _apply_run(values, path)
    if values.problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in values.problems))
    return elements.Config(values.flat)


def _apply_run(
    values: flags.Values, path: pathlib.Path, without: Sequence[str] = ()
) -> None:
    """Sets the keys of a `config.yaml`, as far as this version still has them."""
    for key, value in flags.flatten(dict(read_config(path))).items():
        if key in values.flat and key not in without:
            values.set(key, value if isinstance(value, tuple) else [value])


def _evaluated_run(arguments: Sequence[tuple[str, list[str]]]) -> pathlib.Path | None:
    """Returns the `config.yaml` of the run that is to be evaluated, if any is."""
    given = {name: values[0] for name, values in arguments if len(values) == 1}
    source = given.get("run.from_checkpoint") or given.get("logdir")
    if given.get("script") != "eval_only" or not source:
        return None
    folder = pathlib.Path(source).expanduser()
    for name in ("agent", "ckpt"):  # Checkpoints may be named by these folders, too.
        folder = folder.parent if folder.name == name else folder
    return folder / FILENAME if (folder / FILENAME).is_file() else None


def _to_yaml(config: elements.Config) -> bytes:
    yaml: Any = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    content = io.BytesIO()
    yaml.dump(dict(config), content)
    return content.getvalue()
