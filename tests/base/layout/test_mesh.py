"""Meshes from sizes: what is filled in, what is refused, and that the advice given works."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import (
    MESH_AXES,
    DcnSpec,
    MeshSpec,
    axis_sizes,
    describe,
    devices_needed,
    largest_divisor,
    make_mesh,
    resolve,
)


@given(
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.sampled_from(MESH_AXES),
    st.integers(1, 3),
)
def test_minus_one_is_what_is_left(sizes, free, slices):
    spec = MeshSpec(*sizes, dcn=DcnSpec(data=slices))
    assert resolve(replace(spec, **{free: -1}), devices_needed(spec)) == axis_sizes(spec)
    assert resolve(spec, devices_needed(spec)) == axis_sizes(spec)


@pytest.mark.parametrize(
    ("spec", "devices", "message"),
    [
        (
            MeshSpec(data=2, tensor=4),
            4,
            "mesh data=2 x tensor=4 needs 8 devices, 4 are here: try mesh.tensor=2",
        ),
        (MeshSpec(data=2), 1, "mesh data=2 needs 2 devices, 1 is here: try mesh.data=1"),
        (MeshSpec(), 8, "mesh of 1 device needs 1 device, 8 are here: try mesh.data=8"),
        (
            MeshSpec(data=-1, tensor=3),
            8,
            "mesh tensor=3 needs a multiple of 3 devices, 8 are here: try mesh.tensor=2",
        ),
        (
            MeshSpec(data=3, tensor=5),
            8,
            "mesh data=3 x tensor=5 needs 15 devices, 8 are here: try mesh.data=-1 with the "
            "other axes 1, "
            "or mesh.platform=cpu to simulate the devices",
        ),
        (
            MeshSpec(fsdp=2, dcn=DcnSpec(data=3)),
            8,
            "mesh fsdp=2 over 3 slices needs 6 devices, 8 are here: 3 slices do not divide them, "
            "so change the sizes of mesh.dcn",
        ),
        (
            MeshSpec(data=-1, stage=-1),
            8,
            "mesh has stage and data = -1: only one axis can take what is left, give the others "
            "a size",
        ),
        (
            MeshSpec(tensor=0),
            8,
            "mesh.tensor is 0: an axis has at least 1 device (or is -1 = what is left)",
        ),
        (
            MeshSpec(tensor=-2),
            8,
            "mesh.tensor is -2: an axis has at least 1 device (or is -1 = what is left)",
        ),
        (
            MeshSpec(dcn=DcnSpec(data=-1)),
            8,
            "mesh.dcn.data is -1: an axis has at least 1 device (or is -1 = what is left)",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(spec, devices, message):
    with pytest.raises(UserError) as error:
        resolve(spec, devices)
    assert str(error.value) == message


@given(
    st.lists(
        st.sampled_from([1, 1, 2, 3, 4, 6]),
        min_size=6,
        max_size=6,
    ),
    st.sampled_from([None, *MESH_AXES]),
    st.integers(1, 24),
    st.integers(1, 3),
)
def test_following_the_advice_gives_a_mesh_that_fits(sizes, free, devices, slices):
    spec = MeshSpec(*sizes, dcn=DcnSpec(fsdp=slices))
    if free:
        spec = replace(spec, **{free: -1})
    try:
        resolve(spec, devices)
    except UserError as error:
        advice = re.search(r"try mesh\.(\w+)=(-?\d+)", str(error))
        if advice is None:
            assert devices % slices
            return
        if "the other axes 1" in str(error):
            start = replace(MeshSpec(), dcn=spec.dcn)
        else:
            start = spec
        resolve(
            replace(start, **{advice[1]: int(advice[2])}),
            devices,
        )


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_largest_divisor(number, most):
    assert largest_divisor(number, most) == max(n for n in range(1, most + 1) if number % n == 0)


def test_a_mesh_has_every_axis_in_order_and_leaves_placement_to_the_compiler():
    mesh = make_mesh(MeshSpec(data=2, fsdp=-1, tensor=2))
    assert mesh.axis_names == MESH_AXES
    assert describe(mesh.shape) == "data=2 x fsdp=2 x tensor=2"
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_the_last_axis_takes_neighbouring_devices():
    """Tensor parallelism talks most, stages least."""
    mesh = make_mesh(MeshSpec(stage=2, data=2, tensor=2))
    assert list(mesh.devices.ravel()) == jax.devices()


def test_a_mesh_takes_the_devices_it_is_given():
    some = jax.devices()[2:6]
    assert set(make_mesh(MeshSpec(data=4), some).devices.ravel()) == set(some)


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(tensor=4, dcn=DcnSpec(data=2)),
        MeshSpec(data=2, tensor=2, dcn=DcnSpec(data=2)),
        MeshSpec(stage=2, tensor=2, dcn=DcnSpec(data=2)),
        MeshSpec(fsdp=2, dcn=DcnSpec(stage=2, fsdp=2)),
    ],
)
def test_simulated_slices_are_laid_out_as_real_ones(spec):
    """Against jax's own layout of two or four processes."""
    mesh = make_mesh(spec)
    ici = axis_sizes(spec)
    dcn = vars(spec.dcn)
    size = math.prod(ici.values())
    processes = [
        SimpleNamespace(device_kind="cpu", platform="cpu", id=i, process_index=i // size)
        for i in range(8)
    ]
    sizes = [[table[axis] for axis in MESH_AXES] for table in (ici, dcn)]
    real = mesh_utils.create_hybrid_device_mesh(*sizes, processes, process_is_granule=True)
    assert [device.id for device in mesh.devices.flat] == [device.id for device in real.flat]
    assert dict(mesh.shape) == {axis: ici[axis] * dcn[axis] for axis in MESH_AXES}


def test_slices_that_are_not_here_are_refused():
    one_node = [SimpleNamespace(platform="gpu", id=i, process_index=0) for i in range(8)]
    with pytest.raises(UserError, match=r"mesh\.dcn .*'data': 2"):
        make_mesh(MeshSpec(tensor=4, dcn=DcnSpec(data=2)), one_node)


def test_a_mesh_of_one_device_says_so():
    assert describe(axis_sizes(MeshSpec())) == "1 device"
