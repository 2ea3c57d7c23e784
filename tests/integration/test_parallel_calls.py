"""Every call of the contract, made by a client of the test against running roles."""

import numpy as np
import pytest
from parallel_testing import WAIT, metrics
from roles_testing import Roles, transitions
from waiting_testing import wait_until

from embodied.rpc import RemoteError
from embodied.run.parallel import parallel_agent


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Roles with a replay and a logger, which only the test uses."""
    with Roles(tmp_path_factory.mktemp("stores"), "--run.train_ratio", "0") as roles:
        roles.start_stores()
        yield roles


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    """Roles with an actor and all that it needs; the test plays the workers."""
    with Roles(tmp_path_factory.mktemp("actor")) as roles:
        roles.start_stores()
        roles.start(parallel_agent, roles.parts.make_agent)
        yield roles


def observation(envid, is_last=False, **changes):
    return {
        "where": np.array([envid, 0, 0], np.int32),
        "reward": np.float32(1),
        "is_first": np.bool_(False),
        "is_last": np.bool_(is_last),
        "is_terminal": np.bool_(False),
        "log/count": np.float32(7),
        "envid": np.int32(envid),
        "is_eval": np.bool_(False),
        **changes,
    }


def message(envid, is_eval=False):
    """A transition as the logger gets it."""
    return {
        "reward": np.zeros(1, np.float32),
        "is_first": np.ones(1, bool),
        "is_last": np.zeros(1, bool),
        "envid": np.array([envid], np.int32),
        "is_eval": np.full(1, is_eval),
    }


class TestReplay:
    def test_what_is_added_is_sampled_and_updated(self, stores):
        client = stores.client("replay")
        for batch in transitions([0, 1], 30):
            client.add_batch(batch).result(WAIT)
        batch = client.sample_batch_train().result(WAIT)
        assert batch["where"].shape == (4, 8 + 1, 3)
        assert batch["stepid"].shape == (4, 9, 20)
        assert set(batch["where"][..., 0].ravel().tolist()) <= {0, 1}
        assert (np.diff(batch["where"][..., 2].astype(int), axis=1) == 1).all()
        assert batch["is_first"][:, 0].all()
        assert "envid" not in batch and "is_eval" not in batch
        assert client.sample_batch_report().result(WAIT)["where"].shape[1] == 4 + 1
        # Later batches have the refreshed latents.
        steps = len(batch["stepid"][0])
        fresh = np.full((4, steps, 2), -5, np.float32)
        client.update({"stepid": batch["stepid"], "dyn/deter": fresh}).result(WAIT)
        seen = set()
        for _ in range(50):
            sample = client.sample_batch_train().result(WAIT)
            seen.update(sample["dyn/deter"].ravel().tolist())
        assert -5 in seen and len(seen) > 1

    def test_evaluation_has_its_own(self, stores):
        client = stores.client("replay")
        assert client.sample_batch_eval().result(WAIT) == {}
        for batch in transitions([7], 20, is_eval=True):
            client.add_batch(batch).result(WAIT)
        batch = client.sample_batch_eval().result(WAIT)
        assert set(batch["where"][..., 0].ravel().tolist()) == {7}
        report = client.sample_batch_report().result(WAIT)
        assert 7 not in report["where"][..., 0]

    def test_answers_keep_their_order(self, stores):
        client = stores.client("replay")
        futures = [client.add_batch(x) for x in transitions([3], 12)]
        assert [future.result(WAIT) for future in futures] == [None] * 12

    def test_what_does_not_fit_is_refused_and_harms_nobody(self, stores):
        client = stores.client("replay")
        (batch,) = transitions([4], 1)
        with pytest.raises(RemoteError):
            client.add_batch({**batch, "reward": np.ones(3, np.float32)}).result(WAIT)
        with pytest.raises(RemoteError):
            client.add_batch({"reward": np.ones(1, np.float32)}).result(WAIT)
        with pytest.raises(RemoteError, match="no_such_call"):
            client.no_such_call().result(WAIT)
        client.add_batch(batch).result(WAIT)


class TestLogger:
    def test_metrics_and_transitions_are_written(self, stores):
        client = stores.client("logger")
        client.add({"mine/value": 3.5}).result(WAIT)
        before = client.wait_step(0).result(WAIT)
        first = {
            "reward": np.zeros(2, np.float32),
            "is_first": np.ones(2, bool),
            "is_last": np.zeros(2, bool),
            "log/found": np.array([1, 2], np.float32),
            "envid": np.array([50, 51], np.int32),
            "is_eval": np.array([False, True]),
        }
        last = {
            **first,
            "reward": np.array([2, 4], np.float32),
            "is_first": np.zeros(2, bool),
            "is_last": np.ones(2, bool),
        }
        assert client.tran(first).result(WAIT) == before + 1
        assert client.tran(last).result(WAIT) == before + 2
        logdir = stores.args.logdir
        names = ("mine/value", "episode/score", "eval_episode/score")

        def written():
            # Such a call writes the metrics when a write is due.
            client.add({"mine/value": 3.5}).result(WAIT)
            return all(name in metrics(logdir) for name in names)

        wait_until(written)
        found = metrics(logdir)
        assert found["mine/value"][0] == 3.5
        assert found["episode/score"] == [2] and found["eval_episode/score"] == [4]

    def test_a_wait_for_a_step_ends_with_it(self, stores):
        client, other = stores.client("logger"), stores.client("logger")
        step = client.wait_step(0).result(WAIT)
        waiting = client.wait_step(step + 1)
        assert not waiting.wait(0.2)
        other.tran(message(60, is_eval=True)).result(WAIT)
        assert not waiting.wait(0.2)
        other.tran(message(60)).result(WAIT)
        assert waiting.result(WAIT) == step + 1


class TestActor:
    def test_one_observation_gets_its_action(self, actor):
        client = actor.client("actor")
        for is_last in (False, True):
            reply = client.act(observation(0, is_last)).result(WAIT)
            assert set(reply) == {"action", "reset"}
            assert reply["reset"] == is_last and 0 <= reply["action"] < 1000

    def test_a_stack_gets_a_stack(self, actor):
        client = actor.client("actor")
        each = [observation(envid, is_last=envid == 11) for envid in (10, 11)]
        stack = {key: np.stack([row[key] for row in each]) for key in each[0]}
        reply = client.call("act", stack, rows=2).result(WAIT)
        assert reply["reset"].tolist() == [False, True]
        assert reply["action"].shape == (2,)

    def test_what_it_did_is_stored_and_counted(self, actor):
        client, logger = actor.client("actor"), actor.client("logger")
        replay = actor.client("replay")
        step = logger.tran(message(70, is_eval=True)).result(WAIT)
        for index in range(12):
            where = np.array([20, 0, index], np.int32)
            client.act(observation(20, where=where)).result(WAIT)
        # A transition of evaluation returns the step without counting as one.
        wait_until(
            lambda: logger.tran(message(70, is_eval=True)).result(WAIT) == step + 12
        )
        seen = replay.sample_batch_report().result(WAIT)
        assert {"where", "action", "reward"} <= set(seen)
        assert not [key for key in seen if key.startswith("log/")]

    def test_a_bad_observation_harms_nobody(self, actor):
        good, bad = actor.client("actor"), actor.client("actor")
        good.act(observation(30)).result(WAIT)
        missing = observation(31)
        del missing["is_last"]
        for broken in (missing, {"x": np.zeros(3)}):
            with pytest.raises(RemoteError):
                bad.act(broken).result(WAIT)
        assert good.act(observation(30)).result(WAIT)["reset"] == False  # noqa: E712
