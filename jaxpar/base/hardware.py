"""What a chip, its links and its network can do: the figures behind MFU and the cost model, from
`jaxpar.meshes`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import jax

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.prices import Prices
from jaxpar.base.toml import find_toml, from_toml, presets

LANES = 128
"""The number of entries of the last dim that a TPU's registers and tiles hold."""
CHIPS = "jaxpar.meshes.chips"


GPU_POOL = 0.9
"""The share of a GPU's memory that JAX's pool may take in a run of ours (`runtime.start`): the rest
is for the driver, NCCL and the libraries. JAX's own default is 0.75, beyond which jaxlib 0.10.2
allocates nothing."""


def usable_bytes(hbm_bytes: int, platform: str) -> int:
    """Count the bytes of a device's memory that programs may take.

    Args:
      hbm_bytes: all bytes of its memory.
      platform: the platform: `cpu`, `gpu` or `cuda`, or `tpu`.

    Returns:
      The bytes; on a GPU those of JAX's pool.
    """
    if platform in ("gpu", "cuda"):
        return int(GPU_POOL * hbm_bytes)
    return hbm_bytes


def lowering_platform(device: jax.Device) -> str:
    """The platform that a program for a device, which need not be here, is lowered for: `cpu`,
    `cuda` or `tpu`.
    """
    if device.platform == "gpu":
        return "cuda"
    return device.platform


@dataclass(frozen=True)
class PeakFlops:
    """Dense matmul FLOP/s of one device by dtype, without structured sparsity; 0 = not in hardware,
    or no figure.
    """

    float32: float = 0.0
    """On GPUs this is the figure of TF32, which XLA uses for float32 matmuls unless told
    otherwise.
    """
    bfloat16: float = 0.0
    float8: float = 0.0
    int8: float = 0.0


@dataclass(frozen=True)
class Interconnect:
    """The fast network between chips: ICI inside a TPU slice, NVLink inside a GPU node."""

    kind: Literal["none", "torus", "switch"] = "none"
    """In a torus chips have links to their neighbours only; through a switch each reaches every
    other at full rate.
    """
    shape: tuple[int, ...] = ()
    """Chips along each physical axis: (4, 4, 4) for a v5p cube, (8,) for a GPU node."""
    wraps: tuple[bool, ...] = ()
    """Whether each axis closes into a ring. One that does not has half the bandwidth for an
    all-gather.
    """
    links: int = 0
    """The number of links of one chip: two an axis in a torus."""
    link_bandwidth: float = 0.0
    """Bytes/s of one link in one direction, as far as a program gets them."""
    chip_bandwidth: float = 0.0
    """Bytes/s in one direction between the devices of one chip; 0 where a chip is one device."""

    @property
    def axis_bandwidth(self) -> float:
        """Bytes/s that one chip sends along one physical axis with all links of that axis busy, if
        the axis wraps.
        """
        return self.link_bandwidth * (2 if self.kind == "torus" else self.links)


@dataclass(frozen=True)
class Protocol:
    """One way to run a collective. A rehearsal takes the fastest one for the size."""

    name: str = ""
    start: float = 0.0
    """Seconds before the first byte moves."""
    hop: float = 0.0
    """Seconds that a step over one link takes at the least: a hop in a torus, a step through a
    switch.
    """
    dcn_hop: float = 0.0
    """Seconds that a step over the data-centre network takes at the least."""
    share: float = 1.0
    """The share of the bandwidth that it reaches."""


@dataclass(frozen=True)
class Hardware:
    """A system of equal chips. Figures are for one JAX device: a chip, or a half of a chip that JAX
    sees as two.

    Bandwidths are for one direction; 0 = no figure.
    """

    chip: str = ""
    device_kinds: tuple[str, ...] = ()
    """What `jax.Device.device_kind` says on this chip."""
    chips: int = 0
    chips_per_host: int = 0
    """Chips that share one machine's NICs and memory; a virtual machine, and so a JAX process, may
    have fewer.
    """
    devices_per_chip: int = 1
    """JAX devices of one chip."""
    clock_hz: float = 0.0
    """The clock of the matmul units, which turns a compiler's cycles into seconds."""
    matrix_unit: int = 0
    """The columns of a TPU's matrix unit: with fewer, a part of it idles."""
    hbm_bytes: int = 0
    """Size of the device memory. A program gets a little less: the runtime keeps some."""
    hbm_bandwidth: float = 0.0
    """Bytes/s between the device and its memory."""
    dcn_bandwidth: float = 0.0
    """Bytes/s to other slices or nodes over the data-centre network."""
    host_link_bandwidth: float = 0.0
    """Bytes/s to the host's memory (PCIe), which offloading uses."""
    host_link_latency: float = 0.0
    """Seconds before a copy to or from the host moves its first byte."""
    host_memory_bandwidth: float = 0.0
    """Bytes/s of the host's memory, an equal share for each device of a machine."""
    host_flops: float = 0.0
    """Float32 FLOP/s of the host's processors, likewise."""
    launch_overhead: float = 0.0
    """Seconds between the kernels of one stream; 0 where a program runs without launches, as on
    TPUs.
    """
    peak_flops: PeakFlops = field(default_factory=PeakFlops)
    prices: Prices = field(default_factory=Prices)
    ici: Interconnect = field(default_factory=Interconnect)
    protocols: tuple[Protocol, ...] = ()


