"""The kernels of grouped matmuls, interpreted, against XLA's ragged matmul."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import needs_cuda

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient

SIZES = {
    "even": (8, 32, 48, [[2, 2, 2, 2]]),
    "odd sizes, an expert without rows": (77, 37, 41, [[20, 0, 31], [5, 0, 4]]),
    "several tiles of rows": (300, 40, 130, [[150, 129, 1, 0]]),
    "no rows at all": (5, 16, 16, [[0, 0]]),
    "more experts than rows": (3, 16, 24, [[0, 1, 0, 0, 1, 0, 1, 0]]),
}


def arrays(case: str, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rows, inner, columns, counts = SIZES[case]
    rng = np.random.default_rng(0)
    shapes = ((rows, inner), (len(counts[0]), inner, columns), (rows, columns))
    x, weight, dy = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return x, weight, dy, jnp.asarray(counts, jnp.int32)


def assert_close(found: jax.Array, wanted: jax.Array, inner: int) -> None:
    """Sums of `inner` terms near 1 in float32, in another order: each partial sum is about
    sqrt(inner) and is rounded, which makes inner units in the last place in either order, doubled
    for the largest of many entries. In bfloat16 the result is rounded once more.
    """
    unit = float(jnp.finfo(found.dtype).eps)
    atol = 4 * inner * float(jnp.finfo(jnp.float32).eps)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=atol, rtol=2 * unit
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("even", "bfloat16"),
        ("odd sizes, an expert without rows", "float32"),
        ("several tiles of rows", "bfloat16"),
        ("no rows at all", "float32"),
        ("more experts than rows", "float32"),
    ],
)
def test_products_and_gradients_are_those_of_the_reference(case: str, dtype: str) -> None:
    x, weight, dy, counts = arrays(case, dtype)
    held = (jnp.arange(len(x)) < jnp.sum(counts))[:, None]

    def product(implementation: str, rows: jax.Array, transposed: bool) -> jax.Array:
        kernel = implementation == "pallas_gpu"
        found = grouped_matmul(
            rows, weight, counts, transposed, implementation=implementation, interpret=kernel
        )
        return jnp.where(held, found, 0)

    for rows, transposed in ((x, False), (dy, True)):
        assert_close(
            product("pallas_gpu", rows, transposed),
            product("reference", rows, transposed),
            rows.shape[1],
        )
    assert_close(
        grouped_weight_gradient(x, dy, counts, implementation="pallas_gpu", interpret=True),
        grouped_weight_gradient(x, dy, counts, implementation="reference"),
        len(x),
    )


def test_empty_rows_become_zeros() -> None:
    """Whatever was in memory would be a NaN at worst, and spread."""
    x, weight, _, counts = arrays("odd sizes, an expert without rows", "float32")
    found = grouped_matmul(x, weight, counts, implementation="pallas_gpu", interpret=True)
    assert not np.any(found[int(jnp.sum(counts)) :])


def test_gradients_of_the_product_are_the_other_products() -> None:
    """What `parallel.experts` composes by hand, against jax's own derivative of the reference."""
    x, weight, dy, counts = arrays("several tiles of rows", "float32")

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(dy * grouped_matmul(x, weight, counts, implementation="reference"))

    dx, dweight = jax.grad(loss, (0, 1))(x, weight)
    found = grouped_matmul(
        dy, weight, counts, transposed=True, implementation="pallas_gpu", interpret=True
    )
    assert_close(found[: int(jnp.sum(counts))], dx[: int(jnp.sum(counts))], dy.shape[1])
    found = grouped_weight_gradient(x, dy, counts, implementation="pallas_gpu", interpret=True)
    assert_close(found, dweight, len(x))


@pytest.mark.parametrize(
    ("implementation", "dtype", "interpret", "why"),
    [
        ("pallas_tpu", "float32", False, "is called 'pallas_tpu'"),
        ("pallas_gpu", "float32", False, "on cpu"),
        ("pallas_gpu", "float16", True, "neither float32 nor bfloat16"),
    ],
)
def test_what_cannot_serve_is_refused(
    implementation: str, dtype: str, interpret: bool, why: str
) -> None:
    x, weight, _, counts = arrays("even", dtype)
    with pytest.raises(UserError, match=why):
        grouped_matmul(x, weight, counts, implementation=implementation, interpret=interpret)


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_absent_gpu_multiplies_each_row_once(dtype: str) -> None:
    """XLA's own lowering multiplies it by the matrices of all experts."""

    def products(
        x: jax.Array, weight: jax.Array, dy: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, ...]:
        return (
            grouped_matmul(x, weight, counts),
            grouped_matmul(dy, weight, counts, transposed=True),
            grouped_weight_gradient(x, dy, counts),
        )

    shapes = ((4096, 1024), (8, 1024, 3072), (4096, 3072))
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    counts = jax.ShapeDtypeStruct((1, 8), "int32")
    report = rehearse.step(jax.jit(products), *given, counts, target="h100x1")
    assert sum(line["flops"] for line in report["lines"]) == 3 * 2 * 4096 * 1024 * 3072
    assert not any("all experts" in note for note in report["notes"])
