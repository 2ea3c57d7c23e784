"""The agent in the programs: training, continuing, evaluating, reproducibility."""

import functools
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from dreamer_testing import QUICK

import embodied.run
from dreamerv3.agent import Agent
from dreamerv3.cli import factories
from dreamerv3.cli.config import load_config, make_args
from dreamerv3.main import main
from embodied.checkpoint import Checkpoint
from embodied.envs.dummy import Dummy

# Vectors, since programs with images take much longer to compile.
TINY = ["--configs", "debug", "--task", "gym_CartPole-v1", "--run.eval_envs", "2"]
TINY += ["--logger.outputs", "jsonl", "--batch_size", "4", "--agent.imag_length", "3"]
TIMED = ("fps/", "timer/", "usage/")  # Metrics that differ from run to run.
UPDATES = 20
START = 4 * 10 + 4 * 10  # Until 4 envs have made 4 · 10 sequences of 11 steps.

pytestmark = pytest.mark.timeout(400)  # Most of it for the first compilation.


def arguments(logdir, steps, *argv):
    steps = ["--run.steps", str(steps), "--run.report_every", "0"]
    return [*TINY, "--logdir", str(logdir), *steps, *argv]


def read_metrics(logdir):
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved_agent(logdir):
    checkpoint = Checkpoint(logdir)
    manifest = checkpoint.newest()
    return manifest.meta["step"], checkpoint.read_part(manifest, "agent")


