"""The training step: state and its shardings, gradients over microbatches, update, evaluation.

Shapes: A accumulation, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.config import Config, TrainConfig
from jaxpar.base.errors import UserError
from jaxpar.base.heads import fit_rules
from jaxpar.base.jax_compat import compiler_options, once_options
from jaxpar.base.mesh import make_mesh
from jaxpar.base.plan import Plan, gradient_dtype, one_along, summed_last
from jaxpar.base.sharding import ShardingRules, local_rows, path_name, replicated, state_axes, tree_shardings
from jaxpar.hlo.turns import require_order
from jaxpar.models import Batch, Model, Params
from jaxpar.parallel import pipeline
from jaxpar.parallel.collectives import further_split, is_axes, manual
from jaxpar.parallel.context import check_split
from jaxpar.parallel.cross_entropy import LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import HOST, check_offload, offload_notes, on_device
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.ops import attention_notes, overlap_notes
from jaxpar.parallel.pipeline import check_stages, microbatches, pipeline_notes, reorder_layers, stored_order
from jaxpar.parallel.token_order import TOKENS
from jaxpar.train.moments import Quantized, moments_of, packed, scales_sharding, with_moments
from jaxpar.train.optimizer import decay_mask, learning_rate, make_optimizer
from jaxpar.train.saved_activations import check_names
from jaxpar.train.update import update


class TrainState(NamedTuple):
    """Everything a step changes. `step` counts finished steps (int32 scalar)."""

    step: Any
    params: Params
    opt_state: Any


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """The plan of a config on these devices (all, when None), checked against the model and the batch.

    Its rules are the config's, but for more devices than heads: see `fit_rules`. What was changed, `plan_notes` says.

    Raises:
      UserError: a mesh that does not fit the devices, a dim or a batch that its mesh axes do not divide, an optimizer
        state that is split neither as its parameters nor further, or what `context.check_split` refuses.
    """
    mesh = make_mesh(config.mesh, devices)
    rules, _ = _fitted(config, mesh)
    memory = config.memory
    plan = Plan(
        mesh, rules, config.precision.compute, memory.policy, config.overlap, config.context, memory.loss_mib,
        config.kernels.attention, config.pipeline, memory.keep, memory.parameters, memory.optimizer,
        config.precision.params, config.precision.gradients, config.precision.moments,
    )  # fmt: skip
    model, train, shards = Model(config.model), config.train, plan.size("batch")
    microbatch = train.batch // train.accumulation
    if plan.size("stage") > 1:
        count = microbatches(config, plan.mesh.shape)
        check_stages(plan, model.config.layers, count)
        plan, microbatch = replace(plan, pipeline=replace(config.pipeline, microbatches=count)), microbatch // count
    shapes = param_shapes(model, plan)
    tree_shardings(shapes, model.axes, plan)
    tree_shardings(shapes, _state_axes(model), plan)
    further_split(("state_embed",), ("embed",), plan)
    for stored, used in ((STORED, GATHERED), (STORED, ATTENDED), (ATTENDED, GATHERED)):
        further_split(stored, used, plan)
    plan.sharding((*ATTENDED[:2], "heads", "head_dim"), name="attention")
    if microbatch % shards:
        fitting = -(-microbatch // shards) * shards * train.accumulation
        raise UserError(
            f"train.batch={train.batch} / accumulation={train.accumulation} is a microbatch of {microbatch} sequences, "
            f"which {shards} data-parallel shards do not divide: try --train.batch {fitting}"
        )
    if plan.overlap.domino == "on" and microbatch // shards % 2:
        raise UserError(
            f"overlap.domino cuts a device's microbatch of {microbatch // shards} sequences in two halves: "
            f"try --train.batch {2 * train.batch}, or leave domino out"
        )
    activation = (microbatch, config.data.seq_len, config.model.embed)
    plan.sharding(("batch", "seq", None), activation, "activations")
    plan.sharding(("batch", "residual_seq", None), activation, "residual stream")
    sizes = config.model
    check_split(
        plan, plan.context.strategy, config.data.seq_len, sizes.heads, sizes.kv_heads or sizes.heads, sizes.dropout
    )
    check_names(config, plan)
    if asked := offload_asked(plan):
        check_offload(asked, plan.mesh.devices.flat[0], memory.offload_anyway)
    return plan


def plan_notes(config: Config, plan: Plan) -> list[str]:
    """What a plan does otherwise than its config asks for, a line each for the log."""
    pipelines = pipeline_notes(config, plan, Model(config.model).parameter_count())
    asked = offload_asked(plan)
    offloads = offload_notes(asked, plan.mesh.devices.flat[0]) if asked else []
    return [
        *_fitted(config, plan.mesh)[1], *overlap_notes(plan, config.data.seq_len), *pipelines, *offloads,
        *_sum_notes(config, plan), *kernel_notes(config, plan),
    ]  # fmt: skip


def kernel_notes(config: Config, plan: Plan, training: bool = True) -> list[str]:
    """Why no kernel serves the attention of a training step, or of an evaluation, where the devices have some."""
    model, data, train = config.model, config.data, config.train
    parts = plan.size("batch") * (train.accumulation * max(plan.pipeline.microbatches, 1) if training else 1)
    return attention_notes(
        plan, data.seq_len, model.head_dim or model.embed // model.heads, training and model.dropout > 0, model.window,
        data.pack, max(train.batch // parts, 1),
    )  # fmt: skip


def _sum_notes(config: Config, plan: Plan) -> list[str]:
    """Why gradients that could be summed over devices once are not."""
    parts, over = config.train.accumulation, summed_last(plan, config.train.accumulation, whole=False)
    why = "experts are balanced" if config.model.experts else "dropout is drawn" if config.model.dropout else ""
    if not over or not why:
        return []
    return [f"gradients are summed over {' x '.join(over)} after every microbatch of {parts}: {why} over all of one"]


def offload_asked(plan: Plan) -> str:
    """The settings that ask for host memory; empty = none."""
    names = [f"keep.{name}" for name in plan.offloads]
    names += [name for name in ("optimizer", "parameters") if getattr(plan, name) == "offload"]
    return ", ".join(f"memory.{name} = offload" for name in names)


def _fitted(config: Config, mesh: Mesh) -> tuple[ShardingRules, list[str]]:
    model = config.model
    return fit_rules(config.rules, model.heads, model.kv_heads or model.heads, mesh.shape)


Order = Sequence[int] | None  # of stored layers: see `jaxpar.parallel.pipeline.stored_order`


def state_shapes(model: Model, config: Config, plan: Plan, order: Order | Literal["plan's"] = "plan's") -> TrainState:
    """The state as ShapeDtypeStructs, without shardings, its layers stored in this order."""
    order = stored_order(plan, config.model.layers) if order == "plan's" else order
    return jax.eval_shape(partial(_with_params, model, config), model.shapes(order))


def param_shapes(model: Model, plan: Plan) -> Params:
    """The parameters as ShapeDtypeStructs, as the plan stores them."""
    shapes = model.shapes(stored_order(plan, model.config.layers))
    return jax.eval_shape(lambda params: _as_stored(params, model, plan.params), shapes)


def _as_stored(params: Params, model: Model, dtype: str) -> Params:
    """Parameters with their matrices in the dtype that the config stores them in; vectors stay float32."""
    matrices = decay_mask(model.axes)
    return jax.tree.map(lambda x, matrix: x.astype(dtype if matrix else jnp.float32), params, matrices)


def state_shardings(
    model: Model, config: Config, plan: Plan, order: Order | Literal["plan's"] = "plan's"
) -> TrainState:
    """Where the state lives: moments as their parameters or split further; every scalar replicated by name.

    (A scalar made outside jit would sit on device 0 and clash with the mesh after a restore.) `order` as above.
    """
    shapes, everywhere = state_shapes(model, config, plan, order), replicated(plan)
    matrices = decay_mask(model.axes)

    def of_moment(path: Any, axes: Any, matrix: bool, moment: Any) -> Any:
        host = matrix and plan.optimizer == "offload"
        name = path_name(path)
        if isinstance(moment, Quantized):
            codes = plan.sharding(axes, moment.codes.shape, name)
            return Quantized(_placed(codes, host), _placed(scales_sharding(moment, axes, plan), host))
        return _placed(plan.sharding(axes, moment.shape, name), host)

    moments = (
        jax.tree_util.tree_map_with_path(of_moment, _state_axes(model), matrices, moment, is_leaf=is_axes)
        for moment in moments_of(shapes.opt_state)
    )
    opt_state = jax.tree.map(lambda _: everywhere, with_moments(shapes.opt_state, {}, {}))
    params = param_shardings(shapes.params, model, plan)
    return TrainState(everywhere, params, with_moments(opt_state, *moments))


def param_shardings(shapes: Params, model: Model, plan: Plan) -> Params:
    """Where the parameters live: layers in host memory where the plan has them there."""
    shardings = tree_shardings(shapes, model.axes, plan)
    host = plan.parameters == "offload"
    return shardings | {"blocks": jax.tree.map(lambda place: _placed(place, host), shardings["blocks"])}


def in_host(state: TrainState, model: Model, plan: Plan) -> TrainState:
    """Of each array of a state whether the plan has it in host memory."""
    host = {"blocks": plan.parameters == "offload"}
    params = {
        name: jax.tree.map(lambda _, name=name: host.get(name, False), part) for name, part in state.params.items()
    }

    def of_moment(matrix: bool, moment: Any) -> Any:
        return jax.tree.map(lambda _: matrix and plan.optimizer == "offload", moment)

    moments = (jax.tree.map(of_moment, decay_mask(model.axes), moment) for moment in moments_of(state.opt_state))
    nowhere = jax.tree.map(lambda _: False, with_moments(state.opt_state, {}, {}))
    return TrainState(False, params, with_moments(nowhere, *moments))


def _placed(sharding: NamedSharding, host: bool) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if host else sharding


def _state_axes(model: Model) -> Any:
    """The logical axes of every parameter's gradient and moments, in a dict of the parameters' form."""
    return jax.tree.map(state_axes, model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def init_state(model: Model, config: Config, plan: Plan, params: Params | None = None) -> TrainState:
    """A state at step 0, made in place on the mesh; from `params` (an import) where given.

    The same on every mesh: each random number depends on its place in the global array only.
    """
    shardings, order = state_shardings(model, config, plan), stored_order(plan, model.config.layers)
    shapes = state_shapes(model, config, plan)
    if params is None:
        key = jax.random.key(config.train.seed)
        made = jax.jit(
            lambda: _as_stored(model.init(key, order), model, config.precision.params),
            out_shardings=shardings.params,
            compiler_options=once_options(plan.mesh),
        )()
    else:

        def start(params: Params) -> Params:
            layers = config.model.layers
            blocks = jax.tree.map(lambda x: reorder_layers(x, None, order, layers), params["blocks"])
            return _as_stored(params | {"blocks": blocks}, model, config.precision.params)

        # What is given has every stage's layers, and may have another dtype: then no array is as large as here.
        given = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
        reused = (0,) if plan.size("stage") == 1 and {*given, config.precision.params} == {"float32"} else ()
        made = jax.jit(start, out_shardings=shardings.params, donate_argnums=reused)(params)
    step, opt_state = jax.tree.map(_zeros_at, (shapes.step, shapes.opt_state), (shardings.step, shardings.opt_state))
    return TrainState(step, made, opt_state)


def _zeros_at(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.Array:
    """Zeros without a program to compile, one array after another: all at once could fill the host's memory."""
    shard = place.shard_shape(leaf.shape)
    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, place, lambda _: np.zeros(shard, leaf.dtype)))


