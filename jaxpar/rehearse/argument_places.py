"""The places of a rehearsed function's arguments on the target.

Shardings say it, of the arguments or inside the function. Where nothing does, the function is on
one chip of the target, as it would be on one device here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError, short
from jaxpar.base.jax_compat import ClosedJaxpr
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.rehearse.targets import Target

_MOST_NAMED = 4


class Placed(NamedTuple):
    """The arguments of a function as shapes on a target."""

    arguments: tuple[PyTree, ...]
    keywords: dict[str, PyTree]
    mesh: Mesh
    note: str
    """The assumption made of arguments that have no sharding; empty where all have one."""


def place_arguments(
    jitted: jax.stages.Wrapped,
    names: Sequence[str],
    arguments: Sequence[PyTree],
    keywords: Mapping[str, PyTree],
    target: Target,
) -> Placed:
    """Find the mesh of a call, and place the arguments that have no sharding.

    Arguments without a sharding, or on one device of this machine, are taken as shapes. Beside
    others on a mesh, of the arguments or inside the function, they lie as JAX has it: as the
    compiler chooses. With no mesh at all, everything is on one chip of the target.

    Args:
      names: the names that it gives its arguments by position.
      arguments: arrays, ShapeDtypeStructs, pytrees of them, and static arguments, which stay what
        they are.
      keywords: its arguments by name, of the same form.

    Returns:
      The arguments as shapes with their shardings, the mesh, and a note on what was chosen for the
      caller.

    Raises:
      UserError: the arguments lie on several meshes, on none of devices, or on other devices than
        the target's; or there are no arrays at all.
    """
    shapes = jax.tree.map(_shape_of, (tuple(arguments), dict(keywords)))
    meshes = _meshes_of(shapes) or _meshes_inside(jitted, shapes)
    if meshes:
        mesh = _the_mesh(meshes, target)
        note = _compilers_choice_note(names, *shapes)
    elif not any(map(_is_array, jax.tree.leaves(shapes))):
        raise UserError(
            "rehearse.step compiles for where the arrays of a call lie, and this call has none: "
            "give the function an array, or out_shardings on a mesh of the target"
        )
    else:
        (device, *_) = target.devices()
        mesh = Mesh(np.array([device]), ("data",))
        shapes = _lay(shapes, NamedSharding(mesh, P()))
        note = _one_chip_note(target)
    placed, by_name = shapes
    return Placed(placed, by_name, mesh, note)


def devices_of_call(
    jitted: jax.stages.Wrapped, arguments: Sequence[PyTree], keywords: Mapping[str, PyTree]
) -> list[jax.Device]:
    """Find the devices of the one mesh of a call, of its arguments or inside the function; empty
    where there is none, or several.
    """
    shapes = jax.tree.map(_shape_of, (tuple(arguments), dict(keywords)))
    meshes = _meshes_of(shapes) or _meshes_inside(jitted, shapes)
    if len(meshes) != 1:
        return []
    (mesh,) = meshes
    return list(mesh.devices.flat)


def argument_bytes(
    named: Mapping[str, PyTree],
    compiled: jax.stages.Compiled,
) -> dict[str, int]:
    """Count the bytes of one device's part of each argument that takes any, by name.

    Args:
      named: all arguments by name, as they were compiled.
      compiled: the function. It says where arrays lie that have no sharding, and which it leaves
        out because it does not use them.
    """
    form = jax.tree.structure(compiled.args_info)
    infos = jax.tree.leaves(compiled.args_info)
    chosen = iter(zip(infos, form.flatten_up_to(compiled.input_shardings), strict=True))
    sizes: dict[str, int] = {}
    for name, argument in named.items():
        # the compiled function has the same arrays in the same order, but no static arguments
        arrays = [leaf for leaf in jax.tree.leaves(argument) if _is_array(leaf)]
        shardings = [
            next(sharding for info, sharding in chosen if info.shape == array.shape)
            for array in arrays
        ]
        sizes[name] = sum(map(_bytes_on_a_device, arrays, shardings))
    return {name: size for name, size in sizes.items() if size}


def _bytes_on_a_device(array: jax.ShapeDtypeStruct, chosen: Sharding | None) -> int:
    """Count the bytes of one device's part of an array; 0 where the program does not use it."""
    if chosen is None:
        return 0
    sharding = array.sharding or chosen
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _shape_of(leaf: Any) -> Any:
    """Convert an array to a shape, with its sharding unless that is one device and no mesh; return
    anything else as it is.
    """
    if not _is_array(leaf):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, SingleDeviceSharding):
        sharding = None
    weak_type = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)


