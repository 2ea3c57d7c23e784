"""DMLab, ProcGen and Minecraft, against small fakes of their documented interfaces."""

from __future__ import annotations

import importlib
import sys
import types

import numpy as np
import pytest
from suite_testing import check_suite, episodes, play, rollout, same

from embodied import envs
from embodied.envs import MissingExtra, UnknownTask, make

MODULES = ("dmlab", "procgen", "minecraft")


@pytest.fixture
def install(monkeypatch):
    """Returns a function that installs fake modules; unloads adapters at the end."""

    def install(name, **attributes):
        module = types.ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    forget()
    yield install
    forget()


def forget():
    """Unloads the adapters, so that they are imported again."""
    for name in MODULES:
        sys.modules.pop(f"embodied.envs.{name}", None)
        vars(envs).pop(name, None)


@pytest.mark.parametrize(
    ("task", "package", "message"),
    [
        ("dmlab_lasertag_one_opponent_small", "deepmind_lab", "github.com/google-dee"),
        ("procgen_coinrun", "procgen", "github.com/openai/procgen"),
        ("minecraft_diamond", "minerl", "MineRL 0.4 as https://minerl.readthedocs.io"),
    ],
)
def test_missing_packages_say_what_to_install(
    install, monkeypatch, task, package, message
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"{task}.*{package}.*{message}"):
        make(task)


class FakeLab:
    """Levels of 40 frames whose pictures depend on the seed and the actions."""

    def __init__(self, level, observations, config=None, renderer="software"):
        self.level = level
        self.sensors = observations
        self.shape = (int(config["height"]), int(config["width"]), 3)
        self.frames = None
        self.rng = np.random.default_rng()

    def reset(self, episode=-1, seed=None):
        self.rng = np.random.default_rng(seed)
        self.frames = 0

    def is_running(self):
        return self.frames is not None and self.frames < 40

    def observations(self):
        if not self.is_running():
            raise RuntimeError("Environment is not running.")
        image = self.rng.integers(0, 256, self.shape, np.uint8)
        obs = {"RGB_INTERLEAVED": image, "INSTR": np.array(b"Get the RED ball")}
        return {name: obs[name] for name in self.sensors}

    def step(self, action, num_steps=1):
        if action.dtype != np.intc or action.shape != (7,):
            raise ValueError(action)
        self.frames += num_steps
        return 2.0 * num_steps

    def close(self):
        self.frames = None


@pytest.fixture
def lab(install):
    return install("deepmind_lab", Lab=FakeLab)


def test_dmlab_suite(lab):
    history = check_suite("dmlab_rooms_watermaze", steps=30, ends=2, size=(48, 64))
    assert history[0]["image"].shape == (48, 64, 3)
    # Ten steps of four frames, then the picture of the level's last running frame.
    assert history[10]["is_last"]
    assert history[10]["is_terminal"]
    assert np.array_equal(history[10]["image"], history[9]["image"])
    assert history[1]["reward"] == 8


def test_dmlab_options(lab):
    env = make("dmlab_rooms_watermaze")
    assert env._lab.level == "contributed/dmlab30/rooms_watermaze"
    assert make("dmlab_tests/empty")._lab.level == "tests/empty"
    history = rollout("dmlab_rooms_watermaze", 11, episodic=False)
    assert episodes(history) == 1
    assert not any(obs["is_terminal"] for obs in history)
    one, other = (rollout("dmlab_x", 5, use_seed=False) for _ in range(2))
    assert not same(one, other)
    env.close()
    env.close()


def test_dmlab_instructions_are_hashed_words(lab):
    history = rollout("dmlab_language_answer_quantitative_question", 3)
    words = history[0]["instruction"]
    assert words.dtype == np.int32
    assert (words[:4] > 0).all()
    assert not words[4:].any()
    assert len(set(words[:4])) == 4


class FakeProcgen:
    """Levels of 7 steps; gym3 shows the next level as soon as one is over."""

    made = 0

    def __init__(
        self, num, env_name, rand_seed, num_threads, distribution_mode, render_mode
    ):
        type(self).made += 1
        self.rng = np.random.default_rng(rand_seed)
        self.large = render_mode == "rgb_array"
        self.count = 0
        self.reward = 0.0
        self.start()

    def start(self):
        self.count = 0
        self.color = self.rng.integers(1, 256)

    def observe(self):
        image = np.full((1, 64, 64, 3), self.color, np.uint8)
        first = np.array([self.count == 0])
        return np.array([self.reward], np.float32), {"rgb": image}, first

    def act(self, action):
        if action.dtype != np.int32 or action.shape != (1,):
            raise ValueError(action)
        self.count += 1
        self.reward = float(self.count)
        if self.count == 7:
            self.start()

    def get_info(self):
        image = np.full((512, 512, 3), self.color, np.uint8)
        return [{"rgb": image}] if self.large else [{}]

    def close(self):
        pass


@pytest.mark.parametrize("size", [(64, 64), (96, 96)])
def test_procgen_suite(install, size):
    install("procgen", ProcgenGym3Env=FakeProcgen)
    history = check_suite("procgen_coinrun", steps=40, ends=4, size=size)
    assert history[0]["image"].shape == (*size, 3)
    # The last observation is the old level's, the first one the new level's.
    assert history[7]["is_last"]
    assert history[7]["is_terminal"]
    assert history[7]["reward"] == 7
    assert np.array_equal(history[7]["image"], history[6]["image"])
    assert not np.array_equal(history[8]["image"], history[7]["image"])


