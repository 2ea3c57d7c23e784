"""What a run saves, and how it continues."""

import errno
import json
import os
import shutil

import elements
import numpy as np
import pytest
from run_testing import (
    START,
    NotingAgent,
    Parts,
    contents,
    make_args,
    make_named_replay,
    newest_step,
    saved_steps,
)

from embodied.checkpoint import Checkpoint, CheckpointError, reading
from embodied.run.parallel import conductor
from embodied.run.parallel.conductor import RoleCheckpoint
from embodied.run.saving import RunCheckpoint, read_agent


def unlisted(logdir):
    """Returns the files of parts and replays that no manifest lists."""
    manifests = (logdir / "ckpt" / "manifests").glob("*.json")
    contents = [json.loads(path.read_text())["content"] for path in manifests]
    listed = {record["path"] for content in contents for record in content["files"]}
    found = {
        path.relative_to(logdir).as_posix()
        for folder in ("replay", "ckpt")
        for path in (logdir / folder).rglob("*")
        if path.is_file() and "manifest" not in path.relative_to(logdir).as_posix()
    }
    return found - listed


class TestResume:
    def test_it_goes_on_with_counter_replay_and_agent(self, tmp_path):
        first = Parts(tmp_path, steps=60)
        first.train()
        before = contents(first.replay)
        again = Parts(tmp_path, steps=60)
        assert again.train().step == 60
        assert contents(again.replay) == before
        assert again.agent.updates == first.agent.updates
        further = Parts(tmp_path, steps=90)
        assert (further.train().steps, int(further.logger.step)) == (30, 90)
        assert further.logger.rows[0][0] > 60, "metrics go on at that step"
        assert further.replay.stats()["total_inserts"] == 90
        assert further.agent.updates > first.agent.updates

    def test_no_sequence_spans_the_gap(self, tmp_path):
        Parts(tmp_path, steps=40).train()
        again = Parts(tmp_path, steps=80)
        again.train()
        batch = again.replay.sample(2000)
        where = batch["where"].astype(int)
        positions = where[..., 1] * 6 + where[..., 2]
        assert (np.diff(positions, axis=1) == 1).all()

    @pytest.mark.parametrize("ratio", [4e-7, 3.7, 20.0])
    def test_the_ratio_is_exact_over_all_resumes(self, tmp_path, ratio):
        Parts(tmp_path, steps=START, train_ratio=ratio, envs=2).train()
        for steps in (38, 62, 64, 200):
            parts = Parts(tmp_path, steps=steps, train_ratio=ratio, envs=2)
            parts.train()
        ahead = parts.agent.updates * 4 * 6 - ratio * (200 - START)
        assert 0 < ahead <= 4 * 6

    def test_random_numbers_go_on(self, tmp_path):
        whole = Parts(tmp_path / "whole", steps=80, envs=1)
        whole.train()
        for steps in (40, 80):
            cut = Parts(tmp_path / "cut", steps=steps, envs=1)
            cut.train()
        actions = [
            {int(a) for a in parts.replay.sample(2000)["action"][:, 0]}
            for parts in (whole, cut)
        ]
        assert actions[0] > actions[1], "without those whose sequence has no end"

    def test_train_ratio_may_change(self, tmp_path):
        Parts(tmp_path, steps=40, train_ratio=4.0).train()
        again = Parts(tmp_path, steps=80, train_ratio=24.0)
        assert again.train().updates == pytest.approx(40, abs=2)

    def test_latents_that_were_not_saved_are_missed_before_anything_runs(
        self, tmp_path
    ):
        Parts(tmp_path, steps=40, replay_context=0).train()
        again = Parts(tmp_path, steps=80, replay_context=1)
        with pytest.raises(CheckpointError, match=r"replay_context=0, without them"):
            again.train()
        assert again.envs == []
        assert Parts(tmp_path, steps=80, replay_context=0).train().steps == 40

    def test_the_newest_whole_checkpoint_is_taken(self, tmp_path, caplog):
        Parts(tmp_path, steps=40).train()
        Parts(tmp_path, steps=80).train()
        assert saved_steps(tmp_path) == [0, 40, 80]
        newest = max((tmp_path / "ckpt/agent").glob("*.safetensors"))
        newest.write_bytes(newest.read_bytes()[:-1])
        again = Parts(tmp_path, steps=60)
        assert again.train().steps == 20
        assert newest.name in caplog.text
        assert newest_step(tmp_path) == 60

    def test_a_checkpoint_that_was_skipped_can_be_mended(self, tmp_path):
        for steps in (40, 80):
            first = Parts(tmp_path, steps=steps)
            first.train()
        newest = max((tmp_path / "ckpt/agent").glob("*.safetensors"))
        away = newest.rename(tmp_path / "away")
        assert Parts(tmp_path, steps=40).train().step == 40
        away.rename(newest)
        again = Parts(tmp_path, steps=80)
        assert again.train().steps == 0
        assert len(again.replay) == len(first.replay) > 40
        assert not unlisted(tmp_path)

    def test_when_none_is_whole_a_person_has_to_decide(self, tmp_path):
        Parts(tmp_path, steps=40).train()
        for path in (tmp_path / "ckpt/agent").glob("*.json"):
            path.unlink()
        parts = Parts(tmp_path, steps=60)
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
            parts.train()
        assert parts.logger.closed
        assert saved_steps(tmp_path) == [0, 40], "nothing was overwritten"

    def test_damaged_replay_files_cost_their_steps_only(self, tmp_path, caplog):
        first = Parts(tmp_path, steps=200)
        first.train()
        victim = max((tmp_path / "replay").iterdir(), key=lambda x: x.stat().st_size)
        victim.write_bytes(b"x")
        again = Parts(tmp_path, steps=200)
        again.train()
        assert set() < contents(again.replay) < contents(first.replay)
        assert victim.name in caplog.text
        assert int(again.logger.step) == 200

    def test_experience_without_a_checkpoint_is_used(self, tmp_path):
        first = Parts(tmp_path, steps=60)
        first.train()
        shutil.rmtree(tmp_path / "ckpt")
        again = Parts(tmp_path, steps=1, envs=1)
        again.train()
        assert contents(again.replay) == contents(first.replay)
        assert again.agent.updates == 1, "there is enough to train on"
        assert Parts(tmp_path, steps=1).train().step == 1


