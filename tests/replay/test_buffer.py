"""Samples of a replay, and their contents."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from replay_testing import (
    all_starts,
    check_batch,
    fill,
    make_step,
    make_steps,
)

from embodied.replay import Replay, selectors
from embodied.replay.chunks import Schema


class TestSamples:
    def test_every_full_sequence_of_every_worker_can_be_sampled(self):
        replay = Replay(4, chunksize=3)
        fill(replay, [0, 7, 2], range(9))
        assert len(replay) == 3 * 6
        assert all_starts(replay) == {(w, c) for w in (0, 7, 2) for c in range(6)}

    def test_a_worker_with_too_few_steps_has_no_sequence(self):
        replay = Replay(4)
        fill(replay, [0], range(3))
        assert len(replay) == 0
        with pytest.raises(LookupError, match="'unnamed' has no sequence of 4 steps"):
            replay.sample(1)
        fill(replay, [0], [3])
        assert all_starts(replay) == {(0, 0)}

    @pytest.mark.parametrize("chunksize", [1, 2, 5, 100])
    def test_sequences_may_be_longer_than_chunks(self, chunksize):
        replay = Replay(5, chunksize=chunksize)
        fill(replay, [1], range(12))
        assert all_starts(replay) == {(1, count) for count in range(8)}

    def test_log_keys_are_dropped_and_others_kept(self):
        replay = Replay(2, context=1)
        fill(replay, [0], range(2))
        batch = replay.sample(3)
        keys = {"worker", "count", "checksum", "image", "is_first", "is_last"}
        assert set(batch) == keys | {"dyn/deter", "dyn/stoch", "stepid"}
        assert batch["image"].shape == (3, 2, 3, 2)
        assert batch["stepid"].shape == (3, 2, 20)
        assert batch["dyn/deter"].dtype == ml_dtypes.bfloat16

    @pytest.mark.parametrize("context", [1, 2, 4])
    def test_latents_have_the_steps_of_the_context_only(self, context):
        replay = Replay(4, context=context)
        fill(replay, [0], range(6))
        batch = replay.sample(2)
        assert batch["dyn/deter"].shape == (2, context, 4)
        assert batch["dyn/stoch"].shape == (2, context, 3)
        assert batch["count"].shape == (2, 4)
        check_batch(batch)

    def test_stepids_are_unique_and_the_same_in_overlapping_sequences(self):
        replay = Replay(3, chunksize=4, selector=selectors.Fifo())
        fill(replay, [0, 1], range(10))
        batch = replay.sample(len(replay), "report")
        seen = {}
        for pair, stepid in zip(
            np.stack([batch["worker"], batch["count"]], -1).reshape(-1, 2).tolist(),
            batch["stepid"].reshape(-1, 20),
        ):
            assert seen.setdefault(tuple(pair), stepid.tobytes()) == stepid.tobytes()
        assert len(set(seen.values())) == len(seen) == 20

    def test_a_stepid_is_the_chunk_and_the_index_in_it(self):
        replay = Replay(3, chunksize=300)
        fill(replay, [0], range(300))
        batch = replay.sample(1)
        ids = batch["stepid"][0]
        assert (ids[:, :16] == ids[0, :16]).all()
        index = [int.from_bytes(x[16:].tobytes(), "big") for x in ids]
        assert index == batch["count"][0].tolist()

    def test_the_same_seed_gives_the_same_samples(self):
        batches = []
        for seed in (1, 1, 2):
            replay = Replay(3, seed=seed)
            fill(replay, [0, 1], range(200))
            batches.append(replay.sample(20)["count"].tolist())
        assert batches[0] == batches[1] != batches[2]

    @pytest.mark.parametrize("mode", ["test", "", None])
    def test_unknown_modes_are_refused(self, mode):
        replay = Replay(1)
        fill(replay, [0], [0])
        with pytest.raises(ValueError, match="Expected a mode of"):
            replay.sample(1, mode)

    @pytest.mark.parametrize("batch", [0, -1])
    def test_empty_batches_are_refused(self, batch):
        with pytest.raises(ValueError, match="at least 1"):
            Replay(1).sample(batch)

    def test_samples_are_copies(self):
        replay = Replay(2, context=1)
        fill(replay, [0], range(2))
        first = replay.sample(1)
        for value in first.values():
            value[...] = 0
        check_batch(replay.sample(1))

    def test_an_empty_buffer_is_true(self):
        assert Replay(2)
        assert len(Replay(2)) == 0


class TestMemory:
    def test_a_sample_without_memory_leaves_the_buffer_usable(self, monkeypatch):
        replay = Replay(2, 20, chunksize=2)
        fill(replay, [0], range(5))

        def fail(self, batch, length):
            raise MemoryError("no memory here")

        with monkeypatch.context() as patch:
            patch.setattr(Schema, "empty_batch", fail)
            for _ in range(5):
                with pytest.raises(MemoryError, match="no memory here"):
                    replay.sample(2)
        fill(replay, [0], range(5, 200))
        assert all_starts(replay) == {(0, count) for count in range(179, 199)}
        assert replay.stats()["chunks"] <= 24, "evicted chunks are still held"


class TestEpisodes:
    def add(self, replay, count, first=False, last=False):
        replay.add(make_step(0, count, first, last))

    def test_is_first_is_set_at_the_start_and_in_the_copy_only(self):
        replay = Replay(3, selector=selectors.Fifo())
        for count in range(5):
            self.add(replay, count, first=count == 2)
        firsts = replay.sample(3)["is_first"]
        assert firsts.tolist() == [
            [True, False, True],
            [True, True, False],
            [True, False, False],
        ]

    def test_an_episode_that_another_follows_without_end_is_abandoned(self):
        replay = Replay(2, selector=selectors.Fifo())
        for count in range(6):
            self.add(replay, count, first=count in (0, 2, 4), last=count == 1)
        lasts = {
            count: last
            for counts, lasts in zip(*map(replay.sample(5).get, ("count", "is_last")))
            for count, last in zip(counts.tolist(), lasts.tolist())
        }
        assert lasts == {0: False, 1: True, 2: False, 3: True, 4: False, 5: False}

    def test_the_last_step_of_a_sequence_is_marked_once_the_next_has_come(self):
        replay = Replay(2, selector=selectors.Fifo())
        self.add(replay, 0, first=True)
        self.add(replay, 1)
        lasts = replay.sample(1, "report")["is_last"]
        assert lasts.tolist() == [[False, False]]
        self.add(replay, 2, first=True)
        lasts = replay.sample(2, "report")["is_last"]
        assert lasts.tolist() == [[False, True], [True, False]]

    def test_a_crash_ends_the_episode_before_the_next_step_comes(self):
        replay = Replay(2, selector=selectors.Fifo())
        self.add(replay, 0, first=True)
        self.add(replay, 1)
        replay.abandon(0)
        replay.abandon(99)  # An unknown worker.
        assert replay.sample(1)["is_last"].tolist() == [[False, True]]
        self.add(replay, 2)
        batch = replay.sample(2, "report")
        assert batch["is_first"].tolist()[0] == [True, True]

    def test_abandoning_reaches_one_worker(self):
        replay = Replay(2, selector=selectors.Fifo())
        fill(replay, [0, 1], range(2))
        replay.abandon(1)
        batch = replay.sample(2)
        assert batch["worker"][:, 0].tolist() == [0, 1]
        assert batch["is_last"][:, 1].tolist() == [False, True]

    def test_steps_need_not_know_of_episodes(self):
        replay = Replay(2)
        for value in range(3):
            replay.add({"value": np.int32(value)})
        replay.abandon(0)
        assert set(replay.sample(1)) == {"value", "stepid"}


class TestBadSteps:
    @pytest.fixture
    def replay(self):
        replay = Replay(1, selector=selectors.Fifo())
        replay.add({"x": np.zeros(2, np.float32), "y": np.int32(1)})
        return replay

    @pytest.mark.parametrize(
        ("step", "message"),
        [
            (
                {"x": np.zeros(3, np.float32), "y": np.int32(1)},
                r"x as float32 .*\(1, 3",
            ),
            ({"x": np.zeros(2), "y": np.int32(1)}, r"x as float32 .* got float64"),
            ({"x": np.zeros(2, np.float32), "y": 1.0}, r"y as int32 .* got float64"),
            ({"x": np.zeros(2, np.float32)}, r"got none of \['y'\]"),
            (
                {"x": np.zeros(2, np.float32), "y": np.int32(1), "z": 1},
                r"got \['z'\] in addition",
            ),
            ({"x": np.zeros(2, np.float32), "z": 1}, r"none of \['y'\] and \['z'\]"),
        ],
    )
    def test_a_step_that_differs_is_refused_and_changes_nothing(
        self, replay, step, message
    ):
        with pytest.raises(ValueError, match=message):
            replay.add(step)
        with pytest.raises(ValueError, match=message):
            replay.add(step, worker=5)
        assert len(replay) == 1
        assert replay.stats()["streams"] == 1
        replay.add({"x": np.ones(2, np.float32), "y": np.int32(2)})
        assert replay.sample(2)["y"][:, 0].tolist() == [1, 2]

    def test_batches_that_do_not_fit_their_workers_are_refused(self, replay):
        steps = {"x": np.zeros((2, 2), np.float32), "y": np.zeros(2, np.int32)}
        for workers in ([1], [1, 2, 3]):
            with pytest.raises(ValueError, match=f"{len(workers)}, 2"):
                replay.add_batch(steps, workers)
        for workers in ([[1, 2]], [0.5, 1.5], ["a", "b"]):
            with pytest.raises(ValueError, match="vector of integers"):
                replay.add_batch(steps, workers)
        assert replay.stats()["streams"] == 1

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            ("text", "<U4"),
            (object(), "object"),
            (np.zeros(2, complex), "complex128"),
            (np.zeros(2, ">f4"), ">f4"),
            (np.zeros(2, "datetime64[s]"), "datetime64"),
        ],
    )
    def test_a_first_step_that_cannot_be_stored_is_refused(self, value, dtype):
        replay = Replay(1)
        with pytest.raises(ValueError, match=f"Expected x as bool.*{dtype}"):
            replay.add({"x": value})
        replay.add({"x": np.float32(1)})
        assert len(replay) == 1

    def test_reserved_and_missing_keys_are_refused(self):
        with pytest.raises(ValueError, match="'stepid' is added by sampling"):
            Replay(1).add({"stepid": np.zeros(20, np.uint8)})
        with pytest.raises(ValueError, match="at least one key"):
            Replay(1).add({"log/x": 1})
        with pytest.raises(ValueError, match=r"is_first as a scalar, got shape \(1,\)"):
            Replay(1).add({"is_first": np.zeros(1, bool)})

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"length": 0}, "1 step or more"),
            ({"length": "8"}, "1 step or more, got '8'"),
            ({"capacity": 0}, "capacity >= 1"),
            ({"capacity": "x"}, "capacity >= 1 as a number, or None, got 'x'"),
            ({"capacity": float("nan")}, "capacity >= 1"),
            ({"capacity": float("inf")}, "capacity >= 1"),
            ({"chunksize": 1.5}, "chunksize >= 1, got 1.5"),
            ({"chunksize": 0}, "chunksize >= 1"),
            ({"context": -1}, "context from 0 to the length of sequences, 4"),
            ({"context": 5}, "got 5"),
            ({"bytes": 0}, "positive number or 'auto'"),
            ({"bytes": "1GB"}, "got '1GB'"),
            ({"compress": "gzip", "directory": "/nowhere"}, "'zstd', 'none'"),
        ],
    )
    def test_bad_settings_are_refused(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            Replay(**{"length": 4, **kwargs})


class TestBatches:
    def test_a_batch_is_the_same_as_single_steps(self):
        one, many = (Replay(3, 20, selector=selectors.Fifo()) for _ in range(2))
        workers = [3, 1, 2]
        for count in range(12):
            steps = make_steps(workers, [count] * 3)
            many.add_batch(steps, np.array(workers))
            for i, worker in enumerate(workers):
                one.add({key: value[i] for key, value in steps.items()}, worker)
        for key, value in one.sample(20, "report").items():
            if key != "stepid":
                assert (value == many.sample(20, "report")[key]).all(), key

    def test_a_worker_may_come_twice_in_a_batch(self):
        replay = Replay(3)
        replay.add_batch(make_steps([5, 5, 6, 5, 5], [0, 1, 0, 2, 3]), [5, 5, 6, 5, 5])
        assert all_starts(replay) == {(5, 0), (5, 1)}

    def test_an_empty_batch_is_nothing(self):
        replay = Replay(3)
        replay.add_batch({}, [])
        assert len(replay) == 0
