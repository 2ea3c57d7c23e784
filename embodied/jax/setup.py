"""Chooses the platform and prepares JAX for it. Agent process, once, before any array.

    backend = setup(platform='auto', compute_dtype='bfloat16')
    backend.platform        # cpu, gpu or tpu
    backend.compute_dtype   # float32 on the cpu

JAX reads most of these settings when it initialises its devices, which it does once in
a process; settings that come too late are an error.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import jax

logger = logging.getLogger(__name__)

PLATFORMS = ("auto", "cpu", "cuda", "tpu")
# JAX's names of the platforms.
BACKENDS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
CONNECT_SECONDS = 300  # How long hosts that train together wait for one another.
CACHE_FOLDER = "dreamerv3-parallel/jax"
SLOW_COMPILE_SECONDS = 1.0  # Programs that compiled faster are not cached.


class SetupError(RuntimeError):
    """The devices are not those that the settings ask for."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """Devices that JAX has found.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      compute_dtype: precision of the networks.
      devices: number of devices of all hosts.
    """

    platform: str
    compute_dtype: str
    devices: int


def setup(
    platform: str = "auto",
    compute_dtype: str = "bfloat16",
    *,
    mock_devices: int = 0,
    prealloc: bool = True,
    jit: bool = True,
    debug: bool = False,
    deterministic: bool = False,
    concurrent: bool = False,
    expect_devices: int = 0,
    coordinator_address: str = "",
    replica: int = 0,
    replicas: int = 1,
    train_devices: int = 1,
) -> Backend:
    """Prepares JAX and returns the devices that it found.

    Args:
      platform: `cpu`, `cuda`, `tpu`, or `auto` for an accelerator if there is one,
        else the cpu.
      compute_dtype: precision on accelerators; the cpu always uses float32.
      mock_devices: number of devices to split the cpu into; 0 for one.
      prealloc: reserve most of the accelerator's memory at once.
      jit: compile; else every operation runs by itself.
      debug: raise at the first value that is not finite.
      deterministic: choose only algorithms that give the same result every time.
      concurrent: let one NVIDIA GPU run independent parts of a program at once.
      expect_devices: number of devices of all hosts; 0 for any.
      coordinator_address: HOST:PORT of the first of several hosts.
      replica: index of this host.
      replicas: number of hosts that train together.
      train_devices: number of devices that train, on each host.

    Raises:
      SetupError: the devices are not those that the settings ask for.
      ValueError: a setting is invalid, or contradicts another.
    """
    if platform not in PLATFORMS:
        raise ValueError(
            f"jax.platform: expected one of {', '.join(PLATFORMS)}, got {platform!r}."
        )
    platform = "cpu" if mock_devices and platform == "auto" else platform
    if mock_devices and platform != "cpu":
        raise ValueError(
            f"jax.mock_devices: expected 0 with jax.platform {platform}, got "
            f"{mock_devices}. Only the cpu can be made into several devices."
        )
    several = replicas * train_devices > 1
    flags = xla_flags(platform, mock_devices, deterministic, several, concurrent)
    add_xla_flags(os.environ, flags)
    if not prealloc:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if platform != "auto":
        jax.config.update("jax_platforms", platform)
    if not jit:
        jax.config.update("jax_disable_jit", True)
    if debug:
        jax.config.update("jax_debug_nans", True)
        jax.config.update("jax_debug_infs", True)
    _use_cache()
    if replicas > 1:
        _connect(coordinator_address, replica, replicas)
    backend = _look(platform, compute_dtype)
    _check(platform, backend, mock_devices, expect_devices, replicas)
    return backend


def xla_flags(
    platform: str,
    mock_devices: int,
    deterministic: bool,
    several: bool,
    concurrent: bool = False,
) -> dict[str, str]:
    """Flags of the compiler by name.

    Flags for the gpu do nothing on other platforms, so they are given whenever the
    platform may turn out to be a gpu.
    """
    flags = {}
    if mock_devices:
        flags["xla_force_host_platform_device_count"] = str(mock_devices)
    if platform in ("auto", "cuda"):
        if several:
            # Moves gradients between devices while others are still computed.
            flags["xla_gpu_enable_latency_hiding_scheduler"] = "true"
        if deterministic:
            flags["xla_gpu_deterministic_ops"] = "true"
        if concurrent:
            # Loops belong to the same graph as everything else, and the device starts
            # each of its nodes as soon as those are done that it depends on.
            flags["xla_gpu_enable_command_buffer"] = "+WHILE"
            flags["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
    return flags


def add_xla_flags(environ: MutableMapping[str, str], flags: Mapping[str, str]) -> None:
    """Adds flags to XLA_FLAGS; flags that the user has set there stay as they are.

    Raises:
      SetupError: the user has set another number of mock devices.
    """
    given = environ.get("XLA_FLAGS", "").split()
    theirs = {
        name: value
        for name, _, value in (flag.lstrip("-").partition("=") for flag in given)
    }
    count = "xla_force_host_platform_device_count"
    if count in flags and theirs.get(count, flags[count]) != flags[count]:
        raise SetupError(
            f"jax.mock_devices: expected the number in XLA_FLAGS, --{count}="
            f"{theirs[count]}, got {flags[count]}. Change or remove one of them."
        )
    ours = [f"--{name}={value}" for name, value in flags.items() if name not in theirs]
    if ours:
        environ["XLA_FLAGS"] = " ".join(given + ours)


def cache_folder(environ: Mapping[str, str]) -> pathlib.Path:
    """The user's folder of compiled programs."""
    root = environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root, CACHE_FOLDER)


