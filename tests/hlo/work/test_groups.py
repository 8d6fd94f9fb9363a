"""Who takes part in a collective: lists, iota tilings and mesh axes, against numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work.collectives import Groups, replica_groups, source_target_pairs


def groups(attribute: str, devices: int = 8) -> Groups:
    line = f"  ROOT %x = f32[2]{{0}} all-gather(%a), {attribute}, dimensions={{0}}"
    return replica_groups(
        parse_module(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{line}\n}}\n")
        .computations["main"]
        .instructions["x"],
        devices,
    )


def test_lists() -> None:
    assert groups("replica_groups={{0,1,2,3},{4,5,6,7}}") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups("replica_groups={{0,2}}") == ((0, 2),)


@pytest.mark.parametrize("attribute", ["replica_groups={}", "channel_id=1"])
def test_no_groups_mean_everybody(attribute: str) -> None:
    assert groups(attribute, 4) == ((0, 1, 2, 3),)


def test_iota() -> None:
    assert groups("replica_groups=[2,4]<=[8]") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups("replica_groups=[4,2]<=[2,4]T(1,0)") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups("replica_groups=[16,4]<=[4,16]T(1,0)")[1] == (1, 17, 33, 49)


dims = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(dims, st.randoms(use_true_random=False))
def test_iota_against_numpy(sizes: list[int], random: np.random.RandomState) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    total = prod(sizes)
    width = max(d for d in range(1, total + 1) if total % d == 0 and d <= 3)
    expected = (
        np.arange(total)
        .reshape(sizes)
        .transpose(order)
        .reshape(
            -1,
            width,
        )
    )
    text = f"replica_groups=[{total // width},{width}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    assert groups(text) == tuple(map(tuple, expected.tolist()))


@given(dims, st.data())
def test_mesh_axes_against_numpy(sizes: list[int], data: st.DataObject) -> None:
    """One group for each position along the axes that were not chosen; within it the chosen axes in
    their order.
    """
    chosen = data.draw(
        st.lists(
            st.sampled_from(range(len(sizes))),
            min_size=1,
            unique=True,
        )
    )
    order = data.draw(st.permutations(range(len(sizes))))
    source = [sizes[order.index(dim)] for dim in range(len(sizes))]
    mesh = np.arange(prod(sizes)).reshape(source).transpose(order)
    outside = [dim for dim in range(len(sizes)) if dim not in chosen]
    expected = mesh.transpose(outside + chosen).reshape(
        -1,
        prod(sizes[dim] for dim in chosen),
    )
    axes = ",".join(f"'axis_{n}'={size}" for n, size in enumerate(sizes))
    names = ",".join(f"'axis_{n}'" for n in chosen)
    ids = f", device_ids=([{','.join(map(str, source))}]T({','.join(map(str, order))}))"
    found = groups(f"replica_groups=mesh[{axes}]{ids} {{{names}}}")
    assert found == tuple(map(tuple, expected.tolist()))
    if list(order) == sorted(order):
        assert found == groups(f"replica_groups=mesh[{axes}] {{{names}}}")


def test_part_of_a_mesh_axis() -> None:
    """`'b':(2)2` is the part of size 2 of axis b that has 2 outside it: b = outside 2 x chosen 2 x
    inside 2.
    """
    mesh = np.arange(16).reshape(2, 2, 2, 2)  # a, then b's three parts
    expected = mesh.transpose(0, 1, 3, 2).reshape(-1, 2)
    found = groups("replica_groups=mesh['a'=2,'b'=8] {'b':(2)2}", 16)
    assert found == tuple(map(tuple, expected.tolist()))


def test_an_explicit_device_order() -> None:
    assert groups("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,3,1) {'b'}", 4) == (
        (0, 2),
        (3, 1),
    )


@pytest.mark.parametrize("text", ["mesh['a'=2,'b'=2] {'c'}", "[what]"])
def test_a_form_that_nobody_knows_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="replica_groups"):
        groups(f"replica_groups={text}", 4)


def test_source_target_pairs() -> None:
    text = "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[2]{0} collective-permute(%a)"
    pairs = parse_module(f"{text}, source_target_pairs={{{{0,1}},{{1,0}},{{2,3}}}}\n}}\n")
    assert source_target_pairs(pairs.computations["main"].instructions["x"]) == (
        (0, 1),
        (1, 0),
        (2, 3),
    )
    none = parse_module(f"{text}\n}}\n")
    assert source_target_pairs(none.computations["main"].instructions["x"]) == ()
