"""Backends, a proxy and other helpers of the tests of transport."""

from __future__ import annotations

import itertools
import os
import socket
import threading

import numpy as np
from waiting_testing import WAIT, wait_until

from embodied.rpc import Keys, free_port, transport


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


def echo(*args):
    return args[0] if len(args) == 1 else list(args)


def fail(text):
    raise LookupError(text)


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
                pass  # The other side has closed it already.

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
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "A thread did not end."
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(threads))]


def wait_for_calls(server, count):
    """Waits until so many calls have arrived since the last time stats were asked."""
    arrived = itertools.accumulate(server.stats()["calls"] for _ in itertools.count())
    wait_until(lambda: next(arrived) >= count, f"{count} calls")


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
