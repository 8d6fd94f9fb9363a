"""The network model: closed forms on rings, lines, boxes and switches, contention, and figures
others have measured.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.hlo.program.tasks import Collective
from jaxpar.rehearse.link_costs import CollectiveTime, collective_time
from jaxpar.rehearse.targets import Position, Target, load_target

GIB = 2**30


def torus(target: Target, slices: int | None = None) -> tuple[Position, ...]:
    """Every seat of a target, slices outermost, then axes in order, cores last."""
    hardware = target.hardware
    sides = (
        range(slices or target.slices),
        *map(range, hardware.ici.shape),
        range(hardware.devices_per_chip),
    )
    return tuple(Position(seat[0], seat[1:-1], seat[-1]) for seat in itertools.product(*sides))


def groups(
    shape: tuple[int, ...],
    *axes: int,
) -> tuple[tuple[int, ...], ...]:
    """Replica groups along these axes of a mesh whose positions are numbered in row-major order."""
    ids = np.moveaxis(
        np.arange(math.prod(shape)).reshape(shape),
        axes,
        range(-len(axes), 0),
    )
    return tuple(
        map(
            tuple,
            ids.reshape(-1, math.prod(shape[axis] for axis in axes)).tolist(),
        )
    )


def shift(
    shape: tuple[int, ...],
    axis: int,
    by: int = 1,
) -> tuple[tuple[int, int], ...]:
    """(source, target) pairs that move everything `by` places along an axis, the end to the
    start.
    """
    rows = groups(shape, axis)
    return tuple((row[i], row[(i + by) % len(row)]) for row in rows for i in range(len(row)))


def take(name: str, kind, members, size: int = GIB, places=None) -> CollectiveTime:
    target = load_target(name)
    return collective_time(Collective(kind, members, size, "bf16"), places or torus(target), target)


def rate(found: CollectiveTime, size: int = GIB) -> float:
    """GB/s once it is under way."""
    return size / (found.seconds - found.latency) / 1e9


CUBE = (4, 4, 4)
NODES = (8, 8)  # of h100x64: nodes x GPUs

# Rings, lines and boxes.


@pytest.mark.parametrize(
    ("axes", "expected", "lanes"),
    [
        ((2,), 180 * 4 / 3, {"ici:z+", "ici:z-"}),
        ((0,), 180 * 4 / 3, {"ici:x+", "ici:x-"}),
        ((0, 1), 360 * 16 / 15, {"ici:x+", "ici:x-", "ici:y+", "ici:y-"}),
        (
            (0, 1, 2),
            540 * 64 / 63,
            {f"ici:{axis}{way}" for axis in "xyz" for way in "+-"},
        ),
    ],
)
def test_an_all_gather_over_whole_rings_of_a_cube(axes, expected, lanes):
    found = take("v5p-64", "all-gather", groups(CUBE, *axes))
    assert rate(found) == pytest.approx(expected)
    assert set(found.resources) == lanes


def test_the_book_has_v_over_180_gb_a_second_for_a_long_ring_of_v5p():
    # "How to Scale Your Model", part 3: V / W, which is this without the device's own part.
    members = groups((16, 16, 24), 2)
    assert rate(take("v5p-6144", "all-gather", members[:1])) == pytest.approx(180, rel=0.05)


def test_a_line_has_half_the_bandwidth_of_a_ring():
    line = groups((4, 8), 0)
    ring = groups((16, 16), 0)
    assert rate(take("v6e-32", "all-gather", line)) == pytest.approx(90 * 4 / 3)
    assert rate(take("v6e-256", "all-gather", ring)) == pytest.approx(180 * 16 / 15)


def test_an_all_reduce_is_two_all_gathers_and_a_reduce_scatter_one():
    members = groups(CUBE, 2)
    gather, scatter, reduce = (
        take("v5p-64", kind, members) for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )
    assert scatter == gather
    assert reduce.seconds - reduce.latency == pytest.approx(2 * (gather.seconds - gather.latency))


def test_latency_is_a_start_and_a_hop_a_microsecond():
    # To the far side of a ring of 4 are 2 hops, of a line of 4 are 3; three rings add up.
    for name, members, hops in [
        ("v5p-64", groups(CUBE, 2), 2),
        ("v5e-16", groups((4, 4), 1), 3),
        ("v5p-64", groups(CUBE, 0, 1, 2), 6),
    ]:
        assert take(name, "all-gather", members, 0).seconds == pytest.approx(5e-6 + hops * 1e-6)


def test_how_many_groups_there_are_does_not_matter_where_they_share_no_link():
    members = groups(CUBE, 2)
    assert take("v5p-64", "all-gather", members) == take("v5p-64", "all-gather", members[:1])


# Shared links.


def test_strided_groups_share_the_links_between_them():
    ring = np.arange(16).reshape(8, 2).T  # 0 2 4 ..., 1 3 5 ... along an axis of 16
    both = tuple(tuple(int(place) for place in row) for row in ring)
    places = tuple(Position(0, (0, y)) for y in range(16))
    one, two = (
        take("v6e-256", "all-gather", members, places=places) for members in (both[:1], both)
    )
    assert rate(one) == pytest.approx(180 * 8 / 7)
    assert rate(two) == pytest.approx(90 * 8 / 7)


def test_a_part_of_a_ring_is_a_line():
    places = tuple(Position(0, (0, y)) for y in range(16))
    halves = (tuple(range(8)), tuple(range(8, 16)))
    assert rate(take("v6e-256", "all-gather", halves, places=places)) == pytest.approx(90 * 8 / 7)


def test_opposite_places_of_a_ring_use_both_ways_round():
    members = ((0, 2), (1, 3))
    places = tuple(Position(0, (0, 0, z)) for z in range(4))
    one, two = (
        take("v5p-64", "all-gather", chosen, places=places) for chosen in (members[:1], members)
    )
    assert rate(one) == pytest.approx(180 * 2)
    assert rate(two) == pytest.approx(90 * 2)
    assert set(two.resources) == {"ici:z+", "ici:z-"}


def test_a_group_that_is_no_box_runs_a_ring_in_its_own_order():
    corners = (
        Position(0, (0, 0)),
        Position(0, (0, 1)),
        Position(0, (1, 3)),
        Position(0, (1, 2)),
    )
    found = take(
        "v5e-8",
        "all-gather",
        ((0, 1, 2, 3),),
        places=corners,
    )
    # Two of the four steps are three hops, and both ways cross the middle link: all of the data in
    # each direction.
    assert rate(found) == pytest.approx(45 * 4 / 3)


def test_the_two_devices_of_a_chip_share_its_links():
    shape = (4, 4, 4, 2)
    assert rate(take("tpu7x-64", "all-gather", groups(shape, 2))) == pytest.approx(90 * 4 / 3)
    one = tuple(group for group in groups(shape, 2) if group[0] % 2 == 0)
    assert rate(take("tpu7x-64", "all-gather", one)) == pytest.approx(180 * 4 / 3)


def test_the_two_devices_of_a_chip_have_a_link_of_their_own():
    found = take("tpu7x-64", "all-gather", groups((4, 4, 4, 2), 3))
    assert rate(found) == pytest.approx(540 * 2)
    assert found.resources == ("chip",)


def test_a_group_of_whole_chips_gathers_over_the_torus_once_for_both():
    found = take(
        "tpu7x-64",
        "all-gather",
        groups((4, 4, 4, 2), 2, 3),
    )
    over_torus = GIB * 3 / 4 / 180e9
    in_chip = GIB / 2 / 540e9
    assert found.seconds - found.latency == pytest.approx(over_torus + in_chip)
    assert found.resources == ("chip", "ici:z+", "ici:z-")


# All-to-all.


def test_an_all_to_all_on_a_ring_costs_a_quarter_of_an_all_gather():
    # Of the same global array, which is 16 times what a device holds ("How to Scale Your Model",
    # part 3).
    members = groups((16, 16), 1)
    gather = take("v6e-256", "all-gather", members, 16 * GIB)
    exchange = take("v6e-256", "all-to-all", members)
    ratio = (exchange.seconds - exchange.latency) / (gather.seconds - gather.latency)
    assert ratio == pytest.approx(1 / 4 * 16 / 15)


def test_an_all_to_all_over_a_box_is_as_slow_as_its_longest_axis():
    line = groups(CUBE, 2)
    plane = groups(CUBE, 1, 2)
    assert rate(take("v5p-64", "all-to-all", plane)) == rate(take("v5p-64", "all-to-all", line))


def test_an_all_to_all_on_a_line_crosses_its_middle():
    # 2 x 2 pairs of 1/4 each go over the middle link of a line of 4, each way.
    assert rate(take("v5e-16", "all-to-all", groups((4, 4), 1))) == pytest.approx(45)


# Point to point.


def test_a_ring_shift_uses_one_direction_of_one_axis():
    found = take("v5p-64", "ppermute", shift(CUBE, 2))
    assert found.resources == ("ici:z+",)
    assert rate(found) == pytest.approx(90)
    assert found.latency == pytest.approx(6e-6)
    assert take("v5p-64", "ppermute", shift(CUBE, 2, -1)).resources == ("ici:z-",)


def test_messages_that_cross_one_link_share_it():
    found = take("v6e-256", "ppermute", shift((16, 16), 1, 3))
    assert rate(found) == pytest.approx(180 / 2 / 3)
    assert found.latency == pytest.approx(8e-6)


def test_the_end_of_a_line_is_far_from_its_start():
    found = take("v5e-16", "ppermute", shift((4, 4), 1))
    assert found.latency == pytest.approx(8e-6)
    assert rate(found) == pytest.approx(45)
    assert set(found.resources) == {"ici:y+", "ici:y-"}


def test_a_message_to_itself_moves_nothing():
    found = take("v5p-64", "ppermute", ((0, 0), (1, 1)))
    assert found == CollectiveTime(0.0, 0.0, ())


def test_groups_of_one_move_nothing():
    assert take("v5p-64", "all-reduce", tuple((place,) for place in range(64))).seconds == 0


# Several slices.


def test_slices_exchange_over_the_data_centre_network():
    found = take("v5p-64x4", "all-reduce", groups((4, 64), 0))
    assert found.resources == ("dcn",)
    assert found.seconds - found.latency == pytest.approx(2 * 3 / 4 * GIB / 6.25e9)


def test_a_group_inside_and_across_slices_sends_only_its_part_across():
    found = take("v5p-64x4", "all-gather", groups((4, 4, 16), 0, 1))
    # 4 chips along x in each of 4 slices.
    assert found.seconds - found.latency == pytest.approx(
        GIB * 3 / 4 / 180e9 + GIB * 3 / 4 / 4 / 6.25e9
    )
    assert found.resources == ("ici:x+", "ici:x-", "dcn")


def test_a_shift_across_slices_goes_at_the_pace_of_the_slowest_pair():
    found = take("v5p-64x4", "ppermute", shift((256,), 0))
    assert rate(found) == pytest.approx(6.25)
    assert "dcn" in found.resources


# GPUs.


def test_an_all_gather_in_a_node():
    found = take("h100x8", "all-gather", (tuple(range(8)),))
    assert rate(found) == pytest.approx(370.8 * 8 / 7)
    assert found.resources == ("nvlink",)


def test_across_nodes_every_gpu_brings_its_nic():
    # 8 NICs of 50 GB/s a node carry 7/8 of the data; in the node NVLink carries 63/64 of it, which
    # takes longer.
    whole = take("h100x64", "all-gather", groups(NODES, 0, 1))
    assert rate(whole) == pytest.approx(min(370.8 * 64 / 63, 400 * 8 / 7))
    assert whole.resources == ("nvlink", "dcn")
    one_a_node = take("h100x64", "all-gather", groups(NODES, 0))
    assert rate(one_a_node) == pytest.approx(50 * 8 / 7)
    assert one_a_node.resources == ("dcn",)


def test_an_all_to_all_leaves_a_node_by_one_nic_a_gpu():
    assert rate(take("h100x64", "all-to-all", groups(NODES, 0, 1))) == pytest.approx(50 * 64 / 56)


def test_small_messages_take_the_protocol_and_the_tree_with_the_least_latency():
    small, large = (take("h100x64", "all-reduce", groups(NODES, 0, 1), size) for size in (4, GIB))
    # NCCL's LL protocol up and down a tree: 6.6 + 2 (7 x 0.6 + 3 x 2.7) us.
    assert small.seconds == pytest.approx(31.2e-6, rel=1e-3)
    assert rate(large) == pytest.approx(370.8 / 2 * 64 / 63, rel=0.05)


def test_pairs_in_a_node_use_nvlink_and_others_their_nics():
    assert take("h100x64", "ppermute", shift(NODES, 1)).resources == ("nvlink",)
    assert take("h100x64", "ppermute", shift(NODES, 0)).resources == ("dcn",)
    assert rate(take("h100x64", "ppermute", shift((64,), 0))) == pytest.approx(50)


# Measured by others ("How to Scale Your Model", parts 3 and 12).


@pytest.mark.parametrize(
    ("name", "members", "size", "measured"),
    [
        ("v5e-32", groups((4, 8), 0), 2048 * 8192 * 2, 680e-6),
        ("v5e-32", groups((4, 8), 0), 256 * 256 * 2, 8e-6),
        ("h100x8", (tuple(range(8)),), 4096 * 65536 * 2, 1.5e-3),
    ],
)
def test_within_a_third_of_what_was_measured(name, members, size, measured):
    assert take(name, "all-gather", members, size).seconds == pytest.approx(measured, rel=0.33)


# Bad input, and large targets.


def test_a_chip_without_figures_says_so():
    target = replace(load_target("h100x8"), hardware=Hardware(chip="new"))
    places = tuple(Position(0, (index,)) for index in range(8))
    with pytest.raises(UserError, match=r"h100x8 \(new\) .*nvlink"):
        collective_time(
            Collective("all-reduce", (tuple(range(8)),), 1, "f32"),
            places,
            target,
        )


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "ppermute"])
def test_a_group_of_thousands_is_no_trouble(kind):
    if kind == "ppermute":
        members = shift((6144,), 0)
    else:
        members = (tuple(range(6144)),)
    assert take("v5p-6144", kind, members).seconds > 0
