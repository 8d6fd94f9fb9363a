"""From logical axes to shards: the specs, what they refuse, and that the sizes promised are those
of real arrays.
"""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.layout.placements import local_bytes, local_rows, placements
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.rules import LOGICAL_AXES
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.base.layout.specs import spec_for

logical_axes = st.lists(
    st.sampled_from([None, *LOGICAL_AXES]),
    max_size=4,
)


def test_rules_name_every_logical_axis_and_no_other():
    # a rank is never split
    assert set(LOGICAL_AXES) - {"rank"} == set(vars(ShardingRules())) - {"own"}
    with pytest.raises(TypeError, match="embd"):
        ShardingRules(embd=("fsdp",))


@pytest.mark.parametrize(
    ("sizes", "axes", "spec"),
    [
        (
            {"data": 2, "fsdp": 2},
            ("batch", None),
            P(("data", "fsdp")),
        ),
        ({"data": 2, "tensor": 4}, ("batch", None), P("data")),
        ({"tensor": 8}, ("batch", "embed"), P()),
        (
            {"fsdp": 2, "tensor": 2},
            ("embed", "mlp"),
            P("fsdp", "tensor"),
        ),
        (
            {"tensor": 2},
            ("layers", "embed", "mlp"),
            P(None, None, "tensor"),
        ),
        (
            {"context": 2, "tensor": 2},
            (None, "residual_seq", None),
            P(None, ("context", "tensor")),
        ),
        ({"data": 2}, (), P()),
    ],
)
def test_axes_of_one_device_are_left_out(plan_of, sizes, axes, spec):
    plan = plan_of(**sizes)
    assert plan.spec(axes) == spec
    assert plan.size("batch") == sizes.get("data", 1) * sizes.get("fsdp", 1)


def test_a_mesh_axis_used_twice_names_both_dims(plan_of):
    with pytest.raises(
        UserError,
        match=r"^w: .*tensor=2 .*\(heads\) .*\(mlp\)",
    ):
        plan_of(tensor=2).sharding(("heads", None, "mlp"), name="w")


def test_a_dim_that_does_not_divide_names_array_dim_axis_and_sizes(plan_of):
    with pytest.raises(UserError) as error:
        plan_of(tensor=4).sharding(
            ("layers", "embed", "kv_heads"),
            (2, 64, 6),
            "blocks.k",
        )
    assert str(error.value) == (
        "blocks.k: dim 2 (kv_heads) has size 6, which tensor=4 does not divide: "
        "try mesh.tensor=3, or take tensor out of rules.kv_heads"
    )


@given(
    data=st.integers(1, 8),
    fsdp=st.integers(1, 8),
    tensor=st.integers(1, 8),
    size=st.integers(1, 60),
)
def test_the_suggested_sizes_divide(data, fsdp, tensor, size):
    rules = ShardingRules(mlp=("data", "fsdp", "tensor"))
    shape = dict.fromkeys(MESH_AXES, 1) | {"data": data, "fsdp": fsdp, "tensor": tensor}
    try:
        spec_for(("mlp",), rules, AbstractMesh(tuple(shape.values()), tuple(shape)), (size,))
    except UserError as error:
        flags = re.findall(r"mesh\.(\w+)=(\d+)", str(error))
        assert flags
        smaller = shape | {axis: int(fits) for axis, fits in flags}
        spec_for(("mlp",), rules, AbstractMesh(tuple(smaller.values()), tuple(smaller)), (size,))


@given(axes=logical_axes, data=st.data())
def test_a_spec_is_refused_or_fits_the_array(plan_of, axes, data):
    plan = plan_of(fsdp=2, context=2, tensor=2)
    shape = data.draw(st.tuples(*[st.integers(1, 12)] * len(axes)))
    try:
        sharding = plan.sharding(axes, shape)
    except UserError:
        with pytest.raises((UserError, ValueError)):
            NamedSharding(plan.mesh, plan.spec(axes)).shard_shape(shape)
    else:
        pieces = tuple(plan.size(axis) for axis in axes)
        assert sharding.shard_shape(shape) == tuple(
            n // k for n, k in zip(shape, pieces, strict=True)
        )


def test_the_table_tells_the_bytes_that_devices_really_hold(plan_of):
    plan = plan_of(fsdp=2, tensor=4)
    axes = {
        "blocks": {"q": ("layers", "embed", "heads", None), "scale": ("layers", "embed")},
        "head": ("vocab", None),
    }
    arrays = {
        "blocks": {
            "q": np.zeros((3, 8, 4, 5), jnp.bfloat16),
            "scale": np.zeros((3, 8), np.float32),
        },
        "head": np.zeros((12, 7), np.int8),
    }
    placed = jax.tree.leaves(jax.device_put(arrays, plan.sharding(axes, arrays)))
    rows = placements(arrays, axes, plan)
    assert [row.name for row in rows] == ["blocks.q", "blocks.scale", "head"]
    for row, array in zip(rows, placed, strict=True):
        assert row.shape == array.shape
        assert {shard.data.nbytes for shard in array.addressable_shards} == {row.bytes_per_device}


