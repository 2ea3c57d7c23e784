"""The command line, its factories, and rollouts in real processes."""

import json
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import embodied.wrappers
from dreamerv3.cli import scripts
from dreamerv3.cli.config import load_config, make_args, read_config
from dreamerv3.main import main, make_agent, make_env, make_logger
from embodied.random_agent import RandomAgent

ROLLOUT = ["--script", "rollout", "--random_agent", "True", "--run.envs", "2"]
ROLLOUT += ["--logger.outputs", "jsonl"]
HEAVY = {"jax", "gymnasium", "tensorboardX", "wandb", "rich", "PIL", "zmq"}


def command(*argv):
    return [sys.executable, "-m", "dreamerv3.main", *argv]


def run(*argv):
    return subprocess.run(
        command(*argv), capture_output=True, text=True, timeout=60, check=False
    )


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestProcess:
    def test_help_shows_keys_and_ends_well(self):
        done = run("--configs", "debug", "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert "--run.envs 16" in done.stdout

    def test_alone_it_shows_the_first_page(self):
        alone, asked = run(), run("--help")
        assert (alone.returncode, alone.stdout) == (0, asked.stdout)
        assert "The flags that people use most" in alone.stdout

    def test_help_comes_at_once(self):
        # Processor time, since wall time grows on a busy machine; relative to that of
        # another import, since machines differ.
        def seconds(*command):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            user = after.ru_utime - before.ru_utime
            return user + after.ru_stime - before.ru_stime

        ours = min(seconds("-m", "dreamerv3.main", "--help") for _ in range(3))
        numpy = min(seconds("-c", "import numpy") for _ in range(3))
        assert ours < 5 * numpy

    def test_importing_the_program_imports_nothing_heavy(self):
        show = "print(*{name.split('.')[0] for name in sys.modules})"
        code = f"import sys, dreamerv3.main as m; {show}; m.make_env; {show}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        first, then = map(set, map(str.split, done.stdout.splitlines()))
        # Nothing is imported at first, so that the program can handle Ctrl-C early.
        assert not first & {"embodied", "elements", "numpy", *HEAVY}
        assert "embodied" in then and not then & HEAVY

    @pytest.mark.parametrize("module", ["elements", "numpy", "embodied.run", "jax"])
    @pytest.mark.parametrize("becomes", ["KeyboardInterrupt", "ImportError"])
    def test_an_interrupt_during_imports_is_no_traceback(
        self, tmp_path, module, becomes
    ):
        argv = ["--configs", "debug", "--logdir", str(tmp_path / "run")]
        code = (
            "import os, signal, sys\n"
            # A shell may have started the tests with SIGINT ignored.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "class Finder:\n"
            "    def find_spec(name, *_):\n"
            f"        if name == {module!r}:\n"
            "            try:\n"
            "                os.kill(os.getpid(), signal.SIGINT)\n"
            "            except KeyboardInterrupt:\n"
            # Modules in C may replace the interrupt by another error.
            f"                raise {becomes}('not initialised') from None\n"
            "sys.meta_path.insert(0, Finder)\n"
            "from dreamerv3.main import main\n"
            f"sys.exit(main({argv}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        told = "dreamerv3: interrupted, without saving.\n"
        assert (done.returncode, done.stderr) == (130, told)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--run.enws", "8"], ["--run.enws 8", "--run.envs?"]),
            (["--batch_size", "x", "--seed", "-1"], ["batch_size", "'x'", "seed"]),
            ([*ROLLOUT, "--task", "dummy_dics"], ["dummy", "'dics'", "disc?"]),
        ],
    )
    def test_mistakes_exit_with_2_and_without_traceback(self, tmp_path, argv, words):
        done = run(*argv, "--logdir", str(tmp_path / "run"))
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        lines = done.stderr.splitlines()
        assert all(line.startswith("dreamerv3: ") for line in lines)
        for word in words:
            assert word in done.stderr
        assert not (tmp_path / "run").exists()


