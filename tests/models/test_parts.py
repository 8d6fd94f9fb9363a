"""Parts of one's own in a model, and the library's own modules in the hands of a user of Flax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Layout
from jaxpar.models import Block, Model
from jaxpar.models.hf import import_hf
from jaxpar.models.hf.export import export_hf
from jaxpar.parallel.domino import Places

LLAMA = ModelConfig(
    family="llama", vocab_size=40, layers=2, embed=16, heads=4, kv_heads=2, mlp=32, max_seq_len=16
)
ONE = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 9)), jnp.int32)
BATCH = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}


class Parallel(nnx.Module):
    """A block with parameters of Flax's own, without ops: a causal mean and an MLP, side by
    side.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D = config.embed
        into = nnx.with_partitioning(nnx.initializers.normal(0.1), ("embed", "mlp"))
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, config.mlp, kernel_init=into, rngs=rngs)
        self.mixes = nnx.List([nnx.Linear(D, D, use_bias=False, rngs=rngs) for _ in range(2)])

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        normed = self.norm(x_BSD)
        places = jnp.arange(1, x_BSD.shape[1] + 1)[:, None]
        mean = jnp.cumsum(self.mixes[0](normed), axis=1) / places
        hidden = jax.nn.gelu(self.up(normed)) @ self.up.kernel[...].T
        return (x_BSD + self.mixes[1](mean) + hidden).astype(x_BSD.dtype)


