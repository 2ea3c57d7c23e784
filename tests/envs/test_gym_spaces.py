"""Tests that FromGym converts values of any Gymnasium space there and back."""

from __future__ import annotations

import numpy as np
import pytest
from gym_testing import BINARY, Echo, box
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from suite_testing import RESET

from embodied import Space
from embodied.envs.from_gym import FromGym
from embodied.envs.gym_spaces import obs_leaf
from embodied.envs.keys import UnsupportedSpace, hash_words
from embodied.wrappers import SpaceError, UnifyDtypes, wrap

STANDARD = {"reward", "is_first", "is_last", "is_terminal"}
FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint64)
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def boxes(draw):
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS, np.bool_)))
    if dtype is np.bool_:
        return spaces.Box(0, 1, shape, dtype)
    if dtype in FLOATS:
        low = draw(st.sampled_from((-np.inf, -2.0, 0.0)))
        high = draw(st.sampled_from((0.5, np.inf)))
        return spaces.Box(low, high, shape, dtype)
    info = np.iinfo(dtype)
    bound = st.one_of(
        st.sampled_from((info.min, 0, info.max)), st.integers(info.min, info.max)
    )
    low, high = sorted((draw(bound), draw(bound)))
    return spaces.Box(np.full(shape, low, dtype), np.full(shape, high, dtype), shape)


@st.composite
def multi_discretes(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    start = rng.integers(-3, 4, shape) if draw(st.booleans()) else None
    return spaces.MultiDiscrete(rng.integers(1, 6, shape), start=start)


LEAVES = st.one_of(
    boxes(),
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start),
        st.integers(1, 9),
        st.integers(-5, 5),
    ),
    multi_discretes(),
    st.builds(
        spaces.MultiBinary,
        st.integers(1, 3) | st.lists(st.integers(1, 3), min_size=1, max_size=3),
    ),
)
NESTED = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, min_size=1, max_size=3).map(spaces.Tuple)
        | st.dictionaries(
            st.sampled_from("abcd"), children, min_size=1, max_size=3
        ).map(spaces.Dict)
    ),
    max_leaves=6,
)


def flatten(space, value, key=""):
    """The leaves of a Gymnasium value, with their spaces, by key."""
    if isinstance(space, spaces.Dict):
        children = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        children = enumerate(space.spaces)
    else:
        return {key: (space, np.asarray(value))}
    leaves = {}
    for part, child in children:
        name = f"{key}/{part}" if key else str(part)
        leaves.update(flatten(child, value[part], name))
    return leaves


def meaning_of_zero(gym_space, declared):
    """Returns the Gymnasium value that a flattened value of 0 stands for."""
    if not declared.discrete or declared.dtype == bool:
        return 0
    if isinstance(gym_space, spaces.Box):
        return gym_space.low.astype(object) - declared.low.astype(object)
    return np.asarray(getattr(gym_space, "start", 0)).astype(object)


def assert_same(gym_space, gym_value, declared, value):
    if gym_value.ndim > 2 and value.ndim == 1:  # Not an image: flattened to a vector.
        gym_value = gym_value.ravel()
        if isinstance(gym_space, spaces.Box):
            gym_space = spaces.flatten_space(gym_space)
    if not declared.discrete:
        np.testing.assert_array_equal(gym_value, value)
        assert gym_value.dtype == value.dtype
        return
    value = value.astype(object) + meaning_of_zero(gym_space, declared)
    np.testing.assert_array_equal(gym_value.astype(object), value)


@settings(max_examples=25)
@given(NESTED, st.integers(0, 2**31 - 1))
def test_observations_fit_their_space_and_can_be_restored(space, seed):
    gym_env = Echo(space, seed=seed)
    env = FromGym(gym_env, obs_key="root")
    for action in (RESET, {"reset": False, "action": np.int32(1)}):
        obs = env.step(action)
        for key, declared in env.obs_space.items():
            assert obs[key] in declared, (key, declared, obs[key])
        root = "" if isinstance(space, spaces.Dict) else "root"
        leaves = flatten(space, gym_env.observation, root)
        assert obs.keys() == leaves.keys() | STANDARD
        for key, (gym_space, value) in leaves.items():
            assert_same(gym_space, value, env.obs_space[key], obs[key])


