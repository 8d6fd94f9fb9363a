"""What a wrong gradient is compared with: contributions that add up, copies by mesh axis, other
masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from experiments import case_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Plan
from jaxpar.verify.comparison import copies, copies_by_axis
from jaxpar.verify.explain import _contributions
from jaxpar.verify.of_config.checks import nearest_to_loss, partitions_of
from jaxpar.verify.of_config.losses_and_gradients import Case, one_device
from jaxpar.verify.of_config.shrink import shrink
from jaxpar.verify.report import GradientRow


def case_of(mesh: MeshSpec, **changes: object) -> Case:
    small, _ = shrink(
        override(Config(), {"model.family": "llama", "train.batch": 36, **changes}), mesh
    )
    return case_on(small, jax.devices()[:8])


def test_partitions_have_every_row_once() -> None:
    case = case_of(
        MeshSpec(data=2, fsdp=2, context=2),
        **{"train.accumulation": 3},
    )
    rows = {row.tobytes(): n for n, row in enumerate(case.batch["tokens"])}
    found = {
        part.what + part.of: [
            [rows[row.tobytes()] for row in batch["tokens"]] for batch in part.batches
        ]
        for part in partitions_of(case, case.experiment("float32").plan)
    }
    shards = ["shard of data", "shard of fsdp", "shard of data x fsdp"]
    assert [*found] == [*shards, "microbatch", "microbatch (of consecutive rows)"]
    for parts in found.values():
        assert sorted(row for part in parts for row in part) == sorted(rows.values())
    assert [len(parts) for parts in found.values()] == [2, 2, 4, 3, 3]
    assert found["shard of fsdp"][0] == [*range(6), *range(12, 18)]
    assert found["microbatch"][1][:3] == [1, 4, 7]


def test_contributions_add_up_to_the_gradient() -> None:
    case = case_of(MeshSpec(data=4, tensor=2))
    one = partial(one_device(case, "float32", exact=True), case.params)
    want = one(case.batch)
    parts, means = _contributions(one, partitions_of(case, case.experiment("float32").plan), want)
    assert not means
    assert [name for _, name, _ in parts] == [f"shard {at} of data" for at in range(4)]
    for name, grad in want.grads.items():
        total = np.sum(
            [grads[name] for _, _, grads in parts],
            axis=0,
        )
        np.testing.assert_allclose(
            total,
            grad,
            atol=1e-5 * np.max(np.abs(grad)),
        )
        assert not np.allclose(parts[0][2][name], grad, rtol=0.1)


def test_copies_are_told_apart_by_mesh_axis(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(data=2, fsdp=2, tensor=2)

    # what a device holds depends on where it is, though the spec denies it
    def local(x: jax.Array) -> jax.Array:
        return x + 10 * jax.lax.axis_index("data") + 100 * jax.lax.axis_index("tensor")

    x = jnp.arange(4.0)
    wrong = jax.jit(
        jax.shard_map(
            local, mesh=plan.mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
        )
    )(x)
    assert isinstance(wrong.sharding, NamedSharding)
    found = copies_by_axis(copies(wrong), wrong.sharding)
    assert set(found) == {"data", "tensor"}
    np.testing.assert_array_equal(found["data"], [x, x + 10])
    np.testing.assert_array_equal(found["tensor"], [x, x + 100])


def test_the_wrong_gradient_nearest_to_the_loss() -> None:
    def wrong(*rows: tuple[str, tuple[int, ...] | None]) -> tuple[GradientRow, ...]:
        return tuple(GradientRow(name, (1,), 1.0, 0.1, layers=layers) for name, layers in rows)

    table = ("embed.tokens", None)
    q = ("blocks.q", (0, 1))
    up = ("blocks.up", (0,))
    assert nearest_to_loss(wrong(table)) == "embed.tokens"
    assert nearest_to_loss(wrong(table, q, up)) == "blocks.q of layer 1"
    assert nearest_to_loss(wrong(table, up)) == "blocks.up of layer 0"
    assert nearest_to_loss(wrong(table, q, up, ("head.norm.scale", None))) == "head.norm.scale"
    assert nearest_to_loss(wrong(q, ("distill.project", None))) == "distill.project"
