"""Tests loading the policy of a checkpoint, from Python and by `--script eval_only`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import agent_testing as testing
import elements
import gymnasium
import jax
import numpy as np
import pytest
from dreamer_testing import make_config
from hypothesis import given
from hypothesis import strategies as st
from inference_testing import ACT_SPACE, save_run

import dreamerv3
from dreamerv3.cli.config import ConfigError, load_config, read_config
from dreamerv3.main import main
from dreamerv3.policies.acting_agent import ActingAgent
from dreamerv3.policies.hub import to_json
from dreamerv3.policies.spaces import spaces_from_tree, spaces_to_tree
from embodied import Space
from embodied.checkpoint import CheckpointError

EXAMPLE = Path(__file__).parents[2] / "examples/inference.py"
DISCRETE = gymnasium.spaces.Discrete(4)
OBS_SPACE = testing.OBS_SPACE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An untrained agent, and the logdir of its checkpoint."""
    logdir = tmp_path_factory.mktemp("run")
    return save_run(logdir), logdir


def observations(count, batch=None):
    rng = np.random.default_rng(1)
    lead = () if batch is None else (batch,)
    for _ in range(count):
        yield {
            "vector": rng.normal(size=(*lead, 3)).astype(np.float32),
            "token": rng.integers(0, 4, lead).astype(np.int32),
        }


def test_importing_the_package_imports_no_jax():
    code = "import dreamerv3, sys; assert not {'jax', 'equinox'} & set(sys.modules)"
    code += "; from dreamerv3 import load; print(load.__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "load\n"
    with pytest.raises(AttributeError, match="'laod'"):
        _ = dreamerv3.laod


@pytest.mark.parametrize("batch", [None, 3])
def test_it_acts_like_the_agent_that_was_saved(run, batch):
    agent, logdir = run
    carry = agent.init_policy(batch or 1)
    policy = dreamerv3.load(logdir, batch=batch)
    agent._policy_runner.calls = 0  # Seeds depend on the number of calls.
    for index, obs in enumerate(observations(5, batch)):
        found = policy.act(obs)
        rows = {k: x if batch else x[None] for k, x in obs.items()}
        first = np.full(batch or 1, index == 0)
        carry, expected, _ = agent.policy(carry, {**rows, "is_first": first}, "eval")
        assert found.keys() == expected.keys() == ACT_SPACE.keys()
        for key, value in expected.items():
            value = value if batch else value[0]
            value = np.clip(value, -1, 1) if key == "force" else value
            # Programs that are compiled differently may round differently.
            np.testing.assert_allclose(found[key], value, 1e-5, 1e-6, strict=True)
            assert batch or found[key] in ACT_SPACE[key]


@pytest.mark.parametrize("folder", ["", "ckpt", "ckpt/agent"])
def test_logdirs_and_checkpoints_are_found(run, folder):
    policy = dreamerv3.load(run[1] / folder)
    assert policy.step == 7
    assert sorted(policy.obs_space) == ["token", "vector"]
    assert policy.act_space == ACT_SPACE


def test_neither_replay_nor_environment_is_needed(run, tmp_path, monkeypatch):
    _, logdir = run
    shutil.copytree(logdir, tmp_path / "run")
    config = tmp_path / "run/config.yaml"
    text = config.read_text().replace("inference_testing:Task", "atari_pong")
    config.write_text(text)
    policy = dreamerv3.load(tmp_path / "run")
    assert policy.act(next(observations(1)))["move"] in range(3)


def test_only_what_acting_needs_is_on_the_device(run):
    agent, logdir = run
    saved = agent.save()
    before = {id(x) for x in jax.live_arrays()}
    policy = dreamerv3.load(logdir)
    new = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
    del policy
    needed = [
        x.nbytes
        for name, x in saved["params"].items()
        if name.startswith(("enc/", "dyn/", "pol/")) and "prior" not in name
    ]
    assert sum(needed) <= new < 1.2 * sum(needed)
    whole = [x.nbytes for x in [*saved["params"].values(), *saved["opt"].values()]]
    assert new < sum(whole) / 3


