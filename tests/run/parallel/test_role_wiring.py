"""Addresses, connections, time shares and calls of roles, and the bottleneck."""

import logging
import socket
import threading

import cloudpickle
import pytest
from role_testing import FakeClient, make_args, make_future

from embodied.rpc import AuthError, free_port
from embodied.run.parallel import wiring
from embodied.run.parallel.bottleneck import find_bottleneck
from embodied.run.parallel.launcher import prepare


class TestAddresses:
    def test_auto_becomes_free_ports(self):
        args = wiring.resolve_addresses(make_args(replay_addr="elsewhere:5"))
        assert args.replay_addr == "elsewhere:5"
        ports = {
            getattr(args, key).removeprefix("localhost:")
            for key in wiring.ADDRESSES[::2]
        }
        assert len(ports) == 2 and all(port.isdigit() for port in ports)

    def test_ipv6(self):
        args = wiring.resolve_addresses(make_args(ipv6=True, replay_addr="host:5"))
        assert args.actor_addr.startswith("[::1]:") and args.replay_addr == "host:5"

    def test_a_role_of_its_own_is_told_what_to_pass(self):
        args = make_args(logger_addr="host:1")
        wiring.check_addresses(args, "logger_addr")
        with pytest.raises(wiring.RoleError) as caught:
            wiring.check_addresses(args, "actor_addr", "logger_addr", "replay_addr")
        message = str(caught.value)
        assert "--run.actor_addr HOST:PORT --run.replay_addr HOST:PORT" in message
        assert "{auto}" in message and "run.logger_addr" not in message

    @pytest.mark.parametrize(("asked", "batch"), [(-1, 3), (0, 3), (4, 4), (7, 7)])
    def test_the_batch_is_half_of_the_envs(self, tmp_path, asked, batch):
        args = make_args(envs=7, actor_batch=asked, logdir=str(tmp_path / "run"))
        args = prepare(args)
        assert args.policy_batch == batch
        assert (tmp_path / "run").is_dir()

    def test_a_batch_that_would_never_be_full_is_refused(self, tmp_path):
        args = make_args(envs=7, actor_batch=8, logdir=str(tmp_path / "run"))
        with pytest.raises(wiring.RoleError, match=r"at most run.envs \(7\), got 8"):
            prepare(args)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("key", "addr"), [("remote_replay", "replay"), ("remote_envs", "actor")]
    )
    def test_roles_elsewhere_need_addresses(self, tmp_path, key, addr):
        args = make_args(logdir=str(tmp_path), **{key: True})
        with pytest.raises(wiring.RoleError, match=f"--run.{addr}_addr HOST:PORT"):
            prepare(args)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"actor_addr": "localhost:{busy}"}, "run.actor_addr: .* already in use"),
            (
                {"actor_addr": "localhost:{free}", "replay_addr": "localhost:{free}"},
                "run.replay_addr: expected an address of its own",
            ),
            ({"replay_addr": "0.0.0.0:{free}"}, "run.replay_addr: .*--run.keyfile"),
            ({"logger_addr": "nohost.invalid:{free}"}, "run.logger_addr: Cannot res"),
            ({"keyfile": "/no/such/file"}, "Cannot read key file /no/such/file"),
            (
                {"transport": "portal", "actor_addr": "0.0.0.0:{free}"},
                "run.actor_addr: .* portal has no authentication",
            ),
        ],
    )
    def test_a_run_does_not_start_where_it_cannot_listen(
        self, tmp_path, changes, message
    ):
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            ports = {"{busy}": busy.getsockname()[1], "{free}": free_port()}
            for name, port in ports.items():
                changes = {k: v.replace(name, str(port)) for k, v in changes.items()}
            args = make_args(logdir=str(tmp_path / "run"), **changes)
            with pytest.raises(wiring.RoleError, match=message):
                prepare(args)
        assert not (tmp_path / "run").exists()


class TestConnect:
    @pytest.mark.parametrize(
        ("addr", "level", "more"),
        [
            ("localhost:1", "INFO", ""),
            ("[::1]:1", "INFO", ""),
            (
                "no.invalid:1",
                "WARNING",
                " Its name does not resolve: no.invalid (gone).",
            ),
        ],
    )
    def test_it_says_for_whom_it_waits(self, monkeypatch, caplog, addr, level, more):
        def look_up(host, port):
            if host not in ("localhost", "::1"):
                raise socket.gaierror(socket.EAI_NONAME, "gone")

        class Late(FakeClient):
            tries = 0

            def connect(self, timeout):
                self.tries += 1
                if self.tries < 4:
                    raise TimeoutError("not yet")

        monkeypatch.setattr(wiring, "FIRST_NOTE", 0.0)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        client = Late()
        client.addr = addr
        with caplog.at_level(logging.INFO, "embodied.run"):
            assert wiring.connect(client, "The learner", "replay", lambda: False)
        (record,) = caplog.records
        assert record.levelname == level
        note = f"The learner waits for the replay at {addr}."
        assert record.getMessage() == note + more

    def test_names_that_are_not_looked_up_in_time_hold_nobody(self, monkeypatch):
        hangs = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: hangs.wait(30))
        monkeypatch.setattr(wiring, "LOOK_UP_SECONDS", 0.01)
        assert wiring._unresolved("slow:1") == ""
        hangs.set()

    def test_it_gives_up_when_told(self):
        class Never(FakeClient):
            def connect(self, timeout):
                raise TimeoutError("never")

        answers = iter([False, False, True])
        assert not wiring.connect(Never(), "env-0", "actor", lambda: next(answers))

    def test_a_refused_key_is_an_error_at_once(self):
        class Refused(FakeClient):
            def connect(self, timeout):
                raise AuthError("key")

        with pytest.raises(AuthError):
            wiring.connect(Refused(), "env-0", "actor", lambda: False)


