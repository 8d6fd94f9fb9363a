"""The declaration of a model's parameters, with the names of their dims in Flax's own metadata, and
the activations.

Shapes: V vocab, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError

Initializer = Callable[..., Array]
"""A function that makes an array from a key, a shape and a dtype."""
zeros = nnx.initializers.zeros
ones = nnx.initializers.ones
normal = nnx.initializers.normal


def squared_relu(x: Array) -> Array:
    """Square the entries above zero, and return zero for others (Primer, arXiv:2109.08668, section
    3).
    """
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu2": squared_relu,
}
"""The functions of `Family.activation` and `model.activation`."""


def param(
    rngs: nnx.Rngs,
    init: Initializer,
    **dims: int,
) -> nnx.Param:
    """Declare a float32 parameter: `param(rngs, normal(0.02), embed=64, mlp=256)` is [64, 256] over
    those logical axes.

    Args:
      init: makes the first value.
      **dims: the size of each dim by its logical axis. A dim whose name starts with `_` has no
        logical axis and is never split.
    """
    axes = tuple(None if name.startswith("_") else name for name in dims)
    return param_of(rngs, init, tuple(dims.values()), axes)


def param_of(
    rngs: nnx.Rngs,
    init: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
) -> nnx.Param:
    """Declare a float32 parameter by its shape.

    The names are Flax's metadata, for `nnx.get_partition_spec`. A layout says later where the array
    lies: Flax would otherwise place it at once, and ask for a mesh whose axes have these names.

    Args:
      init: makes the first value.
      shape: the sizes of the dims.
      axes: for each dim a logical axis, or None where it is never split.
    """
    declared = nnx.with_partitioning(init, axes, eager_sharding=False)
    return nnx.Param(declared(rngs.params(), shape, jnp.float32))


def declared_axes(
    variable: nnx.Variable,
    name: str = "a parameter",
) -> tuple[str | None, ...]:
    """Read the logical axes of a variable from Flax's metadata.

    Args:
      name: the variable's name in a message.

    Returns:
      The logical axis of each dim; None = the dim has none.

    Raises:
      UserError: a dim has several names, there are some names and not one for each dim, or the
        entries are no floating-point numbers.
    """
    names = tuple(variable.get_metadata().get("out_sharding") or ())
    shape = variable.shape
    one_each = all(axis is None or isinstance(axis, str) for axis in names)
    if not one_each or (names and len(names) != len(shape)):
        raise UserError(
            f"{name} of shape {shape} names its dims {names}: a dim has one logical axis or None, "
            'as in out_sharding=("embed", "mlp"), and one that nnx.vmap stacks over is named by '
            'transform_metadata={nnx.PARTITION_NAME: "layers"}'
        )
    if not jnp.issubdtype(variable.dtype, jnp.floating):
        raise UserError(
            f"{name} of shape {shape} is {variable.dtype}: a parameter is floating point, for a "
            "gradient"
        )
    return names or (None,) * len(shape)


def require_float32(dtype: DTypeLike, name: str) -> None:
    """Refuse a parameter that is declared in another dtype than float32: it would be trained in the
    config's dtype, and not in its own.

    Args:
      dtype: the parameter's dtype.
      name: the parameter's name in the message.

    Raises:
      UserError: the dtype is not float32.
    """
    if dtype != jnp.float32:
        raise UserError(
            f"{name} is {jnp.dtype(dtype).name}: declare it in float32 (param_dtype); "
            "precision.params=bfloat16 keeps it in 16 bits, and the compute dtype is "
            "precision.compute"
        )


def vocab_rows(config: ModelConfig) -> int:
    """Return the stored size of the vocabulary, with the padding that rounds it up."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def vocab_table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Make a vocabulary table [V, D]: the input embedding or the output head.

    The vocabulary is rounded up so that a mesh axis can divide it. Rows past the vocabulary are
    never read.

    Returns:
      The table, with logical axes ("vocab", "embed").
    """
    return param(rngs, normal(config.init_std), vocab=vocab_rows(config), embed=config.embed)
