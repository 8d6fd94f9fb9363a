"""The ops of a model as a protocol: a further implementation is one class, and goes wherever ops
go.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.base.config import Config, override
from jaxpar.kernels.masks import Causal
from jaxpar.models import Model
from jaxpar.parallel import AttentionCall, MeshOps, Ops, WrappedOps
from jaxpar.parallel.attention_state import run_with_states
from jaxpar.train.generation.generator import Generator
from jaxpar.train.step import loss_weights
from jaxpar.verify.of_config.random_inputs import random_batch, random_params
from jaxpar.verify.reference_ops import ReferenceOps

Seen = dict[str, list[jax.Array]]


class Taps(WrappedOps):
    """An identity: what each op returns is noted under the op's name, and handed on as it is."""

    def __init__(self, ops: Ops, seen: Seen):
        super().__init__(ops)
        self.seen = seen

    def note(self, name: str, found: Any) -> Any:
        self.seen.setdefault(name, []).extend(jax.tree.leaves(found))
        return found

    def column_linear(self, *given: Any, **named: Any) -> Any:
        return self.note("column_linear", super().column_linear(*given, **named))

    def row_linear(self, *given: Any, **named: Any) -> jax.Array:
        return self.note("row_linear", super().row_linear(*given, **named))

    def lookup(self, *given: Any) -> jax.Array:
        return self.note("lookup", super().lookup(*given))

    def attention(self, call: AttentionCall) -> jax.Array:
        return self.note("attention", super().attention(call))


SIZES: dict[str, Any] = {
    "model.family": "llama",
    "model.layers": 2,
    "model.embed": 16,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.mlp": 24,
    "model.vocab_size": 50,
    "model.max_seq_len": 16,
    "model.scan_layers": False,  # what is noted in a loop would not outlive it
    "data.seq_len": 8,
    "train.batch": 8,
    "mesh.platform": "cpu",
}


@pytest.mark.parametrize(
    ("ops", "mesh"),
    [
        (MeshOps, {}),
        (ReferenceOps, {}),
        (MeshOps, {"mesh.data": 2, "mesh.tensor": 2}),
        (MeshOps, {"mesh.tensor": 2, "overlap.domino": "sequence"}),
    ],
)
def test_taps_are_one_class_and_leave_the_loss_as_it_is(ops: Any, mesh: dict[str, Any]) -> None:
    config = override(Config(), SIZES | mesh)
    devices = jax.devices()[: config.mesh.data * config.mesh.tensor]
    plan = jaxpar.make_experiment(config, devices).plan
    params = random_params(Model(config.model), 0)
    batch = random_batch(config, 0)

    @partial(jax.jit, static_argnums=0)
    def loss(maker: Any, params: Any) -> tuple[Any, Seen]:
        seen: Seen = {}
        model = Model(config.model, ops=lambda plan: maker(plan, seen))
        sums = model.loss(params, batch, plan, weights=loss_weights(config))
        return sums, seen

    plain, nothing = loss(lambda plan, seen: ops(plan), params)
    tapped, seen = loss(lambda plan, seen: Taps(ops(plan), seen), params)
    assert nothing == {}
    np.testing.assert_array_equal(plain.loss, tapped.loss)
    halves = 2 if "overlap.domino" in mesh else 1
    # of each layer q, k and v, gate and up; then out and down
    counts = {"lookup": 1, "attention": 2 * halves, "column_linear": 10 * halves}
    assert {name: len(found) for name, found in seen.items()} == counts | {"row_linear": 4 * halves}
    assert all(np.all(np.isfinite(x)) for found in seen.values() for x in found)


def test_generation_goes_through_the_ops_of_the_model() -> None:
    config = override(Config(), SIZES)
    plan = jaxpar.make_experiment(config, jax.devices()[:1]).plan
    seen: Seen = {}
    params = random_params(Model(config.model), 0)
    plain = Generator(Model(config.model), params, plan)
    tapped = Generator(
        Model(config.model, ops=lambda plan: Taps(MeshOps(plan), seen)), params, plan
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    assert tapped.generate(prompts, max_tokens=4) == plain.generate(prompts, max_tokens=4)
    assert {"lookup", "attention", "column_linear", "row_linear"} == set(seen)


def test_what_each_attention_of_a_block_leaves_is_returned_and_given_to_the_next_run() -> None:
    ops = MeshOps(jaxpar.make_experiment(override(Config(), SIZES), jax.devices()[:1]).plan)
    x = jnp.ones((1, 3, 2, 4))

    def attend(call: AttentionCall, state: Any, ops: Ops) -> tuple[jax.Array, Any]:
        before = 0 if state is None else state
        return ops.attention(call), before + call.softcap

    def block(ops: Ops) -> list[jax.Array]:
        return [ops.attention(AttentionCall(x, x, x, Causal(), softcap=cap)) for cap in (2.0, 5.0)]

    outs, left = run_with_states(block, ops, attend)
    assert left == (2.0, 5.0)
    again, left = run_with_states(block, ops, attend, left)
    assert left == (4.0, 10.0)
    np.testing.assert_array_equal(outs, again)


@pytest.mark.parametrize("packed", [False, True])
def test_later_queries_see_in_the_reference_what_they_see_in_the_whole(packed: bool) -> None:
    ops = ReferenceOps(jaxpar.make_experiment(override(Config(), SIZES), jax.devices()[:1]).plan)
    q, k, v = (
        jax.random.normal(key, (2, 8, heads, 4))
        for key, heads in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
    )
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1]]) if packed else None
    whole = AttentionCall(q, k, v, Causal(), segments)
    later = whole._replace(q_BSHh=q[:, 5:], q_start=5)
    # float32 sums in another order
    np.testing.assert_allclose(ops.attention(later), ops.attention(whole)[:, 5:], rtol=1e-5)
