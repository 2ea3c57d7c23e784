"""Wrappers: what agents see and do fits, and what does not fit is explained."""

from __future__ import annotations

import pickle
import threading

import elements
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embodied
from embodied import Space, wrappers
from embodied.wrappers import SpaceError

RESET = {"reset": True}
STANDARD = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}


class Script(embodied.Env):
    """Plays back observations: each step returns the next of the `values`."""

    def __init__(self, obs_space=None, values=(), act_space=None, length=1000):
        self.obs_space = {**STANDARD, **(obs_space or {})}
        self.act_space = {"reset": Space(bool), **(act_space or {})}
        self.values = list(values)
        self.length = length
        self.actions = []
        self.steps = 0
        self.count = 0
        self.closes = 0

    obs_space = act_space = None  # Plain attributes, as users' environments may have.

    def step(self, action):
        self.actions.append(action)
        self.count = 0 if action["reset"] else self.count + 1
        obs = {
            "reward": np.float32(self.count),
            "is_first": np.bool_(self.count == 0),
            "is_last": np.bool_(self.count >= self.length),
            "is_terminal": np.bool_(self.count >= self.length),
        }
        if self.values:
            obs.update(self.values[self.steps % len(self.values)])
        self.steps += 1
        return obs

    def close(self):
        self.closes += 1


def returning(space, value):
    return Script({"x": space}, [{"x": value}])


def taking(space):
    return Script(act_space={"act": space})


def act(value):
    return {"reset": False, "act": value}


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


class TestClipAction:
    @given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
    def test_values_are_moved_to_the_nearest_in_range(self, values):
        env = wrappers.ClipAction(taking(Space(np.float32, 2)), "act")
        env.step(act(np.array(values, np.float32)))
        expected = [min(max(value, -1), 1) for value in values]
        np.testing.assert_array_equal(env.env.actions[0]["act"], expected)
        assert env.env.actions[0]["act"] in env.act_space["act"]

    def test_bounds_of_the_space_hold_too(self):
        env = wrappers.ClipAction(taking(Space(np.float32, 2, [0, -5], np.inf)), "act")
        env.step(act(np.float32([-3, -3])))
        np.testing.assert_array_equal(env.env.actions[0]["act"], [0, -1])
        assert env.act_space["act"] == Space(np.float32, 2, [0, -1], 1)

    def test_the_callers_action_is_not_changed(self):
        action = act(np.float32([5, 5]))
        env = wrappers.ClipAction(taking(Space(np.float32, 2)), "act")
        env.step(action)
        np.testing.assert_array_equal(action["act"], [5, 5])

    def test_bounds_with_nothing_in_common(self):
        with pytest.raises(SpaceError, match=r"'act' of env Script.*in common"):
            wrappers.ClipAction(taking(Space(np.float32, 2, 5, np.inf)), "act")

    @pytest.mark.parametrize(
        ("key", "error"), [("act", SpaceError), ("nothing", KeyError)]
    )
    def test_only_continuous_actions(self, key, error):
        with pytest.raises(error, match=key):
            wrappers.ClipAction(taking(Space(np.int32, (), 0, 3)), key)

    @pytest.mark.parametrize("value", [np.zeros(3, np.float32), np.array(["a", "b"])])
    def test_wrong_shape_or_type(self, value):
        env = wrappers.ClipAction(taking(Space(np.float32, 2)), "act")
        with pytest.raises(SpaceError, match=r"expected Space\(float32, shape=\(2,\)"):
            env.step(act(value))


