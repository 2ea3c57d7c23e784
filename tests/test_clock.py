from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting_testing import wait_until

from embodied.clock import ClockServer, GlobalClock, LocalClock
from embodied.rpc import Client, RemoteError, free_port

# Other work on the machine must not decide whether a test passes.


class Time:
    """A time source that stands still until it is moved."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def test_the_first_call_starts_the_clock():
    now = Time()
    clock = LocalClock(10, time=now)
    now.now += 100
    assert not clock()
    now.now += 9.5
    assert not clock()
    now.now += 0.5
    assert clock()
    assert not clock()


def test_the_first_call_answers_first():
    clock = LocalClock(10, first=True, time=Time())
    assert [clock(), clock()] == [True, False]


def test_an_interval_begins_when_the_last_one_was_noticed():
    now = Time()
    clock = LocalClock(10, time=now)
    clock()
    now.now += 35
    assert [clock(), clock()] == [True, False], "a late call counts once"
    now.now += 9
    assert not clock()
    now.now += 1
    assert clock()


def test_a_clock_is_due_until_it_is_called():
    now = Time()
    clock = LocalClock(10, time=now)
    assert clock.due() and clock.due(), "to be started"
    clock()
    now.now += 9
    assert not clock.due()
    now.now += 1
    assert clock.due() and clock.due()
    assert clock() and not clock.due()
    assert not LocalClock(0).due()
    assert not LocalClock(-1).due()


@pytest.mark.parametrize("first", [False, True])
def test_zero_is_never(first):
    now = Time()
    clock = LocalClock(0, first, time=now)
    for _ in range(3):
        now.now += 1e9
        assert not clock()


@pytest.mark.parametrize("first", [False, True])
def test_negative_is_every_call(first):
    clock = LocalClock(-1, first, time=Time())
    assert [clock() for _ in range(3)] == [True] * 3


@given(st.floats(0.1, 10), st.lists(st.floats(0, 30), max_size=30))
def test_answers_are_at_least_the_interval_apart(every, gaps):
    now = Time(0.0)
    clock = LocalClock(every, time=now)
    clock()
    last = 0.0
    for gap in gaps:
        now.now += gap
        passed = now.now - last >= every
        assert clock() == passed
        last = now.now if passed else last


def test_uses_real_seconds_by_default():
    begin = time.monotonic()
    clock = LocalClock(0.02)
    clock()
    wait_until(clock)
    assert time.monotonic() - begin >= 0.02


def test_refuses_what_is_no_number():
    with pytest.raises(ValueError, match="got nan"):
        LocalClock(float("nan"))


def test_a_global_clock_without_replicas_is_a_local_one():
    assert [GlobalClock(-1)() for _ in range(2)] == [True, True]
    assert [GlobalClock(0)() for _ in range(2)] == [False, False]
    clock = GlobalClock(1e9, first=True)
    assert [clock(), clock()] == [True, False]


def test_all_replicas_get_the_same_decision_at_the_same_call():
    port, now = free_port(), [0.0]
    with ClockServer(port, replicas=3, time=lambda: now[0]):
        clients = [Client(port) for _ in range(3)]
        clocks = [
            [GlobalClock(10, client=client, name=name) for name in ("log", "save")]
            for client in clients
        ]
        decisions: list[list[bool]] = [[], [], []]
        rng = np.random.default_rng(0)
        for _ in range(30):
            # Replicas ask in any order, and time goes on between them.
            for replica in rng.permutation(3):
                now[0] += 1.5
                decisions[replica] += [clock() for clock in clocks[replica]]
        for client in clients:
            client.close()
    assert decisions[0] == decisions[1] == decisions[2]
    assert 3 < sum(decisions[0]) < 30


def test_replicas_ask_the_server_only_for_clocks_with_an_interval():
    clock = GlobalClock(-1, client=object())
    assert clock() and clock()


def test_replicas_that_are_far_out_of_step_are_told_so(monkeypatch):
    monkeypatch.setattr(ClockServer, "MAX_OPEN_DECISIONS", 5)
    port = free_port()
    with ClockServer(port, replicas=2), Client(port) as client:
        clock = GlobalClock(10, client=client)
        with pytest.raises(RemoteError, match="behind"):
            for _ in range(10):
                clock()
