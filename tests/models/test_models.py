"""Properties of the models: who sees what, and that stacking, padding, packing and recomputing
change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import some

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.models import Model
from jaxpar.models.positions import _quarter_turn, _quarter_turn_by_matmul, count_positions
from jaxpar.models.transformer import Block
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.mesh_ops import ops_without_plan

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "vocab_multiple": 8,
    "layers": 3,
    "embed": 32,
    "heads": 4,
    "mlp": 48,
}
CONFIGS = {
    "gpt2": ModelConfig(family="gpt2", max_seq_len=24, init_std=0.2, **SIZES),
    "llama": ModelConfig(
        family="llama",
        kv_heads=2,
        head_dim=12,
        max_seq_len=24,
        tied_head=False,
        init_std=0.2,
        rope_factor=4.0,
        rope_original_seq_len=16,
        **SIZES,
    ),
}
ONE = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))


@pytest.fixture(params=CONFIGS, scope="module")
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def tokens(
    config: ModelConfig,
    rows: int = 2,
    length: int = 16,
    seed: int = 0,
) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)), jnp.int32
    )


def batch_of(ids: jax.Array) -> dict[str, jax.Array]:
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def fresh(config: ModelConfig, seed: int) -> Any:
    return jax.jit(Model(config).init)(jax.random.key(seed))


def loss_of(config: ModelConfig, params: Any, batch: Any, key: Any = None) -> LossSums:
    return jax.jit(lambda params, batch, key: Model(config).loss(params, batch, ONE, key))(
        params, batch, key
    )


def loss_and_gradients(
    config: ModelConfig, plan: Plan, params: Any, batch: Any, key: Any = None
) -> Any:
    model = Model(config)
    return jax.jit(jax.value_and_grad(lambda params: model.loss(params, batch, plan, key).loss))(
        params
    )


def assert_close(ours: Any, want: Any, tolerance: float) -> None:
    """Each array relative to its largest entry. One that is zero but for rounding (the gradient of
    GPT-2's key bias: softmax does not see a shift) is compared on the scale of the terms that
    cancelled in it, which is the tree's."""
    overall = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(want))
    for a, b in zip(
        jax.tree.leaves(ours),
        jax.tree.leaves(want),
        strict=True,
    ):
        own = float(np.max(np.abs(b)))
        scale = own if own > 1e-6 * overall else overall
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= tolerance * scale


def test_a_position_depends_on_itself_and_the_past_only(config: ModelConfig) -> None:
    model = Model(config)
    params = fresh(config, 0)
    ids = tokens(config)
    x_BSD = model.embed(
        params,
        ids,
        jnp.broadcast_to(jnp.arange(16), ids.shape),
        ONE,
    )
    layer = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
    positions = jnp.broadcast_to(jnp.arange(16), ids.shape)

    def seen(x_BSD: jax.Array) -> jax.Array:
        return jnp.sum(model.block(layer, x_BSD, Places(positions), ONE)[0][0, 9])

    influence_S = jnp.max(
        jnp.abs(jax.jit(jax.grad(seen))(x_BSD)[0]),
        axis=-1,
    )
    assert np.all(np.asarray(influence_S[:10]) > 0)
    assert np.all(np.asarray(influence_S[10:]) == 0)


@pytest.mark.slow
def test_packed_documents_give_the_loss_of_separate_ones(config: ModelConfig) -> None:
    """Whatever a layer's mask is; first tokens and blocks are those of each document."""
    config = dataclasses.replace(
        config, masks=("causal", "longformer(2, 1)", "bigbird(1, 1, 1, block=2)")
    )
    params = fresh(config, 1)
    a = tokens(config, 1, 8, seed=1)
    b = tokens(config, 1, 12, seed=2)
    packed_tokens = jnp.concatenate(
        [a[:, :-1], b[:, :-1]],
        axis=1,
    )
    packed = {
        "tokens": packed_tokens,
        "labels": jnp.concatenate(
            [a[:, 1:], b[:, 1:]],
            axis=1,
        ),
        "segments": jnp.asarray(
            [[1] * 7 + [2] * 11],
            jnp.int32,
        ),
        "positions": jnp.asarray(
            [[*range(7), *range(11)]],
            jnp.int32,
        ),
    }
    together = loss_of(config, params, packed)
    apart = [loss_of(config, params, batch_of(ids)) for ids in (a, b)]
    np.testing.assert_allclose(
        together.nll,
        apart[0].nll + apart[1].nll,
        rtol=1e-5,
    )
    unpacked = loss_of(
        config,
        params,
        {key: packed[key] for key in ("tokens", "labels")},
    )
    assert abs(unpacked.nll - together.nll) > 1e-3


