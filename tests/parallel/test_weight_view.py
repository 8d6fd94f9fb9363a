"""Linears and experts that read their weights through a view: values, gradients and layouts.

Tolerance: as in test_linear.py, 1e-5 of the largest entry for float32 sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.kernels import block_sparse
from jaxpar.kernels.weight_forms import CyclicBlocks, NOfM, WeightForm
from jaxpar.parallel.linear import zero_blocks
from jaxpar.parallel.linear.weight_view import WeightView
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import ExpertsCall
from jaxpar.verify.reference_ops import ReferenceOps

B = 4
S = 8
D = 16
F = 32
H = 4
h = 4
FORM = NOfM(2, 4)


def plan_on(spec: MeshSpec, **changes: Any) -> Plan:
    return Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]), **changes)


def draw(*shapes: tuple[int, ...]) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def test_the_largest_of_each_group_are_kept_and_of_equals_the_first() -> None:
    weight_IO = jnp.array([[1.0, -3.0], [-2.0, 3.0], [0.5, 3.0], [4.0, -3.0]])
    mask_IO = FORM.mask(weight_IO)
    assert mask_IO.tolist() == [[False, True], [True, True], [False, False], [True, False]]
    assert NOfM(1, 2).mask(weight_IO)[:, 0].tolist() == [False, True, False, True]


def block(ops: Any, weights: list[Array], x_BSD: Array, form: NOfM) -> Array:
    """Three column linears, two row linears of two dims and of one."""
    q, out, up, down = (WeightView(weight, form) for weight in weights)
    q_BSHh, up_BSF = ops.column_linear(x_BSD, [q, up], [("heads", "head_dim"), ("mlp",)])
    attended = ops.row_linear(jnp.tanh(q_BSHh), out, ("heads", "head_dim"))
    return attended + ops.row_linear(jnp.tanh(up_BSF), down, ("mlp",))


def test_blocks_are_kept_by_their_squares_or_by_their_places() -> None:
    weight_IO = jnp.array([[3.0, 0.0], [0.0, 2.0], [2.0, 0.5], [2.0, 0.5]])
    assert NOfM(1, 2, rows=2).mask(weight_IO)[:, 0].tolist() == [True, True, False, False]
    assert NOfM(1, 2, rows=2, columns=2).mask(weight_IO)[:, 1].tolist() == [
        True,
        True,
        False,
        False,
    ]
    cyclic = CyclicBlocks(1, 2, rows=1, columns=1)
    assert cyclic.mask(weight_IO).astype(int).tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    # what a fixed pattern leaves out is not trained
    np.testing.assert_array_equal(cyclic.pull(weight_IO) != 0, [[1, 0], [0, 1], [1, 0], [0, 1]])


FORMS = {
    "entries": FORM,
    "blocks": NOfM(1, 2, rows=2, columns=4),
    "cyclic": CyclicBlocks(1, 4, rows=1, columns=2),
}
MESHES = {"one": MeshSpec(), "data2.fsdp2.tensor2": MeshSpec(data=2, fsdp=2, tensor=2)}


@pytest.mark.parametrize("spec", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_linears_through_a_view_are_those_of_the_reference(form: str, spec: str) -> None:
    x_BSD, *weights = draw((B, S, D), (D, H, h), (H, h, D), (D, F), (F, D))
    plan = plan_on(MESHES[spec])

    def losses(ops: Any) -> tuple[Array, Any]:
        loss = lambda x, weights: jnp.sum(jnp.sin(block(ops, weights, x, FORMS[form])))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x_BSD, weights)

    got = losses(MeshOps(plan))
    want = losses(ReferenceOps(plan_on(MeshSpec())))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=0)
    # straight through, an entry that does not multiply has a gradient too
    share = float(jnp.mean(got[1][1][2] != 0))
    assert share == (0.25 if form == "cyclic" else 1.0)


def test_experts_through_a_view_are_those_of_the_reference() -> None:
    x_BSD, router, *weights = draw((B, S, D), (D, 4), (4, D, F), (4, D, F), (4, F, D))
    plan = plan_on(MeshSpec(expert=2, tensor=2))

    def losses(ops: Any) -> tuple[Array, Any]:
        def loss(weights: list[Array]) -> Array:
            views = [WeightView(weight, FORM) for weight in weights]
            return jnp.sum(jnp.square(ops.expert_mlp(ExpertsCall(x_BSD, router, *views, 2))[0]))

        return jax.jit(jax.value_and_grad(loss))(weights)

    got = losses(MeshOps(plan))
    want = losses(ReferenceOps(plan_on(MeshSpec())))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=0)


def test_a_group_that_would_lie_on_two_devices_is_refused() -> None:
    x_BSD, weight = draw((B, S, 12), (12, F))
    ops = MeshOps(plan_on(MeshSpec(fsdp=2)))
    with pytest.raises(UserError, match=r"units of 4 along embed, and a device has 6"):
        ops.column_linear(x_BSD, WeightView(weight, FORM), ("mlp",))
    # a head of 6 features on one device: groups would cross to the next head, which is elsewhere
    hidden, out = draw((B, S, 2, 6), (2, 6, 12))
    split = MeshOps(plan_on(MeshSpec(tensor=2)))
    with pytest.raises(UserError, match=r"along heads x head_dim, and a device has 6"):
        split.row_linear(hidden, WeightView(out, FORM), ("heads", "head_dim"))


def test_a_view_keeps_nothing_beside_the_stored_matrix_and_sends_nothing_more() -> None:
    """What the backward keeps of a linear is its input and the stored weight; the collectives are
    those of the dense one.
    """
    x_BSD, weight = draw((B, S, D), (D, F))
    ops = MeshOps(plan_on(MeshSpec(fsdp=2, tensor=2)))

    def residuals(weight_of: Any) -> list[tuple[int, ...]]:
        def kept(x: Array, weight: Array) -> Any:
            return jax.vjp(lambda *a: ops.column_linear(a[0], weight_of(a[1]), ("mlp",)), x, weight)

        shapes = jax.eval_shape(kept, x_BSD, weight)[1]
        return sorted(leaf.shape for leaf in jax.tree.leaves(shapes))

    assert residuals(lambda w: WeightView(w, FORM)) == residuals(lambda w: w)

    def collectives(weight_of: Any) -> list[str]:
        def loss(weight: Array) -> Array:
            return jnp.sum(ops.column_linear(x_BSD, weight_of(weight), ("mlp",)))

        text = str(jax.make_jaxpr(jax.grad(loss))(weight))
        return [
            word
            for word in ("all_gather", "psum", "reduce_scatter")
            for _ in range(text.count(word))
        ]

    assert collectives(lambda w: WeightView(w, FORM)) == collectives(lambda w: w)


@dataclass(frozen=True)
class Doubled(WeightForm):
    """A form of one's own."""

    unit: tuple[int, int] = (1, 1)
    name: str = "doubled"

    def read(self, weight_IO: Array) -> Array:
        return 2 * weight_IO


