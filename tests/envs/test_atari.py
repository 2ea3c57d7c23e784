"""Atari: the preprocessing of the benchmarks, and how episodes end."""

from __future__ import annotations

import numpy as np
import pytest
from suite_testing import check_suite, episodes, play, rollout

ale_py = pytest.importorskip("ale_py", reason="the extra 'atari' is not installed")

from embodied.envs import UnknownTask, make  # noqa: E402
from embodied.envs.atari import Atari  # noqa: E402


def step(env, action=0, reset=False):
    return env.step({"reset": reset, "action": np.int32(action)})


@pytest.mark.parametrize("task", ["atari_pong", "atari100k_boxing"])
def test_suite(task):
    check_suite(task, steps=300, length=400)


def test_protocols():
    atari, atari100k = make("atari_pong"), make("atari100k_pong")
    assert atari.obs_space["image"].shape == (96, 96, 1)
    assert atari.act_space["action"].classes == 18
    assert atari100k.obs_space["image"].shape == (64, 64, 3)
    assert atari100k.act_space["action"].classes == 6
    assert make("atari100k_pong", actions="all").act_space["action"].classes == 18


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("crazy_climber", "crazy_climber"),
        ("james_bond", "jamesbond"),
        ("ms_pacman", "ms_pacman"),
        ("UpNDown", "up_n_down"),
    ],
)
def test_names_of_games(task, name):
    assert Atari(task).name == f"atari_{name}"


def test_unknown_game_names_the_nearest():
    with pytest.raises(UnknownTask, match=r"got 'pnog'\. Did you mean atari_pong"):
        make("atari_pnog")


def test_games_that_cannot_be_played_are_unknown():
    with pytest.raises(UnknownTask, match=r"got 'combat'"):
        make("atari_combat")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("actions", "some"),
        ("lives", "ends"),
        ("aggregate", "min"),
        ("resize", "opencv"),
        ("repeat", 0),
        ("pooling", 0),
        ("noops", -1),
        ("length", 0),
        ("size", (0, 64)),
    ],
)
def test_wrong_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"Expected {option}"):
        Atari("pong", **{option: value})


@pytest.mark.parametrize(("gray", "channels"), [(True, 1), (False, 3)])
def test_image_has_the_chosen_size_and_channels(gray, channels):
    env = Atari("pong", size=(48, 80), gray=gray)
    image = step(env, reset=True)["image"]
    assert image.shape == (48, 80, channels)
    assert image.dtype == np.uint8
    assert image.max() > image.min()


def test_images_are_not_overwritten_by_later_steps():
    env = Atari("boxing", gray=False, noops=0)
    first = step(env, reset=True)["image"]
    copy = first.copy()
    later = [step(env, action)["image"] for action in (2, 5, 2, 3, 4, 1) * 5]
    np.testing.assert_array_equal(first, copy)
    assert not np.array_equal(first, later[-1])


def test_pooling_combines_the_last_frames_of_a_step():
    def image(repeat, pooling, aggregate, steps):
        env = Atari(
            "asteroids",
            size=(210, 160),
            repeat=repeat,
            pooling=pooling,
            aggregate=aggregate,
            sticky=False,
            noops=0,
        )
        obs = step(env, reset=True)
        for _ in range(steps):
            obs = step(env, 3)
        return obs["image"].astype(int)

    # After 48 frames; this game draws its sprites on alternating frames.
    earlier, last = image(1, 1, "max", 47), image(1, 1, "max", 48)
    assert not np.array_equal(earlier, last)
    np.testing.assert_array_equal(image(4, 2, "max", 12), np.maximum(earlier, last))
    np.testing.assert_array_equal(image(4, 2, "mean", 12), (earlier + last) // 2)
    np.testing.assert_array_equal(image(4, 1, "max", 12), last)


def test_a_step_sums_the_rewards_of_its_frames():
    def rewards(repeat, steps):
        options = {"sticky": False, "noops": 0, "length": 10**6}
        env = Atari("boxing", repeat=repeat, **options)
        step(env, reset=True)
        # Moves towards the opponent and hits.
        return [float(step(env, 16)["reward"]) for _ in range(steps)]

    fine = rewards(1, 1200)
    coarse = rewards(4, 300)
    assert any(fine)
    assert coarse == np.reshape(fine, (-1, 4)).sum(1).tolist()


def test_clipped_rewards_are_signs():
    plain = rollout("atari_qbert", 150, sticky=False)
    clipped = rollout("atari_qbert", 150, sticky=False, clip_reward=True)
    assert max(obs["reward"] for obs in plain) > 1
    for one, other in zip(plain, clipped, strict=True):
        assert np.sign(one["reward"]) == other["reward"]


def test_sticky_actions_make_the_same_actions_differ():
    def last_images(sticky):
        histories = [
            play(Atari("boxing", sticky=sticky, noops=0, seed=seed), 60)
            for seed in (1, 2)
        ]
        return [history[-1]["image"] for history in histories]

    assert np.array_equal(*last_images(sticky=False))
    assert not np.array_equal(*last_images(sticky=True))


def test_idle_frames_vary_the_start_of_episodes():
    env = Atari("ms_pacman", noops=30, sticky=False)
    starts = {step(env, reset=True)["image"].tobytes() for _ in range(8)}
    assert len(starts) > 1
    env = Atari("ms_pacman", noops=0, sticky=False)
    starts = {step(env, reset=True)["image"].tobytes() for _ in range(8)}
    assert len(starts) == 1


def test_episodes_are_cut_after_their_length_in_frames():
    history = play(Atari("pong", length=42), 25)
    ends = [index for index, obs in enumerate(history) if obs["is_last"]]
    # 42 frames are ten steps of four and one of two; the reset takes a step too.
    assert ends == [11, 23]
    assert not any(obs["is_terminal"] for obs in history)


def test_lost_lives():
    def counts(lives):
        env = Atari("breakout", sticky=False, autostart=True, lives=lives)
        history = play_idle(env, 600)
        return terminals(history), episodes(history)

    # Each of the five lives is soon lost if the paddle does not move.
    ended, games = counts("unused")
    assert ended == games >= 3
    lost, same_games = counts("discount")
    assert same_games == games
    assert lost // 5 == games
    lost, short_games = counts("reset")
    assert lost == short_games >= 5 * games


def test_autostart_presses_fire():
    waits = play_idle(Atari("breakout", sticky=False, noops=0), 300)
    assert episodes(waits) == 0
    images = [obs["image"] for obs in waits[5:]]
    assert all(np.array_equal(images[0], image) for image in images)
    plays = play_idle(Atari("breakout", sticky=False, noops=0, autostart=True), 300)
    assert episodes(plays) > 0


def play_idle(env, steps):
    obs = step(env, reset=True)
    history = [obs]
    for _ in range(steps):
        obs = step(env, 0, reset=obs["is_last"])
        history.append(obs)
    return history


def terminals(history):
    return sum(int(obs["is_terminal"]) for obs in history)
