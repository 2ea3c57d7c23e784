"""Whole episodes are reported once, with the right numbers; partial ones never."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.episodes import Episodes


class Clock:
    """A clock that stands still until `now` is changed."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def transition(reward=0.0, first=False, last=False, **extra):
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        **extra,
    }


def run(episodes, env, rewards, is_eval=False, **extra):
    """Adds a whole episode; the first reward belongs to the reset."""
    finished = []
    for index, reward in enumerate(rewards):
        step = transition(reward, index == 0, index == len(rewards) - 1)
        step.update({key: values[index] for key, values in extra.items()})
        finished += episodes.add(step, env, is_eval)
    return finished


def counts(result):
    return tuple(
        result[f"parallel/ep_{key}"]
        for key in ("starts", "ends", "abandoned", "states")
    )


def epstats(result):
    return {key: value for key, value in result.items() if "epstats/" in key}


def frames(number, value=0, size=4, channels=3):
    return np.full((number, size, size, channels), value, np.uint8)


class TestNumbers:
    def test_score_is_the_sum_of_rewards_and_length_the_number_of_actions(self):
        finished = run(Episodes(), 0, [0.0, 1.0, 0.5, -0.25])
        assert finished == [{"episode/score": 1.25, "episode/length": 3}]

    def test_reward_rate_counts_changes_of_the_reward(self):
        episodes = Episodes()
        # Differences 1, 0, 1, 0.005: two of four actions changed the reward enough.
        run(episodes, 0, [0.0, 1.0, 1.0, 0.0, 0.005])
        assert episodes.result()["epstats/reward_rate"] == 0.5

    def test_a_change_of_exactly_a_hundredth_counts(self):
        episodes = Episodes()
        run(episodes, 0, [0.0, 0.01])
        assert episodes.result()["epstats/reward_rate"] == 1.0

    def test_log_keys_are_averaged_maximised_and_summed(self):
        episodes = Episodes()
        run(episodes, 0, [0, 0, 0], **{"log/coins": [-3.0, -1.0, -5.0]})
        result = episodes.result()
        assert result["epstats/log/coins/avg"] == -3.0
        assert result["epstats/log/coins/max"] == -1.0
        assert result["epstats/log/coins/sum"] == -9.0

    def test_statistics_are_means_over_episodes_since_the_last_result(self):
        episodes = Episodes()
        run(episodes, 0, [0, 0], **{"log/coins": [0.0, 2.0]})
        run(episodes, 1, [0, 0], **{"log/coins": [0.0, 4.0]})
        assert episodes.result()["epstats/log/coins/max"] == 3.0
        assert epstats(episodes.result()) == {}
        run(episodes, 1, [0, 0], **{"log/coins": [0.0, 8.0]})
        assert episodes.result()["epstats/log/coins/max"] == 8.0

    def test_a_log_key_that_only_some_steps_have_is_averaged_over_those(self):
        episodes = Episodes()
        episodes.add(transition(first=True), 0)
        episodes.add(transition(**{"log/late": np.float32(4.0)}), 0)
        episodes.add(transition(last=True, **{"log/late": np.float32(2.0)}), 0)
        assert episodes.result()["epstats/log/late/avg"] == 3.0

    def test_a_log_key_of_another_env_is_not_mixed_in_when_its_slot_is_used_again(self):
        episodes = Episodes()
        run(episodes, 0, [0, 0], **{"log/coins": [1.0, 2.0]})
        episodes.result()
        run(episodes, 1, [0, 0])
        assert "epstats/log/coins/sum" not in episodes.result()

    def test_log_keys_that_are_not_scalar_numbers_and_other_keys_are_ignored(self):
        episodes = Episodes()
        run(
            episodes,
            0,
            [0, 0],
            **{"log/vector": np.zeros((2, 5)), "log/name": np.array(["a", "b"])},
            state=np.zeros((2, 5)),
        )
        assert set(epstats(episodes.result())) == {"epstats/reward_rate"}

    def test_an_episode_of_one_observation_has_length_zero(self):
        episodes = Episodes()
        finished = episodes.add(transition(0.0, first=True, last=True), 0)
        assert finished == [{"episode/score": 0.0, "episode/length": 0}]
        assert episodes.result()["epstats/reward_rate"] == 0.0

    def test_infinite_rewards_do_not_disturb_the_bookkeeping(self):
        finished = run(Episodes(), 0, [0.0, np.inf, np.inf])
        assert finished[0]["episode/score"] == np.inf


