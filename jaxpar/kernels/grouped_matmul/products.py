"""Products of rows with the matrices of their experts, behind two functions which take what serves.

XLA:TPU makes kernels of its own of a ragged matmul. XLA:GPU multiplies every row by the matrices of
all experts and picks one of the products: for 8 experts 8 times the work, and arrays of 8 times the
bytes. So GPUs have kernels of this library, and the log says where they cannot serve.

Shapes: E experts, R rows, I and O the dims of a matrix, M the buffers that the rows came in.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.base.compiled_for import device_of_compilation, too_old
from jaxpar.base.errors import UserError
from jaxpar.kernels.attention.dispatch import say_once
from jaxpar.kernels.grouped_matmul import triton

Implementation = Literal["pallas_gpu", "reference"]
_OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def grouped_matmul(
    x_RI: Array,
    weight_EIO: Array,
    counts_ME: Array,
    transposed: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply each row by the matrix of its expert, in the dtype of the matrices.

    Args:
      x_RI: the rows in the order of their experts; those past the last expert's rows are empty,
        and what they become means nothing.
      weight_EIO: the matrices.
      counts_ME: the rows of each buffer that are for each expert.
      transposed: whether they are multiplied by the transposes: rows [R, O] become [R, I].
      implementation: one of `Implementation`; None = what serves on the platform.
      interpret: whether a kernel is interpreted, for tests on a CPU.

    Raises:
      UserError: the implementation that is asked for is not known, or cannot serve.
    """
    sizes_E = jnp.sum(counts_ME, axis=0)
    if _choose(x_RI, weight_EIO, implementation, interpret) == "pallas_gpu":
        return triton.multiply(x_RI, weight_EIO, sizes_E, transposed, interpret)
    used = jnp.swapaxes(weight_EIO, 1, 2) if transposed else weight_EIO
    return jax.lax.ragged_dot(x_RI, used, sizes_E, preferred_element_type=weight_EIO.dtype)


def grouped_weight_gradient(
    x_RI: Array,
    dy_RO: Array,
    counts_ME: Array,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """Compute the gradients of the experts' matrices [E, I, O], summed in float32.

    Args:
      x_RI: the rows in the order of their experts.
      dy_RO: the gradients of their products.
      counts_ME, implementation, interpret: as of `grouped_matmul`.

    Raises:
      UserError: the implementation that is asked for is not known, or cannot serve.
    """
    sizes_E = jnp.sum(counts_ME, axis=0)
    if _choose(x_RI, dy_RO, implementation, interpret) == "pallas_gpu":
        return triton.weight_gradient(x_RI, dy_RO, sizes_E, interpret)
    float32 = jnp.dtype(jnp.float32)
    return jax.lax.ragged_dot_general(
        x_RI, dy_RO, sizes_E, _OVER_ROWS, preferred_element_type=float32
    )


def _choose(x: Array, other: Array, implementation: str | None, interpret: bool) -> str:
    """Take an implementation; where a GPU's kernels cannot serve, say so."""
    known = get_args(Implementation)
    if implementation is not None and implementation not in known:
        raise UserError(
            f"no implementation of a grouped matmul is called {implementation!r}: try one of "
            f"{', '.join(known)}"
        )
    platform = device_of_compilation().platform
    if implementation == "reference" or (implementation is None and platform != "gpu"):
        return "reference"
    why = _refusal(x, other, platform, interpret)
    if not why:
        return "pallas_gpu"
    if implementation:
        raise UserError(
            f"a grouped matmul by {implementation} was asked for, but: {why}; reference serves"
        )
    say_once(f"each row is multiplied by the matrices of all experts (pallas_gpu: {why})")
    return "reference"


def _refusal(x: Array, other: Array, platform: str, interpret: bool) -> str:
    """Say why the kernels of GPUs cannot serve; empty = they can."""
    if platform != "gpu" and not interpret:
        return f"on {platform}"
    for array in (x, other):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{array.dtype} is neither float32 nor bfloat16"
    if x.dtype != other.dtype:
        return f"the factors are {x.dtype} and {other.dtype}"
    return "" if interpret else too_old()
