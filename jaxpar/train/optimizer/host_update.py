"""The optimizer's step in host memory, computed by the host: gradients go down, parameters come up.

Each device's host computes that device's part of the arrays, under `shard_map`, since a host sends
nothing to another. So an entry may depend on no other entry, unless there is one device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import MIXES_ENTRIES, ClosedJaxpr, compute_in_host_memory
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree, state_axes
from jaxpar.models import Params
from jaxpar.parallel.host_memory import in_host_memory, on_device, on_host
from jaxpar.train.optimizer.definition import Optimizer, in_host_memory_of
from jaxpar.train.optimizer.state_layout import StateArray
from jaxpar.train.optimizer.updated_part import (
    Part,
    Scale,
    UpdatedPart,
    gather_params,
    is_counted,
    update_arrays,
)

Shape = jax.ShapeDtypeStruct


def update_on_host(part: Part, scale: Scale, optimizer: Optimizer, plan: Plan) -> UpdatedPart:
    """Return the new parameters and state of some parts, each in the memory where the old one was.

    Parameters on the device go down and come up, those in host memory stay. The optimizer is one
    that `require_host_update` has accepted.
    """
    params = part.params
    opt_state = part.opt_state
    grads = part.grads
    axes = part.axes
    away = in_host_memory_of(optimizer, opt_state, params, axes, plan)
    params_away = jax.tree.map(in_host_memory, params)
    split_further = plan.mesh_axes("state_embed") != plan.mesh_axes("embed")
    stored = params
    if split_further:
        stored = jax.tree.map(
            lambda x, names: plan.constrain(on_device(x), state_axes(names)), params, axes
        )
    param_specs = jax.tree.map(
        lambda x, names: plan.sharding(state_axes(names), x.shape).spec, params, axes
    )
    state_specs = _state_specs(optimizer, params, axes, plan)
    every_axis = P(plan.mesh.axis_names)

    def of_device(
        params: Params, opt_state: optax.OptState, grads: Params, scale: Scale
    ) -> tuple[Params, optax.OptState, Array]:
        def compute(
            params: Params, opt_state: optax.OptState, grads: Params, scale: Scale
        ) -> tuple[Params, optax.OptState, Array]:
            here = Part(params, opt_state, grads, axes)
            new = update_arrays(here, scale, optimizer, plan)
            return new.params, new.opt_state, jnp.stack(new.overflows)

        arguments = jax.tree.map(on_host, (params, opt_state, grads, scale))
        new, state, overflows = compute_in_host_memory(compute, *arguments)
        if not split_further:
            new = jax.tree.map(_in_memory, new, params_away)
        state = jax.tree.map(_in_memory, state, away)
        return new, state, on_device(overflows)

    new, state, overflows = jax.shard_map(
        of_device,
        mesh=plan.mesh,
        in_specs=(param_specs, state_specs, param_specs, P()),
        out_specs=(param_specs, state_specs, every_axis),
        check_vma=False,
    )(stored, opt_state, grads, scale)
    if split_further:
        new = gather_params(jax.tree.map(on_device, new), axes, plan)
        new = jax.tree.map(_in_memory, new, params_away)
    counted: list[tuple[PyTree, PyTree]] = [(params, param_specs)]
    if not optimizer.stays_finite:
        counted.append((opt_state, state_specs))
    copies = [
        _copies(spec, plan)
        for arrays, specs in counted
        for x, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(specs), strict=True)
        if is_counted(x)
    ]
    # Where devices hold the same part of an array, all of them have counted it.
    by_array = overflows.reshape(plan.mesh.size, len(copies)).sum(0) // jnp.array(copies)
    return UpdatedPart(new, state, by_array.sum(dtype=jnp.int32))


def require_host_update(optimizer: Optimizer, params: Params, axes: Params, plan: Plan) -> None:
    """Refuse an optimizer whose update a host cannot compute for its own devices alone.

    Args:
      optimizer: the optimizer.
      params: the trained parameters as ShapeDtypeStructs.
      axes: their logical axes.
      plan: the plan.

    Raises:
      UserError: entries of the update depend on other entries and there are several devices, or
        JAX cannot compute it on arrays in host memory.
    """
    transformation = optimizer.make(axes)
    exact = jax.tree.map(lambda x: Shape(x.shape, jnp.float32), params)
    state = jax.eval_shape(transformation.init, exact)

    def on_arrays_of_host(grads: Params, state: optax.OptState, params: Params) -> Any:
        return transformation.update(*jax.tree.map(on_host, (grads, state, params)))

    if optimizer.by_layer:
        instead = "try memory.optimizer=offload, which updates on the device"
    else:  # as with pruning: its state cannot pass the device layer by layer
        instead = "try memory.optimizer=device"
    try:
        jaxpr = jax.make_jaxpr(on_arrays_of_host)(exact, state, exact)
    except ValueError as error:
        if "memory_space" not in str(error):
            raise
        raise UserError(
            f"memory.optimizer=host: {optimizer.name} makes arrays of its own in its update, and "
            f"JAX does not mix them with those in host memory: {instead}"
        ) from error
    if plan.mesh.size == 1:
        return
    if found := _first_that_mixes(jaxpr):
        raise UserError(
            "memory.optimizer=host has each device's host update its own part of the arrays, and "
            f"{optimizer.name} looks at several entries of an array at once ({found}): {instead}"
        )


def _first_that_mixes(jaxpr: ClosedJaxpr) -> str:
    """Name the first primitive by which an entry of a result depends on another place's entries, or
    on the place itself; empty if there is none.

    Every other operation takes and gives arrays of one shape, or spreads a scalar.
    """
    if any(jnp.size(value) > 1 for value in jaxpr.consts):
        return "a constant array"
    for equation in jaxpr.jaxpr.eqns:
        inner = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr)]
        if inner:
            found = next(filter(None, map(_first_that_mixes, inner)), "")
            if found:
                return found
            continue
        name = equation.primitive.name
        taken = {shape for shape in map(_shape, equation.invars) if math.prod(shape) > 1}
        given = set(map(_shape, equation.outvars))
        makes_arrays = any(math.prod(shape) > 1 for shape in given)
        if taken:
            mixes = name in MIXES_ENTRIES or taken != given
        else:
            mixes = makes_arrays and name != "broadcast_in_dim"
        if mixes:
            return name
    return ""


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of what an equation reads or makes, whose type has none for tokens and the like."""
    return getattr(value.aval, "shape", ())


