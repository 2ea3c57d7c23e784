"""Training in one process: what is collected, trained on, reported and logged."""

import json
import time

import elements
import numpy as np
import pytest
from loop_testing import LENGTH, Task
from run_testing import START, FailingAgent, NotingAgent, Parts, contents, newest_step

from embodied.driver import EnvError

MEASURED = ("fps/", "timer/", "usage/")  # These differ from run to run.


class Rising(Task):
    """Pays more from the sixth episode on."""

    def step(self, action):
        step = super().step(action)
        step["reward"] *= np.float32(7 if self._episode >= 5 else 1)
        return step


class TestEnd:
    def test_it_ends_at_the_step_asked_for(self, tmp_path):
        parts = Parts(tmp_path, steps=61, envs=2)
        result = parts.train()
        assert (result.step, result.steps) == (62, 62), "both envs step together"
        assert int(parts.logger.step) == 62
        assert parts.logger.closed

    def test_it_ends_after_the_duration(self, tmp_path):
        parts = Parts(tmp_path, steps=1e10, duration=0.3)
        start = time.monotonic()
        result = parts.train()
        assert 0.3 <= result.seconds <= time.monotonic() - start < 20
        assert result.step == newest_step(tmp_path) > 0

    def test_a_run_that_has_ended_does_nothing_more(self, tmp_path):
        Parts(tmp_path, steps=50).train()
        again = Parts(tmp_path, steps=50)
        assert again.train().steps == 0
        assert int(again.logger.step) == 50
        assert again.agent.policies == []


class TestCollecting:
    def test_every_step_is_stored_once(self, tmp_path):
        parts = Parts(tmp_path, steps=60, envs=2)
        parts.train()
        length = parts.args.batch_length + parts.args.replay_context
        starts = [divmod(step, LENGTH + 1) for step in range(30 - length + 1)]
        expected = {(env, *where) for env in range(2) for where in starts}
        assert contents(parts.replay) == expected
        assert parts.replay.stats()["total_inserts"] == 60

    def test_the_policy_acts_in_train_mode_on_all_envs(self, tmp_path):
        parts = Parts(tmp_path, steps=30, envs=3, env_offset=10)
        parts.train()
        assert parts.agent.policies == [("train", [10, 11, 12])] * 10

    def test_episodes_are_logged_at_the_step_they_end(self, tmp_path):
        parts = Parts(tmp_path, steps=60, envs=2)
        result = parts.train()
        logger = parts.logger
        assert logger.values("episode/score") == [LENGTH] * 10
        assert logger.values("episode/length") == [LENGTH] * 10
        assert logger.steps("episode/score")[:4] == [11, 12, 23, 24]
        assert (result.episodes, result.mean_score) == (10, LENGTH)

    def test_the_result_has_the_mean_score_of_the_last_ten_episodes(self, tmp_path):
        parts = Parts(tmp_path, steps=90, envs=1)
        parts.task = Rising
        result = parts.train()
        assert (result.episodes, result.mean_score) == (15, 7.0 * LENGTH)

    def test_envs_in_processes_give_the_same(self, tmp_path):
        runs = []
        for debug in (True, False):
            parts = Parts(tmp_path / str(debug), steps=40, debug=debug)
            parts.envs = None
            parts.make_env = Task
            parts.train()
            runs.append((contents(parts.replay), parts.logger.rows[:8]))
        assert runs[0] == runs[1]


