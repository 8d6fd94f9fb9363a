"""The training state (its shapes, where each array lives, and how it is made), the training step,
which adds up the gradients of microbatches and updates the state, and the evaluation step.

Shapes: A accumulation, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Wrapped

from jaxpar.base.batch_arrays import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.compiler import step_options
from jaxpar.base.config import Config
from jaxpar.base.jax_compat import Option, once_options
from jaxpar.base.layout.plan import (
    Plan,
    deferred_sum_axes,
    gradient_dtype,
    param_dtype,
    plan_without_batch_axes,
)
from jaxpar.base.layout.sharding import (
    Axes,
    KeyPath,
    is_axes,
    local_rows,
    replicated_sharding,
    state_axes,
)
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import AnyModel, Batch, OwnModel, Params, in_parts
from jaxpar.parallel import pipeline
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.cross_entropy import LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import HOST, on_device
from jaxpar.parallel.padding import TokenCounts, count_tokens
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.parallel.token_order import TOKENS, axes_of
from jaxpar.train.optimizer import (
    Optimizer,
    in_host_memory_of,
    pack_moments,
    reported_rate,
    require_runnable,
)
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer, as_optimizer, require_update
from jaxpar.train.optimizer.host_update import require_host_update
from jaxpar.train.optimizer.state_layout import StateArray
from jaxpar.train.optimizer.update import update

Leaf = TypeVar("Leaf")
Shape = jax.ShapeDtypeStruct


class TrainState(NamedTuple, Generic[Leaf]):
    """A training run between steps: finished steps (int32 scalar), all parameters, and the state of
    the optimizer for those that are trained.

    Its leaves are arrays, or what a function returns for each of them: a ShapeDtypeStruct, a
    sharding or a flag.
    """

    step: Leaf
    params: Params
    opt_state: optax.OptState


def param_shapes(model: AnyModel, plan: Plan) -> Params:
    """Return the parameters as ShapeDtypeStructs, in the form in which the plan stores them."""
    shapes = model.shapes(stored_order(plan, model.config.layers))
    return jax.eval_shape(lambda params: _as_stored(params, model, plan), shapes)


def state_shapes(
    model: AnyModel,
    config: Config,
    plan: Plan,
    order: Sequence[int] | None = None,
    optimizer: AnyOptimizer = None,
) -> TrainState[Shape]:
    """Return the state as ShapeDtypeStructs with shardings.

    An array of the optimizer's state that belongs to a parameter is split as the parameter's dims
    are, or further; every other, such as a counter, is replicated. (A scalar made outside jit would
    sit on device 0 and clash with the mesh after a restore.)

    Args:
      model: the model.
      config: the experiment.
      plan: its plan.
      order: the order of the layers; None = the plan's.
      optimizer: in place of the config's.

    Raises:
      UserError: see `require_runnable`, `require_update` and `require_host_update`.
    """
    if order is None:
        order = stored_order(plan, config.model.layers)
    chosen = as_optimizer(optimizer, config, plan)
    require_runnable(chosen, plan)
    shapes = model.shapes(order)
    axes = model.trained(model.axes)
    # The optimizer's state is that of parameters in float32.
    trained = model.trained(shapes)
    if chosen.learning_rate is None:  # it is no optimizer of a config
        # the order that its own step is made for
        stored = model.shapes(stored_order(plan, config.model.layers))
        require_update(chosen, model.trained(stored), axes)
    if plan.optimizer == "host":
        require_host_update(chosen, trained, axes, plan)
    arrays = chosen.state_arrays(trained, axes)
    opt_state = jax.tree.map(lambda array: array.value, arrays, is_leaf=_is_state_array)
    opt_state = jax.eval_shape(
        lambda state: pack_moments(chosen, state, trained, axes, plan.moments), opt_state
    )
    host = in_host_memory_of(chosen, opt_state, trained, axes, plan)
    names = _axes_by_path(axes, trained)

    def place(array: StateArray, shape: Shape, away: bool) -> Shape:
        if array.parameter is None:
            sharding = replicated_sharding(plan)
        else:
            own = state_axes(names[array.parameter])
            dims = [None if dim is None else own[dim] for dim in array.dims]
            sharding = plan.sharding(dims, shape.shape, "optimizer state")
        return Shape(shape.shape, shape.dtype, sharding=_in_memory(sharding, away))

    stored = jax.eval_shape(lambda params: _as_stored(params, model, plan), shapes)
    shardings = param_shardings(stored, model, plan)
    return TrainState(
        Shape((), jnp.int32, sharding=replicated_sharding(plan)),
        jax.tree.map(
            lambda x, at: Shape(x.shape, x.dtype, sharding=at),
            stored,
            shardings,
        ),
        jax.tree.map(place, arrays, opt_state, host, is_leaf=_is_state_array),
    )


def _is_state_array(x: object) -> bool:
    return isinstance(x, StateArray)


def _axes_by_path(axes: Params, params: Params) -> dict[KeyPath, Axes]:
    """The logical axes of each parameter by its path."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = structure.flatten_up_to(axes)
    return {path: one for (path, _), one in zip(leaves, names, strict=True)}


