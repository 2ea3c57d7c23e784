"""Wrappers that change when episodes begin and end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from wrapper_testing import RESET, Script

from embodied import Env, Space, wrappers
from embodied.envs.keys import SIGNALS, signals
from embodied.wrappers import AddFrames, NotRenderable, SpaceError


class TestTimeLimit:
    def test_ends_episodes_without_calling_them_terminal(self):
        env = wrappers.TimeLimit(Script(), 3)
        ends = [env.step(RESET)["is_last"]]
        ends += [env.step({"reset": False})["is_last"] for _ in range(3)]
        assert ends == [False, False, False, True]
        assert not env.step(RESET)["is_terminal"]

    def test_the_environments_own_end_stays(self):
        env = wrappers.TimeLimit(Script(length=2), 2)
        env.step(RESET)
        env.step({"reset": False})
        obs = env.step({"reset": False})
        assert obs["is_last"]
        assert obs["is_terminal"]

    def test_counts_anew_in_every_episode(self):
        env = wrappers.TimeLimit(Script(), 3)
        for _ in range(3):
            env.step(RESET)
            assert not env.step({"reset": False})["is_last"]

    def test_zero_is_no_limit(self):
        env = wrappers.TimeLimit(Script(), 0)
        env.step(RESET)
        assert not any(env.step({"reset": False})["is_last"] for _ in range(50))

    def test_without_reset_the_world_goes_on(self):
        inner = Script(
            {"x": Space(np.float32)}, [{"x": np.float32(i)} for i in range(9)]
        )
        env = wrappers.TimeLimit(inner, 2, reset=False)
        env.step(RESET)
        env.step({"reset": False})
        last = env.step({"reset": False})
        first = env.step(RESET)
        assert last["is_last"]
        assert first["is_first"]
        assert not first["is_last"]
        assert first["reward"] == 0
        assert first["x"] == last["x"] == 2
        assert env.step({"reset": False})["x"] == 3
        assert [action["reset"] for action in inner.actions] == [True] + [False] * 3

    def test_without_reset_an_environment_that_ended_is_reset(self):
        env = wrappers.TimeLimit(Script(length=1), 5, reset=False)
        env.step(RESET)
        assert env.step({"reset": False})["is_last"]
        assert env.step(RESET)["is_first"]
        assert env.env.actions[-1]["reset"]

    def test_negative_duration(self):
        with pytest.raises(ValueError, match="got -1"):
            wrappers.TimeLimit(Script(), -1)


class TestActionRepeat:
    def test_sums_rewards(self):
        env = wrappers.ActionRepeat(Script(), 3)
        assert env.step(RESET)["reward"] == 0
        assert env.env.steps == 1
        obs = env.step({"reset": False})
        assert obs["reward"] == 1 + 2 + 3
        assert obs["reward"].dtype == np.float32

    def test_stops_at_the_end(self):
        env = wrappers.ActionRepeat(Script(length=2), 5)
        env.step(RESET)
        obs = env.step({"reset": False})
        assert obs["is_last"]
        assert obs["reward"] == 1 + 2

    def test_says_how_many_steps_an_action_takes(self):
        env = wrappers.TimeLimit(wrappers.ActionRepeat(Script(), 2), 10)
        assert env.repeat == 2
        assert wrappers.ActionRepeat(env, 3).repeat == 6

    def test_repeat_of_zero(self):
        with pytest.raises(ValueError, match="at least 1, got 0"):
            wrappers.ActionRepeat(Script(), 0)


class Fragile(Script):
    """Fails at the given steps, counted over all instances of one `log`."""

    def __init__(self, log, failures, **kwargs):
        super().__init__(**kwargs)
        self.log = log
        self.failures = failures
        log.append("made")

    def step(self, action):
        self.log.append("step")
        if self.log.count("step") in self.failures:
            raise OSError(f"failed at {self.log.count('step')}")
        return super().step(action)

    def close(self):
        self.log.append("closed")


class TestRestartOnException:
    def restarting(self, failures, log=None, **kwargs):
        log = [] if log is None else log
        options = {"wait": 0, "window": 100, "maxfails": 2, **kwargs}
        return wrappers.RestartOnException(lambda: Fragile(log, failures), **options)

    def test_goes_on_with_the_first_observation_of_a_new_episode(self):
        log = []
        env = self.restarting({3}, log)
        env.step(RESET)
        assert env.step({"reset": False})["reward"] == 1
        obs = env.step({"reset": False})
        assert obs["is_first"]
        assert obs["reward"] == 0
        assert not obs["is_last"]
        assert env.step({"reset": False})["reward"] == 1
        assert log == ["made", "step", "step", "step", "closed", "made", "step", "step"]

    def test_an_action_repeat_does_not_carry_reward_into_the_new_episode(self):
        env = wrappers.ActionRepeat(self.restarting({4}), 3)
        env.step(RESET)
        obs = env.step({"reset": False})
        assert obs["is_first"]
        assert obs["reward"] == 0

    def test_a_time_limit_counts_anew(self):
        env = wrappers.TimeLimit(self.restarting({3}), 2)
        env.step(RESET)
        env.step({"reset": False})
        assert env.step({"reset": False})["is_first"]
        assert not env.step({"reset": False})["is_last"]
        assert env.step({"reset": False})["is_last"]

    def test_gives_up_after_too_many_failures_in_the_window(self):
        env = self.restarting({2, 3, 4})
        env.step(RESET)
        with pytest.raises(OSError, match="failed at 4"):
            env.step({"reset": False})

    def test_failures_before_the_window_do_not_count(self):
        now = [0.0]
        env = self.restarting({2, 4, 6}, maxfails=1, window=10, clock=lambda: now[0])
        env.step(RESET)
        assert env.step({"reset": False})["is_first"]
        now[0] = 11
        assert env.step({"reset": False})["is_first"]
        now[0] = 20
        with pytest.raises(OSError, match="failed at 6"):
            env.step({"reset": False})

    def test_other_exceptions_pass(self):
        env = self.restarting({2}, exceptions=(ValueError,))
        env.step(RESET)
        with pytest.raises(OSError, match="failed at 2"):
            env.step({"reset": False})

    def test_an_environment_that_cannot_be_made_at_first_is_an_error(self):
        def fail():
            raise OSError("no display")

        with pytest.raises(OSError, match="no display"):
            wrappers.RestartOnException(fail, wait=0)

    def test_a_failing_close_does_not_prevent_the_restart(self, monkeypatch):
        env = self.restarting({2})
        env.step(RESET)

        def fail():
            raise OSError("cannot close")

        monkeypatch.setattr(env.env, "close", fail)
        assert env.step({"reset": False})["is_first"]

    def test_other_spaces_after_the_restart_are_an_error(self):
        made = []

        def make_env():
            made.append(0)
            space = {"x": Space(np.float32, len(made))}
            value = {"x": np.zeros(len(made), np.float32)}
            return Fragile(made, set(), obs_space=space, values=[value])

        env = wrappers.RestartOnException(make_env, wait=0)
        env.env.failures = {1}
        with pytest.raises(SpaceError, match="different spaces after a restart"):
            env.step(RESET)

    def test_close_ends_a_wait(self):
        failing = threading.Event()

        def clock():
            failing.set()
            return 0.0

        env = self.restarting({1}, wait=3600, clock=clock)
        errors = []

        def run():
            try:
                env.step(RESET)
            except OSError as error:
                errors.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        assert failing.wait(10)
        env.close()
        thread.join(10)
        assert not thread.is_alive()
        assert errors == ["failed at 1"]


class Drawn(Env):
    """Counts steps and resets, and draws the count."""

    def __init__(self, frame=(40, 60, 3)):
        self.count, self.resets, self.shape = 0, 0, frame

    @property
    def obs_space(self):
        return {"count": Space(np.int32), **SIGNALS}

    @property
    def act_space(self):
        return {"reset": Space(bool), "action": Space(np.int32, (), 0, 2)}

    def step(self, action):
        self.resets += bool(action["reset"])
        self.count = 0 if action["reset"] else self.count + 1
        return {"count": np.int32(self.count), **signals(0.0, self.count == 0)}

    def render(self):
        return np.full(self.shape, self.count, np.uint8)


class TestAddFrames:
    def test_each_step_has_its_frame_and_no_reset_is_lost(self):
        inner = Drawn()
        env = AddFrames(inner)
        assert env.obs_space["log/frame"] == Space(np.uint8, (40, 60, 3))
        for count, reset in enumerate((True, False, False)):
            obs = env.step({"reset": reset, "action": np.int32(0)})
            assert obs["count"] == count
            assert (obs["log/frame"] == count).all()
        assert inner.resets == 1
        env.step({"reset": True, "action": np.int32(0)})
        assert inner.resets == 2

    def test_large_frames_are_made_smaller(self):
        env = AddFrames(Drawn((320, 640, 3)))
        assert env.obs_space["log/frame"].shape == (160, 320, 3)
        assert env.step({"reset": True})["log/frame"].shape == (160, 320, 3)

    def test_others_than_the_first_are_black(self):
        env = AddFrames(Drawn(), active=False)
        env.step({"reset": True})
        frame = env.step({"reset": False, "action": np.int32(0)})["log/frame"]
        assert frame.shape == (40, 60, 3)
        assert not frame.any()

    def test_what_cannot_be_drawn_is_refused(self):
        with pytest.raises(NotRenderable, match="render returned"):
            AddFrames(Drawn((4, 4)))
        plain = Drawn()
        plain.render = None
        with pytest.raises(NotRenderable, match="TypeError"):
            AddFrames(plain)
