"""The optimiser: clipping, scaling, momentum, decay, learning rate. Agent process."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from embodied.jax.nets import Array, Tree
from embodied.jax.param_names import flat_name

SMALLEST_NORM = 1e-3  # Least norm of weights in clipping, since they may start at zero.
LARGE_TENSOR = 2**20  # Elements; reading more takes longer than starting a kernel.
SMALL_TENSOR = 2**12  # Elements; tensors with more may be spread over devices.
ROWS_PER_STACK = (
    32  # Rows of a matrix; compilers fuse operations of about 90 arrays at most.
)
FINAL_RATE = 0.1  # Share of the learning rate that schedules end with.


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adaptive clipping, then division by the RMS of gradients, then momentum.

        state = optimizer.init(params)
        updates, state, metrics = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    An update is skipped if its gradients, the loss or the resulting step are not
    finite: it is zero, and the state is unchanged except for the count of skipped
    updates in a row. If only the step is not finite, which takes a state that is not,
    large tensors are still changed where it is.

    Attributes:
      lr: learning rate.
      agc: largest norm of a tensor's gradient relative to that of its weights; 0 turns
        clipping off.
      eps: added to the root mean square of gradients.
      beta1: decay of the momentum.
      beta2: decay of the mean square of gradients.
      momentum: whether to use momentum.
      wd: weight decay of tensors whose name ends in `/kernel`.
      schedule: learning rate after the warm-up: `const`, `linear` or `cosine`.
      warmup: updates over which the learning rate rises from zero.
      anneal: update at which the schedule has ended.
    """

    lr: float = 4e-5
    agc: float = 0.3
    eps: float = 1e-20
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: bool = True
    wd: float = 0.0
    schedule: str = "const"
    warmup: int = 1000
    anneal: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in ("const", "linear", "cosine"):
            raise ValueError(
                "Optimizer expected schedule const, linear or cosine, got "
                f"{self.schedule!r}."
            )
        if self.schedule != "const" and self.anneal <= self.warmup:
            raise ValueError(
                f"Optimizer expected anneal above warmup ({self.warmup}) with schedule "
                f"{self.schedule}, got {self.anneal}."
            )

    def init(self, params: Tree) -> dict[str, Any]:
        """State before the first update."""
        return {
            "step": {"value": jnp.zeros((), jnp.int32)},
            "nonfinite": {"value": jnp.zeros((), jnp.int32)},
            "square": jax.tree.map(jnp.zeros_like, params),
            "momentum": jax.tree.map(jnp.zeros_like, params) if self.momentum else {},
        }

    def update(
        self, grads: Tree, state: dict[str, Any], params: Tree, loss: Array | float = 0
    ) -> tuple[Tree, dict[str, Any], dict[str, Array]]:
        """Returns the change of the parameters, the new state, and metrics.

        Metrics: updates, grad_norm, grad_rms, update_rms, param_rms, param_count, and
        nonfinite, the number of updates in a row that were skipped.
        """
        step, skipped = state["step"]["value"], state["nonfinite"]["value"]
        grad_norms, param_norms = tensor_norms(grads), tensor_norms(params)
        grad_norm = optax.tree.norm(grad_norms)
        if self.agc:
            grads = clip_adaptively(grads, grad_norms, param_norms, self.agc)
        updates, square, momentum = self._direction(grads, state, params)
        # The step is checked, too: parameters that are not finite once remain so.
        step_norm = optax.tree.norm(tensor_norms(updates))
        known = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        finite = known & jnp.isfinite(step_norm)

        def is_applied(x: Array) -> Array:
            # Large tensors would be read once more after the norm is known.
            return finite if x.size < LARGE_TENSOR else known & jnp.isfinite(x)

        applied = jax.tree.map(is_applied, updates)
        rate = -self.rate(step)
        updates = jax.tree.map(
            lambda ok, x: jnp.where(ok, rate * x, 0), applied, updates
        )
        square = jax.tree.map(jnp.where, applied, square, state["square"])
        if self.momentum:
            momentum = jax.tree.map(jnp.where, applied, momentum, state["momentum"])
        new = {
            "step": {"value": step + finite.astype(step.dtype)},
            "nonfinite": {"value": jnp.where(finite, 0, skipped + 1)},
            "square": square,
            "momentum": momentum,
        }
        count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
        size = math.sqrt(max(count, 1))
        metrics = {
            "updates": new["step"]["value"],
            "grad_norm": grad_norm,
            "grad_rms": grad_norm / size,
            "update_rms": jnp.where(finite, -rate * step_norm, 0) / size,
            "param_rms": optax.tree.norm(param_norms) / size,
            "param_count": jnp.array(count, jnp.int32),
            "nonfinite": new["nonfinite"]["value"],
        }
        return updates, new, metrics

    def _direction(
        self, grads: Tree, state: dict[str, Any], params: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """Returns the step to subtract, for a learning rate of 1, and moving averages.

        `grads` are the gradients after clipping.
        """
        count = (state["step"]["value"] + 1).astype(jnp.float32)

        def average(decay: float, old: Tree, new: Tree) -> tuple[Tree, Tree]:
            """Returns the moving average, raw and corrected for its start at zero."""
            mixed = jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, old, new)
            # 1 - decay^count, without the rounding of a difference close to zero.
            weight = -jnp.expm1(count * math.log(decay)) if decay else 1.0
            return mixed, jax.tree.map(lambda x: x / weight, mixed)

        squares = jax.tree.map(jnp.square, grads)
        square, corrected = average(self.beta2, state["square"], squares)
        updates = jax.tree.map(
            lambda x, y: x / (jnp.sqrt(y) + self.eps), grads, corrected
        )
        momentum = state["momentum"]
        if self.momentum:
            momentum, updates = average(self.beta1, momentum, updates)
        if self.wd:
            updates = jax.tree_util.tree_map_with_path(
                lambda path, x, y: (
                    x + self.wd * y if flat_name(path).endswith("/kernel") else x
                ),
                updates,
                params,
            )
        return updates, square, momentum

    def rate(self, step: Array) -> Array:
        """Learning rate at an update, counted from 0."""
        step = step.astype(jnp.float32)
        rate = jnp.array(self.lr, jnp.float32)
        if self.schedule != "const":
            length = self.anneal - self.warmup
            done = jnp.clip((step - self.warmup) / length, 0, 1)
            if self.schedule == "cosine":
                done = 0.5 * (1 - jnp.cos(math.pi * done))
            rate = rate * (1 - (1 - FINAL_RATE) * done)
        if self.warmup:
            rate = rate * jnp.minimum(1, step / self.warmup)
        return rate


