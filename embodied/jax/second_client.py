"""A second client of a device, whose programs run beside those of the first.

JAX runs the programs of one client one after another, so a policy step would wait for
the update before it. Programs of two clients run at the same time, and can read the
same memory:

    other = second_client(jax.devices()[0])    # The same device.
    shared = share(array, other)               # The same memory.

Both need functions of JAX that are not public, and are imported where they are used.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Of the device's memory, at most: for a policy step, its carries and images.
MEMORY_FRACTION = 0.15
DLPACK_KINDS = {"cpu": 1, "gpu": 2}  # DLPack's numbers of the platforms.


class SecondClientError(RuntimeError):
    """There can be no second client of a device."""


@functools.cache
def second_client(device: jax.Device) -> jax.Device:
    """Opens a second client of a device, once; returns its view of the device.

    Raises:
      SecondClientError: the device is not an NVIDIA GPU or a CPU, or JAX has changed.
    """
    try:
        other = _open(device).local_devices()[0]
        share(jax.device_put(jnp.zeros(1), device), other)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise SecondClientError(
            f"jax.policy_beside: expected an NVIDIA GPU that programs can share, or a "
            f"CPU, and JAX 0.10.2 or a version that is not much later; got "
            f"{device.device_kind} and JAX {jax.__version__} ({error})."
        ) from error
    return other


def share(array: jax.Array, other: jax.Device) -> jax.Array:
    """Returns an array of the other client in the same memory.

    On a CPU, this waits until the array is computed; on a GPU, only programs that read
    the result do. It must live until all of them have ended: its memory is given back
    to the first client, which does not wait for programs of the second.
    """
    from jax._src.lib import _jax

    stream: Any = None
    if other.platform == "gpu":
        stream = other.get_stream_for_external_ready_events()
    give: Any = array.__dlpack__  # Type checkers do not know its arguments.
    capsule = give(stream=stream)
    kind = DLPACK_KINDS[other.platform]
    return _jax.dlpack_managed_tensor_to_buffer(capsule, other, stream, None, kind)


def _open(device: jax.Device) -> Any:
    from jax._src.lib import xla_client

    if device.platform == "cpu":
        return xla_client.make_cpu_client()
    if device.platform != "gpu":
        raise RuntimeError(f"its platform is {device.platform}")
    options = {
        **xla_client.generate_pjrt_gpu_plugin_options(),
        "memory_fraction": MEMORY_FRACTION,
        "preallocate": False,
        "visible_devices": [device.local_hardware_id],
    }
    return xla_client.make_c_api_client("cuda", options, None)
