"""Attention as it is called: which implementation serves, the libraries', gradients of all that
comes out, and plans.

`kernels.attention.call.reference` is what they are held against (tests/kernels/attention/test_reference.py
has it against the definition); tolerances are those of tests/attention_cases.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import EVERY_MASK, Answer, Case, answer, assert_right, inputs

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Context, Overlap, Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.hlo.origin import decode
from jaxpar.kernels.attention import chunked, dispatch, libraries
from jaxpar.kernels.attention.call import DEFAULT, Call, Unserved, reference
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.attention.libraries import kernel_cost
from jaxpar.kernels.masks import Causal, First, Full, Mask, Segments, Window, bigbird
from jaxpar.models.masks import layer_masks
from jaxpar.parallel import choose_attention
from jaxpar.parallel.context import kernel_for
from jaxpar.parallel.domino import Places
from jaxpar.parallel.mesh_ops import MeshOps, split_of
from jaxpar.parallel.ops import AttentionCall, Ops
from jaxpar.parallel.sequence_halves import attend_in_first_half, run_parts
from jaxpar.verify.reference_ops import ReferenceOps

Tensors = tuple[jax.Array, ...]
RATE = 0.3


def plan_on(spec: MeshSpec, **rules: Any) -> Plan:
    return Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]),
        ShardingRules(**rules),
    )


def projections(
    B: int, S: int, H: int, K: int, h: int, dtype: str = "float32", seed: int = 0
) -> Tensors:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((B, S, heads, h)), dtype) for heads in (H, K, K))


def documents(B: int, S: int) -> jax.Array:
    """Random documents of eight tokens on average; the first of a row may be one token long."""
    return jnp.asarray(
        np.cumsum(np.random.default_rng(1).random((B, S)) < 1 / 8, axis=1), jnp.int32
    )


def values_and_gradients(function: Callable[..., Any], args: Tensors) -> Tensors:
    """The output and the gradients of a random projection of it."""
    towards = jnp.asarray(
        np.random.default_rng(2).standard_normal(args[0].shape),
        jnp.float32,
    )

    def projected(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(*args)
        return jnp.sum(out.astype(jnp.float32) * towards), out

    argnums = tuple(range(len(args)))
    (_, out), gradients = jax.jit(jax.value_and_grad(projected, argnums, has_aux=True))(*args)
    return out, *gradients


def assert_close(found: Tensors, want: Tensors, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(found, want, strict=True):
        ours = np.asarray(ours, np.float64)
        theirs = np.asarray(theirs, np.float64)
        assert np.max(np.abs(ours - theirs)) <= tolerance * np.max(np.abs(theirs))


def of(mask: Mask, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: dispatch.attention(q, k, v, mask, **options)[0]


def by_reference(mask: Mask, call: Call | None = None) -> Callable[..., Any]:
    return lambda q, k, v: reference(q, k, v, mask, call or Call())[0]


# What comes out has gradients.


@pytest.mark.parametrize("name", ["chunked", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        EVERY_MASK[0],
        EVERY_MASK[3],
        EVERY_MASK[9],
        Case("unsorted", H=4, softcap=3.0),
    ],
    ids=str,
)
def test_out_and_lse_have_gradients(case: Case, name: str) -> None:
    given = inputs(case)

    @jax.jit
    def found() -> Answer:
        def projected(q: Any, k: Any, v: Any) -> Any:
            out, lse = dispatch.attention(
                q, k, v, given.mask, softcap=case.softcap, implementation=name
            )
            return jnp.sum(out * given.dout) + jnp.sum(lse * given.dlse), (
                out,
                lse,
            )

        gradients, (out, lse) = jax.grad(projected, (0, 1, 2), has_aux=True)(
            given.q, given.k, given.v
        )
        return Answer(out, lse, *gradients)

    with chunked.tiles_at_most(chunked.TileSize(24, 24)):
        ours = found()
    assert_right(ours, answer(case, given), case.dtype)


def test_the_scale_may_be_another() -> None:
    args = projections(1, 40, 2, 1, 8)
    ours = values_and_gradients(of(Causal(), scale=0.7, implementation="chunked"), args)
    assert_close(ours, values_and_gradients(by_reference(Causal(), Call(scale=0.7)), args))


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Causal() & Window(5)],
    ids=str,
)
def test_cudnn_is_asked_for_the_mask_that_was_given(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is the library's; here XLA answers it, in float32 and over another order of sums."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *x, **how: plain(*x, **how | {"implementation": "xla"}),
    )
    q, k, v = projections(1, 24, 2, 1, 8)
    call = Call(scale=0.7)
    np.testing.assert_allclose(
        libraries.cudnn(q, k, v, mask, call),
        reference(q, k, v, mask, call)[0],
        rtol=1e-5,
        atol=1e-5,
    )


# Which one serves.


def request(
    seq_len: int, head_dim: int, mask: Mask, dtype: str = "bfloat16", **options: Any
) -> AttentionRequest:
    one = jax.ShapeDtypeStruct((1, seq_len, 1, head_dim), jnp.dtype(dtype))
    return AttentionRequest(
        one,
        one,
        mask,
        Call(),
        **{"with_lse": False, **options},
    )


IDS = Segments(*[jnp.zeros((1, 1024), jnp.int32)] * 2)
SHAPES: Any = Segments(*[jax.ShapeDtypeStruct((1, 1024), jnp.int32)] * 2)  # pyright: ignore[reportArgumentType]
DROPS = "dropout of attention weights"
CHOICES: list[tuple[str, AttentionRequest, str, str]] = [
    ("tpu", request(8192, 128, Causal()), "splash", ""),
    (
        "tpu",
        request(1024, 256, Causal() & Window(100) & IDS),
        "splash",
        "",
    ),
    ("tpu", request(1024, 64, Causal()), "pallas_tpu", "splash: head_dim 64 is no multiple of 128"),
    (
        "tpu",
        request(1000, 128, Causal()),
        "pallas_tpu",
        "splash: sequence length 1000 is no multiple of 128",
    ),
    ("tpu", request(1024, 128, First(9)), "pallas_tpu", "splash: no mask like First(n=9)"),
    (
        "tpu",
        request(1024, 128, Causal(), with_lse=True),
        "pallas_tpu",
        "splash: no log-sum-exp that has a gradient",
    ),
    (
        "tpu",
        request(1024, 128, Causal(), dropping=True),
        "chunked",
        f"splash: {DROPS}; pallas_tpu: {DROPS}",
    ),
    (
        "tpu",
        request(1024, 128, Causal(), cut="split oddly"),
        "chunked",
        "splash: split oddly; pallas_tpu: split oddly",
    ),
    (
        "tpu",
        request(1024, 320, Causal()),
        "chunked",
        "splash: head_dim 320 is no multiple of 128; pallas_tpu: head_dim 320 is more than 256",
    ),
    (
        "tpu",
        request(1 << 20, 64, Causal()),
        "chunked",
        "splash: head_dim 64 is no multiple of 128; pallas_tpu: 524800 tiles to visit are more "
        "than SMEM holds",
    ),
    (
        "tpu",
        request(1 << 20, 64, Causal() & Window(4095)),
        "pallas_tpu",
        "splash: head_dim 64 is no multiple of 128",
    ),
    ("gpu", request(8192, 128, Causal()), "cudnn", ""),
    ("gpu", request(8192, 64, Causal() & Window(1023)), "cudnn", ""),
    ("gpu", request(8192, 64, Full()), "cudnn", ""),
    ("gpu", request(1024, 64, Causal() & IDS), "pallas_gpu", "cudnn: documents"),
    (
        "gpu",
        request(1024, 64, Causal() & First(9) & IDS),
        "pallas_gpu",
        "cudnn: no mask like Causal(offset=0) & First(n=9) of each document & Segments((1, "
        "1024), (1, 1024))",
    ),
    (
        "gpu",
        request(1024, 64, bigbird(64, causal=True) & SHAPES),
        "chunked",
        "cudnn: no mask like BlockSparse(1 x 1 blocks of 64 x 64, 100% seen) of each document & "
        "Segments((1, 1024), "
        "(1, 1024)); pallas_gpu: blocks are laid on each document, which begins anywhere in a tile",
    ),
    (
        "gpu",
        request(1024, 64, Window(3, 3)),
        "pallas_gpu",
        "cudnn: no mask like Window(left=3, right=3)",
    ),
    (
        "gpu",
        request(1024, 256, Causal()),
        "pallas_gpu",
        "cudnn: head_dim 256 is no multiple of 8 up to 128",
    ),
    ("gpu", request(1024, 64, Causal(), "float32"), "pallas_gpu", "cudnn: float32"),
    (
        "gpu",
        request(1024, 64, Causal(), dropping=True),
        "chunked",
        f"cudnn: {DROPS}; pallas_gpu: {DROPS}",
    ),
    ("cpu", request(512, 64, Causal()), "chunked", ""),
    ("cpu", request(513, 64, bigbird(513)), "chunked", ""),
]


@pytest.mark.parametrize(("platform", "case", "name", "why"), CHOICES)
def test_the_choice_and_its_reason(
    platform: str,
    case: AttentionRequest,
    name: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "has_cudnn", lambda: True)
    assert dispatch.choose(case, platform) == (name, why)


def test_the_log_says_what_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dispatch.say_once.cache_clear()
    for _ in range(2):
        dispatch.choose(request(1000, 128, Causal()), "tpu")
    assert caplog.messages == [
        "attention by pallas_tpu (splash: sequence length 1000 is no multiple of 128)"
    ]


def bad(**changes: Any) -> Any:
    q, k, v = projections(2, 16, 4, 2, 8)
    mask = changes.pop("mask", Causal())
    arrays = {"q": q, "k": k, "v": v} | {
        name: changes.pop(name) for name in ("q", "k", "v") if name in changes
    }
    return dispatch.attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        mask,
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"q": jnp.ones((2, 16, 8))},
            r"takes \[batch, sequence, heads, head_dim\], and was given q \(2, 16, 8\)",
        ),
        ({"v": jnp.ones((2, 15, 2, 8))}, "k and v of one"),
        ({"q": jnp.ones((3, 16, 4, 8))}, r"batch and head_dim .*q \(3, 16, 4, 8\)"),
        ({"q": jnp.ones((2, 16, 3, 8))}, r"heads \(3\) .*kv heads \(2\)"),
        (
            {"q": jnp.ones((2, 16, 4, 8), jnp.bfloat16)},
            r"one dtype: bfloat16, float32, float32",
        ),
        (
            {"mask": "causal"},
            r"a mask of jaxpar.kernels.masks, such as Causal\(\), and was given 'causal'",
        ),
        ({"mask": Causal}, "the class Causal: write"),
        (
            {"mask": jnp.ones((16, 16), bool)},
            r"was given an array bool\[16, 16\]: a map of .* is BlockSparse",
        ),
        (
            {"mask": Segments(None, None)},
            r"Segments needs q_ids \(2, 16\)",
        ),
        (
            {"mask": Causal() & Segments(jnp.ones((2, 16), int), jnp.ones((2, 9), int))},
            r"kv_ids \(2, 16\).* was given \(2, 9\)",
        ),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"scale": 0.0}, r"was given scale=0.0"),
        (
            {"softcap": -5.0},
            "softcap=-5.0",
        ),
        ({"softcap": float("nan")}, r"was given softcap=nan"),
        (
            {"dropout_rate": 1.0},
            "dropout_rate=1.0",
        ),
        ({"dropout_rate": -1}, r"was given dropout_rate=-1"),
        (
            dict.fromkeys("qkv", jnp.ones((2, 16, 4, 8), int)),
            "bfloat16, .* given int32",
        ),
        (
            dict.fromkeys("qkv", jnp.ones((2, 0, 4, 8))),
            r"at least one token, .*: q \(2, 0, 4, 8\)",
        ),
        (
            {
                "k": jnp.ones((2, 16, 0, 8)),
                "v": jnp.ones((2, 16, 0, 8)),
            },
            "at least one token",
        ),
        (
            {"mask": Segments(*[jnp.ones((2, 16))] * 2)},
            r"Segments needs q_ids of an integer dtype, .* given float32",
        ),
        (
            {"implementation": "flash"},
            "'flash': try one of",
        ),
        (
            {"implementation": "splash", "with_lse": False},
            "splash .*: on cpu",
        ),
        (
            {"implementation": "cudnn"},
            "cudnn .*log-sum-exp",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_refused_in_a_line(changes: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bad(**changes)


def test_what_only_the_tiles_show_is_refused_in_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unserved(*_: Any) -> Any:
        raise Unserved("9 tiles to visit are more than SMEM holds")

    monkeypatch.setattr(chunked, "forward", unserved)
    with pytest.raises(
        UserError,
        match=r"chunked .*: 9 tiles",
    ):
        bad()


# Libraries.

INTERPRET = Call(interpret=True)


@pytest.mark.parametrize(
    ("B", "S", "H", "K", "dtype", "mask"),
    [
        (2, 256, 4, 2, "float32", Causal()),
        (
            1,
            256,
            4,
            2,
            "bfloat16",
            Causal() & Segments(documents(1, 256), documents(1, 256)),
        ),
        (1, 384, 2, 1, "float32", Causal()),  # blocks of 128: gcd(384, 1024)
        (1, 256, 2, 1, "float32", Causal() & Window(99)),
        (1, 256, 2, 1, "float32", Window(50, 20)),
        (1, 256, 2, 1, "float32", Full()),
    ],
    ids=str,
)
def test_splash_is_the_reference(
    B: int,
    S: int,
    H: int,
    K: int,
    dtype: str,
    mask: Mask,
) -> None:
    args = projections(B, S, H, K, 128, dtype)
    asked = AttentionRequest(args[0], args[1], mask, INTERPRET, with_lse=False)
    assert dispatch.refusal("splash", asked, "cpu") == ""
    ours = values_and_gradients(
        lambda q, k, v: libraries.splash(q, k, v, mask, INTERPRET),
        args,
    )
    assert {x.dtype for x in ours} == {jnp.dtype(dtype)}
    want = values_and_gradients(
        by_reference(mask),
        tuple(x.astype(jnp.float32) for x in args),
    )
    assert_close(ours, want, 2**-6 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [
        ("fwd_residuals.3", 2),
        ("dq_no_residuals", 3),
        ("dkv_no_residuals.1", 4),
    ],
)
def test_the_flops_of_splash_are_those_of_the_share_that_it_says(name: str, matmuls: int) -> None:
    B = 2
    H = 8
    K = 4
    S = 1024
    T = 2048
    h = 128
    shapes: list[tuple[int, ...]] = [
        (3, 4),
        (8, 1024),
        (B, H, S, h),
        (B, K, T, h),
        (B, K, T, h),
        (B, H, S),
    ]
    path = "jit(step)/transpose(jvp())/block/attention/core/shard_map/computed=0.25/splash_mha/splash_mha/pallas_call"
    found = kernel_cost(f"splash_mha_{name}", path, shapes, {})
    assert found and found.flops == 2 * matmuls * B * H * S * T * h / 4
    assert found.attention == ("splash", h, T, found.flops, matmuls, "")
    half = kernel_cost(f"splash_mha_{name}", "another/pallas_call", shapes, {})
    assert half and half.flops == 2 * found.flops
    assert kernel_cost(f"splash_mha_{name}", path, shapes[:2], {}) is None
    assert kernel_cost(f"ring_{name}", path, shapes, {}) is None
    assert decode(path) == ("block/attention/core", "backward")


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (Full(), 1),
        (Causal(), 36 / 64),
        (Causal() & Window(1024), 15 / 64),  # a query sees 1025 keys: of two tiles at most
        (
            Causal()
            & Window(2000)
            & Segments(
                documents(1, 8192),
                documents(1, 8192),
            ),
            21 / 64,
        ),
    ],
    ids=["full", "causal", "window", "window and documents"],
)
def test_splash_says_which_share_of_the_scores_it_computes(mask: Mask, share: float) -> None:
    """In tiles of 1,024; it skips none for its documents."""
    q, k = (jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16) for heads in (2, 1))
    traced = jax.jit(lambda q, k: libraries.splash(q, k, k, mask, DEFAULT)).trace(
        q,
        k,
    )
    assert f"computed={share}" in traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=True)


@pytest.mark.parametrize(
    ("h", "dtype", "softcap", "block"),
    [
        (128, "bfloat16", 0.0, 1024),
        (128, "bfloat16", 30.0, 512),
        (128, "float32", 0.0, 512),
        (256, "bfloat16", 0.0, 512),
        (256, "float32", 0.0, 512),
        (512, "float32", 0.0, 256),
    ],
)
def test_splash_takes_smaller_tiles_of_wider_heads(
    h: int, dtype: str, softcap: float, block: int
) -> None:
    q = jax.ShapeDtypeStruct((1, 8192, 2, h), dtype)
    assert libraries._splash_block(q, Call(softcap=softcap)) == block


# Plans.

OTHERWISE = "kv heads are split otherwise than heads"
LAYOUTS: list[tuple[dict[str, int], dict[str, Any], tuple[str, str]]] = [
    ({"tensor": 8}, {}, ("splash", "")),
    ({"context": 2, "tensor": 4}, {}, ("pallas_tpu", "")),
    ({"tensor": 8}, {"kv_heads": ()}, ("splash", "")),  # column_linear copies them
    (
        {"fsdp": 2, "tensor": 4},
        {"kv_heads": ("fsdp",)},
        ("chunked", f"splash: {OTHERWISE}; pallas_tpu: {OTHERWISE}"),
    ),
    (
        {"tensor": 8},
        {"heads": (), "kv_heads": (), "attention_seq": ("tensor",)},
        ("pallas_tpu", ""),
    ),
    ({"fsdp": 8}, {"kv_heads": ()}, ("splash", "")),
    (
        {"tensor": 8},
        {"heads": (), "kv_heads": (), "head_dim": ("tensor",)},
        ("chunked", "splash: heads are split inside; pallas_tpu: heads are split inside"),
    ),
]


@pytest.mark.parametrize(("mesh", "rules", "want"), LAYOUTS)
def test_the_choice_minds_how_the_plan_splits(
    mesh: dict[str, int], rules: Any, want: tuple[str, str]
) -> None:
    assert (
        choose_attention(
            split_of(plan_on(MeshSpec(**mesh), **rules)), Causal(), 1024, 128, platform="tpu"
        )
        == want
    )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ring", "pallas_tpu"), ("ulysses", "chunked")],
)
def test_a_strategy_takes_what_serves_its_pieces(strategy: Any, name: str) -> None:
    """Of a million tokens over eight devices: a device of Ulysses has them all, more tiles than a
    list holds.
    """
    plan = dataclasses.replace(plan_on(MeshSpec(context=8)), context=Context(strategy))
    one = jax.ShapeDtypeStruct((1, 1 << 17, 8, 64), jnp.bfloat16)
    assert kernel_for(split_of(plan), Causal(), one, one, "tpu")[0] == name
    named = dataclasses.replace(plan, attention="pallas_tpu")
    if name == "pallas_tpu":
        assert choose_attention(split_of(named), Causal(), 1 << 20, 64, platform="tpu") == (
            name,
            "",
        )
    else:
        with pytest.raises(UserError, match=r"pallas_tpu .*: 524800 tiles"):
            choose_attention(split_of(named), Causal(), 1 << 20, 64, platform="tpu")


def test_a_plan_asks_for_an_implementation_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dispatch.say_once.cache_clear()
    args = projections(4, 20, 8, 4, 6)
    segments = documents(4, 20)
    plan = dataclasses.replace(plan_on(MeshSpec(fsdp=2, tensor=4)), attention="reference")
    want = values_and_gradients(by_reference(Causal() & Segments(segments, segments)), args)
    assert_close(
        values_and_gradients(
            lambda q, k, v: MeshOps(plan).attention(AttentionCall(q, k, v, Causal(), segments)),
            args,
        ),
        want,
    )
    assert caplog.messages == ["attention by reference, which kernels.attention asks for"]


@pytest.mark.parametrize(
    ("mesh", "name", "says"),
    [
        (
            {"fsdp": 2},
            "pallas_tpu",
            "pallas_tpu .*on cpu; .*: chunked, reference",
        ),
        (
            {"context": 2},
            "pallas_tpu",
            "pallas_tpu .*on cpu; .*: chunked$",
        ),
        (
            {"context": 2},
            "splash",
            "split over devices, .*: chunked$",
        ),
    ],
)
def test_an_implementation_that_a_plan_cannot_have_is_refused(
    mesh: dict[str, int], name: str, says: str
) -> None:
    plan = dataclasses.replace(plan_on(MeshSpec(**mesh)), attention=name)
    with pytest.raises(UserError, match=says):
        MeshOps(plan).attention(AttentionCall(*projections(2, 16, 4, 2, 8), Causal()))


@pytest.mark.parametrize(
    ("packed", "name"),
    [(False, "cudnn"), (True, "pallas_gpu")],
)
def test_packed_documents_are_not_given_to_a_library_that_takes_none(
    packed: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choosing and computing see the same mask: what is chosen serves."""
    monkeypatch.setattr(libraries, "has_cudnn", lambda: True)
    for room in ("_attention", "_choose_attention"):
        monkeypatch.setattr(f"jaxpar.parallel.{room}.platform_of", lambda plan: "gpu")
    monkeypatch.setattr(
        libraries, "cudnn", lambda q, k, v, mask, call: reference(q, k, v, mask, call)[0]
    )
    args = projections(2, 32, 4, 2, 16, "bfloat16")
    segments = documents(2, 32) if packed else None
    plan = dataclasses.replace(plan_on(MeshSpec(fsdp=2)), compute="bfloat16")
    assert choose_attention(split_of(plan), Causal(), 32, 16, packed=packed)[0] == name
    if segments is None:
        mask = Causal()
    else:
        mask = Causal() & Segments(segments, segments)
    out = jax.jit(
        lambda q, k, v: MeshOps(plan).attention(AttentionCall(q, k, v, Causal(), segments))
    )(*args)
    assert_close(
        (out,),
        (jax.jit(lambda q, k, v: reference(q, k, v, mask)[0])(*args),),
        2**-6,
    )


