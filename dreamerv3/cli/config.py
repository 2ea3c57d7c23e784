"""The configuration: defaults, blocks and flags, checked and typed. Any process.

    config = load_config(['--configs', 'debug', '--run.envs', '8'])
    args = make_args(config)

`dreamerv3.cli.logdir` stores it with the run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import elements
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dreamerv3.cli.conversion import check, convert, to_float
from dreamerv3.cli.schema import (
    CONFIGS,
    OPEN_GROUPS,
    Flat,
    combination_problems,
    nearest,
)
from dreamerv3.cli.task_origin import find_task_problem, suite_of
from embodied.envs.registry import is_envpool_atari
from embodied.run.settings import RunSettings

FILENAME = "config.yaml"  # File of the configuration in the logdir.

# Programs that start from the configuration of an existing run.
RUN_CONFIG_SCRIPTS = ("eval_only", "host_command")
# Keys that these programs do not take from that configuration.
KEYS_NOT_FROM_RUN = (
    *("script", "logdir", "replica", "replicas", "run.steps", "run.duration"),
    *("run.from_checkpoint", "run.from_checkpoint_regex", "jax.expect_devices"),
    *("jax.policy_devices", "jax.policy_mesh", "jax.train_devices", "jax.train_mesh"),
)

# Keys that a new run does not take from the `config.yaml` of another run.
KEYS_NOT_SHARED = ("logdir", "replica")
RUN_KEYS = {"logdir", "replica", "script", "task"}  # The file of every run has these.

HELP = "`dreamerv3 --help all` lists all keys."
CONFIG_FILES = (".yaml", ".yml")

_IS_PATTERN = re.compile(r"[^A-Za-z0-9_.-]")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says what to change.

    Attributes:
      problems: one or more sentences for each problem.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


def load_config(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> elements.Config:
    """Builds the configuration from command line arguments.

    Args:
      argv: `--configs NAME ...`, where a name is a block or a file, and
        `--KEY VALUE ...`; by default those of the process.
      environ: environment variables; by default those of the process. Its
        JOB_COMPLETION_INDEX sets `replica`.

    Returns:
      All keys, checked, with `logdir` filled in.

    Raises:
      ConfigError: the configuration cannot be used; the message lists all problems.
    """
    values = merge(sys.argv[1:] if argv is None else argv)
    index = (os.environ if environ is None else environ).get("JOB_COMPLETION_INDEX")
    if index:
        values.set("replica", index)
    flat = values.flat
    flat["logdir"] = fill_logdir(flat["logdir"], flat["task"], flat["seed"])
    # Checking combinations of values that are wrong already would repeat problems.
    problems = values.problems or combination_problems(flat)
    if problems:
        raise ConfigError(*problems)
    logdir = flat["logdir"].replace("{timestamp}", elements.timestamp())
    flat["logdir"] = os.path.expanduser(logdir)
    return elements.Config(flat)


def merge(argv: Sequence[str]) -> Values:
    """Applies blocks, files and then flags to the defaults; checks no combinations.

    For `--script eval_only` and `host_command`, the configuration of the run at
    `run.from_checkpoint` or `logdir` is applied between the defaults and the blocks. If
    the task of a run's configuration names code, it must be given again, unless this
    user has started that run.
    """
    arguments, strays = split_arguments(argv)
    blocks = read_blocks()
    defaults = flatten(blocks.pop("defaults"))
    values = _apply(Values(defaults), arguments, blocks)
    run = _existing_run(arguments, values.flat)
    if run is not None:
        values = Values(defaults)
        _apply_run(values, run, without=KEYS_NOT_FROM_RUN)
        _apply(values, arguments, blocks)
    folder = values.task_folder
    if folder and (problem := find_task_problem(folder, values.flat["task"])):
        values.problems.append(problem)
    values.problems[:0] = strays
    return values


def _apply(
    values: Values,
    arguments: Sequence[tuple[str, list[str]]],
    blocks: Mapping[str, Any],
) -> Values:
    """Applies all blocks and files, and then all flags."""
    for flag, names in arguments:
        if flag != "configs":
            continue
        if not names:
            values.problems.append(
                f"--configs: expected one or more of {', '.join(blocks)}, or files, "
                "got no value."
            )
        for name in names:
            if name.endswith(CONFIG_FILES) or "/" in name:
                _apply_file(values, name)
            else:
                _apply_block(values, name, blocks)
    views = ("script", ["view"]) in arguments
    for flag, given in arguments:
        if views and flag == "logdir" and len(given) > 1:
            values.set(flag, given[0])
            values.flat["view.folders"] = tuple(given[1:])
        elif flag != "configs":
            values.set(flag, tuple(given), typed=False)
    return values


def _apply_block(values: Values, name: str, blocks: Mapping[str, Any]) -> None:
    if name not in blocks:
        near = nearest(name, blocks)
        hint = f" Did you mean {near}?" if near else ""
        values.problems.append(
            f"--configs {name}: expected one or more of {', '.join(blocks)}, or a file "
            f"NAME.yaml.{hint}"
        )
        return
    for key, value in flatten(blocks[name]).items():
        values.set(key, value)


def _apply_file(values: Values, name: str) -> None:
    """Sets the keys of a file, which is like a block or the `config.yaml` of a run.

    Of a `config.yaml`, it leaves out the keys that two runs must not share, and those
    that this version does not have any more.
    """
    path, before = pathlib.Path(name).expanduser(), len(values.problems)
    try:
        content = _read_file(path)
    except ValueError as error:
        values.problems.append(f"--configs {name}: {error}")
        return
    if set(content) >= RUN_KEYS:
        _apply_run(values, path, without=KEYS_NOT_SHARED)
        content = {}
    folder = path.parent if path.name == FILENAME else None
    for key, value in flatten(content).items():
        if value is None:
            values.problems.append(f"{key}: expected a value, got none.")
        else:
            values.set(key, value, folder)
    found = values.problems[before:]
    values.problems[before:] = [f"--configs {name}: {problem}" for problem in found]


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    """Reads keys and values; raises ValueError with the reason if it cannot."""
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}).") from None
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"it is not a YAML file ({reason}).") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(
            "expected keys and values, as in a block, such as `run: {envs: 8}`, got "
            f"{'nothing' if not content else type(content).__name__}."
        )
    return content


def fill_logdir(logdir: str, task: str, seed: int) -> str:
    """Fills in the seed, and the task with dashes for unusual characters."""
    name = re.sub(r"[^\w.-]+", "-", task)
    return logdir.replace("{task}", name).replace("{seed}", str(seed))


def read_blocks() -> dict[str, Any]:
    """Reads `configs.yaml`: the `defaults` and the named blocks."""
    return YAML(typ="safe").load(CONFIGS.read_text(encoding="utf-8"))


def make_args(config: elements.Config) -> elements.Config:
    """Returns the settings of loops and roles: the `run` block and keys beside it."""
    names = [field.name for field in dataclasses.fields(RunSettings)]
    beside = {name: config[name] for name in names if name not in config.run}
    return elements.Config({**config.run, **beside})


def action_repeat(config: Mapping[str, Any]) -> int:
    """Returns the frames of an agent step by a configuration with full keys."""
    suite = suite_of(config["task"])
    if suite == "envpool" and not is_envpool_atari(config["task"].partition("_")[2]):
        return 1
    return int(config.get(f"env.{suite}.repeat", 1))


def read_config(filename: str | os.PathLike[str]) -> elements.Config:
    """Reads the `config.yaml` of a logdir.

    Raises:
      ConfigError: the file is damaged, or cannot be read.
    """
    try:
        content = _read_file(pathlib.Path(filename))
        if not isinstance(content.get("task"), str):
            raise ValueError("it has no task.")
        return elements.Config(content)
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"logdir: {filename} is not a configuration of this program: {reason}. "
            f"Restore or delete it, or choose another --logdir."
        ) from error


def run_config(logdir: str | os.PathLike[str]) -> elements.Config:
    """Returns the configuration of a run, with defaults for keys that it lacks.

    Its task may name code of somebody else: call `find_task_problem` before making its
    environment.

    Raises:
      ConfigError: there is no configuration, or it cannot be used.
    """
    path = pathlib.Path(logdir, FILENAME)
    if not path.is_file():
        raise ConfigError(
            f"logdir: expected the logdir of a run, got {logdir}, which has no "
            f"{FILENAME}."
        )
    values = Values(flatten(read_blocks()["defaults"]))
    _apply_run(values, path)
    if values.problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in values.problems))
    return elements.Config(values.flat)


def _apply_run(values: Values, path: pathlib.Path, without: Sequence[str] = ()) -> None:
    """Sets those keys of a `config.yaml` that this version still has."""
    for key, value in read_config(path).flat.items():
        known = key in values.flat or key.startswith(OPEN_GROUPS)
        if known and key not in without:
            values.set(key, value, path.parent)


def _existing_run(
    arguments: Sequence[tuple[str, list[str]]], flat: Flat
) -> pathlib.Path | None:
    """Returns the `config.yaml` of the run that the program starts from, or None."""
    given = {name: values[0] for name, values in arguments if len(values) == 1}
    source = given.get("run.from_checkpoint") or given.get("logdir")
    if given.get("script") not in RUN_CONFIG_SCRIPTS or not source:
        return None
    source = fill_logdir(source, flat["task"], flat["seed"])
    folder = pathlib.Path(source).expanduser()
    for name in ("agent", "ckpt"):  # Checkpoints may be named by these folders, too.
        folder = folder.parent if folder.name == name else folder
    return folder / FILENAME if (folder / FILENAME).is_file() else None


def split_arguments(
    argv: Iterable[str],
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Splits `--name value value` and `--name=value` into names and their values.

    Returns:
      The flags in order, and a sentence for each argument that belongs to no flag.
    """
    flags: list[tuple[str, list[str]]] = []
    problems = []
    for argument in argv:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            problems.append(
                f"{argument!r}: expected a flag such as --task before the first value."
            )
    return flags, problems


