"""Which values of the configuration do not go together. Any process."""

from __future__ import annotations

import difflib
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from embodied.envs import registry

Flat = dict[str, Any]  # Values by full key, such as 'run.envs'.

ENV_SCRIPTS = ("parallel_env", "parallel_envs")  # Run on hosts that only step envs.
# Of which a logdir has one at a time.
OWNING_SCRIPTS = (
    *("train", "train_eval", "rollout", "parallel", "parallel_agent"),
    "import_checkpoint",
)

# Which addresses a program shares with roles that were started elsewhere.
SHARED_ADDRESSES = {
    "parallel_agent": ("actor_addr", "replay_addr", "logger_addr"),
    "parallel_env": ("actor_addr",),
    "parallel_envs": ("actor_addr",),
    "parallel_logger": ("logger_addr",),
    "parallel_replay": ("replay_addr",),
}

SMALLEST_MAP, LARGEST_MAP = 3, 16  # Sides of the smallest feature map of an image.


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most like `name`, or an empty string.

    A name without its group, such as `envs`, is like the key that ends with it.
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
    checks = (_task, _hosts, _batches, _actor, _addresses, _devices, _agent, _images)
    return [problem for check in checks for problem in check(flat)]


def _task(flat: Flat) -> Iterator[str]:
    task, script = flat["task"], flat["script"]
    suite, _, name = task.partition("_")
    if suite not in registry.SUITES and ":" not in task:
        near = nearest(suite, registry.SUITES)
        hint = f" Did you mean {near}_{name or 'NAME'}?" if near else ""
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
    """An evaluation that is given no checkpoint looks into its logdir."""
    path = pathlib.Path(logdir).expanduser()
    if (path / "ckpt").is_dir():
        return
    if "{timestamp}" in logdir:  # By default: nobody has named one.
        found = "got none of it. Set --logdir"
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
    for role in ("train", "policy"):
        devices = flat[f"jax.{role}_devices"]
        for name, count in (("mock", mock), ("expect", expect)):
            if count and max(devices) >= count:
                yield (
                    f"jax.{role}_devices: expected indices below "
                    f"jax.{name}_devices ({count}), got {list(devices)}."
                )
        total = len(devices) * (flat["replicas"] if role == "train" else 1)
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
    key = f"env.{flat['task'].partition('_')[0]}.size"
    if flat["random_agent"] or key not in flat:
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
