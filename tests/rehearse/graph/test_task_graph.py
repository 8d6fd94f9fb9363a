"""The task graph: paths, bounds and schedules whose answers are known, loops through which values
go from trip to trip, and schedules that the checker must refuse.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fake_rehearsal import fake_rehearsal
from hypothesis import given
from hypothesis import strategies as st
from report_types import problems
from tiers import needs_cuda, needs_libtpu

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import Options, without_fusion
from jaxpar.hlo.fusions import joining_fusions, operations, operations_opened
from jaxpar.hlo.program.tasks import Loop, Needs, Node, Program, Task, walk_paths
from jaxpar.hlo.read import read_program
from jaxpar.rehearse.cost import Cost, Costs
from jaxpar.rehearse.graph.list_schedule import best_schedule, check_schedule
from jaxpar.rehearse.graph.paths import bound, paths_of
from jaxpar.rehearse.graph.report import task_graph_of, write_graph
from jaxpar.rehearse.graph.runs import RunGraph, beside_compute, closed, unrolled
from jaxpar.rehearse.report.task_graph import TaskGraph
from jaxpar.rehearse.timeline import replay

STORED = sorted((Path(__file__).parents[2] / "hlo" / "data" / "hlo").glob("*.txt"))


def task(seconds: float, *needs: int, lane: str = "compute", state: tuple[int, ...] = ()) -> Task:
    """A task of so many seconds, which stand in `flops`; its lane stands in `shape`."""
    kind = "matmul" if lane == "compute" else "collective"
    return Task(
        "a_task",
        "dot",
        kind,
        depends=needs,
        flops=seconds,
        shape=lane,
        needs=Needs(needs, states=state),
    )


def costs_of(program: Program) -> Costs:
    return {path: Cost(one.flops, (one.shape,)) for path, one, _ in walk_paths(program.nodes)}


def graph_of(*nodes: Node) -> RunGraph:
    program = Program("test", nodes)
    graph = unrolled(program, costs_of(program))
    assert graph is not None
    return graph


def test_path_slack_bound_and_list_schedule_of_a_known_graph() -> None:
    # a matmul, a sum of 3 s over links beside one matmul of 2, and what needs both
    graph = graph_of(task(1.0), task(3.0, 0, lane="ici"), task(2.0, 0), task(1.0, 1, 2))
    paths = paths_of(graph)
    assert paths.length == 5.0
    assert paths.slack == [0.0, 0.0, 1.0, 0.0]
    assert bound(graph, paths) == 5.0  # compute is held for 4
    schedule = best_schedule(graph)
    assert schedule.seconds == 5.0
    assert schedule.begins == [0.0, 1.0, 1.0, 4.0]


def test_the_busiest_lane_bounds_what_a_path_does_not() -> None:
    graph = graph_of(task(2.0), task(2.0), task(2.0))
    paths = paths_of(graph)
    assert (paths.length, bound(graph, paths)) == (2.0, 6.0)
    assert best_schedule(graph).seconds == 6.0


def test_the_most_urgent_run_goes_first() -> None:
    # the program has the long chain's head last
    graph = graph_of(task(1.0), task(1.0), task(1.0), task(5.0, 2, lane="ici"))
    assert best_schedule(graph).seconds == 6.0


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        ([0.0, 0.5, 4.0], "run 1 begins before run 0"),
        ([0.0, 1.0, 0.5], "runs 0 and 2 hold compute"),
        ([0.0, 1.0], "3 runs, and 2 of them"),
    ],
)
def test_a_schedule_that_breaks_an_edge_or_a_lane_is_refused(
    begins: list[float], message: str
) -> None:
    graph = graph_of(task(1.0), task(3.0, 0, lane="ici"), task(1.0))
    with pytest.raises(ValueError, match=message):
        check_schedule(graph, begins)


def chain(trips: int) -> Loop:
    """A loop of which each trip needs what the one before made."""
    return Loop(
        "chain",
        trips,
        (task(2.0, state=(0,)), task(1.0, lane="ici", state=(1,))),
        starts=(Needs(), Needs()),
        ends=(Needs((0,)), Needs(states=(1,))),
    )


def test_what_a_trip_is_handed_is_an_edge_and_nothing_else_is() -> None:
    graph = graph_of(chain(4))
    # the matmuls are a chain; the transfers read what never changes, and wait for nobody
    assert paths_of(graph).length == 8.0
    assert list(graph.needs) == [(), (), (0,), (), (2,), (), (4,), ()]


def test_closed_loops_run_trip_after_trip() -> None:
    program = Program("test", (chain(4), task(1.0, lane="ici")))
    graph, seconds = closed(program, costs_of(program), lambda graph: best_schedule(graph).seconds)
    assert graph.seconds == [8.0, 1.0]
    assert graph.lanes[0] == ("compute", "ici")
    assert seconds == 9.0  # the loop holds the links too


def test_the_results_of_a_loop_are_known_part_by_part() -> None:
    after = Task(
        "after",
        "dot",
        "matmul",
        depends=(0,),
        flops=1.0,
        shape="compute",
        needs=Needs(results=((0, 1),)),
    )
    graph = graph_of(chain(3), after)
    assert graph.needs[-1] == ()  # its part of the state goes through the loop unchanged
    assert paths_of(graph).length == 6.0


def test_a_program_of_too_many_runs_is_not_unrolled() -> None:
    program = Program("test", (chain(4),))
    assert unrolled(program, costs_of(program), most=7) is None
    written = task_graph_of(
        "HloModule m, is_scheduled=true\n\nENTRY e {\n}\n",
        program,
        costs_of(program),
        8.0,
        most_runs=7,
    )
    assert written["as_compiled"]["bound"] is None
    assert written["as_compiled"]["list_schedule_in_loops"] == 8.0


durations = st.integers(0, 40).map(lambda eighths: eighths / 8)


@st.composite
def programs(draw: st.DrawFn, depth: int = 2) -> tuple[Node, ...]:
    """Tasks and loops, each of which needs some that come before it."""
    nodes: list[Node] = []
    for i in range(draw(st.integers(1, 5))):
        before = draw(st.sets(st.sampled_from(range(i)), max_size=2)) if i else set[int]()
        plain = tuple(j for j in before if isinstance(nodes[j], Task))
        parts = tuple((j, 0) for j in before if isinstance(nodes[j], Loop))
        needs = Needs(plain, parts, (0,) if depth < 2 and draw(st.booleans()) else ())
        if depth and draw(st.booleans()):
            body = draw(programs(depth=depth - 1))
            last = len(body) - 1
            end = Needs((last,)) if isinstance(body[last], Task) else Needs(results=((last, 0),))
            trips = draw(st.integers(1, 3))
            nodes.append(Loop("loop", trips, body, tuple(before), starts=(needs,), ends=(end,)))
        else:
            lane = draw(st.sampled_from(["compute", "ici"]))
            nodes.append(
                Task(
                    "t",
                    "dot",
                    "matmul",
                    depends=tuple(before),
                    flops=draw(durations),
                    shape=lane,
                    asynchronous=lane != "compute",
                    needs=needs,
                )
            )
    return tuple(nodes)


@given(programs())
def test_no_order_is_below_the_bound_nor_above_the_work(nodes: tuple[Node, ...]) -> None:
    program = Program("test", nodes)
    costs = costs_of(program)
    graph = unrolled(program, costs)
    assert graph is not None
    least = bound(graph, paths_of(graph))
    schedule = best_schedule(graph)
    work = sum(graph.seconds)
    rounding = 1e-9 * (1 + work)  # sums of a few dozen times, in another order
    assert least <= schedule.seconds + rounding
    assert schedule.seconds <= work + rounding
    assert least <= replay(program, costs).seconds + rounding
    assert check_schedule(graph, schedule.begins) == pytest.approx(schedule.seconds)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_the_compilers_own_order_keeps_every_edge(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    program = read_program(text)
    costs = {
        path: Cost(1.0 + one.bytes % 7, ("side",) if one.asynchronous else ("compute",))
        for path, one, _ in walk_paths(program.nodes)
    }
    graph = unrolled(program, costs)
    assert graph is not None
    assert all(before < run for run, needs in enumerate(graph.needs) for before in needs)
    written = task_graph_of(text, program, costs, replay(program, costs).seconds)
    assert not list(problems(json.loads(json.dumps(written)), TaskGraph))
    order = written["as_compiled"]
    assert order["bound"] is not None and order["list_schedule"] is not None
    assert order["bound"] <= order["list_schedule"] <= written["work"] + 1e-6
    assert order["bound"] <= written["played"] + 1e-6
    assert operations(program) <= operations_opened(text, program)


def test_a_scan_hands_its_carry_on_and_a_map_does_not() -> None:
    """The reader's edges, of programs compiled here: a chain of five matmuls, and five beside one
    another.
    """

    def carried(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: row @ w, x)

    def longest(function: object, *shape: int) -> float:
        shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((32, 32), "f4")
        text = jax.jit(function).lower(*shapes).compile().as_text()  # type: ignore[arg-type]
        program = read_program(text or "")
        costs = {
            path: Cost(float(one.kind == "matmul"), ("compute",))
            for path, one, _ in walk_paths(program.nodes)
        }
        graph = unrolled(program, costs)
        assert graph is not None and sum(graph.seconds) == 5.0
        return paths_of(graph).length

    assert longest(carried, 32, 32) == 5.0
    assert longest(mapped, 5, 32, 32) == 1.0


def test_collectives_beside_compute_free_it() -> None:
    both = Task("sum", "all-reduce", "collective", flops=3.0)
    program = Program("test", (task(2.0), both))
    costs = {(0,): Cost(2.0, ("compute",)), (1,): Cost(3.0, ("compute", "ici"))}
    graph = unrolled(program, costs)
    freed = unrolled(program, beside_compute(program, costs))
    assert graph is not None and freed is not None
    assert best_schedule(graph).seconds == 5.0
    assert best_schedule(freed).seconds == 3.0


def test_edges_say_from_how_many_trips_before() -> None:
    program = Program("test", (task(1.0), chain(4)))
    written = task_graph_of(
        "HloModule m, is_scheduled=true\n\nENTRY e {\n}\n", program, costs_of(program), 9.0
    )
    assert written["edges"] == [{"before": 2, "after": 2, "trips": 1}]
    assert written["loops"] == [{"id": 1, "name": "chain", "trips": 4, "loop": None}]
    assert [one["loop"] for one in written["tasks"]] == [None, 1, 1]
    assert written["fused"].get("edges") == written["run_edges"] == 3


def test_a_report_without_a_graph_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="graph=True"):
        write_graph(fake_rehearsal(layers=1), tmp_path / "graph.json")


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.nn.gelu(jnp.tanh(x @ w) * 2 + 1) @ v + x, None

    return jax.lax.scan(layer, x, None, length=4)[0].sum()


def graph_on(target: str, options: Options | None = None) -> TaskGraph:
    """The task graph of an MLP's gradient on one chip, which is as it is promised."""
    # more than a v5e keeps on the chip
    x = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    gradient = jax.jit(jax.grad(mlp, argnums=(1, 2)))
    report = rehearse.step(gradient, x, w, w, target=target, graph=True, compiler_options=options)
    assert "graph" in report
    graph = report["graph"]
    assert not list(problems(graph, TaskGraph))
    order = graph["as_compiled"]
    assert order["bound"] is not None and order["list_schedule"] is not None
    assert order["bound"] <= order["list_schedule"] * (1 + 1e-9)
    assert order["bound"] <= graph["played"] * (1 + 1e-9)
    return graph


def without_fusion_there_are_more_tasks(target: str) -> None:
    mesh = jax.sharding.Mesh(rehearse.load_target(target).devices()[:1], ("data",))
    fused = graph_on(target)["fused"]
    bare = graph_on(target, without_fusion(mesh))["fused"]
    assert bare["tasks"] > 1.2 * fused["tasks"]
    assert bare["bytes"] > 1.2 * fused["bytes"]
    assert bare.get("edges", 0) > 1.2 * fused.get("edges", 0) > 0


@needs_libtpu
def test_the_tpu_compiler_fuses_nothing_where_it_is_told_to() -> None:
    without_fusion_there_are_more_tasks("v5e-1")


@needs_cuda
def test_the_gpu_compiler_fuses_nothing_where_it_is_told_to() -> None:
    without_fusion_there_are_more_tasks("h100x1")


def test_the_cpu_compiler_fuses_nothing_where_it_is_told_to() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))

    def count(options: dict) -> int:
        compiled = jax.jit(lambda x: jnp.tanh(x) * 2 + 1, compiler_options=options)
        return joining_fusions(compiled.lower(jnp.ones((64, 64))).compile().as_text() or "")

    assert count({}) == 1
    assert count(without_fusion(mesh)) == 0
