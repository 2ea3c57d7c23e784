"""Damaged, hostile and old checkpoints: which are skipped, removed or refused."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from checkpoint_testing import files_below, flip, same, warnings
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    FileRecord,
    reading,
    write_file,
)
from embodied.checkpoint.files import seal
from embodied.checkpoint.store import Manifest


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves two checkpoints; returns them with the contents of their files."""
    root = tmp_path_factory.mktemp("saved")
    checkpoint = Checkpoint(root)
    old = {"agent": {"w": np.arange(50.0), "n": 1}, "logger": [1, "one"]}
    new = {"agent": {"w": -np.arange(50.0), "n": 2}, "logger": [2, "two"]}
    checkpoint.save(old, {"step": 1})
    tag = checkpoint.save(new, {"step": 2})
    contents = {path: (root / path).read_bytes() for path in files_below(root)}
    return root, checkpoint, (old, {"step": 1}), (new, {"step": 2}), tag, contents


class TestDamage:
    @settings(max_examples=70)
    @given(st.data())
    def test_a_flipped_bit_or_a_torn_file_never_gives_wrong_data(self, saved, data):
        root, checkpoint, old, new, tag, contents = saved
        path = data.draw(st.sampled_from(sorted(contents)))
        size = len(contents[path])
        if data.draw(st.booleans()):
            flip(root / path, data.draw(st.integers(0, 8 * size - 1)))
        else:
            (root / path).write_bytes(
                contents[path][: data.draw(st.integers(0, size - 1))]
            )
        try:
            with warnings() as messages:
                found = checkpoint.load()
        finally:
            (root / path).write_bytes(contents[path])
        newest_part = tag in path and "manifest" not in path
        assert same(found, old if newest_part else new)
        assert any(path in text for text in messages) == (
            newest_part or "manifest" in path
        )

    def test_both_copies_of_a_manifest_damaged_gives_the_previous_one(
        self, tmp_path, checkpoint
    ):
        checkpoint.save({"agent": 1})
        tag = checkpoint.save({"agent": 2})
        flip(tmp_path / "ckpt/manifest.json", 999)
        flip(tmp_path / f"ckpt/manifests/{tag}.json", 999)
        assert checkpoint.load() == ({"agent": 1}, {})
        assert checkpoint.save({"agent": 3}) > tag
        assert checkpoint.load() == ({"agent": 3}, {})

    def test_a_damaged_archive_copy_is_written_anew_by_the_next_commit(
        self, tmp_path, checkpoint
    ):
        first = checkpoint.save({"agent": 1})
        flip(tmp_path / f"ckpt/manifests/{first}.json", 999)
        second = checkpoint.save({"agent": 2})
        flip(tmp_path / f"ckpt/agent/{second}.json", 99)
        assert checkpoint.load() == ({"agent": 1}, {})

    def test_optional_files_do_not_count(self, tmp_path, checkpoint):
        chunk = write_file(tmp_path, "replay/chunk", b"data", required=False)
        tag = checkpoint.new_tag()
        checkpoint.commit(tag, [*checkpoint.write_part(tag, "agent", 1), chunk])
        flip(tmp_path / chunk.path, 0)
        assert checkpoint.newest().tag == tag

    def test_a_required_file_outside_the_folder_counts(self, tmp_path, checkpoint):
        checkpoint.save({"agent": 0})
        tag = checkpoint.new_tag()
        checkpoint.commit(tag, [write_file(tmp_path, "replay/index", b"data")])
        flip(tmp_path / "replay/index", 0)
        assert checkpoint.load() == ({"agent": 0}, {})

    @pytest.mark.parametrize("what", ["manifests", "parts"])
    def test_nothing_whole_raises_and_keeps_everything(
        self, tmp_path, checkpoint, what
    ):
        for step in range(2):
            checkpoint.save({"agent": step})
        manifests = {path for path in files_below(tmp_path) if "manifest" in path}
        parts = {
            path for path in files_below(tmp_path) if path.endswith(".safetensors")
        }
        damaged = manifests if what == "manifests" else parts
        for path in damaged:
            flip(tmp_path / path, 80)
        before = files_below(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"No checkpoint in .* is whole"
        ) as error:
            checkpoint.load()
        assert all(path in str(error.value) for path in damaged)
        assert "move the folder away" in str(error.value)
        checkpoint.clean()
        assert files_below(tmp_path) == before
        assert checkpoint.exists()