def _state_specs(optimizer: Optimizer, params: Params, axes: Params, plan: Plan) -> PyTree:
    """The spec of each array of the state: that of the parameter it belongs to."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = structure.flatten_up_to(axes)
    by_path = {path: state_axes(one) for (path, _), one in zip(leaves, names, strict=True)}
    exact = jax.tree.map(lambda x: Shape(x.shape, jnp.float32), params)

    def spec(array: StateArray) -> P:
        if array.parameter is None:
            return P()
        own = by_path[array.parameter]
        dims = [None if dim is None else own[dim] for dim in array.dims]
        return plan.sharding(dims, array.value.shape, "optimizer state").spec

    return jax.tree.map(
        spec,
        optimizer.state_arrays(exact, axes),
        is_leaf=lambda x: isinstance(x, StateArray),
    )


def _copies(spec: P, plan: Plan) -> int:
    """Count the devices that hold the same part of an array."""
    split = 1
    for entry in spec:
        mesh_axes = entry if isinstance(entry, tuple) else (entry,)
        split *= math.prod(plan.mesh.shape[axis] for axis in mesh_axes if axis is not None)
    return plan.mesh.size // split


def _in_memory(x: Array, away: bool) -> Array:
    """Leave an array in host memory, or bring it up."""
    if away:
        return x
    return on_device(x)