def state_shardings(
    model: AnyModel, config: Config, plan: Plan, optimizer: AnyOptimizer = None
) -> TrainState[NamedSharding]:
    """Return where the state lives (see `state_shapes`)."""
    shapes = state_shapes(model, config, plan, optimizer=optimizer)
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def param_shardings(shapes: Params, model: AnyModel, plan: Plan) -> Params:
    """Return where the parameters live; layers are in host memory if the plan offloads them."""
    return jax.tree.map(
        _in_memory, plan.sharding(model.axes, shapes), _params_in_host(shapes, plan)
    )


def in_host(
    state: TrainState[Shape], model: AnyModel, plan: Plan, optimizer: Optimizer
) -> TrainState[bool]:
    """Tell whether each array of a state is in host memory.

    The plan says it: the shardings of an absent GPU forget in which memory an array lies.

    Args:
      state: the state, as `state_shapes` returns it.
      model: the model.
      plan: its plan.
      optimizer: the optimizer.
    """
    trained = model.trained(state.params)
    axes = model.trained(model.axes)
    return TrainState(
        False,
        _params_in_host(state.params, plan),
        in_host_memory_of(optimizer, state.opt_state, trained, axes, plan),
    )


def _params_in_host(params: Params, plan: Plan) -> Params:
    return jax.tree.broadcast(
        {name: name == "blocks" and plan.parameters == "offload" for name in params}, params
    )


def _in_memory(sharding: NamedSharding, host: bool) -> NamedSharding:
    if host:
        return sharding.with_memory_kind(HOST)
    return sharding


def gradient_axes(model: AnyModel) -> Params:
    """Return the logical axes of the gradient and moments of every parameter that is trained, in a
    dict like that of the parameters."""
    return jax.tree.map(state_axes, model.trained(model.axes), is_leaf=is_axes)


def init_state(
    model: AnyModel,
    config: Config,
    plan: Plan,
    params: Params | None = None,
    optimizer: AnyOptimizer = None,
) -> TrainState[jax.Array]:
    """Make a state at step 0 in place on the mesh.

    It is the same on every mesh, because each random number depends only on its place in the global
    array.

    Args:
      model: the model.
      config: the experiment.
      plan: its plan.
      params: the parameters (of an import); None = random ones, from `train.seed`.
      optimizer: in place of the config's.

    Raises:
      UserError: see `require_runnable`.
    """
    chosen = as_optimizer(optimizer, config, plan)
    shapes = state_shapes(model, config, plan, optimizer=chosen)
    order = stored_order(plan, model.config.layers)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes.params)
    if params is None:
        key = jax.random.key(config.train.seed)
        options = once_options(plan.mesh)
        init = jax.jit(
            lambda: _as_stored(model.init(key, order), model, plan),
            out_shardings=shardings,
            compiler_options=options,
        )
        made = init()
    else:

        def start(params: Params) -> Params:
            reorder = partial(reorder_layers, before=None, after=order, layers=config.model.layers)
            return _as_stored(
                params | {"blocks": jax.tree.map(reorder, params["blocks"])}, model, plan
            )

        dtypes = jax.tree.map(
            lambda leaf, made: leaf.dtype == made.dtype,
            params,
            shapes.params,
        )
        if order is None and all(jax.tree.leaves(dtypes)):
            made = jax.device_put(params, shardings)
        else:  # no given array is as large as the one made here, so none can be reused
            made = jax.jit(start, out_shardings=shardings)(params)
    if chosen.starts_at_zero:
        opt_state = jax.tree.map(_zeros, shapes.opt_state)
    else:
        opt_state = _first_opt_state(chosen, made, shapes.opt_state, model, plan)
    return TrainState(_zeros(shapes.step), made, opt_state)


