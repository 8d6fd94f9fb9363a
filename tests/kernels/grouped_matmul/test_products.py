"""Rows times the matrices of their experts, against a loop over the rows."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.kernels.grouped_matmul import (
    expert_order,
    grouped_matmul,
    grouped_weight_gradient,
    inverse,
)

# Of two buffers of four rows for three experts; the second expert has none, three rows are empty.
COUNTS = jnp.asarray(
    [[2, 0, 1], [1, 0, 1]],
    jnp.int32,
)
EXPERTS = np.asarray(
    [
        0,
        0,
        2,
        -1,
        0,
        2,
        -1,
        -1,
    ]
)


def test_each_row_meets_the_matrix_of_its_expert() -> None:
    """Float32 sums of eight terms at most, in another order: 1e-5."""
    rng = np.random.default_rng(0)
    x, dy, weight = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((8, 5), (8, 7), (3, 5, 7))
    )
    order = np.asarray(expert_order(COUNTS, 8))
    expert = EXPERTS[order]
    np.testing.assert_array_equal(
        expert,
        [0, 0, 0, 2, 2, -1, -1, -1],
    )
    np.testing.assert_array_equal(
        order[np.asarray(inverse(jnp.asarray(order)))],
        np.arange(8),
    )
    held = expert >= 0
    found = jax.jit(grouped_matmul)(x, weight, COUNTS)
    np.testing.assert_allclose(
        found[held],
        [row @ weight[e] for row, e in zip(x[held], expert[held], strict=True)],
        atol=1e-5,
    )
    wanted = np.zeros_like(weight)
    for row, gradient, e in zip(
        x[held],
        dy[held],
        expert[held],
        strict=True,
    ):
        wanted[e] += np.outer(row, gradient)
    dweight = jax.jit(grouped_weight_gradient)(x, dy, COUNTS)
    assert dweight.dtype == np.float32
    np.testing.assert_allclose(dweight, wanted, atol=1e-5)


def test_rows_of_one_buffer_stand_in_order() -> None:
    assert expert_order(COUNTS[:1], 4) is None
