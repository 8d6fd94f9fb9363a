"""One MLP's training step in several forms: of this library's ops, of plain matmuls left to XLA,
and with mistakes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives
from jaxpar.rehearse.timeline import TaskTime

BATCH = 16
SEQ = 24
WIDTH = 512
MLP = 1024
BYTES = 4 * WIDTH * MLP
"""Of one weight, and of its gradient."""


def library(up: Any, down: Any, x: Any, plan: Plan) -> Any:
    with jax.named_scope("block"), jax.named_scope("mlp"):
        (h,) = MeshOps(plan).column_linear(
            x,
            [up],
            [("mlp",)],
        )
        return jnp.sum(jnp.square(MeshOps(plan).row_linear(jnp.tanh(h), down, ("mlp",))))


def plain(up: Any, down: Any, x: Any, plan: Plan) -> Any:
    with jax.named_scope("block"), jax.named_scope("mlp"):
        return jnp.sum(jnp.square(jnp.tanh(x @ up) @ down))


def gathered(up: Any, down: Any, x: Any, plan: Plan) -> Any:
    """`plain`, but for the hidden activation, which every device must have whole."""
    with jax.named_scope("block"), jax.named_scope("mlp"):
        h = plan.constrain(jnp.tanh(x @ up), (None, None, None))
        return jnp.sum(jnp.square(h @ down))


def turned(up: Any, down: Any, x: Any, plan: Plan) -> Any:
    """`plain`, but for a weight that is kept for the backward the other way around."""
    with jax.named_scope("block"), jax.named_scope("mlp"):
        h = jax.lax.optimization_barrier(
            jnp.swapaxes(jax.lax.optimization_barrier(jnp.tanh(x @ up)), 1, 2)
        )
        return jnp.sum(jnp.square(jnp.einsum("bfs,fd->bsd", h, down)))


@functools.cache
def tasks_of(form: Callable[..., Any], plan: Plan) -> tuple[list[TaskTime], list[Requested]]:
    """The step's tasks as compiled for the devices here, a second for each GB, and the collectives
    it asks for.
    """
    weights = [
        plan.sharding(("embed", "mlp")),
        plan.sharding(("mlp", "embed")),
    ]
    rows = plan.sharding(("batch", "residual_seq", None))
    shapes = [(WIDTH, MLP), (MLP, WIDTH), (BATCH, SEQ, WIDTH)]

    def step(up: Any, down: Any, x: Any) -> Any:
        return jax.grad(lambda up, down: form(up, down, x, plan), argnums=(0, 1))(
            up,
            down,
        )

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jitted = jax.jit(step, in_shardings=(*weights, rows), out_shardings=tuple(weights))
    traced = jitted.trace(*arguments)
    text = traced.lower().compile().as_text()
    assert text
    found = [
        TaskTime(task, Cost(1e-9 * task.bytes, ()), count, 0.0)
        for task, count in walk(read_program(text, [(str(Path(__file__).parent), "tests")]).nodes)
    ]
    return found, requested_collectives(traced.jaxpr, plan.mesh)