def _with_params(model: Model, config: Config, params: Params) -> TrainState:
    opt_state = make_optimizer(config.train, model.axes).init(params)
    opt_state = packed(opt_state, decay_mask(model.axes), config.precision.moments)
    params = _as_stored(params, model, config.precision.params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


def reorder_state(state: TrainState, before: Order, after: Order, config: Config) -> TrainState:
    """A state with its stacked layers in another stored order: see `jaxpar.parallel.pipeline.stored_order`."""
    if before == after:
        return state
    model, layers = Model(config.model), config.model.layers

    def moved(x: Any, axes: Any) -> Any:
        return reorder_layers(x, before, after, layers) if axes[:1] == ("layers",) else x

    params = jax.tree.map(moved, state.params, model.axes)

    def moved_moment(axes: Any, moment: Any) -> Any:
        return jax.tree.map(lambda x: moved(x, axes), moment)

    moments = (
        jax.tree.map(moved_moment, model.axes, moment, is_leaf=is_axes) for moment in moments_of(state.opt_state)
    )
    return TrainState(state.step, params, with_moments(state.opt_state, *moments))


def put_batch(rows: Mapping[str, np.ndarray], plan: Plan) -> dict[str, jax.Array]:
    """This process's rows of a global batch as global arrays [B, S] on the mesh."""
    sharding = plan.sharding(TOKENS)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in rows.items()}


