"""Saving and loading a replay, and cleaning up its files."""

from __future__ import annotations

import numpy as np
import pytest
from durable_testing import commit, contents, names
from replay_testing import (
    all_starts,
    check_batch,
    fill,
    make_update,
    versions,
    write_save,
)

from embodied.checkpoint import CheckpointError
from embodied.replay import Replay, reader, selectors


def same_samples(one, two):
    """Checks that the next batches of both replays are equal."""
    for _ in range(5):
        first, second = one.sample(7), two.sample(7)
        for key, value in first.items():
            assert (value == second[key]).all(), key


def versions_by_start(replay):
    """Returns the versions of latents by (worker, count) of each sequence's start."""
    batch = replay.sample(len(replay), "report")  # All of them, with a Fifo.
    check_batch(batch)
    starts = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
    return dict(zip(starts, versions(batch).tolist()))


class TestRoundTrip:
    @pytest.mark.parametrize("compress", ["zstd", "none"])
    def test_all_steps_come_back_through_a_checkpoint(
        self, make, checkpoint, tmp_path, compress
    ):
        replay = make(compress=compress)
        fill(replay, [0, 1, 5], range(21))
        commit(checkpoint, tmp_path, replay)
        data = checkpoint.load()[0]["replay"]
        loaded = make()
        loaded.load(data)
        assert len(loaded) == len(replay) == 3 * 19
        assert all_starts(loaded) == {(w, c) for w in (0, 1, 5) for c in range(19)}

    @pytest.mark.parametrize(
        "selector",
        [
            selectors.Fifo,
            selectors.Uniform,
            lambda: selectors.Recency(1 / np.arange(1, 100)),
            lambda: selectors.Prioritized(0.8, np.inf, True, 0.5),
            lambda: selectors.Mixture(
                {"a": selectors.Prioritized(), "b": selectors.Uniform()},
                {"a": 0.5, "b": 0.5},
            ),
        ],
    )
    def test_the_same_sequences_are_drawn(self, make, checkpoint, tmp_path, selector):
        replay = make(capacity=40, selector=selector())
        fill(replay, [0, 1], range(60))
        for priority in (3, 1, 2):
            replay.update(make_update(replay.sample(5), 1, priority))
        commit(checkpoint, tmp_path, replay)
        loads = [make(capacity=40, selector=selector()) for _ in range(2)]
        for loaded in loads:
            loaded.load(checkpoint.load()[0]["replay"])
        assert len(loads[0]) == len(replay)
        assert all_starts(loads[0]) == all_starts(replay)
        same_samples(*loads)

    def test_totals_go_on(self, make):
        replay = make(capacity=10)
        fill(replay, [0], range(30))
        replay.sample(4)
        loaded = make(capacity=10)
        loaded.load(replay.save())
        fill(loaded, [0], range(30, 35))
        stats = loaded.stats()
        assert (stats["inserts"], stats["total_inserts"]) == (5, 35)
        assert (stats["samples"], stats["total_samples"]) == (0, 4)
        assert stats["total_evicted"] == 18 + 3

    def test_no_sequence_spans_the_gap(self, make):
        replay = make(length=4)
        fill(replay, [0, 1], range(10))
        data = replay.save()
        fill(replay, [0, 1], range(10, 20))  # Not saved.
        loaded = make(length=4)
        loaded.load(data)
        assert loaded.stats()["streams"] == 0
        fill(loaded, [0], range(20, 26))
        # `all_starts` also checks that the steps of a sequence are consecutive.
        before = {(w, c) for w in (0, 1) for c in range(7)}
        assert all_starts(loaded) == before | {(0, c) for c in range(20, 23)}

    def test_the_episode_at_the_gap_is_abandoned(self, make):
        replay = make(length=2, selector=selectors.Fifo())
        fill(replay, [0], range(3))
        loaded = make(length=2, selector=selectors.Fifo())
        loaded.load(replay.save())
        lasts = loaded.sample(2, "report")["is_last"]
        assert lasts.tolist() == [[False, False], [False, True]]

    def test_the_oldest_are_evicted_first_after_a_load(self, make):
        replay = make(capacity=30, selector=selectors.Fifo())
        rng = np.random.default_rng(0)
        counts = dict.fromkeys(range(4), 0)
        for worker in rng.integers(0, 4, 100).tolist():
            fill(replay, [worker], [counts[worker]])
            counts[worker] += 1
        loaded = make(capacity=30, selector=selectors.Fifo())
        loaded.load(replay.save())
        # A stream of another worker evicts the same number of sequences from both.
        for buffer in (replay, loaded):
            fill(buffer, [9], range(19))
        assert len(replay) == len(loaded) == 30
        assert all_starts(replay) == all_starts(loaded)

    @pytest.mark.parametrize(
        ("capacity", "chunksize"), [(5, 8), (290, 8), (1000, 8), (1000, 5)]
    )
    def test_another_capacity_keeps_the_newest(self, make, capacity, chunksize):
        replay = make(capacity=300)
        fill(replay, [0], range(353))  # The oldest chunk is evicted in part.
        loaded = make(capacity=capacity, chunksize=chunksize)
        loaded.load(replay.save())
        kept = min(300, capacity)
        assert all_starts(loaded) == {(0, c) for c in range(351 - kept, 351)}

    @pytest.mark.parametrize("chunksize", [1, 3, 100])
    def test_another_chunksize_gives_the_same_sequences(self, make, chunksize):
        replay = make()
        fill(replay, [0, 1], range(30))
        loaded = make(chunksize=chunksize)
        loaded.load(replay.save())
        assert all_starts(loaded) == {(w, c) for w in (0, 1) for c in range(28)}
        again = make(chunksize=chunksize)
        again.load(loaded.save())
        assert all_starts(again) == all_starts(loaded)

    @pytest.mark.parametrize("length", [1, 2, 6])
    def test_another_length_gives_other_sequences_of_the_same_steps(self, make, length):
        replay = make(length=3)
        fill(replay, [0, 1], range(20))
        loaded = make(length=length, context=1)
        loaded.load(replay.save())
        expected = {(w, c) for w in (0, 1) for c in range(21 - length)}
        assert all_starts(loaded) == expected

    @pytest.mark.parametrize("context", [0, 3])
    def test_another_context_takes_what_it_needs_of_the_latents(self, make, context):
        replay = make(length=3, context=1)
        fill(replay, [0], range(20))
        loaded = make(length=3, context=context)
        loaded.load(replay.save())
        fill(loaded, [1], range(20))
        batch = loaded.sample(50)
        assert ("dyn/deter" in batch) == bool(context)
        assert set(batch["worker"][:, 0].tolist()) == {0, 1}

    def test_latents_that_were_not_saved_cannot_be_sampled(self, make):
        replay = make(length=3, context=0)
        empty = replay.save()
        fill(replay, [0], range(20))
        data = replay.save()
        loaded = make(length=3, context=1, name="train")
        with pytest.raises(
            CheckpointError,
            match=r"'train' has replay_context=1 .* saved with replay_context=0, ",
        ):
            loaded.load(data)
        assert len(loaded) == 0
        loaded.load()  # Not detected without the saved data.
        with pytest.raises(
            ValueError, match=r"'dyn/deter'.* run with replay_context 0"
        ):
            fill(loaded, [0], range(1))
        loaded.load(empty)
        fill(loaded, [0], range(3))
        assert len(loaded) == 1

    def test_saves_of_before_have_neither_the_context_nor_all_counters(self, make):
        replay = make(length=3)
        fill(replay, [0], range(20))
        data = replay.save()
        del data["context"], data["counters"]["priorities_rejected"]
        loaded = make(length=3)
        loaded.load(data)
        assert len(loaded) == 18
        assert loaded.stats()["total_priorities_rejected"] == 0

    @pytest.mark.parametrize("amount", [1, 10, 17, 1000])
    def test_amount_limits_to_the_newest_steps(self, make, amount):
        replay = make(length=3)
        fill(replay, [0], range(40))
        data = replay.save()
        for argument in (data, None):
            loaded = make(length=3)
            loaded.load(argument, amount=amount)
            start = max(0, 40 - amount)
            expected = {(0, c) for c in range(start, 38)}
            assert len(loaded) == len(expected)
            if expected:
                assert all_starts(loaded) == expected

    def test_the_progress_of_a_long_load_is_logged(self, make, monkeypatch, caplog):
        monkeypatch.setattr(reader, "_REPORT_SECONDS", -1)
        replay = make()
        fill(replay, [0], range(40))
        with caplog.at_level("INFO"):
            make().load(replay.save())
        told = [f"Loading replay: {i} of 5 chunks." for i in range(1, 6)]
        assert [record.message for record in caplog.records] == told

    def test_without_directory_there_is_nothing_to_save(self):
        replay = Replay(2)
        fill(replay, [0], range(5))
        data, cut = write_save(replay)
        loaded = Replay(2)
        loaded.load(data)
        assert len(loaded) == 0
        assert loaded.stats()["total_inserts"] == 5
        assert cut.records("/") == []
        with pytest.raises(ValueError, match="Expected a directory"):
            loaded.load()

    def test_an_empty_buffer_can_be_saved_and_loaded(self, make):
        replay = make()
        data = replay.save()
        fill(replay, [0], range(5))
        replay.load(data)
        assert len(replay) == 0
        fill(replay, [0], range(5))
        check_batch(replay.sample(1))

    def test_loading_replaces_what_was_there(self, make):
        replay = make(online=True, selector=selectors.Prioritized())
        fill(replay, [0], range(10))
        data = replay.save()
        fill(replay, [0, 1], range(10, 50))
        old = replay.sample(4)
        replay.load(data)
        assert all_starts(replay) == {(0, c) for c in range(8)}
        assert replay.stats()["online_queue"] == 0
        replay.update(make_update(old, 1, priority=5))  # Mostly of steps that are gone.
        check_batch(replay.sample(20))