class TestPruning:
    @pytest.mark.parametrize("keep", [1, 3])
    def test_the_newest_are_kept(self, tmp_path, keep):
        checkpoint = Checkpoint(tmp_path, keep=keep)
        tags = [checkpoint.save({"agent": step}) for step in range(5)]
        expected = {"ckpt/manifest.json"}
        for tag in tags[-keep:]:
            expected |= {f"ckpt/manifests/{tag}.json", f"ckpt/agent/{tag}.json"}
            expected |= {f"ckpt/agent/{tag}.safetensors"}
        assert files_below(tmp_path) == expected

    @settings(max_examples=15)
    @given(
        st.integers(1, 3),
        st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6),
    )
    def test_chunks_live_as_long_as_a_kept_manifest_lists_them(self, keep, cuts):
        with tempfile.TemporaryDirectory() as root:
            checkpoint = Checkpoint(root, keep=keep)
            unlisted = write_file(root, "replay/unlisted", b"")
            for cut in cuts:
                records = [
                    write_file(root, f"replay/{chunk}", b"data", required=False)
                    for chunk in cut
                ]
                checkpoint.commit(checkpoint.new_tag(), records)
            expected = {f"replay/{x}" for cut in cuts[-keep:] for x in cut}
            found = {x for x in files_below(root) if not x.startswith("ckpt")}
            assert found == expected | {unlisted.path}

    def test_a_damaged_manifest_deletes_nothing_and_does_not_count(self, tmp_path):
        checkpoint = Checkpoint(tmp_path, keep=2)
        shared = write_file(tmp_path, "replay/shared", b"data", required=False)

        def save(step):
            tag = checkpoint.new_tag()
            records = checkpoint.write_part(tag, "agent", step)
            checkpoint.commit(tag, [*records, shared])
            return tag

        tags = [save(0), save(1)]
        flip(tmp_path / f"ckpt/manifests/{tags[1]}.json", 500)
        flip(tmp_path / "ckpt/manifest.json", 500)
        tags.append(save(2))
        assert checkpoint.newest().tag == tags[2]
        flip(tmp_path / f"ckpt/agent/{tags[2]}.json", 99)
        assert checkpoint.newest().tag == tags[0], "the second whole one was kept"
        tags += [save(3), save(4)]
        left = {path.stem for path in (tmp_path / "ckpt/manifests").iterdir()}
        assert left == set(tags[-2:]), "the damaged one went when it was too old"
        assert (tmp_path / shared.path).exists()

    def test_the_parts_of_a_damaged_manifest_stay_for_its_repair(self, tmp_path):
        checkpoint = Checkpoint(tmp_path, keep=3)
        tags = [checkpoint.save({"agent": step}) for step in range(2)]
        copy = tmp_path / f"ckpt/manifests/{tags[1]}.json"
        good = copy.read_bytes()
        for path in (copy, tmp_path / "ckpt/manifest.json"):
            flip(path, 200)
        checkpoint = Checkpoint(tmp_path, keep=3)
        checkpoint.clean()
        assert checkpoint.load()[0] == {"agent": 0}
        copy.write_bytes(good)
        assert Checkpoint(tmp_path, keep=3).load()[0] == {"agent": 1}

    def test_a_checkpoint_that_lost_a_file_does_not_count(self, tmp_path):
        checkpoint = Checkpoint(tmp_path, keep=2)
        tags = [checkpoint.save({"agent": step}) for step in range(2)]
        (tmp_path / f"ckpt/agent/{tags[1]}.json").unlink()
        checkpoint.save({"agent": 2})
        (tmp_path / f"ckpt/agent/{checkpoint.newest().tag}.json").unlink()
        assert checkpoint.load() == ({"agent": 0}, {})

    def test_a_failed_deletion_is_a_warning_and_tried_again(self, tmp_path, caplog):
        checkpoint = Checkpoint(tmp_path, keep=1)
        first = checkpoint.commit(
            checkpoint.new_tag(), [write_file(tmp_path, "x", b"1")]
        )
        (tmp_path / "x").unlink()
        (tmp_path / "x").mkdir()
        checkpoint.save({"agent": 1})
        assert "Cannot remove x" in caplog.text
        assert checkpoint.load() == ({"agent": 1}, {})
        (tmp_path / "x").rmdir()
        checkpoint.clean()
        assert not (tmp_path / f"ckpt/manifests/{first.tag}.json").exists()


