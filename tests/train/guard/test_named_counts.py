"""A traced function is run as it is, with a count beside each activation that it names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.remat import named
from jaxpar.train.guard.named_counts import count_nonfinite, with_counts


def test_more_entries_than_int32_counts_are_not_counted_as_none() -> None:
    logits = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    assert jax.eval_shape(count_nonfinite, logits).dtype == jnp.float32
    assert jax.eval_shape(count_nonfinite, jnp.zeros(3)).dtype == jnp.int32


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return named(x / 2, "v")


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g / 2,))


def function(tree: dict[str, jax.Array], y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    q = named(jnp.log(tree["x"]), "q")  # -inf at 0, NaN below
    k = jax.jit(lambda x: named(x * 2, "k"))(y)
    wide = jax.lax.cond(y[0] > 0, lambda x: x + 1, lambda x: x - 1, y)
    lse = named(jnp.full(3, -jnp.inf), "attention_lse")
    return halved(q) + k, {"wide": wide, "lse": lse, "q": named(k, "q")}


def test_the_result_is_the_functions_own_and_names_are_counted_in_calls_too() -> None:
    tree = {"x": jnp.array([0.0, 1.0, -1.0])}
    y = jnp.array([1.0, jnp.inf, 2.0])
    found, counts = jax.jit(lambda *args: with_counts(function, *args))(tree, y)
    jax.tree.map(np.testing.assert_array_equal, found, function(tree, y))
    read = {name: int(count) for name, count in counts.items()}
    # q twice: of the logarithm two, and of the doubled y one
    assert read == {"q": 3, "k": 1, "v": 2}
