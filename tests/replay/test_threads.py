"""Threads that insert, sample, update and save at once never see partial data."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from replay_testing import check_batch, make_steps, make_update

from embodied.replay import Replay, selectors

DURATIONS = [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


class Crew:
    """Threads that repeat their work until time is up or one has failed."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds
        self._stop = threading.Event()
        self._threads = []
        self._errors = []
        self.rounds = {}

    def add(self, name, function, *args):
        self.rounds[name] = 0
        self._threads.append(
            threading.Thread(target=self._work, args=(name, function, *args))
        )

    def run(self, enough):
        """Runs all threads until time is up, and up to 60 s longer on a busy machine.

        Args:
          enough: returns whether every thread has done enough work.
        """
        for thread in self._threads:
            thread.start()
        self._stop.wait(self._end - time.monotonic())
        while not enough() and time.monotonic() < self._end + 60:
            if self._stop.wait(0.1):
                break
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        if self._errors:
            raise self._errors[0]

    def _work(self, name, function, *args):
        try:
            while not self._stop.is_set():
                function(*args)
                self.rounds[name] += 1
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()


class Work:
    """The operations that threads repeat on one buffer."""

    def __init__(self, replay):
        self.replay = replay
        self.counts = {}
        self.latest = None  # A recent batch; threads replace it as a whole.
        self.versions = 0

    def insert(self, workers):
        count = self.counts.get(workers, 0)
        self.replay.add_batch(make_steps(workers, [count] * len(workers)), workers)
        self.counts[workers] = count + 1

    def sample(self, mode):
        try:
            batch = self.replay.sample(8, mode)
        except LookupError:  # Nothing is stored yet.
            return
        check_batch(batch)
        self.latest = batch

    def update(self):
        batch = self.latest
        if batch is not None:
            self.versions += 1
            self.replay.update(make_update(batch, self.versions, priority=1))

    def save(self, make):
        data = self.replay.save()
        other = make()
        other.load(data)
        if len(other):
            check_batch(other.sample(8, "report"))
            check_batch(other.sample(8, "train"))
        self.replay.stats()


@pytest.mark.parametrize("seconds", DURATIONS)
def test_no_sequence_is_torn(memory_folder, seconds):
    with memory_folder() as folder:

        def make(selector=None):
            # Memory is so small that rows are reused all the time.
            return Replay(
                6,
                300,
                folder,
                chunksize=8,
                online=True,
                selector=selector,
                context=2,
                bytes=80_000,
            )

        work = Work(make(selectors.Prioritized(zero_on_sample=True)))
        crew = Crew(seconds)
        crew.add("insert a", work.insert, (0, 1, 2))
        crew.add("insert b", work.insert, (3, 4))
        crew.add("sample a", work.sample, "train")
        crew.add("sample b", work.sample, "report")
        crew.add("update a", work.update)
        crew.add("update b", work.update)
        crew.add("save", work.save, lambda: make(selectors.Uniform()))

        def enough():
            evicted = work.replay.stats()["total_evicted"]
            return min(crew.rounds.values()) >= 3 and evicted > 300

        crew.run(enough)
        assert enough(), crew.rounds
        assert len(work.replay) <= 300


@pytest.mark.parametrize("save_wait", [False, True])
def test_saving_blocks_inserts_only_if_asked_to(tmp_path, monkeypatch, save_wait):
    replay = Replay(3, directory=tmp_path, save_wait=save_wait)
    replay.add_batch(make_steps([0], [0]), [0])
    writing, go_on, added = (threading.Event() for _ in range(3))
    original = replay._folder.write

    def slow_write(*args):
        writing.set()
        assert go_on.wait(60)
        return original(*args)

    def add():
        replay.add_batch(make_steps([0] * 9, range(1, 10)), [0] * 9)
        added.set()

    monkeypatch.setattr(replay._folder, "write", slow_write)
    saved = []
    threads = [threading.Thread(target=lambda: saved.append(replay.save()))]
    threads[0].start()
    assert writing.wait(60)
    threads.append(threading.Thread(target=add))
    threads[1].start()
    assert added.wait(0.3 if save_wait else 60) == (not save_wait)
    if not save_wait:
        check_batch(replay.sample(5))
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert added.is_set()
    assert saved[0]["chunks"]["steps"].tolist() == [1], "the steps of then"


def test_an_insert_waits_for_a_reader_of_the_memory_it_needs():
    replay = Replay(2, bytes=2000, chunksize=2)
    for count in range(50):
        replay.add({"count": np.full(10, count)})
    assert replay.stats()["bytes"] > 1000
    reading, go_on = threading.Event(), threading.Event()
    batches = []

    schema = replay._index.schema
    allocate = schema.empty_batch

    def wait(batch, length):
        reading.set()
        assert go_on.wait(60)
        return allocate(batch, length)

    schema.empty_batch = wait

    def read():
        batches.append(replay.sample(50))

    def insert():
        for count in range(50, 100):
            replay.add({"count": np.full(10, count)})

    threads = [threading.Thread(target=read), threading.Thread(target=insert)]
    threads[0].start()
    assert reading.wait(60)
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive(), "memory that is being read was used again"
    assert len(replay) > 10, "more was evicted than one chunk"
    go_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    counts = batches[0]["count"]
    assert (counts == counts[:, :, :1]).all()
    assert (counts[:, 1] - counts[:, 0] == 1).all()
    assert counts.max() < 50
    assert replay.stats()["bytes"] <= 2000


def test_an_update_of_what_is_replaced_meanwhile_does_not_reach_what_follows():
    selector = selectors.Prioritized()
    replay = Replay(2, context=1, selector=selector)
    replay.add_batch(make_steps([0] * 9, range(9)), [0] * 9)
    update = make_update(replay.sample(4), 1, priority=9)
    index, errors, found = replay._index, [], threading.Event()
    pin = index.pin

    def note_pin(chunks):
        pin(chunks)
        found.set()

    def work():
        try:
            replay.update(update)
        except BaseException as error:
            errors.append(error)

    index.pin = note_pin
    thread = threading.Thread(target=work)
    with replay._latents:
        thread.start()
        assert found.wait(60)  # The update has found its steps and waits for the lock.
        replay.load(Replay(2).save())
        replay.add_batch(make_steps([0] * 3, range(3)), [0] * 3)
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
    assert len(selector) == len(replay) == 2
    check_batch(replay.sample(9))
