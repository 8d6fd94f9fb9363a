"""Hardware that is not here, by name: `v5p-64`, `v5e-8`, `v5p-128x4`, `v5p:4x4x8`, `h100x64`, or `here`.

A TPU's number counts chips, not cores: Google Cloud calls the 64 chips of `v5p-64` v5p-128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxpar.hardware import Hardware
from jaxpar.mesh import MeshSpec

Platform = Literal["tpu", "cuda", "cpu"]


@dataclass(frozen=True)
class Target:
    """A system of equal devices, perhaps not here: what to compile for, and what it can do."""

    name: str
    """As this library writes it: `v5p-64`, `v5p-128x4`, `h100x64`, `here`."""
    chip: str
    """File of `jaxpar.meshes.chips`: `v5p`; for `here` what JAX calls the device."""
    platform: Platform
    """As in `lower(lowering_platforms=(target.platform,))`."""
    hardware: Hardware
    """Figures of one device, `chips` of all slices or nodes, `ici` of one slice or node."""
    slices: int
    """TPU slices, or GPU nodes, joined by the data-centre network only."""
    topology: str
    """Of one slice or of all nodes: `4x4x4`; `8x8` = nodes x GPUs."""
    vendor_name: str = ""
    """What Google Cloud calls one slice: `v5p-128`."""
    note: str = ""
    """One line that a user should read with the name."""

    @property
    def devices(self) -> int:
        """JAX devices of the whole target: chips, but for chips that JAX sees as two."""
        return self.hardware.chips * self.hardware.devices_per_chip


class Position(NamedTuple):
    """Where a device sits: slice or node, coordinates of its chip inside (as `hardware.ici.shape`), core on the chip."""

    slice: int
    coords: tuple[int, ...]
    core: int = 0


def load_target(name: str) -> Target:
    """The target of this name.

    Raises:
      UserError: an unknown chip, or a size its topology does not allow, each with the nearest that exist.
    """
    raise NotImplementedError


def target_devices(target: Target) -> list[jax.Device]:
    """Devices to build a mesh from and compile for, without the hardware; for `here` those of this machine.

    Raises:
      UserError: the compiler for them is not installed (and how to install it), or refuses this topology.
    """
    raise NotImplementedError


def compilers() -> dict[str, str]:
    """What compiles for each platform here, by platform: `libtpu 0.0.42`, or how to install it."""
    raise NotImplementedError


def check_mesh(spec: MeshSpec, target: Target) -> None:
    """Whether a mesh fits the target.

    Raises:
      UserError: it does not, with the change to make.
    """
    raise NotImplementedError


def places(devices: Sequence[jax.Device], target: Target) -> tuple[Position, ...]:
    """Where each device sits, in the order given: pass `mesh.devices.flat` for the positions of a program."""
    raise NotImplementedError
