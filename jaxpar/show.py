"""Where a config's parameters live: a table and a picture, for any mesh, without its hardware."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jaxpar.config import Config
from jaxpar.mesh import describe
from jaxpar.metrics import count_text
from jaxpar.models import Model
from jaxpar.picture import mesh_figure, save_figure
from jaxpar.report import console, sharding_table
from jaxpar.runtime import start
from jaxpar.sharding import placements
from jaxpar.step import make_plan, plan_notes


def show(config: Config, picture: Path, as_json: bool = False) -> None:
    """Print the parameter table of a config and draw its largest arrays on the mesh.

    The devices are simulated on this CPU, however many the mesh needs; an axis of -1 counts as 1.

    Args:
      config: what to show.
      picture: the PNG to write.
      as_json: print a JSON list of rows in place of the table.
    """
    mesh = dataclasses.replace(config.mesh, platform="cpu", distributed=False)
    config = dataclasses.replace(config, mesh=mesh)
    plan, model = make_plan(config, start(mesh)), Model(config.model)
    rows = placements(model.shapes(), model.axes, plan)
    title = (
        f"{config.model.family}, {count_text(model.parameter_count())} parameters, on {describe(dict(plan.mesh.shape))}"
    )
    out = console()
    if as_json:
        table = [{**row._asdict(), "spec": [list(e) if isinstance(e, tuple) else e for e in row.spec]} for row in rows]
        out.print(json.dumps(table))
    else:
        out.print(title)
        for note in plan_notes(config, plan):
            out.print(note)
        out.print(sharding_table(rows))
    save_figure(mesh_figure(rows, plan, title), picture)
    if not as_json:
        out.print(f"picture: {picture}")
