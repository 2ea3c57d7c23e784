"""How the command line reports errors of parallel programs."""

import pytest

from dreamerv3.cli.config import ConfigError
from dreamerv3.cli.schema import read_keys
from dreamerv3.cli.scripts import SCRIPTS
from dreamerv3.main import load_config, main, make_env
from embodied.envs import env_seed
from embodied.rpc import AuthError
from embodied.run import parallel
from embodied.run.parallel.observations import ObservationError
from embodied.run.parallel.wiring import RoleError
from embodied.workers import RunFailed, RunStalled

ARGV = ["--script", "parallel", "--random_agent", "True", "--logdir"]


def run_with(monkeypatch, folder, error, cause=None):
    """Runs a program whose roles fail with an error; returns the exit code."""

    def fail(*args):
        raise error from cause

    monkeypatch.setattr(parallel, "combined", fail)
    return main([*ARGV, str(folder)])


def test_all_scripts_are_there():
    names = {*SCRIPTS, "suite", "ray"}  # `main` handles these two itself.
    assert set(read_keys()["script"].rule.names) == names


def test_a_failed_role_is_shown_with_its_traceback(monkeypatch, tmp_path, capsys):
    error = RunFailed("env-3", "failed for good", "Traceback ...\nOSError: 5", "env")
    assert run_with(monkeypatch, tmp_path, error) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("dreamerv3: Worker 'env-3' failed for good\n")
    assert "\n  Traceback ...\n  OSError: 5\n" in shown


@pytest.mark.parametrize(("kind", "code"), [("SpaceError", 1), ("UnusableEnv", 2)])
def test_a_mistake_in_an_environment_is_shown_without(
    monkeypatch, tmp_path, capsys, kind, code
):
    error = RunFailed("env-3", "failed: expected", "Traceback ...", "env", kind)
    assert run_with(monkeypatch, tmp_path, error) == code
    assert capsys.readouterr().err == "dreamerv3: Worker 'env-3' failed: expected\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunStalled("No worker has progressed"), 1),
        (AuthError("its key is not the one expected"), 1),
        (RoleError("run.actor_batch: expected less"), 2),
        (ObservationError("act expected the key image as well"), 2),
    ],
)
def test_other_errors_are_one_message(monkeypatch, tmp_path, capsys, error, code):
    assert run_with(monkeypatch, tmp_path, error) == code
    assert capsys.readouterr().err == f"dreamerv3: {error}\n"


def test_a_mistake_that_the_agent_finds_is_shown_as_it_is(
    monkeypatch, tmp_path, capsys
):
    error = RunFailed("agent", "failed", "Traceback ...", "agent")
    cause = ConfigError("agent.enc: expected something else")
    assert run_with(monkeypatch, tmp_path, error, cause) == 2
    assert capsys.readouterr().err == f"dreamerv3: {cause}\n"


def test_an_env_id_that_does_not_exist_is_refused(tmp_path, capsys):
    argv = ["--script", "parallel_env", "--replica", "20", "--run.actor_addr"]
    assert main([*argv, "localhost:7", "--logdir", str(tmp_path)]) == 2
    assert "run.envs + run.eval_envs (20)" in capsys.readouterr().err


def test_replicas_have_environments_of_their_own(monkeypatch):
    seeds = []

    def make(task, index, seed, **options):
        seeds.append(env_seed(seed, index))
        raise LookupError

    monkeypatch.setattr("embodied.envs.registry.make", make)
    flags = ["--task", "grid_reach", "--run.envs", "2", "--replicas", "2"]
    for replica in ("0", "1"):
        config = load_config([*flags, "--replica", replica])
        for index in range(2):
            with pytest.raises(LookupError):
                make_env(config, index)
    assert len(set(seeds)) == 4
    assert seeds[:2] == [env_seed(0, 0), env_seed(0, 1)]  # As without replicas.
