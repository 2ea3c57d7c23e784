"""Each row of a vector environment behaves like a single environment."""

from __future__ import annotations

import functools
import multiprocessing

import gymnasium
import numpy as np
import pytest

from dreamerv3.cli.config import load_config, read_config
from dreamerv3.cli.factories import EnvFactory, make_env
from dreamerv3.main import main
from embodied import Space
from embodied.base import BatchEnv
from embodied.envs import env_seed, registry
from embodied.envs.from_gym import FromGym
from embodied.envs.grid import Grid
from embodied.envs.gym_vector import SingleEnv, VectorGym, make_vector
from embodied.envs.keys import UnusableEnv
from embodied.run.parallel.env import EnvGroup
from embodied.wrappers import FitBatch, SpaceError, wrap

STEPS = 60


def make_pendulums(num_envs):
    """Makes a vector environment that is not registered."""
    return gymnasium.make_vec("Pendulum-v1", num_envs, vectorization_mode="sync")


class Count(gymnasium.vector.VectorEnv):
    """Counts steps and ends episodes after three; its text and info show the count."""

    def __init__(self, num_envs):
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Dict(
            count=gymnasium.spaces.Discrete(5), text=gymnasium.spaces.Text(20)
        )
        self.observation_space = self.single_observation_space
        self.single_action_space = gymnasium.spaces.MultiDiscrete([2, 3])
        self.action_space = self.single_action_space
        self.seeds = []
        self.shift = 0

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.count = np.arange(self.num_envs) % 3
        return self._observe(), {}

    def step(self, actions):
        assert actions.shape == (self.num_envs, 2)
        self.count = np.where(self.count == 3, 0, self.count + 1)
        reward = np.ones(self.num_envs)
        ended = self.count == 3
        info = {"lives": 3 - self.count, "_lives": np.ones(self.num_envs, bool)}
        return self._observe(), reward, ended, np.zeros_like(ended), info

    def _observe(self):
        text = tuple(f"count {count}" for count in self.count)
        return {"count": self.count + self.shift, "text": text}


def compare(batch, singles, actions):
    """Checks that both return the same, with `reset` set as an actor would."""
    reset = np.ones(len(batch), bool)
    for action in actions:
        found = batch.step({"reset": reset, **action})
        rows = [
            env.step({"reset": reset[i], **{k: x[i] for k, x in action.items()}})
            for i, env in enumerate(singles)
        ]
        assert found.keys() == rows[0].keys()
        for key, value in found.items():
            expected = np.stack([row[key] for row in rows])
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=key)
            assert value.dtype == expected.dtype
        reset = found["is_last"]


@pytest.mark.parametrize(
    ("task", "key"), [("CartPole-v1", "action"), ("Pendulum-v1", "action")]
)
def test_a_vector_of_single_environments_is_what_they_are(task, key):
    seeds = [env_seed(0, index) for index in range(3)]
    inner = make_vector(task, seeds, "sync")
    batch = FitBatch(inner)
    singles = [wrap(FromGym(task, seed=seed)) for seed in seeds]
    assert batch.obs_space == singles[0].obs_space
    assert batch.act_space == singles[0].act_space
    rng = np.random.default_rng(0)
    # Also beyond the bounds, so that continuous actions are clipped.
    wide = 1.5 if task == "Pendulum-v1" else 1
    actions = [
        {
            key: np.stack(
                [batch.act_space[key].sample(rng) * wide for _ in seeds]
            ).astype(batch.act_space[key].dtype)
        }
        for _ in range(STEPS)
    ]
    compare(batch, singles, actions)
    batch.close()
    batch.close()


def test_an_environment_in_the_middle_of_its_episode_resets_all():
    env = Count(3)
    batch = VectorGym(env, 1, info_keys=["none", "lives"])
    action = {"action": np.zeros((3, 2), np.int32)}
    first = batch.step({"reset": np.ones(3, bool), **action})
    assert first["is_first"].all()
    assert first["text"].shape == (3, 16)
    assert first["log/lives"].tolist() == [0, 0, 0]
    second = batch.step({"reset": first["is_last"], **action})
    assert second["count"].tolist() == [1, 2, 3]
    assert second["is_last"].tolist() == second["is_terminal"].tolist()
    assert second["is_last"].tolist() == [False, False, True]
    assert second["log/lives"].tolist() == [2, 1, 0]
    assert second["text"][0].tolist() != second["text"][1].tolist()
    third = batch.step({"reset": second["is_last"], **action})
    assert third["is_first"].tolist() == [False, False, True]
    assert third["reward"].tolist() == [1, 1, 0]
    asked = np.array([True, False, False])
    fourth = batch.step({"reset": asked, **action})
    assert fourth["is_first"].all()
    assert len(env.seeds) == 2


