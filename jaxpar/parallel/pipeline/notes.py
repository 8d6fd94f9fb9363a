"""Lines for the log that say what users should know about the pipeline they asked for."""

from __future__ import annotations

from jaxpar.base.config import Config
from jaxpar.base.plan import Plan
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.pipeline.simulator import Times, simulate_schedule

_LONG = 0.25  # an idle share that is worth a line in the log


def pipeline_notes(config: Config, plan: Plan) -> list[str]:
    """Give the schedule in figures, and what speaks against it: idle stages, or layers that do not divide.

    A backward counts as two forwards, plus one forward each for recomputing the blocks and the stage.
    """
    pipeline, P = plan.pipeline, plan.size("stage")
    layers = layers_in(plan, config.model.layers)
    if layers is None:
        return []
    M, v = pipeline.microbatches, pipeline.virtual
    table = schedule(pipeline.schedule, P, M, v)
    again = (1 + (pipeline.stash == "stage")) * plan.recomputes
    times = Times(1.0, 2.0 + again)
    found = simulate_schedule(table, times)
    kept = f"keeps {max(found.stash)} input{'s' if max(found.stash) > 1 else ''} at most"
    sizes = f"{pipeline.schedule}, {P} stages, {M} microbatches"
    notes = [f"pipeline: {sizes}: {len(table.ticks)} ticks, idle {100 * found.bubble:.0f} %, a stage {kept}"]
    if min(layers.counts) < layers.places:
        notes.append(
            f"virtual stages have {', '.join(map(str, layers.counts))} layers: each tick lasts as long as the largest, "
            f"{layers.places}, on all of them"
        )
    if pipeline.schedule == "interleaved" and v == 1:
        notes.append("interleaved with one virtual stage is 1f1b: try pipeline.virtual=2")
    if config.train.accumulation > 1:
        notes.append(
            f"the pipeline fills and drains {config.train.accumulation} times a step: train.accumulation 1 and "
            f"pipeline.microbatches={M * config.train.accumulation} would once"
        )
    if found.bubble >= _LONG:
        more = simulate_schedule(schedule(pipeline.schedule, P, 4 * P, v), times).bubble
        notes.append(
            f"a pipeline of {P} with {M} microbatches idles {100 * found.bubble:.0f} %; with {4 * P} it would "
            f"{100 * more:.0f} %: try pipeline.microbatches={4 * P} and a batch for it, or mesh.fsdp in place of "
            "mesh.stage if the model fits so"
        )
    return notes
