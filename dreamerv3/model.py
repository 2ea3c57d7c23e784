"""The agent's networks put together, its state, and the policy step. Agent process.

Everything here is a pure function of arrays, to be compiled by the caller:

    state = init(key, obs_space, act_space, config)
    carry = init_carry(state.model, batch_size)
    carry, actions, outputs = policy(state.model, carry, obs, seed)

`dreamerv3.training` has the training step on the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from dreamerv3.decoder import Decoder, make_decoder
from dreamerv3.encoder import Encoder, make_encoder
from dreamerv3.losses import LossSettings, Norms
from dreamerv3.rssm import RSSM, Latent, flat, make_rssm
from embodied.envs.keys import SIGNALS
from embodied.jax import values
from embodied.jax.heads import (
    BinaryHead,
    NamedSpaces,
    PolicyHead,
    TwoHotHead,
    action_size,
    action_vector,
    binary_head,
    policy_head,
    twohot_head,
)
from embodied.jax.nets import Array, Builder, Recipes, draw
from embodied.jax.normalize import Normalizer
from embodied.jax.optim import Optimizer
from embodied.jax.param_names import cast_matrices, with_flat_params
from embodied.space import Space

Carry = dict[str, Any]  # deter and stoch, as in Latent, and action by key, [B, ...]

# Keys of latents in batches and in outputs for the replay.
DETER, STOCH = "dyn/deter", "dyn/stoch"

# Computes further losses [B, T] by name from networks, states and batch [B, T, ...].
ExtraLosses = Callable[[Any, Latent, Mapping[str, Array]], Mapping[str, Array]]

# Losses beside those of the decoded keys.
LOSSES = ("rew", "con", "dyn", "rep", "policy", "value", "repval")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Settings for the speed of a kind of device; results agree up to rounding.

    Attributes:
      scan: steps per iteration of the loop over replayed sequences.
      imagine: steps per iteration of the loop of imagination.
      pooled_channels: see `make_encoder`.
      acting_channels: see `make_encoder`.
      halved_channels: see `make_decoder`.
    """

    scan: int = 1
    imagine: int = 1
    pooled_channels: int = 12
    acting_channels: int = 12
    halved_channels: int = 0


# Accelerators mostly wait for small kernels, of which fewer iterations launch fewer,
# and are faster with many channels; a CPU mostly waits for the compiler.
ACCELERATOR = Tuning(
    scan=4, imagine=5, pooled_channels=64, acting_channels=0, halved_channels=12
)
CPU = Tuning()


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """Settings of training and acting beside the networks; named as in the config."""

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
    imag_loss: LossSettings
    repl_loss: LossSettings
    slow_rate: float
    slow_every: int
    norms: Norms
    opt: Optimizer
    eval_mode: str
    decoded: tuple[str, ...] = ()  # Observations whose losses `rec` scales.
    extra_losses: ExtraLosses | None = None

    def scale(self, loss: str) -> float:
        """Weight of a loss.

        Raises:
          ValueError: the loss has no weight.
        """
        scales = dict(self.loss_scales)
        name = "rec" if loss in self.decoded and loss not in scales else loss
        if name not in scales:
            raise ValueError(
                f"Loss {loss!r} expected a scale in agent.loss_scales, which has "
                f"{', '.join(scales)}. Give it one: --agent.loss_scales.{loss} 1.0"
            )
        return scales[name]


class Model(eqx.Module):
    """The trained networks, with all of their parameters."""

    enc: Encoder
    dyn: RSSM
    dec: Decoder
    rew: TwoHotHead
    con: BinaryHead
    pol: PolicyHead
    val: TwoHotHead
    settings: AgentSettings = eqx.field(static=True)


class PolicyNetworks(eqx.Module):
    """The networks that acting needs."""

    enc: Encoder
    dyn: RSSM
    pol: PolicyHead
    settings: AgentSettings = eqx.field(static=True)


class State(eqx.Module):
    """Everything that training changes.

    The flat names of its arrays are those in checkpoints: `enc/...` to `val/...`,
    `slowval/...`, `slowval_count/value`, `retnorm/lo/value`, `opt/...`.
    """

    model: Model
    slowval: TwoHotHead
    slowval_count: dict[str, Array]
    retnorm: dict[str, Any]
    valnorm: dict[str, Any]
    advnorm: dict[str, Any]
    opt: dict[str, Any]


