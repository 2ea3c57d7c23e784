"""Reads flags and blocks into typed values of the configuration. Any process."""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dreamerv3 import rules
from dreamerv3.checks import Flat, nearest

HELP = "`dreamerv3 --help` lists all keys."
LARGEST_INTEGER = 2**63
LARGEST_ORDER = 18  # Powers of ten.
# The text that is not a number, by key.
TEXT_OR_INTEGER = {"replay.bytes": "auto", "suite.at_once": "auto"}

_IS_PATTERN = re.compile(r"[^A-Za-z0-9_.-]")


def split_arguments(
    argv: Iterable[str],
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Splits `--name value value` and `--name=value` into names and their values.

    Returns:
      The flags in order, and a sentence for each argument that belongs to none.
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
      problems: a sentence for each thing that was wrong so far.
    """

    def __init__(self, defaults: Flat):
        self.flat = dict(defaults)
        self.problems: list[str] = []
        self._defaults = defaults

    def set(self, name: str, values: Sequence[Any]) -> None:
        """Sets the keys that a flag or a line of a block stands for.

        Args:
          name: a key, a regular expression that matches keys as a whole, or the key
            of a list followed by `+` to add to that list.
          values: one value, or several for a list, as text or of the key's type.
        """
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
            try:
                value = _convert(key, self._defaults[key], values)
                value = (*added, *value) if isinstance(value, tuple) else value
                _check(key, value)
            except ValueError as error:
                self.problems.append(f"{key}: {error}")
            else:
                self.flat[key] = value


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
    near = nearest(name, flat) or nearest(leaf, flat)
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


def _check(key: str, value: Any) -> None:
    rule = rules.rule(key)
    if not rule or rule.accepts(value):
        return
    items = value if isinstance(value, tuple) else (value,)
    near = [
        rule.meant.get(str(item)) or nearest(str(item), rule.names)
        for item in items
        if item not in rule.names
    ]
    hint = next((f" Did you mean {name}?" for name in near if name), "")
    shown = list(value) if isinstance(value, tuple) else value
    raise ValueError(f"expected {rule.allowed}, got {shown!r}.{hint}")


def _convert(key: str, default: Any, values: Sequence[Any]) -> Any:
    """Converts values to the type of a key's default."""
    if isinstance(default, tuple):
        if len(values) == 1 and isinstance(values[0], str):
            values = values[0].split(",")
        if not values:
            raise ValueError(f"expected {_expected(key, default)}, got no value.")
        return tuple(_convert(key, default[0], [value]) for value in values)
    if len(values) != 1:
        shown = " ".join(map(str, values)) or "no value"
        raise ValueError(f"expected {_expected(key, default)}, got {shown}.")
    value = values[0]
    if value == TEXT_OR_INTEGER.get(key):
        return value
    convert = _CONVERTERS[int if key in TEXT_OR_INTEGER else type(default)]
    result = convert(value)
    infinite = isinstance(result, float) and not math.isfinite(result)
    if result is None or (infinite and not (math.isinf(default) and result > 0)):
        raise ValueError(f"expected {_expected(key, default)}, got {value!r}.")
    return result


def _expected(key: str, default: Any) -> str:
    """Says which values a key takes, for values that are not even of its type."""
    item = default[0] if isinstance(default, tuple) else default
    words = {bool: "True or False", int: "a whole number", float: "a number"}
    word = words.get(type(item), "one value")
    if isinstance(item, float) and math.isinf(item):
        word += " or inf"
    if isinstance(default, tuple):
        word = "one or more values"
    rule = rules.rule(key)
    if rule and key in TEXT_OR_INTEGER:
        return rule.allowed
    return f"{word}, {rule.allowed}" if rule else word


def _to_bool(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())


def _to_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        # Exact also for 1e18, where a float is not.
        number = decimal.Decimal(str(value).strip())
    except decimal.InvalidOperation:
        return None
    # The order of magnitude first: 1e999999999 would fill the memory as an integer.
    if not number.is_finite() or number.adjusted() > LARGEST_ORDER:
        return None
    whole = int(number)
    return whole if whole == number and abs(whole) < LARGEST_INTEGER else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: str,
}
