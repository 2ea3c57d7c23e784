"""Capacity, the online queue, updates and priorities of a replay."""

from __future__ import annotations

import logging
import math

import numpy as np
import psutil
import pytest
from replay_testing import (
    all_starts,
    check_batch,
    fill,
    make_update,
    versions,
)

from embodied.replay import Replay, selectors, sizing
from embodied.replay.index import ONLINE_LIMIT


def train_counts(replay, batch):
    return replay.sample(batch)["count"][:, 0].tolist()


class TestCapacity:
    @pytest.mark.parametrize("capacity", [1, 10, 33])
    def test_the_oldest_items_are_evicted(self, capacity):
        replay = Replay(3, capacity, chunksize=4, selector=selectors.Fifo())
        fill(replay, [0, 1], range(50))
        assert len(replay) == capacity
        order = [(w, c) for c in range(48) for w in (0, 1)][-capacity:]
        batch = replay.sample(capacity)
        check_batch(batch)
        found = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
        assert list(found) == order
        assert replay.stats()["evicted"] == 96 - capacity

    def test_memory_of_evicted_chunks_is_used_again(self):
        replay = Replay(5, 100, chunksize=4)
        fill(replay, [0, 1], range(100))
        chunks = replay.stats()["chunks"]
        for start in range(100, 2000, 100):
            fill(replay, [0, 1], range(start, start + 100))
            assert abs(replay.stats()["chunks"] - chunks) <= 4
        check_batch(replay.sample(50))

    def test_one_batch_may_be_larger_than_the_capacity(self):
        replay = Replay(1, 5, selector=selectors.Fifo())
        workers = np.arange(2000)
        for start in (0, 2000):
            replay.add_batch({"worker": start + workers}, workers)
            expected = [[start + worker] for worker in range(1995, 2000)]
            assert replay.sample(5, "report")["worker"].tolist() == expected

    def test_bytes_evict_when_the_capacity_does_not(self):
        replay = Replay(3, bytes=30_000, chunksize=8)
        fill(replay, range(4), range(400))
        stats = replay.stats()
        assert stats["bytes"] <= 30_000
        assert stats["bytes"] > 20_000, "far too much was evicted"
        newest = {(w, c) for w in range(4) for c in range(397, 398)}
        assert newest <= all_starts(replay)
        assert stats["evicted"] == 4 * 398 - len(replay)

    def test_explicit_bytes_that_cannot_hold_the_capacity_are_an_error(self):
        replay = Replay(3, 5e6, bytes=1e6, name="train")
        step = {"image": np.zeros((64, 64, 3), np.uint8)}
        with pytest.raises(
            ValueError,
            match=r"Replay 'train' should hold 5000000 steps of 12328 bytes, 61.6 GB, "
            r"but bytes=1e\+06 holds 81 steps",
        ):
            replay.add(step)
        assert len(replay) == 0
        fits = Replay(3, 81, bytes=1e6)
        for _ in range(100):
            fits.add(step)
        assert len(fits) > 60
        assert fits.stats()["bytes"] <= 1e6

    def test_auto_bytes_shrink_the_capacity_with_a_warning(self, monkeypatch, caplog):
        monkeypatch.setattr(sizing, "available_bytes", lambda: 2e5)
        replay = Replay(3, 1e6, chunksize=16, name="train")
        with caplog.at_level(logging.WARNING, "embodied.replay"):
            fill(replay, [0], range(6))
        (record,) = caplog.records
        size = replay.stats()["bytes"] // 16
        fits = int(0.8e5 // size)
        assert f"hold {fits} steps. The capacity shrinks to that" in record.message
        assert "Replay 'train' should hold 1000000 steps" in record.message
        fill(replay, [0], range(6, 2 * fits))
        assert 0.9 * fits < len(replay) <= fits
        assert replay.stats()["bytes"] <= 0.8e5

    def test_auto_is_silent_where_the_capacity_fits(self, caplog):
        replay = Replay(3, 100)
        fill(replay, [0], range(6))
        assert not caplog.records

    def test_a_limit_below_one_sequence_is_an_error(self):
        with pytest.raises(ValueError, match="One sequence of 65 in chunks of"):
            Replay(65, bytes=5000).add({"image": np.zeros(1000, np.uint8)})

    def test_more_workers_than_memory_has_room_for_are_refused(self):
        replay = Replay(4, bytes=1000 * 60, chunksize=100)
        steps = {"x": np.zeros(20, np.uint8)}
        replay.add(steps, 0)
        workers = list(range(1000))
        with pytest.raises(ValueError, match="each of 1000 workers needs"):
            replay.add_batch({"x": np.zeros((1000, 20), np.uint8)}, workers)
        assert replay.stats()["streams"] == 1
        assert replay.stats()["total_inserts"] == 1

    def test_the_limit_of_a_container_counts(self, monkeypatch):
        free = psutil.virtual_memory().available
        monkeypatch.setattr(sizing, "cgroup_bytes_left", lambda: math.inf)
        assert sizing.available_bytes() > free / 2
        monkeypatch.setattr(sizing, "cgroup_bytes_left", lambda: 700)
        assert sizing.available_bytes() == 700

    def test_reserved_memory_is_not_taken_before_it_is_written(self):
        process = psutil.Process()
        before = process.memory_info().rss
        replay = Replay(2, bytes=psutil.virtual_memory().total // 2)
        for _ in range(10):
            replay.add({"image": np.ones((64, 64, 3), np.uint8)})
        assert process.memory_info().rss - before < 100e6

    def test_loading_forgets_steps_and_what_a_step_holds(self):
        replay = Replay(2, online=True, selector=selectors.Prioritized())
        fill(replay, [0], range(20))
        old = replay.sample(1)
        replay.load(Replay(2).save())
        assert len(replay) == 0
        with pytest.raises(LookupError):
            replay.sample(1)
        replay.update(make_update(old, 1))
        replay.add({"other": np.float32(1)})
        replay.add({"other": np.float32(2)})
        assert replay.sample(1)["other"].tolist() == [[1, 2]]


class TestOnline:
    def make(self, **kwargs):
        return Replay(3, online=True, selector=selectors.Fifo(), **kwargs)

    def test_fresh_sequences_come_first_once_and_do_not_overlap(self):
        replay = self.make()
        fill(replay, [0], range(11))
        assert train_counts(replay, 2) == [0, 3]
        assert train_counts(replay, 3) == [6, 0, 1], "the queue, then the selector"
        assert train_counts(replay, 2) == [2, 3]
        fill(replay, [0], range(11, 13))
        assert train_counts(replay, 1) == [9]

    def test_each_worker_has_its_own_sequences(self):
        replay = self.make()
        fill(replay, [0], range(1))
        fill(replay, [1], range(7))
        fill(replay, [0], range(1, 4))
        batch = replay.sample(3)
        found = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
        assert list(found) == [(1, 0), (1, 3), (0, 0)]

    @pytest.mark.parametrize("mode", ["report", "eval"])
    def test_other_modes_leave_the_queue_alone(self, mode):
        replay = self.make()
        fill(replay, [0], range(9))
        before = replay.stats()["online_queue"]
        replay.sample(5, mode)
        assert replay.stats()["online_queue"] == before == 3
        assert train_counts(replay, 3) == [0, 3, 6]

    def test_a_queue_that_nobody_empties_is_bounded(self):
        replay = Replay(1, online=True, chunksize=64)
        amount = ONLINE_LIMIT + 50
        for count in range(amount):
            replay.add({"count": np.int32(count)})
            if count % 100 == 0:
                replay.sample(1, "eval")
        stats = replay.stats()
        assert stats["online_queue"] == ONLINE_LIMIT
        assert stats["online_dropped"] == 50
        assert replay.sample(2)["count"].tolist() == [[50], [51]]

    def test_evicted_sequences_are_skipped(self):
        replay = self.make(capacity=4)
        fill(replay, [0], range(30))
        counts = train_counts(replay, 4)
        assert counts[0] == 24, "27 has no two successors; before 24 all is evicted"
        assert min(counts) >= 24

    def test_there_is_no_queue_by_default(self):
        replay = Replay(3, selector=selectors.Fifo())
        fill(replay, [0], range(9))
        assert replay.stats()["online_queue"] == 0
        assert train_counts(replay, 2) == [0, 1]


class TestUpdates:
    def test_latents_are_refreshed_and_others_stay(self):
        replay = Replay(3, context=3, selector=selectors.Fifo())
        fill(replay, [0, 1], range(5))
        batch = replay.sample(2, "report")
        replay.update(make_update(batch, version=8))
        batch = replay.sample(6, "report")
        check_batch(batch)
        refreshed = {0: 8, 1: 8, 2: 8, 3: 0, 4: 0}
        expected = [[refreshed[x] for x in row] for row in batch["count"].tolist()]
        assert versions(batch).tolist() == expected

    def test_steps_that_are_gone_are_counted_and_their_place_is_untouched(self):
        replay = Replay(2, 8, chunksize=2, context=2)
        fill(replay, [0], range(5))
        old = [replay.sample(4, "report") for _ in range(5)]
        fill(replay, [0], range(5, 100))
        replay.stats()
        for batch in old:
            replay.update(make_update(batch, version=9))
        assert replay.stats()["update_ignored"] == 5 * 4 * 2
        batch = replay.sample(50, "report")
        check_batch(batch)
        assert (versions(batch) == 0).all()

    def test_forged_and_unwritten_steps_are_ignored(self):
        replay = Replay(2, chunksize=100, context=1)
        fill(replay, [0], range(3))
        batch = replay.sample(1)
        forged = dict(make_update(batch, version=9))
        forged["stepid"] = forged["stepid"].copy()
        forged["stepid"][0, 0, 19] = 50  # Same chunk, not written yet.
        forged["stepid"][0, 1, 0] ^= 1  # Another chunk.
        replay.update(forged)
        assert replay.stats()["update_ignored"] == 2
        assert (versions(replay.sample(9)) == 0).all()

    def test_updates_before_the_first_step_are_ignored(self):
        replay = Replay(2, context=1)
        replay.update({"stepid": np.zeros((3, 2, 20), np.uint8)})
        assert replay.stats()["update_ignored"] == 6

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"stepid": np.zeros((1, 3, 19), np.uint8)}, r"\[..., 20\]"),
            ({"stepid": np.zeros((1, 3, 20), np.int32)}, "got int32"),
            ({"dyn/deter": np.zeros((1, 3, 4), np.int32)}, "dyn/deter as bfloat16"),
            ({"dyn/stoch": np.zeros((1, 2, 3), np.uint8)}, r"\(1, 3, 3\)"),
            ({"priority": np.zeros((1, 2), np.float32)}, r"priority of shape \(1, 3\)"),
            ({"image": np.zeros((1, 3), np.uint8)}, r"got \['image'\] in addition"),
        ],
    )
    def test_malformed_updates_are_refused_and_change_nothing(self, change, message):
        replay = Replay(3, context=1)
        fill(replay, [0], range(3))
        update = make_update(replay.sample(1), version=5) | change
        with pytest.raises(ValueError, match=message):
            replay.update(update)
        assert (versions(replay.sample(5)) == 0).all()

    def test_an_update_without_stepid_is_refused(self):
        replay = Replay(3, context=1)
        fill(replay, [0], range(3))
        with pytest.raises(ValueError, match="Expected stepid"):
            replay.update({"priority": np.zeros(3)})