def init(
    key: Array,
    obs_space: Mapping[str, Any],
    act_space: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    compute_dtype: str = "float32",
    replay_context: int = 1,
    priority: bool = False,
    tuning: Tuning = CPU,
    extra_losses: ExtraLosses | None = None,
) -> State:
    """Makes the state before the first update.

    Args:
      key: random key of the weights.
      obs_space: spaces by key; signals such as `reward` and `log/` keys are left out.
      act_space: spaces by key; `reset` is left out.
      config: the `agent` block of the configuration.
      compute_dtype: float32 or bfloat16.
      replay_context: steps of context before each sequence.
      priority: whether training returns priorities for the replay.
      tuning: settings for the speed of the device.
      extra_losses: computes further losses; see `ExtraLosses`.

    Raises:
      ValueError: a space, the name of a key, or a loss scale cannot be used.
    """
    spaces = _observations(obs_space)
    settings = _make_settings(
        *(config, replay_context, priority, tuning.imagine, spaces, extra_losses)
    )
    actions = named_spaces(act_space, ("reset",))
    if not actions:
        raise ValueError("The agent expected at least one action beside reset.")
    dtype = compute_dtype
    recipes: Recipes = {}
    rssm = config["dyn"]["rssm"]
    stoch = rssm["stoch"] * rssm["classes"]
    features = rssm["deter"] + stoch

    def build(name: str, part: str) -> Builder:
        return Builder.of(recipes, name, config[part], dtype)

    enc, tokens = make_encoder(
        *(recipes, spaces, config["enc"]["simple"], dtype),
        *(tuning.pooled_channels, tuning.acting_channels),
    )
    model = Model(
        enc=enc,
        dyn=make_rssm(recipes, action_size(actions), tokens, rssm, dtype, tuning.scan),
        dec=make_decoder(
            *(recipes, spaces, rssm["deter"], stoch, config["dec"]["simple"], dtype),
            tuning.halved_channels,
        ),
        rew=twohot_head(build("rew", "rewhead"), features, config["rewhead"]),
        con=binary_head(build("con", "conhead"), features, config["conhead"]),
        pol=policy_head(build("pol", "policy"), features, actions, config["policy"]),
        val=twohot_head(build("val", "value"), features, config["value"]),
        settings=settings,
    )
    model = with_flat_params(jax.tree.map(jnp.asarray, model), draw(key, recipes))
    return State(
        model=model,
        # A copy, since a buffer of the state can be donated only once.
        slowval=jax.tree.map(jnp.copy, model.val),
        slowval_count={"value": jnp.zeros((), jnp.int32)},
        opt=settings.opt.init(model),
        **settings.norms.init(),
    )


def init_carry(params: Model | PolicyNetworks, batch: int) -> Carry:
    """Carry before the first step, for both policies and training: zeros."""
    action = {
        key: jnp.zeros((batch, *space.shape), values.jax_dtype(space))
        for key, space in params.pol.spaces
    }
    return {**params.dyn.initial(batch), "action": action}


def policy(
    params: Model | PolicyNetworks,
    carry: Carry,
    obs: Mapping[str, Array],
    seed: Array,
    mode: str = "train",
) -> tuple[Carry, dict[str, Array], dict[str, Array]]:
    """Chooses actions for a batch of observations.

    Args:
      params: networks.
      carry: recurrent state and last action of each env.
      obs: [B, ...] by key, `is_first` included.
      seed: random key, or its data, or an integer.
      mode: `train` or `eval`.

    Returns:
      The new carry, actions [B, ...] by key, and, if sequences are replayed with
      context, the latents [B, ...] to store with the transition.
    """
    if mode not in ("train", "eval"):
        raise ValueError(f"policy expected mode train or eval, got {mode!r}.")
    batch = obs["is_first"].shape[0]
    noise = policy_noise(params, seed, batch)
    if mode == "eval" and params.settings.eval_mode == "mode":
        noise["action"] = None
    latent, actions = policy_step(params, carry, obs, noise)
    outputs = pack_latent(latent) if params.settings.replay_context else {}
    return {**latent, "action": actions}, actions, outputs


def policy_noise(
    params: Model | PolicyNetworks, seed: Array, batch: int
) -> dict[str, Any]:
    """Draws the noise of a policy step: for the states, and for the actions by key."""
    state_key, action_key = jax.random.split(as_key(seed))
    return {
        "state": params.dyn.noise(state_key, (batch,)),
        "action": params.pol.noise(action_key, (batch,)),
    }


def policy_step(
    params: Model | PolicyNetworks,
    carry: Carry,
    obs: Mapping[str, Array],
    noise: Mapping[str, Any],
) -> tuple[Latent, dict[str, Array]]:
    """Returns the new states, and actions [B, ...] by key.

    Args:
      params: networks.
      carry: recurrent state and last action of each env.
      obs: [B, ...] by key, `is_first` included.
      noise: from `policy_noise`; where `action` is None, the most likely actions are
        taken.
    """
    latent, _ = params.dyn.step(
        {"deter": carry["deter"], "stoch": carry["stoch"]},
        action_vector(params.pol.spaces, carry["action"]),
        params.enc(obs),
        obs["is_first"],
        noise["state"],
    )
    dists = params.pol(features(latent))
    if noise["action"] is None:
        return latent, params.pol.mode(dists)
    return latent, params.pol.sample(dists, noise["action"])


