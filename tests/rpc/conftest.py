"""The backends that share one contract."""

from __future__ import annotations

import functools
import logging

import pytest
from rpc_testing import Backend, Proxy, echo, fail
from waiting_testing import WAIT

from embodied.rpc import Keys

# Tests that portal cannot pass, with the reason.
PORTAL_CANNOT = {
    "test_tuples_stay_tuples": "portal packs tuples as lists",
    "test_plain_numbers_keep_their_type": "portal packs numbers as arrays",
    "test_arguments_above_the_limit_are_refused_before_they_are_sent": (
        "portal's server does not tell its limit; it refuses what came"
    ),
    "test_slots_count_for_their_group": "portal's clients do not tell slots",
    "test_a_batch_of_all_slots_does_not_wait": "portal's clients do not tell slots",
    "test_a_batch_does_not_wait_for_a_client_that_left": (
        "portal's clients do not tell slots"
    ),
    "test_slots_are_told_when_a_client_joins_and_leaves": (
        "portal's clients do not tell slots"
    ),
    "test_a_call_whose_reply_was_lost_is_not_applied_again": (
        "portal's server cannot tell a repeated call from a new one"
    ),
    "test_a_broken_connection_is_made_again_and_open_calls_are_answered": (
        "portal's server cannot tell a repeated call from a new one"
    ),
    "test_replies_stay_as_they_are_while_they_are_held": "portal shares no memory",
    "test_memory_is_used_again_when_replies_are_dropped": "portal shares no memory",
}


@pytest.fixture(scope="session")
def keys():
    return Keys.generate()


@pytest.fixture(params=["local", "remote", "insecure", "portal"])
def rpc(request, keys):
    reason = PORTAL_CANNOT.get(request.node.originalname)
    if request.param == "portal" and reason:
        pytest.skip(f"portal cannot: {reason}")
    logging.getLogger("embodied.rpc").setLevel(logging.CRITICAL)
    backend = Backend(request.param, keys)
    try:
        yield backend
    finally:
        backend.close()
        logging.getLogger("embodied.rpc").setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Makes insecure batch servers a slow test: other combinations cover each half."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        found = params.get("rpc"), params.get("make_server")
        if found == ("insecure", "BatchServer"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["Server", "BatchServer"])
def make_server(request, rpc):
    """Returns a factory of either kind of server: plain methods work alike in both."""
    return functools.partial(rpc.server, kind=request.param)


@pytest.fixture
def client(rpc, make_server):
    """A client of a server with `echo` and `fail`."""
    server = make_server()
    server.bind("echo", echo)
    server.bind("fail", fail)
    server.start(block=False)
    client = rpc.client(server)
    client.connect(WAIT)
    return client


@pytest.fixture
def proxy():
    proxy = Proxy()
    yield proxy
    proxy.close()
