"""`jaxpar bench overlap`: a block, and the whole step, in each form of overlap, rehearsed for a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.plan import Overlap
from jaxpar.plan.choose_overlap import Trial, best, open_plan, time_forms, words
from jaxpar.rehearse.of_config import rehearse
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import Target, check_mesh

OPEN = Overlap("auto", "auto", domino="auto")
PURE = (Overlap("ring", "ring"), Overlap("bidirectional", "bidirectional"))


class OverlapRow(NamedTuple):
    """A form: one block, and the step where it was rehearsed."""

    block: Trial
    step: Rehearsal | None


def compare_forms(
    config: Config, target: Target, steps: bool, say: Callable[[str], None] = lambda line: None
) -> list[OverlapRow]:
    """Every form for the block; with `steps`, the whole step in the pure forms, Domino, and the block's fastest.

    Args:
      config: an experiment whose mesh fits the target; what its overlap says is not used.
      target: from `load_target`.
      steps: also rehearse the training step.
      say: called with a line for each.
    """
    check_mesh(config.mesh, target)
    config = dataclasses.replace(config, overlap=OPEN)
    trials = time_forms(config, open_plan(config, target.devices()), target, say, PURE)
    whole = {trials[0].overlap, *PURE, best(trials).overlap} if steps else set()
    whole |= {trial.overlap for trial in trials if steps and trial.overlap.domino == "on"}
    rows = []
    for trial in trials:
        step = None
        if trial.overlap in whole:
            say(f"the step: {words(trial.overlap)}")
            step = rehearse(dataclasses.replace(config, overlap=trial.overlap), target)
        rows.append(OverlapRow(trial, step))
    return rows


def overlap_table(rows: Sequence[OverlapRow]) -> str:
    """A Markdown table, the fastest block marked, and a line that says by how much."""
    names = ("form", "block, ms", "matmul", "other compute", "exposed", "sent, MB")
    stepped = any(row.step for row in rows)
    head = [*names, "step, ms", "exposed", "temporaries, GiB"] if stepped else [*names]
    fastest = best([row.block for row in rows])
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for block, step in rows:
        name = f"**{words(block.overlap)}**" if block is fastest else words(block.overlap)
        times = (block.seconds, block.matmul, block.compute - block.matmul, block.exposed)
        cells = [name, *(f"{1e3 * seconds:.2f}" for seconds in times), f"{block.sent / 1e6:.0f}"]
        if step is not None:
            time, held = step["time"], step["memory"]["categories"]
            temporaries = held["activations"] + held["gradients"] + held["temporaries"]
            exposed = time["exposed_communication"]
            cells += [f"{1e3 * time['step']:.0f}", f"{1e3 * exposed:.0f}", f"{temporaries / 2**30:.2f}"]
        lines.append("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
    first = rows[0].block
    gain = 100 * (1 - fastest.seconds / first.seconds)
    return "\n".join(
        [*lines, "", f"Fastest block: {words(fastest.overlap)}, {gain:.1f} % less than {words(first.overlap)}."]
    )
