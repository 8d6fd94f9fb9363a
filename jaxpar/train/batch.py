"""The batch of a step: its shapes, its rows on this process and on the mesh, and its microbatches.

Shapes: A accumulation, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.batch_arrays import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.config import Config
from jaxpar.base.layout.placements import local_rows
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Batch
from jaxpar.parallel.zigzag import TOKENS, axes_of
from jaxpar.train.state import Shape

ABSENT = -2
"""The labels of rows that a process could not read; -1 are those that do not count."""


def put_batch(
    rows: Mapping[str, np.ndarray],
    plan: Plan,
) -> dict[str, jax.Array]:
    """Turn this process's rows of a global batch into global arrays [B, S] on the mesh."""
    sharding = plan.sharding(TOKENS)
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in rows.items()
    }


def batch_rows(batch: int, plan: Plan) -> list[int]:
    """Return the rows of a global batch that this process's data loader reads."""
    return local_rows(plan.sharding(TOKENS, (batch, 1), "batch"), batch)


def empty_batch(
    config: Config,
    plan: Plan,
    absent: bool = False,
) -> dict[str, np.ndarray]:
    """Return this process's rows of a batch in which no label counts; a training step with `absent`
    rows is void, and has rows of a teacher too where there is one.
    """
    shape = len(batch_rows(config.train.batch, plan)), config.data.seq_len
    label = ABSENT if absent else -1
    rows: dict[str, np.ndarray] = {
        name: np.full(shape, label if name == "labels" else 0, np.int32)
        for name in token_arrays(config)
    }
    if absent:
        for name, leaf in _teacher_arrays(config, plan).items():
            rows[name] = np.zeros((*shape, *leaf.shape), leaf.dtype)
    return rows


def batch_shapes(config: Config, plan: Plan, teacher: bool = True) -> dict[str, Shape]:
    """Return a training batch as ShapeDtypeStructs with shardings, for which the step is
    compiled.

    Args:
      teacher: whether a teacher's answers are in it, where the config has a teacher; an evaluation
        has none.
    """
    shape = (config.train.batch, config.data.seq_len)
    sharding = plan.sharding(TOKENS, shape, "batch")
    leaf = Shape(shape, jnp.int32, sharding=sharding)
    batch = dict.fromkeys(token_arrays(config), leaf)
    if teacher:
        for name, leaf in _teacher_arrays(config, plan).items():
            batch[name] = Shape((*shape, *leaf.shape), leaf.dtype, sharding=sharding)
    return batch


def _teacher_arrays(config: Config, plan: Plan) -> dict[str, Shape]:
    """Return what a token has of each array of a teacher; empty where there is none."""
    distill = config.distill
    if not distill.teacher:
        return {}
    found = {
        TEACHER_IDS: Shape((distill.top_k,), jnp.int32),
        TEACHER_LOG_PROBS: Shape((distill.top_k,), jnp.float32),
    }
    if distill.hidden:
        states = (len(distill.hidden), distill.hidden_width)
        found[TEACHER_HIDDEN] = Shape(states, jnp.dtype(plan.compute))
    return found


def token_arrays(config: Config) -> tuple[str, ...]:
    """Return the names of the arrays of a batch that the data have, int32 [B, S]."""
    if config.data.pack:
        return ("tokens", "labels", "positions", "segments")
    return ("tokens", "labels")


def cut_microbatches(batch: Batch, accumulation: int, plan: Plan) -> Batch:
    """Cut a batch [B, S, ...] into microbatches [A, B / A, S, ...]: row r goes to number r % A, so
    every device keeps its own.
    """

    def split(rows_BS: jax.Array) -> jax.Array:
        rows_BAS = rows_BS.reshape(-1, accumulation, *rows_BS.shape[1:])
        return plan.constrain(rows_BAS.swapaxes(0, 1), (None, *axes_of(rows_BS)))

    return jax.tree.map(split, dict(batch))
