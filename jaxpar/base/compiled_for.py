"""The device that a function is compiled for, where it is not one of those that JAX has here.

A rehearsal traces a function for an absent chip. What chooses by the chip and is told no mesh, such
as attention without a layout, asks `device_of_compilation`, and not JAX's default backend, which is
the laptop's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import jax


class CompilationDevice(NamedTuple):
    """What is known of the device that a function is compiled for."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    capability: str
    """The compute capability of a GPU, `9.0`; empty for other devices."""
    kind: str
    """The device's `device_kind`: `TPU v5p`, `NVIDIA H100 80GB HBM3`."""


# JAX keeps traced functions; those traced under another value of such a context are not taken for
# this one's.
_ABSENT = jax.make_user_context(None)


def compiling_for(device: jax.Device) -> AbstractContextManager[object]:
    """A context in which functions are traced for this device, which may be absent."""
    return cast(AbstractContextManager[object], _ABSENT(_device_of(device)))


def device_of_compilation() -> CompilationDevice:
    """The device that a function without a mesh is traced for: that of `compiling_for`, or else
    JAX's own first one.
    """
    return cast(CompilationDevice | None, _ABSENT.value) or _device_of(jax.devices()[0])


def _device_of(device: jax.Device) -> CompilationDevice:
    if device.platform in ("cuda", "rocm"):
        platform = "gpu"
    else:
        platform = device.platform
    return CompilationDevice(
        platform, str(getattr(device, "compute_capability", "")), device.device_kind
    )
