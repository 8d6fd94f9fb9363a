"""Cases for every implementation of attention, and the answer in float64 by numpy, gradients by
their formulas.

Tolerances are relative to the largest entry of the array compared.

float32: sums of at most a few hundred terms, taken in another order, and weights once more through
exp: a few tens of ulps (6e-8); 1e-5 leaves a factor of ten.

bfloat16 has 8 bits, so it rounds by up to 2^-8. A value is a mean of values by rounded weights, and
rounded itself: two roundings, 2^-7 of the mean of the values' sizes. A gradient passes four (the
output inside delta, the weights or their gradients, the gradient itself, what the scale makes of
the queries): 2^-6. The inputs are rounded before the answer is made, and log-sum-exp stays in
float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.kernels.attention.call import BLIND, Call
from jaxpar.kernels.masks import (
    And,
    BlockSparse,
    Causal,
    Dilated,
    First,
    Full,
    Mask,
    Segments,
    Tiles,
    Window,
    bigbird,
    dense,
    in_documents,
    places_in_documents,
)

VALUE = {"float32": 1e-5, "bfloat16": 2**-7}
GRADIENT = {"float32": 1e-5, "bfloat16": 2**-6}
# of the block masks here: kernels under test take tiles that divide it, or a multiple by `scaled`
BLOCK = 32


class Case(NamedTuple):
    """Sizes as in `jaxpar.kernels.attention.call`; `mask` names one of MASKS."""

    mask: str
    B: int = 2
    S: int = 64
    T: int = 64
    H: int = 2
    K: int = 2
    h: int = 32
    dtype: str = "float32"
    softcap: float = 0.0
    block: int = BLOCK

    def __str__(self) -> str:
        cap = f"-cap{self.softcap:g}" if self.softcap else ""
        return (
            f"{self.mask}-{self.B}x{self.S}x{self.T}-{self.H}/{self.K}x{self.h}-{self.dtype}{cap}"
        )


def _documents(
    rng: np.random.Generator,
    B: int,
    S: int,
    T: int,
) -> Segments:
    """Packed documents of some eight tokens; where S and T differ, those of a longer sequence."""
    of_all = np.cumsum(rng.random((B, max(S, T))) < 1 / 8, axis=1).astype(np.int32)
    q_ids = jnp.asarray(of_all[:, :S])
    return Segments(q_ids, q_ids if S == T else jnp.asarray(of_all[:, :T]))


def _of_documents(mask: Mask, documents: Segments) -> Mask:
    """A mask that counts from the start of each document, whose queries and keys both begin where
    the rows do.
    """
    if documents.q_ids is documents.kv_ids:
        return mask & documents
    q_places = places_in_documents(documents.q_ids)
    kv_places = places_in_documents(documents.kv_ids)
    return And(in_documents(mask, q_places, kv_places), documents)


def _unsorted(
    rng: np.random.Generator,
    B: int,
    S: int,
    T: int,
) -> Segments:
    return Segments(
        jnp.asarray(rng.integers(0, 3, (B, S)), jnp.int32),
        jnp.asarray(rng.integers(0, 4, (B, T)), jnp.int32),
    )


def _blocks(
    rng: np.random.Generator,
    S: int,
    T: int,
    block: int,
) -> BlockSparse:
    """A map at random, one row of blocks empty."""
    seen = rng.random((-(-S // block), -(-T // block))) < 0.4
    seen[len(seen) // 2] = False
    return BlockSparse(seen, block, block)


def _moving(rng: np.random.Generator, S: int, T: int) -> BlockSparse:
    """A map of small blocks that is laid on each document."""
    return BlockSparse(
        rng.random((-(-S // 2), -(-T // 3))) < 0.6,
        2,
        3,
        per_document=True,
    )


MASKS: dict[str, Callable[[np.random.Generator, Case], Mask]] = {
    "full": lambda rng, c: Full(),
    "causal": lambda rng, c: Causal(),
    "causal_end": lambda rng, c: Causal(c.T - c.S),
    "causal_late": lambda rng, c: Causal(-c.S // 3),  # the first queries see nothing
    "window": lambda rng, c: Causal() & Window(c.S // 4),
    "window_both": lambda rng, c: Window(c.S // 5, 7),
    "window_both_documents": lambda rng, c: Window(c.S // 5, 7) & _documents(rng, c.B, c.S, c.T),
    "prefix": lambda rng, c: Causal() | First(c.T // 3),
    "dilated": lambda rng, c: Dilated(9, 3),
    "documents": lambda rng, c: _documents(rng, c.B, c.S, c.T),
    "causal_documents": lambda rng, c: Causal() & _documents(rng, c.B, c.S, c.T),
    # keys of a fourth document, which nobody sees
    "unsorted": lambda rng, c: _unsorted(rng, c.B, c.S, c.T),
    "window_documents": lambda rng, c: Causal() & Window(c.S // 3) & _documents(rng, c.B, c.S, c.T),
    "blocks": lambda rng, c: _blocks(rng, c.S, c.T, c.block),
    "causal_blocks": lambda rng, c: Causal() & _blocks(rng, c.S, c.T, c.block),
    "bigbird": lambda rng, c: bigbird(
        max(c.S, c.T),
        3,
        1,
        1,
        0,
        c.block,
    ),
    "causal_bigbird": lambda rng, c: Causal() & bigbird(max(c.S, c.T), 3, 1, 1, 0, c.block),
    "prefix_or_blocks": lambda rng, c: (Causal() & Window(5)) | _blocks(rng, c.S, c.T, c.block),
    "documents_or_blocks": lambda rng, c: (
        Causal() & (_documents(rng, c.B, c.S, c.T) | _blocks(rng, c.S, c.T, c.block))
    ),
    "two_documents": lambda rng, c: (
        _unsorted(rng, c.B, c.S, c.T) & (Causal() | _documents(rng, c.B, c.S, c.T))
    ),
    "first_of_documents": lambda rng, c: _of_documents(
        Causal() & (Window(4) | First(3)), _documents(rng, c.B, c.S, c.T)
    ),
    "blocks_of_documents": lambda rng, c: _of_documents(
        Causal() & _moving(rng, c.S, c.T), _documents(rng, c.B, c.S, c.T)
    ),
    "dilated_or_prefix": lambda rng, c: Causal() & (Dilated(4, 8) | First(5) | Window(3, 0)),
    "nothing": lambda rng, c: Causal(-c.T - c.S),
}


class Inputs(NamedTuple):
    """Arrays of a case; `towards` are the gradients of output and log-sum-exp."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any
    mask: Mask