def flatten(nested: Mapping[str, Any]) -> Flat:
    """Joins the keys of nested mappings with dots, which are escaped in patterns."""
    flat: Flat = {}
    for key, value in nested.items():
        key = str(key)  # Files of users may have numbers.
        if not isinstance(value, Mapping):
            flat[key] = tuple(value) if isinstance(value, list) else value
            continue
        for inner, leaf in flatten(value).items():
            is_pattern = _IS_PATTERN.search(key) or _IS_PATTERN.search(inner)
            flat[key + (r"\." if is_pattern else ".") + inner] = leaf
    return flat


class Values:
    """The configuration while blocks and flags are applied to it.

    Attributes:
      flat: values by full key.
      task_folder: folder of the run whose configuration has set the task; None if a
        flag or a block has.
      problems: a sentence for each problem found so far.
    """

    def __init__(self, defaults: Flat):
        self.flat = dict(defaults)
        self.task_folder: pathlib.Path | None = None
        self.problems: list[str] = []
        self._defaults = defaults

    def set(
        self,
        name: str,
        value: Any,
        folder: pathlib.Path | None = None,
        typed: bool = True,
    ) -> None:
        """Sets the keys that a flag or a line of a block stands for.

        Args:
          name: a key, a regular expression that matches keys as a whole, or the key
            of a list followed by `+` to add to that list.
          value: one value, or a tuple of several, as text or of the key's type.
          folder: of the run whose configuration has the value.
          typed: whether the values of a key without a default have their type; else
            they are text, which is converted.
        """
        values = value if isinstance(value, tuple) else (value,)
        if name.startswith(OPEN_GROUPS) and name not in self._defaults:
            self._set_open(name, values, typed)
            return
        added: tuple[Any, ...] = ()
        if name.endswith("+") and isinstance(self.flat.get(name[:-1]), tuple):
            name = name[:-1]
            added = self.flat[name]
        try:
            keys = _find_keys(self.flat, name)
        except ValueError as error:
            given = " ".join([f"--{name}", *map(str, values)])
            self.problems.append(f"{given}: {error}")
            return
        for key in keys:
            if key not in self._defaults:
                self._set_open(key, values, typed)
                continue
            try:
                value = convert(key, self._defaults[key], values)
                value = (*added, *value) if isinstance(value, tuple) else value
                check(key, value)
            except ValueError as error:
                self.problems.append(f"{key}: {error}")
            else:
                self.flat[key] = value
                if key == "task":
                    self.task_folder = folder

    def _set_open(self, name: str, values: Sequence[Any], typed: bool) -> None:
        """Sets a key without a default, whose type is therefore that of its value."""
        group, _, last = name.rpartition(".")
        if f"{group}." not in OPEN_GROUPS or not last.isidentifier() or not values:
            shown = " ".join(map(str, values)) or "no value"
            self.problems.append(
                f"{name}: expected the name of an argument and its value, got {shown}."
            )
            return
        given = values if typed else [_from_text(text) for text in values]
        value = given[0] if len(given) == 1 else tuple(given)
        if group == "agent.loss_scales":
            value = to_float(value)
            if value is None or not value >= 0:
                self.problems.append(
                    f"{name}: expected a number of at least 0, got {values[0]!r}."
                )
                return
        self.flat[name] = value


