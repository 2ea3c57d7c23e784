"""Programs that train and evaluate in one process, from the command line."""

import json
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dreamerv3.cli.config import read_config
from dreamerv3.main import load_config, main, make_replay, make_stream
from embodied.checkpoint import Checkpoint
from embodied.replay import selectors

SMALL = ["--configs", "debug", "--task", "grid_reach", "--random_agent", "True"]
SMALL += ["--logger.outputs", "jsonl", "--run.envs", "2", "--run.eval_envs", "2"]
SMALL += ["--batch_size", "4", "--batch_length", "8", "--report_length", "4"]


def arguments(logdir, *argv, script="train", steps=300):
    steps = ["--run.steps", str(steps)]
    return [*SMALL, "--logdir", str(logdir), "--script", script, *steps, *argv]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(logdir):
    merged = {}
    for line in read_lines(logdir / "metrics.jsonl"):
        merged.update(line)
    return merged


def step_of(logdir):
    return Checkpoint(logdir).newest().meta["step"]


class TestTrain:
    def test_it_trains_and_says_what_lies_where(self, tmp_path, capsys):
        argv = arguments(tmp_path, "--run.report_every", "-1", "--run.log_every", "-1")
        assert main(argv) == 0
        shown = capsys.readouterr().out
        assert "Training in 2 environments of grid_reach" in shown
        assert "300 steps and 64 updates in" in shown
        (row,) = [line for line in shown.splitlines() if line.startswith("  ckpt")]
        assert row.startswith("  ckpt, replay    the policy")
        assert f"--script eval_only --logdir {tmp_path} plays" in shown
        assert "metrics.jsonl" in shown
        metrics = read_metrics(tmp_path)
        assert metrics["step"] == 300
        for name in ("episode/score", "train/reward_mean", "report/reward_mean"):
            assert name in metrics
        assert metrics["train/batch_length"] == 8 + 1
        assert metrics["report/batch_length"] == 4 + 1
        assert metrics["timer/train"] > 0
        scores = read_lines(tmp_path / "scores.jsonl")
        assert all(set(score) == {"step", "episode/score"} for score in scores)
        assert read_config(tmp_path / "config.yaml").script == "train"

    def test_the_same_command_continues(self, tmp_path, capsys):
        assert main(arguments(tmp_path, steps=100)) == 0
        assert main(arguments(tmp_path, steps=160)) == 0
        shown = capsys.readouterr().out
        assert "Continuing at step 100, from checkpoint" in shown
        assert "60 steps and" in shown and "now at step 160" in shown
        assert step_of(tmp_path) == 160

    def test_timers_can_be_left_out(self, tmp_path):
        argv = arguments(tmp_path, "--logger.timer", "False", steps=50)
        assert main(argv) == 0
        names = read_metrics(tmp_path)
        assert "fps/policy" in names
        assert not [name for name in names if name.startswith("timer/")]

    def test_damaged_checkpoints_are_told_without_traceback(self, tmp_path, capsys):
        main(arguments(tmp_path, steps=20))
        for path in (tmp_path / "ckpt/agent").glob("*.safetensors"):
            path.write_bytes(b"x")
        assert main(arguments(tmp_path, steps=40)) == 1
        message = capsys.readouterr().err
        assert message.startswith("dreamerv3: No checkpoint in ")
        assert "move the folder away" in message

    def test_a_wrong_checkpoint_to_start_from_is_told(self, tmp_path, capsys):
        argv = arguments(tmp_path / "run", "--run.from_checkpoint", str(tmp_path))
        assert main(argv) == 1
        assert "run.from_checkpoint: expected the logdir" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("script", "flags", "word"),
        [
            ("train", ["--replicas", "2"], "replicas: expected 1"),
            ("train_eval", ["--run.eval_envs", "0"], "run.eval_envs: expected at"),
            ("eval_only", [], "run, which does not exist. Set another --logdir"),
            ("import_checkpoint", [], "run.from_checkpoint: expected the folder"),
        ],
    )
    def test_what_cannot_work_is_refused(self, tmp_path, capsys, script, flags, word):
        assert main(arguments(tmp_path / "run", *flags, script=script)) == 2
        assert word in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    def test_warnings_are_shown(self, tmp_path, capsys, monkeypatch):
        full = SimpleNamespace(total=10**12, free=0)
        monkeypatch.setattr("shutil.disk_usage", lambda _: full)
        assert main(arguments(tmp_path, steps=20)) == 1
        shown = capsys.readouterr()
        assert "WARNING: Step 0 was not saved. Too little space" in shown.out
        assert "There is no checkpoint yet" in shown.out
        assert "step 20, could not be saved" in shown.err


