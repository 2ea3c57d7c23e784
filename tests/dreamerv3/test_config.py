"""The keys with their defaults, as the contract has them, and the named blocks."""

import math
import re

import pytest

from dreamerv3.cli import schema
from dreamerv3.cli.config import load_config, merge, read_blocks
from embodied.envs import registry

HEAD = {"act": "silu", "norm": "rms", "winit": "trunc_normal_in"}
CODER = {
    **HEAD,
    "depth": 64,
    "mults": (2, 3, 4, 4),
    "layers": 3,
    "units": 1024,
    "symlog": True,
    "outer": False,
    "kernel": 5,
    "strided": False,
}
ATARI = {
    "repeat": 4,
    "lives": "unused",
    "noops": 30,
    "autostart": False,
    "resize": "pillow",
    "clip_reward": False,
}

CONTRACT = {
    "logdir": "~/logdir/{timestamp}",
    "logdir_access": "user",  # Ours.
    "replica": 0,
    "replicas": 1,
    "task": "dummy_disc",
    "seed": 0,
    "method": "name",
    "script": "train",
    "batch_size": 16,
    "batch_length": 64,
    "report_length": 32,
    "consec_train": 1,
    "consec_report": 1,
    "replay_context": 1,
    "random_agent": False,
    "errfile": False,
    "ipv6": False,
    "clock_addr": "",
    "clock_port": "",
    "run": {
        "steps": 1e10,
        "duration": 0,
        "train_ratio": 32.0,
        "log_every": 120,
        "report_every": 300,
        "save_every": 900,
        "envs": 16,
        "eval_envs": 4,
        "eval_eps": 1,
        "report_batches": 1,
        "from_checkpoint": "",
        "from_checkpoint_regex": ".*",
        "episode_timeout": 180,
        "actor_addr": "localhost:{auto}",
        "replay_addr": "localhost:{auto}",
        "logger_addr": "localhost:{auto}",
        "actor_batch": -1,
        "actor_threads": 1,
        "agent_process": False,
        "remote_replay": False,
        "remote_envs": False,
        "usage": {
            "psutil": True,
            "nvsmi": True,
            "gputil": False,
            "malloc": False,
            "gc": False,
        },
        "debug": True,
        "transport": "zmq",
        "link": "auto",
        "insecure": False,
        "keyfile": "",
        "envs_per_worker": 1,
        "env_offset": 0,
        "actor_timeout": 0.05,
        "env_timeout": 300,
        "stop_timeout": 60.0,
        "replica_timeout": 30.0,
        "stall_timeout": 1800,
        "view": False,
        "restarts": {"env": 10, "replay": 3, "logger": 3, "agent": 3},
        "keep": 3,
        "max_nonfinite": 50,
        "render": False,
    },
    "view": {
        "host": "127.0.0.1",
        "port": 0,
        "sessions": 2,
        "folders": ("none",),
    },
    "replay": {
        "size": 5e6,
        "online": True,
        "fracs": {"uniform": 1, "priority": 0, "recency": 0},
        "prio": {
            "exponent": 0.8,
            "maxfrac": 0.5,
            "initial": math.inf,
            "zero_on_sample": True,
        },
        "priosignal": "model",
        "recexp": 1.0,
        "chunksize": 1024,
        "bytes": "auto",
        "compress": "zstd",
        "latent_save_bytes": 1e9,
    },
    "jax": {
        "platform": "auto",
        "compute_dtype": "bfloat16",
        "policy_devices": (0,),
        "train_devices": (0,),
        "mock_devices": 0,
        "prealloc": True,
        "jit": True,
        "debug": False,
        "expect_devices": 0,
        "enable_policy": True,
        "coordinator_address": "",
        "train_mesh": "-1,1,1",
        "policy_mesh": "-1,1,1",
        "deterministic": False,
    },
    "suite": {
        "preset": "none",
        "tasks": ("all",),
        "seeds": 1,
        "script": "parallel",
        "at_once": "auto",
        "mps": "auto",
        "table_only": False,
    },
    "ray": {
        "address": "",
        "envs_per_bundle": 8,
        "head_resources": ("auto",),
        "env_resources": ("auto",),
        "trusted_network": False,
        "dashboard": True,
    },
    "plot": {"runs": ("none",), "out": "", "metric": "episode/score"},
    "logger": {
        "outputs": ("jsonl", "tensorboard", "terminal"),
        "filter": "episode/(score|length)|train/opt/loss|updates_per_second",
        "timer": True,
        "fps": 15,
        "user": "",
    },
    "env": {
        "atari": {
            **ATARI,
            "size": (96, 96),
            "sticky": True,
            "gray": True,
            "actions": "all",
            "pooling": 2,
            "aggregate": "max",
        },
        "atari100k": {
            **ATARI,
            "size": (64, 64),
            "sticky": False,
            "gray": False,
            "actions": "needed",
        },
        "crafter": {"size": (64, 64), "logs": False},
        "dmc": {
            "size": (64, 64),
            "repeat": 1,
            "proprio": True,
            "image": True,
            "camera": -1,
        },
        "dmlab": {"size": (64, 64), "repeat": 4, "episodic": True, "use_seed": True},
        "minecraft": {
            "size": (64, 64),
            "break_speed": 100.0,
            "logs": False,
            "length": 36000,
        },
        "grid": {"size": (48, 48), "length": 10},
        "envpool": {
            "size": (96, 96),
            "repeat": 4,
            "sticky": True,
            "gray": True,
            "actions": "all",
            "noops": 30,
            "threads": 0,
        },
        "gym": {"size": (0, 0), "info_keys": ("none",), "vector": "none"},
        "minigrid": {"size": (64, 64), "full": False},
        "procgen": {"size": (96, 96), "resize": "pillow"},
        "loconav": {"size": (64, 64), "repeat": 1, "camera": -1},
    },
    "agent": {
        "loss_scales": {
            "rec": 1,
            "rew": 1,
            "con": 1,
            "dyn": 1,
            "rep": 0.1,
            "policy": 1,
            "value": 1,
            "repval": 0.3,
        },
        "opt": {
            "lr": 4e-5,
            "agc": 0.3,
            "eps": 1e-20,
            "beta1": 0.9,
            "beta2": 0.999,
            "momentum": True,
            "wd": 0,
            "schedule": "const",
            "warmup": 1000,
            "anneal": 0,
        },
        "ac_grads": False,
        "dyn": {
            "typ": "rssm",
            "rssm": {
                **HEAD,
                "deter": 8192,
                "hidden": 1024,
                "stoch": 32,
                "classes": 64,
                "unimix": 0.01,
                "outscale": 1,
                "imglayers": 2,
                "obslayers": 1,
                "dynlayers": 1,
                "absolute": False,
                "blocks": 8,
                "free_nats": 1.0,
            },
        },
        "enc": {"typ": "simple", "simple": CODER},
        "dec": {"typ": "simple", "simple": {**CODER, "outscale": 1, "bspace": 8}},
        "rewhead": {
            **HEAD,
            "layers": 1,
            "units": 1024,
            "output": "symexp_twohot",
            "outscale": 0,
            "bins": 255,
        },
        "conhead": {
            **HEAD,
            "layers": 1,
            "units": 1024,
            "output": "binary",
            "outscale": 1,
        },
        "policy": {
            **HEAD,
            "layers": 3,
            "units": 1024,
            "minstd": 0.1,
            "maxstd": 1.0,
            "outscale": 0.01,
            "unimix": 0.01,
        },
        "value": {
            **HEAD,
            "layers": 3,
            "units": 1024,
            "output": "symexp_twohot",
            "outscale": 0,
            "bins": 255,
        },
        "policy_dist_disc": "categorical",
        "policy_dist_cont": "bounded_normal",
        "eval_mode": "sample",
        "imag_last": 0,
        "imag_length": 15,
        "horizon": 333,
        "contdisc": True,
        "imag_loss": {"slowtar": False, "lam": 0.95, "actent": 3e-4, "slowreg": 1.0},
        "repl_loss": {"slowtar": False, "lam": 0.95, "slowreg": 1.0},
        "slowvalue": {"rate": 0.02, "every": 1},
        "retnorm": {
            "impl": "perc",
            "rate": 0.01,
            "limit": 1.0,
            "perclo": 5,
            "perchi": 95,
            "debias": False,
        },
        "valnorm": {"impl": "none", "rate": 0.01, "limit": 1e-8},
        "advnorm": {"impl": "none", "rate": 0.01, "limit": 1e-8},
        "reward_grad": True,
        "repval_loss": True,
        "repval_grad": True,
        "report": True,
        "report_gradnorms": False,
    },
}

