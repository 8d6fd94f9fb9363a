"""The reference, differentiated by jax, against the definition in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import EVERY_MASK, SIZES, Answer, Case, answer, assert_right, inputs
from tiers import some

from jaxpar.kernels.attention.call import Call, reference


@pytest.mark.parametrize(
    "case",
    [*EVERY_MASK, *some(SIZES, 10, pytest.mark.long)],
    ids=str,
)
def test_reference_is_the_definition(case: Case) -> None:
    given = inputs(case)

    @jax.jit
    def found() -> Answer:
        def projected(q: Any, k: Any, v: Any) -> Any:
            out, lse = reference(
                q,
                k,
                v,
                given.mask,
                Call(softcap=case.softcap),
            )
            return jnp.sum(out.astype(jnp.float32) * given.dout) + jnp.sum(lse * given.dlse), (
                out,
                lse,
            )

        gradients, (out, lse) = jax.grad(projected, (0, 1, 2), has_aux=True)(
            given.q, given.k, given.v
        )
        return Answer(out, lse, *gradients)

    assert_right(found(), answer(case, given), case.dtype)


def test_the_scale_may_be_another() -> None:
    given = inputs(Case("causal"))
    ours = reference(
        given.q,
        given.k,
        given.v,
        given.mask,
        Call(scale=0.5),
    )
    theirs = reference(
        given.q * 0.5 * np.sqrt(32),
        given.k,
        given.v,
        given.mask,
    )
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
