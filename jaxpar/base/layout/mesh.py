"""Mesh axes, and a `jax.sharding.Mesh` from their sizes, in an order that follows the hardware's
topology.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxpar.base.errors import UserError, short
from jaxpar.base.field_marks import Called, Idle
from jaxpar.base.key_aliases import suggest_axis
from jaxpar.base.number_checks import require_whole
from jaxpar.base.ranges import Range

MeshAxis: TypeAlias = str
"""The name of a direction of a grid of devices, on any mesh."""
ConfigMeshAxis = Literal["stage", "data", "fsdp", "context", "expert", "tensor"]
"""The mesh axes of a config and of `make_mesh`."""

Size = Annotated[
    int, Range(1, 65_536, also=(-1,), why="an axis has at least 1 device, or is -1 = what is left")
]
"""The number of devices along a mesh axis inside a slice."""
Slices = Annotated[int, Range(1, 4_096)]
"""The number of slices that a mesh axis spans."""

# Outermost first. The last axes land on neighbouring devices, so those that talk most often
# (tensor: twice a layer) come last and those that talk least (stage: one activation a tick) come
# first, as in Megatron-LM.
MESH_AXES: tuple[ConfigMeshAxis, ...] = ("stage", "data", "fsdp", "context", "expert", "tensor")


@dataclass(frozen=True)
class DcnSpec:
    """How many slices (or GPU nodes) each mesh axis spans over the data-centre network; 1 = stays
    inside a slice.
    """

    stage: Slices = 1
    data: Slices = 1
    fsdp: Slices = 1
    context: Slices = 1
    expert: Slices = 1
    tensor: Slices = 1


_ONE_PROCESS = Idle(
    lambda c: not c.mesh.distributed,
    "one process has no others to wait for",
    "add --mesh.distributed True",
)


@dataclass(frozen=True)
class MeshSpec:
    """The number of devices along each mesh axis inside a slice. One may be -1, which takes what is
    left. The sizes in `dcn` multiply these."""

    stage: Annotated[
        Size,
        Called(
            "pp pipeline_parallel pipeline_parallel_size "
            "pipeline_model_parallel_size pipeline_parallel_degree "
            "ici_pipeline_parallelism stages num_stages pipe pipeline pipe_parallel "
            "pipe_parallel_size"
        ),
    ] = 1
    data: Annotated[
        Size,
        Called(
            "dp data_parallel data_parallel_size data_parallel_replicate_degree "
            "ici_data_parallelism ddp devices replica replicas gpus num_gpus n_gpus "
            "num_devices nproc_per_node"
        ),
    ] = 1
    fsdp: Annotated[
        Size,
        Called(
            "zero zero_stage data_parallel_shard_degree ici_fsdp_parallelism "
            "fsdp_size sharding shard dp_shard"
        ),
    ] = 1
    context: Annotated[
        Size,
        Called(
            "cp sp context_parallel context_parallel_size context_parallel_degree "
            "sequence_parallel seq sequence ici_context_parallelism"
        ),
    ] = 1
    expert: Annotated[
        Size,
        Called(
            "ep expert_parallel expert_model_parallel_size expert_parallel_degree "
            "ici_expert_parallelism"
        ),
    ] = 1
    tensor: Annotated[
        Size,
        Called(
            "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size "
            "tensor_parallel_degree tp_size mp ici_tensor_parallelism "
            "model_parallel model"
        ),
    ] = 1
    dcn: DcnSpec = field(default_factory=DcnSpec)
    platform: Annotated[
        Literal["auto", "cpu", "gpu", "tpu"],
        Called("device platform accelerator backend hardware use_cpu"),
    ] = "auto"
    """`cpu` simulates as many CPU devices as the mesh needs, and never fewer than JAX was told of
    before. `tpu` and `gpu` refuse to run on anything else.
    """
    distributed: bool = False
    """Join a multi-process run with `jax.distributed.initialize()` before the first device is
    touched.
    """
    join_seconds: Annotated[
        int,
        Range(1, 86_400),
        _ONE_PROCESS,
    ] = 300
    """How long a process of several waits at the start for the others, before it ends with exit
    code 75."""


def require_mesh_axis(name: object, otherwise: str) -> None:
    """Refuse what is not the name of a mesh axis.

    Args:
      name: what was given.
      otherwise: with what the message begins.

    Raises:
      UserError: it is no such name.
    """
    if not isinstance(name, str) or name not in MESH_AXES:
        if isinstance(name, str):
            hint = suggest_axis(name, MESH_AXES, MeshSpec)
        else:
            hint = ""
        raise UserError(
            f"{otherwise} {short(name)}{hint}: its axes are {', '.join(MESH_AXES)}; a mesh of "
            "other axes is made by jax.make_mesh, and a jaxpar.Layout takes it"
        )


def axis_sizes(spec: MeshSpec) -> dict[MeshAxis, int]:
    """The sizes of a spec inside a slice, by axis in mesh order; -1 is left as it is."""
    return {axis: getattr(spec, axis) for axis in MESH_AXES}


def describe(sizes: Mapping[MeshAxis, int]) -> str:
    """`data=2 x tensor=4`: the axes larger than one, or `1 device` where there is none."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1 device"


