"""The driver's decisions when bundles are placed, lost or stopped, or end."""

import contextlib
import threading
import types

import pytest
from fake_ray import FakeRay
from waiting_testing import wait_until

from dreamerv3.cli.config import load_config
from dreamerv3.cluster import ray_driver
from dreamerv3.cluster.bundle_actor import Outcome, Place
from dreamerv3.cluster.bundles import explain_loss, make_env_bundles
from dreamerv3.cluster.ray_driver import ClusterRun
from dreamerv3.cluster.run_keys import make_keys
from embodied.run.parallel.replicas import EXIT_START_AGAIN

FLAGS = ["--script", "ray", "--run.envs", "4", "--run.eval_envs", "0"]
FLAGS += ["--ray.envs_per_bundle", "2", "--ray.head_resources", "head=1"]
FIRST, SECOND = "envs 0 to 1", "envs 2 to 3"
HEADS = ("head 0", "head 1")
GANG = [f"replica {replica}, {name}" for replica in (0, 1) for name in (FIRST, SECOND)]


def place(address="10.0.0.1", sees=True):
    return Place("machine", address, (21001, 21002, 21003, 21004), sees)


class Run:
    """A run on a fake cluster that the test controls."""

    def __init__(self, logdir, *flags, trusted=False):
        config = load_config([*FLAGS, *flags, "--logdir", str(logdir)])
        self.ray = FakeRay()
        self._stack = contextlib.ExitStack()
        keys = self._stack.enter_context(make_keys(logdir, "", trusted, {}))
        bundles = make_env_bundles(config)
        self._run = ClusterRun(self.ray, config, keys, {"head": 1.0}, bundles)
        self.stop = threading.Event()
        self.outcome = None

    def __enter__(self):
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        for name in ("head", *HEADS):
            if (call := self.ray.call(name, "run")) and not call.future().done():
                call.answer(Outcome(0))
        self._thread.join(30)
        self._stack.close()

    def _main(self):
        self.outcome = self._run.run(self.stop)

    def call(self, name, method, after=None):
        """Waits for a call of a bundle's method other than `after`, and returns it."""
        wait_until(lambda: self.ray.call(name, method) not in (None, after), seconds=20)
        return self.ray.call(name, method)

    def begin(self):
        """Places everything; returns the call that runs the head."""
        self.call("head", "place").answer(place())
        for name in (FIRST, SECOND):
            self.call(name, "place").answer(place("10.0.0.2"))
            self.call(name, "run")
        return self.call("head", "run")

    def begin_gang(self):
        """Places two replicas; returns the calls that run their heads."""
        for index, name in enumerate(HEADS):
            self.call(name, "place").answer(place(f"10.0.0.{index + 1}"))
        for name in GANG:
            self.call(name, "place").answer(place("10.0.0.9"))
            self.call(name, "run")
        return [self.call(name, "run") for name in HEADS]

    def end(self):
        self._thread.join(30)
        assert self.outcome is not None, "The run did not end."
        return self.outcome


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_driver, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr("embodied.workers.RestartPolicy.delay", lambda self, count: 0)


def test_the_head_comes_first_and_envs_get_its_address(tmp_path):
    with Run(tmp_path) as run:
        head = run.call("head", "place")
        assert run.ray.newest(FIRST) is None
        head.answer(place())
        first = run.call(FIRST, "place")
        first.answer(place("10.0.0.2"))
        number, _, _, host, keys = run.call(FIRST, "run").arguments
        assert (number, keys) == (1, None)
        assert host["actor_addr"] == "10.0.0.1:21001"
        assert (host["env_offset"], host["envs"], host["eval_envs"]) == (0, 2, 0)
        assert host["keyfile"].startswith(f"{tmp_path}/.ray-keys-")
        resources = run.ray.newest(FIRST).options
        assert (resources["num_cpus"], resources["scheduling_strategy"]) == (
            2,
            "SPREAD",
        )
        # The other bundle was not placed; the run ends all the same.
        run.call("head", "run").answer(Outcome(0))
        assert run.end() == Outcome(0)
        assert all(actor.killed for actor in run.ray.actors)


@pytest.mark.parametrize("code", [1, 2, 130])
def test_the_code_of_the_head_is_that_of_the_run(tmp_path, code):
    with Run(tmp_path) as run:
        run.begin().answer(Outcome(code, ("why",)))
        assert run.end() == Outcome(code, ("why",))


