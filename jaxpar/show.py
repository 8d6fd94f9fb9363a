"""Where a config's parameters live and what its devices send: tables and pictures, for any mesh, without hardware."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from jaxpar.auto import closed, is_open
from jaxpar.communication import arrays, sites
from jaxpar.config import Config
from jaxpar.layer_picture import layer_figure
from jaxpar.mesh import describe
from jaxpar.metrics import count_text
from jaxpar.models import Model
from jaxpar.picture import mesh_figure, save_figure
from jaxpar.report import communication_table, console, sharding_table
from jaxpar.runtime import start
from jaxpar.sharding import placements
from jaxpar.step import make_plan, plan_notes


def show(config: Config, picture: Path, as_json: bool = False) -> None:
    """Print where a config's parameters live and what each device sends in a step; draw the largest arrays on the mesh
    and, in an SVG beside that picture (`tiny_layer.svg` of `tiny.png`), what one layer moves.

    The devices are simulated on this CPU, however many the mesh needs; an axis of -1 counts as 1.

    Args:
      config: what to show.
      picture: the PNG to write.
      as_json: print a JSON list of rows in place of the table.
    """
    mesh = dataclasses.replace(config.mesh, platform="cpu", distributed=False)
    unchosen = is_open(config.overlap)
    config = dataclasses.replace(config, mesh=mesh, overlap=closed(config.overlap))
    plan, model = make_plan(config, start(mesh)), Model(config.model)
    rows = placements(model.shapes(), model.axes, plan)
    parameters = arrays(model.shapes(), model.axes)
    moves = sites(parameters, config, plan)
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
        if unchosen:
            out.print("overlap auto: shown as xla, without Domino; train and rehearse choose")
        out.print(sharding_table(rows))
        out.print("")
        out.print(communication_table(moves) if moves else "no collectives: one device")
    save_figure(mesh_figure(rows, plan, title), picture)
    layer = picture.with_name(f"{picture.stem}_layer.svg")
    save_figure(layer_figure(parameters, moves, config, plan, title), layer)
    if not as_json:
        out.print(f"one layer: {layer}")
        out.print(f"picture: {picture}")
