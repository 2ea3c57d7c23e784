"""The learner without its connections, and its stream of batches."""

import threading

import pytest
from role_testing import Background, CountingAgent, FakeClient, make_args
from waiting_testing import wait_until

from embodied.rpc import Disconnected
from embodied.run.parallel.learner import Learner, RemoteStream
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.run.parallel.replicas import Replicas
from embodied.run.parallel.stopping import RunEnd, note_compiling


def make_learner(batches=(), agent=None, replay=None, **changes):
    agent = agent or CountingAgent()
    replay, logger = replay or FakeClient(), FakeClient()
    args = make_args(**changes)
    return Learner(agent, iter(batches), replay, logger, args), agent, replay, logger


class TestStep:
    def test_batches_are_trained_on_in_order(self):
        learner, agent, _, _ = make_learner([{"x": 1}, {"x": 2}])
        learner.step()
        learner.step()
        assert agent.trained == [(0, {"x": 1}), (1, {"x": 2})]
        assert learner.updates == 2
        with pytest.raises(StopIteration):
            learner.step()
        assert learner.updates == 2

    def test_what_the_agent_has_for_the_replay_is_sent(self):
        learner, agent, replay, _ = make_learner([{}, {}])
        learner.step()
        assert replay.calls == []
        agent.outputs = {"replay": {"stepid": 1}}
        learner.step()
        assert replay.calls == [("update", ({"stepid": 1},))]

    def test_an_update_that_was_not_taken_is_told(self, caplog):
        replay = FakeClient(update=RuntimeError("no such step"))
        learner, agent, _, _ = make_learner([{}, {}], replay=replay)
        agent.outputs = {"replay": {}}
        learner.step()
        learner.step()
        assert (
            "The replay did not take what the learner sent: no such step" in caplog.text
        )
        assert learner.updates == 2

    def test_what_the_agent_still_works_on_is_waited_for(self):
        class Late(CountingAgent):
            def flush(self):
                return {"replay": {"stepid": 9}}, {"loss": 100.0}

        learner, _, replay, logger = make_learner(agent=Late())
        learner.flush()
        learner.log()
        assert replay.sent("update") == [({"stepid": 9},)]
        assert logger.sent("add")[0][0]["train/loss"] == 100.0


class TestMetrics:
    def test_means_since_the_last_time_are_sent(self):
        learner, _, _, logger = make_learner([{}] * 3)
        for _ in range(3):
            learner.step()
        learner.log()
        (metrics,) = logger.sent("add")[-1]
        assert metrics["train/loss"] == 2.0
        assert metrics["parallel/updates"] == 3
        assert metrics["fps/train"] == pytest.approx(
            metrics["parallel/updates_per_second"] * 2 * 4
        )
        assert 0 <= metrics["timer/learner/train"] <= 1
        assert metrics["client/learner_replay/calls"] == 0
        learner.log()
        assert "train/loss" not in logger.sent("add")[-1][0]

    def test_the_first_batch_and_the_first_update_are_told_at_once(self):
        told = []

        class Slow(CountingAgent):
            def train(self, carry, batch):
                told.append(logger.sent("add"))
                return super().train(carry, batch)

        learner, _, _, logger = make_learner([{}] * 2, agent=Slow())
        learner.step()
        assert told == [[({"parallel/updates": 0},)]]  # Sent before it compiles.
        learner.step()
        assert logger.sent("add") == [({"parallel/updates": n},) for n in (0, 1)]

    def test_shares_of_time_do_not_count_what_came_before_the_first_update(self):
        waits = iter(
            [{"waits": 0.9}, {"waits": 0.2}]
        )  # The stream has waited for a replay to be filled.
        logger = FakeClient()
        learner = Learner(
            *(CountingAgent(), iter([{}, {}]), FakeClient(), logger, make_args()),
            stream_stats=lambda: next(waits),
        )
        learner.step()
        learner.step()
        learner.log()
        assert logger.sent("add")[-1][0]["waits"] == 0.2


class TestReport:
    @pytest.mark.parametrize("source", ["report", "eval"])
    def test_so_many_fresh_batches_with_one_carry(self, source):
        numbers = iter(range(100))
        answer = {f"sample_batch_{source}": lambda _: {"value": next(numbers)}}
        learner, agent, replay, logger = make_learner(replay=FakeClient(**answer))
        opened = []
        learner.report(source, opened.append)
        # consec_report 3 times report_batches 2.
        assert replay.calls == [(f"sample_batch_{source}", (i,)) for i in range(6)]
        assert agent.reported == [(i, {"value": i}) for i in range(6)]
        assert logger.sent("add") == [({f"{source}/value": 2.5},)]
        assert opened[0].closed and agent.closed == 1

    def test_nothing_to_sample_is_an_empty_report(self):
        replay = FakeClient(sample_batch_eval={})
        learner, agent, _, logger = make_learner(replay=replay)
        learner.report("eval", lambda stream: None)
        assert agent.reported == []
        assert logger.sent("add") == [({},)]