def test_actions_are_sampled_or_the_most_likely_ones(run):
    obs = {"vector": np.zeros((3, 3), np.float32), "token": np.zeros(3, np.int32)}
    spread = {}
    for sample in (True, False):
        policy = dreamerv3.load(run[1], sample=sample, batch=3)
        forces = []
        for _ in range(20):
            policy.reset()
            forces.append(policy.act(obs)["force"])
        spread[sample] = np.std(forces)
    # Latent states are sampled in both cases, so the spread is never zero.
    assert spread[False] < 0.1 < 0.3 < spread[True]


def test_seeds_decide_the_actions(run):
    obs = next(observations(1))
    forces = [dreamerv3.load(run[1], seed=seed).act(obs)["force"] for seed in (1, 2)]
    assert not np.array_equal(*forces)


def test_checkpoints_without_spaces_take_those_of_the_task(tmp_path):
    save_run(tmp_path, without=["spaces"])
    policy = dreamerv3.load(tmp_path)
    assert policy.act_space.keys() == ACT_SPACE.keys()
    assert policy.act(next(observations(1)))["force"].shape == (2,)


def test_configurations_of_other_versions_are_taken(run, tmp_path):
    shutil.copytree(run[1], tmp_path / "run")
    path = tmp_path / "run/config.yaml"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if "eval_mode" not in line]
    assert len(kept) == len(lines) - 1
    path.write_text("\n".join([*kept, "key_of_another_version: 3"]))
    assert dreamerv3.load(tmp_path / "run").step == 7


class TestErrors:
    def test_no_checkpoint(self, tmp_path):
        for path, words in ((tmp_path, "has no checkpoint"), ("/x/y", "not exist")):
            start = f"^Expected the logdir of a run.* got {path}, which .*{words}"
            with pytest.raises(CheckpointError, match=start):
                dreamerv3.load(path)

    def test_a_checkpoint_of_the_reference_has_to_be_imported(self):
        with pytest.raises(CheckpointError, match="--script import_checkpoint"):
            dreamerv3.load(testing.GOLDEN / "reference_checkpoint")

    def test_no_config(self, run, tmp_path):
        shutil.copytree(run[1], tmp_path / "run")
        (tmp_path / "run/config.yaml").unlink()
        with pytest.raises(ConfigError, match=r"which has no config.yaml"):
            dreamerv3.load(tmp_path / "run")

    def test_a_config_of_other_sizes(self, run, tmp_path):
        shutil.copytree(run[1], tmp_path / "run")
        path = tmp_path / "run/config.yaml"
        path.write_text(path.read_text().replace("deter: 16", "deter: 32"))
        with pytest.raises(CheckpointError, match=r"does not fit.*Other shapes: dyn/"):
            dreamerv3.load(tmp_path / "run")

    def test_a_config_with_values_that_are_not_allowed(self, run, tmp_path):
        shutil.copytree(run[1], tmp_path / "run")
        path = tmp_path / "run/config.yaml"
        path.write_text(path.read_text().replace("deter: 16", "deter: many"))
        with pytest.raises(ConfigError, match=r"config.yaml: agent.dyn.rssm.deter"):
            dreamerv3.load(tmp_path / "run")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"mode": "test"}, "mode eval or train, got 'test'"),
            ({"batch": 0}, "batch of at least 1, or None, got int 0"),
            ({"batch": "2"}, "batch of at least 1, or None, got str '2'"),
            ({"platform": "toaster"}, "jax.platform: expected one of"),
            ({"act_space": {}}, "spaces of force, got none"),
            ({"act_space": {"force": Space("f4", 3, 0, 1)}}, r"shape \(2,\)"),
            ({"act_space": {"foo": None}}, "actions, force, move, got 'foo'"),
            ({"act_space": {"force": None}}, "'force' as a space of floats.*None"),
            ({"act_space": {"force": DISCRETE}}, r"of floats.*got Discrete\(4\)"),
            ({"act_space": DISCRETE}, r"dict .*\{'force': env.*got Discrete\(4\)"),
            ({"act_space": {"move": DISCRETE}}, "'move' with 3 classes.*Discrete"),
            ({"act_space": {"move": None}}, "'move' with 3 classes.*None"),
        ],
    )
    def test_arguments(self, run, options, words):
        with pytest.raises(ValueError, match=words):
            dreamerv3.load(run[1], **options)

    def test_acting_before_anything_was_loaded(self):
        agent = ActingAgent(OBS_SPACE, ACT_SPACE, make_config())
        obs = {**next(observations(1, 2)), "is_first": np.ones(2, bool)}
        with pytest.raises(RuntimeError, match="Call load first"):
            agent.policy(agent.init_policy(2), obs)