def test_parts_of_ones_own_are_used_and_no_cache_takes_one_model_for_another() -> None:
    """The config is the same, and was seen before with other parts."""
    library = Model(LLAMA)
    own = Model(LLAMA, blocks=Parallel)
    assert library.axes["blocks"]["q"] == ("layers", "embed", "heads", "head_dim")
    axes = own.axes["blocks"]
    assert axes["up"] == {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", None)}
    assert axes["mixes"]["1"] == {"kernel": ("layers", None, None)}
    params = jax.jit(own.init)(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(own.shapes())
    assert own == Model(LLAMA, blocks=Parallel) and own != library and len({own, library}) == 2
    assert own.with_config(LLAMA) is own
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    got, _ = own.hidden_states(params, {**BATCH, "positions": positions}, ONE)
    # the same mathematics, by Flax's modules themselves, one after the other
    want = params["embed"]["tokens"][BATCH["tokens"]]
    for layer in range(LLAMA.layers):
        with nnx.use_eager_sharding(False):
            block = Parallel(LLAMA, nnx.Rngs(0))
        values = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        block.norm.scale[...] = values["norm"]["scale"]
        block.up.kernel[...] = values["up"]["kernel"]
        for number, mix in enumerate(block.mixes):
            mix.kernel[...] = values["mixes"][str(number)]["kernel"]
        want = block(want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # one scan, and one by one


def test_a_list_of_modules_keeps_its_order_beyond_ten() -> None:
    """A checkpoint's keys are words, of which "10" is before "2"."""

    class Scales(nnx.Module):
        def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
            del config, rngs
            self.scales = nnx.List([nnx.Param(jnp.full(1, float(n))) for n in range(12)])

        def __call__(self, x_BSD: jax.Array) -> jax.Array:
            for number, scale in enumerate(self.scales):
                x_BSD += number * scale[...]
            return x_BSD

    model = Model(LLAMA, blocks=Scales)
    layer = jax.tree.map(lambda leaf: leaf[0], model.init(jax.random.key(0))["blocks"])
    got, routed = model.block(layer, jnp.zeros((1, 1, 16)), Places(TOKENS[:1, :1]), ONE)
    assert routed is None
    np.testing.assert_array_equal(got, sum(n * n for n in range(12)))


def test_our_parameters_have_their_names_in_the_metadata_of_flax() -> None:
    specs = nnx.get_partition_spec(nnx.state(Block(LLAMA, nnx.Rngs(0))))
    found = nnx.to_pure_dict(specs)
    assert found["q"] == P("embed", "heads", "head_dim") and found["down"] == P("mlp", "embed")
    assert found["attention_norm"] == {"scale": P("embed")}
    layout = Layout(make_mesh(fsdp=2, tensor=4))
    places = nnx.to_pure_dict(layout.sharding(specs))
    assert places["q"].spec == P("fsdp", "tensor") and places["k"].spec == P("fsdp", "tensor")


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_block_alone_is_that_of_the_model_on_one_device(family: str) -> None:
    config = replace(LLAMA, family=family, kv_heads=0)
    model = Model(config)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 8, 16))
    block = Block(config, nnx.Rngs(0))
    got = jax.jit(block)(x_BSD)
    layer = nnx.to_pure_dict(nnx.state(block))
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    want, _ = jax.jit(lambda x: model.block(layer, x, Places(positions), ONE))(x_BSD)
    np.testing.assert_array_equal(got, want)


def test_the_optimizer_of_flax_trains_a_block_whose_moments_have_the_names_of_parameters() -> None:
    block = Block(LLAMA, nnx.Rngs(0))
    optimizer = nnx.Optimizer(block, optax.adamw(1e-2), wrt=nnx.Param)
    moments = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"][0]["mu"]
    assert nnx.to_pure_dict(moments)["q"] == P("embed", "heads", "head_dim")
    x_BSD = jax.random.normal(jax.random.key(1), (2, 8, 16))

    @nnx.jit
    def step(block: Block, optimizer: nnx.Optimizer) -> jax.Array:
        def loss(block: Block) -> jax.Array:
            return jnp.mean(jnp.square(block(x_BSD) - 1))

        value, grads = nnx.value_and_grad(loss)(block)
        optimizer.update(block, grads)
        return value

    losses = [float(step(block, optimizer)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def block_with(**arguments: Any) -> type[nnx.Module]:
    """A block whose `__init__` makes one parameter, of these arguments."""

    class One(nnx.Module):
        def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
            self.w = nnx.Param(jnp.ones((config.embed, 4)), eager_sharding=False, **arguments)

        def __call__(self, x_BSD: jax.Array) -> jax.Array:
            return x_BSD * self.w[0, 0]

    return One


class Dropping(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.dropout(x_BSD)


class Asking(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs): ...

    def __call__(self, x_BSD: jax.Array, mask: Any) -> jax.Array:
        return x_BSD


class Counting(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.count = nnx.Param(jnp.zeros(2, jnp.int32))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD


@pytest.mark.parametrize(
    ("blocks", "changes", "said"),
    [
        (lambda rngs: None, {}, r"blocks=<lambda> is called with a ModelConfig and an nnx.Rngs"),
        (lambda config, rngs: 3, {}, "blocks=<lambda> made a int: a part of a model is an nnx.Mod"),
        (Dropping, {}, "blocks=Dropping has dropout.rngs.count, a RngCount.*parallel.dropout"),
        (Asking, {}, "blocks=Asking is called with an array first.*found x_BSD, mask"),
        (Counting, {}, r"blocks=Counting.count of shape \(2,\) is int32"),
        (
            block_with(out_sharding=(("embed", "mlp"), None)),
            {},
            r"One.w of shape \(16, 4\) names its dims \(\('embed', 'mlp'\), None\): a dim has one",
        ),
        (
            block_with(out_sharding=("embed", "mlp", "heads")),
            {},
            r"One.w of shape \(16, 4\) names its dims \('embed', 'mlp', 'heads'\)",
        ),
        (
            block_with(out_sharding=("embed",)),
            {},
            r"One.w of shape \(16, 4\) names its dims \('embed',\).*nnx.PARTITION_NAME",
        ),
        (
            block_with()(LLAMA, nnx.Rngs(0)),
            {},
            "blocks= takes what makes a module.*a One that is made already: give the class One",
        ),
        (block_with(), {"dropout": 0.1}, "model.dropout=0.1, and blocks=One takes no `key`"),
        (
            block_with(),
            {"masks": ("causal", "window(4)")},
            "model.masks has 2 masks in turn, and blocks=One takes no `kind`",
        ),
        (
            block_with(),
            {"lora": Lora(rank=2)},
            "model.lora.rank=2, and blocks=One has no parameter with a dim `rank`",
        ),
    ],
)
def test_what_is_no_part_is_refused_by_name(
    blocks: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        Model(replace(LLAMA, **changes), blocks=blocks)


def test_what_a_block_may_not_do_is_said_when_it_is_traced() -> None:
    class Wide(nnx.Module):
        def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
            self.w = nnx.Param(jnp.ones(16))

        def __call__(self, x_BSD: jax.Array) -> jax.Array:
            return x_BSD * self.w[...]  # float32 times bfloat16

    class Silent(Wide):
        def __call__(self, x_BSD: jax.Array) -> None: ...

    silent = Model(LLAMA, blocks=Silent)
    with pytest.raises(UserError, match="Silent made None of a stream: a block returns the array"):
        jax.eval_shape(lambda params: silent.loss(params, BATCH, ONE), silent.shapes())

    half = Plan(ONE.mesh, compute="bfloat16")
    model = Model(LLAMA, blocks=Wide)
    with pytest.raises(UserError, match=r"Wide made float32\[2, 8, 16\] of bfloat16.*astype"):
        jax.eval_shape(lambda params: model.loss(params, BATCH, half), model.shapes())
    packed = {**BATCH, "segments": TOKENS[:, 1:], "positions": TOKENS[:, 1:]}
    with pytest.raises(UserError, match="packed documents, and blocks=Wide takes no `segments_BS`"):
        jax.eval_shape(lambda params: model.loss(params, packed, ONE), model.shapes())
    named = Model(LLAMA, blocks=block_with(out_sharding=("embed", "widths")))
    with pytest.raises(UserError, match=r"blocks.w: dim 2: no logical axis 'widths'"):
        ONE.sharding(named.axes, named.shapes())


class SameNames(Block):
    """Other mathematics over the library's own parameters."""

    def __call__(self, x_BSD: jax.Array, ops: Any = None) -> jax.Array:
        return x_BSD + self.mlp(self.mlp_norm(x_BSD), ops)


def test_blocks_of_ones_own_are_imported_by_the_names_of_their_parameters_and_not_exported(
    tmp_path: Path,
) -> None:
    library = Model(LLAMA)
    export_hf(jax.jit(library.init)(jax.random.key(0)), library, tmp_path / "llama")
    other = Model(LLAMA, blocks=SameNames)
    params = import_hf(tmp_path / "llama", other, ONE)
    assert jax.tree.structure(params) == jax.tree.structure(library.shapes())
    said = "blocks=SameNames is a part of your own, and transformers would compute llama"
    with pytest.raises(UserError, match=said):
        export_hf(params, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    said = r"the parameter blocks.mixes.0.kernel \[2, 16, 16\] of Parallel is none of the checkpoi"
    with pytest.raises(UserError, match=said):
        import_hf(tmp_path / "llama", Model(LLAMA, blocks=Parallel), ONE)
