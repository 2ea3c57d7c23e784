"""Tests the named blocks of configs.yaml, and the rules for values in its comments."""

import math

import pytest

from dreamerv3.cli import schema
from dreamerv3.cli.config import load_config, merge, read_blocks
from embodied.envs import registry

SIZES = {  # deter, hidden, classes, depth, units
    "size1m": (512, 64, 4, 4, 64),
    "size12m": (2048, 256, 16, 16, 256),
    "size25m": (3072, 384, 24, 24, 384),
    "size50m": (4096, 512, 32, 32, 512),
    "size100m": (6144, 768, 48, 48, 768),
    "size200m": (8192, 1024, 64, 64, 1024),
    "size400m": (12288, 1536, 96, 96, 1536),
}


class TestRules:
    @pytest.mark.parametrize(
        ("text", "allowed", "good", "bad"),
        [
            (">= 1", "at least 1", [1, 2.5, (1, 2)], [0, -1.0, (2, 0)]),
            ("> 0", "more than 0", [1e-9, math.inf], [0, -1]),
            ("< 2", "below 2", [1], [2]),
            (">= -1", "at least -1", [-1], [-2]),
            (">= 0, <= 100", "from 0 to 100", [0, 100], [-0.1, 100.1]),
            ("> 0, <= 1", "more than 0 and up to 1", [0.1, 1], [0, 1.1]),
            ("odd, >= 3", "odd and at least 3", [3, 255], [1, 4]),
            ("one of a, b", "one of a, b", ["a", "b"], ["c", "a, b"]),
            ("only a", "only a", ["a"], ["b"]),
            (
                "several of a, b",
                "one or more, without repetition, of a, b",
                [("a",), ("b", "a")],
                [("a", "a"), ("c",)],
            ),
            ("mesh", schema.KINDS["mesh"].allowed, ["-1,1,1"], ["-1,-1,1", "1,1"]),
        ],
    )
    def test_are_read_from_brackets(self, text, allowed, good, bad):
        rule = schema.parse_rule(text)
        assert rule.allowed == allowed
        assert all(rule.accepts(value) for value in good)
        assert not any(rule.accepts(value) for value in bad)

    @pytest.mark.parametrize("text", ["", "many", "=> 1", ">=", ">= 1,< 2", "any of a"])
    def test_of_another_form_are_refused(self, text):
        with pytest.raises(ValueError, match=r"configs\.yaml|could not convert"):
            schema.parse_rule(text)

    def test_stand_at_the_end_of_the_comment(self, tmp_path, monkeypatch):
        path = tmp_path / "configs.yaml"
        path.write_text(
            "defaults:\n\n  # Number of hosts, [not a rule] of environments.\n"
            "  # [>= 1]\n  hosts: 1\n  plain: x  # Any text.\n"
            "  group:\n    inner: 2  # A number, or so. [> 0]\n\nblock:\n  hosts: 3\n"
        )
        monkeypatch.setattr(schema, "CONFIGS", path)
        keys = schema.read_keys.__wrapped__()
        assert list(keys) == ["hosts", "plain", "group", "group.inner"]
        assert keys["hosts"].rule.allowed == "at least 1"
        assert "[not a rule]" in keys["hosts"].explanation
        assert keys["plain"].rule is None
        assert keys["group"].default == ""
        assert keys["group.inner"].rule.allowed == "more than 0"


