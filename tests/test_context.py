"""Every strategy of context parallelism against one device: values, gradients, what is sent, the work of each device.

Tolerance: as in test_attention, sums of at most a few hundred float32 terms in another order: 1e-5 of the largest entry.
In bfloat16 outputs and gradients pass a few roundings by half an ulp (2^-9): 2^-6 of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import context, local_attention
from jaxpar.attention import whole
from jaxpar.context import check_split, chunk_order, inverse, needed_kv_heads, reordered, split_attention
from jaxpar.errors import UserError
from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import walk
from jaxpar.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.planned import planned
from jaxpar.sharding import Context, Plan, ShardingRules

pytestmark = pytest.mark.quick

STRATEGIES = ("ring", "all_gather", "ulysses")


def plan_on(strategy: str = "ring", rules: dict[str, Any] | None = None, **mesh: int) -> Plan:
    spec = MeshSpec(**mesh)
    made = make_mesh(spec, jax.devices()[: devices_needed(spec)])
    return Plan(made, ShardingRules(**(rules or {})), context=Context(strategy))  # pyright: ignore[reportArgumentType]


def projections(B: int, S: int, H: int, K: int, h: int, dtype: str = "float32", size: float = 1) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(size * rng.standard_normal((B, S, heads, h)), dtype) for heads in (H, K, K)]


def documents(B: int, S: int) -> jax.Array:
    """Random documents of ten tokens on average."""
    return jnp.asarray(np.cumsum(np.random.default_rng(1).random((B, S)) < 0.1, axis=1), jnp.int32)


def values_and_gradients(attention: Any, args: list[jax.Array]) -> Any:
    towards = jnp.asarray(np.random.default_rng(2).standard_normal(args[0].shape), jnp.float32)

    def projected(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(*args)
        return jnp.sum(out.astype(jnp.float32) * towards), out

    (_, out), gradients = jax.jit(jax.value_and_grad(projected, (0, 1, 2), has_aux=True))(*args)
    return out, *gradients


def split(plan: Plan, window: int = 0, segments: jax.Array | None = None) -> Any:
    """The attention under a plan of arrays in natural order."""
    order = chunk_order(plan)

    def attention(*args: jax.Array) -> jax.Array:
        documents = None if segments is None else reordered(segments, order, 1)
        out = split_attention(plan, window, *(reordered(x, order, 1) for x in args), documents)
        return reordered(out, inverse(order), 1)

    return attention


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


# Strategy, mesh, rules, heads, kv heads, window, packed.
CASES = [
    ("ring", {"context": 2}, {}, 3, 1, 0, False),
    ("ring", {"context": 4, "tensor": 2}, {}, 6, 2, 0, True),
    ("ring", {"context": 8}, {}, 5, 5, 13, False),
    ("ring", {"context": 4}, {}, 4, 2, 7, True),
    ("ring", {"context": 2, "tensor": 4}, {"heads": (), "kv_heads": (), "attention_seq": ("context", "tensor")}, 3, 3, 0, True),
    ("ring", {"context": 2, "tensor": 4}, {"kv_heads": ()}, 8, 2, 0, False),
    ("ring", {"context": 2, "tensor": 2}, {"kv_heads": ()}, 6, 2, 5, False),
    ("ring", {"context": 2, "tensor": 4}, {"kv_heads": ()}, 8, 3, 0, False),
    ("ring", {"data": 2, "fsdp": 2, "context": 2}, {}, 3, 1, 0, True),
    ("all_gather", {"context": 2}, {}, 3, 1, 11, True),
    ("all_gather", {"context": 4, "tensor": 2}, {}, 6, 2, 0, False),
    ("all_gather", {"context": 8}, {}, 5, 5, 0, True),
    ("ulysses", {"context": 2}, {}, 6, 3, 0, True),
    ("ulysses", {"context": 4, "tensor": 2}, {}, 8, 2, 9, False),
    ("ulysses", {"context": 8}, {}, 24, 3, 0, False),
    ("ulysses", {"context": 4}, {}, 12, 12, 0, True),
]  # fmt: skip
CASES = [case if case[3] % case[4] == 0 else (*case[:3], 12, 3, *case[5:]) for case in CASES]


@pytest.mark.parametrize(("strategy", "mesh", "rules", "H", "K", "window", "packed"), CASES, ids=str)
def test_a_strategy_gives_the_answer_of_one_device(strategy, mesh, rules, H, K, window, packed, monkeypatch):
    monkeypatch.setattr(local_attention, "ROWS", 5)  # several tiles, the last of them ragged
    monkeypatch.setattr(local_attention, "COLUMNS", 7)
    args, segments = projections(4, 48, H, K, 6), documents(4, 48) if packed else None
    found = values_and_gradients(split(plan_on(strategy, rules, **mesh), window, segments), args)
    assert_close(found, values_and_gradients(lambda *x: whole(*x, segments, window=window), args))
