"""Makes the training step (batches on the mesh, gradients over microbatches, the update) and the evaluation step.

Shapes: A accumulation, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Wrapped

from jaxpar.base.config import Config, TrainConfig
from jaxpar.base.jax_compat import compiler_options
from jaxpar.base.plan import Plan, gradient_dtype, late_sum_axes, plan_of_one_place
from jaxpar.base.sharding import Axes, local_rows, replicated_sharding, state_axes
from jaxpar.hlo.turns import require_order
from jaxpar.models import Batch, Model, Params
from jaxpar.parallel import pipeline
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.cross_entropy import LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.token_order import TOKENS
from jaxpar.train.optimizer import learning_rate, update
from jaxpar.train.state import TrainState, gradient_axes, state_shapes, state_shardings


def put_batch(rows: Mapping[str, np.ndarray], plan: Plan) -> dict[str, jax.Array]:
    """Turn this process's rows of a global batch into global arrays [B, S] on the mesh."""
    sharding = plan.sharding(TOKENS)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in rows.items()}


def batch_rows(batch: int, plan: Plan) -> list[int]:
    """Return the rows of a global batch that this process's data loader reads."""
    return local_rows(plan.sharding(TOKENS, (batch, 1), "batch"), batch)


def empty_batch(config: Config, plan: Plan) -> dict[str, np.ndarray]:
    """Return this process's rows of a batch in which no label counts."""
    rows = len(batch_rows(config.train.batch, plan))
    return {
        name: np.full((rows, config.data.seq_len), -1 if name == "labels" else 0, np.int32)
        for name in batch_shapes(config, plan)
    }


