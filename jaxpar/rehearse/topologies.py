"""The compilers for hardware that is not here, and the devices that they compile for."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import jax

from jaxpar.base.hardware import GpuCompiler, Hardware, Slices
from jaxpar.base.jax_compat import find_private, register_gpu_compiler
from jaxpar.base.machine import versions

log = logging.getLogger(__name__)
Topology = Any  # what jax calls a TopologyDescription


def tpu_topology(
    rules: Slices,
    shape: str,
    slices: int,
    host_shape: tuple[int, ...],
    wraps: tuple[bool, ...],
) -> Topology:
    """Get the compiler's devices of TPU slices.

    Args:
      rules: how the chip comes in slices.
      shape: the shape of one slice, `4x4x4`.
      host_shape: the shape of the chips of one machine.
      wraps: whether each axis of the slice is a ring.
    """
    options: dict[str, object] = {"chip_config_name": rules.config} if rules.config else {}
    if slices > 1:
        options["num_slices"] = slices
    return find_private("topologies")(
        platform="tpu",
        topology_name=f"{rules.name}:{shape}",
        chips_per_host_bounds=host_shape,
        wrap=(*wraps, False)[:3],
        **options,
    )


def gpu_topology(name: str, chip: GpuCompiler, hardware: Hardware, shape: str) -> Topology:
    """Get the compiler's devices of GPUs from a `stream_executor.GpuTargetConfigProto`, written as
    text. The numbers that are written out here are the same for every chip.

    Args:
      name: the name of the target.
      chip: what the compiler asks of the chip.
      shape: the nodes and the GPUs of each, `8x8`.
    """
    major, minor, extension = re.fullmatch(r"(\d+)\.(\d+)(a?)", chip.compute_capability).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if extension:
        feature = "ACCELERATED_FEATURES"
    else:
        feature = "NONE"
    config = f"""
gpu_device_info {{
  core_count: {chip.core_count}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_rate_ghz}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {chip.threads_per_core}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory_per_block_optin}
  shared_memory_per_core: {chip.shared_memory_per_core}  l2_cache_size: {chip.l2_cache_size}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_memory_size: {hardware.hbm_bytes}  memory_bandwidth: {hardware.hbm_bandwidth:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{hardware.device_kinds[0]}"
"""

    def describe_devices() -> Topology:
        return find_private("topologies")(
            topology_name=name,
            platform="cuda",
            target_config=config,
            topology=f"1x{shape}",
        )

    try:
        return describe_devices()
    except NotImplementedError:  # JAX had started before, without its CUDA plugin
        if not register_gpu_compiler():
            raise
        log.warning(
            "JAX had started without its CUDA plugin: it is loaded now, to compile for %s alone",
            name,
        )
        return describe_devices()


_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def compilers() -> dict[str, str]:
    """Name for each platform what compiles for it here, `libtpu 0.0.42`, or what is missing and how
    to install it.
    """
    return {
        platform: missing_compiler(platform) or _listed(versions(names))
        for platform, names in _COMPILERS.items()
    }


_EXTRA = "pip install 'jaxpar[rehearse]'"


def missing_compiler(platform: str) -> str:
    """Name what must be installed to compile for a platform; empty if nothing is missing."""
    wanted = jax.__version__
    found = versions(_COMPILERS.get(platform, ()))
    if platform == "tpu" and not (found or os.environ.get("TPU_LIBRARY_PATH")):
        return (
            f"libtpu, the TPU compiler: {_EXTRA}, or 'jax[tpu]=={wanted}' alone (Linux on x86-64 "
            "only)"
        )
    if platform != "cuda" or wanted in found.values():
        return ""
    packages = f"jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"
    fix = f"{_EXTRA}, or {packages} alone (Linux only)"
    if not found:
        return f"jax's CUDA plugin, the GPU compiler (no driver, no GPU): {fix}"
    return f"a CUDA plugin of jax's own version, {wanted} (found {_listed(found)}): {fix}"


def cudnn_packages() -> list[str]:
    """List the packages that bring cuDNN to a machine without a GPU, for the CUDA version of the
    plugin that is here.
    """
    if "jax-cuda13-plugin" in versions(_COMPILERS["cuda"]):
        cuda = "cu13"
    else:
        cuda = "cu12"
    return [f"nvidia-{name}-{cuda}" for name in ("cudnn", "cuda-nvcc", "nvjitlink")]


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())