def test_a_form_of_ones_own_multiplies_and_has_no_reference() -> None:
    x_BSD, weight = draw((B, S, D), (D, F))
    plan = plan_on(MeshSpec(fsdp=2))
    got = MeshOps(plan).column_linear(x_BSD, WeightView(weight, Doubled()), ("mlp",))
    want = MeshOps(plan).column_linear(x_BSD, weight, ("mlp",))
    np.testing.assert_allclose(got, 2 * want, rtol=1e-6)
    with pytest.raises(UserError, match="no weights of form doubled"):
        ReferenceOps(plan).column_linear(x_BSD, WeightView(weight, Doubled()), ("mlp",))


@pytest.mark.slow
@pytest.mark.parametrize("form", [NOfM(1, 2, 128, 128), CyclicBlocks(1, 2, 128, 128)], ids=str)
def test_on_a_tpu_a_kernel_multiplies_without_the_blocks_of_zeros(
    form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is interpreted here: forward, and both gradients; float32 sums in another order."""
    maps = list[Any]()

    def interpreted(x: Array, weight: Array, blocks: Any, platform: str) -> Array:
        assert platform == "tpu"
        maps.append(blocks)
        return block_sparse.matmul(
            x, weight, blocks, implementation="pallas_tpu", platform=platform, interpret=True
        )

    x_BSD, up, down = draw((1, 8, 256), (256, 512), (512, 256))

    def losses() -> Any:
        ops = MeshOps(plan_on(MeshSpec()))

        def loss(x: Array, up: Array, down: Array) -> Array:
            hidden = ops.column_linear(x, WeightView(up, form), ("mlp",))
            return jnp.sum(jnp.square(ops.row_linear(hidden, WeightView(down, form), ("mlp",))))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x_BSD, up, down)

    want = losses()
    monkeypatch.setattr(zero_blocks, "platform_of", lambda layout: "tpu")
    fake = SimpleNamespace(matmul=interpreted)
    monkeypatch.setattr(zero_blocks, "block_sparse", fake)
    got = losses()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.max(jnp.abs(other))), rtol=0)
    assert len(maps) == 4 and all(np.mean(np.asarray(one)) == 0.5 for one in maps)
    # what places decide is known while tracing, so that the kernel has a list of just these tiles
    assert all(isinstance(one, np.ndarray) == (form.name[0] == "c") for one in maps)
