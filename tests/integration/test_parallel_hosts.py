"""Runs on two hosts with keys; the hosts are network namespaces with a cable."""

import contextlib
import time

import pytest
from parallel_testing import LEAN, Program, Saved, last_step, small

from benchmarks.chaos.audit import read_stored
from benchmarks.chaos.network import Hosts
from benchmarks.chaos.numbered_env import TRACES
from embodied.rpc import Keys

PARTITION_SECONDS = 35.0  # More than any timeout of a connection.
# Environments in which every step is unique.
NUMBERED = ["--task", "benchmarks.chaos.numbered_env:Numbered", "--run.eval_envs", "0"]


@pytest.fixture
def hosts():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts())
        except OSError as error:
            pytest.skip(f"Network namespaces cannot be made here: {error}")
        yield made


def commands(hosts, folder, train_keys, env_keys, *flags):
    """The programs of the two hosts."""
    addresses = ["--run.actor_addr", f"{hosts.address}:7001", *flags]
    train = small(
        folder / "run",
        *(*addresses, "--run.remote_envs", "True", "--run.keyfile", str(train_keys)),
        steps=10**9,
    )
    env = small(
        folder / "unused",
        *(*addresses, "--run.keyfile", str(env_keys)),
        script="parallel_envs",
    )
    return (
        Program(*train, prefix=hosts.prefix("train")),
        Program(*env, prefix=hosts.prefix("env")),
    )


def test_environments_of_another_host(hosts, tmp_path):
    keys = tmp_path / "keys.json"
    Keys.generate().save(keys)
    pair = commands(hosts, tmp_path, keys, keys, *LEAN)
    with pair[0] as train, pair[1] as env:
        train.wait_for_envs(tmp_path / "run", 2)
        train.interrupt()
        assert train.wait() == 0, f"{train.output()}\n{env.output()}"
        assert env.wait() == 0, env.output()
        assert "Traceback" not in train.output() + env.output()
    assert Saved(tmp_path / "run").step > 0


@pytest.mark.slow
def test_a_host_that_was_out_of_reach_comes_back(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv(TRACES, str(tmp_path))
    keys, logdir = tmp_path / "keys.json", tmp_path / "run"
    Keys.generate().save(keys)
    pair = commands(hosts, tmp_path, keys, keys, *NUMBERED, "--replay.size", "1e6")
    with pair[0] as train, pair[1] as env:
        train.wait_for_envs(logdir, 2)
        hosts.connect(False)
        time.sleep(PARTITION_SECONDS)
        hosts.connect(True)
        assert "No contact with envs 0 to 1 since " in train.output()
        train.wait_for("Back after ")
        step = last_step(logdir)
        train.wait_until(lambda: last_step(logdir) > step + 200)
        train.interrupt()
        assert train.wait() == 0, f"{train.output()}\n{env.output()}"
        assert env.wait() == 0, env.output()
    stored = read_stored(logdir)
    assert not stored.problems and stored.counts["stored"] > 200
    for what in ("gaps", "duplicates", "mixed", "torn_episodes"):
        assert not stored.counts[what], stored.counts


def test_a_host_with_another_key_is_refused(hosts, tmp_path):
    for name in ("right.json", "wrong.json"):
        Keys.generate().save(tmp_path / name)
    keys = (tmp_path / "right.json", tmp_path / "wrong.json")
    pair = commands(hosts, tmp_path, *keys, *LEAN)
    with pair[0] as train, pair[1] as env:
        assert env.wait() == 1, env.output()
        shown = env.output()
        assert f"no connection to {hosts.address}:7001" in shown
        assert "Use the key file of the run (--run.keyfile FILE)" in shown
        assert "Traceback" not in shown
        assert train.running, train.output()
        train.interrupt()
        assert train.wait() == 0, train.output()


def test_another_interface_needs_a_key_file(hosts, tmp_path):
    argv = small(tmp_path, "--run.actor_addr", f"{hosts.address}:7001")
    with Program(*argv, prefix=hosts.prefix("train")) as train:
        code, shown = train.wait(), train.output()
    assert code in (1, 2), shown
    assert "key" in shown and "run.keyfile" in shown
