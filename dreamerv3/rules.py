"""Which values each key of the configuration may have. Any process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

SCRIPTS = (
    "train",
    "train_eval",
    "eval_only",
    "parallel",
    "parallel_agent",
    "parallel_env",
    "parallel_envs",
    "parallel_logger",
    "parallel_replay",
    "import_checkpoint",
    "rollout",
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What values of a key are allowed.

    Attributes:
      allowed: completes the sentence "expected ...".
      accepts: whether a value, already of the key's type, is allowed.
      names: the allowed values, where there are few.
      meant: which of them people mean by another name that is not like it.
    """

    allowed: str
    accepts: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    meant: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)


def at_least(low: float) -> Rule:
    """Numbers from `low` on."""
    return Rule(f"at least {low:g}", lambda value: value >= low)


def above(low: float) -> Rule:
    """Numbers greater than `low`."""
    return Rule(f"more than {low:g}", lambda value: value > low)


def between(low: float, high: float) -> Rule:
    """Numbers from `low` to `high`, both included."""
    return Rule(f"from {low:g} to {high:g}", lambda value: low <= value <= high)


def choice(*names: str, **meant: str) -> Rule:
    """One of a few names; `meant` are those that stand behind other names."""
    allowed = f"one of {', '.join(names)}" if len(names) > 1 else f"only {names[0]}"
    return Rule(allowed, lambda value: value in names, names, meant)


def choices(*names: str) -> Rule:
    """A list of different names out of a few."""
    return Rule(
        f"one or more, without repetition, of {', '.join(names)}",
        lambda value: len(set(value)) == len(value) and set(value) <= set(names),
        names,
    )


def text(allowed: str, pattern: str) -> Rule:
    """Text that a regular expression matches as a whole."""
    return Rule(allowed, lambda value: bool(re.fullmatch(pattern, value)))


def _is_regex(value: str) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _is_mesh(value: str) -> bool:
    sizes = value.split(",")
    whole = all(re.fullmatch(r"-1|[1-9]\d{0,5}", size) for size in sizes)
    return len(sizes) == 3 and whole and sizes.count("-1") <= 1


_COUNT = at_least(1)
_INDEX = at_least(0)
_WEIGHT = at_least(0)
_SHARE = between(0, 1)
_RATE = Rule("more than 0 and up to 1", lambda value: 0 < value <= 1)
_DECAY = Rule("from 0 to below 1", lambda value: 0 <= value < 1)
_SECONDS = Rule("a number of seconds above 0", lambda value: value > 0)
_REGEX = Rule("a regular expression", _is_regex)
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
_HOST = r"([^\s:\[\]]+|\[[0-9a-fA-F:.]+\])"
_ADDRESS = text(
    "HOST:PORT, or HOST:{auto} for a free port", rf"{_HOST}:({_PORT}|\{{auto\}})"
)
_MESH = Rule("three sizes such as -1,1,1 of which at most one is -1", _is_mesh)
_DEVICES = Rule(
    "different indices of at least 0",
    lambda value: len(set(value)) == len(value) and min(value) >= 0,
)
_SIDES = Rule(
    "two numbers of at least 1", lambda value: len(value) == 2 and min(value) >= 1
)
_INITS = [
    f"{distribution}_{fan}"
    for distribution in ("trunc_normal", "normal", "uniform")
    for fan in ("in", "out", "avg")
]

