"""The actor without its server."""

import logging

import numpy as np
import pytest
from role_testing import Background, CountingAgent, FakeClient, make_args, observations
from waiting_testing import wait_until

import embodied
from embodied.replay import ReplayMemoryError
from embodied.rpc import Disconnected, RemoteError, Unanswered
from embodied.run.parallel import wiring
from embodied.run.parallel.actor import Actor, RunOver, wait_for_envs
from embodied.run.parallel.observations import ObservationError


class Setting:
    """An actor whose clients are fakes."""

    def __init__(self, envs=4, agent=None, replay=None, **kwargs):
        self.agent = agent or CountingAgent()
        self.replay = replay or FakeClient()
        self.logger = FakeClient()
        self.fatal = []
        self.actor = Actor(
            self.agent,
            self.replay,
            self.logger,
            envs,
            on_fatal=self.fatal.append,
            **kwargs,
        )

    def step(self, envids, **changes):
        """Acts and publishes; returns the actions."""
        reply, message = self.actor.act(observations(envids, **changes))
        self.actor.publish(message)
        return reply["action"].tolist()

    def stored(self):
        return self.replay.sent("add_batch")[-1][0]

    def logged(self):
        return self.logger.sent("tran")[-1][0]


class TestAct:
    def test_reset_is_the_last_step(self):
        reply, _ = Setting().actor.act(observations([0, 1], is_last=[True, False]))
        assert set(reply) == {"action", "reset"}
        assert reply["reset"].tolist() == [True, False]

    def test_every_env_has_its_own_memory(self):
        setting = Setting()
        assert setting.step([0, 1]) == [1, 1]
        assert setting.step([1, 2]) == [2, 1]
        assert setting.step([2, 1, 0]) == [2, 3, 2]
        assert setting.step([0, 1], is_first=[True, False]) == [1, 4]

    def test_log_keys_reach_the_logger_alone(self):
        setting = Setting()
        setting.step([0])
        (_, keys), *_ = setting.agent.seen
        assert "log/count" not in keys and "envid" not in keys and "is_eval" not in keys
        assert "log/count" not in setting.stored()
        assert setting.logged()["log/count"].tolist() == [0]

    def test_evaluation_is_told_to_the_policy(self):
        setting = Setting()
        setting.step([0])
        setting.step([1], is_eval=True)
        assert [mode for mode, _ in setting.agent.seen] == ["train", "eval"]
        assert setting.stored()["is_eval"].tolist() == [True]

    def test_a_new_env_begins_anew_for_policy_and_replay_but_not_for_the_logger(self):
        setting = Setting()
        setting.step([0, 1], is_first=[False, True])
        assert setting.stored()["is_first"].tolist() == [True, True]
        assert setting.logged()["is_first"].tolist() == [False, True]
        setting.step([0, 1])
        assert setting.stored()["is_first"].tolist() == [False, False]

    def test_the_replay_gets_observations_actions_and_outputs(self):
        setting = Setting()
        setting.step([3, 1])
        stored = setting.stored()
        assert stored["envid"].tolist() == [3, 1]
        assert stored["action"].tolist() == [1, 1]
        assert stored["dyn/deter"].tolist() == [10.0, 10.0]
        assert stored["image"].shape == (2, 2, 2, 3)
        assert "reset" not in stored

    def test_the_logger_gets_no_images_but_those_of_one_env(self):
        setting = Setting()
        setting.step([5, 3])
        setting.step([4])
        messages = [arguments[0] for arguments in setting.logger.sent("tran")]
        assert all("image" not in message for message in messages)
        assert messages[0]["image_envid"] == 3
        assert messages[0]["images"]["image"].shape == (2, 2, 3)
        assert "images" not in messages[1]
        assert "dyn/deter" not in messages[0] and "action" not in messages[0]

    def test_steps_of_two_workers_with_the_same_env_do_not_follow_each_other(self):
        setting = Setting()
        assert setting.step([0, 1]) == [1, 1]
        assert setting.step([0, 1, 0]) == [1, 2, 1]
        assert setting.stored()["is_first"].tolist() == [True, False, True]
        assert setting.step([1, 0]) == [3, 1]
        assert setting.stored()["is_first"].tolist() == [False, True]

    def test_more_envs_than_expected_begin_anew(self, caplog):
        setting = Setting(envs=2)
        with caplog.at_level(logging.INFO, "embodied.run"):
            assert setting.step([0, 1]) == [1, 1]
            assert setting.step([0, 1, 2]) == [1, 1, 1]
        assert "more environments than expected" in caplog.text
        assert setting.stored()["is_first"].tolist() == [True, True, True]
        assert setting.step([0, 1, 2]) == [2, 2, 2]

    def test_an_env_that_another_worker_steps_begins_anew(self):
        setting = Setting()
        setting.step([0, 1])
        setting.actor.free([0, 17])
        assert setting.actor.stats()["parallel/envs"] == 1
        assert setting.step([0, 1]) == [1, 2]

    def test_an_env_that_was_away_goes_on(self):
        setting = Setting()
        setting.step([0, 1])
        setting.actor.leave([0, 17])
        assert setting.actor.stats()["parallel/envs"] == 1
        assert setting.step([0, 1]) == [2, 2]
        assert setting.actor.stats()["parallel/envs"] == 2

    def test_its_place_is_for_others_who_need_it(self):
        setting = Setting()
        setting.step(range(4))  # As many as there are slots.
        setting.actor.leave([0, 1])
        assert setting.step([2, 3, 8, 9]) == [2, 2, 1, 1]
        assert setting.step([8, 9]) == [2, 2], "nobody else began anew"

    def test_in_the_middle_of_an_episode_a_new_one_begins(self):
        setting = Setting()
        setting.actor.owns = lambda envid: envid < 2
        obs = observations([0, 1, 2], is_first=[False, True, False])
        reply, message = setting.actor.act(obs)
        assert reply["reset"].tolist() == [True, False, False], "not of strangers"
        setting.actor.publish(message)
        assert setting.stored()["envid"].tolist() == [1, 2]
        assert setting.logged()["envid"].tolist() == [1, 2]
        reply, message = setting.actor.act(observations([0], is_first=[True]))
        assert not reply["reset"].any()
        setting.actor.act(observations([0]))
        assert setting.actor.act(observations([0]))[0]["reset"].tolist() == [False]

    def test_nothing_is_published_of_a_batch_that_is_all_lost(self):
        setting = Setting()
        setting.actor.owns = lambda envid: True
        reply, message = setting.actor.act(observations([0, 1]))
        assert reply["reset"].all()
        setting.actor.publish(message)
        assert not setting.replay.sent("add_batch")

    def test_another_env_is_filmed_when_the_first_has_left(self):
        setting = Setting()
        setting.step([0, 1])
        setting.actor.leave([0])
        setting.step([1])
        assert setting.logged()["image_envid"] == 1

    def test_threads_do_not_disturb_each_other(self):
        setting = Setting(envs=8)

        def run(envids):
            return [
                setting.actor.act(observations(envids))[0]["action"].tolist()
                for _ in range(200)
            ]

        tasks = [Background(run, envids) for envids in ([0, 1], [2], [3, 4, 5], [6])]
        for task in tasks:
            task.__enter__()
        for task, size in zip(tasks, (2, 1, 3, 1)):
            task.join()
            assert task.error is None
            assert task.result == [[step] * size for step in range(1, 201)]

    def test_workers_are_sent_away_at_the_end(self):
        setting = Setting()
        setting.actor.over = True
        with pytest.raises(RunOver):
            setting.actor.act(observations([0]))

    @pytest.mark.parametrize("key", ["envid", "is_eval", "reward", "is_last"])
    def test_what_is_missing_is_named(self, key):
        obs = observations([0])
        del obs[key]
        with pytest.raises(ValueError, match=key):
            Setting().actor.act(obs)

    @pytest.mark.parametrize("knows", [True, False], ids=["spaces", "first batch"])
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"image": np.zeros((1, 3, 3, 3), np.uint8)}, r"'image' of env 7 as uint8"),
            ({"image": np.zeros((1, 2, 2, 3))}, r"got float64 of shape \(2, 2, 3\)"),
            ({"is_first": np.zeros(1, np.float32)}, "'is_first' .* as bool"),
            ({"envid": np.zeros((1, 2), np.int32)}, "'envid'"),
            ({"envid": np.zeros(1)}, "'envid'"),
            ({"other": np.zeros(1)}, "other of env 7 in addition"),
        ],
    )
    def test_mistakes_of_a_worker_are_not_fatal(self, knows, changes, message):
        agent = CountingAgent()
        if knows:
            agent.obs_space = {"image": embodied.Space(np.uint8, (2, 2, 3))}
        setting = Setting(agent=agent)
        assert setting.step([7]) == [1]
        with pytest.raises(ObservationError, match=message):
            setting.actor.act(observations([7], **changes))
        missing = observations([7])
        del missing["image"]
        with pytest.raises(ObservationError, match="key image as well"):
            setting.actor.act(missing)
        assert setting.fatal == []
        assert setting.step([7]) == [2]

    @pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, MemoryError])
    def test_failures_of_the_agent_are_fatal(self, kind):
        class Broken(CountingAgent):
            def policy(self, carry, obs, mode="train"):
                raise kind("device")

        setting = Setting(agent=Broken())
        with pytest.raises(Unanswered):
            setting.actor.act(observations([0]))
        assert [type(error) for error in setting.fatal] == [kind]


