"""Loss and every gradient of anyone's sharded program against a plain function on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.table import Table

from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.base.sharding import path_name
from jaxpar.verify.copies import copies, copies_by_axis, finite, floor_of, relative_error, rms
from jaxpar.verify.mistakes import Contribution, Evidence, Finding, diagnose

_LEAST, _NOISE, _MOST = 1e-5, 4.0, 1e-3
"""Tolerance in float32: `jaxpar.verify.of_config.FLOAT32`, or, of a more sensitive model, a few times what the
reference's own gradient is off when every number it is given is off by an ulp; but never what a mistake would be."""
_ULP = 2.0**-23

Loss = Callable[[Any, Any], Any]


class GradientRow(NamedTuple):
    """One parameter's gradient.

    Attributes:
      name: its path in the tree: `blocks.up`.
      shape: of the array.
      error: |got - want| / max(|want|, floor), root mean squares, the worst copy's; infinite for NaN.
      tolerance: what it may be.
      finding: how it differs; None where it does not.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    finding: Finding | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Verdict:
    """What `gradients` found.

    Attributes:
      loss, reference_loss: of the program, and of the reference.
      loss_error: relative.
      tolerance: what the loss's may be; each row has its own.
      rows: the parameters, in the tree's order.
    """

    loss: float
    reference_loss: float
    loss_error: float
    tolerance: float
    rows: tuple[GradientRow, ...]

    @property
    def equal(self) -> bool:
        return self.loss_error <= self.tolerance and not self.wrong

    @property
    def wrong(self) -> tuple[GradientRow, ...]:
        """The parameters whose gradients differ."""
        return tuple(row for row in self.rows if not row.ok)

    def __str__(self) -> str:
        if self.equal:
            return f"EQUAL: loss and {len(self.rows)} gradients, to {max(row.tolerance for row in self.rows):.1e}"
        said = [f"the loss, by {self.loss_error:.1e}"] if not self.loss_error <= self.tolerance else []
        alike: dict[str, list[GradientRow]] = {}
        for row in self.wrong:
            how = f"{row.finding.says} ({row.finding.kind})" if row.finding else "not explained"
            alike.setdefault(how, []).append(row)
        for how, rows in alike.items():
            worst, names = max(row.error for row in rows), ", ".join(row.name for row in rows)
            said.append(f"{names}, by {worst:.1e}: {'each' if len(rows) > 1 else 'it'} is {how}")
        return "DIFFERS: " + "; ".join(said)

    def show(self) -> None:
        """Print every parameter's error, and how it differs, on the terminal."""
        table = Table("parameter", "shape", "error", "", box=None, pad_edge=False)
        loss_ok = self.loss_error <= self.tolerance
        table.add_row("loss", "", f"{self.loss_error:.1e}", "ok" if loss_ok else "DIFFERS")
        for row in self.rows:
            said = f"DIFFERS: {row.finding.kind}: it is {row.finding.says}" if row.finding else "ok"
            table.add_row(row.name, " x ".join(map(str, row.shape)), f"{row.error:.1e}", said)
        console().print(table)
        console().print(str(self).partition(":")[0])


