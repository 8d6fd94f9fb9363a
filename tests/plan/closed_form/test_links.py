"""The time of a collective from the sizes of a mesh is the time from the places of its devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jaxpar.base.layout.mesh import MESH_AXES, DcnSpec, MeshSpec, make_mesh
from jaxpar.hlo.program.tasks import Collective
from jaxpar.plan.closed_form.links import send_seconds
from jaxpar.rehearse.link_costs import collective_time
from jaxpar.rehearse.targets import Target, load_target, places
from jaxpar.rehearse.topologies import compilers

SIZE = 64 * 2**20
MESHES: dict[str, list[dict[str, Any]]] = {
    "v5p-64": [
        {"fsdp": 16, "tensor": 4},
        {"fsdp": 64},
        {"data": 2, "fsdp": 8, "tensor": 4},
        {"stage": 2, "fsdp": 16, "tensor": 2},
        {"fsdp": 8, "context": 4, "tensor": 2},
        {"data": 4, "expert": 8, "tensor": 2},
    ],
    "v5p-64x2": [{"fsdp": 16, "tensor": 4, "data": 1, "dcn": {"data": 2}}],
    "v5e-16": [{"fsdp": 8, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 4}],
    "h100x32": [
        {"fsdp": 32},
        {"fsdp": 4, "tensor": 8},
        {"stage": 2, "data": 2, "tensor": 8},
        {"data": 8, "tensor": 4},
    ],
}


def groups_of(shape: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The positions that each group along these axes has, in the order of the mesh."""
    places_of = [MESH_AXES.index(axis) for axis in axes]
    others = [place for place in range(len(shape)) if place not in places_of]
    grid = np.arange(math.prod(shape)).reshape(shape).transpose(others + places_of)
    members = math.prod(shape[place] for place in places_of)
    return [tuple(map(int, group)) for group in grid.reshape(-1, members)]


def by_places(kind: Any, axes: tuple[str, ...], shape: Any, devices: Any, target: Target) -> float:
    groups = groups_of(shape, axes)
    if kind == "ppermute":
        groups = [
            (group[i], group[(i + 1) % len(group)]) for group in groups for i in range(len(group))
        ]
    collective = Collective(kind, tuple(groups), SIZE, "bf16")
    return collective_time(collective, devices, target).seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_by_its_sizes_is_as_fast_as_by_its_devices(name):
    if not compilers()["tpu" if name[0] == "v" else "cuda"]:
        pytest.skip("its compiler is not here")
    target = load_target(name)
    devices = target.devices()
    for sizes in MESHES[name]:
        sizes = dict(sizes)
        dcn = DcnSpec(**sizes.pop("dcn", {}))
        mesh = make_mesh(MeshSpec(**sizes, dcn=dcn), devices)
        inside = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
        across = tuple(getattr(dcn, axis) for axis in MESH_AXES)
        shape = tuple(mesh.shape.values())
        where = places(mesh.devices.flat, target)
        used = [axis for axis in MESH_AXES if mesh.shape[axis] > 1]
        for axis in used:
            for kind in ("all-gather", "all-reduce", "all-to-all", "ppermute"):
                found = send_seconds(kind, (axis,), SIZE, inside, across, target)
                wanted = by_places(kind, (axis,), shape, where, target)
                assert found == pytest.approx(wanted, rel=0.01), (sizes, axis, kind)
        for kind in ("all-gather", "all-reduce"):
            found = send_seconds(kind, tuple(used), SIZE, inside, across, target)
            wanted = by_places(kind, tuple(used), shape, where, target)
            assert found == pytest.approx(wanted, rel=0.01), (sizes, kind)


def test_a_ring_is_twice_as_fast_as_a_line():
    """An axis of v5p's cube closes into a ring; half of it does not."""
    target = load_target("v5p-64")
    whole = send_seconds("all-gather", ("tensor",), SIZE, (1, 1, 16, 1, 1, 4), (1,) * 6, target)
    half = send_seconds("all-gather", ("tensor",), SIZE, (1, 1, 32, 1, 1, 2), (1,) * 6, target)
    assert whole == pytest.approx(SIZE * 3 / 4 / 180e9, rel=0.05)
    assert half == pytest.approx(SIZE / 2 / 90e9, rel=0.05)


def test_a_group_over_nodes_waits_for_the_network():
    target = load_target("h100x32")
    inside = send_seconds("all-gather", ("tensor",), SIZE, (1, 4, 1, 1, 1, 8), (1,) * 6, target)
    across = send_seconds("all-gather", ("data",), SIZE, (1, 4, 1, 1, 1, 8), (1,) * 6, target)
    assert across > 3 * inside
