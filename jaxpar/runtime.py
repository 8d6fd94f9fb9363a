"""Starting JAX on the platform that was asked for, before the first device is touched."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import jax

from jaxpar.errors import UserError
from jaxpar.mesh import MeshSpec, devices_needed

_INSTALL = {"tpu": "pip install 'jaxpar[tpu]'", "gpu": "pip install 'jaxpar[cuda]'"}
_BACKENDS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}


def start(spec: MeshSpec) -> list[jax.Device]:
    """The devices for a mesh: simulated ones on `cpu`, else those that are here.

    May be called again, and after JAX has started (a notebook): then it only checks.

    Raises:
      UserError: TPU or GPU asked for and absent, or JAX already started with another platform or too few CPU devices.
    """
    if spec.platform != "auto":
        jax.config.update("jax_platforms", _BACKENDS[spec.platform])
    if spec.platform == "cpu":
        keep_heap()
        with contextlib.suppress(RuntimeError):  # JAX has started: the devices are counted below
            jax.config.update("jax_num_cpu_devices", devices_needed(spec))
    if spec.distributed:
        jax.distributed.initialize()
    try:
        devices = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = _INSTALL.get(spec.platform, "--mesh.platform cpu")
        raise UserError(
            f"mesh.platform is {spec.platform!r} and JAX cannot start it ({reason}): {fix} on a machine that has one, "
            "or --mesh.platform cpu to simulate the mesh here"
        ) from error
    found = devices[0].platform
    if spec.platform not in ("auto", found):
        raise UserError(
            f"mesh.platform is {spec.platform!r} and JAX has started on {found}: "
            "set the platform before anything uses JAX"
        )
    if spec.platform == "cpu" and jax.process_count() == 1:
        needed = devices_needed(spec)
        if len(devices) < needed:
            raise UserError(
                f"{needed} simulated CPU devices are needed and JAX has started with {len(devices)}: call "
                f"jax.config.update('jax_num_cpu_devices', {needed}) before anything uses JAX, or restart the notebook"
            )
        devices = devices[:needed]
    return devices


def keep_heap() -> bool:
    """Keep freed memory in the process (glibc only); True when it was done.

    XLA:CPU allocates a step's temporaries anew each step. glibc hands blocks above 32 MiB back to the kernel when they
    are freed, and then every page of them is faulted in again: the Shakespeare recipe's step took 1.3x as long.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(mmap_threshold, 1 << 30) and mallopt(trim_threshold, 2**31 - 1))
