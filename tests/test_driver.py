"""Tests the loop of the driver, its counting, and its checks of policies and envs."""

from __future__ import annotations

import numpy as np
import pytest
from driver_testing import Moves, children, collect, env_factory
from hypothesis import given
from hypothesis import strategies as st

from embodied.driver import Driver, EnvError
from embodied.random_agent import RandomAgent

# Other work on the machine must not decide whether a test passes.

both = pytest.mark.parametrize("parallel", [False, True])


@both
class TestLoop:
    def test_transitions_hold_observation_action_and_outputs(self, parallel):
        policy = Moves()
        with Driver([env_factory(3), env_factory(3)], parallel) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            driver(policy, steps=10)
        assert transitions.keys() == {0, 1}
        for trace in transitions.values():
            assert trace[0].keys() == {
                *("vector", "pid", "log/episode", "reward"),
                *("is_first", "is_last", "is_terminal", "move", "calls"),
            }
            columns = {key: [step[key].tolist() for step in trace] for key in trace[0]}
            # Each action answers the observation of its own step. The reward is the
            # previous move, except that a reset ignores the move of the last step.
            assert columns["vector"] == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]
            assert columns["is_first"] == [True, False, False, True, False]
            assert columns["is_last"] == [False, False, True, False, False]
            assert columns["move"] == [1, 2, 3, 4, 0]
            assert columns["reward"] == [0, 1, 2, 0, 4]
            assert columns["calls"] == [10, 20, 30, 40, 50]
            assert columns["log/episode"] == [0, 0, 0, 1, 1]

    def test_the_policy_sees_stacked_observations_without_log_keys(self, parallel):
        policy = Moves()
        with Driver([env_factory()] * 3, parallel, mode="eval") as driver:
            workers = []
            driver.on_step(lambda tran, worker, mode: workers.append((worker, mode)))
            driver.reset(policy.init)
            driver(policy, steps=3)
        ((obs, kwargs),) = policy.seen
        assert obs["vector"].shape == (3, 2)
        assert obs["reward"].dtype == np.float32
        assert obs["is_first"].tolist() == [True] * 3
        assert not [key for key in obs if key.startswith("log/")]
        assert kwargs == {"mode": "eval"}
        assert workers == [(0, "eval"), (1, "eval"), (2, "eval")]

    def test_a_random_agent_drives(self, parallel):
        make_env = env_factory(4)
        agent = RandomAgent(make_env().obs_space, make_env().act_space)
        with Driver([make_env] * 2, parallel) as driver:
            transitions = collect(driver)
            driver.reset(agent.init_policy)
            driver(agent.policy, episodes=3)
        assert sum(step["is_last"] for x in transitions.values() for step in x) == 4

    def test_reset_starts_new_episodes(self, parallel):
        policy = Moves()
        with Driver([env_factory(9)], parallel) as driver:
            transitions = collect(driver)
            for _ in range(2):
                driver.reset(policy.init)
                driver(policy, steps=2)
        assert [step["log/episode"].item() for step in transitions[0]] == [0, 0, 1, 1]
        assert [step["calls"].item() for step in transitions[0]] == [10, 20, 10, 20]

    def test_calls_go_on_where_the_last_one_ended(self, parallel):
        policy = Moves()
        with Driver([env_factory(9)], parallel) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            for _ in range(3):
                driver(policy, steps=1)
        assert [step["calls"].item() for step in transitions[0]] == [10, 20, 30]
        assert [step["vector"][0].item() for step in transitions[0]] == [0, 1, 2]

    def test_closing_closes_the_envs_once(self, parallel, tmp_path):
        path = tmp_path / "closed"
        driver = Driver([env_factory(closed=path)] * 2, parallel)
        driver.close()
        driver.close()
        assert path.read_text() == "closed\n" * 2
        with pytest.raises(RuntimeError, match="driver is closed"):
            driver(Moves(), steps=1)

    def test_an_error_of_the_constructor_names_the_env(self, parallel, tmp_path):
        def broken():
            raise ValueError("no such level")

        path = tmp_path / "closed"
        before = children()
        with pytest.raises(
            EnvError, match="Env 1 failed with ValueError: no such"
        ) as e:
            Driver([env_factory(closed=path), broken], parallel)
        assert e.value.index == 1
        assert children() == before
        if parallel:
            assert "in broken" in str(e.value)
        else:
            assert isinstance(e.value.__cause__, ValueError)
            assert path.exists(), "the other env is closed"

    def test_an_error_in_step_names_the_env_and_closes_the_driver(self, parallel):
        def explode(env):
            if env.count == 1:
                raise KeyError("inside the env")

        policy = Moves()
        before = children()
        driver = Driver([env_factory(), env_factory(fail=explode)], parallel)
        driver.reset(policy.init)
        with pytest.raises(EnvError, match="Env 1 failed with KeyError") as caught:
            driver(policy, steps=100)
        if parallel:
            assert "in explode" in caught.value.traceback
        else:
            assert isinstance(caught.value.__cause__, KeyError)
        assert children() == before
        with pytest.raises(RuntimeError, match="driver is closed"):
            driver(policy, steps=1)
        driver.close()

    def test_an_error_while_closing_is_told_and_the_others_still_close(
        self, parallel, tmp_path
    ):
        missing, path = tmp_path / "none" / "file", tmp_path / "closed"
        before = children()
        driver = Driver(
            [env_factory(closed=missing), env_factory(closed=path)], parallel
        )
        with pytest.raises(EnvError, match="Env 0 failed with FileNotFoundError"):
            driver.close()
        assert path.exists()
        assert children() == before

    def test_envs_with_other_spaces_are_refused(self, parallel):
        with pytest.raises(EnvError, match="Env 1 has other spaces than env 0"):
            Driver([env_factory(size=2), env_factory(size=3)], parallel)

    def test_an_error_of_the_policy_leaves_a_driver_that_can_be_reset(self, parallel):
        def broken(carry, obs):
            raise ZeroDivisionError

        policy = Moves()
        with Driver([env_factory()] * 2, parallel) as driver:
            transitions = collect(driver)
            with pytest.raises(ZeroDivisionError):
                driver(broken, steps=1)
            driver.reset(policy.init)
            driver(policy, steps=4)
        assert [step["is_first"].item() for step in transitions[0]] == [True, False]


