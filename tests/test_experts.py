"""Experts on any layout give the answer of every expert on every token; what is sent is what the docstring says.

Tolerance: as in test_collective_matmul, sums of at most a few hundred float32 terms in another order: 1e-5 of the
largest entry.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import experts, plain
from jaxpar.errors import UserError
from jaxpar.experts import RouterSums, expert_mlp
from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import walk
from jaxpar.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.planned import planned
from jaxpar.sharding import Plan, ShardingRules

pytestmark = pytest.mark.quick

B, S, D, F, E, K = 8, 24, 12, 24, 8, 3


def plan_on(rules: ShardingRules | None = None, compute: str = "float32", **mesh: int) -> Plan:
    spec = MeshSpec(**mesh)
    return Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]), rules or ShardingRules(), compute)  # pyright: ignore[reportArgumentType]


@functools.cache
def given() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = (B, S, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    x, *weights = (rng.standard_normal(shape) for shape in shapes)
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, *(w / np.sqrt(w.shape[-2]) for w in weights)))


def values_and_gradients(op: Any, plan: Plan, factor: float = 0.0) -> Any:
    """The answer, the router's sums, and the gradients of a loss that has all of them."""

    def loss(args: Any) -> Any:
        y, sums = op(*args, K, factor, plan)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + 0.3 * sums.balance + 0.2 * sums.z, (y, sums)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(given())


@functools.cache
def expected() -> Any:
    return values_and_gradients(plain.expert_mlp, plan_on())


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


ZERO1 = ShardingRules(state_embed=("fsdp", "data"))
WHOLE = ShardingRules(residual_seq=("context",))  # the residual stream is the same on the devices along tensor
LAYOUTS = {
    "one device": (None, {}),
    "expert=2": (None, {"expert": 2}),
    "expert=8": (None, {"expert": 8}),
    "expert x fsdp x tensor": (None, {"expert": 2, "fsdp": 2, "tensor": 2}),
    "expert x context": (None, {"expert": 4, "context": 2}),
    "context x tensor": (None, {"context": 2, "tensor": 4}),
    "expert x tensor, residual stream whole": (WHOLE, {"expert": 2, "tensor": 4}),
    "mlp whole": (ShardingRules(mlp=()), {"expert": 2, "tensor": 4}),
    "data x fsdp x expert, ZeRO-1": (ZERO1, {"data": 2, "fsdp": 2, "expert": 2}),
    "experts over context": (ShardingRules(experts=("context",)), {"context": 4, "tensor": 2}),
    "experts over data x context": (ShardingRules(experts=("data", "context")), {"data": 2, "context": 4}),
    "experts on every device": (ShardingRules(experts=()), {"expert": 2, "fsdp": 2, "tensor": 2}),
}


@pytest.mark.parametrize("factor", [0.0, E / K], ids=["dropless", "capacity"])  # E / K: room for all
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_plain_answer(layout, factor):
    rules, mesh = LAYOUTS[layout]
    found = values_and_gradients(expert_mlp, plan_on(rules, **mesh), factor)
    assert_close(found, expected())
    assert found[0][1][1].dropped == 0
