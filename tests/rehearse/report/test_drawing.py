"""From a replayed program to the report's timeline."""

from report_types import problems

from jaxpar.hlo.program.tasks import Collective, Loop, Origin, Program, Task, Wait, walk_paths
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.report.schema import TimelineColumns
from jaxpar.rehearse.report.trace import timeline_of
from jaxpar.rehearse.timeline import Event, replay

GATHER = Task(
    "ag",
    "all-gather",
    "collective",
    Origin("block/mlp", "models/llama.py:97", "forward"),
    bytes=9,
    collective=Collective("all-gather", ((0, 1),), 1024, "bf16"),
    asynchronous=True,
)


def dot() -> Task:
    return Task("dot", "dot", "matmul", Origin("block", "models/llama.py:9", "forward"), bytes=64)


DOT = dot()
OUTER = Loop(
    "while.1",
    3,
    (
        GATHER,
        dot(),
        Loop("while.2", 2, (dot(),)),
        Wait("done", 0),
    ),
    origin=Origin("layers"),
)
PROGRAM = Program("step", (DOT, OUTER, dot()))


def drawn(program: Program, drawn_trips: int) -> TimelineColumns:
    """Every task a microsecond, the gather on a link."""
    lanes = {"ag": ("ici:x",)}
    costs = {
        path: Cost(1e-6, lanes.get(task.name, ("compute",)))
        for path, task, _ in walk_paths(program.nodes)
    }
    return timeline_of(replay(program, costs, drawn_trips).events)


def test_columns_come_from_the_instructions():
    found = drawn(PROGRAM, 9)
    assert list(problems(found, TimelineColumns)) == []
    assert found["lanes"] == ["compute", "ici:x"]
    at = found["names"].index("ag")
    columns = [found[key][at] for key in ("kinds", "scopes", "sources", "phases", "bytes")]
    assert columns == ["all-gather", "block/mlp", "models/llama.py:97", "forward", 1024]
    assert found["names"].count("dot") == 4, "one entry an instruction, not a name"


def test_events_are_in_microseconds_one_for_every_execution():
    found = drawn(PROGRAM, 9)
    compute = sorted(event[1:3] for event in found["events"] if event[0] == 0)
    assert compute == [[float(i), 1.0] for i in range(1 + 3 * 3 + 1)]
    assert all(event[4] == 0 for event in found["events"])


def test_a_bar_for_many_trips_says_how_many():
    program = Program(
        "step",
        (Loop("while.1", 30, (DOT,), origin=Origin("layers")),),
    )
    found = drawn(program, 2)
    assert found["events"][-1][1:] == [2, 28, 1, 28]
    assert (found["names"][1], found["kinds"][1]) == ("while.1", "loop")


def test_lanes_are_ordered_compute_links_local_host():
    events = [
        Event(lane, 0, 1e-6, DOT)
        for lane in ("host", "dma", "ici:y", "dcn", "side", "compute", "ici:x")
    ]
    found = timeline_of(events)
    assert found["lanes"] == ["compute", "dcn", "ici:x", "ici:y", "dma", "side", "host"]
