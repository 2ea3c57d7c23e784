"""Reports every second: rates of hops, and a logger that nothing waits for."""

import json
import threading

import pytest
from role_testing import make_args, wait_until

from embodied import rpc
from embodied.run import live
from embodied.run.parallel import live_reports
from embodied.run.parallel.live_reports import HopRates, report_hops, tell_logger

WAIT = 20


class End:
    """A client or server with these totals."""

    def __init__(self, **totals):
        self.counts = dict.fromkeys(("calls", "sent_bytes", "received_bytes"), 0)
        self.counts |= totals

    def totals(self):
        return {**self.counts, "latency_p50": 0.25}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.Rate.__init__, "__defaults__", (5.0, lambda: now[0]))
    return now


def test_rates_are_of_the_last_seconds(clock):
    end, updates = End(inflight=2), [0]
    rates = HopRates({"client/x": end}, {"train": lambda: updates[0]})
    rates.result()
    clock[0], updates[0] = 2.0, 10
    end.counts |= {"calls": 4, "sent_bytes": 1000}
    told = rates.result()
    assert told["rates"] == {"train": 5.0}
    assert told["hops"]["client/x"] == {
        "calls": 2.0,
        "sent_bytes": 500.0,
        "received_bytes": 0.0,
        "latency": 0.25,
        "queue": 2,
    }


@pytest.fixture
def logger():
    """A logger role's server, which answers once `answers` is set."""
    server = rpc.Server(f"localhost:{rpc.free_port()}", "logger")
    server.told, server.answers = [], threading.Event()
    server.first = threading.Event()

    def tell_hops(text):
        server.told.append(json.loads(text))
        server.first.set()
        assert server.answers.wait(WAIT)

    server.bind("tell_hops", tell_hops, workers=1)
    with server:
        yield server
        server.answers.set()


def test_a_logger_that_does_not_answer_is_told_nothing_more(logger, monkeypatch):
    monkeypatch.setattr(live_reports, "LIVE_SECONDS", 0.01)
    settings = make_args(logger_addr=logger.addr)
    calls = []

    def tell(client):
        calls.append(client.tell_hops(json.dumps({"number": len(calls)})))
        return calls[-1:]

    with tell_logger(settings, "test", tell):
        assert logger.first.wait(WAIT)
        wait_until(lambda: calls)  # The logger may have the call before `calls` has it.
        assert not calls[0].wait(0.3)  # Thirty times LIVE_SECONDS.
        assert len(calls) == 1
        logger.answers.set()
        assert calls[0].result(WAIT) is None
        while len(logger.told) < 3:
            calls[-1].wait(WAIT)


def test_hops_are_reported_until_the_end(logger, monkeypatch):
    monkeypatch.setattr(live_reports, "LIVE_SECONDS", 0.01)
    logger.answers.set()
    settings = make_args(logger_addr=logger.addr)
    with report_hops(settings, "actor", {"client/x": End()}, {}):
        assert logger.first.wait(WAIT)
    assert logger.told[0]["role"] == "actor"
    assert set(logger.told[0]["hops"]) == {"client/x"}
    assert not [x for x in threading.enumerate() if x.name == "actor-live"]


def test_a_logger_that_is_not_there_keeps_nobody():
    settings = make_args(logger_addr=f"localhost:{rpc.free_port()}")
    with report_hops(settings, "actor", {"client/x": End()}, {}):
        pass
    with report_hops(make_args(), "actor", {}, {}):  # The port is not known.
        pass