class TestModes:
    def test_train_and_eval_are_kept_apart_even_for_the_same_env_id(self):
        episodes = Episodes()
        episodes.add(transition(first=True), 0, is_eval=False)
        episodes.add(transition(first=True), 0, is_eval=True)
        train = episodes.add(transition(1.0, last=True), 0, is_eval=False)
        evaluation = episodes.add(transition(5.0, last=True), 0, is_eval=True)
        assert train == [{"episode/score": 1.0, "episode/length": 1}]
        assert evaluation == [{"eval_episode/score": 5.0, "eval_episode/length": 1}]

    def test_statistics_of_eval_have_their_own_names(self):
        episodes = Episodes()
        run(episodes, 0, [0, 1], is_eval=True, image=frames(2))
        result = episodes.result()
        assert set(epstats(result)) == {
            "eval_epstats/reward_rate",
            "eval_epstats/policy_image",
        }
        assert counts(result) == (1, 1, 0, 0)

    def test_rows_of_one_batch_may_be_of_both_modes(self):
        batch = {
            "reward": np.float32([1, 2, 3]),
            "is_first": np.array([True, True, True]),
            "is_last": np.array([True, True, True]),
        }
        finished = Episodes().add_batch(batch, [0, 1, 2], np.array([0, 1, 0]))
        assert [next(iter(item.items())) for item in finished] == [
            ("episode/score", 1.0),
            ("eval_episode/score", 2.0),
            ("episode/score", 3.0),
        ]


class TestHalfEpisodes:
    def test_a_stream_that_starts_in_the_middle_is_ignored_until_is_first(self):
        episodes = Episodes()
        assert episodes.add(transition(5.0), 0) == []
        assert episodes.add(transition(5.0, last=True), 0) == []
        assert counts(episodes.result()) == (0, 0, 0, 0)
        assert run(episodes, 0, [0, 1])[0]["episode/score"] == 1.0

    def test_what_follows_is_last_without_is_first_is_ignored(self):
        episodes = Episodes()
        run(episodes, 0, [0, 1])
        assert episodes.add(transition(7.0, last=True), 0) == []

    def test_the_rest_of_an_episode_after_the_timeout_is_not_logged(self):
        clock = Clock()
        episodes = Episodes(timeout=180, clock=clock)
        episodes.add(transition(first=True), 0)
        episodes.add(transition(1.0), 0)
        clock.now += 181
        assert episodes.add(transition(1.0), 0) == []
        assert episodes.add(transition(1.0, last=True), 0) == []
        result = episodes.result()
        assert counts(result) == (1, 0, 1, 0)
        assert epstats(result) == {}
        assert run(episodes, 0, [0, 3])[0]["episode/score"] == 3.0

    def test_slow_steps_within_the_timeout_keep_the_episode(self):
        clock = Clock()
        episodes = Episodes(timeout=180, clock=clock)
        finished = []
        for index in range(5):
            finished += episodes.add(transition(1.0, index == 0, index == 4), 0)
            clock.now += 180
        assert finished == [{"episode/score": 5.0, "episode/length": 4}]

    def test_silent_episodes_are_abandoned_by_result_without_another_step(self):
        clock = Clock()
        episodes = Episodes(timeout=10, clock=clock)
        episodes.add(transition(first=True), 0)
        clock.now += 6
        episodes.add(transition(first=True), 1)
        clock.now += 6
        assert counts(episodes.result()) == (2, 0, 1, 1)

    def test_without_a_timeout_episodes_wait_for_ever(self):
        clock = Clock()
        episodes = Episodes(timeout=0, clock=clock)
        episodes.add(transition(first=True), 0)
        clock.now += 1e9
        assert counts(episodes.result()) == (1, 0, 0, 1)
        assert len(episodes.add(transition(last=True), 0)) == 1

    def test_is_first_in_an_open_episode_abandons_it(self):
        episodes = Episodes()
        episodes.add(transition(first=True), 0)
        episodes.add(transition(100.0), 0)
        assert run(episodes, 0, [0, 1]) == [{"episode/score": 1.0, "episode/length": 1}]
        assert counts(episodes.result()) == (2, 1, 1, 0)

    def test_a_second_reset_in_a_row_abandons_nothing(self):
        episodes = Episodes()
        episodes.add(transition(first=True), 0)
        assert run(episodes, 0, [0, 1]) == [{"episode/score": 1.0, "episode/length": 1}]
        assert counts(episodes.result()) == (1, 1, 0, 0)

    def test_counts_start_anew_after_result_but_open_episodes_remain(self):
        episodes = Episodes()
        episodes.add(transition(first=True), 0)
        assert counts(episodes.result()) == (1, 0, 0, 1)
        assert counts(episodes.result()) == (0, 0, 0, 1)


