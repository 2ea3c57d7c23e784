"""What training and acting need to know beside the networks. Agent process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dreamerv3.losses import Norms
from embodied.jax.normalize import Normalizer
from embodied.jax.optim import Optimizer

# Losses beside those of the decoded keys.
LOSSES = ("rew", "con", "dyn", "rep", "policy", "value", "repval")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the steps need to know beside the networks; names as in the config."""

    replay_context: int
    priority: bool
    loss_scales: tuple[tuple[str, float], ...]
    free_nats: float
    horizon: int
    contdisc: bool
    imag_last: int
    imag_length: int
    imagine_unroll: int
    ac_grads: bool
    reward_grad: bool
    repval_loss: bool
    repval_grad: bool
    imag_loss: tuple[tuple[str, Any], ...]
    repl_loss: tuple[tuple[str, Any], ...]
    slow_rate: float
    slow_every: int
    norms: Norms
    opt: Optimizer
    eval_mode: str

    def scale(self, loss: str) -> float:
        """Weight of a loss; those that have no name of their own are decoded keys."""
        scales = dict(self.loss_scales)
        return scales[loss if loss in LOSSES else "rec"]


def make_settings(
    config: Mapping[str, Any], replay_context: int, priority: bool, unroll: int
) -> Settings:
    """Takes the settings from the `agent` block of the configuration."""
    same = (
        *("horizon", "contdisc", "imag_last", "imag_length", "ac_grads"),
        *("reward_grad", "repval_loss", "repval_grad", "eval_mode"),
    )
    norms = [Normalizer(**config[name]) for name in ("retnorm", "valnorm", "advnorm")]
    return Settings(
        replay_context=replay_context,
        priority=priority,
        loss_scales=tuple(sorted(config["loss_scales"].items())),
        free_nats=config["dyn"]["rssm"]["free_nats"],
        imagine_unroll=unroll,
        imag_loss=tuple(sorted(config["imag_loss"].items())),
        repl_loss=tuple(sorted(config["repl_loss"].items())),
        slow_rate=config["slowvalue"]["rate"],
        slow_every=config["slowvalue"]["every"],
        norms=Norms(*norms),
        opt=Optimizer(**config["opt"]),
        **{name: config[name] for name in same},
    )
