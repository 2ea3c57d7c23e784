"""Gymnasium environments: any space survives the way there and back."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamerv3.cli.config import ConfigError, load_config, run_config
from dreamerv3.cli.factories import make_env
from dreamerv3.cli.logdir import prepare_logdir
from embodied import Space
from embodied.envs import MissingExtra, UnknownTask
from embodied.envs.from_gym import FromGym
from embodied.envs.keys import UnsupportedSpace, UnusableEnv, hash_words
from embodied.wrappers import SpaceError, UnifyDtypes, wrap

STANDARD = {"reward", "is_first", "is_last", "is_terminal"}
RESET = {"reset": True}
BINARY = spaces.Discrete(2)


class Echo(gymnasium.Env):
    """Returns samples of its observation space, and keeps what it was given."""

    def __init__(self, observation_space, action_space=BINARY, seed=0):
        self.observation_space = observation_space
        self.action_space = action_space
        self.observation_space.seed(seed)
        self.action_space.seed(seed)
        self.seeds = []
        self.actions = []
        self.outcome = (1.0, False, False, {})
        self.observation = None
        self.closes = 0

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.observation = self.observation_space.sample()
        return self.observation, {}

    def step(self, action):
        self.actions.append(action)
        self.observation = self.observation_space.sample()
        return (self.observation, *self.outcome)

    def close(self):
        self.closes += 1


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
    """What a flattened value of 0 is in the Gymnasium space."""
    if not declared.discrete or declared.dtype == bool:
        return 0
    if isinstance(gym_space, spaces.Box):
        return gym_space.low.astype(object) - declared.low.astype(object)
    return np.asarray(getattr(gym_space, "start", 0)).astype(object)


def assert_same(gym_space, gym_value, declared, value):
    if gym_value.ndim > 2 and value.ndim == 1:  # No image: a vector.
        gym_value = gym_value.ravel()
        if isinstance(gym_space, spaces.Box):
            gym_space = spaces.flatten_space(gym_space)
    if not declared.discrete:
        np.testing.assert_array_equal(gym_value, value)
        assert gym_value.dtype == value.dtype
        return
    value = value.astype(object) + meaning_of_zero(gym_space, declared)
    np.testing.assert_array_equal(gym_value.astype(object), value)


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=20, deadline=None)
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


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_terminated_and_truncated_are_told_apart(terminated, truncated):
    env = FromGym(Echo(spaces.Discrete(2)))
    env.step(RESET)
    env.gym_env.outcome = (2.5, terminated, truncated, {})
    obs = env.step({"reset": False, "action": np.int32(0)})
    assert obs["reward"] == 2.5
    assert obs["is_last"] == (terminated or truncated)
    assert obs["is_terminal"] == terminated
    assert not obs["is_first"]


def test_first_observation_has_no_reward():
    obs = FromGym(Echo(spaces.Discrete(2))).step(RESET)
    assert obs["is_first"]
    assert obs["reward"] == 0
    assert not obs["is_last"]


def test_only_the_first_reset_is_seeded():
    env = FromGym(Echo(spaces.Discrete(2)), seed=7)
    for _ in range(3):
        env.step(RESET)
    assert env.gym_env.seeds == [7, None, None]


def test_a_finished_episode_is_reset_even_if_nobody_asks():
    env = FromGym(Echo(spaces.Discrete(2)))
    env.step(RESET)
    env.gym_env.outcome = (0.0, True, False, {})
    action = {"reset": False, "action": np.int32(0)}
    assert env.step(action)["is_last"]
    assert env.step(action)["is_first"]


def test_observations_are_copies_of_the_environments_buffer():
    env = FromGym(Echo(spaces.Box(0, 1, (3,), np.float32)))
    obs = env.step(RESET)["obs"]
    before = obs.copy()
    env.gym_env.observation += 1
    np.testing.assert_array_equal(obs, before)


def test_float_observations_may_leave_their_bounds():
    gym_env = Echo(spaces.Box(-1, 1, (2,), np.float64))
    gym_env.observation_space.sample = lambda: np.array([3.0, -3.0])
    obs = wrap(FromGym(gym_env)).step(RESET)
    np.testing.assert_array_equal(obs["obs"], np.float32([3, -3]))


def test_chosen_infos_are_logged():
    env = FromGym(Echo(spaces.Discrete(2)), info_keys=["success"])
    assert env.step(RESET)["log/success"] == 0
    env.gym_env.outcome = (0.0, True, False, {"success": True, "other": "text"})
    obs = env.step({"reset": False, "action": np.int32(0)})
    assert obs["log/success"] == 1
    assert obs.keys() == env.obs_space.keys()


def test_close_closes_once():
    env = FromGym(Echo(spaces.Discrete(2)))
    env.close()
    env.close()
    assert env.gym_env.closes == 1


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


def test_observation_without_a_declared_key():
    env = FromGym(Echo(spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))))
    env.gym_env.observation_space.sample = lambda: {"a": 1}
    with pytest.raises(UnusableEnv, match="'b' of an observation"):
        env.step(RESET)


@pytest.mark.parametrize(
    ("space", "value", "advice"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), [np.nan, 0.0], "finite"),
        (spaces.Box(0, 9, (2,), np.int32), [1.5, 2.0], "Convert it to int32"),
        (spaces.Box(0, 9, (2,), np.int32), [1, 10], "bounds"),
        (spaces.Discrete(3, start=1), 4, "bounds"),
        (spaces.Discrete(3), "two", "Convert it to int32"),
        (spaces.Box(-1, 1, (2,), np.float32), [0.0], "shape"),
    ],
)
def test_wrong_observations_are_reported_by_key(space, value, advice):
    gym_env = Echo(space)
    gym_env.observation_space.sample = lambda: value
    with pytest.raises(SpaceError, match=f"'obs' of env Echo.*{advice}"):
        wrap(FromGym(gym_env)).step(RESET)


def test_exceptions_of_the_environment_pass_unchanged():
    class Broken(Echo):
        def step(self, action):
            raise OSError("socket lost")

    env = wrap(FromGym(Broken(spaces.Discrete(2))))
    env.step(RESET)
    with pytest.raises(OSError, match=r"^socket lost$"):
        env.step({"reset": False, "action": np.int32(0)})


def test_registered_ids_with_options():
    env = FromGym("CartPole-v1", max_episode_steps=3, seed=1)
    assert env.name == "gym_CartPole-v1"
    obs = env.step(RESET)
    lengths = 0
    while not obs["is_last"]:
        obs = env.step({"reset": False, "action": np.int32(lengths % 2)})
        lengths += 1
    assert lengths == 3
    assert not obs["is_terminal"]
    env.close()


def test_options_need_an_id():
    with pytest.raises(TypeError, match="render_mode"):
        FromGym(Echo(spaces.Discrete(2)), render_mode="rgb_array")


def test_unknown_id():
    with pytest.raises(UnknownTask, match=r"CartPol-v1.*CartPole"):
        FromGym("CartPol-v1")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(gymnasium.registry, "ALE/Pong-v5", raising=False)
    with pytest.raises(
        MissingExtra, match=r"pip install 'dreamerv3-parallel\[atari\]'"
    ):
        FromGym("ALE/Pong-v5")


# Images, texts, boards.


def box(shape, dtype=np.uint8, low=0, high=255):
    return spaces.Box(low, high, shape, dtype)


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


def test_texts_are_classes_of_words():
    env = FromGym(gym_env := Echo(spaces.Text(40)))
    assert env.obs_space["obs"] == Space(np.int32, (16,), 0, 256)
    gym_env.observation_space.sample = lambda: "go to the Red door"
    words = env.step(RESET)["obs"]
    assert (words > 0).sum() == 5
    np.testing.assert_array_equal(words, hash_words("GO to the red door"))
    with pytest.raises(UnsupportedSpace, match="'action', got Text"):
        FromGym(Echo(BINARY, spaces.Text(5)))


def test_numbers_of_info_are_logged_and_others_refused():
    gym_env = Echo(BINARY)
    env = FromGym(gym_env, info_keys=["none", "speed"])
    assert "log/none" not in env.obs_space
    assert env.step(RESET)["log/speed"] == 0
    gym_env.outcome = (1.0, False, False, {"speed": "fast"})
    with pytest.raises(UnusableEnv, match=r"info\['speed'\] as a number"):
        env.step({"reset": False, "action": np.int32(0)})


def test_arguments_of_environments_are_flags(tmp_path):
    flags = [
        "--task",
        "gym_CartPole-v1",
        "--env.gym.kwargs.sutton_barto_reward",
        "True",
    ]
    config = load_config([*flags, "--logdir", str(tmp_path)], {})
    env = make_env(config, 0)
    assert env.gym_env.unwrapped._sutton_barto_reward is True
    env.close()
    prepare_logdir(config)
    assert run_config(tmp_path).env.gym.kwargs.sutton_barto_reward is True
    own = load_config(["--task", "test_from_gym:sized", "--env.gym.kwargs.n", "3"], {})
    env = make_env(own, 0)
    assert env.act_space["action"].classes == 3
    for name in ("", "a.b"):
        with pytest.raises(ConfigError, match="expected the name of an argument"):
            load_config([f"--env.gym.kwargs.{name}", "1"], {})


def sized(n=2):
    return Echo(BINARY, spaces.Discrete(n))


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ([], (64, 64)),
        (["--env.gym.size", "48", "80"], (48, 80)),
        (["--agent.enc.simple.mults", "1", "2"], (64, 64)),
    ],
)
def test_images_get_a_size_that_networks_take(flags, size):
    config = load_config(["--task", "test_from_gym:pictures", *flags], {})
    env = make_env(config, 0)
    assert env.obs_space["image"].shape == (*size, 3)
    assert env.step(RESET)["image"].shape == (*size, 3)
    fitting = load_config(["--task", "test_from_gym:fitting"], {})
    assert make_env(fitting, 0).obs_space["image"].shape == (96, 80, 3)


def pictures():
    return Echo(box((3, 210, 160)))


def fitting():
    return Echo(box((96, 80, 3)))