def _first_opt_state(
    optimizer: Optimizer, params: Params, shapes: optax.OptState, model: AnyModel, plan: Plan
) -> optax.OptState:
    """Make the optimizer's first state where its shapes say."""
    axes = model.trained(model.axes)

    def start(trained: Params) -> optax.OptState:
        exact = jax.tree.map(
            lambda x: on_device(x).astype(jnp.float32),
            trained,
        )
        state = optimizer.make(axes).init(exact)
        return pack_moments(optimizer, state, exact, axes, plan.moments)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init = jax.jit(start, out_shardings=shardings, compiler_options=once_options(plan.mesh))
    return init(model.trained(params))


def _as_stored(params: Params, model: AnyModel, plan: Plan) -> Params:
    """Convert each parameter to the dtype in which the plan stores it."""
    return jax.tree.map(
        lambda x, axes: x.astype(param_dtype(axes, plan)),
        params,
        model.axes,
    )


def _zeros(leaf: Shape) -> jax.Array:
    """Make zeros without compiling a program, one array at a time, since all at once could fill the
    host's memory.
    """
    zeros = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return jax.block_until_ready(
        jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: zeros)
    )


def reorder_state(
    state: TrainState[jax.Array],
    before: Sequence[int] | None,
    after: Sequence[int] | None,
    model: AnyModel,
    optimizer: Optimizer,
) -> TrainState[jax.Array]:
    """Put a state's stacked layers in another stored order (see `pipeline.stored_order`); None =
    the model's. The optimizer's state may be empty."""

    def reorder(x: jax.Array, axes: Axes) -> jax.Array:
        if axes[:1] == ("layers",):
            return reorder_layers(x, before, after, model.config.layers)
        return x

    def reorder_array(x: jax.Array, array: StateArray, axes: Axes) -> jax.Array:
        along = tuple(None if dim is None else axes[dim] for dim in array.dims)
        return reorder(x, along)

    axes = model.trained(model.axes)  # only what is trained is saved
    params = jax.tree.map(reorder, state.params, axes)
    opt_state = state.opt_state
    if jax.tree.leaves(opt_state):
        shapes = jax.tree.map(
            lambda x: Shape(x.shape, jnp.float32),
            state.params,
        )
        arrays = optimizer.state_arrays(shapes, axes)
        names = _axes_by_path(axes, state.params)
        opt_state = jax.tree.map(
            lambda array, x: (
                x if array.parameter is None else reorder_array(x, array, names[array.parameter])
            ),
            arrays,
            opt_state,
            is_leaf=_is_state_array,
        )
    return TrainState(state.step, params, opt_state)


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


def put_batch(
    rows: Mapping[str, np.ndarray],
    plan: Plan,
) -> dict[str, jax.Array]:
    """Turn this process's rows of a global batch into global arrays [B, S] on the mesh."""
    sharding = plan.sharding(TOKENS)
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in rows.items()
    }


def batch_rows(batch: int, plan: Plan) -> list[int]:
    """Return the rows of a global batch that this process's data loader reads."""
    return local_rows(plan.sharding(TOKENS, (batch, 1), "batch"), batch)


