"""A server that was stopped for a while does not consider its clients gone."""

import os
import signal
import time

from embodied import rpc, workers

FROZEN = 4.5  # Seconds; clients count as gone after three.


def serve(port):
    from embodied.rpc import server as servers

    servers.CLIENT_TIMEOUT, servers.HEARTBEAT = 3.0, 0.4
    left = []
    server = servers.Server(port)
    server.bind("left", lambda: len(left))
    server.sessions.on_leave.append(left.append)
    server.start(block=True)


def test_clients_of_a_server_that_was_stopped_have_not_left():
    port = rpc.free_port()
    with workers.Process(serve, port) as process, rpc.Client(port) as client:
        assert client.left().result(60) == 0
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(FROZEN)
        os.kill(process.pid, signal.SIGCONT)
        assert client.left().result(60) == 0
