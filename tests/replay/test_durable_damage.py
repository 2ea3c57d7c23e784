"""Damaged files, failed saves and full disks do not spoil the rest of a replay."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess

import numpy as np
import pytest
from durable_testing import commit, names
from replay_testing import (
    all_starts,
    check_batch,
    fill,
    make_steps,
    make_update,
    versions,
    write_save,
)

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.replay import Replay, selectors

FULL = CheckpointError("the disk is full")


@contextlib.contextmanager
def failing_writes(monkeypatch, replay, number, error):
    """Lets the write of one file of a replay fail, counted from 1."""
    write, calls = replay._folder.write, itertools.count(1)

    def fail(*args):
        if next(calls) == number:
            raise error
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(replay._folder, "write", fail)
        yield


class TestCuts:
    def test_steps_after_the_cut_do_not_belong_to_the_save(self, make):
        replay = make()
        fill(replay, [0, 1], range(20))
        with replay.cut() as cut:
            fill(replay, [0, 1], range(20, 40))
            data = cut.write()
        loaded = make()
        loaded.load(data)
        assert all_starts(loaded) == {(w, c) for w in (0, 1) for c in range(18)}
        assert loaded.stats()["total_inserts"] == 40

    def test_a_cut_that_is_not_written_lets_go_of_everything(self, make, tmp_path):
        replay = make(length=2, capacity=20)
        fill(replay, [0], range(20))
        replay.cut().close()
        fill(replay, [0], range(20, 400))
        assert replay.stats()["chunks"] <= 24, "evicted chunks are still held"
        replay.save()
        assert names(tmp_path, "steps")

    def test_a_failing_write_lets_the_next_save_begin(self, make, monkeypatch):
        replay = make(save_wait=True)
        fill(replay, [0], range(20))

        def fail(*args):
            raise CheckpointError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(replay._folder, "write", fail)
            with pytest.raises(CheckpointError, match="full"):
                replay.save()
        fill(replay, [0], range(20, 40))
        loaded = make()
        loaded.load(replay.save())
        assert len(loaded) == len(replay) == 38


class TestOtherFolders:
    @pytest.mark.parametrize("with_data", [True, False])
    def test_steps_from_elsewhere_are_copied_by_the_next_save(
        self, make, tmp_path, with_data
    ):
        source = make(directory=tmp_path / "source")
        fill(source, [0, 1], range(20))
        data = source.save()
        replay = make()
        replay.load(data if with_data else None, tmp_path / "source")
        assert all_starts(replay) == {(w, c) for w in (0, 1) for c in range(18)}
        data = replay.save()
        loaded = make()
        loaded.load(data)
        assert all_starts(loaded) == all_starts(replay)

    def test_without_a_list_all_whole_files_count(self, make, tmp_path):
        replay = make(capacity=50)
        for start in range(0, 60, 7):
            fill(replay, [0, 1], range(start, start + 7))
            replay.update(make_update(replay.sample(3), start))
            replay.save()
        loaded = make()
        loaded.load()
        # Evicted steps stay on disk until a commit.
        assert all_starts(loaded) == {(w, c) for w in (0, 1) for c in range(61)}
        loaded = make(capacity=50)
        loaded.load()
        assert all_starts(loaded) >= {(w, c) for w in (0, 1) for c in range(45, 61)}
        fill(loaded, [0], range(100, 110))
        loaded.save()
        again = make(capacity=1000)
        again.load()
        assert {(0, c) for c in range(100, 108)} <= all_starts(again)

    def test_an_empty_or_missing_folder_gives_an_empty_buffer(self, make, tmp_path):
        replay = make()
        replay.load()
        assert len(replay) == 0
        (tmp_path / "replay").mkdir()
        (tmp_path / "replay" / "notes.txt").write_text("not a chunk")
        replay.load()
        assert len(replay) == 0

    def test_chunks_whose_steps_differ_are_left_out(self, make, caplog):
        old = make()
        old.add_batch({"other": np.zeros(9, np.float32)}, [0] * 9)
        old.save()
        replay = make()
        fill(replay, [0], range(20))
        replay.save()
        loaded = make()
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            loaded.load()
        assert all_starts(loaded) == {(0, c) for c in range(18)}
        assert "whose steps differ" in caplog.text


def damage_cut(path):
    os.truncate(path, path.stat().st_size // 2)


def damage_empty(path):
    os.truncate(path, 0)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 16
    path.write_bytes(data)


def damage_remove(path):
    path.unlink()


DAMAGES = [damage_cut, damage_empty, damage_flip, damage_remove]


class TestLinks:
    def test_steps_behind_links_are_read(self, make, tmp_path):
        replay = make()
        fill(replay, [0, 1], range(30))
        replay.save()
        shared = tmp_path / "shared"
        shared.mkdir()
        for path in (tmp_path / "replay").iterdir():
            (shared / path.name).symlink_to(path)
        (shared / "loop").symlink_to("loop")
        loaded = make(directory=None)
        loaded.load(directory=shared)
        assert all_starts(loaded) == all_starts(replay) != set()


class TestDamage:
    @pytest.mark.parametrize("compress", ["zstd", "none"])
    @pytest.mark.parametrize("with_data", [True, False])
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_file_is_left_out_and_the_rest_kept(
        self, make, tmp_path, caplog, damage, with_data, compress
    ):
        replay = make(length=3, compress=compress)
        for start in range(0, 30, 3):  # Pieces of 3 steps; chunks of 8.
            fill(replay, [0, 1], range(start, start + 3))
            data = replay.save()
        victim = next(
            path
            for path in sorted((tmp_path / "replay").iterdir())
            if path.name.split("-")[1:3] == ["00000004", "00000007"]
        )
        chunk = victim.name[:32]
        damage(victim)
        loaded = make(length=3)
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            loaded.load(data if with_data else None)
        starts = all_starts(loaded)
        lost = {(w, c) for w in (0, 1) for c in range(28)} - starts
        (worker,) = {w for w, _ in lost}
        counts = {c for _, c in lost}
        # Steps 4 to 6 of a chunk of 8 are gone. All sequences that hold one of them are
        # lost, and so is the one from step 7, behind the gap, into the next chunk.
        first = min(counts) + 2
        assert first % 8 == 4
        assert counts == set(range(first - 2, first + 4)) & set(range(28))
        if with_data or damage is not damage_remove:
            assert victim.name in caplog.text
        assert len(names(tmp_path)) >= 20 - 1
        data = loaded.save()
        again = make(length=3)
        again.load(data)
        assert all_starts(again) == starts
        assert worker in (0, 1) and chunk

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_latents_give_those_that_came_with_the_steps(
        self, make, tmp_path, caplog, damage
    ):
        replay = make(length=2, context=2, selector=selectors.Fifo())
        fill(replay, [0], range(8))
        replay.save()
        replay.update(make_update(replay.sample(7), 5))
        data = replay.save()
        (victim,) = (tmp_path / "replay").glob("*.latents")
        damage(victim)
        loaded = make(length=2, context=2, selector=selectors.Fifo())
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            loaded.load(data)
        assert victim.name in caplog.text
        batch = loaded.sample(7)
        check_batch(batch)
        assert (versions(batch) == 0).all()

    def test_foreign_bytes_under_a_good_name_are_left_out(self, make, tmp_path, caplog):
        replay = make()
        fill(replay, [0], range(20))
        replay.save()
        paths = sorted((tmp_path / "replay").iterdir())
        paths[0].write_bytes(os.urandom(1000))
        paths[1].write_bytes(b"\x28\xb5\x2f\xfd" + os.urandom(1000))
        paths[2].write_bytes((1 << 60).to_bytes(8, "little") + bytes(100))
        loaded = make()
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            loaded.load()
        assert len(loaded) == 0
        assert len(caplog.records) == 3

    def test_a_whole_file_in_the_place_of_another_is_left_out(
        self, make, tmp_path, caplog
    ):
        replay = make()
        fill(replay, [0], range(16))
        data = replay.save()
        one, two = (tmp_path / "replay").iterdir()
        one.write_bytes(two.read_bytes())
        loaded = make()
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            loaded.load(data)
        assert one.name in caplog.text
        counts = {c for _, c in all_starts(loaded)}
        assert counts in ({0, 1, 2, 3, 4, 5}, {8, 9, 10, 11, 12, 13})

    @pytest.mark.parametrize(
        "data", [{}, [], {"format": 99}, {"format": 1, "counters": {}}, "text"]
    )
    def test_what_is_no_save_is_refused(self, make, data):
        replay = make()
        fill(replay, [0], range(9))
        with pytest.raises(CheckpointError, match="cannot read the saved replay"):
            replay.load(data)
        assert len(replay) == 7, "what was there is kept"

    def test_another_selector_has_all_sequences(self, make):
        replay = make(selector=selectors.Uniform())
        fill(replay, [0], range(20))
        loaded = make(selector=selectors.Fifo())
        loaded.load(replay.save())
        assert loaded.sample(18)["count"][:, 0].tolist() == list(range(18))


class TestFullDisk:
    def big(self, replay, counts):
        """Adds steps that do not compress."""
        rng = np.random.default_rng(counts.start)
        for count in counts:
            steps = make_steps([0], [count])
            steps["noise"] = rng.integers(0, 255, (1, 20_000), np.uint8)
            replay.add_batch(steps, [0])

    def test_work_goes_on_and_a_later_save_makes_up_for_it(self, small_disk):
        def make():
            return Replay(3, directory=small_disk / "replay", chunksize=8, context=1)

        replay = make()
        checkpoint = Checkpoint(small_disk, keep=2)
        self.big(replay, range(60))
        commit(checkpoint, small_disk, replay, {"step": 60})
        self.big(replay, range(60, 260))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is full"):
                replay.save()
        check_batch(replay.sample(5))
        self.big(replay, range(260, 270))
        replay.update(make_update(replay.sample(2), 1))
        assert not list(small_disk.rglob("*partial*"))
        parts, meta = checkpoint.load()
        assert meta == {"step": 60}
        loaded = make()
        loaded.load(parts["replay"])
        assert all_starts(loaded) == {(0, c) for c in range(58)}
        # Ten times as much room.
        larger = ["mount", "-o", "remount,size=40m", str(small_disk)]
        subprocess.run(larger, check=True, timeout=30)
        commit(checkpoint, small_disk, replay, {"step": 270})
        loaded = make()
        loaded.load(checkpoint.load()[0]["replay"])
        assert all_starts(loaded) == {(0, c) for c in range(268)}

    def test_files_that_no_save_came_to_list_are_removed(
        self, make, tmp_path, monkeypatch
    ):
        replay = make(length=1, capacity=16, context=1, selector=selectors.Fifo())
        fill(replay, [0], range(8))
        replay.save()
        with failing_writes(monkeypatch, replay, 5, FULL):
            fill(replay, [0], range(8, 20))
            with pytest.raises(CheckpointError, match="full"):
                replay.save()
        assert len(names(tmp_path)) > 8
        fill(replay, [0], range(20, 60))
        _, cut = write_save(replay)
        listed = {x.path for x in cut.records(tmp_path / "replay")}
        assert listed <= names(tmp_path)
        first_save = {name for name in names(tmp_path) if "-00000001." in name}
        assert names(tmp_path) == listed | first_save

    def test_files_of_evicted_steps_make_room_before_the_next_save(
        self, make, tmp_path, monkeypatch
    ):
        replay = make(length=1, capacity=16, context=1, selector=selectors.Fifo())
        fill(replay, [0], range(8))
        replay.save()
        with failing_writes(monkeypatch, replay, 4, FULL):
            fill(replay, [0], range(8, 20))
            with pytest.raises(CheckpointError, match="full"):
                replay.save()
        left = names(tmp_path)
        fill(replay, [0], range(20, 100))  # Nothing of before is in it any more.
        with failing_writes(monkeypatch, replay, 1, FULL):
            with pytest.raises(CheckpointError, match="full"):
                replay.save()
        saved = {name for name in left if "-00000001." in name}
        after = names(tmp_path)
        assert len(left) > len(saved)
        assert after & left == saved

    def test_any_failure_of_one_file_keeps_account_of_the_others(
        self, make, tmp_path, monkeypatch
    ):
        replay = make(length=1, capacity=64, context=1, selector=selectors.Fifo())
        fill(replay, [0], range(40))
        error = MemoryError("no memory to compress")
        with failing_writes(monkeypatch, replay, 3, error), pytest.raises(MemoryError):
            replay.save()
        _, cut = write_save(replay)
        listed = {x.path for x in cut.records(tmp_path / "replay")}
        assert names(tmp_path) == listed
