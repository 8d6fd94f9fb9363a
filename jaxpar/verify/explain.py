"""The explanation of each wrong gradient, by running the reference on parts of the batch and on
wrong batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.verify.comparison import Answer, axes_of_dim, copies_by_axis, distance, scale_of
from jaxpar.verify.mistakes import Evidence, Guess, MistakeKind, diagnose, guesses_of_part
from jaxpar.verify.report import GradientRow, Verdict

_ADDS_UP = 1e-3
"""The relative error up to which contributions add up to the whole; a missing part leaves a far
larger one.
"""

Gradients = Mapping[str, np.ndarray]
"""Gradients by parameter name, [1, *shape]."""
Reference = Callable[[PyTree], Answer]
"""A function that runs the reference on another batch."""
Alteration = tuple[MistakeKind, str, Gradients]
"""A kind of mistake, its description in words, and the gradients that the reference gives with
it.
"""


class Partition(NamedTuple):
    """A batch in parts that should contribute once each: `what` is `shard` or `microbatch`, `of` is
    say ` of data`.
    """

    what: str
    of: str
    batches: Sequence[PyTree]


def explain(
    verdict: Verdict,
    got: Answer,
    want: Answer,
    run: Reference,
    partitions: Iterable[Partition],
    altered: Callable[[], Iterable[Alteration]],
    *,
    sizes: Mapping[str, int] | None = None,
    stacked: Callable[[str], bool] = lambda name: False,
) -> Verdict:
    """Explain each wrong row of a verdict by a finding.

    Args:
      verdict: the comparison of `got`, the program's answer with its shardings, and `want`, the
        reference's answer.
      run: the reference, which is run on each part of each of the batch's `partitions`.
      altered: gives the reference's answers with mistakes; called only if nothing else explains a
        gradient.
      sizes: numbers by name, besides those of mesh axes, that may be the factor by which a gradient
        is wrong.
      stacked: tells from a parameter's name whether its first dim counts layers.

    Returns:
      The verdict, in whose wrong rows `finding` says how the gradient differs, and `layers` which
      layers do where it is stacked.
    """
    parts, means = _contributions(run, partitions, want)
    others = functools.cache(lambda: list(altered()))

    def explain_row(row: GradientRow) -> GradientRow:
        name = row.name
        copies = got.grads[row.name]
        right = want.grads[row.name][0]
        sharding = got.shardings[row.name]
        guesses = _predictions(name, means)
        for what, part, grads in parts:
            guesses += guesses_of_part(what, part, grads[name][0], right)
        evidence = Evidence(
            max(copies, key=lambda copy: distance(copy, right)),
            right,
            sizes=sizes or {},
            guesses=guesses,
            axis_sizes={str(axis): size for axis, size in sharding.mesh.shape.items() if size > 1},
            split=[axes_of_dim(sharding, dim) for dim in range(right.ndim)],
            copies=copies_by_axis(copies, sharding),
        )
        layers = None
        if stacked(name):
            off = map(distance, evidence.got, right)
            most = row.tolerance * scale_of(want, name)
            layers = tuple(layer for layer, error in enumerate(off) if not error <= most)
        finding = diagnose(evidence, layers)
        if not finding.fits:
            finding = diagnose(
                replace(evidence, guesses=guesses + _predictions(name, others())), layers
            )
        return row._replace(finding=finding, layers=layers)

    return replace(
        verdict,
        rows=tuple(row if row.ok else explain_row(row) for row in verdict.rows),
    )


def _predictions(name: str, altered: Iterable[Alteration]) -> list[Guess]:
    """Return the named gradient of each alteration as a guess for `diagnose`."""
    return [
        (kind, f"what the reference gives where {what}", grads[name][0])
        for kind, what, grads in altered
    ]


def _contributions(
    run: Reference, partitions: Iterable[Partition], want: Answer
) -> tuple[list[tuple[str, str, Gradients]], list[Alteration]]:
    """Compute what each part, a `shard` or a `microbatch`, contributes, and the means of parts that
    do not add up.

    The parts add up as they are if the loss is a sum, and divided by their number if it is a mean
    of equal parts. If it is a mean of unequal parts, then the mean of their means is a mistake.
    """
    parts: list[tuple[str, str, Gradients]] = []
    means: list[Alteration] = []
    for what, of, batches in partitions:
        found = [run(batch).grads for batch in batches]
        total = {name: np.sum([grads[name] for grads in found], axis=0) for name in want.grads}
        mean = _scaled(1 / len(found), total)
        scale = next(
            (
                scale
                for scale, whole in ((1.0, total), (1 / len(found), mean))
                if _is_near(whole, want)
            ),
            0.0,
        )
        if scale:
            parts += [
                (what, f"{what} {n}{of}", _scaled(scale, grads)) for n, grads in enumerate(found)
            ]
        else:
            own = f"each {what}{of} divides by its own number of tokens"
            means += [("mean", own, mean), ("mean", f"{own}, and the results are summed", total)]
    return parts, means


def _scaled(scale: float, grads: Gradients) -> Gradients:
    return {name: scale * grad for name, grad in grads.items()}


def _is_near(total: Gradients, want: Answer) -> bool:
    return all(
        distance(total[name], grad) <= _ADDS_UP * scale_of(want, name)
        for name, grad in want.grads.items()
    )


def shards(batch: PyTree, placed: PyTree) -> Iterator[Partition]:
    """Yield the rows of a batch as the devices have them, for each mesh axis that splits rows and
    for all of them.

    Args:
      batch: a tree of arrays, [rows, ...].
      placed: the sharding of each array, in the same form. An array whose rows are not split along
        an axis stays whole.

    Yields:
      A partition for each axis, with a batch for each shard along it.
    """
    places = jax.tree.leaves(placed)
    splits = [axes_of_dim(place, 0) for place in places]
    for axes in dict.fromkeys(
        axes for split in splits for axes in (*((axis,) for axis in split), split) if axes
    ):

        def part(
            leaf: np.ndarray, place: NamedSharding, n: int, axes: tuple[str, ...] = axes
        ) -> np.ndarray:
            if not set(axes) <= set(axes_of_dim(place, 0)):
                return leaf
            return (
                _grid(leaf, place, axes, 0)
                .take(n, axis=1)
                .reshape(
                    -1,
                    *leaf.shape[1:],
                )
            )

        count = math.prod(places[0].mesh.shape[axis] for axis in axes)
        batches = [
            jax.tree.map(
                lambda leaf, place, n=n: part(leaf, place, n),
                batch,
                placed,
            )
            for n in range(count)
        ]
        yield Partition("shard", f" of {' x '.join(axes)}", batches)


def misplaced_shards(batch: PyTree, placed: PyTree, run: Reference) -> Iterator[Alteration]:
    """Yield what the reference gives if shards along a mesh axis hold other shards' parts of an
    array of the batch.

    Args:
      batch: a tree of arrays.
      placed: the sharding of each array, in the same form.
      run: computes the reference's answer on a changed batch. It runs twice for each mesh axis that
        splits a dim of an array, when that alteration is asked for.

    Yields:
      The kind `shard`, what was misplaced in words, and the reference's gradients with it.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    for at, ((path, leaf), place) in enumerate(
        zip(
            leaves,
            jax.tree.leaves(placed),
            strict=True,
        )
    ):
        for dim, axis in [(n, axis) for n in range(leaf.ndim) for axis in axes_of_dim(place, n)]:
            grid = _grid(leaf, place, (axis,), dim)
            size = place.mesh.shape[axis]
            for what, order in (
                (f"every shard of {axis} has the first one's", [0] * size),
                (
                    f"each shard of {axis} has the one before's",
                    [(n - 1) % size for n in range(size)],
                ),
            ):
                changed = [other for _, other in leaves]
                changed[at] = grid.take(order, axis=dim + 1).reshape(leaf.shape)
                said = f"{what} part of {path_name(path) or 'batch'}"
                yield "shard", said, run(jax.tree.unflatten(tree, changed)).grads


def _grid(
    leaf: np.ndarray,
    place: NamedSharding,
    axes: tuple[str, ...],
    dim: int,
) -> np.ndarray:
    """Reshape one dim into three: places along the mesh axes before `axes`, places along `axes`,
    and the rest.
    """
    names = axes_of_dim(place, dim)
    sizes = place.mesh.shape
    outer = math.prod(sizes[name] for name in names[: names.index(axes[0])])
    count = math.prod(sizes[name] for name in axes)
    return leaf.reshape(
        *leaf.shape[:dim],
        outer,
        count,
        -1,
        *leaf.shape[dim + 1 :],
    )
