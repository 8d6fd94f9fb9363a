"""Targets: names of hardware that need not be here, `v5p-64`, `v5e-8`, `v5p-128x4`, `v5p:4x4x8` or
`h100x64`.

A TPU's number counts chips, not cores: the 64 chips of `v5p-64` are v5p-128 at Google Cloud.
`v5p-128x4` is four slices of 128 chips, `v5p:4x4x8` is a slice of exactly this shape, and `h100x64`
is 64 GPUs, eight to a node; `h100x64@a3-highgpu-8g` says in which machines they are. `here` is
this machine, and `here:8` its CPU as 8 simulated devices.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax

from jaxpar.base.errors import Say, UserError, short, suggest
from jaxpar.base.hardware import CHIPS, Chip, Hardware, Slices, load_chip
from jaxpar.base.jax_compat import refusal_without
from jaxpar.base.layout.mesh import MeshSpec, describe, resolve
from jaxpar.base.machine_types import load_machine_type
from jaxpar.base.process.runtime import ask_for_cpus, without_chips
from jaxpar.base.toml import presets
from jaxpar.rehearse.here import CpuFigures, chip_here, cpu_figures, hardware_of_cpus
from jaxpar.rehearse.topologies import Topology, gpu_topology, missing_compiler, tpu_topology

Platform = Literal["tpu", "cuda", "cpu"]
GPUS_PER_NODE = 8
HERE = "here"
"""The name of this machine as a target."""


@dataclass(frozen=True)
class Target:
    """A system of equal devices, perhaps not here: what to compile for, and what it can do."""

    name: str
    """The name as this library writes it: `v5p-64`, `v5p-128x4`, `v5p:4x4x8`, `h100x64`,
    `h100x64@a3-highgpu-8g`.
    """
    chip: str
    """The name of a file in `jaxpar.meshes.chips`, such as `v5p`."""
    platform: Platform
    """The platform, as in `lower(lowering_platforms=(target.platform,))`."""
    hardware: Hardware
    """The figures of one device; `chips` counts all slices or nodes, and `ici` describes one slice
    or node.
    """
    slices: int
    """The number of TPU slices, or of GPU nodes, which only the data-centre network joins."""
    topology: str
    """The shape of one slice, `4x4x4`, or of all nodes, `8x8` = nodes x GPUs."""
    vendor_name: str = ""
    """Google Cloud's name of one slice: `v5p-128`."""
    note: str = ""
    """A line to show beside the name, where the name could be misread."""
    here: tuple[jax.Device, ...] = ()
    """The devices, where they are those of this machine."""
    cpu: CpuFigures | None = None
    """What the processors do that the devices share, where they are simulated on CPU."""

    @property
    def device_count(self) -> int:
        """The number of JAX devices of the whole target: its chips, or twice as many where JAX sees
        a chip as two.
        """
        return self.hardware.chips * self.hardware.devices_per_chip

    @property
    def host_shape(self) -> tuple[int, ...]:
        """The shape of the chips that one machine, and so one JAX process, holds: a GPU node, or
        four along (x, y, z), but the whole slice on one machine: 1 chip, or 8 of a 2D torus."""
        shape = self.hardware.ici.shape
        flat = (*shape, 1)[:3]
        if self.platform != "tpu":
            return shape
        if flat in ((1, 1, 1), (2, 4, 1)):
            return flat
        return (2, 2, 1)

    @property
    def hosts(self) -> int:
        """The number of machines of the whole target."""
        return self.hardware.chips // math.prod(self.host_shape)

    def devices(self) -> list[jax.Device]:
        """Return devices to build a mesh from and compile for, without the hardware.

        Targets of several kinds may live in one process, and JAX may have started before. Where it
        has been told no platform, it is told `cpu`: compiling needs no accelerator, and JAX would
        look for one at the first array.

        Raises:
          UserError: the compiler is not installed (the message says how to install it), or refuses
            this topology.
        """
        if self.here:
            return list(self.here)
        if not jax.config.values["jax_platforms"]:
            jax.config.update("jax_platforms", "cpu")
        if why := refusal_without("topologies"):
            raise UserError(f"nothing can be compiled for {self.name}: {why}")
        if missing := missing_compiler(self.platform):
            raise UserError(f"target {self.name} needs {missing}")
        try:
            with without_chips():
                found = self._topology().devices
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            if self.platform == "cuda":
                hint = ", and a process that starts with JAX_PLATFORMS=cpu may have it"
            else:
                hint = ""
            raise UserError(
                f"the compiler for {self.name} does not start ({reason}): `jaxpar doctor` lists "
                f"what is here{hint}"
            ) from error
        if len(found) != (expected := self.device_count):
            raise UserError(
                f"the compiler for {self.name} gives {len(found)} devices, {expected} are expected"
            )
        return list(found)

    def _topology(self) -> Topology:
        """Return what the compiler knows of the target."""
        chip = load_chip(self.chip)
        if self.platform == "tpu":
            wraps = self.hardware.ici.wraps
            return tpu_topology(chip.slices, self.topology, self.slices, self.host_shape, wraps)
        return gpu_topology(self.name, chip.compiler, self.hardware, self.topology)