_ABSENT = -2
"""The labels of rows that a process could not read; -1 are those that do not count."""


def empty_batch(
    config: Config,
    plan: Plan,
    absent: bool = False,
) -> dict[str, np.ndarray]:
    """Return this process's rows of a batch in which no label counts; a training step with `absent`
    rows is void, and has rows of a teacher too where there is one.
    """
    shape = len(batch_rows(config.train.batch, plan)), config.data.seq_len
    label = _ABSENT if absent else -1
    rows: dict[str, np.ndarray] = {
        name: np.full(shape, label if name == "labels" else 0, np.int32)
        for name in token_arrays(config)
    }
    if absent and config.distill.teacher:
        entries = (*shape, config.distill.top_k)
        rows[TEACHER_IDS] = np.zeros(entries, np.int32)
        rows[TEACHER_LOG_PROBS] = np.zeros(entries, np.float32)
        if config.distill.hidden:
            states = (*shape, *_hidden_sizes(config))
            rows[TEACHER_HIDDEN] = np.zeros(states, jnp.dtype(plan.compute))
    return rows


def batch_shapes(config: Config, plan: Plan, teacher: bool = True) -> dict[str, Shape]:
    """Return a training batch as ShapeDtypeStructs with shardings, for which the step is
    compiled.

    Args:
      config: every setting.
      plan: its plan.
      teacher: whether a teacher's answers are in it, where the config has a teacher; an evaluation
        has none.
    """
    shape = (config.train.batch, config.data.seq_len)
    sharding = plan.sharding(TOKENS, shape, "batch")
    leaf = Shape(shape, jnp.int32, sharding=sharding)
    batch = dict.fromkeys(token_arrays(config), leaf)
    if teacher and config.distill.teacher:
        entries = (*shape, config.distill.top_k)
        batch[TEACHER_IDS] = Shape(entries, jnp.int32, sharding=sharding)
        batch[TEACHER_LOG_PROBS] = Shape(entries, jnp.float32, sharding=sharding)
        if config.distill.hidden:
            states = (*shape, *_hidden_sizes(config))
            batch[TEACHER_HIDDEN] = Shape(states, jnp.dtype(plan.compute), sharding=sharding)
    return batch


def _hidden_sizes(config: Config) -> tuple[int, int]:
    """How many hidden states of a teacher a token has, and their width."""
    return len(config.distill.hidden), config.distill.hidden_width


def token_arrays(config: Config) -> tuple[str, ...]:
    """Return the names of the arrays of a batch that the data have, int32 [B, S]."""
    if config.data.pack:
        return ("tokens", "labels", "positions", "segments")
    return ("tokens", "labels")


def step_shapes(
    model: AnyModel, config: Config, plan: Plan, optimizer: AnyOptimizer = None
) -> tuple[TrainState[Shape], dict[str, Shape]]:
    """Return the arguments of a training step as ShapeDtypeStructs with shardings, for tracing and
    compiling it.
    """
    shapes = state_shapes(model, config, plan, optimizer=optimizer)
    return shapes, batch_shapes(config, plan)


