"""The comparison of the loss and every gradient of any sharded program with a plain function's on
one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import PyTree
from jaxpar.base.number_checks import require_number
from jaxpar.verify.comparison import FLOAT32, Answer, answer_of, compare, relative_error
from jaxpar.verify.explain import explain, misplaced_shards, shards
from jaxpar.verify.given import (
    makes_gradients,
    place_by,
    read_arrays,
    require_scalar,
    require_split,
)
from jaxpar.verify.report import Verdict

_NOISE = 4.0
_MOST = 1e-3
"""The largest tolerance in float32, which is `FLOAT32` for most gradients. For a more sensitive
model it is a few times the error that the reference's own gradient has when every input is off by
an ulp, but never as large as a mistake's error."""
_ULP = 2.0**-23

Loss = Callable[[PyTree, PyTree], jax.Array | tuple[jax.Array, PyTree]]
"""A function `(params, batch)` -> a scalar, or (scalar, gradients)."""


def gradients(
    loss: Loss,
    reference: Loss,
    params: PyTree,
    batch: PyTree,
    shardings: tuple[PyTree, PyTree],
    *,
    tolerance: float | None = None,
) -> Verdict:
    """Compare the loss and every gradient of a sharded program with a plain function's on one
    device.

    Every copy of a gradient is compared, so that a single wrong replica is seen too. A gradient
    that differs is explained by the known mistake that would turn the right one into it
    (`jaxpar.verify.mistakes`). For that the reference is also run on parts of the batch, and on
    batches in which shards hold each other's part of an array.

    Args:
      loss: `(params, batch)` -> a scalar, on sharded arrays. It may use `shard_map`, sharding
        constraints or anything else. It is differentiated here, unless it returns `(scalar,
        gradients)` because it makes its own gradients.
      reference: the same function of whole arrays, written as plainly as possible.
      params: a pytree of arrays. Use random values, because zeros and ones hide mistakes.
      batch: a pytree of arrays. Uneven masks and more than one row per shard show more mistakes.
      shardings: a pair, for params and for batch, each a NamedSharding or a pytree of them, as
        `jax.jit` takes them; one mesh.
      tolerance: the largest relative error allowed in the loss and in each gradient. None =
        float32: 1e-5, or up to 1e-3 for a gradient that is more sensitive to rounding of the
        parameters and the batch. A program that computes in bfloat16 is off by about 1e-2. It is
        above 0 and below 1, the error of a gradient that is missing.

    Returns:
      The verdict. A gradient that is smaller than what the tolerance allows it to be off by is
      equal whatever it is, and is named as too small to tell.

    Raises:
      UserError: the shardings are not NamedShardings of one mesh or do not divide the arrays, a
        parameter is no array of floats, the loss or the reference is not a scalar, or the gradients
        that a loss makes are not those of params.
    """
    if tolerance is not None:
        require_number("verify.gradients", "tolerance", tolerance, above=0, below=1)
    params, batch = read_arrays(params, batch)
    placed = place_by(shardings, params, batch)
    mesh = _mesh_of(placed)
    require_split(params, batch, placed)
    require_scalar(reference, params, batch)
    device = mesh.devices.flat[0]
    jitted = jax.jit(jax.value_and_grad(reference))

    def one(params: PyTree, batch: PyTree) -> Answer:
        with jax.default_matmul_precision("highest"):
            return answer_of(*jitted(*jax.device_put((params, batch), device)))

    run = partial(one, jax.device_put(params, device))
    want = run(batch)
    got = _under_test(loss, *jax.device_put((params, batch), placed))
    if tolerance is None:
        noisy = one(*_round_floats((params, batch)))
        limits = {
            name: min(max(FLOAT32, _NOISE * relative_error(noisy, want, name)), _MOST)
            for name in want.grads
        }
    else:
        limits = dict.fromkeys(want.grads, tolerance)
    verdict = compare(got, want, limits, max(limits.values()))
    if not verdict.wrong:
        return verdict
    return explain(
        verdict,
        got,
        want,
        run,
        shards(batch, placed[1]),
        lambda: misplaced_shards(batch, placed[1], run),
    )


def _round_floats(tree: PyTree) -> PyTree:
    """Move every float up or down by an ulp, at random."""
    rng = np.random.default_rng(0)
    off = lambda x: (x * (1 + _ULP * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)  # noqa: E731
    return jax.tree.map(
        lambda x: off(x) if np.issubdtype(x.dtype, np.floating) else x,
        tree,
    )


def _under_test(loss: Loss, params: PyTree, batch: PyTree) -> Answer:
    own = makes_gradients(loss, params, batch)
    with jax.default_matmul_precision("highest"):
        return answer_of(
            *jax.jit(loss if own else jax.value_and_grad(loss))(
                params,
                batch,
            )
        )


def _mesh_of(placed: PyTree) -> Mesh:
    found = jax.tree.leaves(placed)
    meshes = {
        place.mesh
        for place in found
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh)
    }
    if len(meshes) != 1 or not all(isinstance(place, NamedSharding) for place in found):
        kinds = ", ".join(sorted({type(place).__name__ for place in found}))
        raise UserError(
            f"verify.gradients needs NamedShardings of one mesh, and was given {kinds} of "
            f"{len(meshes)}: "
            "layout.sharding makes them of logical axes"
        )
    return meshes.pop()
