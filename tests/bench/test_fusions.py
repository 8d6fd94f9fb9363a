"""The fusion study: the same numbers with a barrier behind every operation, and a table for a target."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.bench.fusions import (
    FusionBenchArgs,
    bench_fusions,
    directions,
    fusion_table,
    parts,
    size,
    unfused,
)

SMALL = FusionBenchArgs(targets=("v5e-8",), seq_len=16)
PARTS = parts(SMALL)


def arrays(shapes: tuple[Any, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(3 * rng.standard_normal(x.shape), x.dtype) for x in shapes]


@pytest.mark.quick
@pytest.mark.parametrize("part", PARTS)
def test_barriers_change_no_value(part: str) -> None:
    """Up to the rounding that a fusion saves: 2^-8 of the largest entry, a bfloat16 rounding."""
    for run, given in directions(*PARTS[part]).values():
        args = arrays(given)
        text = jax.jit(unfused(run)).lower(*args).as_text()
        assert text.count("optimization_barrier") >= 3
        for ours, want in zip(jax.tree.leaves(unfused(run)(*args)), jax.tree.leaves(run(*args)), strict=True):
            ours, want = np.asarray(ours, np.float64), np.asarray(want, np.float64)
            assert np.max(np.abs(ours - want)) <= 2**-8 * np.max(np.abs(want))


@pytest.mark.quick
def test_the_least_is_inputs_and_outputs_once() -> None:
    function, args = PARTS["SwiGLU"]
    one = 16 * 14336 // 4 * 2
    assert size(args) + size(jax.eval_shape(function, *args)) == 3 * one
    run, given = directions(function, args)["backward"]
    assert size(given) + size(jax.eval_shape(run, *given)) == 5 * one


@pytest.mark.slow
def test_a_target_has_a_row_for_each_part() -> None:
    rows = bench_fusions(SMALL)
    assert [(row.part, row.direction) for row in rows] == [(p, d) for p in PARTS for d in ("forward", "backward")]
    for row in rows:
        assert row.least > 0 and 0 < row.fused <= row.alone
    assert len(fusion_table(rows).splitlines()) == 2 + len(rows)
