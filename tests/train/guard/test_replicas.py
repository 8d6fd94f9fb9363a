"""Copies of arrays on several devices: one flipped bit is found, with its array and device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.layout.plan import Plan
from jaxpar.parallel.host_memory import HOST
from jaxpar.train.guard.replicas import Mismatch, ReplicaCheck, mismatch_message, replicas_note

SHAPES = {"matrix": (P("fsdp", "tensor"), jnp.float32), "bias": (P("tensor"), jnp.bfloat16)}


def arrays_on(plan: Plan) -> dict[str, jax.Array]:
    def one(spec: P, dtype: Any) -> jax.Array:
        numbers = np.arange(1, 65, dtype=dtype).reshape([8] * (2 if len(spec) > 1 else 1) + [-1])
        return jax.device_put(numbers, NamedSharding(plan.mesh, spec))

    return {name: one(*made) for name, made in SHAPES.items()}


def with_flipped_bit(x: jax.Array, device: jax.Device) -> jax.Array:
    """The array with the lowest bit of one entry turned over on one device."""
    pieces = []
    for shard in x.addressable_shards:
        piece = np.array(shard.data)
        if shard.device == device:
            piece.view(f"uint{8 * piece.itemsize}").reshape(-1)[1] ^= 1
        pieces.append(jax.device_put(piece, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("number", [0, 5])
def test_one_flipped_bit_is_found_with_its_array_and_its_device(plan_of, name, number) -> None:
    plan = plan_of(data=4, tensor=2)
    arrays = arrays_on(plan)
    check = ReplicaCheck(arrays, plan.mesh)
    assert check.mismatches(arrays) == []
    device = plan.mesh.devices.flat[number]
    arrays[name] = with_flipped_bit(arrays[name], device)
    assert check.mismatches(arrays) == [Mismatch(name, (device,), 4)]


def test_of_two_copies_none_is_blamed(plan_of) -> None:
    plan = plan_of(data=2, fsdp=2, tensor=2)
    arrays = arrays_on(plan)
    device = plan.mesh.devices.flat[3]
    arrays["matrix"] = with_flipped_bit(arrays["matrix"], device)
    (found,) = ReplicaCheck(arrays, plan.mesh).mismatches(arrays)
    assert not found.known and device in found.devices and found.copies == 2
    assert "two copies do not say which" in mismatch_message([found], 10, 20)


def test_what_has_no_copies_on_devices_is_not_compared_and_that_is_said(plan_of) -> None:
    plan = plan_of(fsdp=4, tensor=2)
    arrays = arrays_on(plan)
    check = ReplicaCheck(arrays, plan.mesh)
    assert (check.compared, check.arrays) == (1, 2)
    assert "compares 1 of 2 arrays" in replicas_note(check)
    alone = ReplicaCheck({"matrix": arrays["matrix"]}, plan.mesh)
    assert alone.compared == 0 and alone.mismatches({"matrix": arrays["matrix"]}) == []
    assert replicas_note(alone).startswith("warning: ")
    away = NamedSharding(plan.mesh, P("tensor")).with_memory_kind(HOST)
    shape = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=away)
    assert ReplicaCheck({"bias": shape}, plan.mesh).compared == 0
