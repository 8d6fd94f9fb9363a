"""The number of pieces in which the scores are computed: chunks of a device's tokens, or slices of
its vocabulary.

Shapes: D embed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.layout.sharding import Axes, Layout, state_axes
from jaxpar.kernels.attention.dispatch import say_once
from jaxpar.parallel.collectives import further_split

HEAD: Axes = ("vocab", "embed")
"""The logical axes of a vocabulary matrix."""
_ROWS = 128  # chunks of more tokens than this are multiples of it: a matmul unit's rows
_SCORES = 2**27  # bytes of scores at a time: with more, no matmul is faster
_CHUNK = 1024  # tokens: in smaller chunks the matrix's gradient costs more than making scores twice


class Tiling(NamedTuple):
    """The number of chunks of a device's tokens, and the number of slices of its rows of the
    vocabulary matrix.
    """

    chunks: int
    slices: int


def tiling(
    tokens: int,
    rows: int,
    embed: int,
    layout: Layout,
    loss_mib: int,
) -> Tiling:
    """Choose the cheaper form of the loss, and one that holds no more than `loss_mib`, as far as
    that is possible.

    Each chunk of tokens reads the matrix twice, and reads and writes its float32 gradient: 12 bytes
    per entry. Slices make scores twice, at 2 FLOPs per token and entry, and gather the matrix
    again. Where a chip does 160 to 300 FLOPs in the time of a byte of its memory
    (`jaxpar.meshes.chips`), the two are equal at about `_CHUNK` tokens per chunk.

    The loss holds the scores and, where the matrix is split over `embed` too, the gathered part of
    it with its float32 gradient. In that case slices save this memory as well; otherwise chunks are
    made larger instead.

    Args:
      tokens: the number of tokens of one device.
      rows: the number of rows of the vocabulary matrix that one device scores.
      embed: the width D of the matrix, whole.
      loss_mib: how many MiB of a device's memory the loss may take.

    Returns:
      The numbers of chunks and slices, of which one is 1.
    """
    moved = further_split(state_axes(HEAD), (HEAD[0], None), layout)
    if moved:
        of_row = embed * (layout.dtype.itemsize + 4)
    else:
        of_row = 0
    found, fitting = tiling_of(tokens, rows, of_row, loss_mib)
    if found.slices > 1:
        instead = f"in place of chunks of {fitting} tokens: memory.loss_mib is {loss_mib}"
        say_once(f"loss by {found.slices} slices of the vocabulary, scores made twice, {instead}")
    return found


def tiling_of(tokens: int, rows: int, of_row: int, loss_mib: int) -> tuple[Tiling, int]:
    """Choose the form of the loss from sizes alone, as `tiling` does.

    Args:
      of_row: the bytes that a row of the matrix takes where it is gathered, with its gradient; 0 =
        the matrix is not gathered.

    Returns:
      The tiling, and the tokens of a chunk that would fit.
    """
    most = loss_mib * 2**20
    left = most - rows * of_row
    most_scores = _SCORES if of_row else max(_SCORES, 4 * rows * _CHUNK)
    fitting = max(min(left, most_scores), 0) // (4 * rows)
    by_chunks = Tiling(-(-tokens // max(fitting // _ROWS * _ROWS, _ROWS)), 1)
    if fitting >= min(tokens, _CHUNK) or not of_row:
        return by_chunks, fitting
    divisors = [n for n in _divisors(rows) if n > 1 and rows // n >= min(rows // 2, _ROWS)]
    fits = (
        n
        for n in divisors
        if rows // n * (of_row + 4 * tokens) <= most and 4 * tokens * rows // n <= _SCORES
    )
    slices = next(fits, 0)
    if not slices and left >= 4 * rows * min(tokens, _ROWS):
        return by_chunks, fitting
    return Tiling(1, slices or max(divisors, default=1)), fitting


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
