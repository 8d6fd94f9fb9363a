"""`verify.gradients` on a loss of a few lines: mistakes that the caller names, and what is printed
and kept.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import verify

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((4, 3)).astype(np.float32),
    "b": RNG.standard_normal(3).astype(np.float32),
}
BATCH = {
    "x": RNG.standard_normal((16, 4)).astype(np.float32),
    "mask": RNG.uniform(0.2, 2, 16).astype(np.float32),
}


def loss(params: Any, batch: Any) -> Any:
    y = jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2
    return jnp.sum(y * batch["mask"][:, None])


def without_mask(params: Any, batch: Any) -> Any:
    return loss(params, batch | {"mask": jnp.ones_like(batch["mask"])})


def verdict_of(program: Any, **options: Any) -> verify.Verdict:
    layout = jaxpar.Layout(jaxpar.make_mesh(data=4, fsdp=2))
    return verify.gradients(
        program, loss, PARAMS, BATCH, (layout.sharding(()), layout.sharding(("batch",))), **options
    )


def test_a_mistake_that_nothing_explains_is_one_all_the_same() -> None:
    assert verdict_of(loss).equal
    verdict = verdict_of(without_mask)
    assert not verdict.loss_ok
    assert [row.finding and row.finding.kind for row in verdict.wrong] == ["unknown", "unknown"]


def test_a_small_error_is_one_all_the_same() -> None:
    """The limit is 1e-5 for a loss that is as little sensitive to rounding as this one, and it is
    3e-5 off.
    """
    assert not verdict_of(lambda params, batch: (1 + 3e-5) * loss(params, batch)).equal


def test_one_shard_of_two_mesh_axes_together_is_missing() -> None:
    """Rows 6 and 7 are those of shard 3, which is at data=1, fsdp=1."""

    def without_a_shard(params: Any, batch: Any) -> Any:
        rows = jnp.arange(16)
        return loss(
            params,
            batch
            | {
                "mask": jnp.where(
                    (rows == 6) | (rows == 7),
                    0,
                    batch["mask"],
                )
            },
        )

    (bias, weight) = verdict_of(without_a_shard).wrong
    for row in (bias, weight):
        assert row.says == "sum missing, it is the reference without shard 3 of data x fsdp"


def test_what_is_printed_and_kept_of_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = verdict_of(lambda params, batch: 2 * loss(params, batch), tolerance=1e-4)
    verdict.show()
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["loss", "b", "w"]
    assert rows[2].rstrip().endswith("DIFFERS: sum doubled")  # fsdp has two devices
    assert last.startswith("DIFFERS: the loss, by 1.0e+00 and 2 of 2 gradients")
    assert [(row.name, row.tolerance) for row in verdict.rows] == [("b", 1e-4), ("w", 1e-4)]
