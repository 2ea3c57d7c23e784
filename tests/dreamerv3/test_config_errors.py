"""Every mistake in a configuration is one readable message."""

import pytest

from dreamerv3.cli.config import ConfigError, load_config
from embodied.envs import registry

USAGE_ERRORS = {
    # Names of keys and blocks.
    "unknown key": ("--run.enws 8", "--run.enws 8", "no such key", "--run.envs?"),
    "key without its group": ("--envs 8", "--envs 8", "no such key", "--run.envs?"),
    "misspelt end of a key": ("--unitz 8", "--unitz 8", "no such key", ".units?"),
    "a group": ("--run 8", "--run 8", "group of 46", "--run.steps"),
    "pattern without a match": (
        r"--.*\.unitz 8",
        r"--.*\.unitz 8",
        "matches no key as a whole",
        ".units?",
    ),
    "pattern that is only a prefix": (r"--(run)\.env 8", "no key as a whole"),
    "broken pattern": ("--(run 8", "--(run 8", "not a regular expression"),
    "configs without its s": ("--config size1m", "no such key", "--configs?"),
    "unknown block": ("--configs size1x", "--configs size1x", "debug", "size1m?"),
    "no block": ("--configs", "--configs", "debug", "no value"),
    "value without a flag": ("8 --seed 1", "'8'", "expected a flag"),
    # Types.
    "word for an int": ("--run.envs many", "run.envs", "whole number", "'many'"),
    "fraction for an int": ("--run.steps 1.5", "run.steps", "whole number", "'1.5'"),
    "huge int": ("--run.steps 1e999999999", "run.steps", "whole number"),
    "infinite int": ("--run.steps inf", "run.steps", "whole number", "'inf'"),
    "word for a float": ("--agent.opt.lr x", "agent.opt.lr", "a number", "'x'"),
    "nan": ("--agent.opt.lr nan", "agent.opt.lr", "a number", "'nan'"),
    "infinity": ("--run.duration inf", "run.duration", "a number", "'inf'"),
    "minus infinity": ("--replay.prio.initial=-inf", "a number or inf", "'-inf'"),
    "word for a bool": ("--run.debug yes", "run.debug", "True or False", "'yes'"),
    "number for a bool": ("--run.debug 1", "run.debug", "True or False", "'1'"),
    "no value": ("--run.debug --seed 1", "run.debug", "True or False", "no value"),
    "several values": ("--run.envs 1 2", "run.envs", "whole number", "1 2"),
    "several texts": ("--task a b", "task", "one value", "a b"),
    "word in a list": ("--env.dmc.size 64 big", "env.dmc.size", "whole", "'big'"),
    "empty list": ("--logger.outputs", "logger.outputs", "one or more", "no value"),
    "bytes": ("--replay.bytes lots", "replay.bytes", "auto", "'lots'"),
    "no bytes": ("--replay.bytes 0", "replay.bytes", "at least 1", "0"),
    # Ranges and choices.
    "too small": ("--run.envs 0", "run.envs", "at least 1", "got 0"),
    "negative seed": ("--seed -1", "seed", "at least 0", "got -1"),
    "share above one": ("--replay.prio.maxfrac 2", "from 0 to 1", "got 2.0"),
    "rate of zero": ("--agent.slowvalue.rate 0", "more than 0 and up to 1", "0.0"),
    "script": ("--script trian", "script", "one of train, ", "'trian'", "train?"),
    "output": ("--logger.outputs jsonl wandbb", "outputs", "'wandbb'", "wandb?"),
    "output twice": ("--logger.outputs jsonl jsonl", "without repetition"),
    "output added twice": ("--logger.outputs+ jsonl", "without repetition"),
    "platform": ("--jax.platform gpu", "auto, cuda, cpu, tpu", "Did you mean cuda?"),
    "dtype": ("--jax.compute_dtype bfloat", "bfloat16, float32", "bfloat16?"),
    "activation": ("--agent.value.act sillu", "agent.value.act", "silu?"),
    "normalisation": ("--agent.value.norm rmsnorm", "agent.value.norm", "layer"),
    "choice like no other": ("--run.transport 7", "one of zmq, portal, got '7'."),
    "only choice": ("--agent.dyn.typ rsm", "agent.dyn.typ", "only rssm", "'rsm'"),
    "even bins": ("--agent.value.bins 254", "bins", "odd", "got 254"),
    "three sides": ("--env.dmc.size 64 64 3", "env.dmc.size", "two", "[64, 64, 3]"),
    "repeated device": ("--jax.train_devices 0 0", "different", "[0, 0]"),
    "mesh": ("--jax.train_mesh 1,1", "jax.train_mesh", "three sizes", "'1,1'"),
    "mesh of two rests": ("--jax.train_mesh=-1,-1,1", "at most one is -1"),
    "address": ("--run.actor_addr localhost", "run.actor_addr", "HOST:PORT"),
    "port": ("--run.actor_addr localhost:70000", "HOST:PORT", "70000"),
    "regex": ("--run.from_checkpoint_regex (", "regular expression", "'('"),
    "filter": ("--logger.filter (", "logger.filter", "regular expression"),
    "logdir": ("--logdir=", "logdir", "not empty", "''"),
    "bucket": ("--logdir s3://bucket/run", "folder of this machine", "s3://bucket/run"),
    "file URL": ("--logdir file:///tmp/run", "logdir", "folder of this machine"),
    "logdir to fill in": (
        "--logdir runs/{tsk}",
        "{task}",
        "got 'runs/{tsk}'",
    ),
    # Combinations.
    "suite": ("--task dumy_disc", "task", "dummy, ", "'dumy_disc'", "dummy_disc?"),
    "id of Gymnasium": ("--task CartPole-v1", "task", "Did you mean gym_CartPole-v1?"),
    "spaced id": ("--task ALE/Pong-v5", "Did you mean gym_ALE/Pong-v5?"),
    "suite alone": ("--task dummy", "task", "dummy_NAME", "disc, cont"),
    "actor batch": (
        "--run.actor_batch 5 --run.envs 4",
        "run.actor_batch",
        "at most run.envs (4)",
        "got 5",
    ),
    "batch": (
        "--batch_size 3 --batch_length 10 --report_length 2 --replay.size 32",
        "replay.size",
        "batch_size (3)",
        "= 33 steps",
        "got 32",
    ),
    "consecutive batches": (
        "--consec_train 4 --replay.size 4000",
        "consec_train * batch_length",
        "= 4112 steps",
    ),
    "evaluation": (
        "--batch_size 1 --replay.size 320",
        "a tenth",
        "report_length + replay_context = 33 steps",
        "got 320",
    ),
    "report": ("--report_length 65", "report_length", "at most", "(64)", "got 65"),
    "fractions": ("--replay.fracs.uniform 0", "replay.fracs", "above 0"),
    "replica": ("--replica 2 --replicas 2", "replica:", "below replicas (2)", "2"),
    "env id": (
        "--script parallel_env --replica 20 --run.actor_addr localhost:5000",
        "replica:",
        "below run.envs + run.eval_envs (20)",
    ),
    "no checkpoint": ("--script eval_only", "run.from_checkpoint", "eval_only"),
    "schedule": (
        "--agent.opt.schedule cosine",
        "agent.opt.anneal",
        "more than agent.opt.warmup (1000)",
        "got 0",
    ),
    "short schedule": (
        "--agent.opt.schedule linear --agent.opt.anneal 1000",
        "agent.opt.anneal",
        "got 1000",
    ),
    "blocks": ("--agent.dyn.rssm.blocks 3", "blocks", "divisor", "(8192)", "3"),
    "block space": ("--agent.dec.simple.bspace 1024", "bspace", "divisor", "(256)"),
    "deviations": ("--agent.policy.minstd 2", "minstd", "less than", "(1.0)", "2.0"),
    "percentiles": ("--agent.retnorm.perclo 95", "perclo", "less than", "(95.0)"),
    "image side": (
        "--task dmc_walk --env.dmc.size 84 84",
        "env.dmc.size",
        "multiples of 16",
        "[84, 84]",
    ),
    "small image": (
        "--task dmc_walk --env.dmc.size 32 64",
        "from 48 to 256",
        "[32, 64]",
    ),
    "large image": (
        "--task dmc_walk --env.dmc.size 64 272",
        "from 48 to 256",
        "[64, 272]",
    ),
    "image for more stages": (
        r"--.*\.mults 1 1 1 1 8 --task dmc_walk --env.dmc.size 80 96",
        "multiples of 32 from 96 to 512",
        "5 times",
    ),
    "image with a stage at full size": (
        r"--.*\.outer True --task dmc_walk --env.dmc.size 60 136",
        "multiples of 8 from 24 to 128",
        "3 times",
        "[60, 136]",
    ),
    "image with a stage at full size in one network": (
        "--agent.dec.simple.outer True --task dmc_walk --env.dmc.size 56 64",
        "multiples of 16 from 48 to 256",
        "4 times",
    ),
    "several devices at once": (
        "--jax.concurrent True --jax.train_devices 0 1",
        "jax.concurrent: expected False with several train devices, got True with 2",
        "[0, 1]",
    ),
    "several devices beside updates": (
        "--jax.policy_beside True --jax.policy_devices 0 1",
        "jax.policy_beside: expected False with several policy devices",
        "[0, 1]",
    ),
    "mock devices": ("--jax.mock_devices 2 --jax.platform cuda", "mock", "cuda"),
    "few mock devices": (
        "--jax.mock_devices 2 --jax.train_devices 2",
        "jax.train_devices",
        "below jax.mock_devices (2)",
        "[2]",
    ),
    "few devices": (
        "--jax.expect_devices 1 --jax.policy_devices 1",
        "jax.policy_devices",
        "below jax.expect_devices (1)",
    ),
    "mesh and devices": (
        "--jax.train_mesh 2,1,1",
        "jax.train_mesh",
        "number of train devices (1)",
        "'2,1,1'",
    ),
    "batch and devices": (
        "--jax.train_devices 0 1 2",
        "batch_size",
        "multiple of the 3",
        "got 16",
    ),
    "free port of a remote role": (
        "--script parallel_envs",
        "run.actor_addr",
        "HOST:PORT with --script parallel_envs",
        "localhost:{auto}",
    ),
    "free port of a remote replay": (
        "--script parallel --run.remote_replay True",
        "run.replay_addr",
        "--run.remote_replay True",
    ),
}