class Position(NamedTuple):
    """The place of a device: its slice or node, its chip's coordinates in `hardware.ici.shape`, and
    its core there.
    """

    slice: int
    coords: tuple[int, ...]
    core: int = 0


def load_target(name: str) -> Target:
    """Look up the target of a name; no compiler is needed yet.

    Args:
      name: a chip and a size: `v5p-64` for 64 chips, `v5p-64x4` for four slices of them,
        `v5p:4x4x4` for a shape, `h100x64` for 64 GPUs; of GPUs a type of machine may follow:
        `h100x64@a3-highgpu-8g`. `here` is the devices of this machine, and `here:8` 8 of its
        simulated CPU devices.

    Raises:
      UserError: the chip is unknown, or its topology does not allow this size; the message names
        the nearest.
    """
    if not isinstance(name, str):
        raise UserError(
            f'a target is a name, such as "v5p-64" or "h100x8", and {short(name)} was given'
        )
    if at_hand := re.fullmatch(r"here(?::(\d+))?", name.lower()):
        return target_here(_devices_here(int(at_hand[1] or 0)))
    size, at, machine = name.lower().partition("@")
    match = re.fullmatch(r"(\w+?)([-:x])(\d+(?:x\d+)*)", size)
    chips = {chip: load_chip(chip) for chip in presets(CHIPS)}
    if match is None or match[1] not in chips:
        words = [
            f"{key}{'-' if chip.slices.name else 'x'}{n}"
            for key, chip in chips.items()
            for n in (8, 64, 256)
        ]
        guess = suggest(size.replace("litepod", "e"), words)
        raise UserError(
            f"no target {name!r}{guess}: chips are {', '.join(chips)}, as in v5p-64, v5p-64x4, "
            "h100x64; and here is this machine"
        )
    key = match[1]
    mark = match[2]
    numbers = _numbers(match[3])
    chip = chips[key]
    if at and chip.slices.name:
        raise UserError(f"target {name!r}: types of machines are those of GPUs, and {key} is a TPU")
    match mark, numbers:
        case "x", (count,) if count > 0 and not chip.slices.name:
            return _in_machines(_gpus(key, chip, count), machine) if at else _gpus(key, chip, count)
        case ":", shape if chip.slices.name:
            return _slice(key, chip, shape, 1, named_by_shape=True)
        case "-", (count,) | (count, _) if min(numbers) > 0 and chip.slices.name:
            shape = _shape_of(key, chip.slices, count)
            return _slice(key, chip, shape, math.prod(numbers[1:]))
    if chip.slices.name:
        shape = "4x4x4" if chip.slices.cube else "8x8"
        how = (
            f"{key}-64 for 64 chips, {key}-64x4 for four slices of them, {key}:{shape} for a shape"
        )
    else:
        how = f"{key}x64 for 64 GPUs, {GPUS_PER_NODE} to a node"
    raise UserError(f"no target {name!r}: write {how}")


# TPU slices.


def _numbers(shape: str) -> tuple[int, ...]:
    return tuple(int(side) for side in shape.split("x"))


