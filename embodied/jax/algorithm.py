"""Interface of an algorithm: pure functions of arrays. Agent process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from embodied.jax.nets import Array, Tree
from embodied.space import Space

Outputs = dict[str, Any]
Metrics = dict[str, Array]
Gather = Callable[[Tree], Tree]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The functions that `embodied.jax.agent` compiles and runs.

    Seeds are the data of random keys, [2] uint32. All arrays of carries, batches and
    outputs have the rows of the batch as their first axis.

    Attributes:
      init: makes the initial state from a random key.
      carry: makes the carry before the first step for a number of rows, from a state
        or from the policy's parameters. Training, reports and policies share it.
      train: makes one update: maps state, carry, batch, seed and a gather function to
        the new state, the new carry, outputs and metrics. Weights that are split over
        devices must pass through the gather function before they are used; gradients
        are taken with respect to its inputs. The metric `opt/nonfinite` is the number
        of updates in a row that were skipped since they were not finite.
      report: maps state, carry, batch and seed to the new carry and metrics.
      policy_params: returns the parameters of a state that the policy needs.
      policy: maps parameters, carry, observations, seed and mode to the new carry,
        actions and outputs.
      observations: spaces of the observations that the policy reads.
      batch_keys: keys of batches that `train` and `report` read.
      modes: the mode that `policy` is compiled for, by the mode it is called with.
    """

    init: Callable[[Array], Tree]
    carry: Callable[[Tree, int], Tree]
    train: Callable[
        [Tree, Tree, Any, Array, Gather], tuple[Tree, Tree, Outputs, Metrics]
    ]
    report: Callable[[Tree, Tree, Any, Array], tuple[Tree, Metrics]]
    policy_params: Callable[[Tree], Tree]
    policy: Callable[[Tree, Tree, Any, Array, str], tuple[Tree, Outputs, Outputs]]
    observations: Mapping[str, Space]
    batch_keys: tuple[str, ...]
    modes: Mapping[str, str]