class TestStream:
    def test_calls_are_made_ahead_and_numbered(self):
        client = FakeClient(sample_batch_train=lambda number: {"number": number})
        stream = RemoteStream(client, "train", ahead=2)
        assert next(stream) == {"number": 0}
        assert client.calls == [("sample_batch_train", (i,)) for i in range(3)]
        assert next(stream) == {"number": 1}
        assert len(client.calls) == 4

    def test_batches_keep_their_order(self):
        client = FakeClient(held=["sample_batch_train"])
        stream = RemoteStream(client, "train", ahead=1)
        with Background(next, stream) as task:
            wait_until(lambda: len(client.open) == 2)
            client.open[1].set_result({"number": 1})
            assert task.running
            client.open[0].set_result({"number": 0})
        assert task.result == {"number": 0}
        assert next(stream) == {"number": 1}

    def test_it_ends_after_the_count(self):
        client = FakeClient(sample_batch_report={"x": 1})
        stream = RemoteStream(client, "report", ahead=5, count=3)
        assert list(stream) == [{"x": 1}] * 3
        assert len(client.calls) == 3

    def test_closing_ends_a_wait(self):
        client = FakeClient(held=["sample_batch_train"])
        stream = RemoteStream(client, "train")
        with Background(next, stream) as task:
            wait_until(lambda: client.open)
            assert task.running
            stream.close()
        assert isinstance(task.error, StopIteration)
        assert stream.stats()["timer/learner/stream_wait"] > 0
        with pytest.raises(StopIteration):
            next(stream)

    def test_it_is_not_ready_before_the_batch_has_come(self):
        client = FakeClient(held=["sample_batch_train"])
        stream = RemoteStream(client, "train", ahead=1)
        assert not stream.ready(0.001)
        client.open[0].set_error(Disconnected("the server was restarted"))
        assert not stream.ready(0.001)
        client.open[2].set_result({"number": 0})
        assert stream.ready(0.001)
        assert next(stream) == {"number": 0}
        assert [arguments for _, arguments in client.calls] == [(0,), (1,), (0,)]

    def test_a_wake_up_for_an_earlier_batch_does_not_end_it(self):
        client = FakeClient(held=["sample_batch_train"])
        stream = RemoteStream(client, "train", ahead=1)
        # Waited for several times, so that it wakes the reader several times.
        assert not stream.ready(0.001)
        assert not stream.ready(0.001)
        client.open[0].set_result({"number": 0})
        assert next(stream) == {"number": 0}
        with Background(next, stream) as task:
            wait_until(lambda: len(client.open) == 3)
            stream._wake.set()  # As the second call of the first batch's callback.
            wait_until(lambda: not stream._wake.is_set())
            assert task.running
            client.open[1].set_result({"number": 1})
        assert task.result == {"number": 1}

    def test_it_is_ready_for_an_error_and_never_after_the_end(self):
        client = FakeClient(sample_batch_train=RuntimeError("broken"))
        stream = RemoteStream(client, "train")
        assert stream.ready()
        stream.close()
        assert not stream.ready()

    def test_what_a_restarted_replay_was_asked_for_is_asked_again(self):
        client = FakeClient(held=["sample_batch_train"])
        stream = RemoteStream(client, "train", ahead=2)
        with Background(next, stream) as task:
            wait_until(lambda: len(client.open) == 3)
            client.open[1].set_result({"number": 1})  # Answered before the restart.
            for index in (2, 0):
                client.open[index].set_error(Disconnected("the server was restarted"))
            wait_until(lambda: len(client.open) == 5)
            assert [arguments[0] for _, arguments in client.calls] == [0, 1, 2, 0, 2]
            client.open[4].set_result({"number": 2})
            assert task.running
            client.open[3].set_result({"number": 0})
        assert task.result == {"number": 0}
        client.open.clear()
        assert next(stream) == {"number": 1}
        assert next(stream) == {"number": 2}

    def test_a_closed_connection_is_an_error(self):
        client = FakeClient(sample_batch_train=Disconnected("the client is closed"))
        calls = iter([client.call])
        stream = RemoteStream(client, "train")

        def call(*arguments):
            for allowed in calls:
                return allowed(*arguments)
            raise Disconnected("the client is closed")

        client.call = call
        with pytest.raises(Disconnected):
            next(stream)

    def test_an_error_is_raised(self):
        client = FakeClient(sample_batch_train=RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            next(RemoteStream(client, "train"))


class TestOver:
    @pytest.fixture
    def over(self):
        rendezvous = Rendezvous(threading.Barrier(2), "learner", "actor")
        with RunEnd(threading.Event(), rendezvous, 0.0, Replicas()) as over:
            yield over

    def test_the_run_ends_with_the_answer(self, over):
        client = FakeClient(held=["wait_step"])
        over.when(lambda: client.wait_step(10))
        assert not over
        client.open[0].set_result(10)
        assert over

    def test_a_logger_that_is_restarted_is_asked_again(self, over):
        client = FakeClient(held=["wait_step"])
        over.when(lambda: client.wait_step(10))
        for index in range(3):
            client.open[index].set_error(Disconnected("the server was restarted"))
            assert not over
        assert client.sent("wait_step") == [(10,)] * 4
        client.open[3].set_result(10)
        assert over

    def test_a_closed_connection_is_the_end(self, over):
        client = FakeClient(held=["wait_step"])
        over.when(lambda: client.wait_step(10))

        def closed(*arguments):
            raise Disconnected("the client is closed")

        client.call = closed
        client.open[0].set_error(Disconnected("the client is closed"))
        assert over


def test_compiling_changes_and_is_told_to_the_launcher():
    class Agent:
        compiling = False

    agent, told = Agent(), []
    progress = note_compiling(agent, lambda: told.append(1))
    assert progress() == progress() and not told
    agent.compiling = True
    assert progress() != progress() and len(told) == 2
    assert note_compiling(object(), lambda: told.append(1))() == 0, "of other agents"
