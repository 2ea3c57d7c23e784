"""Tests that the keys and their default values are those of the contract."""

import math
import re

import pytest

from dreamerv3.cli import schema
from dreamerv3.cli.config import merge

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
    "logdir_access": "user",  # Not in the reference.
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
        "policy_beside": False,
        "deterministic": False,
        "concurrent": False,
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