def test_a_stop_saves_and_then_ends_the_envs(tmp_path):
    with Run(tmp_path) as run:
        head = run.begin()
        run.stop.set()
        assert run.call("head", "stop").arguments == (1,)
        assert run.ray.call(FIRST, "stop") is None
        head.answer(Outcome(0))
        assert run.call(FIRST, "stop").arguments == (1,)
        assert run.end() == Outcome(0)


def test_a_stop_before_there_is_a_head_is_an_end(tmp_path):
    with Run(tmp_path) as run:
        run.call("head", "place")
        run.stop.set()
        assert run.end() == Outcome(0)


def test_a_head_that_could_not_save_yet_ends_well(tmp_path):
    with Run(tmp_path) as run:
        head = run.begin()
        run.stop.set()
        run.call("head", "stop")
        head.answer(Outcome(-15))
        assert run.end() == Outcome(0)


def test_lost_envs_are_placed_again(tmp_path):
    with Run(tmp_path) as run:
        run.begin()
        before = run.ray.newest(FIRST)
        run.call(FIRST, "run").fail("gone", "ActorUnavailableError")
        wait_until(lambda: run.ray.newest(FIRST) is not before)
        assert before.killed  # It may still be alive.
        run.call(FIRST, "place").answer(place("10.0.0.3"))
        assert run.call(FIRST, "run").arguments[0] == 2
        assert len(run.ray.newest(SECOND).calls) == 2


def test_a_lost_head_starts_elsewhere_and_envs_follow(tmp_path):
    with Run(tmp_path) as run:
        head, first = run.begin(), run.call(FIRST, "run")
        before = run.ray.newest("head")
        head.fail("gone")
        run.call(FIRST, "stop")
        wait_until(lambda: run.ray.newest("head") is not before)
        assert before.killed
        run.call("head", "place").answer(place("10.0.0.9"))
        again = run.call("head", "run")
        assert again.arguments[0] == 2
        assert again.arguments[1].keywords["patience"] > 0
        first.answer(Outcome(0))
        after = run.call(FIRST, "run", after=first)
        assert after.arguments[3]["actor_addr"] == "10.0.0.9:21001"
        again.answer(Outcome(0))
        assert run.end() == Outcome(0)


def test_a_head_cannot_go_on_without_its_logdir(tmp_path):
    with Run(tmp_path, trusted=True) as run:
        head = run.begin()
        before = run.ray.newest("head")
        head.fail("gone")
        wait_until(lambda: run.ray.newest("head") is not before)
        run.call("head", "place").answer(place("10.0.0.9", sees=False))
        outcome = run.end()
        assert outcome.code == 1
        assert f"does not see {tmp_path}" in outcome.problems[0]


def test_a_head_that_is_lost_again_and_again_ends_the_run(tmp_path):
    with Run(tmp_path, "--run.restarts.agent", "1") as run:
        run.call("head", "place").fail("Boom.\nModuleNotFoundError: no dreamerv3.")
        wait_until(lambda: len(run.ray.actors) == 2)
        run.call("head", "place").fail("Boom.\nModuleNotFoundError: no dreamerv3.")
        outcome = run.end()
        # Ray refuses the name of an actor that is not entirely dead yet.
        assert len({actor.options["name"] for actor in run.ray.actors}) == 2
        assert outcome.code == 1
        assert "--run.restarts.agent" in outcome.problems[0]
        assert outcome.problems[0].endswith("ModuleNotFoundError: no dreamerv3.")


def test_a_head_that_is_killed_starts_again(tmp_path):
    with Run(tmp_path) as run:
        run.begin().answer(Outcome(-9))
        wait_until(lambda: len([x for x in run.ray.actors if x.name == "head"]) == 2)


def test_envs_that_fail_for_good_end_the_run_saved(tmp_path):
    with Run(tmp_path, "--run.restarts.env", "1") as run:
        head, first = run.begin(), run.call(FIRST, "run")
        first.answer(Outcome(2, ("another task",)))
        run.call(FIRST, "run", after=first).answer(Outcome(2, ("another task",)))
        run.call("head", "stop")
        head.answer(Outcome(0))
        outcome = run.end()
        assert outcome.code == 2
        assert "--run.restarts.env" in outcome.problems[0]
        assert outcome.problems[1] == "another task"


def test_a_node_without_the_logdir_gets_no_keys(tmp_path):
    with Run(tmp_path) as run:
        run.call("head", "place").answer(place())
        run.call(FIRST, "place").answer(place("10.0.0.2", sees=False))
        run.call("head", "stop")
        run.call("head", "run").answer(Outcome(0))
        outcome = run.end()
        assert outcome.code == 2
        assert "machine (10.0.0.2) does not see" in outcome.problems[0]
        assert "--ray.trusted_network True" in outcome.problems[0]