PLANS = {
    "fsdp2.tensor4": (MeshSpec(fsdp=2, tensor=4), {}),
    "kv heads whole": (MeshSpec(fsdp=2, tensor=4), {"kv_heads": ()}),
    "heads split inside": (
        MeshSpec(tensor=2),
        {"heads": (), "kv_heads": (), "head_dim": ("tensor",)},
    ),
}


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with chunked.tiles_at_most(chunked.TileSize(12, 12)):
        yield


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("small_tiles")
def test_tiles_on_a_mesh_are_the_reference_on_one_device(plan: str) -> None:
    args = projections(4, 20, 8, 4, 6)
    segments = documents(4, 20)
    want = values_and_gradients(by_reference(Causal() & Segments(segments, segments)), args)
    spec, rules = PLANS[plan]
    on = plan_on(spec, **rules)
    assert choose_attention(split_of(on), Causal(), 20, 6)[0] == "chunked"
    assert_close(
        values_and_gradients(
            lambda q, k, v: MeshOps(on).attention(AttentionCall(q, k, v, Causal(), segments)),
            args,
        ),
        want,
    )


@pytest.mark.usefixtures("small_tiles")
def test_dropout_is_the_same_on_every_mesh() -> None:
    args = projections(4, 20, 4, 4, 6)
    key = jax.random.key(7)
    one, many = (
        jax.jit(
            lambda q, k, v, plan=plan: MeshOps(plan).attention(
                AttentionCall(q, k, v, Causal(), None, RATE, key)
            )
        )(*args)
        for plan in (plan_on(MeshSpec()), plan_on(MeshSpec(fsdp=2, tensor=4)))
    )
    assert_close((many,), (one,))


