"""What batched methods promise, on every backend."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
from rpc_testing import in_threads, same, wait_for_calls
from waiting_testing import WAIT, wait_until

from embodied.rpc import Disconnected, RemoteError

NEVER = 100.0  # Seconds; too long for a batch to go out because of its timeout.


def row(x):
    """One call's observation, different for every x."""
    return {"x": np.array(x, np.int64), "image": np.full((3, 4), x % 256, np.uint8)}


def stack(values):
    rows = [row(x) for x in values]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class Policy:
    """A batched function that records its rows, and waits while its gate is closed."""

    def __init__(self):
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def __call__(self, obs):
        self.batches.append(obs["x"].tolist())
        self.entered.release()
        assert self.gate.wait(WAIT)
        return {"action": obs["x"] * 2, "image": obs["image"][:, ::-1] + 1}

    @property
    def sizes(self):
        return [len(batch) for batch in self.batches]


def answer(values):
    """Returns the answer of the policy to a stack of rows."""
    obs = stack(values)
    return {"action": obs["x"] * 2, "image": obs["image"] + np.uint8(1)}


def answer_row(x):
    return {key: value[0] for key, value in answer([x]).items()}


def serve(rpc, policy, **kwargs):
    server = rpc.batch_server()
    server.bind("act", policy, **{"batch": 4, "timeout": NEVER, **kwargs})
    server.start(block=False)
    return server


def clients(rpc, server, count, **kwargs):
    made = [rpc.client(server, **kwargs) for _ in range(count)]
    for client in made:
        client.connect(WAIT)
    return made


class TestForming:
    def test_a_full_batch_goes_out_at_once(self, rpc):
        policy = Policy()
        server = serve(rpc, policy)
        workers = clients(rpc, server, 4)
        for start in range(0, 20, 4):
            futures = [client.act(row(start + i)) for i, client in enumerate(workers)]
            for i, future in enumerate(futures):
                assert same(future.result(WAIT), answer_row(start + i))
        assert policy.sizes == [4] * 5
        assert [sorted(x) for x in policy.batches][1] == [4, 5, 6, 7]

    def test_a_short_batch_goes_out_after_the_timeout(self, rpc):
        policy = Policy()
        server = serve(rpc, policy, timeout=1.0)
        workers = clients(rpc, server, 3)
        started = time.monotonic()
        futures = [client.act(row(i)) for i, client in enumerate(workers)]
        for i, future in enumerate(futures):
            assert same(future.result(WAIT), answer_row(i))
        assert 1.0 <= time.monotonic() - started < WAIT
        assert policy.sizes == [3]

    def test_a_batch_of_all_slots_does_not_wait(self, rpc):
        policy = Policy()
        server = serve(rpc, policy)
        workers = clients(rpc, server, 3, slots=1)
        futures = [client.act(row(i)) for i, client in enumerate(workers)]
        for i, future in enumerate(futures):
            assert same(future.result(WAIT), answer_row(i))
        assert policy.sizes == [3]

    def test_a_batch_does_not_wait_for_a_client_that_left(self, rpc):
        policy = Policy()
        server = serve(rpc, policy)
        workers = clients(rpc, server, 3, slots=1)
        futures = [client.act(row(i)) for i, client in enumerate(workers[:2])]
        assert not futures[0].wait(0.05)
        workers[2].close()
        for i, future in enumerate(futures):
            assert same(future.result(WAIT), answer_row(i))
        assert policy.sizes == [2]

    def test_it_grows_while_the_function_is_busy_up_to_the_limit(self, rpc):
        policy = Policy()
        policy.gate.clear()
        server = serve(rpc, policy, batch=2, limit=5)
        (client,) = clients(rpc, server, 1, maxinflight=32)
        futures = [client.act(row(x)) for x in range(2)]
        assert policy.entered.acquire(timeout=WAIT)
        futures += [client.act(row(x)) for x in range(2, 14)]
        wait_for_calls(server, 14)
        policy.gate.set()
        for x, future in enumerate(futures):
            assert same(future.result(WAIT), answer_row(x))
        assert policy.batches == [
            [0, 1],
            [2, 3, 4, 5, 6],
            [7, 8, 9, 10, 11],
            [12, 13],
        ]

    def test_several_workers_run_several_batches(self, rpc):
        together = threading.Barrier(2)

        def policy(obs):
            together.wait(WAIT)
            return obs

        server = serve(rpc, policy, batch=2, workers=2)
        (client,) = clients(rpc, server, 1)
        futures = [client.act(row(x)) for x in range(4)]
        for x, future in enumerate(futures):
            assert same(future.result(WAIT), row(x))


