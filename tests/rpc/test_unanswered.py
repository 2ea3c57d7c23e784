"""Calls whose function ends before it can answer."""

import threading

import numpy as np
import pytest
from waiting_testing import WAIT

from embodied.rpc import (
    BatchServer,
    Client,
    Disconnected,
    Keys,
    Server,
    Unanswered,
    free_port,
)


@pytest.mark.parametrize("link", ["local", "remote"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Server, {}), (BatchServer, {}), (BatchServer, {"batch": 1})],
    ids=["plain", "not batched", "batched"],
)
def test_the_call_fails_when_the_next_server_is_there(kind, options, link):
    port, keys = free_port(), Keys.generate()
    called = threading.Event()

    def leave(value):
        called.set()
        raise Unanswered("ending")

    with Client(port, keys=keys, link=link) as client:
        future = client.double(np.array([4]))
        first = kind(port, keys=keys)
        first.bind("double", leave, **options)
        with first:
            assert called.wait(WAIT)
            assert not future.wait(0.2)
        second = kind(port, keys=keys)
        second.bind("double", lambda value: 2 * value, **options)
        with second:
            with pytest.raises(Disconnected, match="restarted"):
                future.result(WAIT)
            assert client.double(np.array([4])).result(WAIT).tolist() == [8]
