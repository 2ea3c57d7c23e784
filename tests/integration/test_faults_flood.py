"""Strangers at the ports of a run that trains: floods and malformed messages."""

import contextlib
import os
import random
import socket
import threading

import pytest
from fault_testing import ENVS, Run, check_ratio, check_replay

GREETING = bytes.fromhex("ff00000000000000017f0300") + b"NULL".ljust(20, b"\0")
GREETING = GREETING.ljust(64, b"\0")

MALFORMED = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(5000),
    "web": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a greeting": GREETING[:20],
    "no key": GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER",
    "a huge frame": GREETING + b"\x02" + b"\x7f" + 7 * b"\xff" + b"x" * 1000,
    "a wrong handshake": GREETING.replace(b"NULL\0", b"CURVE") + b"\x04\xc8" * 200,
}


def send(port, message):
    """Sends a message, and ignores errors."""
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(message)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(0.2)
            stranger.recv(1000)


def flood(ports, stop, count):
    """Opens and closes many connections until `stop` is set."""
    while not stop.is_set():
        with contextlib.ExitStack() as stack:
            for index in range(count):
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(socket.socket())
                    stranger.settimeout(5)
                    stranger.connect(("127.0.0.1", ports[index % len(ports)]))
                    stranger.send(os.urandom(index % 100))


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "count"), [(4, 100), (60, 300)])
def test_a_run_goes_on_with_strangers_at_its_ports(tmp_path, seconds, count):
    with Run(tmp_path, "--run.save_every", "3") as run:
        run.goes_on()
        ports = run.addresses()
        assert len(set(ports)) == 3
        for port in ports:
            for message in MALFORMED.values():
                send(port, message)
        run.goes_on()
        stop = threading.Event()
        thread = threading.Thread(target=flood, args=(ports, stop, count))
        thread.start()
        try:
            run.stays(seconds)
        finally:
            stop.set()
            thread.join()
        run.goes_on(seconds=10)  # It recovers this soon after a flood.
        check_ratio(run)
        assert "restarted" not in run.output()
        run.leave()
    steps = check_replay(tmp_path)
    assert len({step[0] for step in steps}) == ENVS
