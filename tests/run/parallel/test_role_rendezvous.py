"""How actor and learner begin, end and fail together."""

import threading
import time

import pytest
from role_testing import Background, CountingAgent, make_args

from embodied.run.parallel import agent as agents
from embodied.run.parallel.rendezvous import Rendezvous
from embodied.workers.supervisor import INTERRUPTED_GRACE


def sides():
    barrier = threading.Barrier(2)
    return Rendezvous(barrier, "actor", "learner"), Rendezvous(
        barrier, "learner", "actor"
    )


def run(rendezvous, *, fail=None):
    with rendezvous:
        rendezvous.meet()
        if fail:
            raise fail
        rendezvous.meet()


def test_both_meet_twice():
    actor, learner = sides()
    with Background(run, actor) as one, Background(run, learner) as two:
        pass
    assert one.error is None and two.error is None
    assert not actor.broken
    actor.check()


@pytest.mark.parametrize("first", [0, 1])
def test_the_other_side_fails_with_the_error_of_the_first(first):
    pair = sides()
    names = ("actor", "learner")
    error = ValueError("cannot be restored")
    called = []
    pair[1 - first].on_failure(lambda: called.append(1))

    def fail():
        with pair[first]:
            pair[first].meet()
            raise error

    with Background(fail) as failing, Background(run, pair[1 - first]) as waiting:
        pass
    assert failing.error is error
    assert isinstance(waiting.error, RuntimeError)
    assert waiting.error.__cause__ is error
    message = f"The {names[1 - first]} ends because the {names[first]} failed"
    assert message in str(waiting.error)
    assert called and all(side.broken for side in pair)


def test_a_failure_before_the_other_side_has_come():
    actor, learner = sides()
    with pytest.raises(ValueError, match="early"):
        with learner:
            raise ValueError("early")
    with pytest.raises(RuntimeError, match="learner failed: early"):
        actor.meet()


def test_the_first_error_counts():
    actor, learner = sides()
    actor.fail(ValueError("first"))
    learner.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        actor.check()
    with pytest.raises(RuntimeError, match="actor failed: first"):
        learner.check()


def test_a_failure_is_told_also_to_who_asks_later():
    actor, learner = sides()
    actor.fail(ValueError("early"))
    called = []
    learner.on_failure(lambda: called.append(1))
    assert called == [1] and not learner.abandoned


def test_all_is_abandoned_from_outside():
    actor, learner = sides()
    seen = []
    learner.on_failure(lambda: seen.append(learner.abandoned))
    with Background(actor.meet) as waiting:
        Rendezvous(learner._barrier, "launcher", "agent").abandon()
    assert isinstance(waiting.error, RuntimeError) and seen == [True]
    with pytest.raises(RuntimeError, match="launcher failed: The run was ended"):
        learner.check()


def test_an_agent_that_is_abandoned_ends_before_the_program_exits(
    tmp_path, monkeypatch
):
    def serve(agent, barrier, *arguments):
        failed = threading.Event()
        Rendezvous(barrier, "actor", "learner").on_failure(failed.set)
        assert failed.wait(10)

    monkeypatch.setattr(agents, "parallel_actor", serve)
    monkeypatch.setattr(agents, "run_learner", serve)
    args, abandon = make_args(logdir=str(tmp_path), replica=1), threading.Event()
    run = agents.run_agent, CountingAgent, args, threading.Event(), None, abandon
    with Background(*run) as agent:
        begin = time.monotonic()
        abandon.set()
    assert time.monotonic() - begin < INTERRUPTED_GRACE / 2
    with pytest.raises(RuntimeError, match="The run was ended"):
        raise agent.error


def test_a_meeting_that_is_called_off_is_no_failure():
    actor, learner = sides()
    with Background(actor.meet) as waiting:
        learner.call_off()
    assert waiting.error is None and waiting.result is False
    assert actor.meet() is False


def test_a_side_that_does_not_come_is_a_timeout():
    _, learner = sides()
    with pytest.raises(TimeoutError, match=r"The learner waited 0\.01 s for the actor"):
        learner.meet(0.01)


def test_the_barrier_is_one_of_two():
    with pytest.raises(ValueError, match="barrier of 2, got 3"):
        Rendezvous(threading.Barrier(3), "actor", "learner")
