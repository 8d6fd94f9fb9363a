"""The picture of a task graph, from a made-up program."""

from __future__ import annotations

import pytest
from fake_rehearsal import fake_rehearsal
from matplotlib.collections import LineCollection

from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import Loop, Needs, Origin, Program, Task, walk_paths
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.graph.report import task_graph_of
from jaxpar.show.task_graph import task_graph_figure


def test_both_orders_and_a_trip_are_drawn_with_its_critical_path():
    def task(seconds, *needs, lane="compute", scope="block/mlp"):
        kind = "matmul" if lane == "compute" else "collective"
        origin = Origin(scope=scope, phase="backward")
        return Task("a", "dot", kind, origin, needs, flops=seconds, shape=lane, needs=Needs(needs))

    body = (
        task(1e-3),
        task(3e-3, 0, lane="ici:x", scope="block/attention/core/static_sparsity_splash"),
        task(1e-3, 0),
        task(1e-3, 1, 2),
    )
    program = Program("test", (Loop("layers", 3, body, ends=()),))
    costs = {path: Cost(one.flops, (one.shape,)) for path, one, _ in walk_paths(program.nodes)}
    report = fake_rehearsal(layers=1)
    report["graph"] = task_graph_of("HloModule m\n\nENTRY e {\n}\n", program, costs, 15e-3)
    figure = task_graph_figure(report)
    played, listed, trip = figure.axes
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert played.get_yticklabels()[0].get_text() == "phase"
    assert {"forward", "backward"} < set(named), "what the row of phases is drawn in"
    assert played.get_title("left").endswith("15 ms in the compiler's order")
    # three trips that need nothing of one another take turns on the links
    assert "10 ms" not in listed.get_title("left")
    assert "no schedule is below 9 ms, the critical path is 5 ms" in listed.get_title("left")
    assert trip.get_title("left").startswith("a trip of layers, 3 trips: 4 tasks")
    rows = [tick.get_text() for tick in trip.get_yticklabels()]
    assert rows == ["block/mlp (backward)", "…/static_sparsity_splash (backward)"]
    cold, hot = (found for found in trip.collections if isinstance(found, LineCollection))
    assert (len(cold.get_segments()), len(hot.get_segments())) == (2, 2)


def test_a_report_without_a_graph():
    with pytest.raises(UserError, match="graph=True"):
        task_graph_figure(fake_rehearsal(layers=1))