class TestEvaluation:
    def test_train_eval_keeps_scores_apart(self, tmp_path):
        argv = ["--run.report_every", "-1", "--run.eval_eps", "2"]
        assert main(arguments(tmp_path, *argv, script="train_eval", steps=60)) == 0
        metrics = read_metrics(tmp_path)
        for name in ("episode/score", "eval_episode/score", "eval/reward_mean"):
            assert name in metrics
        assert metrics["step"] == 60
        assert {"replay", "replay_eval"} <= {path.name for path in tmp_path.iterdir()}

    def test_eval_only_prints_the_score(self, tmp_path, capsys):
        main(arguments(tmp_path / "run", steps=50))
        source = ["--run.from_checkpoint", str(tmp_path / "run")]
        argv = arguments(tmp_path / "eval", *source, script="eval_only", steps=10**6)
        assert main([*argv, "--run.eval_eps", "20"]) == 0
        shown = capsys.readouterr().out
        assert "20 episodes of the agent of step 50: mean score" in shown
        assert "95% confidence interval" in shown
        metrics = read_metrics(tmp_path / "eval")
        assert metrics["step"] == 50 and "eval_episode/length" in metrics
        assert not (tmp_path / "eval/ckpt").exists()

    def test_eval_only_in_the_logdir_of_the_run_leaves_the_run(self, tmp_path):
        main(arguments(tmp_path, steps=50))
        source = ["--run.from_checkpoint", str(tmp_path)]
        assert main(arguments(tmp_path, *source, script="eval_only")) == 0
        assert read_config(tmp_path / "config.yaml").script == "train"
        assert step_of(tmp_path) == 50
        assert main(arguments(tmp_path, steps=80)) == 0
        assert step_of(tmp_path) == 80


