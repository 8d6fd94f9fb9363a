"""What is run in place of a config: its plan on the devices that are here, and a model small enough for them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxpar.base.config import Config, KernelsConfig, check, rules_of
from jaxpar.base.errors import UserError
from jaxpar.base.heads import fit_rules
from jaxpar.base.mesh import MESH_AXES, MeshSpec, make_mesh, total_sizes
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import ShardingRules
from jaxpar.kernels.attention.chunked import ROWS
from jaxpar.parallel.ops import choose_attention
from jaxpar.parallel.pipeline import check_stages, microbatches
from jaxpar.train.plans import check_batch, check_parameters
from jaxpar.verify.of_config.mesh import asked_sizes, place_mesh
from jaxpar.verify.of_config.shrink import LEAST, shrink


class Setup(NamedTuple):
    """What is to be verified, shrunk to the devices here.

    Attributes:
      config: the shrunk config that is run.
      asked: the mesh as it was given.
      devices: the devices of the plan.
      notes: what was changed, a sentence each.
    """

    config: Config
    asked: MeshSpec
    devices: list[jax.Device]
    notes: tuple[str, ...]


def prepare(config: Config, devices: list[jax.Device] | None = None) -> Setup:
    """The first half of `verify`: what will be run, and where."""
    check(config)
    mesh, used, notes = place_mesh(config.mesh, devices, config.compile.cache)
    _check_sizes(config, mesh)
    small, more = _shrink_alike(config, mesh, used)
    return Setup(small, config.mesh, used, (*notes, *more))


def _check_sizes(config: Config, mesh: MeshSpec) -> None:
    """Refuse a config whose own sizes its mesh does not divide: the shrunk ones always fit."""
    sizes = asked_sizes(config.mesh, mesh)
    plan = _layout(config, AbstractMesh(tuple(sizes.values()), MESH_AXES), rules_of(config, sizes))
    if plan.size("stage") > 1:
        count = microbatches(config, sizes)
        check_stages(plan, config.model.layers, count)
        plan = replace(plan, pipeline=replace(config.pipeline, microbatches=count))
    check_parameters(config, plan)
    check_batch(config, plan)


def _layout(config: Config, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> Plan:
    """The part of a plan that says where arrays lie."""
    return Plan(mesh, rules, context=config.context, attention=config.kernels.attention, pipeline=config.pipeline)  # pyright: ignore[reportArgumentType]


def _shrink_alike(config: Config, mesh: MeshSpec, devices: list[jax.Device]) -> tuple[Config, list[str]]:
    """The smallest config whose attention has the implementation that the whole one has on these devices."""
    plan = _layout(config, make_mesh(mesh, devices), rules_of(config, asked_sizes(config.mesh, mesh)))
    notes: list[str] = []
    try:
        wanted = _attention(plan, config)
    except UserError as refused:  # a kernel of other hardware
        notes.append(f"OTHER ATTENTION: {refused}")
        config, plan = replace(config, kernels=KernelsConfig()), replace(plan, attention="auto")
        wanted = _attention(plan, config)
    found = ""
    for least in LEAST:
        small, changes = shrink(config, mesh, least)
        with contextlib.suppress(UserError):  # what was asked for may not serve small sizes
            found = _attention(plan, small)
        if found == wanted:
            break
    else:
        notes.append(f"OTHER ATTENTION: {wanted} has no small form, so this verifies {found}")
    platform, here = config.mesh.platform, devices[0].platform
    if not notes and platform not in ("auto", "cpu", here) and plan.size("attention_seq") == 1:
        there = _attention(plan, config, platform)
        notes += [f"OTHER ATTENTION: {there} on {platform}, {wanted} here"] if there != wanted else []
    model = small.model
    _, fitted = fit_rules(config.rules, model.heads, model.kv_head_count, total_sizes(mesh))
    return small, [*notes, *changes, *fitted]


def _attention(plan: Plan, config: Config, platform: str = "") -> str:
    """The implementation, and whether plain XLA takes several tiles."""
    model, seq_len, packed = config.model, config.data.seq_len, config.data.pack
    head_dim = model.head_size
    name, _ = choose_attention(plan, seq_len, head_dim, False, model.window, packed, platform)
    return f"{name} in tiles" if name == "chunked" and seq_len > ROWS else name
