"""Wrappers that convert actions and observations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wrapper_testing import RESET, Script, act, returning, taking

from embodied import Space, wrappers
from embodied.wrappers import SpaceError


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
        with pytest.raises(SpaceError, match=r"'act' of env Script.*overlap"):
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
            # A `high` at the maximum of the dtype includes that maximum.
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
        with pytest.raises(SpaceError, match="Shift the values"):
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

    def test_only_images(self):
        spaces = {key: Space(np.uint8, (8, 8, 3)) for key in ("image", "map")}
        spaces["vector"] = Space(np.float32, (8, 8, 3))
        env = wrappers.ResizeImage(Script(spaces), (4, 4))
        sizes = {key: env.obs_space[key].shape[0] for key in spaces}
        assert sizes == {"image": 4, "map": 4, "vector": 8}

    def test_images_of_the_right_size_are_left_alone(self):
        image = np.zeros((8, 8, 3), np.uint8)
        env = wrappers.ResizeImage(returning(Space(np.uint8, (8, 8, 3)), image), (8, 8))
        assert env.step(RESET)["x"] is image
