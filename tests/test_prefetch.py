"""Tests that Prefetch delivers items and errors in order, and closes in any state."""

from __future__ import annotations

import threading
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_testing import (
    Count,
    no_thread_is_left,  # noqa: F401
    take,
)

from embodied import streams


def explode():
    raise KeyError("inside the source")


class Failing(Count):
    """Counts, and fails once it has reached the limit."""

    def __next__(self):
        return explode() if self.value >= self.limit else super().__next__()


class Gated(Count):
    """Counts, but every item waits until the gate is open."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __next__(self):
        self.entered.set()
        assert self.gate.wait(60)
        return super().__next__()


class TestPrefetch:
    @given(amount=st.integers(1, 4), limit=st.integers(0, 6))
    def test_delivers_all_items_in_order_and_then_the_end(self, amount, limit):
        with streams.Prefetch(Count(limit=limit), lambda x: 2 * x, amount) as stream:
            assert list(stream) == [2 * value for value in range(limit)]
            assert next(stream, "end") == "end"

    def test_no_thread_runs_before_the_first_use(self):
        before = threading.active_count()
        with streams.Prefetch(Count()) as stream:
            assert threading.active_count() == before
            iter(stream)
            assert threading.active_count() == before + 1

    def test_transforms_in_another_thread(self):
        def thread(_):
            return threading.get_ident()

        with streams.Prefetch(Count(), thread) as stream:
            assert next(stream) != threading.get_ident()

    @pytest.mark.parametrize("amount", [1, 3])
    def test_fetches_ahead_as_many_items_as_it_may_and_no_more(self, amount):
        source = Count()
        full = threading.Event()

        def watch(item):
            if item == 2 + amount - 1:
                full.set()
            return item

        with streams.Prefetch(source, watch, amount) as stream:
            take(stream, 2)
            assert full.wait(60)
        assert source.value == 2 + amount

    def test_hands_over_an_error_with_its_traceback_after_the_items_before_it(self):
        with streams.Prefetch(Failing(limit=2), amount=3) as stream:
            assert take(stream, 2) == [0, 1]
            with pytest.raises(KeyError, match="inside the source") as caught:
                next(stream)
        lines = traceback.format_exception(caught.value)
        assert any("in explode" in line for line in lines), lines

    def test_raises_the_error_again_at_every_later_call(self):
        lengths = []
        with streams.Prefetch(Failing(limit=0)) as stream:
            for _ in range(3):
                with pytest.raises(KeyError) as caught:
                    next(stream)
                lengths.append(len(traceback.format_exception(caught.value)))
        assert lengths[0] == lengths[1] == lengths[2]

    def test_hands_over_an_error_of_the_transform(self):
        with streams.Prefetch(Count(), lambda item: 1 // item) as stream:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    next(stream)

    def test_an_error_passes_two_prefetches(self):
        inner = streams.Prefetch(Failing(limit=1))
        with streams.Prefetch(inner, amount=2) as stream:
            assert next(stream) == 0
            with pytest.raises(KeyError) as caught:
                next(stream)
        assert "in explode" in "".join(traceback.format_exception(caught.value))

    def test_goes_on_after_an_error_from_a_saved_position(self):
        source = Failing(limit=2)
        with streams.Prefetch(source, amount=2) as stream:
            take(stream, 2)
            with pytest.raises(KeyError):
                next(stream)
            source.limit = 99
            stream.load(stream.save())
            assert take(stream, 2) == [2, 3]

    def test_closes_with_a_full_queue(self):
        full = threading.Event()
        source = Count()
        stream = streams.Prefetch(source, lambda _: full.set())
        iter(stream)
        assert full.wait(60)
        stream.close()
        assert source.closed == 1
        stream.close()

    def test_closing_lets_the_source_complete_one_item_only(self):
        source = Gated()
        stream = streams.Prefetch(source, amount=5)
        iter(stream)
        assert source.entered.wait(60)
        closer = threading.Thread(target=stream.close)
        closer.start()
        with pytest.raises(RuntimeError, match="Prefetch is closed"):
            next(stream)
        source.gate.set()
        closer.join(60)
        assert not closer.is_alive()
        assert source.value == 1

    def test_closing_wakes_a_reader_that_waits(self):
        source = Gated()
        stream = streams.Prefetch(source)
        iter(stream)
        errors = []

        def read():
            try:
                next(stream)
            except RuntimeError as error:
                errors.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        closer = threading.Thread(target=stream.close)
        closer.start()
        reader.join(60)  # The source is still blocked.
        assert len(errors) == 1
        assert "closed" in errors[0]
        source.gate.set()
        closer.join(60)

    def test_gives_up_on_a_source_that_never_returns(self, monkeypatch):
        monkeypatch.setattr(streams, "CLOSE_SECONDS", 0.05)
        source = Gated()
        stream = streams.Prefetch(source)
        iter(stream)
        assert source.entered.wait(60)
        with pytest.raises(TimeoutError, match="Prefetch waited"):
            stream.close()
        source.gate.set()
        monkeypatch.setattr(streams, "CLOSE_SECONDS", 60)
        stream.close()

    def test_after_close_the_position_is_kept_and_load_restarts(self):
        with streams.Prefetch(Count(), amount=3) as stream:
            take(stream, 4)
            stream.close()
            with pytest.raises(RuntimeError, match="Only `load` starts it again"):
                next(stream)
            stream.load(stream.save())
            assert take(stream, 2) == [4, 5]

    def test_refuses_to_fetch_nothing_ahead(self):
        with pytest.raises(ValueError, match="amount >= 1, got 0"):
            streams.Prefetch(Count(), amount=0)


def test_the_source_is_closed_even_if_the_thread_does_not_end(monkeypatch):
    class Source(Count):
        closed = False

        def close(self):
            self.closed = True

    source = Source()
    prefetch = streams.Prefetch(source)
    stop = prefetch._stop

    def stop_late():
        stop()
        raise TimeoutError("it does not end")

    monkeypatch.setattr(prefetch, "_stop", stop_late)
    with pytest.raises(TimeoutError):
        prefetch.close()
    assert source.closed
