"""The plain ops: what they compute, and that no derivative among them was written by hand."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import case_on
from tiers import some

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Plan
from jaxpar.kernels.masks import Causal, Window
from jaxpar.models import FAMILIES, Model
from jaxpar.parallel import MeshOps
from jaxpar.parallel.ops import AttentionCall, LogitsCall, LossCall
from jaxpar.verify.of_config.losses_and_gradients import Case, one_device
from jaxpar.verify.of_config.shrink import shrink
from jaxpar.verify.reference_ops import ReferenceOps


@pytest.fixture
def plan(plan_of: Any) -> Plan:
    return plan_of()


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(len(shape)).standard_normal(shape),
        jnp.float32,
    )


def test_linears_contract_and_add_their_bias(plan: Plan) -> None:
    x = drawn(2, 3, 4)
    q = drawn(4, 5, 6)
    up = drawn(4, 7)
    bias = drawn(5, 6)
    ys = ReferenceOps(plan).column_linear(
        x,
        (q, up),
        None,
        (bias, None),
    )
    np.testing.assert_allclose(
        ys[0],
        np.einsum("bsd,dhk->bshk", x, q) + bias,
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        ys[1],
        np.einsum("bsd,df->bsf", x, up),
        rtol=1e-5,
    )
    y = ReferenceOps(plan).row_linear(
        ys[0],
        drawn(5, 6, 4),
        None,
        drawn(4),
    )
    np.testing.assert_allclose(
        y, np.einsum("bshk,hkd->bsd", ys[0], drawn(5, 6, 4)) + drawn(4), rtol=1e-4
    )


def test_one_weight_is_taken_as_one_of_several(plan: Plan) -> None:
    """As `jaxpar.parallel.column_linear` takes it; the form of its collectives is that of its own
    axis.
    """
    x, up, bias = drawn(2, 3, 4), drawn(4, 7), drawn(7)
    sites = []

    class Watched(type(plan.overlap)):
        def forms(self, site: Any) -> Any:
            sites.append(site)
            return super().forms(site)

    watched = dataclasses.replace(plan, overlap=Watched(**vars(plan.overlap)))
    want = np.einsum("bsd,df->bsf", x, up) + bias
    for ops in (ReferenceOps(plan), MeshOps(watched)):
        for found in (
            ops.column_linear(x, up, ("mlp",), bias),
            ops.column_linear(x, [up], [("mlp",)], [bias])[0],
        ):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert sites == ["mlp", "mlp"]


@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_loops(plan: Plan, packed: bool) -> None:
    q = drawn(2, 5, 4, 3)
    k = 2 * drawn(2, 5, 2, 3)
    v = drawn(2, 5, 2, 3) + 1
    if packed:
        segments = np.asarray(
            [
                [0, 0, 0, 0, 0],
                [0, 0, 1, 1, 2],
            ]
        )
    else:
        segments = np.zeros((2, 5), int)
    ids = jnp.asarray(segments) if packed else None
    out = ReferenceOps(plan).attention(
        AttentionCall(q, k, v, Causal() & Window(2), ids, softcap=1.5)
    )
    for b, t, h in np.ndindex(2, 5, 4):
        seen = [s for s in range(max(t - 2, 0), t + 1) if segments[b, s] == segments[b, t]]
        scores = np.asarray([np.dot(q[b, t, h], k[b, s, h // 2]) for s in seen]) / np.sqrt(3)
        scores = 1.5 * np.tanh(scores / 1.5)
        weights = np.exp(scores) / np.sum(np.exp(scores))
        values = np.asarray([v[b, s, h // 2] for s in seen])
        np.testing.assert_allclose(
            out[b, t, h],
            weights @ values,
            rtol=1e-5,
            atol=1e-6,
        )


def test_a_shifted_mask_is_another(plan: Plan) -> None:
    q = drawn(2, 5, 2, 3)
    k = drawn(2, 5, 2, 3)
    v = drawn(2, 5, 2, 3)
    later = ReferenceOps(plan, offset=1).attention(AttentionCall(q, k, v, Causal()))
    np.testing.assert_allclose(
        later[:, -1],
        ReferenceOps(plan).attention(AttentionCall(q, k, v, Causal()))[:, -1],
        rtol=1e-6,
    )
    assert np.max(np.abs(later[:, 0] - v[:, 0])) > 0.1
    earlier = ReferenceOps(plan, offset=-1).attention(AttentionCall(q, k, v, Causal()))
    np.testing.assert_allclose(earlier[:, 1], v[:, 0], rtol=1e-6)
    np.testing.assert_allclose(
        earlier[:, 0],
        v.mean(axis=1),
        rtol=1e-5,
    )


def test_loss_by_loops(plan: Plan) -> None:
    x = drawn(2, 3, 4)
    head = drawn(8, 4)
    labels = np.asarray(
        [
            [0, 5, -1],
            [2, -1, 1],
        ]
    )
    sums = ReferenceOps(plan).linear_cross_entropy(
        LossCall(LogitsCall(x, head, 6), jnp.asarray(labels), z_loss=0.1)
    )
    nll = squares = 0.0
    for b, s in np.argwhere(labels >= 0):
        scores = np.asarray(head[:6]) @ np.asarray(x[b, s])
        lse = np.log(np.sum(np.exp(scores)))
        nll = nll + lse - scores[labels[b, s]]
        squares = squares + lse**2
    np.testing.assert_allclose(
        [sums.loss, sums.nll, sums.tokens], [nll + 0.1 * squares, nll, 4], rtol=1e-5
    )


def primitives(jaxpr: Any) -> set[str]:
    """Every primitive of a jaxpr, those inside others too."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            found |= primitives(inner) if hasattr(inner, "eqns") else set()
    return found


def case_of(family: str) -> Case:
    config = override(Config(), {"model.family": family, "data.pack": True, "train.z_loss": 1e-3})
    small, _ = shrink(config, MeshSpec())
    return case_on(small, jax.devices()[:1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_holds_no_derivative_written_by_hand(family: str, plan: Plan) -> None:
    case = case_of(family)

    def of_loss(model: Model) -> set[str]:
        traced = jax.make_jaxpr(lambda params, batch: model.loss(params, batch, plan).loss)
        return primitives(traced(case.params, case.batch).jaxpr)

    assert not [
        name for name in of_loss(Model(case.model.config, ops=ReferenceOps)) if "custom_vjp" in name
    ]
    assert [name for name in of_loss(case.model) if "custom_vjp" in name]


def test_the_reference_has_the_signatures_of_what_it_stands_for() -> None:
    ours = {name: op for name, op in vars(MeshOps).items() if not name.startswith("_")}
    for name, op in ours.items():
        assert (
            inspect.signature(getattr(ReferenceOps, name)).parameters.keys()
            == inspect.signature(op).parameters.keys()
        )


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_rows_a_few_at_a_time_add_up(family: str) -> None:
    case = case_of(family)
    one = one_device(case, "float32", exact=True)
    whole = one(case.params, case.batch)
    assert whole.tokens == np.sum(case.batch["labels"] >= 0)
    first = np.arange(len(case.batch["labels"]))[:, None] < 1
    kept = (np.where(mask, case.batch["labels"], -1) for mask in (first, ~first))
    parts = [one(case.params, case.batch | {"labels": labels}) for labels in kept]
    assert sum(part.losses[0] for part in parts) == pytest.approx(whole.losses[0])
    largest = max(np.max(np.abs(grad)) for grad in whole.grads.values())
    for name, grad in whole.grads.items():
        np.testing.assert_allclose(
            sum(part.grads[name] for part in parts), grad, atol=1e-6 * largest, rtol=1e-4
        )
