"""Pages of `--help`: the most used flags, all keys, or those of a group.

In the main process.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from dreamerv3.cli.config import ConfigError
from dreamerv3.cli.schema import CONFIGS, Key, nearest, read_keys
from embodied.envs import registry

USAGE = """\
usage: dreamerv3 [--configs BLOCK|FILE ...] [--KEY VALUE ...]
       dreamerv3 --help [GROUP ... | all]
       dreamerv3 --version
"""
EXAMPLES = """\
Learn to balance a pole, in minutes on a CPU, then watch it:
  dreamerv3 --configs demo --logdir logdir/demo
  dreamerv3 --script eval_only --logdir logdir/demo
Train on another task, with a process for every environment:
  dreamerv3 --script parallel --configs atari100k size12m --task atari100k_boxing
"""
RULES = """\
Blocks set several keys at once and are applied in order, and so are files of your own
(NAME.yaml) and the config.yaml of a run; then come flags. A key may be a regular
expression that matches whole keys: --'.*\\.units' 64. A list takes several values:
--logger.outputs jsonl terminal. Numbers may be written like 1e6.
"""
ALL = "all"
# On the first page, in this order.
COMMON = (
    *("task", "script", "logdir", "seed"),
    *("run.steps", "run.duration", "run.envs", "run.envs_per_worker", "run.eval_envs"),
    *("run.train_ratio", "run.log_every", "run.save_every"),
    *("run.from_checkpoint", "run.eval_eps"),
    *("batch_size", "batch_length", "replay.size"),
    *("jax.platform", "logger.outputs", "agent.opt.lr"),
)
WIDTH = 88  # Of the lines, in characters.
_COLUMN = 32  # Width of flags on the first page.


def help_text(topics: Sequence[str] = ()) -> str:
    """Returns the page of some groups or keys; by default the first page.

    Args:
      topics: such as `run`, `agent.opt` or `run.envs`; `all` for everything.

    Raises:
      ConfigError: there is no such group or key.
    """
    if not topics:
        return _first_page()
    if ALL in topics:
        return _page("")
    known = read_keys()
    for topic in topics:
        if topic not in known:
            near = nearest(topic, _groups()) or nearest(topic, known)
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"--help {topic}: expected a key, all, or one of the groups "
                f"{', '.join(_groups())}.{hint}"
            )
    return "\n".join(_page(topic) for topic in topics)


def _first_page() -> str:
    keys = read_keys()
    lines = [USAGE, EXAMPLES, "The flags that people use most, with their defaults"]
    for name in COMMON:
        flag = f"  --{name} {keys[name].default}".ljust(_COLUMN)
        if not flag.endswith(" "):
            lines.append(flag)
            flag = ""
        lines.append(
            textwrap.fill(
                keys[name].explanation,
                WIDTH,
                initial_indent=flag.ljust(_COLUMN),
                subsequent_indent=" " * _COLUMN,
            )
        )
    count = sum(1 for key in keys.values() if key.default)
    more = f"--help GROUP or --help KEY explains more, --help all all {count} keys:"
    lines += ["", f"{more}", _wrapped(", ".join(_groups()), 2), "", RULES]
    return "\n".join([*lines, *_blocks(), "", *_suites()]) + "\n"


def _page(topic: str) -> str:
    """Returns the page of one group or key; an empty topic is for everything."""
    keys = read_keys().values()
    groups = [Key("", "", "General", None), *(key for key in keys if not key.default)]
    lines = [] if topic else [USAGE, RULES]
    for group in groups:
        inside = [
            key
            for key in keys
            if key.default
            and key.name.rpartition(".")[0] == group.name
            and f"{key.name}.".startswith(f"{topic}." if topic else "")
        ]
        if not inside:
            continue
        lines.append(group.explanation.rstrip("."))
        for key in inside:
            allowed = f" [{key.rule.allowed}]" if key.rule else ""
            lines.append(f"  --{key.name} {key.default}")
            lines.append(_wrapped(f"{key.explanation}{allowed}", 6))
        lines.append("")
    if not topic:
        lines += [*_blocks(), "", *_suites(), ""]
    return "\n".join(lines)


def _groups() -> list[str]:
    """Returns the groups that are not inside another."""
    keys = read_keys().values()
    return [key.name for key in keys if not key.default and "." not in key.name]


def _blocks() -> list[str]:
    text = CONFIGS.read_text(encoding="utf-8")
    names = [x for x in re.findall(r"^(\w+):", text, re.MULTILINE) if x != "defaults"]
    return ["Blocks for --configs", _wrapped(", ".join(names), 2)]


def _suites() -> Iterator[str]:
    yield "Suites for --task SUITE_NAME; your own environment is package.module:Name"
    for suite in registry.SUITES.values():
        yield _wrapped(f"{suite.name}: {suite.doc}", 2)


def _wrapped(text: str, indent: int) -> str:
    space = " " * indent
    return textwrap.fill(text, WIDTH, initial_indent=space, subsequent_indent=space)
