"""What the tests of processes share."""

from __future__ import annotations

import socket

import psutil
from waiting_testing import WAIT


class Line:
    """A socket to a child: the test has this object, the child the descriptor `fd`."""

    def __init__(self):
        self.here, self.there = socket.socketpair()
        self.here.settimeout(WAIT)
        self.reader = self.here.makefile("r")
        self.fd = self.there.fileno()

    def receive(self):
        return self.reader.readline().strip()

    def send(self, text):
        self.here.sendall(f"{text}\n".encode())

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.reader.close()
        self.here.close()
        self.there.close()


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_forever():
    """Returns a function that runs until it is stopped."""

    def wait():
        import threading

        threading.Event().wait()

    return wait


def fail_with(error):
    def fail():
        raise error

    return fail


def fail_while_stopping():
    """Returns a function that says that it is ready, and fails when it is stopped."""

    def work(fd):
        import os
        import threading

        try:
            os.write(fd, b"ready\n")
            threading.Event().wait()
        finally:
            raise OSError("disk full")

    return work
