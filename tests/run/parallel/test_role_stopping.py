"""The deadline of a stop, without roles."""

import itertools
import threading

from role_testing import WAIT

from embodied.run.parallel import stopping
from embodied.run.parallel.stopping import StopDeadline


def test_a_watch_ends_with_its_block_although_nobody_has_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "END_SECONDS", 0.01)
    before = set(threading.enumerate())
    with StopDeadline(threading.Event(), tmp_path, 60.0, lambda: None):
        (thread,) = set(threading.enumerate()) - before
        assert thread.is_alive()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_it_gives_up_when_nothing_is_written_after_the_stop(tmp_path):
    stop, gave_up = threading.Event(), threading.Event()
    with StopDeadline(stop, tmp_path, 0.05, gave_up.set):
        assert not gave_up.wait(0.3)
        stop.set()
        assert gave_up.wait(WAIT)


def test_a_change_that_no_file_shows_is_progress(tmp_path):
    stop, gave_up, steps = threading.Event(), threading.Event(), itertools.count()
    stop.set()
    with StopDeadline(stop, tmp_path, 0.05, gave_up.set, lambda: next(steps)):
        assert not gave_up.wait(0.3)
