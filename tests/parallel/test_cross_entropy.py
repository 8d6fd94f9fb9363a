"""The loss against its definition with all scores at once: sums and gradients, on several meshes
and in many chunks.

Tolerance: float32 sums of at most a few hundred terms of size one, taken in another order, differ
by a few ulps of the sum: 1e-5 relative to the largest entry leaves a factor of ten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import some

import jaxpar.parallel.cross_entropy
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.parallel.cross_entropy import LossSums, Tiling, in_pieces, tiling
from jaxpar.parallel.cross_entropy.loss_terms import SoftTargets, Targets
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import LogitsCall, LossCall
from jaxpar.verify.reference_ops import ReferenceOps

PLANS: dict[str, tuple[MeshSpec, dict[str, Any]]] = {
    "one": (MeshSpec(), {}),
    "data2.fsdp2.tensor2": (MeshSpec(data=2, fsdp=2, tensor=2), {}),
    "fsdp2.context2.tensor2": (MeshSpec(fsdp=2, context=2, tensor=2), {}),
    "tensor8": (MeshSpec(tensor=8), {}),
    "vocabulary whole, residual stream whole": (
        MeshSpec(fsdp=4, tensor=2),
        {"vocab": (), "residual_seq": ("context",)},
    ),
    "vocabulary over two axes, fsdp splits parameters only": (
        MeshSpec(data=2, fsdp=2, tensor=2),
        {"vocab": ("fsdp", "tensor"), "batch": ("data",), "embed": ("data",)},
    ),
}
B = 4
S = 16
D = 24
V = 56
SIZE = 51  # SIZE entries of the V are no padding


def plan_of(name: str, compute: Any = "float32") -> Plan:
    spec, rules = PLANS[name]
    return Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]), ShardingRules(**rules), compute
    )


def loss_call(
    x: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    softcap: float = 0.0,
    bias: jax.Array | None = None,
    **options: Any,
) -> LossCall:
    return LossCall(LogitsCall(x, table, SIZE, softcap, bias), labels, **options)


def inputs(
    rows: int = B, length: int = S, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, vocabulary matrix, and labels of which some do not count."""
    rng = np.random.default_rng(0)
    x, table = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, length, D), (V, D))
    )
    return (
        x,
        table,
        jnp.asarray(
            rng.integers(-3, SIZE, (rows, length)),
            jnp.int32,
        ),
    )


def reference(
    x: jax.Array, table: jax.Array, labels: jax.Array, z_loss: float, softcap: float = 0.0
) -> LossSums:
    scores = (x @ table.T)[..., :SIZE]
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    lse = jax.scipy.special.logsumexp(scores, axis=-1)
    nll = lse - jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    counts = labels >= 0
    return LossSums(
        jnp.sum(counts * (nll + z_loss * lse**2)), jnp.sum(counts * nll), jnp.sum(counts)
    )


def sums_and_gradients(
    loss: Callable[..., LossSums],
    x: jax.Array,
    table: Any,
) -> Any:
    def scalar(
        x: jax.Array,
        table: Any,
    ) -> tuple[jax.Array, LossSums]:
        sums = loss(x, table)
        return sums.loss, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))(
        x,
        table,
    )
    return sums, gradients


