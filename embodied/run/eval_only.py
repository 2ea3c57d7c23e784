"""Evaluates an agent from a checkpoint, in one process.

Files that are written below the logdir, for an agent that was saved at step 1000:

    eval/1000.json          scores, their mean and its confidence interval
    eval/1000-image.mp4     an episode, per image key; a GIF if there is no ffmpeg
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from embodied.base import Agent, Array, TaskError
from embodied.checkpoint import CheckpointError, write_file
from embodied.clock import LocalClock
from embodied.episodes import Episodes
from embodied.logger.output import encode_video
from embodied.run.collecting import Evaluator, MakeEnv, make_driver
from embodied.run.console import STOPPING, stop_on_signals
from embodied.run.live import plain
from embodied.run.metrics import Meter
from embodied.run.saving import load_agent
from embodied.run.settings import RunSettings
from embodied.run.training_run import Limit
from embodied.run.usage import Usage

FOLDER = "eval"  # In the logdir.
CONFIDENCE = 0.95
VIDEO_FPS = 15
SMALLEST = 320  # Pixels of a window's shorter side; smaller frames are enlarged.
VIDEO = "eval_epstats/policy_"  # Prefix of the names of videos among the metrics.


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of an evaluation.

    Attributes:
      step: step at which the agent was saved.
      scores: scores of all finished episodes.
      lengths: lengths of these episodes, in actions.
      wanted: number of episodes that were requested.
      largest: for each scalar key `log/...`, its largest value in each episode.
    """

    step: int
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    wanted: int
    largest: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def mean_score(self) -> float | None:
        """The mean score; None if no episode was finished."""
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def margin(self) -> float | None:
        """Half the width of the 95% confidence interval of the mean score.

        From Student's t distribution; None for fewer than two episodes.
        """
        count = len(self.scores)
        if count < 2:
            return None
        # Here, because importing the framework should not import SciPy.
        from scipy.special import stdtrit

        error = statistics.stdev(self.scores) / math.sqrt(count)
        return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of the mean score, as low and high."""
        mean, margin = self.mean_score, self.margin
        if mean is None or margin is None:
            return None
        return mean - margin, mean + margin

    def __str__(self) -> str:
        count, mean, interval = len(self.scores), self.mean_score, self.interval
        if mean is None:
            return f"No episode was finished (of {self.wanted})."
        episodes = f"{count} episode{'s' if count > 1 else ''}"
        if count < self.wanted:
            episodes += f" (of {self.wanted}, so that short ones are over-represented)"
        text = f"{episodes} of the agent of step {self.step}: mean score {mean:.4g}"
        if interval is not None:
            low, high = interval
            text += f" (95% confidence interval {low:.4g} to {high:.4g})"
        return f"{text}, mean length {statistics.fmean(self.lengths):.4g}."


def eval_only(
    make_agent: Callable[[], Agent],
    make_env: MakeEnv,
    make_logger: Callable[[], Any],
    args: Any,
) -> Evaluation:
    """Plays episodes with the agent of `args.from_checkpoint`, and prints the score.

    Plays `args.eval_eps` episodes in at most `args.envs` environments; `args.steps`,
    `args.duration`, Ctrl-C and SIGTERM end it earlier. Metrics are logged at the step
    at which the agent was saved. Scores are written to a JSON file in `args.logdir`,
    with a video of the last episode of the first environment beside it if there are
    images. With `args.render` a window shows that environment.

    Args:
      make_agent: makes the agent, of which only `load` and the policy are used.
      make_env: makes the environment of an id.
      make_logger: makes the logger: `add`, `write`, `close` and a counter `step`.
      args: the `run` block of the configuration, and sizes of batches.

    Returns:
      The scores.

    Raises:
      CheckpointError: `from_checkpoint` is not given, or there is no checkpoint, or
        the results cannot be written.
    """
    args = _read_settings(args)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(STOPPING))
        agent = make_agent()
        step = _load(agent, args)
        logger = stack.enter_context(contextlib.closing(make_logger()))
        logger.step.load(step)
        amount = args.eval_eps
        envs = min(args.envs, amount)
        driver = stack.enter_context(make_driver(make_env, 0, envs, args))
        episodes, videos = Episodes(timeout=0), dict[str, Array]()
        evaluator = Evaluator(agent, driver, amount, logger, episodes)
        if args.render:
            window = stack.enter_context(contextlib.closing(Window("Evaluation")))
            driver.on_step(window.show_step)
        limit = Limit(lambda: evaluator.steps, args.steps, args.duration, stop)
        meter, usage = Meter(), Usage(args.usage)
        should_log = LocalClock(args.log_every)

        def log() -> None:
            metrics = episodes.result()
            for name in [name for name in metrics if name.startswith(VIDEO)]:
                videos[name.removeprefix(VIDEO)] = metrics[name]
            logger.add(metrics)
            logger.add(meter.result())
            logger.add(usage.result(), prefix="usage")
            logger.write()

        evaluator.begin()
        while not (evaluator.done or limit.reached()):
            with meter.section("evaluate"):
                meter.count("policy", evaluator.play())
            if should_log():
                log()
        if not meter.idle:
            log()
    scores, lengths = evaluator.scores, evaluator.lengths
    result = Evaluation(step, tuple(scores), tuple(lengths), amount, evaluator.largest)
    print(result, flush=True)
    paths = write_result(args.logdir, args.from_checkpoint, result, videos)
    print(f"Written to {', '.join(paths)}", flush=True)
    return result


def _load(agent: Agent, args: RunSettings) -> int:
    source, regex = args.from_checkpoint, args.from_checkpoint_regex
    key = "logdir" if source == args.logdir else "run.from_checkpoint"
    return load_agent(agent, source, regex, key)


def _read_settings(args: Any) -> RunSettings:
    settings = RunSettings.from_args(args)
    if not settings.from_checkpoint:
        raise CheckpointError(
            "run.from_checkpoint: expected the logdir of a run to evaluate, got ''."
        )
    return settings


def write_result(
    logdir: str, source: str, result: Evaluation, videos: Mapping[str, Array]
) -> list[str]:
    """Writes the scores of an evaluation; returns the paths of JSON and videos.

    Files of an earlier evaluation of the same step are replaced.

    Args:
      logdir: where to write.
      source: logdir or folder that the checkpoint was loaded from.
      result: the scores.
      videos: videos [T, H, W, C] uint8 by image key.
    """
    stem = f"{FOLDER}/{result.step}"
    names = []
    for key, video in videos.items():
        ending, encoded = encode_video(video, VIDEO_FPS)
        key = re.sub("[^A-Za-z0-9_-]", "_", key.removeprefix("log/"))
        names.append(f"{stem}-{key}.{ending}")
        write_file(logdir, names[-1], encoded)
    content = {
        "checkpoint": str(source),
        **dataclasses.asdict(result),  # `step`, `scores`, `lengths`, and so on.
        "episodes": len(result.scores),
        "mean_score": result.mean_score,
        "confidence": CONFIDENCE,
        "interval": result.interval,
        "mean_length": statistics.fmean(result.lengths) if result.lengths else None,
        "videos": sorted(names),
    }
    write_file(logdir, f"{stem}.json", json.dumps(plain(content)).encode())
    return [f"{logdir}/{name}" for name in (f"{stem}.json", *sorted(names))]


class WindowError(TaskError):
    """No window can be opened; the message says what to do."""


class Window:
    """Shows frames, one after the other, until it is closed.

    Raises:
      WindowError: there is no display, or no package to draw on it.
    """

    def __init__(self, title: str):
        try:
            import tkinter

            self._root: Any = tkinter.Tk()
        except (ImportError, RuntimeError) as error:
            raise self._error(error) from error
        except Exception as error:
            if type(error).__name__ != "TclError":  # Its module may be missing.
                raise
            raise self._error(error) from error
        self._root.title(title)
        self._label = tkinter.Label(self._root)
        self._label.pack()
        self._open = True
        self._root.protocol("WM_DELETE_WINDOW", self.close)

    def show(self, frame: np.ndarray) -> None:
        """Shows a frame [H, W, C] uint8, of 1 or 3 channels, unless closed."""
        if not self._open:
            return
        from PIL import Image, ImageTk

        image = Image.fromarray(frame[..., 0] if frame.shape[2] == 1 else frame)
        factor = -(-SMALLEST // min(image.size))
        if factor > 1:
            size = (image.width * factor, image.height * factor)
            image = image.resize(size, Image.Resampling.NEAREST)
        self._picture = ImageTk.PhotoImage(image, master=self._root)
        self._label.configure(image=self._picture)
        self._root.update()

    def show_step(self, transition: dict[str, Any], worker: int) -> None:
        """Shows a step of the first environment, if it has an image."""
        frame = pick_frame(transition) if worker == 0 else None
        if frame is not None:
            self.show(frame)

    def close(self) -> None:
        """Closes the window. May be called more than once."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # The display may be gone.
                self._root.destroy()

    @staticmethod
    def _error(error: Exception) -> WindowError:
        return WindowError(
            f"run.render: expected a display to open a window on, got none ({error}). "
            "Without one, look at the video that eval_only writes."
        )


def pick_frame(transition: dict[str, Any]) -> np.ndarray | None:
    """Returns the frame to show: `log/frame`, else the first image, else None."""
    images = {
        key: value
        for key, value in transition.items()
        if isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] in (1, 3)
    }
    if not images:
        return None
    return images.get("log/frame", next(iter(images.values())))