@settings(max_examples=25)
@given(NESTED, st.integers(0, 2**31 - 1))
def test_actions_arrive_in_the_structure_of_the_action_space(space, seed):
    gym_env = Echo(spaces.Discrete(3), space, seed)
    env = FromGym(gym_env, act_key="root")
    env.step(RESET)
    rng = np.random.default_rng(seed)
    action = {key: declared.sample(rng) for key, declared in env.act_space.items()}
    env.step({**action, "reset": False})
    (arrived,) = gym_env.actions
    assert space.contains(arrived)
    root = "" if isinstance(space, spaces.Dict) else "root"
    leaves = flatten(space, arrived, root)
    assert action.keys() == leaves.keys() | {"reset"}
    for key, (gym_space, value) in leaves.items():
        assert_same(gym_space, value, env.act_space[key], action[key])


@settings(max_examples=20)
@given(LEAVES.filter(lambda space: space.dtype not in (np.int64, np.uint64)))
def test_any_leaf_is_unified_for_agents(space):
    env = UnifyDtypes(FromGym(Echo(space)))
    obs = env.step(RESET)
    for key, declared in env.obs_space.items():
        assert declared.dtype in (np.float32, np.int32, np.uint8, np.bool_)
        assert obs[key] in declared


def test_discrete_values_count_from_zero():
    env = FromGym(Echo(spaces.Discrete(3, start=-5), spaces.Discrete(4, start=10)))
    assert env.obs_space["obs"].classes == 3
    assert env.act_space["action"].classes == 4
    assert 0 <= env.step(RESET)["obs"] < 3
    env.step({"reset": False, "action": np.int32(3)})
    assert env.gym_env.actions == [13]


@pytest.mark.parametrize("value", [np.int8(125), np.int16(125), np.int64(125)])
def test_a_narrow_dtype_does_not_wrap_discrete_values_around(value):
    env = FromGym(gym_env := Echo(spaces.Discrete(300, start=-10)))
    gym_env.observation_space.sample = lambda: value
    assert env.step(RESET)["obs"] == 135


def test_classes_per_element():
    space = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))
    declared = FromGym(Echo(spaces.Discrete(2), space)).act_space["action"]
    assert declared.dtype == np.int32
    np.testing.assert_array_equal(declared.classes, [[2, 3], [4, 5]])


def test_signed_integers_are_shifted_off_the_marker_of_missing_values():
    env = FromGym(Echo(spaces.Box(-1, 3, (50,), np.int64)))
    assert env.obs_space["obs"].classes.tolist() == [5] * 50
    obs = env.step(RESET)["obs"]
    assert obs.min() == 0
    np.testing.assert_array_equal(obs - 1, env.gym_env.observation)


def test_nested_keys_are_joined_with_slashes():
    space = spaces.Dict(
        hand=spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Discrete(3))])
    )
    obs = FromGym(Echo(space)).step(RESET)
    assert obs.keys() == STANDARD | {"hand/0", "hand/1/x"}


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (spaces.Box(0, 255, (48, 48, 3), np.uint8), "image"),
        (spaces.Box(0, 255, (128,), np.uint8), "obs"),
        (spaces.Box(-1, 1, (3, 3, 3), np.float32), "obs"),
        (spaces.Discrete(3), "obs"),
    ],
)
def test_default_key_of_a_plain_observation(space, key):
    assert FromGym(Echo(space)).obs_space.keys() == STANDARD | {key}
    assert FromGym(Echo(space), obs_key="mine").obs_space.keys() == STANDARD | {"mine"}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Box(0, 1, (0,), np.float32),
        spaces.Discrete(2**40),
    ],
    ids=lambda space: type(space).__name__,
)
def test_spaces_that_do_not_fit_are_refused_by_key(space):
    nested = spaces.Dict(body=spaces.Dict(part=space))
    with pytest.raises(UnsupportedSpace, match="body/part"):
        FromGym(Echo(nested))


