"""The backends that one contract holds for, and what its tests share."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time

import numpy as np
import pytest

from embodied.rpc import Keys, free_port, transport

WAIT = 20.0  # Seconds; far above what anything takes, also on a busy machine.

# What portal cannot meet, by the name of the test that shows it.
PORTAL_CANNOT = {
    "test_tuples_stay_tuples": "portal packs tuples as lists",
    "test_plain_numbers_keep_their_type": "portal packs numbers as arrays",
    "test_arguments_above_the_limit_are_refused_before_they_are_sent": (
        "portal's server does not tell its limit; it refuses what came"
    ),
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


class Backend:
    """Makes servers and clients of one backend, and closes them."""

    def __init__(self, name: str, keys: Keys):
        self.name = name
        self._transport = transport("portal" if name == "portal" else "zmq")
        self._made: list = []
        self._common = {"insecure": True} if name == "insecure" else {"keys": keys}
        self._link = name if name in ("local", "remote") else "auto"

    def server(self, port=0, kind="Server", **kwargs):
        """Returns a server that is not started, with its address as `addr`."""
        make = getattr(self._transport, kind)
        server = make(port or free_port(), **self._common, **kwargs)
        self._made.append(server)
        return server

    def batch_server(self, port=0, **kwargs):
        return self.server(port, "BatchServer", **kwargs)

    def client(self, server, **kwargs):
        """Returns a client of a server or of an address."""
        addr = getattr(server, "addr", server)
        client = self._transport.Client(
            addr, **{**self._common, "link": self._link, **kwargs}
        )
        self._made.append(client)
        return client

    def close(self):
        for made in reversed(self._made):
            made.close()


@pytest.fixture(scope="session")
def keys():
    return Keys.generate()


@pytest.fixture(autouse=True)
def own_key_folder(tmp_path_factory, monkeypatch):
    """Keeps tests away from the keys of the user."""
    folder = tmp_path_factory.getbasetemp() / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))


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
    """Leaves one combination to the long rounds, as either half is in another."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        found = params.get("rpc"), params.get("make_server")
        if found == ("insecure", "BatchServer"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["Server", "BatchServer"])
def make_server(request, rpc):
    """Makes a server of either kind: plain methods work alike in both."""
    return functools.partial(rpc.server, kind=request.param)


def echo(*args):
    return args[0] if len(args) == 1 else list(args)


def fail(text):
    raise LookupError(text)


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


class Proxy:
    """A TCP proxy that can lose replies, break connections and change its target.

    Threads: one accepts; two for each connection copy bytes, one in each direction.
    """

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.addr = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = ""
        self.losing = threading.Event()  # Replies are thrown away while it is set.
        self._lock = threading.Lock()  # Guards the sockets.
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self):
        """Breaks all connections."""
        with self._lock:
            broken, self._sockets = self._sockets, []
        for sock in broken:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The other side was faster.

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(WAIT)
        self.cut()
        for thread in self._threads:
            thread.join(WAIT)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                host, port = self.target.rsplit(":", 1)
                far = socket.create_connection((host, int(port)), WAIT)
            except (OSError, ValueError):
                near.close()
                continue
            near.settimeout(None)
            far.settimeout(None)
            with self._lock:
                self._sockets += [near, far]
            for args in ((near, far, None), (far, near, self.losing)):
                thread = threading.Thread(target=self._copy, args=args)
                self._threads.append(thread)
                thread.start()

    @staticmethod
    def _copy(source, target, losing):
        try:
            while data := source.recv(1 << 16):
                if not (losing and losing.is_set()):
                    target.sendall(data)
        except OSError:
            pass
        finally:
            for sock in (source, target):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            source.close()


@pytest.fixture
def proxy():
    proxy = Proxy()
    yield proxy
    proxy.close()


def in_threads(function, arguments):
    """Calls a function in one thread for each argument; returns the results."""
    results: dict = {}
    errors: list[BaseException] = []

    def work(index, argument):
        try:
            results[index] = function(argument)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(index, argument), daemon=True)
        for index, argument in enumerate(arguments)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WAIT
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
        assert not thread.is_alive(), "A thread did not end."
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(threads))]


def same(left, right):
    """Whether two trees are equal in values, types, dtypes and shapes."""
    if isinstance(left, np.ndarray | np.generic):
        left, right = np.asarray(left), np.asarray(right)
        return (left.dtype, left.shape) == (
            right.dtype,
            right.shape,
        ) and left.tobytes() == right.tobytes()
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def shared_blocks():
    """Counts the blocks of shared memory that this process has open."""
    blocks = set()
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        try:
            if os.readlink(path).startswith("/memfd:embodied"):
                blocks.add(os.stat(path).st_ino)
        except OSError:
            continue  # The descriptor of the listing itself.
    return len(blocks)