def make_train_step(
    model: AnyModel, config: Config, plan: Plan, optimizer: AnyOptimizer = None
) -> Wrapped:
    """Make the jitted step `(state, batch) -> (state, metrics)`, which donates the state, unless
    the host updates it and parameters lie in host memory, too.

    Metrics are scalars: `loss` (nats a token, of the labels alone), `objective` (what is
    differentiated, where labels are smoothed or there is a teacher), `grad_norm` (before clipping),
    `learning_rate` (unless an optimizer that was given does not say it), `tokens` (labels that
    count) and `overflows` (entries of parameters, or of the optimizer's state, that would not be
    finite, and stayed as they were). With experts there are also `router_balance` (1 = all
    alike) and `router_z`, which are means over the tokens that are text and over the layers.

    Where a process had no rows (see `empty_batch`), the loss is NaN, and the state stays as it was,
    its step too: the other processes learn of it by the loss, and all can save what they have.
    """
    train = config.train
    chosen = as_optimizer(optimizer, config, plan)
    shardings = state_shardings(model, config, plan, chosen)

    def step(
        state: TrainState[jax.Array], batch: Batch
    ) -> tuple[TrainState[jax.Array], dict[str, jax.Array]]:
        key = dropout_key(config, state.step)
        sums, grads = gradients(
            model, state.params, batch, plan, key, train.accumulation, loss_weights(config)
        )
        done: jax.Array | int = 1
        if jax.process_count() > 1:
            absent = jnp.any(batch["labels"] == _ABSENT)
            sums = jax.tree.map(
                lambda x: jnp.where(absent, jnp.nan, x),
                sums,
            )
            done = jnp.where(absent, 0, 1)
        with jax.named_scope("update"):
            new = update(
                model.trained(state.params),
                state.opt_state,
                grads,
                sums,
                model.trained(model.axes),
                chosen,
                plan,
            )
        rate = reported_rate(chosen, state.step, state.opt_state)
        metrics = {
            "loss": sums.nll / sums.tokens,
            "grad_norm": new.norm,
            "tokens": sums.tokens,
        }
        if train.label_smoothing or config.distill.teacher:
            metrics["objective"] = sums.loss / sums.tokens
        if rate is not None:
            metrics["learning_rate"] = rate
        metrics["overflows"] = new.overflows
        if sums.routed is not None:
            text = count_tokens(batch).text
            metrics |= {
                "router_balance": sums.routed.balance / text,
                "router_z": sums.routed.z / text,
            }
        return TrainState(
            state.step + done, model.merge(state.params, new.params), new.opt_state
        ), metrics

    # A host computes new arrays beside the old, and XLA would copy each into the place of one that
    # was donated: over the link on GPUs, all in vain. On the device only tables are there twice.
    all_on_host = plan.optimizer == "host" and plan.parameters == "offload"
    donated = () if all_on_host else (0,)
    return jax.jit(
        step,
        in_shardings=(shardings, plan.sharding(TOKENS)),
        out_shardings=(shardings, replicated_sharding(plan)),
        donate_argnums=donated,
        compiler_options=step_options(plan.mesh, config.compiler.options),
    )


def dropout_key(config: Config, step: jax.Array) -> jax.Array | None:
    """Return the key of a step's dropout, by the number of steps before it; None = no dropout."""
    if not config.model.dropout:
        return None
    return jax.random.fold_in(jax.random.key(config.train.seed), step)


def loss_weights(config: Config) -> LossWeights:
    """Return the weights of the losses that a config adds to the likelihood."""
    train = config.train
    distill = config.distill
    return LossWeights(
        train.z_loss,
        train.balance_loss,
        train.router_z_loss,
        train.label_smoothing,
        distill.alpha if distill.teacher else 0.0,
        distill.temperature,
        distill.hidden_weight,
    )


def gradients(
    model: AnyModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    key: jax.Array | None,
    accumulation: int,
    weights: LossWeights,
) -> tuple[LossSums, Params]:
    """Compute the summed loss of a global batch and its float32 gradient, one of `accumulation`
    microbatches at a time.

    The gradient is that of the parameters that are trained (`Model.trained`), and no other is made.
    They are sums and not means, so that dividing by the total token count weighs every token alike,
    however they were split; the losses of routers take their weight from the counts of the whole
    batch (see `Model.loss`). Where each device can add up its own, devices are summed after the
    last microbatch (`deferred_sum_axes`).
    """
    looks_at_all = bool(model.config.experts) or isinstance(model, OwnModel)
    over = deferred_sum_axes(plan, accumulation, key is not None or looks_at_all)
    if not over:
        if model.config.experts:
            counts = count_tokens(batch)
        else:
            counts = None
        return _accumulate(model, params, batch, plan, key, accumulation, weights, counts)
    one = plan_without_batch_axes(plan, over)
    axes = (LossSums(*[()] * 3), gradient_axes(model))  # pyright: ignore[reportArgumentType]

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype)

    def local(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        parts = _accumulate(model, params, batch, one, None, accumulation, weights, None)
        with jax.named_scope("accumulate"):
            return manual(lambda parts: jax.tree.map(total, parts), one, (axes,), axes)(parts)

    # Axes of one device are manual too: if no other axis is left, XLA has nothing to split around a
    # kernel.
    here = {
        *over,
        *(axis for axis, size in plan.mesh.shape.items() if size == 1),
    }
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(P(), P(over)),
        out_specs=P(),
        axis_names=here,
        check_vma=False,
    )(params, dict(batch))