def _use_cache() -> None:
    config: Any = jax.config  # Type checkers know none of its settings.
    if config.jax_compilation_cache_dir:
        return  # The user has chosen one, by JAX_COMPILATION_CACHE_DIR.
    folder = cache_folder(os.environ)
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", SLOW_COMPILE_SECONDS
    )
    try:
        # Programs in the cache are run, so no other user may write to it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        logger.warning("Compiled programs are not cached (%s).", error)
        return
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))


def _connect(address: str, replica: int, replicas: int) -> None:
    """Connects to the other hosts; the first host listens at the address."""
    if jax.distributed.is_initialized():
        return
    if not address:
        raise ValueError(
            f"jax.coordinator_address: expected HOST:PORT of the first replica with "
            f"replicas {replicas}, got ''."
        )
    logger.info(
        "Host %d of %d waits for the others at %s ...", replica, replicas, address
    )
    # That service would intercept SIGTERM, which asks this process to save.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=replicas,
        process_id=replica,
        initialization_timeout=CONNECT_SECONDS,
    )


def _look(platform: str, compute_dtype: str) -> Backend:
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = f" ({error})" if str(error) else ""
        raise SetupError(
            f"jax.platform: expected {platform} devices, but JAX found none{reason}. "
            "Install JAX for this platform (for cuda: pip install "
            "'dreamerv3-parallel[cuda]') and its driver, or use --jax.platform cpu."
        ) from error
    found = devices[0].platform
    dtype = "float32" if found == "cpu" else compute_dtype
    return Backend(found, dtype, len(devices))


def _check(
    platform: str, backend: Backend, mock_devices: int, expect: int, replicas: int
) -> None:
    found = f"{backend.devices} {backend.platform} devices ({_listing()})"
    late = "JAX was initialised in this process before: call `setup` first."
    if platform != "auto" and BACKENDS[platform] != backend.platform:
        raise SetupError(f"jax.platform: expected {platform}, got {found}. {late}")
    if mock_devices and backend.devices != mock_devices * replicas:
        raise SetupError(
            f"jax.mock_devices: expected {mock_devices} for each of {replicas} hosts, "
            f"got {found}. {late}"
        )
    if expect and backend.devices != expect:
        raise SetupError(
            f"jax.expect_devices: expected {expect}, got {found}. Look for devices "
            "that have failed or are hidden, such as by CUDA_VISIBLE_DEVICES."
        )


def _listing() -> str:
    names = [str(device) for device in jax.devices()]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
