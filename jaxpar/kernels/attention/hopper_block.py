"""What the Hopper kernels share: a block of warpgroups, and a ring of tiles that one of them fills and the others walk.

A block has one or two warpgroups that compute, each on its own strip of 64 rows, and one more that only asks for tiles.
The copy engine (TMA) fetches the tiles that `visits` names into a ring of slots. Barriers say when a slot has arrived
and when all are done with it (FlashAttention-3, arXiv:2407.08608, section 3.1). Matrix products are wgmma.

Shapes: as in `jaxpar.kernels.attention.call`. Arrays are cut into tiles: [N, R, H, h], [N, H, R] and ids [N, L, R]. N
counts the tiles of all sequences, R is 64 in a strip and C in a tile of the ring, L leaves of the mask are `Segments`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.base.jax_compat import gpu_interpreter
from jaxpar.kernels.attention.call import MASKED, Arrays, Call, Index, Ref, Unserved, pad_to
from jaxpar.kernels.attention.visits import cuts_blocks, in_tile, visits
from jaxpar.kernels.masks import Mask, Tiles, segments_in

Carry = TypeVar("Carry")
ROWS = 64
"""The rows of a strip, as many as one wgmma takes."""
LOG2E = math.log2(math.e)
_SLOTS = 2
_SHARED = 220 * 2**10  # bytes for tiles out of a block's 227 KiB; the rest is for rows, ids and barriers
_AXES = "head", "tile", "sequence", "warpgroup"


class Job(NamedTuple):
    """The sizes and the mask, and how a kernel cuts them into tiles.

    Attributes:
      h: head_dim in the kernel, a multiple of 64.
      out_dtype: the dtype of the kernel's outputs.
      strips: how many strips a block has, one for each warpgroup that computes.
      ring: C, the rows of a tile in the ring.
      of_keys: True = strips are of keys and the ring's tiles of queries; False = the other way round.
    """

    B: int
    S: int
    T: int
    H: int
    K: int
    h: int
    dtype: DTypeLike
    out_dtype: DTypeLike
    mask: Mask
    call: Call
    scale: float
    strips: int = 2
    ring: int = 128
    of_keys: bool = False

    @property
    def rows(self) -> int:
        return self.strips * ROWS

    @property
    def tiles(self) -> Tiles:
        block_q, block_k = (self.ring, self.rows) if self.of_keys else (self.rows, self.ring)
        call = self.call
        return Tiles(self.S, self.T, block_q, block_k, call.q_start, call.k_start, call.multiple)

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks of strips, and how many tiles of the ring, a sequence has."""
        Q, K = self.tiles.shape
        return (K, Q) if self.of_keys else (Q, K)

    def cut(self, of_keys: bool, tensors: tuple[int, int], *rings: int) -> Job:
        """The job with the largest tiles, among these rings, that fit and do not cut the blocks of the mask.

        Args:
          tensors: how many tensors have strips, and how many are walked.

        Raises:
          Unserved: no tiles fit.
        """
        for strips, ring in itertools.product((2, 1), rings):
            job = self._replace(strips=strips, ring=ring, of_keys=of_keys)
            fits = (tensors[0] * job.rows + tensors[1] * _SLOTS * ring) * 2 * self.h <= _SHARED
            if fits and not cuts_blocks(job.mask, job.tiles):
                return job
        least = self._replace(strips=1, ring=min(rings), of_keys=of_keys).tiles
        cut = f"tiles of {least.block_q} x {least.block_k} cut the blocks of {self.mask}"
        raise Unserved(f"{cut}, or head_dim {self.h} does not fit in shared memory")


