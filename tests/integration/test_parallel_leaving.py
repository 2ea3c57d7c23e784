"""A run ends soon although a role is missing or does not answer."""

import os
import signal
import time

import pytest
from parallel_testing import HASTY, LEAN, Program, Saved, small

from embodied.rpc import free_port

SOON = 15.0  # Seconds; supervised roles get ten of them to end.


def is_saving(logdir):
    """Whether the agent has written its part of a save that is not committed."""
    newest = Saved(logdir).tag
    return any(path.stem > newest for path in (logdir / "ckpt/agent").iterdir())


class TestRoleThatDoesNotAnswer:
    @pytest.mark.parametrize(
        "own_process", [pytest.param(False, marks=pytest.mark.slow), True]
    )
    def test_the_second_interrupt_does_not_wait_for_it(self, tmp_path, own_process):
        argv = [*LEAN, "--run.agent_process", own_process]
        argv = small(tmp_path, *argv, steps=10**9)
        with Program(*argv) as program:
            program.wait_for_step(tmp_path, 100)
            children = program.children()
            os.kill(program.roles()["replay"].pid, signal.SIGSTOP)
            program.interrupt()
            program.wait_until(lambda: is_saving(tmp_path))
            assert program.running
            program.interrupt()
            assert program.wait(SOON) == 130, program.output()
            assert "interrupted, without saving" in program.output()
            assert "Traceback" not in program.output()
            assert not [child for child in children if child.is_running()]
        assert Saved(tmp_path).step == 0

    @pytest.mark.slow
    def test_the_second_interrupt_of_an_agent_of_its_own(self, tmp_path, addresses):
        logdir = tmp_path / "run"

        def command(script):
            return small(logdir, *addresses, script=script, steps=10**9)

        with (
            Program(*command("parallel_logger")),
            Program(*command("parallel_replay")) as replay,
            Program(*command("parallel_envs")) as envs,
            Program(*command("parallel_agent")) as agent,
        ):
            agent.wait_for_step(logdir, 100)
            os.kill(replay.pid, signal.SIGSTOP)
            agent.interrupt()
            agent.wait_until(lambda: is_saving(logdir))
            agent.interrupt()
            assert agent.wait(SOON) == 130, agent.output()
            assert envs.running, "they wait for an agent that continues"

    def test_a_failed_run_does_not_wait_for_its_save(self, tmp_path):
        argv = ["--run.restarts.replay", "0", "--run.save_every", "-1"]
        with Program(*small(tmp_path, *LEAN, *argv, steps=10**9)) as program:
            program.wait_for_step(tmp_path, 100)
            replay = program.roles()["replay"].pid
            os.kill(replay, signal.SIGSTOP)
            program.wait_until(lambda: is_saving(tmp_path))
            os.kill(replay, signal.SIGKILL)
            begin = time.monotonic()
            assert program.wait(2 * SOON) == 1, program.output()
            assert time.monotonic() - begin < SOON
            assert "Worker 'replay' of role 'replay' failed" in program.output()


class TestRoleThatIsNotThere:
    """One Ctrl-C is enough, since there is nothing to save."""

    @pytest.mark.parametrize(
        "own_process", [False, pytest.param(True, marks=pytest.mark.slow)]
    )
    def test_the_replay_is_elsewhere(self, tmp_path, addresses, own_process):
        flags = ["--run.remote_replay", "True", "--run.agent_process", own_process]
        flags += LEAN
        argv = small(tmp_path / "run", *addresses, *flags)
        with Program(*argv, script=HASTY) as program:
            leave(program, "The learner waits for the replay at ")
            told = program.output()
        assert "No checkpoint: the run has ended before the first one." in told
        assert "ckpt" not in told[told.index("Written to") :]

    def test_an_agent_of_its_own(self, tmp_path, addresses):
        argv = small(tmp_path / "run", *addresses, script="parallel_agent")
        with Program(*argv, script=HASTY) as program:
            leave(program, "The learner waits for the replay at ")

    def test_environments_of_their_own(self, tmp_path, addresses):
        argv = small(tmp_path / "run", *addresses, script="parallel_envs")
        with Program(*argv, script=HASTY) as program:
            leave(program, "This host waits for the actor at ")

    @pytest.mark.parametrize(
        ("replica", "whom"),
        [
            (0, "Replica 0 waits for the others of 2."),
            pytest.param(1, "the first replica at ", marks=pytest.mark.slow),
        ],
    )
    def test_other_replicas(self, tmp_path, replica, whom):
        flags = ["--replicas", 2, "--replica", replica, "--clock_port", free_port()]
        with Program(*small(tmp_path, *LEAN, *flags), script=HASTY) as program:
            leave(program, whom)


def leave(program, text):
    """Interrupts a program that waits; checks that it ends soon and without error."""
    program.wait_for(text)
    children = program.children()
    program.interrupt()
    assert program.wait(SOON) == 0, program.output()
    assert "Traceback" not in program.output() and "WARNING" not in program.output()
    assert not [child for child in children if child.is_running()]