def _lay(shapes: PyTree, where: Sharding) -> PyTree:
    """Give all shapes one sharding."""

    def lay(leaf: Any) -> Any:
        if _is_array(leaf):
            return leaf.update(sharding=where)
        return leaf

    return jax.tree.map(lay, shapes)


def _meshes_of(shapes: PyTree) -> set[Mesh]:
    """Find the meshes on which shapes lie.

    Raises:
      UserError: a sharding names no mesh of devices.
    """
    meshes = set()
    for leaf in jax.tree.leaves(shapes):
        sharding = getattr(leaf, "sharding", None)
        if sharding is None:
            continue
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            raise UserError(
                "rehearse.step needs NamedShardings on a mesh of devices, or none, and was given "
                f"{short(sharding)}"
            )
        meshes.add(sharding.mesh)
    return meshes


def _meshes_inside(jitted: jax.stages.Wrapped, shapes: PyTree) -> set[Mesh]:
    """Find the meshes of devices that a function names itself: in `in_shardings` or
    `out_shardings`, a `with_sharding_constraint` or a `shard_map`.
    """
    leaves, form = jax.tree.flatten(shapes)

    def call(*arrays: jax.Array) -> Any:
        waiting = iter(arrays)
        filled = [next(waiting) if _is_array(leaf) else leaf for leaf in leaves]
        arguments, keywords = jax.tree.unflatten(form, filled)
        return jitted(*arguments, **keywords)

    traced = jax.make_jaxpr(call)(*filter(_is_array, leaves))
    return set(_meshes_in(traced))


def _meshes_in(jaxpr: core.Jaxpr | ClosedJaxpr) -> Iterator[Mesh]:
    """Yield the meshes that are parameters of a jaxpr's equations, or that shardings there name."""
    opened: Any = getattr(jaxpr, "jaxpr", jaxpr)  # newer jax has one class for both
    for equation in opened.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, core.Jaxpr | ClosedJaxpr):
                yield from _meshes_in(value)
                continue
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh) and mesh.size:
                yield mesh


def _the_mesh(meshes: set[Mesh], target: Target) -> Mesh:
    """Return the one mesh of a call, which has the target's devices.

    Raises:
      UserError: there are several, or it has other devices.
    """
    how = f'make the mesh with devices=jaxpar.load_target("{target.name}").devices()'
    if len(meshes) > 1:
        raise UserError(
            f"rehearse.step needs arguments on one mesh, and {len(meshes)} meshes were found: {how}"
        )
    (mesh,) = meshes
    devices = list(mesh.devices.flat)
    # a device says `gpu`
    if target.platform == "cuda":
        platforms = ("cuda", "gpu")
    else:
        platforms = (target.platform,)
    if devices[0].platform not in platforms or len(devices) != target.device_count:
        raise UserError(
            f"the arguments lie on {len(devices)} devices ({devices[0].device_kind}) and "
            f"{target.name} has "
            f"{target.device_count} ({target.platform}): {how}"
        )
    return mesh


def _one_chip_note(target: Target) -> str:
    """Write the note that the rest of the target is idle."""
    if target.device_count == 1:
        return ""
    return (
        "no argument has a sharding: the function is on one of the "
        f"{target.device_count} devices of {target.name}"
    )


def _compilers_choice_note(
    names: Sequence[str], arguments: Sequence[PyTree], keywords: Mapping[str, PyTree]
) -> str:
    """Write the note on arrays without a sharding beside others on a mesh; empty where all have
    one.
    """
    named = dict(zip(names, arguments, strict=True)) | dict(keywords)
    unplaced = []
    for name, argument in named.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            if _is_array(leaf) and leaf.sharding is None:
                unplaced.append(f"{name}.{path_name(path)}".rstrip("."))
    if not unplaced:
        return ""
    shown = unplaced[:_MOST_NAMED] + ["..."] * (len(unplaced) > _MOST_NAMED)
    return (
        f"arrays without a sharding, {len(unplaced)} of the arguments ({', '.join(shown)}): each "
        "lies on the mesh as the function says, or else as the compiler chooses"
    )
