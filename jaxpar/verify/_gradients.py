"""Loss and every gradient of anyone's sharded program against a plain function on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.base.errors import UserError
from jaxpar.base.sharding import PyTree
from jaxpar.verify.comparison import Answer, answer_of, compare, relative_error
from jaxpar.verify.explain import Alteration, explain, misplaced_shards, shards
from jaxpar.verify.report import Verdict

_LEAST, _NOISE, _MOST = 1e-5, 4.0, 1e-3
"""Tolerance in float32: `jaxpar.verify.of_config.FLOAT32`, or, of a more sensitive model, a few times what the
reference's own gradient is off when every number it is given is off by an ulp; but never what a mistake would be."""
_ULP = 2.0**-23

Loss = Callable[[PyTree, PyTree], jax.Array | tuple[jax.Array, PyTree]]
"""`(params, batch)` -> a scalar, or (scalar, gradients)."""


def gradients(
    loss: Loss,
    reference: Loss,
    params: PyTree,
    batch: PyTree,
    shardings: tuple[PyTree, PyTree],
    *,
    tolerance: float | None = None,
    mistakes: Mapping[str, Loss] | None = None,
) -> Verdict:
    """Compare the loss and every gradient of a sharded program with a plain function's on one device.

    Every copy of a gradient is compared, so that one wrong replica is seen too. A gradient that differs is explained:
    which known mistake would have made it of the right one (`jaxpar.verify.mistakes`). For that the reference is run
    on parts of the batch, and with an array of the batch in which each shard has another one's.

    Args:
      loss: `(params, batch)` -> a scalar, on sharded arrays: with `shard_map`, sharding constraints, or whatever it is
        made of. It is differentiated; or it gives `(scalar, gradients)` itself, where a program makes its own.
      reference: the same function of whole arrays, as plain as it can be written.
      params: a pytree of arrays. Random ones: zeros and ones hide mistakes.
      batch: a pytree of arrays. Uneven masks, and more than one row a shard, show more.
      shardings: of params and of batch: NamedShardings of one mesh, or pytrees of such, as for `jax.jit`.
      tolerance: of the relative error of the loss and of each gradient. None = float32: 1e-5, and more, up to 1e-3,
        for a gradient that is as sensitive as that to roundings of parameters and batch. A program that computes in
        bfloat16 is off by some 1e-2.
      mistakes: other references to compare a wrong gradient with, by what they would mean: `"positions start at 0 on
        every shard"`.

    Raises:
      UserError: shardings that are none, or of several meshes; a loss that is no scalar.
    """
    params, batch = (jax.tree.map(np.asarray, tree) for tree in (params, batch))
    placed = jax.tree.broadcast(shardings, (params, batch))
    device = _mesh_of(placed).devices.flat[0]
    one, params_there = _on_one_device(reference, device), jax.device_put(params, device)
    run = partial(one, params_there)
    want = run(batch)
    got = _under_test(loss, *jax.device_put((params, batch), placed))
    if tolerance is None:
        noisy = one(*_round_floats((params, batch)))
        limits = {name: min(max(_LEAST, _NOISE * relative_error(noisy, want, name)), _MOST) for name in want.grads}
    else:
        limits = dict.fromkeys(want.grads, tolerance)
    verdict = compare(got, want, limits, max(limits.values()))
    if not verdict.wrong:
        return verdict

    def altered() -> Iterator[Alteration]:
        yield from misplaced_shards(batch, placed[1], run)
        for what, other in (mistakes or {}).items():
            yield "as given", what, _on_one_device(other, device)(params_there, batch).grads

    return explain(verdict, got, want, run, shards(batch, placed[1]), altered)


def _on_one_device(function: Loss, device: jax.Device) -> Callable[[PyTree, PyTree], Answer]:
    jitted = jax.jit(jax.value_and_grad(function))

    def run(params: PyTree, batch: PyTree) -> Answer:
        with jax.default_matmul_precision("highest"):
            return answer_of(*jitted(*jax.device_put((params, batch), device)))

    return run


def _round_floats(tree: PyTree) -> PyTree:
    """Every float goes up or down by an ulp."""
    rng = np.random.default_rng(0)
    off = lambda x: (x * (1 + _ULP * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)  # noqa: E731
    return jax.tree.map(lambda x: off(x) if np.issubdtype(x.dtype, np.floating) else x, tree)


def _under_test(loss: Loss, params: PyTree, batch: PyTree) -> Answer:
    out = jax.eval_shape(loss, params, batch)
    own = isinstance(out, tuple) and len(out) == 2
    if getattr(out[0] if own else out, "shape", None) != ():
        raise UserError(f"verify.gradients needs a loss that is a scalar, or (scalar, gradients), and was given {out}")
    with jax.default_matmul_precision("highest"):
        return answer_of(*jax.jit(loss if own else jax.value_and_grad(loss))(params, batch))


def _mesh_of(placed: PyTree) -> Mesh:
    found = jax.tree.leaves(placed)
    meshes = {place.mesh for place in found if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh)}
    if len(meshes) != 1 or not all(isinstance(place, NamedSharding) for place in found):
        kinds = ", ".join(sorted({type(place).__name__ for place in found}))
        raise UserError(
            f"verify.gradients needs NamedShardings of one mesh, and was given {kinds} of {len(meshes)}: "
            "layout.sharding makes them of logical axes"
        )
    return meshes.pop()