def clip_adaptively(
    grads: Tree, grad_norms: Tree, weight_norms: Tree, limit: float
) -> Tree:
    """Bounds each tensor's gradient norm to `limit` times the norm of its weights."""

    def clip(grad: Array, norm: Array, weight_norm: Array) -> Array:
        bound = limit * jnp.maximum(SMALLEST_NORM, weight_norm)
        return grad / jnp.maximum(1, norm / bound)

    return jax.tree.map(clip, grads, grad_norms, weight_norms)


def tensor_norms(tree: Tree) -> Tree:
    """Norm of each tensor.

    Tensors become rows of matrices, whose rows are summed: all squares of a small
    tensor, or their sums over the last axis of a large one. Otherwise, an update would
    start two kernels for each tensor, which takes longer than the sums.
    """
    leaves, treedef = jax.tree.flatten(tree)
    parts = [jnp.square(leaf) for leaf in leaves]
    parts = [x.ravel() if x.size < SMALL_TENSOR else x.sum(-1).ravel() for x in parts]
    # Rows of similar lengths together, so that they are mostly full.
    order = sorted(range(len(parts)), key=lambda index: parts[index].size)
    norms: dict[int, Array] = {}
    for start in range(0, len(order), ROWS_PER_STACK):
        chosen = order[start : start + ROWS_PER_STACK]
        length = parts[chosen[-1]].size
        rows = [jnp.pad(parts[i], (0, length - parts[i].size)) for i in chosen]
        norms.update(zip(chosen, jnp.sqrt(jnp.stack(rows).sum(-1))))
    return jax.tree.unflatten(treedef, [norms[i] for i in range(len(leaves))])


def select_tree(condition: Array, new: Tree, old: Tree) -> Tree:
    """Returns the new tree if the condition holds, else the old one."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
