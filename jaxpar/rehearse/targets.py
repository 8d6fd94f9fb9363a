"""Hardware that is not here, by name: `v5p-64`, `v5e-8`, `v5p-128x4`, `v5p:4x4x8`, `h100x64`, or `here`.

A TPU's number counts chips, not cores: the 64 chips of `v5p-64` are v5p-128 at Google Cloud. `v5p-128x4` is four
slices of 128, `v5p:4x4x8` a slice of exactly this shape, `h100x64` 64 GPUs, eight to a node.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import jax
from jax.experimental import topologies

from jaxpar.base.errors import UserError, nearest
from jaxpar.base.hardware import CHIPS, Chip, GpuCompiler, Hardware, Slices, hardware_of, load_chip
from jaxpar.base.mesh import MeshSpec, describe, resolve
from jaxpar.base.runtime import without_chips
from jaxpar.base.toml import presets

Platform = Literal["tpu", "cuda", "cpu"]
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Target:
    """A system of equal devices, perhaps not here: what to compile for, and what it can do."""

    name: str
    """As this library writes it: `v5p-64`, `v5p-128x4`, `v5p:4x4x8`, `h100x64`, `here`."""
    chip: str
    """A file of `jaxpar.meshes.chips`: `v5p`; for `here` what JAX calls the device."""
    platform: Platform
    """As in `lower(lowering_platforms=(target.platform,))`."""
    hardware: Hardware
    """Figures of one device; `chips` of all slices or nodes; `ici` of one slice or node."""
    slices: int
    """TPU slices, or GPU nodes, joined by the data-centre network only."""
    topology: str
    """One slice, `4x4x4`, or all nodes, `8x8` = nodes x GPUs."""
    vendor_name: str = ""
    """What Google Cloud calls one slice: `v5p-128`."""
    note: str = ""
    """A line that belongs beside the name, where it could be misread."""

    @property
    def device_count(self) -> int:
        """JAX devices of the whole target: its chips, or twice as many where JAX sees a chip as two."""
        return self.hardware.chips * self.hardware.devices_per_chip

    def devices(self) -> list[jax.Device]:
        """Devices to build a mesh from and compile for, without the hardware; for `here` those of this machine.

        Targets of several kinds may live in one process. Where JAX has been told no platform it is told `cpu`:
        compiling needs no accelerator, and JAX would look for one at the first array.

        Raises:
          UserError: the compiler for them is not installed (and how to install it), or refuses this topology.
        """
        return _devices(self)


class Position(NamedTuple):
    """Where a device sits: the slice or node, its chip's coordinates in `hardware.ici.shape`, its core on the chip."""

    slice: int
    coords: tuple[int, ...]
    core: int = 0


def load_target(name: str) -> Target:
    """The target of this name. `here` is this machine's devices, and starts JAX.

    Raises:
      UserError: an unknown chip, or a size its topology does not allow, each with the nearest that exist.
    """
    if name == "here":
        return _here()
    match = re.fullmatch(r"(\w+?)([-:x])(\d+(?:x\d+)*)", name.lower())
    chips = [chip for chip in presets(CHIPS) if chip != "cpu"]
    if match is None or match[1] not in chips:
        words = [example for chip in chips for example in _examples(chip)]
        guess = nearest(name.lower().replace("litepod", "e"), [*words, "here"])
        raise UserError(
            f"no target {name!r}{guess}: chips are {', '.join(chips)}, as in v5p-64, v5p-64x4, h100x64; or here"
        )
    chip, mark, numbers = load_chip(match[1]), match[2], _numbers(match[3])
    if mark == "x" and not chip.slices.name and len(numbers) == 1:
        return _gpus(match[1], chip, numbers[0])
    if mark == ":" and chip.slices.name:
        return _slice(match[1], chip, numbers, 1, named_by_shape=True)
    if mark != "-" or not chip.slices.name or len(numbers) > 2 or min(numbers) < 1:
        raise UserError(f"no target {name!r}: " + _how_to_write(match[1], chip))
    count, slices = (*numbers, 1)[:2]
    shape = _shape_of(count, chip.slices)
    if shape is None:
        sizes = sorted(_sizes(chip.slices))
        near = [size for size in sizes if size < count][-1:] + [size for size in sizes if size > count][:1]
        nearby = [f"{match[1]}-{size}" for size in near]
        if count > chip.slices.most_chips:
            nearby.append(f"two slices of that, {nearby[0]}x2")
        raise UserError(
            f"target {name!r}: no {match[1]} slice has {count} chips, the nearest are {' and '.join(nearby)}"
        )
    return _slice(match[1], chip, shape, slices)


