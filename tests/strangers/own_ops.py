"""A stranger's own MLP, attention, experts and loss from the library's ops, each beside plain JAX.

Every function takes a layout: of one device, it is plain mathematics; of many, the same answer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar
from jaxpar import parallel
from jaxpar.kernels import masks

B = 4
S = 16
D = 24
F = 40
H = 4
K = 2
h = 6
V = 32
E = 4
HEADS = ("heads", "head_dim")


def arrays(**shapes):
    """Random ones, by name."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.standard_normal(shape) / 3, jnp.float32)
        for name, shape in shapes.items()
    }


def mlp(layout, overlap="xla"):
    """Gate and up share one gather of x; down's sum is scattered."""

    def apply(x, gate, up, down):
        gated, raised = parallel.column_linear(
            x, (gate, up), (("mlp",), ("mlp",)), layout, overlap=overlap
        )
        return parallel.row_linear(
            jax.nn.silu(gated) * raised, down, ("mlp",), layout, overlap=overlap
        )

    return apply, arrays(
        x=(B, S, D),
        gate=(D, F),
        up=(D, F),
        down=(F, D),
    )


def plain_mlp(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def attention_block(layout, context="ring"):
    """Projections, attention in a sliding window over packed documents, and the output's
    projection.

    Where the sequence is split the tokens stand `in_order`: a batch is put into it once, before the
    first layer.
    """

    def apply(x, q, k, v, out):
        documents = jnp.broadcast_to(jnp.arange(S) // 7, (B, S))
        batch = parallel.in_order({"tokens": documents}, layout, context)
        documents = batch["tokens"]
        places = batch["positions"]
        x = jnp.take_along_axis(x, places[..., None], axis=1)
        axes = HEADS, ("kv_heads", "head_dim"), ("kv_heads", "head_dim")
        q, k, v = parallel.column_linear(
            x,
            (q, k, v),
            axes,
            layout,
            seq="attention_seq",
        )
        mask = masks.Causal() & masks.Window(8) & masks.Segments(documents, documents)
        mixed = parallel.attention(q, k, v, mask, layout, context=context)
        y = parallel.row_linear(mixed, out, HEADS, layout, seq="attention_seq")
        return parallel.in_natural_order(y, layout, context)

    return apply, arrays(
        x=(B, S, D),
        q=(D, H, h),
        k=(D, K, h),
        v=(D, K, h),
        out=(H, h, D),
    )


def plain_attention(x, q, k, v, out):
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", x, weight) for weight in (q, k, v))
    k, v = (jnp.repeat(part, H // K, axis=2) for part in (k, v))
    i = jnp.arange(S)[:, None]
    j = jnp.arange(S)
    seen = (j <= i) & (i - j <= 8) & (i // 7 == j // 7)
    scores = jnp.where(
        seen,
        jnp.einsum("bsnh,btnh->bnst", q, k) / h**0.5,
        -jnp.inf,
    )
    return jnp.einsum("bnst,btnh,nhd->bsd", jax.nn.softmax(scores), v, out)


def attention_alone():
    """On one device, inside any jitted function: no layout."""

    def apply(q, k, v):
        return parallel.attention(q, k, v, masks.Causal() & masks.Window(8))

    return apply, arrays(
        q=(B, S, H, h),
        k=(B, S, K, h),
        v=(B, S, K, h),
    )


def plain_attention_alone(q, k, v):
    k, v = (jnp.repeat(part, H // K, axis=2) for part in (k, v))
    i = jnp.arange(S)[:, None]
    j = jnp.arange(S)
    scores = jnp.where(
        (j <= i) & (i - j <= 8), jnp.einsum("bsnh,btnh->bnst", q, k) / h**0.5, -jnp.inf
    )
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v)


def loss(layout):
    """Mean cross-entropy, with no array of all scores."""

    def apply(x, head):
        labels = jnp.arange(B * S).reshape(B, S) % V
        sums = parallel.linear_cross_entropy(x, head, labels, layout)
        return sums.loss / sums.tokens

    return apply, arrays(x=(B, S, D), head=(V, D))


def plain_loss(x, head):
    scores = x @ head.T
    labels = jnp.arange(B * S).reshape(B, S) % V
    return -jnp.mean(
        jnp.take_along_axis(
            jax.nn.log_softmax(scores),
            labels[..., None],
            axis=-1,
        )
    )


def experts(layout):
    """Two of four experts a token; each device has some of them."""

    def apply(x, router, gate, up, down):
        return parallel.expert_mlp(x, router, gate, up, down, layout, experts_per_token=2)[0]

    return apply, arrays(
        x=(B, S, D),
        router=(D, E),
        gate=(E, D, F),
        up=(E, D, F),
        down=(E, F, D),
    )


def plain_experts(x, router, gate, up, down):
    shares = jax.nn.softmax(x @ router)
    kept = shares * (shares >= jax.lax.top_k(shares, 2)[0][..., -1:])
    answers = jnp.einsum(
        "bsef,efd->bsed",
        jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up),
        down,
    )
    return jnp.einsum("bse,bsed->bsd", kept / kept.sum(-1, keepdims=True), answers)


def worst_error(op, given, plain):
    """Of the answer and of every gradient, relative to the largest entry."""

    def answer(function):
        def scalar(given):
            y = function(**given)
            return jnp.sum(jnp.sin(y)), y

        (_, y), grads = jax.jit(jax.value_and_grad(scalar, has_aux=True))(given)
        return {"y": y, **grads}

    got = answer(op)
    want = answer(plain)
    return max(
        float(jnp.max(jnp.abs(got[name] - want[name])) / jnp.max(jnp.abs(want[name])))
        for name in want
    )


if __name__ == "__main__":
    ours = jaxpar.Layout(jaxpar.make_mesh(fsdp=2, tensor=4))
    for form in ("xla", "ring", "bidirectional"):
        print(f"MLP, {form}: {worst_error(*mlp(ours, form), plain_mlp):.1e}")
    split = jaxpar.Layout(jaxpar.make_mesh(data=2, context=4))
    for strategy in ("ring", "ulysses"):
        print(
            f"attention, {strategy}: "
            f"{worst_error(*attention_block(split, strategy), plain_attention):.1e}"
        )
    print(f"loss: {worst_error(*loss(ours), plain_loss):.1e}")
    print(
        f"experts: {worst_error(*experts(jaxpar.Layout(jaxpar.make_mesh(expert=4, tensor=2))), plain_experts):.1e}"
    )