class TestTraining:
    @pytest.mark.parametrize("ratio", [1.0, 7.3, 100.0])
    def test_trained_steps_keep_to_the_ratio(self, tmp_path, ratio):
        parts = Parts(tmp_path, steps=400, envs=2, train_ratio=ratio)
        result = parts.train()
        assert 0 < result.updates * 4 * 6 - ratio * (400 - START) <= 4 * 6

    @pytest.mark.parametrize("ratio", [1.0, 1000.0])
    def test_the_first_update_comes_alone_when_the_replay_is_filled(
        self, tmp_path, ratio
    ):
        parts = Parts(tmp_path, steps=START - 2, envs=2, train_ratio=ratio)
        assert parts.train().updates == 0
        other = Parts(tmp_path / "other", steps=START, envs=2, train_ratio=ratio)
        assert other.train().updates == 1, "nothing is made up for"
        assert {batch["where"].shape for batch in other.agent.trained} == {(4, 7, 3)}

    def test_a_small_replay_is_filled_sooner(self, tmp_path):
        parts = Parts(tmp_path, steps=22, envs=2, train_ratio=1.0)
        make_replay = parts.make_replay
        parts.make_replay = lambda: make_replay(capacity=10)
        assert parts.train().updates == 1

    def test_another_ratio_counts_from_there_on(self, tmp_path):
        Parts(tmp_path, steps=100, envs=2, train_ratio=1.0).train()
        parts = Parts(tmp_path, steps=100, envs=2, train_ratio=24.0)
        assert parts.train().updates == 0, "there were no steps at this ratio"
        parts = Parts(tmp_path, steps=110, envs=2, train_ratio=24.0)
        assert parts.train().updates == 1 + 8, "the first two steps begin it"

    @pytest.mark.parametrize("ratio", [0.0, -1.0])
    def test_without_a_ratio_there_is_an_update_after_each_turn(self, tmp_path, ratio):
        parts = Parts(tmp_path, steps=START + 20, envs=2, train_ratio=ratio)
        assert parts.train().updates == 11

    @pytest.mark.parametrize(("consec", "context"), [(1, 0), (3, 2)])
    def test_batches_are_cut_from_longer_sequences(self, tmp_path, consec, context):
        parts = Parts(
            tmp_path, steps=300, envs=2, consec_train=consec, replay_context=context
        )
        parts.train()
        batches = parts.agent.trained
        assert len(batches) > 2 * consec
        for index, batch in enumerate(batches):
            assert batch["where"].shape == (4, context + 6, 3)
            assert (batch["consec"] == index % consec).all()
            assert set(batch) == {
                *("where", "reward", "is_first", "is_last", "is_terminal"),
                *("action", "consec", "stepid"),
            }
        if consec > 1:
            ends = batches[0]["stepid"][:, -context:]
            assert (ends == batches[1]["stepid"][:, :context]).all()

    def test_what_training_found_out_goes_to_the_replay(self, tmp_path):
        class Refreshing(NotingAgent):
            def policy(self, carry, obs, mode="train"):
                carry, actions, _ = super().policy(carry, obs, mode)
                return carry, actions, {"dyn/deter": np.zeros((len(actions), 2), "f4")}

            def train(self, carry, batch):
                carry, _, metrics = super().train(carry, batch)
                shape = (*batch["stepid"].shape[:2], 2)
                latents = np.full(shape, self.updates, np.float32)
                update = {"stepid": batch["stepid"], "dyn/deter": latents}
                return carry, {"replay": update}, metrics

        parts = Parts(tmp_path, steps=100, envs=1)
        parts.make_agent = Refreshing
        parts.train()
        latents = parts.replay.sample(100)["dyn/deter"]
        assert latents.shape == (100, 1, 2)
        assert latents.max() > 5
        assert parts.replay.stats()["total_updates"] > 5

    def test_the_carry_goes_from_update_to_update(self, tmp_path):
        class Carrying(NotingAgent):
            def init_train(self, batch_size):
                return [batch_size]

            def train(self, carry, batch):
                _, outputs, _ = super().train(carry, batch)
                return [*carry, len(carry)], outputs, {"carry": carry[-1]}

        parts = Parts(tmp_path, steps=50)
        parts.make_agent = Carrying
        updates = parts.train().updates
        mean = (4 + sum(range(1, updates))) / updates
        assert parts.logger.values("train/carry") == [pytest.approx(mean)]


