"""The order of a batch's tokens, and halves of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Context, Overlap, Plan
from jaxpar.parallel.domino import halves, whole_batch
from jaxpar.parallel.zigzag import TOKENS, in_natural_order, in_order


def plan_on(
    overlap: Overlap | None = None,
    strategy: str = "ring",
    **mesh: int,
) -> Plan:
    spec = MeshSpec(**mesh)
    devices = jax.devices()[: devices_needed(spec)]
    return Plan(make_mesh(spec, devices), overlap=overlap or Overlap(), context=Context(strategy))  # pyright: ignore[reportArgumentType]


def test_everything_of_a_batch_moves_together_and_comes_back():
    tokens = jnp.arange(48).reshape(2, 24)
    labels = jnp.arange(48).reshape(2, 24) + 1
    ordered = in_order({"tokens": tokens, "labels": labels}, plan_on(context=2))
    assert ordered["positions"][0].tolist() == [
        *range(6),
        *range(18, 24),
        *range(6, 12),
        *range(12, 18),
    ]
    np.testing.assert_array_equal(
        ordered["tokens"], ordered["positions"] + jnp.asarray([[0], [24]])
    )
    np.testing.assert_array_equal(ordered["labels"], ordered["tokens"] + 1)
    back = in_natural_order(ordered["tokens"][..., None], plan_on(context=2))
    np.testing.assert_array_equal(back[..., 0], tokens)


def test_positions_that_are_given_are_kept():
    restarting = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4]])
    batch = {"tokens": jnp.zeros((1, 8), int), "positions": restarting}
    assert in_order(batch, plan_on())["positions"] is restarting
    assert in_order(batch, plan_on(context=2))["positions"][0].tolist() == [0, 1, 3, 4, 2, 0, 1, 2]
    ulysses = in_order(batch, plan_on(strategy="ulysses", context=2), "ulysses")
    assert ulysses["positions"][0].tolist() == restarting[0].tolist()


def test_a_sequence_that_is_not_cut_evenly_is_refused():
    with pytest.raises(UserError, match=r"data\.seq_len=6 is not cut into 4 equal chunks"):
        in_order(
            {"tokens": jnp.zeros((1, 6), int)},
            plan_on(context=2),
        )


def test_each_device_halves_its_own_sequences():
    plan = plan_on(Overlap(domino="on"), data=4, tensor=2)
    x = jnp.arange(8 * 6).reshape(8, 6)
    x = jax.device_put(x, plan.sharding(TOKENS))
    first, second = halves(x, TOKENS, plan)
    assert first[:, 0].tolist() == [0, 12, 24, 36], "the first of each device's two"
    assert first.sharding.is_equivalent_to(plan.sharding(TOKENS), 2)
    np.testing.assert_array_equal(whole_batch((first, second), TOKENS, plan), x)
    assert halves(None, TOKENS, plan) == (None, None)


@pytest.mark.slow
def test_each_device_has_its_share_of_both_halves_of_a_sequence():
    plan = plan_on(Overlap(domino="sequence"), data=2, tensor=2)
    tokens = jnp.arange(2 * 8).reshape(2, 8)
    ordered = in_order({"tokens": tokens}, plan, halved=True)["tokens"]
    assert ordered[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    np.testing.assert_array_equal(
        in_natural_order(ordered[..., None], plan, halved=True)[..., 0], tokens
    )
    for axes in (TOKENS, ("batch", "residual_seq")):
        x = jax.device_put(ordered, plan.sharding(axes))
        first, second = halves(x, axes, plan)
        np.testing.assert_array_equal(first, tokens[:, :4])
        np.testing.assert_array_equal(second, tokens[:, 4:])
        assert first.sharding.is_equivalent_to(plan.sharding(axes), 2)
        np.testing.assert_array_equal(whole_batch((first, second), axes, plan), ordered)


def test_an_odd_number_of_sequences_is_cut_in_halves_of_each():
    asked = Overlap(domino="on")
    assert asked.for_rows(2) is asked
    assert asked.for_rows(3) == Overlap(domino="sequence")
    assert Overlap(domino="auto").for_rows(1).domino == "auto"


def test_without_domino_there_is_one_part_the_batch_itself():
    plan = plan_on(data=4)
    x = jnp.zeros((8, 6))
    assert halves(x, TOKENS, plan)[0] is x
    assert whole_batch((x,), TOKENS, plan) is x
