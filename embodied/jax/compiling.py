"""Compiles functions ahead of their first call, and logs it. Agent process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import distributed

MEET_SECONDS = 1800.0  # How long to wait for the slowest host.

logger = logging.getLogger(__name__)
_meetings = itertools.count()
_running: list[str] = []  # Names of the functions that are being compiled.


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
    """Compiles a function for the shapes and shardings of its arguments.

    Args:
      function: function of arrays.
      arguments: arrays, or their shapes with shardings.
      name: name of the function in messages.
      donate: indices of arguments whose memory the results may reuse.
      out_shardings: shardings of the results.
      options: options of the compiler.
      hosts: whether all hosts run it together; they wait for the slowest compiler.

    Returns:
      The compiled function, or `function` itself if compilation is turned off.
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
    _running.append(name)
    try:
        compiled = jitted.lower(*arguments).compile()
    finally:
        _running.remove(name)
    _return_memory()
    logger.info("Compiled %s in %.1f s.", name, time.monotonic() - started)
    if hosts:
        _barrier(f"compiled {name}")
    return compiled


def is_compiling() -> bool:
    """Returns whether this process is compiling a function."""
    return bool(_running)


def _return_memory() -> None:
    """Returns memory that the compiler has freed, often a gigabyte, to the system.

    The allocator of glibc would keep it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _barrier(name: str) -> None:
    """Waits until all hosts have come this far.

    Hosts connect to each other when they first run a function. On CPUs, a host that
    arrives 30 s before the others would give up.
    """
    if jax.process_count() > 1:
        # JAX has no public function that waits without running a computation.
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"{name} {next(_meetings)}", int(MEET_SECONDS * 1000))


def compiles() -> bool:
    """Whether functions are compiled; the setting `jax.jit` can turn this off."""
    config: Any = jax.config  # Type checkers know none of its settings.
    return not config.jax_disable_jit