class TestReports:
    def test_they_come_as_soon_as_there_is_enough_data(self, tmp_path):
        parts = Parts(tmp_path, steps=20, report_every=-1.0, train_ratio=1.0)
        parts.train()
        assert len(parts.agent.reported) == 3, "after 16, 18 and 20 steps"
        assert parts.logger.steps("report/batch_length") == [16, 18, 20]
        assert parts.logger.values("report/batch_length") == [4] * 3

    def test_number_and_length_of_batches(self, tmp_path):
        parts = Parts(
            tmp_path, steps=18, report_every=-1.0, consec_report=2, report_batches=3
        )
        parts.train()
        batches = parts.agent.reported
        assert len(batches) == 2 * 2 * 3
        consec = [int(batch["consec"][0, 0]) for batch in batches]
        assert consec == [0, 1] * 6
        assert {batch["where"].shape for batch in batches} == {(4, 1 + 3, 3)}

    def test_samples_of_a_report_are_new_and_change_no_training(self, tmp_path):
        runs = []
        for name, every in (("with", -1.0), ("without", 0.0)):
            parts = Parts(tmp_path / name, steps=60, report_every=every)
            parts.train()
            runs.append([batch["where"] for batch in parts.agent.trained])
            seen = [batch["where"][..., 1].max() for batch in parts.agent.reported]
            assert max(seen, default=4) == 4, "the newest episode"
        assert np.array_equal(*runs)

    def test_the_carry_is_fresh_in_each_report(self, tmp_path):
        class Carrying(NotingAgent):
            def init_report(self, batch_size):
                return 0

            def report(self, carry, batch):
                return carry + 1, {"carry": carry, "video": np.zeros((2, 4, 4, 3))}

        parts = Parts(tmp_path, steps=20, report_every=-1.0, report_batches=3)
        parts.make_agent = Carrying
        parts.train()
        assert parts.logger.values("report/carry") == [1.0] * 3, "the mean of 0, 1, 2"
        assert parts.logger.values("report/video")[0].shape == (2, 4, 4, 3)

    def test_zero_means_never(self, tmp_path):
        parts = Parts(tmp_path, steps=60, report_every=0.0)
        parts.train()
        assert parts.agent.reported == []


class TestLogging:
    def test_names(self, tmp_path):
        parts = Parts(tmp_path, steps=40, report_every=-1.0, save_every=-1.0)
        parts.train()
        assert parts.logger.names() >= {
            "episode/score",
            "episode/length",
            "epstats/reward_rate",
            "epstats/log/count/max",
            "parallel/ep_ends",
            "fps/policy",
            "fps/train",
            "timer/collect",
            "timer/train",
            "timer/report",
            "timer/save",
            "train/reward_mean",
            "report/reward_mean",
            "replay/items",
            "replay/replay_ratio",
            "usage/psutil/proc_ram_gb",
        }
        assert not [name for name in parts.logger.names() if "eval" in name]

    def test_rates_are_zero_and_not_missing_before_the_first_update(self, tmp_path):
        parts = Parts(tmp_path, steps=4, log_every=-1.0)
        assert parts.train().updates == 0
        assert parts.logger.values("fps/train") == [0, 0]
        assert len(parts.logger.values("timer/train")) == 2

    def test_usage_can_be_left_out(self, tmp_path):
        parts = Parts(tmp_path, steps=20, usage={"psutil": False})
        parts.train()
        assert not [name for name in parts.logger.names() if "usage" in name]

    def test_means_cover_all_updates_since_the_last_write(self, tmp_path):
        parts = Parts(tmp_path, steps=60, log_every=-1.0, train_ratio=24.0)
        result = parts.train()
        # One update when the replay is filled, then two per turn: one per env step.
        assert parts.logger.values("train/updates")[:3] == [1, 2.5, 4.5]
        assert parts.logger.writes == 30, "every turn; there is nothing new at the end"
        assert result.updates == 1 + 60 - START

    def test_what_came_after_the_last_write_is_written_at_the_end(self, tmp_path):
        parts = Parts(tmp_path, steps=60, log_every=1e6)
        parts.train()
        assert parts.logger.writes == 1
        assert parts.logger.steps("fps/policy") == [60]

    def test_a_logger_of_elements_will_do(self, tmp_path):
        rows = []
        parts = Parts(tmp_path, steps=60)
        parts.make_logger = lambda: elements.Logger(
            elements.Counter(), [rows.extend], multiplier=4
        )
        assert parts.train().step == 60
        assert {"episode/score", "fps/train"} <= {name for _, name, _ in rows}
        assert max(step for step, _, _ in rows) == 240