class TestFiles:
    def test_files_are_written_once_and_never_changed(self, make, tmp_path):
        replay = make(capacity=60)
        before = {}
        for start in range(0, 150, 13):
            fill(replay, [0, 1, 2], range(start, start + 13))
            replay.update(make_update(replay.sample(4), start))
            replay.save()
            now = contents(tmp_path)
            assert before.items() <= now.items()
            assert len(now) > len(before)
            before = now

    def test_a_save_writes_only_what_is_new(self, make, tmp_path):
        replay = make()
        fill(replay, [0], range(20))
        replay.save()
        first = names(tmp_path)
        replay.save()
        assert names(tmp_path) == first
        fill(replay, [0], range(20, 22))
        replay.save()
        (fresh,) = names(tmp_path) - first
        assert fresh.split("-")[1:] == ["00000004", "00000006", "00000003.steps"]

    def test_evicted_chunks_leave_the_disk_after_the_commit(
        self, make, checkpoint, tmp_path
    ):
        replay = make(capacity=40, length=2)
        sizes = []
        for start in range(0, 400, 50):
            fill(replay, [0], range(start, start + 50))
            before = names(tmp_path)
            replay.save()
            assert before <= names(tmp_path), "deleted before the commit"
            commit(checkpoint, tmp_path, replay)
            sizes.append(len(names(tmp_path)))
        # Two kept checkpoints of 41 to 48 steps, in chunks of 1 (40 // 32).
        assert max(sizes) <= 2 * 45
        assert checkpoint.newest() is not None
        oldest = checkpoint.load()[0]["replay"]
        loaded = make(capacity=40, length=2)
        loaded.load(oldest)
        assert all_starts(loaded) == {(0, c) for c in range(359, 399)}

    def test_refreshed_latents_survive(self, make, checkpoint, tmp_path):
        replay = make(length=3, context=3, selector=selectors.Fifo())
        fill(replay, [0, 1], range(20))
        commit(checkpoint, tmp_path, replay)
        for version in range(1, 4):
            batch = replay.sample(6)
            replay.update(make_update(batch, version))
            commit(checkpoint, tmp_path, replay)
            loaded = make(length=3, context=3, selector=selectors.Fifo())
            loaded.load(checkpoint.load()[0]["replay"])
            assert versions_by_start(loaded) == versions_by_start(replay)
            assert versions(loaded.sample(36, "report")).max() == version
        # Only the generations that the kept checkpoints list are left.
        chunks = {name[:32] for name in names(tmp_path, "latents")}
        assert chunks and len(names(tmp_path, "latents")) <= 2 * len(chunks)

    def test_latents_refreshed_before_the_first_save_survive(self, make):
        replay = make(length=2, context=2, selector=selectors.Fifo())
        fill(replay, [0], range(5))
        replay.update(make_update(replay.sample(4), 7))
        loaded = make(length=2, context=2, selector=selectors.Fifo())
        loaded.load(replay.save())
        assert (versions(loaded.sample(4)) == 7).all()

    def test_latents_refreshed_in_a_chunk_that_grows_survive(self, make):
        replay = make(length=2, context=2, selector=selectors.Fifo())
        fill(replay, [0], range(4))
        replay.save()
        replay.update(make_update(replay.sample(3, "report"), 7))
        fill(replay, [0], range(4, 8))
        loaded = make(length=2, context=2, selector=selectors.Fifo())
        loaded.load(replay.save())
        assert versions(loaded.sample(7))[:, 0].tolist() == [7, 7, 7, 7, 0, 0, 0]

    def test_the_most_recently_refreshed_latents_are_written_first(
        self, make, tmp_path
    ):
        budget = 2 * 8 * (4 * 2 + 3)  # Two chunks of 8 steps.
        replay = make(length=1, selector=selectors.Fifo(), latent_save_bytes=budget)
        fill(replay, [0], range(40))
        data = replay.save()
        assert not names(tmp_path, "latents")
        order = [4, 17, 35, 9, 26]  # One step in each of the five chunks.
        batch = replay.sample(40, "report")
        for version, count in enumerate(order, start=1):
            row = {key: value[count : count + 1] for key, value in batch.items()}
            replay.update(make_update(row, version))
        saved = [data]
        for kept in ([9, 26], [17, 35, 9, 26], order):
            saved.append(replay.save())
            loaded = make(length=1, selector=selectors.Fifo())
            loaded.load(saved[-1])
            found = versions(loaded.sample(40))[:, 0]
            assert set(np.flatnonzero(found).tolist()) == set(kept)
            for count in kept:
                assert found[count] == 1 + order.index(count)
        assert len(names(tmp_path, "latents")) == 5
        replay.save()
        assert len(names(tmp_path, "latents")) == 5, "nothing was refreshed"

    def test_priorities_survive_even_where_slots_have_changed(self, make):
        replay = make(length=1, selector=selectors.Prioritized())
        fill(replay, [0], range(30))
        batch = replay.sample(500, "report")
        chosen = batch["count"] == 11
        replay.update(
            {"stepid": batch["stepid"], "priority": chosen.astype(np.float32)}
        )
        loaded = make(length=1, selector=selectors.Prioritized(), chunksize=5)
        loaded.load(replay.save())
        assert set(loaded.sample(100)["count"][:, 0].tolist()) == {11}

    def test_a_discarded_save_leaves_no_file_and_is_made_up_for(self, make, tmp_path):
        replay = make(length=2, context=2, selector=selectors.Fifo())
        fill(replay, [0], range(20))
        replay.save()
        replay.update(make_update(replay.sample(3), 1))
        replay.save()
        before = contents(tmp_path)
        fill(replay, [0], range(20, 30))
        replay.update(make_update(replay.sample(10, "report"), 2))
        write_save(replay)[1].discard()
        assert contents(tmp_path) == before
        loaded = make(length=2, context=2, selector=selectors.Fifo())
        loaded.load(replay.save())
        assert len(versions_by_start(loaded)) == 29
        assert versions_by_start(loaded) == versions_by_start(replay)

    def test_cleaning_removes_what_came_after_a_checkpoint(
        self, make, checkpoint, tmp_path
    ):
        replay = make()
        fill(replay, [0], range(20))
        data = commit(checkpoint, tmp_path, replay)
        kept = names(tmp_path)
        fill(replay, [0], range(20, 40))
        replay.update(make_update(replay.sample(9), 1))
        replay.save()
        assert names(tmp_path) > kept
        loaded = make()
        loaded.load(data)
        loaded.clean(checkpoint.listed(), tmp_path)
        assert names(tmp_path) == kept
        assert all_starts(loaded) == {(0, c) for c in range(18)}

    def test_cleaning_removes_what_came_before_a_checkpoint(
        self, make, checkpoint, tmp_path
    ):
        replay = make()
        fill(replay, [0], range(20))
        for version in range(3):
            replay.update(make_update(replay.sample(9), 2 * version))
            replay.save()  # Neither committed nor discarded: the conductor was killed.
            replay.update(make_update(replay.sample(9), 2 * version + 1))
            data = commit(checkpoint, tmp_path, replay)
        listed = {path.removeprefix("replay/") for path in checkpoint.listed()}
        assert names(tmp_path) - listed, "files that nobody needs"
        (tmp_path / "replay" / "notes.txt").write_text("not a chunk")
        loaded = make()
        loaded.load(data)
        loaded.clean(checkpoint.listed(), tmp_path)
        assert names(tmp_path, "steps") | names(tmp_path, "latents") <= listed
        assert (tmp_path / "replay" / "notes.txt").exists()
        loaded.load(data)
        assert all_starts(loaded) == {(0, c) for c in range(18)}

    def test_going_on_from_an_older_checkpoint_leaves_the_newer_one_whole(
        self, make, checkpoint, tmp_path
    ):
        replay = make(selector=selectors.Fifo())
        fill(replay, [0], range(16))
        older = commit(checkpoint, tmp_path, replay)
        fill(replay, [0], range(16, 40))
        replay.update(make_update(replay.sample(38, "report"), 1))
        newer = commit(checkpoint, tmp_path, replay)
        before = contents(tmp_path)
        other = make(selector=selectors.Fifo())
        other.load(older)
        other.clean(checkpoint.listed(), tmp_path)
        other.update(make_update(other.sample(14, "report"), 2))
        other.save()  # Writes latents of the same chunks, under another name.
        assert contents(tmp_path).items() > before.items()
        loaded = make(selector=selectors.Fifo())
        loaded.load(newer)
        assert (versions(loaded.sample(38, "report")) == 1).all()

    def test_cleaning_removes_nothing_if_a_manifest_is_damaged(
        self, make, checkpoint, tmp_path
    ):
        replay = make()
        for start in (0, 20):
            fill(replay, [0], range(start, start + 20))
            data = commit(checkpoint, tmp_path, replay)
        (tmp_path / "ckpt/manifest.json").write_bytes(b"torn")
        max((tmp_path / "ckpt/manifests").iterdir()).write_bytes(b"torn")
        before = names(tmp_path)
        loaded = make()
        loaded.load(checkpoint.load()[0]["replay"])
        assert all_starts(loaded) == {(0, c) for c in range(18)}
        loaded.clean(checkpoint.listed(), tmp_path)
        assert names(tmp_path) == before
        loaded.load(data)
        assert all_starts(loaded) == {(0, c) for c in range(38)}

    def test_cleaning_leaves_the_files_of_other_replays(
        self, make, checkpoint, tmp_path
    ):
        folders = [tmp_path / "replay", tmp_path / "replay/00001"]
        replays = [make(directory=folder) for folder in folders]
        for replay in replays:
            fill(replay, [0], range(20))
            replay.save()
        replays[0].clean(set(), tmp_path)
        assert [len(list(folder.glob("*.steps"))) for folder in folders] == [0, 3]

    def test_records_are_relative_to_the_root(self, make, tmp_path):
        replay = make()
        fill(replay, [0], range(20))
        _, cut = write_save(replay)
        records = cut.records(tmp_path)
        assert {x.path for x in records} == {f"replay/{x}" for x in names(tmp_path)}
        assert not any(record.required for record in records)
        with pytest.raises(ValueError, match="Expected the root"):
            cut.records(tmp_path / "elsewhere")
