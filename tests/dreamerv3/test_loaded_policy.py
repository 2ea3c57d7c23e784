"""Tests how a loaded policy checks observations, begins episodes and scales actions."""

import elements
import gymnasium
import numpy as np
import pytest
from agent_testing import OBS_SPACE
from inference_testing import ACT_SPACE, Task

from dreamerv3.policies.inference import ActionConverter, LoadedPolicy
from embodied import Space, wrappers
from embodied.envs.gym_spaces import act_leaf


class Noting:
    """Records observations, counts steps per row in its carry, acts beyond bounds."""

    def __init__(self):
        self.seen = []

    def init_policy(self, batch_size):
        return np.zeros(batch_size, int)

    def policy(self, carry, obs, mode="train"):
        self.seen.append(obs)
        carry = np.where(obs["is_first"], 1, carry + 1)
        force = np.stack([carry, -carry], 1).astype(np.float32) / 2
        return carry, {"force": force, "move": carry.astype(np.int32)}, {}


def make_policy(batch=None, **options):
    return LoadedPolicy(Noting(), OBS_SPACE, ACT_SPACE, batch=batch, **options)


OBS = {"vector": np.zeros(3, np.float32), "token": 1}
ROWS = {"vector": np.zeros((3, 3), np.float32), "token": [0, 1, 2]}


class TestActing:
    def test_episodes_begin_after_reset(self):
        policy = make_policy()
        counts = []
        for step in range(6):
            if step in (2, 5):
                policy.reset()
            counts.append(policy.act(OBS)["move"])
        assert counts == [1, 2, 1, 2, 3, 1]

    def test_is_first_begins_one_too(self):
        policy = make_policy()
        flags = [False, False, True, np.bool_(False)]
        found = [policy.act({**OBS, "is_first": x})["move"] for x in flags]
        assert found == [1, 2, 1, 2]

    @pytest.mark.parametrize("rows", [[False, True, True], [1, 2], np.array([2, 1])])
    def test_rows_of_a_batch_begin_apart(self, rows):
        policy = make_policy(batch=3)
        policy.act(ROWS)
        policy.reset(rows)
        assert policy.act(ROWS)["move"].tolist() == [2, 1, 1]
        policy.reset([])
        assert policy.act(ROWS)["move"].tolist() == [3, 2, 2]
        policy.reset()
        assert policy.act(ROWS)["move"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize("rows", [[3], [-1], [True], [0.5], ["a"]])
    def test_rows_that_are_none_are_refused(self, rows):
        with pytest.raises(ValueError, match="reset expected a mask or indices"):
            make_policy(batch=3).reset(rows)
        with pytest.raises(ValueError, match="give no rows"):
            make_policy().reset(rows)

    def test_values_are_as_for_one_environment_or_for_a_batch(self):
        action = make_policy().act(OBS)
        assert isinstance(action["move"], np.int32)
        assert action["force"].shape == (2,)
        actions = make_policy(batch=3).act(ROWS)
        assert actions["move"].shape == (3,)
        assert actions["force"].shape == (3, 2)

    def test_continuous_actions_are_clipped(self):
        policy = make_policy()
        forces = [policy.act(OBS)["force"] for _ in range(3)]
        expected = np.array([[0.5, -0.5], [1, -1], [1, -1]], np.float32)
        np.testing.assert_array_equal(forces, expected, strict=True)

    def test_the_agent_sees_its_spaces_and_nothing_else(self):
        policy = make_policy()
        obs = {"vector": [1, 2, 3], "token": np.int64(2)}
        policy.act({**obs, "log/x": 1, "reward": "much", "is_last": None})
        (seen,) = policy._agent.seen
        assert sorted(seen) == ["is_first", "token", "vector"]
        expected = np.array([[1, 2, 3]], np.float32)
        np.testing.assert_array_equal(seen["vector"], expected, strict=True)
        np.testing.assert_array_equal(seen["token"], np.array([2], "i4"), strict=True)

    def test_missing_values_pass(self):
        policy = make_policy()
        policy.act({"vector": [-np.inf, 0, np.nan], "token": -1})
        assert policy._agent.seen[0]["token"] == -1

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"token": None}, "'token' as int32"),
            ({"token": 4}, "'token' .* within 0 to 3"),
            ({"token": -2}, "'token' .* within 0 to 3"),
            ({"token": 1.5}, "'token' .* within 0 to 3"),
            ({"token": 2**40}, "'token' .* within 0 to 3"),
            ({"token": [1]}, r"'token' as int32 of shape \(\)"),
            ({"vector": np.zeros((1, 3))}, r"'vector' as float32 of shape \(3,\)"),
            ({"vector": ["a", "b", "c"]}, "'vector' as float32"),
            ({"is_first": [True]}, r"'is_first' as bool of shape \(\)"),
            ({"is_first": 3}, "'is_first' as bool"),
        ],
    )
    def test_values_that_do_not_fit_are_named(self, change, words):
        with pytest.raises(ValueError, match=f"act expected {words}"):
            make_policy().act({**OBS, **change})

    def test_missing_keys_are_named(self):
        words = "observations vector, token, got reward, token: vector is missing"
        with pytest.raises(ValueError, match=words):
            make_policy().act({"token": 1, "reward": 0.0})
        with pytest.raises(ValueError, match="got none: token, vector is missing"):
            make_policy().act({})

    def test_an_array_in_place_of_a_dict_is_refused(self):
        words = r"a dict of observations by key, vector, token, got float64 of shape"
        with pytest.raises(ValueError, match=words):
            make_policy().act(np.zeros(3))

    def test_images_are_not_cast_from_other_scales(self):
        spaces = {"image": Space(np.uint8, (2, 2, 3))}
        policy = LoadedPolicy(Noting(), spaces, ACT_SPACE)
        policy.act({"image": np.full((2, 2, 3), 255)})
        for image in (np.full((2, 2, 3), 0.5), np.full((2, 2, 3), 256)):
            with pytest.raises(ValueError, match="'image' as uint8"):
                policy.act({"image": image})