@dataclass(frozen=True)
class Slices:
    """Which TPU slices exist, and what their compiler calls them."""

    name: str = ""
    """As in `get_topology_desc(topology_name="v5p:4x4x4")`."""
    shapes: tuple[str, ...] = ()
    """Every slice (`2x2x1`), or where there are larger ones by `cube`, those smaller than a
    cube.
    """
    cube: int = 0
    """Larger slices have sides that are multiples of this; 0 = there are none."""
    most_chips: int = 0
    ring: int = 0
    """An axis is a ring where its length is this; 0 = where the slice is made of whole cubes."""
    config: str = ""
    """The compiler's `chip_config_name`; empty = its default."""
    vendor: str = ""
    """Google Cloud's name of a slice, `{cores}` or `{chips}` filled in."""


@dataclass(frozen=True)
class GpuCompiler:
    """What XLA's GPU compiler must know of a chip that is not here (`GpuTargetConfigProto`)."""

    core_count: int = 0
    """Streaming multiprocessors."""
    fpus_per_core: int = 0
    threads_per_core: int = 2048
    """The most threads that are on a core at once."""
    shared_memory_per_core: int = 0
    """Bytes."""
    shared_memory_per_block_optin: int = 0
    """Bytes a kernel may ask for."""
    l2_cache_size: int = 0
    """Bytes."""
    clock_rate_ghz: float = 0.0
    """The highest clock of a core."""
    compute_capability: str = ""
    """`9.0`, or `9.0a` for a chip with instructions of its own."""


@dataclass(frozen=True)
class TpuCompiler:
    """What XLA's TPU compiler is told when it compiles a training step for a chip."""

    scoped_vmem_kib: int = 0
    """KiB of vector memory (VMEM) that one fusion or kernel may use; 0 = the compiler's own
    default. With more of it matmuls are faster, and compilations take longer."""
    fuse_all_gathers: bool = False
    """Whether all-gathers run beside fusions, by an option that the makers of the compiler call
    unsafe on all chips but some."""
    sparse_core_all_gathers: bool = False
    """Whether all-gathers are the work of the chip's SparseCores, beside its TensorCores."""


@dataclass(frozen=True)
class HeadDimTiles:
    """The tiles of the Triton attention kernels in bfloat16, each as (queries, keys, warps of a
    program, stages of its software pipeline).
    """

    head_dim: int = 0
    """The largest head_dim that takes these."""
    forward: tuple[int, ...] = ()
    dq: tuple[int, ...] = ()
    """The tiles of the kernel that gives the queries' gradient."""
    dkv: tuple[int, ...] = ()
    """The tiles of the kernel that gives the gradients of keys and values."""


@dataclass(frozen=True)
class AttentionTiles:
    """The tiles that attention takes on a GPU, and the GPUs that take them."""

    gpus: tuple[str, ...] = ()
    """Words of a `device_kind`, such as `H100` of `NVIDIA H100 PCIe`: this chip, and others with
    the same tensor cores and as much shared memory, whatever else they lack."""
    bfloat16: tuple[HeadDimTiles, ...] = ()


@dataclass(frozen=True)
class Cloud:
    """What providers call the chip, beside `Slices.vendor`; empty = it is not there."""

    gke: str = ""
    """The node label `cloud.google.com/gke-tpu-accelerator`, or `gke-accelerator` of a GPU."""
    runtime: str = ""
    """The software version of a TPU VM."""
    skypilot: str = ""
    """A GPU's name; a TPU's is that of its slice."""
    env: tuple[str, ...] = ()
    """`NAME=value` of the environment in which several of its nodes work best together."""


