"""Batches that an agent reads ahead: when they are sampled, and no thread hangs."""

import itertools
import threading

import pytest
from loop_testing import Task
from run_testing import NotingAgent, Parts

from embodied.driver import EnvError
from embodied.run.trainer import Feed
from embodied.streams import Prefetch, Stateless

SECONDS = 30  # After which a test that waits has failed.


class Reader:
    """Reads a stream in a thread until it ends."""

    def __init__(self, stream):
        self.items = []
        self.got = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream):
        for item in stream:
            self.items.append(item)
            self.got.release()

    def wait(self):
        assert self.got.acquire(timeout=SECONDS)


def counting():
    return Stateless(itertools.count())


class TestFeed:
    def test_a_thread_reads_what_was_fetched_in_order_and_no_more(self):
        source = counting()
        feed = Feed(source)
        reader = Reader(feed)
        for _ in range(3):
            feed.fetch()
            reader.wait()
        assert reader.items == [0, 1, 2]
        assert next(source) == 3, "nothing else was taken from the source"
        feed.close()
        reader.thread.join(SECONDS)
        assert not reader.thread.is_alive(), "it waited for a fourth"

    def test_what_was_fetched_before_the_end_is_still_read(self):
        feed = Feed(counting())
        feed.fetch()
        feed.fetch()
        feed.close()
        reader = Reader(feed)
        reader.thread.join(SECONDS)
        assert reader.items == [0, 1]

    def test_the_loops_own_thread_need_not_fetch_first(self):
        feed = Feed(counting())
        assert next(feed) == 0
        feed.fetch()
        assert [next(feed), next(feed)] == [1, 2]

    def test_errors_of_the_source_reach_the_loop(self):
        feed = Feed(Stateless(iter(())))
        with pytest.raises(StopIteration):
            feed.fetch()


class Ahead(NotingAgent):
    """Reads ahead in a thread, like agents that move batches to a device."""

    amount = 1

    def stream(self, st):
        super().stream(st)
        return Prefetch(st, amount=self.amount)


def run_ahead(logdir, amount, **changes):
    parts = Parts(
        logdir, steps=150, envs=2, consec_train=2, report_every=-1.0, **changes
    )

    def make_agent():
        parts.agent = Ahead()
        parts.agent.amount = amount
        return parts.agent

    parts.make_agent = make_agent
    parts.train()
    return parts


class TestReadingAhead:
    def test_no_sample_is_taken_that_is_not_trained_on(self, tmp_path):
        parts = run_ahead(tmp_path, amount=5, consec_report=1)
        samples = parts.replay.stats()["total_train_samples"]
        trained = len(parts.agent.trained)
        assert trained > 20
        assert samples == -(-trained // 2) * parts.args.batch_size

    def test_it_changes_nothing_how_far_an_agent_reads_ahead(self, tmp_path):
        one, other = (
            run_ahead(tmp_path / str(amount), amount).agent for amount in (1, 5)
        )
        assert len(one.reported) == len(other.reported) > 20
        for mine, theirs in zip(one.trained, other.trained, strict=True):
            assert (mine["where"] == theirs["where"]).all()

    def test_no_thread_is_left(self, tmp_path):
        run_ahead(tmp_path, amount=2)
        assert not [x for x in threading.enumerate() if x.name == "prefetch"]


class Late(NotingAgent):
    """Returns results one update late; `flush` returns those of the last update."""

    def __init__(self):
        super().__init__()
        self._results = ({}, {})

    def train(self, carry, batch):
        carry, outputs, metrics = super().train(carry, batch)
        results, self._results = self._results, (outputs, metrics)
        return carry, *results

    def flush(self):
        results, self._results = self._results, ({}, {})
        return results


@pytest.mark.parametrize("ends", ["by its steps", "by an env that fails"])
def test_the_metrics_of_the_last_update_are_not_lost(tmp_path, ends):
    class Failing(Task):
        def step(self, action):
            if self._episode == 4:
                raise OSError("the env broke")
            return super().step(action)

    parts = Parts(tmp_path, steps=100, log_every=0.0)
    parts.agent = Late()
    parts.make_agent = lambda: parts.agent
    if ends == "by its steps":
        parts.train()
    else:
        parts.task = Failing
        with pytest.raises(EnvError):
            parts.train()
    updates = parts.agent.updates
    # All are logged at the end, as the mean of 1, 2, ..., updates.
    assert parts.logger.values("train/updates") == [(updates + 1) / 2]
