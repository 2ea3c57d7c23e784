"""The chaos test: its proxy, its programs, its summary, and two minutes of it."""

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.chaos import campaign, faults
from benchmarks.chaos.programs import MARK, Mark, Program, poll, python
from benchmarks.chaos.site import MetricsWatch, Site, Topology, free_port


class Echo(socketserver.BaseRequestHandler):
    """Sends everything back."""

    def handle(self):
        with contextlib.suppress(OSError):
            while data := self.request.recv(100):
                self.request.sendall(data)


@pytest.fixture
def proxy(tmp_path):
    """A proxy in front of a server that sends everything back."""
    front = free_port()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        command = python("benchmarks.chaos.proxy", "--listen", f"127.0.0.1:{front}")
        command += ["--to", f"127.0.0.1:{server.server_address[1]}"]
        program = Program(command, tmp_path / "proxy.txt", {})
        program.port = front
        try:
            assert poll(lambda: is_open(front), 30)
            yield program
        finally:
            program.destroy()
            server.shutdown()
            thread.join()


def is_open(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), 30)


def echoed(connection, data):
    connection.sendall(data)
    return connection.recv(100)


class TestProxy:
    def test_it_carries(self, proxy):
        with connect(proxy) as connection:
            assert echoed(connection, b"one") == b"one"

    @pytest.mark.parametrize("kind", ["stall", "delay"])
    def test_it_stalls_and_delays(self, proxy, kind):
        with connect(proxy) as connection:
            proxy.tell(f"{kind} 1")
            begin = time.monotonic()
            taken = 0.0
            while time.monotonic() < begin + 1:
                sent = time.monotonic()
                assert echoed(connection, b"one") == b"one"
                taken = max(taken, time.monotonic() - sent)
            assert taken > 0.1

    def test_it_cuts_and_then_answers_again(self, proxy):
        with connect(proxy) as connection:
            assert echoed(connection, b"one") == b"one"
            begin = time.monotonic()
            proxy.tell("cut 1")
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        with connect(proxy) as connection:
            assert echoed(connection, b"two") == b"two"
            assert time.monotonic() > begin + 0.9


class TestPrograms:
    def test_all_that_a_program_started_is_found_and_ended(self, tmp_path):
        mark = Mark()
        child = (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
        )
        environ = {MARK: mark.value}
        program = Program([sys.executable, "-c", child], tmp_path / "out", environ)
        try:
            assert poll(lambda: len(mark.processes()) == 2, 30)
            assert mark.usage()["processes"] == 2
        finally:
            program.destroy()
        assert poll(lambda: not mark.processes(), 10)
        assert program.code == -signal.SIGKILL

    def test_roles_are_known_by_the_last_argument(self, tmp_path):
        script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
        command = [sys.executable, "-c", script]
        role = [sys.executable, "-c", "input()", "env-3"]
        program = Program([*command, *role], tmp_path / "out", {})
        try:
            assert poll(lambda: set(program.roles()) == {"env-3"}, 30)
        finally:
            program.destroy()

    def test_updates_are_counted_from_now_on_also_in_a_file_that_was_cut(
        self, tmp_path
    ):
        path = tmp_path / "metrics.jsonl"
        line = '{"step": 1, "parallel/updates_per_second": %s}\n'
        path.write_text(line % 5)
        watch = MetricsWatch(path)
        assert watch.updates() == 0
        with path.open("a") as file:
            file.write(line % 0.0 + line % 0.05 + '{"step": 2}\n{"unfin')
        assert watch.updates() == 1
        os.truncate(path, 0)
        assert watch.updates() == 1
        with path.open("a") as file:
            file.write(line % 3)
        assert watch.updates() == 2


@pytest.mark.parametrize("topology", campaign.TOPOLOGIES, ids=lambda x: x.name)
def test_every_topology_has_the_faults_of_its_roles(topology, tmp_path):
    kinds = set(faults.applicable(Site(topology, tmp_path, [])))
    assert kinds >= {"kill_env", "kill_launcher", "damage_file", "stop_role"}
    assert ("kill_agent" in kinds) == topology.process
    assert ("cut_connections" in kinds) == topology.remote_envs
    assert not kinds & {"fill_disk", "pull_cable"}  # Disk and cable are not set up.


def test_names_of_topologies_differ():
    names = [topology.name for topology in campaign.TOPOLOGIES]
    assert len(set(names)) == len(names)
    assert Topology("any").shortest < Topology("any", dreamer=True).shortest


def test_the_summary_is_json():
    record = campaign.Record()
    record.faults = {"kill_env": [3.0, 1.0, 2.0], "restart": []}
    record.raise_to(lost=3.0)
    record.raise_to(lost=2.0)
    record.lost.update(kill_replay=3, end=2)
    summary = json.loads(json.dumps(record.summary()))
    assert summary["faults"] == {"kill_env": 3, "restart": 0}
    expected = {"kill_env": {"median": 2.0, "worst": 3.0}}
    assert summary["seconds_to_training"] == expected
    assert summary["lost"] == {"all": 5, "kill_replay": 3, "end": 2}
    assert summary["worst"] == {"lost": 3.0}
    assert summary["gaps"] == summary["duplicates"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_it():
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert sum(summary["faults"].values()) >= 5
    assert summary["counts"]["stored"] > 1000
