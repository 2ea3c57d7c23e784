"""Converts values of flags and files to the types of keys, and checks them.

Any process.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from typing import Any

from dreamerv3.cli.schema import nearest, read_keys

LARGEST_INTEGER = 2**63
LARGEST_ORDER = 18  # Powers of ten.
ALIASES = {"gpu": "cuda"}  # Common names of values that are spelled otherwise.


def check(key: str, value: Any) -> None:
    """Raises ValueError unless a value, of the key's type, is allowed."""
    rule = read_keys()[key].rule
    if not rule or rule.accepts(value):
        return
    items = value if isinstance(value, tuple) else (value,)
    near = [
        nearest(ALIASES.get(str(item), str(item)), rule.names)
        for item in items
        if item not in rule.names
    ]
    hint = next((f" Did you mean {name}?" for name in near if name), "")
    shown = list(value) if isinstance(value, tuple) else value
    raise ValueError(f"expected {rule.allowed}, got {shown!r}.{hint}")


def convert(key: str, default: Any, values: Sequence[Any]) -> Any:
    """Converts values to the type of a key's default.

    Args:
      key: the full key.
      default: its default.
      values: one value, or several for a list, as text or already of the type.

    Raises:
      ValueError: they are not of the type; the message says what was expected.
    """
    if isinstance(default, tuple):
        if len(values) == 1 and isinstance(values[0], str):
            values = values[0].split(",")
        if not values:
            raise ValueError(f"expected {_expected(key, default)}, got no value.")
        return tuple(convert(key, default[0], [value]) for value in values)
    if len(values) != 1:
        shown = " ".join(map(str, values)) or "no value"
        raise ValueError(f"expected {_expected(key, default)}, got {shown}.")
    value, rule = values[0], read_keys()[key].rule
    word = rule.word if rule else ""
    if word and value == word:
        return value
    result = _CONVERTERS[int if word else type(default)](value)
    infinite = isinstance(result, float) and not math.isfinite(result)
    if result is None or (infinite and not (math.isinf(default) and result > 0)):
        raise ValueError(f"expected {_expected(key, default)}, got {value!r}.")
    return result


def _expected(key: str, default: Any) -> str:
    """Describes the values that a key takes, for messages about other values."""
    item = default[0] if isinstance(default, tuple) else default
    words = {bool: "True or False", int: "a whole number", float: "a number"}
    word = words.get(type(item), "one value")
    if isinstance(item, float) and math.isinf(item):
        word += " or inf"
    if isinstance(default, tuple):
        word = "one or more values"
    rule = read_keys()[key].rule
    if rule and rule.word:
        return rule.allowed
    return f"{word}, {rule.allowed}" if rule else word


def _to_bool(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())


def _to_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        # Exact up to the largest integers, where a float is not.
        number = decimal.Decimal(str(value).strip())
    except decimal.InvalidOperation:
        return None
    # Check the magnitude first: 1e999999999 would fill the memory as an integer.
    if not number.is_finite() or number.adjusted() > LARGEST_ORDER:
        return None
    whole = int(number)
    return whole if whole == number and abs(whole) < LARGEST_INTEGER else None


def to_float(value: Any) -> float | None:
    """Converts a value or text to a float; returns None if it is not a number."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: to_float,
    str: str,
}