def assert_close(ours: Any, want: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(
        jax.tree.leaves(ours),
        jax.tree.leaves(want),
        strict=True,
    ):
        a = np.asarray(a, np.float32)
        b = np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


def cut_into(chunk: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loss be made in so many pieces, whatever would be chosen."""
    monkeypatch.setattr(
        jaxpar.parallel.cross_entropy._linear_cross_entropy,
        "tiling",
        lambda tokens, *_: Tiling(1, slices) if slices > 1 else Tiling(-(-tokens // chunk), 1),
    )


@pytest.mark.parametrize("plan", some(PLANS, 2))
@pytest.mark.parametrize(
    ("z_loss", "chunk", "slices", "softcap"),
    [
        (0.0, 1024, 1, 0.0),
        (1e-2, 7, 1, 0.0),
        (1e-2, 7, 1, 2.0),
        (1e-2, 64, 7, 0.0),
        (1e-2, 64, 7, 2.0),
    ],
)  # 7: each device fills its last chunk up; the last of 7 slices is padding alone
def test_the_loss_and_its_gradients_are_those_of_all_scores_at_once(
    plan: str,
    z_loss: float,
    chunk: int,
    slices: int,
    softcap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_into(chunk, slices, monkeypatch)
    x, table, labels = inputs()
    ours = sums_and_gradients(
        lambda x, table: MeshOps(plan_of(plan)).linear_cross_entropy(
            loss_call(x, table, labels, softcap=softcap, z_loss=z_loss)
        ),
        x,
        table,
    )
    assert_close(
        ours,
        sums_and_gradients(
            lambda x, table: reference(x, table, labels, z_loss, softcap),
            x,
            table,
        ),
    )
    assert not np.any(np.asarray(ours[1][1])[SIZE:])


@pytest.mark.parametrize(("plan", "slices"), [("data2.fsdp2.tensor2", 1), ("tensor8", 7)])
def test_a_bias_of_the_vocabulary_is_in_the_scores_and_has_its_gradient(
    plan: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores with a bias are those of a matrix with one more column, which multiplies a one."""
    cut_into(7, slices, monkeypatch)
    x, table, labels = inputs()
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(V), jnp.float32)
    on = plan_of(plan)

    def ours(x: jax.Array, head: Any) -> LossSums:
        table, bias = head
        return MeshOps(on).linear_cross_entropy(loss_call(x, table, labels, 2.0, bias, z_loss=1e-2))

    def wider(x: jax.Array, head: Any) -> LossSums:
        table, bias = head
        ones = jnp.ones((*x.shape[:2], 1))
        column = jnp.concatenate([table, bias[:, None]], axis=1)
        return reference(jnp.concatenate([x, ones], axis=-1), column, labels, 1e-2, 2.0)

    found = sums_and_gradients(ours, x, (table, bias))
    assert_close(found, sums_and_gradients(wider, x, (table, bias)))
    assert not np.any(np.asarray(found[1][1][1])[SIZE:])
    scores = MeshOps(on).logits(LogitsCall(x, table, SIZE, 2.0, bias))[..., :SIZE]
    want = 2 * jnp.tanh((x @ table.T + bias)[..., :SIZE] / 2)
    assert_close(scores, want)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        (13, 4),
        (13, 13),
        (7, 3),
        (1, 1),
        (5, 100),
    ],
)
def test_any_number_of_tokens_is_cut_into_chunks_no_longer_than_asked(
    length: int, chunk: int
) -> None:
    x, _, labels = inputs(1, length)
    x_NTD, targets = in_pieces._chunks(
        x[0],
        Targets(labels[0], None),
        -(-length // chunk),
    )
    labels_NT = targets.labels
    assert labels_NT.shape[0] == -(-length // chunk)
    assert labels_NT.shape[1] <= chunk
    np.testing.assert_array_equal(
        x_NTD.reshape(-1, D)[:length],
        x[0],
    )
    np.testing.assert_array_equal(labels_NT.reshape(-1)[:length], labels[0])
    assert np.all(labels_NT.reshape(-1)[length:] < 0)


def test_chunks_are_as_large_as_the_memory_allows() -> None:
    on = dataclasses.replace(plan_of("one"), loss_mib=64)
    # 64 MiB are 523 tokens' scores, so 512
    assert tiling(2048, 32064, 4096, on, on.loss_mib) == (4, 1)
    assert tiling(2048, 1 << 20, 4096, on, on.loss_mib) == (16, 1)  # 128 at least
    assert (
        tiling(100, 1 << 20, 4096, on, on.loss_mib)
        == tiling(2048, 256, 4096, on, on.loss_mib)
        == (1, 1)
    )
    # GPT-2 124M, 12 sequences: 128 MiB are 667 tokens' scores, 1,024 cost less, and slices would
    # spare nothing more.
    assert tiling(12288, 50304, 768, on, 4096) == (12, 1)


def test_the_vocabulary_goes_by_slices_where_the_gathered_matrix_is_too_large() -> None:
    """LLaMA-3 8B over fsdp and tensor=4: 8,192 tokens, 32,064 rows of 4,096; gathered, with its
    gradient, 751 MiB.
    """
    on = plan_of("data2.fsdp2.tensor2", "bfloat16")
    sizes = {mib: tiling(8192, 32064, 4096, on, mib) for mib in (4096, 800, 256, 128, 1)}
    # 49 MiB are left for scores of 384 tokens; a slice's row takes 56 KiB with its scores; 167 rows
    # are the fewest.
    assert sizes == {
        4096: (8, 1),
        800: (1, 8),
        256: (1, 8),
        128: (1, 16),
        1: (1, 192),
    }
    assert tiling(8192, 97, 4096, on, 1) == (1, 1)  # a prime has no slices


@pytest.mark.parametrize("mib", [256, 4096, 1 << 16])
def test_the_cheaper_form_is_taken_however_much_may_be_held(mib: int) -> None:
    """LLaMA-3.2 1B: 128 MiB are scores of 261 tokens, and the float32 gradient to add to takes
    1 GiB.
    """
    on = dataclasses.replace(plan_of("data2.fsdp2.tensor2", "bfloat16"), loss_mib=mib)
    assert tiling(8192, 128256, 2048, on, on.loss_mib) == (1, 32)
    few = tiling(200, 128256, 2048, on, on.loss_mib)
    prime = tiling(8192, 128239, 2048, on, on.loss_mib)
    # a prime has no slices
    assert (few, prime) == (((1, 8), (1, 1)) if mib == 256 else ((1, 1), (32, 1)))


def test_no_more_scores_than_asked_exist_at_a_time() -> None:
    tokens = 2048
    vocab = 4096
    chunk = 128
    on = dataclasses.replace(plan_of("one"), loss_mib=2)
    assert tiling(tokens, vocab, 8, on, on.loss_mib) == (tokens // chunk, 1)
    shapes = (
        jax.ShapeDtypeStruct((2, tokens // 2, 8), jnp.float32),
        jax.ShapeDtypeStruct((vocab, 8), jnp.float32),
    )
    labels = jnp.zeros((2, tokens // 2), jnp.int32)
    loss = jax.grad(
        lambda x, table: (
            MeshOps(on).linear_cross_entropy(LossCall(LogitsCall(x, table, vocab), labels)).loss
        ),
        (0, 1),
    )
    memory = jax.jit(loss).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * chunk * vocab * 4 < tokens * vocab * 4 / 2


def test_the_sums_without_a_gradient_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table, labels = inputs()
    for plan, chunk, slices in (
        ("one", 7, 1),
        ("data2.fsdp2.tensor2", 7, 1),
        ("data2.fsdp2.tensor2", 64, 4),
    ):
        cut_into(chunk, slices, monkeypatch)
        on = plan_of(plan)
        sums = jax.jit(
            lambda x, table, on=on: MeshOps(on).linear_cross_entropy(
                loss_call(x, table, labels, z_loss=1e-2)
            )
        )(x, table)
        assert_close(sums, reference(x, table, labels, 1e-2))
        assert float(sums.tokens) == np.sum(np.asarray(labels) >= 0)


def test_the_gradient_is_linear_in_the_cotangent_and_flows_through_the_loss_alone() -> None:
    x, table, labels = inputs()
    _, pull = jax.vjp(
        lambda x, table: MeshOps(plan_of("one")).linear_cross_entropy(
            loss_call(x, table, labels, z_loss=1e-2)
        ),
        x,
        table,
    )
    zero = jnp.zeros(())
    one = jnp.ones(())
    plain = pull(LossSums(one, zero, zero))
    for scale in (2.0, -0.25, 0.0):  # powers of two: exact
        scaled = pull(LossSums(scale * one, zero, zero))
        chex.assert_trees_all_equal(scaled, jax.tree.map(lambda leaf, by=scale: by * leaf, plain))
    third = pull(LossSums(one / 3, zero, zero))
    assert_close(third, jax.tree.map(lambda leaf: leaf / 3, plain), 1e-6)
    for of_other_sums in (LossSums(zero, one, zero), LossSums(zero, zero, one)):
        assert not any(np.any(np.asarray(leaf)) for leaf in pull(of_other_sums))


def test_labels_none_of_which_count_give_zeros() -> None:
    x, table, labels = inputs()
    none = jnp.full_like(labels, -1)
    found = sums_and_gradients(
        lambda x, table: MeshOps(plan_of("one")).linear_cross_entropy(
            loss_call(x, table, none, z_loss=1e-2)
        ),
        x,
        table,
    )
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("plan", ["one", "data2.fsdp2.tensor2"])
def test_bfloat16_rounds_gradients_and_not_sums(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into(7, 1, monkeypatch)
    x, table, labels = inputs(dtype="bfloat16")
    table = table.astype(jnp.float32)  # a parameter, but one that bfloat16 can hold
    on = plan_of(plan, "bfloat16")
    sums, gradients = sums_and_gradients(
        lambda x, table: MeshOps(on).linear_cross_entropy(loss_call(x, table, labels, z_loss=1e-2)),
        x,
        table,
    )
    want, want_gradients = sums_and_gradients(
        lambda x, table: reference(x, table, labels, 1e-2), x.astype(jnp.float32), table
    )
    # Scores are float32 sums of products that float32 holds: the loss is that of float32.
    assert_close(sums, want)
    assert [leaf.dtype for leaf in gradients] == [jnp.bfloat16, jnp.float32]
    # The gradients of the scores are rounded (2^-9), that of x once or, summed over devices, three
    # times more.
    assert_close(gradients, want_gradients, 2**-7)
    dtable = np.asarray(gradients[1])
    # summed and kept in float32
    assert np.any(
        dtable
        != np.asarray(
            jnp.asarray(dtable, jnp.bfloat16),
            np.float32,
        )
    )


def test_tokens_and_vocabulary_over_the_same_mesh_axis_are_refused() -> None:
    spec = MeshSpec(fsdp=8)
    plan = Plan(
        make_mesh(spec, jax.devices()),
        ShardingRules(vocab=("fsdp",), embed=()),
    )
    with pytest.raises(
        UserError,
        match=r"loss: mesh axis fsdp=8 is used twice, by dim 0 \(batch\) and dim 2 \(vocab\)",
    ):
        MeshOps(plan).linear_cross_entropy(loss_call(*inputs(8)))


MIXED = "vocabulary over two axes, fsdp splits parameters only"
K = 5  # weighted entries of a token


def soft_targets(seed: int = 3) -> SoftTargets:
    """Weights that add up to less than one, ids that are named twice, and some that are none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-2, V, (B, S, K))
    ids[..., 1] = ids[..., 0]
    weights = rng.random((B, S, K)) / K
    return SoftTargets(jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32))


def by_definition(
    x: jax.Array,
    table: jax.Array,
    labels: jax.Array,
    soft: SoftTargets | None,
    label_smoothing: float,
    alpha: float,
    temperature: float,
    softcap: float = 0.0,
) -> LossSums:
    """The loss from dense distributions, written apart from the library's reference."""
    scores = (x @ table.T)[..., :SIZE]
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    want = np.full((B, S, SIZE), label_smoothing / SIZE)
    dense = np.zeros((B, S, SIZE))
    hard = np.asarray(labels)
    given = None if soft is None else SoftTargets(*map(np.asarray, soft))
    for b, s in np.ndindex(B, S):
        if hard[b, s] >= 0:
            want[b, s, hard[b, s]] += 1 - label_smoothing
        for n in range(K) if given is not None else ():
            if 0 <= given.ids[b, s, n] < SIZE:
                dense[b, s, given.ids[b, s, n]] += given.weights[b, s, n]
    counts = labels >= 0
    loss = -jnp.sum(jnp.asarray(want, jnp.float32) * jax.nn.log_softmax(scores), axis=-1)
    if soft is not None:
        warm = jax.nn.log_softmax(scores / temperature)
        of_soft = -jnp.sum(jnp.asarray(dense, jnp.float32) * warm, axis=-1)
        loss = (1 - alpha) * loss + alpha * temperature**2 * of_soft
    plain = reference(x, table, labels, 0.0, softcap)
    return LossSums(jnp.sum(counts * loss), plain.nll, plain.tokens)


# chunks and slices of the vocabulary, of which the last is padding alone
@pytest.mark.parametrize(("chunk", "slices"), [(7, 1), (64, 7)])
@pytest.mark.parametrize(
    "plan",
    [name if name == MIXED else pytest.param(name, marks=pytest.mark.slow) for name in PLANS],
)
def test_soft_targets_and_smoothing_are_those_of_whole_distributions(
    plan: str, chunk: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(chunk, slices, monkeypatch)
    x, table, labels = inputs()
    soft = soft_targets()
    softcap = 4.0
    numbers = {"alpha": 0.7, "temperature": 3.0, "soft": soft}
    numbers |= {"label_smoothing": 0.2}
    ours = sums_and_gradients(
        lambda x, table: MeshOps(plan_of(plan)).linear_cross_entropy(
            loss_call(x, table, labels, softcap=softcap, **numbers)
        ),
        x,
        table,
    )
    want = sums_and_gradients(
        lambda x, table: by_definition(x, table, labels, softcap=softcap, **numbers),
        x,
        table,
    )
    assert_close(ours, want)
    assert not np.any(np.asarray(ours[1][1])[SIZE:])  # padding gets no mass


@pytest.mark.parametrize(
    ("smoothing", "alpha", "temperature"), [(0.3, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.5, 0.5)]
)
def test_each_part_of_the_loss_alone(smoothing: float, alpha: float, temperature: float) -> None:
    x, table, labels = inputs()
    soft = soft_targets() if alpha else None
    numbers = {"alpha": alpha, "temperature": temperature, "soft": soft}
    numbers |= {"label_smoothing": smoothing}
    on = MeshOps(plan_of("data2.fsdp2.tensor2"))
    found = sums_and_gradients(
        lambda x, table: on.linear_cross_entropy(loss_call(x, table, labels, **numbers)),
        x,
        table,
    )
    plain = ReferenceOps(plan_of("one"))
    for want in (
        lambda x, table: by_definition(x, table, labels, **numbers),
        lambda x, table: plain.linear_cross_entropy(loss_call(x, table, labels, **numbers)),
    ):
        assert_close(found, sums_and_gradients(want, x, table))


def test_one_entry_of_weight_one_is_the_label() -> None:
    x, table, labels = inputs()
    soft = SoftTargets(labels[..., None], jnp.ones((B, S, 1)))
    on = MeshOps(plan_of("one"))
    alone = sums_and_gradients(
        lambda x, table: on.linear_cross_entropy(loss_call(x, table, labels, z_loss=0.0)), x, table
    )
    weighted = sums_and_gradients(
        lambda x, table: on.linear_cross_entropy(loss_call(x, table, labels, soft=soft)), x, table
    )
    assert_close(weighted, alone)


def test_soft_targets_of_another_form_are_refused() -> None:
    x, table, labels = inputs()
    soft = soft_targets()
    on = MeshOps(plan_of("one"))

    def refused(match: str, soft: SoftTargets | None = soft, **numbers: float) -> None:
        with pytest.raises(UserError, match=match):
            on.linear_cross_entropy(loss_call(x, table, labels, soft=soft, **numbers))

    refused("ids of shape", SoftTargets(soft.ids[:, :-1], soft.weights[:, :-1]))
    refused("integer ids and float weights", SoftTargets(soft.weights, soft.weights))
    refused("temperature as a finite number above 0", temperature=0.0)
    refused("alpha as a finite number of at least 0 and at most 1", alpha=1.5)
    refused("label_smoothing as a finite number", label_smoothing=-0.1)