class TestMemory:
    def test_envs_that_never_return_are_forgotten(self):
        clock = Clock()
        episodes = Episodes(timeout=1, clock=clock)
        for env in range(1000):
            episodes.add(transition(first=True, **{"log/x": np.float32(1)}), env)
            clock.now += 0.5
        episodes.result()
        assert len(episodes._modes[False]._open) <= 8

    def test_envs_between_episodes_take_no_room(self):
        episodes = Episodes()
        for env in range(100):
            run(episodes, env, [0, 1])
        assert not episodes._modes[False]._open


class TestVideo:
    def test_the_first_env_is_recorded_and_the_others_are_not(self):
        episodes = Episodes()
        for env in (3, 4):
            episodes.add(transition(first=True, image=frames(1, env)[0]), env)
        for env in (4, 3):
            episodes.add(transition(last=True, image=frames(1, env)[0]), env)
        video = episodes.result()["epstats/policy_image"]
        np.testing.assert_array_equal(video, frames(2, 3))

    def test_the_last_finished_video_is_reported_once(self):
        episodes = Episodes()
        run(episodes, 0, [0, 0], image=frames(2, 1))
        run(episodes, 0, [0, 0, 0], image=frames(3, 2))
        video = episodes.result()["epstats/policy_image"]
        np.testing.assert_array_equal(video, frames(3, 2))
        assert "epstats/policy_image" not in episodes.result()

    @pytest.mark.parametrize(
        "limit", [{"VIDEO_FRAMES": 3}, {"VIDEO_BYTES": 3 * 4 * 4 * 3 + 1}]
    )
    def test_only_the_first_frames_of_a_long_episode_are_kept(self, limit, monkeypatch):
        for name, value in limit.items():
            monkeypatch.setattr(f"embodied.episodes.{name}", value)
        episodes = Episodes()
        images = np.concatenate([frames(1, index) for index in range(10)])
        run(episodes, 0, [0] * 10, image=images)
        video = episodes.result()["epstats/policy_image"]
        np.testing.assert_array_equal(video, images[:3])

    def test_frames_are_copied_so_that_buffers_can_be_used_again(self):
        episodes = Episodes()
        buffer = frames(1, 1)[0]
        episodes.add(transition(first=True, image=buffer), 0)
        buffer[:] = 2
        episodes.add(transition(last=True, image=buffer), 0)
        buffer[:] = 9
        video = episodes.result()["epstats/policy_image"]
        assert video[:, 0, 0, 0].tolist() == [1, 2]

    def test_images_may_come_for_the_recorded_env_alone(self):
        episodes = Episodes()
        batch = {
            "reward": np.zeros(2, np.float32),
            "is_first": np.array([True, True]),
            "is_last": np.array([False, False]),
        }
        images = {1: {"image": frames(1, 1)[0], "log/map": frames(1, 7, 2, 1)[0]}}
        episodes.add_batch(batch, [0, 1], images=images)
        batch = {**batch, "is_first": ~batch["is_first"], "is_last": ~batch["is_last"]}
        episodes.add_batch(batch, [0, 1], images=images)
        result = episodes.result()
        np.testing.assert_array_equal(result["epstats/policy_image"], frames(2, 1))
        assert result["epstats/policy_log/map"].shape == (2, 2, 2, 1)

    def test_another_env_is_recorded_if_images_come_of_that_one(self):
        episodes = Episodes()
        for env, first, last in ((1, True, False), (0, True, False), (0, False, True)):
            batch = {
                "reward": np.zeros(1, np.float32),
                "is_first": np.array([first]),
                "is_last": np.array([last]),
            }
            images = {env: {"image": frames(1, env)[0]}}
            episodes.add_batch(batch, [env], images=images)
        video = episodes.result()["epstats/policy_image"]
        np.testing.assert_array_equal(video, frames(2, 0))

    def test_the_frames_of_an_abandoned_episode_are_dropped(self):
        episodes = Episodes()
        episodes.add(transition(first=True, image=frames(1, 1)[0]), 0)
        episodes.add(transition(image=frames(1, 1)[0]), 0)
        run(episodes, 0, [0, 0], image=frames(2, 2))
        video = episodes.result()["epstats/policy_image"]
        np.testing.assert_array_equal(video, frames(2, 2))

    def test_another_env_is_recorded_when_the_first_has_gone(self):
        clock = Clock()
        episodes = Episodes(timeout=10, clock=clock)
        run(episodes, 0, [0, 0], image=frames(2, 1))
        run(episodes, 1, [0, 0], image=frames(2, 2))
        assert episodes.result()["epstats/policy_image"][0, 0, 0, 0] == 1
        clock.now += 11
        run(episodes, 1, [0, 0], image=frames(2, 2))
        assert episodes.result()["epstats/policy_image"][0, 0, 0, 0] == 2

    def test_arrays_that_are_not_images_are_not_recorded(self):
        episodes = Episodes()
        stacked = np.zeros((2, 4, 4, 7), np.uint8)
        floats = np.zeros((2, 4, 4, 3), np.float32)
        run(episodes, 0, [0, 0], stacked=stacked, floats=floats)
        assert set(epstats(episodes.result())) == {"epstats/reward_rate"}


