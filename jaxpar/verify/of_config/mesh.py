"""The devices that a config is verified on, and the mesh that they allow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import jax

from jaxpar.base.errors import UserError
from jaxpar.base.mesh import DcnSpec, MeshAxis, MeshSpec, axis_sizes, describe, devices_needed, resolve, total_sizes
from jaxpar.base.runtime import start, widen_cpu_pool

SIMULATED = 8
"""CPU devices where the mesh leaves their number open; a mesh that asks for up to twice as many gets them."""


def place_mesh(
    spec: MeshSpec, devices: list[jax.Device] | None, cache: str
) -> tuple[MeshSpec, list[jax.Device], list[str]]:
    """The mesh that is verified, its devices, and what to say about them.

    Args:
      spec: the mesh that was asked for.
      devices: those to use; None = this process's own, CPU devices being simulated where that is possible.
      cache: where compiled programs are kept: see `jaxpar.base.runtime.keep_programs`.

    Raises:
      UserError: too few devices to keep every mesh axis above 1.
    """
    found = _devices_here(spec, cache) if devices is None else devices
    mesh, notes = fit_mesh(spec, len(found)), []
    if mesh is None and found[0].platform != "cpu":
        notes.append(f"{len(found)} {found[0].device_kind} cannot keep every mesh axis above 1: CPU devices instead")
        with contextlib.suppress(RuntimeError):  # JAX runs without a CPU platform
            found = jax.local_devices(backend="cpu")
        mesh = fit_mesh(spec, len(found))
    if mesh is None:
        raise UserError(
            f"{len(found)} devices are here, too few to keep 2 along each axis of mesh {describe(total_sizes(spec))}: "
            "`jaxpar verify CONFIG --mesh.platform cpu` in a fresh process simulates them"
        )
    used = found[: devices_needed(mesh)]
    if used[0].platform == "cpu" and len(used) > 1:
        wanted = f": mesh.platform is {spec.platform!r} and none is here" if spec.platform in ("gpu", "tpu") else ""
        notes.append(f"{len(used)} simulated CPU devices{wanted}")
    if spec.distributed:
        notes.append("mesh.distributed is left out: one process verifies on its own devices")
    if note := mesh_note(spec, mesh, len(found)):
        notes.insert(0, note)
    return replace(mesh, platform="auto", distributed=False), used, notes


def _devices_here(spec: MeshSpec, cache: str) -> list[jax.Device]:
    """This process's devices, the CPU simulating enough for the mesh if JAX has not started."""
    count = simulated_devices(spec)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        count = len(jax.devices("cpu")) if spec.platform == "cpu" else 1
    widen_cpu_pool(count)
    found = start(MeshSpec(data=count, platform="cpu") if spec.platform == "cpu" else MeshSpec(), cache)
    return [device for device in found if device.process_index == jax.process_index()]


def simulate_for(spec: MeshSpec) -> None:
    """Before JAX starts for a TPU or GPU mesh: let the CPU simulate devices too, where too few of the others are here.

    On CPU, and on `auto`, which may turn out to be CPU, the number of devices is the run's own.
    """
    if spec.platform in ("tpu", "gpu"):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", simulated_devices(spec))


def simulated_devices(spec: MeshSpec) -> int:
    """How many CPU devices to simulate for a mesh: what it needs, within reason; enough for 2 along each axis."""
    free = [axis for axis, size in axis_sizes(spec).items() if size == -1]
    if not free and devices_needed(spec) <= 2 * SIMULATED:
        return devices_needed(spec)
    for count in (SIMULATED, 2 * SIMULATED, 4 * SIMULATED):
        fitted = fit_mesh(spec, count)
        if fitted is not None and all(getattr(fitted, axis) > 1 for axis in free):
            return count
    return 8 * SIMULATED


def fit_mesh(spec: MeshSpec, devices: int) -> MeshSpec | None:
    """The spec for at most `devices` devices: as it is where they are enough (-1 filled in), else with smaller axes.

    Every axis above 1 stays above 1 (-1 counts as such), and those that lost most get more while there is room. Slices
    are kept, two along an axis, where the axes fit with them. None where even 2 along each axis does not fit.

    Raises:
      UserError: a size that is no size, or two axes of -1.
    """
    sizes, needed = axis_sizes(spec), devices_needed(spec)
    resolve(spec, needed)
    if needed <= devices:
        return _with_sizes(spec, {axis: devices // needed if size == -1 else size for axis, size in sizes.items()})
    slices = asdict(spec.dcn)
    inside: dict[MeshAxis, float] = {axis: math.inf if size == -1 else size for axis, size in sizes.items()}
    over_all: dict[MeshAxis, float] = {axis: size * slices[axis] for axis, size in inside.items()}
    two_slices, one_slice = {axis: min(count, 2) for axis, count in slices.items()}, dict.fromkeys(slices, 1)
    for wanted, dcn in ((inside, two_slices), (over_all, one_slice)):
        small: dict[MeshAxis, float] = {axis: min(size, 2) for axis, size in wanted.items()}
        room = devices // (math.prod(small.values()) * math.prod(dcn.values()))
        if not room:
            continue
        while room >= 2:
            axis = max(small, key=lambda axis: wanted[axis] / small[axis])
            if wanted[axis] < 2 * small[axis]:
                break
            small[axis], room = 2 * small[axis], room // 2
        return _with_sizes(replace(spec, dcn=DcnSpec(**dcn)), small)
    return None


def _with_sizes(spec: MeshSpec, sizes: Mapping[MeshAxis, float]) -> MeshSpec:
    return replace(spec, **{axis: int(size) for axis, size in sizes.items()})


def mesh_note(asked: MeshSpec, used: MeshSpec, here: int) -> str:
    """What to say when the mesh that is verified is not the one that was asked for; empty when it is."""
    if -1 not in axis_sizes(asked).values() and total_sizes(asked) == total_sizes(used):
        return ""
    before = describe({axis: size * getattr(asked.dcn, axis) for axis, size in axis_sizes(asked).items()})
    after = describe(total_sizes(used))
    if devices_needed(asked) <= here:
        return f"mesh {before} is {after} here"
    return (
        f"SMALLER MESH: {before} needs {devices_needed(asked)} devices and {here} are here, so this verifies {after}: "
        "the same axes, not the same sizes"
    )


def asked_sizes(asked: MeshSpec, used: MeshSpec) -> dict[MeshAxis, int]:
    """Devices along each axis of the mesh that was asked for, where an axis of -1 has those of the one that is used."""
    filled = {axis: getattr(used, axis) for axis, size in axis_sizes(asked).items() if size == -1}
    return total_sizes(replace(asked, **filled))