def devices_needed(spec: MeshSpec) -> int:
    """The number of devices that a spec asks for; an axis of -1 counts as one."""
    return math.prod(total_sizes(spec).values())


def total_sizes(mesh: MeshSpec) -> dict[MeshAxis, int]:
    """The number of devices along each mesh axis over all slices; an axis of -1 counts as one."""
    return {axis: max(size, 1) * getattr(mesh.dcn, axis) for axis, size in axis_sizes(mesh).items()}


def resolve(
    spec: MeshSpec,
    device_count: int,
    available: str = "",
) -> dict[MeshAxis, int]:
    """Fill in the axis of -1.

    Args:
      spec: the sizes by axis.
      device_count: the number of devices over all slices.
      available: how a message calls these devices; empty means `64 are here`.

    Returns:
      The size of each axis inside a slice.

    Raises:
      UserError: an axis whose size is no whole number, 0 or below -1, two axes of -1, or a product
        that is not `device_count`.
    """
    sizes = axis_sizes(spec)
    for name, size in [
        *sizes.items(),
        *((f"dcn.{axis}", n) for axis, n in asdict(spec.dcn).items()),
    ]:
        require_whole("a mesh", f"mesh.{name}", size)
        if size < 1 and (size != -1 or name.startswith("dcn.")):
            raise UserError(
                f"mesh.{name} is {size}: an axis has at least 1 device (or is -1 = what is left)"
            )
    free: list[MeshAxis] = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        both = " and ".join(free)
        raise UserError(
            f"mesh has {both} = -1: only one axis can take what is left, give the others a size"
        )
    slices = math.prod(asdict(spec.dcn).values())
    fixed = math.prod(size for size in sizes.values() if size != -1) * slices
    if fixed == device_count or (free and device_count % fixed == 0):
        return sizes | dict.fromkeys(free, device_count // fixed)
    here = available or f"{device_count} {'is' if device_count == 1 else 'are'} here"
    given = {axis: size for axis, size in sizes.items() if size not in (1, -1)}
    shape = (describe(given) if given else "of 1 device") + (
        f" over {slices} slices" if slices > 1 else ""
    )
    if free:
        needs = f"a multiple of {fixed} devices"
    else:
        needs = f"{fixed} device{'s' if fixed > 1 else ''}"
    raise UserError(
        f"mesh {shape} needs {needs}, {here}: {_suggestion(sizes, device_count, slices)}"
    )


def _suggestion(sizes: dict[MeshAxis, int], device_count: int, slices: int) -> str:
    """Advice to change one axis so that the mesh fits: the largest axis for which that is
    possible.
    """
    per_slice, rest = divmod(device_count, slices)
    if rest:
        return f"{slices} slices do not divide them, so change the sizes of mesh.dcn"
    for axis, size in sorted(
        sizes.items(),
        key=lambda item: -item[1],
    ):
        others = math.prod(n for a, n in sizes.items() if a != axis and n != -1)
        if size > 1 and per_slice % others == 0:
            left = per_slice // others
            if -1 not in sizes.values():
                fits = left
            else:
                fits = largest_divisor(left, size)
            return f"try mesh.{axis}={fits}"
    if all(size == 1 for size in sizes.values()):
        return f"try mesh.data={per_slice}"
    return "try mesh.data=-1 with the other axes 1, or mesh.platform=cpu to simulate the devices"


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`."""
    return next(n for n in range(most, 0, -1) if number % n == 0)


def make_mesh(
    spec: MeshSpec | None = None, devices: Sequence[jax.Device] | None = None, **sizes: int
) -> Mesh:
    """Make a mesh with all six axes (most of size 1), devices placed by topology.

    On TPU the order follows the torus (`mesh_utils.create_device_mesh`); with `dcn` sizes the
    slices, or on GPU the processes, form the outer blocks (`create_hybrid_device_mesh`); simulated
    slices are consecutive devices. Axis types are always Auto, because `with_sharding_constraint`
    raises under Explicit, which is jax's default.

    Args:
      spec: the sizes by axis.
      devices: the devices to use; None means all of `jax.devices()`.
      sizes: in place of a spec: `make_mesh(data=2, fsdp=-1)`. An axis of -1 takes what is left.

    Returns:
      The mesh, its axes in the order of `MESH_AXES`.

    Raises:
      UserError: a name is not a mesh axis, an argument is of another type, or the sizes do not
        match the devices.
    """
    for axis in sizes:
        require_mesh_axis(axis, "make_mesh: no mesh axis")
    if spec is not None and not isinstance(spec, MeshSpec):
        raise UserError(
            f"make_mesh takes a MeshSpec, or sizes by name, and was given {short(spec)}: "
            f"{_by_name(spec)}"
        )
    if spec is not None and sizes:
        raise UserError(
            f"make_mesh takes a MeshSpec or sizes, and was given both: {describe(sizes)}"
        )
    spec = spec or MeshSpec(**sizes)  # pyright: ignore[reportArgumentType]
    devices = _list_devices(devices)
    ici = tuple(resolve(spec, len(devices)).values())
    dcn = tuple(getattr(spec.dcn, axis) for axis in MESH_AXES)
    if (
        math.prod(dcn) > 1
        and devices[0].platform == "cpu"
        and len({device.process_index for device in devices}) == 1
    ):
        grid = _simulate_slices(devices, ici, dcn)
    elif math.prod(dcn) > 1:
        one_slice = len({getattr(device, "slice_index", 0) for device in devices}) == 1
        more = {"process_is_granule": one_slice, "allow_split_physical_axes": True}
        try:
            grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, **more)
        except ValueError as error:
            raise UserError(
                f"mesh.dcn {asdict(spec.dcn)} does not fit the slices here: {error}"
            ) from error
    else:
        grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _by_name(spec: object) -> str:
    """What to write in place of what is no MeshSpec."""
    if isinstance(spec, Mapping) and all(axis in MESH_AXES for axis in spec):
        sizes = spec
    else:
        sizes = {"data": -1}
    return f"write make_mesh({', '.join(f'{axis}={size!r}' for axis, size in sizes.items())})"


def _list_devices(devices: object) -> list[jax.Device]:
    """The devices that were given, or all of JAX's; a UserError for what is no list of devices."""
    if devices is None:
        return list(jax.devices())
    found: list[Any] = list(devices) if isinstance(devices, Iterable) else []
    if not found or not all(hasattr(device, "platform") for device in found):
        raise UserError(
            "make_mesh takes devices as a list of jax's devices, and was given "
            f"{short(devices)}: write "
            "devices=jax.devices()[:4], for one"
        )
    return found


def _simulate_slices(
    devices: list[jax.Device], ici: tuple[int, ...], dcn: tuple[int, ...]
) -> np.ndarray:
    """The grid that `create_hybrid_device_mesh` would make if consecutive devices formed the
    slices.
    """
    blocks = mesh_utils.create_device_mesh((*dcn, *ici), devices)
    outer_inner = [place for axis in range(len(ici)) for place in (axis, len(ici) + axis)]
    return blocks.transpose(outer_inner).reshape(
        [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    )