class TestChecks:
    def test_a_missing_key_is_named(self):
        with pytest.raises(KeyError, match="is_last"):
            Episodes().add({"reward": 0.0, "is_first": True}, 0)

    def test_a_wrong_shape_is_named(self):
        batch = {
            "reward": np.zeros(3),
            "is_first": np.zeros(2, bool),
            "is_last": np.zeros(2, bool),
        }
        with pytest.raises(ValueError, match=r"'reward' of shape \(2,\).*got \(3,\)"):
            Episodes().add_batch(batch, [0, 1])

    def test_a_bad_image_is_named(self):
        images = {0: {"image": np.zeros((4, 4, 3))}}
        batch = {key: value[None] for key, value in transition(first=True).items()}
        with pytest.raises(ValueError, match="'image' of env 0"):
            Episodes().add_batch(batch, [0], images=images)

    def test_a_refused_batch_changes_nothing(self):
        episodes = Episodes()
        with pytest.raises(ValueError):
            episodes.add_batch({**transition(first=True), "reward": np.zeros(3)}, [0])
        assert counts(episodes.result()) == (0, 0, 0, 0)

    def test_an_empty_batch_is_nothing(self):
        empty = {"reward": [], "is_first": [], "is_last": []}
        assert Episodes().add_batch(empty, []) == []


