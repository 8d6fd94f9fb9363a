"""Checks of the ids of documents, and of values that are given in place of a mask: a mistake
becomes a sentence, and not another mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError, short


def require_ids(
    name: str,
    ids: object,
    shape: Sequence[int] | None = None,
) -> None:
    """Refuse ids of documents that are not an array [B, S] of whole numbers.

    Args:
      name: the argument's name.
      ids: the value that was given.
      shape: the shape that the ids must have; None = any of two dims.

    Raises:
      UserError: the ids are no array, of another shape, or of a dtype without whole numbers.
    """
    found: Any = getattr(ids, "shape", None)
    wrong = found is None or (len(found) != 2 if shape is None else tuple(found) != tuple(shape))
    if wrong:
        if shape is not None:
            wanted = f"{name} {tuple(shape)}"
        else:
            wanted = f"{name} as an array [batch, sequence]"
        if found is not None:
            given = tuple(found)
        else:
            given = short(ids)
        raise UserError(f"Segments needs {wanted}, an id for each token, and was given {given}")
    dtype = getattr(ids, "dtype", object)
    # text and padding are ids too
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)):
        raise UserError(
            f"Segments needs {name} of an integer dtype, an id for each token, and was given "
            f"{dtype}"
        )


def describe_no_mask(value: object, base: type) -> str:
    """Describe a value that was given in place of a mask, and say what to write instead.

    Args:
      value: the value that was given.
      base: the class of masks.
    """
    if isinstance(value, type) and issubclass(value, base):
        return f"the class {value.__name__}: write {value.__name__}()"
    if not isinstance(value, jax.Array | np.ndarray):
        return short(value)
    return (
        f"an array {value.dtype}{list(value.shape)}: a map of what is seen is "
        "BlockSparse(map, block_q, block_k)"
    )
