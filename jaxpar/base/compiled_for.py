"""The device that a function is compiled for, where it is not one of those that JAX has here.

A rehearsal traces a function for an absent chip. What chooses by the chip and is told no mesh, such
as attention without a layout, asks `device_of_compilation`, and not JAX's default backend, which is
the laptop's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import jax

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import absent_device, compiler_message, kernel_that_failed


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


@contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """A context in which functions are traced and lowered for this device, which may be absent.

    Raises:
      UserError: a Pallas kernel does not lower for it.
    """
    try:
        with _ABSENT(_device_of(device)), absent_device(device):
            yield
    except UserError:
        raise
    except Exception as error:
        kernel = kernel_that_failed(error)
        if not kernel:
            raise
        said = compiler_message(str(error)) or type(error).__name__
        raise UserError(
            f"the kernel {kernel} does not lower for {device.device_kind} with jax "
            f"{jax.__version__} ({said}): for attention, kernels.attention=chunked needs none"
        ) from error


def too_old(capability: str = "") -> str:
    """Why a GPU has no kernels of its own: those of Triton and cuDNN begin with Ampere; empty = it
    may have them.

    Args:
      capability: its compute capability, `9.0`; empty = that of the device that is compiled for.
    """
    capability = capability or device_of_compilation().capability
    old = re.fullmatch(r"[1-7]\.\d", capability)
    if old:
        return f"compute capability {capability} is below 8.0"
    return ""


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
