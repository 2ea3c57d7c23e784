"""Output distributions, all in float32, as pytrees of arrays. Agent process.

Samples are made from noise that the caller draws, so that a scan over time can draw
the noise of all its steps at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from embodied.jax.nets import Array, f32, sg

# A field that is part of the tree's structure, not of its arrays.
static_field = functools.partial(dataclasses.field, metadata={"static": True})

LOG_ZERO = -1e30  # Log-probability of impossible classes.
BIN_RANGE = 20.0  # Bins of two-hot distributions reach from -symexp(20) to symexp(20).


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Categorical:
    """Independent categorical variables.

    Attributes:
      logprobs: [..., classes] logarithms of the probabilities.
      event: number of axes before the last that belong to one event.
      lowest: entropy of the least random distribution, per variable.
      highest: entropy of the uniform distribution, per variable; None if it is over
        all classes.
    """

    logprobs: Array
    event: int = static_field(default=0)
    lowest: float = static_field(default=0.0)
    highest: float | None = static_field(default=None)

    @classmethod
    def of(
        cls,
        logits: Array,
        unimix: float = 0.0,
        event: int = 0,
        counts: np.ndarray | None = None,
    ) -> Categorical:
        """Makes the distribution from logits, mixed with the uniform distribution.

        Args:
          logits: [..., *event, classes].
          unimix: share of the uniform distribution.
          event: number of axes that belong to one event.
          counts: [*event] number of classes of each variable, if they differ. Further
            classes have no probability.
        """
        logits = f32(logits)
        if counts is not None:
            return cls._of_unequal(logits, unimix, event, counts)
        if not unimix:
            return cls(jax.nn.log_softmax(logits), event)
        classes = logits.shape[-1]
        probs = (1 - unimix) * jax.nn.softmax(logits) + unimix / classes
        return cls(jnp.log(probs), event, _least_entropy(classes, unimix))

    @classmethod
    def _of_unequal(
        cls, logits: Array, unimix: float, event: int, counts: np.ndarray
    ) -> Categorical:
        valid = np.arange(logits.shape[-1]) < counts[..., None]
        probs = jax.nn.softmax(jnp.where(valid, logits, LOG_ZERO))
        probs = (1 - unimix) * probs + unimix * valid / counts[..., None]
        least = [_least_entropy(int(n), unimix) if unimix else 0.0 for n in counts.flat]
        return cls(
            # Finite, since zero times infinity is not zero; the inner `where` keeps the
            # gradient finite.
            jnp.where(valid, jnp.log(jnp.where(valid, probs, 1)), LOG_ZERO),
            event,
            float(np.mean(least)),
            float(np.mean(np.log(counts))),
        )

    @property
    def probs(self) -> Array:
        """Probabilities [..., classes]."""
        return jnp.exp(self.logprobs)

    def mode(self) -> Array:
        """Most likely classes, int32."""
        return jnp.argmax(self.logprobs, -1).astype(jnp.int32)

    def sample(self, noise: Array) -> Array:
        """Draws classes, int32, from Gumbel noise [..., classes]."""
        # If scores are NaN, the result is still a valid class.
        return jnp.minimum(_first_largest(self.logprobs + noise), noise.shape[-1] - 1)

    def straight_through(self, noise: Array) -> Array:
        """Draws one-hots from Gumbel noise, with the gradient of the probabilities."""
        chosen = _first_largest(sg(self.logprobs + noise))[..., None]
        # Compilers fuse `where` into the same kernel, but not a cast.
        onehot = jnp.where(_order(noise) == chosen, 1.0, 0.0)
        return _pass_gradient(onehot.astype(self.logprobs.dtype), self.probs)

    def logp(self, index: Array) -> Array:
        """Log-probability of an event."""
        # A product instead of a lookup, whose gradient would be a scatter.
        onehot = jax.nn.one_hot(
            index, self.logprobs.shape[-1], dtype=self.logprobs.dtype
        )
        return _total(self.event, (onehot * self.logprobs).sum(-1))

    def entropy(self) -> Array:
        """Entropy of the event."""
        return _total(self.event, -(self.probs * self.logprobs).sum(-1))

    def entropy_bounds(self) -> tuple[float, float]:
        """Least and greatest entropy that the event can have."""
        shape = self.logprobs.shape
        count = math.prod(shape[len(shape) - 1 - self.event : -1])
        most = math.log(shape[-1]) if self.highest is None else self.highest
        return count * self.lowest, count * most

    def kl(self, other: Categorical) -> Array:
        """Divergence KL(self || other) of the event."""
        return _total(
            self.event, (self.probs * (self.logprobs - other.logprobs)).sum(-1)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BoundedNormal:
    """Normal with a mean in -1..1 and a bounded deviation; samples are not squashed.

    Attributes:
      mean: [..., *event] mean.
      std: [..., *event] standard deviation.
      event: number of axes that belong to one event.
      minstd: smallest standard deviation.
      maxstd: largest standard deviation.
    """

    mean: Array
    std: Array
    event: int = static_field()
    minstd: float = static_field()
    maxstd: float = static_field()

    @classmethod
    def of(
        cls, mean: Array, std: Array, event: int, minstd: float, maxstd: float
    ) -> BoundedNormal:
        """Makes the distribution from raw network outputs."""
        deviation = (maxstd - minstd) * jax.nn.sigmoid(f32(std) + 2.0) + minstd
        return cls(jnp.tanh(f32(mean)), deviation, event, minstd, maxstd)

    def mode(self) -> Array:
        """Most likely value."""
        return self.mean

    def sample(self, noise: Array) -> Array:
        """Draws a value from standard normal noise."""
        return self.mean + self.std * noise

    def logp(self, value: Array) -> Array:
        """Log-probability of an event."""
        distance = (f32(value) - self.mean) / self.std
        logp = -0.5 * jnp.square(distance) - jnp.log(self.std)
        return _total(self.event, logp - 0.5 * math.log(2 * math.pi))

    def entropy(self) -> Array:
        """Entropy of the event."""
        return _total(self.event, _normal_entropy(0.0) + jnp.log(self.std))

    def entropy_bounds(self) -> tuple[float, float]:
        """Least and greatest entropy that the event can have."""
        count = math.prod(self.mean.shape[self.mean.ndim - self.event :])
        low, high = math.log(self.minstd), math.log(self.maxstd)
        return count * _normal_entropy(low), count * _normal_entropy(high)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Binary:
    """Bernoulli variable.

    Attributes:
      logit: [...] log-odds.
    """

    logit: Array

    def prob(self) -> Array:
        """Probability of one."""
        return jax.nn.sigmoid(f32(self.logit))

    def loss(self, target: Array) -> Array:
        """Cross-entropy to a target in 0..1."""
        logit = f32(self.logit)
        target = sg(f32(target))
        positive, negative = jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit)
        return -(target * positive + (1 - target) * negative)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoHot:
    """Scalar as a distribution over bins that are spaced by symexp.

    Attributes:
      logits: [..., bins], an odd number of bins.
    """

    logits: Array

    def pred(self) -> Array:
        """Mean, exactly zero where all logits are equal.

        The middle bin is zero. Probabilities of mirrored bins are subtracted before
        they are multiplied: compilers may round one of two products, but not both.
        """
        logits = f32(self.logits)
        probs, bins = jax.nn.softmax(logits), self._bins(logits)
        middle = logits.shape[-1] // 2
        below, above = probs[..., :middle][..., ::-1], probs[..., middle + 1 :]
        return ((above - below) * bins[middle + 1 :]).sum(-1)

    def loss(self, target: Array) -> Array:
        """Cross-entropy to the two bins around a raw value [...]."""
        return self.cross_entropy(self.twohot(target))

    def cross_entropy(self, weights: Array) -> Array:
        """Cross-entropy to weights of all bins [..., bins]."""
        return -(sg(weights) * jax.nn.log_softmax(f32(self.logits))).sum(-1)

    def twohot(self, target: Array) -> Array:
        """Weights [..., bins] of the two bins around a raw value [...].

        Each bin is weighted by the distance of the value to the other bin. Values
        outside of all bins are clipped to the first or last bin.
        """
        logits = f32(self.logits)
        target = sg(f32(target))[..., None]
        bins = self._bins(logits)
        count = bins.shape[0]
        below = (bins <= target).sum(-1) - 1
        above = count - (bins > target).sum(-1)
        below, above = jnp.clip(below, 0, count - 1), jnp.clip(above, 0, count - 1)
        same = below == above
        target = target[..., 0]
        to_below = jnp.where(same, 1, jnp.abs(bins[below] - target))
        to_above = jnp.where(same, 1, jnp.abs(bins[above] - target))
        total = to_below + to_above
        dtype = logits.dtype
        return (
            jax.nn.one_hot(below, count, dtype=dtype) * (to_above / total)[..., None]
            + jax.nn.one_hot(above, count, dtype=dtype) * (to_below / total)[..., None]
        )

    def _bins(self, logits: Array) -> Array:
        return jnp.asarray(twohot_bins(logits.shape[-1]), logits.dtype)


@functools.cache
def twohot_bins(count: int) -> np.ndarray:
    """Values of `count` bins (an odd number): symexp of even steps, mirrored."""
    half = np.linspace(-BIN_RANGE, 0, (count + 1) // 2, dtype=np.float32)
    half = -np.expm1(-half)
    return np.concatenate([half, -half[:-1][::-1]])


def squared_error(prediction: Array, target: Array, event: int) -> Array:
    """Squared error, summed over the last `event` axes."""
    return _total(event, jnp.square(f32(prediction) - sg(f32(target))))


def _total(event: int, x: Array) -> Array:
    """Sums over the last `event` axes."""
    return x.sum(tuple(range(x.ndim - event, x.ndim)))


@jax.custom_jvp
def _pass_gradient(value: Array, source: Array) -> Array:
    """Returns the value, with the gradient of the source."""
    return value


@_pass_gradient.defjvp
def _pass_gradient_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], tangents[1]


def _first_largest(scores: Array) -> Array:
    """Index of the first maximum, int32; the number of scores if that is NaN.

    Compilers fuse this with the operations around it; an argmax is a kernel of its own.
    """
    best = scores == scores.max(-1, keepdims=True)
    return jnp.where(best, _order(scores), scores.shape[-1]).min(-1)


def _order(x: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _least_entropy(classes: int, unimix: float) -> float:
    rare = unimix / classes
    often = 1 - unimix + rare
    return -often * math.log(often) - (classes - 1) * rare * math.log(rare)


def _normal_entropy(log_std: float) -> float:
    return 0.5 * math.log(2 * math.pi * math.e) + log_std