DEFAULTS = merge([]).flat

SIZES = {  # deter, hidden, classes, depth, units
    "size1m": (512, 64, 4, 4, 64),
    "size12m": (2048, 256, 16, 16, 256),
    "size25m": (3072, 384, 24, 24, 384),
    "size50m": (4096, 512, 32, 32, 512),
    "size100m": (6144, 768, 48, 48, 768),
    "size200m": (8192, 1024, 64, 64, 1024),
    "size400m": (12288, 1536, 96, 96, 1536),
}


def flat_contract(nested, prefix=""):
    flat = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat.update(flat_contract(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


class TestDefaults:
    def test_are_those_of_the_contract_and_no_others(self):
        assert flat_contract(CONTRACT) == DEFAULTS

    def test_have_the_types_of_the_contract(self):
        for key, expected in flat_contract(CONTRACT).items():
            value = DEFAULTS[key]
            assert isinstance(value, bool) == isinstance(expected, bool), key
            assert isinstance(value, str) == isinstance(expected, str), key

    @pytest.mark.parametrize(
        "key", ["run.steps", "replay.size", "replay.latent_save_bytes"]
    )
    def test_counts_are_integers_however_they_are_written(self, key):
        assert type(DEFAULTS[key]) is int
        values = merge([f"--{key}", "1e6"])
        assert values.flat[key] == 1_000_000 and type(values.flat[key]) is int

    def test_keep_to_their_own_rules(self):
        for key, value in DEFAULTS.items():
            rule = schema.read_keys()[key].rule
            assert rule is None or rule.accepts(value), key

    def test_all_numbers_but_ratios_and_intervals_have_a_rule(self):
        free = r"run\.(train_ratio|(log|report|save)_every|actor_batch)"
        for key, value in DEFAULTS.items():
            if type(value) in (int, float) and not re.fullmatch(free, key):
                assert schema.read_keys()[key].rule, key

    def test_every_kind_of_value_belongs_to_a_key(self):
        used = [schema.read_keys()[key].rule for key in DEFAULTS]
        assert all(kind in used for kind in schema.KINDS.values())


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
        expected = dict(DEFAULTS)
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