@pytest.mark.slow
def test_padding_the_vocabulary_changes_neither_the_loss_nor_any_gradient(
    config: ModelConfig,
) -> None:
    exact = dataclasses.replace(config, vocab_multiple=1)
    params = fresh(config, 2)
    V = config.vocab_size

    def cut(tree: Any) -> Any:
        embed = {**tree["embed"], "tokens": tree["embed"]["tokens"][:V]}
        head = {name: leaf[:V] if name == "table" else leaf for name, leaf in tree["head"].items()}
        return {**tree, "embed": embed, "head": head}

    batch = batch_of(tokens(config))
    loss, grads = loss_and_gradients(config, ONE, params, batch)
    want, want_grads = loss_and_gradients(exact, ONE, cut(params), batch)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert_close(cut(grads), want_grads, 1e-5)
    assert not np.any(grads["embed"]["tokens"][V:])


@pytest.mark.slow
def test_unrolling_and_recomputing_change_nothing(config: ModelConfig) -> None:
    config = dataclasses.replace(config, dropout=0.2)
    params = fresh(config, 3)
    batch = batch_of(tokens(config))
    key = jax.random.key(4)
    want = loss_and_gradients(config, ONE, params, batch, key)
    again = dataclasses.replace(config, scan_layers=False), dataclasses.replace(ONE, remat="full")
    for model, plan in ((again[0], ONE), (config, again[1])):
        # The same float32 operations, fused differently.
        assert_close(loss_and_gradients(model, plan, params, batch, key), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ONE, id="kept", marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(ONE, remat="full"), id="remat"),
    ],
)
def test_layers_of_several_kinds_take_turns(plan: Plan) -> None:
    """Two whole groups and a rest, scanned, are five blocks one after another, each with its own
    mask and RoPE.
    """
    sizes = SIZES | {"layers": 5, "kv_heads": 2}
    config = ModelConfig(
        family="gemma3", masks=("window(3)", "causal"), rope_local_theta=10.0, init_std=0.2, **sizes
    )
    model = Model(config)
    params = fresh(config, 5)
    ids = tokens(config)
    positions = jnp.broadcast_to(jnp.arange(16), ids.shape)

    def one_by_one(layers: Any, x_BSD: jax.Array) -> jax.Array:
        for i in range(5):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
            x_BSD, _ = model.block(layer, x_BSD, Places(positions), plan, LayerInfo(kind=i % 2))
        return x_BSD

    def together(layers: Any, x_BSD: jax.Array) -> jax.Array:
        return model.blocks(layers, x_BSD, Places(positions), plan)[0]

    x_BSD = model.embed(params, ids, positions, ONE)
    ours, want = (
        jax.jit(jax.value_and_grad(lambda layers, run=run: jnp.sum(jnp.sin(run(layers, x_BSD)))))(
            params["blocks"]
        )
        for run in (together, one_by_one)
    )
    assert_close(ours, want, 1e-5)  # the same float32 operations, fused differently


def test_full_remat_saves_less(config: ModelConfig) -> None:
    config = dataclasses.replace(config, layers=8)
    params = Model(config).shapes()
    batch = batch_of(tokens(config, 8, 25))

    def temporaries(plan: Plan) -> int:
        model = Model(config)
        compiled = (
            jax.jit(jax.grad(lambda params: model.loss(params, batch, plan).loss))
            .lower(params)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(dataclasses.replace(ONE, remat="full")) < 0.7 * temporaries(ONE)


@pytest.mark.slow
def test_fresh_parameters_are_the_same_on_every_mesh(config: ModelConfig) -> None:
    model = Model(config)
    want = fresh(config, 5)
    for spec in (MeshSpec(data=2, fsdp=2, tensor=2), MeshSpec(fsdp=8)):
        plan = Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]))
        shardings = plan.sharding(model.axes, model.shapes())
        ours = jax.jit(model.init, out_shardings=shardings)(jax.random.key(5))
        # The same random bits; the polynomial that makes them normal may round its last bit by the
        # shape of the loop.
        chex.assert_trees_all_close(ours, want, rtol=5e-7)
    std = float(jnp.std(want["blocks"]["q"]))
    assert abs(std / config.init_std - 1) < 0.1


