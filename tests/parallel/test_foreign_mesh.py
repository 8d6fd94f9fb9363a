"""The ops on a mesh whose axes are called otherwise than ours: values and gradients are those of
one device.

Tolerance: 1e-5 of the largest entry, as everywhere in tests/parallel: sums of float32 in another
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import parallel, verify
from jaxpar.kernels import masks
from jaxpar.parallel import pipeline
from jaxpar.parallel.zigzag import chunk_order, inverse, reorder

B = 4
S = 16
D = 16
H = 8
K = 4
h = 4
F = 32
V = 24
E = 4

MEGATRON = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model"}
LAYOUTS: dict[str, Any] = {
    "data x model": MEGATRON,
    "sequence over model": MEGATRON | {"residual_seq": "model"},
    "in pairs, and fsdp over both": [
        ("batch", ("data", "model")),
        ("embed", ("data", "model")),
    ],
}


@pytest.fixture(params=LAYOUTS, scope="module")
def layout(request: pytest.FixtureRequest) -> jaxpar.Layout:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    return jaxpar.Layout(mesh, LAYOUTS[request.param])


@pytest.fixture(scope="module")
def alone() -> jaxpar.Layout:
    return jaxpar.Layout(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal numbers, small enough that a chain of matmuls does not amplify rounding."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)
        for shape in shapes
    ]


def values_and_gradients(function: Callable[..., Any], args: list[jax.Array]) -> Any:
    """What a function returns, and the gradients of a sum in which no entry counts like another."""

    def scalar(args: list[jax.Array]) -> tuple[jax.Array, Any]:
        out = function(*args)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out)), out  # pyright: ignore[reportReturnType]

    return jax.jit(jax.grad(scalar, has_aux=True))(args)


def assert_same(
    op: Callable[..., Any], split: jaxpar.Layout, alone: jaxpar.Layout, *shapes: tuple[int, ...]
) -> None:
    args = arrays(*shapes)
    found = values_and_gradients(lambda *args: op(split, *args), args)
    wanted = values_and_gradients(lambda *args: op(alone, *args), args)
    for ours, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        difference = np.max(np.abs(np.asarray(ours) - np.asarray(one)))
        assert difference <= 1e-5 * np.max(np.abs(np.asarray(one)))


@pytest.mark.parametrize("form", ["xla", "ring", "bidirectional"])
def test_a_pair_of_linears(form: Any, layout: jaxpar.Layout, alone: jaxpar.Layout) -> None:
    def mlp(layout: jaxpar.Layout, x: Any, up: Any, down: Any) -> Any:
        hidden = parallel.column_linear(x, up, ("mlp",), layout, overlap=form)
        return parallel.row_linear(hidden, down, ("mlp",), layout, overlap=form)

    assert_same(mlp, layout, alone, (8, S, D), (D, F), (F, D))


def test_a_lookup_and_the_loss(layout: jaxpar.Layout, alone: jaxpar.Layout) -> None:
    ids = jnp.asarray(np.random.default_rng(1).integers(0, V, (8, S)), jnp.int32)

    def model(layout: jaxpar.Layout, table: Any, head: Any) -> Any:
        x = parallel.lookup(table, ids, "vocab", layout)
        sums = parallel.linear_cross_entropy(x, head, ids[:, ::-1], layout)
        return sums.loss / sums.tokens, parallel.logits(x, head, layout)

    assert_same(model, layout, alone, (V, D), (V, D))


def test_experts(alone: jaxpar.Layout) -> None:
    rules = MEGATRON | {"experts": "data", "embed": None}
    split = jaxpar.Layout(jax.make_mesh((2, 4), ("data", "model")), rules)

    def mixture(layout: jaxpar.Layout, *args: Any) -> Any:
        y, sums = parallel.expert_mlp(*args, layout, experts_per_token=2)
        return y, 0.3 * sums.balance + 0.2 * sums.z

    shapes = (B, S, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    assert_same(mixture, split, alone, *shapes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["heads", "ring", "ulysses"])
def test_attention(strategy: Any, alone: jaxpar.Layout) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    if strategy == "heads":
        split = jaxpar.Layout(mesh, {"heads": "model"})
        order = np.arange(S)
    else:
        split = jaxpar.Layout(mesh, {"seq": "model"})
        order = chunk_order(split, strategy)
    options = {} if strategy == "heads" else {"context": strategy}

    def attend(layout: jaxpar.Layout, q: Any, k: Any, v: Any) -> Any:
        mask = masks.Causal() & masks.Window(7)
        if layout is alone:
            return parallel.attention(q, k, v, mask, layout)
        moved = [reorder(x, order, 1) for x in (q, k, v)]
        out = parallel.attention(*moved, mask, layout, **options)
        return reorder(out, inverse(order), 1)

    assert_same(attend, split, alone, (B, S, H, h), (B, S, K, h), (B, S, K, h))


def test_kv_heads_that_the_mesh_does_not_divide_are_copied(alone: jaxpar.Layout) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    split = jaxpar.Layout(mesh, {"heads": "model", "kv_heads": None})

    def attend(layout: jaxpar.Layout, x: Any, q: Any, k: Any, out: Any) -> Any:
        axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
        queries, keys = parallel.column_linear(x, (q, k), axes, layout)
        mixed = parallel.attention(queries, keys, keys, masks.Causal(), layout)
        return parallel.row_linear(mixed, out, ("heads", "head_dim"), layout)

    assert_same(attend, split, alone, (B, S, D), (D, H, h), (D, 2, h), (H, h, D))


def test_a_pipeline_whose_stages_are_a_mesh_axis_of_another_name(alone: jaxpar.Layout) -> None:
    mesh = jax.make_mesh((2, 4), ("pipe", "rows"))
    layout = jaxpar.Layout(mesh, {"stage": "pipe", "batch": "rows"})
    axes = {"table": ("vocab", "embed"), "blocks": {"w": ("layers", "embed", "mlp")}}
    table, w = arrays((V, D), (4, D, D))
    params = {"table": table, "blocks": {"w": w}}
    ids = np.random.default_rng(2).integers(0, V, (16, S))
    batch = {"tokens": jnp.asarray(ids), "labels": jnp.asarray(ids[:, ::-1])}

    def functions(layout: jaxpar.Layout) -> tuple[Callable[..., Any], ...]:
        def embed(params: Any, tokens: Any, positions: Any) -> Any:
            return parallel.lookup(params["table"], tokens, "vocab", layout)

        def block(layer: Any, x: Any, positions: Any) -> Any:
            return x + jnp.tanh(x @ layer["w"])

        def score(params: Any, x: Any, labels: Any) -> Any:
            return parallel.linear_cross_entropy(x, params["table"], labels, layout).loss

        return embed, block, score

    def plain(params: Any, batch: Any) -> Any:
        embed, block, score = functions(alone)
        x = embed(params, batch["tokens"], None)
        for layer in params["blocks"]["w"]:
            x = block({"w": layer}, x, None)
        return score(params, x, batch["labels"]) / batch["labels"].size

    step = pipeline.value_and_grad(*functions(layout), axes=axes, layout=layout, microbatches=4)
    places = layout.sharding(axes, params), layout.sharding(("batch", None))
    assert not verify.gradients(step, plain, params, batch, places).wrong


def test_verify_names_the_mesh_axis_of_a_mistake_on_a_foreign_mesh() -> None:
    """A gradient that is summed over no axis is wrong, and its place is told in the mesh's own
    words.
    """
    layout = jaxpar.Layout(jax.make_mesh((2, 4), ("rows", "model")), {"batch": "rows"})
    (w, x) = arrays((D, F), (B, D))
    x_spec = layout.spec(("batch", None))

    def right(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    def wrong(w: Any, x: Any) -> Any:
        def local(w: Any, x: Any) -> Any:
            value, grad = jax.value_and_grad(right)(w, x)
            return jax.lax.psum(value, "rows"), grad

        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(whole, x_spec),
            out_specs=(whole, whole),
            check_vma=False,
        )(w, x)

    places = layout.sharding((None, None)), layout.sharding(("batch", None))
    verdict = verify.gradients(wrong, right, w, x, places)
    assert verdict.wrong
    assert "rows" in str(verdict)


def test_a_table_of_placements_is_in_the_meshs_own_words() -> None:
    layout = jaxpar.Layout(jax.make_mesh((2, 4), ("data", "model")), MEGATRON)
    shapes = {"up": jax.ShapeDtypeStruct((D, F), jnp.float32)}
    (row,) = jaxpar.placements(shapes, {"up": ("embed", "mlp")}, layout)
    assert row.spec == jax.sharding.PartitionSpec("data", "model")
    assert row.bytes_per_device == row.bytes // 8


def test_a_context_mesh_of_explicit_axes_is_refused_and_an_automatic_one_is_taken() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    layout = jaxpar.Layout(mesh, {"mlp": "model"})
    (x, w) = arrays((B, S, D), (D, F))

    def up(x: Any, w: Any) -> Any:
        return parallel.column_linear(x, w, ("mlp",), layout)

    with jax.set_mesh(layout.mesh):
        assert jax.jit(up)(x, w).sharding.spec == layout.spec(("batch", "seq", "mlp"))
    with (
        jax.set_mesh(mesh),
        pytest.raises(jaxpar.UserError, match=r"Explicit axes \(data, model\).*set layout.mesh"),
    ):
        jax.jit(up)(x, w)
