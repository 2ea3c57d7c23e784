"""Suites by name: their tasks, settings, and published scores. Any process.

`published.json` beside this file has, by suite, the scores that the authors of
DreamerV3 published: `steps` in the suite's `unit`, a row for every seed of a task, and
for Atari the scores of a random agent and of a person.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PUBLISHED = Path(__file__).with_name("published.json")
# Scores of a random agent and full scores, in suites that list none by task.
DMC_BOUNDS = (0.0, 1000.0)
# Every agent step counts as so many published frames, whatever the action repeat: most
# likely the published runs repeated no actions, and counted two frames all the same.
FRAMES_PER_STEP = 2


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings with which a suite is run: the published ones where they are known.

    Attributes:
      configs: blocks, applied before those of the user.
      flags: applied before those of the user.
      tasks: full names.
    """

    configs: tuple[str, ...]
    flags: tuple[str, ...]
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PublishedCurve:
    """Published scores of a task, for comparison with a run of it.

    Attributes:
      suite: name of the suite.
      task: full name of the task.
      steps: [N] float64, in agent steps of the run.
      seeds: [S, N] float64, scores of S runs.
      bounds: scores that are normalised to 0 and 1 when tasks are aggregated.
      unit: unit in which steps are reported, 'agent steps' or 'frames' as published.
      per_step: how many of that unit make an agent step of the run.
    """

    suite: str
    task: str
    steps: np.ndarray
    seeds: np.ndarray
    bounds: tuple[float, float]
    unit: str
    per_step: int

    @property
    def mean(self) -> np.ndarray:
        """Mean over seeds, [N] float64."""
        return self.seeds.mean(0)

    def until(self, step: float) -> PublishedCurve:
        """Returns the part up to an agent step, interpolated there."""
        steps = np.unique(np.minimum(self.steps, step))
        seeds = np.stack([np.interp(steps, self.steps, seed) for seed in self.seeds])
        return dataclasses.replace(self, steps=steps, seeds=seeds)


def make_presets() -> dict[str, Preset]:
    """Returns the presets by name."""
    tasks = {suite: tuple(content["tasks"]) for suite, content in _published().items()}
    # Scores are those of training episodes: nothing reads those of evaluation.
    common = ("--run.eval_envs", "0")
    twice = ("--env.dmc.repeat", "2")
    return {
        "atari100k": Preset(
            ("atari100k",), ("--run.steps", "1e5", *common), tasks["atari100k"]
        ),
        # 500,000 and 1,000,000 frames.
        "dmc_proprio": Preset(
            ("dmc_proprio", "size12m"),
            (
                *("--run.train_ratio", "512", "--run.envs", "16", *twice),
                *("--run.steps", "2.5e5", *common),
            ),
            tasks["dmc_proprio"],
        ),
        "dmc_vision": Preset(
            ("dmc_vision",),
            (*twice, "--run.steps", "5e5", *common),
            tasks["dmc_vision"],
        ),
        "crafter": Preset(
            ("crafter",), ("--run.steps", "1e6", *common), ("crafter_reward",)
        ),
    }


def find_published(config: Mapping[str, Any], task: str) -> PublishedCurve | None:
    """Finds the published scores that a run can be compared with.

    Args:
      config: configuration of the run, by full key, which tells the observations.
      task: full name of the task, usually that of the run.

    Returns:
      The scores; None if the task with these observations is not published.
    """
    suite = _suite(task, config)
    content = _published().get(suite, {"tasks": {}})
    if task not in content["tasks"]:
        return None
    frames = content["unit"].startswith("frames")
    per_step = FRAMES_PER_STEP if frames else 1
    bounds = content.get("random_human", {}).get(task, DMC_BOUNDS)
    return PublishedCurve(
        suite=suite,
        task=task,
        steps=np.array(content["steps"], np.float64) / per_step,
        seeds=np.array(content["tasks"][task], np.float64),
        bounds=(float(bounds[0]), float(bounds[1])),
        unit="frames" if frames else "agent steps",
        per_step=per_step,
    )


def published_tasks() -> list[str]:
    """Returns the tasks of all suites, each once."""
    names = [task for content in _published().values() for task in content["tasks"]]
    return list(dict.fromkeys(names))


def _suite(task: str, config: Mapping[str, Any]) -> str:
    name = task.partition("_")[0]
    if name != "dmc":
        return name
    if not config["env.dmc.image"]:
        return "dmc_proprio"
    return "" if config["env.dmc.proprio"] else "dmc_vision"


@functools.cache
def _published() -> dict[str, Any]:
    return json.loads(PUBLISHED.read_text("utf-8"))
