"""Which keys a query may see: small frozen values, combined with `&` and `|`.

    Causal() & Window(left=1023)
    Causal() & Segments(documents_BS, documents_BS)
    Causal() | First(64)
    bigbird(length=4096, window=3, globals=2, random=3, seed=0)

One algebra serves three users. The reference asks `visible` of all places. The kernels ask `states`
which tiles can be left out and which need no mask, and `visible` inside the others. Context
parallelism has places that begin anywhere. A mask without ids is hashable. All masks are pytrees,
and their only arrays are the ids of `Segments`.

Places count from the start of the sequence. In packed documents, which is what joining `Segments`
by `&` says, `First` counts from the start of each document, so that a document sees what it would
see alone. The map of a `BlockSparse` is laid on the whole sequence, unless it says `per_document`.
Where a document begins is read off the ids of whole rows: write `Segments(ids, ids)`, the same
array twice. Some queries of a row, or some keys, are told their places by `And(in_documents(mask,
q_places, kv_places), Segments(q_ids, kv_ids))`.

Places are int32: i of a query, j of a key, and d = i - j. Shapes: B batch, S queries, T keys, Q and
K their tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial, reduce
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxpar.base.arguments import require_whole
from jaxpar.base.errors import UserError
from jaxpar.kernels.mask_arguments import describe_no_mask, require_ids

EMPTY = 0
PARTIAL = 1
FULL = 2
"""How much of a tile may be seen: nothing, some of it, or all of it."""
Places: TypeAlias = Any
"""Places, or what is known of them: a numpy array, a jax array or a number. Kernels compute with
all of them alike.
"""
Start: TypeAlias = int | Array
"""The place of the first query or key, which may be traced."""
_Kind = TypeVar("_Kind")


class Tiles(NamedTuple):
    """Queries and keys cut into tiles; the last ones may be smaller.

    Attributes:
      S, T: how many queries and keys there are.
      block_q, block_k: how many queries and keys a tile has.
      q_start, k_start: the places of the first query and the first key, each an int or a traced
        scalar.
      multiple: a number that traced starts are multiples of.
    """

    S: int
    T: int
    block_q: int
    block_k: int
    q_start: Start = 0
    k_start: Start = 0
    multiple: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers [Q, K] of tiles of queries and of keys."""
        return -(-self.S // self.block_q), -(-self.T // self.block_k)

    @property
    def traced(self) -> bool:
        """Whether the places are known only when the program runs."""
        return _any_traced(self.q_start, self.k_start)

    def spans(self) -> tuple[Places, Places, Places, Places]:
        """The places of each tile's first and last query [Q, 1] and of its first and last key
        [1, K].
        """
        Q, K = self.shape
        rows = np.arange(Q)[:, None] * self.block_q
        columns = np.arange(K)[None] * self.block_k
        last_rows = np.minimum(rows + self.block_q, self.S) - 1
        last_columns = np.minimum(columns + self.block_k, self.T) - 1
        q = self.q_start
        k = self.k_start
        return rows + q, last_rows + q, columns + k, last_columns + k

    def ahead(self) -> tuple[Places, Places]:
        """The least and the greatest d of each tile [Q, K]; every value between them occurs."""
        first_i, last_i, first_j, last_j = self.spans()
        return first_i - last_j, last_i - first_j


class Mask:
    """The base of all masks.

    One of one's own has `visible`, and `@static_mask` above the class. What it leaves out costs
    time and no more: without `states`, no tile is skipped.
    """

    __array_ufunc__ = None  # so that numpy leaves `array & mask` to the mask, which refuses it

    def visible(self, i: Places, j: Places) -> Places:
        """Whether queries at places `i` may see keys at places `j`, as bool of their broadcast
        shapes.

        It takes numpy or jax arrays. Inside a kernel, masks that look up an array are first
        replaced (`visits`).

        Raises:
          UserError: the class of the mask does not define it.
        """
        raise UserError(
            f"a mask says which keys a query sees, and {type(self).__name__} does not: give it "
            "`visible(self, i, j)`"
        )

    def states(self, tiles: Tiles) -> Places:
        """`EMPTY`, `PARTIAL` or `FULL` for each tile, int8 [Q, K], or [B, Q, K] where ids make
        sequences differ.

        The result is a numpy array where everything is known while tracing. It is exact for every
        mask, and for combinations in which only d counts. Others, and ids, may call an empty or
        full tile `PARTIAL`, no more. So does this method, for a mask that does not say: every tile
        is looked at.
        """
        return np.full(tiles.shape, PARTIAL, np.int8)

    def leaves(self) -> Iterator[Mask]:
        """The masks that this one combines, from the left."""
        yield self

    def replaced(self, of_leaf: Callable[[Mask], Mask]) -> Mask:
        """The same combination with each mask replaced; `Full` is left out where it changes
        nothing.
        """
        return of_leaf(self)

    def __and__(self, other: Mask) -> Mask:
        return _join(self, require_mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, require_mask(other, "|"))

    def __rand__(self, other: object) -> Mask:
        return require_mask(other, "&") & self

    def __ror__(self, other: object) -> Mask:
        return require_mask(other, "|") | self


def require_mask(value: object, what: str) -> Mask:
    """Return a mask as it is.

    Args:
      value: what was given.
      what: what takes a mask, for the message.

    Raises:
      UserError: it is no mask, or JAX does not know its class.
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


def _state(some: Places, every: Places) -> Places:
    return some.astype(np.int8) + every.astype(np.int8)


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
    """The base of a mask in which only d counts: its states are exact, and it shows a packed
    document what it would show it alone.
    """

    def states(self, tiles: Tiles) -> Places:
        return _distance_states(self, tiles)


def _distance_states(mask: Mask, tiles: Tiles) -> Places:
    """The exact states of a mask, or of a combination of masks, in which only d counts: every d is
    looked at once.
    """
    (least, most) = tiles._replace(q_start=0, k_start=0).ahead()
    ahead = tiles.q_start - tiles.k_start
    first = np.min(least)
    xp = numpy_for(ahead)
    seen = mask.visible(
        xp.arange(first, np.max(most) + 1) + ahead,
        0,
    )
    before = xp.concatenate(
        [
            np.zeros(1, np.int32),
            xp.cumsum(seen, dtype=np.int32),
        ]
    )
    count = before[most - first + 1] - before[least - first]
    return _state(count > 0, count == most - least + 1)


@static_mask
class Causal(OfDistance):
    """A query sees the keys at or before its own place plus `offset`."""

    offset: int = 0

    def __post_init__(self) -> None:
        require_whole("Causal", "offset", self.offset)

    def visible(self, i: Places, j: Places) -> Places:
        return i - j >= -self.offset


@static_mask
class Window(OfDistance):
    """A query sees the keys at most `left` places before it and `right` places after it; None =
    however far.

    Under `Causal() & Window(1023)` a query sees 1024 keys, its own among them.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None:
                require_whole("Window", name, reach)

    def visible(self, i: Places, j: Places) -> Places:
        seen = i - j == i - j
        if self.left is not None:
            seen = i - j <= self.left
        if self.right is None:
            return seen
        return seen & (i - j >= -self.right)


@static_mask
class First(Mask):
    """Every query sees the first `n` keys; `Causal() | First(n)` is a prefix LM (arXiv:1910.10683,
    section 3.2.1).

    Joined to `Segments` by `&`, it becomes `FirstOfDocument`: the first `n` keys of each document.
    """

    n: int

    def __post_init__(self) -> None:
        require_whole("First", "n", self.n, least=0)

    def visible(self, i: Places, j: Places) -> Places:
        return (i - j == i - j) & (j < self.n)

    def states(self, tiles: Tiles) -> Places:
        first_i, _, first_j, last_j = tiles.spans()
        return _state(
            (first_i == first_i) & (first_j < self.n), (first_i == first_i) & (last_j < self.n)
        )


@static_mask
class Dilated(OfDistance):
    """A query sees its own key and every `stride`-th, at most `window - 1` a side
    (arXiv:2004.05150, section 3.1).
    """

    window: int
    stride: int

    def __post_init__(self) -> None:
        require_whole("Dilated", "window", self.window, least=1)
        require_whole("Dilated", "stride", self.stride, least=1)

    def visible(self, i: Places, j: Places) -> Places:
        d = i - j
        reach = (self.window - 1) * self.stride
        return (d % self.stride == 0) & (d <= reach) & (d >= -reach)


def _any_traced(*values: object) -> bool:
    return any(isinstance(value, jax.Array) for value in values)


def numpy_for(*values: object) -> ModuleType:
    """The module that computes with these values: jax.numpy if any of them is jax's, else numpy."""
    return jnp if _any_traced(*values) else np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class BlockSparse(Mask):
    """A map says which blocks of `block_q` queries by `block_k` keys are seen; nothing outside the
    map is seen.

    Args:
      block_map: bool [M, N], given as an array or as nested lists.
      block_q: how many queries a block has.
      block_k: how many keys a block has.
      per_document: joined to `Segments` by `&`, the map is laid on each document and not on the
        whole sequence.
    """

    block_map: ArrayLike | tuple[tuple[int, ...], bytes]
    block_q: int = 128
    block_k: int = 128
    per_document: bool = False

    def __post_init__(self) -> None:
        blocks = np.asarray(self.block_map, dtype=bool)
        if blocks.ndim != 2 or 0 in blocks.shape:
            raise UserError(
                f"BlockSparse needs a map of blocks [M, N], and was given shape {blocks.shape}"
            )
        require_whole("BlockSparse", "block_q", self.block_q, least=1)
        require_whole("BlockSparse", "block_k", self.block_k, least=1)
        # which can be hashed
        object.__setattr__(self, "block_map", (blocks.shape, blocks.tobytes()))

    @cached_property
    def map(self) -> Bool[np.ndarray, "M N"]:
        shape, blocks = cast(tuple[tuple[int, ...], bytes], self.block_map)
        return np.frombuffer(blocks, bool).reshape(shape)

    @cached_property
    def _area(self) -> Int[np.ndarray, "M+1 N+1"]:
        """How many of the blocks above and left of each corner are seen."""
        return np.pad(
            np.cumsum(
                np.cumsum(self.map, axis=0, dtype=np.int32),
                axis=1,
                dtype=np.int32,
            ),
            ((1, 0), (1, 0)),
        )

    def visible(self, i: Places, j: Places) -> Places:
        (M, N) = self.map.shape
        row = i // self.block_q
        column = j // self.block_k
        inside = (row >= 0) & (row < M) & (column >= 0) & (column < N)
        xp = numpy_for(row, column)
        return xp.asarray(self.map)[xp.clip(row, 0, M - 1), xp.clip(column, 0, N - 1)] & inside

    def states(self, tiles: Tiles) -> Places:
        first_i, last_i, first_j, last_j = tiles.spans()
        top = first_i // self.block_q
        bottom = last_i // self.block_q + 1
        left = first_j // self.block_k
        right = last_j // self.block_k + 1
        (M, N), xp = self.map.shape, numpy_for(first_i, first_j)
        area = xp.asarray(self._area)

        def up_to(row: Places, column: Places) -> Places:
            return area[
                xp.clip(row, 0, M),
                xp.clip(
                    column,
                    0,
                    N,
                ),
            ]

        seen = up_to(bottom, right) - up_to(top, right) - up_to(bottom, left) + up_to(top, left)
        return _state(seen > 0, seen == (bottom - top) * (right - left))

    def __repr__(self) -> str:
        M, N = self.map.shape
        return (
            f"BlockSparse({M} x {N} blocks of {self.block_q} x {self.block_k}, "
            f"{np.mean(self.map):.0%} seen)"
        )


def bigbird(
    length: int,
    window: int = 3,
    globals: int = 2,
    random: int = 3,
    seed: int = 0,
    block: int = 64,
    causal: bool = False,
) -> BlockSparse:
    """A window of blocks, some global blocks and some random ones (arXiv:2007.14062, section 2).

    Args:
      length: the length of the sequence.
      window: how many blocks around a query's own it sees, its own among them; odd.
      globals: how many blocks at the front all queries see; their own queries see every key.
      random: how many blocks each block of queries sees besides, or all that are left if they are
        fewer.
      seed: the seed of the random draw.
      block: how many places a block has.
      causal: the random blocks of a query lie before its own, for use with `Causal()`. The map of a
        shorter sequence is then the beginning of that of a longer one, and is laid on each document
        where there are any.

    Raises:
      UserError: a number is not whole or too small, or the window has no middle.
    """
    for name, value in (("length", length), ("window", window), ("block", block)):
        require_whole("bigbird", name, value, least=1)
    for name, value in (("globals", globals), ("random", random), ("seed", seed)):
        require_whole("bigbird", name, value, least=0)
    if window % 2 == 0:
        raise UserError(
            f"bigbird has blocks on both sides of a query's own, and was given {window=}: make "
            "it odd"
        )
    n = -(-length // block)
    row = np.arange(n)[:, None]
    column = np.arange(n)
    seen = (abs(row - column) <= window // 2) | (row < globals) | (column < globals)
    rng = np.random.default_rng(seed)
    for number in range(globals, n):
        if causal:  # each row has a draw of its own, which knows of nothing after it
            rng = np.random.default_rng((seed, number))
        left = np.flatnonzero(~seen[number, : number if causal else n])
        seen[number, rng.choice(left, min(random, len(left)), replace=False)] = True
    return BlockSparse(seen, block, block, per_document=causal)


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
    """In packed sequences, a query sees the keys of its own document.

    Attributes:
      q_ids, kv_ids: int [B, S] and [B, T], the ids of the queries and keys at hand, wherever their
        places begin. A mask that counts from the start of each document takes those of whole rows,
        one array for both.
    """

    q_ids: Int[Array, "B S"]
    kv_ids: Int[Array, "B T"]

    def visible(self, i: Places, j: Places) -> Places:
        """Compare all ids, [B, S, T]; the places `i` [S, 1] and `j` [1, T] do not matter. A kernel
        has a tile's ids.
        """
        return self.q_ids[..., :, None] == self.kv_ids[..., None, :]

    def check(self, B: int, S: int, T: int) -> None:
        """Refuse ids whose shapes do not fit so many sequences, queries and keys.

        Raises:
          UserError: the ids do not fit, or are no whole numbers.
        """
        require_ids("q_ids", self.q_ids, (B, S))
        require_ids("kv_ids", self.kv_ids, (B, T))

    def states(self, tiles: Tiles) -> Places:
        """The states are exact where the ids of a sequence never decrease."""
        (first, last), (begin, end) = (
            _ends(self.q_ids, tiles.block_q),
            _ends(self.kv_ids, tiles.block_k),
        )
        first = first[:, :, None]
        last = last[:, :, None]
        begin = begin[:, None]
        end = end[:, None]
        some = (first <= end) & (begin <= last)
        return _state(some, (first == last) & (begin == end) & (first == begin))

    def __repr__(self) -> str:
        return f"Segments({_shape_of(self.q_ids)}, {_shape_of(self.kv_ids)})"


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=["n"])
@dataclasses.dataclass(frozen=True, eq=False)
class FirstOfDocument(Segments):
    """What `First(n)` becomes where it is joined to `Segments`: a query sees the first `n` keys of
    each document.

    To a kernel it is a comparison of ids like any other: all queries have the id 0, and so have
    those first keys.
    """

    n: int = 0

    @classmethod
    def at(cls, q_places: Array, kv_places: Array, n: int) -> FirstOfDocument:
        """Make the mask of tokens at these places of their documents, [B, S] and [B, T]."""
        return cls(0 * q_places, (kv_places >= n).astype(np.int32), n)

    def __repr__(self) -> str:
        return f"First(n={self.n}) of each document"


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=["blocks"])
@dataclasses.dataclass(frozen=True, eq=False)
class BlocksOfDocument(Segments):
    """What a `BlockSparse` that is `per_document` becomes where it is joined to `Segments`; the ids
    are places in the documents. No kernel takes it, since the blocks of a document begin anywhere
    in a tile."""

    blocks: BlockSparse = dataclasses.field(kw_only=True)

    def visible(self, i: Places, j: Places) -> Places:
        return self.blocks.visible(
            self.q_ids[..., :, None],
            self.kv_ids[..., None, :],
        )

    def states(self, tiles: Tiles) -> Places:
        return np.full(tiles.shape, PARTIAL, np.int8)

    def __repr__(self) -> str:
        return f"{self.blocks} of each document"


def places_in_documents(ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Count the tokens before each one in its document; those of a document lie together, in their
    own order.
    """
    xp = numpy_for(ids_BT)
    place_T = np.arange(ids_BT.shape[1], dtype=np.int32)
    begins_BT = xp.pad(
        ids_BT[:, 1:] != ids_BT[:, :-1],
        ((0, 0), (1, 0)),
        constant_values=True,
    )
    starts_BT: Places = xp.where(begins_BT, place_T, 0)
    latest_BT: Places = (
        np.maximum.accumulate(starts_BT, 1) if xp is np else jax.lax.cummax(starts_BT, 1)
    )
    return place_T - latest_BT


def in_documents(mask: Mask, q_places: Array, kv_places: Array) -> Mask:
    """The mask of tokens at these places of their documents [B, S] and [B, T], `Segments` not yet
    joined to it.
    """

    def of_document(leaf: Mask) -> Mask:
        if isinstance(leaf, First):
            return FirstOfDocument.at(q_places, kv_places, leaf.n)
        if isinstance(leaf, BlockSparse) and leaf.per_document:
            return BlocksOfDocument(q_places, kv_places, blocks=leaf)
        return leaf

    return mask.replaced(of_document)


def _join(left: Mask, right: Mask) -> Mask:
    """Join two masks by `&`; where one has documents, what counts from the start does so from each
    document's.

    Raises:
      UserError: something counts from the start of documents, and the ids do not say where each one
        begins.
    """
    documents = [part for part in (*_conjuncts(left), *_conjuncts(right)) if type(part) is Segments]
    leaves = [*left.leaves(), *right.leaves()]
    if not documents or not any(
        _counts_from_start(leaf) or isinstance(leaf, _COUNTED) for leaf in leaves
    ):
        return And(left, right)
    ids_BT = _ids_of_rows(documents)
    if not any(_counts_from_start(leaf) for leaf in leaves):
        return And(left, right)
    # Where a kernel is chosen only shapes are known, and what the ids are does not matter.
    known = not isinstance(ids_BT, jax.ShapeDtypeStruct)
    if known:
        places_BT = places_in_documents(ids_BT)
    else:
        places_BT = jnp.zeros(ids_BT.shape, jnp.int32)
    return And(in_documents(left, places_BT, places_BT), in_documents(right, places_BT, places_BT))


_COUNTED = FirstOfDocument, BlocksOfDocument


def _ids_of_rows(documents: list[Segments]) -> Int[Array, "B T"]:
    """The ids of whole rows, from which the places in documents can be counted; they are one array.

    Raises:
      UserError: there is more than one array of ids, so that a document may begin outside of them
        or within them.
    """
    ids_BT = documents[0].q_ids
    for segments in documents:
        require_ids("q_ids", segments.q_ids)
        require_ids("kv_ids", segments.kv_ids)
        if segments.q_ids is not ids_BT or segments.kv_ids is not ids_BT:
            raise UserError(
                "First and blocks per_document count from the start of each document, and the "
                "ids are not those of one "
                "sequence: write Segments(ids, ids), the same array twice, or give the places "
                "of some queries and keys "
                "by And(in_documents(mask, q_places, kv_places), Segments(q_ids, kv_ids))"
            )
    return ids_BT


def _counts_from_start(leaf: Mask) -> bool:
    return isinstance(leaf, First) or (isinstance(leaf, BlockSparse) and leaf.per_document)


def _shape_of(ids: object) -> object:
    return getattr(ids, "shape", ids)


def _ends(ids: Array, block: int) -> tuple[Places, Places]:
    """The least and the greatest id of each tile [B, Q]."""
    B, S = ids.shape
    xp = numpy_for(ids)
    tiled = xp.pad(ids, ((0, 0), (0, -S % block)), mode="edge").reshape(
        B,
        -1,
        block,
    )
    return tiled.min(axis=-1), tiled.max(axis=-1)


class _Pair(Mask):
    left: Mask
    right: Mask

    def leaves(self) -> Iterator[Mask]:
        yield from self.left.leaves()
        yield from self.right.leaves()

    def states(self, tiles: Tiles) -> Places:
        if of_distance(self):
            return _distance_states(self, tiles)
        both = self.left.states(tiles), self.right.states(tiles)
        xp = numpy_for(*both)
        return (xp.minimum if isinstance(self, And) else xp.maximum)(*both)


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
        return " & ".join(
            f"({part})" if isinstance(part, Or) else f"{part}" for part in (self.left, self.right)
        )


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
        return " | ".join(f"{part}" for part in (self.left, self.right))


def segments_in(mask: Mask) -> list[Segments]:
    """The parts of a mask that compare ids, from the left."""
    return [leaf for leaf in mask.leaves() if isinstance(leaf, Segments)]


def without_segments(mask: Mask) -> Mask:
    """The mask as it would be with all ids equal, which shows at least as much."""
    return mask.replaced(lambda leaf: Full() if isinstance(leaf, Segments) else leaf)


def follows_documents(mask: Mask) -> bool:
    """Whether a mask joined to `Segments` shows a document what it would show it alone.

    A map of the whole sequence does not, and of a mask of another class it is not known.
    """
    return all(
        isinstance(leaf, Full | OfDistance | First | Segments)
        or (isinstance(leaf, BlockSparse) and leaf.per_document)
        for leaf in mask.leaves()
    )


def looks_back(mask: Mask) -> bool:
    """Whether no query sees a key after its own place, as far as the mask's form says."""
    if isinstance(mask, And):
        return looks_back(mask.left) or looks_back(mask.right)
    if isinstance(mask, Or):
        return looks_back(mask.left) and looks_back(mask.right)
    return isinstance(mask, Causal) and mask.offset <= 0


def apart_from_segments(mask: Mask) -> tuple[Mask, Int[Array, "B S"] | None]:
    """A mask without its `Segments`, and their ids [B, S], or None where it has none.

    What `&` made to count from the start of each document is as it was before.

    Raises:
      UserError: segments are combined otherwise than by `&`, or have other ids for keys than for
        queries.
    """
    parts = list(_conjuncts(mask))
    ids = [part for part in parts if type(part) is Segments]
    joined = [
        leaf for leaf in mask.leaves() if isinstance(leaf, FirstOfDocument | BlocksOfDocument)
    ]
    if len(ids) > 1 or len(segments_in(mask)) > len(ids) + len(joined) or (joined and not ids):
        raise UserError(
            f"over several devices a mask has its Segments once, joined by &, and was given {mask}"
        )
    if ids and ids[0].q_ids is not ids[0].kv_ids:
        raise UserError(
            "over several devices queries and keys are of one sequence: write Segments(ids, ids)"
        )

    def before(leaf: Mask) -> Mask:
        if isinstance(leaf, FirstOfDocument):
            return First(leaf.n)
        if isinstance(leaf, BlocksOfDocument):
            return leaf.blocks
        return leaf

    rest = [part.replaced(before) for part in parts if type(part) is not Segments]
    return reduce(And, rest) if rest else Full(), ids[0].q_ids if ids else None


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.left)
        yield from _conjuncts(mask.right)
    else:
        yield mask


def of_distance(mask: Mask) -> bool:
    """Whether only d counts, so that places may begin anywhere as long as queries and keys begin
    together.
    """
    return all(isinstance(leaf, Full | OfDistance) for leaf in mask.leaves())


def dense(mask: Mask, tiles: Tiles) -> Places:
    """Whether each place is seen, [S, T] or [B, S, T]: for the reference and for short
    sequences.
    """
    i = np.arange(tiles.S)[:, None] + tiles.q_start
    j = np.arange(tiles.T)[None] + tiles.k_start
    return mask.visible(i, j)


def tile_states(mask: Mask, tiles: Tiles) -> Places:
    """Give `mask.states`; where they are known while tracing they are kept, as a read-only
    array.
    """
    if segments_in(mask) or tiles.traced:
        return mask.states(tiles)
    return _known_states(mask, tiles)


@lru_cache(maxsize=64)
def _known_states(mask: Mask, tiles: Tiles) -> np.ndarray:
    states = np.array(mask.states(tiles))
    states.flags.writeable = False
    return states
