"""A block of one's own (PaLM's, with attention and MLP side by side) through what a preset has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import train, verify
from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.kernels import masks
from jaxpar.models import Block, Model
from jaxpar.parallel.ops import AttentionCall
from jaxpar.train.activations import activations, unnamed_bytes
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import plan_notes
from jaxpar.train.restore import load_run, state_metadata
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import init_state

HEADS = ("heads", "head_dim")
KV_HEADS = ("kv_heads", "head_dim")
MLP = ("mlp",)
SIZES: dict[str, Any] = {
    "model.family": "llama",
    "model.vocab_size": 61,
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp": 48,
    "model.max_seq_len": 32,
    "data.seq_len": 16,
    "train.batch": 8,
    "mesh.platform": "cpu",
}
CUBE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    init = nnx.with_partitioning(nnx.initializers.normal(0.1), axes)
    return nnx.Param(init(rngs.params(), shape))


class ParallelBlock(nnx.Module):
    """y = x + attention(norm(x)) + mlp(norm(x)), with parameters as plain Flax declares them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, H, K, h = config.embed, config.heads, config.kv_head_count, config.head_size
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.query = matrix(rngs, (D, H, h), ("embed", *HEADS))
        self.key = matrix(rngs, (D, K, h), ("embed", *KV_HEADS))
        self.value = matrix(rngs, (D, K, h), ("embed", *KV_HEADS))
        self.mix = matrix(rngs, (H, h, D), (*HEADS, "embed"))
        self.up = matrix(rngs, (D, config.mlp), ("embed", "mlp"))
        self.down = matrix(rngs, (config.mlp, D), ("mlp", "embed"))

    def __call__(self, x_BSD: jax.Array, segments_BS: Any, ops: Any) -> jax.Array:
        weights = [self.query[...], self.key[...], self.value[...], self.up[...]]
        q, k, v, up = ops.column_linear(
            self.norm(x_BSD), weights, [HEADS, KV_HEADS, KV_HEADS, MLP], seq="attention_seq"
        )
        seen = ops.attention(AttentionCall(q, k, v, masks.Causal(), segments_BS))
        attended = ops.row_linear(seen, self.mix[...], HEADS, seq="attention_seq")
        return x_BSD + attended + ops.row_linear(jax.nn.gelu(up), self.down[...], MLP)


class Mean(nnx.Module):
    """A block that mixes tokens itself, so that nothing of it is in a cache."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.weight = matrix(rngs, (config.embed, config.embed), ("embed", None))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        mean = jnp.cumsum(x_BSD, axis=1) / jnp.arange(1, x_BSD.shape[1] + 1)[:, None]
        return x_BSD + mean @ self.weight[...]


def experiment_of(blocks: Any = ParallelBlock, **changes: Any) -> Experiment:
    config = override(Config(), SIZES | CUBE | changes)
    return jaxpar.make_experiment(config, model=Model(config.model, blocks=blocks))


class Gated(nnx.Module):
    """A block with a logical axis of its own, `gates`, and no documents."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.open = matrix(rngs, (config.embed, 8), ("embed", "gates"))
        self.close = matrix(rngs, (8, config.embed), ("gates", "embed"))

    def __call__(self, x_BSD: jax.Array, ops: Any) -> jax.Array:
        gates = ops.column_linear(x_BSD, self.open[...], ("gates",))
        return x_BSD + ops.row_linear(jax.nn.sigmoid(gates), self.close[...], ("gates",))


def test_a_logical_axis_of_its_own_is_split_as_a_run_s_rules_say() -> None:
    with pytest.raises(UserError, match=r"no logical axis 'gates'.*rules.own=\[\"gates=\"\]"):
        experiment_of(Gated)
    experiment = experiment_of(Gated, **{"rules.own": ("gates=tensor",)})
    assert experiment.state.params["blocks"]["open"].sharding.spec == P(None, "fsdp", "tensor")
    found = verify.config(experiment)
    assert found.equal, found


