"""Compiles functions ahead of their first call, and logs it. Agent process."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed

from embodied.jax.nets import Array, Tree

MEET_SECONDS = 1800.0  # For the slowest host.

logger = logging.getLogger(__name__)
_meetings = itertools.count()

Signature = tuple[tuple[str, tuple[int, ...], str], ...]


def compile_ahead(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    name: str,
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    options: Mapping[str, Any] | None = None,
    hosts: bool = False,
) -> Callable[..., Any]:
    """Compiles a function for the shapes of arguments, and for where they lie.

    Args:
      function: of arrays.
      arguments: arrays, or their shapes with shardings.
      name: what to call it in messages.
      donate: indices of arguments whose memory the results may take.
      out_shardings: where results lie.
      options: of the compiler.
      hosts: whether all hosts run it together; they wait for the slowest compiler.

    Returns:
      The compiled function; where compilation is turned off, the function.
    """
    if not compiles():
        return function
    logger.info("Compiling %s ...", name)
    started = time.monotonic()
    jitted = jax.jit(
        function,
        donate_argnums=donate,
        out_shardings=out_shardings,
        compiler_options=dict(options) if options else None,
    )
    compiled = jitted.lower(*arguments).compile()
    logger.info("Compiled %s in %.1f s.", name, time.monotonic() - started)
    if hosts:
        _meet(f"compiled {name}")
    return compiled


def _meet(name: str) -> None:
    """Waits until all hosts are here.

    Hosts that run a function for the first time connect with each other, and the one
    that comes 30 s before the others would give up on a CPU.
    """
    if jax.process_count() > 1:
        # No function of the public interface waits without running something.
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"{name} {next(_meetings)}", int(MEET_SECONDS * 1000))


def compiles() -> bool:
    """Returns False where `jax.jit` of the configuration turns compilation off."""
    config: Any = jax.config  # Type checkers know none of its settings.
    return not config.jax_disable_jit


def signature(arrays: Mapping[str, Any]) -> Signature:
    """Keys, shapes and dtypes, which a compiled function depends on."""
    return tuple(
        (key, value.shape, str(value.dtype)) for key, value in sorted(arrays.items())
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A dict of arrays, with the scalars of each dtype in one array.

    An array for itself takes a copy from the device for itself, however small.

    Attributes:
      vectors: [N] by dtype.
      rest: arrays with dimensions, by key.
      names: keys of the scalars, by dtype.
    """

    vectors: dict[str, Array]
    rest: dict[str, Array]
    names: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(
        metadata={"static": True}
    )

    def unpack(self) -> dict[str, np.ndarray]:
        """The dict, once the arrays are on the host."""
        result: dict[str, Any] = dict(self.rest)
        for dtype, names in self.names:
            result.update(zip(names, self.vectors[dtype]))
        return result


def pack(arrays: Mapping[str, Array]) -> Packed:
    """Packs a dict of arrays; to be used within the function that makes them."""
    groups: dict[str, dict[str, Array]] = {}
    rest = {}
    for key, value in sorted(arrays.items()):
        if value.ndim:
            rest[key] = value
        else:
            groups.setdefault(str(value.dtype), {})[key] = value
    vectors = {
        dtype: jnp.stack(list(group.values())) for dtype, group in groups.items()
    }
    names = tuple((dtype, tuple(group)) for dtype, group in sorted(groups.items()))
    return Packed(vectors, rest, names)


def copies(tree: Tree) -> list[Array]:
    """Leaves of a tree in memory of their own, even where a function returns its input.

    To be used within a compiled function whose other arguments or results are donated
    later.
    """
    return [jnp.copy(leaf) for leaf in jax.tree.leaves(tree)]
