"""The command `jaxpar doctor`, which says what is installed here, and what is known to go wrong
with it.
"""

from __future__ import annotations

import platform

import jax

from jaxpar.base.console import PACKAGES, bytes_text, console
from jaxpar.base.hardware import hardware_of
from jaxpar.base.jax_compat import missing
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.machine import memory_of, versions
from jaxpar.base.process.runtime import start
from jaxpar.base.tested_versions import version_lines

OPTIONAL = (
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "tokenizers",
    "tensorboardX",
    "wandb",
    "mlflow-skinny",
    "transformers",
    "torch",
)
"""The packages that only parts of the library need, beside those of `console.PACKAGES`."""


def doctor_command(_: list[str]) -> int:
    """jaxpar doctor"""
    from jaxpar.parallel.host_memory import memory_kinds
    from jaxpar.rehearse.topologies import compilers

    found = versions(PACKAGES + OPTIONAL)
    devices = start(MeshSpec())
    first = devices[0]
    backend = jax.default_backend()
    hardware = hardware_of(first.device_kind)
    has = memory_of(first)
    limit = f", {bytes_text(has)} usable" if has else ""
    if hardware:
        chip = hardware.chip
    else:
        chip = "no preset knows this chip: MFU will not be shown"
    for line in (
        f"python       {platform.python_version()} on {platform.platform()}",
        f"packages     {', '.join(f'{name} {number}' for name, number in found.items())}",
        f"backend      {backend}: {len(devices)} x {first.device_kind}{limit}",
        f"processes    {jax.process_count()}",
        f"memory kinds {', '.join(memory_kinds(first))}",
        *(f"compiler     for {name} targets: {what}" for name, what in compilers().items()),
        f"hardware     {chip}",
        *version_lines(found),
        *(f"missing      {line}" for line in missing()),
        *(f"warning      {warning}" for warning in warnings_for(found, backend)),
    ):
        console().print(line)
    return 0


def warnings_for(versions: dict[str, str], backend: str) -> list[str]:
    """List what is known to go wrong with these versions of packages on a backend, a line for each.

    Args:
      versions: the installed versions, by package.
      backend: `cpu`, `gpu` or `tpu`.
    """
    from jaxpar.parallel.host_memory import known_problem

    jax_version = versions.get("jax", "")
    jaxlib_version = versions.get("jaxlib", "")
    bad = known_problem(backend, jaxlib_version)
    found = [bad] if bad else []
    if jax_version.split(".")[:2] != jaxlib_version.split(".")[:2]:
        found.append("jax and jaxlib are of different releases: install both at the same version")
    if backend == "cpu" and any("cuda" in name for name in versions):
        found.append(
            "a CUDA plugin is installed and JAX runs on CPU: no driver or no GPU is visible "
            "(see `nvidia-smi`); all is well if it is there to rehearse"
        )
    return found