class TestProcess:
    def start(self, logdir, *argv):
        command = [sys.executable, "-m", "dreamerv3.main"]
        command += arguments(logdir, *argv, "--run.log_every", "0.1", steps=10**9)
        command += ["--logger.outputs+", "terminal"]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_saves_and_the_same_command_continues(self, tmp_path, number):
        steps = []
        for _ in range(2):
            with self.start(tmp_path) as process:
                assert any(x.startswith("step ") for x in process.stdout)
                process.send_signal(number)
                shown, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
            assert f"Written to {tmp_path}" in shown
            steps.append(step_of(tmp_path))
        assert 0 < steps[0] < steps[1]
        assert f"now at step {steps[1]}." in shown

    def test_a_second_interrupt_leaves_at_once(self, tmp_path):
        code = (
            "import sys, threading, dreamerv3.main as program\n"
            "from embodied import RandomAgent\n"
            "def hang(self, *args, **kwargs):\n"
            "    print('hanging', flush=True)\n"
            "    threading.Event().wait(60)\n"
            "RandomAgent.policy = hang\n"
            "sys.exit(program.main(sys.argv[1:]))\n"
        )
        command = [sys.executable, "-c", code, *arguments(tmp_path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert any("hanging" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert any("saving, then leaving" in line for line in process.stdout)
            ended = select.select([process.stdout], [], [], 0.5)[0]
            assert not ended, "it waits for the policy, to save afterwards"
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=30)[1]
        assert process.returncode == 130
        assert errors == "dreamerv3: interrupted, without saving.\n"


def fill(replay, steps, worker=0):
    for index in range(steps):
        step = {"value": np.float32(index), "is_first": index == 0, "is_last": False}
        replay.add(step, worker)


class TestReplay:
    def config(self, tmp_path, *argv):
        return load_config([*SMALL, "--logdir", str(tmp_path), *argv])

    def test_sequences_are_as_long_as_training_and_reports_need(self, tmp_path):
        config = self.config(tmp_path, "--consec_train", "3", "--replay_context", "2")
        train, evaluation = (
            make_replay(config, "replay"),
            make_replay(config, "replay_eval", "eval"),
        )
        for replay, length in ((train, 3 * 8 + 2), (evaluation, 4 + 2)):
            fill(replay, length - 1)
            assert len(replay) == 0
            fill(replay, length, worker=1)
            assert len(replay) == 1
            assert replay.sample(5)["value"].shape == (5, length)

    def test_evaluation_has_a_tenth_of_the_capacity(self, tmp_path):
        config = self.config(tmp_path, "--replay.size", "1000")
        for folder, mode, capacity in (("a", "train", 1000), ("b", "eval", 100)):
            replay = make_replay(config, folder, mode)
            fill(replay, 1500)
            assert len(replay) == capacity

    def test_folders(self, tmp_path):
        for flags, folder in (
            ([], "replay"),
            (["--replicas", "3", "--replica", "2"], "replay/00002"),
        ):
            replay = make_replay(self.config(tmp_path, *flags), "replay")
            fill(replay, 20)
            replay.save()
            assert any(path.is_file() for path in (tmp_path / folder).iterdir())

    def test_new_sequences_come_first_in_training_only(self, tmp_path):
        config = self.config(tmp_path)
        online = make_replay(config, "a"), make_replay(config, "b", "eval")
        for replay, first in zip(online, (9, None)):
            fill(replay, 400)
            starts = replay.sample(40)["value"][:, 0]
            if first is not None:
                assert (starts == 9.0 * np.arange(40)).all()
            else:
                assert len(set(np.diff(starts))) > 5

    def test_shares_of_the_samplers(self, tmp_path):
        flags = ["--replay.online", "False", "--replay.fracs.uniform", "0"]
        recent = make_replay(
            self.config(
                tmp_path,
                *flags,
                *("--replay.fracs.recency", "1", "--replay.recexp", "3"),
            ),
            "a",
        )
        fill(recent, 1000)
        starts = recent.sample(500)["value"][:, 0]
        assert np.median(starts) > 980
        prior = make_replay(
            self.config(
                tmp_path,
                *flags,
                *("--replay.fracs.priority", "1", "--replay.prio.exponent", "1"),
                *("--replay.prio.zero_on_sample", "False"),
            ),
            "b",
        )
        fill(prior, 300)
        batch = prior.sample(2000)
        priority = (batch["value"] == 100).astype(np.float32)
        prior.update({"stepid": batch["stepid"], "priority": priority})
        assert (prior.sample(100)["value"] == 100).any(1).all()

    def test_several_samplers_are_mixed(self, tmp_path):
        flags = ["--replay.fracs.recency", "1", "--replay.fracs.priority", "0.5"]
        replay = make_replay(self.config(tmp_path, *flags), "replay")
        assert isinstance(replay._selector, selectors.Mixture)
        fill(replay, 100)
        assert replay.sample(50, "report")["value"].shape == (50, 9)

    @pytest.mark.parametrize(
        ("mode", "shape", "consec"), [("train", 8, 2), ("report", 4, 3), ("eval", 4, 3)]
    )
    def test_streams_cut_batches(self, tmp_path, mode, shape, consec):
        flags = ["--consec_train", "2", "--consec_report", "3"]
        config = self.config(tmp_path, *flags, "--replay_context", "2")
        replay = make_replay(config, "replay", "eval" if mode == "eval" else "train")
        fill(replay, 100)
        stream = iter(make_stream(config, replay, mode))
        for index in range(2 * consec):
            batch = next(stream)
            assert batch["value"].shape == (4, 2 + shape)
            assert batch["value"].flags.c_contiguous
            assert (batch["consec"] == index % consec).all()
