"""Replay behaves like a simple list of steps, for any order of operations."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_testing import (
    check_batch,
    make_step,
    make_update,
    versions,
    write_save,
)

from embodied.replay import Replay, selectors

WORKERS = 4
SELECTORS = {
    "fifo": selectors.Fifo,
    "uniform": selectors.Uniform,
    "recency": lambda: selectors.Recency(1 / np.arange(1, 200)),
    "prioritized": lambda: selectors.Prioritized(0.8, np.inf, True, 0.5),
    "mixture": lambda: selectors.Mixture(
        {"uniform": selectors.Uniform(), "prioritized": selectors.Prioritized()},
        {"uniform": 0.5, "prioritized": 0.5},
    ),
}


@dataclasses.dataclass
class ModelStep:
    worker: int
    count: int
    first: bool
    last: bool
    version: int = 0
    priority: float | None = None


class Model:
    """Replay as a list of streams, each a list of steps."""

    def __init__(self, length, capacity):
        self.length = length
        self.capacity = capacity
        self.counts = [0] * WORKERS
        self.streams = {}
        self.items = []  # Lists of steps.
        self.abandoned = set()  # Workers whose next step begins an episode.
        self.steps = {}

    def add(self, worker, first, last):
        begins = first or worker in self.abandoned
        self.abandoned.discard(worker)
        step = ModelStep(worker, self.counts[worker], begins, last)
        self.counts[worker] += 1
        self.steps[worker, step.count] = step
        stream = self.streams.setdefault(worker, [])
        if stream and first:
            stream[-1].last = True
        stream.append(step)
        if len(stream) >= self.length:
            self.items.append(stream[-self.length :])
        self.items = self.items[-self.capacity :]
        return step

    def abandon(self, worker):
        if self.streams.get(worker):
            self.streams[worker][-1].last = True
            self.abandoned.add(worker)

    def end_streams(self):
        for worker in self.streams:
            self.abandon(worker)
        self.streams = {}
        self.abandoned = set()

    def starts(self):
        return {(item[0].worker, item[0].count) for item in self.items}

    def check(self, batch):
        """Raises unless all sequences are items, with the right contents."""
        check_batch(batch)
        context = batch["dyn/deter"].shape[1]
        items = {(item[0].worker, item[0].count): item for item in self.items}
        for i, start in enumerate(zip(batch["worker"][:, 0], batch["count"][:, 0])):
            item = items[tuple(int(x) for x in start)]
            assert batch["count"][i].tolist() == [step.count for step in item]
            firsts = [True, *(step.first for step in item[1:])]
            assert batch["is_first"][i].tolist() == firsts
            assert batch["is_last"][i].tolist() == [step.last for step in item]
            expected = [step.version % 100 for step in item[:context]]
            assert versions(batch)[i].tolist() == expected


worker = st.integers(0, WORKERS - 1)
chance = st.integers(0, 5).map(lambda number: number == 0)
operation = st.one_of(
    st.tuples(st.just("add"), worker, chance, chance, st.integers(1, 12)),
    st.tuples(st.just("add_batch"), st.lists(worker, min_size=1, max_size=6), chance),
    st.tuples(st.just("sample"), st.sampled_from(["train", "report", "eval"])),
    st.tuples(st.just("update"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("abandon"), worker),
    st.tuples(st.sampled_from(["save", "load", "scan"])),
)


class Run:
    """Applies the same operations to a buffer and to the model."""

    def __init__(self, folder, kind, length, capacity, chunksize, context, tight):
        self.make = lambda: Replay(
            length,
            capacity,
            folder,
            chunksize,
            selector=SELECTORS[kind](),
            context=context,
            bytes=(3 * capacity + 40 * length) * 80 if tight else "auto",
        )
        self.folder = folder
        self.tight = tight
        self.exact = kind == "fifo"
        self.replay = self.make()
        self.model = Model(length, capacity)
        self.batches = []  # Recent samples, some of them of steps that are gone.
        self.saved = None
        self.updates = 0

    def apply(self, name, *args):
        getattr(self, name)(*args)
        self.compare()

    def compare(self):
        if self.tight:  # Whole chunks are evicted when memory is short.
            length = len(self.replay)
            self.model.items = self.model.items[len(self.model.items) - length :]
        assert len(self.replay) == len(self.model.items)
        if self.exact and len(self.replay):
            batch = self.replay.sample(len(self.replay), "report")
            self.model.check(batch)
            starts = zip(batch["worker"][:, 0].tolist(), batch["count"][:, 0].tolist())
            assert set(starts) == self.model.starts()

    def add(self, worker, first, last, repeat):
        for _ in range(repeat):
            step = self.model.add(worker, first, last)
            self.replay.add(make_step(worker, step.count, first, last), worker)

    def add_batch(self, workers, first):
        steps = []
        for worker in workers:
            step = self.model.add(worker, first, False)
            steps.append(make_step(worker, step.count, first))
        stacked = {key: np.stack([step[key] for step in steps]) for key in steps[0]}
        self.replay.add_batch(stacked, workers)

    def sample(self, mode):
        if not self.model.items:
            with pytest.raises(LookupError, match="no sequence"):
                self.replay.sample(3, mode)
            return
        batch = self.replay.sample(3, mode)
        self.model.check(batch)
        self.batches = [*self.batches[-3:], batch]

    def update(self, which, priority):
        if not self.batches:
            return
        batch = self.batches[which % len(self.batches)]
        self.updates += 1
        self.replay.update(make_update(batch, self.updates, priority))
        for pair in zip(batch["worker"].reshape(-1), batch["count"].reshape(-1)):
            step = self.model.steps.get(tuple(int(x) for x in pair))
            if step is not None:  # Else it came after the save that was loaded.
                step.version = self.updates

    def abandon(self, worker):
        self.replay.abandon(worker)
        self.model.abandon(worker)

    def save(self):
        self.saved = *write_save(self.replay), copy.deepcopy(self.model)

    def load(self):
        if self.saved is None:
            return
        data, cut, model = self.saved
        self.replay = self.make()
        self.replay.load(data)
        records = cut.records(self.folder)
        self.replay.clean({record.path for record in records}, self.folder)
        self.model = copy.deepcopy(model)
        self.model.end_streams()
        self.model.counts = [count + 1000 for count in self.model.counts]  # A gap.
        self.saved = None  # Its files may be replaced from now on.

    def scan(self):
        """Loads without the list of files, right after a save."""
        if self.saved is not None:
            return
        _, cut = write_save(self.replay)
        other = self.make()
        other.load()
        assert len(other) >= len(self.replay) or self.tight
        if len(other):
            check_batch(other.sample(5, "report"))
        cut.discard()


@pytest.mark.parametrize(
    "examples",
    [10, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
@pytest.mark.parametrize("kind", SELECTORS)
def test_replay_equals_a_list_of_steps(memory_folder, kind, examples):
    @settings(max_examples=examples)
    @given(
        st.lists(operation, min_size=5, max_size=30),
        st.integers(1, 7),
        st.integers(1, 60),
        st.integers(1, 9),
        st.booleans(),
        st.data(),
    )
    def check(operations, length, capacity, chunksize, tight, data):
        context = data.draw(st.integers(1, length))
        with memory_folder() as folder:
            run = Run(folder, kind, length, capacity, chunksize, context, tight)
            for name, *args in operations:
                run.apply(name, *args)

    check()