@pytest.fixture(autouse=True)
def image_suite(monkeypatch):
    """Registers a suite with an image size in its options, whichever suites exist."""
    suite = registry.Suite("dmc", "none:none", "none")
    monkeypatch.setattr(registry, "SUITES", {**registry.SUITES, "dmc": suite})


@pytest.mark.parametrize("name", USAGE_ERRORS)
def test_mistake_is_one_message_that_says_all(name):
    arguments, *words = USAGE_ERRORS[name]
    with pytest.raises(ConfigError) as caught:
        load_config(arguments.split(" "), {})
    assert len(caught.value.problems) == 1
    message = str(caught.value)
    assert "\n" not in message
    assert "mean ?" not in message
    for word in words:
        assert word in message


def test_job_completion_index_is_checked():
    with pytest.raises(ConfigError, match=r"replica: expected a whole number.*'first'"):
        load_config([], {"JOB_COMPLETION_INDEX": "first"})


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(["--run.enws", "8", "--seed", "x", "--batch_size", "0"])
    keys = [problem.split()[0] for problem in caught.value.problems]
    assert keys == ["--run.enws", "seed:", "batch_size:"]
    with pytest.raises(ConfigError) as caught:
        load_config(["--task", "dumy_disc", "--report_length", "100"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        "--random_agent True --task dmc_walk --env.dmc.size 84 84",
        "--task dmc_walk --env.dmc.size 48 256",
        r"--.*\.outer True --task dmc_walk --env.dmc.size 24 128",
        "--agent.enc.simple.outer True --task dmc_walk --env.dmc.size 48 128",
        "--task dmc_walk --env.atari.size 84 84",
        "--replicas 3 --replica 2",
        "--agent.opt.schedule cosine --agent.opt.anneal 1001",
        "--run.envs 4 --run.actor_batch 4",
        "--jax.train_devices 0 1 --jax.train_mesh 2,1,1",
        "--jax.train_devices 0 1 2 --jax.train_mesh 1,1,-1",
        "--replicas 2 --jax.train_mesh 2,-1,1",
        "--batch_size 1 --replay.size 330",
        "--task tests.module:Name",
        "--script parallel_envs --run.actor_addr [::1]:5000",
        "--script parallel",
        "--run.actor_batch 0",
    ],
)
def test_what_only_looks_like_a_mistake_is_accepted(arguments):
    assert load_config(arguments.split(), {})
