"""Roles in other places: own processes, own commands, several hosts of environments."""

import contextlib

import pytest
from parallel_testing import Program, Saved, last_step, metrics, small, wait_until


@contextlib.contextmanager
def started(*commands):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Program(*command)) for command in commands]


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
        (
            ["--run.agent_process", "True"],
            {"logger", "replay", "agent", "env-0", "env-1", "env-2"},
        ),
        (
            ["--run.transport", "portal", "--run.actor_threads", "2"],
            {"logger", "replay", "env-0", "env-1", "env-2"},
        ),
    ],
    ids=["envs_per_worker", "agent_process", "portal"],
)
def test_one_command_runs(tmp_path, flags, roles):
    # Long enough to be logged, and no longer than portal can bear.
    steps = 150 if "portal" in flags else 2000
    with Program(*small(tmp_path, *flags, steps=steps)) as program:
        seen = set()
        wait_until(
            lambda: seen.update(program.roles()) or not program.running, program=program
        )
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


@pytest.mark.parametrize("task", ["gym_CartPole-v1", "dummy_disc"])
def test_environments_of_another_task_end_with_one_error(tmp_path, addresses, task):
    flags = [*addresses, "--run.remote_envs", "True"]
    main = small(tmp_path / "run", *flags, steps=10**9)
    other = small(tmp_path / "host", *addresses, script="parallel_envs")
    with started(main, [*other, "--task", task]) as (trainer, host):
        assert host.wait() == 2, host.output()
        shown = host.output()
        assert trainer.running
    assert "same --task?" in shown[shown.index("dreamerv3: ") :]
    assert "Traceback" not in shown


def test_environments_of_two_hosts(tmp_path, addresses):
    logdir = tmp_path / "run"
    flags = ["--run.remote_envs", "True", "--run.envs", "4"]
    main = small(logdir, *addresses, *flags, steps=10**9)
    hosts = [
        small(tmp_path / "host", *addresses, *flags, script="parallel_envs")
        for flags in (
            ("--run.envs", "2", "--run.eval_envs", "0"),
            ("--run.envs", "2", "--run.eval_envs", "1", "--run.env_offset", "2"),
        )
    ]
    with started(main, *hosts) as (trainer, first, second):
        trainer.wait_for_envs(logdir, 5)
        assert set(first.roles()) == {"env-0", "env-1"}
        assert set(second.roles()) == {"env-2", "env-3", "env-4"}
        trainer.interrupt()
        assert trainer.wait() == 0, trainer.output()
        for host in (first, second):
            assert host.wait() == 0, host.output()
        assert "env workers elsewhere" in trainer.output()
    assert Saved(logdir).step > 0
    assert not (tmp_path / "host" / "config.yaml").exists()


def test_a_host_with_the_environments_of_another_one_is_refused(tmp_path, addresses):
    logdir = tmp_path / "run"
    main = small(logdir, *addresses, "--run.remote_envs", "True", steps=10**9)
    envs = ["--run.envs", "2", "--run.eval_envs", "0"]
    host = small(tmp_path / "host", *addresses, *envs, script="parallel_envs")
    with started(main, host) as (trainer, first):
        trainer.wait_for_envs(logdir, 2)
        with Program(*host) as second:
            assert second.wait() == 2, second.output()
            shown = second.output()
        assert "env 0 is stepped by worker env-0 already" in shown
        assert "--run.env_offset" in shown and "Traceback" not in shown
        step = last_step(logdir)
        wait_until(lambda: last_step(logdir) > step, program=trainer)
        for program in (trainer, first):
            assert program.running and "restarted" not in program.output()


def test_the_replay_of_another_command(tmp_path, addresses):
    main = small(tmp_path, *addresses, "--run.remote_replay", "True")
    replay = small(tmp_path, *addresses, script="parallel_replay")
    with started(main, replay) as (trainer, other):
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

    # Whoever starts first waits for those that come later, and says for whom.
    with started(command("parallel_env", "--replica", "2")) as (env,):
        env.wait_for("env-2 waits for the actor at ")
        with started(command("parallel_agent")) as (agent,):
            agent.wait_for("The learner waits for the replay at ")
            with started(
                command("parallel_replay"),
                command("parallel_logger"),
                command("parallel_envs", "--run.eval_envs", "0"),
            ) as (replay, logger, envs):
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
def test_a_role_of_its_own_needs_addresses(tmp_path, script, missing):
    logdir = tmp_path / "run"
    with Program(*small(logdir, script=script)) as program:
        assert program.wait() == 2, program.output()
        shown = program.output()
    for name in missing:
        assert f"--run.{name} HOST:PORT" in shown or f"run.{name}: expected" in shown
    assert "{auto}" in shown and "Traceback" not in shown
    assert not logdir.exists()
