"""Each env has one worker, also after kills and if two workers claim the same env."""

import os
import re
import signal
import time

import pytest
from role_testing import CountingAgent, FakeClient, observations
from waiting_testing import WAIT, wait_until

from embodied.rpc import BatchServer, Client, Keys, RemoteError, WireError, free_port
from embodied.rpc.links import Link
from embodied.rpc.sessions import MAX_INFLIGHT, PROTOCOL, Sessions
from embodied.run.parallel.actor import Actor
from embodied.run.parallel.owners import Absences, Owners, read_info, worker_info
from embodied.workers import Process

KEYS = Keys.generate()
TIMEOUT = 8.0


class Setting:
    """An actor and its clients, without a server; `pass_time` lets time pass."""

    def __init__(self):
        self.replay = FakeClient()
        self.actor = Actor(CountingAgent(), self.replay, FakeClient(), 4)
        self.sessions = Sessions(TIMEOUT, discard=lambda link: None)
        self.owners = Owners(self.sessions, self.actor.leave, self.actor.free)
        self.actor.owns = self.owners.owns

    def hello(self, client, envids, supervisor="", slots=1):
        return self.sessions.hello(
            Link(),
            {
                "version": PROTOCOL,
                "client": client.ljust(16),
                "name": client.decode(),
                "slots": slots,
                "group": False,
                "info": worker_info(envids, supervisor),
                "max_inflight": MAX_INFLIGHT,
            },
        )

    def pass_time(self, *silent, seconds=TIMEOUT + 1):
        """Lets time pass in which `silent` clients send nothing and the others do."""
        for session in list(self.sessions):
            if session.client.strip() in silent:
                session.heard -= seconds
            else:
                self.sessions.get(session.link)
        self.sessions.expire()

    def step(self, envids, **changes):
        reply, message = self.actor.act(observations(envids, **changes))
        self.actor.publish(message)
        return reply["action"].tolist()

    def stored(self, key):
        return self.replay.sent("add_batch")[-1][0][key].tolist()


class TestSupervised:
    def test_a_restarted_worker_gets_its_envs_at_once_as_new_ones(self):
        setting = Setting()
        setting.hello(b"first", [0, 1], "host", slots=2)
        assert setting.step([0, 1]) == [1, 1]
        assert setting.hello(b"second", [0, 1], "host", slots=2) is not None
        assert setting.sessions.slots(False) == 2  # Without those of the first.
        assert setting.step([0, 1], is_first=[True, True]) == [1, 1]
        assert setting.stored("is_first") == [True, True]

    def test_the_late_departure_of_the_killed_one_resets_nothing(self):
        setting = Setting()
        setting.hello(b"first", [0], "host")
        setting.step([0])
        setting.hello(b"second", [0], "host")
        assert setting.step([0], is_first=[True]) == [1]
        setting.pass_time(b"first")
        assert setting.step([0]) == [2]
        assert setting.stored("is_first") == [False]

    def test_one_that_comes_back_after_it_was_replaced_has_to_ask(self):
        setting = Setting()
        first = setting.hello(b"first", [0], "host").link
        second = setting.hello(b"second", [0], "host").link
        assert setting.sessions.get(first) is None
        assert setting.sessions.get(second) is not None


class TestStrangers:
    def test_the_second_is_refused_when_the_first_is_heard_of(self):
        setting = Setting()
        setting.hello(b"env-0-1", [0, 1], "here", slots=2)
        setting.step([0, 1])
        assert setting.hello(b"other", [1, 2], "there", slots=2) is None
        setting.pass_time()
        with pytest.raises(WireError, match=r"env 1 .* env-0-1 .*--run.env_offset"):
            setting.hello(b"other", [1, 2], "there", slots=2)
        assert setting.sessions.slots(False) == 2
        assert setting.step([0, 1]) == [2, 2]
        assert setting.stored("is_first") == [False, False]

    def test_the_second_has_to_wait_while_nothing_is_known(self):
        setting = Setting()
        setting.hello(b"first", [0])
        for _ in range(3):
            assert setting.hello(b"second", [0]) is None
            assert len(setting.sessions) == 1

    def test_the_second_gets_the_env_when_the_first_has_gone(self):
        setting = Setting()
        setting.hello(b"first", [0])
        setting.step([0])
        assert setting.hello(b"second", [0]) is None
        setting.pass_time(b"first")
        assert setting.hello(b"second", [0]) is not None
        assert setting.step([0]) == [1]
        # The first was only cut off. Now it is the one that is too late.
        assert setting.hello(b"first", [0]) is None
        setting.pass_time()
        with pytest.raises(WireError, match="env 0"):
            setting.hello(b"first", [0])

    def test_ids_are_free_after_a_goodbye(self):
        setting = Setting()
        setting.sessions.bye(setting.hello(b"first", [0, 1]))
        assert setting.hello(b"second", [1, 2]) is not None

    def test_one_that_was_silent_goes_on_where_it_was(self):
        setting = Setting()
        setting.hello(b"first", [0, 1], slots=2)
        setting.step([0, 1], is_first=[True, True])
        setting.pass_time(b"first", seconds=30.0)
        assert setting.actor.stats()["parallel/envs"] == 0
        (note,) = setting.owners.absences.notes()
        assert re.search(r"No contact with envs 0 to 1 since [\d:]{8}, 30 s ago", note)
        assert setting.owners.absences.notes() == []
        setting.hello(b"first", [0, 1], slots=2)
        assert setting.owners.absences.notes() == ["Back after 30 s: envs 0 to 1."]
        assert setting.step([0, 1]) == [2, 2]
        assert setting.stored("is_first") == [False, False]

    def test_one_that_was_forgotten_does_not(self):
        setting = Setting()
        setting.hello(b"first", [0])
        setting.step([0], is_first=[True])
        setting.pass_time(b"first", seconds=1000.0)
        setting.hello(b"first", [0])
        assert setting.step([0], is_first=[True]) == [1]

    def test_one_that_connects_again_is_no_other_one(self):
        setting = Setting()
        setting.hello(b"first", [0])
        assert setting.hello(b"first", [0]) is not None


