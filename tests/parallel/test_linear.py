"""Every parallel op against the same mathematics in plain numpy-style jax: values and gradients, on
several meshes.

Tolerance: float32 sums of at most a few hundred terms of size one, taken in another order, differ
by a few ulps of the sum: 1e-5 relative to the largest entry leaves a factor of ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from tiers import some

from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.kernels.masks import Causal
from jaxpar.parallel import dropout
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import AttentionCall, LogitsCall
from jaxpar.parallel.zigzag import chunk_order, inverse, reorder

MESHES = {
    "one": MeshSpec(),
    "data2.fsdp2.tensor2": MeshSpec(data=2, fsdp=2, tensor=2),
    "fsdp2.context2.tensor2": MeshSpec(fsdp=2, context=2, tensor=2),
    "tensor8": MeshSpec(tensor=8),
}
B = 4
S = 16
D = 24
H = 16
K = 8
h = 6
F = 40
V = 56


def plan_on(spec: MeshSpec, **changes: Any) -> Plan:
    return Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]), **changes)


@pytest.fixture(params=MESHES, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_on(MESHES[request.param])


def arrays(
    *shapes: tuple[int, ...],
    seed: int = 0,
) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def assert_same(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    args: list[jax.Array],
    tolerance: float = 1e-5,
) -> None:
    """Values, and the gradients of a random projection of them with respect to every argument."""
    rng = np.random.default_rng(1)
    weights = jax.tree.map(
        lambda y: jnp.asarray(rng.standard_normal(y.shape), jnp.float32),
        jax.eval_shape(reference, *args),
    )

    def projected(function: Callable[..., Any]) -> Callable[..., Any]:
        def scalar(args: list[jax.Array]) -> tuple[jax.Array, Any]:
            y = function(*args)
            return sum(
                jnp.sum(a * b)
                for a, b in zip(
                    jax.tree.leaves(y),
                    jax.tree.leaves(weights),
                    strict=True,
                )
            ), y

        return jax.jit(jax.value_and_grad(scalar, has_aux=True))

    (_, ours_y), ours_grads = projected(ours)(args)
    (_, want_y), want_grads = projected(reference)(args)
    for a, b in zip(
        jax.tree.leaves((ours_y, ours_grads)), jax.tree.leaves((want_y, want_grads)), strict=True
    ):
        assert a.shape == b.shape
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance * np.max(
            np.abs(np.asarray(b))
        )


def test_column_linear_shares_one_gather_between_weights_with_and_without_bias(plan: Plan) -> None:
    args = arrays(
        (B, S, D),
        (D, H, h),
        (D, F),
        (H, h),
    )
    axes = (("heads", "head_dim"), ("mlp",))
    assert_same(
        lambda x, q, up, bias: MeshOps(plan).column_linear(
            x,
            (q, up),
            axes,
            (bias, None),
        ),
        lambda x, q, up, bias: (
            jnp.einsum("bsd,dhk->bshk", x, q) + bias,
            x @ up,
        ),
        args,
    )


def test_row_linear_adds_its_bias_once(plan: Plan) -> None:
    args = arrays(
        (B, S, H, h),
        (H, h, D),
        (D,),
    )
    assert_same(
        lambda x, w, bias: MeshOps(plan).row_linear(
            x,
            w,
            ("heads", "head_dim"),
            bias,
        ),
        lambda x, w, bias: jnp.einsum("bshk,hkd->bsd", x, w) + bias,
        args,
    )


def test_weight_gradients_contracted_as_on_a_tpu_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxpar.parallel.linear.pieces.platform_of", lambda plan: "tpu")
    # two sequences a device
    plan = plan_on(MESHES["fsdp2.context2.tensor2"])
    heads = ("heads", "head_dim")
    assert_same(
        lambda x, q, out: MeshOps(plan).row_linear(
            MeshOps(plan).column_linear(x, (q,), (heads,))[0], out, heads
        ),
        lambda x, q, out: jnp.einsum("bsd,dhk,hke->bse", x, q, out),
        arrays(
            (B, S, D),
            (D, H, h),
            (H, h, D),
        ),
    )


@pytest.mark.parametrize("axis", ["vocab", None])
def test_lookup_finds_rows_and_sums_repeated_ones_in_the_gradient(plan: Plan, axis: Any) -> None:
    ids = (
        jnp.asarray(np.random.default_rng(2).integers(0, V, (B, S)), jnp.int32).at[0, :5].set(V - 1)
    )
    assert_same(
        lambda table: MeshOps(plan).lookup(table, ids, axis),
        lambda table: table[ids],
        arrays((V, D)),
    )


def reference_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1])
    visible = jnp.arange(q.shape[1])[:, None] >= jnp.arange(q.shape[1])
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    return jnp.einsum(
        "bhst,bthk->bshk", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1), v
    )


@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_causal_grouped_and_keeps_documents_apart(plan: Plan, packed: bool) -> None:
    if packed:
        segments = jnp.cumsum(
            jnp.asarray(np.random.default_rng(3).random((B, S)) < 0.2, jnp.int32), axis=1
        )
    else:
        segments = None
    order = chunk_order(plan, "ring")

    def ours(*args: jax.Array) -> jax.Array:
        if segments is None:
            documents = None
        else:
            documents = reorder(segments, order, 1)
        out = MeshOps(plan).attention(
            AttentionCall(*(reorder(x, order, 1) for x in args[:3]), Causal(), documents)
        )
        return reorder(out, inverse(order), 1)

    assert_same(
        ours,
        lambda q, k, v: reference_attention(q, k, v, segments),
        arrays(
            (B, S, H, h),
            (B, S, K, h),
            (B, S, K, h),
        ),
    )


# More devices than heads. Kv heads are copied: twelve heads over four devices need the six kv heads
# twice, and two axes may split heads of which the first splits kv heads too.

COPIED = {
    "tensor8": (MeshSpec(tensor=8), ShardingRules(kv_heads=()), 8, 2),
    "data2.tensor4": (
        MeshSpec(data=2, tensor=4),
        ShardingRules(kv_heads=()),
        12,
        6,
    ),
    "fsdp2.context2.tensor2": (
        MeshSpec(fsdp=2, context=2, tensor=2),
        ShardingRules(kv_heads=()),
        4,
        1,
    ),
    "expert2.tensor4": (
        MeshSpec(expert=2, tensor=4),
        ShardingRules(
            batch=("data",),
            heads=("expert", "tensor"),
            kv_heads=("expert",),
        ),
        8,
        2,
    ),
    "fsdp2.data2.tensor2, zero-1": (
        MeshSpec(fsdp=2, data=2, tensor=2),
        ShardingRules(kv_heads=(), state_embed=("fsdp", "data")),
        2,
        1,
    ),
}


def attended(
    plan: Plan, x: Array, q: Array, k: Array, v: Array, q_bias: Array, v_bias: Array, out: Array
) -> Array:
    heads = ("heads", "head_dim")
    kv_heads = ("kv_heads", "head_dim")
    seq = "attention_seq"
    segments = jnp.cumsum(
        jnp.arange(S)[None] % jnp.asarray([[5], [7], [9], [16]]) == 0,
        axis=1,
    )
    order = chunk_order(plan, "ring")
    x = reorder(x, order, 1)
    segments = reorder(segments, order, 1)
    projections = MeshOps(plan).column_linear(
        x, (q, k, v), (heads, kv_heads, kv_heads), (q_bias, None, v_bias), seq
    )
    y = MeshOps(plan).row_linear(
        MeshOps(plan).attention(AttentionCall(*projections, Causal(), segments)),
        out,
        heads,
        seq=seq,
    )
    return reorder(y, inverse(order), 1)


@pytest.mark.parametrize("name", some(COPIED, 6))
def test_kv_heads_are_copied_where_more_devices_split_heads(name: str) -> None:
    mesh, rules, heads, kv_heads = COPIED[name]
    kv = (D, kv_heads, h)
    args = arrays(
        (B, S, D),
        (D, heads, h),
        kv,
        kv,
        (heads, h),
        kv[1:],
        (heads, h, D),
    )
    plan = plan_on(mesh, rules=rules)
    assert_same(partial(attended, plan), partial(attended, plan_on(MeshSpec())), args)
    project = jax.jit(
        lambda x, v, bias: MeshOps(plan).column_linear(
            x,
            (v,),
            (("kv_heads", "head_dim"),),
            (bias,),
        )
    )
    (v_BSKh,) = project(args[0], args[3], args[5])
    want = jnp.einsum("bsd,dhk->bshk", args[0], args[3]) + args[5]
    assert v_BSKh.shape[2] == math.lcm(kv_heads, plan.size("heads"))
    assert v_BSKh.sharding.is_equivalent_to(plan.sharding(("batch", "seq", "heads")), 4)
    np.testing.assert_allclose(
        v_BSKh, jnp.repeat(want, v_BSKh.shape[2] // kv_heads, axis=2), rtol=1e-5, atol=1e-5
    )


SPLIT = {
    "tensor8": (MeshSpec(tensor=8), 4, 2),
    "data2.tensor4": (MeshSpec(data=2, tensor=4), 6, 6),
    "fsdp2.context2.tensor2": (MeshSpec(fsdp=2, context=2, tensor=2), 5, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(SPLIT, 2))
def test_attention_is_split_over_the_sequence_where_heads_do_not_divide(name: str) -> None:
    mesh, heads, kv_heads = SPLIT[name]
    sizes = plan_on(mesh).mesh.shape
    plan = plan_on(mesh, rules=fit_rules(ShardingRules(), heads, kv_heads, sizes)[0])
    kv = (D, kv_heads, h)
    args = arrays(
        (B, S, D),
        (D, heads, h),
        kv,
        kv,
        (heads, h),
        kv[1:],
        (heads, h, D),
    )
    assert_same(partial(attended, plan), partial(attended, plan_on(MeshSpec())), args)
    assert plan.size("attention_seq") == plan.size("residual_seq") == 8 // plan.size("batch")


def test_weight_gradients_are_summed_in_float32_under_bfloat16_compute(plan: Plan) -> None:
    plan = Plan(plan.mesh, compute="bfloat16")
    x, weight = arrays((B, S, D), (D, F))
    # Products of small whole numbers: exact in bfloat16, while their sum over the tokens (about
    # 2^10) is not.
    x = jnp.round(2 * x)
    dy = jnp.round(3 * arrays((B, S, F), seed=5)[0])
    x = x.at[..., 0].set(7)
    dy = dy.at[..., 0].set(9).at[0, 0, 0].set(8)

    def project(weight: jax.Array) -> jax.Array:
        return MeshOps(plan).column_linear(x.astype(jnp.bfloat16), (weight,), (("mlp",),))[0]

    dweight = jax.jit(lambda weight, dy: jax.vjp(project, weight)[1](dy)[0])(
        weight, dy.astype(jnp.bfloat16)
    )
    assert dweight.dtype == jnp.float32
    np.testing.assert_array_equal(dweight, jnp.einsum("bsd,bsf->df", x, dy))
    assert dweight[0, 0] != dweight[0, 0].astype(jnp.bfloat16).astype(jnp.float32)


def test_logits_of_padded_entries_never_win() -> None:
    x, table = arrays((1, 3, D), (V, D))
    scores = MeshOps(plan_on(MeshSpec())).logits(LogitsCall(x, table, 50))
    assert np.all(np.asarray(scores[..., 50:]) < -1e29)
    np.testing.assert_array_equal(
        np.argmax(scores, -1),
        np.argmax(scores[..., :50], -1),
    )


def test_dropout_keeps_the_mean_and_is_the_same_on_every_mesh() -> None:
    key = jax.random.key(0)
    x = jnp.ones((64, 32, 16))
    outs = []
    for spec in MESHES.values():
        plan = plan_on(spec)
        x_here = jax.device_put(x, plan.sharding(("batch", "seq", None)))
        outs.append(np.asarray(jax.jit(lambda x: dropout(x, 0.25, key))(x_here)))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    assert set(np.unique(outs[0])) == {0.0, np.float32(1 / 0.75)}
    assert abs(outs[0].mean() - 1) < 5 * math.sqrt(0.25 / 0.75 / x.size)  # five standard errors
    assert dropout(x, 0.25, None) is x


def test_a_sequence_kept_whole_between_ops_gives_the_same() -> None:
    rules = ShardingRules(residual_seq=("context",))
    plan = plan_on(MeshSpec(fsdp=2, tensor=4), rules=rules)
    # 7 tokens: no mesh axis divides them, and none needs to
    args = arrays((B, 7, D), (D, F), (F, D))
    assert_same(
        lambda x, up, down: MeshOps(plan).row_linear(
            MeshOps(plan).column_linear(x, (up,), (("mlp",),))[0], down, ("mlp",)
        ),
        lambda x, up, down: x @ up @ down,
        args,
    )
