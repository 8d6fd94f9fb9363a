"""The schedule played out: programs whose answer is known, loops against the same loops unrolled by
hand.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.hlo.program.tasks import Collective, Loop, Node, Program, Task, Wait, walk_paths
from jaxpar.hlo.read import read_program
from jaxpar.rehearse.cost import Cost, Costs
from jaxpar.rehearse.timeline import Timeline, replay

DATA = Path(__file__).parents[1] / "hlo" / "data" / "hlo"
GATHER = Collective("all-gather", ((0, 1),), 1024, "bf16")


def matmul(seconds: float, *depends: int, name: str = "dot") -> Task:
    """Seconds stand in `flops` until `played` prices them."""
    return Task(name, "dot", "matmul", depends=depends, flops=seconds)


def gather(
    seconds: float, *depends: int, lane: str = "ici:x", asynchronous: bool = True, name: str = "ag"
) -> Task:
    return Task(
        name,
        "all-gather",
        "collective",
        depends=depends,
        flops=seconds,
        shape=lane,
        collective=GATHER,
        asynchronous=asynchronous,
    )


def fetch(
    seconds: float,
    *depends: int,
    name: str = "fetch",
    asynchronous: bool = True,
) -> Task:
    return Task(
        name,
        "copy",
        "host_copy",
        depends=depends,
        flops=seconds,
        shape="host",
        asynchronous=asynchronous,
    )


def program(*nodes: Node) -> Program:
    return Program("test", nodes)


def costs_of(subject: Program) -> Costs:
    def cost(task: Task) -> Cost:
        if task.shape:
            if task.asynchronous:
                lanes = (task.shape,)
            else:
                lanes = ("compute", task.shape)
        else:
            lanes = ("compute",)
        return Cost(task.flops, lanes)

    return {path: cost(task) for path, task, _ in walk_paths(subject.nodes)}


def played(*nodes: Node, **options: Any) -> Timeline:
    subject = program(*nodes)
    found = replay(subject, costs_of(subject), **options)
    assert_adds_up(found)
    return found


def held(found: Timeline) -> dict[str, float]:
    """How long each lane is held."""
    lanes: dict[str, float] = {}
    for row in found.tasks:
        for lane in row.cost.lanes:
            lanes[lane] = lanes.get(lane, 0.0) + row.seconds
    return lanes


def assert_adds_up(found: Timeline) -> None:
    """What holds of every timeline."""
    total = found.seconds
    assert sum(found.busy.values()) + sum(found.stalls.values()) + found.idle == pytest.approx(
        total
    )
    assert max(held(found).values(), default=0.0) <= total * (1 + 1e-9)
    assert all(
        event.start >= 0 and event.start + event.duration <= total * (1 + 1e-9)
        for event in found.events
    )


def test_one_matmul():
    found = played(matmul(3.0))
    assert found.seconds == 3.0
    assert found.busy["matmul"] == 3.0
    assert found.idle == 0.0
    assert not found.stalls


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_collective_is_exposed_whole(asynchronous):
    task = gather(2.0, asynchronous=asynchronous)
    found = played(task, *([Wait("done", 0)] if asynchronous else []))
    assert found.seconds == 2.0
    assert found.exposed_communication == 2.0
    assert found.stalls == ({"collective": 2.0} if asynchronous else {})
    assert found.busy == ({} if asynchronous else {"collective": 2.0})
    assert held(found)["ici:x"] == 2.0


@pytest.mark.parametrize("compute", [1.0, 5.0])
def test_a_matmul_beside_an_independent_collective_takes_the_longer(compute):
    found = played(gather(2.0), matmul(compute), Wait("done", 0))
    assert found.seconds == max(2.0, compute)
    assert found.exposed_communication == max(0.0, 2.0 - compute)


def test_a_dependent_chain_takes_the_sum():
    found = played(
        matmul(1.0),
        gather(2.0, 0),
        Wait("done", 1),
        matmul(4.0, 2),
        gather(8.0, 3),
        Wait("done", 4),
    )
    assert found.seconds == 15.0
    assert found.exposed_communication == 10.0


def test_a_task_that_takes_an_unfinished_result_waits_without_a_wait():
    found = played(gather(2.0), matmul(1.0, 0))
    assert found.seconds == 3.0
    assert found.exposed_communication == 2.0


def test_two_collectives_share_a_link_one_after_the_other_and_two_links_at_once():
    waits = Wait("done", 0), Wait("done", 1)
    assert played(gather(2.0), gather(3.0), *waits).seconds == 5.0
    assert played(gather(2.0), gather(3.0, lane="ici:y"), *waits).seconds == 3.0
    blocked = played(
        gather(2.0, name="first"), gather(3.0, asynchronous=False, name="second"), Wait("done", 0)
    )
    assert blocked.seconds == 5.0
    # The link was in use: the one that could not start is what compute stood still for.
    assert exposures(blocked) == {"second": 5.0}


def test_work_still_running_at_the_end_is_waited_for():
    found = played(matmul(1.0), gather(4.0))
    assert found.seconds == 4.0 + 1.0
    assert found.exposed_communication == 4.0


@pytest.mark.parametrize(
    ("fetching", "computing"),
    [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)],
)
def test_a_double_buffered_loop(fetching, computing):
    """Fetch the next while computing this: the first fetch, then the longer of the two each
    trip.
    """
    trips = 100
    loop = Loop(
        "loop",
        trips - 1,
        (Wait("arrived", 1, previous_trip=True), fetch(fetching), matmul(computing)),
        depends=(1,),
    )
    found = played(
        fetch(fetching, name="first"), Wait("arrived", 0), loop, matmul(computing, 2, name="last")
    )
    assert found.seconds == pytest.approx(
        (trips - 1) * max(fetching, computing) + fetching + computing
    )
    # The first trip's fetch hides whole, the last of the loop is waited for at the end of it.
    assert found.host_stall == pytest.approx(
        fetching + (trips - 1) * max(0.0, fetching - computing)
    )


def test_host_offload_behind_compute_costs_nothing_until_the_link_is_too_slow():
    def step(seconds: float) -> Timeline:
        forward = Loop(
            "forward",
            10,
            (
                matmul(1.0),
                fetch(seconds, 0, name="out"),
                matmul(1.0),
                Wait("sent", 1),
            ),
        )
        backward = Loop(
            "backward",
            10,
            (
                fetch(seconds, name="back"),
                matmul(2.0),
                Wait("there", 0),
                matmul(2.0, 2),
            ),
        )
        return played(forward, backward)

    assert step(0.5).host_stall == 0.0
    assert step(0.5).seconds == pytest.approx(10 * 2.0 + 10 * 4.0)
    slow = step(3.0)
    assert slow.host_stall == pytest.approx(10 * 2.0 + 10 * 1.0)
    assert exposures(slow) == pytest.approx({"out": 20.0, "back": 10.0})


def test_a_launch_is_idle_time():
    subject = program(matmul(3.0))
    found = replay(
        subject,
        {(0,): Cost(3.0, ("compute",), launch=1.0)},
    )
    assert (found.seconds, found.busy, found.idle) == (3.0, {"matmul": 2.0}, 1.0)


def test_exposure_is_added_up_over_trips_and_found_by_task():
    body = (
        gather(2.0, name="a"),
        matmul(1.5),
        Wait("a.done", 0),
        gather(0.5, name="b"),
        matmul(1.0),
        Wait("b.done", 3),
    )
    found = played(
        Loop("layers", 126, body),
        gather(4.0, asynchronous=False, name="c"),
    )
    rows = [
        (row.task.name, row.count, row.seconds, row.exposed)
        for row in found.tasks
        if row.task.collective
    ]
    assert rows == [
        ("a", 126, pytest.approx(252.0), pytest.approx(63.0)),
        ("b", 126, pytest.approx(63.0), 0.0),
        ("c", 1, 4.0, 4.0),
    ]
    assert found.seconds == pytest.approx(126 * 3.0 + 4.0)


def test_a_branch_that_is_taken_in_a_quarter_of_the_trips_takes_a_quarter_of_the_time():
    always = matmul(1.0)
    seldom = replace(matmul(2.0, name="seldom"), share=0.25)
    found = played(Loop("w", 8, (always, seldom), ()))
    assert found.seconds == pytest.approx(8 * 1.0 + 2 * 2.0)
    assert {row.task.name: row.count for row in found.tasks} == {"dot": 8, "seldom": 2}


@pytest.mark.parametrize(("share", "times"), [(1 / 3, 3), (0.01, 1), (0.0, 0)])
def test_a_branch_runs_a_whole_number_of_times(share, times):
    """A share that the trips do not have is rounded alike in the time and in the counts."""
    always = matmul(1.0)
    found = played(Loop("w", 8, (always, replace(matmul(2.0), share=share)), ()))
    assert found.seconds == pytest.approx(8 * 1.0 + times * 2.0)
    assert found.tasks[1].count == times


def test_events_draw_the_first_trips_and_a_bar_for_the_rest():
    layers = Loop(
        "layers",
        5,
        (gather(1.0), matmul(2.0), Wait("done", 0)),
    )
    found = played(
        Loop("microbatches", 4, (layers, matmul(1.0, name="head"))),
        drawn_trips=2,
    )
    bars = [event for event in found.events if event.repeats]
    assert [(bar.node.name, bar.start, bar.duration, bar.repeats) for bar in bars] == [
        ("layers", 4.0, 6.0, 3),
        ("layers", 15.0, 6.0, 3),
        ("microbatches", 22.0, 22.0, 2),
    ]
    assert [event.start for event in found.events if event.node.name == "dot"] == [
        0.0,
        2.0,
        11.0,
        13.0,
    ]
    assert [(event.start, event.lane) for event in found.events if event.node.name == "ag"][:2] == [
        (0.0, "ici:x"),
        (2.0, "ici:x"),
    ]
    assert len(played(Loop("loop", 5, (matmul(1.0),)), drawn_trips=5, most_events=3).events) == 3


def test_a_node_that_depends_on_a_later_one_is_refused():
    with pytest.raises(ValueError, match="dot depends on"):
        played(matmul(1.0, 1), matmul(1.0))


def test_a_deep_nest_of_many_tasks_is_quick():
    layer = tuple(
        node
        for i in range(100)
        for node in (gather(0.9, lane="ici:x"), matmul(1.0), Wait(f"done.{i}", 3 * i))
    )
    windows = Loop(
        "window",
        3,
        (gather(1.5, lane="ici:y"), matmul(1.0), Wait("done", 0)),
    )
    began = time.perf_counter()
    found = played(
        Loop(
            "microbatches",
            32,
            (Loop("layers", 126, (*layer, windows)), matmul(1.0)),
        )
    )
    assert time.perf_counter() - began < 2.0
    assert found.seconds == pytest.approx(32 * (126 * (100 + 4.5) + 1))


# Compiled programs, read from their text, at prices that make the answer plain.

SECONDS = {
    "matmul": 5.0,
    "collective": 3.0,
    "host_copy": 2.0,
    "fusion": 0.5,
    "copy": 0.25,
    "control": 0.0,
}


def played_text(name: str, **seconds: float) -> Timeline:
    """The timeline of a stored program; every task costs what its kind does, links and the host
    have a lane each.
    """
    prices = SECONDS | seconds
    subject = read_program((DATA / f"{name}.txt").read_text(encoding="utf-8"))
    lane = {"collective": "link", "host_copy": "host", "copy": "dma"}

    def cost(task: Task) -> Cost:
        if task.kind in lane and (task.asynchronous or task.kind != "copy"):
            own = (lane[task.kind],)
        else:
            own = ()
        return Cost(prices[task.kind], own if task.asynchronous else ("compute", *own))

    found = replay(
        subject,
        {path: cost(task) for path, task, _ in walk_paths(subject.nodes)},
    )
    assert_adds_up(found)
    return found


@pytest.mark.parametrize(
    ("link", "trip"),
    [(3.0, 0.25 + 10.5), (20.0, 0.25 + 20.0)],
)
def test_a_ring_written_by_hand_for_gpus_overlaps_its_permutes(link, trip):
    """4 trips: a copy, then a permute beside two matmuls and an addition. Before them two copies
    and a broadcast.
    """
    found = played_text("gpu_ring", collective=link)
    assert found.seconds == pytest.approx(0.25 + 0.5 + 4 * trip)
    assert found.exposed_communication == pytest.approx(4 * max(0.0, link - 10.5))
    assert held(found)["link"] == 4 * link


@pytest.mark.parametrize("link", [2.0, 4.0])
def test_the_tpu_compilers_own_windowed_loop_overlaps_its_permutes(link):
    """2 trips of two windows: in each a pair of permutes on one link beside a matmul, started a
    fusion (0.5) apart in the first. After the loop one more permute, with nothing to hide behind.
    """
    found = played_text("tpu_windowed_loop", collective=link)
    # The first pair has a fusion's head start on its matmul, the second none.
    assert found.exposed_communication == pytest.approx(
        link + 2 * (max(0.0, 2 * link - 5.5) + max(0.0, 2 * link - 5))
    )
    assert found.busy["matmul"] == 2 * 2 * 5.0


@pytest.mark.parametrize(
    ("link", "stall"),
    [(2.0, 0.0), (5.25, 0.0), (9.0, 3.75)],
)
def test_a_gpu_program_that_offloads_behind_a_matmul(link, stall):
    """A copy to the host beside a slice (0.25) and a matmul (5); another matmul comes after the
    wait.
    """
    found = played_text("gpu_host_copy", host_copy=link)
    assert found.host_stall == pytest.approx(stall)
    assert found.seconds == pytest.approx(10.25 + stall)


# Loops against the same loops unrolled: random programs.

DURATIONS = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 2.3])
LANES = st.sampled_from(["ici:x", "ici:y"])


@st.composite
def bodies(draw: Any, depth: int) -> tuple[Node, ...]:
    """A list of nodes in schedule order; some tasks are waited for at once, some later, some in the
    next trip.
    """
    nodes: list[Node] = []
    for i in range(draw(st.integers(1, 7))):
        if i:
            depends = tuple(draw(st.sets(st.integers(0, i - 1), max_size=2)))
        else:
            depends = ()
        flying = [j for j, node in enumerate(nodes) if isinstance(node, Task) and node.asynchronous]
        form = draw(
            st.sampled_from(["matmul", "gather", "blocking", "wait", "loop" if depth else "matmul"])
        )
        if form == "loop":
            nodes.append(
                Loop(
                    "loop",
                    draw(st.integers(1, 7)),
                    draw(bodies(depth - 1)),
                    depends,
                )
            )
        elif form == "wait" and flying:
            nodes.append(Wait("done", draw(st.sampled_from(flying))))
        elif form in ("gather", "blocking"):
            nodes.append(
                gather(
                    draw(DURATIONS),
                    *depends,
                    lane=draw(LANES),
                    asynchronous=form == "gather",
                    name=f"ag.{i}",
                )
            )
        else:
            nodes.append(matmul(draw(DURATIONS), *depends, name=f"dot.{i}"))
    return tuple(nodes)


@st.composite
def crossing_bodies(draw: Any) -> tuple[Node, ...]:
    """A body in which some asynchronous tasks are waited for in the next trip."""
    inner = list(draw(bodies(0)))
    for _ in range(draw(st.integers(0, 3))):
        flying = [j for j, node in enumerate(inner) if isinstance(node, Task) and node.asynchronous]
        if not flying:
            break
        at = draw(st.integers(0, len(inner)))
        target = draw(st.sampled_from(flying))
        inner = [_shifted(node, at) for node in inner]
        inner.insert(at, Wait("arrived", target + (target >= at), previous_trip=True))
    return tuple(inner)


def _shifted(node: Node, at: int, by: int = 1) -> Node:
    """The node after `by` more were put in at a position."""
    if isinstance(node, Wait):
        return replace(node, task=node.task + by * (node.task >= at))
    return replace(
        node,
        depends=tuple(j + by * (j >= at) for j in node.depends),
    )


def unrolled(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same program without loops."""
    flat: list[Node] = []

    def put(
        nodes: tuple[Node, ...],
        earlier: dict[int, int],
    ) -> dict[int, int]:
        """Append nodes; `earlier`: where the previous trip's nodes went. Returns where these
        went.
        """
        at: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if isinstance(node, Wait):
                if node.previous_trip:
                    found = earlier.get(node.task)
                else:
                    found = at[node.task]
                if found is not None:
                    flat.append(Wait(node.name, found))
            elif isinstance(node, Task):
                flat.append(
                    replace(
                        node,
                        depends=tuple(at[j] for j in node.depends),
                    )
                )
            else:
                for j in node.depends:
                    if isinstance(nodes[j], Task):
                        flat.append(Wait("entry", at[j]))
                trip: dict[int, int] = {}
                for _ in range(node.trips):
                    trip = put(node.body, trip)
                flat.extend(
                    Wait("exit", trip[j])
                    for j, inner in enumerate(node.body)
                    if getattr(inner, "asynchronous", 0)
                )
            at[i] = max(len(flat) - 1, 0)
        return at

    put(nodes, {})
    return tuple(flat)