class TestTimeShare:
    def test_shares_since_the_last_time(self):
        now = [0.0]
        watch = wiring.TimeShare(lambda: now[0])
        now[0] = 6.0
        with watch:
            now[0] = 8.0
        assert watch.share() == 0.25
        with watch:
            now[0] = 9.0
            assert watch.share() == 1.0
            now[0] = 10.0
        now[0] = 12.0
        assert watch.share() == pytest.approx(1 / 3)
        assert watch.share() == 0.0

    def test_two_threads_inside_count_twice(self):
        now = [0.0]
        watch = wiring.TimeShare(lambda: now[0])
        with watch, watch:
            now[0] = 1.0
        assert watch.share() == 2.0


class TestResults:
    def test_errors_are_told_with_their_context(self):
        told = []
        results = wiring.PendingCalls(
            lambda context, error: told.append((context, str(error)))
        )
        good, bad = make_future(), make_future()
        results.add(good, "good")
        results.add(bad, "bad")
        good.set_result(1)
        bad.set_error(RuntimeError("lost"))
        results.check()
        results.check()
        assert told == [("bad", "lost")]

    def test_an_error_that_comes_meanwhile_is_told_once(self):
        class Ending(type(make_future())):
            def done(self):
                before = super().done()
                self.set_error(RuntimeError("lost"))
                return before

        told, future = [], make_future()
        future.__class__ = Ending
        results = wiring.PendingCalls(lambda context, error: told.append(context))
        results.add(future, "bad")
        results.check()
        results.check()
        assert told == ["bad"]


def test_factories_may_be_pickled():
    assert wiring.load_factory(cloudpickle.dumps(lambda: 3))() == 3
    assert wiring.load_factory(max) is max


@pytest.mark.parametrize(
    ("shares", "role"),
    [
        ({"learner/wait": 0.05, "learner/stream_wait": 0.9}, "learner"),
        ({"learner/wait": 0.8, "learner/stream_wait": 0.1}, "transfer"),
        (
            {"learner/wait": 0.8, "learner/stream_wait": 0.7, "replay/sample": 0.6},
            "replay",
        ),
        (
            {
                "learner/wait": 0.8,
                "learner/stream_wait": 0.7,
                "replay/limited": 0.9,
                "replay/sample": 0.1,
                "actor/policy": 0.9,
            },
            "actor",
        ),
        (
            {
                "learner/wait": 0.8,
                "learner/stream_wait": 0.7,
                "replay/limited": 0.9,
                "replay/sample": 0.1,
                "actor/policy": 0.2,
            },
            "env",
        ),
        (
            {
                "learner/wait": 0.8,
                "learner/stream_wait": 0.7,
                "replay/limited": 0.9,
                "replay/insert": 0.9,
                "actor/policy": 0.1,
            },
            "replay",
        ),
    ],
)
def test_the_slowest_link_is_named(shares, role):
    shares = {f"timer/{name}": share for name, share in shares.items()}
    assert find_bottleneck(shares).startswith(f"{role}: ")


@pytest.mark.parametrize(
    ("values", "phase"),
    [
        ({}, "filling the replay"),
        ({"timer/actor/policy": 0.9, "timer/replay/sample": 0.0}, "filling the replay"),
        ({"parallel/updates": 0, "timer/actor/policy": 0.9}, "compiling"),
        ({"parallel/updates": 1, "timer/actor/policy": 0.9}, "training begins"),
    ],
)
def test_there_is_no_bottleneck_before_the_learner_has_told_of_updates(values, phase):
    assert find_bottleneck(values) == phase


ACTING = {
    "timer/learner/wait": 0.8,
    "timer/learner/stream_wait": 0.7,
    "timer/replay/limited": 1.0,
}


@pytest.mark.parametrize(
    ("on_cpu", "remedy"), [(0, "jax.policy_devices"), (1, "run.train_ratio")]
)
def test_the_remedy_for_the_actor_depends_on_its_device(on_cpu, remedy):
    values = {**ACTING, "timer/actor/policy": 0.9, "parallel/policy_on_cpu": on_cpu}
    assert remedy in find_bottleneck(values)


def test_several_policy_threads_share_the_work():
    shares = {**ACTING, "timer/actor/policy": 1.2}
    assert find_bottleneck(shares, threads=1).startswith("actor: ")
    assert find_bottleneck(shares, threads=4).startswith("env: ")