def _accumulate(
    model: AnyModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    key: jax.Array | None,
    accumulation: int,
    weights: LossWeights,
    counts: TokenCounts | None,
) -> tuple[LossSums, Params]:
    def of_microbatch(rows: Batch, key: jax.Array | None) -> tuple[LossSums, Params]:
        if plan.size("stage") > 1:
            staged = in_parts(model, "mesh.stage")
            return pipeline.gradients(staged, params, rows, plan, key, weights, counts=counts)

        def loss(trained: Params) -> tuple[jax.Array, LossSums]:
            sums = model.loss(
                model.merge(params, trained),
                rows,
                plan,
                key,
                weights,
                counts,
            )
            return sums.loss, sums

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(model.trained(params))
        return sums, grads

    if accumulation == 1:
        return of_microbatch(batch, key)

    def add(
        total: tuple[LossSums, Params], item: tuple[Batch, jax.Array]
    ) -> tuple[tuple[LossSums, Params], None]:
        rows, index = item
        more, more_grads = of_microbatch(
            rows, None if key is None else jax.random.fold_in(key, index)
        )
        with jax.named_scope("accumulate"):
            sums, grads = total
            grads = jax.tree.map(
                lambda x, y: (x + on_device(y)).astype(x.dtype),
                grads,
                more_grads,
            )
            return (jax.tree.map(jnp.add, sums, more), grads), None

    def zeros(param: jax.Array, axes: Axes) -> jax.Array:
        return plan.constrain(
            jnp.zeros(param.shape, gradient_dtype(axes, plan)),
            state_axes(axes),
        )

    if model.config.experts:
        routed = RouterSums(*jnp.zeros(2))
    else:
        routed = None
    trained = model.trained(params), model.trained(model.axes)
    nothing = (
        LossSums(*jnp.zeros(3), routed=routed),
        jax.tree.map(
            zeros,
            *trained,
        ),
    )
    return jax.lax.scan(
        add, nothing, (cut_microbatches(batch, accumulation, plan), jnp.arange(accumulation))
    )[0]


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

        zero = jnp.zeros(())
        return jax.lax.scan(add, (zero, zero), cut_microbatches(batch, accumulation, plan))[0]

    return jax.jit(step, compiler_options=dict(options))


def cut_microbatches(batch: Batch, accumulation: int, plan: Plan) -> Batch:
    """Cut a batch [B, S, ...] into microbatches [A, B / A, S, ...]: row r goes to number r % A, so
    every device keeps its own.
    """

    def split(rows_BS: jax.Array) -> jax.Array:
        rows_BAS = rows_BS.reshape(-1, accumulation, *rows_BS.shape[1:])
        return plan.constrain(rows_BAS.swapaxes(0, 1), (None, *axes_of(rows_BS)))

    return jax.tree.map(split, dict(batch))


def compile_eval_step(model: AnyModel, config: Config, plan: Plan) -> Compiled:
    """Compile `make_eval_step` for a config's parameters, batches and compiler options; on CPU
    `require_order` may refuse the program."""
    state = state_shapes(model, config, plan)
    batch = batch_shapes(config, plan, teacher=False)
    options = step_options(plan.mesh, config.compiler.options)
    compiled = (
        make_eval_step(model, plan, config.train.accumulation, options)
        .lower(state.params, batch)
        .compile()
    )
    require_order(compiled, plan.mesh.devices.flat)
    return compiled