def gradients(
    loss: Loss,
    reference: Loss,
    params: Any,
    batch: Any,
    shardings: tuple[Any, Any],
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
    placed = tuple(_broadcast(given, tree) for given, tree in zip(shardings, (params, batch), strict=True))
    mesh = _mesh_of(placed)
    run = _Reference(reference, params, mesh.devices.flat[0])
    want_loss, want = run(batch)
    losses, arrays = _under_test(loss, params, batch, placed)
    got_loss = max(losses, key=lambda value: finite(abs(value - want_loss)))  # the worst copy's
    got = {name: copies(array) for name, array in arrays.items()}
    floor = floor_of(want.values())
    if tolerance is None:
        noise = run.noise(batch, want, floor)
        limits = {name: min(max(_LEAST, _NOISE * noise[name]), _MOST) for name in want}
    else:
        limits = dict.fromkeys(want, tolerance)
    rows = [
        GradientRow(name, want[name].shape, relative_error(got[name], want[name], floor), limits[name]) for name in want
    ]
    loss_error = finite(abs(got_loss - want_loss) / max(abs(want_loss), 1e-30))
    verdict = Verdict(got_loss, want_loss, loss_error, max(limits.values()), tuple(rows))
    if not verdict.wrong:
        return verdict
    tried = _Tried(run, batch, placed[1], want, mistakes or {})
    found = {row.name: _explained(row.name, arrays[row.name], want[row.name], tried) for row in verdict.wrong}
    return replace(verdict, rows=tuple(row._replace(finding=found.get(row.name)) for row in rows))


class _Reference:
    """The reference's loss and gradients by name, in float64 on the host."""

    def __init__(self, reference: Loss, params: Any, device: jax.Device):
        self._jitted = {"": jax.jit(jax.value_and_grad(reference))}
        self._params = jax.device_put(params, device)
        self._device = device

    def noise(self, batch: Any, want: dict[str, np.ndarray], floor: float) -> dict[str, float]:
        """How far each gradient goes when every float it is made of goes up or down by an ulp."""
        rng, params = np.random.default_rng(0), self._params

        def rounded(x: Any) -> Any:
            x = np.asarray(x)
            if not np.issubdtype(x.dtype, np.floating):
                return x
            return (x * (1 + _ULP * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)

        try:
            self._params = jax.device_put(jax.tree.map(rounded, params), self._device)
            _, grads = self(jax.tree.map(rounded, batch))
        finally:
            self._params = params
        return {name: relative_error([grad], want[name], floor) for name, grad in grads.items()}

    def __call__(self, batch: Any, other: Loss | None = None) -> tuple[float, dict[str, np.ndarray]]:
        jitted = self._jitted[""] if other is None else jax.jit(jax.value_and_grad(other))
        with jax.default_matmul_precision("highest"):
            loss, grads = jitted(self._params, jax.device_put(batch, self._device))
        return float(loss), {name: np.asarray(grad, np.float64) for name, grad in _named(grads).items()}


def _under_test(
    loss: Loss, params: Any, batch: Any, placed: tuple[Any, Any]
) -> tuple[list[float], dict[str, jax.Array]]:
    """Every copy of the program's loss, and its gradients as they lie on devices."""
    given = jax.device_put(params, placed[0]), jax.device_put(batch, placed[1])
    out = jax.eval_shape(loss, *given)
    own = isinstance(out, tuple) and len(out) == 2
    value = out[0] if own else out
    if getattr(value, "shape", None) != ():
        raise UserError(f"verify.gradients needs a loss that is a scalar, or (scalar, gradients), and was given {out}")
    with jax.default_matmul_precision("highest"):
        found, grads = jax.jit(loss if own else jax.value_and_grad(loss))(*given)
    return [float(value) for value in copies(found)], _named(grads)


class _Tried:
    """The reference under other circumstances; each is run when it is first asked for."""

    def __init__(
        self, run: _Reference, batch: Any, placed: Any, want: dict[str, np.ndarray], mistakes: Mapping[str, Loss]
    ):
        self._run, self._batch, self._placed, self._want, self._mistakes = run, batch, placed, want, mistakes
        self._parts: list[tuple[str, dict[str, np.ndarray]]] | None = None
        self._altered: dict[tuple[str, str], dict[str, np.ndarray]] | None = None

    def parts(self, name: str) -> list[Contribution]:
        """What each shard of the batch's rows contributes, where contributions add up to the whole."""
        if self._parts is None:
            self._parts = list(self._contributions())
        return [Contribution(label, "sum", grads[name]) for label, grads in self._parts]

    def altered(self, name: str) -> dict[tuple[str, str], np.ndarray]:
        """What gradients would be if a shard had another's part of an array of the batch, or its own mean."""
        if self._altered is None:
            self._altered = dict(self._alterations())
        return {key: grads[name] for key, grads in self._altered.items()}

    def _of_shards(self, axis: str, size: int) -> list[dict[str, np.ndarray]]:
        """The reference's gradients of each shard of the rows by itself."""

        def rows(leaf: np.ndarray, place: NamedSharding, shard: int) -> np.ndarray:
            return _pieces(leaf, place, axis, 0, size)[shard] if axis in _split(place, 0) else leaf

        return [
            self._run(jax.tree.map(lambda leaf, place, n=n: rows(leaf, place, n), self._batch, self._placed))[1]
            for n in range(size)
        ]

    def _row_axes(self) -> dict[str, int]:
        found = {}
        for leaf, place in zip(jax.tree.leaves(self._batch), jax.tree.leaves(self._placed), strict=True):
            found |= {axis: place.mesh.shape[axis] for axis in (_split(place, 0) if leaf.ndim else ())}
        return {axis: size for axis, size in found.items() if size > 1}

    def _contributions(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        for axis, size in self._row_axes().items():
            shards = self._of_shards(axis, size)
            for scale in (1.0, 1.0 / size):  # a sum over rows, or a mean
                total = {name: scale * np.sum([grads[name] for grads in shards], axis=0) for name in self._want}
                if all(_near(total[name], want) for name, want in self._want.items()):
                    for n, grads in enumerate(shards):
                        yield f"shard {n} of {axis}", {name: scale * grad for name, grad in grads.items()}
                    break

    def _alterations(self) -> Iterator[tuple[tuple[str, str], dict[str, np.ndarray]]]:
        for axis, size in self._row_axes().items():
            shards = self._of_shards(axis, size)
            means = {name: np.mean([grads[name] for grads in shards], axis=0) for name in self._want}
            if any(not _near(means[name], want) for name, want in self._want.items()):
                own = f"each shard of {axis} divides by its own number of tokens"
                yield ("mean", own), means
                yield ("mean", f"{own}, and the results are summed"), {n: size * grad for n, grad in means.items()}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._batch):
            name = path_name(path) or "batch"
            place = next(p for at, p in jax.tree_util.tree_leaves_with_path(self._placed) if at == path)
            for dim in range(leaf.ndim):
                for axis in _split(place, dim):
                    for what, other in _misplaced(leaf, place, axis, dim):
                        changed = jax.tree_util.tree_map_with_path(
                            lambda at, x, path=path, other=other: other if at == path else x, self._batch
                        )
                        yield ("shard", f"{what} of {name}"), self._run(changed)[1]
        for what, other in self._mistakes.items():
            yield ("as given", what), self._run(self._batch, other)[1]


def _misplaced(leaf: np.ndarray, place: NamedSharding, axis: str, dim: int) -> Iterator[tuple[str, np.ndarray]]:
    """An array whose shards along a mesh axis are all the first one, or each the one before."""
    size = place.mesh.shape[axis]
    pieces = _pieces(leaf, place, axis, dim, size)
    yield f"every shard of {axis} has the first one's part", _joined([pieces[0]] * size, leaf, place, axis, dim)
    for by, what in ((1, "the one before's"), (-1, "the one after's")):
        moved = [pieces[(n - by) % size] for n in range(size)]
        if size > 2 or by == 1:
            yield f"each shard of {axis} has {what} part", _joined(moved, leaf, place, axis, dim)


def _inner(place: NamedSharding, axis: str, dim: int) -> tuple[int, int]:
    """Into how many pieces a dim is cut by the mesh axes before this one, and by it."""
    names = _split(place, dim)
    outer = int(np.prod([place.mesh.shape[name] for name in names[: names.index(axis)]]))
    return outer, place.mesh.shape[axis]


def _pieces(leaf: np.ndarray, place: NamedSharding, axis: str, dim: int, size: int) -> list[np.ndarray]:
    """The parts of an array at each place along a mesh axis that splits a dim of it."""
    outer, _ = _inner(place, axis, dim)
    grid = leaf.reshape(*leaf.shape[:dim], outer, size, -1, *leaf.shape[dim + 1 :])
    shape = (*leaf.shape[:dim], -1, *leaf.shape[dim + 1 :])
    return [grid.take(n, axis=dim + 1).reshape(shape) for n in range(size)]


def _joined(pieces: list[np.ndarray], leaf: np.ndarray, place: NamedSharding, axis: str, dim: int) -> np.ndarray:
    """The inverse of `_pieces`."""
    outer, _ = _inner(place, axis, dim)
    parts = [piece.reshape(*leaf.shape[:dim], outer, -1, *leaf.shape[dim + 1 :]) for piece in pieces]
    return np.stack(parts, axis=dim + 1).reshape(leaf.shape)


def _split(place: NamedSharding, dim: int) -> tuple[str, ...]:
    """The mesh axes of more than one device that split a dim."""
    entry = place.spec[dim] if dim < len(place.spec) else None
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return tuple(name for name in names if place.mesh.shape[name] > 1)


def _explained(name: str, array: jax.Array, want: np.ndarray, tried: _Tried) -> Finding:
    place: Any = array.sharding
    sizes = {str(axis): size for axis, size in place.mesh.shape.items() if size > 1}
    got = max(copies(array), key=lambda copy: rms(np.nan_to_num(copy.astype(np.float64) - want, posinf=1e30)))
    evidence = Evidence(
        got=got.astype(np.float32),
        want=want.astype(np.float32),
        sizes=sizes,
        split=[_split(place, dim) for dim in range(want.ndim)],
        axis_sizes=sizes,
        parts=tried.parts(name),
        altered=tried.altered(name),
        copies=copies_by_axis(array, place.mesh),
    )
    return diagnose(evidence)


def _named(tree: Any) -> dict[str, Any]:
    return {path_name(path) or "params": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _broadcast(given: Any, tree: Any) -> Any:
    """A sharding for each array of a tree, from a prefix of it."""
    is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)  # noqa: E731
    return jax.tree.map(lambda place, part: jax.tree.map(lambda _: place, part), given, tree, is_leaf=is_sharding)


def _mesh_of(placed: Any) -> Mesh:
    found = jax.tree.leaves(placed)
    meshes = {place.mesh for place in found if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh)}
    if len(meshes) != 1 or not all(isinstance(place, NamedSharding) for place in found):
        kinds = ", ".join(sorted({type(place).__name__ for place in found}))
        raise UserError(
            f"verify.gradients needs NamedShardings of one mesh, and was given {kinds} of {len(meshes)}: "
            "layout.sharding makes them of logical axes"
        )
    return meshes.pop()


def _near(got: np.ndarray, want: np.ndarray) -> bool:
    return rms(got - want) <= 1e-3 * max(rms(want), 1e-30)
