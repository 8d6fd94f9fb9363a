"""The evaluation step: the loss of a batch, in the microbatches of a training step."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.stages import Compiled, Wrapped

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import step_options
from jaxpar.base.config import Config
from jaxpar.base.jax_compat import Option
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import AnyModel, Batch, Params, in_parts
from jaxpar.parallel import pipeline
from jaxpar.parallel.host_memory import on_device
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.step.batch import batch_shapes, cut_microbatches
from jaxpar.train.step.state import TrainState, state_shapes


def make_eval_step(
    model: AnyModel, plan: Plan, accumulation: int = 1, options: Mapping[str, Option] | None = None
) -> Wrapped:
    """Make the jitted step `(params, batch) -> (nll in nats, tokens)`, both float32 sums over the
    batch.

    It takes the batch in the microbatches of a training step, one after another, and is compiled
    with the same options, so that it works with no more memory.

    Args:
      model: the model.
      plan: where arrays lie and how the step runs.
      accumulation: the number of microbatches.
      options: options of the compiler; None = those of a training step on this mesh.
    """
    if options is None:
        options = step_options(plan.mesh)

    def of_microbatch(params: Params, rows: Batch) -> tuple[jax.Array, jax.Array]:
        stages = plan.size("stage") > 1
        if stages:
            sums = pipeline.loss(in_parts(model, "mesh.stage"), params, rows, plan)
        else:
            sums = model.loss(params, rows, plan)
        return sums.nll, sums.tokens

    def step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if accumulation == 1:
            return of_microbatch(params, batch)

        def add(
            total: tuple[jax.Array, jax.Array], rows: Batch
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            return jax.tree.map(jnp.add, total, of_microbatch(params, rows)), None

        zero = jnp.zeros((), jnp.float32)
        return jax.lax.scan(add, (zero, zero), cut_microbatches(batch, accumulation, plan))[0]

    return jax.jit(step, compiler_options=dict(options))


def compile_eval_step(model: AnyModel, config: Config, plan: Plan) -> Compiled:
    """Compile `make_eval_step` for a config's parameters, batches and compiler options; on CPU
    `require_order` may refuse the program."""
    state = state_shapes(model, config, plan)
    batch = batch_shapes(config, plan, teacher=False)
    options = step_options(plan.mesh, config.compiler.options)
    step = make_eval_step(model, plan, config.train.accumulation, options)
    with compiling_for(plan.mesh.devices.flat[0]):
        lowered = step.lower(state.params, batch)
    compiled = lowered.compile()
    require_order(compiled, plan.mesh.devices.flat)
    return compiled


def evaluation_params(
    model: AnyModel, state: TrainState[jax.Array], optimizer: Optimizer
) -> Params:
    """Return the parameters for evaluation, generation and export, where a state's own lie: an
    optimizer that averages them evaluates the average.

    Args:
      model: the model.
      state: a state of its training.
      optimizer: the one that it is trained with.
    """
    if not optimizer.averages(state.opt_state):
        return state.params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)

    def averaged(opt_state: optax.OptState, params: Params) -> Params:
        found = optimizer.evaluation_params(
            jax.tree.map(on_device, opt_state),
            jax.tree.map(on_device, model.trained(params)),
        )
        return model.merge(params, found)

    return jax.jit(averaged, out_shardings=shardings)(state.opt_state, state.params)
