"""A mesh by the name of a preset, a file or a target."""

import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import load_mesh_preset
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.rehearse.named_mesh import named_mesh
from jaxpar.rehearse.targets import check_mesh, load_target


@pytest.mark.parametrize("name", ["h100x16", "h100x4", "a100x8", "v5e-16x2", "v6e-8", "tpu7x-8"])
def test_any_target_has_a_mesh_that_fits_it(name: str) -> None:
    mesh, hardware = named_mesh(name)
    target = load_target(name)
    check_mesh(mesh, target)
    assert devices_needed(mesh) == target.device_count
    assert hardware == target.hardware
    assert mesh.distributed == (target.hosts > 1)


@pytest.mark.parametrize("name", ["v5p-64", "v5p_64", "cpu_8"])
def test_a_preset_goes_before_the_target_of_its_name(name: str) -> None:
    assert named_mesh(name) == load_mesh_preset(name)


def test_a_file_has_its_own_mesh(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[mesh]\ntensor = 2\n")
    assert named_mesh(str(file))[0] == MeshSpec(tensor=2)


def test_what_is_neither_is_refused_as_a_target() -> None:
    with pytest.raises(UserError, match="no target 'v5q-8'"):
        named_mesh("v5q-8")