def test_absences_are_told_less_and_less_often():
    now = [0.0]
    absences = Absences(lambda: now[0])
    absences.begin([3, 5, 4, "the replay"])
    told = []
    for second in range(1, 101):
        now[0] = second
        told += [second] * len(absences.notes())
    assert told == [10, 20, 40, 80]
    absences.end([3, 9])
    assert absences.notes() == ["Back after 100 s: envs 3."]
    now[0] = 200
    (note,) = absences.notes()
    assert "No contact with the replay, envs 4 to 5 since" in note


@pytest.mark.parametrize(
    "info",
    [
        *(3, "x", [0], ["envids"], {"envids": 3}, {"envids": None}),
        *({"envids": ["0"]}, {"envids": [-1]}, {"envids": [[0]]}, {"envids": [True]}),
        *({"envids": [1 << 40]}, {"envids": [0], "supervisor": 3}),
    ],
)
def test_odd_information_is_refused(info):
    with pytest.raises(WireError, match="expected the info"):
        read_info(info)


def test_nothing_needs_to_be_told():
    assert read_info(None) == read_info({}) == ([], "")


class Serving:
    """An actor's server for real clients, none of which shares memory with it."""

    def __init__(self):
        self.server = BatchServer(free_port(), "actor", keys=KEYS)
        self.actor = Actor(CountingAgent(), FakeClient(), FakeClient(), 4)
        self.freed = []
        Owners(self.server.sessions, self.actor.leave, self._free)
        self.server.bind("act", self.actor.act, self.actor.publish, batch=1, limit=4)

    def _free(self, envids):
        self.actor.free(envids)
        self.freed += envids

    def client(self, envids, supervisor, name="worker"):
        return connect(self.server.addr, KEYS, envids, supervisor, name)

    def __enter__(self):
        self.server.start(block=False)
        return self

    def __exit__(self, *error):
        self.server.close()


def connect(addr, keys, envids, supervisor, name="worker"):
    info = worker_info(envids, supervisor)
    return Client(addr, name, keys=keys, info=info, slots=len(envids), link="remote")


def act(client, envid):
    obs = {key: value[0] for key, value in observations([envid]).items()}
    return int(client.act(obs).result(WAIT)["action"])


def act_for_ever(addr, keys):
    with connect(addr, keys, [0], "host") as client:
        while True:
            act(client, 0)


def test_a_killed_worker_on_another_machine(monkeypatch):
    monkeypatch.setattr("embodied.rpc.server.CLIENT_TIMEOUT", 2.5)
    monkeypatch.setattr("embodied.rpc.server.HEARTBEAT", 0.5)
    with Serving() as serving:
        process = Process(act_for_ever, serving.server.addr, KEYS, start=True)
        wait_until(lambda: serving.actor.stats()["parallel/envs"] == 1)
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        serving.freed.clear()
        with serving.client([0], "host") as client:
            client.connect(WAIT)
            assert serving.freed == [0]  # At once, not after the timeout.
            assert act(client, 0) == 1
            end, count = time.monotonic() + 4.0, 1
            while time.monotonic() < end:  # Beyond the killed worker's timeout.
                count += 1
                assert act(client, 0) == count
            assert serving.freed == [0]


def test_two_hosts_with_the_same_envs():
    with Serving() as serving, serving.client([0, 1], "here", "env-0-1") as first:
        assert act(first, 0) == 1
        with serving.client([1, 2], "there", "env-1-2") as second:
            with pytest.raises(RemoteError, match=r"env 1 .*env-0-1.*env_offset"):
                second.connect(WAIT)
        assert act(first, 0) == 2
        assert serving.freed == []


def test_a_worker_that_tells_nonsense_harms_nobody():
    with Serving() as serving, serving.client([0], "here") as good:
        assert act(good, 0) == 1
        for info in (3, ["x"], {"envids": 5}, {"envids": [{}]}):
            with Client(serving.server.addr, keys=KEYS, info=info, slots=1) as bad:
                with pytest.raises(RemoteError, match="expected the info of a worker"):
                    bad.connect(WAIT)
        assert act(good, 0) == 2