# copied kv heads lie likewise
@pytest.mark.parametrize(
    ("packed", "rules"),
    [(False, {}), (True, {"kv_heads": ()})],
)
def test_splash_on_a_mesh_is_the_reference_on_one_device(
    packed: bool, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "choose", lambda *_: ("splash", ""))
    own = libraries.splash
    monkeypatch.setattr(libraries, "splash", lambda *args: own(*args[:-1], INTERPRET))
    args = projections(2, 128, 4, 2, 128)
    segments = documents(2, 128) if packed else None
    plan = plan_on(MeshSpec(fsdp=2, tensor=2), **rules)
    ours = values_and_gradients(
        lambda q, k, v: MeshOps(plan).attention(AttentionCall(q, k, v, Causal(), segments)), args
    )
    if segments is None:
        mask = Causal()
    else:
        mask = Causal() & Segments(segments, segments)
    assert_close(ours, values_and_gradients(by_reference(mask), args))


@pytest.mark.parametrize(
    ("mask", "packed"),
    [
        (Causal(), True),
        (Causal() & Window(5), False),
        (Causal() & bigbird(24, 1, 1, 1, block=4, causal=True), True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_tiles")
def test_halves_of_a_sequence_attend_as_the_whole(mask: Mask, packed: bool) -> None:
    """The second half of the queries sees the keys and values of both, and gives both gradients."""
    args = projections(2, 24, 8, 4, 6)
    segments = documents(2, 24) if packed else None
    plan = plan_on(MeshSpec(tensor=2))
    plan = dataclasses.replace(plan, overlap=Overlap(domino="sequence"))

    def halves(*args: jax.Array) -> jax.Array:
        def attend(half: jax.Array, place: Places, ops: Ops) -> jax.Array:
            return ops.attention(AttentionCall(*half, mask, place.segments))

        parts = list(zip(*(jnp.split(x, 2, axis=1) for x in args), strict=True))
        ids = (None, None) if segments is None else jnp.split(segments, 2, axis=1)
        places = [Places(jnp.arange(12), one) for one in ids]
        return jnp.concatenate(run_parts(attend, parts, places, MeshOps(plan), plan), axis=1)

    want = values_and_gradients(
        lambda *x: ReferenceOps(plan).attention(AttentionCall(*x, mask, segments)), args
    )
    assert_close(values_and_gradients(halves, args), want)


def test_halves_of_a_sequence_take_no_mask_that_looks_ahead() -> None:
    plan = dataclasses.replace(plan_on(MeshSpec()), overlap=Overlap(domino="sequence"))
    with pytest.raises(UserError, match=r"Full\(\) .*first half"):
        attend_in_first_half(
            AttentionCall(*projections(1, 4, 1, 1, 2), Full()), None, MeshOps(plan)
        )


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(70)], ids=str)
def test_splash_takes_queries_that_begin_later_than_the_keys(mask: Mask) -> None:
    q, k, v = projections(1, 256, 2, 1, 128)
    later = INTERPRET._replace(q_start=128)
    ours = values_and_gradients(
        lambda q, k, v: libraries.splash(q, k, v, mask, later), (q[:, 128:], k, v)
    )
    want = values_and_gradients(by_reference(mask, Call(q_start=128)), (q[:, 128:], k, v))
    assert_close(ours, want)
    gpu = q.astype(jnp.bfloat16)[:, 128:], k.astype(jnp.bfloat16)
    asked = AttentionRequest(*gpu, mask, later, with_lse=False)
    assert "begin later" in dispatch.refusal("cudnn", asked, "gpu")


def test_a_map_of_the_whole_sequence_is_refused_with_documents() -> None:
    with pytest.raises(
        UserError,
        match=r"BlockSparse.*per_document=True",
    ):
        MeshOps(plan_on(MeshSpec())).attention(
            AttentionCall(*projections(2, 33, 4, 2, 6), bigbird(33), documents(2, 33))
        )


@pytest.mark.parametrize(
    "word", ["window(5)", "window(40)", "longformer(3, stride=2)", "bigbird(1, 1, 1, block=4)"]
)
def test_a_mask_and_a_soft_cap_are_those_of_the_definition(word: str) -> None:
    """`ReferenceOps.attention` is the definition."""
    (mask,) = layer_masks(ModelConfig(masks=(word,), max_seq_len=33))
    args = projections(2, 33, 4, 2, 6)
    segments = documents(2, 33)
    on = plan_on(MeshSpec())
    want = values_and_gradients(
        lambda *x: ReferenceOps(on).attention(AttentionCall(*x, mask, segments, softcap=2.0)), args
    )
    assert_close(
        values_and_gradients(
            lambda *x: MeshOps(on).attention(AttentionCall(*x, mask, segments, softcap=2.0)),
            args,
        ),
        want,
    )
