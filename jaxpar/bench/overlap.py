"""`jaxpar bench overlap` rehearses a block, and the whole step, for a target in each form of overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxpar.base.config import Config
from jaxpar.base.plan import Overlap
from jaxpar.bench.alternate import Row
from jaxpar.plan.choose_overlap import Trial, fastest_trial, open_plan, time_forms, words
from jaxpar.rehearse.of_config import rehearse
from jaxpar.rehearse.targets import Target, check_mesh

OPEN = Overlap("auto", "auto", domino="auto")
PURE = (Overlap("ring", "ring"), Overlap("bidirectional", "bidirectional"))


def compare_forms(
    config: Config, target: Target, steps: bool, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Give a row for every form of the block; `steps` adds the whole step in the pure forms, Domino and the fastest.

    The config's mesh must fit the target; its own overlap is not used.
    """
    check_mesh(config.mesh, target)
    config = dataclasses.replace(config, overlap=OPEN)
    trials = time_forms(config, open_plan(config, target.devices()), target, say, PURE)
    fastest = fastest_trial(trials)
    whole = {trials[0].overlap, *PURE, fastest.overlap} if steps else set()
    rows = []
    for trial in trials:
        row = block_row(trial, trial is fastest)
        if trial.overlap in whole or (steps and trial.overlap.domino == "on"):
            say(f"the step: {words(trial.overlap)}")
            step = rehearse(dataclasses.replace(config, overlap=trial.overlap), target)
            held = step["memory"]["categories"]
            temporaries = held["activations"] + held["gradients"] + held["temporaries"]
            row |= {
                "step, ms": 1e3 * step["time"]["step"], "step exposed, ms": 1e3 * step["time"]["exposed_communication"],
                "temporaries, GiB": temporaries / 2**30,
            }  # fmt: skip
        rows.append(row)
    return rows


def block_row(trial: Trial, fastest: bool) -> Row:
    """The row with the times of one block in a form; the name of the fastest is bold."""
    name = words(trial.overlap)
    return {
        "form": f"**{name}**" if fastest else name, "block, ms": 1e3 * trial.seconds, "matmul, ms": 1e3 * trial.matmul,
        "other compute, ms": 1e3 * (trial.compute - trial.matmul), "exposed, ms": 1e3 * trial.exposed,
        "sent, MB": trial.sent / 1e6,
    }  # fmt: skip
