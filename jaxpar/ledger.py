"""Where the bytes of a training step are: predicted part by part, beside what the compiler says; and what to do when
they are too many.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.table import Table

from jaxpar.activations import NAMES
from jaxpar.budget import nearest, state_of, work_bytes
from jaxpar.config import Config
from jaxpar.footprint import activations, unnamed_bytes
from jaxpar.hardware import Hardware
from jaxpar.metrics import bytes_text
from jaxpar.picture import save_figure
from jaxpar.rehearsal.memory import CompiledBytes
from jaxpar.sharding import Plan

_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#332288", "#88ccee", "#117733",
           "#999933", "#cc6677", "#882255", "#44aa99", "#ddcc77", "#777777")  # fmt: skip


class Part(NamedTuple):
    """A part of what a step holds, bytes of one device."""

    name: str
    what: str
    device: int
    host: int = 0


def ledger(config: Config, plan: Plan, platform: str) -> list[Part]:
    """The parts of a step, from shapes alone; the last is a guess.

    What a block works with, the loss, and the update are not there at once: the larger counts.

    Args:
      config: the experiment.
      plan: of the config.
      platform: on `cpu` host memory is the device's own.
    """
    state, work = state_of(config, plan, platform), work_bytes(config, plan)
    kept = [
        Part(one.name, NAMES[one.name].what, one.kept if one.action == "save" or platform == "cpu" else 0,
             one.kept if one.action == "offload" and platform != "cpu" else 0)
        for one in activations(config, plan) if one.kept
    ]  # fmt: skip
    if unnamed := unnamed_bytes(config, plan):
        kept.append(Part("no name", "what else the backward is given", unnamed))
    held = sum(part.device for part in kept)
    more = max(work, state.update - held)
    what = "what a block and the loss work with" if work >= state.update - held else "what the update works with"
    return [
        Part("parameters", f"{plan.params}", state.parameters, state.host_parameters),
        Part("optimizer", f"moments, {plan.moments}", state.optimizer, state.host_optimizer),
        Part("gradients", "", state.gradients, state.host_gradients),
        Part("batch", "", state.batch),
        *kept,
        Part("work", what + ", a guess", more),
    ]


def ledger_table(parts: list[Part], compiled: CompiledBytes | None = None) -> Table:
    """The parts with their sums, and the compiler's."""
    table = Table("memory", "what", "device", "host", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"

    def row(name: str, what: str, device: int, host: int) -> None:
        table.add_row(name, what, *(bytes_text(size) if size else "" for size in (device, host)))

    for part in parts:
        row(*part)
    total, host = (sum(getattr(part, where) for part in parts) for where in ("device", "host"))
    row("predicted", "", total, host)
    if compiled is not None:
        off = f"predicted {100 * (total / compiled.total - 1):+.0f} %"
        row("compiled", off, compiled.total, compiled.host)
    return table


def ledger_figure(parts: list[Part], title: str, compiled: CompiledBytes | None = None, has: int = 0) -> Figure:
    """Stacked bars: the predicted parts of a device and of the host, the compiler's account, and what a device has."""
    bars: list[tuple[str, list[tuple[str, int]]]] = [
        ("device, predicted", [(part.name, part.device) for part in parts if part.device])
    ]
    if compiled is not None:
        sizes = compiled._asdict()
        del sizes["host"]
        bars.append(("device, compiled", [(name, size) for name, size in sizes.items() if size]))
    if host := [(part.name, part.host) for part in parts if part.host]:
        bars.append(("host, predicted", host))
    names = list(dict.fromkeys(name for _, stack in bars for name, _ in stack))
    colors = {name: _COLORS[at % len(_COLORS)] for at, name in enumerate(names)}
    largest = max(has, *(sum(size for _, size in stack) for _, stack in bars))
    unit, letter = next(
        ((2**shift, name) for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**shift), (1, "B")
    )
    figure = Figure(figsize=(9, 1.6 + 0.75 * len(bars)), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = set[str]()
    for at, (_, stack) in enumerate(bars):
        left = 0.0
        for name, size in stack:
            label = None if name in drawn else name
            drawn.add(name)
            axes.barh(at, size / unit, left=left, color=colors[name], edgecolor="white", linewidth=0.6, label=label)
            left += size / unit
        axes.text(left, at, f" {left:.3g}", va="center", fontsize=8)
    if has:
        axes.axvline(has / unit, color="#cc3311", linestyle="--", linewidth=1, label=f"a device has {has / unit:.3g}")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel=f"{letter} of one device", title=title, xlim=(0, 1.12 * largest / unit))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def write_ledger(folder: Path, parts: list[Part], title: str, compiled: CompiledBytes, has: int) -> None:
    """`memory.json` and `memory.png` in a run folder."""
    found = {"predicted": [part._asdict() for part in parts], "compiled": compiled._asdict(), "device_has": has}
    (folder / "memory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save_figure(ledger_figure(parts, title, compiled, has), folder / "memory.png")


def out_of_memory(message: str, config: Config, plan: Plan, hardware: Hardware, platform: str, has: int) -> str:
    """What to tell the user of a step that does not fit, in a line.

    Args:
      message: the runtime's.
      config: the experiment.
      plan: of the config.
      hardware: of a device.
      platform: of a device.
      has: bytes of a device; 0 = not known.
    """
    total = sum(part.device for part in ledger(config, plan, platform))
    said = message.strip().splitlines()[0][:200]
    room = has or int(0.9 * total)  # not known: less than what was just too much
    found = nearest(replace(config, memory=replace(config.memory, may=())), list(plan.mesh.devices.flat), platform,
                    hardware, room)  # fmt: skip
    found = found or nearest(config, list(plan.mesh.devices.flat), platform, hardware, room)
    where = f"a device has {bytes_text(has)}" if has else "what a device has is not known"
    tried = f"try {found}" if found else (
        f"nothing this mesh can keep, offload or recompute fits: try --mesh.fsdp {2 * plan.mesh.shape['fsdp']} or "
        f"--train.accumulation {2 * config.train.accumulation}"
    )  # fmt: skip
    return f"out of memory: a step was predicted to take {bytes_text(total)}, {where}; {tried} ({said})"