def _examples(name: str) -> list[str]:
    slices = load_chip(name).slices
    if not slices.name:
        return [f"{name}x{count}" for count in (8, 16, 64)]
    return [f"{name}-{math.prod(_numbers(shape))}" for shape in slices.shapes] + [f"{name}-64", f"{name}-256"]


def _how_to_write(name: str, chip: Chip) -> str:
    if not chip.slices.name:
        return f"write {name}x64 for 64 GPUs, {GPUS_PER_NODE} to a node"
    shape = "4x4x4" if len(_numbers(chip.slices.shapes[0])) == 3 else "8x8"
    return f"write {name}-64 for 64 chips, {name}-64x4 for four slices of them, {name}:{shape} for a shape"


# TPU slices.


def _numbers(shape: str) -> tuple[int, ...]:
    return tuple(int(side) for side in shape.split("x"))


def _sizes(slices: Slices) -> set[int]:
    """Chips of every slice that exists."""
    small = {math.prod(_numbers(shape)) for shape in slices.shapes}
    whole = slices.cube**3
    return small | (set(range(whole, slices.most_chips + 1, whole)) if whole else set())


def _shape_of(count: int, slices: Slices) -> tuple[int, ...] | None:
    """The shape closest to a cube that has this many chips: the shortest longest side, then the longest shortest."""
    listed = [shape for shape in map(_numbers, slices.shapes) if math.prod(shape) == count]
    if listed or count not in _sizes(slices):
        return listed[0] if listed else None
    cubes = count // slices.cube**3
    factors = [n for n in range(1, cubes + 1) if cubes % n == 0]
    found = [
        (a, b, cubes // (a * b))
        for a in factors
        for b in factors
        if cubes % (a * b) == 0 and a <= b <= cubes // (a * b)
    ]
    return tuple(side * slices.cube for side in min(found, key=lambda sides: (sides[2], -sides[0])))


def _slice(name: str, chip: Chip, shape: tuple[int, ...], count: int, named_by_shape: bool = False) -> Target:
    """`count` slices of this shape."""
    text, rules, devices = "x".join(map(str, shape)), chip.slices, chip.hardware.devices_per_chip
    cubes = rules.cube and len(shape) == 3 and min(shape) > 0 and all(side % rules.cube == 0 for side in shape)
    if text not in rules.shapes and not (cubes and math.prod(shape) <= rules.most_chips):
        whole = f", and sides of a multiple of {rules.cube} up to {rules.most_chips} chips" if rules.cube else ""
        raise UserError(f"target '{name}:{text}': no {name} slice has this shape: try {', '.join(rules.shapes)}{whole}")
    chips = math.prod(shape)
    wraps = tuple(side == rules.ring if rules.ring else bool(cubes) for side in shape)
    hardware = replace(chip.hardware, chips=chips * count, ici=replace(chip.hardware.ici, shape=shape, wraps=wraps))
    vendor, each = rules.vendor.format(chips=chips, cores=2 * chips), " a slice" if count > 1 else ""
    counted = f"{chips} chips{each}; Google Cloud counts TensorCores and calls this {vendor}"
    note = counted if "{cores}" in rules.vendor else ""
    note += f"; JAX sees {devices} devices a chip" if devices > 1 else ""
    label = f"{name}:{text}" if named_by_shape else f"{name}-{chips}" + (f"x{count}" if count > 1 else "")
    return Target(label, name, "tpu", hardware, count, text, vendor, note)


# GPU nodes, and this machine.


def _gpus(name: str, chip: Chip, count: int) -> Target:
    if count < 1:
        raise UserError(f"target '{name}x{count}' has no GPUs: " + _how_to_write(name, chip))
    nodes, rest = divmod(count, GPUS_PER_NODE)
    if rest and count not in (1, 2, 4):
        below, above = nodes * GPUS_PER_NODE or 4, (nodes + 1) * GPUS_PER_NODE
        raise UserError(
            f"target '{name}x{count}': GPUs come {GPUS_PER_NODE} to a node (or 1, 2 or 4 of one node), the nearest are "
            f"{name}x{below} and {name}x{above}"
        )
    nodes, per_node = max(nodes, 1), min(count, GPUS_PER_NODE)
    hardware = replace(chip.hardware, chips=count, ici=replace(chip.hardware.ici, shape=(per_node,), wraps=(True,)))
    return Target(f"{name}x{count}", name, "cuda", hardware, nodes, f"{nodes}x{per_node}")


def _here() -> Target:
    """This machine's devices; an unknown chip has no figures."""
    devices = jax.devices()
    kind, slices = devices[0].device_kind, len(set(_slice_indices(devices)))
    platform: Platform = {"gpu": "cuda", "tpu": "tpu"}.get(devices[0].platform, "cpu")  # pyright: ignore[reportAssignmentType]
    known = hardware_of(kind) or Hardware(chip=kind, device_kinds=(kind,))
    shape, wraps = (len(devices) // slices,), (platform == "cuda",)
    if platform == "tpu":  # JAX gives three coordinates for a 2D torus too
        axes = zip(*(device.coords[: known.ici.links // 2 or 3] for device in devices), strict=True)
        shape = tuple(max(axis) + 1 for axis in axes)
        wraps = tuple(side == 16 if len(shape) == 2 else all(side % 4 == 0 for side in shape) for side in shape)
    hardware = replace(
        known, chips=len(devices) // known.devices_per_chip, ici=replace(known.ici, shape=shape, wraps=wraps)
    )
    topology = "x".join(map(str, shape if platform == "tpu" else (slices, *shape)))
    return Target("here", kind, platform, hardware, slices, topology)


def _slice_indices(devices: Sequence[jax.Device]) -> list[int]:
    """The slice or node of each device. GPUs that are not here are all of slice 0, with a process for each node."""
    found = [getattr(device, "slice_index", None) or 0 for device in devices]
    if len(set(found)) == 1 and devices[0].platform != "tpu":
        return [device.process_index for device in devices]
    return found


# Devices to compile for.


def _devices(target: Target) -> list[jax.Device]:
    if target.name == "here":
        return jax.devices()
    if jax.config.values["jax_platforms"] is None:
        jax.config.update("jax_platforms", "cpu")
    missing = _missing(target.platform)
    if missing:
        raise UserError(f"target {target.name} needs {missing}")
    try:
        with without_chips():
            found = _tpu_devices(target) if target.platform == "tpu" else _gpu_devices(target)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the compiler for {target.name} does not start ({reason}): `jaxpar doctor` lists what is here"
        ) from error
    if len(found) != target.device_count:
        raise UserError(
            f"the compiler for {target.name} gives {len(found)} devices, {target.device_count} are expected"
        )
    return found


def _tpu_devices(target: Target) -> list[jax.Device]:
    rules, ici = load_chip(target.chip).slices, target.hardware.ici
    flat = (*ici.shape, 1)[:3]
    # A process holds four chips, but for the slices of one machine: 1, or 8 of a 2D torus.
    host = flat if flat in ((1, 1, 1), (2, 4, 1)) else (2, 2, 1)
    options: dict[str, object] = {"chips_per_host_bounds": host, "wrap": (*ici.wraps, False)[:3]}
    if rules.config:
        options["chip_config_name"] = rules.config
    if target.slices > 1:
        options["num_slices"] = target.slices
    name = f"{rules.name}:{target.topology}"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def _gpu_devices(target: Target) -> list[jax.Device]:
    config = _target_config(load_chip(target.chip).compiler, target.hardware)
    found = topologies.get_topology_desc(
        topology_name=target.name, platform="cuda", target_config=config, topology=f"1x{target.topology}"
    )
    return list(found.devices)


def _target_config(chip: GpuCompiler, hardware: Hardware) -> str:
    """`stream_executor.GpuTargetConfigProto` in text form. What is written out here is the same for every chip."""
    major, minor, extension = re.fullmatch(r"(\d+)\.(\d+)(a?)", chip.compute_capability).groups()  # pyright: ignore[reportOptionalMemberAccess]
    feature = "ACCELERATED_FEATURES" if extension else "NONE"
    return f"""
gpu_device_info {{
  core_count: {chip.core_count}  fpus_per_core: {chip.fpus_per_core}  clock_rate_ghz: {chip.clock_rate_ghz}
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {chip.shared_memory_per_block_optin}
  shared_memory_per_core: {chip.shared_memory_per_core}  l2_cache_size: {chip.l2_cache_size}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_memory_size: {hardware.hbm_bytes}  memory_bandwidth: {hardware.hbm_bandwidth:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{hardware.device_kinds[0]}"
"""


def compilers() -> dict[str, str]:
    """For each platform what compiles for it here, `libtpu 0.0.42`, or what is missing and how to install it."""
    found = {"tpu": ("libtpu",), "cuda": _CUDA_PLUGINS}
    return {
        platform: _missing(platform) or " ".join(f"{name} {_version(name)}" for name in names if _version(name))
        for platform, names in found.items()
    }


_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(platform: str) -> str:
    """What must be installed to compile for a platform, or nothing."""
    wanted = jax.__version__
    if platform == "tpu" and not (_version("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
        return f"libtpu, the TPU compiler: pip install 'jax[tpu]=={wanted}' (Linux on x86-64 only)"
    if platform != "cuda":
        return ""
    fix = f"pip install jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted} (Linux only)"
    plugins = [f"{name} {_version(name)}" for name in _CUDA_PLUGINS if _version(name)]
    if not plugins:
        return f"jax's CUDA plugin, the GPU compiler (no driver, no GPU): {fix}"
    if not any(_version(name) == wanted for name in _CUDA_PLUGINS):
        return f"a CUDA plugin of jax's own version, {wanted} (found {', '.join(plugins)}): {fix}"
    return ""


# The mesh on the target.


def check_mesh(spec: MeshSpec, target: Target) -> None:
    """Whether a mesh fits the target.

    Raises:
      UserError: it does not, with the change to make.
    """
    across = {axis: size for axis, size in vars(spec.dcn).items() if size != 1}
    spans, unit = math.prod(across.values()), "nodes" if target.platform == "cuda" else "slices"
    needed = target.slices > 1 and target.platform == "tpu"
    if (needed or across) and spans != target.slices and target.platform != "cpu":
        here = f"{target.slices} {unit}" if target.slices > 1 else f"one {unit[:-1]}"
        change = f"try --mesh.dcn.data {target.slices}" if target.slices > 1 else "leave out the --mesh.dcn. sizes"
        asked = f"spans {spans} of them (mesh.dcn {describe(across)})" if across else "has no axis across them"
        raise UserError(f"{target.name} is {here}, and the mesh {asked}: {change}")
    of = f"{target.hardware.chips} chips" if target.hardware.devices_per_chip > 1 else target.topology
    resolve(spec, target.device_count, f"{target.name} has {target.device_count} ({of})")


def places(devices: Sequence[jax.Device], target: Target) -> tuple[Position, ...]:
    """Where each device sits, in the order given: `places(mesh.devices.flat, target)` for a program's positions."""
    devices = list(devices)
    slices = _slice_indices(devices)
    if target.platform == "tpu":
        axes = len(target.hardware.ici.shape)
        return tuple(
            Position(slice, tuple(device.coords[:axes]), device.core_on_chip)  # pyright: ignore[reportAttributeAccessIssue]
            for device, slice in zip(devices, slices, strict=True)
        )
    members: dict[int, list[int]] = {}  # ids by node, in order
    for number, node in sorted((device.id, node) for device, node in zip(devices, slices, strict=True)):
        members.setdefault(node, []).append(number)
    seats = {number: seat for numbers in members.values() for seat, number in enumerate(numbers)}
    return tuple(Position(node, (seats[device.id],)) for device, node in zip(devices, slices, strict=True))