class TestPublish:
    def test_a_batch_that_was_not_stored_is_not_continued(self, caplog):
        answers = iter([None, RuntimeError("full"), None, None])
        replay = FakeClient(add_batch=lambda batch: next(answers))
        setting = Setting(replay=replay)
        setting.step([0, 1])
        setting.step([0])
        assert "did not store a batch: full" in caplog.text
        setting.step([0, 1])
        assert setting.stored()["is_first"].tolist() == [True, False]

    def test_batches_that_are_lost_together_begin_one_episode(self):
        setting = Setting(replay=FakeClient(held=["add_batch"]))
        setting.actor.owns = lambda envid: True
        setting.step([0], is_first=[True])
        for _ in range(2):
            setting.step([0])
        first, second, third = setting.replay.open
        first.set_error(RuntimeError("gone"))
        setting.step([0])  # Here the error is noticed.
        reply, message = setting.actor.act(observations([0]))
        assert reply["reset"].tolist() == [True]
        setting.actor.publish(message)
        second.set_error(RuntimeError("gone"))
        setting.step([0], is_first=[True])
        third.set_error(RuntimeError("gone"))
        for _ in range(2):
            reply, message = setting.actor.act(observations([0]))
            assert reply["reset"].tolist() == [False]
            setting.actor.publish(message)

    def test_a_replay_without_memory_is_fatal(self):
        error = RemoteError("exception", "too large", "ReplayMemoryError")
        setting = Setting(replay=FakeClient(add_batch=error))
        setting.step([0])
        (fatal,) = setting.fatal
        assert isinstance(fatal, ReplayMemoryError) and str(fatal) == "too large"

    def test_after_the_end_lost_connections_do_not_matter(self):
        def gone(batch):
            raise Disconnected("closed")

        setting = Setting(replay=FakeClient(add_batch=gone))
        _, message = setting.actor.act(observations([0]))
        with pytest.raises(Disconnected):
            setting.actor.publish(message)
        setting.actor.over = True
        setting.actor.publish(message)

    def test_statistics_are_those_since_the_last_call(self):
        setting = Setting(server_stats=lambda: {"queue": 3})
        setting.step([0, 1])
        metrics = setting.actor.stats()
        assert metrics["fps/policy"] > 0 and metrics["parallel/envs"] == 2
        assert metrics["server/actor/queue"] == 3
        assert metrics["client/actor_replay/calls"] == 1
        assert 0 <= metrics["timer/actor/policy"] <= 1
        assert "fps/policy" not in setting.actor.stats()

    def test_progress_is_told_of_every_batch(self):
        told = []
        setting = Setting(progress=lambda: told.append(1))
        setting.step([0])
        setting.step([0])
        assert len(told) == 2


