"""The server: it requires its token, and shows only the given folders."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import psutil
import pytest
from view_testing import QUICK, ask, fetch, program, running, view, write_run
from waiting_testing import wait_until

pytest.importorskip("starlette", reason="the extra `view` is not installed")

NASTY = "<img src=x onerror=alert(1)>/../../etc/passwd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    write_run(folder / "runs/one")
    write_run(folder / "runs/two", seed=1)
    with (folder / "runs/one/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 600, NASTY: 1.0}) + "\n")
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with view(folder / "runs") as address:
        yield address


def test_without_the_token_nothing_is_shown(address):
    server, token = address.rstrip("/").rsplit("/", 1)
    wrong = "x" * len(token)
    for path in ("", "/", "/api/runs", f"/{wrong}/", f"/{wrong}/api/runs", "/static/x"):
        status, headers, body = fetch(server + path)
        assert status == 404 and b"dummy" not in body and b"<" not in body
        assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_the_page_has_a_policy_and_needs_nothing_from_elsewhere(address):
    status, headers, body = fetch(address)
    assert status == 200 and b"<script" in body
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "script-src 'self'" in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    for name in ("main.js", "page.js", "style.css", "chart.js", "dream.js"):
        status, _, body = fetch(f"{address}static/{name}")
        assert status == 200 and b"http://" not in body and b"https://" not in body


@pytest.mark.parametrize(
    "path",
    [
        "static/../../secret.txt",
        "static/..%2f..%2fsecret.txt",
        "static/%2fetc%2fpasswd",
        "api/run/..",
        "api/run/..%2f..%2fsecret.txt",
        "api/run/one",
        "api/series?run=../one&name=train/loss",
        "api/videos/..%2fone",
        "api/video/one/0",
    ],
)
def test_no_other_file_can_be_asked_for(address, path):
    status, _, body = fetch(address + path)
    assert status == 404 and b"secret" not in body and b"root:" not in body


def test_a_page_of_another_name_is_refused(address):
    assert fetch(f"{address}api/runs", headers={"Host": "evil.example"})[0] == 404
    assert fetch(f"{address}api/runs", headers={"Host": "localhost:1"})[0] == 200


def test_writes_are_only_taken_from_our_page(address):
    assert fetch(f"{address}api/dream", b"run=x")[0] == 415
    headers = {"Content-Type": "application/json"}
    assert fetch(f"{address}api/dream", b"[1]", headers)[0] == 400
    assert fetch(f"{address}api/dream", b"{" + b" " * 70_000, headers)[0] == 413
    assert fetch(f"{address}api/dream", [b"{", b" " * 70_000], headers)[0] == 413
    assert fetch(f"{address}api/dream", b'{"run": "no"}', headers)[0] == 404
    assert fetch(f"{address}api/runs", b"{}", headers)[0] == 405


def test_runs_and_curves(address):
    one, two = sorted(ask(f"{address}api/runs"), key=lambda run: run["name"])
    assert (one["name"], one["state"], one["score"]) == ("one", "ended", 50)
    assert one["setting"] == two["setting"] and len(one["curve"]) == 50
    shown = ask(f"{address}api/run/{one['id']}")
    assert NASTY in shown["metrics"] and shown["config"]["changed"] == {}
    query = f"run={one['id']}&run={two['id']}&name=train/loss&points=10"
    first, second = ask(f"{address}api/series?{query}")
    assert first["total"] == 50 and len(first["x"]) <= 10 and first["y"][0] == 1.0
    assert first["x"] == second["x"]
    part = ask(f"{address}api/series?{query}&from=100&to=200")[0]
    assert min(part["x"]) >= 100 and max(part["x"]) <= 200
    assert ask(f"{address}api/series?{query}&points=nan&smooth=1e9&from=x")


def test_reading_leaves_the_folder_as_it_is(address, folder):
    def everything():
        return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}

    before = everything()
    for run in ask(f"{address}api/runs"):
        ask(f"{address}api/run/{run['id']}")
        ask(f"{address}api/events/{run['id']}")
        ask(f"{address}api/videos/{run['id']}")
    assert everything() == before


def test_a_new_score_is_streamed(address, folder):
    run = next(run for run in ask(f"{address}api/runs") if run["name"] == "two")
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        path = f"/{address.split('/')[3]}/api/stream?run={run['id']}"
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
        connection.sendall(request.encode())
        file = connection.makefile()
        assert wait_until(lambda: "event: run" in file.readline(), "the first event")
        path = folder / "runs/two/scores.jsonl"
        score = f"{len(path.read_text().splitlines())}.5"  # New at every attempt.
        with path.open("a") as scores:
            scores.write(f'{{"step": 900, "episode/score": {score}}}\n')
        wait_until(lambda: f'"score": {score}' in file.readline(), "the new score")


def cpu_seconds(process, seconds):
    """Returns the processor time that a process takes within some seconds."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


