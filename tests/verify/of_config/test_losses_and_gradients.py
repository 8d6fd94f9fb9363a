"""Both sides of a comparison: the order of parameters, every copy of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import case_on
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import path_name
from jaxpar.models import FAMILIES, Model
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.padding import TokenCounts
from jaxpar.train import step
from jaxpar.train.experiment import Experiment
from jaxpar.verify.comparison import Answer, copies
from jaxpar.verify.of_config.checks import FLOAT32_LOSS, compare_answers
from jaxpar.verify.of_config.losses_and_gradients import (
    one_device,
    parameter_order,
    under_plan,
)
from jaxpar.verify.of_config.shrink import shrink


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_stand_in_the_order_of_the_forward_pass(family: str, tied: bool) -> None:
    model = Model(override(Config(), {"model.family": family, "model.tied_head": tied}).model)
    order = parameter_order(model)
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.shapes())}
    assert len(order) == len(set(order))
    assert set(order) == names
    attention = ["blocks.q", "blocks.out"]
    mlp = ["blocks.up", "blocks.down"]
    norms = ["blocks.attention_norm.scale"], ["blocks.mlp_norm.scale"]
    if FAMILIES[family].norm_after:
        blocks = [*attention, *norms[0], *mlp, *norms[1]]
    else:
        blocks = [*norms[0], *attention, *norms[1], *mlp]
    last = "head.norm.scale" if FAMILIES[family].final_norm else "head.transform.dense"
    places = [order.index(name) for name in ("embed.tokens", *blocks, last)]
    assert places == sorted(places)


def test_every_copy_is_fetched(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(data=2, tensor=2)

    def local(x: jax.Array) -> jax.Array:
        return x + 10 * jax.lax.axis_index("data")

    x = jnp.arange(4.0)
    wrong = jax.jit(
        jax.shard_map(
            local, mesh=plan.mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
        )
    )
    np.testing.assert_array_equal(copies(wrong(x)), [x, x + 10])
    np.testing.assert_array_equal(copies(x), [x])


@pytest.mark.slow
def test_the_reference_weighs_the_losses_of_routers_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake in their weight, which every layout would share, is no part of it."""
    changes = {
        "model.family": "llama",
        "model.experts": 4,
        "train.balance_loss": 0.1,
        "train.router_z_loss": 0.05,
    }
    small, _ = shrink(override(Config(), changes), MeshSpec())
    case = case_on(small, jax.devices()[:1])
    plan = case.experiment("float32").plan
    weights = step.loss_weights(small)

    def loss() -> float:
        of_step = jax.jit(
            lambda params, batch: case.model.loss(params, batch, plan, None, weights).loss
        )
        return float(of_step(case.params, case.batch))

    right = loss()
    monkeypatch.setattr(TokenCounts, "labels_per_token", 1.0)
    wrong = loss()
    reference = float(one_device(case, "float32", exact=True)(case.params, case.batch).losses[0])
    assert abs(right - reference) < FLOAT32_LOSS * reference < 0.1 * abs(wrong - reference)


def test_the_plan_is_run_as_in_training() -> None:
    """The training step's arguments, float32 matmuls in full when asked, gradients laid out as
    parameters.
    """
    small, _ = shrink(
        override(
            Config(), {"train.accumulation": 3, "train.z_loss": 0.1, "train.balance_loss": 0.2}
        ),
        MeshSpec(data=2, tensor=2),
    )
    seen = []

    def gradients(experiment: Experiment, params: object, _: object, key: object) -> object:
        matmuls = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        seen.append((experiment, key, matmuls))
        return LossSums(*jnp.ones(3)), params

    case = case_on(
        small,
        jax.devices()[:4],
        cast(Any, gradients),
    )
    for precision, exact in (("float32", True), ("bfloat16", False)):
        answer = under_plan(case, precision, exact)
        experiment, key, matmuls = seen.pop()
        plan = experiment.plan
        assert (plan.compute, plan.mesh.shape["tensor"], key) == (precision, 2, None)
        train = experiment.config.train
        assert (train.accumulation, train.z_loss, train.balance_loss) == (3, 0.1, 0.2)
        assert matmuls == ("highest" if exact else None)
    assert answer.shardings["blocks.up"].spec == P(None, None, "tensor")
    np.testing.assert_array_equal(
        answer.grads["blocks.up"], np.stack([case.params["blocks"]["up"]] * 2)
    )


def test_an_error_of_a_few_times_the_tolerance_is_seen() -> None:
    """The worst that rounding does in float32 is 3.6e-6 of a gradient (docs/verified.md). The limits
    are 1e-5 of it and 3e-6 of the loss; in bfloat16 three times the error of one device and 2^-7,
    and 2^-8 of the loss."""
    case = case_on(
        shrink(Config(), MeshSpec())[0],
        jax.devices()[:1],
    )
    names = parameter_order(case.model)
    want = Answer(
        np.full(1, 4.0),
        {name: np.ones((1, 3)) for name in names},
    )

    def off(gradient: float = 0.0, loss: float = 0.0) -> Answer:
        """The answer with errors of this size in the last gradient, or in the loss."""
        return Answer(
            want.losses * (1 + loss),
            {
                **want.grads,
                names[-1]: np.full((1, 3), 1 + gradient),
            },
        )

    def equal(
        got: Answer,
        near: Answer | None = None,
        ops: Answer | None = None,
    ) -> bool:
        return compare_answers("", case, got, want, near, ops).equal

    assert equal(off(7e-6)) and not equal(off(2e-5))
    assert equal(off(loss=2e-6)) and not equal(off(loss=6e-6))
    near = off(1e-3)
    assert equal(off(0.01), near) and not equal(off(0.02), near)
    assert equal(off(loss=3e-3), near) and not equal(off(loss=6e-3), near)
    # twice what one device with the library's ops is off by, unless that is more than 2^-4
    ops = off(0.02)
    assert equal(off(0.04), near, ops) and not equal(off(0.06), near, ops)
    assert not equal(off(0.02), near, off(0.1))
