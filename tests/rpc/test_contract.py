"""What calls, data and futures promise, for every backend and both kinds of server."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from conftest import WAIT, in_threads, same

from embodied.rpc import RemoteError, WireError

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(">f4", ">i8", "S5", "U3", "M8[us]", "m8[s]"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
SHAPES = [(), (0,), (7,), (2, 3), (3, 0, 2)]


def echo(*args):
    return args[0] if len(args) == 1 else list(args)


def fail(text):
    raise LookupError(text)


@pytest.fixture
def client(rpc, make_server):
    """A client of a server with `echo` and `fail`."""
    server = make_server()
    server.bind("echo", echo)
    server.bind("fail", fail)
    server.start(block=False)
    client = rpc.client(server)
    client.connect(WAIT)
    return client


class TestData:
    def test_arrays_of_every_dtype_and_shape(self, client):
        for dtype in map(np.dtype, DTYPES):
            data = {}
            for shape in SHAPES:
                raw = np.arange(np.empty(shape, dtype).nbytes, dtype=np.uint8)
                if dtype.kind in "bUMm":  # Not every bit pattern is a value of these.
                    raw = (raw % dtype.itemsize == 0).astype(np.uint8)
                data[str(shape)] = raw.view(dtype).reshape(shape)
            assert same(client.echo(data).result(WAIT), data), dtype

    def test_arrays_of_every_layout(self, client):
        array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
        frozen = array.copy()
        frozen.flags.writeable = False
        data = {
            "columns": array[:, 1:3],
            "reversed": array[::-1, :, ::-1],
            "fortran": np.asfortranarray(array),
            "transposed": array.T,
            "broadcast": np.broadcast_to(array[0, 0], (6, 5)),
            "frozen": frozen,
            "scalar": np.float32(3.5),
        }
        assert same(client.echo(data).result(WAIT), data)

    def test_nested_data(self, client):
        data = {
            "": {},
            "list": [[], ["x", [None, np.arange(3)]]],
            "text": ["", "ü\0€𝄞", "a" * 70_000],
            "bytes": [b"", b"\0\xff", bytes(range(256)) * 300],
            "none": None,
            "deep": {"a": {"b": {"c": {"d": [{"e": np.ones((2, 2))}]}}}},
        }
        assert same(client.echo(data).result(WAIT), data)

    def test_tuples_stay_tuples(self, client):
        data = {"t": (), "u": (np.arange(2), ("x", [("y",)]))}
        assert same(client.echo(data).result(WAIT), data)

    def test_plain_numbers_keep_their_type(self, client):
        numbers = [True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1]
        numbers += [0.5, -0.0, float("inf"), float("nan"), 1e300]
        assert same(client.echo(numbers).result(WAIT), numbers)

    def test_several_arguments_and_none(self, rpc, make_server):
        server = make_server()
        server.bind("count", lambda *args: np.int64(len(args)))
        server.start(block=False)
        client = rpc.client(server)
        assert client.count().result(WAIT) == 0
        assert client.count("a", "b", None).result(WAIT) == 3

    def test_large_arrays_both_ways(self, client):
        generator = np.random.default_rng(0)
        for _ in range(3):
            data = {
                "image": generator.integers(0, 256, 5_000_000, np.uint8),
                "small": np.arange(3),
                "matrix": generator.standard_normal((1000, 100)).T,
            }
            assert same(client.echo(data).result(WAIT), data)

    @pytest.mark.parametrize("size", [10, 300_000])
    def test_the_caller_may_change_its_arrays_after_the_call(self, client, size):
        client.echo(np.zeros(size)).result(WAIT)  # From now on memory may be shared.
        array = np.empty(size)
        futures = []
        for value in range(10):
            array[:] = value
            futures.append(client.echo(array))
            array[:] = -1
        for value, future in enumerate(futures):
            assert same(future.result(WAIT), np.full(size, value, np.float64))

    @pytest.mark.parametrize("size", [10, 300_000])
    def test_the_function_may_keep_its_arguments(self, rpc, make_server, size):
        kept = []
        server = make_server()
        server.bind("keep", kept.append)
        server.start(block=False)
        client = rpc.client(server)
        for value in range(10):
            client.keep(np.full(size, value)).result(WAIT)
        for value, array in enumerate(kept):
            assert (array == value).all()

    def test_what_cannot_be_sent_is_refused_in_the_call(self, client):
        bad = {
            "objects": np.array([object()], dtype=object),
            "records": np.zeros(2, [("a", "i4")]),
            "set": {1, 2},
            "keys": {3: "x"},
            "integer": 2**64,
            "function": print,
            "text": "\ud800",
            "too many": [np.zeros(1)] * 5000,
        }
        for name, value in bad.items():
            for _ in range(client.maxinflight + 1):
                with pytest.raises(WireError):
                    client.echo({"key": value})
            assert client.echo("fine").result(WAIT) == "fine", name

    def test_a_result_that_cannot_be_sent_is_an_error_of_the_method(
        self, rpc, make_server
    ):
        server = make_server()
        server.bind("bad", lambda: {1, 2})
        server.bind("good", lambda: "good")
        server.start(block=False)
        client = rpc.client(server)
        with pytest.raises(RemoteError, match="set") as caught:
            client.bad().result(WAIT)
        assert caught.value.type == "WireError"
        assert client.good().result(WAIT) == "good"


class TestFutures:
    def test_the_answer_is_the_same_however_often_it_is_asked(self, client):
        future = client.echo({"x": np.arange(5)})
        results = in_threads(lambda _: future.result(WAIT), range(8))
        results += [future.result(0), future.result(WAIT), future.result()]
        assert all(result is results[0] for result in results)
        assert future.done() and future.wait(0) and future.exception() is None

    def test_many_threads_wait_for_many_futures(self, client):
        def work(start):
            futures = [client.echo(np.array(start + x)) for x in range(30)]
            return [int(future.result(WAIT)) for future in reversed(futures)]

        results = in_threads(work, range(0, 600, 100))
        for start, result in zip(range(0, 600, 100), results):
            assert result == [start + x for x in reversed(range(30))]

    def test_an_error_says_what_happened_on_the_server(self, client):
        error = client.fail("no such\nstep: 7").exception(WAIT)
        assert isinstance(error, RemoteError)
        assert (error.kind, error.type) == ("exception", "LookupError")
        assert "no such\nstep: 7" in error.args[0]
        assert "fail" in error.args[0]
        assert "raise LookupError(text)" in error.traceback
        assert "raise LookupError(text)" in str(error)
        assert client.echo("fine").result(WAIT) == "fine"

    # A report with such a text would break the test runner itself.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_an_error_whose_text_is_not_unicode(self, rpc, make_server):
        def read():
            raise FileNotFoundError("no file \udcff.txt")  # As os.fsdecode makes it.

        server = make_server()
        server.bind("read", read)
        server.bind("echo", echo)
        server.start(block=False)
        client = rpc.client(server)
        error = client.read().exception(5.0)
        assert isinstance(error, RemoteError) and error.type == "FileNotFoundError"
        assert "no file" in ascii(error.args[0])
        assert client.echo("fine").result(5.0) == "fine"

    def test_an_error_is_raised_however_often_it_is_asked(self, client):
        future = client.fail("again")

        def ask(_):
            with pytest.raises(RemoteError, match="again") as caught:
                future.result(WAIT)
            return caught.value

        errors = [*in_threads(ask, range(8)), ask(0), ask(0)]
        assert all(error is errors[0] for error in errors)
        assert future.exception() is errors[0]

    def test_the_error_of_a_dropped_future_reaches_nobody_else(self, client):
        for _ in range(3 * client.maxinflight):
            client.fail("dropped")
        assert client.echo("fine").result(WAIT) == "fine"

    def test_an_answer_may_come_after_a_timeout(self, rpc, make_server):
        gate = threading.Event()
        server = make_server()
        server.bind("wait", lambda: gate.wait(WAIT) and "done")
        server.start(block=False)
        client = rpc.client(server)
        future = client.call("wait")
        with pytest.raises(TimeoutError, match="wait"):
            future.result(0.05)
        with pytest.raises(TimeoutError):
            future.exception(0)
        assert not future.wait(0) and not future.done()
        gate.set()
        assert future.result(WAIT) == "done"

    def test_callbacks_run_once_before_or_after_the_answer(self, rpc, make_server):
        gate, called = threading.Event(), []
        both = threading.Event()
        server = make_server()
        server.bind("get", lambda: gate.wait(WAIT) and "done")
        server.start(block=False)
        future = rpc.client(server).get()
        future.add_callback(called.append)
        future.add_callback(lambda _: both.set())
        assert called == []
        gate.set()
        assert both.wait(WAIT)  # Although nobody asks for the result.
        assert called == [future]
        future.add_callback(called.append)
        assert called == [future, future]
        assert future.result(0) == "done"

    def test_callbacks_of_an_error(self, client):
        failed = threading.Event()
        future = client.fail("x")
        future.add_callback(lambda done: done.exception(0) and failed.set())
        assert failed.wait(WAIT)


class TestMethods:
    def test_an_unknown_method(self, client):
        error = client.nope(np.arange(3)).exception(WAIT)
        assert isinstance(error, RemoteError) and error.kind == "bad"
        assert "nope" in str(error)
        assert "echo, fail" in str(error)  # What there is instead.
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
        with pytest.raises(WireError, match=r"20032 bytes.* 10000"):
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
                with rpc.client(server) as client:  # How they travel changes early.
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
        with pytest.raises(ValueError, match=f"1..256: {maxinflight}"):
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
        deadline = time.monotonic() + WAIT
        while theirs["replies"] < 7:  # It counts a reply after it is sent.
            theirs["replies"] += server.stats()["replies"]
            assert time.monotonic() < deadline
        assert (theirs["calls"], theirs["replies"]) == (7, 7)
        assert (theirs["errors"], theirs["rejected"]) == (1, 1)
        assert theirs["clients"] == 1
        assert theirs["call_rate"] > 0
        assert theirs["waiting"] == theirs["post_waiting"] == theirs["repeated"] == 0
        assert theirs["received_bytes"] > 0 and theirs["sent_bytes"] > 0
        assert 0 < theirs["latency_p50"] <= theirs["latency_p99"] < WAIT
        assert server.stats()["calls"] == client.stats()["calls"] == 0


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
        arrived = server.stats()["calls"]
        for x, client in enumerate(clients):
            futures.append(client.put(np.array(x)))
            deadline = time.monotonic() + WAIT
            while arrived < x + 1:  # Calls of several clients race otherwise.
                arrived += server.stats()["calls"]
                assert time.monotonic() < deadline
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
        # One is in `postfn`, two wait for it, and one more was worked on.
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
