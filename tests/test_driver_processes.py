"""Tests environments in processes of their own, which may be killed, hang or exit."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from driver_testing import Moves, children, collect, env_factory

from embodied.driver import Driver, EnvError


class TestProcesses:
    def test_each_env_has_its_own_process_and_all_end_with_the_driver(self):
        before = children()
        policy = Moves()
        with Driver([env_factory()] * 2) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            driver(policy, steps=2)
            pids = {trace[0]["pid"].item() for trace in transitions.values()}
            assert len(pids) == 2
            assert pids == set(children()) - set(before)
        assert children() == before

    def test_all_envs_step_at_the_same_time(self, tmp_path):
        names = [tmp_path / name for name in "ab"]
        for name in names:
            os.mkfifo(name)

        # Opening one end of a pipe waits until the other end is opened, so the first
        # step can only complete if both envs are in it at the same time.
        def meet(path, flags):
            def fail(env):
                if env.episode < 0:
                    for name in path:
                        os.close(os.open(name, flags))

            return fail

        envs = [
            env_factory(fail=meet([str(x) for x in names], os.O_RDONLY)),
            env_factory(fail=meet([str(x) for x in names], os.O_WRONLY)),
        ]
        policy = Moves()
        with Driver(envs, timeout=60) as driver:
            driver.reset(policy.init)
            driver(policy, steps=4)
        assert len(policy.seen) == 2

    def test_an_env_that_is_killed_between_steps(self):
        policy = Moves()
        before = children()
        driver = Driver([env_factory()] * 2)
        transitions = collect(driver)
        driver.reset(policy.init)
        driver(policy, steps=2)
        pid = transitions[1][0]["pid"].item()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvError, match="Env 1 was killed by SIGKILL") as caught:
            driver(policy, steps=100)
        assert caught.value.index == 1
        assert children() == before

    def test_an_env_that_dies_in_a_step(self):
        def die(env):
            if env.count == 1:
                os.kill(os.getpid(), signal.SIGSEGV)

        policy = Moves()
        driver = Driver([env_factory(fail=die)])
        driver.reset(policy.init)
        with pytest.raises(EnvError, match="Env 0 was killed by SIGSEGV"):
            driver(policy, steps=100)

    def test_an_env_that_leaves_quietly(self):
        policy = Moves()
        driver = Driver([env_factory(fail=lambda env: os._exit(0))])
        driver.reset(policy.init)
        with pytest.raises(EnvError, match=r"Env 0 closed its connection .*: 0\."):
            driver(policy, steps=1)

    def test_an_env_that_hangs_is_ended_after_the_timeout(self):
        def hang(env):
            if env.count == 1:
                threading.Event().wait()

        policy = Moves()
        before = children()
        # Long enough for the child to start on a busy machine.
        with Driver([env_factory(), env_factory(fail=hang)], timeout=15) as driver:
            driver.reset(policy.init)
            begin = time.monotonic()
            with pytest.raises(EnvError, match="Env 1 did not answer within 15 s"):
                driver(policy, steps=100)
        assert 14 < time.monotonic() - begin < 60
        assert children() == before

    def test_a_factory_that_cannot_be_sent_fails_at_once(self):
        lock = threading.Lock()
        before = children()
        with pytest.raises(TypeError, match="pickle"):
            Driver([env_factory(), lambda: lock])
        assert children() == before

    def test_large_observations_arrive_whole(self):
        policy = Moves()
        with Driver([env_factory(size=1_000_000)] * 2) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            driver(policy, steps=4)
        assert (transitions[1][1]["vector"] == 1).all()
        assert transitions[1][1]["vector"].shape == (1_000_000,)

    @pytest.mark.slow
    def test_killing_envs_at_random_never_hangs(self):
        rng = np.random.default_rng(0)
        for _ in range(50):
            policy = Moves()
            before = children()
            driver = Driver([env_factory()] * 2, timeout=60)
            driver.reset(policy.init)
            victim = int(rng.choice([pid for pid in children() if pid not in before]))
            delay = float(rng.uniform(0, 0.05))
            killer = threading.Timer(delay, os.kill, (victim, signal.SIGKILL))
            killer.start()
            with pytest.raises(EnvError, match="was killed by SIGKILL"):
                driver(policy, steps=10**9)
            killer.join()
            assert children() == before
