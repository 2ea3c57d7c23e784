"""Errors explain values that do not fit their spaces, also in wrapped environments."""

from __future__ import annotations

import pickle

import elements
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wrapper_testing import RESET, STANDARD, Script, act, returning, taking

from embodied import Space, wrappers
from embodied.wrappers import SpaceError


class TestWrapper:
    def test_passes_everything_on(self):
        env = Script()
        env.task = "walk"
        wrapped = wrappers.Wrapper(wrappers.Wrapper(env))
        assert wrapped.task == "walk"
        assert wrapped.step(RESET)["is_first"]
        assert wrapped.obs_space == env.obs_space
        wrapped.close()
        assert env.closes == 1

    def test_unknown_attributes_are_errors(self):
        with pytest.raises(AttributeError, match="nothing"):
            _ = wrappers.Wrapper(Script()).nothing

    def test_can_be_pickled(self):
        env = pickle.loads(pickle.dumps(wrappers.wrap(taking(Space(np.float32, 2)))))
        assert env.step(RESET)["is_first"]

    def test_takes_spaces_of_elements(self):
        env = Script()
        env.obs_space = {
            "x": elements.Space(np.float64, (2,), -1, 1),
            "reward": elements.Space(np.float32),
            **{key: elements.Space(bool) for key in STANDARD if key != "reward"},
        }
        env.act_space = {
            "reset": elements.Space(bool),
            "act": elements.Space(np.int32, (), 0, 4),
        }
        env.values = [{"x": np.zeros(2)}]
        wrapped = wrappers.wrap(env)
        assert wrapped.obs_space["x"] == Space(np.float32, 2, -1, 1)
        assert wrapped.act_space["act"] == Space(np.int32, (), 0, 4)
        assert wrapped.step(RESET)["x"].dtype == np.float32


