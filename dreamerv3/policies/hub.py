"""Policies as folders for the Hugging Face Hub. Any process; nothing is uploaded.

    model.safetensors    weights that acting needs, by name
    config.json          task, step, spaces and the whole configuration
    config.yaml          the configuration as in a logdir
    README.md            the model card: score, interval, how to use it
    replay.mp4           an episode, or replay.gif; only if the run was evaluated

`dreamerv3.load` reads such a folder like a logdir.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dreamerv3.cli.config import FILENAME
from dreamerv3.policies.spaces import spaces_from_tree
from embodied.base import Tree
from embodied.checkpoint import CheckpointError
from embodied.run.eval_only import FOLDER as EVAL
from embodied.run.saving import SavedAgent

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
VIDEOS = (".mp4", ".gif")

_CARD = """\
---
library_name: dreamerv3-parallel
tags:
- reinforcement-learning
- dreamerv3
- world-model
- {task}
{results}---

# DreamerV3 on {task}

A policy of [DreamerV3](https://arxiv.org/abs/2301.04104), trained with
DreamerV3 Parallel for {step:,} environment steps. It has the weights that acting needs:
encoder, dynamics and policy.

{score}

{video}

## Use

```python
import dreamerv3

policy = dreamerv3.load("path/to/this/folder")
policy.reset()
action = policy.act(obs)
```

It sees {observations} and decides on {actions}. The configuration is in `config.yaml`.
"""

_RESULTS = """\
model-index:
- name: DreamerV3
  results:
  - task:
      type: reinforcement-learning
      name: reinforcement-learning
    dataset:
      name: {task}
      type: {task}
    metrics:
    - type: mean_reward
      value: {value}
      name: mean_reward
      verified: false
"""


def write_hub(
    folder: pathlib.Path,
    saved: SavedAgent,
    weights: Mapping[str, np.ndarray],
    spaces: Tree,
    config: Mapping[str, Any],
) -> None:
    """Writes the files of a policy into a folder.

    Args:
      folder: an existing, empty folder.
      saved: the agent's checkpoint.
      weights: weights by flat name.
      spaces: `obs` and `act`, from `spaces_to_tree`.
      config: configuration of the run.
    """
    shutil.copy(saved.logdir / FILENAME, folder / FILENAME)
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    save_file(arrays, folder / WEIGHTS, {"format": "np"})
    content = {
        "model_type": "dreamerv3",
        "task": config["task"],
        "step": saved.step,
        "spaces": to_json(spaces),
        "config": to_json(config),
    }
    (folder / CONFIG).write_text(f"{json.dumps(content, indent=2)}\n", "utf-8")
    result = _newest_result(saved)
    video = _copy_video(saved.logdir, result, folder)
    text = _CARD.format(
        task=config["task"],
        step=saved.step,
        results=_results(config["task"], result),
        score=_score(result),
        video=video,
        observations=_listed(spaces["obs"]),
        actions=_listed(spaces["act"]),
    )
    (folder / CARD).write_text(text, "utf-8")


def is_hub(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a folder that `write_hub` has written."""
    folder = pathlib.Path(path).expanduser()
    return all((folder / name).is_file() for name in (WEIGHTS, CONFIG, FILENAME))


def read_hub(path: str | os.PathLike[str]) -> SavedAgent:
    """Reads the agent from a folder that `write_hub` has written.

    Raises:
      CheckpointError: a file is damaged.
    """
    folder = pathlib.Path(path).expanduser()
    try:
        content = json.loads((folder / CONFIG).read_text("utf-8"))
        params = load_file(folder / WEIGHTS)
        spaces = content["spaces"]
        spaces_from_tree(spaces)  # Raises an error if they are damaged.
        step = int(content["step"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: expected a policy in {WEIGHTS} and {CONFIG}, but they are "
            f"damaged ({error})."
        ) from error
    return SavedAgent(folder, "hub", step, {"params": params, "spaces": spaces})


def _newest_result(saved: SavedAgent) -> dict[str, Any] | None:
    """Returns the evaluation of the saved step, else the one of the latest step."""
    folder = pathlib.Path(saved.logdir, EVAL)
    found = sorted(
        (path for path in folder.glob("*.json") if path.stem.isdigit()),
        key=lambda path: (int(path.stem) == saved.step, int(path.stem)),
    )
    return json.loads(found[-1].read_text("utf-8")) if found else None


def _copy_video(
    logdir: pathlib.Path, result: Mapping[str, Any] | None, folder: pathlib.Path
) -> str:
    """Copies the first video of a result; returns the text on it for the card."""
    for name in (result or {}).get("videos", []):
        source = pathlib.Path(logdir, name)
        if source.suffix in VIDEOS and source.is_file():
            target = folder / f"replay{source.suffix}"
            shutil.copy(source, target)
            if source.suffix == ".gif":
                return f"![An episode]({target.name})"
            return f"An episode: [{target.name}]({target.name})"
    return "There is no video of it."


def _score(result: Mapping[str, Any] | None) -> str:
    if not result or result["mean_score"] is None:
        return (
            "It was not evaluated. `dreamerv3 --script eval_only --logdir LOGDIR` does "
            "so; export it again then."
        )
    episodes, mean = result["episodes"], result["mean_score"]
    text = f"Mean score of {episodes} episodes: **{mean:.4g}**"
    if result["interval"]:
        low, high = result["interval"]
        percent = round(100 * result["confidence"])
        text += f" ({percent}% confidence interval {low:.4g} to {high:.4g})"
    return f"{text}, by the agent of step {result['step']:,}."


def _results(task: str, result: Mapping[str, Any] | None) -> str:
    if not result or result["mean_score"] is None:
        return ""
    value = f"{result['mean_score']:.4g}"
    if result["interval"]:
        low, high = result["interval"]
        value += f" +/- {(high - low) / 2:.4g}"
    return _RESULTS.format(task=task, value=value)


def _listed(spaces: Mapping[str, Any]) -> str:
    signals = ("is_first", "is_last", "is_terminal", "reward")
    return ", ".join(f"`{key}`" for key in spaces if key not in signals)


def to_json(tree: Any) -> Any:
    """Converts a tree to JSON values, with infinite numbers as text."""
    if isinstance(tree, Mapping):
        return {key: to_json(value) for key, value in tree.items()}
    if isinstance(tree, np.ndarray | np.generic):
        return to_json(tree.tolist())
    if isinstance(tree, list | tuple):
        return [to_json(value) for value in tree]
    return str(tree) if tree in (np.inf, -np.inf) else tree
