"""A slow output blocks callers only while its queue is full, and loses nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from embodied.logger import AsyncOutput, Logger

ONE = np.array(1.0)
TIMEOUT = 30


class SlowOutput(AsyncOutput):
    """An output whose writes wait until the test opens the gate."""

    def __init__(self, queue_size=16, **kwargs):
        super().__init__(**kwargs)
        self.QUEUE_SIZE = queue_size
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.written = []
        self.events = []
        self.error = None
        self.threads = set()

    def _write(self, summaries):
        self.entered.set()
        self.threads.add(threading.current_thread())
        if not self.gate.wait(TIMEOUT):
            raise TimeoutError("the test did not open the gate")
        if self.error:
            error, self.error = self.error, None
            raise error
        self.written += [name for _, name, _ in summaries]

    def _close(self):
        self.events.append("close")


def test_writes_happen_in_one_other_thread_in_order():
    output = SlowOutput()
    output.gate.set()
    for index in range(100):
        output([(index, f"m{index}", ONE)])
    output.close()
    assert output.written == [f"m{index}" for index in range(100)]
    assert output.events == ["close"]
    (thread,) = output.threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_the_caller_does_not_wait_while_there_is_room():
    output = SlowOutput(queue_size=3)
    output([(0, "a", ONE)])
    assert output.entered.wait(TIMEOUT)
    for name in "bcd":
        output([(0, name, ONE)])
    assert output.written == []
    output.gate.set()
    output.close()
    assert output.written == ["a", "b", "c", "d"]


def test_a_full_queue_holds_the_caller_until_there_is_room():
    output = SlowOutput(queue_size=1)
    output([(0, "a", ONE)])
    assert output.entered.wait(TIMEOUT)
    output([(0, "b", ONE)])
    done = threading.Event()

    def produce():
        output([(0, "c", ONE)])
        done.set()

    thread = threading.Thread(target=produce)
    thread.start()
    assert not done.wait(0.1)
    output.gate.set()
    assert done.wait(TIMEOUT)
    thread.join()
    output.close()
    assert output.written == ["a", "b", "c"]


def test_an_output_that_hangs_raises_instead_of_holding_the_caller_for_ever():
    output = SlowOutput(queue_size=1)
    output.STALL_SECONDS = output.CLOSE_SECONDS = 0.05
    output([(0, "a", ONE)])
    assert output.entered.wait(TIMEOUT)
    output([(0, "b", ONE)])
    with pytest.raises(TimeoutError, match=r"written nothing for more than 0\.05 s"):
        output([(0, "c", ONE)])
    with pytest.raises(TimeoutError, match="2 writes may be lost"):
        output.close()
    output.gate.set()


def test_metrics_that_do_not_match_are_not_queued():
    output = SlowOutput(pattern="train/.*")
    output.gate.set()
    output([(0, "train/a", ONE), (0, "pretrain/a", ONE)])
    output([(0, "eval/a", ONE)])
    output.close()
    assert output.written == ["train/a"]


def test_the_call_that_finds_an_error_is_itself_carried_out():
    output = SlowOutput(queue_size=1)
    output.error = OSError("lost connection")
    output([(0, "a", ONE)])
    assert output.entered.wait(TIMEOUT)
    output([(0, "b", ONE)])
    output.gate.set()
    with pytest.raises(OSError, match="lost connection"):
        output([(0, "c", ONE)])  # Waits for room, which comes after the error.
    output.close()
    assert output.written == ["b", "c"]


def test_an_error_of_the_last_write_is_raised_by_close():
    output = SlowOutput()
    output.gate.set()
    output.error = OSError("lost connection")
    output([(0, "a", ONE)])
    with pytest.raises(OSError, match="lost connection"):
        output.close()
    output.close()


def test_an_output_without_writes_needs_no_thread_to_close():
    output = SlowOutput()
    output.close()
    output.close()
    assert output.events == ["close"]


def test_a_closed_output_takes_no_more():
    output = SlowOutput()
    output.close()
    with pytest.raises(RuntimeError, match="is closed"):
        output([(0, "a", ONE)])


def test_a_background_error_is_reported_by_the_logger(caplog):
    output = SlowOutput()
    output.gate.set()
    output.error = OSError("lost connection")
    with Logger(0, [output]) as logger:
        logger.add({"a": 1.0})
        logger.write()
        logger.add({"b": 1.0})
    assert output.written == ["b"]
    assert "lost connection" in caplog.text


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_many_producers_lose_nothing(rounds):
    for _ in range(rounds):
        output = SlowOutput(queue_size=2)
        output.gate.set()

        def produce(index, output=output):
            for count in range(20):
                output([(0, f"{index}/{count}", ONE)])

        threads = [threading.Thread(target=produce, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output.close()
        assert len(output.written) == len(set(output.written)) == 80


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"got 'train\('"):
        SlowOutput(pattern="train(")