def test_a_node_in_a_trusted_network_gets_keys(tmp_path):
    with Run(tmp_path, trusted=True) as run:
        run.call("head", "place").answer(place(sees=False))
        assert run.call("head", "run").arguments[4] is not None


def test_heads_that_train_together_start_together(tmp_path):
    with Run(tmp_path, "--replicas", "2") as run:
        run.call(HEADS[0], "place").answer(place("10.0.0.1"))
        other = run.call(HEADS[1], "place")
        strategy = run.ray.newest(HEADS[1]).options["scheduling_strategy"]
        bundles, spread = strategy["placement_group"]
        assert (len(bundles), spread) == (2, "STRICT_SPREAD")
        assert run.ray.call(HEADS[0], "run") is None
        other.answer(place("10.0.0.2"))
        for index, name in enumerate(HEADS):
            _, _, config, host, _ = run.call(name, "run").arguments
            assert host["actor_addr"] == f"10.0.0.{index + 1}:21001"
            assert (config.replica, config.replicas) == (index, 2)
            assert (config.clock_addr, config.clock_port) == ("10.0.0.1", "21003")
            assert config.jax.coordinator_address == "10.0.0.1:21004"
        run.call(GANG[3], "place").answer(place("10.0.0.9"))
        _, _, config, host, _ = run.call(GANG[3], "run").arguments
        assert config.replica == 1
        assert (host["actor_addr"], host["env_offset"]) == ("10.0.0.2:21001", 2)


def test_a_run_ends_when_all_its_heads_have(tmp_path):
    with Run(tmp_path, "--replicas", "2") as run:
        first, second = run.begin_gang()
        run.stop.set()
        for name in HEADS:
            run.call(name, "stop")
        second.answer(Outcome(0))
        assert run.ray.call(GANG[0], "stop") is None
        first.answer(Outcome(0))
        assert run.end() == Outcome(0)


def test_all_heads_start_again_when_one_is_lost(tmp_path):
    with Run(tmp_path, "--replicas", "2") as run:
        calls, before = run.begin_gang(), [run.ray.newest(name) for name in HEADS]
        calls[1].fail("gone")
        for name, actor in zip(HEADS, before):
            wait_until(lambda name=name, actor=actor: run.ray.newest(name) is not actor)
            assert actor.killed
        for name in GANG:
            run.call(name, "stop")
        for index, name in enumerate(HEADS):
            run.call(name, "place").answer(place(f"10.0.0.{index + 5}"))
        _, program, config, *_ = run.call(HEADS[1], "run").arguments
        assert program.keywords["patience"] > 0
        assert config.clock_addr == "10.0.0.5"


@pytest.mark.parametrize("code", [1, 2])
def test_the_reason_of_a_head_counts_and_not_that_others_left_it(tmp_path, code):
    with Run(tmp_path, "--replicas", "2") as run:
        first, second = run.begin_gang()
        first.answer(Outcome(EXIT_START_AGAIN, ("Replica 1 has failed.",)))
        second.answer(Outcome(code, ("why",)))
        assert run.end() == Outcome(code, ("why",))


def test_heads_that_were_left_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_driver, "REASON_SECONDS", 0.1)
    with Run(tmp_path, "--replicas", "2") as run:
        first, _ = run.begin_gang()
        before = run.ray.newest(HEADS[1])
        first.answer(Outcome(EXIT_START_AGAIN, ("Replica 1 is gone.",)))
        wait_until(lambda: run.ray.newest(HEADS[1]) is not before)
        assert before.killed


def test_heads_that_train_together_need_one_logdir(tmp_path):
    with Run(tmp_path, "--replicas", "2", trusted=True) as run:
        run.call(HEADS[1], "place").answer(place("10.0.0.2", sees=False))
        outcome = run.end()
        assert outcome.code == 1
        assert "The head 1 cannot train with the others" in outcome.problems[0]


def test_losses_are_explained_by_their_cause():
    unavailable = type("ActorUnavailableError", (Exception,), {})("RpcError: 14")
    assert explain_loss(unavailable) == "its node or its process cannot be reached"
    assert explain_loss(Exception("The actor died:\n  its node has died.\n")) == (
        "its node has died"
    )
    assert explain_loss(types.SimpleNamespace()) != ""