@dataclass(frozen=True)
class Board:
    """Another board with the same chip, and what differs on it; a figure of 0 and an empty table
    are the same as in the file's `hardware`."""

    chip: str = ""
    device_kinds: tuple[str, ...] = ()
    clock_hz: float = 0.0
    hbm_bytes: int = 0
    hbm_bandwidth: float = 0.0
    host_link_bandwidth: float = 0.0
    peak_flops: PeakFlops = field(default_factory=PeakFlops)
    ici: Interconnect = field(default_factory=Interconnect)

    def on(self, hardware: Hardware) -> Hardware:
        """The figures of this board, by those of the file's `hardware`."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        none = Board()
        differ = {name: value for name, value in own.items() if value != getattr(none, name)}
        return replace(hardware, **differ)


@dataclass(frozen=True)
class Chip:
    """A file of `jaxpar.meshes.chips`. Its `hardware` does not say how many chips there are."""

    hardware: Hardware = field(default_factory=Hardware)
    boards: tuple[Board, ...] = ()
    """Those that are measured by their own figures and are no targets."""
    slices: Slices = field(default_factory=Slices)
    compiler: GpuCompiler = field(default_factory=GpuCompiler)
    tpu_compiler: TpuCompiler = field(default_factory=TpuCompiler)
    attention: AttentionTiles = field(default_factory=AttentionTiles)
    cloud: Cloud = field(default_factory=Cloud)


@dataclass(frozen=True)
class _MeshPreset:
    chip: str = ""
    mesh: MeshSpec = field(default_factory=MeshSpec)


@functools.cache  # each step that is made asks all of them which chip it is for
def load_chip(name: str) -> Chip:
    """Load a chip from its file in `jaxpar.meshes.chips`.

    Args:
      name: the name of the file, without its ending.

    Raises:
      UserError: there is no such file.
    """
    known = presets(CHIPS)
    if name not in known:
        raise UserError(f"no chip {name!r}{suggest(name, known)}: there are {', '.join(known)}")
    return from_toml(Chip, known[name].read_text(encoding="utf-8"), name)


def load_mesh_preset(name_or_path: str) -> tuple[MeshSpec, Hardware]:
    """Load a mesh and its chip.

    Args:
      name_or_path: a preset of `jaxpar.meshes`, or a TOML file.

    Returns:
      The mesh, and the figures of its chip; no figures where it names no `chip`.

    Raises:
      UserError: there is no such preset, chip or file, or the file is malformed.
    """
    text, origin = find_toml(name_or_path, "jaxpar.meshes")
    preset = from_toml(_MeshPreset, text, origin)
    if not preset.chip:
        return preset.mesh, Hardware()
    try:
        return preset.mesh, load_chip(preset.chip).hardware
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error


def chip_of(device_kind: str) -> Chip | None:
    """Find a chip among those that have a file.

    Args:
      device_kind: what `jax.Device.device_kind` says on it.

    Returns:
      The chip, on another of its boards with the figures of that; or None for an unknown one.
    """
    for name in presets(CHIPS):
        chip = load_chip(name)
        if device_kind in chip.hardware.device_kinds:
            return chip
        for board in chip.boards:
            if device_kind in board.device_kinds:
                return replace(chip, hardware=board.on(chip.hardware))
    return None


def hardware_of(device_kind: str) -> Hardware | None:
    """Find the figures of a chip. They do not say how many chips there are: `chips`, `ici.shape`
    and `ici.wraps` are empty.

    Args:
      device_kind: what `jax.Device.device_kind` says on it.

    Returns:
      The figures, or None for an unknown chip.
    """
    chip = chip_of(device_kind)
    return chip.hardware if chip else None


def has_bfloat16(device: object) -> bool:
    """Whether a device multiplies in bfloat16. A GPU of a compute capability below 8.0, such as a
    T4, does not: XLA keeps arrays in bfloat16 there, and turns them into float32 for every product.
    """
    return re.fullmatch(r"[1-7]\.\d", str(getattr(device, "compute_capability", ""))) is None


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Look up the dense matmul speed of one device.

    Args:
      device_kind: what `jax.Device.device_kind` says on it.
      dtype: a field of `PeakFlops`: float32, bfloat16, float8 or int8.

    Returns:
      FLOP/s, or None where there is no figure: an unknown chip, a CPU, another dtype.
    """
    hardware = hardware_of(device_kind)
    if hardware:
        return getattr(hardware.peak_flops, dtype, None) or None
    return None
