"""What is installed, what JAX sees, and which combinations are known to be bad."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import jax

from jaxpar.base.console import PACKAGES, bytes_text
from jaxpar.base.hardware import hardware_of
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.runtime import start
from jaxpar.parallel import host_memory as offload
from jaxpar.rehearse.targets import compilers

OPTIONAL = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "tokenizers", "tensorboardX", "transformers", "torch")


class KnownTrouble(NamedTuple):
    """A combination that is known to go wrong: when, and what happens."""

    applies: Callable[[dict[str, str], str], bool]
    what: str


KNOWN_BAD = (
    *(
        KnownTrouble(
            lambda versions, backend, bad=bad: (backend, versions.get("jaxlib")) == (bad.platform, bad.jaxlib), bad.what
        )
        for bad in offload.KNOWN_BAD
    ),
    KnownTrouble(
        lambda versions, _: versions.get("jax", "").split(".")[:2] != versions.get("jaxlib", "").split(".")[:2],
        "jax and jaxlib are of different releases: install both at the same version",
    ),
    KnownTrouble(
        lambda versions, backend: backend == "cpu" and any("cuda" in name for name in versions),
        "a CUDA plugin is installed and JAX runs on CPU: no driver or no GPU is visible (see `nvidia-smi`); "
        "all is well if it is there to rehearse",
    ),
    KnownTrouble(
        lambda versions, _: versions.get("orbax-checkpoint") == "0.12.8",
        "orbax-checkpoint 0.12.8 restores a flipped bit without a word: keep checkpoints on storage that checksums",
    ),
)


def installed() -> dict[str, str]:
    """Versions of the packages that matter, those that are here."""
    found = {}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def examine() -> tuple[list[str], list[str]]:
    """(facts, warnings) about this machine, a line each."""
    versions, devices = installed(), start(MeshSpec())
    first, backend = devices[0], jax.default_backend()
    hardware = hardware_of(first.device_kind)
    stats = first.memory_stats()
    limit = f", {bytes_text(stats['bytes_limit'])} usable" if stats and "bytes_limit" in stats else ""
    facts = [
        f"python       {platform.python_version()} on {platform.platform()}",
        f"packages     {', '.join(f'{name} {number}' for name, number in versions.items())}",
        f"backend      {backend}: {len(devices)} x {first.device_kind}{limit}",
        f"processes    {jax.process_count()}",
        f"memory kinds {', '.join(offload.memory_kinds(first))}",
        *(f"compiler     for {name} targets: {what}" for name, what in compilers().items()),
        f"hardware     {hardware.chip if hardware else 'no preset knows this chip: MFU will not be shown'}",
    ]
    return facts, [bad.what for bad in KNOWN_BAD if bad.applies(versions, backend)]
