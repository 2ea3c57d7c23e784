"""Moving statistics to scale returns, values and advantages by. Agent process."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from embodied.jax.nets import Array, f32, sg

State = dict[str, dict[str, Array]]  # By flat name, such as lo/value.


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """Offset and scale of a stream of values, as pure functions of a state.

        state = normalizer.init()
        state = normalizer.update(state, x)
        offset, scale = normalizer.stats(state)

    Attributes:
      impl: `none`, `meanstd` (mean and standard deviation) or `perc` (percentiles).
      rate: share of the new values in the moving average.
      limit: smallest scale.
      perclo: lower percentile, the offset of `perc`.
      perchi: upper percentile; the scale is the difference of the two.
      debias: whether to divide by the weight that the moving average has gathered
        since its start at zero.
    """

    impl: str = "none"
    rate: float = 0.01
    limit: float = 1e-8
    perclo: float = 5.0
    perchi: float = 95.0
    debias: bool = True

    def init(self) -> State:
        """State before the first update."""
        return {name: {"value": jnp.zeros((), jnp.float32)} for name in self._names()}

    def update(self, state: State, x: Array) -> State:
        """Moves the statistics towards those of all elements of `x`."""
        if self.impl == "none":
            return state
        x = sg(f32(x))
        if self.impl == "meanstd":
            new = {"mean": x.mean(), "sqrs": jnp.square(x).mean()}
        else:
            ranks = jnp.array([self.perclo, self.perchi], x.dtype)
            low, high = jnp.percentile(x, ranks)
            new = {"lo": low, "hi": high}
        if self.debias:
            new["corr"] = jnp.ones((), x.dtype)
        return {
            name: {"value": (1 - self.rate) * entry["value"] + self.rate * new[name]}
            for name, entry in state.items()
        }

    def stats(self, state: State) -> tuple[Array, Array]:
        """Offset and scale, scalars float32, without gradient."""
        if self.impl == "none":
            return jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
        current = {name: sg(entry["value"]) for name, entry in state.items()}
        if self.debias:
            weight = jnp.maximum(current.pop("corr"), self.rate)
            current = {name: value / weight for name, value in current.items()}
        if self.impl == "meanstd":
            offset = current["mean"]
            variance = current["sqrs"] - jnp.square(offset)
            scale = jnp.sqrt(jnp.maximum(variance, 0))
        else:
            offset, scale = current["lo"], current["hi"] - current["lo"]
        return offset, jnp.maximum(scale, self.limit)

    def _names(self) -> tuple[str, ...]:
        names: dict[str, tuple[str, ...]] = {
            "none": (),
            "meanstd": ("mean", "sqrs"),
            "perc": ("lo", "hi"),
        }
        if self.impl not in names:
            raise ValueError(
                f"Normalizer expected impl none, meanstd or perc, got {self.impl!r}."
            )
        corrected = self.debias and self.impl != "none"
        return (*names[self.impl], "corr") if corrected else names[self.impl]
