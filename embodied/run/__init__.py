"""The loops that put everything together: `train`, `train_eval`, `eval_only`.

Start with `train`, which reads as one screen; `single_process` has what it calls, and
there is one file for each thing behind that: `collecting`, `trainer`, `evaluation`,
`ratio` (how much to train), `saving` (checkpoints), `metrics`, `progress` (the end).
The loop over many processes is in `parallel`, which is imported on first use.
"""

import importlib
from typing import Any

from embodied.run.eval_only import Evaluation, eval_only
from embodied.run.progress import Result
from embodied.run.train import train
from embodied.run.train_eval import train_eval

__all__ = ["Evaluation", "Result", "eval_only", "train", "train_eval"]


def __getattr__(name: str) -> Any:
    if name == "parallel":
        return importlib.import_module("embodied.run.parallel")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