def test_values_that_do_not_fit_are_refused():
    env = Count(2)
    batch = FitBatch(VectorGym(env))
    env.shift = 7
    with pytest.raises(SpaceError, match=r"'count'.*expected Space\(int32, .*\(2,\)"):
        batch.step({"reset": np.ones(2, bool), "action": np.zeros((2, 2), np.int32)})


class Rows(BatchEnv):
    """Returns the values that a test sets."""

    obs_space = {  # noqa: RUF012
        "speed": Space(np.float64, (2,), -1, 1),
        "count": Space(np.int64, (), 0, 5),
    }
    act_space = {"reset": Space(bool)}  # noqa: RUF012

    def __init__(self):
        self.speed = np.zeros((3, 2))
        self.count = np.arange(3)

    def __len__(self):
        return 3

    def step(self, actions):
        return {"speed": self.speed, "count": self.count}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": np.full((3, 2), 1.5)}, "'speed'.*Keep it within the bounds"),
        ({"speed": np.full((3, 2), np.nan)}, "'speed'.*Values must be finite"),
        ({"speed": np.zeros((3, 3))}, r"'speed'.*Give it the shape \(3, 2\)"),
        ({"count": np.array([0, 1, 5])}, "'count'.*Keep it within the bounds"),
        ({"count": np.array([0, 1, 2.5])}, "'count'.*Convert it to int32"),
        ({"count": np.array([0, 1, 1 << 40])}, "'count'.*Convert it to int32"),
    ],
)
def test_rows_are_checked_as_single_observations_are(change, message):
    env = Rows()
    batch, reset = FitBatch(env), {"reset": np.zeros(3, bool)}
    found = batch.step(reset)
    assert found["speed"].dtype == np.float32
    assert found["count"].dtype == np.int32
    vars(env).update(change)
    with pytest.raises(SpaceError, match=message):
        batch.step(reset)


def test_markers_of_missing_values_and_passed_ones_pass():
    env = Rows()
    env.speed[0], env.count[0] = -np.inf, -1
    FitBatch(env).step({"reset": np.zeros(3, bool)})
    env.speed[0] = np.nan
    FitBatch(env, nonfinite="pass").step({"reset": np.zeros(3, bool)})


@pytest.mark.parametrize("key", ["speed", "more"])
def test_keys_are_those_that_are_declared(key, monkeypatch):
    env = Rows()
    obs = env.step({})
    obs.pop(key, None) if key == "speed" else obs.update(more=np.zeros(3))
    monkeypatch.setattr(env, "step", lambda actions: obs)
    with pytest.raises(SpaceError, match=f"'{key}'"):
        FitBatch(env).step({"reset": np.zeros(3, bool)})
    with pytest.raises(SpaceError, match="'reset'"):
        FitBatch(env).step({})


def test_other_ways_to_reset_are_refused():
    env = Count(2)
    env.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    with pytest.raises(UnusableEnv, match="autoreset_mode is NEXT_STEP"):
        VectorGym(env)


def test_one_row_is_an_environment():
    env = SingleEnv(make_vector("CartPole-v1", [3], "sync"))
    single = FromGym("CartPole-v1", seed=3)
    for reset in (True, False, False):
        action = {"reset": np.bool_(reset), "action": np.int32(1)}
        found, expected = env.step(action), single.step(action)
        np.testing.assert_allclose(found["obs"], expected["obs"], rtol=1e-6)
    env.close()
    single.close()


def test_one_row_resets_without_other_actions():
    env = SingleEnv(make_vector("CartPole-v1", [3], "sync"))
    for _ in range(2):
        assert env.step({"reset": np.bool_(True)})["is_first"]
        action = {"reset": np.bool_(False), "action": np.int32(1)}
        while not env.step(action)["is_last"]:
            pass
    env.close()


def test_actions_of_a_batch_are_checked_unless_they_reset():
    floats = FitBatch(VectorGym(make_pendulums(2)))
    classes = FitBatch(VectorGym(Count(2)))
    nan, far = np.full((2, 1), np.nan, np.float32), np.full((2, 2), 300, np.int32)
    for batch, bad, message in ((floats, nan, "finite"), (classes, far, "300")):
        batch.step({"reset": np.array([True, True]), "action": bad})
        fine = bad.copy()
        fine[0] = 0
        batch.step({"reset": np.array([False, True]), "action": fine})
        with pytest.raises(SpaceError, match=message):
            batch.step({"reset": np.array([False, False]), "action": fine})
        batch.close()


def test_images_are_resized_for_the_networks():
    config = load_config(["--task", "test_gym_vector:make_pictures"], {})
    batch = EnvFactory(config).make_batch([0, 1])
    assert batch.obs_space["image"] == Space(np.uint8, (64, 64, 3))
    action = {"reset": np.ones(2, bool), "action": np.zeros(2, np.int32)}
    assert batch.step(action)["image"].shape == (2, 64, 64, 3)
    batch.close()