class TestCheckSpaces:
    def check(self, space, value, **kwargs):
        return wrappers.CheckSpaces(returning(space, value), **kwargs).step(RESET)["x"]

    @pytest.mark.parametrize(
        ("space", "value"),
        [
            (Space(np.float32, 2, 0, 1), np.float32([0, 1])),
            (Space(np.float32, 2, 0, 1), np.float32([-np.inf, 1])),
            (Space(np.float32), np.float32(-np.inf)),
            (Space(np.int32, (), 0, 4), np.int32(-1)),
            (Space(np.int32, 2, 2, 4), np.int32([-1, 3])),
            (Space(np.uint8, 2, 0, 255), np.uint8([0, 255])),
            (Space(bool), np.bool_(True)),
            (Space(np.float32, 2), np.float32([1e38, -1e38])),
        ],
    )
    def test_good_values_and_markers_of_missing_ones_pass(self, space, value):
        assert np.array_equal(self.check(space, value), value)

    @pytest.mark.parametrize(
        ("space", "value"),
        [
            (Space(np.float32), 1.5),
            (Space(np.float32), 2),
            (Space(np.int32, (), 0, 4), 3),
            (Space(bool), True),
        ],
    )
    def test_plain_numbers_get_the_declared_dtype(self, space, value):
        checked = self.check(space, value)
        assert checked in space
        assert checked == value

    @pytest.mark.parametrize(
        ("space", "value", "advice"),
        [
            (Space(np.float32, 2), np.zeros(2), "float64.*Convert it to float32"),
            (Space(np.float32, 2), [0.0, 0.0], "Convert it to float32"),
            (Space(np.float32, 2), None, "NoneType None.*Convert it"),
            (Space(np.int32), np.float32(1), "Convert it to int32"),
            (Space(np.int32), 1.0, "Convert it to int32"),
            (Space(np.int32), True, "Convert it to int32"),
            (Space(np.uint8), 256, "Convert it to uint8"),
            (Space(bool), 1, "Convert it to bool"),
            (Space(np.float32, 2), np.zeros(3, np.float32), "Give it the shape"),
            (Space(np.float32, 2), np.float32(0), "Give it the shape"),
            (Space(np.float32, 2), np.float32([0, np.nan]), "nan.*must be finite"),
            (Space(np.float32), np.float32(np.nan), "must be finite"),
            (Space(np.float32), float("nan"), "must be finite"),
            (Space(np.float32), 1e300, "must be finite"),
            (Space(np.float32, 2), np.float32([0, np.inf]), "must be finite"),
            (Space(np.float32, 2, 0, 1), np.float32([0, 1.1]), "declare wider ones"),
            (Space(np.float32, (), 0, 1), np.float32(-0.1), "declare wider ones"),
            (Space(np.float32, 2, 0, 1), np.float32([-np.inf, 2]), "declare wider"),
            (Space(np.int32, (), 0, 4), np.int32(4), "declare wider ones"),
            (Space(np.int32, (), 0, 4), np.int32(-2), "declare wider ones"),
            (Space(np.int32, 2, 0, 4), np.int32([-1, 4]), "declare wider ones"),
            (Space(np.uint8, (), 0, 4), np.uint8(9), "declare wider ones"),
        ],
    )
    def test_bad_observations_are_explained(self, space, value, advice):
        with pytest.raises(
            SpaceError, match=r"Observation 'x' of env Script: expected Space\("
        ) as info:
            self.check(space, value)
        assert info.match(advice)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_nonfinite_values_can_be_let_through(self, value):
        space = Space(np.float32, 2, 0, 1)
        array = np.float32([value, 0.5])
        checked = self.check(space, array, nonfinite="pass")
        np.testing.assert_array_equal(checked, array)
        with pytest.raises(SpaceError, match="declare wider ones"):
            self.check(space, np.float32([value, 2]), nonfinite="pass")
        with pytest.raises(ValueError, match="'raise' or 'pass', got 'ignore'"):
            wrappers.CheckSpaces(Script(), nonfinite="ignore")

    def test_a_reward_is_never_missing(self):
        env = wrappers.CheckSpaces(Script({}, [{"reward": np.float32(-np.inf)}]))
        with pytest.raises(SpaceError, match=r"'reward'.*finite"):
            env.step(RESET)

    def test_logged_values_are_free(self):
        space, value = Space(np.float32, (), 0, 1), np.float32(np.nan)
        env = wrappers.CheckSpaces(Script({"log/x": space}, [{"log/x": value}]))
        assert np.isnan(env.step(RESET)["log/x"])

    def test_missing_key(self):
        env = wrappers.CheckSpaces(Script({"x": Space(np.float32)}))
        with pytest.raises(SpaceError, match=r"'x' of env Script.*no such key"):
            env.step(RESET)

    def test_extra_key(self):
        env = wrappers.CheckSpaces(Script({}, [{"surprise": np.float32(1)}]))
        with pytest.raises(SpaceError, match=r"'surprise'.*Declare its space"):
            env.step(RESET)

    def test_not_a_dict(self):
        env = Script()
        env.step = lambda action: (np.zeros(3), 0.0)
        with pytest.raises(SpaceError, match=r"dict of arrays.*got tuple"):
            wrappers.CheckSpaces(env).step(RESET)

    @pytest.mark.parametrize("key", STANDARD)
    @pytest.mark.parametrize("space", [None, Space(np.int32), Space(np.float32, 2)])
    def test_standard_keys_must_be_declared(self, key, space):
        env = Script()
        env.obs_space = {**STANDARD, key: space}
        if space is None:
            del env.obs_space[key]
        with pytest.raises(SpaceError, match=f"'{key}'.*Declare it in obs_space"):
            wrappers.CheckSpaces(env)

    def test_reset_must_be_declared(self):
        env = Script()
        env.act_space = {}
        with pytest.raises(SpaceError, match=r"'reset'.*Declare it in act_space"):
            wrappers.CheckSpaces(env)

    @pytest.mark.parametrize(
        ("space", "value"),
        [
            (Space(np.int32, (), 0, 4), np.int32(4)),
            (Space(np.int32, (), 0, 4), np.int32(-1)),
            (Space(np.int32, (), 0, 4), np.int64(1)),
            (Space(np.int32, (), 0, 4), np.int32([1])),
            (Space(np.float32, 2, -1, 1), np.float32([0, 1.01])),
            (Space(np.float32, 2, -1, 1), np.float32([0, np.nan])),
            (Space(np.float32, 2), np.float32([0, -np.inf])),
        ],
    )
    @pytest.mark.parametrize("nonfinite", ["raise", "pass"])
    def test_bad_actions_never_reach_the_environment(self, space, value, nonfinite):
        env = wrappers.CheckSpaces(taking(space), nonfinite)
        with pytest.raises(SpaceError, match=r"Action 'act' of env Script: expected"):
            env.step(act(value))
        assert env.env.actions == []

    def test_missing_and_extra_actions(self):
        env = wrappers.CheckSpaces(taking(Space(np.int32, (), 0, 4)))
        with pytest.raises(SpaceError, match=r"'act'.*no such key"):
            env.step({"reset": False})
        with pytest.raises(SpaceError, match=r"'reset'.*no such key"):
            env.step({"act": np.int32(0)})
        with pytest.raises(SpaceError, match=r"'other'.*leave it out"):
            env.step({**act(np.int32(0)), "other": 1})

    def test_actions_of_a_reset_are_ignored(self):
        env = wrappers.CheckSpaces(taking(Space(np.int32, (), 0, 4)))
        assert env.step({"reset": True, "act": np.float64(99)})["is_first"]
        assert env.step(RESET)["is_first"]


