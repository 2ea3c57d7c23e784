"""A person plays inside the world model of a run. The process of one dream.

    start      the model is shown a context: steps of the replay, or of an episode that
               the policy plays now
    step       the model imagines what an action leads to, and decodes it

The truth is shown beside it, if there is one. After an episode, it is the environment,
which goes on with the same actions. After a moment of the replay, it is the recording,
as long as the recorded actions are taken.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dreamerv3.cli.config import ConfigError, run_config
from dreamerv3.cli.task_origin import names_code, started_by_user
from dreamerv3.view.dream_model import DreamModel, load_model
from embodied.base import Env, TaskError
from embodied.checkpoint import CheckpointError
from embodied.driver import EnvError
from embodied.envs.keys import SIGNALS
from embodied.replay.chunkfiles import STEPS, ChunkFolder

PRIORITY = 5  # Added to the nice value, so that the run comes first.
CONTEXT = 32  # Steps that the model is shown.
MOST_CONTEXT = 256
SHOWN_VECTOR = 64  # How many numbers of a vector are sent.
IDLE_SECONDS = 600.0  # After which a dream ends that nobody uses.
MOST_FILE = 1 << 30  # Bytes of memory that a file of the replay may need.

log = logging.getLogger("embodied.view")


class NoDream(Exception):
    """The run offers nothing to dream of; the message says why."""


def answer_requests(logdir: str, connection: Any) -> None:
    """Answers JSON requests with JSON.

    Returns when the other side closes the connection, or has sent nothing for
    `IDLE_SECONDS`.
    """
    os.nice(PRIORITY)
    dream: Dream | None = None
    while connection.poll(IDLE_SECONDS):
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            if dream is None:
                dream = Dream(Path(logdir))
            answer = dream.answer(request)
        except (NoDream, ConfigError, CheckpointError, ValueError) as error:
            answer = {"error": " ".join(str(error).split())[:1000]}
        except (EnvError, TaskError) as error:
            answer = {"error": f"The environment does not start. {error}"[:1000]}
        connection.send_bytes(json.dumps(answer).encode())


class Dream:
    """A dream of one run.

    Args:
      logdir: of the run.
    """

    def __init__(self, logdir: Path):
        self._logdir = logdir
        self._config = run_config(logdir)
        if self._config.random_agent:
            raise NoDream("This run has a random agent, which has no world model.")
        self._model: DreamModel = load_model(logdir, self._config)
        # Compile now rather than when a key is pressed.
        self._model.imagine(self._model.initial(), self._model.no_action())
        self._env: Env | None = None
        self._context: list[dict[str, Any]] = []
        # The last step of the context, and the steps recorded after it.
        self._trail: list[dict[str, Any]] = []
        self._on_trail = False  # Whether all actions since were the recorded ones.
        self._latent: Any = None
        self._steps = 0
        self._total = 0.0
        self._true_total: float | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handles a request, whose `do` is start, step or restart."""
        does = {"start": self.start, "step": self.step, "restart": self.restart}
        if request.get("do") not in does:
            raise ValueError(
                f"do: expected {' or '.join(does)}, got {request.get('do')!r}."
            )
        return does[request["do"]](request)

    def start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Shows the model a context.

        Args:
          request: `source`, replay or episode; `moment` of the replay, between 0 for
            its oldest and 1 for its newest step; `context`, steps.
        """
        count = request.get("context", CONTEXT)
        if not isinstance(count, int) or not 1 <= count <= MOST_CONTEXT:
            raise ValueError(
                f"context expected 1 to {MOST_CONTEXT} steps, got {count}."
            )
        self._close_env()
        if request.get("source", "replay") == "episode":
            self._context = self._play(count)
            self._trail = []
        else:
            moment = request.get("moment", 1.0)
            if not isinstance(moment, int | float) or not 0 <= moment <= 1:
                raise ValueError(
                    f"moment expected a number from 0 to 1, got {moment!r}."
                )
            self._context, later = self._from_replay(float(moment), count)
            self._trail = [self._context[-1], *later]
        self._begin()
        self._true_total = 0.0 if self._env is not None else None
        return {
            "spaces": self._model.describe(),
            "step": self._model.step,
            "context": [self._shown(step) for step in self._context[-8:]],
            **self._frame(self._context[-1]),
        }

    def restart(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Goes back to the end of the context, unless an environment played it."""
        if self._env is not None:
            raise NoDream("An episode that was played cannot be played again.")
        self._begin()
        return self._frame(self._context[-1])

    def _begin(self) -> None:
        self._latent = self._model.initial()
        for step in self._context:
            self._latent = self._model.observe(self._latent, step)
        self._steps, self._total = 0, 0.0
        self._on_trail = self._env is None

    def step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Imagines one step.

        Args:
          request: `action`, by key, or `policy`, to let the policy choose, or
            `recorded`, for the action that the run took at this moment.
        """
        now = self._trail[self._steps] if self._has_recorded() else None
        if request.get("policy"):
            action = self._model.choose(self._latent)
        elif request.get("recorded"):
            if now is None:
                raise NoDream("Nothing further was recorded after this moment.")
            action = {key: now[key] for key, _ in self._model.actions}
        else:
            action = self._model.action(request.get("action") or {})
        self._on_trail = now is not None and _same(action, now)
        self._latent = self._model.imagine(self._latent, action)
        self._steps += 1
        if self._env is not None:
            truth = self._step_env(action)
        else:
            truth = self._trail[self._steps] if self._on_trail else None
        frame = self._frame(truth)
        self._total += frame["reward"]
        taken = {key: np.asarray(value).tolist() for key, value in action.items()}
        return {**frame, "action": taken, "total": self._total}

    def _has_recorded(self) -> bool:
        return self._on_trail and self._steps + 1 < len(self._trail)

    def _frame(self, truth: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns what is shown of the present state, and of the truth if given."""
        shown = self._model.show(self._latent)
        frame = {
            "at": self._steps,
            "reward": shown["reward"],
            "continues": shown["continues"],
            "value": shown["value"],
            "policy": shown["policy"],
            "total": self._total,
            "dream": self._shown(shown["obs"]),
            "more": self._has_recorded(),
        }
        if truth is not None:
            frame["truth"] = self._shown(truth)
            frame["true_reward"] = float(np.asarray(truth["reward"]))
            frame["over"] = bool(np.asarray(truth["is_last"]))
            frame["true_total"] = self._true_total
        return frame

    def _shown(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns images as pixels and vectors as numbers, ready for JSON."""
        shown: dict[str, Any] = {}
        for key, space in self._model.decoded:
            value = np.asarray(obs[key])
            if len(space.shape) == 3:
                shown[key] = _pixels(value)
            else:
                flat = np.asarray(value, np.float64).reshape(-1)[:SHOWN_VECTOR]
                flat = np.nan_to_num(flat, posinf=0.0, neginf=0.0)
                shown[key] = {"vector": flat.tolist()}
        return shown

    def _play(self, count: int) -> list[dict[str, Any]]:
        """Starts the environment, and lets the policy play in it.

        If the episode ends within `count` steps, another one is played for half as long
        as it lasted, so that something is left of it.
        """
        from dreamerv3.cli.factories import make_env

        if names_code(self._config.task) and not started_by_user(
            self._logdir, self._config.task
        ):
            raise NoDream(
                f"The environment {self._config.task} names code that would be "
                "imported, and there is no proof that you have started this run on "
                "this machine. Begin at a moment of the replay."
            )
        self._env = make_env(self._config, 0)
        while True:
            steps = self._play_steps(self._env, count)
            if not steps[-1]["is_last"]:
                return steps
            count = max(1, len(steps) // 2)

    def _play_steps(self, env: Env, count: int) -> list[dict[str, Any]]:
        """Returns the first steps of an episode, up to its end."""
        steps: list[dict[str, Any]] = []
        latent = self._model.initial()
        action = self._model.no_action()
        for index in range(count):
            taken = self._model.clipped(action)
            obs = env.step({**taken, "reset": np.bool_(index == 0)})
            step = self._seen(obs)
            latent = self._model.observe(latent, {**step, **self._model.no_action()})
            action = self._model.choose(latent)
            latent = self._model.followed(latent, action)
            steps.append({**step, **action})  # As in the replay.
            if step["is_last"]:
                break
        return steps

    def _step_env(self, action: Mapping[str, Any]) -> dict[str, Any] | None:
        """Steps the true environment; None once its episode is over."""
        assert self._env is not None
        if self._true_total is None:
            return None
        obs = self._env.step({**self._model.clipped(action), "reset": np.bool_(False)})
        self._true_total += float(obs["reward"])
        frame = self._seen(obs)
        if frame["is_last"]:
            # Shown once; the next steps would be of another episode.
            self._true_total = None
        return frame

    def _seen(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is needed of an observation, as in the replay."""
        return {key: obs[key] for key in (*self._model.keys, *SIGNALS)}

    def _from_replay(
        self, moment: float, count: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the steps up to a moment, and those after it."""
        steps = read_moment(self._logdir, moment, count)
        needed = {*self._model.keys, *SIGNALS, *(k for k, _ in self._model.actions)}
        missing = sorted(needed - set(steps[0][0]))
        if missing:
            raise NoDream(f"The replay has no {', '.join(missing)}.")
        return steps

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def read_moment(
    logdir: Path, moment: float, count: int
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Reads steps of a saved replay.

    Args:
      logdir: of the run.
      moment: from 0, the oldest step, to 1, which leaves `count` steps after it in the
        newest file.
      count: steps up to the moment, itself included; fewer if an episode begins there.

    Returns:
      Steps up to the moment, and those after it, until the end of the episode or of the
      file.

    Raises:
      NoDream: nothing is saved.
    """
    folders = [logdir / "replay", *sorted((logdir / "replay").glob("[0-9]" * 5))]
    files = [
        (ChunkFolder(folder), file)
        for folder in folders
        if folder.is_dir()
        for file in ChunkFolder(folder).scan()
        if file.kind == STEPS and file.stop - file.start > 1
    ]
    if not files:
        raise NoDream(
            "Nothing of this run's replay is saved yet. Wait for its next save, or let "
            "the policy play an episode."
        )
    files.sort(key=lambda pair: (pair[1].save, pair[1].start, pair[1].name))
    place = moment * len(files)
    index = min(int(place), len(files) - 1)
    folder, file = files[index]
    arrays, _ = folder.read(file, MOST_FILE // (file.stop - file.start))
    total = len(arrays["is_first"])
    end = max(1, round((place - index if moment < 1 else 1.0) * (total - 1)))
    if moment == 1.0:  # Leave recorded steps to compare with.
        end = max(1, total - 1 - count)
    start = max(0, end + 1 - count)
    firsts = np.flatnonzero(arrays["is_first"][start : end + 1])
    if len(firsts):
        start += int(firsts[-1])
    later = np.flatnonzero(arrays["is_first"][end + 1 :])
    stop = end + 1 + int(later[0]) if len(later) else total
    rows = [
        {key: value[row] for key, value in arrays.items()} for row in range(start, stop)
    ]
    return rows[: end + 1 - start], rows[end + 1 - start :]


def _same(action: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    return all(np.array_equal(value, step[key]) for key, value in action.items())


def _pixels(value: np.ndarray) -> dict[str, Any]:
    """Returns an image [H, W, C] as base64 of its RGB bytes, with its size."""
    if value.dtype != np.uint8:
        value = (np.clip(value, 0, 1) * 255).astype(np.uint8)
    if value.shape[-1] < 3:
        value = np.repeat(value[..., :1], 3, -1)
    value = value[..., :3]
    height, width, _ = value.shape
    data = base64.b64encode(value.tobytes()).decode()
    return {"height": height, "width": width, "pixels": data}
