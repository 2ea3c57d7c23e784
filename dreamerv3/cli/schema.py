"""Allowed values of the keys of the configuration, and combinations that cannot work.

Any process. `configs.yaml` has the default, the explanation and the allowed values of
each key in one place. This module reads them from there; its code defines only the
kinds of values, and the combinations that cannot work.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dreamerv3.cli.task_origin import suite_of
from embodied.envs import registry

# Groups whose keys may have any name: arguments of environments, and the scales of
# losses, which include those of the user's own losses.
OPEN_GROUPS = ("env.gym.kwargs.", "agent.loss_scales.")
CONFIGS = pathlib.Path(__file__).parent.with_name("configs.yaml")

Flat = dict[str, Any]  # Values by full key, such as 'run.envs'.

ENV_SCRIPTS = ("parallel_env", "parallel_envs")  # Run on hosts that only step envs.
# Programs of which a logdir can have one at a time.
OWNING_SCRIPTS = (
    *("train", "train_eval", "rollout", "parallel", "parallel_agent"),
    *("import_checkpoint", "ray"),
)

# Addresses that a program shares with roles that were started elsewhere.
SHARED_ADDRESSES = {
    "parallel_agent": ("actor_addr", "replay_addr", "logger_addr"),
    "parallel_env": ("actor_addr",),
    "parallel_envs": ("actor_addr",),
    "parallel_logger": ("logger_addr",),
    "parallel_replay": ("replay_addr",),
}

SMALLEST_MAP, LARGEST_MAP = 3, 16  # Sides of the smallest feature map of an image.

FILLED_IN = ("{timestamp}", "{task}", "{seed}")  # In the name of a logdir.
_LINE = re.compile(r"( *)([^\s:#][^:]*):(?: (.*?))?(?:(?:^| +)# (.*))?")
_INDENT = 2  # Spaces per level in configs.yaml.


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a key may have.

    Attributes:
      allowed: completes the sentence "expected ...".
      accepts: tells whether a value, already of the key's type, is allowed.
      names: the allowed values, if they can be listed.
      word: the text that is allowed beside numbers, such as `auto`.
    """

    allowed: str
    accepts: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    word: str = ""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the defaults, or a group of keys.

    Attributes:
      name: the full key.
      default: the default as written in `configs.yaml`; empty for a group.
      explanation: the comment.
      rule: from the brackets at the end of the comment; None if any value of the
        default's type is allowed.
    """

    name: str
    default: str
    explanation: str
    rule: Rule | None


@functools.cache
def read_keys() -> dict[str, Key]:
    """Reads the keys of the defaults with their comments, in the order of the file.

    A comment stands on the key's own line or directly above it. This reads lines, and
    not YAML, because parsers drop comments; every key has a line of its own.
    """
    keys: dict[str, Key] = {}
    path: list[str] = []
    comment = ""
    for line in _default_lines():
        if line.lstrip().startswith("#"):
            comment = f"{comment} {line.strip('# ')}".strip()
            continue
        match = _LINE.fullmatch(line)
        if match:
            indent, name, default, beside = match.groups()
            path = [*path[: len(indent) // _INDENT - 1], name]
            comment = " ".join(filter(None, (comment, beside)))
            rule = None
            if comment.endswith("]"):
                comment, _, allowed = comment.removesuffix("]").rpartition(" [")
                rule = parse_rule(allowed)
            full = ".".join(path)
            keys[full] = Key(full, default or "", comment, rule)
        comment = ""
    return keys


def parse_rule(text: str) -> Rule:
    """Makes a rule from the text in the brackets of `configs.yaml`.

    Raises:
      ValueError: the text has none of the forms that the file explains.
    """
    if text in KINDS:
        return KINDS[text]
    form, _, rest = text.partition(" of ")
    names = tuple(rest.split(", "))
    if form == "one":
        return _one_of(names)
    if form == "several":
        return Rule(
            f"one or more, without repetition, of {rest}",
            lambda value: len(set(value)) == len(value) and set(value) <= set(names),
            names,
        )
    if text.startswith("only "):
        name = text.removeprefix("only ")
        return Rule(text, lambda value: value == name, (name,))
    return _number_rule(text)


def _number_rule(text: str) -> Rule:
    """Makes a rule such as `>= 0, < 1`, which holds for each number of a list."""
    tests: list[tuple[Callable[[Any, Any], bool], float]] = []
    words = []
    for term in text.split(", "):
        sign, _, bound = term.partition(" ")
        if sign not in _COMPARISONS or bool(bound) == (sign == "odd"):
            raise ValueError(f"configs.yaml: expected allowed values, got [{text}].")
        word, compare = _COMPARISONS[sign]
        limit = float(bound or 1)
        tests.append((compare, limit))
        words.append(f"{word} {limit:g}" if bound else word)

    def accepts(value: Any) -> bool:
        values = value if isinstance(value, tuple) else (value,)
        return all(compare(x, limit) for compare, limit in tests for x in values)

    allowed = re.sub("^at least (.*) and up to", r"from \1 to", " and ".join(words))
    return Rule(allowed, accepts)


_COMPARISONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    ">=": ("at least", operator.ge),
    ">": ("more than", operator.gt),
    "<=": ("up to", operator.le),
    "<": ("below", operator.lt),
    "odd": ("odd", lambda value, _: value % 2 == 1),
}


def _one_of(names: tuple[str, ...]) -> Rule:
    allowed = f"one of {', '.join(names)}"
    return Rule(allowed, lambda value: value in names, names)


def _matching(allowed: str, pattern: str) -> Rule:
    """Makes a rule for text that a regular expression matches as a whole."""
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


_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
_HOST = r"([^\s:\[\]]+|\[[0-9a-fA-F:.]+\])"

_RESOURCE = re.compile(r"[A-Za-z_][\w.:-]*=(\d+|\d*\.\d+)")

_COUNT_OR_AUTO = Rule(
    "auto, or a whole number of at least 1",
    lambda value: value == "auto" or value >= 1,
    word="auto",
)

# Kinds of values that several keys have, or that only code can check.
KINDS = {
    "text": _matching("a text that is not empty", r".*\S.*"),
    "regex": Rule("a regular expression", _is_regex),
    "port": _matching("a port number, or empty", rf"{_PORT}?"),
    "address": _matching(
        "HOST:PORT, or HOST:{auto} for a free port", rf"{_HOST}:({_PORT}|\{{auto\}})"
    ),
    "coordinator": _matching("HOST:PORT, or empty", rf"({_HOST}:{_PORT})?"),
    "count": _COUNT_OR_AUTO,
    "names": Rule("names", lambda value: all(name.strip() for name in value)),
    "resources": Rule(
        "auto, or names with amounts, such as CPU=2 GPU=1",
        lambda value: value == ("auto",) or all(map(_RESOURCE.fullmatch, value)),
    ),
    "mesh": Rule("three sizes such as -1,1,1 of which at most one is -1", _is_mesh),
    "devices": Rule(
        "different indices of at least 0",
        lambda value: len(set(value)) == len(value) and min(value) >= 0,
    ),
    "sides": Rule(
        "two numbers of at least 1", lambda value: len(value) == 2 and min(value) >= 1
    ),
    "sides or zeros": Rule(
        "two numbers of at least 1, or zeros",
        lambda value: len(value) == 2 and (min(value) >= 1 or max(value) == 0),
    ),
    "initialisation": _one_of(
        tuple(
            f"{distribution}_{fan}"
            for distribution in ("trunc_normal", "normal", "uniform")
            for fan in ("in", "out", "avg")
        )
    ),
}


def _default_lines() -> Iterator[str]:
    inside = False
    for line in CONFIGS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#")):
            inside = line == "defaults:"
        elif inside:
            yield line


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most like `name`, or an empty string.

    A name without its group, such as `envs`, finds the key that ends with it.
    """
    known = list(known)
    endings: dict[str, str] = {}
    for other in known:
        endings.setdefault(other.rpartition(".")[2], other)
    if name in endings:
        return endings[name]
    if "." not in name:
        known = [*known, *endings]
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return endings.get(found[0], found[0]) if found else ""


