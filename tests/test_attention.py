"""`chunked` and `splash` against `whole`, and `whole` against the definition (tests/test_parallel.py has that one).

Tolerances are relative to the largest entry of the array compared.

float32: sums of at most a few hundred terms, taken in another order, and weights once more through exp: a few tens of
ulps (6e-8); 1e-5 leaves a factor of ten.

bfloat16 rounds by up to 2^-9. A value is a mean of values by rounded weights, and rounded itself: two roundings, 2^-8.
A gradient passes four (the output inside delta, the weights or their gradients, the gradient itself, for splash the
scaled queries): 2^-7.
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

import jaxpar.attention
import jaxpar.parallel
from jaxpar import plain
from jaxpar.attention import choose, chunked, kernel_cost, splash, whole
from jaxpar.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.parallel import attention, attention_choice
from jaxpar.sharding import Plan, ShardingRules

pytestmark = pytest.mark.quick

Tensors = tuple[jax.Array, ...]


def plan_on(spec: MeshSpec, **rules: Any) -> Plan:
    return Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]), ShardingRules(**rules))


def projections(B: int, S: int, H: int, K: int, h: int, dtype: str = "float32", seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((B, S, heads, h)), dtype) for heads in (H, K, K))


def documents(B: int, S: int) -> jax.Array:
    """Random documents of eight tokens on average; the first of a row may be one token long."""
    return jnp.asarray(np.cumsum(np.random.default_rng(1).random((B, S)) < 1 / 8, axis=1), jnp.int32)


def values_and_gradients(function: Callable[..., Any], args: Tensors) -> Tensors:
    """The output and the gradients of a random projection of it."""
    towards = jnp.asarray(np.random.default_rng(2).standard_normal(args[0].shape), jnp.float32)

    def projected(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*args)
        return jnp.sum(out.astype(jnp.float32) * towards), out

    argnums = tuple(range(len(args)))
    (_, out), gradients = jax.jit(jax.value_and_grad(projected, argnums, has_aux=True))(*args)
    return out, *gradients


def float32(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def assert_close(ours: Tensors, want: Tensors, tolerances: tuple[float, float] = (1e-5, 1e-5)) -> None:
    """Values within the first tolerance, gradients within the second."""
    for i, (a, b) in enumerate(zip(ours, want, strict=True)):
        assert a.shape == b.shape
        assert np.max(np.abs(float32(a) - float32(b))) <= tolerances[i > 0] * np.max(np.abs(float32(b)))


BFLOAT16 = (2**-8, 2**-7)


@pytest.mark.parametrize(
    ("S", "rows", "H", "K", "packed"),
    [
        pytest.param(37, 16, 4, 2, False, id="odd"),
        pytest.param(37, 16, 4, 2, True, id="odd-packed"),
        pytest.param(24, 8, 3, 3, True, id="no-groups-divides"),
        pytest.param(17, 16, 6, 1, False, id="one-kv-head-one-row-left"),
        pytest.param(16, 16, 4, 2, True, id="one-chunk"),
        pytest.param(13, 64, 4, 2, False, id="rows-beyond-the-sequence"),
        pytest.param(3, 1, 2, 1, False, id="a-row-at-a-time"),
    ],
)
def test_chunked_is_whole(S: int, rows: int, H: int, K: int, packed: bool) -> None:
    args, segments = projections(2, S, H, K, 7), documents(2, S) if packed else None
    ours = values_and_gradients(lambda q, k, v: chunked(q, k, v, segments, rows=rows), args)
    assert_close(ours, values_and_gradients(lambda q, k, v: whole(q, k, v, segments), args))


@pytest.mark.parametrize(("S", "rows", "sizes"), [(512, None, {512}), (1100, None, {512, 76}), (8192, None, {1024}),
                                                  (10, 4, {4, 2}), (5, 9, {5})])  # fmt: skip
def test_tiles_cover_what_each_row_sees_once(S: int, rows: int | None, sizes: set[int]) -> None:
    count_ST = np.zeros((S, S), np.int8)
    for chunk, tiles in jaxpar.attention._tiles(S, rows):
        sizes = sizes - {chunk.stop - chunk.start}
        for tile in tiles:
            own = chunk.stop - chunk.start
            count_ST[chunk, tile] += np.tril(np.ones((own, own), np.int8)) if tile == chunk else 1
    assert not sizes
    np.testing.assert_array_equal(count_ST, np.tril(np.ones((S, S), np.int8)))


def test_chunked_computes_half_the_scores_and_keeps_none() -> None:
    B, S, H, h = 1, 256, 2, 16
    args = projections(B, S, H, H, h)

    def flops(function: Callable[..., Any]) -> float:
        analysis: Any = jax.jit(function).lower(*args).compile().cost_analysis()
        return analysis["flops"]

    # Eight chunks: 8 x 9 / 2 of 64 tiles, and a few operations a score beside the 4 h of the matmuls.
    ratio = flops(partial(chunked, rows=32)) / flops(whole)
    assert 0.5 < ratio < 0.65
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(partial(chunked, rows=32), *args)[1], *args))
    assert max(math.prod(leaf.shape) for leaf in kept) <= B * S * H * h
    assert sum(math.prod(leaf.shape) for leaf in kept) <= 5 * B * S * H * h


def test_chunked_in_bfloat16_is_near_float32_on_the_same_inputs() -> None:
    args, segments = projections(2, 61, 4, 2, 7, "bfloat16"), documents(2, 61)
    ours = values_and_gradients(lambda q, k, v: chunked(q, k, v, segments, rows=40), args)
    assert {x.dtype for x in ours} == {jnp.dtype("bfloat16")}
    exact = tuple(x.astype(jnp.float32) for x in args)
    want = values_and_gradients(lambda q, k, v: whole(q, k, v, segments), exact)
    assert_close(ours, want, BFLOAT16)
    for a, b in zip(ours, want, strict=True):
        # No common factor: 1 / sqrt(7) rounded to bfloat16 would be one of 1.0025. Random roundings of a thousand
        # entries, each up to 2^-9, leave 2^-9 / 30.
        assert abs(np.vdot(float32(a), float32(b)) / np.vdot(float32(b), float32(b)) - 1) < 1e-3


RATE = 0.3


def test_dropout_of_chunked_has_the_gradient_of_its_own_forward() -> None:
    args, segments, key = projections(2, 21, 4, 2, 6), documents(2, 21), jax.random.key(3)
    forward = chunked.fun  # without the backward written by hand: differentiated by jax
    ours, want = (
        values_and_gradients(lambda q, k, v, f=f: f(q, k, v, segments, RATE, key, 11), args) for f in (chunked, forward)
    )
    assert_close(ours, want)


def test_dropout_of_chunked_depends_on_the_key_only() -> None:
    args = projections(2, 21, 4, 2, 6)
    drop = jax.jit(lambda key: chunked(*args, None, RATE, key, 11))
    first, second, again = (np.asarray(drop(jax.random.key(seed))) for seed in (3, 4, 3))
    np.testing.assert_array_equal(first, again)
    assert np.max(np.abs(first - second)) > 0.1


def test_dropout_of_chunked_draws_every_weight_on_its_own() -> None:
    S, rows, H = 48, 16, 8
    # Equal scores and one value per key: the output is the weights themselves.
    v = jnp.broadcast_to(jnp.eye(S)[None, :, None], (1, S, H, S))
    out = jax.jit(lambda key: chunked(jnp.zeros_like(v), jnp.zeros_like(v), v, None, RATE, key, rows))(
        jax.random.key(5)
    )
    out_HST, seen_ST = np.asarray(out[0]).swapaxes(0, 1), np.tril(np.ones((S, S), bool))
    assert not np.any(out_HST[:, ~seen_ST])
    kept_HST = out_HST > 0
    np.testing.assert_allclose(out_HST, kept_HST / (1 - RATE) / np.arange(1, S + 1)[:, None], rtol=1e-6)

    def assert_share(drawn: np.ndarray, share: float) -> None:
        assert abs(np.mean(drawn) - share) < 5 * math.sqrt(share * (1 - share) / drawn.size)

    assert_share(kept_HST[:, seen_ST], 1 - RATE)
    # Two heads, rows, keys, or chunks: they agree as often as what is independent.
    alike = RATE**2 + (1 - RATE) ** 2
    assert_share(kept_HST[1:, seen_ST] == kept_HST[:-1, seen_ST], alike)
    assert_share(kept_HST[:, rows + 1 :, :rows] == kept_HST[:, rows:-1, :rows], alike)
    assert_share(kept_HST[:, rows:, 1:rows] == kept_HST[:, rows:, : rows - 1], alike)
    assert_share(kept_HST[:, rows : 2 * rows, :rows] == kept_HST[:, 2 * rows :, :rows], alike)
    # The first bits of two chunks' draws, which one key for both would make the same.
    assert np.any(kept_HST[0, rows, :rows] != kept_HST[0, 2 * rows, :rows])


def test_dropout_of_chunked_keeps_the_mean() -> None:
    args, draws = projections(1, 12, 2, 1, 4), 400
    keys = jax.random.split(jax.random.key(6), draws)
    outs = np.asarray(jax.jit(jax.vmap(lambda key: chunked(*args, None, RATE, key, 6)))(keys))
    error = 5 * np.std(outs, axis=0) / math.sqrt(draws)
    assert np.all(np.abs(np.mean(outs, axis=0) - np.asarray(whole(*args))) < error)


SPLASH = [
    pytest.param(2, 256, 4, 2, "float32", True, id="packed"),
    pytest.param(1, 256, 4, 2, "bfloat16", True, id="bfloat16"),
    pytest.param(1, 384, 2, 1, "float32", False, id="blocks-of-128"),  # gcd(384, 1024)
    pytest.param(1, 1536, 1, 1, "float32", False, id="blocks-of-512"),
]


@pytest.mark.parametrize(("B", "S", "H", "K", "dtype", "packed"), SPLASH)
def test_splash_is_whole(B: int, S: int, H: int, K: int, dtype: str, packed: bool) -> None:
    args, segments = projections(B, S, H, K, 128, dtype), documents(B, S) if packed else None
    ours = values_and_gradients(lambda q, k, v: splash(q, k, v, segments, interpret=True), args)
    assert {x.dtype for x in ours} == {jnp.dtype(dtype)}
    exact = tuple(x.astype(jnp.float32) for x in args)
    want = values_and_gradients(lambda q, k, v: whole(q, k, v, segments), exact)
    assert_close(ours, want, BFLOAT16 if dtype == "bfloat16" else (1e-5, 1e-5))


CHOICES: list[tuple[tuple[Any, ...], str, str]] = [
    (("tpu", 8192, 128, False), "splash", ""),
    (("tpu", 128, 256, False), "splash", ""),
    (("gpu", 8192, 128, False), "chunked", "on gpu"),
    (("cpu", 512, 64, False), "whole", "on cpu"),
    (("cpu", 513, 64, False), "chunked", "on cpu"),
    (("tpu", 1024, 64, False), "chunked", "head_dim 64 is no multiple of 128"),
    (("tpu", 1000, 128, False), "chunked", "sequence length 1000 is no multiple of 128"),
    (("tpu", 100, 128, False), "whole", "sequence length 100 is no multiple of 128"),
    (("tpu", 1024, 128, True), "chunked", "dropout of attention weights"),
    (("tpu", 1024, 128, False, "split oddly"), "chunked", "split oddly"),
    (("gpu", 256, 64, True, "split oddly"), "whole", "split oddly"),
]


@pytest.mark.parametrize(("case", "name", "why"), CHOICES)
def test_the_choice_and_its_reason(case: tuple[Any, ...], name: str, why: str) -> None:
    assert choose(*case) == (name, why)


LAYOUTS: list[tuple[dict[str, int], dict[str, Any], tuple[str, str]]] = [
    ({"tensor": 8}, {}, ("chunked", "on cpu")),
    ({"context": 2, "tensor": 4}, {}, ("ring", "the sequence is split over devices")),
    ({"tensor": 8}, {"kv_heads": ()}, ("chunked", "on cpu")),  # column_linear copies them
    ({"fsdp": 2, "tensor": 4}, {"kv_heads": ("fsdp",)}, ("chunked", "kv heads are split otherwise than heads")),
    (
        {"tensor": 8},
        {"heads": (), "kv_heads": (), "attention_seq": ("tensor",)},
        ("ring", "the sequence is split over devices"),
    ),
    ({"fsdp": 8}, {"kv_heads": ()}, ("chunked", "on cpu")),
    ({"tensor": 8}, {"heads": (), "kv_heads": (), "head_dim": ("tensor",)}, ("chunked", "heads are split inside")),
]


@pytest.mark.parametrize(("mesh", "rules", "want"), LAYOUTS)
def test_the_choice_minds_how_the_plan_splits(mesh: dict[str, int], rules: Any, want: tuple[str, str]) -> None:
    assert attention_choice(plan_on(MeshSpec(**mesh), **rules), 1024, 128, False) == want


@pytest.mark.parametrize(
    ("name", "matmuls"), [("fwd_residuals.3", 2), ("dq_no_residuals", 3), ("dkv_no_residuals.1", 4)]
)
def test_the_flops_of_a_kernel_are_those_of_the_causal_half(name: str, matmuls: int) -> None:
    B, H, K, S, h = 2, 8, 4, 1024, 128
    shapes: list[tuple[int, ...]] = [(3, 4), (8, 1024), (B, H, S, h), (B, K, S, h), (B, K, S, h), (B, H, S)]
    assert kernel_cost(f"splash_mha_{name}", shapes) == matmuls * B * H * S * S * h
    assert kernel_cost(f"splash_mha_{name}", shapes[:2]) is None
    assert kernel_cost(f"ring_{name}", shapes) is None


PLANS = {
    "fsdp2.tensor4": (MeshSpec(fsdp=2, tensor=4), {}),
    "kv heads whole": (MeshSpec(fsdp=2, tensor=4), {"kv_heads": ()}),
    "heads split inside": (MeshSpec(tensor=2), {"heads": (), "kv_heads": (), "head_dim": ("tensor",)}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_chunked_on_a_mesh_is_whole_on_one_device(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, segments = projections(4, 20, 8, 4, 6), documents(4, 20)
    want = values_and_gradients(lambda q, k, v: whole(q, k, v, segments), args)
    monkeypatch.setattr(jaxpar.attention, "_ROWS", 12)
    spec, rules = PLANS[plan]
    on = plan_on(spec, **rules)
    assert attention_choice(on, 20, 6, False)[0] == "chunked"
    assert_close(values_and_gradients(lambda q, k, v: attention(q, k, v, on, segments), args), want)


def test_dropout_of_chunked_is_the_same_on_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpar.attention, "_ROWS", 12)
    args, key = projections(4, 20, 4, 4, 6), jax.random.key(7)
    one, many = (
        jax.jit(lambda q, k, v, plan=plan: attention(q, k, v, plan, None, RATE, key))(*args)
        for plan in (plan_on(MeshSpec()), plan_on(MeshSpec(fsdp=2, tensor=4)))
    )
    assert_close((many,), (one,))


@pytest.mark.parametrize(("packed", "rules"), [(False, {}), (True, {"kv_heads": ()})])  # copied kv heads lie likewise
def test_splash_on_a_mesh_is_whole_on_one_device(packed: bool, rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxpar.parallel, "choose", lambda *_: ("splash", ""))
    monkeypatch.setattr(jaxpar.parallel, "splash", partial(splash, interpret=True))
    args, segments = projections(2, 128, 4, 2, 128), documents(2, 128) if packed else None
    plan = plan_on(MeshSpec(fsdp=2, tensor=2), **rules)
    ours = values_and_gradients(lambda q, k, v: attention(q, k, v, plan, segments), args)
    assert_close(ours, values_and_gradients(lambda q, k, v: whole(q, k, v, segments), args))


@pytest.mark.parametrize("window", [2, 5, 13, 40])
def test_a_window_is_that_of_the_definition(window: int) -> None:
    """`plain.attention` is the definition; chunks of 7 rows cut the window in every way."""
    args, segments = projections(2, 33, 4, 2, 6), documents(2, 33)
    on = plan_on(MeshSpec())
    want = values_and_gradients(lambda *x: plain.attention(*x, on, segments, window=window), args)
    assert_close(values_and_gradients(lambda *x: whole(*x, segments, window=window), args), want)
    assert_close(values_and_gradients(lambda *x: chunked(*x, segments, rows=7, window=window), args), want)


def test_splash_takes_a_window() -> None:
    args = projections(1, 256, 2, 1, 128)
    found = values_and_gradients(lambda *x: splash(*x, window=100, interpret=True), args)
    assert_close(found, values_and_gradients(lambda *x: whole(*x, window=100), args))
