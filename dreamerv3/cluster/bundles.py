"""Bundles of a run: what goes together, and what becomes of it. Driver.

A bundle is the part of a run that one node holds as a whole. There is one head bundle
for each replica, with agent, replay and logger; each env bundle has some environments
of a replica.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import elements

from dreamerv3.cli.config import ConfigError
from dreamerv3.cluster.bundle_actor import Place
from embodied.workers import RestartPolicy

AUTO = ("auto",)
HEAD_CORES = 3.0  # One each for agent, replay and logger.
ENV_RESOURCES = {"CPU": 1.0}
# Ray's names of accelerators, by `jax.platform`.
ACCELERATORS = {"cuda": "GPU", "tpu": "TPU"}

Resources = dict[str, float]  # Amounts by Ray's names.


@dataclasses.dataclass(frozen=True)
class EnvBundle:
    """Environments that one node steps.

    Attributes:
      offset: id of the first environment.
      envs: how many train.
      eval_envs: how many evaluate; their ids follow.
      resources: all that they need together.
      replica: index of the replica that they belong to.
      prefix: of the name, if there are several replicas.
    """

    offset: int
    envs: int
    eval_envs: int
    resources: Resources
    replica: int
    prefix: str

    @property
    def name(self) -> str:
        """Name in messages, in the dashboard and before the lines that it prints."""
        last = self.offset + self.envs + self.eval_envs - 1
        ids = f"env {last}" if last == self.offset else f"envs {self.offset} to {last}"
        return f"{self.prefix}{ids}"

    @property
    def host(self) -> dict[str, int]:
        """Keys of the `run` block that tell its program which environments to step."""
        return {
            "env_offset": self.offset,
            "envs": self.envs,
            "eval_envs": self.eval_envs,
        }


class Bundle:
    """A bundle and its actor, which is made again when it is lost.

    Attributes:
      name: of the bundle.
      resources: needed by the bundle.
      policy: how often it may be lost.
      actor: handle of the actor; None while there is none.
      actors: how many actors were made so far.
      place: where the actor is; None until Ray has placed it.
      number: of the last start of its program.
      told: number of the last start that was told to stop.
      running: whether start `number` is running.
      began: when the actor was made or, later, its program started.
    """

    def __init__(self, name: str, resources: Resources, restarts: int):
        self.name = name
        self.resources = resources
        self.policy = RestartPolicy(restarts)
        self.actor: Any = None
        self.actors = 0
        self.place: Place | None = None
        self.number = 0
        self.told = 0
        self.running = False
        self.began = time.monotonic()
        self._losses: list[float] = []
        self._in_a_row = 0

    @property
    def title(self) -> str:
        """The name, capitalised to begin a message."""
        return self.name.capitalize()

    def limit_message(self, key: str) -> str:
        """Returns the message for a bundle that was lost more often than `key` allows.

        Args:
          key: configuration key with the number of restarts.
        """
        return (
            f"{self.title}: lost more than {self.policy.restarts} times within "
            f"{self.policy.window:g} s (--{key})."
        )

    def delay(self) -> float | None:
        """Counts a loss; returns the seconds until the next start, None to give up."""
        now, policy = time.monotonic(), self.policy
        self._losses = [x for x in self._losses if now - x < policy.window] + [now]
        if len(self._losses) > policy.restarts:
            return None
        steady = now - self.began >= policy.steady
        self._in_a_row = 1 if steady else self._in_a_row + 1
        return policy.delay(self._in_a_row)


def head_names(config: elements.Config) -> list[str]:
    """Returns the names of the head bundles, one for each replica."""
    if config.replicas == 1:
        return ["head"]
    return [f"head {replica}" for replica in range(config.replicas)]


def make_env_bundles(config: elements.Config) -> list[EnvBundle]:
    """Returns the env bundles of all replicas, each of which has `run.envs`."""
    several = config.replicas > 1
    return [
        bundle
        for replica in range(config.replicas)
        for bundle in _split_envs(config, replica, f"replica {replica}, " * several)
    ]


def _split_envs(config: elements.Config, replica: int, prefix: str) -> list[EnvBundle]:
    """Distributes the environments of a replica over as few bundles as possible.

    Every bundle has at least one training environment, which its program needs, and its
    share of the evaluation environments, so that the loss of a node does not end the
    evaluation.
    """
    envs, eval_envs = config.run.envs, config.run.eval_envs
    most = config.ray.envs_per_bundle
    count = min(envs, -(-(envs + eval_envs) // most))
    each = dict(ENV_RESOURCES)
    if tuple(config.ray.env_resources) != AUTO:
        each = parse_resources(config.ray.env_resources)
    bundles: list[EnvBundle] = []
    offset = 0
    for index in range(count):
        # The first bundles get the spare training envs, the last the evaluation envs.
        train = envs // count + (index < envs % count)
        evaluate = eval_envs // count + (count - index <= eval_envs % count)
        total = train + evaluate
        resources = {name: total * amount for name, amount in each.items()}
        bundle = EnvBundle(offset, train, evaluate, resources, replica, prefix)
        bundles.append(bundle)
        offset += total
    return bundles


def head_resources(config: elements.Config, cluster: Mapping[str, float]) -> Resources:
    """Returns the head bundle's resources: as configured, or cores and accelerators.

    Args:
      config: of the run.
      cluster: resources of all nodes together, which decide the kind of accelerator
        if `jax.platform` is auto.
    """
    if tuple(config.ray.head_resources) != AUTO:
        return parse_resources(config.ray.head_resources)
    devices = 1 + max(*config.jax.train_devices, *config.jax.policy_devices)
    kind = ACCELERATORS.get(config.jax.platform, "")
    if config.jax.platform == "auto":
        kind = next((name for name in ACCELERATORS.values() if cluster.get(name)), "")
    if config.random_agent:
        kind = ""
    return {"CPU": HEAD_CORES, **({kind: float(devices)} if kind else {})}


def parse_resources(pairs: Iterable[str]) -> Resources:
    """Parses texts such as CPU=2, which the configuration has already checked."""
    found: Resources = {}
    for pair in pairs:
        name, _, amount = pair.partition("=")
        found[name] = float(amount)
    return found


def check_room(needed: Resources, nodes: Iterable[Mapping[str, float]]) -> None:
    """Raises ConfigError if no node could hold the head, even an empty one.

    Args:
      needed: resources of the head.
      nodes: all resources of each node.
    """
    nodes = list(nodes)
    if not any(fits(needed, node) for node in nodes):
        best = "; ".join(sorted({show_resources(node) for node in nodes}))
        raise ConfigError(
            "ray.head_resources: expected a node with room for the head "
            f"({show_resources(needed)}), got nodes with {best or 'nothing'}. Name "
            "what a node has: --ray.head_resources CPU=1."
        )


def fits(needed: Resources, node: Mapping[str, float]) -> bool:
    """Tells whether an empty node has the resources of a bundle."""
    return all(node.get(name, 0.0) >= amount for name, amount in needed.items())


def show_resources(resources: Mapping[str, float]) -> str:
    """Returns resources as they are written in flags, without Ray's own bookkeeping."""
    own = ("memory", "object_store_memory")
    shown = [
        f"{name}={amount:g}"
        for name, amount in sorted(resources.items())
        if name not in own and not name.startswith("node:")
    ]
    return " ".join(shown) or "nothing"


def actor_options(resources: Resources) -> dict[str, object]:
    """Returns resources as options of a Ray actor, with its own names for some."""
    rest = dict(resources)
    cpus, gpus = rest.pop("CPU", 0.0), rest.pop("GPU", 0.0)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": rest}


def explain_loss(reason: Any) -> str:
    """Returns the part of a Ray error that a person needs.

    Args:
      reason: an error, or a text that explains the loss already.
    """
    if type(reason).__name__ == "ActorUnavailableError":
        return "its node or its process cannot be reached"
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    # The last line has the cause, the others tell where it was noticed.
    return lines[-1].rstrip(".")[:500] if lines else type(reason).__name__
