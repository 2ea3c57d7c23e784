"""What a loaded replay goes on with: dtypes, priorities, random numbers, damage."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from replay_testing import all_starts, fill, make_steps, make_update

from embodied.replay import ReplayMemoryError, selectors
from embodied.replay.chunkfiles import STEPS, ChunkFile
from embodied.replay.sizing import INDEX_BYTES


def prioritized():
    return selectors.Prioritized(0.8, np.inf, True, 0.5)


def weights(replay):
    """Returns the priority, as it is used, of the sequence that begins at each step."""
    batch = replay.sample(400, "report")
    assert not len(replay._selector._infinite)
    starts = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
    slots = replay._index.chunks.locate(batch["stepid"][:, 0])[0]
    return dict(zip(starts, replay._selector._weights._levels[0][slots].tolist()))


class TestPriorities:
    @pytest.mark.parametrize("budget", [0, 1e9])
    def test_all_survive_whatever_is_written_of_latents(self, make, budget):
        options = {"latent_save_bytes": budget, "context": 1}
        replay = make(selector=prioritized(), **options)
        fill(replay, [0, 1], range(20))
        replay.save()
        for priority in range(1, 6):
            replay.update(make_update(replay.sample(20), 1, priority))
        loaded = make(selector=prioritized(), **options)
        loaded.load(replay.save())
        assert weights(loaded) == weights(replay)

    def test_those_of_steps_that_were_saved_without_any_survive(self, make):
        replay = make()
        fill(replay, [0], range(20))
        data = replay.save()
        replay = make(selector=prioritized())
        replay.load(data)
        for priority in (1, 2, 3):
            replay.update(make_update(replay.sample(18), 1, priority))
        loaded = make(selector=prioritized())
        loaded.load(replay.save())
        assert weights(loaded) == weights(replay)


@pytest.mark.parametrize(
    "make_selector",
    [
        selectors.Uniform,
        lambda: selectors.Recency(1 / np.arange(1, 100)),
        prioritized,
        lambda: selectors.Mixture(
            {"a": selectors.Uniform(), "b": selectors.Recency(np.ones(100))},
            {"a": 0.5, "b": 0.5},
        ),
    ],
)
def test_draws_after_a_load_are_not_those_of_the_start(make, make_selector):
    replay = make(selector=make_selector())
    fill(replay, [0, 1], range(40))
    first = replay.sample(20)["count"].tolist()
    loaded = make(selector=make_selector())
    loaded.load(replay.save())
    assert loaded.sample(20)["count"].tolist() != first


def test_latents_of_another_device_are_converted(make):
    replay = make(context=1)
    fill(replay, [0], range(9))
    steps = make_steps([0], [9])
    assert steps["dyn/deter"].dtype.name == "bfloat16"
    steps["dyn/deter"] = steps["dyn/deter"].astype(np.float32)
    replay.add_batch(steps, [0])
    update = make_update(replay.sample(4), 3)
    update["dyn/deter"] = update["dyn/deter"].astype(np.float32)
    replay.update(update)
    assert replay.sample(8)["dyn/deter"].dtype.name == "bfloat16"
    assert all_starts(replay) == {(0, count) for count in range(8)}


def test_many_damaged_files_of_a_full_buffer_cost_only_steps(make, tmp_path, caplog):
    probe = make()
    fill(probe, [0], [0])
    step = probe._index.schema.step_bytes + INDEX_BYTES
    replay = make(bytes=32 * 8 * step)
    for count in range(0, 300, 3):  # So that chunks are saved in several pieces.
        fill(replay, [0], range(count, count + 3))
        data = replay.save()
    assert replay.stats()["chunks"] >= 31, "the buffer is full"
    before = len(replay)
    pieces = [ChunkFile.parse(path.name) for path in (tmp_path / "replay").iterdir()]
    used = {chunk.tobytes() for chunk in data["chunks"]["id"]}
    middle = [x for x in pieces if x.chunk in used and x.kind == STEPS and x.start > 0]
    for file in middle[:12]:
        (tmp_path / "replay" / file.name).unlink()
    loaded = make(bytes=32 * 8 * step)
    with caplog.at_level(logging.WARNING):
        loaded.load(data)
    assert "Skipping a damaged file" in caplog.text
    assert before / 3 < len(loaded) < before


def test_too_many_workers_are_a_lack_of_memory(make):
    replay = make(capacity=100, bytes=1e5)
    with pytest.raises(ReplayMemoryError, match="each of 1000 workers needs"):
        fill(replay, range(1000), [0])


def test_a_replay_with_more_room_than_before_is_not_full(make):
    replay = make(capacity=20)
    fill(replay, [0], range(60))
    assert replay.full
    loaded = make(capacity=1000)
    loaded.load(replay.save())
    assert len(loaded) == 20 and not loaded.full
    fill(loaded, [0], range(60, 80))
    assert not loaded.full
