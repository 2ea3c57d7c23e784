"""Memory Maze: images from inside of a maze."""

from __future__ import annotations

import sys

import pytest
from suite_testing import check_suite, play, skip_without_rendering

pytest.importorskip("dm_control", reason="the extra 'memmaze' is not installed")
from importlib.util import find_spec

from embodied.envs import UnknownTask, make
from embodied.wrappers import wrap

if find_spec("memory_maze") is None:
    pytest.skip("the extra 'memmaze' is not installed", allow_module_level=True)


def test_images_and_actions():
    with skip_without_rendering():
        env = make("memmaze_9x9", size=(48, 48))
        history = play(wrap(env), 5)
    assert env.obs_space["image"].shape == (48, 48, 3)
    assert env.act_space["action"].classes == 6
    assert history[0]["image"].std() > 5
    assert "memory_maze" not in sys.modules  # Its __init__ needs the old gym.


@pytest.mark.slow
def test_suite():
    with skip_without_rendering():
        check_suite("memmaze_9x9", steps=1010)


def test_mistakes():
    with pytest.raises(UnknownTask, match="got '7x7'"):
        make("memmaze_7x7")
    with pytest.raises(ValueError, match="equal sides"):
        make("memmaze_9x9", size=(64, 48))
