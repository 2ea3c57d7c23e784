"""Pools of EnvPool."""

from __future__ import annotations

import numpy as np
import pytest

from dreamerv3.cli.config import action_repeat, load_config
from dreamerv3.cli.factories import EnvFactory, make_spaces
from embodied.envs import UnknownTask, make
from embodied.envs.registry import is_envpool_atari

envpool = pytest.importorskip("envpool", reason="the extra is not installed")


def test_a_pool_of_atari_steps_in_one_call():
    config = load_config(["--task", "envpool_Pong-v5", "--env.envpool.repeat", "2"], {})
    batch = EnvFactory(config).make_batch(range(4))
    spaces, _ = make_spaces(config)
    assert spaces["image"].shape == batch.obs_space["image"].shape == (96, 96, 1)
    assert batch.act_space["action"].classes == 18
    reset = np.ones(4, bool)
    seen = []
    for _ in range(20):
        obs = batch.step({"reset": reset, "action": np.ones(4, np.int32)})
        assert obs["image"].shape == (4, 96, 96, 1)
        assert obs["image"].dtype == np.uint8
        reset = obs["is_last"]
        seen.append(obs["image"])
    assert len({row.tobytes() for row in seen[-1]}) > 1, "each has its own seed"
    batch.close()


def test_episodes_end_and_begin():
    config = load_config(["--task", "envpool_CartPole-v1"], {})
    batch = EnvFactory(config).make_batch([0, 1])
    obs = batch.step({"reset": np.ones(2, bool), "action": np.zeros(2, np.int32)})
    assert obs["is_first"].all()
    lasts = np.zeros(2, int)
    for _ in range(60):
        before = obs["is_last"]
        obs = batch.step({"reset": before, "action": np.ones(2, np.int32)})
        np.testing.assert_array_equal(obs["is_first"], before)
        assert not obs["reward"][before].any()
        lasts += obs["is_last"]
    assert lasts.min() >= 2
    batch.close()


def test_names_are_known():
    with pytest.raises(UnknownTask, match="Pong-v5"):
        make("envpool_Ponk-v5")


@pytest.mark.parametrize(
    ("task", "repeats"),
    [("Pong-v5", True), ("HalfCheetah-v4", False), ("Ant-v5", False)],
)
def test_only_actions_of_games_are_repeated_as_configured(task, repeats, monkeypatch):
    make, given = envpool.make, {}

    def record(*args, **options):
        given.update(options)
        return make(*args, **options)

    monkeypatch.setattr(envpool, "make", record)
    flags = ["--task", f"envpool_{task}", "--env.envpool.repeat", "2"]
    config = load_config(flags, {})
    EnvFactory(config).make_batch([0]).close()
    assert given.get("frame_skip") == (2 if repeats else None)
    assert action_repeat(config.flat) == (2 if repeats else 1)


def test_atari_games_are_known_by_their_ids():
    for task in envpool.list_all_envs():
        if task.endswith("-v5"):
            fields = envpool.make_spec(task).config._fields
            assert is_envpool_atari(task) == ("full_action_space" in fields), task