class Model:
    """A reference implementation of `Episodes`: a list of steps per env."""

    def __init__(self, timeout):
        self.timeout = timeout
        self.open = {}
        self.seen = {}
        self.counts = collections.Counter()
        self.finished = []

    def expire(self, now):
        for key in list(self.open):
            if now - self.seen[key] > self.timeout:
                del self.open[key]
                self.counts["abandoned"] += 1

    def add(self, step, env, is_eval, now):
        self.expire(now)
        key = (env, is_eval)
        if step["is_first"]:
            if len(self.open.get(key, [])) > 1:
                self.counts["abandoned"] += 1
                del self.open[key]
            if key not in self.open:
                self.counts["starts"] += 1
            self.open[key] = []
        if key not in self.open:
            return []
        self.seen[key] = now
        self.open[key].append(step)
        if not step["is_last"]:
            return []
        steps = self.open.pop(key)
        self.counts["ends"] += 1
        self.finished.append((is_eval, steps))
        prefix = "eval_" if is_eval else ""
        score = sum(float(step["reward"]) for step in steps)
        return [(f"{prefix}episode/score", score, len(steps) - 1)]

    def result(self, now):
        self.expire(now)
        means = collections.defaultdict(list)
        for is_eval, steps in self.finished:
            prefix = "eval_epstats" if is_eval else "epstats"
            rewards = np.float32([step["reward"] for step in steps])
            changes = np.abs(np.diff(rewards)) >= 0.01
            means[f"{prefix}/reward_rate"].append(changes.sum() / max(1, changes.size))
            values = [float(step["log/x"]) for step in steps]
            means[f"{prefix}/log/x/avg"].append(np.mean(values))
            means[f"{prefix}/log/x/max"].append(max(values))
            means[f"{prefix}/log/x/sum"].append(sum(values))
        result = {name: np.mean(values) for name, values in means.items()}
        for key in ("starts", "ends", "abandoned"):
            result[f"parallel/ep_{key}"] = self.counts[key]
        result["parallel/ep_states"] = len(self.open)
        self.counts.clear()
        self.finished.clear()
        return result


ROWS = st.tuples(
    st.integers(0, 4),  # env
    st.integers(-3, 3),  # reward
    st.integers(-3, 3),  # log/x
    st.sampled_from(["step", "step", "step", "first", "last", "both"]),
)
BATCHES = st.tuples(
    st.lists(ROWS, max_size=8),
    st.booleans(),  # is_eval
    st.sampled_from([0, 0, 3, 6, 11]),  # seconds before the batch
    st.booleans(),  # whether to ask for the result afterwards
)


def check_against_model(batches):
    clock = Clock()
    episodes, model = Episodes(timeout=10, clock=clock), Model(timeout=10)
    for rows, is_eval, pause, ask in batches:
        clock.now += pause
        steps = [
            transition(
                reward / 2,
                kind in ("first", "both"),
                kind in ("last", "both"),
                **{"log/x": np.float32(value)},
            )
            for _, reward, value, kind in rows
        ]
        envs = [env for env, *_ in rows]
        expected = []
        for step, env in zip(steps, envs):
            expected += model.add(step, env, is_eval, clock.now)
        keys = ("reward", "is_first", "is_last", "log/x")
        batch = {key: np.array([step[key] for step in steps]) for key in keys}
        finished = episodes.add_batch(batch, np.array(envs, int), is_eval)
        prefix = "eval_" if is_eval else ""
        assert [
            (name, item[name], item[f"{prefix}episode/length"])
            for item in finished
            for name in item
            if name.endswith("/score")
        ] == expected
        if ask:
            assert episodes.result() == pytest.approx(model.result(clock.now))
    assert episodes.result() == pytest.approx(model.result(clock.now))


@settings(max_examples=50)
@given(st.lists(BATCHES, max_size=20))
def test_interleaved_envs_agree_with_a_simple_model(batches):
    check_against_model(batches)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.lists(BATCHES, max_size=60))
def test_interleaved_envs_agree_with_a_simple_model_over_long_runs(batches):
    check_against_model(batches)