class TestReadersOfARunThatGoesOn:
    """With keep=1 every commit prunes the checkpoint that a reader has found."""

    @pytest.fixture
    def run(self, tmp_path):
        run = Checkpoint(tmp_path, keep=1)
        run.save({"agent": 0}, {"step": 0})
        return run

    @pytest.fixture
    def commit_before(self, monkeypatch, run):
        """Makes the run commit before each of the first calls of a reader."""

        def commit_before(name, commits):
            function, steps = getattr(reading, name), iter(range(1, commits + 1))

            def commit_and_call(*args, **kwargs):
                if (step := next(steps, None)) is not None:
                    with monkeypatch.context() as patch:
                        patch.setattr(reading, name, function)
                        run.save({"agent": step}, {"step": step})
                return function(*args, **kwargs)

            monkeypatch.setattr(reading, name, commit_and_call)

        return commit_before

    # `find_damage` checks whether files are whole; `load_tree` reads them afterwards.
    @pytest.mark.parametrize("name", ["find_damage", "load_tree"])
    @pytest.mark.parametrize("commits", [1, 3])
    def test_they_get_the_newer_checkpoint_without_a_warning(
        self, tmp_path, commit_before, name, commits
    ):
        reader = Checkpoint(tmp_path)
        commit_before(name, commits)
        with warnings() as messages:
            manifest, parts = reader.read_newest(["agent"])
        assert (manifest.meta["step"], parts) == (commits, {"agent": commits})
        assert not messages

    def test_all_ways_to_read_look_again(self, tmp_path, commit_before):
        reader = Checkpoint(tmp_path)
        commit_before("find_damage", 1)
        assert reader.newest().meta["step"] == 1
        commit_before("find_damage", 1)
        assert reader.load() == ({"agent": 1}, {"step": 1})

    def test_they_do_not_look_for_ever(self, tmp_path, commit_before):
        commit_before("load_tree", 1000)
        with pytest.raises(CheckpointError, match="is missing"):
            Checkpoint(tmp_path).load()

    def test_what_is_damaged_is_read_once(self, tmp_path, run, monkeypatch):
        for path in files_below(tmp_path):
            if path.endswith(".safetensors"):
                flip(tmp_path / path, 80)
        find_damage, calls = reading.find_damage, []

        def count(*args, **kwargs):
            calls.append(args)
            return find_damage(*args, **kwargs)

        monkeypatch.setattr(reading, "find_damage", count)
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
            Checkpoint(tmp_path).newest()
        assert len(calls) == 2  # The part's two files.


class TestHostileManifests:
    def plant(self, root, path, tag="20200101T000000000000-00000001"):
        """Writes an old, well-sealed manifest that lists `path`."""
        manifest = Manifest(tag, (FileRecord(path, 3, "sha256:" + 64 * "0"),), {})
        target = root / f"ckpt/manifests/{tag}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(manifest.to_bytes())

    @pytest.mark.parametrize(
        "path", ["../victim", "{outside}", "link/victim", "a/../../victim"]
    )
    def test_nothing_outside_the_root_is_read_or_deleted(self, tmp_path, path):
        root = tmp_path / "root"
        (root / "a").mkdir(parents=True)
        (root / "link").symlink_to(tmp_path)
        victim = tmp_path / "victim"
        victim.write_bytes(b"abc")
        self.plant(root, path.format(outside=victim))
        checkpoint = Checkpoint(root, keep=1)
        with pytest.raises(CheckpointError, match=r"No checkpoint .* is whole"):
            checkpoint.newest()
        checkpoint.save({"agent": 1})
        checkpoint.save({"agent": 2})
        checkpoint.clean()
        assert victim.read_bytes() == b"abc"
        assert checkpoint.load() == ({"agent": 2}, {})

    def test_the_current_manifest_is_not_deleted_for_an_old_one(self, tmp_path):
        self.plant(tmp_path, "ckpt/manifest.json")
        checkpoint = Checkpoint(tmp_path, keep=1)
        checkpoint.save({"agent": 1})
        assert (tmp_path / "ckpt/manifest.json").exists()

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        self.plant(tmp_path, "pipe")
        with pytest.raises(CheckpointError, match="regular file"):
            Checkpoint(tmp_path).newest()

    @pytest.mark.parametrize(
        "content",
        [None, [], {}, {"format": 2}, {"format": 1, "tag": "x", "files": [1]}],
    )
    def test_a_manifest_of_another_shape_is_refused(self, tmp_path, content):
        (tmp_path / "ckpt").mkdir()
        (tmp_path / "ckpt/manifest.json").write_bytes(seal(content))
        with pytest.raises(CheckpointError, match="is not a manifest that this"):
            Checkpoint(tmp_path).newest()


class TestCleaning:
    def test_leftovers_go_and_everything_else_stays(self, tmp_path, checkpoint):
        for step in range(2):
            checkpoint.save({"agent": step})
        tag = checkpoint.new_tag()
        write_file(tmp_path, "replay/chunk", b"data")
        write_file(tmp_path, "ckpt/agent/notes.txt", b"mine")
        write_file(tmp_path, "ckpt/manifests/notes.json", b"mine")
        before = files_below(tmp_path)
        checkpoint.write_part(tag, "agent", 9)
        checkpoint.write_part(tag, "replay/00001", 9)
        for folder in ("", "ckpt", "ckpt/agent", "replay"):
            (tmp_path / folder / ".0123456789abcdef.partial-save").write_bytes(b"torn")
        checkpoint.clean()
        assert files_below(tmp_path) == before

    def test_a_first_save_that_was_killed_leaves_nothing(self, tmp_path, checkpoint):
        checkpoint.write_part(checkpoint.new_tag(), "agent", 9)
        checkpoint.clean()
        assert not files_below(tmp_path)
        assert checkpoint.newest() is None

    def test_a_save_that_fails_half_way_removes_its_parts(self, tmp_path, checkpoint):
        checkpoint.save({"agent": 0})
        before = files_below(tmp_path)
        with pytest.raises(CheckpointError, match=r"builtins.object"):
            checkpoint.save({"agent": 1, "logger": object()})
        assert files_below(tmp_path) == before
