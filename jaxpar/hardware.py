"""What a chip, its links and its network can do: the figures behind MFU and the cost model, from `jaxpar.meshes`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.config import find_toml, from_dict, presets
from jaxpar.errors import UserError
from jaxpar.mesh import MeshSpec


@dataclass(frozen=True)
class PeakFlops:
    """Dense matmul FLOP/s of one chip by dtype, structured sparsity left out; 0 = not in hardware, or no figure."""

    float32: float = 0.0
    """On GPUs the figure of TF32, which XLA uses for float32 matmuls unless told otherwise."""
    bfloat16: float = 0.0
    float8: float = 0.0
    int8: float = 0.0


@dataclass(frozen=True)
class Interconnect:
    """The fast network between chips: ICI inside a TPU slice, NVLink inside a GPU node."""

    kind: Literal["none", "torus", "switch"] = "none"
    """torus = links to neighbours only; switch = every chip reaches every other at full rate."""
    shape: tuple[int, ...] = ()
    """Chips along each physical axis: (4, 4, 4) for a v5p cube, (8,) for a GPU node."""
    wraps: tuple[bool, ...] = ()
    """Whether each axis closes into a ring. One that does not has half the bandwidth for an all-gather."""
    links: int = 0
    """Links of one chip: two an axis in a torus."""
    link_bandwidth: float = 0.0
    """Bytes/s of one link in one direction."""

    @property
    def axis_bandwidth(self) -> float:
        """Bytes/s one chip sends along one physical axis, all of that axis's links busy, if the axis wraps."""
        return self.links * self.link_bandwidth / max(len(self.shape), 1)


@dataclass(frozen=True)
class Hardware:
    """A system of equal chips. Every figure is for one chip; bandwidths are for one direction; 0 = no figure."""

    chip: str = ""
    device_kinds: tuple[str, ...] = ()
    """What `jax.Device.device_kind` says on it."""
    chips: int = 0
    chips_per_host: int = 0
    """Chips that share one machine's NICs and memory; a virtual machine, and so a JAX process, may have fewer."""
    devices_per_chip: int = 1
    """JAX devices of one chip."""
    clock_hz: float = 0.0
    """Clock of the matmul units: turns a compiler's cycles into seconds."""
    hbm_bytes: int = 0
    """Size of the device memory. A program gets a little less: the runtime keeps some."""
    hbm_bandwidth: float = 0.0
    """Bytes/s between the chip and its memory."""
    dcn_bandwidth: float = 0.0
    """Bytes/s to other slices or nodes over the data-centre network."""
    host_link_bandwidth: float = 0.0
    """Bytes/s to the host's memory (PCIe): what offloading has."""
    launch_overhead: float = 0.0
    """Seconds between the kernels of one stream; 0 where a program runs without launches, as on TPUs."""
    peak_flops: PeakFlops = field(default_factory=PeakFlops)
    ici: Interconnect = field(default_factory=Interconnect)


@dataclass(frozen=True)
class _MeshPreset:
    mesh: MeshSpec = field(default_factory=MeshSpec)
    hardware: Hardware = field(default_factory=Hardware)


def load_mesh_preset(name_or_path: str) -> tuple[MeshSpec, Hardware]:
    """A mesh and the hardware it was made for: a preset of `jaxpar.meshes` by name, or a TOML file by path.

    A file without a `[hardware]` table gives a `Hardware` that has no figures.

    Raises:
      UserError: no such preset or file, malformed TOML, an unknown key, or a value of the wrong type.
    """
    text, origin = find_toml(name_or_path, "jaxpar.meshes")
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from error
    preset = from_dict(_MeshPreset, value, origin)
    return preset.mesh, preset.hardware


def hardware_of(device_kind: str) -> Hardware | None:
    """The hardware of the first preset with this chip, or None for an unknown one.

    What is said of one chip holds wherever it sits; `chips`, `ici.shape` and `ici.wraps` are that preset's own.

    Args:
      device_kind: `jax.devices()[0].device_kind`, as it stands.
    """
    known = (load_mesh_preset(name)[1] for name in presets("jaxpar.meshes"))
    return next((hardware for hardware in known if device_kind in hardware.device_kinds), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense matmul FLOP/s of one chip, or None when there is no figure: an unknown chip, a CPU, another dtype.

    Args:
      device_kind: `jax.devices()[0].device_kind`, as it stands.
      dtype: a field of `PeakFlops`: float32, bfloat16, float8 or int8.
    """
    hardware = hardware_of(device_kind)
    return getattr(hardware.peak_flops, dtype, None) or None if hardware else None