class TestSave:
    def test_at_the_start_in_between_and_at_the_end(self, tmp_path):
        Parts(tmp_path, steps=7, envs=1, save_every=-1.0, keep=100).train()
        assert saved_steps(tmp_path) == list(range(8))

    def test_at_the_end_although_never_in_between(self, tmp_path):
        Parts(tmp_path, steps=30, save_every=0.0).train()
        assert saved_steps(tmp_path) == [0, 30]

    def test_only_the_newest_are_kept_with_their_files(self, tmp_path):
        Parts(tmp_path, steps=9, envs=1, save_every=-1.0, keep=2).train()
        assert saved_steps(tmp_path) == [8, 9]
        assert len(list((tmp_path / "ckpt/agent").iterdir())) == 4

    def test_nothing_new_is_not_saved_again(self, tmp_path):
        Parts(tmp_path, steps=30).train()

        def written():
            shown = ("live.json", "events.jsonl")  # Live status, not saved state.
            paths = [path for path in tmp_path.rglob("*") if path.name not in shown]
            return {path: path.stat().st_mtime_ns for path in paths}

        before = written()
        Parts(tmp_path, steps=30).train()
        assert written() == before

    def test_the_folders_of_the_contract(self, tmp_path):
        Parts(tmp_path, steps=20).train()
        assert {"agent", "replay", "logger", "manifest.json"} <= {
            path.name for path in (tmp_path / "ckpt").iterdir()
        }
        assert any((tmp_path / "replay").iterdir())

    def test_what_a_killed_save_left_is_removed_at_the_start(self, tmp_path):
        Parts(tmp_path, steps=20).train()
        strays = ["ckpt/agent/20990101T000000000000-00000009.json"]
        strays.append("replay/.0123456789abcdef.partial-save")
        for stray in strays:
            (tmp_path / stray).write_bytes(b"half")
        Parts(tmp_path, steps=40).train()
        assert not any((tmp_path / stray).exists() for stray in strays)

    def test_replay_files_of_a_save_that_was_not_committed_are_removed(self, tmp_path):
        Parts(tmp_path, steps=40).train()
        before = set((tmp_path / "replay").iterdir())
        committed = (tmp_path / "ckpt/manifest.json").read_bytes()
        Parts(tmp_path, steps=80).train()
        assert set((tmp_path / "replay").iterdir()) > before
        (tmp_path / "ckpt/manifest.json").write_bytes(committed)
        max((tmp_path / "ckpt/manifests").iterdir()).unlink()
        assert Parts(tmp_path, steps=40).train().step == 40
        assert set((tmp_path / "replay").iterdir()) == before


class TestFullDisk:
    """Writing fails as on a full disk, from some moment on or for a while."""

    @pytest.fixture
    def disk(self, monkeypatch):
        write, state = os.write, {"full": False, "folder": ""}

        def limited(descriptor, data):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if state["full"] and state["folder"] in name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", limited)
        return state

    @pytest.mark.parametrize(
        "folder", ["ckpt/logger", "ckpt/limiter", "/replay/", "ckpt"]
    )
    def test_training_goes_on_with_a_warning_and_is_saved_later(
        self, tmp_path, disk, caplog, folder
    ):
        disk["folder"] = folder

        class Watching(NotingAgent):
            """Fills the disk after 3 updates, and frees it after 6."""

            def train(self, carry, batch):
                disk["full"] = 3 <= self.updates < 6
                if self.updates == 6:
                    seen.append(saved_steps(tmp_path)[-1])
                return super().train(carry, batch)

        seen = []
        steps = START + 20
        parts = Parts(tmp_path, steps=steps, train_ratio=12.0, save_every=-1.0)
        parts.make_agent = Watching
        parts.train()
        assert "was not saved. The disk that holds" in caplog.text
        assert seen and seen[0] < START + 10, "the last good one is still there"
        assert newest_step(tmp_path) == steps
        assert not unlisted(tmp_path), "failed saves leave nothing"
        again = Parts(tmp_path, steps=steps)
        again.train()
        assert contents(again.replay) == contents(parts.replay)

    @pytest.mark.parametrize("folder", ["ckpt/agent", "ckpt/limiter"])
    def test_an_end_that_cannot_be_saved_is_an_error(self, tmp_path, disk, folder):
        disk["folder"] = folder

        class Filling(NotingAgent):
            def train(self, carry, batch):
                disk["full"] = True
                return super().train(carry, batch)

        parts = Parts(tmp_path, steps=40)
        parts.make_agent = Filling
        with pytest.raises(CheckpointError, match="step 40, could not be saved"):
            parts.train()
        assert newest_step(tmp_path) == 0
        assert not unlisted(tmp_path), "neither of the agent nor of the replay"