RULES: dict[str, tuple[MeshSpec, dict[str, Any]]] = {
    "kv heads, vocabulary and residual stream whole": (
        MeshSpec(fsdp=2, tensor=4),
        {"kv_heads": (), "vocab": (), "residual_seq": ("context",)},
    ),
    "parameters over data too, and no tokens over fsdp": (
        MeshSpec(data=2, fsdp=2, tensor=2),
        {"batch": ("data",), "embed": ("fsdp", "data")},
    ),
    "parameters over context too, heads split inside": (
        MeshSpec(fsdp=2, context=2, tensor=2),
        {
            "embed": ("context", "fsdp"),
            "heads": (),
            "kv_heads": (),
            "head_dim": ("tensor",),
            "mlp": (),
        },
    ),
}


@functools.cache
def packed_on_one_device(config: ModelConfig) -> tuple[Any, Any, Any]:
    """Parameters, a batch of packed rows, its loss and gradients."""
    params = fresh(config, 6)
    batch = batch_of(tokens(config, 4, 17)) | {
        "segments": jnp.asarray(
            [[0] * 5 + [1] * 11] * 4,
            jnp.int32,
        )
    }
    return params, batch, loss_and_gradients(config, ONE, params, batch)


@pytest.mark.slow
@pytest.mark.parametrize("rules", some(RULES, 4))
def test_any_rules_give_the_loss_and_the_gradients_of_one_device(
    config: ModelConfig, rules: str
) -> None:
    config = dataclasses.replace(config, layers=1)
    spec, changes = RULES[rules]
    plan = Plan(
        make_mesh(spec, jax.devices()[: devices_needed(spec)]),
        ShardingRules(**changes),
    )
    params, batch, want = packed_on_one_device(config)
    params = jax.device_put(params, plan.sharding(Model(config).axes, params))
    # Float32 sums in another order, through one block and the head.
    assert_close(loss_and_gradients(config, plan, params, batch), want, 2e-5)


def test_every_parameter_has_a_logical_axis_per_dim(config: ModelConfig) -> None:
    model = Model(config)
    jax.tree.map(
        lambda leaf, axes: None if leaf.ndim == len(axes) else pytest.fail(str(axes)),
        model.shapes(),
        model.axes,
    )
    assert all(
        axes[0] == "layers" for axes in model.axes["blocks"].values() if isinstance(axes, tuple)
    )


@pytest.mark.slow
def test_dropout_is_off_without_a_key_and_differs_by_layer_and_key(config: ModelConfig) -> None:
    config = dataclasses.replace(config, dropout=0.5)
    params = fresh(config, 6)
    batch = batch_of(tokens(config))
    quiet = loss_of(config, params, batch).nll
    noisy = [loss_of(config, params, batch, jax.random.key(seed)).nll for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2] != quiet


def test_flops_follow_the_palm_formula() -> None:
    config = ModelConfig(
        family="llama", vocab_size=100, layers=2, embed=16, heads=2, mlp=32, tied_head=False
    )
    per_layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    want = 6 * (2 * per_layer + 16 + 100 * 16) + 12 * 2 * 16 * 64
    assert Model(config).flops_per_token(64) == want


def test_of_the_experts_those_that_a_token_is_sent_to_count() -> None:
    config = ModelConfig(
        family="llama", vocab_size=100, layers=2, embed=16, heads=2, mlp=32, tied_head=False
    )
    config = dataclasses.replace(config, experts=5, experts_per_token=3)
    per_layer = 4 * 16 * 16 + 3 * 3 * 16 * 32 + 5 * 16 + 2 * 16
    assert Model(config).flops_per_token(0) == 6 * (2 * per_layer + 16 + 100 * 16)
    assert Model(config).parameter_count() == 2 * (per_layer + 2 * 3 * 16 * 32) + 16 + 2 * 100 * 16


