"""Metrics of the loops: means over updates, rates, and shares of time."""

import numpy as np
import pytest

from embodied.run.metrics import Means, Meter


class TestMeans:
    def test_numbers_are_averaged_and_the_rest_is_the_last(self):
        means = Means()
        means.add({"loss": np.float32(1), "image": np.zeros((2, 2)), "note": "a"})
        means.add({"loss": np.float32(4), "image": np.ones((2, 2)), "note": "b"})
        result = means.result()
        assert result["loss"] == 2.5
        assert (result["image"] == 1).all()
        assert result["note"] == "b"

    def test_a_result_covers_what_came_since_the_last(self):
        means = Means()
        means.add({"loss": 1.0})
        assert means.result() == {"loss": 1.0}
        assert means.result() == {}
        means.add({"loss": 3.0, "rare": 5})
        means.add({"loss": 5.0})
        assert means.result() == {"loss": 4.0, "rare": 5.0}

    def test_a_value_is_looked_at_one_update_later(self):
        class OnDevice:
            ndim, waited = 0, False

            def __array__(self, dtype=None, copy=None):
                self.waited = True
                return np.array(2.0, dtype)

        means, first, second = Means(), OnDevice(), OnDevice()
        means.add({"loss": first})
        assert not first.waited
        means.add({"loss": second})
        assert (first.waited, second.waited) == (True, False)
        assert means.result() == {"loss": 2.0}


class TestMeter:
    def test_rates_and_shares(self):
        now = [100.0]
        meter = Meter(clock=lambda: now[0])
        with meter.section("collect"):
            now[0] += 1
        for _ in range(2):
            with meter.section("train"):
                now[0] += 2
            meter.count("train", 50)
        now[0] += 5
        expected = {"fps/train": 10, "timer/collect": 0.1, "timer/train": 0.4}
        assert not meter.idle
        assert meter.result() == pytest.approx(expected)
        now[0] += 4
        assert meter.idle
        assert meter.result() == dict.fromkeys(expected, 0), "nothing happened since"

    def test_a_section_that_fails_counts(self):
        now = [0.0]
        meter = Meter(clock=lambda: now[0])
        with pytest.raises(KeyError), meter.section("train"):
            now[0] += 3
            raise KeyError
        now[0] += 1
        assert meter.result() == {"timer/train": 0.75}

    def test_no_time_has_no_rates(self):
        meter = Meter(clock=lambda: 1.0)
        meter.count("train", 5)
        assert meter.result() == {}
