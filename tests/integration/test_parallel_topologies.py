"""Roles in other places: own processes, own commands, several hosts of environments."""

import contextlib
import dataclasses
import pathlib

import pytest
from parallel_testing import (
    HASTY,
    Program,
    Saved,
    last_step,
    metrics,
    shared_addresses,
    small,
)

from dreamerv3.main import main


@contextlib.contextmanager
def started(*commands, script=None):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Program(*command, script=script))
            for command in commands
        ]


def check_run(logdir, steps=300):
    assert Saved(logdir).step >= steps
    found = metrics(logdir)
    assert "episode/score" in found and "fps/train" in found


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        (
            ["--run.envs_per_worker", "3", "--run.envs", "4", "--run.eval_envs", "2"],
            {"logger", "replay", "env-0-2", "env-3", "env-4-5"},
        ),
        pytest.param(
            ["--run.agent_process", "True"],
            {"logger", "replay", "agent", "env-0", "env-1", "env-2"},
            marks=pytest.mark.slow,
        ),
        (
            [
                *("--run.transport", "portal", "--run.actor_threads", "2"),
                *("--run.eval_envs", "0"),
            ],
            {"logger", "replay", "env-0", "env-1"},
        ),
    ],
    ids=["envs_per_worker", "agent_process", "portal"],
)
def test_one_command_runs(tmp_path, flags, roles):
    # Enough steps to be logged; portal cannot cope with as many as the others.
    steps = 100 if "portal" in flags else 1000
    with Program(*small(tmp_path, *flags, steps=steps)) as program:
        seen = set()
        program.wait_until(lambda: seen.update(program.roles()) or not program.running)
        assert program.wait() == 0, program.output()
        assert "Traceback" not in program.output()
    assert seen == roles
    check_run(tmp_path, steps)


@pytest.mark.slow
def test_portal_continues_a_run(tmp_path):
    for steps in (100, 160):
        argv = small(tmp_path, "--run.transport", "portal", steps=steps)
        with Program(*argv) as program:
            assert program.wait() == 0, program.output()
            shown = program.output()
    assert "Continuing at step 1" in shown and "WARNING: A checkpoint" not in shown
    assert Saved(tmp_path).step >= 160


@dataclasses.dataclass
class Joined:
    """A run and a host with two of its environments; more hosts can try to join."""

    folder: pathlib.Path
    addresses: list[str]
    trainer: Program | None = None
    host: Program | None = None

    @property
    def logdir(self):
        return self.folder / "run"

    def trainer_command(self):
        flags = [*self.addresses, "--run.remote_envs", "True", "--run.envs", "4"]
        return small(self.logdir, *flags, steps=10**9)

    def host_command(self, *flags):
        envs = ["--run.envs", "2", "--run.eval_envs", "0", *flags]
        folder = self.folder / "host"
        return small(folder, *self.addresses, *envs, script="parallel_envs")

    def check_goes_on(self):
        """Checks that run and host continue, unaffected by refused hosts."""
        step = last_step(self.logdir)
        self.trainer.wait_until(lambda: last_step(self.logdir) > step)
        for program in (self.trainer, self.host):
            assert program.running and "restarted" not in program.output()


@pytest.fixture(scope="class")
def joined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    run = Joined(folder, shared_addresses(folder))
    with started(run.trainer_command(), run.host_command()) as programs:
        run.trainer, run.host = programs
        run.trainer.wait_for_envs(run.logdir, 2)
        yield run


class TestHosts:
    @pytest.mark.parametrize(
        "task", [pytest.param("gym_CartPole-v1", marks=pytest.mark.slow), "dummy_disc"]
    )
    def test_environments_of_another_task_end_with_one_error(self, joined, task):
        flags = ["--run.env_offset", "2", "--task", task]
        with Program(*joined.host_command(*flags)) as other:
            assert other.wait() == 2, other.output()
            shown = other.output()
        assert "same --task?" in shown[shown.index("dreamerv3: ") :]
        assert "Traceback" not in shown
        joined.check_goes_on()

    def test_a_host_with_the_environments_of_another_one(self, joined):
        with Program(*joined.host_command()) as second:
            assert second.wait() == 2, second.output()
            shown = second.output()
        assert "env 0 is stepped by worker env-0 already" in shown
        assert "--run.env_offset" in shown and "Traceback" not in shown
        joined.check_goes_on()

    def test_environments_of_two_hosts(self, joined):  # The last, as it ends the run.
        flags = ["--run.eval_envs", "1", "--run.env_offset", "2"]
        with Program(*joined.host_command(*flags)) as second:
            joined.trainer.wait_for_envs(joined.logdir, 5)
            assert set(joined.host.roles()) == {"env-0", "env-1"}
            assert set(second.roles()) == {"env-2", "env-3", "env-4"}
            joined.trainer.interrupt()
            for program in (joined.trainer, joined.host, second):
                assert program.wait() == 0, program.output()
            assert "env workers elsewhere" in joined.trainer.output()
        assert Saved(joined.logdir).step > 0
        assert not (joined.folder / "host" / "config.yaml").exists()


def test_the_replay_of_another_command(tmp_path, addresses):
    argv = small(tmp_path, *addresses, "--run.remote_replay", "True")
    replay = small(tmp_path, *addresses, script="parallel_replay")
    with started(argv, replay) as (trainer, other):
        assert trainer.wait() == 0, trainer.output()
        assert "replay elsewhere" in trainer.output()
        assert "replay" not in trainer.roles()
        assert other.running
        other.interrupt()
        assert other.wait() == 0, other.output()
    check_run(tmp_path)


def test_every_role_as_a_command_of_its_own(tmp_path, addresses):
    logdir = tmp_path / "run"

    def command(script, *flags):
        return small(logdir, *addresses, *flags, script=script)

    # A role that starts early waits for the others, and logs for which.
    lonely = command("parallel_env", "--replica", "2")
    with started(lonely, script=HASTY) as (env,):
        env.wait_for("env-2 waits for the actor at ")
        with started(command("parallel_agent"), script=HASTY) as (agent,):
            agent.wait_for("The learner waits for the replay at ")
            with started(command("parallel_replay"), command("parallel_logger")) as (
                replay,
                logger,
            ):
                # Before others come and may reach the last step without it.
                agent.wait_for_envs(logdir, 1)
                hosts = command("parallel_envs", "--run.eval_envs", "0")
                with started(hosts) as (envs,):
                    for program in (agent, env, envs):
                        assert program.wait() == 0, program.output()
                    for program in (replay, logger):
                        assert program.running, program.output()
                        program.terminate()
                        assert program.wait() == 0, program.output()
                    for program in (agent, env, envs, replay, logger):
                        assert "Traceback" not in program.output()
    check_run(logdir)


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("parallel_agent", ["actor_addr", "replay_addr", "logger_addr"]),
        ("parallel_replay", ["replay_addr"]),
        ("parallel_logger", ["logger_addr"]),
        ("parallel_env", ["actor_addr"]),
        ("parallel_envs", ["actor_addr"]),
    ],
)
def test_a_role_of_its_own_needs_addresses(tmp_path, capfd, script, missing):
    logdir = tmp_path / "run"
    assert main(small(logdir, script=script)) == 2
    shown = "".join(capfd.readouterr())
    for name in missing:
        assert f"--run.{name} HOST:PORT" in shown or f"run.{name}: expected" in shown
    assert "{auto}" in shown and "Traceback" not in shown
    assert not logdir.exists()
