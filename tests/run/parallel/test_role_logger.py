"""The logger role without its server."""

import json
import time

import numpy as np
import pytest
from loop_testing import Notes
from role_testing import Background, make_args
from waiting_testing import wait_until

from embodied.rpc import Unanswered
from embodied.run.live import record_events
from embodied.run.parallel.logger import LoggerRole


def make_role(**changes):
    notes = Notes()
    return LoggerRole(notes, make_args(**changes)), notes


def batch(envids, is_eval=False, reward=1.0, first=False, last=False, **more):
    size = len(envids)
    return {
        "reward": np.full(size, reward, np.float32),
        "is_first": np.full(size, first),
        "is_last": np.full(size, last),
        "envid": np.array(envids, np.int32),
        "is_eval": np.broadcast_to(np.asarray(is_eval), size),
        **more,
    }


class TestPauses:
    """Episodes of envs that make no steps for longer than the timeout."""

    def play(self, pause, others):
        now = [0.0]
        notes = Notes()
        role = LoggerRole(notes, make_args(episode_timeout=180.0), lambda: now[0])
        role.tran(batch([0], first=True))
        for _ in range(pause):
            now[0] += 1.0
            if others:
                role.tran(batch([1]))
        role.tran(batch([0], last=True))
        return notes.values("episode/score")

    def test_a_pause_of_all_abandons_no_episode(self):
        assert self.play(pause=200, others=False) == [2.0]

    def test_an_env_that_stays_away_while_others_step_is_given_up(self):
        assert self.play(pause=200, others=True) == []

    def test_not_before_the_timeout(self):
        assert self.play(pause=170, others=True) == [2.0]


class TestSteps:
    def test_only_training_counts(self):
        role, notes = make_role()
        assert role.tran(batch([0, 1, 2], is_eval=[False, True, False])) == 2
        assert role.tran(batch([1], is_eval=True)) == 2
        assert int(notes.step) == 2

    def test_a_wait_ends_with_the_step(self):
        role, _ = make_role()
        assert role.wait_step(0) == 0
        with Background(role.wait_step, 3) as task:
            role.tran(batch([0, 1]))
            role.tran(batch([7], is_eval=True))
            assert task.running
            role.tran(batch([0, 1]))
        assert task.result == 4

    def test_closing_ends_a_wait_without_an_answer(self):
        role, notes = make_role()
        with Background(role.wait_step, 3) as task:
            role.close()
        assert isinstance(task.error, Unanswered)
        assert notes.closed and notes.writes

    def test_the_step_comes_back(self):
        role, _ = make_role()
        role.tran(batch([0, 1, 2]))
        other, notes = make_role()
        other.load(role.save())
        assert int(notes.step) == 3
        assert other.tran(batch([0])) == 4


class TestEpisodes:
    def play(self, role, envids, is_eval, reward, **more):
        role.tran(batch(envids, is_eval, 0.0, first=True, **more))
        role.tran(batch(envids, is_eval, reward, **more))
        role.tran(batch(envids, is_eval, reward, last=True, **more))

    def test_scores_of_training_and_evaluation_are_apart(self):
        role, notes = make_role()
        self.play(role, [0], False, 1.0)
        self.play(role, [0], True, 5.0)
        assert notes.values("episode/score") == [2.0]
        assert notes.values("eval_episode/score") == [10.0]
        assert notes.values("episode/length") == [2]

    def test_log_keys_are_summarised(self):
        role, notes = make_role()
        self.play(role, [0], False, 1.0, **{"log/found": np.array([3.0], np.float32)})
        role.close()
        assert notes.values("epstats/log/found/sum") == [9.0]
        assert notes.values("epstats/log/found/max") == [3.0]

    def test_the_filmed_env_becomes_a_video(self):
        role, notes = make_role()
        images = {"image": np.full((4, 4, 3), 9, np.uint8)}
        film = {"images": images, "image_envid": 1}
        self.play(role, [0, 1], False, 1.0, **film)
        role.close()
        (video,) = notes.values("epstats/policy_image")
        assert video.shape == (3, 4, 4, 3) and (video == 9).all()

    def test_an_episode_of_which_steps_are_missing_is_not_reported(self):
        role, notes = make_role()
        role.tran(batch([0, 1], first=True))
        images = {"image": np.zeros((4, 4, 4), np.uint8)}  # Of four channels.
        film = {"images": images, "image_envid": 1}
        with Background(role.wait_step, 4) as waiter:
            with pytest.raises(ValueError, match="1 or 3 channels"):
                role.tran(batch([0, 1], **film))
        assert waiter.error is None, "the steps were counted"
        role.tran(batch([0, 1], last=True))
        assert notes.values("episode/score") == []
        self.play(role, [0], False, 1.0)
        assert notes.values("episode/score") == [2.0]
        role.close()
        assert notes.values("parallel/ep_abandoned") == [2]