class TestBlocks:
    @pytest.mark.parametrize("name", SIZES)
    def test_sizes_set_exactly_the_table(self, name):
        deter, hidden, classes, depth, units = SIZES[name]
        expected = dict(merge([]).flat)
        expected["agent.dyn.rssm.deter"] = deter
        expected["agent.dyn.rssm.hidden"] = hidden
        expected["agent.dyn.rssm.classes"] = classes
        for part in ("enc.simple", "dec.simple"):
            expected[f"agent.{part}.depth"] = depth
        for part in (
            "enc.simple",
            "dec.simple",
            "rewhead",
            "conhead",
            "policy",
            "value",
        ):
            expected[f"agent.{part}.units"] = units
        assert merge(["--configs", name]).flat == expected
        assert load_config(["--configs", name])

    @pytest.mark.parametrize(
        ("name", "task", "steps", "ratio", "envs"),
        [
            ("atari", "atari_pong", 5.1e7, 32, 16),
            ("atari100k", "atari100k_pong", 1.1e5, 256, 1),
            ("crafter", "crafter_reward", 1.1e6, 512, 1),
            ("dmc_proprio", "dmc_walker_walk", 1.1e6, 1024, 16),
            ("dmc_vision", "dmc_walker_walk", 1.1e6, 256, 16),
            ("dmlab", "dmlab_explore_goal_locations_small", 2.6e7, 32, 16),
            ("procgen", "procgen_coinrun", 1.1e8, 64, 16),
            ("minecraft", "minecraft_diamond", 1e10, 32, 16),
            ("bsuite", "bsuite_mnist/0", 1e10, 1024, 1),
            ("loconav", "loconav_ant_maze_m", 1e10, 256, 16),
        ],
    )
    def test_tasks_set_task_steps_ratio_and_envs(self, name, task, steps, ratio, envs):
        flat = merge(["--configs", name]).flat
        assert flat["task"] == task
        assert flat["run.steps"] == steps and type(flat["run.steps"]) is int
        assert flat["run.train_ratio"] == ratio
        assert flat["run.envs"] == envs

    def test_dmc_blocks_choose_what_is_observed(self):
        proprio = merge(["--configs", "dmc_proprio"]).flat
        vision = merge(["--configs", "dmc_vision"]).flat
        assert (proprio["env.dmc.proprio"], proprio["env.dmc.image"]) == (True, False)
        assert (vision["env.dmc.proprio"], vision["env.dmc.image"]) == (False, True)
        assert proprio["agent.dyn.rssm.deter"] == 512
        assert vision["agent.dyn.rssm.deter"] == 8192

    def test_multicpu_splits_eight_devices_of_the_cpu(self):
        config = load_config(["--configs", "multicpu"])
        assert config.jax.mock_devices == 8
        assert len(config.jax.policy_devices) == 2
        assert len(config.jax.train_devices) == 6
        assert config.batch_size == 12

    def test_debug_is_tiny(self):
        config = load_config(["--configs", "debug"])
        rssm = config.agent.dyn.rssm
        sizes = (rssm.stoch, rssm.classes, rssm.deter, rssm.hidden, rssm.blocks)
        assert sizes == (2, 4, 8, 3, 4)
        assert rssm.imglayers == 2
        for name in ("rewhead", "conhead", "policy", "value"):
            assert config.agent[name].layers == 1
            assert config.agent[name].units == 8
        for name in ("rewhead", "value"):
            assert config.agent[name].bins == 5
        for name in ("enc", "dec"):
            assert config.agent[name].simple.depth == 2
            assert config.agent[name].simple.layers == 1
        assert (config.batch_size, config.batch_length) == (8, 10)
        assert config.report_length == 5
        assert config.jax.platform == "cpu"
        assert config.replay.size == 10_000
        run = config.run
        assert (run.envs, run.train_ratio) == (4, 8)
        assert (run.log_every, run.report_every, run.save_every) == (5, 10, 15)

    def test_demo_can_be_used_as_it_is(self):
        config = load_config(["--configs", "demo", "--script", "rollout"])
        assert config.task.partition("_")[0] in registry.SUITES

    @pytest.mark.parametrize("name", [x for x in read_blocks() if x != "defaults"])
    def test_each_block_goes_together_with_the_defaults(self, name):
        values = merge(["--configs", name])
        assert values.problems == []
        if values.flat["task"].partition("_")[0] in registry.SUITES:
            assert load_config(["--configs", name])

    def test_later_blocks_and_then_flags_win(self):
        both = merge(["--configs", "size1m", "debug"]).flat
        assert both["agent.policy.units"] == 8
        flag = merge(["--agent.policy.units", "5", "--configs", "size1m"]).flat
        assert flag["agent.policy.units"] == 5
        assert flag["agent.value.units"] == 64
