"""The base of all masks, and the masks that `&` and `|` make of two.

Shapes: B batch, S queries, T keys, Q and K their tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar, dataclass_transform

import jax
import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.kernels.masks.checks import describe_no_mask
from jaxpar.kernels.masks.tiles import FULL, PARTIAL, Places, Tiles, numpy_for, tile_state

_Kind = TypeVar("_Kind")


class Mask:
    """The base of all masks.

    A mask of one's own defines `visible`, and has `@static_mask` above the class. The other methods
    only save time: without `states`, no tile is skipped.
    """

    __array_ufunc__ = None  # so that numpy leaves `array & mask` to the mask, which refuses it

    def visible(self, i: Places, j: Places) -> Places:
        """Return whether queries at places `i` may see keys at places `j`, as bool of their
        broadcast shapes.

        The places are numpy or jax arrays. Inside a kernel, masks that look up an array are first
        replaced (`visits`).

        Raises:
          UserError: the class of the mask does not define it.
        """
        raise UserError(
            f"a mask says which keys a query sees, and {type(self).__name__} does not: give it "
            "`visible(self, i, j)`"
        )

    def states(self, tiles: Tiles) -> Places:
        """Return `EMPTY`, `PARTIAL` or `FULL` for each tile, int8 [Q, K], or [B, Q, K] where ids
        make sequences differ.

        The result is a numpy array where everything is known while tracing. It is exact for every
        mask, and for combinations in which only d counts. Other combinations, and ids, may call an
        empty or full tile `PARTIAL`, but make no other mistake. The method of this class, for a
        mask that does not define it, calls every tile `PARTIAL`.
        """
        return np.full(tiles.shape, PARTIAL, np.int8)

    def leaves(self) -> Iterator[Mask]:
        """Yield the masks that this one combines, from the left."""
        yield self

    def replaced(self, of_leaf: Callable[[Mask], Mask]) -> Mask:
        """Return the same combination with each mask replaced; `Full` is left out where it changes
        nothing.
        """
        return of_leaf(self)

    def when_joined(self, whole: Mask) -> Mask:
        """Return the mask that `whole`, which `&` joined, becomes because this mask is in it.

        With `Segments`, masks that count from the start of a sequence count from the start of each
        document. Other masks leave the whole as it is.
        """
        return whole

    def __and__(self, other: Mask) -> Mask:
        whole: Mask = And(self, require_mask(other, "&"))
        for part in list(conjuncts(whole)):
            whole = part.when_joined(whole)
        return whole

    def __or__(self, other: Mask) -> Mask:
        return Or(self, require_mask(other, "|"))

    def __rand__(self, other: object) -> Mask:
        return require_mask(other, "&") & self

    def __ror__(self, other: object) -> Mask:
        return require_mask(other, "|") | self


def require_mask(value: object, what: str) -> Mask:
    """Return a mask as it is.

    Args:
      value: the value that was given.
      what: the name, in the message, of the function or argument that takes a mask.

    Raises:
      UserError: the value is no mask, or JAX does not know its class.
    """
    if isinstance(value, Mask):
        if jax.tree_util.all_leaves([value]):
            raise UserError(
                f"{what} takes masks that are pytrees, and {type(value).__name__} is none: write "
                "@masks.static_mask above the class"
            )
        return value
    raise UserError(
        f"{what} takes a mask of jaxpar.kernels.masks, such as Causal(), and was given "
        f"{describe_no_mask(value, Mask)}"
    )


@dataclass_transform(frozen_default=True)
def static_mask(kind: type[_Kind]) -> type[_Kind]:
    """Make a class a frozen dataclass and a pytree without arrays: for a mask whose fields are
    numbers.
    """
    return jax.tree_util.register_static(dataclasses.dataclass(frozen=True)(kind))


@static_mask
class Full(Mask):
    """Every query sees every key."""

    def visible(self, i: Places, j: Places) -> Places:
        return i - j == i - j

    def states(self, tiles: Tiles) -> Places:
        return np.full(tiles.shape, FULL, np.int8)


class OfDistance(Mask):
    """The base of masks in which only d counts. Their states are exact, and they show a packed
    document what they would show it alone.
    """

    def states(self, tiles: Tiles) -> Places:
        return _distance_states(self, tiles)


def _distance_states(mask: Mask, tiles: Tiles) -> Places:
    """Find the exact states of a mask, or of a combination of masks, in which only d counts: every
    d is looked at once.
    """
    least, most = tiles._replace(q_start=0, k_start=0).ahead()
    ahead = tiles.q_start - tiles.k_start
    first = np.min(least)
    xp = numpy_for(ahead)
    seen = mask.visible(xp.arange(first, np.max(most) + 1) + ahead, 0)
    none = np.zeros(1, np.int32)
    before = xp.concatenate([none, xp.cumsum(seen, dtype=np.int32)])
    count = before[most - first + 1] - before[least - first]
    return tile_state(count > 0, count == most - least + 1)


def of_distance(mask: Mask) -> bool:
    """Return whether only d counts in a mask, so that places may begin anywhere as long as queries
    and keys begin together.
    """
    return all(isinstance(leaf, Full | OfDistance) for leaf in mask.leaves())


class _Pair(Mask):
    left: Mask
    right: Mask

    def leaves(self) -> Iterator[Mask]:
        yield from self.left.leaves()
        yield from self.right.leaves()

    def states(self, tiles: Tiles) -> Places:
        if of_distance(self):
            return _distance_states(self, tiles)
        left = self.left.states(tiles)
        right = self.right.states(tiles)
        xp = numpy_for(left, right)
        if isinstance(self, And):
            return xp.minimum(left, right)
        return xp.maximum(left, right)


@partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class And(_Pair):
    """A query sees the keys that both masks show."""

    left: Mask
    right: Mask

    def visible(self, i: Places, j: Places) -> Places:
        return self.left.visible(i, j) & self.right.visible(i, j)

    def replaced(self, of_leaf: Callable[[Mask], Mask]) -> Mask:
        left = self.left.replaced(of_leaf)
        right = self.right.replaced(of_leaf)
        if isinstance(left, Full):
            return right
        if isinstance(right, Full):
            return left
        return And(left, right)

    def __repr__(self) -> str:
        parts = [
            f"({part})" if isinstance(part, Or) else f"{part}" for part in (self.left, self.right)
        ]
        return " & ".join(parts)


@partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Or(_Pair):
    """A query sees the keys that either mask shows."""

    left: Mask
    right: Mask

    def visible(self, i: Places, j: Places) -> Places:
        return self.left.visible(i, j) | self.right.visible(i, j)

    def replaced(self, of_leaf: Callable[[Mask], Mask]) -> Mask:
        left = self.left.replaced(of_leaf)
        right = self.right.replaced(of_leaf)
        if isinstance(left, Full) or isinstance(right, Full):
            return Full()
        return Or(left, right)

    def __repr__(self) -> str:
        return f"{self.left} | {self.right}"


def conjuncts(mask: Mask) -> Iterator[Mask]:
    """Yield the masks that `&` joins, from the left; a mask that is no `And` yields itself."""
    if isinstance(mask, And):
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    else:
        yield mask