@pytest.mark.parametrize("key", ["reward", "is_first", "stepid", "log/x", "action"])
def test_reserved_and_double_keys_are_refused(key):
    with pytest.raises(UnsupportedSpace, match=f"{key}.*rename"):
        FromGym(Echo(spaces.Dict({key: spaces.Discrete(2)})))


def test_keys_that_collide_after_joining_are_refused():
    space = spaces.Dict(
        {"a": spaces.Dict(b=spaces.Discrete(2)), "a/b": spaces.Discrete(2)}
    )
    with pytest.raises(UnsupportedSpace, match=r"a/b.*twice"):
        FromGym(Echo(space))


@pytest.mark.parametrize(
    ("space", "shape", "convert"),
    [
        (box((20, 30, 3)), (20, 30, 3), lambda x: x),
        (box((3, 20, 30)), (20, 30, 3), lambda x: x.transpose(1, 2, 0)),
        (box((4, 20, 30)), (20, 30, 4), lambda x: x.transpose(1, 2, 0)),
        (box((20, 30)), (20, 30, 1), lambda x: x[..., None]),
        (
            box((20, 30, 3), np.float32, high=1),
            (20, 30, 3),
            lambda x: np.rint(x * 255).astype(np.uint8),
        ),
        (
            box((1, 20, 30), np.float64, high=255),
            (20, 30, 1),
            lambda x: np.rint(x.transpose(1, 2, 0)).astype(np.uint8),
        ),
        (
            box((2, 20, 30, 3)),
            (20, 30, 6),
            lambda x: np.concatenate([x[0], x[1]], -1),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, spaces.Space) else "",
)
def test_images_of_every_layout_are_images(space, shape, convert):
    env = FromGym(gym_env := Echo(space))
    assert env.obs_space["image"] == Space(np.uint8, shape)
    obs = env.step(RESET)["image"]
    np.testing.assert_array_equal(obs, convert(gym_env.observation))
    assert obs in env.obs_space["image"]
    small = FromGym(gym_env, size=(8, 6))
    assert small.step(RESET)["image"].shape == (8, 6, shape[2])
    assert small.obs_space["image"].shape == (8, 6, shape[2])


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (box((3, 3), high=2), Space(np.int32, (3, 3), 0, 3)),
        (box((2, 3, 4), np.float32, low=-1, high=1), Space(np.float32, (24,))),
        (box((2, 3, 4), np.int8, low=0, high=2), Space(np.int8, (24,), 0, 3)),
        (box((2, 3, 4, 5), np.uint8), Space(np.uint8, (120,))),
    ],
)
def test_other_arrays_become_what_networks_take(space, expected):
    env = FromGym(gym_env := Echo(space))
    assert env.obs_space["obs"] == expected
    obs = env.step(RESET)["obs"]
    assert obs in expected
    np.testing.assert_array_equal(obs.ravel(), gym_env.observation.ravel())


def test_values_beyond_the_dtype_are_not_wrapped_around():
    env = wrap(FromGym(gym_env := Echo(box((2, 3, 4), np.int8, low=0, high=2))))
    gym_env.observation_space.sample = lambda: np.full((2, 3, 4), 257)
    with pytest.raises(SpaceError, match=r"'obs'.*int64"):
        env.step(RESET)


def test_texts_are_classes_of_words():
    env = FromGym(gym_env := Echo(spaces.Text(40)))
    assert env.obs_space["obs"] == Space(np.int32, (16,), 0, 256)
    gym_env.observation_space.sample = lambda: "go to the Red door"
    words = env.step(RESET)["obs"]
    assert (words > 0).sum() == 5
    np.testing.assert_array_equal(words, hash_words("GO to the red door"))
    leaf = obs_leaf("text", (), spaces.Text(40), (0, 0))
    for several in (("go to", "door"), np.array(["go to", "door"], object)):
        rows = leaf.encode(several)
        np.testing.assert_array_equal(rows, [hash_words("go to"), hash_words("door")])
    with pytest.raises(UnsupportedSpace, match="'action', got Text"):
        FromGym(Echo(BINARY, spaces.Text(5)))