class TestStacks:
    def test_stacks_and_single_calls_share_a_batch(self, rpc):
        policy = Policy()
        server = serve(rpc, policy, batch=8)
        workers = clients(rpc, server, 3)
        stacks = [
            workers[0].call("act", stack([1, 2, 3]), rows=3),
            workers[1].call("act", stack([4, 5, 6, 7]), rows=4),
        ]
        single = workers[2].act(row(8))
        assert same(stacks[0].result(WAIT), answer([1, 2, 3]))
        assert same(stacks[1].result(WAIT), answer([4, 5, 6, 7]))
        assert same(single.result(WAIT), answer_row(8))
        assert sorted(policy.batches[0]) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert policy.sizes == [8]

    def test_a_stack_of_one_stays_a_stack(self, rpc):
        server = serve(rpc, Policy(), batch=1)
        (client,) = clients(rpc, server, 1)
        result = client.call("act", stack([5]), rows=1).result(WAIT)
        assert same(result, answer([5]))

    def test_a_stack_is_not_split(self, rpc):
        policy = Policy()
        server = serve(rpc, policy, batch=4, timeout=0.05)
        first, second = clients(rpc, server, 2)
        futures = [
            first.call("act", stack([1, 2, 3]), rows=3),
            second.call("act", stack([4, 5, 6]), rows=3),
        ]
        for future, values in zip(futures, ([1, 2, 3], [4, 5, 6])):
            assert same(future.result(WAIT), answer(values))
        assert sorted(policy.batches) == [[1, 2, 3], [4, 5, 6]]

    def test_stacks_that_do_not_fit_are_refused(self, rpc):
        policy = Policy()
        server = serve(rpc, policy, batch=4)
        (client,) = clients(rpc, server, 1)
        with pytest.raises(RemoteError, match=r"5 rows.* 4"):
            client.call("act", stack(range(5)), rows=5).result(WAIT)
        with pytest.raises(RemoteError, match="not a stack of 3 rows"):
            client.call("act", stack(range(2)), rows=3).result(WAIT)
        result = client.call("act", stack(range(4)), rows=4).result(WAIT)
        assert same(result, answer(range(4)))


