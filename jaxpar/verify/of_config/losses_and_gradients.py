"""The two answers that are compared: loss and gradients on one device, and under a plan.

The reference is as plain as it can be: it runs on one device, takes a few rows at a time, uses the
ops of `jaxpar.verify.reference_ops`, recomputes nothing and unrolls the layers.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.batch_arrays import TEACHER_HIDDEN
from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import once_options, step_options
from jaxpar.base.config import Config, PrecisionConfig
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.rules import as_rules
from jaxpar.base.layout.sharding import path_name, replicated_sharding
from jaxpar.base.layout.specs import is_axes
from jaxpar.hlo.collective_order import require_order
from jaxpar.kernels.attention.chunked import TILE, TileSize, tiles_at_most
from jaxpar.models import AnyModel, Batch, Model, OwnModel, Params
from jaxpar.models.hidden import PROJECTIONS
from jaxpar.parallel import Ops
from jaxpar.parallel.cross_entropy import LossSums, teacher_targets
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train import step
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer
from jaxpar.train.state import param_shapes, param_shardings
from jaxpar.verify.comparison import Answer, answer_of, by_name, copies
from jaxpar.verify.of_config.random_inputs import Rows, random_batch, random_params
from jaxpar.verify.of_config.setup import Setup
from jaxpar.verify.reference_ops import ReferenceOps

Gradients = Callable[..., tuple[LossSums, Params]]
"""The function under test, which takes the arguments of `jaxpar.train.step.gradients`."""
OneDevice = Callable[[Params, Rows], Answer]
"""A function that computes the loss and gradients of a batch on the first device."""
_ROWS = 2  # sequences that the reference takes at a time


@dataclass(frozen=True)
class Case:
    """A case to verify: the shrunk model, its plan's devices, and on the host its parameters [...]
    and a batch [B, S].
    """

    config: Config
    model: AnyModel
    devices: list[jax.Device]
    params: Params
    batch: Rows
    gradients: Gradients
    optimizer: AnyOptimizer = None
    tile: TileSize = TILE

    @classmethod
    def draw(cls, setup: Setup, gradients: Gradients = step.gradients) -> Case:
        """Draw random parameters and a random batch for what was set up.

        Args:
          setup: the config, model and devices to run.
          gradients: the function under test.

        Returns:
          The case. Its arrays are always the same for the same setup.
        """
        params = random_params(setup.model)
        batch = random_batch(setup.config)
        return cls(
            setup.config,
            setup.model,
            setup.devices,
            params,
            batch,
            gradients,
            setup.optimizer,
            setup.tile,
        )

    def experiment(self, precision: str) -> Experiment:
        """Make the experiment under test, in a compute dtype, on all devices of the case."""
        config = replace(self.config, precision=PrecisionConfig(precision))  # pyright: ignore[reportArgumentType]
        return make_experiment(config, self.devices, self.model, self.optimizer, training=False)


def one_device(
    case: Case,
    precision: str,
    exact: bool,
    ops: Callable[[Plan], Ops] = ReferenceOps,
) -> OneDevice:
    """Make a function that computes loss and gradients on the first device; with `ReferenceOps` it
    is the reference.

    The losses of routers are weighed here and not by `Model.loss`, so that a mistake there is no
    part of the reference: they are means over the text of all rows of the case, and the rest of the
    loss is a sum over its labels.

    Args:
      case: what is run.
      precision: the compute dtype.
      exact: make float32 matmuls run in full float32 also where the device would use less by
        default.
      ops: makes the ops that the model calls from a plan for one device.

    Returns:
      `(params, batch)` -> the loss [1], the gradients [1, *shape] and the tokens [1], all in
      float64. It may be called with any rows of a batch, and takes a few at a time.
    """
    # logical axes of one's own are known to it too, each of them whole
    whole = as_rules(dict.fromkeys(case.config.rules.own_rules))
    plan = Plan(make_mesh(MeshSpec(), case.devices[:1]), whole, compute=precision)  # pyright: ignore[reportArgumentType]
    sizes = case.config.model
    if case.model.has_blocks:
        sizes = replace(sizes, scan_layers=False)
    unrolled = case.model.with_config(sizes, ops)
    weights = step.loss_weights(case.config)
    labels = np.count_nonzero(case.batch["labels"] >= 0)
    text = np.count_nonzero(text_of(case.batch))

    def loss(
        trained: Params,
        params: Params,
        batch: Batch,
    ) -> tuple[jax.Array, jax.Array]:
        merged = unrolled.merge(params, trained)
        if isinstance(unrolled, OwnModel):
            sums = unrolled.loss(merged, batch, plan)
            return sums.loss, sums.tokens
        x_BSD, routed = unrolled.hidden_states(merged, batch, plan)
        soft = teacher_targets(batch, weights.temperature)
        sums = unrolled.score(merged, x_BSD, batch["labels"], plan, weights, soft)
        if unrolled.projections is not None:
            far = _hidden_distance(unrolled, merged, batch, plan)
            sums = sums._replace(loss=sums.loss + weights.hidden * far)
        if routed is None:
            return sums.loss, sums.tokens
        balance = labels * (routed.balance / text)
        z = labels * (routed.z / text)
        return sums.loss + weights.balance_loss * balance + weights.router_z_loss * z, sums.tokens

    value_and_grad = jax.jit(
        jax.value_and_grad(loss, has_aux=True), compiler_options=once_options(plan.mesh, 0)
    )

    def run(params: Params, batch: Rows) -> Answer:
        """Sum over the rows, a few at a time; the parts are added up in float64."""
        here = jax.device_put(params, case.devices[0])
        positions = np.broadcast_to(
            np.arange(batch["tokens"].shape[1], dtype=np.int32), batch["tokens"].shape
        )
        batch = {"positions": positions, **batch, "text": text_of(batch)}
        starts = range(0, len(batch["labels"]), _ROWS)
        parts = [{name: rows[at : at + _ROWS] for name, rows in batch.items()} for at in starts]
        with _matmuls(exact), tiles_at_most(case.tile):
            answers = [value_and_grad(unrolled.trained(here), here, part) for part in parts]
        (loss, tokens), grads = jax.tree.map(
            lambda *x: np.sum(x, axis=0, dtype=np.float64, keepdims=True), *answers
        )
        return Answer(loss, by_name(grads), tokens=tokens)

    return run


def _hidden_distance(model: Model, params: Params, batch: Batch, plan: Plan) -> jax.Array:
    """Sum the distances of a model's hidden states from a teacher's, apart from
    `jaxpar.models.hidden`: for each pair of layers the model is run again up to its layer.
    """
    assert model.projections is not None
    counts_BS = batch["labels"] >= 0
    total = jnp.zeros((), jnp.float32)
    pairs = model.projections.pairs
    for place, pair in enumerate(pairs):
        layers = pair.student or model.config.layers
        first = jax.tree.map(lambda x, layers=layers: x[:layers], params["blocks"])
        found = model.streams(params | {"blocks": first}, batch, plan, after=(layers,))
        x_BSD = found.after[0].astype(jnp.float32)
        projected_BST = jnp.einsum("bsd,dt->bst", x_BSD, params[PROJECTIONS][pair.name])
        gap_BST = projected_BST - batch[TEACHER_HIDDEN][:, :, place]
        total += jnp.sum(counts_BS * jnp.mean(jnp.square(gap_BST), axis=-1))
    return total / len(pairs)


def text_of(batch: Rows) -> np.ndarray:
    """Tell which tokens [B, S] are text and which are padding, row by row and apart from
    `jaxpar.parallel.padding`.

    Args:
      batch: `labels` [B, S], and `segments` or else `tokens` [B, S], on the host.

    Returns:
      True where a token is text, [B, S]. The zeros without labels at the end of a row are padding.
    """
    filled = batch.get("segments", batch["tokens"])
    text = np.ones(filled.shape, bool)
    for row, labels, kept in zip(filled, batch["labels"], text, strict=True):
        end = len(row)
        while end > 0 and row[end - 1] == 0 and labels[end - 1] < 0:
            end -= 1
        kept[end:] = False
    return text


def under_plan(case: Case, precision: str, exact: bool) -> Answer:
    """Compute loss and gradients under the plan with the function under test, with arrays laid out
    as in training.

    Args:
      case: what is run.
      precision: the compute dtype.
      exact: make float32 matmuls run in full float32.

    Returns:
      Every copy of the loss, gradients and tokens, with the shardings of the gradients. Layers are
      in the order of the model, also where a pipeline stores them in another.

    Raises:
      UserError: the CPU could mix up collectives of the program (`hlo.collective_order`).
    """
    experiment = case.experiment(precision)
    plan = experiment.plan
    shapes = param_shapes(case.model, plan)
    shardings = case.model.trained(plan.sharding(case.model.axes, shapes))
    stored = param_shardings(shapes, case.model, plan)
    batch_sharding = plan.sharding(TOKENS)

    def run(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        sums, grads = case.gradients(experiment, params, batch, None)
        return sums, jax.tree.map(on_device, grads)

    jitted = jax.jit(
        run,
        in_shardings=(stored, batch_sharding),
        out_shardings=(replicated_sharding(plan), shardings),
        compiler_options=once_options(plan.mesh, 0)
        | step_options(plan.mesh, case.config.compiler.options),
    )
    layers = case.model.config.layers
    order = stored_order(plan, layers)
    params = case.params
    if order is not None:
        blocks = jax.tree.map(
            lambda x: reorder_layers(x, None, order, layers),
            params["blocks"],
        )
        params = params | {"blocks": blocks}
    given = jax.device_put(params, stored), jax.device_put(case.batch, batch_sharding)
    with _matmuls(exact):
        with compiling_for(case.devices[0]), tiles_at_most(case.tile):
            lowered = jitted.lower(*given)
        compiled = lowered.compile()
        require_order(compiled, case.devices)
        sums, grads = compiled(*given)
    answer = answer_of(sums.loss, grads)
    stacked = {  # the layers are the second dim, after the copies
        name: reorder_layers(grad.swapaxes(0, 1), order, None, layers).swapaxes(
            0,
            1,
        )
        for name, grad in answer.grads.items()
        if order is not None and is_stacked(name)
    }
    return answer._replace(
        grads={**answer.grads, **stacked},
        tokens=copies(sums.tokens),
    )


def is_stacked(name: str) -> bool:
    """Return whether the first dim of a parameter counts layers."""
    return name.startswith("blocks.")


def _matmuls(exact: bool) -> contextlib.AbstractContextManager[object]:
    """Make float32 matmuls run in float32; by default GPUs use TF32 and TPUs bfloat16."""
    if exact:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def parameter_order(model: AnyModel) -> list[str]:
    """Return the names of the parameters that are trained, in the order in which the model declares
    them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model.trained(model.axes), is_leaf=is_axes)
    trained = {path_name(path) for path, _ in leaves}
    return [name for name in model.parameter_names() if name in trained]
