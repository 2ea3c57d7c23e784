"""Experiments of the Behaviour Suite, in the process that steps them."""

from __future__ import annotations

import inspect
from typing import Any

import bsuite.bsuite
import bsuite.sweep

from embodied.envs.from_dm import FromDM
from embodied.envs.registry import check_task


def make_bsuite(task: str, seed: int = 0) -> FromDM:
    """Makes the environment of one setting of an experiment.

    Args:
      task: experiment and number of the setting, such as 'catch/0'.
      seed: decides the episodes of settings that do not fix a seed. The meaning of
        actions, where it is shuffled, is part of the setting.
    """
    check_task("bsuite id", task, bsuite.sweep.SETTINGS)
    name = task.partition(bsuite.sweep.SEPARATOR)[0]
    load = bsuite.bsuite.EXPERIMENT_NAME_TO_ENVIRONMENT[name]
    settings: dict[str, Any] = dict(bsuite.sweep.SETTINGS[task])
    if "seed" in inspect.signature(load).parameters and settings.get("seed") is None:
        settings["seed"] = seed
    return FromDM(load(**settings))