class TestKeepingApart:
    def test_groups_do_not_share_a_batch(self, rpc):
        seen = []

        def policy(obs):
            seen.append((set(obs["eval"].tolist()), len(obs["x"])))
            return {"x": obs["x"]}

        server = serve(rpc, policy, batch=2, group="eval")
        workers = clients(rpc, server, 4)
        futures = []
        for i, client in enumerate(workers):
            obs = {"x": np.array(i), "eval": np.array(i % 2 == 1)}
            futures.append(client.act(obs))
        for i, future in enumerate(futures):
            assert future.result(WAIT)["x"] == i
        assert sorted(seen, key=str) == [({False}, 2), ({True}, 2)]

    def test_slots_count_for_their_group(self, rpc):
        server = serve(rpc, Policy(), batch=8, group="x", timeout=NEVER)
        one = rpc.client(server, group=1, slots=1)
        two = rpc.client(server, group=2, slots=1)
        for client in (one, two):
            client.connect(WAIT)
        futures = [one.act(row(1)), two.act(row(2))]
        assert same(futures[0].result(WAIT), answer_row(1))
        assert same(futures[1].result(WAIT), answer_row(2))

    def test_the_rows_of_a_stack_must_agree_on_their_group(self, rpc):
        server = serve(rpc, Policy(), group="x")
        (client,) = clients(rpc, server, 1)
        with pytest.raises(RemoteError, match="differ in 'x'"):
            client.call("act", stack([1, 2]), rows=2).result(WAIT)
        with pytest.raises(RemoteError, match="key 'x'"):
            client.act({"y": np.array(1)}).result(WAIT)

    @pytest.mark.parametrize(
        "bad",
        [
            {"x": np.array(9), "image": np.zeros((3, 5), np.uint8)},
            {"x": np.array(9), "image": np.zeros((3, 4), np.float32)},
            {"x": np.array(9)},
            {"x": np.array(9), "image": "no image"},
        ],
        ids=["shape", "dtype", "keys", "text"],
    )
    @pytest.mark.parametrize("with_schema", [True, False])
    def test_a_bad_observation_harms_only_its_sender(self, rpc, bad, with_schema):
        schema = {"x": (np.int64, ()), "image": (np.uint8, (3, 4))}
        policy = Policy()
        # With a schema the batch is full without the bad row.
        options = (
            {"schema": schema, "timeout": NEVER} if with_schema else {"timeout": 0.2}
        )
        server = serve(rpc, policy, **options)
        bad_client, *workers = clients(rpc, server, 5)
        futures = [client.act(row(i)) for i, client in enumerate(workers[:2])]
        error = bad_client.act(bad)
        futures += [client.act(row(i)) for i, client in enumerate(workers) if i >= 2]
        for i, future in enumerate(futures):
            assert same(future.result(WAIT), answer_row(i))
        if with_schema:
            assert error.exception(WAIT).kind == "bad"
            assert policy.sizes == [4]
        elif "image" not in bad or isinstance(bad["image"], str):
            assert isinstance(error.exception(WAIT), RemoteError)
        else:  # Rows of another shape go to the function in a separate batch.
            assert error.result(WAIT)["action"] == 18


class TestAnswers:
    def test_every_client_gets_its_own_rows(self, rpc):
        server = serve(rpc, Policy(), batch=3, limit=8, timeout=0.005)

        def work(start):
            client = rpc.client(server)
            results = []
            for x in range(start, start + 40, 4):
                futures = [
                    client.act(row(x)),
                    client.call("act", stack([x + 1, x + 2]), rows=2),
                    client.act(row(x + 3)),
                ]
                first, pair, last = (future.result(WAIT) for future in futures)
                results += [same(first, answer_row(x)), same(last, answer_row(x + 3))]
                results.append(same(pair, answer([x + 1, x + 2])))
            return all(results)

        assert all(in_threads(work, range(0, 5000, 1000)))

    def test_large_rows(self, rpc):
        server = serve(rpc, lambda obs: {"image": obs["image"]}, batch=2)
        workers = clients(rpc, server, 2)
        generator = np.random.default_rng(0)
        for _ in range(5):
            images = generator.integers(0, 256, (2, 64, 64, 3), np.uint8)
            pairs = list(zip(workers, images))
            futures = [client.act({"image": image}) for client, image in pairs]
            for future, image in zip(futures, images):
                assert same(future.result(WAIT), {"image": image})

    def test_an_error_of_the_function_reaches_all_callers_of_that_batch(self, rpc):
        def policy(obs):
            if 7 in obs["x"]:
                raise ArithmeticError("seven")
            return {"x": obs["x"]}

        server = serve(rpc, policy, batch=2)
        workers = clients(rpc, server, 2)
        futures = [client.act(row(x)) for client, x in zip(workers, (6, 7))]
        for future in futures:
            error = future.exception(WAIT)
            assert isinstance(error, RemoteError)
            assert (error.kind, error.type) == ("exception", "ArithmeticError")
            assert "seven" in error.args[0]
        futures = [client.act(row(x)) for client, x in zip(workers, (8, 9))]
        assert [int(future.result(WAIT)["x"]) for future in futures] == [8, 9]

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            ({"x": np.zeros(3)}, r"shape \(3,\).* 2 rows"),
            ({"x": np.float32(1)}, r"shape \(\).* 2 rows"),
            ({"x": 1.0}, "arrays, not plain values"),
        ],
        ids=["rows", "scalar", "number"],
    )
    def test_a_function_must_return_a_row_for_each_row(self, rpc, result, message):
        server = serve(rpc, lambda obs: result, batch=2)
        workers = clients(rpc, server, 2)
        for future in [client.act(row(1)) for client in workers]:
            with pytest.raises(RemoteError, match=message):
                future.result(WAIT)

    def test_only_arrays_can_be_batched(self, rpc):
        server = serve(rpc, Policy(), batch=2)
        (client,) = clients(rpc, server, 1)
        with pytest.raises(RemoteError, match="only arrays"):
            client.act({"x": "text"}).result(WAIT)

    def test_plain_and_batched_methods_live_together(self, rpc):
        server = rpc.batch_server()
        server.bind("act", Policy(), batch=2, timeout=NEVER)
        server.bind("echo", lambda x: x)
        server.start(block=False)
        client, other = clients(rpc, server, 2)
        waiting = client.act(row(1))
        assert client.echo("x").result(WAIT) == "x"
        assert not waiting.done()
        assert same(other.act(row(2)).result(WAIT), answer_row(2))
        assert same(waiting.result(WAIT), answer_row(1))