def combination_problems(flat: Flat) -> list[str]:
    """Returns a sentence for each combination of values that cannot work."""
    checks = (
        _logdir,
        _task,
        _hosts,
        _batches,
        _actor,
        _addresses,
        _devices,
        _agent,
        _images,
    )
    return [problem for check in checks for problem in check(flat)]


def _logdir(flat: Flat) -> Iterator[str]:
    logdir = flat["logdir"]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", logdir):
        yield (
            f"logdir: expected a folder of this machine, got {logdir!r}. Saves need a "
            "file system: mount it, or copy the folder when the run has ended."
        )
    if set(re.findall(r"\{\w*\}", logdir)) - set(FILLED_IN):
        yield (
            f"logdir: expected only {', '.join(FILLED_IN)} in braces, which are filled "
            f"in, got {logdir!r}."
        )


def _task(flat: Flat) -> Iterator[str]:
    task, script = flat["task"], flat["script"]
    suite, _, name = task.partition("_")
    if suite not in registry.SUITES and ":" not in task:
        near = nearest(suite, registry.SUITES)
        hint = f" Did you mean {near}_{name or 'NAME'}?" if near else ""
        if re.search(r"-v\d+$", task):  # Ids of Gymnasium end like this.
            hint = f" Did you mean gym_{task}?"
        yield (
            f"task: expected SUITE_NAME with one of the suites "
            f"{', '.join(sorted(registry.SUITES))}, or your own package.module:Name, "
            f"got {task!r}.{hint}"
        )
    elif suite in registry.SUITES and not name:
        yield (
            f"task: expected {suite}_NAME, got {task!r}. "
            f"The suite has: {registry.SUITES[suite].doc}"
        )
    if not flat["run.from_checkpoint"]:
        if script == "import_checkpoint":
            yield (
                "run.from_checkpoint: expected the folder of a checkpoint for "
                f"--script {script}, got ''."
            )
        elif script == "eval_only":
            yield from _evaluated(flat["logdir"])