def test_images_are_found_by_dtype_and_shape():
    setting = Setting()
    _, message = setting.actor.act(
        observations(
            [0],
            flat=np.zeros((1, 3), np.uint8),
            depth=np.zeros((1, 2, 2, 1)),
            stack=np.zeros((1, 2, 2, 4), np.uint8),
        )
    )
    setting.actor.publish(message)
    assert set(setting.logged()["images"]) == {"image"}


@pytest.mark.parametrize(
    ("host", "keyfile", "command"),
    [
        ("10.0.0.1", "", "--run.actor_addr 10.0.0.1:5"),
        ("0.0.0.0", "run.keys", "--run.actor_addr HOST:5 --run.keyfile run.keys"),
    ],
)
def test_without_environments_it_says_what_to_run(
    monkeypatch, caplog, host, keyfile, command
):
    monkeypatch.setattr(wiring, "FIRST_NOTE", 0.0)
    monkeypatch.setattr(wiring, "STOP_SECONDS", 0.01)
    args = make_args(actor_addr=f"{host}:5", keyfile=keyfile)
    setting = Setting()
    with caplog.at_level(logging.INFO, "embodied.run"):
        with Background(wait_for_envs, setting.actor, args) as task:
            wait_until(lambda: caplog.messages)
            assert task.running
            setting.step([0])
    (note,) = caplog.messages
    assert note.startswith(f"The actor waits for environments at {host}:5. Start them")
    assert note.endswith(f": dreamerv3 --script parallel_envs {command}")