class TestCommitted:
    def test_a_commit_that_raised_but_happened_keeps_its_files(
        self, tmp_path, monkeypatch
    ):
        commit = Checkpoint.commit

        def commit_and_fail(self, tag, records, meta=None):
            commit(self, tag, records, meta)
            raise CheckpointError("the folder could not be synced")

        first = Parts(tmp_path, steps=60)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "commit", commit_and_fail)
            with pytest.raises(CheckpointError, match="could not be saved"):
                first.train()
        again = Parts(tmp_path, steps=60)
        assert again.train().steps == 0
        assert contents(again.replay) == contents(first.replay) != set()


class TestFromCheckpoint:
    def test_a_new_run_starts_with_the_agent_only(self, tmp_path):
        source = Parts(tmp_path / "source", steps=60)
        source.train()
        parts = Parts(
            tmp_path / "new", steps=2, from_checkpoint=str(tmp_path / "source")
        )
        assert parts.train().step == 2
        assert parts.agent.updates == source.agent.updates > 0
        assert len(parts.replay) == 0
        assert saved_steps(tmp_path / "new") == [0, 2]

    def test_the_regex_restricts_it(self, tmp_path):
        Parts(tmp_path / "source", steps=60).train()
        parts = Parts(
            tmp_path / "new",
            steps=2,
            from_checkpoint=str(tmp_path / "source"),
            from_checkpoint_regex="rng",
        )
        parts.train()
        assert parts.agent.updates == 0

    def test_a_run_that_continues_takes_its_own(self, tmp_path):
        Parts(tmp_path / "source", steps=60).train()
        source = str(tmp_path / "source")
        first = Parts(tmp_path / "new", steps=100, from_checkpoint=source)
        first.train()
        shutil.rmtree(source)
        again = Parts(tmp_path / "new", steps=100, from_checkpoint=source)
        again.train()
        assert again.agent.updates == first.agent.updates

    def test_the_source_may_go_on(self, tmp_path, monkeypatch):
        Parts(tmp_path / "source", steps=20, keep=1).train()
        find_damage = reading.find_damage

        def go_on(*args, **kwargs):
            monkeypatch.setattr(reading, "find_damage", find_damage)
            Parts(tmp_path / "source", steps=60, keep=1).train()
            return find_damage(*args, **kwargs)

        monkeypatch.setattr(reading, "find_damage", go_on)
        assert read_agent(tmp_path / "source").step == 60

    @pytest.mark.parametrize("folder", ["", "nowhere"])
    def test_a_wrong_folder_is_named_before_anything_is_saved(self, tmp_path, folder):
        (tmp_path / "empty").mkdir()
        parts = Parts(
            tmp_path / "new", from_checkpoint=str(tmp_path / "empty" / folder)
        )
        with pytest.raises(CheckpointError, match=r"run.from_checkpoint: expected .*"):
            parts.train()
        assert not (tmp_path / "new").exists()


def test_parts_are_saved_under_one_step(tmp_path):
    args = make_args(tmp_path)
    replay, agent = make_named_replay(args), NotingAgent()

    class Counter:
        """The least that a counter needs: it can be read as an int, and loaded."""

        value = 5

        def __int__(self):
            return self.value

        def load(self, value):
            self.value = value

    checkpoint = RunCheckpoint(args, Counter(), agent, {"replay": replay})
    assert checkpoint.save()
    counter = Counter()
    counter.value = 0
    RunCheckpoint(args, counter, agent, {"replay": replay}).restore()
    assert counter.value == 5


def test_a_linked_folder_of_a_replay_is_refused(tmp_path):
    args = make_args(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/replay").symlink_to(tmp_path / "elsewhere")
    counter, agent = elements.Counter(), NotingAgent()
    checkpoint = RunCheckpoint(
        args, counter, agent, {"replay": make_named_replay(args)}
    )
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.restore()
    with pytest.raises(CheckpointError, match="symbolic link"):
        RoleCheckpoint(args).folder("replay")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(conductor.fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match="has no locks"):
        RoleCheckpoint(make_args(tmp_path)).load(["replay"])
