"""Typed settings of loops and roles. Any process.

    settings = RunSettings.from_args(args)
    settings.envs           # int

Users give `args` as an `elements.Config`, or as any mapping or namespace with the same
names; a loop or role converts it to `RunSettings` on entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def _restarts() -> Mapping[str, int]:
    return {"env": 10, "replay": 3, "logger": 3, "agent": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The `run` block of the configuration, and the keys beside it.

    `dreamerv3/configs.yaml` explains each of them. Settings with a default may be left
    out, since programs that were written for earlier versions do not have them.
    """

    # Beside the `run` block.
    replica: int
    replicas: int
    logdir: str
    batch_size: int
    batch_length: int
    report_length: int
    consec_train: int
    consec_report: int
    replay_context: int
    errfile: bool = False
    ipv6: bool = False
    clock_addr: str = ""
    clock_port: str = ""

    # How long, and how often.
    steps: int
    duration: float
    train_ratio: float
    log_every: float
    report_every: float
    save_every: float
    report_batches: int

    # Environments.
    envs: int
    eval_envs: int
    eval_eps: int
    episode_timeout: float
    debug: bool
    envs_per_worker: int = 1
    env_offset: int = 0
    env_timeout: float = 300.0
    render: bool = False

    # Checkpoints and failures.
    from_checkpoint: str
    from_checkpoint_regex: str = ".*"
    keep: int = 3
    max_nonfinite: int = 50
    restarts: Mapping[str, int] = dataclasses.field(default_factory=_restarts)
    stall_timeout: float = 1800.0
    stop_timeout: float = 60.0
    replica_timeout: float = 30.0

    # Started by the program, beside the run.
    view: bool = False

    # Roles, and where they are.
    actor_addr: str
    replay_addr: str
    logger_addr: str
    actor_batch: int
    actor_threads: int
    actor_timeout: float = 0.05
    agent_process: bool
    remote_replay: bool
    remote_envs: bool
    transport: str = "zmq"
    link: str = "auto"
    insecure: bool = False
    keyfile: str = ""
    usage: Mapping[str, bool]

    @property
    def policy_batch(self) -> int:
        """Rows of a policy step: `actor_batch`, or half of the environments."""
        return self.actor_batch if self.actor_batch > 0 else max(1, self.envs // 2)

    @classmethod
    def from_args(cls, args: Any) -> RunSettings:
        """Converts the `args` of a loop or role.

        Args:
          args: an `elements.Config`, a mapping, a namespace, or `RunSettings`. Further
            keys are ignored.

        Raises:
          ValueError: a key is missing, or its value has the wrong type.
        """
        if isinstance(args, cls):
            return args
        given = dict(args) if isinstance(args, Mapping) else vars(args)
        fields = dataclasses.fields(cls)
        missing = [
            field.name
            for field in fields
            if field.name not in given
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(
                "args expected the run block of the configuration, and replica, "
                "logdir, batch_size and so on beside it, got it without "
                f"{', '.join(missing)}."
            )
        return cls(
            **{
                field.name: _convert(field.name, str(field.type), given[field.name])
                for field in fields
                if field.name in given
            }
        )


def _whole(value: Any) -> int:
    number = int(value)
    if number != float(value):
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    if value not in (True, False):
        raise ValueError
    return bool(value)


# By the name of a field's type: a word for messages, and a conversion.
_TYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("a whole number", _whole),
    "float": ("a number", float),
    "bool": ("True or False", _truth),
    "str": ("a text", str),
}


def _convert(name: str, kind: str, value: Any) -> Any:
    """Converts a value to the type of its field; 1e6 counts as a whole number."""
    word, convert = _TYPES.get(kind, ("a mapping", dict))
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"args.{name}: expected {word}, got {value!r}.") from None