@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.sampled_from([8, 16, 24]),
)
def test_local_rows_are_those_of_this_process_s_devices(plan_of, here, rows):
    plan = plan_of(data=4, tensor=2)
    everywhere = plan.sharding(("batch",), (rows,))
    assert local_rows(everywhere, rows) == list(range(rows))
    some = {
        d: index for d, index in everywhere.devices_indices_map((rows,)).items() if d.id in here
    }
    partly = SimpleNamespace(addressable_devices_indices_map=lambda shape: some)
    size = rows // 4
    assert local_rows(partly, rows) == [
        row for row in range(rows) if {2 * (row // size), 2 * (row // size) + 1} & here
    ]


FEW_HEADS: list[
    tuple[dict[str, Any], tuple[int, int], dict[str, int], dict[str, Any], list[str]]
] = [
    ({}, (8, 4), {"tensor": 4}, {}, []),
    ({}, (1, 1), {}, {}, []),
    (
        {"heads": (), "kv_heads": ()},
        (3, 1),
        {"tensor": 2},
        {},
        [],
    ),
    # said otherwise: it is refused
    (
        {"attention_seq": ("context",)},
        (4, 4),
        {"tensor": 8},
        {},
        [],
    ),
    (
        {"kv_heads": ("fsdp",)},
        (8, 1),
        {"fsdp": 2, "tensor": 4},
        {},
        [],
    ),
    (
        {},
        (8, 2),
        {"tensor": 8},
        {"kv_heads": ()},
        [
            "tensor=8 does not divide 2 kv heads: their weights are whole, and k and v have 8 "
            "heads, each of them 4 times"
        ],
    ),
    (
        {},
        (12, 6),
        {"tensor": 4},
        {"kv_heads": ()},
        [
            "tensor=4 does not divide 6 kv heads: their weights are whole, and k and v have 12 "
            "heads, each of them 2 times"
        ],
    ),
    (
        {"heads": ("expert", "tensor"), "kv_heads": ("expert", "tensor")},
        (8, 2),
        {"expert": 2, "tensor": 4},
        {"kv_heads": ("expert",)},
        ["expert=2 x tensor=4 does not divide 2 kv heads"],
    ),
    (
        {},
        (4, 4),
        {"tensor": 8},
        {"heads": (), "kv_heads": (), "attention_seq": ("context", "tensor")},
        ["tensor=8 does not divide 4 heads: attention is split over the sequence"],
    ),
    (
        {"heads": ("expert", "tensor"), "kv_heads": ("expert", "tensor")},
        (2, 1),
        {"expert": 2, "tensor": 4},
        {"heads": ("expert",), "kv_heads": (), "attention_seq": ("context", "tensor")},
        [
            "expert=2 x tensor=4 does not divide 2 heads: attention",
            "expert=2 does not divide 1 kv heads",
        ],
    ),
    (
        {"heads": ("expert", "tensor"), "residual_seq": ("expert", "tensor")},
        (2, 2),
        {"expert": 2, "tensor": 4},
        {"heads": (), "kv_heads": (), "attention_seq": ("expert", "tensor")},
        ["expert=2 x tensor=4 does not divide 2 heads: attention is split over the sequence"],
    ),
    (
        {"residual_seq": ("context",)},
        (4, 4),
        {"tensor": 8},
        {"heads": (), "kv_heads": (), "attention_seq": ("context",)},
        [
            "tensor=8 does not divide 4 heads: attention is repeated along tensor, which "
            "rules.residual_seq does not name"
        ],
    ),
]


def test_local_bytes_are_those_of_one_device(plan_of):
    plan = plan_of(fsdp=4, tensor=2)
    split = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=plan.sharding(("embed", "mlp")))
    whole = jax.device_put(np.zeros(5, np.int8), plan.sharding((None,)))
    assert local_bytes({"split": split, "inner": [whole]}) == 4 * 2 * 3 + 5


@pytest.mark.parametrize(("asked", "heads", "mesh", "changes", "says"), FEW_HEADS)
def test_rules_make_do_with_more_devices_than_heads(asked, heads, mesh, changes, says):
    sizes = dict.fromkeys(MESH_AXES, 1) | mesh
    rules = ShardingRules(**asked)
    fitted, notes = fit_rules(rules, *heads, sizes)
    assert fitted == replace(rules, **changes)
    assert len(notes) == len(says)
    assert all(note.startswith(start) for note, start in zip(notes, says, strict=True))
    assert fit_rules(fitted, *heads, sizes) == (fitted, []), "what fits is left alone"


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_fitted_rules_divide_any_heads(kv_heads, group, tensor, expert, two):
    over = ("expert", "tensor") if two else ("tensor",)
    heads = kv_heads * group
    sizes = dict.fromkeys(MESH_AXES, 1) | {"tensor": tensor, "expert": expert}
    rules, _ = fit_rules(ShardingRules(heads=over, kv_heads=over), heads, kv_heads, sizes)
    mesh: Any = SimpleNamespace(shape=sizes)
    spec_for((None, "attention_seq", "heads"), rules, mesh, (1, 2520, heads))
    spec_for(("embed", "kv_heads"), rules, mesh, (1, kv_heads))
    devices = math.prod(sizes[axis] for axis in rules.heads)
    assert heads % math.lcm(kv_heads, devices) == 0


def test_equal_plans_share_one_compiled_program(plan_of):
    @chex.assert_max_traces(n=2)
    def double(x, plan):
        return 2 * x

    jitted = jax.jit(double, static_argnums=1)
    one = plan_of(data=2)
    same = plan_of(data=2)
    other = replace(plan_of(data=2), remat="full")
    assert one == same != other
    assert hash(one) == hash(same)
    for plan in (one, same, other):
        jitted(1.0, plan)


def test_constrain_shards_on_a_mesh_and_does_nothing_on_one_device(plan_of):
    x = jnp.zeros((8, 4))
    plan: Plan = plan_of(data=2, fsdp=2)
    constrained = jax.jit(lambda x: plan.constrain(x, ("batch", None)))(x)
    assert constrained.sharding.is_equivalent_to(plan.sharding(("batch", None)), x.ndim)
    assert plan_of().constrain(x, ("batch", None)) is x
