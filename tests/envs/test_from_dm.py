"""dm_env environments: specs of every kind, episodes, and names."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import pytest
from suite_testing import play

from embodied import Space
from embodied.envs import UnknownTask, make
from embodied.envs.from_dm import FromDM
from embodied.envs.keys import UnsupportedSpace
from embodied.wrappers import wrap

# Stand-ins for the types of dm_env, so that it need not be installed.
Array = dataclasses.make_dataclass("Array", ["shape", "dtype"])
Bounded = dataclasses.make_dataclass("Bounded", ["minimum", "maximum"], bases=(Array,))


@dataclasses.dataclass
class TimeStep:
    kind: str
    reward: float | None
    discount: float | None
    observation: dict

    def first(self):
        return self.kind == "first"

    def last(self):
        return self.kind == "last"


class Counter:
    """Counts to `length`; even episodes end in a terminal state."""

    obs_spec = types.MappingProxyType(
        {
            "count": Array((), np.int64),
            "nested": {"pair": [Array((2,), np.float64), Array((1,), np.float32)]},
            "level": Bounded((2,), np.int32, np.array([0, -3]), np.array([9, 3])),
            "flag": Array((), bool),
            "nothing": Array((0,), np.float64),
            "image": Bounded((4, 4, 3), np.uint8, 0, 255),
        }
    )
    act_spec = Bounded((2,), np.float64, -2.0, np.array([1.0, 3.0]))

    def __init__(self, length=5, seed=None):
        self.length = length
        self.seed = seed
        self.episode = 0
        self.actions = []
        self.closed = 0
        self.count = 0

    def observation_spec(self):
        return self.obs_spec

    def action_spec(self):
        return self.act_spec

    def reset(self):
        self.count = 0
        self.episode += 1
        return TimeStep("first", None, None, self.observation())

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        last = self.count == self.length
        discount = float(not (last and self.episode % 2 == 0))
        return TimeStep("last" if last else "mid", 1.5, discount, self.observation())

    def observation(self):
        return {
            "count": self.count,
            "nested": {"pair": [np.ones(2), np.zeros(1, np.float32)]},
            "level": np.array([self.count % 10, -3], np.int32),
            "flag": self.count % 2 == 0,
            "nothing": np.zeros(0),
            "image": np.full((4, 4, 3), self.count, np.uint8),
        }

    def close(self):
        self.closed += 1


class Choices(Counter):
    obs_spec = Array((3,), np.float32)
    act_spec = (Bounded((), np.int64, -1, 2), Array((2,), bool))

    def observation(self):
        return np.zeros(3, np.float32)


def test_spaces_are_flattened():
    spaces = FromDM(Counter()).obs_space
    shapes = {key: (space.shape, space.dtype.name) for key, space in spaces.items()}
    assert shapes == {
        "count": ((), "int64"),
        "nested/pair/0": ((2,), "float64"),
        "nested/pair/1": ((1,), "float32"),
        "level": ((2,), "int32"),
        "flag": ((), "bool"),
        "image": ((4, 4, 3), "uint8"),
        "reward": ((), "float32"),
        "is_first": ((), "bool"),
        "is_last": ((), "bool"),
        "is_terminal": ((), "bool"),
    }
    # Not from -3, since -1 would mean that the observation is missing.
    assert spaces["level"].low.tolist() == [0, 0]
    assert spaces["level"].high.tolist() == [10, 7]
    assert np.full((4, 4, 3), 255, np.uint8) in spaces["image"]


def test_episodes_pass_all_checks():
    history = play(wrap(FromDM(Counter())), 30)
    lasts = [index for index, obs in enumerate(history) if obs["is_last"]]
    terminals = [index for index, obs in enumerate(history) if obs["is_terminal"]]
    assert lasts == [5, 11, 17, 23, 29]
    assert terminals == [11, 23]
    assert history[3]["reward"] == 1.5
    assert history[3]["level"].tolist() == [3, 0]


def test_continuous_actions_keep_their_bounds():
    space = FromDM(Counter()).act_space["action"]
    assert space.low.tolist() == [-2, -2]
    assert space.high.tolist() == [1, 3]


def test_integer_actions_count_from_zero():
    inner = Choices()
    env = FromDM(inner)
    assert env.obs_space["obs"].shape == (3,)
    assert env.act_space["action/0"].classes == 4
    assert env.act_space["action/1"].classes.tolist() == [2, 2]
    env.step({"reset": True})
    flags = np.array([1, 0], np.int32)
    env.step({"reset": False, "action/0": np.int32(0), "action/1": flags})
    assert type(inner.actions[0]) is type(inner.action_spec())
    number, booleans = inner.actions[0]
    assert number == -1
    assert number.dtype == np.int64
    assert {-1: "left"}[number] == "left"
    assert booleans.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_actions_are_classes_in_int32_whatever_their_dtype(dtype):
    inner = Counter()
    inner.action_spec = lambda: Bounded((2,), dtype, 0, 1)
    assert FromDM(inner).act_space["action"] == Space(np.int32, (2,), 0, 2)


def test_repeat_sums_rewards_and_stops_at_the_end():
    env = FromDM(Counter(length=5), repeat=3)
    action = {"reset": False, "action": np.zeros(2)}
    env.step({"reset": True})
    assert [env.step(action)["reward"] for _ in range(2)] == [4.5, 3.0]
    assert env.step(action)["is_first"]


def test_observations_are_copies():
    inner = Counter()
    buffer = np.zeros((4, 4, 3), np.uint8)
    plain = inner.observation
    inner.observation = lambda: {**plain(), "image": buffer}
    image = FromDM(inner).step({"reset": True})["image"]
    buffer[:] = 7
    assert not image.any()


def test_close_once():
    inner = Counter()
    env = FromDM(inner)
    env.close()
    env.close()
    assert inner.closed == 1


@pytest.mark.parametrize(
    ("obs_spec", "act_spec", "message"),
    [
        ({"reward": Array((), np.float32)}, None, "'reward', which is reserved"),
        ({"action": Array((), np.float32)}, None, "'action', which occurs twice"),
        ({"text": Array((), np.dtype("U4"))}, None, "numeric spec at 'text'"),
        (None, Array((), np.int32), "'action' to have bounds"),
    ],
)
def test_specs_that_do_not_fit(obs_spec, act_spec, message):
    inner = Counter()
    inner.obs_spec = obs_spec or inner.obs_spec
    inner.act_spec = act_spec or inner.act_spec
    with pytest.raises(UnsupportedSpace, match=message):
        FromDM(inner)


@pytest.fixture
def module(monkeypatch):
    this = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "counters", this)
    return "counters"


def test_task_names_a_factory(module):
    env = make("dm_counters:Counter", length=9, seed=1)
    assert env.dm_env.length == 9
    assert env.dm_env.seed == make("dm_counters:Counter", seed=1).dm_env.seed
    assert env.dm_env.seed != make("dm_counters:Counter", seed=2).dm_env.seed


def test_own_tasks_may_be_dm_envs(module):
    assert isinstance(make("counters:Counter"), FromDM)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("dm_counters", "form dm_package.module:Name, got 'dm_counters'"),
        ("dm_counters:Cuonter", "Did you mean dm_counters:Counter"),
        ("dm_missing_package.module:Env", "'missing_package' was not found"),
    ],
)
def test_mistakes_in_names(module, task, message):
    with pytest.raises(UnknownTask, match=message):
        make(task)


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"dm_env.Environment .*, got list"):
        FromDM([])
    with pytest.raises(TypeError, match="options \\['length'\\] only with the name"):
        FromDM(Counter(), length=3)
    with pytest.raises(ValueError, match="repeat of at least 1, got 0"):
        FromDM(Counter(), repeat=0)
