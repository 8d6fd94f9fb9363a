"""Collectives of the CPU that could be mixed up: they are found, and the library's own programs
have none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.collective_order import find_unordered, require_order
from jaxpar.models import Model
from jaxpar.parallel.cpu_collective_order import order_token_after, ready_after
from jaxpar.parallel.pipeline import ticks
from jaxpar.train import step
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan


def two_loops(ordered: bool) -> Any:
    """A program with two loops of hops, which need nothing of one another."""
    plan = Plan(make_mesh(MeshSpec(data=4), jax.devices()[:4]))

    def hops(x: jax.Array) -> jax.Array:
        around = [(i, (i + 1) % 4) for i in range(4)]
        return jax.lax.fori_loop(
            0, 5, lambda _, x: jnp.tanh(jax.lax.ppermute(x, "data", around) - x), x
        )

    def both(
        x: jax.Array,
        y: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        x = hops(x)
        if ordered:
            order_token = order_token_after(jnp.int32(0), x, (None, None), plan)
        else:
            order_token = None
        return x, hops(ready_after(y, order_token))

    run = jax.shard_map(
        both, mesh=plan.mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    x, y = jax.random.normal(
        jax.random.key(0),
        (2, 12, 3),
    )
    compiled = jax.jit(run).lower(x, y).compile()
    return compiled, compiled(x, y)


def test_two_loops_that_may_run_at_once_are_found_and_a_turn_orders_them() -> None:
    loose, want = two_loops(ordered=False)
    ((first, second),) = find_unordered(loose.as_text())
    assert (first.opcode, second.opcode) == ("while", "while")
    with pytest.raises(
        UserError,
        match=r"while.* and .*while.* train.accumulation",
    ):
        require_order(loose, jax.devices())
    tied, got = two_loops(ordered=True)
    require_order(tied, jax.devices())
    assert find_unordered(tied.as_text()) == []
    # an order token changes no bit
    assert all(jax.tree.map(lambda x, y: bool((x == y).all()), got, want))


PLAN = {
    "model.family": "llama",
    "model.heads": 4,
    "model.layers": 4,
    "model.embed": 64,
    "model.vocab_size": 64,
    "data.seq_len": 32,
    "train.batch": 32,
    "mesh.stage": 2,
    "mesh.tensor": 2,
    "pipeline.microbatches": 4,
}
RINGS = {"overlap.gather": "ring", "overlap.scatter": "ring"}
CASES = [
    {"pipeline.schedule": "1f1b", "pipeline.stash": "stage", "memory.policy": "dots", **RINGS},
    {
        "pipeline.schedule": "1f1b",
        "pipeline.stash": "blocks",
        "memory.policy": "none",
        "overlap.domino": "on",
        "mesh.fsdp": 2,
        "mesh.tensor": 1,
        "train.accumulation": 2,
    },
    {"pipeline.schedule": "looped", "pipeline.virtual": 2, "mesh.tensor": 1, "mesh.context": 2},
    {
        "pipeline.schedule": "gpipe",
        "memory.policy": "full",
        "model.experts": 2,
        "mesh.tensor": 1,
        "mesh.expert": 2,
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_pipelines_collectives_have_one_order(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without order tokens the first died or gave a wrong loss, and XLA gave no other sign."""
    config = override(Config(), PLAN | CASES[case])
    model = Model(config.model)
    plan = make_plan(config, jax.devices()[:4])

    experiment = Experiment(config, model, plan)

    def found() -> list[Any]:
        program = step.make_train_step(experiment)
        return find_unordered(program.lower(*step.step_shapes(experiment)).compile().as_text())

    assert found() == []
    if case < 1:
        monkeypatch.setattr(ticks, "first_order_token", lambda plan: None)
        assert found() != []


@pytest.mark.slow
def test_an_update_a_layer_at_a_time_has_one_order() -> None:
    """The loop over layers could run beside the reduce-scatter of the embedding's gradient."""
    changes = {
        "mesh.stage": 1,
        "mesh.fsdp": 2,
        "memory.parameters": "offload",
        "memory.optimizer": "offload",
    }
    config = override(Config(), PLAN | changes | {"pipeline.microbatches": 0})
    model = Model(config.model)
    plan = make_plan(config, jax.devices()[:4])
    experiment = Experiment(config, model, plan)
    program = step.make_train_step(experiment)
    assert find_unordered(program.lower(*step.step_shapes(experiment)).compile().as_text()) == []


@pytest.mark.slow
def test_an_evaluation_in_a_pipeline_has_one_order() -> None:
    config = override(Config(), PLAN | RINGS | {"pipeline.schedule": "1f1b"})
    model = Model(config.model)
    plan = make_plan(config, jax.devices()[:4])
    assert find_unordered(step.compile_eval_step(Experiment(config, model, plan)).as_text()) == []