def _evaluated(logdir: str) -> Iterator[str]:
    """Yields a sentence if the logdir of an evaluation has no checkpoints."""
    path = pathlib.Path(logdir).expanduser()
    if (path / "ckpt").is_dir():
        return
    if "{timestamp}" in logdir:  # The default: no logdir was given.
        found = "but no logdir was given. Set --logdir"
    elif path.name == "ckpt" and path.is_dir():
        found = f"got {logdir}, a folder inside one. Set --logdir {path.parent}"
    elif path.is_dir():
        found = f"got {logdir}, in which there is no folder ckpt. Set another --logdir"
    else:
        found = f"got {logdir}, which does not exist. Set another --logdir"
    yield (
        "logdir: expected that of a run for --script eval_only, with its checkpoints "
        f"in the folder ckpt, {found}, or --run.from_checkpoint."
    )


def _hosts(flat: Flat) -> Iterator[str]:
    replica, replicas, script = flat["replica"], flat["replicas"], flat["script"]
    if script == "parallel_env":
        envs = flat["run.envs"] + flat["run.eval_envs"]
        if replica >= envs:
            yield (
                f"replica: expected an env id below run.envs + run.eval_envs ({envs}) "
                f"for --script parallel_env, got {replica}."
            )
    elif script not in ENV_SCRIPTS and replica >= replicas:
        yield (
            f"replica: expected an index below replicas ({replicas}), got {replica}. "
            f"Set --replicas to the number of hosts."
        )


def _batches(flat: Flat) -> Iterator[str]:
    context, capacity = flat["replay_context"], flat["replay.size"]
    train = flat["consec_train"] * flat["batch_length"]
    report = flat["consec_report"] * flat["report_length"]
    batch = flat["batch_size"] * (train + context)
    if batch > capacity:
        yield (
            f"replay.size: expected at least one batch, which is batch_size "
            f"({flat['batch_size']}) times consec_train * batch_length + "
            f"replay_context ({train + context}) = {batch} steps, got {capacity}."
        )
    if flat["run.eval_envs"] and report + context > capacity // 10:
        yield (
            f"replay.size: expected a tenth of it, which evaluation gets, to hold "
            f"one sequence of consec_report * report_length + replay_context = "
            f"{report + context} steps, got {capacity}."
        )
    if report > train:
        yield (
            f"report_length: expected reports to fit the sequences of the replay, "
            f"consec_report * report_length of at most consec_train * batch_length "
            f"({train}), got {report}."
        )
    if not any(value for key, value in flat.items() if key.startswith("replay.fracs.")):
        yield (
            "replay.fracs: expected uniform, priority or recency above 0, got 0 for "
            "each."
        )


def _actor(flat: Flat) -> Iterator[str]:
    batch, envs = flat["run.actor_batch"], flat["run.envs"]
    if batch > envs:
        yield (
            f"run.actor_batch: expected at most run.envs ({envs}), or -1 for half of "
            f"them, got {batch}. A batch that large would never be full."
        )