def batch_rows(batch: int, plan: Plan) -> list[int]:
    """The rows of a global batch that this process's data loader reads."""
    return local_rows(plan.sharding(TOKENS, (batch, 1), "batch"), batch)


def empty_batch(config: Config, plan: Plan) -> dict[str, np.ndarray]:
    """This process's rows of a batch without a label that counts."""
    rows = len(batch_rows(config.train.batch, plan))
    return {
        name: np.full((rows, config.data.seq_len), -1 if name == "labels" else 0, np.int32)
        for name in batch_shapes(config, plan)
    }


def batch_shapes(config: Config, plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch as ShapeDtypeStructs with shardings: what the step is compiled for."""
    shape = (config.train.batch, config.data.seq_len)
    leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=plan.sharding(TOKENS, shape, "batch"))
    names = ("tokens", "labels", "positions", "segments") if config.data.pack else ("tokens", "labels")
    return dict.fromkeys(names, leaf)


def step_shapes(model: Model, config: Config, plan: Plan) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """The arguments of a training step as ShapeDtypeStructs with shardings: what it is traced and compiled for."""
    shapes, shardings = state_shapes(model, config, plan), state_shardings(model, config, plan)
    state = jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, shardings)
    return state, batch_shapes(config, plan)


def make_train_step(model: Model, config: Config, plan: Plan) -> Any:
    """`(state, batch) -> (state, metrics)`, jitted, the state donated.

    Metrics are float32 scalars: `loss` (nats a token, without z-loss), `grad_norm` (before clipping), `learning_rate`,
    `tokens` (labels that count); with experts also `router_balance` (1 = all alike), `router_z` (of a token) and
    `dropped` (share of the choices without room), means over the layers.
    """
    schedule, train = learning_rate(config.train), config.train
    shardings = state_shardings(model, config, plan)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(train.seed), state.step) if config.model.dropout else None
        sums, grads = gradients(model, state.params, batch, plan, key, train.accumulation, loss_weights(train))
        with jax.named_scope("update"):
            new = update(state.params, state.opt_state, grads, sums, model.axes, train, plan)
        metrics = {
            "loss": sums.nll / sums.tokens,
            "grad_norm": new.norm,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "tokens": sums.tokens,
        }
        if sums.routed is not None:
            routed = batch["tokens"].size
            metrics |= {
                "router_balance": sums.routed.balance / routed,
                "router_z": sums.routed.z / routed,
                "dropped": sums.routed.dropped / (routed * model.config.experts_per_token),
            }
        return TrainState(state.step + 1, new.params, new.opt_state), metrics

    batch_sharding = plan.sharding(TOKENS)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding),
        out_shardings=(shardings, replicated(plan)),
        donate_argnums=0,
        compiler_options=compiler_options(plan.mesh),
    )


def loss_weights(train: TrainConfig) -> LossWeights:
    """What a config adds to the likelihood."""
    return LossWeights(train.z_loss, train.balance_loss, train.router_z_loss)


def gradients(
    model: Model, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, accumulation: int,
    weights: LossWeights,
) -> tuple[LossSums, Params]:  # fmt: skip
    """Summed loss of a global batch and its float32 gradient, over `accumulation` microbatches one after another.

    Sums, not means: divided by the total token count they weigh every token alike, however it was split. Over devices
    they are summed after the last microbatch where each can add up its own (`summed_last`).
    """
    over = summed_last(plan, accumulation, key is not None or bool(model.config.experts))
    if not over:
        return _accumulated(model, params, batch, plan, key, accumulation, weights)
    scalars: Any = ((),) * 3
    one, layouts = one_along(plan, over), (LossSums(*scalars), jax.tree.map(state_axes, model.axes, is_leaf=is_axes))

    def local(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        def total(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype)

        parts = _accumulated(model, params, batch, one, None, accumulation, weights)
        with jax.named_scope("accumulate"):
            return manual(lambda parts: jax.tree.map(total, parts), one, (layouts,), layouts)(parts)

    # With the axes of one device: where no other is left, a kernel stands where XLA has nothing to split.
    here = {*over, *(axis for axis, size in plan.mesh.shape.items() if size == 1)}
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=(P(), P(over)), out_specs=P(), axis_names=here, check_vma=False
    )(params, dict(batch))


def _accumulated(
    model: Model, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, accumulation: int,
    weights: LossWeights,
) -> tuple[LossSums, Params]:  # fmt: skip
    def of_microbatch(rows: Batch, key: jax.Array | None) -> tuple[LossSums, Params]:
        if plan.size("stage") > 1:
            return pipeline.gradients(model, params, rows, plan, key, weights)

        def loss(params: Params) -> tuple[jax.Array, LossSums]:
            sums = model.loss(params, rows, plan, key, weights)
            return sums.loss, sums

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return sums, grads

    if accumulation == 1:
        return of_microbatch(batch, key)

    def split(rows_BS: jax.Array) -> jax.Array:
        # Row r goes to microbatch r % A: every device keeps its own rows.
        rows_BAS = rows_BS.reshape(-1, accumulation, rows_BS.shape[1])
        return plan.constrain(rows_BAS.swapaxes(0, 1), (None, *TOKENS))

    def add(total: Any, item: tuple[Batch, Any]) -> tuple[Any, None]:
        rows, index = item
        part = of_microbatch(rows, None if key is None else jax.random.fold_in(key, index))
        with jax.named_scope("accumulate"):
            (sums, grads), (more, more_grads) = total, part
            grads = jax.tree.map(lambda x, y: (x + on_device(y)).astype(x.dtype), grads, more_grads)
            return (jax.tree.map(jnp.add, sums, more), grads), None

    routed = RouterSums(*jnp.zeros(3)) if model.config.experts else None
    zeros = (LossSums(*jnp.zeros(3), routed=routed), jax.tree.map(partial(_zeros, plan), params, model.axes))
    return jax.lax.scan(add, zeros, (jax.tree.map(split, dict(batch)), jnp.arange(accumulation)))[0]


def _zeros(plan: Plan, param: jax.Array, axes: Any) -> jax.Array:
    """A parameter's gradient to add to, where and as gradients are."""
    return plan.constrain(jnp.zeros(param.shape, gradient_dtype(axes, plan)), state_axes(axes))


def make_eval_step(model: Model, plan: Plan) -> Any:
    """`(params, batch) -> (nll in nats, tokens)`, sums over the batch, jitted."""

    def step(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        stages = plan.size("stage") > 1
        sums = pipeline.loss(model, params, batch, plan) if stages else model.loss(params, batch, plan)
        return sums.nll, sums.tokens

    return jax.jit(step)


def compile_eval_step(model: Model, config: Config, plan: Plan) -> Any:
    """`make_eval_step`, compiled for a config's parameters and batches.

    Raises:
      UserError: on CPU, collectives that may be mixed up (`require_order`).
    """
    state, batch = step_shapes(model, config, plan)
    compiled = make_eval_step(model, plan).lower(state.params, batch).compile()
    require_order(compiled, plan.mesh.devices.flat)
    return compiled
