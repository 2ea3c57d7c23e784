"""The world model of a run, one step at a time, for a single sequence. With JAX.

model = load_model(logdir, config)
latent = model.observe(model.initial(), step)     # What the model is shown.
latent = model.imagine(latent, action)            # What it makes of an action.
model.show(latent)                                # Decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import elements
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dreamerv3 import model as networks
from dreamerv3.agent import make_algorithm, set_up_devices
from dreamerv3.policies.acting_agent import on_one_device
from dreamerv3.policies.inference import agent_spaces, must_fit
from embodied.base import Array, Spaces, Tree
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
# Latent, and the action that was taken last, with a batch of one.
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
    with must_fit(saved):
        given = {k: v for k, v in saved.data["params"].items() if k in sizes}
        found = choose_arrays(given, sizes, None)
    dtypes = {name: leaf.dtype for name, leaf in flat_params(shapes).items()}
    values = {k: jnp.asarray(np.asarray(v), dtypes[k]) for k, v in found.items()}
    model = with_flat_params(shapes, values)
    return DreamModel(model, obs_space, act_space, saved.step)


class DreamModel:
    """Steps of the model, compiled. Belongs to one thread.

    Attributes:
      decoded: spaces of the observations that can be shown, by key.
      actions: spaces of the actions, by key.
      keys: of the observations that the model is shown.
      step: of the run at which the model was saved.
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
        self._show = eqx.filter_jit(_show)
        self._choose = eqx.filter_jit(_choose)

    def initial(self) -> State:
        """Returns the state before the first step."""
        return networks.init_carry(self._model, 1)

    def no_action(self) -> dict[str, np.ndarray]:
        """Returns the action before the first step: zeros."""
        return {key: np.zeros(x.shape, x.dtype) for key, x in self.actions}

    def observe(self, state: State, step: Step) -> State:
        """Shows the model a step: its observation, and the action that followed."""
        obs = {key: np.asarray(step[key])[None] for key in [*self.keys, "is_first"]}
        state = self._observe(self._model, state, obs, self._next())
        action = {key: np.asarray(step[key], x.dtype)[None] for key, x in self.actions}
        return {**state, "action": action}

    def imagine(self, state: State, action: Mapping[str, Any]) -> State:
        """Returns the state that an action leads to, by the model alone."""
        given = {key: np.asarray(action[key], x.dtype)[None] for key, x in self.actions}
        return self._imagine(self._model, state, given, self._next())

    def choose(self, state: State) -> dict[str, np.ndarray]:
        """Samples an action of the policy."""
        actions = self._choose(self._model, state, self._next())
        return {key: np.asarray(actions[key])[0] for key, _ in self.actions}

    def show(self, state: State) -> dict[str, Any]:
        """Decodes a state: observations, reward, continuation, value, policy."""
        shown = jax.device_get(self._show(self._model, state))
        policy = {
            key: {name: value[0].reshape(-1).tolist() for name, value in dist.items()}
            for key, dist in shown["policy"].items()
        }
        return {
            "obs": {key: value[0] for key, value in shown["obs"].items()},
            "reward": float(shown["reward"][0]),
            "continues": float(shown["continues"][0]),
            "value": float(shown["value"][0]),
            "policy": policy,
        }

    def action(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns an action from plain values; what is missing is zero.

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
        """Returns an action as environments take it; policies sample beyond bounds."""
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

    def _next(self) -> Array:
        self._key, key = jax.random.split(self._key)
        return key


def describe_space(key: str, space: Space) -> dict[str, Any]:
    """Returns what a page needs to know of a space."""
    classes = None
    if space.discrete:
        classes = int(np.max(np.asarray(space.classes)))
    low, high = (np.asarray(x, np.float64) for x in (space.low, space.high))
    bounds = [float(np.clip(low.min(), -1e6, 0)), float(np.clip(high.max(), 0, 1e6))]
    return {
        "key": key,
        "shape": list(space.shape),
        "classes": classes,
        "low": int(low.min()) if space.discrete else bounds[0],
        "high": bounds[1],
    }


def _observe(model: networks.Model, state: State, obs: Tree, key: Array) -> State:
    action = action_vector(model.pol.spaces, state["action"])
    latent = {"deter": state["deter"], "stoch": state["stoch"]}
    noise = model.dyn.noise(key, (1,))
    latent, _ = model.dyn.step(latent, action, model.enc(obs), obs["is_first"], noise)
    return latent


def _imagine(model: networks.Model, state: State, action: Tree, key: Array) -> State:
    vector = action_vector(model.pol.spaces, action)[:, None]
    latent = {"deter": state["deter"], "stoch": state["stoch"]}
    states = model.dyn.imagine(latent, vector, model.dyn.noise(key, (1, 1)))
    return {**jax.tree.map(lambda x: x[:, 0], states), "action": action}


def _choose(model: networks.Model, state: State, key: Array) -> Tree:
    dists = model.pol(networks.features(state))
    return model.pol.sample(dists, model.pol.noise(key, (1,)))


def _show(model: networks.Model, state: State) -> Tree:
    feat = networks.features(state)
    outputs = model.dec(state["deter"], state["stoch"])
    policy = {}
    for key, dist in model.pol(feat).items():
        if hasattr(dist, "probs"):
            policy[key] = {"probs": dist.probs}
        else:
            policy[key] = {"mean": dist.mean, "std": dist.std}
    return {
        "obs": model.dec.predictions(outputs),
        "reward": model.rew(feat).pred(),
        "continues": model.con(feat).prob(),
        "value": model.val(feat).pred(),
        "policy": policy,
    }