class Picture(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (3, 50, 40), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.ones((3, 50, 40), np.float32), {}


def test_a_factory_of_several_gets_a_seed_if_it_takes_one():
    given = []

    def make(num_envs, seed):
        given.append(seed)
        return make_pendulums(num_envs)

    assert len(registry.adapt_batch(make, [3, 4], {})) == 2
    assert given == [3]


def test_the_number_of_environments_is_not_taken_from_the_options():
    options = {"kwargs": {"num_envs": 5}}
    assert len(registry.adapt_batch(make_pendulums, [3, 4], options)) == 2


def make_pictures(num_envs):
    return gymnasium.vector.SyncVectorEnv([Picture] * num_envs)


@pytest.mark.parametrize(
    "flags",
    [
        ("--task", "gym_Pendulum-v1", "--env.gym.vector", "sync"),
        ("--task", "test_gym_vector:make_pendulums"),
    ],
)
def test_workers_step_a_batch_in_one_call(flags):
    config = load_config([*flags], {})
    group = EnvGroup(EnvFactory(config), [4, 5], is_eval=False)
    obs = group.step()
    assert obs["envid"].tolist() == [4, 5]
    assert obs["obs"].shape == (2, 3)
    assert not np.array_equal(obs["obs"][0], obs["obs"][1])
    alone = EnvGroup(EnvFactory(config), [4], is_eval=False)
    assert alone.step()["obs"].shape == (3,)
    one = make_env(config, 4)
    step = one.step({key: value[0] for key, value in group.actions.items()})
    found = {key: (obs[key].dtype, obs[key].shape[1:]) for key in one.obs_space}
    assert found == {key: (np.asarray(x).dtype, np.shape(x)) for key, x in step.items()}
    for closed in (group, alone, one):
        closed.close()


@pytest.mark.timeout(120)
def test_a_parallel_run_with_vector_environments(tmp_path):
    arguments = [
        *("--script", "parallel", "--task", "gym_CartPole-v1", "--run.steps", "400"),
        *("--env.gym.vector", "sync", "--random_agent", "True", "--run.envs", "4"),
        *("--run.envs_per_worker", "4", "--run.eval_envs", "1", "--batch_size", "4"),
        *("--batch_length", "8", "--report_length", "8", "--run.log_every", "1"),
        *("--logger.outputs", "jsonl"),
    ]
    assert main([*arguments, "--logdir", str(tmp_path)]) == 0
    assert read_config(tmp_path / "config.yaml").env.gym.vector == "sync"
    assert "episode/score" in (tmp_path / "scores.jsonl").read_text()


@pytest.fixture
def no_forks():
    """Starts processes anew: this one may have threads of JAX, from other tests."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("vector", ["sync", "async"])
@pytest.mark.usefixtures("no_forks")
def test_environments_of_a_function_step_together(vector):
    options = {"vector": vector, "kwargs": {"render_mode": None}}
    make = functools.partial(gymnasium.make, "CartPole-v1")
    envs = registry.adapt_batch(make, [1, 2, 3], options)
    try:
        zeros = {"action": np.zeros(3, np.int32)}
        obs = envs.step({**zeros, "reset": np.ones(3, bool)})
        assert obs["is_first"].all() and obs["obs"].shape == (3, 4)
        assert len(np.unique(obs["obs"][:, 0])) == 3  # Of different seeds.
    finally:
        envs.close()
    assert registry.adapt_batch(make, [1], options) is None
    assert registry.adapt_batch(make, [1, 2], {}) is None


def test_functions_that_take_a_seed_get_it():
    seeds = []

    def make(seed, length):
        seeds.append((seed, length))
        return gymnasium.make("CartPole-v1", max_episode_steps=length)

    options = {"vector": "sync", "kwargs": {"length": 7}}
    registry.adapt_batch(make, [4, 5], options).close()
    assert seeds[-2:] == [(4, 7), (5, 7)]
    options["kwargs"]["seed"] = 1  # That of the run holds, as for a single one.
    registry.adapt_batch(make, [4, 5], options).close()
    assert seeds[-2:] == [(4, 7), (5, 7)]


def test_vectors_that_cannot_be_made_are_refused():
    with pytest.raises(UnusableEnv, match="gym_Acrobot-v1, which has none"):
        registry.make_batch("gym_Acrobot-v1", indices=[0, 1], vector="own")
    make = functools.partial(gymnasium.make, "CartPole-v1")
    with pytest.raises(UnusableEnv, match="Expected sync or async"):
        registry.adapt_batch(make, [0, 1], {"vector": "own"})
    with pytest.raises(UnusableEnv, match="Expected Gymnasium environments"):
        registry.adapt_batch(lambda: Grid("reach"), [0, 1], {"vector": "sync"})