@pytest.mark.parametrize(
    "rows", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_many_runs_and_rows_come_quickly(tmp_path, rows):
    for index in range(100):
        write_run(tmp_path / f"run{index}", seed=index, rows=20)
    row = '{"step": %d, "episode/score": %.3f}\n'
    with (tmp_path / "run0/scores.jsonl").open("w") as file:
        file.writelines(row % (10 * i, i / 7) for i in range(rows))
    with running("--script", "view", "--logdir", tmp_path) as process:
        address = process.stdout.readline().rsplit(maxsplit=1)[-1]
        begin = time.monotonic()
        fetch(address)
        runs = ask(f"{address}api/runs")
        first = time.monotonic() - begin
        assert len(runs) == 100 and first < 8  # 1.5 s, on a machine that is not busy.
        long = next(run for run in runs if run["name"] == "run0")
        (curve,) = ask(f"{address}api/series?run={long['id']}")
        assert curve["total"] == rows and len(curve["x"]) <= 800
        server = psutil.Process(process.pid)
        memory = sum(p.memory_info().rss for p in [server, *server.children()])
        assert memory < 250e6
        used = [cpu_seconds(server, 2) for _ in range(3)]
        assert (
            min(used) < 0.02 * 2 + 0.02
        )  # The kernel counts in hundredths of a second.
        print(json.dumps({"first_page_s": first, "memory_mb": memory / 1e6}))


def test_errors_are_clear(tmp_path):
    output, _ = program("--script", "view", "--logdir", tmp_path / "no").communicate()
    assert "expected a run, or a folder of runs" in output and "Traceback" not in output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ("--script", "view", "--logdir", tmp_path, "--view.port", port)
        output, _ = program(*flags).communicate()
    assert "view.port" in output and "Traceback" not in output


def test_several_folders(tmp_path):
    write_run(tmp_path / "x/one")
    write_run(tmp_path / "y/one")
    with view(tmp_path / "x", tmp_path / "y") as address:
        names = [run["name"] for run in ask(f"{address}api/runs")]
    assert names == ["x/one", "y/one"]


def test_the_server_leaves_on_sigterm_while_a_page_is_open(folder):
    process = program("--script", "view", "--logdir", folder / "runs")
    address = process.stdout.readline().rsplit(maxsplit=1)[-1]
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        path = f"/{address.split('/')[3]}/api/stream"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(100)
        os.kill(process.pid, 15)
        process.communicate(timeout=20)


def test_beside_a_run_it_comes_back_at_the_same_address(tmp_path):
    with running(*QUICK, "--run.view", "True", "--logdir", tmp_path / "run") as process:
        lines = iter(process.stdout.readline, "")
        address = next(x for x in lines if "The view is at" in x).rsplit(maxsplit=1)[-1]
        threading.Thread(target=process.stdout.read, daemon=True).start()
        wait_until(lambda: ask(f"{address}api/runs")[0]["step"] > 0, "steps of the run")
        assert ask(f"{address}api/runs")[0]["state"] == "live"
        port = int(address.split(":")[2].split("/")[0])
        listeners = [
            entry.pid
            for entry in psutil.net_connections("tcp")
            if entry.status == "LISTEN" and entry.laddr.port == port
        ]
        os.kill(listeners[0], 9)
        wait_until(lambda: _answers(address), "the view again")
        assert process.poll() is None


def _answers(address):
    try:
        return fetch(address)[0] == 200
    except OSError:
        return False
