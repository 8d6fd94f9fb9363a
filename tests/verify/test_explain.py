"""What a wrong gradient is compared with: contributions that add up, copies by mesh axis, other masks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config, override
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.plan import Plan
from jaxpar.models import Model
from jaxpar.train import step
from jaxpar.verify import explain as evidence
from jaxpar.verify.copies import copies_by_axis
from jaxpar.verify.explain import Wrong, nearest_to_loss
from jaxpar.verify.losses_and_gradients import Case, one_device, random_batch, random_params
from jaxpar.verify.mistakes import Finding
from jaxpar.verify.shrink import shrink


def case_of(mesh: MeshSpec, **changes: object) -> Case:
    small, _ = shrink(override(Config(), {"model.family": "llama", "train.batch": 36, **changes}), mesh)
    model = Model(small.model)
    return Case(small, model, jax.devices()[:8], random_params(model), random_batch(small), step.gradients)


@pytest.mark.quick
def test_groups_of_one_kind_cover_every_token_once() -> None:
    case = case_of(MeshSpec(data=2, fsdp=2, context=2), **{"train.accumulation": 3})
    groups = list(evidence._groups(case, case.plan("float32")))
    names = [name for name, _, _ in groups]
    assert names[:6] == [f"shard {at} of {axis}" for axis in ("data", "fsdp", "context") for at in (0, 1)]
    assert {kind for name, kind, _ in groups if "microbatch" in name} == {"microbatch"}
    for kind, count in (("of data", 2), ("of fsdp", 2), ("of context", 2), ("of data x fsdp x context", 8)):
        masks = [mask for name, _, mask in groups if name.endswith(kind)]
        assert len(masks) == count
        np.testing.assert_array_equal(np.sum(masks, axis=0), 1)
    strided = [mask for name, _, mask in groups if name in ("microbatch 0", "microbatch 1", "microbatch 2")]
    np.testing.assert_array_equal(np.sum(strided, axis=0), 1)
    assert strided[1][1].all()
    assert not strided[1][0].any()


def test_contributions_add_up_to_the_gradient() -> None:
    case = case_of(MeshSpec(data=4, tensor=2))
    one = one_device(case, "float32", exact=True)
    want = one(case.params, case.batch)
    said: list[str] = []
    parts = evidence._parts(case, case.plan("float32"), one, said.append)
    assert [name for name, _, _ in parts] == [f"shard {at} of data" for at in range(4)]
    assert "4 shards" in said[0]
    for name, grad in want.grads.items():
        total = np.sum([answer.grads[name] for _, _, answer in parts], axis=0)
        np.testing.assert_allclose(total, grad, atol=1e-5 * np.max(np.abs(grad)))
        assert not np.allclose(parts[0][2].grads[name], grad, rtol=0.1)


@pytest.mark.quick
def test_copies_are_told_apart_by_mesh_axis(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(data=2, fsdp=2, tensor=2)

    def local(x: jax.Array) -> jax.Array:  # what a device holds depends on where it is, though the spec denies it
        return x + 10 * jax.lax.axis_index("data") + 100 * jax.lax.axis_index("tensor")

    x = jnp.arange(4.0)
    wrong = jax.jit(jax.shard_map(local, mesh=plan.mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False))(x)
    copies = copies_by_axis(wrong, plan.mesh)
    assert set(copies) == {"data", "tensor"}
    np.testing.assert_array_equal(copies["data"], [x, x + 10])
    np.testing.assert_array_equal(copies["tensor"], [x, x + 100])


@pytest.mark.quick
def test_the_wrong_gradient_nearest_to_the_loss() -> None:
    finding = Finding("unknown", "", 1.0)
    wrong = [
        Wrong("embed.tokens", None, finding),
        Wrong("blocks.q", (0, 1), finding),
        Wrong("blocks.up", (0,), finding),
    ]
    assert nearest_to_loss(wrong[:1]) == "embed.tokens"
    assert nearest_to_loss(wrong) == "blocks.q of layer 1"
    assert nearest_to_loss([wrong[0], wrong[2]]) == "blocks.up of layer 0"
    assert nearest_to_loss([*wrong, Wrong("head.norm.scale", None, finding)]) == "head.norm.scale"
