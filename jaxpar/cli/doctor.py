"""What is installed, what JAX sees, and which combinations are known to be bad."""

from __future__ import annotations

import platform

import jax

from jaxpar.base.console import PACKAGES, bytes_text
from jaxpar.base.hardware import hardware_of
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.runtime import start, versions
from jaxpar.parallel.host_memory import known_problem, memory_kinds
from jaxpar.rehearse.targets import compilers

OPTIONAL = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "tokenizers", "tensorboardX", "wandb", "mlflow-skinny",
            "transformers", "torch")  # fmt: skip


def examine() -> tuple[list[str], list[str]]:
    """(facts, warnings) about this machine, a line each."""
    found, devices = versions(PACKAGES + OPTIONAL), start(MeshSpec())
    first, backend = devices[0], jax.default_backend()
    hardware = hardware_of(first.device_kind)
    stats = first.memory_stats()
    limit = f", {bytes_text(stats['bytes_limit'])} usable" if stats and "bytes_limit" in stats else ""
    facts = [
        f"python       {platform.python_version()} on {platform.platform()}",
        f"packages     {', '.join(f'{name} {number}' for name, number in found.items())}",
        f"backend      {backend}: {len(devices)} x {first.device_kind}{limit}",
        f"processes    {jax.process_count()}",
        f"memory kinds {', '.join(memory_kinds(first))}",
        *(f"compiler     for {name} targets: {what}" for name, what in compilers().items()),
        f"hardware     {hardware.chip if hardware else 'no preset knows this chip: MFU will not be shown'}",
    ]
    return facts, warnings_for(found, backend)


def warnings_for(versions: dict[str, str], backend: str) -> list[str]:
    """What is known to go wrong with these versions of packages on a backend (`cpu`, `gpu`, `tpu`), a line each."""
    jax_version, jaxlib_version = versions.get("jax", ""), versions.get("jaxlib", "")
    found = []
    if bad := known_problem(backend, jaxlib_version):
        found.append(bad)
    if jax_version.split(".")[:2] != jaxlib_version.split(".")[:2]:
        found.append("jax and jaxlib are of different releases: install both at the same version")
    if backend == "cpu" and any("cuda" in name for name in versions):
        found.append(
            "a CUDA plugin is installed and JAX runs on CPU: no driver or no GPU is visible (see `nvidia-smi`); "
            "all is well if it is there to rehearse"
        )
    if versions.get("orbax-checkpoint") == "0.12.8":
        found.append(
            "orbax-checkpoint 0.12.8 restores a flipped bit without a word: keep checkpoints on storage that checksums"
        )
    return found
