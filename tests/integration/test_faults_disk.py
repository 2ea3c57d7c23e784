"""Damaged files, a full disk, and the end in the middle of a save."""

import pathlib
import re
import shutil

import pytest
from fault_testing import (
    Run,
    check_files,
    check_metrics,
    check_ratio,
    check_replay,
    manifests,
)

from embodied.checkpoint import Checkpoint

NOT_SAVED = "WARNING: A checkpoint could not be saved, training goes on. "
TORN = "WARNING: Skipping a damaged manifest: "
SAMPLE = ("ckpt/agent/", "ckpt/limiter/", "replay/")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The logdir of a run that was killed after some saves."""
    logdir = tmp_path_factory.mktemp("killed") / "run"
    with Run(logdir) as run:
        run.goes_on()
        run.saves()
        run.crash()
    return logdir


class TestDamagedFiles:
    @pytest.mark.parametrize(
        "every",
        [False, True],
        ids=["some", "all"],
    )
    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_the_newest_whole_checkpoint_counts(self, killed, tmp_path, every):
        older, newest = manifests(killed)[-2:]
        files = list(newest.files)
        if not every:
            files = [
                next(record for record in files[::-1] if record.path.startswith(start))
                for start in SAMPLE
            ]
        for index, record in enumerate(files):
            logdir = tmp_path / str(index)
            shutil.copytree(killed, logdir)
            truncate(logdir / record.path)
            # Intact files of a replay are used even if others are damaged.
            expected = older if record.required else newest
            with Run(logdir) as run:
                run.wait_for(f"from checkpoint {expected.tag}.")
                run.wait_for("The replay has ")
                pattern = rf"WARNING: .*{re.escape(pathlib.Path(record.path).name)}"
                assert re.search(pattern, run.output()), run.output()
                run.crash()

    def test_the_run_goes_on_although_a_manifest_is_torn(self, killed, tmp_path):
        logdir = tmp_path / "run"
        shutil.copytree(killed, logdir)
        truncate(logdir / "ckpt/manifest.json")
        newest = manifests(logdir)[-1]
        with Run(logdir) as run:
            run.wait_for(f"from checkpoint {newest.tag}.")
            assert f"Continuing at step {newest.meta['step']}," in run.output()
            assert TORN in run.output() and "manifest.json" in run.output()
            run.goes_on()
            check_ratio(run)
            assert run.output().count("WARNING") == run.output().count(TORN)
            run.leave()
        check_replay(logdir)
        check_files(logdir)
        check_metrics(logdir)


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


# Of a size that has room for few saves.
DISK = pytest.mark.parametrize("small_disk", ["30m"], indirect=True)


class TestFullDisk:
    @DISK
    def test_the_last_save_stays_and_the_run_goes_on(self, small_disk):
        logdir = small_disk / "run"
        with Run(logdir) as run:
            run.goes_on()
            run.saves()
            fill(small_disk / "ballast")
            run.wait_for(NOT_SAVED)
            last = Checkpoint(logdir).newest()
            run.wait_for(f"The last checkpoint, {last.tag}, is untouched.")
            seen = run.output()
            run.wait_until(
                lambda: (
                    run.output().count(NOT_SAVED) > seen.count(NOT_SAVED) + 1
                    and shown_step(run.output()) > shown_step(seen)
                )
            )
            assert Checkpoint(logdir).newest() == last
            (small_disk / "ballast").unlink()
            run.goes_on()
            run.saves()
            assert Checkpoint(logdir).newest().tag > last.tag
            assert "restarted" not in run.output()
            run.leave()
        check_replay(logdir)

    @DISK
    def test_an_end_that_cannot_be_saved_is_an_error(self, small_disk):
        logdir = small_disk / "run"
        with Run(logdir) as run:
            run.goes_on()
            fill(small_disk / "ballast")
            run.wait_for(NOT_SAVED)
            last = Checkpoint(logdir).newest()
            run.terminate()
            assert run.wait() == 1, run.output()
            assert f"could not be saved to {logdir}" in run.output()
        assert Checkpoint(logdir).newest() == last

    @pytest.mark.parametrize("small_disk", ["900k"], indirect=True)
    @pytest.mark.parametrize(
        "flags",
        [
            ["--script", "train"],
            pytest.param(["--run.agent_process", "True"], marks=pytest.mark.slow),
        ],
        ids=["one process", "all roles"],
    )
    def test_a_run_that_could_never_be_saved_says_so_at_once(self, small_disk, flags):
        with Run(small_disk / "run", *flags) as run:
            assert run.wait() == 1, run.output()
            shown = run.output()
        assert "the run could never be saved there. Choose another --logdir." in shown
        assert "is untouched" not in shown and "Traceback" not in shown
        assert not Checkpoint(small_disk / "run").exists()

    @DISK
    def test_checkpoints_that_will_not_all_fit_are_told(self, small_disk):
        flags = ["--script", "train", "--run.steps", "50"]
        with Run(small_disk / "run", *flags, "--run.keep", "1000000") as run:
            assert run.wait() == 0, run.output()
            words = "but run.keep 1000000 needs room for 1000001 while one is written"
            assert run.output().count(words) == 1


def fill(path):
    """Writes until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(size))


def shown_step(output):
    return max(map(int, re.findall(r"^Step (\d+), ", output, re.MULTILINE)))


class TestEndDuringSave:
    @pytest.mark.parametrize(
        "process",
        [pytest.param(False, marks=pytest.mark.slow), True],
        ids=["thread", "process"],
    )
    def test_all_of_the_end_is_saved(self, tmp_path, process):
        flags = ["--run.save_every", "-1", "--run.agent_process", process]
        with Run(tmp_path, *flags) as run:
            run.saves()
            run.wait_until(lambda: is_saving(tmp_path))
            run.leave()
            assert "WARNING" not in run.output()
        saved = manifests(tmp_path)
        assert Checkpoint(tmp_path).newest() == saved[-1]
        assert not is_saving(tmp_path)
        assert not list(tmp_path.rglob("*.partial-save"))
        check_replay(tmp_path)


def is_saving(logdir):
    """Whether there are files of a save that is not committed."""
    tags = {manifest.tag for manifest in manifests(logdir)}
    return any(path.stem not in tags for path in (logdir / "ckpt/agent").iterdir())