def _shape_of(name: str, rules: Slices, count: int) -> tuple[int, ...]:
    """Find the shape of a slice of so many chips; among several, the nearest to a cube (the
    shortest longest side).
    """
    if rules.cube:
        cubes = rules.most_chips // rules.cube**3
    else:
        cubes = 0
    sides = range(1, cubes + 1)
    whole = [
        (a, b, c)
        for a in sides
        for b in sides[a - 1 : cubes // a]
        for c in sides[b - 1 : cubes // (a * b)]
    ]
    whole.sort(key=lambda shape: (shape[2], -shape[0]))
    listed = [
        *map(_numbers, rules.shapes),
        *(tuple(side * rules.cube for side in shape) for shape in whole),
    ]
    shapes = {math.prod(shape): shape for shape in reversed(listed)}
    if count in shapes:
        return shapes[count]
    near = [
        max((n for n in shapes if n < count), default=0),
        min((n for n in shapes if n > count), default=0),
    ]
    nearby = [f"{name}-{size}" for size in near if size]
    if count > rules.most_chips:
        nearby.append(f"two slices of that, {nearby[0]}x2")
    near = " and ".join(nearby)
    raise UserError(
        f"target '{name}-{count}': no {name} slice has {count} chips, the nearest are {near}"
    )


def _slice(
    name: str, chip: Chip, shape: tuple[int, ...], count: int, named_by_shape: bool = False
) -> Target:
    """Make the target that has `count` slices of this shape."""
    text = "x".join(map(str, shape))
    rules = chip.slices
    devices = chip.hardware.devices_per_chip
    cubes = (
        rules.cube
        and len(shape) == 3
        and min(shape) > 0
        and all(side % rules.cube == 0 for side in shape)
    )
    if text not in rules.shapes and not (cubes and math.prod(shape) <= rules.most_chips):
        if rules.cube:
            whole = f", and sides of a multiple of {rules.cube} up to {rules.most_chips} chips"
        else:
            whole = ""
        raise UserError(
            f"target '{name}:{text}': no {name} slice has this shape: try "
            f"{', '.join(rules.shapes)}{whole}"
        )
    chips = math.prod(shape)
    wraps = tuple(side == rules.ring if rules.ring else bool(cubes) for side in shape)
    hardware = replace(
        chip.hardware,
        chips=chips * count,
        ici=replace(
            chip.hardware.ici,
            shape=shape,
            wraps=wraps,
        ),
    )
    vendor = rules.vendor.format(chips=chips, cores=2 * chips)
    each = " a slice" if count > 1 else ""
    counted = f"{chips} chips{each}; Google Cloud counts TensorCores and calls this {vendor}"
    note = counted if "{cores}" in rules.vendor else ""
    note += f"; JAX sees {devices} devices a chip" if devices > 1 else ""
    if named_by_shape:
        label = f"{name}:{text}"
    else:
        label = f"{name}-{chips}" + (f"x{count}" if count > 1 else "")
    return Target(label, name, "tpu", hardware, count, text, vendor, note)


# GPU nodes.


def _gpus(name: str, chip: Chip, count: int) -> Target:
    nodes, rest = divmod(count, GPUS_PER_NODE)
    if rest and count not in (1, 2, 4):
        below = nodes * GPUS_PER_NODE or 4
        above = (nodes + 1) * GPUS_PER_NODE
        raise UserError(
            f"target '{name}x{count}': GPUs come {GPUS_PER_NODE} to a node "
            f"(or 1, 2 or 4 of one node), the nearest are {name}x{below} and {name}x{above}"
        )
    nodes = max(nodes, 1)
    per_node = min(count, GPUS_PER_NODE)
    hardware = replace(
        chip.hardware,
        chips=count,
        ici=replace(
            chip.hardware.ici,
            shape=(per_node,),
            wraps=(True,),
        ),
    )
    return Target(f"{name}x{count}", name, "cuda", hardware, nodes, f"{nodes}x{per_node}")


def _in_machines(target: Target, name: str) -> Target:
    """Return the target in machines of this type."""
    machine = load_machine_type(name, target.chip)
    count = target.hardware.chips
    if count > machine.gpus != GPUS_PER_NODE:
        raise UserError(
            f"target '{target.name}@{name}': such a machine has {machine.gpus} GPU, and several of "
            f"them are no target: try {target.chip}x{machine.gpus}@{name}"
        )
    return replace(target, name=f"{target.name}@{name}", hardware=machine.on(target.hardware))


# This machine.


def target_here(
    devices: Sequence[jax.Device],
    say: Say = lambda line: None,
    anew: bool = False,
    rates: CpuFigures | None = None,
) -> Target:
    """Make the target that is devices of this machine. Of a CPU the figures are measured, once.

    Args:
      devices: those that programs run on, all at once.
      say: is called with a line before anything is measured.
      anew: whether a CPU is measured even where figures are kept: other processes may have run
        then.
      rates: what was just measured with other devices of the CPU, which is taken.

    Raises:
      UserError: nothing is known of their chip.
    """
    count = len(devices)
    if devices[0].platform != "cpu":
        chip, hardware = chip_here(devices)
        return Target(HERE, chip, "cuda", hardware, 1, f"1x{count}", here=tuple(devices))
    figures = cpu_figures(devices, say, anew, rates)
    hardware = hardware_of_cpus(figures, count)
    if count > 1:
        note = f"{count} simulated devices on {figures.cores} cores"
    else:
        note = f"{figures.cores} cores"
    name = HERE if count == 1 else f"{HERE}:{count}"
    return Target(
        name, "cpu", "cpu", hardware, 1, str(count), note=note, here=tuple(devices), cpu=figures
    )


def _devices_here(count: int) -> list[jax.Device]:
    """Return the devices of this machine: 0 = all of them, or so many simulated CPU devices."""
    if count:
        ask_for_cpus(count)
    devices = jax.devices()
    if len(devices) < count or (count and devices[0].platform != "cpu"):
        raise UserError(
            f"target 'here:{count}' is {count} simulated CPU devices, and JAX has started with "
            f"{len(devices)} ({devices[0].platform}): set JAX_PLATFORMS=cpu, or ask before "
            "anything uses JAX"
        )
    return devices[: count or None]


# The mesh on the target.


def check_mesh(spec: MeshSpec, target: Target) -> None:
    """Check that a mesh fits the target.

    Args:
      spec: the mesh, in which one axis may be -1.

    Raises:
      UserError: it does not fit; the message says what to change.
    """
    across = {axis: size for axis, size in vars(spec.dcn).items() if size != 1}
    spans = math.prod(across.values())
    if target.platform == "cuda":
        unit = "nodes"
    else:
        unit = "slices"
    needed = target.slices > 1 and target.platform == "tpu"
    if (needed or across) and spans != target.slices:
        if target.slices > 1:
            here = f"{target.slices} {unit}"
        else:
            here = f"one {unit[:-1]}"
        if target.slices > 1:
            change = f"try mesh.dcn.data={target.slices}"
        else:
            change = "leave out the mesh.dcn sizes"
        if across:
            asked = f"spans {spans} of them (mesh.dcn {describe(across)})"
        else:
            asked = "has no axis across them"
        raise UserError(f"{target.name} is {here}, and the mesh {asked}: {change}")
    if target.hardware.devices_per_chip > 1:
        of = f"{target.hardware.chips} chips"
    else:
        of = target.topology
    resolve(spec, target.device_count, f"{target.name} has {target.device_count} ({of})")


def places(devices: Iterable[jax.Device], target: Target) -> tuple[Position, ...]:
    """Find the position of each device, in the order of `devices`.

    Args:
      devices: the devices of the target that a program runs on. `mesh.devices.flat` is a program's
        order.
    """
    devices = list(devices)
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    if target.platform == "tpu":
        axes = len(target.hardware.ici.shape)
        return tuple(
            Position(slice, tuple(device.coords[:axes]), device.core_on_chip)  # pyright: ignore[reportAttributeAccessIssue]
            for device, slice in zip(devices, slices, strict=True)
        )
    # GPUs that are not here are all in slice 0, with one process per node
    if len(set(slices)) == 1:
        slices = [device.process_index for device in devices]
    members: defaultdict[int, list[int]] = defaultdict(list)  # the devices' ids by node
    for device, node in zip(devices, slices, strict=True):
        members[node].append(device.id)
    seats = zip(devices, slices, strict=True)
    return tuple(
        Position(node, (sorted(members[node]).index(device.id),)) for device, node in seats
    )