class TestNormalizeAction:
    def test_scales_to_finite_bounds_and_passes_the_rest(self):
        space = Space(np.float32, 3, [0, -np.inf, 2], [10, np.inf, np.inf])
        env = wrappers.NormalizeAction(taking(space), "act")
        seen = env.act_space["act"]
        np.testing.assert_array_equal(seen.low, [-1, -np.inf, 2])
        np.testing.assert_array_equal(seen.high, [1, np.inf, np.inf])
        for value, expected in [
            ([-1, -7, 3], [0, -7, 3]),
            ([1, 7, 4], [10, 7, 4]),
            ([0, 0.5, 5], [5, 0.5, 5]),
        ]:
            env.step(act(np.float32(value)))
            np.testing.assert_allclose(env.env.actions[-1]["act"], expected)

    @given(
        st.floats(-1e6, 1e6),
        st.floats(0, 1e6),
        st.floats(-1, 1, width=32),
        st.sampled_from([np.float32, np.float64]),
    )
    def test_what_is_in_range_stays_in_range(self, low, spread, value, dtype):
        space = Space(dtype, (), low, low + spread)
        env = wrappers.NormalizeAction(taking(space), "act")
        env.step(act(dtype(value)))
        assert env.env.actions[0]["act"] in space

    def test_what_is_out_of_range_stays_out_of_range(self):
        env = wrappers.NormalizeAction(taking(Space(np.float32, (), 0, 10)), "act")
        env.step(act(np.float32(2)))
        assert env.env.actions[0]["act"] == 15

    def test_bounds_at_the_end_of_float32_are_none(self):
        limit = float(np.finfo(np.float32).max)
        space = Space(np.float64, (), -limit, limit)
        env = wrappers.NormalizeAction(taking(space), "act")
        env.step(act(np.float64(0.5)))
        assert env.env.actions[0]["act"] == 0.5


class TestDiscretizeAction:
    def test_offers_evenly_spaced_values(self):
        space = Space(np.float64, 2, [-1, 0], [1, 10])
        env = wrappers.DiscretizeAction(taking(space), "act", 5)
        assert env.act_space["act"] == Space(np.int32, 2, 0, 5)
        env.step(act(np.int32([0, 4])))
        env.step(act(np.int32([2, 1])))
        first, second = (action["act"] for action in env.env.actions)
        np.testing.assert_allclose(first, [-1, 10])
        np.testing.assert_allclose(second, [0, 2.5])
        assert first.dtype == np.float64

    def test_scalars(self):
        env = wrappers.DiscretizeAction(taking(Space(np.float32, (), 0, 1)), "act", 3)
        env.step(act(np.int32(1)))
        assert env.env.actions[0]["act"] == 0.5

    @pytest.mark.parametrize("index", [-1, 3])
    def test_index_out_of_range(self, index):
        env = wrappers.DiscretizeAction(taking(Space(np.float32, (), 0, 1)), "act", 3)
        with pytest.raises(SpaceError, match="one of the 3 bins"):
            env.step(act(np.int32(index)))

    def test_needs_finite_bounds_and_bins(self):
        with pytest.raises(SpaceError, match="finite bounds"):
            wrappers.DiscretizeAction(taking(Space(np.float32, 2)), "act", 3)
        with pytest.raises(ValueError, match="at least 2 bins, got 1"):
            wrappers.DiscretizeAction(taking(Space(np.float32, 2, 0, 1)), "act", 1)


