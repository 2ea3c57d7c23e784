"""The text of `--help`, from the comments in `configs.yaml`. In the main process."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator

from dreamerv3 import rules
from dreamerv3.config import CONFIGS
from embodied.envs import registry

USAGE = """\
usage: dreamerv3 [--configs BLOCK ...] [--KEY VALUE ...]
       dreamerv3 --help | --version

Blocks set several keys at once and are applied in order, then flags. A key may be a
regular expression that matches whole keys: --'.*\\.units' 64. A list takes several
values: --logger.outputs jsonl terminal. Numbers may be written like 1e6.
"""

_LINE = re.compile(r"( *)([^\s:#][^:]*):(?: (.*?))?(?:(?:^| +)# (.*))?")
_INDENT = 2  # Spaces per level in configs.yaml.


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key of the defaults, or a group of keys.

    Attributes:
      key: the full key.
      default: the default as it is written, empty for a group.
      explanation: the comment.
    """

    key: str
    default: str
    explanation: str


def read_entries() -> list[Entry]:
    """Reads the keys of the defaults with their comments, in the order of the file.

    A comment stands on the key's own line or directly above it. This reads lines, and
    not YAML, because parsers drop comments; every key has a line of its own.
    """
    entries: list[Entry] = []
    path: list[str] = []
    comment = ""
    for line in _default_lines():
        if line.lstrip().startswith("#"):
            comment = f"{comment} {line.strip('# ')}".strip()
            continue
        match = _LINE.fullmatch(line)
        if match:
            indent, name, default, beside = match.groups()
            path = [*path[: len(indent) // _INDENT - 1], name]
            explanation = " ".join(filter(None, (comment, beside)))
            entries.append(Entry(".".join(path), default or "", explanation))
        comment = ""
    return entries


def help_text(width: int = 88) -> str:
    """Returns all that can be set, by group, with defaults and what is allowed."""
    entries = read_entries()
    groups = [Entry("", "", "General")]
    groups += [entry for entry in entries if not entry.default]
    lines = [USAGE]
    for group in groups:
        inside = [
            entry
            for entry in entries
            if entry.default and entry.key.rpartition(".")[0] == group.key
        ]
        if not inside:
            continue
        lines.append(group.explanation.rstrip("."))
        for entry in inside:
            rule = rules.rule(entry.key)
            allowed = f" [{rule.allowed}]" if rule else ""
            lines.append(f"  --{entry.key} {entry.default}")
            lines.append(_wrapped(f"{entry.explanation}{allowed}", 6, width))
        lines.append("")
    lines += ["Blocks for --configs", _wrapped(", ".join(_block_names()), 2, width)]
    lines += ["", "Suites for --task SUITE_NAME"]
    for suite in registry.SUITES.values():
        lines.append(_wrapped(f"{suite.name}: {suite.doc}", 2, width))
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: int, width: int) -> str:
    space = " " * indent
    return textwrap.fill(text, width, initial_indent=space, subsequent_indent=space)


def _default_lines() -> Iterator[str]:
    inside = False
    for line in CONFIGS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#")):
            inside = line == "defaults:"
        elif inside:
            yield line


def _block_names() -> list[str]:
    found = re.findall(r"^(\w+):", CONFIGS.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name in found if name != "defaults"]
