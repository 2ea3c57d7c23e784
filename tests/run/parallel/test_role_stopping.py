"""The deadline of a stop, without roles."""

import itertools
import queue
import threading

import pytest
from waiting_testing import WAIT

from embodied.run.parallel import stopping
from embodied.run.parallel.stopping import StopDeadline, StopTimeout


def test_a_watch_ends_with_its_block_although_nobody_has_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "END_SECONDS", 0.01)
    before = set(threading.enumerate())
    with StopDeadline(threading.Event(), tmp_path, 60.0, print, str):
        (thread,) = set(threading.enumerate()) - before
        assert thread.is_alive()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_it_gives_up_when_nothing_is_written_after_the_stop(tmp_path):
    stop, errors = threading.Event(), queue.SimpleQueue()
    with pytest.raises(StopTimeout, match="waited for the replay") as info:
        with StopDeadline(stop, tmp_path, 0.05, errors.put, lambda: "the replay"):
            with pytest.raises(queue.Empty):
                errors.get(timeout=0.3)
            stop.set()
            error = errors.get(timeout=WAIT)
    assert info.value is error


def test_a_change_that_no_file_shows_is_progress(tmp_path):
    stop, errors, steps = threading.Event(), queue.SimpleQueue(), itertools.count()
    stop.set()
    with (
        StopDeadline(stop, tmp_path, 0.05, errors.put, str, lambda: next(steps)),
        pytest.raises(queue.Empty),
    ):
        errors.get(timeout=0.3)