# By pattern of the whole key; the first that matches holds. Keys without a rule, such
# as all that are True or False, take every value of their type.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"logdir|task|method", text("a text that is not empty", r".*\S.*")),
    (r"seed|replica|replay_context", _INDEX),
    (r"replicas|batch_size|consec_train|consec_report", _COUNT),
    (r"batch_length|report_length", at_least(2)),
    (r"script", choice(*SCRIPTS)),
    (r"clock_port", text("a port number, or empty", rf"{_PORT}?")),
    (r"run\.(steps|envs|eval_eps|report_batches|actor_threads)", _COUNT),
    (r"run\.(envs_per_worker|keep)", _COUNT),
    (r"run\.(eval_envs|env_offset|max_nonfinite|restarts\..*)", _INDEX),
    (r"run\.(duration|episode_timeout)", at_least(0)),
    (r"run\.(actor|env|stall)_timeout", _SECONDS),
    (r"run\.(actor|replay|logger)_addr", _ADDRESS),
    (r"run\.from_checkpoint_regex|logger\.filter", _REGEX),
    (r"run\.transport", choice("zmq", "portal")),
    (r"run\.link", choice("auto", "local", "remote")),
    (r"replay\.(size|chunksize)", _COUNT),
    (
        r"replay\.bytes",
        Rule(
            "auto, or a whole number of at least 1",
            lambda value: value == "auto" or value >= 1,
        ),
    ),
    (r"replay\.latent_save_bytes", _INDEX),
    (r"replay\.compress", choice("zstd", "none")),
    (r"replay\.(fracs\..*|prio\.exponent|recexp)", _WEIGHT),
    (r"replay\.prio\.maxfrac", _SHARE),
    (r"replay\.prio\.initial", above(0)),
    (r"replay\.priosignal", choice("model")),
    (r"jax\.platform", choice("auto", "cuda", "cpu", "tpu", gpu="cuda")),
    (r"jax\.compute_dtype", choice("bfloat16", "float32")),
    (r"jax\.(policy|train)_devices", _DEVICES),
    (r"jax\.(policy|train)_mesh", _MESH),
    (r"jax\.(mock|expect)_devices", _INDEX),
    (r"jax\.coordinator_address", text("HOST:PORT, or empty", rf"({_HOST}:{_PORT})?")),
    (r"logger\.outputs", choices("jsonl", "tensorboard", "terminal", "scope", "wandb")),
    (r"logger\.fps", _COUNT),
    (r"env\..*\.size", _SIDES),
    (r"env\..*\.(repeat|pooling|length)", _COUNT),
    (r"env\..*\.actions", choice("all", "needed")),
    (r"env\..*\.lives", choice("unused", "discount", "reset")),
    (r"env\..*\.noops", _INDEX),
    (r"env\..*\.aggregate", choice("max", "mean")),
    (r"env\..*\.resize", choice("pillow")),
    (r"env\..*\.camera", at_least(-1)),
    (r"env\..*\.break_speed", above(0)),
    (r"agent\.loss_scales\..*", _WEIGHT),
    (r"agent\.opt\.(lr|eps)", above(0)),
    (r"agent\.opt\.(agc|wd)", _WEIGHT),
    (r"agent\.opt\.beta[12]", _DECAY),
    (r"agent\.opt\.schedule", choice("const", "linear", "cosine")),
    (r"agent\.opt\.(warmup|anneal)", _INDEX),
    (r"agent\.dyn\.typ", choice("rssm")),
    (r"agent\.(enc|dec)\.typ", choice("simple")),
    (r"agent\..*\.(deter|hidden|stoch|classes|blocks|bspace|depth|units)", _COUNT),
    (r"agent\..*\.(layers|imglayers|obslayers|dynlayers)", _COUNT),
    (r"agent\..*\.mults", Rule("numbers of at least 1", lambda value: min(value) >= 1)),
    (
        r"agent\..*\.kernel",
        Rule("an odd number of at least 1", lambda value: value >= 1 and value % 2),
    ),
    (
        r"agent\..*\.bins",
        Rule("an odd number of at least 3", lambda value: value >= 3 and value % 2),
    ),
    (r"agent\..*\.act", choice("silu", "relu", "gelu", "elu", "tanh")),
    (r"agent\..*\.norm", choice("rms", "layer", "none")),
    (r"agent\..*\.winit", choice(*_INITS)),
    (r"agent\..*\.(unimix|lam)", _SHARE),
    (r"agent\..*\.(outscale|free_nats|actent|slowreg)", _WEIGHT),
    (r"agent\.(rewhead|value)\.output", choice("symexp_twohot")),
    (r"agent\.conhead\.output", choice("binary")),
    (r"agent\.policy\.(min|max)std", above(0)),
    (r"agent\.policy_dist_disc", choice("categorical")),
    (r"agent\.policy_dist_cont", choice("bounded_normal")),
    (r"agent\.eval_mode", choice("sample", "mode")),
    (r"agent\.imag_last", _INDEX),
    (r"agent\.(imag_length|horizon|slowvalue\.every)", _COUNT),
    (r"agent\..*\.rate", _RATE),
    (r"agent\..*norm\.impl", choice("none", "meanstd", "perc")),
    (r"agent\..*norm\.limit", above(0)),
    (r"agent\.retnorm\.perc(lo|hi)", between(0, 100)),
)


def rule(key: str) -> Rule | None:
    """Returns the rule of a key, or None where any value of its type will do."""
    for pattern, found in RULES:
        if re.fullmatch(pattern, key):
            return found
    return None
