"""Which clients may connect, and which errors the others get."""

from __future__ import annotations

import concurrent.futures
import json
import os
import stat
import threading
import time

import pytest

from embodied.rpc import (
    AuthError,
    Client,
    Disconnected,
    Keys,
    Server,
    free_port,
    zmq_links,
)


def echo_server(port, **kwargs):
    server = Server(port, **kwargs)
    server.bind("echo", lambda x: x)
    return server


def test_keys_survive_a_file_that_only_its_owner_can_read(tmp_path):
    keys, path = Keys.generate(), tmp_path / "secret" / "keys.json"
    keys.save(path)
    assert Keys.load(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    words = rf"^Key file {path} exists and is not overwritten.*remove it first"
    with pytest.raises(FileExistsError, match=words):
        Keys.generate().save(path)
    assert Keys.load(path) == keys
    assert os.listdir(path.parent) == ["keys.json"]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o660, 0o777])
def test_a_key_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "keys.json"
    Keys.generate().save(path)
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"{mode:04o}.*chmod 600"):
        Keys.load(path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"server_public": 3}', "\x00\x01"]
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(AuthError, match="not a valid key file"):
        Keys.load(path)
    path.write_bytes(b"\xff\xfe" + content.encode())
    with pytest.raises(AuthError, match="not a valid key file"):
        Keys.load(path)


@pytest.mark.parametrize("change", [lambda key: key[:-5], lambda key: "#" * len(key)])
def test_a_file_with_an_impossible_key_is_refused(tmp_path, change):
    path = tmp_path / "keys.json"
    Keys.generate().save(path)
    data = json.loads(path.read_text())
    data["client_secret"] = change(data["client_secret"])
    path.write_text(json.dumps(data))
    with pytest.raises(AuthError, match="not a valid key file"):
        Keys.load(path)


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(AuthError, match="Copy it"):
        Keys.load(tmp_path / "none.json")


def test_the_secret_is_not_printed():
    keys = Keys.generate()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)


def test_threads_that_need_default_keys_at_the_same_time_get_the_same(
    tmp_path, monkeypatch
):
    threads = 16
    for index in range(20):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / str(index)))
        barrier = threading.Barrier(threads)

        def make(barrier=barrier):
            barrier.wait()
            return Keys.default()

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            found = [pool.submit(make) for _ in range(threads)]
            assert len({future.result(60) for future in found}) == 1


def test_default_keys_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Keys.default() == Keys.default()
    assert stat.S_IMODE((tmp_path / "embodied/keys.json").stat().st_mode) == 0o600


def test_a_client_with_the_runs_keys_gets_in():
    keys, port = Keys.generate(), free_port()
    with echo_server(port, keys=keys), Client(port, keys=keys) as client:
        assert client.echo(1).result(10) == 1


def test_a_client_whose_key_is_not_allowed_is_told_so():
    ours, theirs, port = Keys.generate(), Keys.generate(), free_port()
    # The intruder knows the server's public key, but its own key is not allowed.
    intruder = Keys(
        ours.server_public,
        theirs.server_secret,
        theirs.client_public,
        theirs.client_secret,
        (),
    )
    with echo_server(port, keys=ours) as server:
        with Client(port, keys=intruder) as client:
            # The refusal may come before the call or after it.
            with pytest.raises(AuthError, match="does not allow this client's key"):
                client.echo(1).result(10)
            with pytest.raises(AuthError):
                client.connect(10)
            with pytest.raises(AuthError):
                client.echo(2)
        assert server.rejected["key"] >= 1
        assert server.stats()["calls"] == 0
        with Client(port, keys=ours) as client:
            assert client.echo(3).result(10) == 3


def test_a_client_that_expects_another_server_is_told_so(monkeypatch):
    monkeypatch.setattr(zmq_links, "FAILED_SECONDS", 0.5)
    port = free_port()
    with echo_server(port, keys=Keys.generate()):
        with Client(port, keys=Keys.generate()) as client:
            with pytest.raises(AuthError, match="key is not the one expected"):
                client.connect(30)


def test_a_client_without_keys_does_not_get_in():
    port = free_port()
    with echo_server(port, keys=Keys.generate()) as server:
        with Client(port, insecure=True) as client:
            with pytest.raises(AuthError):
                client.connect(30)
        assert server.stats()["calls"] == 0


def test_a_client_with_keys_does_not_talk_to_a_server_without():
    port = free_port()
    with echo_server(port, insecure=True):
        with Client(port) as client, pytest.raises(AuthError):
            client.connect(30)


def test_both_sides_may_agree_to_use_no_keys():
    port = free_port()
    with echo_server(port, insecure=True), Client(port, insecure=True) as client:
        assert client.echo(1).result(10) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
def test_other_interfaces_need_explicit_keys(host):
    with pytest.raises(AuthError, match="other machines"):
        Server(f"{host}:{free_port()}")
    Server(f"{host}:{free_port()}", keys=Keys.generate())


def test_without_a_host_only_this_machine_can_connect():
    assert Server(1234).addr == "127.0.0.1:1234"
    assert Server("localhost:1234").addr == "127.0.0.1:1234"


def test_no_server_is_a_timeout_and_closing_ends_the_wait():
    with Client(free_port()) as client:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no server answers"):
            client.connect(0.2)
        assert time.monotonic() - started < 10
        call = client.echo(1)
    with pytest.raises(Disconnected):
        call.result(10)
