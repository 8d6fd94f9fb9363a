"""The largest entries of each matrix, found by counting.

A threshold is built bit by bit, and for each bit all devices add up how many entries are above it.
So the choice is the same on every layout, and nothing is gathered or sorted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, UInt

_SIGN = 1 << 31
"""The bit of a float32's sign. Without it, the bits as a whole number are in the order of the
magnitudes.
"""


def largest(sizes: Float[Array, "*dims"], number: Array, outer: int) -> Bool[Array, "*dims"]:
    """Mark the largest entries of each matrix.

    Args:
      sizes: float32, stacked over some dims; an entry below zero is never chosen.
      number: the number to choose of each matrix, rounded down; a scalar, or an array with the dims
        of `sizes`, of which a matrix's are 1.
      outer: the number of dims that are stacked over.

    Returns:
      True for at most so many of each matrix: of equal entries at the border none is chosen.
    """
    bits = jax.lax.bitcast_convert_type(sizes.astype(jnp.float32), jnp.uint32)
    return _highest(jnp.where(sizes < 0, jnp.uint32(0), bits + 1), number, outer)


def highest(
    scores: Float[Array, "*dims"], sizes: Float[Array, "*dims"], number: Array, outer: int
) -> Bool[Array, "*dims"]:
    """Mark the entries of each matrix with its highest scores, of any sign.

    Args:
      scores: float32, stacked over some dims.
      sizes: not negative, of the same shape: of equal scores at the border, the entries with the
        largest sizes are chosen.
      number: the number to choose of each matrix, rounded down; a scalar, or an array with the dims
        of `scores`, of which a matrix's are 1.
      outer: the number of dims that are stacked over.

    Returns:
      True for at most so many of each matrix: of equal scores and sizes at the border none is
      chosen.
    """
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(_SIGN)
    keys = jnp.where(bits >= sign, ~bits, bits + sign)
    chosen = _highest(keys, number, outer)
    inner = tuple(range(outer, scores.ndim))
    there = jnp.sum(chosen, axis=inner, keepdims=True, dtype=jnp.int32)
    border = jnp.max(scores, axis=inner, keepdims=True, where=~chosen, initial=-jnp.inf)
    tied = jnp.where(~chosen & (scores == border), sizes, -1.0)
    return chosen | largest(tied, jnp.floor(number) - there, outer)


def _highest(keys: UInt[Array, "*dims"], number: Array, outer: int) -> Bool[Array, "*dims"]:
    """Mark the entries of each matrix with its highest keys; a key of 0 is never chosen."""
    inner = tuple(range(outer, keys.ndim))
    number = jnp.floor(number).astype(jnp.int32)

    def above(border: Array) -> Array:
        return jnp.sum(keys > border, axis=inner, keepdims=True, dtype=jnp.int32)

    # the highest border above which there are too many, bit by bit
    lowest = jnp.zeros((*keys.shape[:outer], *[1] * len(inner)), jnp.uint32)
    border = lowest
    for bit in reversed(range(32)):
        higher = border + jnp.uint32(1 << bit)
        border = jnp.where(above(higher) > number, higher, border)
    border = jnp.where(above(lowest) > number, border + 1, lowest)
    return keys > border