class TestPrograms:
    @pytest.mark.slow
    def test_training_continues_and_is_evaluated(self, tmp_path, capsys):
        assert main(arguments(tmp_path / "run", 100)) == 0
        shown = capsys.readouterr().out
        assert "Compiling train for batches of 4 x 11 ..." in shown
        assert "Compiled train for batches of 4 x 11 in" in shown
        assert "Written to" in shown
        step, before = saved_agent(tmp_path / "run")
        assert step == 100
        updates = int(before["counters"]["updates"])
        assert updates == before["opt"]["step/value"] == (100 - START) * 8 // 40 + 1

        assert main(arguments(tmp_path / "run", 160)) == 0
        assert "Continuing at step 100, from checkpoint" in capsys.readouterr().out
        step, after = saved_agent(tmp_path / "run")
        assert step == 160
        assert after["opt"]["step/value"] == (160 - START) * 8 // 40 + 1
        name = "dyn/dynhid0/kernel"
        assert not np.array_equal(before["params"][name], after["params"][name])
        losses = [x for x in read_metrics(tmp_path / "run") if "train/opt/loss" in x]
        assert losses[-1]["train/opt/updates"] > updates

        source = ["--run.from_checkpoint", str(tmp_path / "run"), "--run.eval_eps", "3"]
        source += ["--script", "eval_only"]
        assert main(arguments(tmp_path / "eval", 10**6, *source)) == 0
        assert "3 episodes of the agent of step 160" in capsys.readouterr().out

    def test_the_end_of_a_run_is_not_trained_on_again(self, tmp_path):
        main(arguments(tmp_path, 60))
        _, before = saved_agent(tmp_path)
        main(arguments(tmp_path, 60))
        _, after = saved_agent(tmp_path)
        for name, value in before["params"].items():
            np.testing.assert_array_equal(value, after["params"][name], err_msg=name)

    def test_a_checkpoint_of_another_size_is_told_on_one_line(self, tmp_path, capsys):
        assert main(arguments(tmp_path, 8)) == 0
        capsys.readouterr()
        config = (tmp_path / "config.yaml").read_text()
        other = ["--agent.dyn.rssm.hidden", "5"]
        assert main(arguments(tmp_path, 16, *other)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"dreamerv3: logdir: {tmp_path} holds a run with other")
        assert "dyn/dynin0/kernel" in line
        assert (tmp_path / "config.yaml").read_text() == config

    @pytest.mark.slow
    @pytest.mark.parametrize("task", ["gym_CartPole-v1", "grid_reach"])
    def test_train_eval_reports_on_both_replays(self, tmp_path, task):
        argv = ["--script", "train_eval", "--run.report_every", "1", "--task", task]
        argv += ["--run.eval_eps", "4", "--run.log_every", "1"]
        assert main(arguments(tmp_path, 2000, *argv)) == 0
        names = set().union(*read_metrics(tmp_path))
        for name in ("train/loss/policy", "report/loss/policy", "eval/loss/policy"):
            assert name in names
        assert {"episode/score", "eval_episode/score"} <= names

    @pytest.mark.slow
    def test_a_signal_saves(self, tmp_path):
        argv = arguments(tmp_path, 10**9, "--run.log_every", "0.1")
        argv += ["--logger.outputs+", "terminal", "--logger.filter", "train/opt/loss"]
        command = [sys.executable, "-m", "dreamerv3.main", *argv]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert any("| loss " in line for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            shown, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert f"Written to {tmp_path}" in shown
        step, agent = saved_agent(tmp_path)
        assert step > 0 and agent["opt"]["step/value"] > 0


def use_envs(monkeypatch, make_env):
    """Makes all programs use the environments of `make_env`."""
    monkeypatch.setattr(factories, "make_env", make_env)


class TestRefusals:
    def refused(self, logdir, capsys, *argv):
        assert main(arguments(logdir, 8, *argv)) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("dreamerv3: ")
        assert not logdir.exists()
        return line

    def test_devices_that_are_not_there(self, tmp_path, capsys):
        line = self.refused(tmp_path / "run", capsys, "--jax.expect_devices", "7")
        assert "jax.expect_devices: expected 7, got 1 cpu devices" in line

    def test_spaces_that_the_agent_cannot_take(self, tmp_path, capsys, monkeypatch):
        def make_env(config, index, own=None):
            return Dummy("disc", size=(40, 40))

        use_envs(monkeypatch, make_env)
        line = self.refused(tmp_path / "run", capsys)
        assert "Images expected sides that are multiples of 16" in line
        assert "got 40x40" in line

    def test_errors_of_an_environment_keep_their_traceback(
        self, tmp_path, monkeypatch, capsys
    ):
        def make_env(config, index, own=None):
            raise ValueError("a mistake of its author")

        use_envs(monkeypatch, make_env)
        assert main(arguments(tmp_path / "run", 8)) == 1
        shown = capsys.readouterr().err
        assert "ValueError: a mistake of its author" in shown
        assert "in make_env" in shown


class TestReproducible:
    """Compares two runs with one seed; one of them also saves after every step."""

    def run(self, logdir, *argv):
        steps = ["--run.log_every", "-1", "--run.train_ratio", "10", *argv]
        config = load_config(arguments(logdir, START + 4 * (UPDATES - 1), *steps), {})
        spaces = factories.make_spaces(config)
        agent = Agent(*spaces, config, compiler=QUICK)
        result = embodied.run.train(
            lambda: agent,
            functools.partial(factories.make_replay, config, "replay"),
            functools.partial(factories.make_env, config),
            functools.partial(factories.make_stream, config),
            functools.partial(factories.make_logger, config),
            make_args(config),
        )
        assert result.updates == UPDATES
        return agent.save()

    @pytest.mark.slow
    def test_two_runs_with_one_seed_are_equal_bit_for_bit(self, tmp_path):
        one = self.run(tmp_path / "1")
        two = self.run(tmp_path / "2", "--run.save_every", "-1")
        assert one["counters"] == two["counters"]
        assert one["opt"]["step/value"] == UPDATES
        for part in ("params", "opt"):
            assert one[part].keys() == two[part].keys()
            for name, value in one[part].items():
                np.testing.assert_array_equal(value, two[part][name], err_msg=name)
        assert self.metrics(tmp_path / "1") == self.metrics(tmp_path / "2")

    def metrics(self, logdir):
        lines = [
            {name: value for name, value in line.items() if not name.startswith(TIMED)}
            for line in read_metrics(logdir)
        ]
        # Each update is logged separately.
        assert len([x for x in lines if "train/loss/policy" in x]) > 5
        assert lines[-1]["train/opt/updates"] == UPDATES
        return lines