class TestReproducible:
    def run(self, logdir, seed=0, save_every=0.0):
        parts = Parts(
            logdir,
            steps=150,
            log_every=-1.0,
            report_every=-1.0,
            save_every=save_every,
            consec_train=2,
            train_ratio=4.0,
        )

        def make_agent():
            parts.agent = NotingAgent(seed)
            return parts.agent

        parts.make_agent = make_agent
        parts.train()
        return parts

    def test_two_runs_with_one_seed_are_equal_bit_for_bit(self, tmp_path):
        first = self.run(tmp_path / "1")
        second = self.run(tmp_path / "2", save_every=0.5)
        assert len(first.agent.trained) > 15
        for one, other in zip(first.agent.trained, second.agent.trained, strict=True):
            for key in one.keys() - {"stepid"}:  # Step ids are globally unique.
                assert np.array_equal(one[key], other[key]), key
        assert self.metrics(first) == self.metrics(second)
        samples = [parts.replay.sample(500) for parts in (first, second)]
        for key in samples[0].keys() - {"stepid"}:
            assert np.array_equal(samples[0][key], samples[1][key]), key

    def test_another_seed_is_another_run(self, tmp_path):
        first, second = self.run(tmp_path / "1"), self.run(tmp_path / "2", seed=1)
        actions = [parts.replay.sample(500)["action"] for parts in (first, second)]
        assert not np.array_equal(*actions)

    def metrics(self, parts):
        rows = [row for row in parts.logger.rows if not row[1].startswith(MEASURED)]
        assert len(rows) > 200
        return [(step, name, np.asarray(value).tolist()) for step, name, value in rows]


class TestErrors:
    def test_a_failing_env_ends_it_and_keeps_what_was_learned(self, tmp_path):
        class Failing(Task):
            def step(self, action):
                if self._index == 1 and self._episode == 4:
                    raise OSError("the env broke")
                return super().step(action)

        parts = Parts(tmp_path, steps=1000)
        parts.task = Failing
        with pytest.raises(EnvError, match="Env 1 failed with OSError: the env broke"):
            parts.train()
        step = newest_step(tmp_path)
        assert step == int(parts.logger.step) > 40
        assert (parts.logger.writes, parts.logger.closed) == (1, True)
        mean = (parts.agent.updates + 1) / 2
        assert parts.logger.values("train/updates") == [mean], "of all updates"
        healthy = Parts(tmp_path, steps=step)
        healthy.train()
        assert healthy.agent.updates == parts.agent.updates

    def test_a_failing_agent_saves_nothing(self, tmp_path):
        parts = Parts(tmp_path, steps=1000)
        parts.make_agent = FailingAgent
        with pytest.raises(FloatingPointError):
            parts.train()
        assert newest_step(tmp_path) == 0, "that of the start"
        assert parts.logger.closed

    def test_several_hosts_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="replicas=1, got 2"):
            Parts(tmp_path, replicas=2).train()

    def test_environments_are_closed(self, tmp_path):
        closed = []

        class Closing(Task):
            def close(self):
                closed.append(self._index)

        parts = Parts(tmp_path, steps=10, envs=3)
        parts.task = Closing
        parts.train()
        assert closed == [0, 1, 2]


class TestLive:
    def test_events_have_the_first_save_and_the_last(self, tmp_path):
        Parts(tmp_path, steps=40).train()
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        told = [(x["kind"], x.get("step")) for x in events if x["kind"] != "step"]
        assert told == [("start", None), ("save", 0), ("save", 40), ("end", None)]

    def test_the_newest_score_has_the_step_at_which_it_came(self, tmp_path):
        Parts(tmp_path, steps=60, envs=2).train()
        live = json.loads((tmp_path / "live.json").read_text())
        assert (live["state"], live["step"], live["episodes"]) == ("ended", 60, 10)
        step, score = live["scores"][-1]
        assert score == LENGTH and 0 < step <= 60
