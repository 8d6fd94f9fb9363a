"""`jaxpar show`: where a config's parameters live, what its devices keep and send, and how its
pipeline goes, for any mesh and without hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxpar.base.config import Config
from jaxpar.base.console import check_folders, console, count_text
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import describe, total_sizes
from jaxpar.base.runtime import start
from jaxpar.base.sharding import placements
from jaxpar.parallel.pipeline.layers import layers_of, microbatches
from jaxpar.parallel.pipeline.schedules import UNIT, schedule
from jaxpar.plan.communication import step_collectives
from jaxpar.plan.memory_account import memory_account
from jaxpar.show.figures import mesh_figure, save_figure
from jaxpar.show.schedule import schedule_figure, schedule_text
from jaxpar.show.tables import activation_table, communication_table, memory_table, sharding_table
from jaxpar.train.activations import activations
from jaxpar.train.plans import make_experiment, plan_notes


def show(config: Config, picture: Path, has: int = 0) -> None:
    """Print where a config's parameters live and what each device sends in a step. Draw the largest
    arrays on the mesh.

    The devices are simulated on this CPU, however many the mesh needs; an axis of -1 counts as 1.
    `has` is the bytes of a device's memory; 0 = not known.

    Raises:
      UserError: the model does not fit the mesh, or a picture cannot be written.
    """
    check_folders(picture)
    mesh = replace(config.mesh, platform="cpu", distributed=False)
    auto = "overlap auto: shown as xla, without Domino; train and rehearse choose"
    notes = [auto] if config.overlap.is_open else []
    config = replace(config, mesh=mesh, overlap=config.overlap.without_auto())
    experiment = make_experiment(config, start(mesh))
    plan = experiment.plan
    model = experiment.model
    rows = placements(experiment.state.params, model.axes, plan)
    collectives = step_collectives(experiment)
    size = count_text(model.parameter_count())
    budget = config.memory.budget
    title = f"{config.model.family}, {size} parameters, on {describe(dict(plan.mesh.shape))}"
    solved = f"memory.budget {budget}: shown as policy and keep say; train and rehearse solve it"
    parts = memory_account(experiment, "tpu")  # a device whose host memory is not its own
    held = memory_table(parts, has), *([solved] if budget else [])
    if collectives:
        sent = communication_table(collectives)
    else:
        sent = "no collectives: one device"
    tables = (
        sharding_table(rows),
        "",
        activation_table(activations(experiment)),
        "",
        *held,
        "",
        sent,
    )
    out = console()
    for part in (title, *plan_notes(experiment), *notes, *tables):
        out.print(part)
    save_figure(mesh_figure(rows, plan, title), picture)
    out.print(f"picture: {picture}")


def show_schedule(config: Config, picture: Path) -> None:
    """Print which microbatch each stage of a config's pipeline works on in each tick. Draw the
    schedule beside the picture of the mesh (`tiny_schedule.png` for `tiny.png`).

    It needs no devices, not even simulated ones. A stage's forward takes a time of 1, and its
    backward 2; a transfer takes no time.

    Raises:
      UserError: the mesh has one stage, or there can be no such pipeline.
    """
    check_folders(picture)
    name = config.pipeline.schedule
    v = config.pipeline.virtual
    mesh = config.mesh
    stages = mesh.stage * mesh.dcn.stage
    if stages < 2:
        raise UserError(
            f"mesh.stage={mesh.stage}: a pipeline has two stages or more to schedule, try "
            "mesh.stage=4"
        )
    table = schedule(name, stages, microbatches(config, total_sizes(mesh)), v)
    layers = layers_of(config.model.layers, stages, config.pipeline)
    chunks = f" x {v} chunks" if v > 1 else ""
    more = "es" if table.microbatches > 1 else ""
    title = f"{name}, {stages} stages{chunks}, {table.microbatches} microbatch{more}"
    out = console()
    counts = " or ".join(map(str, sorted(set(layers.counts))))
    out.print(
        f"{title}, {counts} layer{'' if counts == '1' else 's'} in each "
        f"{'chunk' if v > 1 else 'stage'}\n"
    )
    out.print(
        schedule_text(
            table,
            out.width if out.is_terminal else 160,
            UNIT.chunk(v),
        )
    )
    path = picture.with_name(f"{picture.stem}_schedule.png")
    save_figure(schedule_figure(table, UNIT.chunk(v), title), path)
    out.print(f"picture: {path}")
