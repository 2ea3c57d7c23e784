"""Sends metrics to Weights & Biases; in the process that logs."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied.logger.output import (
    AsyncOutput,
    MissingPackageError,
    Summary,
    encode_gif,
    histogram_values,
    rows_by_step,
)

RUN_ID_FILE = "wandb_run_id"


class WandbOutput(AsyncOutput):
    """Sends scalars, histograms, images, videos (as GIF) and text, in a thread.

    The run's id is kept in `logdir/wandb_run_id`, so that the same `logdir` continues
    the same run. The step is sent as the metric `step`, the axis of all others: after
    a resume it may go back, which wandb's own step may not.

    Args:
      name: the run's name.
      logdir: folder of the run's files, created if needed.
      config: values shown with the run; a mapping or an `elements.Config`.
      pattern: regular expression that a metric's whole name must match.
      fps: frames per second of videos.
      options: further arguments of `wandb.init`.
    """

    def __init__(
        self,
        name: str,
        logdir: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        pattern: str = ".*",
        fps: float = 15,
        **options: Any,
    ):
        super().__init__(pattern)
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError("wandb", "wandb") from error
        self._wandb: Any = wandb
        self._fps = fps
        folder = pathlib.Path(str(logdir))
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "id": _run_id(folder),
            "resume": "allow",
            # Keeps wandb from capturing the streams that the terminal output uses.
            "settings": wandb.Settings(console="off"),
            **options,
        }
        self._run: Any = wandb.init(
            name=name,
            dir=str(folder),
            config=dict(getattr(config, "flat", config) or {}),
            **options,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _write(self, summaries: list[Summary]) -> None:
        converted = ((step, name, self._convert(x)) for step, name, x in summaries)
        for row in rows_by_step(item for item in converted if item[2] is not None):
            self._run.log(row)

    def _close(self) -> None:
        self._run.finish()

    def _convert(self, value: str | np.ndarray) -> Any:
        if isinstance(value, str):
            return value
        if value.ndim == 0:
            return value.item()
        if value.ndim == 1:
            values = histogram_values(value)
            return None if values is None else self._wandb.Histogram(values)
        if value.ndim == 4:
            buffer = io.BytesIO(encode_gif(value, self._fps))
            return self._wandb.Video(buffer, format="gif")
        return self._wandb.Image(value)


def _run_id(folder: pathlib.Path) -> str:
    path = folder / RUN_ID_FILE
    run_id = path.read_text().strip() if path.exists() else ""
    if not run_id:
        run_id = os.urandom(4).hex()
        path.write_text(run_id)
    return run_id