class TestUnifyDtypes:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (Space(np.float64, 2), Space(np.float32, 2)),
            (Space(np.float16, 2, 0, 1), Space(np.float32, 2, 0, 1)),
            (Space(np.float64, (), -1e300, 1e300), Space(np.float32)),
            (Space(np.int64, (), 0, 9), Space(np.int32, (), 0, 9)),
            (Space(np.int64), Space(np.int32)),
            (Space(np.uint64), Space(np.int32, (), 0)),
            (Space(np.int8), Space(np.int32, (), -128, 128)),
            # A high at the end of the dtype admits that end.
            (Space(np.uint16, (), 0, 65535), Space(np.int32, (), 0, 65536)),
            (Space(np.uint8, (4, 4, 3)), Space(np.uint8, (4, 4, 3))),
            (Space(bool), Space(bool)),
        ],
    )
    def test_spaces(self, before, after):
        env = wrappers.UnifyDtypes(Script({"x": before}, act_space={"act": before}))
        assert env.obs_space["x"] == after
        assert env.act_space["act"] == after

    @settings(max_examples=50)
    @given(
        st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "u1", "u2", "?"]),
        st.integers(0, 999),
    )
    def test_observations_and_actions_fit_on_both_sides(self, dtype, seed):
        space = Space(dtype, (2, 3))
        value = space.sample(seed)
        inner = Script({"x": space}, [{"x": value}], {"act": space})
        env = wrappers.UnifyDtypes(inner)
        obs = env.step(RESET)
        assert obs["x"] in env.obs_space["x"]
        np.testing.assert_allclose(obs["x"], value, rtol=1e-6)
        action = env.act_space["act"].sample(seed)
        if dtype == "f2":
            action = action.astype(np.float16).astype(np.float32)
        env.step(act(action))
        assert inner.actions[-1]["act"] in space
        np.testing.assert_array_equal(inner.actions[-1]["act"], action)

    @pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**62])
    def test_integers_that_do_not_fit(self, value):
        env = wrappers.UnifyDtypes(returning(Space(np.int64), np.int64(value)))
        with pytest.raises(SpaceError, match=f"'x' of env Script.*int32.*{value}"):
            env.step(RESET)

    def test_actions_that_do_not_fit(self):
        env = wrappers.UnifyDtypes(taking(Space(np.int8)))
        with pytest.raises(SpaceError, match=r"'act' of env Script.*int8.*300"):
            env.step(act(np.int32(300)))

    def test_bounds_out_of_reach(self):
        with pytest.raises(SpaceError, match="Count from zero"):
            wrappers.UnifyDtypes(Script({"x": Space(np.int64, (), 2**40, 2**41)}))

    def test_actions_are_not_rounded_over_a_bound(self):
        space = Space(np.float64, (), -np.inf, 0.1)
        env = wrappers.UnifyDtypes(taking(space))
        env.step(act(env.act_space["act"].high.astype(np.float32)[()]))
        assert float(np.float32(0.1)) > 0.1
        assert env.env.actions[0]["act"] in space

    def test_strings(self):
        with pytest.raises(SpaceError, match=r"'x'.*Encode strings"):
            wrappers.UnifyDtypes(Script({"x": Space(str)}))


class TestResizeImage:
    @pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
    def test_resizes_any_number_of_channels(self, channels):
        left = np.zeros((8, 6, channels), np.uint8)
        left[:, :3] = 10 * (1 + np.arange(channels))
        env = returning(Space(np.uint8, left.shape), left)
        env = wrappers.ResizeImage(env, (16, 32))
        image = env.step(RESET)["x"]
        assert image in env.obs_space["x"]
        assert image.shape == (16, 32, channels)
        np.testing.assert_array_equal(image[0, 0], 10 * (1 + np.arange(channels)))
        np.testing.assert_array_equal(image[-1, -1], np.zeros(channels))

    def test_only_matching_images(self):
        spaces = {
            key: Space(np.uint8, (8, 8, 3)) for key in ("image", "image_2", "map")
        }
        spaces["vector"] = Space(np.float32, (8, 8, 3))
        env = wrappers.ResizeImage(Script(spaces), (4, 4), "image.*|vector")
        sizes = {key: env.obs_space[key].shape[0] for key in spaces}
        assert sizes == {"image": 4, "image_2": 4, "map": 8, "vector": 8}

    def test_images_of_the_right_size_are_left_alone(self):
        image = np.zeros((8, 8, 3), np.uint8)
        env = wrappers.ResizeImage(returning(Space(np.uint8, (8, 8, 3)), image), (8, 8))
        assert env.step(RESET)["x"] is image

    def test_pattern_without_a_match(self):
        env = returning(Space(np.uint8, (8, 8, 3)), None)
        with pytest.raises(SpaceError, match=r"'y'.*images \['x'\]"):
            wrappers.ResizeImage(env, (4, 4), "y")


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
        with pytest.raises(SpaceError, match="other spaces after a restart"):
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
