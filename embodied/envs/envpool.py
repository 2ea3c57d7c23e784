"""EnvPool: batches of environments in C++ threads, in the process that steps them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embodied.base import Env
from embodied.envs.gym_vector import SingleEnv, VectorGym
from embodied.envs.registry import UnknownTask, is_envpool_atari


def make_pool(
    task: str,
    seeds: Sequence[int],
    size: Sequence[int] = (96, 96),
    repeat: int = 4,
    sticky: bool = True,
    gray: bool = True,
    actions: str = "all",
    noops: int = 30,
    threads: int = 0,
) -> VectorGym:
    """Makes a pool of environments that step in one call.

    Args:
      task: an id of EnvPool, such as `Pong-v5`.
      seeds: one per environment; EnvPool derives all of its seeds from the first.
      size: height and width of images; this and the options up to `noops` are for
        Atari only.
      repeat: number of frames that each action is repeated for.
      sticky: whether to repeat the previous action with probability 0.25.
      gray: whether images are grayscale.
      actions: `all` or `needed`.
      noops: maximum number of idle frames at the start of an episode.
      threads: number of threads of the pool; 0 lets EnvPool choose.
    """
    import envpool

    if task not in envpool.list_all_envs():
        raise UnknownTask.named("task of EnvPool", task, envpool.list_all_envs())
    atari: Mapping[str, Any] = {
        "img_height": int(size[0]),
        "img_width": int(size[1]),
        "stack_num": 1,
        "frame_skip": repeat,
        "repeat_action_probability": 0.25 if sticky else 0.0,
        "gray_scale": gray,
        "full_action_space": actions == "all",
        "noop_max": noops,
        "use_fire_reset": False,
    }
    with _without_warnings():
        pool = envpool.make(
            task,
            env_type="gymnasium",
            num_envs=len(seeds),
            seed=seeds[0] // 2,  # EnvPool counts up from it, within 31 bits.
            num_threads=threads,
            **(atari if is_envpool_atari(task) else {}),
        )
        return VectorGym(pool)


def make_envpool(task: str, seed: int = 0, **options: Any) -> Env:
    """Makes a single environment, for programs that step them one at a time."""
    return SingleEnv(make_pool(task, [seed], **options))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides Gymnasium's warnings that EnvPool's spaces have bounds in float64."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered")
        yield