def test_packed_documents_are_refused_before_a_step_is_traced() -> None:
    rules = {"rules.own": ("gates=",)}
    with pytest.raises(
        UserError, match="packed documents, and blocks=Gated takes no `segments_BS`"
    ):
        experiment_of(Gated, **rules, **{"data.pack": True})


def test_its_loss_and_gradients_are_those_of_one_device_on_data_fsdp_and_tensor() -> None:
    found = verify.config(experiment_of())
    assert found.equal, found
    names = {row.name for row in found.checks[0].rows}
    assert {"blocks.query", "blocks.mix", "blocks.norm.scale"} <= names


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.stage": 2, "mesh.fsdp": 1, "memory.policy": "full"},
        pytest.param(
            {"mesh.context": 2, "mesh.data": 1, "data.pack": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["stages", "context, packed"],
)
def test_so_they_are_in_a_pipeline_and_under_context_parallelism(changes: dict[str, Any]) -> None:
    found = verify.config(experiment_of(**changes))
    assert found.equal, found


@pytest.mark.slow
def test_it_has_a_cache_in_generation_for_nothing() -> None:
    model = experiment_of().model
    one = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    params = jax.jit(model.init)(jax.random.key(0))
    prompt = [5, 17, 3]
    (got,) = train.generate(model, params, one, [prompt], 4)
    logits = jax.jit(lambda params, tokens: model.logits(params, {"tokens": tokens}, one))
    ids = list(prompt)
    for _ in range(4):  # the same by reading all of the text anew for each token
        padded = jnp.asarray([ids + [0] * (7 - len(ids))])
        ids.append(int(jnp.argmax(logits(params, padded)[0, len(ids) - 1])))
    assert got == ids[3:]
    mean = Model(model.config, blocks=Mean)
    with pytest.raises(UserError, match=r"no block calls ops.attention.*no cache"):
        train.generate(mean, jax.jit(mean.init)(jax.random.key(0)), one, [prompt], 2)


def test_what_is_kept_of_it_is_counted_and_a_policy_that_keeps_nothing_is_said() -> None:
    kept = experiment_of()
    names = [one.name for one in activations(kept)]
    assert names == ["block_input", "attention_out", "attention_lse"]
    assert unnamed_bytes(kept) > 0
    one = activations(kept)[0]
    assert one.kept_bytes == 2 * 8 * 16 * 32 * 4 // 8  # layers, batch, tokens, embed, float32
    said = "memory.policy=selective keeps activations by name, and this model's block names none"
    own = plan_notes(experiment_of(Mean, **{"memory.policy": "selective"}))
    assert [note for note in own if note.startswith(said)]
    for blocks, policy in ((Block, "selective"), (ParallelBlock, "dots"), (Mean, "full")):
        notes = plan_notes(experiment_of(blocks, **{"memory.policy": policy}))
        assert not any("by name" in note for note in notes)
    with pytest.raises(UserError, match=r"memory.keep.up: Mean .* it has block_input"):
        experiment_of(Mean, **{"memory.keep.up": "save"})


@pytest.mark.slow
def test_a_checkpoint_is_not_read_as_a_model_of_other_parts(tmp_path: Path) -> None:
    """The parameters have the same names and shapes, and mean something else."""

    class Backwards(Block):
        """The library's parameters, and other mathematics."""

    own = experiment_of(Backwards)
    state = init_state(own)
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", own.config.checkpoint)
    checkpoints.save(1, state, state_metadata(own, None, None, None))
    checkpoints.close()
    _, params = load_run(tmp_path, 1, own)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    library = dataclasses.replace(own, model=Model(own.config.model))
    said = r"parts are blocks=Backwards, and here they are the library's own: give make_experiment"
    with pytest.raises(UserError, match=said):
        load_run(tmp_path, 1, library)
