"""The comparison of the optimizer's step under a plan with one device's, from the same gradients.

Parameters move by two steps, so that what the optimizer keeps of the first is part of the answer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.compiler import once_options
from jaxpar.base.config import PrecisionConfig
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.sharding import path_name
from jaxpar.models import Params
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.optimizer.update import update
from jaxpar.train.optimizer.updated_part import Part
from jaxpar.train.state import gradient_axes
from jaxpar.train.step import init_state
from jaxpar.verify.comparison import Answer, copies
from jaxpar.verify.of_config.losses_and_gradients import (
    Case,
    is_stacked,
    parameter_order,
)
from jaxpar.verify.report import GradientRow, Verdict

# Float32, from the same gradients: what differs is the order of sums (of the gradients' norm, of
# Adafactor's rows, in Muon's matmuls), an ulp (6e-8) here or there, and the rounding of a parameter
# of which a step is a thousandth or more. The worst seen, of Muon, is 1e-6.
UPDATE = 1e-4
_LEAST_STEP = 1e-3
"""The share of a parameter below which a step is compared with this share, as it is rounded
more.
"""


def compare_updates(case: Case, reference: Answer) -> Verdict:
    """Compare how far each parameter moves in two steps of the optimizer.

    Args:
      case: what is verified; its optimizer has a constant learning rate, so large that rounding of
        the parameters does not count.
      reference: the loss and gradients that both take.

    Returns:
      The verdict, with a row for each parameter that is trained.
    """
    got = _moved(_experiment(case, alone=False), case, reference)
    want = _moved(_experiment(case, alone=True), case, reference)
    shapes = dict(_named(case.model.trained(case.params)))
    rows = []
    for name in parameter_order(case.model):
        moved = want[name][0].astype(np.float64)
        scale = max(_rms(moved), _LEAST_STEP * _rms(shapes[name]), 1e-30)
        error = max(_rms(copy - moved) / scale for copy in got[name])
        if not math.isfinite(error):
            error = math.inf
        rows.append(GradientRow(name, shapes[name].shape, error, UPDATE))
    if case.optimizer is None:
        name = case.config.optimizer.name
    else:
        name = "yours"
    return Verdict(f"update: {name}", 0.0, UPDATE, tuple(rows), of_update=True)


def _experiment(case: Case, alone: bool) -> Experiment:
    """Make the case's experiment in float32, on its own plan, or alone on one device."""
    config = case.config
    train = replace(
        config.train,
        learning_rate=0.05,
        warmup_steps=0,
        schedule="constant",
    )
    # what is pruned is chosen in both steps
    pruning = replace(config.pruning, begin=0, end=2, every=1)
    config = replace(config, train=train, pruning=pruning, precision=PrecisionConfig())
    devices = case.devices
    if alone:
        memory = replace(config.memory, optimizer="device", parameters="device")
        config = replace(config, mesh=MeshSpec(), memory=memory)
        devices = devices[:1]
    return make_experiment(config, devices, case.model, case.optimizer, training=False)


def _moved(
    experiment: Experiment,
    case: Case,
    reference: Answer,
) -> dict[str, np.ndarray]:
    """Compute how far two steps move each parameter, [copies, *shape], with the model's order of
    layers.
    """
    model = experiment.model
    plan = experiment.plan
    layers = model.config.layers
    order = stored_order(plan, layers)
    here = jax.tree.map(jnp.asarray, case.params)
    state = init_state(experiment, here)
    axes = model.trained(model.axes)

    def gradient(path: Any, axes: tuple[str | None, ...]) -> jax.Array:
        name = path_name(path)
        value = reference.grads[name][0].astype(np.float32)
        if order is not None and is_stacked(name):
            value = np.asarray(reorder_layers(jnp.asarray(value), None, order, layers))
        return jax.device_put(value, plan.sharding(axes, value.shape))

    grads = jax.tree_util.tree_map_with_path(
        lambda path, _, names: gradient(path, names),
        model.trained(case.params),
        gradient_axes(model),
    )
    nll = jnp.float32(reference.losses[0])
    sums = LossSums(nll, nll, jnp.float32(np.max(reference.tokens)))

    def steps(params: Params, opt_state: Any, grads: Params) -> Params:
        before = jax.tree.map(on_device, params)
        for share in (1.0, 0.5):
            given = jax.tree.map(lambda g, share=share: share * g, grads)
            done = update(Part(params, opt_state, given, axes), sums, experiment.optimizer, plan)
            params = done.params
            opt_state = done.opt_state
        return jax.tree.map(lambda new, old: on_device(new) - old, params, before)

    places = model.trained(plan.sharding(model.axes, model.shapes(order)))
    run = jax.jit(steps, out_shardings=places, compiler_options=once_options(plan.mesh, 0))
    moved = run(model.trained(state.params), state.opt_state, grads)
    back = partial(reorder_layers, before=order, after=None, layers=layers)
    found = {}
    for name, leaf in _named(moved):
        every = copies(leaf)
        if order is not None and is_stacked(name):  # the layers are the second dim, after copies
            every = np.asarray(back(every.swapaxes(0, 1))).swapaxes(
                0,
                1,
            )
        found[name] = every
    return found


def _named(tree: Params) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _rms(x: np.ndarray) -> float:
    if x.size:
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    return 0.0
