"""Where the arguments of a rehearsed function lie: on one chip, or on the mesh that they or the
function name. The target is these simulated devices, so that nothing needs a compiler that is not
here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from strangers import own_rehearsal
from tiers import MARKS

import jaxpar
from jaxpar import rehearse
from jaxpar.rehearse.argument_places import argument_bytes, place_arguments

HERE: Any = SimpleNamespace(
    name="these",
    platform="cpu",
    device_count=8,
    devices=jax.devices,
)
X = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
W = jax.ShapeDtypeStruct((8, 32), jnp.float32)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("rows",))


def product(x: jax.Array, params: dict[str, jax.Array], times: int) -> jax.Array:
    return times * (x @ params["w"].astype(x.dtype))


NAMES = ("x", "params", "times")
JITTED = jax.jit(product, static_argnums=2)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (X, W),
        (jnp.ones(X.shape, X.dtype), W),
        (np.ones(X.shape, np.float32), jax.device_put(np.ones(W.shape, W.dtype), jax.devices()[3])),
    ],
    ids=["shapes", "an array of this machine", "arrays alone"],
)
def test_arguments_without_a_sharding_are_on_one_chip(x: Any, w: Any) -> None:
    placed = place_arguments(JITTED, NAMES, (x, {"w": w}, 3), {}, HERE)
    assert placed.mesh.size == 1
    assert placed.note == (
        "no argument has a sharding: the function is on one of the 8 devices of these"
    )
    x_there, params_there, times = placed.arguments
    assert times == 3
    for given, there in ((x, x_there), (w, params_there["w"])):
        assert isinstance(there, jax.ShapeDtypeStruct)
        assert (there.shape, there.dtype) == (given.shape, given.dtype)
        assert there.sharding == NamedSharding(placed.mesh, P())


def test_beside_arguments_on_a_mesh_the_others_lie_as_the_compiler_chooses() -> None:
    rows = NamedSharding(mesh(), P("rows"))
    split = X.update(sharding=rows)
    placed = place_arguments(JITTED, NAMES, (split, {"w": W}, 3), {}, HERE)
    assert placed.mesh == rows.mesh
    assert placed.arguments == (split, {"w": W}, 3)
    assert placed.note.startswith("arrays without a sharding, 1 of the arguments (params.w): ")
    compiled = JITTED.lower(*placed.arguments).compile()
    assert argument_bytes(dict(zip(NAMES, placed.arguments, strict=True)), compiled) == {
        "x": 2 * 16 * 8 // 8,
        "params": 4 * 8 * 32,
    }


def test_arrays_that_are_not_used_take_nothing() -> None:
    """A static argument and Python numbers stand between them, which the program has not."""

    def some(a: Any, form: str, b: Any, number: float, c: Any) -> Any:
        return a["used"] * number + c

    jitted = jax.jit(some, static_argnames="form")
    arguments = ({"used": X, "left": W}, "a form", W, 2.0, X)
    names = ("a", "form", "b", "number", "c")
    compiled = jitted.lower(*arguments).compile()
    sizes = argument_bytes(dict(zip(names, arguments, strict=True)), compiled)
    assert sizes == {"a": 2 * 16 * 8, "c": 2 * 16 * 8}


def in_shardings() -> Any:
    return jax.jit(lambda x, y: x @ y, in_shardings=(NamedSharding(mesh(), P("rows")), None))


def a_constraint() -> Any:
    where = NamedSharding(mesh(), P("rows"))
    return jax.jit(lambda x, y: jax.lax.with_sharding_constraint(x @ y, where))


def a_shard_map() -> Any:
    rows = P("rows")
    mapped = jax.shard_map(lambda x, y: x @ y, mesh=mesh(), in_specs=(rows, P()), out_specs=rows)
    return jax.jit(lambda x, y: jax.lax.scan(lambda z, _: (mapped(z, y), None), x, None, 2)[0])


@pytest.mark.parametrize("form", [in_shardings, a_constraint, a_shard_map])
def test_a_mesh_that_the_function_names_is_its_arguments(form: Any) -> None:
    square = jax.ShapeDtypeStruct((8, 8), X.dtype)
    placed = place_arguments(form(), ("x", "y"), (X, square), {}, HERE)
    assert placed.mesh == mesh()
    assert placed.arguments == (X, square)
    assert placed.note.startswith("arrays without a sharding, 2 of the arguments (x, y): ")


def test_a_call_without_arrays_is_refused() -> None:
    with pytest.raises(jaxpar.UserError, match="this call has none"):
        place_arguments(jax.jit(lambda: jnp.ones((4, 4)) @ jnp.ones((4, 4))), (), (), {}, HERE)


def test_two_meshes_are_refused() -> None:
    other = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), P("a"))
    arguments = (X.update(sharding=other), {"w": W.update(sharding=NamedSharding(mesh(), P()))}, 3)
    with pytest.raises(jaxpar.UserError, match="2 meshes were found"):
        place_arguments(JITTED, NAMES, arguments, {}, HERE)


@pytest.mark.parametrize(
    ("name", "one"),
    [
        pytest.param("v5e-8", "v5e-1", marks=MARKS["tpu"]),
        pytest.param("h100x8", "h100x1", marks=MARKS["cuda"]),
    ],
)
def test_plain_shapes_cost_what_one_chip_costs(name: str, one: str) -> None:
    params = {
        "up": jax.ShapeDtypeStruct((own_rehearsal.EMBED, own_rehearsal.HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((own_rehearsal.HIDDEN, own_rehearsal.EMBED), jnp.float32),
    }
    batch = jnp.zeros((own_rehearsal.BATCH, own_rehearsal.SEQ, own_rehearsal.EMBED), jnp.bfloat16)
    moments = jax.eval_shape(own_rehearsal.OPTIMIZER.init, params)
    lines: list[str] = []
    plain = rehearse.step(own_rehearsal.step, params, moments, batch, target=name, say=lines.append)
    placed = own_rehearsal.report_for(one)
    note = f"no argument has a sharding: the function is on one of the 8 devices of {name}"
    assert note in lines and plain["notes"][0] == note
    assert plain["mesh"] == {}
    assert plain["time"]["step"] == pytest.approx(placed["time"]["step"], rel=1e-6)
    assert plain["memory"]["categories"] == placed["memory"]["categories"]