class TestCounting:
    @given(
        lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
        steps=st.integers(0, 20),
        episodes=st.integers(0, 5),
    )
    def test_stops_at_the_first_step_at_which_both_are_reached(
        self, lengths, steps, episodes
    ):
        policy = Moves()
        with Driver([env_factory(x) for x in lengths], parallel=False) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            driver(policy, steps=steps, episodes=episodes)
        rounds = len(transitions.get(0, []))

        def reached(rounds):
            ended = sum(rounds // length for length in lengths)
            return rounds * len(lengths) >= steps and ended >= episodes

        assert reached(rounds)
        assert rounds == 0 or not reached(rounds - 1)


class TestChecks:
    def drive(self, policy, make_env=None):
        with Driver([make_env or env_factory()] * 2, parallel=False) as driver:
            driver(policy, steps=1)

    def test_actions_of_other_names(self):
        with pytest.raises(ValueError, match=r"actions \['move'\] .* got \['jump'\]"):
            self.drive(lambda carry, obs: (carry, {"jump": np.zeros(2)}, {}))

    def test_actions_of_another_batch_size(self):
        with pytest.raises(ValueError, match=r"'move' .* shape \[2\], got \[3\]"):
            self.drive(lambda carry, obs: (carry, {"move": np.zeros(3)}, {}))

    def test_outputs_named_like_observations(self):
        outputs = {"reward": np.zeros(2)}
        with pytest.raises(ValueError, match=r"\['reward'\], which are observations"):
            self.drive(lambda carry, obs: (carry, {"move": np.zeros(2)}, outputs))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"vector": np.zeros(3)}, r"Env 0 returned 'vector' of shape \(3,\)"),
            ({"extra": 1}, r"Env 0 returned an observation with keys \['extra'"),
        ],
    )
    def test_observations_that_do_not_fit_their_space(self, change, message):
        def make_env():
            env = env_factory()()
            step = env.step
            env.step = lambda action: {**step(action), **change}
            return env

        with pytest.raises(EnvError, match=message):
            self.drive(Moves(), make_env)

    def test_an_observation_that_is_no_dict(self):
        def make_env():
            env = env_factory()()
            env.step = lambda action: None
            return env

        with pytest.raises(EnvError, match="returned NoneType; expected a dict"):
            self.drive(Moves(), make_env)

    def test_a_key_that_goes_missing_later_names_the_env(self):
        def make_env():
            env = env_factory()()
            step = env.step

            def forget(action):
                obs = step(action)
                if env.count == 1:
                    del obs["vector"]
                return obs

            env.step = forget
            return env

        driver = Driver([env_factory(), make_env], parallel=False)
        policy = Moves()
        driver.reset(policy.init)
        with pytest.raises(EnvError, match="Env 1 returned an observation with keys"):
            driver(policy, steps=10)
        with pytest.raises(RuntimeError, match="driver is closed"):
            driver(policy, steps=1)

    def test_undeclared_log_keys_are_fine(self):
        def make_env():
            env = env_factory()()
            step = env.step
            env.step = lambda action: {**step(action), "log/extra": 7}
            return env

        policy = Moves()
        with Driver([make_env], parallel=False) as driver:
            transitions = collect(driver)
            driver.reset(policy.init)
            driver(policy, steps=1)
        assert transitions[0][0]["log/extra"] == 7

    def test_no_envs(self):
        with pytest.raises(ValueError, match="at least one environment"):
            Driver([])

    @pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
    def test_no_deadline(self, timeout):
        with pytest.raises(ValueError, match="expected a timeout in seconds"):
            Driver([env_factory()], timeout=timeout)

    @pytest.mark.parametrize("kind", ["obs", "act"])
    def test_spaces_without_the_required_keys(self, kind):
        class Bare(env_factory()):
            @property
            def obs_space(self):
                full = super().obs_space
                return full if kind == "act" else {"vector": full["vector"]}

            @property
            def act_space(self):
                full = super().act_space
                return full if kind == "obs" else {"move": full["move"]}

        with pytest.raises(EnvError, match=f"in its {kind}_space"):
            Driver([Bare], parallel=False)