def test_procgen_starts_over_when_told_to(install):
    install("procgen", ProcgenGym3Env=FakeProcgen)
    env = make("procgen_maze", size=(64, 64))
    made = FakeProcgen.made
    first = env.step({"reset": True})
    env.step({"reset": False, "action": np.int32(3)})
    again = env.step({"reset": True})
    assert FakeProcgen.made == made + 1
    assert again["is_first"]
    assert not np.array_equal(first["image"], again["image"])


def test_procgen_mistakes(install):
    install("procgen", ProcgenGym3Env=FakeProcgen)
    with pytest.raises(UnknownTask, match="Did you mean procgen_coinrun"):
        make("procgen_coinnrun")
    with pytest.raises(ValueError, match="resize to be one of"):
        make("procgen_coinrun", resize="opencv")


class FakeHandler:
    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs


class FakeSpec:
    """Calls what MineRL's EnvSpec calls, and makes the fake game."""

    def __init__(self, name, resolution, max_episode_steps):
        self.resolution = resolution
        self.max_episode_steps = max_episode_steps
        for part in (
            *("agent_start", "agent_handlers", "rewardables", "server_decorators"),
            *("server_world_generators", "server_quit_producers"),
            "server_initial_conditions",
        ):
            setattr(self, part, getattr(self, f"create_{part}")())
        self.observables = self.create_observables()
        self.actionables = self.create_actionables()

    def create_observables(self):
        return [FakeHandler("pov")]

    def create_actionables(self):
        return [FakeHandler("camera")]

    def make(self):
        return FakeMinecraft(self)


class FakeMinecraft:
    """Attacking gives a log; the player dies after 50 steps."""

    def __init__(self, spec):
        self.spec = spec
        self.commands = []
        self.rng = None
        self.seeds = []

    def seed(self, seed):
        self.seeds.append(seed)
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.count = self.logs = 0
        self.life = 20.0
        return self.observe()

    def step(self, command):
        self.commands.append(command)
        self.count += 1
        self.logs += command["attack"]
        self.life -= 0.4
        return self.observe(), 0.0, self.count >= 50, {}

    def observe(self):
        width, height = self.spec.resolution
        return {
            "pov": self.rng.integers(0, 256, (height, width, 3), np.uint8),
            "inventory": {"log": np.array(self.logs), "dirt": np.array(3)},
            "equipped_items": {"mainhand": {"type": "air", "damage": 0}},
            "life_stats": {"life": self.life, "food": 20, "air": 300},
        }

    def close(self):
        pass


@pytest.fixture
def minecraft(install):
    names = (
        *("FlatInventoryObservation", "EquippedItemObservation"),
        *("ObservationFromLifeStats", "PlaceBlock", "EquipAction", "CraftAction"),
        *("CraftNearbyAction", "SmeltItemNearby", "AgentStartBreakSpeedMultiplier"),
        *("DefaultWorldGenerator", "ServerQuitFromTimeUp"),
        *("ServerQuitWhenAnyAgentFinishes", "TimeInitialCondition"),
        "SpawningInitialCondition",
    )
    handlers = types.SimpleNamespace(**dict.fromkeys(names, FakeHandler))
    mc = types.SimpleNamespace(MS_PER_STEP=50)
    specs = "minerl.herobraine.env_specs"
    for package in ("minerl", "minerl.herobraine", specs):
        install(package)
    install(f"{specs}.simple_embodiment", SimpleEmbodimentEnvSpec=FakeSpec)
    install("minerl.herobraine.hero", handlers=handlers, mc=mc)


def test_minecraft_suite(minecraft):
    options = {"size": (48, 64), "logs": True, "length": 40}
    history = check_suite("minecraft_diamond", steps=100, ends=2, **options)
    assert history[0]["image"].shape == (48, 64, 3)
    assert not any(obs["is_terminal"] for obs in history)
    rewards = [obs["reward"] for obs in history[:40]]
    # The first log is a milestone, others are not, and health is lost all the time.
    assert sorted(round(float(reward), 3) for reward in rewards)[-2:] == [0, 0.996]


def test_minecraft_death_is_terminal(minecraft):
    history = play(make("minecraft_wood"), 60)
    last = [obs["is_last"] for obs in history].index(True)
    assert last == 50
    assert history[last]["is_terminal"]


def test_minecraft_wood_rewards_every_log(minecraft):
    env = make("minecraft_wood")
    env.step({"reset": True})
    for _ in range(3):
        obs = env.step({"reset": False, "action": np.int32(1)})
        assert obs["reward"] == pytest.approx(1 - 0.004)
    log = importlib.import_module("embodied.envs.minecraft").ITEMS.index("log")
    assert obs["inventory"][log] == obs["inventory_max"][log] == 3


def test_minecraft_commands(minecraft):
    env = make("minecraft_diamond", break_speed=7.0)
    env.step({"reset": True})
    for action in [2] * 6 + [5, 11]:
        env.step({"reset": False, "action": np.int32(action)})
    game = env._env
    # The view goes up by 60 degrees and no further.
    pitches = [command["camera"][0] for command in game.commands]
    assert pitches == [-15, -15, -15, -15, 0, 0, 0, 0]
    assert game.commands[6]["camera"].tolist() == [0, 15]
    assert game.commands[7]["place"] == "dirt"
    assert game.commands[7]["craft"] == "none"
    assert game.spec.agent_start[0].args == (7.0,)
    assert game.spec.max_episode_steps > 36_000


def test_minecraft_worlds_differ_between_episodes(minecraft):
    env = make("minecraft_diamond", seed=1)
    for _ in range(3):
        env.step({"reset": True})
    assert len(set(env._env.seeds)) == 3


def test_minecraft_unknown_task(minecraft):
    with pytest.raises(
        UnknownTask, match=r"got 'diamnod'\. Did you mean minecraft_diamond"
    ):
        make("minecraft_diamnod")
