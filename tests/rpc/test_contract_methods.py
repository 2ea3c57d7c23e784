"""The methods of servers, for every backend and both kinds of server."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from rpc_testing import echo, fail, in_threads, same, wait_for_calls
from waiting_testing import WAIT, wait_until

from embodied.rpc import RemoteError, WireError
from embodied.rpc.links import MESSAGE_SLACK


class TestMethods:
    def test_an_unknown_method(self, client):
        error = client.nope(np.arange(3)).exception(WAIT)
        assert isinstance(error, RemoteError) and error.kind == "bad"
        assert "nope" in str(error)
        assert "echo, fail" in str(error)  # The methods that exist.
        assert client.echo("fine").result(WAIT) == "fine"

    def test_a_call_that_does_not_fit_the_schema(self, rpc, make_server):
        calls = []
        server = make_server()
        schema = {"x": (np.float32, (3,)), "y": (bool, ())}
        server.bind("put", calls.append, schema=schema)
        server.start(block=False)
        client = rpc.client(server)
        good = {"x": np.zeros(3, np.float32), "y": np.array(True)}
        bad = [
            (
                {"x": np.zeros(4, "f4")},
                r"'x'.* float32 of shape \(3,\).* float32 .*\(4,\)",
            ),
            (
                {"x": np.zeros(3, "f8")},
                r"'x'.* float32 of shape \(3,\).* float64 .*\(3,\)",
            ),
            ({"x": "text"}, r"'x'.* float32 of shape \(3,\).* no array"),
            ({"z": np.zeros(1)}, r"missing keys \[\].* surplus keys \['z'\]"),
            ({"y": None}, r"'y'.* bool of shape \(\).* no array"),
        ]
        for change, message in bad:
            with pytest.raises(RemoteError, match=message) as caught:
                client.put({**good, **change}).result(WAIT)
            assert caught.value.kind == "bad"
        with pytest.raises(RemoteError, match="one argument, a dict"):
            client.put(good, good).result(WAIT)
        assert calls == []
        client.put(good).result(WAIT)
        assert len(calls) == 1
        assert sum(server.rejected.values()) == len(bad) + 1

    def test_arguments_above_the_limit_are_refused_before_they_are_sent(
        self, rpc, make_server
    ):
        server = make_server(max_bytes=10_000)
        server.bind("echo", echo)
        server.start(block=False)
        client = rpc.client(server)
        client.connect(WAIT)
        with pytest.raises(WireError, match=r"20050 bytes.* 10000"):
            client.echo(np.zeros(20_001, np.uint8))

    def test_what_is_above_the_limit_harms_nobody(self, rpc, make_server):
        server = make_server(max_bytes=1_000_000)
        server.bind("echo", echo)
        server.bind("make", lambda: np.zeros(2_000_000, np.uint8))
        server.start(block=False)
        client, other = rpc.client(server), rpc.client(server)
        client.connect(WAIT)
        with pytest.raises((WireError, RemoteError), match="1000000"):
            client.echo(np.zeros(9_000_000, np.uint8)).result(WAIT)
        with pytest.raises(RemoteError, match="1000000"):
            client.make().result(WAIT)
        for caller in (client, other):
            assert caller.echo("fine").result(WAIT) == "fine"

    def test_what_is_just_below_the_limit_arrives(self, rpc, make_server):
        server = make_server(max_bytes=1_000_000)
        server.bind("echo", echo)
        server.start(block=False)
        client = rpc.client(server)
        client.connect(WAIT)
        text = b"x" * (1_000_000 + MESSAGE_SLACK - 100)
        assert bytes(client.echo(text).result(WAIT)) == text
        largest = np.zeros(999_936, np.uint8)  # A multiple of 64, as arrays are padded.
        text = text[: MESSAGE_SLACK - 200]
        array, back = client.echo(largest, text).result(WAIT)
        assert len(array) == len(largest) and bytes(back) == text

    def test_a_closing_server_sends_large_replies_to_the_end(self, rpc):
        large, count = np.arange(1 << 19, dtype=np.int32), 8
        running, gate = threading.Semaphore(0), threading.Event()

        def work():
            running.release()
            gate.wait(WAIT)
            return large

        server = rpc.server(workers=count)
        server.bind("work", work)
        server.start(block=False)
        clients = [rpc.client(server) for _ in range(count)]
        futures = [client.work() for client in clients]
        for _ in range(count):
            assert running.acquire(timeout=WAIT)
        gate.set()
        server.close()
        for future in futures:
            np.testing.assert_array_equal(future.result(2.0), large)

    def test_plain_values_count_for_the_limit_too(self, rpc, make_server):
        server = make_server(max_bytes=1_000_000)
        server.bind("echo", echo)
        server.bind("make", lambda: b"x" * 9_000_000)
        server.start(block=False)
        client = rpc.client(server)
        client.connect(WAIT)
        with pytest.raises((WireError, RemoteError), match="1000000"):
            client.echo(b"x" * 9_000_000).result(5.0)
        with pytest.raises(RemoteError, match="1000000"):
            client.make().result(5.0)
        assert client.echo("fine").result(5.0) == "fine"

    def test_calls_of_one_client_keep_their_order(self, rpc, make_server):
        seen = {"a": [], "b": []}
        server = make_server(workers=4)
        server.bind("put", lambda who, x: seen[who].append(int(x)))
        server.start(block=False)

        def work(who):
            client = rpc.client(server)
            futures = [client.put(who, np.array(x)) for x in range(200)]
            for future in futures:
                future.result(WAIT)

        in_threads(work, "ab")
        assert seen == {"a": list(range(200)), "b": list(range(200))}

    @pytest.mark.parametrize("rounds", [5, pytest.param(300, marks=pytest.mark.slow)])
    def test_small_and_large_calls_keep_their_order(self, rpc, make_server, rounds):
        seen = []
        server = make_server(workers=3)
        server.bind("put", lambda x, data: seen.append(int(x)) or data)
        server.start(block=False)
        sizes = [0, 100_000, 10, 5_000, 300_000, 0, 0, 70_000]
        for _ in range(rounds):
            for unit in ("x", b"x", np.arange(300_000, dtype=np.uint16)):
                # A new client, since its first calls travel differently.
                with rpc.client(server) as client:
                    client.connect(WAIT)
                    seen.clear()
                    calls = []
                    for x, size in enumerate(sizes * 2):
                        plain = isinstance(unit, str | bytes)
                        data = unit * size if plain else unit[:size]
                        calls.append((client.put(np.array(x), data), data))
                    for future, data in calls:
                        assert same(future.result(WAIT), data)
                    assert seen == list(range(len(calls)))

    def test_clients_are_served_at_the_same_time(self, rpc, make_server):
        together = threading.Barrier(3)
        server = make_server(workers=3)
        server.bind("meet", lambda: together.wait(WAIT) >= 0 and "met")
        server.start(block=False)
        futures = [rpc.client(server).meet() for _ in range(3)]
        assert [future.result(WAIT) for future in futures] == ["met"] * 3

    def test_a_method_with_its_own_workers_waits_for_nobody(self, rpc, make_server):
        gate = threading.Event()
        server = make_server()
        server.bind("slow", lambda: gate.wait(WAIT) and "slow")
        server.bind("fast", lambda: "fast", workers=1)
        server.start(block=False)
        client = rpc.client(server)
        slow = client.slow()
        assert client.fast().result(WAIT) == "fast"
        assert not slow.done()
        gate.set()
        assert slow.result(WAIT) == "slow"

    def test_maxinflight_holds_the_caller_back(self, rpc, make_server):
        gate, third = threading.Event(), threading.Event()
        server = make_server()
        server.bind("get", lambda: gate.wait(WAIT) and "done")
        server.start(block=False)
        client = rpc.client(server, maxinflight=2)
        futures = [client.get(), client.get()]

        def call():
            futures.append(client.get())
            third.set()

        thread = threading.Thread(target=call)
        thread.start()
        assert not third.wait(0.1)
        assert client.stats()["inflight"] == 2
        gate.set()
        assert third.wait(WAIT)
        thread.join(WAIT)
        assert [future.result(WAIT) for future in futures] == ["done"] * 3

    @pytest.mark.parametrize("maxinflight", [0, 257])
    def test_maxinflight_has_a_range(self, rpc, maxinflight):
        with pytest.raises(ValueError, match=f"1 to 256, got {maxinflight}"):
            rpc.client("localhost:1", maxinflight=maxinflight)

    def test_methods_are_bound_once_and_before_the_start(self, make_server):
        server = make_server()
        server.bind("echo", echo)
        with pytest.raises(ValueError, match="echo"):
            server.bind("echo", echo)
        server.start(block=False)
        with pytest.raises(RuntimeError, match="other"):
            server.bind("other", echo)

    def test_stats_count_what_happened_since_the_last_time(self, rpc, make_server):
        server = make_server()
        server.bind("echo", echo)
        server.bind("fail", fail)
        server.start(block=False)
        client = rpc.client(server)
        array = np.zeros(100_000, np.uint8)
        for _ in range(5):
            client.echo(array).result(WAIT)
        for call in (client.fail, client.nope):
            assert call("x").exception(WAIT)
        mine = client.stats()
        assert (mine["calls"], mine["replies"], mine["errors"]) == (7, 7, 2)
        assert mine["sent_bytes"] >= 500_000
        assert mine["received_bytes"] >= 500_000
        assert mine["inflight"] == mine["reconnects"] == 0
        assert 0 < mine["latency_p50"] <= mine["latency_p99"] < WAIT
        theirs = server.stats()

        def counted():  # Replies are counted after they are sent.
            theirs["replies"] += server.stats()["replies"]
            return theirs["replies"] >= 7

        wait_until(counted)
        assert (theirs["calls"], theirs["replies"]) == (7, 7)
        assert (theirs["errors"], theirs["rejected"]) == (1, 1)
        assert theirs["clients"] == 1
        assert theirs["call_rate"] > 0
        assert theirs["waiting"] == theirs["post_waiting"] == theirs["repeated"] == 0
        assert theirs["received_bytes"] >= 500_000 and theirs["sent_bytes"] > 0
        assert 0 < theirs["latency_p50"] <= theirs["latency_p99"] < WAIT
        assert server.stats()["calls"] == client.stats()["calls"] == 0

    def test_totals_are_since_the_start_and_leave_stats_as_they_are(
        self, rpc, make_server
    ):
        server = make_server()
        server.bind("echo", echo)
        server.start(block=False)
        client = rpc.client(server)
        array = np.zeros(100_000, np.uint8)
        client.echo(array).result(WAIT)
        client.stats(), server.stats()
        for _ in range(2):
            client.echo(array).result(WAIT)
        for _ in range(2):  # Reading the totals does not reset them.
            mine, theirs = client.totals(), server.totals()
            assert mine["calls"] == theirs["calls"] == 3
            assert mine["sent_bytes"] >= 300_000 <= theirs["received_bytes"]
            assert 0 < mine["latency_p50"] < WAIT and mine["inflight"] == 0
        assert client.stats()["calls"] == server.stats()["calls"] == 2


class TestPostfn:
    def test_it_runs_after_the_reply(self, rpc, make_server):
        gate, infos = threading.Event(), []
        ran = threading.Event()

        def post(info):
            assert gate.wait(WAIT)
            infos.append(info)
            ran.set()

        server = make_server()
        server.bind("get", lambda: ("reply", {"info": 1}), post)
        server.start(block=False)
        assert rpc.client(server).get().result(WAIT) == "reply"
        assert infos == []
        gate.set()
        assert ran.wait(WAIT)
        assert infos == [{"info": 1}]

    def test_it_keeps_the_order_of_calls_with_several_workers(self, rpc, make_server):
        order, all_ran = [], threading.Event()
        later = threading.Event()

        def work(x):
            x = int(x)
            if x == 0:
                assert later.wait(WAIT)  # The first call is done last.
            elif x == 3:
                later.set()
            return None, x

        def post(x):
            order.append(x)
            if len(order) == 4:
                all_ran.set()

        server = make_server(workers=4)
        server.bind("put", work, post)
        server.start(block=False)
        clients = [rpc.client(server) for _ in range(4)]
        for client in clients:
            client.connect(WAIT)
        futures = []
        server.stats()
        for x, client in enumerate(clients):
            futures.append(client.put(np.array(x)))
            wait_for_calls(server, 1)  # Calls of several clients race otherwise.
        for future in futures:
            future.result(WAIT)
        assert all_ran.wait(WAIT)
        assert order == [0, 1, 2, 3]

    def test_a_full_backlog_slows_the_calls_down(self, rpc, make_server):
        gate, worked = threading.Event(), []
        server = make_server(backlog=2)
        server.bind(
            "put", lambda x: (None, worked.append(int(x))), lambda _: gate.wait(WAIT)
        )
        server.start(block=False)
        client = rpc.client(server)
        futures = [client.put(np.array(x)) for x in range(10)]
        # One call is in `postfn`, two wait for it, and one more has been answered.
        for future in futures[:4]:
            future.result(WAIT)
        assert not futures[4].wait(0.1)
        assert worked == [0, 1, 2, 3]
        gate.set()
        for future in futures:
            future.result(WAIT)
        assert worked == list(range(10))

    def test_its_failure_is_counted_and_harms_no_other_call(self, rpc, make_server):
        def post(x):
            if x == 0:
                raise ValueError("after")
            done.set()

        done = threading.Event()
        server = make_server()
        server.bind("put", lambda x: (x, int(x)), post)
        server.start(block=False)
        client = rpc.client(server)
        for x in range(2):
            assert client.put(np.array(x)).result(WAIT) == x
        assert done.wait(WAIT)
        assert server.stats()["post_errors"] == 1

    def test_it_does_not_run_for_a_call_that_failed(self, rpc, make_server):
        infos, done = [], threading.Event()

        def work(x):
            return x, 1 // int(x)

        def post(info):
            infos.append(info)
            done.set()

        server = make_server()
        server.bind("put", work, post)
        server.start(block=False)
        client = rpc.client(server)
        assert client.put(np.array(0)).exception(WAIT).type == "ZeroDivisionError"
        client.put(np.array(1)).result(WAIT)
        assert done.wait(WAIT)
        assert infos == [1]