class TestWriting:
    def test_metrics_are_added_and_written_when_it_is_time(self):
        role, notes = make_role(log_every=-1)
        role.add({"train/loss": 2.0})
        assert notes.values("train/loss") == [2.0] and notes.writes == 1
        role, notes = make_role(log_every=0)
        role.add({"train/loss": 2.0})
        assert notes.writes == 0
        role.save()
        assert notes.writes == 1

    def test_rates_are_of_training_steps(self):
        role, notes = make_role(log_every=-1)
        role.tran(batch([7], is_eval=True))
        assert notes.values("fps/env") == []
        role.tran(batch([0, 1]))
        (rate,) = notes.values("fps/env")
        assert rate > 0

    def test_the_bottleneck_is_named(self):
        role, notes = make_role(log_every=-1)
        role.add({"timer/learner/wait": 0.01})
        role.tran(batch([0]))
        (line,) = notes.values("parallel/bottleneck")
        assert line.startswith("learner: ")

    def test_phases_before_training_are_told_at_once(self):
        role, notes = make_role(log_every=0)
        for updates in (0, 1, 2):
            role.add({"parallel/updates": updates})
        assert notes.values("parallel/bottleneck") == ["compiling", "training begins"]
        assert notes.writes == 2

    def test_before_the_first_batch_the_replay_is_being_filled(self, caplog):
        role, notes = make_role(log_every=-1)
        role.add({"timer/actor/policy": 0.9})
        with caplog.at_level("INFO", "embodied"):
            role.tran(batch([0]))
        assert set(notes.values("parallel/bottleneck")) == {"filling the replay"}
        assert caplog.messages[-1].endswith(" steps/s. Now: filling the replay.")

    def test_every_line_while_it_compiles_says_so(self):
        role, notes = make_role(log_every=-1)
        role.tran(batch([0]))
        for _ in range(3):
            role.add({"parallel/updates": 0})
        assert set(notes.values("parallel/bottleneck")) == {"compiling"}
        assert len(notes.values("parallel/bottleneck")) >= 3

    def test_without_steps_nobody_is_slow(self):
        role, notes = make_role(log_every=-1)
        role.add({"timer/learner/wait": 0.01})
        assert notes.values("parallel/bottleneck") == []

    @pytest.mark.parametrize("has_terminal", [False, True])
    def test_a_terminal_shows_lines_itself(self, caplog, has_terminal):
        role, notes = make_role(log_every=-1)
        notes.has_terminal = has_terminal
        role.add({"timer/learner/wait": 0.01})
        with caplog.at_level("INFO", "embodied"):
            for _ in range(3):
                role.tran(batch([0]))
        told = "Bottleneck: learner: it waits for batches 1% of the time."
        assert all(told in message for message in caplog.messages)
        # Beside a terminal's line, which only has the role's name, it comes once.
        assert len(caplog.messages) == (1 if has_terminal else 3)

    def test_several_threads(self):
        role, notes = make_role(log_every=-1)

        def run(envid):
            for _ in range(100):
                role.tran(batch([envid]))
                role.add({"x": 1.0})

        tasks = [Background(run, envid) for envid in range(4)]
        for task in tasks:
            task.__enter__()
        for task in tasks:
            task.join()
            assert task.error is None
        wait_until(lambda: int(notes.step) == 400)
        assert len(notes.values("x")) == 400


def test_transitions_that_do_not_fit_are_refused():
    role, _ = make_role()
    with pytest.raises(KeyError, match="envid"):
        role.tran({"reward": np.zeros(1)})
    with pytest.raises(ValueError, match="reward"):
        role.tran({**batch([0, 1]), "reward": np.zeros(3, np.float32)})


class TestLive:
    """The status of a run for `live.json`."""

    def test_steps_scores_and_metrics_are_those_of_this_moment(self):
        role, _ = make_role()
        assert role.live()["scores"] == []
        role.tran(batch([0, 1], first=True))
        role.tran(batch([0], reward=2.0, last=True))
        role.tran(batch([1], is_eval=True, first=True))
        role.add({"server/actor/calls": 3, "train/loss": 1.0, "usage/gc/top": "text"})
        live = role.live()
        assert live["step"] == 3 and live["episodes"] == 1
        assert live["scores"] == [(3, 3.0)]
        assert live["metrics"] == {"server/actor/calls": 3}
        assert live["reported"] > 1e9

    def test_hops_are_shown_while_they_are_reported(self, monkeypatch):
        role, _ = make_role()
        now = [1e9]
        monkeypatch.setattr(time, "time", lambda: now[0])
        hop = {"calls": 7.0, "latency": 0.01}
        told = {"role": "actor", "hops": {"server/actor": hop}, "rates": {"policy": 3}}
        role.tell_hops(json.dumps(told))
        live = role.live()
        assert live["hops"] == {"server/actor": hop}
        assert live["rates"]["policy"] == 3 and "env" in live["rates"]
        now[0] += 11
        assert role.live()["hops"] == {} and "policy" not in role.live()["rates"]

    def test_hosts_come_and_go(self, tmp_path, monkeypatch):
        role, _ = make_role()
        now = [1e9]
        monkeypatch.setattr(time, "time", lambda: now[0])
        told = {"host": "far", "pid": 7, "roles": {"env": {"workers": 2}}}
        with record_events(tmp_path):
            role.tell_roles(json.dumps(told))
            role.tell_roles(json.dumps(told))
            assert role.live()["hosts"]["far (7)"]["roles"]["env"]["workers"] == 2
            now[0] += 11
            assert role.live()["hosts"] == {}
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert texts == ["Host far (7) connected.", "Host far (7) disconnected."]
