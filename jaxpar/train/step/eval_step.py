"""The evaluation step: the loss of a batch, in the microbatches of a training step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.stages import Compiled, Wrapped

from jaxpar.base.compiled_for import compiling_for
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Batch, Params, in_parts
from jaxpar.parallel import pipeline
from jaxpar.parallel.host_memory import on_device
from jaxpar.train.batch import batch_shapes, cut_microbatches
from jaxpar.train.experiment import Experiment
from jaxpar.train.state import TrainState


def make_eval_step(experiment: Experiment) -> Wrapped:
    """Make the jitted step `(params, batch) -> (nll in nats, tokens)`, both float32 sums over the
    batch.

    It takes the batch in the microbatches of a training step, one after another, and is compiled
    with the same options, so that it works with no more memory.
    """
    model = experiment.model
    plan = experiment.plan
    accumulation = experiment.config.train.accumulation

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

    return jax.jit(step, compiler_options=experiment.compiler_options)


def compile_eval_step(experiment: Experiment) -> Compiled:
    """Compile `make_eval_step` for an experiment's parameters and batches; on CPU `require_order`
    may refuse the program.
    """
    batch = batch_shapes(experiment.config, experiment.plan, teacher=False)
    step = make_eval_step(experiment)
    with compiling_for(experiment.devices[0]):
        lowered = step.lower(experiment.state.params, batch)
    compiled = lowered.compile()
    require_order(compiled, experiment.devices)
    return compiled


def evaluation_params(experiment: Experiment, state: TrainState[jax.Array]) -> Params:
    """Return the parameters for evaluation, generation and export, where a state's own lie: an
    optimizer that averages them evaluates the average.

    Args:
      experiment: what is trained.
      state: a state of its training.
    """
    model = experiment.model
    optimizer = experiment.optimizer
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
