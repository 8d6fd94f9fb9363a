"""Where any optimizer's state lies: beside its parameters, and made there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import path_name

AXES = {"table": ("vocab", "embed"), "up": ("layers", "embed", "mlp"), "scale": ("layers", "embed")}
SHAPES = {"table": (256, 128), "up": (3, 128, 128), "scale": (3, 128)}
TABLE = P("tensor", "fsdp")
UP = P(None, "fsdp", "tensor")
SCALE = P(None, "fsdp")


def placed_params() -> Any:
    layout = jaxpar.Layout(jaxpar.make_mesh(data=2, fsdp=2, tensor=2))
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    return jax.device_put(params, layout.sharding(AXES, params))


def like_params(tree: str) -> dict[str, P]:
    return {f"{tree}.table": TABLE, f"{tree}.up": UP, f"{tree}.scale": SCALE}


ADAFACTOR = {
    # a square matrix: which of its dims was taken out is not to be told by sizes
    "0.v_row.up": P(None, "fsdp"),
    "0.v_col.up": P(None, "tensor"),
    "0.v_row.table": P("fsdp"),
    "0.v_col.table": P("tensor"),
    "0.v.scale": SCALE,
}
STATES = {
    "adamw": (optax.adamw(1e-3), like_params("0.mu") | like_params("0.nu")),
    "momentum": (optax.sgd(1e-3, 0.9), like_params("0.trace")),
    "sgd": (optax.sgd(1e-3), {}),
    "lion": (optax.lion(1e-3), like_params("0.mu")),
    "adafactor": (optax.adafactor(1e-3), ADAFACTOR),
    "muon": (
        optax.contrib.muon(1e-3),
        {
            "inner_states.muon.inner_state.0.mu.table": TABLE,
            "inner_states.adam.inner_state.0.nu.up": UP,
        },
    ),
    "accumulating": (
        optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 2),
        like_params("inner_opt_state.1.0.mu") | like_params("acc_grads"),
    ),
    "several arrays of a parameter": (
        optax.sm3(1e-3),
        {"0.mu.up.1": P("fsdp"), "0.mu.up.2": P("tensor"), "0.mu.table.0": P("tensor")},
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_an_optimizers_state_lies_where_its_parameters_do(name: str) -> None:
    optimizer, wanted = STATES[name]
    params = placed_params()
    state = jaxpar.optimizer_state(optimizer, params)
    jax.tree.map(np.testing.assert_array_equal, state, optimizer.init(params))
    rows = jax.tree_util.tree_leaves_with_path(state)
    found = {path_name(path): leaf for path, leaf in rows}
    mesh = params["up"].sharding.mesh
    for path, leaf in found.items():
        where = jax.sharding.NamedSharding(mesh, wanted.get(path, P()))
        if path in wanted or leaf.ndim == 0:
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim), path
        assert leaf.sharding.mesh == mesh
    assert set(wanted) <= set(found)


def test_shapes_that_know_where_they_lie_give_such_shapes() -> None:
    params = placed_params()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    optimizer = optax.adafactor(1e-3)
    there = jaxpar.optimizer_state(optimizer, shapes)
    made = jaxpar.optimizer_state(optimizer, params)
    assert jax.tree.structure(there) == jax.tree.structure(made)
    for shape, array in zip(jax.tree.leaves(there), jax.tree.leaves(made), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_parameters_of_one_device_keep_their_state_there() -> None:
    device = jax.devices()[3]
    params = jax.device_put({"w": jnp.ones(4)}, device)
    state = jaxpar.optimizer_state(optax.adam(1e-3), params)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(state))


REFUSED = {
    "no transformation": (
        lambda: ("adam", placed_params()),
        "takes an optax.GradientTransformation, and was given 'adam'",
    ),
    "no place": (
        lambda: (optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}),
        "found some without",
    ),
    "two places": (
        lambda: (optax.adam(1e-3), {"w": placed_params()["up"], "b": jnp.ones(4)}),
        "of one device",
    ),
    "a state that optax cannot read": (
        lambda: (optax.lbfgs(), placed_params()),
        "optax.tree_map_params cannot tell",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_layout_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(jaxpar.UserError, match=message):
        jaxpar.optimizer_state(*given())


def test_labels_that_walk_a_dict_are_refused_with_a_way_out() -> None:
    params = {"kept": {"w": jnp.ones((4, 4))}, "trained": {"w": jnp.ones((4, 4))}}

    def labels(tree: dict[str, Any]) -> dict[str, Any]:
        return {name: jax.tree.map(lambda _, name=name: name, one) for name, one in tree.items()}

    parts = {"trained": optax.adamw(1e-2), "kept": optax.set_to_zero()}
    with pytest.raises(UserError, match=r"optax.multi_transform"):
        jaxpar.optimizer_state(optax.multi_transform(parts, labels), params)
    state = jaxpar.optimizer_state(optax.multi_transform(parts, labels(params)), params)
    assert optax.tree.get(state, "count") == 0