def job_of(q_shape: Sequence[int], k_shape: Sequence[int], dtype: DTypeLike, mask: Mask, call: Call) -> Job:
    (B, S, H, h), (T, K) = q_shape, k_shape[1:3]
    scale = call.scale or 1 / math.sqrt(h)
    return Job(B, S, T, H, K, -(-h // 64) * 64, dtype, call.out_dtype or dtype, mask, call, scale)


def launch(
    kernel: Callable[..., list[Array]],
    job: Job,
    strips: Sequence[Array],
    ring: Sequence[Sequence[Array]],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> list[Array]:
    """Launch a kernel; each `kernel(block, *strips, *ring)` gives one strip of the outputs in registers.

    Args:
      kernel: is given refs of its strips, [R, h] or [R], and of the slots of the ring, [slots, C, h] or [slots, C].
      strips, outputs: the arrays that are cut into strips, [B, S, H, h] or [B, H, S].
      ring: the arrays whose tiles are walked; those of an inner list arrive together.
    """
    listed = visits(job.mask, job.tiles, job.of_keys)
    guide = _Guide(jnp.asarray(listed.entries), jnp.asarray(listed.full), jnp.asarray(listed.some), job.call.starts())
    cut, row_ids, ring_ids = partial(_cut, job, ROWS, job.rows), *_ids(job)
    own = [*map(cut, strips), *row_ids]
    stages = [[_cut(job, job.ring, job.ring, x) for x in stage] for stage in ring]
    stages[0] += ring_ids
    targets = [jax.eval_shape(cut, x) for x in outputs]
    given = plgpu.kernel(
        partial(_block, job, listed.bits, kernel),
        out_type=targets,
        scratch_types={
            "own": [_smem(x, job.strips) for x in own],
            "slots": [[_smem(x, _SLOTS) for x in stage] for stage in stages],
            "ready": plgpu.Barrier(num_arrivals=len(own), num_barriers=job.strips),
            "arrived": [plgpu.Barrier(num_arrivals=len(stage), num_barriers=_SLOTS) for stage in stages],
            "done": plgpu.Barrier(num_arrivals=job.strips, num_barriers=_SLOTS),
        },
        grid=(job.K if job.of_keys else job.H, job.shape[0], job.B),
        grid_names=_AXES[:3],
        num_threads=job.strips + 1,
        thread_name=_AXES[3],
        kernel_name=f"attention_{kernel.__name__.strip('_')}",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_interpreter() if job.call.interpret else None,
    )(guide, own, stages)
    return [_join_tiles(job, x, like) for x, like in zip(given, outputs, strict=True)]


class _Guide(NamedTuple):
    """What a block reads besides tensors: the lists of visits, and the places of the first query and key."""

    entries: Ref
    full: Ref
    some: Ref
    starts: Ref


def _ids(job: Job) -> tuple[list[Array], list[Array]]:
    """The ids of the strips and of the tiles in the ring, if there are any."""
    ids = [(leaf.kv_ids, leaf.q_ids) if job.of_keys else (leaf.q_ids, leaf.kv_ids) for leaf in segments_in(job.mask)]
    if not ids:
        return [], []
    of_rows, of_ring = zip(*ids, strict=True)
    return (
        [jnp.stack([_tile_rows(x, ROWS, job.rows) for x in of_rows], axis=1)],
        [jnp.stack([_tile_rows(x, job.ring, job.ring) for x in of_ring], axis=1)],
    )


# Arrays in memory, cut into tiles.


def _cut(job: Job, size: int, multiple: int, x: Array) -> Array:
    """Cut [B, S, H, h] into [N, R, H, h], or [B, H, S] into [N, H, R]; R is `size`, S is filled up to a multiple."""
    if x.ndim == 3:
        return _tile_rows(x.swapaxes(1, 2), size, multiple).swapaxes(1, 2)
    return _tile_rows(pad_to(x, 3, job.h), size, multiple)


def _tile_rows(x: Array, size: int, multiple: int) -> Array:
    return pad_to(x, 1, multiple).reshape(-1, size, *x.shape[2:])


def _join_tiles(job: Job, x: Array, like: jax.ShapeDtypeStruct) -> Array:
    """The array from which `_cut` made `x`."""
    if x.ndim == 3:
        return x.swapaxes(1, 2).reshape(job.B, -1, x.shape[1]).swapaxes(1, 2)[:, :, : like.shape[2]]
    return x.reshape(job.B, -1, *x.shape[2:])[:, : like.shape[1], :, : like.shape[3]]


def _smem(x: Arrays, *copies: int) -> Ref:
    """Room in shared memory for one tile of a cut array, or for several."""
    shape = (x.shape[1], x.shape[3]) if x.ndim == 4 else x.shape[1:] if x.dtype == jnp.int32 else x.shape[2:]
    return plgpu.SMEM((*copies, *shape), x.dtype)


def _tile(x: Ref, n: Index, head: Index) -> Ref:
    """The ref of one tile."""
    return x.at[n, :, head] if len(x.shape) == 4 else x.at[n] if x.dtype == jnp.int32 else x.at[n, head]


# Inside a kernel.


def _block(
    job: Job, bits: int, kernel: Callable[..., list[Array]], guide: _Guide, own_arrays: list[Ref],
    stages: list[list[Ref]], *targets: Ref,
    own: list[Ref], slots: list[list[Ref]], ready: Ref, arrived: list[Ref], done: Ref,
) -> None:  # fmt: skip
    """Do the work of one warpgroup of a block: compute, or ask for tiles."""
    head, tile, b, me = (lax.axis_index(name) for name in _AXES)
    if not job.of_keys:  # The last queries see most under causal masks; they go first, so no long block ends last.
        tile = job.shape[0] - 1 - tile
    block = KernelBlock(job, bits, guide, head, tile, b, me, own, slots, arrived, done)

    @pl.when(me < job.strips)
    def compute() -> None:
        _take_registers(job, 240, "increase")
        n = (b * job.shape[0] + tile) * job.strips + me
        for source, target in zip(own_arrays, own, strict=True):
            plgpu.copy_gmem_to_smem(_tile(source, n, head), target.at[me], ready.at[me])
        plgpu.barrier_wait(ready.at[me])
        ids = 1 if segments_in(job.mask) else 0
        refs = [x.at[me] for x in own], slots[0][: len(slots[0]) - ids], *slots[1:]
        results = kernel(block, *refs[0][: len(own) - ids], *itertools.chain(*refs[1:]))
        for x, target in zip(results, targets, strict=True):
            _tile(target, n, head)[...] = x.astype(target.dtype)

    @pl.when(me == job.strips)
    def move() -> None:
        _take_registers(job, 24, "decrease")
        block.fill(stages)


def _take_registers(job: Job, count: int, action: Literal["increase", "decrease"]) -> None:
    if job.strips == 2:  # With one strip, all warpgroups have as many registers as a thread can name.
        plgpu.set_max_registers(count, action=action)


@dataclass(frozen=True)
class KernelBlock:
    """A block at work, as one of its warpgroups sees it.

    Attributes:
      bits: how many bits of an entry are for `in_tile`.
      head: the query head, or the kv head where strips are of keys.
      tile, b, me: the number of the block's strips, the sequence, and the warpgroup.
      own, slots: refs of the strips and of the ring; ids come last in `own` and in the first stage.
      arrived, done: the barriers of the slots.
    """

    job: Job
    bits: int
    guide: _Guide
    head: Index
    tile: Index
    b: Index
    me: Index
    own: list[Ref]
    slots: list[list[Ref]]
    arrived: list[Ref]
    done: Ref

    def visit_list(self) -> tuple[tuple[Index, Index], Array, Array, int]:
        """The row of the lists, how many of its tiles are full, how many it has, and how many heads walk it."""
        job, guide = self.job, self.guide
        row = (self.b if guide.some.shape[0] > 1 else 0), self.tile
        return row, guide.full[row], guide.some[row], job.H // job.K if job.of_keys else 1

    def walk(self, step: Callable[[Visit, Carry], Carry], carry: Carry) -> Carry:
        """Pass `carry` through `step` for every tile to visit, those that need no mask first."""
        row, full, some, heads = self.visit_list()

        def of_head(g: Index, carry: Carry) -> Carry:
            def visit(n: Array, carry: Carry, masked: bool) -> Carry:
                slot = lax.rem(g * some + n, _SLOTS)
                carry = step(Visit(self, slot, self.guide.entries[*row, n] if masked else None), carry)
                plgpu.barrier_arrive(self.done.at[slot])
                return carry

            carry = lax.fori_loop(0, full, partial(visit, masked=False), carry)
            return lax.fori_loop(full, some, partial(visit, masked=True), carry)

        return of_head(0, carry) if heads == 1 else lax.fori_loop(0, heads, of_head, carry)

    def fill(self, stages: list[list[Ref]]) -> None:
        """Ask for the tiles of `walk`, each as soon as all warpgroups have left its slot."""
        job, (row, _, some, heads) = self.job, self.visit_list()

        def left(n: Array) -> None:
            plgpu.barrier_wait(self.done.at[lax.rem(n, _SLOTS)])

        def turn(n: Array, _: None) -> None:
            pl.when(n >= _SLOTS)(lambda: left(n))
            slot, g = lax.rem(n, _SLOTS), lax.div(n, some) if heads > 1 else 0
            place = self.b * job.shape[1] + (self.guide.entries[*row, n - g * some] >> self.bits)
            head = self.head * heads + g if job.of_keys else lax.div(self.head, job.H // job.K)
            for stage, slots, arrived in zip(stages, self.slots, self.arrived, strict=True):
                for source, target in zip(stage, slots, strict=True):
                    plgpu.copy_gmem_to_smem(_tile(source, place, head), target.at[slot], arrived.at[slot])

        lax.fori_loop(0, heads * some, turn, None)
        lax.fori_loop(lax.max(heads * some - _SLOTS, 0), heads * some, lambda n, _: left(n), None)

    def product(self, a: Ref, b: Ref, onto: Array | None = None, transposed: bool = False) -> Array:
        """Compute `onto + a @ b` in float32. `a` is a ref or in registers; `b` is a ref, `transposed` or not."""
        if self.job.call.interpret:  # jax's interpreter has no wgmma for registers or for transposed refs
            out = jnp.dot(a[...], b[...].T if transposed else b[...], preferred_element_type=jnp.float32)
            return out if onto is None else onto + out
        b = plgpu.transpose_ref(b, (1, 0)) if transposed else b
        if onto is not None:
            sums: Ref = plgpu.WGMMAAccumulatorRef.init(onto)
            return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(sums)

        def alone(sums: Ref) -> Array:
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(alone, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


class Visit(NamedTuple):
    """The tile of the ring that a warpgroup is at; `entry` is the list's entry, None where nothing is masked."""

    block: KernelBlock
    slot: Array
    entry: Array | None

    def wait(self, stage: int) -> None:
        """Wait until a stage's tile has arrived."""
        plgpu.barrier_wait(self.block.arrived[stage].at[self.slot])

    def scores(self, products: Array) -> tuple[Array, Array | None]:
        """From products [R, C], the scores times log2(e), for exp2, and the slope of the soft cap if there is one."""
        job, slope = self.block.job, None
        if cap := job.call.softcap:
            # tanh is made from exp2: the hardware's own is good only to 2^-11, an error that the cap multiplies.
            tanh = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2E * job.scale / cap)))
            scores, slope = tanh * (cap * LOG2E), 1 - tanh * tanh
        else:
            scores = products * (job.scale * LOG2E)
        return scores if self.entry is None else jnp.where(self._visible(), scores, MASKED), slope

    def _visible(self) -> Array:
        """Which places of the tile are seen, [R, C]."""
        assert self.entry is not None
        (job, bits, guide), shape = (self.block.job, self.block.bits, self.block.guide), (ROWS, self.block.job.ring)
        i = (self.block.tile * job.strips + self.block.me) * ROWS + lax.broadcasted_iota(jnp.int32, shape, 0)
        j = (self.entry >> bits) * job.ring + lax.broadcasted_iota(jnp.int32, shape, 1)
        own, ring = self.block.own[-1].at[self.block.me], self.block.slots[0][-1].at[self.slot]
        ids = [(_Spread(own[n], 0, shape), _Spread(ring[n], 1, shape)) for n in range(len(segments_in(job.mask)))]
        if job.of_keys:
            i, j, ids = j, i, [(k, q) for q, k in ids]
        seen = in_tile(job.mask, i + guide.starts[0], j + guide.starts[1], self.entry, ids)
        return seen & (j < job.T) if job.T % job.tiles.block_k else seen


@dataclass(frozen=True)
class _Spread:
    """Ids over a whole tile, however indexed. `Segments` would make them [R, 1], for which Mosaic has no layout."""

    ids: Array
    dim: int
    shape: tuple[int, int]

    def __getitem__(self, _: object) -> Array:
        return lax.broadcast_in_dim(self.ids, self.shape, (self.dim,))


def over(x: Array, like: Array, dim: int = 0) -> Array:
    """Broadcast `x`, which lies along `dim`, to the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, (dim,))
