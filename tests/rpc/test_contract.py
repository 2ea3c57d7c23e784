"""The data and the futures of calls, for every backend and both kinds of server."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from rpc_testing import echo, in_threads, same
from waiting_testing import WAIT

from embodied.rpc import RemoteError, WireError

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(">f4", ">i8", "S5", "U3", "M8[us]", "m8[s]"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]
SHAPES = [(), (0,), (7,), (2, 3), (3, 0, 2)]


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

    def test_what_cannot_be_sent_is_refused_in_the_call(self, rpc, make_server):
        server = make_server()
        server.bind("echo", echo)
        server.start(block=False)
        client = rpc.client(server, maxinflight=2)
        client.connect(WAIT)
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