def exposures(found: Timeline) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in found.tasks:
        total[row.task.name] = total.get(row.task.name, 0.0) + row.exposed
    return {name: seconds for name, seconds in total.items() if seconds > 1e-9}


def assert_equals_unrolled(nodes: tuple[Node, ...]) -> None:
    rolled = played(*nodes, drawn_trips=0)
    flat = played(*unrolled(nodes))
    assert rolled.seconds == pytest.approx(flat.seconds)
    assert exposures(rolled) == pytest.approx(exposures(flat))
    assert rolled.busy == pytest.approx(flat.busy)
    assert {lane: s for lane, s in held(rolled).items() if s} == pytest.approx(
        {lane: s for lane, s in held(flat).items() if s}
    )


@given(bodies(2))
def test_nested_loops_equal_their_unrolled_form(nodes):
    assert_equals_unrolled(nodes)


@given(crossing_bodies(), st.integers(1, 30), DURATIONS)
def test_loops_with_work_across_trips_equal_their_unrolled_form(body, trips, head):
    assert_equals_unrolled((matmul(head), Loop("loop", trips, body), matmul(head)))


@given(
    crossing_bodies(),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_a_nest_with_work_across_trips_equals_its_unrolled_form(body, trips, outer):
    assert_equals_unrolled(
        (Loop("outer", outer, (Loop("inner", trips, body), gather(0.4), matmul(0.2))),)
    )