def test_weights_that_the_regex_leaves_out_are_random(run):
    saved = run[0].save()
    agent = ActingAgent(OBS_SPACE, ACT_SPACE, make_config(), seed=5)
    agent.load(saved, "(?!pol/)")
    names = list(agent._leaves)
    found = dict(zip(names, agent._parameters.newest()))
    same = {n for n in names if np.array_equal(found[n], saved["params"][n])}
    assert {n for n in names if not n.startswith("pol/")} <= same
    assert "pol/mlp/linear0/kernel" not in same
    with pytest.raises(ValueError, match="matches none"):
        agent.load(saved, "val/")
    del saved["params"]["pol/mlp/linear0/kernel"]
    with pytest.raises(ValueError, match="Missing: pol/mlp/linear0/kernel"):
        agent.load(saved, ".*")


@given(
    st.sampled_from(["f4", "i4", "u1", "bool"]),
    st.lists(st.integers(1, 4), max_size=3),
    st.lists(st.integers(0, 100), min_size=2, max_size=2, unique=True),
    st.booleans(),
)
def test_spaces_come_back(dtype, shape, bounds, differ):
    low, high = sorted(bounds)
    low, high = (False, True) if dtype == "bool" else (low, high)
    low = np.broadcast_to(low, shape).copy()
    if differ and dtype == "f4":
        low -= np.arange(low.size).reshape(shape)
    space = Space(dtype, tuple(shape), low, high)
    plain = Space(dtype, tuple(shape))
    obs = {"a": space, "b": plain}
    tree = spaces_to_tree(obs, {"c": elements.Space(np.int32, 3)})
    expected = obs, {"c": Space.of(elements.Space(np.int32, 3))}
    assert spaces_from_tree(tree) == expected
    assert spaces_from_tree(json.loads(json.dumps(to_json(tree)))) == expected


SMALL = ["--configs", "debug", "--task", "grid_reach", "--random_agent", "True"]
SMALL += ["--logger.outputs", "jsonl", "--run.envs", "2", "--run.eval_envs", "0"]