def test_shared_experts_are_one_mlp_that_every_token_goes_to() -> None:
    config = ModelConfig(
        family="llama", vocab_size=100, layers=1, embed=16, heads=2, mlp=32, experts=4
    )
    alone = Model(config).flops_per_token(0)
    config = dataclasses.replace(config, shared_experts=2, experts_per_token=1)
    assert Model(config).flops_per_token(0) == alone + 6 * (2 - 1) * 3 * 16 * 32
    block = Block(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    run = nnx.jit(lambda block, x: block(x)[0])
    found = run(block, x)
    gate, up, down = (getattr(block, f"shared_{name}")[...] for name in ("gate", "up", "down"))
    block.shared_down[...] = jnp.zeros_like(down)
    without = run(block, x)
    stream = nnx.jit(_before_the_mlp)(block, x)
    normed = block.mlp_norm(stream)
    shared = (jax.nn.silu(normed @ gate) * (normed @ up)) @ down
    assert shared.shape == x.shape and np.max(np.abs(shared)) > 1e-4
    # float32 sums of 64 terms, added to numbers of about 4
    np.testing.assert_allclose(found - without, shared, atol=1e-5)


def _before_the_mlp(block: Block, x: jax.Array) -> jax.Array:
    normed = block.attention_norm(x)
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    return x + block.attention(normed, places, None, ops_without_plan())


def test_refused_sizes_say_why() -> None:
    with pytest.raises(UserError, match=r"gpt2 has no experts, found model.experts=4: set it to 0"):
        Model(ModelConfig(family="gpt2", experts=4))
    with pytest.raises(UserError, match="no model family 'lama' \\(did you mean 'llama'\\?\\)"):
        Model(ModelConfig(family="lama"))
    with pytest.raises(
        UserError, match=r"gpt2 has no grouped kv heads, found model.kv_heads=2: set it to 0"
    ):
        Model(ModelConfig(family="gpt2", heads=4, kv_heads=2))
    with pytest.raises(UserError, match=r"gpt2 has no RoPE: leave model.rope_factor alone"):
        Model(ModelConfig(family="gpt2", rope_factor=2.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_are_turned_by_a_matmul_to_the_bit(dtype: str) -> None:
    """What TPUs run; `rotate` takes the other here."""
    rng = np.random.default_rng(0)
    x, towards = (jnp.asarray(rng.standard_normal((2, 5, 3, 10)), dtype) for _ in range(2))
    for ours, want in zip(
        jax.vjp(_quarter_turn_by_matmul, x), jax.vjp(_quarter_turn, x), strict=True
    ):
        ours, want = (found(towards)[0] if callable(found) else found for found in (ours, want))
        assert ours.dtype == want.dtype
        np.testing.assert_array_equal(ours, want)


@pytest.mark.slow
def test_parallel_sublayers_add_attention_and_mlp_of_one_norm() -> None:
    config = dataclasses.replace(CONFIGS["llama"], sublayers="parallel", activation="relu2")
    block = Block(config, nnx.Rngs(0))
    x_BSD = jax.random.normal(jax.random.key(1), (2, 9, config.embed))
    positions_BS = count_positions(x_BSD)
    ops = ops_without_plan()
    normed_BSD = block.attention_norm(x_BSD)
    attention_BSD = block.attention(normed_BSD, positions_BS, None, ops)
    gate = normed_BSD @ block.gate[...]
    hidden = jnp.maximum(gate, 0) ** 2 * (normed_BSD @ block.up[...])
    want_BSD = x_BSD + attention_BSD + hidden @ block.down[...]
    # Matmuls of one gather may sum in another order: an ulp of numbers of about one.
    np.testing.assert_allclose(block(x_BSD), want_BSD, atol=1e-5)
    assert not hasattr(block, "mlp_norm")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"family": "gemma2", "sublayers": "parallel"}, "gemma2 norms what each sublayer adds"),
        ({"experts": 2, "sublayers": "parallel"}, r"model.experts=2, which are sent their tokens"),
        ({"experts": 2, "activation": "relu2"}, "experts have that of their family, silu"),
    ],
)
def test_sublayers_and_activations_that_a_family_has_not_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    config = dataclasses.replace(CONFIGS["llama"], **changes)
    with pytest.raises(UserError, match=says):
        Block(config, nnx.Rngs(0))
