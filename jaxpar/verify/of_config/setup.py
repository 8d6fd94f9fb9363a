"""The setup of a verification: a config's plan on the devices here, with a model small enough for
them.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxpar.base.config import Config, KernelsConfig, rules_of
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout import mesh as meshes
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.mesh import (
    DcnSpec,
    MeshSpec,
    axis_sizes,
    describe,
    devices_needed,
    total_sizes,
)
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.base.process.runtime import ask_for_cpus, start
from jaxpar.kernels.attention.chunked import TILE, TileSize
from jaxpar.models import AnyModel, Model
from jaxpar.models.masks import layer_masks
from jaxpar.parallel import choose_attention
from jaxpar.parallel.mesh_ops import attention_calls
from jaxpar.parallel.pipeline import check_stages, microbatches
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import check_batch, check_parameters, with_projections
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer
from jaxpar.verify.of_config.shrink import few_rows, shrink
from jaxpar.verify.of_config.shrink_rules import LEAST
from jaxpar.verify.of_config.sizes import asked_sizes

SIMULATED = 8
"""The number of CPU devices that are simulated where the mesh leaves it open; a mesh may ask for up
to twice as many.
"""
_SMALL_TILE = TileSize(5, 5)
"""A tile in place of hundreds of queries and keys, so that the shortest sequence has three."""
_IN_TILES = "chunked in tiles"


class Setup(NamedTuple):
    """The shrunk config that is to be verified, its model, the devices of its plan, and a sentence
    on each change.
    """

    config: Config
    model: AnyModel
    devices: list[jax.Device]
    notes: tuple[str, ...]
    optimizer: AnyOptimizer = None
    tile: TileSize = TILE
    """The largest tile of attention in plain XLA."""


def prepare(
    experiment: Config | Experiment,
    devices: list[jax.Device] | None = None,
) -> Setup:
    """Decide what a verification runs, and on which devices.

    Args:
      experiment: the experiment to verify, or the config of one.
      devices: the devices to choose from; None = those of this process, with simulated CPU devices
        where JAX has not started yet.

    Returns:
      The shrunk config and its model, as many of the devices as its mesh needs, and a note on each
      change. A model that cannot be shrunk keeps its size.

    Raises:
      UserError: there are too few devices to keep every mesh axis above 1, or the config's own
        sizes do not fit.
    """
    if isinstance(experiment, Config):
        config = check(experiment)
        model = Model(config.model)
        optimizer = None
    else:
        config = experiment.config
        model = experiment.model
        optimizer = experiment.own_optimizer
    mesh, used, notes = _place_mesh(config.mesh, devices)
    if not model.has_blocks:
        few = few_rows(config, mesh)
        said = (*notes, f"{model.config.family} at its own size")
        return Setup(few, model, used, said, optimizer)
    _check_sizes(config, model, mesh)
    small, tile, more = _shrink_alike(config, mesh, used)
    return Setup(
        small,
        with_projections(model.with_config(small.model), small),
        used,
        (*notes, *more),
        optimizer,
        tile,
    )


def _place_mesh(
    spec: MeshSpec, devices: list[jax.Device] | None
) -> tuple[MeshSpec, list[jax.Device], list[str]]:
    """Return the mesh that is verified, its devices, and notes about them."""
    if devices is None:
        found = _devices_here(spec)
    else:
        found = devices
    mesh = fit_mesh(spec, len(found))
    notes = []
    if mesh is None and found[0].platform != "cpu":
        notes.append(
            f"{len(found)} {found[0].device_kind} cannot keep every mesh axis above 1: "
            "CPU devices instead"
        )
        with contextlib.suppress(RuntimeError):  # JAX may run without a CPU platform
            found = jax.local_devices(backend="cpu")
        mesh = fit_mesh(spec, len(found))
    if mesh is None:
        raise UserError(
            f"{len(found)} devices are here, too few to keep 2 along each axis of mesh "
            f"{describe(total_sizes(spec))}: "
            "`jaxpar verify CONFIG --mesh.platform cpu` in a fresh process simulates them"
        )
    used = found[: devices_needed(mesh)]
    if used[0].platform == "cpu" and len(used) > 1:
        if spec.platform in ("gpu", "tpu"):
            wanted = f": mesh.platform is {spec.platform!r} and none is here"
        else:
            wanted = ""
        notes.append(f"{len(used)} simulated CPU devices{wanted}")
    if spec.distributed:
        notes.append("mesh.distributed is left out: one process verifies on its own devices")
    if note := mesh_note(spec, mesh, len(found)):
        notes.insert(0, note)
    return replace(mesh, platform="auto", distributed=False), used, notes


def _devices_here(spec: MeshSpec) -> list[jax.Device]:
    """Return this process's devices; if JAX has not started, the CPU simulates enough of them for
    the mesh.
    """
    ask_for_cpus(simulated_devices(spec))
    every = MeshSpec(data=-1, platform="cpu")
    found = start(every if spec.platform == "cpu" else MeshSpec())
    return [device for device in found if device.process_index == jax.process_index()]


def simulated_devices(spec: MeshSpec) -> int:
    """Return how many CPU devices to simulate: what the mesh needs, within reason, but enough for 2
    along each axis.

    Args:
      spec: the mesh that was asked for, in which -1 leaves an axis open.

    Raises:
      UserError: a size of the mesh is not valid, or two axes are -1, in a mesh that has to be
        fitted.
    """
    free = [axis for axis, size in axis_sizes(spec).items() if size == -1]
    if not free and devices_needed(spec) <= 2 * SIMULATED:
        return devices_needed(spec)
    for count in (SIMULATED, 2 * SIMULATED, 4 * SIMULATED):
        if (fitted := fit_mesh(spec, count)) and all(getattr(fitted, axis) > 1 for axis in free):
            return count
    return 8 * SIMULATED


def fit_mesh(spec: MeshSpec, devices: int) -> MeshSpec | None:
    """Fit a mesh to the devices that are here.

    Every axis above 1 stays above 1 (-1 counts as such), and the axes that shrank most grow while
    there is room. Slices are then part of their axis.

    Args:
      spec: the mesh that was asked for.
      devices: the most devices that may be used.

    Returns:
      The spec unchanged but for -1 filled in, where the devices are enough, or else a smaller one.
      It is None where even 2 along each axis does not fit.

    Raises:
      UserError: a size is not valid, or two axes are -1.
    """
    sizes = axis_sizes(spec)
    needed = devices_needed(spec)
    meshes.resolve(spec, needed)
    if needed <= devices:
        return replace(
            spec, **{axis: devices // needed for axis, size in sizes.items() if size == -1}
        )
    wanted = {
        axis: math.inf if size == -1 else size * getattr(spec.dcn, axis)
        for axis, size in sizes.items()
    }
    small = {axis: int(min(size, 2)) for axis, size in wanted.items()}
    room = devices // math.prod(small.values())
    if not room:
        return None
    while room >= 2:
        axis = max(small, key=lambda axis: wanted[axis] / small[axis])
        if wanted[axis] < 2 * small[axis]:
            break
        small[axis] = 2 * small[axis]
        room = room // 2
    return replace(spec, dcn=DcnSpec(), **small)


def mesh_note(asked: MeshSpec, used: MeshSpec, here: int) -> str:
    """Say in a note how the mesh that is verified differs from the one that was asked for.

    Args:
      asked: the mesh of the config.
      used: the mesh that is verified.
      here: the number of devices that are here.

    Returns:
      The note; empty where the sizes are those that were asked for.
    """
    if -1 not in axis_sizes(asked).values() and total_sizes(asked) == total_sizes(used):
        return ""
    before = describe(
        {axis: size * getattr(asked.dcn, axis) for axis, size in axis_sizes(asked).items()}
    )
    after = describe(total_sizes(used))
    if devices_needed(asked) <= here:
        return f"mesh {before} is {after} here"
    return (
        f"SMALLER MESH: {before} needs {devices_needed(asked)} devices and {here} are here, so "
        f"this verifies {after}: "
        "the same axes, not the same sizes"
    )


def _check_sizes(config: Config, model: AnyModel, mesh: MeshSpec) -> None:
    """Refuse a config whose own sizes its mesh does not divide, because the shrunk sizes always
    fit.
    """
    sizes = asked_sizes(config.mesh, mesh)
    plan = _layout(
        config, AbstractMesh(tuple(sizes.values()), meshes.MESH_AXES), rules_of(config, sizes)
    )
    if plan.size("stage") > 1:
        count = microbatches(config, sizes)
        check_stages(plan, config.model.layers, count, config.model.kinds)
        plan = replace(plan, pipeline=replace(config.pipeline, microbatches=count))
    whole = Experiment(config, model, plan)
    check_parameters(whole)
    check_batch(whole)


def _layout(config: Config, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> Plan:
    """Make only the part of a plan that says where arrays lie."""
    return Plan(
        mesh,  # pyright: ignore[reportArgumentType]
        rules,
        context=config.context,
        attention=config.kernels.attention,
        pipeline=config.pipeline,
    )


def _shrink_alike(
    config: Config, mesh: MeshSpec, devices: list[jax.Device]
) -> tuple[Config, TileSize, list[str]]:
    """Make the smallest config that uses the attention implementation of the whole one on these
    devices; return it with the size of a tile there, and notes.
    """
    plan = _layout(
        config, meshes.make_mesh(mesh, devices), rules_of(config, asked_sizes(config.mesh, mesh))
    )
    notes: list[str] = []
    try:
        wanted = _attention(plan, config)
    except UserError as refused:  # the kernel is for other hardware
        notes.append(f"OTHER ATTENTION: {refused}")
        config = replace(config, kernels=KernelsConfig())
        plan = replace(plan, attention="auto")
        wanted = _attention(plan, config)
    tile = _SMALL_TILE if _IN_TILES in wanted else TILE
    small, changed, found = _smallest(config, mesh, plan, wanted, tile)
    if found != wanted:
        notes.append(f"OTHER ATTENTION: {wanted} has no small form, so this verifies {found}")
    platform = config.mesh.platform
    here = devices[0].platform
    if not notes and platform not in ("auto", "cpu", here) and plan.size("attention_seq") == 1:
        there = _attention(plan, config, platform)
        if there != wanted:
            notes.append(f"OTHER ATTENTION: {there} on {platform}, {wanted} here")
    model = small.model
    _, fitted = fit_rules(config.rules, model.heads, model.kv_head_count, total_sizes(mesh))
    return small, tile, [*notes, changed, *fitted]


def _smallest(
    config: Config,
    mesh: MeshSpec,
    plan: Plan,
    wanted: str,
    tile: TileSize,
) -> tuple[Config, str, str]:
    """Make the smallest config that uses the wanted attention, else the last that was tried; return
    it with a note of what was changed, and the attention that it uses.
    """
    found = ""
    small, changed = shrink(config, mesh, LEAST[0])
    for least in LEAST:
        small, changed = shrink(config, mesh, least)
        # the kernel that was asked for may not support small sizes
        with contextlib.suppress(UserError):
            found = _attention(plan, small, tile=tile)
        if found == wanted:
            break
    return small, changed, found


def _attention(plan: Plan, config: Config, platform: str = "", tile: TileSize = TILE) -> str:
    """Name the strategy of a split sequence, or the implementation and whether plain XLA needs
    several tiles.
    """
    model = config.model
    seq_len = config.data.seq_len
    heads = max(model.heads // plan.size("heads"), 1)
    how = {"packed": config.data.pack, "platform": platform, "heads": heads}
    masks = dict.fromkeys(layer_masks(model))
    tiled = []
    for split, keys in attention_calls(plan, seq_len, model.attention_softcap):
        for mask in masks:
            name, _ = choose_attention(split, mask, keys, model.head_size, **how)
            in_tiles = name == "chunked" and keys > tile.rows
            tiled.append(_IN_TILES if in_tiles else name)
        if split.devices > 1:
            return split.strategy
    return " and ".join(dict.fromkeys(tiled))
