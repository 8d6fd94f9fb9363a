"""The mesh that a name stands for: that of a preset or a file, or of a target, of which any number
of devices has one.
"""

from __future__ import annotations

from pathlib import PurePath

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, load_mesh_preset
from jaxpar.base.layout.mesh import DcnSpec, MeshSpec
from jaxpar.base.toml import presets
from jaxpar.rehearse.targets import Target, load_target


def named_mesh(name: str) -> tuple[MeshSpec, Hardware]:
    """Find the mesh of a name, and the figures of its chip; no figures where it names no chip.

    Args:
      name: a preset of `jaxpar.meshes`, a TOML file, or a target such as `h100x16`. A target
        without a preset has `target_mesh`.

    Raises:
      UserError: there is no such preset, file or target.
    """
    if name in presets("jaxpar.meshes") or PurePath(name).suffix == ".toml":
        return load_mesh_preset(name)
    try:
        target = load_target(name)
    except UserError as error:
        try:  # a run folder, or the name of an earlier version
            return load_mesh_preset(name)
        except UserError:
            raise error from None
    return target_mesh(target), target.hardware


def target_mesh(target: Target) -> MeshSpec:
    """Return the plainest mesh of a target: parameters are split inside a slice or a node, and
    copied to each of several, so that only gradients cross the network between them.
    """
    return MeshSpec(
        fsdp=target.device_count // target.slices,
        dcn=DcnSpec(data=target.slices),
        platform="tpu" if target.platform == "tpu" else "gpu",
        distributed=target.hosts > 1,
    )
