"""Configuration files of users among the blocks, and placeholders in logdirs."""

import numpy as np
import pytest

from dreamerv3.cli.config import ConfigError, action_repeat, load_config
from dreamerv3.cli.factories import image_size
from dreamerv3.cli.logdir import prepare_logdir
from embodied import Space

MINE = r"""
# Like a block of configs.yaml.
task: gym_CartPole-v1
run: {envs: 3, train_ratio: 64}
.*\.units: 33
logger.outputs: [jsonl, terminal]
agent:
  opt: {lr: 1e-3}
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return str(path)


def load(*argv):
    return load_config([*argv, "--logdir", "run"], {})


class TestFiles:
    def test_a_file_is_like_a_block(self, mine):
        config = load("--configs", mine)
        assert config.task == "gym_CartPole-v1"
        assert (config.run.envs, config.run.train_ratio) == (3, 64.0)
        assert config.agent.policy.units == config.agent.enc.simple.units == 33
        assert config.agent.opt.lr == 1e-3
        assert config.logger.outputs == ("jsonl", "terminal")

    def test_it_mixes_with_blocks_in_order_and_flags_come_last(self, mine):
        config = load("--configs", "debug", mine)
        assert config.agent.policy.units == 33
        assert config.batch_size == 8  # From the block.
        config = load("--configs", mine, "debug", "--run.train_ratio", "5")
        assert config.agent.policy.units == 8
        assert (config.run.envs, config.run.train_ratio) == (4, 5.0)

    def test_a_relative_name_will_do(self, mine, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert load("--configs", "mine.yaml").run.envs == 3

    def test_that_of_a_run_repeats_it_elsewhere(self, tmp_path):
        argv = ["--configs", "debug", "--seed", "7", "--task", "dummy_cont"]
        first = load_config([*argv, "--logdir", str(tmp_path / "first")], {})
        path = prepare_logdir(first) / "config.yaml"
        again = load_config(["--configs", str(path), "--logdir", "other"], {})
        assert again == first.update(logdir="other")
        # Without a flag for the logdir, it does not continue the first run.
        assert load_config(["--configs", str(path)], {}).logdir != first.logdir
        smaller = load_config(["--configs", str(path), "size1m"], {})
        assert (smaller.seed, smaller.agent.policy.units) == (7, 64)

    def test_keys_of_a_run_that_are_gone_do_not_matter(self, tmp_path):
        config = load_config(["--seed", "7", "--logdir", str(tmp_path)], {})
        path = prepare_logdir(config) / "config.yaml"
        path.write_text(path.read_text() + "\nkey_of_another_version: 1\n")
        assert load("--configs", str(path)).seed == 7

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("run: {enws: 3}", ["run.enws", "no such key", "--run.envs?"]),
            ("batch_size: many", ["batch_size", "whole number", "'many'"]),
            ("run: {envs: 0}", ["run.envs", "at least 1"]),
            ("task:", ["task", "expected a value"]),
            ("1: {2: 3}", ["1.2", "no such key"]),
            ("- a\n- b", ["expected keys and values", "list"]),
            ("", ["expected keys and values", "nothing"]),
            ("a: [", ["not a YAML file"]),
            ("run: !!python/object:os.system {}", ["not a YAML file"]),
        ],
    )
    def test_mistakes_name_the_file(self, tmp_path, content, words):
        path = tmp_path / "mine.yml"
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load("--configs", "debug", str(path))
        for word in [f"--configs {path}", *words]:
            assert word in str(caught.value)

    @pytest.mark.parametrize("name", ["nothing.yaml", "some/folder"])
    def test_files_that_are_not_there(self, name):
        with pytest.raises(ConfigError, match=f"{name}: it cannot be read"):
            load("--configs", name)


class TestLogdirs:
    def test_task_and_seed_are_filled_in(self):
        argv = ["--logdir", "runs/{task}/{seed}", "--seed", "3"]
        logdir = load_config([*argv, "--configs", "crafter"], {}).logdir
        assert logdir == "runs/crafter_reward/3"

    @pytest.mark.parametrize(
        ("task", "name"),
        [("bsuite_catch/0", "bsuite_catch-0"), ("my_env:MyEnv", "my_env-MyEnv")],
    )
    def test_tasks_become_names_of_folders(self, task, name):
        config = load_config(["--logdir", "{task}", "--task", task], {})
        assert config.logdir == name

    def test_an_evaluation_needs_no_devices_of_the_run(self, tmp_path):
        devices = ["--jax.expect_devices", "5", "--jax.policy_devices", "4"]
        prepare_logdir(load_config(["--logdir", str(tmp_path), *devices], {}))
        (tmp_path / "ckpt").mkdir()
        argv = ["--script", "eval_only", "--logdir", str(tmp_path)]
        config = load_config(argv, {})
        assert config.jax.expect_devices == 0
        assert config.jax.policy_devices == (0,)
        given = load_config([*argv, "--jax.policy_devices", "1"], {})
        assert given.jax.policy_devices == (1,)

    def test_an_evaluation_finds_what_was_filled_in(self, tmp_path):
        argv = ["--logdir", f"{tmp_path}/{{task}}-{{seed}}", "--configs", "debug"]
        argv += ["--task", "dummy_cont", "--seed", "5"]
        run = load_config([*argv, "--batch_size", "3"], {})
        logdir = prepare_logdir(run)
        (logdir / "ckpt").mkdir()
        assert logdir == tmp_path / "dummy_cont-5"
        config = load_config([*argv, "--script", "eval_only"], {})
        assert config.logdir == str(logdir)
        source = ["--script", "eval_only", "--run.from_checkpoint", str(logdir)]
        assert load_config([*source, "--logdir", "new"], {}).batch_size == 3


def test_own_environments_have_no_settings_of_suites():
    config = load_config(["--task", "atari_tools:Pictures"])
    assert action_repeat(config.flat) == 1
    spaces = {"image": Space(np.uint8, (84, 84, 3))}
    assert image_size(config, spaces) == (64, 64)
    config = load_config(["--task", "atari_pong"])
    assert action_repeat(config.flat) == 4
    assert image_size(config, spaces) is None
