"""Wrappers for the start, end and frames of episodes; where the env is stepped."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from embodied.base import Env, Spaces
from embodied.images import resize_image
from embodied.space import Space
from embodied.wrappers.checking import SpaceError, Step, Wrapper, brief, env_name

_logger = logging.getLogger(__name__)


class TimeLimit(Wrapper):
    """Ends episodes after `duration` steps; 0 means never.

    Args:
      env: the environment.
      duration: number of steps after the first observation.
      reset: whether the environment is reset after a cut episode. If not, it continues
        where it was: the last observation is also the first of the next episode.
    """

    def __init__(self, env: Env, duration: int, reset: bool = True):
        super().__init__(env)
        if duration < 0:
            raise ValueError(f"Expected a duration of at least 0, got {duration}.")
        self._duration = duration
        self._reset = reset
        self._count = 0
        self._done = True
        self._cut: Step | None = None

    def step(self, action: Step) -> Step:
        """Steps, and sets `is_last` when time is up."""
        if self._done or action["reset"]:
            return self._start(action)
        obs = self.env.step(action)
        # An environment may begin an episode by itself, such as after a crash.
        self._count = 0 if obs["is_first"] else self._count + 1
        if self._duration and self._count >= self._duration and not obs["is_last"]:
            obs = {**obs, "is_last": np.bool_(True)}
            self._cut = None if self._reset else obs
        self._done = bool(obs["is_last"])
        return obs

    def _start(self, action: Step) -> Step:
        cut, self._cut = self._cut, None
        self._count = 0
        if cut is None:
            obs = self.env.step({**action, "reset": np.bool_(True)})
        else:
            obs = {
                **cut,
                "reward": np.zeros_like(cut["reward"]),
                "is_first": np.bool_(True),
                "is_last": np.bool_(False),
            }
        self._done = bool(obs["is_last"])
        return obs


class ActionRepeat(Wrapper):
    """Takes every action `repeat` times, or until the episode ends; sums rewards.

    The attribute `repeat` is the number of environment steps per action, including
    the repeats of wrapped environments.
    """

    def __init__(self, env: Env, repeat: int):
        super().__init__(env)
        if repeat < 1:
            raise ValueError(f"Expected a repeat of at least 1, got {repeat}.")
        self._repeat = repeat
        self.repeat = repeat * getattr(env, "repeat", 1)

    def step(self, action: Step) -> Step:
        """Returns the last observation, with the sum of the rewards."""
        obs = self.env.step(action)
        total = obs["reward"]
        for _ in range(self._repeat - 1):
            if obs["is_first"] or obs["is_last"]:
                break
            obs = self.env.step(action)
            # A new episode must not get the reward of the one before.
            total = obs["reward"] if obs["is_first"] else total + obs["reward"]
        return {**obs, "reward": total}


class RestartOnException(Wrapper):
    """Recreates the environment when its `step` fails.

    The step that failed returns the first observation of a new episode, with
    `is_first` set. The interrupted episode has no last step, and none is made up, since
    the effect of the action is unknown.

    Only the thread that owns the environment calls `step`; `close` may be called from
    another thread and ends a wait.

    Args:
      make_env: makes the environment, the same one at every call.
      exceptions: exception types that cause a restart.
      window: seconds within which failures are counted.
      maxfails: failures in a window that are tolerated; the next one is raised.
      wait: seconds before the environment is made again.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        exceptions: tuple[type[BaseException], ...] = (Exception,),
        window: float = 300.0,
        maxfails: int = 2,
        wait: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(make_env())
        self._make_env = make_env
        self._exceptions = exceptions
        self._window = window
        self._maxfails = maxfails
        self._wait = wait
        self._clock = clock
        self._failures: collections.deque[float] = collections.deque()
        self._closed = threading.Event()

    def step(self, action: Step) -> Step:
        """Steps the environment; if that fails, makes and resets a new one."""
        try:
            return self.env.step(action)
        except self._exceptions as error:
            failure = error
        while True:
            self._count_failure(failure)
            if self._closed.wait(self._wait):
                raise failure
            try:
                env = self._make_env()
                obs = env.step({**action, "reset": np.bool_(True)})
            except self._exceptions as error:
                failure = error
            else:
                return self._continue_with(env, obs)

    def close(self) -> None:
        """Closes the environment and cancels a restart that is waiting."""
        self._closed.set()
        super().close()

    def _count_failure(self, failure: BaseException) -> None:
        now = self._clock()
        self._failures.append(now)
        while self._failures[0] < now - self._window:
            self._failures.popleft()
        if len(self._failures) > self._maxfails:
            raise failure
        _logger.warning(
            "Env %s failed (failure %d; %d are tolerated in %g s); it is restarted "
            "in %g s.",
            env_name(self),
            len(self._failures),
            self._maxfails,
            self._window,
            self._wait,
            exc_info=failure,
        )
        try:
            super().close()
        except self._exceptions:
            _logger.warning("Closing env %s failed.", env_name(self), exc_info=True)

    def _continue_with(self, env: Env, obs: Step) -> Step:
        old, self.env = Wrapper(self.env), env
        new = Wrapper(env)
        if (old.obs_space, old.act_space) != (new.obs_space, new.act_space):
            raise SpaceError(
                f"Env {env_name(env)} has different spaces after a restart: "
                f"expected {old.obs_space} and {old.act_space}, got {new.obs_space} "
                f"and {new.act_space}. make_env must make the same one every time."
            )
        return obs


class NotRenderable(Exception):
    """An environment cannot draw frames; the message says why."""


class AddFrames(Wrapper):
    """Adds the image that `env.render()` returns as `log/frame` [H, W, 3] uint8.

    The constructor starts the first episode, to learn the size of frames.

    Args:
      env: environment with a method `render` that returns an image [H, W, 3] uint8.
      active: whether to draw; otherwise frames are black, as for all but one of
        several environments.

    Raises:
      NotRenderable: the environment has no such method, or the method fails.
    """

    KEY = "log/frame"
    LONGEST = 320  # Height and width; larger frames are scaled down.

    def __init__(self, env: Env, active: bool = True):
        super().__init__(env)
        self._active = active
        if not hasattr(env, "render"):
            raise NotRenderable("it has no method render")
        actions = super().act_space.items()
        nothing = {key: np.zeros(space.shape, space.dtype) for key, space in actions}
        self._first: Step | None = env.step({**nothing, "reset": np.bool_(True)})
        self._frame = self._draw()

    @property
    def obs_space(self) -> Spaces:
        """Spaces of the wrapped environment, and of the frame."""
        return {**super().obs_space, self.KEY: Space(np.uint8, self._frame.shape)}

    def step(self, action: Step) -> Step:
        """Steps and draws."""
        first, self._first = self._first, None
        obs = first if first is not None and action["reset"] else self.env.step(action)
        frame = self._draw() if self._active else np.zeros_like(self._frame)
        return {**obs, self.KEY: frame}

    def _draw(self) -> np.ndarray:
        try:
            frame = self.env.render()  # type: ignore[attr-defined]
        except Exception as error:
            raise NotRenderable(f"{type(error).__name__}: {error}") from error
        frame = np.asarray(frame)
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise NotRenderable(
                f"render returned {brief(frame)}, not an image [H, W, 3] uint8"
            )
        longest = max(frame.shape[:2])
        if longest > self.LONGEST:
            height, width = (
                max(1, round(side * self.LONGEST / longest)) for side in frame.shape[:2]
            )
            frame = resize_image(frame, (height, width))
        return frame
