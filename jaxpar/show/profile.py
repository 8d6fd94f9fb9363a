"""The steps that `metrics.profile` traced, by line of the model, beside what a rehearsal predicts
for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData
from rich.console import RenderableType

from jaxpar.base.errors import Say, UserError, read_json
from jaxpar.base.hardware import load_chip
from jaxpar.base.toml import presets
from jaxpar.rehearse.of_config import rehearse
from jaxpar.rehearse.report.report_tables import seconds_text, titled_table
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.train.restore import given_notes
from jaxpar.train.runs.folder.run_folder import read_run_config

Line = tuple[str, str, str]
"""The scope, source and phase of a line of the model."""
_KINDS = {
    "steps": list[int],
    "trace": str,
    "module": str,
    "device_kind": str,
    "devices": int,
    "traced": int,
    "lines": dict[str, list[str]],
}
_NOWHERE = ("instructions that are not in the program's text", "", "")


def profile_parts(folder: Path, target: str, say: Say, most: int = 25) -> list[RenderableType]:
    """Make the table of a run's latest trace, under a title.

    Args:
      target: the system to rehearse the run's config for; empty = the system that it ran on, if it
        can be rehearsed.
      say: receives a line of text as each phase begins.
      most: the number of rows.

    Raises:
      UserError: there is no trace, it is damaged, or the target that was named does not serve.
    """
    facts_file = _latest_facts(folder)
    facts = _read_facts(facts_file)
    measured = measured_lines(facts, facts_file.parent)
    note = f"{facts['devices']} x {facts['device_kind']}"
    for given in given_notes(folder):
        say(given)
    predicted = dict[Line, float]()
    try:
        report = rehearse(read_run_config(folder), target or _target_of(facts), say=say)
        predicted = _predicted_lines(report)
        step = seconds_text(report["time"]["step"])
        note += f", predicted for {report['target']['name']}: {step}"
    except UserError as error:
        if target:
            raise
        note += f"; no prediction: {error}"
    times: dict[str, Mapping[Line, float]] = {"measured": measured}
    if predicted:
        times["predicted"] = predicted
    first, last = facts["steps"]
    title = (
        f"a step of steps {first} to {last} on one device: {seconds_text(measured.total())} "
        f"measured on {note}"
    )
    columns = [*times, "line", "scope", "phase"]
    return titled_table(title, columns, _rows(times), len(times), most)


def _latest_facts(folder: Path) -> Path:
    """Find the file that was written beside a run's latest trace.

    Raises:
      UserError: there is no trace.
    """
    files = (folder / "profile").glob("steps_*.json")
    latest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if latest is None:
        raise UserError(
            f"{folder} has no trace: train it with metrics.profile=20:25, which traces steps 20 "
            "to 25"
        )
    return latest


def _predicted_lines(report: Rehearsal) -> dict[Line, float]:
    """List the seconds of each line of the model that a rehearsal predicts: its work and its
    waits.
    """
    return {
        (row["scope"], row["source"], row["phase"]): row["compute"] + row["exposed"]
        for row in report["lines"]
    }


def _rows(times: Mapping[str, Mapping[Line, float]]) -> list[list[str]]:
    """Make a row for each line of the model, by each of the times, the longest first."""
    lines = {line for found in times.values() for line in found}

    def longest_first(line: Line) -> list[float]:
        return [-found.get(line, 0.0) for found in times.values()]

    rows = []
    for line in sorted(lines, key=longest_first):
        scope, source, phase = line
        spent = [found.get(line, 0.0) for found in times.values()]
        shown = [seconds_text(seconds) if seconds else "" for seconds in spent]
        rows.append([*shown, source, scope, phase])
    return rows


def _read_facts(file: Path) -> dict[str, Any]:
    """Read what was written beside a trace (`train.hooks.profile`); a UserError where it is
    damaged.
    """
    facts = read_json(file, _KINDS)
    missing = [key for key in _KINDS if key not in facts]
    counts = not missing and min(facts["devices"], facts["traced"]) > 0
    steps = [] if missing else facts["steps"]
    if not (counts and len(steps) == 2 and steps[0] <= steps[1]):
        if missing:
            lacks = f"lacks {missing[0]}"
        else:
            lacks = "has no steps in order, or no devices"
        raise UserError(f"{file} is damaged: it {lacks}, so delete it and trace the steps again")
    if wrong := [name for name, place in facts["lines"].items() if len(place) != 3]:
        raise UserError(f"{file} is damaged: the place of {wrong[0]} is no scope, source and phase")
    return facts


def measured_lines(facts: dict[str, Any], folder: Path) -> Counter[Line]:
    """Measure the seconds of one step on one device by line of the model: scope, source and phase,
    as means over the steps and devices of the trace.

    A wait for a collective or a copy that runs beside the compute is on the line that started it.

    Args:
      facts: what was written beside the trace.
      folder: the folder in which they and the trace are.

    Raises:
      UserError: the trace is missing or damaged.
    """
    trace = folder / facts["trace"]
    try:
        planes = list(ProfileData.from_file(str(trace)).planes)
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"{trace} is missing, damaged or cut short ({error}): trace the steps again"
        ) from error
    chips = [plane for plane in planes if re.fullmatch(r"/device:(TPU|GPU):\d+", plane.name)]
    found = Counter[Line]()
    for plane in chips or planes:
        tpu = "TPU" in plane.name
        for line in plane.lines:
            # The instructions of a TPU are one line of its plane, of a GPU its streams, of a CPU in
            # the host's threads.
            if chips and not (line.name == "XLA Ops" if tpu else "Stream" in line.name):
                continue
            for event in line.events:
                if tpu:
                    stats = {"hlo_module": facts["module"]}
                else:
                    stats = dict(event.stats)
                # The name of an event of a TPU begins `%add.1 = f32[8] ...`.
                if tpu:
                    name = event.name.partition(" ")[0].lstrip("%")
                else:
                    name = stats.get("hlo_op", "")
                place = facts["lines"].get(name)
                # others, which have events of their own
                around = name.startswith(("while", "call", "conditional"))
                if stats.get("hlo_module") == facts["module"] and (place or not around):
                    found[tuple(place) if place else _NOWHERE] += event.duration_ns
    shares = 1e9 * facts["traced"] * (facts["steps"][1] - facts["steps"][0] + 1)
    return Counter({line: spent / shares for line, spent in found.items()})


def _target_of(facts: dict[str, Any]) -> str:
    """Name a target with the devices of a trace."""
    for name in presets("jaxpar.meshes.chips"):
        chip = load_chip(name)
        if facts["device_kind"] in chip.hardware.device_kinds:
            chips = facts["devices"] // chip.hardware.devices_per_chip
            joined_by = "-" if chip.slices.name else "x"
            return f"{name}{joined_by}{chips}"
    raise UserError(
        "these devices cannot be rehearsed; --target v5e-8, or another that fits the mesh, can"
    )