class Answer(NamedTuple):
    """Output, log-sum-exp, the gradients of q, k and v, and the largest weighted mean of the
    values' sizes.
    """

    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any
    size: float = 0.0


def inputs(case: Case) -> Inputs:
    """At random, the same for the same case."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    B = case.B
    S = case.S
    T = case.T
    H = case.H
    K = case.K
    h = case.h
    shapes = (
        (B, S, H, h),
        (B, T, K, h),
        (B, T, K, h),
        (
            B,
            S,
            H,
            h,
        ),
    )
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), case.dtype) for shape in shapes)
    dlse = jnp.asarray(rng.standard_normal((B, H, S)), jnp.float32)
    return Inputs(
        q,
        k,
        v,
        dout,
        dlse,
        MASKS[case.mask](rng, case),
    )


def part(given: Inputs, rows: slice, columns: slice) -> Inputs:
    """Some of the queries and some of the keys; the mask must be told where they begin."""

    def of_part(leaf: Mask) -> Mask:
        if isinstance(leaf, Segments):
            return Segments(leaf.q_ids[:, rows], leaf.kv_ids[:, columns])
        return leaf

    q, k, v, dout, dlse, mask = given
    return Inputs(
        q[:, rows],
        k[:, columns],
        v[:, columns],
        dout[:, rows],
        dlse[..., rows],
        mask.replaced(of_part),
    )


def answer(
    case: Case,
    given: Inputs,
    q_start: int = 0,
    k_start: int = 0,
) -> Answer:
    """By the definition, in float64."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in given[:5])
    (B, S, H, h) = q.shape
    (T, K) = k.shape[1:3]
    k = np.repeat(k, H // K, axis=2)
    v = np.repeat(v, H // K, axis=2)
    scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(h)
    if case.softcap:
        capped = case.softcap * np.tanh(scores / case.softcap)
    else:
        capped = scores
    seen = np.asarray(
        dense(
            given.mask,
            Tiles(S, T, S, T, q_start, k_start),
        )
    )
    seen = np.broadcast_to(
        seen if seen.ndim == 2 else seen[:, None],
        scores.shape,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.max(
            capped,
            axis=-1,
            where=seen,
            initial=-np.inf,
            keepdims=True,
        )
        weights = np.where(seen, np.exp(capped - most), 0)
        total = np.sum(weights, axis=-1, keepdims=True)
        lse = np.where(total > 0, most + np.log(total), -np.inf)
        weights = np.where(total > 0, weights / total, 0)
    out = np.einsum("bhst,bthd->bshd", weights, v)
    dweights = np.einsum("bshd,bthd->bhst", dout, v)
    delta = np.einsum("bshd,bshd->bhs", dout, out) - dlse
    dscores = weights * (dweights - delta[..., None])
    if case.softcap:
        dscores = dscores * (1 - (capped / case.softcap) ** 2)
    dscores = dscores / np.sqrt(h)
    dq = np.einsum("bhst,bthd->bshd", dscores, k)
    dk = np.einsum("bhst,bshd->bthd", dscores, q).reshape(B, T, K, H // K, h).sum(axis=3)
    dv = np.einsum("bhst,bshd->bthd", weights, dout).reshape(B, T, K, H // K, h).sum(axis=3)
    return Answer(
        out,
        lse[..., 0],
        dq,
        dk,
        dv,
        np.max(
            np.einsum(
                "bhst,bthd->bshd",
                weights,
                abs(v),
            )
        ),
    )


def of_pair(
    forward: Any,
    backward: Any,
    case: Case,
    given: Inputs,
    **options: Any,
) -> Answer:
    """What an implementation answers: its forward, and its backward on what that gave, jitted."""
    call = Call(softcap=case.softcap, **options)

    @jax.jit
    def both(given: Inputs) -> Answer:
        q, k, v, dout, dlse, mask = given
        out, lse = forward(q, k, v, mask, call)
        delta = (
            jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32)) - dlse
        )
        return Answer(
            out,
            lse,
            *backward(q, k, v, dout, lse, delta, mask, call),
        )

    return both(given)


def assert_right(found: Answer, want: Answer, dtype: str) -> None:
    """Equal within the tolerance of the dtype; a query that sees nothing has an output of zeros,
    and lse says so.
    """
    blind = np.isneginf(want.lse)
    lse = np.asarray(found.lse, np.float64)
    assert found.lse.dtype == np.float32
    assert np.all(lse[blind] <= BLIND)
    assert np.all(np.asarray(found.out, np.float64)[blind.swapaxes(1, 2)] == 0)
    pairs = {
        name: (getattr(found, name), getattr(want, name)) for name in ("out", "dq", "dk", "dv")
    }
    pairs["lse"] = lse[~blind], want.lse[~blind]
    for name, (ours, theirs) in pairs.items():
        ours = np.asarray(ours, np.float64)
        assert np.all(np.isfinite(ours)), name
        if not theirs.size:
            continue
        if name == "out" and dtype == "bfloat16":
            size = want.size
        else:
            size = np.max(np.abs(theirs))
        error = np.max(np.abs(ours - theirs)) / max(size, 1e-9)
        if name == "lse":
            bound = VALUE["float32"]
        else:
            bound = (VALUE if name == "out" else GRADIENT)[dtype]
        assert error <= bound, f"{name}: {error:.1e} of its largest entry, {bound:.1e} allowed"


KERNEL_MASKS = [
    mask for mask in MASKS if not mask.endswith("or_blocks") and mask != "blocks_of_documents"
]
"""Those that kernels serve: in a union a tile that is visited need not be seen in its blocks, and
the blocks of a document begin anywhere in a tile."""
EVERY_MASK = [Case(mask) for mask in MASKS]
"""Each mask in float32, heads as many as kv heads."""
KERNEL_CASES = [case for case in EVERY_MASK if case.mask in KERNEL_MASKS]
SIZES = [
    Case(mask, B, S, T, H, K, h, dtype, cap)
    for mask, cap in (
        ("causal_end", 0.0),
        ("window_documents", 0.0),
        ("causal_bigbird", 5.0),
        ("causal_late", 0.0),
        ("dilated_or_prefix", 0.0),
    )
    for B, S, T, H, K, h, dtype in (
        (1, 96, 96, 4, 1, 64, "bfloat16"),
        (2, 50, 75, 8, 1, 32, "float32"),  # odd sizes
        (1, 33, 130, 2, 2, 80, "bfloat16"),
        (1, 130, 33, 8, 2, 96, "float32"),
        (1, 1, 64, 4, 4, 64, "float32"),  # one query, as in generation
        (1, 64, 64, 1, 1, 256, "bfloat16"),
        (3, 160, 128, 4, 2, 128, "float32"),
        (1, 100, 60, 8, 1, 64, "bfloat16"),
        (2, 64, 96, 8, 2, 96, "bfloat16"),
        (1, 17, 81, 2, 2, 128, "bfloat16"),
    )
]
"""Shapes, grouped queries, dtypes, head_dims and the soft cap, each under a few masks."""