def batch_shapes(config: Config, plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a training batch as ShapeDtypeStructs with shardings, for which the step is compiled."""
    shape = (config.train.batch, config.data.seq_len)
    leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=plan.sharding(TOKENS, shape, "batch"))
    names = ("tokens", "labels", "positions", "segments") if config.data.pack else ("tokens", "labels")
    return dict.fromkeys(names, leaf)


def step_shapes(
    model: Model, config: Config, plan: Plan
) -> tuple[TrainState[jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
    """Return the arguments of a training step as ShapeDtypeStructs with shardings, for tracing and compiling it."""
    return state_shapes(model, config, plan), batch_shapes(config, plan)


def make_train_step(model: Model, config: Config, plan: Plan) -> Wrapped:
    """Make the jitted step `(state, batch) -> (state, metrics)`, which donates the state.

    Metrics are float32 scalars: `loss` (nats a token, without z-loss), `grad_norm` (before clipping), `learning_rate`
    and `tokens` (labels that count). With experts there are also `router_balance` (1 = all alike) and `router_z` (per
    token), which are means over the layers.
    """
    schedule, train = learning_rate(config.train), config.train
    shardings = state_shardings(model, config, plan)

    def step(state: TrainState[jax.Array], batch: Batch) -> tuple[TrainState[jax.Array], dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(train.seed), state.step) if config.model.dropout else None
        sums, grads = gradients(model, state.params, batch, plan, key, train.accumulation, loss_weights(train))
        with jax.named_scope("update"):
            trained = model.trained(state.params), state.opt_state, grads
            new = update(*trained, sums, model.trained(model.axes), train, plan)
        metrics = {
            "loss": sums.nll / sums.tokens,
            "grad_norm": new.norm,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": sums.tokens,
        }
        if sums.routed is not None:
            routed = batch["tokens"].size
            metrics |= {"router_balance": sums.routed.balance / routed, "router_z": sums.routed.z / routed}
        return TrainState(state.step + 1, model.merge(state.params, new.params), new.opt_state), metrics

    return jax.jit(
        step,
        in_shardings=(shardings, plan.sharding(TOKENS)),
        out_shardings=(shardings, replicated_sharding(plan)),
        donate_argnums=0,
        compiler_options=compiler_options(plan.mesh),
    )


def loss_weights(train: TrainConfig) -> LossWeights:
    """Return the weights of the losses that a config adds to the likelihood."""
    return LossWeights(train.z_loss, train.balance_loss, train.router_z_loss)


def gradients(
    model: Model, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, accumulation: int,
    weights: LossWeights,
) -> tuple[LossSums, Params]:  # fmt: skip
    """Compute the summed loss of a global batch and its float32 gradient, one of `accumulation` microbatches at a time.

    The gradient is that of the parameters that are trained (`Model.trained`), and no other is made.
    They are sums and not means, so that dividing by the total token count weighs every token alike, however they were
    split. Where each device can add up its own, devices are summed after the last microbatch (`late_sum_axes`).
    """
    over = late_sum_axes(plan, accumulation, key is not None or bool(model.config.experts))
    if not over:
        return _accumulate(model, params, batch, plan, key, accumulation, weights)
    one, axes = plan_of_one_place(plan, over), (LossSums(*[()] * 3), gradient_axes(model))  # pyright: ignore[reportArgumentType]

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype)

    def local(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        parts = _accumulate(model, params, batch, one, None, accumulation, weights)
        with jax.named_scope("accumulate"):
            return manual(lambda parts: jax.tree.map(total, parts), one, (axes,), axes)(parts)

    # Axes of one device are manual too: if no other axis is left, XLA has nothing to split around a kernel.
    here = {*over, *(axis for axis, size in plan.mesh.shape.items() if size == 1)}
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=(P(), P(over)), out_specs=P(), axis_names=here, check_vma=False
    )(params, dict(batch))


def _accumulate(
    model: Model, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, accumulation: int,
    weights: LossWeights,
) -> tuple[LossSums, Params]:  # fmt: skip
    def of_microbatch(rows: Batch, key: jax.Array | None) -> tuple[LossSums, Params]:
        if plan.size("stage") > 1:
            return pipeline.gradients(model, params, rows, plan, key, weights)

        def loss(trained: Params) -> tuple[jax.Array, LossSums]:
            sums = model.loss(model.merge(params, trained), rows, plan, key, weights)
            return sums.loss, sums

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(model.trained(params))
        return sums, grads

    if accumulation == 1:
        return of_microbatch(batch, key)

    def split(rows_BS: jax.Array) -> jax.Array:
        # Row r goes to microbatch r % A, so every device keeps its own rows.
        rows_BAS = rows_BS.reshape(-1, accumulation, rows_BS.shape[1])
        return plan.constrain(rows_BAS.swapaxes(0, 1), (None, *TOKENS))

    def add(total: tuple[LossSums, Params], item: tuple[Batch, jax.Array]) -> tuple[tuple[LossSums, Params], None]:
        rows, index = item
        more, more_grads = of_microbatch(rows, None if key is None else jax.random.fold_in(key, index))
        with jax.named_scope("accumulate"):
            sums, grads = total
            grads = jax.tree.map(lambda x, y: (x + on_device(y)).astype(x.dtype), grads, more_grads)
            return (jax.tree.map(jnp.add, sums, more), grads), None

    def zeros(param: jax.Array, axes: Axes) -> jax.Array:
        return plan.constrain(jnp.zeros(param.shape, gradient_dtype(axes, plan)), state_axes(axes))

    routed = RouterSums(*jnp.zeros(2)) if model.config.experts else None
    trained = model.trained(params), model.trained(model.axes)
    nothing = LossSums(*jnp.zeros(3), routed=routed), jax.tree.map(zeros, *trained)
    return jax.lax.scan(add, nothing, (jax.tree.map(split, dict(batch)), jnp.arange(accumulation)))[0]


def make_eval_step(model: Model, plan: Plan) -> Wrapped:
    """Make the jitted step `(params, batch) -> (nll in nats, tokens)`, both sums over the batch."""

    def step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        stages = plan.size("stage") > 1
        sums = pipeline.loss(model, params, batch, plan) if stages else model.loss(params, batch, plan)
        return sums.nll, sums.tokens

    return jax.jit(step)


def compile_eval_step(model: Model, config: Config, plan: Plan) -> Compiled:
    """Compile `make_eval_step` for a config's parameters and batches.

    Raises:
      UserError: on CPU, collectives may be mixed up (`require_order`).
    """
    state, batch = step_shapes(model, config, plan)
    compiled = make_eval_step(model, plan).lower(state.params, batch).compile()
    require_order(compiled, plan.mesh.devices.flat)
    return compiled