def _addresses(flat: Flat) -> Iterator[str]:
    script = flat["script"]
    shared = [(name, f"--script {script}") for name in SHARED_ADDRESSES.get(script, ())]
    if script == "parallel" and flat["run.remote_replay"]:
        shared.append(("replay_addr", "--run.remote_replay True"))
    if script == "parallel" and flat["run.remote_envs"]:
        shared.append(("actor_addr", "--run.remote_envs True"))
    for name, reason in shared:
        address = flat[f"run.{name}"]
        if "{auto}" in address:
            yield (
                f"run.{name}: expected HOST:PORT with {reason}, got {address!r}. "
                f"Roles that are started elsewhere do not know a port chosen here."
            )


def _devices(flat: Flat) -> Iterator[str]:
    mock, expect = flat["jax.mock_devices"], flat["jax.expect_devices"]
    platform = flat["jax.platform"]
    if mock and platform not in ("auto", "cpu"):
        yield (
            f"jax.mock_devices: expected 0 with jax.platform {platform}, got {mock}. "
            f"Only the cpu can be made into several devices."
        )
    for role, single in (("train", "concurrent"), ("policy", "policy_beside")):
        devices = flat[f"jax.{role}_devices"]
        for name, count in (("mock", mock), ("expect", expect)):
            if count and max(devices) >= count:
                yield (
                    f"jax.{role}_devices: expected indices below "
                    f"jax.{name}_devices ({count}), got {list(devices)}."
                )
        total = len(devices) * (flat["replicas"] if role == "train" else 1)
        if flat[f"jax.{single}"] and total > 1:
            yield (
                f"jax.{single}: expected False with several {role} devices, got True "
                f"with {total} (jax.{role}_devices {list(devices)})."
            )
        mesh = flat[f"jax.{role}_mesh"]
        sizes = [int(size) for size in mesh.split(",")]
        product = math.prod(size for size in sizes if size != -1)
        if total % product or (-1 not in sizes and product != total):
            yield (
                f"jax.{role}_mesh: expected sizes whose product is the number of "
                f"{role} devices ({total}), got {mesh!r}."
            )
        elif role == "train":
            # Batches are split over the data and fsdp axes, not over the tensor axis.
            tensor = sizes[2] if sizes[2] != -1 else total // product
            parts = max(1, len(devices) // tensor)
            if flat["batch_size"] % parts:
                yield (
                    f"batch_size: expected a multiple of the {parts} parts that "
                    f"jax.train_devices split it into, got {flat['batch_size']}."
                )


def _agent(flat: Flat) -> Iterator[str]:
    schedule, warmup = flat["agent.opt.schedule"], flat["agent.opt.warmup"]
    anneal = flat["agent.opt.anneal"]
    if schedule != "const" and anneal <= warmup:
        yield (
            f"agent.opt.anneal: expected more than agent.opt.warmup ({warmup}) with "
            f"--agent.opt.schedule {schedule}, got {anneal}."
        )
    deter = flat["agent.dyn.rssm.deter"]
    channels = flat["agent.dec.simple.depth"] * flat["agent.dec.simple.mults"][-1]
    for key, name, value in (
        ("agent.dyn.rssm.blocks", "agent.dyn.rssm.deter", deter),
        ("agent.dec.simple.bspace", "agent.dyn.rssm.deter", deter),
        ("agent.dec.simple.bspace", "agent.dec.simple.depth * mults[-1]", channels),
    ):
        if value % flat[key]:
            yield f"{key}: expected a divisor of {name} ({value}), got {flat[key]}."
    for low, high in (
        ("agent.policy.minstd", "agent.policy.maxstd"),
        ("agent.retnorm.perclo", "agent.retnorm.perchi"),
    ):
        if flat[low] >= flat[high]:
            yield f"{low}: expected less than {high} ({flat[high]}), got {flat[low]}."


def _images(flat: Flat) -> Iterator[str]:
    task = flat["task"]
    key = f"env.{suite_of(task)}.size"
    if flat["random_agent"] or not any(flat.get(key, ())):
        return
    parts = [f"agent.{part}.simple" for part in ("enc", "dec")]
    # A stage at full resolution, which `outer` adds, does not halve the image.
    stages = {len(flat[f"{part}.mults"]) - flat[f"{part}.outer"] for part in parts}
    for count in sorted(stages):
        factor = 2**count
        low, high = SMALLEST_MAP * factor, LARGEST_MAP * factor
        if any(side % factor or not low <= side <= high for side in flat[key]):
            yield (
                f"{key}: expected multiples of {factor} from {low} to {high}, since "
                f"the networks halve images {count} times, got {list(flat[key])}."
            )