class TestWrap:
    def test_agents_see_unified_spaces_and_act_in_unit_range(self):
        inner = Script(
            {"x": Space(np.float64, 2, 0, 9)},
            [{"x": np.array([0.1, 9.0])}],
            {
                "steer": Space(np.float64, 2, [-90, -np.inf], [90, np.inf]),
                "gear": Space(np.int64, (), 0, 5),
            },
        )
        env = wrappers.wrap(inner)
        assert env.obs_space["x"] == Space(np.float32, 2, 0, 9)
        assert env.act_space["steer"] == Space(np.float32, 2, -1, 1)
        assert env.act_space["gear"] == Space(np.int32, (), 0, 5)
        env.step(RESET)
        obs = env.step(
            {"reset": False, "steer": np.float32([7, -7]), "gear": np.int32(4)}
        )
        assert obs["x"].dtype == np.float32
        action = inner.actions[-1]
        np.testing.assert_array_equal(action["steer"], [90, -1])
        assert action["steer"].dtype == np.float64
        assert action["gear"].dtype == np.int64

    @settings(max_examples=50)
    @given(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.floats(-100, 100, width=16),
        st.floats(0, 100, width=16),
        st.floats(width=32, allow_nan=False),
    )
    def test_any_action_of_an_agent_is_in_the_space_of_the_env(
        self, dtype, low, spread, value
    ):
        space = Space(dtype, (1,), low, low + spread)
        inner = taking(space)
        wrappers.wrap(inner).step(act(np.float32([value])))
        assert inner.actions[-1]["act"] in space

    @pytest.mark.parametrize(
        ("space", "value", "advice"),
        [
            (Space(np.float32, 2), np.zeros(2), "Convert it to float32"),
            (Space(np.float64, 2), np.array([np.nan, 0]), "finite"),
            (Space(np.float64, 2), np.array([1e300, 0]), "finite"),
            (Space(np.float64, 2), np.array(["0", "1"]), "Convert it to float32"),
            (Space(np.float64, 2), np.array([0, 1]), "Convert it to float32"),
            (Space(np.float64, 2), None, "NoneType None"),
            (Space(np.float64, 2), np.zeros(3), "Give it the shape"),
            (Space(np.int64), 1.0, "Convert it to int32"),
            (Space(np.int64), np.int64(2**40), "integers that fit int32"),
            (Space(np.int64, (), 0, 4), np.int64(4), "declare wider ones"),
        ],
    )
    def test_bad_observations_are_explained(self, space, value, advice):
        env = wrappers.wrap(returning(space, value))
        with pytest.raises(SpaceError, match=f"'x' of env Script.*{advice}"):
            env.step(RESET)

    @pytest.mark.parametrize(
        ("value", "advice"),
        [
            (np.float32([np.nan, 0]), "finite"),
            (np.zeros(2), "Convert it to float32"),
            (np.zeros(3, np.float32), "shape"),
        ],
    )
    def test_bad_actions_are_explained(self, value, advice):
        env = wrappers.wrap(taking(Space(np.float32, 2, 0, 5)))
        with pytest.raises(SpaceError, match=f"'act' of env Script.*{advice}"):
            env.step(act(value))

    def test_out_of_range_discrete_action(self):
        env = wrappers.wrap(taking(Space(np.int64, (), 0, 4)))
        with pytest.raises(SpaceError, match=r"'act'.*low=0, high=4.*\[4\]"):
            env.step(act(np.int32(4)))

    def test_missing_action(self):
        env = wrappers.wrap(taking(Space(np.float32, 2, 0, 5)))
        with pytest.raises(SpaceError, match=r"'act'.*no such key"):
            env.step({"reset": False})

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_an_observation_that_is_no_dict(self, dtype):
        env = returning(Space(dtype), dtype(0))
        env.step = lambda action: (np.zeros(3), 0.0)
        with pytest.raises(SpaceError, match=r"dict of arrays.*got tuple"):
            wrappers.wrap(env).step(RESET)

    def test_exceptions_of_the_environment_pass_unchanged(self):
        env = Script()
        error = RuntimeError("simulator lost")

        def fail(action):
            raise error

        env.step = fail
        with pytest.raises(RuntimeError) as info:
            wrappers.wrap(env).step(RESET)
        assert info.value is error

    def test_nonfinite_observations_can_be_let_through(self):
        env = returning(Space(np.float64, 2), np.array([np.nan, 1]))
        obs = wrappers.wrap(env, nonfinite="pass").step(RESET)
        np.testing.assert_array_equal(obs["x"], np.float32([np.nan, 1]))
