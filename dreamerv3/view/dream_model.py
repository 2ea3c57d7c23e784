"""The world model of a run, one step at a time, for a single sequence. With JAX.

model = load_model(logdir, config)
latent = model.observe(model.initial(), step)     # Shows the model a recorded step.
latent = model.imagine(latent, action)            # Predicts what an action leads to.
model.show(latent)                                # Decodes the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import elements
import equinox as eqx
import jax
import numpy as np

from dreamerv3 import model as networks
from dreamerv3.agent import make_algorithm, set_up_devices
from dreamerv3.policies.acting_agent import on_one_device
from dreamerv3.policies.inference import agent_spaces, checkpoint_errors
from embodied.base import Array, Spaces, Tree
from embodied.jax.distributions import Categorical
from embodied.jax.heads import action_vector
from embodied.jax.param_names import (
    cast_matrices,
    choose_arrays,
    flat_params,
    with_flat_params,
)
from embodied.run.saving import read_agent
from embodied.space import Space

Step = Mapping[str, Any]
# A batch of one: `latent`, which includes the action that followed, and, once they were
# decoded, `shown` and `chosen`.
State = dict[str, Any]


def load_model(logdir: Path, config: elements.Config) -> DreamModel:
    """Loads the networks of a run's newest checkpoint, on the CPU.

    Raises:
      CheckpointError: there is no whole checkpoint, or it does not fit its config.
    """
    saved = read_agent(logdir)
    obs_space, act_space = agent_spaces(config, saved)
    config = on_one_device(config, "cpu")
    backend = set_up_devices(config)
    algorithm = make_algorithm(obs_space, act_space, config, backend)

    def init(key: Array) -> Any:
        return cast_matrices(algorithm.init(key).model, backend.compute_dtype)

    shapes = jax.eval_shape(init, jax.random.key(0))
    sizes = {name: leaf.shape for name, leaf in flat_params(shapes).items()}
    with checkpoint_errors(saved):
        given = {k: v for k, v in saved.data["params"].items() if k in sizes}
        found = choose_arrays(given, sizes, None)
    model = with_flat_params(shapes, found)
    return DreamModel(model, obs_space, act_space, saved.step)


class DreamModel:
    """Compiled single steps of the world model. Belongs to one thread.

    Attributes:
      decoded: spaces of the observations that can be shown, by key.
      actions: spaces of the actions, by key.
      keys: of the observations that the model is shown.
      step: step of the run at which the model was saved.
    """

    def __init__(
        self, model: networks.Model, obs_space: Spaces, act_space: Spaces, step: int
    ):
        self.step = step
        self.decoded: tuple[tuple[str, Space], ...] = (
            *model.dec.images,
            *model.dec.vectors,
        )
        self.actions = model.pol.spaces
        self.keys = [key for key, _ in self.decoded]
        self._model = model
        self._key = jax.random.key(0)
        self._observe = eqx.filter_jit(_observe)
        self._imagine = eqx.filter_jit(_imagine)
        self._decode = eqx.filter_jit(_decode)

    def initial(self) -> State:
        """Returns the state before the first step."""
        return {"latent": networks.init_carry(self._model, 1)}

    def no_action(self) -> dict[str, np.ndarray]:
        """Returns the action before the first step: zeros."""
        return {key: np.zeros(x.shape, x.dtype) for key, x in self.actions}

    def observe(self, state: State, step: Step) -> State:
        """Shows the model a step: its observation, and the action that followed."""
        obs = {key: np.asarray(step[key])[None] for key in [*self.keys, "is_first"]}
        latent = self._observe(self._model, state["latent"], obs, self._next())
        return self.followed({"latent": latent}, step)

    def followed(self, state: State, action: Mapping[str, Any]) -> State:
        """Returns a state with the action that followed it."""
        given = {key: np.asarray(action[key], x.dtype)[None] for key, x in self.actions}
        return {**state, "latent": {**state["latent"], "action": given}}

    def imagine(self, state: State, action: Mapping[str, Any]) -> State:
        """Returns the state that an action leads to, by the model alone."""
        latent = self.followed(state, action)["latent"]
        return {"latent": self._imagine(self._model, latent, self._next())}

    def choose(self, state: State) -> dict[str, np.ndarray]:
        """Returns an action that the policy has sampled in a state."""
        chosen = self._decoded(state)["chosen"]
        return {key: np.asarray(chosen[key])[0] for key, _ in self.actions}

    def show(self, state: State) -> dict[str, Any]:
        """Decodes a state: observations, reward, continuation, value, policy."""
        shown = jax.device_get(self._decoded(state)["shown"])
        policy = {
            key: _describe_choice(space, shown["policy"][key])
            for key, space in self.actions
        }
        return {
            "obs": {key: value[0] for key, value in shown["obs"].items()},
            "reward": float(shown["reward"][0]),
            "continues": float(shown["continues"][0]),
            "value": float(shown["value"][0]),
            "policy": policy,
        }

    def action(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns an action from plain values; missing ones are 0, or the lowest class.

        Raises:
          ValueError: a value does not fit its space.
        """
        actions = self.no_action()
        for key, space in self.actions:
            if key not in given:
                if space.discrete:
                    actions[key] = np.full(space.shape, space.low, space.dtype)
                continue
            try:
                value = np.asarray(given[key], np.float64).reshape(space.shape)
                actions[key] = value.astype(space.dtype)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Action {key!r} expected numbers of shape {space.shape}, got "
                    f"{str(given[key])[:80]}."
                ) from error
            if not np.isfinite(value).all():
                raise ValueError(f"Action {key!r} expected finite numbers.")
            low, high = space.limits if space.discrete else (space.low, space.high)
            actions[key] = np.clip(actions[key], low, high).astype(space.dtype)
        return actions

    def clipped(self, action: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns an action within its bounds, beyond which policies may sample."""
        return {
            key: np.clip(action[key], space.low, space.high).astype(space.dtype)
            if not space.discrete
            else np.asarray(action[key], space.dtype)
            for key, space in self.actions
        }

    def describe(self) -> dict[str, Any]:
        """Returns the spaces for the page."""
        return {
            "actions": [describe_space(key, space) for key, space in self.actions],
            "observations": [describe_space(k, space) for k, space in self.decoded],
        }

    def _decoded(self, state: State) -> State:
        """Decodes a state on first use, since most states of the context never are."""
        if "shown" not in state:
            state |= self._decode(self._model, state["latent"], self._next())
        return state

    def _next(self) -> Array:
        self._key, key = jax.random.split(self._key)
        return key


def describe_space(key: str, space: Space) -> dict[str, Any]:
    """Returns what a page needs to know about a space.

    `variables` has the lowest value and the number of classes of each element, in
    order; it is None for a continuous space.
    """
    variables = None
    if space.discrete:
        lows = np.asarray(space.limits[0]).reshape(-1).tolist()
        counts = np.asarray(space.classes).reshape(-1).tolist()
        variables = [{"low": int(a), "classes": b} for a, b in zip(lows, counts)]
    low, high = (np.asarray(x, np.float64) for x in (space.low, space.high))
    return {
        "key": key,
        "shape": list(space.shape),
        "variables": variables,
        "low": float(np.clip(low.min(), -1e6, 1e6)),
        "high": float(np.clip(high.max(), -1e6, 1e6)),
    }


def _describe_choice(space: Space, dist: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns `probs` of each variable, or `mean` and `std` of a continuous action."""
    if not space.discrete:
        return {name: value[0].reshape(-1).tolist() for name, value in dist.items()}
    rows = dist["probs"][0].reshape(-1, dist["probs"].shape[-1]).tolist()
    counts = np.asarray(space.classes).reshape(-1).tolist()
    return {"probs": [row[:count] for row, count in zip(rows, counts)]}


def _observe(
    model: networks.Model, carry: networks.Carry, obs: Tree, key: Array
) -> networks.Carry:
    latent, _ = model.dyn.step(
        {"deter": carry["deter"], "stoch": carry["stoch"]},
        action_vector(model.pol.spaces, carry["action"]),
        model.enc(obs),
        obs["is_first"],
        model.dyn.noise(key, (1,)),
    )
    return {**latent, "action": carry["action"]}


def _imagine(
    model: networks.Model, carry: networks.Carry, key: Array
) -> networks.Carry:
    latent = {"deter": carry["deter"], "stoch": carry["stoch"]}
    action = action_vector(model.pol.spaces, carry["action"])[:, None]
    states = model.dyn.imagine(latent, action, model.dyn.noise(key, (1, 1)))
    latent = jax.tree.map(lambda x: x[:, 0], states)
    return {**latent, "action": carry["action"]}


def _decode(model: networks.Model, latent: networks.Carry, key: Array) -> State:
    feat = networks.features(latent)
    outputs = model.dec(latent["deter"], latent["stoch"])
    dists = model.pol(feat)
    policy = {}
    for name, dist in dists.items():
        if isinstance(dist, Categorical):
            policy[name] = {"probs": dist.probs}
        else:
            policy[name] = {"mean": dist.mean, "std": dist.std}
    shown = {
        "obs": model.dec.predictions(outputs),
        "reward": model.rew(feat).pred(),
        "continues": model.con(feat).prob(),
        "value": model.val(feat).pred(),
        "policy": policy,
    }
    chosen = model.pol.sample(dists, model.pol.noise(key, (1,)))
    return {"shown": shown, "chosen": chosen}