LOW, HIGH = np.array([-2.0, 0]), np.array([2.0, 10])
BOUNDS = {"force": gymnasium.spaces.Box(LOW, HIGH, dtype=np.float64)}


class TestBounds:
    @pytest.mark.parametrize(
        ("inner", "outer"),
        [
            (Space(np.int32, (), 0, 3), gymnasium.spaces.Discrete(3)),
            (Space(np.int32, (), 0, 3), Space(np.int64, (), 0, 3)),
            (Space(np.int32, (), 0, 3), elements.Space(np.int32, (), 0, 3)),
            (Space(np.int32, 2, 0, [3, 4]), gymnasium.spaces.MultiDiscrete([3, 4])),
            (Space(np.int32, 2, 0, 2), gymnasium.spaces.MultiBinary(2)),
            (Space(np.int32, 2, 0, 4), gymnasium.spaces.Box(0, 3, (2,), np.int32)),
        ],
    )
    def test_discrete_spaces_must_have_the_classes_of_the_agent(self, inner, outer):
        assert ActionConverter({"a": inner}, {"a": outer, "reset": 1}).spaces["a"]
        other = Space(np.int32, inner.shape, 0, 5)
        with pytest.raises(ValueError, match="as the agent was trained with"):
            ActionConverter({"a": other}, {"a": outer})

    def test_actions_are_scaled_to_the_bounds_of_the_environment(self):
        converter = ActionConverter(ACT_SPACE, BOUNDS)
        policy = make_policy(converter=converter)
        actions = [policy.act(OBS) for _ in range(2)]
        forces = np.array([action["force"] for action in actions])
        np.testing.assert_allclose(forces, [[1, 2.5], [2, 0]])
        assert forces.dtype == BOUNDS["force"].dtype
        assert [action["move"] for action in actions] == [1, 2]
        assert policy.act_space["move"] == ACT_SPACE["move"]
        np.testing.assert_array_equal(policy.act_space["force"].high, [2, 10])

    @pytest.mark.parametrize(
        ("outer", "given", "expected"),
        [
            (gymnasium.spaces.Discrete(3, start=1), [0, 2], [1, 3]),
            (gymnasium.spaces.Discrete(3), [0, 2], [0, 2]),
            (gymnasium.spaces.Box(-1, 1, (2,), np.int8), [[0, 2]], [[-1, 1]]),
            (
                gymnasium.spaces.MultiDiscrete([2, 3], start=[5, 7]),
                [[1, 0], [0, 2]],
                [[6, 7], [5, 9]],
            ),
        ],
    )
    def test_classes_begin_where_those_of_the_environment_do(
        self, outer, given, expected
    ):
        inner = act_leaf("a", (), outer).space
        converter = ActionConverter({"a": inner}, {"a": outer})
        actions = converter({"a": np.array(given, inner.dtype)})["a"]
        np.testing.assert_array_equal(actions, expected)
        for action in actions:
            assert action in outer
            assert action in converter.spaces["a"]

    def test_they_are_those_of_a_wrapped_environment(self):
        taken = []

        wide = Space(np.float32, 2, -3, 7)

        class Wide(Task):
            @property
            def act_space(self):
                return {**super().act_space, "force": wide}

            def step(self, action):
                taken.append(action["force"])
                return super().step(action)

        env = wrappers.wrap(Wide())
        converter = ActionConverter(ACT_SPACE, {"force": wide})
        rng = np.random.default_rng(0)
        forces = rng.uniform(-1, 1, (20, 2)).astype(np.float32)
        for force in forces:
            env.step({"force": force, "move": np.int32(0), "reset": np.bool_(False)})
        found = converter({"force": forces})["force"]
        np.testing.assert_array_equal(found, taken, strict=True)