class TestPrograms:
    def train(self, logdir, *argv):
        steps = ["--run.steps", "60", "--batch_size", "2"]
        assert main([*SMALL, *steps, "--logdir", str(logdir), *argv]) == 0

    def test_eval_only_needs_nothing_but_the_logdir(self, tmp_path, capsys):
        self.train(tmp_path)
        saved = read_config(tmp_path / "config.yaml")
        argv = ["--script", "eval_only", "--logdir", str(tmp_path)]
        assert main([*argv, "--run.eval_eps", "3"]) == 0
        shown = capsys.readouterr().out
        assert "Evaluating in 2 environments of grid_reach" in shown
        assert "3 episodes of the agent of step 60" in shown
        result = json.loads((tmp_path / "eval/60.json").read_text())
        assert result["episodes"] == 3
        (video,) = result["videos"]
        kind = b"GIF89a" if video.endswith(".gif") else b"ftyp"
        assert kind in (tmp_path / video).read_bytes()[:16]
        assert read_config(tmp_path / "config.yaml") == saved
        assert main(argv) == 0, "again, with the default of one episode"
        assert json.loads((tmp_path / "eval/60.json").read_text())["episodes"] == 1

    def test_eval_only_films_vectors_where_they_can_be_drawn(self, tmp_path, capsys):
        pytest.importorskip("pygame", reason="CartPole draws with it")
        self.train(tmp_path, "--task", "gym_CartPole-v1")
        argv = ["--script", "eval_only", "--logdir", str(tmp_path)]
        assert main([*argv, "--run.eval_eps", "2"]) == 0
        result = json.loads((tmp_path / "eval/60.json").read_text())
        assert [Path(name).stem for name in result["videos"]] == ["60-frame"]
        assert "no video" not in capsys.readouterr().out

    def test_eval_only_goes_on_where_nothing_can_be_drawn(self, tmp_path, capsys):
        self.train(tmp_path, "--task", "inference_testing:Task")
        argv = ["--script", "eval_only", "--logdir", str(tmp_path)]
        assert main(argv) == 0
        assert "There will be no video" in capsys.readouterr().out
        assert json.loads((tmp_path / "eval/60.json").read_text())["videos"] == []

    @pytest.mark.parametrize("folder", ["", "ckpt", "ckpt/agent"])
    def test_eval_only_takes_the_settings_of_another_run(self, tmp_path, folder):
        self.train(tmp_path / "run", "--seed", "3")
        source = ["--run.from_checkpoint", str(tmp_path / "run" / folder)]
        argv = ["--script=eval_only", *source, "--logdir", str(tmp_path / "eval")]
        config = load_config([*argv, "--run.envs", "1"])
        assert (config.task, config.seed, config.random_agent) == (
            "grid_reach",
            3,
            True,
        )
        assert (config.run.envs, config.run.steps) == (1, 10**10)
        assert config.logdir == str(tmp_path / "eval")

    def test_other_programs_do_not(self, tmp_path):
        self.train(tmp_path)
        assert load_config(["--logdir", str(tmp_path)]).task == "dummy_disc"

    @pytest.mark.parametrize(
        ("logdir", "words"),
        [
            ("", "got {}, in which there is no folder ckpt. Set another --logdir"),
            ("none", "got {}/none, which does not exist. Set another --logdir"),
            ("run/ckpt", "a folder inside one. Set --logdir {}/run, or"),
            ("{timestamp}", "but no logdir was given. Set --logdir"),
        ],
    )
    def test_without_a_checkpoint_the_logdir_is_named(
        self, tmp_path, capsys, logdir, words
    ):
        (tmp_path / "run/ckpt").mkdir(parents=True)
        assert main(["--script", "eval_only", "--logdir", str(tmp_path / logdir)]) == 2
        message = capsys.readouterr().err
        assert words.format(tmp_path) in message and "--run.from_checkpoint" in message

    def test_an_empty_folder_of_checkpoints_is_blamed_on_the_logdir(
        self, tmp_path, capsys
    ):
        (tmp_path / "ckpt").mkdir()
        argv = ["--script", "eval_only", "--random_agent", "True"]
        assert main([*argv, "--logdir", str(tmp_path)]) == 1
        words = f"dreamerv3: logdir: expected the logdir of a run.* got {tmp_path}, "
        assert re.match(words, capsys.readouterr().err)

    def test_a_learning_agent_is_evaluated_without_its_training(
        self, run, tmp_path, monkeypatch, capsys
    ):
        argv = ["--script", "eval_only", "--run.from_checkpoint", str(run[1])]
        argv += ["--logdir", str(tmp_path), "--run.eval_eps", "2", "--run.envs", "1"]
        monkeypatch.setattr("dreamerv3.cli.scripts.make_agent", None)
        assert main(argv) == 0
        result = json.loads((tmp_path / "eval/7.json").read_text())
        assert result["scores"] == [5.0, 5.0]

    def test_the_policy_of_a_random_agent_can_be_loaded(self, tmp_path):
        self.train(tmp_path)
        policy = dreamerv3.load(tmp_path)
        assert policy.step == 60
        obs = {key: space.sample(0) for key, space in policy.obs_space.items()}
        assert policy.act(obs)["action"] in policy.act_space["action"]

    def test_the_example_plays_episodes(self, tmp_path):
        self.train(tmp_path)
        assert len(EXAMPLE.read_text().splitlines()) < 80
        done = subprocess.run(
            [sys.executable, "-W", "error", EXAMPLE, tmp_path, "--episodes", "2"],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "The agent of step 60" in done.stdout
        assert "sees image" in done.stdout and "Episode 2: score" in done.stdout

    def test_the_example_says_in_a_line_what_is_missing(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-W", "error", EXAMPLE, tmp_path / "none"],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("inference.py: Expected the logdir of a run")
