"""Env workers without their connection."""

import sys

import elements
import numpy as np
import pytest
from role_testing import FakeClient

import embodied
from embodied.driver import EnvExit
from embodied.rpc import Disconnected, RemoteError
from embodied.run.parallel.env import EnvGroup, EnvWorker, run_worker, worker_name
from embodied.run.parallel.observations import ObservationError


class Task(embodied.Env):
    """Environment that observes its last action and the reset flag of it."""

    def __init__(self, index, **changes):
        self.index = index
        self.closed = False
        self._changes = changes

    @property
    def obs_space(self):
        return {
            "seen": embodied.Space(np.int32, 2),
            "reward": embodied.Space(np.float32),
            "is_first": embodied.Space(bool),
            "is_last": embodied.Space(bool),
            "is_terminal": embodied.Space(bool),
        }

    @property
    def act_space(self):
        return {
            "action": embodied.Space(np.int32, (), 0, 100),
            "reset": embodied.Space(bool),
        }

    def step(self, action):
        obs = {
            "seen": [action["action"], action["reset"]],
            "reward": 1.0,
            "is_first": bool(action["reset"]),
            "is_last": False,
            "is_terminal": False,
            **self._changes,
        }
        return {key: value for key, value in obs.items() if value is not None}

    def close(self):
        self.closed = True


class TestGroup:
    def test_it_begins_with_a_reset_and_takes_actions(self):
        group = EnvGroup(Task, [3, 4], is_eval=True)
        first = group.step()
        assert first["seen"].tolist() == [[0, 1], [0, 1]]
        assert first["envid"].tolist() == [3, 4] and first["is_eval"].all()
        assert first["reward"].dtype == np.float32
        group.actions = {"action": np.array([5, 6]), "reset": np.array([False, True])}
        assert group.step()["seen"].tolist() == [[5, 0], [6, 1]]

    def test_one_environment_is_not_a_stack(self):
        obs = EnvGroup(Task, [3], is_eval=False).step()
        assert obs["seen"].shape == (2,) and obs["envid"].shape == ()
        assert int(obs["envid"]) == 3 and not obs["is_eval"]

    def test_all_are_closed_when_one_cannot_be_made(self):
        made = []

        def make(index):
            if index == 2:
                raise OSError("no such game")
            made.append(Task(index))
            return made[-1]

        with pytest.raises(OSError, match="no such game"):
            EnvGroup(make, [0, 1, 2], False)
        assert len(made) == 2 and all(env.closed for env in made)


class TestWorker:
    def test_one_group_steps_while_the_other_waits(self):
        client = FakeClient(held=["act"])
        groups = [EnvGroup(Task, [0, 1], False), EnvGroup(Task, [2], False)]
        worker = EnvWorker(groups, client)
        assert len(client.open) == 2 and client.rows == [2, 0]
        reply = {"action": np.array([7, 8]), "reset": np.zeros(2, bool)}
        client.open[0].set_result(reply)
        assert worker.step()
        # The first group has asked again before the second had its answer.
        assert len(client.open) == 3 and not client.open[1].done()
        assert client.calls[2][1][0]["seen"].tolist() == [[7, 0], [8, 0]]
        reply = {"action": np.int32(9), "reset": np.bool_(True)}
        client.open[1].set_result(reply)
        assert worker.step()
        assert client.calls[3][1][0]["seen"].tolist() == [9, 1]
        assert client.calls[3][1][0]["envid"] == 2

    def test_it_ends_when_the_run_is_over(self):
        client = FakeClient(act=RemoteError("exception", "over", "RunOver"))
        assert not EnvWorker([EnvGroup(Task, [0], False)], client).step()

    def test_a_step_that_the_actor_may_have_stored_is_the_end_of_its_episode(self):
        client = FakeClient(held=["act"])
        groups = [EnvGroup(Task, [0, 1], False), EnvGroup(Task, [2], False)]
        worker = EnvWorker(groups, client)
        for index in range(2):
            reply = {"action": np.array([7, 8]), "reset": np.zeros(2, bool)}
            if index:
                reply = {key: value[0] for key, value in reply.items()}
            client.open[index].set_result(reply)
            assert worker.step()
        client.open[2].set_error(Disconnected("the server was restarted"))
        assert worker.step()
        # All envs of that group, and of no other, begin anew.
        assert client.calls[4][1][0]["seen"].tolist() == [[0, 1], [0, 1]]
        assert client.calls[4][1][0]["is_first"].all()
        client.open[3].set_result({"action": np.int32(9), "reset": np.bool_(False)})
        assert worker.step()
        assert client.calls[5][1][0]["seen"].tolist() == [9, 0]

    def test_it_ends_with_its_connection(self):
        client = FakeClient(act=Disconnected("the client is closed"))
        worker = EnvWorker([EnvGroup(Task, [0], False)], client)

        def closed(*arguments, **options):
            raise Disconnected("the client is closed")

        client.call = closed
        with pytest.raises(Disconnected):
            worker.step()

    def test_other_errors_are_raised(self):
        client = FakeClient(act=RemoteError("exception", "bad", "ValueError"))
        with pytest.raises(RemoteError, match="bad"):
            EnvWorker([EnvGroup(Task, [0], False)], client).step()

    def test_what_the_agent_refuses_is_an_error_without_the_servers_traceback(self):
        answer = RemoteError("exception", "no key", "ObservationError", "Traceback")
        client = FakeClient(act=answer)
        with pytest.raises(ObservationError, match=r"^no key$"):
            EnvWorker([EnvGroup(Task, [0], False)], client).step()

    def test_actions_of_another_task_are_refused(self):
        client = FakeClient(act={"move": np.int32(0), "reset": np.bool_(False)})
        with pytest.raises(ObservationError, match=r"action, reset .* got move, reset"):
            EnvWorker([EnvGroup(Task, [0], False)], client).step()

    def test_an_environment_cannot_end_the_process(self):
        def make(index):
            sys.exit(0)

        args = elements.Config(actor_addr="localhost:1", env_timeout=1.0)
        with pytest.raises(EnvExit, match=r"sys.exit\(0\)"):
            run_worker(make, [0], args, is_eval=False)


def test_names_of_workers():
    assert worker_name([3]) == "env-3"
    assert worker_name([0, 1, 2]) == "env-0-2"
