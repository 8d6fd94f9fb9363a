"""A matmul with a block-sparse matrix behind one function, which takes the kernel that serves.

Shapes: T rows of x, I and O the dims of the matrix, M by N its blocks.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxpar.base.compiled_for import device_of_compilation, too_old
from jaxpar.base.errors import UserError, short
from jaxpar.base.jax_compat import refusal_without
from jaxpar.kernels.attention.dispatch import say_once
from jaxpar.kernels.block_sparse.blocks import Blocks, block_size
from jaxpar.kernels.masks import FULL, PARTIAL, BlockSparse, Mask, Tiles, require_mask, tile_states

Implementation = Literal["pallas_gpu", "pallas_tpu", "reference"]
_MODULES = {"pallas_gpu": "triton", "pallas_tpu": "tpu"}
_KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}


def matmul(
    x: Float[Array, "... I"],
    weight_IO: Float[Array, "I O"],
    blocks_MN: Blocks,
    *,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: bool = False,
) -> Float[Array, "... O"]:
    """Multiply by a matrix of which only some blocks are kept, as if all others were zero.

    Both gradients are as sparse: that of x is made of the same blocks, and that of the matrix is
    zero outside of them. Products are summed in float32.

    The time of the kernels, and what they read, grows with the number of blocks that are kept.
    Measured on an H100 and rehearsed on TPUs they are worth it from three quarters of zeros on; see
    docs/benchmarks_log.md.

    Args:
      x: rows, of any leading dims; float32 or bfloat16.
      weight_IO: the matrix, of the dtype of x. What stands in the other blocks is not read.
      blocks_MN: which blocks are kept, of I / M rows and O / N columns each. A numpy array is known
        while tracing; a JAX array may depend on values, and XLA then counts the work of all blocks.
        `block_map` makes one of a mask.
      implementation: one of `Implementation`; None = the kernel of the platform where it serves,
        and otherwise plain XLA on the whole matrix, which the log says.
      platform: the platform that it is compiled for; None = that of a rehearsal's target, or else
        JAX's default backend.
      interpret: whether a kernel is interpreted, for tests on a CPU.

    Returns:
      The product, in the dtype of x.

    Raises:
      UserError: the arrays do not fit together, the map is no array of truth values that divides
        the matrix, or the implementation is unknown or cannot serve.
    """
    _check(x, weight_IO, blocks_MN)
    how = _choose(weight_IO, blocks_MN, implementation, platform, interpret)
    if how.name == "reference":
        return reference(x, weight_IO, blocks_MN)
    x_TI = x.reshape(-1, x.shape[-1])
    if isinstance(blocks_MN, np.ndarray):
        known = BlockSparse(blocks_MN, *block_size(blocks_MN, weight_IO.shape))
        product = _product(how._replace(known=known), x_TI, weight_IO, None)
    else:
        product = _product(how, x_TI, weight_IO, blocks_MN)
    y_TO = cast(Array, product)  # custom_vjp hides the type of what it wraps
    return y_TO.reshape(*x.shape[:-1], weight_IO.shape[1])


def reference(
    x: Float[Array, "... I"], weight_IO: Float[Array, "I O"], blocks_MN: Blocks
) -> Float[Array, "... O"]:
    """The same product, by plain XLA on the whole matrix."""
    kept_IO = jnp.where(_entries(blocks_MN, weight_IO.shape), weight_IO, 0)
    y = jnp.matmul(x, kept_IO, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def block_map(
    mask: Mask, shape: tuple[int, int], block: tuple[int, int]
) -> Bool[np.ndarray, "M N"]:
    """Return the blocks of a matrix that a mask of places keeps, for a pattern that does not depend
    on values: `block_map(masks.Window(255), (1024, 1024), (128, 128))`.

    Args:
      mask: the rows of the matrix stand for queries, and its columns for keys.
      shape: the matrix, [I, O].
      block: the rows and columns of a block, which divide the shape.

    Raises:
      UserError: the blocks do not divide the matrix, the mask is no mask, or it cuts a block.
    """
    require_mask(mask, "block_map")
    if shape[0] % block[0] or shape[1] % block[1]:
        raise UserError(
            f"blocks of {block[0]} x {block[1]} do not divide a matrix of {shape[0]} x {shape[1]}"
        )
    states = np.asarray(tile_states(mask, Tiles(*shape, *block)))
    if cut := int(np.sum(states == PARTIAL)):
        raise UserError(
            f"{mask} keeps a part of {cut} blocks of {block[0]} x {block[1]}: a block is kept or "
            "not; give BlockSparse, or blocks that the mask does not cut"
        )
    return states == FULL


class _How(NamedTuple):
    """How a product is made.

    Attributes:
      name: one of `Implementation`.
      interpret: whether the kernel is interpreted.
      known: the map where it is known while tracing; None = it is an argument.
    """

    name: str
    interpret: bool
    known: BlockSparse | None = None

    @property
    def module(self) -> ModuleType:
        """The module of the kernels, imported only now, as Pallas takes long to import."""
        return importlib.import_module(f"jaxpar.kernels.block_sparse.{_MODULES[self.name]}")

    def blocks(self, given: Array | None) -> Blocks:
        """The map, whichever way it is handed on."""
        if self.known is not None:
            return self.known.map
        assert given is not None
        return given


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x_TI: Array, weight_IO: Array, blocks_MN: Array | None) -> Array:
    return how.module.multiply(x_TI, weight_IO, how.blocks(blocks_MN), interpret=how.interpret)


def _product_forward(how, x_TI, weight_IO, blocks_MN):
    return _product(how, x_TI, weight_IO, blocks_MN), (x_TI, weight_IO, blocks_MN)


def _product_backward(how, residuals, dy_TO):
    x_TI, weight_IO, given = residuals
    blocks_MN = how.blocks(given)
    dx_TI = how.module.multiply(
        dy_TO, weight_IO, blocks_MN, transposed=True, interpret=how.interpret
    )
    dweight_IO = how.module.weight_gradient(x_TI, dy_TO, blocks_MN, interpret=how.interpret)
    # a tile that is visited by no step holds what was in memory before
    dweight_IO = jnp.where(_entries(blocks_MN, weight_IO.shape), dweight_IO, 0)
    return dx_TI, dweight_IO.astype(weight_IO.dtype), None


_product.defvjp(_product_forward, _product_backward)


def _entries(blocks_MN: Blocks, shape: tuple[int, ...]) -> Array:
    """Which entries of the matrix are kept [I, O]."""
    block_i, block_o = block_size(blocks_MN, shape)
    return jnp.repeat(jnp.repeat(jnp.asarray(blocks_MN), block_i, axis=0), block_o, axis=1)


def _choose(
    weight_IO: Array,
    blocks_MN: Blocks,
    implementation: str | None,
    platform: str | None,
    interpret: bool,
) -> _How:
    known = get_args(Implementation)
    if implementation is not None and implementation not in known:
        raise UserError(
            f"no implementation of a block-sparse matmul is called {implementation!r}: try one of "
            f"{', '.join(known)}"
        )
    platform = platform or device_of_compilation().platform
    name = implementation or _KERNELS.get(platform, "reference")
    if name == "reference":
        return _How(name, interpret)
    how = _How(name, interpret)
    why = _refusal(how, weight_IO, blocks_MN, platform)
    if not why:
        return how
    if implementation:
        raise UserError(
            f"a block-sparse matmul by {name} was asked for, but: {why}; reference serves"
        )
    say_once(f"block-sparse matmul by plain XLA on the whole matrix ({name}: {why})")
    return _How("reference", interpret)


def _refusal(how: _How, weight_IO: Array, blocks_MN: Blocks, platform: str) -> str:
    """Why a kernel cannot serve; empty = it can."""
    if _KERNELS.get(platform) != how.name and not how.interpret:
        return f"on {platform}"
    if weight_IO.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{weight_IO.dtype} is neither float32 nor bfloat16"
    if why := refusal_without(how.name):
        return why
    if platform == "gpu" and not how.interpret and (why := too_old()):
        return why
    return how.module.refusal(blocks_MN, weight_IO.shape)


def _check(x: Array, weight_IO: Array, blocks_MN: Blocks) -> None:
    """Refuse arrays that do not fit together."""
    if weight_IO.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight_IO.shape[0]:
        raise UserError(
            f"a block-sparse matmul takes rows [..., I] and a matrix [I, O], and was given "
            f"{x.shape} and {weight_IO.shape}"
        )
    if x.dtype != weight_IO.dtype:
        raise UserError(
            f"a block-sparse matmul takes rows and a matrix of one dtype, and was given {x.dtype} "
            f"and {weight_IO.dtype}"
        )
    if not isinstance(blocks_MN, jax.Array | np.ndarray) or blocks_MN.dtype != bool:
        raise UserError(
            "a block-sparse matmul takes its blocks as an array [M, N] of truth values, and was "
            f"given {short(blocks_MN)}"
        )
    divides = blocks_MN.ndim == 2 and not any(
        count == 0 or size % count
        for size, count in zip(weight_IO.shape, blocks_MN.shape, strict=True)
    )
    if not divides:
        raise UserError(
            f"a map of {blocks_MN.shape} blocks does not divide a matrix of {weight_IO.shape}: "
            "give [M, N] of which M divides its rows and N its columns"
        )
