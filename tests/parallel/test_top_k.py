"""The most likely entries of the vocabulary against all scores at once.

Tolerance: log-probabilities are float32 sums of some fifty terms, taken in another order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar.parallel.cross_entropy.top_k
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.parallel.cross_entropy import Tiling
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import LogitsCall
from jaxpar.verify.reference_ops import ReferenceOps

B = 4
S = 16
D = 24
V = 56
SIZE = 51
SPLIT = MeshSpec(data=2, fsdp=2, tensor=2)


def plan_of(spec: MeshSpec, rules: ShardingRules | None = None) -> Plan:
    mesh = make_mesh(spec, jax.devices()[: devices_needed(spec)])
    return Plan(mesh, rules or ShardingRules())


# 11 entries of 7 or 28 rows: a device has fewer rows than entries; chunks of 5 tokens do not divide
@pytest.mark.parametrize(
    ("spec", "chunks", "slices"),
    [(MeshSpec(), 5, 1), (MeshSpec(tensor=8), 5, 1), (SPLIT, 1, 7), (SPLIT, 5, 1)],
)
def test_they_are_the_largest_of_all_scores(
    spec: MeshSpec, chunks: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = Tiling(chunks, slices)
    monkeypatch.setattr(jaxpar.parallel.cross_entropy.top_k, "tiling", lambda *_: tiles)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((B, S, D)), jnp.float32)
    table = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)
    table = table.at[40].set(table[3])  # of equals the first
    on = MeshOps(plan_of(spec))
    found = jax.jit(lambda x, table: on.linear_top_k(LogitsCall(x, table, SIZE, 4.0), 11))(x, table)
    want = ReferenceOps(plan_of(MeshSpec())).linear_top_k(LogitsCall(x, table, SIZE, 4.0), 11)
    np.testing.assert_array_equal(found.ids, want.ids)
    np.testing.assert_allclose(found.log_probs, want.log_probs, rtol=1e-5, atol=1e-6)


def test_more_entries_than_the_vocabulary_has_are_refused() -> None:
    on = MeshOps(plan_of(MeshSpec()))
    with pytest.raises(UserError, match="k=52 is more than the 51 entries"):
        on.linear_top_k(LogitsCall(jnp.zeros((1, 2, D)), jnp.zeros((V, D)), SIZE), 52)