class TestMain:
    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("dreamerv3 0.")

    def test_version_of_sources_that_are_not_installed(self, capsys, monkeypatch):
        monkeypatch.setattr("dreamerv3.cli.texts.PACKAGE", "not-installed")
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == "dreamerv3 from a folder of sources\n"

    def test_help(self, capsys):
        assert main(["-h"]) == 0
        assert "--task dummy_disc" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("argv", "code", "words"),
        [
            (["--help", "run", "--seed", "1"], 0, "--run.actor_batch -1"),
            (["-h", "all"], 0, "--agent.opt.beta2 0.999"),
            (["--help", "rnu"], 2, "Did you mean run"),
        ],
    )
    def test_pages_of_help(self, capsys, argv, code, words):
        assert main(argv) == code
        shown = capsys.readouterr()
        assert words in (shown.err if code else shown.out)

    def test_logdir_of_another_task_is_refused(self, tmp_path, capsys):
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "2"]
        assert main(argv) == 0
        assert main([*argv, "--task", "dummy_cont"]) == 2
        assert "belongs to a run of task 'dummy_disc'" in capsys.readouterr().err

    def test_output_without_its_package_is_refused(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--logger.outputs", "wandb"]
        assert main(argv) == 2
        assert "dreamerv3-parallel[wandb]" in capsys.readouterr().err

    def test_tensorboard_without_its_package_is_told_at_the_start(
        self, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "2"]
        assert main([*argv, "--logger.outputs", "tensorboard", "jsonl"]) == 0
        shown = capsys.readouterr().out
        words = "WARNING: No events for TensorBoard are written"
        assert words in shown and "pip install tensorboardX" in shown
        assert shown.index(words) < shown.index("2 steps in")
        assert "events.out.*" not in shown and "metrics.jsonl" in shown

    def test_errors_of_the_program_itself_are_not_hidden(self, monkeypatch):
        def fail(config):
            raise ImportError("a mistake of ours")

        monkeypatch.setitem(scripts.SCRIPTS, "rollout", fail)
        with pytest.raises(ImportError, match="a mistake of ours"):
            main(["--script", "rollout"])


class TestFactories:
    def test_agent_that_learns_fits_the_task(self):
        from dreamerv3.agent import Agent

        agent = make_agent(load_config(["--configs", "debug"]))
        assert isinstance(agent, Agent)
        carry = agent.init_policy(3)
        assert carry["action"]["act_disc"].shape == (3,)

    def test_random_agent_fits_the_task(self):
        agent = make_agent(load_config(["--random_agent", "True"]))
        assert isinstance(agent, RandomAgent)
        assert set(agent.act_space) == {"act_disc"}
        assert not any(key.startswith("log/") for key in agent.obs_space)

    def test_env_is_wrapped(self):
        env = make_env(load_config(["--task", "dummy_cont"]), 0)
        action = {"act_cont": np.full(6, 5, np.float32), "reset": np.bool_(False)}
        env.step({**action, "reset": np.bool_(True)})
        assert env.step(action)["reward"].dtype == np.float32
        with pytest.raises(ValueError, match="act_cont"):
            env.step({**action, "act_cont": np.zeros(5, np.float32)})
        env.close()

    def test_env_takes_options_of_its_suite(self):
        env = make_env(load_config([]), 0, size=(80, 48))
        assert env.obs_space["image"].shape == (80, 48, 3)
        env.close()

    def test_seed_and_index_decide_what_an_env_does(self):
        def observe(seed, index):
            env = make_env(load_config(["--task=grid_reach", f"--seed={seed}"]), index)
            reset = {"action": np.int32(0), "reset": np.bool_(True)}
            images = [env.step(reset)["image"] for _ in range(5)]
            env.close()
            return np.stack(images)

        assert np.array_equal(observe(1, 0), observe(1, 0))
        assert not np.array_equal(observe(1, 0), observe(2, 0))
        assert not np.array_equal(observe(1, 0), observe(1, 1))

    def test_logger_writes_scores_apart_and_counts_repeats(self, tmp_path):
        config = load_config(["--logdir", str(tmp_path)])
        config = config.update({"task": "dmc_walker_walk", "env.dmc.repeat": 2})
        with make_logger(config) as logger:
            logger.step.increment(5)
            logger.add({"episode/score": 3.0, "eval_episode/score": 4.0, "loss": 1.0})
        (metrics,) = read_lines(tmp_path / "metrics.jsonl")
        assert metrics.pop("step") == 10
        assert metrics == {
            "episode/score": 3.0,
            "eval_episode/score": 4.0,
            "loss": 1.0,
        }
        scores = read_lines(tmp_path / "scores.jsonl")
        assert scores == [{"step": 10, "episode/score": 3.0}]
        assert len(list(tmp_path.glob("events.out.*"))) == 1

    def test_logger_has_the_outputs_asked_for(self, tmp_path, capsys):
        argv = ["--logdir", str(tmp_path), "--logger.outputs", "terminal"]
        with make_logger(load_config([*argv, "--logger.filter", "fps"])) as logger:
            logger.add({"fps/env": 7.0, "other": 8.0})
        shown = capsys.readouterr().out
        assert shown == "step 0 | fps/env 7\n"
        assert list(tmp_path.iterdir()) == []


class TestRollout:
    @pytest.mark.parametrize("debug", ["True", "False"])
    def test_ends_by_itself_and_says_what_lies_where(self, tmp_path, capsys, debug):
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "405"]
        argv += ["--logger.outputs+", "tensorboard", "--run.debug", debug]
        assert main(argv) == 0
        shown = capsys.readouterr().out
        # Episodes of the task are 101 transitions long, with a reward of 1 in all.
        assert "406 steps" in shown
        assert "4 episodes, mean score of the last 4: 1." in shown
        for word in (str(tmp_path), "metrics.jsonl", "scores.jsonl", "tensorboard"):
            assert word in shown
        assert read_config(tmp_path / "config.yaml").script == "rollout"
        scores = read_lines(tmp_path / "scores.jsonl")
        assert [score["episode/score"] for score in scores] == [1.0] * 4
        assert scores[-1]["step"] <= 406
        metrics = {}
        for line in read_lines(tmp_path / "metrics.jsonl"):
            metrics.update(line)
        assert metrics["episode/length"] == 100
        assert metrics["fps/env"] > 0
        assert metrics["parallel/ep_ends"] == 4
        assert metrics["step"] == 406

    def test_its_rate_is_that_of_steps_not_of_starting_environments(self, tmp_path):
        config = load_config([*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "99"])

        def slow(index):
            time.sleep(1.0)
            return make_env(config, index)

        agent, stop = make_agent(config), threading.Event()
        args = make_args(config.update({"run.debug": True}))
        with make_logger(config) as logger:
            result = scripts.rollout(agent, slow, logger, args, stop)
        metrics = read_lines(tmp_path / "metrics.jsonl")[-1]
        assert metrics["fps/env"] > 0.5 * result.steps / result.seconds

    def test_same_command_again_adds_to_the_same_files(self, tmp_path):
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "202"]
        assert main(argv) == main(argv) == 0
        assert len(read_lines(tmp_path / "scores.jsonl")) == 4

    def test_ends_after_the_duration(self, tmp_path):
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.duration", "0.2"]
        start = time.monotonic()
        assert main(argv) == 0
        assert time.monotonic() - start < 20

    def test_restores_signal_handlers(self, tmp_path):
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        main([*ROLLOUT, "--logdir", str(tmp_path), "--run.steps", "2"])
        after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        assert before == after

    def test_failing_env_ends_it_and_keeps_what_was_logged(
        self, tmp_path, monkeypatch, capsys
    ):
        class Failing(embodied.wrappers.Wrapper):
            count = 0

            def step(self, action):
                self.count += 1
                if self.count > 100:
                    raise RuntimeError("the env broke")
                return self.env.step(action)

        def make_failing(config, index):
            return Failing(make_env(config, index))

        monkeypatch.setattr(scripts, "make_env", make_failing)
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.log_every", "-1"]
        assert main(argv) == 1
        assert "RuntimeError: the env broke" in capsys.readouterr().err
        assert read_lines(tmp_path / "metrics.jsonl")[-1]["step"] == 200

    @pytest.mark.parametrize("debug", ["True", "False"])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_end_it_cleanly(self, tmp_path, number, debug):
        argv = [*ROLLOUT, "--logdir", str(tmp_path), "--run.debug", debug]
        argv += ["--run.log_every", "0.1", "--logger.outputs+", "terminal"]
        with subprocess.Popen(
            command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            # The first line with a step is printed during the rollout.
            assert any(line.startswith("step ") for line in process.stdout)
            process.send_signal(number)
            shown, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert "Interrupted: stopping. Ctrl-C again leaves now." in shown
        assert f"Written to {tmp_path}" in shown
        written = read_lines(tmp_path / "metrics.jsonl")
        assert f"{written[-1]['step']} steps in" in shown


def test_a_failed_program_does_not_wait_for_threads_that_cannot_end():
    """A thread that compiles would abort the interpreter while that ends."""
    program = """
import atexit, threading
from dreamerv3 import main

def fail(argv):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("failed")
    return 1

atexit.register(print, "the interpreter ends")
main._main = fail
main.main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "failed\n"), done.stderr
