"""Reports the state of roles to the logger every second. Any process with roles.

The logger writes it to `live.json`. Metrics are sent every `log_every` seconds; these
reports are separate, and do not affect what the metrics count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from embodied.run.live import LIVE_SECONDS, Rate
from embodied.run.parallel import wiring
from embodied.run.settings import RunSettings

END_SECONDS = 5.0
CALLS = ("calls", "sent_bytes", "received_bytes")  # Counts that become rates.
QUEUES = ("inflight", "batch_waiting")  # Of a client, and of a server of batches.

logger = logging.getLogger("embodied.run")


class HopRates:
    """Recent rates of the traffic between roles. Belongs to one thread.

    Args:
      ends: clients and servers by name; they have `totals`.
      counters: functions that return other counts, by name.
    """

    def __init__(
        self,
        ends: Mapping[str, Any],
        counters: Mapping[str, Callable[[], float]],
    ):
        self._ends = dict(ends)
        self._counters = dict(counters)
        self._rates = {
            (name, count): Rate()
            for name in (*self._ends, *self._counters)
            for count in (*CALLS, "")
        }

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns `hops`: rates of `CALLS`, latency and queue by end; and `rates`."""
        hops = {}
        for name, end in self._ends.items():
            totals = end.totals()
            hops[name] = {
                **{count: self._rates[name, count](totals[count]) for count in CALLS},
                "latency": totals["latency_p50"],
                "queue": sum(totals.get(queue, 0) for queue in QUEUES),
            }
        rates = {
            name: self._rates[name, ""](count())
            for name, count in self._counters.items()
        }
        return {"hops": hops, "rates": rates}


@contextlib.contextmanager
def report_hops(
    settings: RunSettings,
    role: str,
    ends: Mapping[str, Any],
    counters: Mapping[str, Callable[[], float]],
) -> Iterator[None]:
    """Sends the `HopRates` of a role every second within the body."""
    rates = HopRates(ends, counters)

    def tell(client: Any) -> list[Any]:
        told = {"role": role, **rates.result()}
        return [client.tell_hops(json.dumps(told))]

    with tell_logger(settings, f"{role}-live", tell):
        yield


@contextlib.contextmanager
def tell_logger(
    settings: RunSettings, name: str, tell: Callable[[Any], Iterable[Any]]
) -> Iterator[None]:
    """Calls `tell` in a thread every second within the body, while a logger listens.

    Args:
      settings: where the logger is.
      name: of the thread and of the connection.
      tell: calls methods of the client that it is given, and returns their futures.
    """
    if wiring.AUTO in str(settings.logger_addr):  # It is not known.
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_tell, args=(settings, name, tell, stop), name=name, daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(END_SECONDS)


def _tell(
    settings: RunSettings,
    name: str,
    tell: Callable[[Any], Iterable[Any]],
    stop: threading.Event,
) -> None:
    results = wiring.PendingCalls(
        lambda _, error: logger.warning("The logger took no report: %s", error)
    )
    try:
        with wiring.make_client(settings.logger_addr, name, settings) as client:
            while not stop.wait(LIVE_SECONDS):
                results.check()
                # Not while the last report is open, so that this never waits for it.
                if results.all_done and client.connected:
                    for future in tell(client):
                        results.add(future)
    except ConnectionError as error:  # The run does not depend on it.
        logger.warning("%s does not report any more: %s", name, error)
