"""The command `jaxpar show`: where a config's parameters live, what its devices keep and send, and
how its pipeline goes, for any mesh and without hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxpar.base.config import Config
from jaxpar.base.console import check_pictures, console, count_text
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import describe, total_sizes
from jaxpar.base.layout.placements import placements
from jaxpar.parallel.pipeline.layers import layers_of, microbatches
from jaxpar.parallel.pipeline.schedules import UNIT, schedule
from jaxpar.plan.communication import step_collectives
from jaxpar.plan.memory_account import MemoryPart, memory_account
from jaxpar.show.figures import memory_figure, mesh_figure, save_figure
from jaxpar.show.layer import layer_figure
from jaxpar.show.masks import mask_figure, masks_of_layers, tiles_to_draw
from jaxpar.show.schedule import schedule_figure, schedule_text
from jaxpar.show.tables import activation_table, communication_table, memory_table, sharding_table
from jaxpar.train.activations import activations
from jaxpar.train.experiments import make_experiment, plan_notes


def show(
    config: Config,
    picture: Path,
    has: int = 0,
    layer: Path | None = None,
    masks: Path | None = None,
    memory: Path | None = None,
) -> None:
    """Print where a config's parameters live and what each device sends in a step. Draw the largest
    arrays on the mesh, and what else is asked for.

    The devices are simulated on this CPU, however many the mesh needs; an axis of -1 takes those
    that JAX was told of, and counts as 1 where it was told nothing.

    Args:
      picture: where the picture of the mesh goes.
      has: the bytes of a device's memory; 0 = not known.
      layer: where a picture of one layer goes, its matrices and activations on the mesh.
      masks: where a picture of the attention masks goes, of each kind of layer.
      memory: where a picture of a device's memory goes, part by part.

    Raises:
      UserError: the model does not fit the mesh, or a picture cannot be written.
    """
    check_pictures(picture, *filter(None, (layer, masks, memory)))
    mesh = replace(config.mesh, platform="cpu", distributed=False)
    auto = "overlap auto: shown as xla, without Domino; train and rehearse choose"
    notes = [auto] if config.overlap.is_open else []
    config = replace(config, mesh=mesh, overlap=config.overlap.without_auto())
    experiment = make_experiment(config)
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
    drawn = {picture: lambda: mesh_figure(rows, plan, title)}
    if layer:
        drawn[layer] = lambda: layer_figure(experiment, title)
    if masks:
        words = masks_of_layers(config.model)
        drawn[masks] = lambda: mask_figure(words, tiles_to_draw(config.data.seq_len))
    if memory:
        drawn[memory] = lambda: memory_figure(_bars(parts), title, has)
    for file, draw in drawn.items():
        save_figure(draw(), file)
        out.print(f"picture: {file}")


def _bars(parts: Sequence[MemoryPart]) -> dict[str, dict[str, int]]:
    """Collect the parts of a step in a device's memory, and in the host's where it has any."""
    bars = {
        "a device": {part.name: part.device for part in parts},
        "its part\nof the host": {part.name: part.host for part in parts},
    }
    return {label: sizes for label, sizes in bars.items() if any(sizes.values())}


def show_schedule(config: Config, picture: Path) -> None:
    """Print which microbatch each stage of a config's pipeline works on in each tick. Draw the
    schedule beside the picture of the mesh (`tiny_schedule.png` for `tiny.png`).

    It needs no devices, not even simulated ones. A stage's forward takes a time of 1, and its
    backward 2; a transfer takes no time.

    Args:
      config: the experiment; its mesh, pipeline and batch count.
      picture: the picture of the mesh, which is not drawn here.

    Raises:
      UserError: the mesh has one stage, there can be no such pipeline, or the picture cannot be
        written.
    """
    check_pictures(picture)
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