class TestPriorities:
    def test_an_empty_selector_is_not_replaced(self):
        selector = selectors.Prioritized(initial=0.0)
        replay = Replay(2, selector=selector)
        fill(replay, [0], range(30))
        assert len(selector) == len(replay) == 29
        batch = replay.sample(500, "report")
        update = make_update(batch, 0)
        chosen = batch["count"] == 7
        replay.update(
            {"stepid": update["stepid"], "priority": chosen.astype(np.float32)}
        )
        starts = set(replay.sample(200)["count"][:, 0].tolist())
        assert starts == {6, 7}, "all sequences with step 7, and only those"

    @pytest.mark.parametrize("chunksize", [1, 2, 3, 50])
    def test_a_step_reaches_all_sequences_that_hold_it(self, chunksize):
        calls = {}

        class Recorder(selectors.Fifo):
            uses_priorities = True

            def prioritize(self, slots, priorities):
                calls.update(zip(slots.tolist(), priorities.tolist()))

        replay = Replay(4, chunksize=chunksize, selector=Recorder())
        fill(replay, [0, 1], range(12))
        batch = replay.sample(18, "report")
        chosen = (batch["worker"] == 1) & (batch["count"] == 5)
        ids = batch["stepid"][chosen][:1]
        replay.update({"stepid": ids, "priority": np.array([2.5], np.float32)})
        assert len(calls) == 4
        for row in calls.values():
            assert np.isnan(row).sum() == 3
        assert sorted(row.index(2.5) for row in calls.values()) == [0, 1, 2, 3]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
    def test_a_priority_that_is_none_leaves_the_one_before(self, value):
        class Recorder(selectors.Prioritized):
            def prioritize(self, slots, priorities):
                calls.append(priorities.tolist())
                super().prioritize(slots, priorities)

        calls = []
        replay = Replay(2, selector=Recorder())
        fill(replay, [0], range(3))
        batch = replay.sample(50, "report")
        ids = dict(
            zip(batch["count"].ravel().tolist(), batch["stepid"].reshape(-1, 20))
        )

        def update(priorities):
            replay.update(
                {
                    "stepid": np.stack([ids[count] for count in priorities]),
                    "priority": np.array(list(priorities.values()), np.float32),
                }
            )

        update({0: 10.0, 1: 2.0, 2: 4.0})
        update({0: value, 2: 6.0})
        assert calls == [[[10, 2], [2, 4]], [[2, 6]]]
        update({0: value, 1: value})
        update({1: 3.0})
        assert calls[2:] == [[[10, 3], [3, 6]]], "as if the others had not come"
        stats = replay.stats()
        assert (stats["updates"], stats["priorities_rejected"]) == (4, 3)

    def test_only_training_notes_what_was_drawn(self):
        replay = Replay(1, selector=selectors.Prioritized(zero_on_sample=True))
        fill(replay, [0], range(10))
        for mode in ("report", "eval"):
            replay.sample(50, mode)
        assert sorted(train_counts(replay, 10)) == list(range(10))

    def test_priorities_of_evicted_steps_do_not_matter(self):
        replay = Replay(2, 8, chunksize=2, selector=selectors.Prioritized())
        fill(replay, [0], range(6))
        old = replay.sample(10, "report")
        fill(replay, [0], range(6, 60))
        ids, counts = old["stepid"], old["count"]
        replay.update({"stepid": ids, "priority": np.ones(counts.shape, np.float32)})
        assert len(set(train_counts(replay, 200))) == 8


class TestStats:
    def test_counts_start_anew_and_totals_go_on(self):
        replay = Replay(4, 10, context=1)
        fill(replay, [0, 1], range(10))
        replay.sample(5)
        replay.sample(3, "report")
        replay.update(make_update(replay.sample(1, "eval"), 1))
        stats = replay.stats()
        assert stats["items"] == len(replay) == 10
        assert stats["streams"] == 2
        assert stats["inserts"] == stats["total_inserts"] == 20
        assert stats["evicted"] == 4
        assert stats["samples"] == 9
        assert stats["updates"] == 1
        assert stats["update_ignored"] == 0
        assert stats["replay_ratio"] == 5 * 4 / 20
        fill(replay, [0], [10])
        stats = replay.stats()
        assert (stats["inserts"], stats["total_inserts"]) == (1, 21)
        assert (stats["samples"], stats["total_samples"]) == (0, 9)

    def test_an_empty_buffer_has_stats(self):
        stats = Replay(4).stats()
        assert stats["items"] == stats["bytes"] == stats["inserts"] == 0
        assert "replay_ratio" not in stats