def policy_params(model: Model) -> PolicyNetworks:
    """Returns the networks that acting needs, with matrices in the compute dtype.

    Each step casts them anyway, so this does not change the actions.
    """
    parts = {
        name: part
        for name, part in model.dyn.parts.items()
        if not name.startswith("prior")
    }
    dyn = RSSM(parts, model.dyn.cell, model.dyn.scan_unroll)
    chosen = PolicyNetworks(model.enc.for_acting(), dyn, model.pol, model.settings)
    return cast_matrices(chosen, model.dyn.cell.dtype)


def features(latent: Latent) -> Array:
    """Input of all heads: [deter, flat stoch], [..., F]."""
    return jnp.concatenate([latent["deter"], flat(latent["stoch"])], -1)


def pack_latent(latent: Latent) -> dict[str, Array]:
    """Latents as the replay stores them: deter, and stoch as class indices."""
    classes = latent["stoch"].shape[-1]
    index = jnp.argmax(latent["stoch"], -1)
    dtype = jnp.uint8 if classes <= 256 else jnp.uint16
    deter = latent["deter"]
    # Values that are not finite would return with every batch from the replay.
    deter = jnp.where(jnp.isfinite(deter), deter, 0)
    return {DETER: deter, STOCH: index.astype(dtype)}


def unpack_latent(params: Model, deter: Array, stoch: Array) -> Latent:
    """Inverse of `pack_latent`; also takes stoch as one-hots."""
    cell = params.dyn.cell
    if stoch.ndim == deter.ndim:
        index = stoch.astype(jnp.int32)
        stoch = jax.nn.one_hot(index, cell.classes, dtype=cell.dtype)
    return {"deter": deter.astype(cell.dtype), "stoch": stoch.astype(cell.dtype)}


def named_spaces(spaces: Mapping[str, Any], without: Container[str]) -> NamedSpaces:
    """Spaces sorted by key, except `log/` keys and those in `without`."""
    return tuple(
        (key, Space.of(spaces[key]))
        for key in sorted(spaces)
        if key not in without and not key.startswith("log/")
    )


def as_key(seed: Array) -> Array:
    """Makes a random key from a key, a key's data, or an integer."""
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    if seed.ndim == 0:
        return jax.random.key(seed)
    return jax.random.wrap_key_data(seed.astype(jnp.uint32))


def _make_settings(
    config: Mapping[str, Any],
    replay_context: int,
    priority: bool,
    unroll: int,
    spaces: NamedSpaces,
    extra_losses: ExtraLosses | None,
) -> AgentSettings:
    """Takes the settings from the `agent` block of the configuration."""
    _check_scales(config["loss_scales"], extra_losses)
    same = (
        *("horizon", "contdisc", "imag_last", "imag_length", "ac_grads"),
        *("reward_grad", "repval_loss", "repval_grad", "eval_mode"),
    )
    norms = [Normalizer(**config[name]) for name in ("retnorm", "valnorm", "advnorm")]
    return AgentSettings(
        replay_context=replay_context,
        priority=priority,
        loss_scales=tuple(sorted(config["loss_scales"].items())),
        free_nats=config["dyn"]["rssm"]["free_nats"],
        imagine_unroll=unroll,
        imag_loss=LossSettings(**config["imag_loss"]),
        repl_loss=LossSettings(**config["repl_loss"]),
        slow_rate=config["slowvalue"]["rate"],
        slow_every=config["slowvalue"]["every"],
        norms=Norms(*norms),
        opt=Optimizer(**config["opt"]),
        decoded=tuple(key for key, _ in spaces),
        extra_losses=extra_losses,
        **{name: config[name] for name in same},
    )


def _check_scales(
    scales: Mapping[str, float], extra_losses: ExtraLosses | None
) -> None:
    unknown = sorted(set(scales) - {*LOSSES, "rec"})
    if unknown and extra_losses is None:
        raise ValueError(
            f"agent.loss_scales: expected the names of losses, {', '.join(LOSSES)} and "
            f"rec, got {', '.join(unknown)}. Additional losses need an agent that "
            "defines extra_losses."
        )


def _observations(obs_space: Mapping[str, Any]) -> NamedSpaces:
    spaces = named_spaces(obs_space, SIGNALS)
    taken = sorted({key for key, _ in spaces} & set(LOSSES))
    if taken:
        raise ValueError(
            f"Observations expected other names than those of losses "
            f"({', '.join(LOSSES)}), got {', '.join(taken)}. Rename them in the "
            "environment."
        )
    return spaces
