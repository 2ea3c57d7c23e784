"""Counts the floating point operations of matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax


def count_flops(function: Callable, *args: Any) -> int:
    """Returns the operations of a function, two for every multiply-add.

    Loops count as often as they run. What the compiler removes or computes twice is not
    taken into account.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = math.prod(shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            numbers = equation.params["dimension_numbers"]
            outputs = kernel[numbers.rhs_spec[0]]
            taps = math.prod(kernel) // outputs
            total += 2 * math.prod(equation.outvars[0].aval.shape) * taps
        times = equation.params.get("length", 1) if name == "scan" else 1
        for inner_jaxpr in _inner(equation.params):
            total += times * _count(inner_jaxpr)
    return total


def _inner(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "jaxpr"):
                found.append(item.jaxpr)
            elif hasattr(item, "eqns"):
                found.append(item)
    return found