class TestAround:
    def test_postfn_runs_after_the_replies_in_order(self, rpc):
        gate, order, done = threading.Event(), [], threading.Event()

        def post(info):
            assert gate.wait(WAIT)
            order.append(info)
            if len(order) == 3:
                done.set()

        def policy(obs):
            return {"x": obs["x"]}, obs["x"].tolist()

        server = serve(rpc, policy, postfn=post, batch=2)
        (client,) = clients(rpc, server, 1)
        futures = [client.act(row(x)) for x in range(6)]
        for x, future in enumerate(futures):
            assert future.result(WAIT)["x"] == x
        assert order == []
        gate.set()
        assert done.wait(WAIT)
        assert order == [[0, 1], [2, 3], [4, 5]]

    def test_stats_say_how_full_batches_were(self, rpc):
        server = serve(rpc, Policy(), batch=4, timeout=0.05)
        (client,) = clients(rpc, server, 1)
        for rows in (4, 2):
            client.call("act", stack(range(rows)), rows=rows).result(WAIT)
        total = Counter()

        def counted():  # Batches are counted after their replies.
            stats = server.stats()
            assert stats["batch_waiting"] == 0
            rows = stats["batches"] * stats["batch_rows"]
            total.update(batches=stats["batches"], rows=rows, calls=stats["calls"])
            return total["batches"] >= 2

        wait_until(counted)
        assert total == {"batches": 2, "rows": 6, "calls": 2}

    def test_waiting_rows_are_in_the_stats(self, rpc):
        server = serve(rpc, Policy(), batch=4)
        client, other = clients(rpc, server, 2)
        client.call("act", stack([1, 2]), rows=2)
        client.act(row(3))
        wait_until(lambda: server.stats()["batch_waiting"] == 3)
        other.act(row(4)).result(WAIT)
        assert server.stats()["batch_waiting"] == 0

    def test_impossible_batches_are_refused(self, rpc):
        server = rpc.batch_server()
        with pytest.raises(ValueError, match=r"limit of at least .*\(4\), got 2"):
            server.bind("act", Policy(), batch=4, limit=2)

    def test_a_server_with_waiting_rows_can_be_closed(self, rpc):
        policy = Policy()
        server = serve(rpc, policy)
        client = rpc.client(server)
        future = client.act(row(1))
        wait_until(lambda: server.stats()["batch_waiting"] == 1)
        server.close()
        assert policy.batches == []
        other = rpc.batch_server(server.addr)
        other.bind("act", policy, batch=1)
        other.start(block=False)
        with pytest.raises(Disconnected):
            future.result(WAIT)
        assert same(client.act(row(2)).result(WAIT), answer_row(2))
        assert policy.batches == [[2]]
