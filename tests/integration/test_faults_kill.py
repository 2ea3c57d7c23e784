"""SIGKILL of each role of a run that trains: what continues, and what is kept."""

import functools
import os
import random
import signal

import pytest
from fault_testing import (
    BATCH_LENGTH,
    CONTEXT,
    ENVS,
    Run,
    check_files,
    check_metrics,
    check_ratio,
    check_replay,
    manifest_paths,
    manifests,
    read_manifest,
    sequences,
    steps_in,
    steps_of,
)
from parallel_testing import last_step

from embodied.checkpoint import Checkpoint

LOST = 50  # Steps, at least, that are not saved when the agent is killed.
ALL_ENVS = [f"env-{index}" for index in range(ENVS)]


class TestRolesThatComeBack:
    @pytest.mark.parametrize(
        "kills",
        [[ALL_ENVS], pytest.param([["env-0"], ALL_ENVS], marks=pytest.mark.slow)],
        ids=["all", "one, then all"],
    )
    def test_env_workers(self, tmp_path, kills):
        count = ENVS
        with Run(tmp_path) as run:
            wait_for_incarnations(run, count)
            for roles in kills:
                run.kill(*roles)
                count += len(roles)
                wait_for_incarnations(run, count)
            run.goes_on()
            check_ratio(run)
            run.leave()
        check_replay(tmp_path)

    @pytest.mark.parametrize(
        "kills",
        [
            [["logger"], ["replay"]],
            pytest.param([["replay"], ["replay", "logger"]], marks=pytest.mark.slow),
        ],
        ids=["alone", "together"],
    )
    def test_logger_and_replay(self, tmp_path, kills):
        with Run(tmp_path) as run:
            for roles in kills:
                run.saves()
                run.kill(*roles)
                run.goes_on()
            check_ratio(run, lost=True)
            run.leave()
        check_replay(tmp_path, max_gaps=4 * ENVS)
        check_metrics(tmp_path)

    def test_replay_between_its_part_of_a_save_and_the_commit(self, tmp_path):
        with Run(tmp_path, "--run.save_every", "-1") as run:
            run.saves()
            logger = run.pid_of("logger")
            os.kill(logger, signal.SIGSTOP)  # No save is committed without it.
            saved = manifests(tmp_path)[-1].tag
            written = tmp_path / "ckpt" / "replay_eval"
            run.wait_until(lambda: newest_part(written) > saved)
            # Time for the replay's answer to arrive, which nothing shows. Meanwhile the
            # save stays uncommitted.
            run.stays(1.0)
            run.kill("replay")
            run.wait_until(lambda: run.output().count("The replay has ") > 1)
            os.kill(logger, signal.SIGCONT)
            run.wait_for("A role was restarted meanwhile.")
            run.saves()
            run.goes_on()
            run.leave()
        check_replay(tmp_path, max_gaps=2 * ENVS)
        check_files(tmp_path)

    @pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_agent_process(self, tmp_path, rounds):
        flags = ["--run.agent_process", "True", "--run.save_every", "1"]
        with Run(tmp_path, *flags) as run:
            run.goes_on()
            before = manifests(tmp_path)[-1].meta["step"]
            for _ in range(rounds):
                run.wait_until(lambda: not_saved(tmp_path) > LOST)
                run.kill("agent")
                run.wait_for("Continuing at step")
                run.goes_on()
            # Updates that were lost with their weights are made again.
            run.wait_for("samples are drawn again")
            check_ratio(run)
            run.leave()
        assert manifests(tmp_path)[-1].meta["step"] > before
        steps = check_replay(tmp_path, max_gaps=2 * ENVS)
        assert len(incarnations(steps)) == ENVS  # No env worker was restarted.


class TestLauncher:
    @pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
    def test_it_can_be_ended_while_it_starts(self, tmp_path, process):
        with Run(tmp_path, "--run.agent_process", process) as run:
            run.wait_for("Addresses: ")
            if process:
                run.pid_of("agent")
            run.leave()

    @pytest.mark.parametrize(
        "process",
        [pytest.param(False, marks=pytest.mark.slow), True],
        ids=["thread", "process"],
    )
    def test_nobody_outlives_it(self, tmp_path, process):
        with Run(tmp_path, "--run.agent_process", process) as run:
            run.wait_for("training begins")
            assert set(run.roles()) >= {"logger", "replay", *ALL_ENVS}
            run.crash()

    def test_steps_are_saved_while_the_replay_fills(self, tmp_path):
        def step():
            return (
                manifests(tmp_path)[-1].meta["step"] if manifest_paths(tmp_path) else 0
            )

        # Enough for a sequence of each environment, and far from enough to train.
        enough = 2 * ENVS * (BATCH_LENGTH + CONTEXT)
        flags = ["--batch_size", "64"]
        with Run(tmp_path, *flags, task="Slow") as run:
            run.wait_until(lambda: step() >= enough)
            run.crash()
            assert "training begins" not in run.output()
        with Run(tmp_path, *flags, task="Slow") as run:
            run.wait_for(f"Continuing at step {step()},")
            run.leave()
        assert len(steps_of(tmp_path, manifests(tmp_path)[-1])) >= enough

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    def test_the_run_goes_on_from_its_last_save(self, tmp_path):
        rounds, flags = 30, ["--run.save_every", "1"]
        moments = random.Random(rounds)
        for _ in range(rounds):
            with Run(tmp_path, *flags) as run:
                check_resumed(run)
                run.stays(moments.uniform(0.0, 3.0))
                run.crash()
        with Run(tmp_path, *flags) as run:
            check_resumed(run)
            run.goes_on()
            check_ratio(run, resumes=rounds)
            run.leave()
        check_replay(tmp_path)
        check_files(tmp_path)
        check_metrics(tmp_path)


def wait_for_incarnations(run, count):
    """Waits until `count` env instances have saved a sequence, killed ones included.

    An instance that is killed before its first sequence leaves nothing.
    """

    @functools.cache
    def saved_in(number):
        """Returns how many instances have a sequence in a checkpoint."""
        saved = manifests(run.logdir)[number - 1]
        batch = sequences(run.logdir, saved, BATCH_LENGTH + CONTEXT)
        return len(incarnations(steps_in(batch))) if batch else 0

    def is_there():
        number = len(manifest_paths(run.logdir))
        return number > 0 and saved_in(number) == count

    run.wait_until(is_there)


def incarnations(steps):
    return {step[0] for step in steps}


def not_saved(logdir):
    """Returns how many logged steps the newest checkpoint lacks."""
    return last_step(logdir) - read_manifest(manifest_paths(logdir)[-1]).meta["step"]


def newest_part(folder):
    """The tag of the newest part in a folder of the checkpoints."""
    return max(path.stem for path in folder.glob("*.json"))


def check_resumed(run):
    """Checks that the run starts, from the newest checkpoint if there is one."""
    newest = Checkpoint(run.logdir).newest()
    if newest:
        run.wait_for(f"from checkpoint {newest.tag}.")
        assert f"Continuing at step {newest.meta['step']}," in run.output()
        assert "WARNING" not in run.output()
    else:
        run.wait_for("Addresses: ")