def to_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Returns keys and values as arguments of the command line."""
    arguments = []
    for key, value in flags.items():
        values = value if isinstance(value, list | tuple) else [value]
        if key.startswith(OPEN_GROUPS):
            values = [_to_text(value) for value in values]
        arguments += [f"--{key}", *map(str, values)]
    return arguments


def _from_text(text: str) -> Any:
    """Converts a text to a number or boolean if it is one, and removes its quotes."""
    try:
        value = YAML(typ="safe").load(text)
    except YAMLError:
        return text
    quoted = isinstance(value, str) and text[:1] in ("'", '"')
    return value if quoted or isinstance(value, bool | int | float) else text


def _to_text(value: Any) -> str:
    """Converts a value to a text that `_from_text` converts back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    same = not isinstance(value, str) or _from_text(value) == value
    return str(value) if same else json.dumps(value, ensure_ascii=False)


def _find_keys(flat: Flat, name: str) -> list[str]:
    """Returns the keys that `name` stands for, at least one."""
    if name in flat:
        return [name]
    inside = [key for key in flat if key.startswith(f"{name}.")]
    if inside:
        raise ValueError(
            f"expected a single key, but {name} is a group of {len(inside)}. "
            f"Set one of them, such as --{inside[0]}."
        )
    leaf = re.split(r"[^A-Za-z0-9_]+", name)[-1]
    near = nearest(name, [*flat, "configs"]) or nearest(leaf, flat)
    hint = f" Did you mean --{near}?" if near else ""
    if not _IS_PATTERN.search(name):
        raise ValueError(f"there is no such key.{hint} {HELP}")
    try:
        keys = [key for key in flat if re.fullmatch(name, key)]
    except re.error as error:
        raise ValueError(f"not a regular expression, {error}.{hint} {HELP}") from None
    if not keys:
        raise ValueError(f"the pattern matches no key as a whole.{hint} {HELP}")
    return keys
