"""The loops that put everything together: `train`, `train_eval`, `eval_only`.

Start with `train`, whose loop fits on one screen; `training_run` has the functions that
it calls, and each of their components has its own file: `collecting` (environments,
evaluation), `trainer`, `saving` (checkpoints), `metrics`, `console` (messages and
signals). The loop over many processes is in `parallel`, which is imported on first
use. How much to train for each step is decided in `replay/limiters.py`.
"""

import importlib
from typing import Any

from embodied.run.eval_only import Evaluation, eval_only
from embodied.run.train import train, train_eval
from embodied.run.training_run import TrainResult

__all__ = ["Evaluation", "TrainResult", "eval_only", "train", "train_eval"]


def __getattr__(name: str) -> Any:
    if name == "parallel":
        return importlib.import_module("embodied.run.parallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
