"""Games of the Arcade Learning Environment, in the process that steps them."""

from __future__ import annotations

from typing import Any

import ale_py
import numpy as np
from ale_py import roms

from embodied.base import Array, Spaces
from embodied.envs.game import Game
from embodied.envs.keys import SIGNALS, check_at_least, check_choice
from embodied.envs.registry import UnknownTask
from embodied.images import resize_image
from embodied.space import Space

STICKY = 0.25  # Probability that a frame takes the previous frame's action.
ACTIONS = ("all", "needed")
LIVES = ("unused", "discount", "reset")
AGGREGATES = ("max", "mean")
RESIZERS = ("pillow",)

# Options of the 100k protocol that differ from the defaults.
_ATARI100K: dict[str, Any] = {
    "size": (64, 64),
    "sticky": False,
    "gray": False,
    "actions": "needed",
}


class Atari(Game):
    """One game, with the preprocessing of the usual benchmarks.

    Args:
      task: the game, such as 'pong' or 'crazy_climber'; underscores and capitals do
        not matter.
      size: height and width of images.
      repeat: number of frames that each action is repeated for.
      sticky: whether every frame takes the action of the one before it with
        probability 0.25.
      gray: whether images have one luminance channel instead of three of colour.
      actions: 'all' 18 actions, or only those that the game uses ('needed').
      lives: a lost life is 'unused', sets `is_terminal` ('discount'), or also ends
        the episode ('reset'), after which the game starts over.
      noops: maximum number of idle frames at the start of an episode; their number is
        random.
      autostart: whether to press fire at the start of an episode, and instead of the
        action after a lost life, for games that wait for it.
      pooling: number of frames at the end of each step that make up an image.
      aggregate: how to combine these frames: 'max', which shows sprites that flicker,
        or 'mean'.
      resize: library that resizes images; 'pillow'.
      clip_reward: whether to reduce rewards to their sign.
      length: frames after which an episode is cut.
      seed: decides the idle frames and the sticky actions.
    """

    def __init__(
        self,
        task: str,
        size: tuple[int, int] = (96, 96),
        repeat: int = 4,
        sticky: bool = True,
        gray: bool = True,
        actions: str = "all",
        lives: str = "unused",
        noops: int = 30,
        autostart: bool = False,
        pooling: int = 2,
        aggregate: str = "max",
        resize: str = "pillow",
        clip_reward: bool = False,
        length: int = 108_000,
        seed: int = 0,
    ):
        check_choice("actions", actions, ACTIONS)
        check_choice("lives", lives, LIVES)
        check_choice("aggregate", aggregate, AGGREGATES)
        check_choice("resize", resize, RESIZERS)
        check_at_least(1, size=min(size), repeat=repeat, pooling=pooling, length=length)
        check_at_least(0, noops=noops)
        rom = _find_rom(task)
        self.name = f"atari_{rom}"
        self._size = (int(size[0]), int(size[1]))
        self._repeat = repeat
        self._gray = gray
        self._lives_mode = lives
        self._noops = noops
        self._autostart = autostart
        self._aggregate = aggregate
        self._clip_reward = clip_reward
        self._length = length
        self._rng = np.random.default_rng(seed)
        self._ale = _load(rom, STICKY if sticky else 0.0, seed)
        full = self._ale.getLegalActionSet()
        self._actions = full if actions == "all" else self._ale.getMinimalActionSet()
        super().__init__(len(self._actions))
        channels = () if gray else (3,)
        frame = (*self._ale.getScreenDims(), *channels)
        self._frames = np.zeros((min(pooling, repeat), *frame), np.uint8)
        self._lives = 0
        self._fire = False  # Whether the next step presses fire.
        self._count = 0  # Frames of this episode.

    @property
    def obs_space(self) -> Spaces:
        """An image of one or three channels."""
        return {
            "image": Space(np.uint8, (*self._size, 1 if self._gray else 3)),
            **SIGNALS,
        }

    def _play(self, action: int) -> tuple[dict[str, Array], float, bool, bool]:
        """Repeats an action."""
        ale, act = self._ale, self._actions[action]
        if self._fire:
            act = ale_py.Action.FIRE
        reward, rendered = 0.0, 0
        over = lost = False
        for left in range(self._repeat, 0, -1):
            reward += ale.act(act)
            self._count += 1
            lives = ale.lives()
            lost = lost or lives < self._lives
            self._lives = lives
            over = ale.game_over(with_truncation=False)
            last = left == 1 or over or self._count >= self._length
            # Frames that are not part of an image are not drawn.
            if last or left <= len(self._frames):
                self._render(rendered)
                rendered += 1
            if last:
                break
        terminal = over or (lost and self._lives_mode != "unused")
        cut = self._count >= self._length
        done = over or cut or (lost and self._lives_mode == "reset")
        self._fire = lost and self._autostart
        if self._clip_reward:
            reward = np.sign(reward)
        return {"image": self._image(rendered)}, reward, done, terminal

    def _start(self) -> dict[str, Array]:
        ale = self._ale
        ale.reset_game()
        noops = int(self._rng.integers(0, self._noops, endpoint=True))
        acts = [ale_py.Action.NOOP] * noops
        if self._autostart:
            # Some games start at the first key after fire.
            acts += [ale_py.Action.FIRE, ale_py.Action.UP]
        for act in acts:
            ale.act(act)
            if ale.game_over(with_truncation=False):
                ale.reset_game()
        self._lives = ale.lives()
        self._fire = False
        self._count = 0
        self._render(0)
        return {"image": self._image(1)}

    def _render(self, index: int) -> None:
        if self._gray:
            self._ale.getScreenGrayscale(self._frames[index])
        else:
            self._ale.getScreenRGB(self._frames[index])

    def _image(self, rendered: int) -> np.ndarray:
        """Combines the first frames and resizes them, in a read-only array."""
        frames = self._frames[:rendered]
        pooled = frames[0]
        if len(frames) > 1 and self._aggregate == "max":
            for frame in frames[1:]:
                np.maximum(pooled, frame, out=pooled)
        elif len(frames) > 1:
            pooled = frames.mean(0).astype(np.uint8)
        resized = resize_image(pooled, self._size)
        return resized[..., None] if self._gray else resized


def atari100k(task: str, **options: Any) -> Atari:
    """Makes a game as in the 100k benchmark: small colour images, no sticky actions.

    Args:
      task: the game.
      **options: options of `Atari`, which override those of the benchmark.
    """
    return Atari(task, **{**_ATARI100K, **options})


def _load(rom: str, sticky: float, seed: int) -> ale_py.ALEInterface:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    # These take effect when the game is loaded.
    ale.setInt("random_seed", seed % 2**31)
    ale.setFloat("repeat_action_probability", sticky)
    path = roms.get_rom_path(rom)
    assert path is not None  # The name is one that ale_py listed.
    ale.loadROM(path)
    return ale


def _find_rom(task: str) -> str:
    known = [rom for rom in roms.get_all_rom_ids() if _is_playable(rom)]
    plain = {rom.replace("_", ""): rom for rom in known}
    rom = plain.get(task.replace("_", "").lower())
    if rom is None:
        raise UnknownTask.named("game", task, known)
    return rom


def _is_playable(rom: str) -> bool:
    """Returns whether ale_py supports a game; loading others ends the process."""
    path = roms.get_rom_path(rom)
    return path is not None and ale_py.ALEInterface.isSupportedROM(path) is not None
