"""A table and a picture show the memory of a step, predicted part by part, beside what the compiler says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from jaxpar.base.activation_names import NAMES
from jaxpar.base.console import bytes_text
from jaxpar.plan.memory_account import MemoryPart
from jaxpar.rehearse.report.memory import CompiledBytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    "parameters": "#2f6fd0", "optimizer": "#6a51c7", "gradients": "#4fb0c6", "batch": "#1b2a41", "no name": "#9aa0a6",
    "work": "#e8a33d", "arguments": "#30497a", "temporaries": "#c96f2e", "program": "#1b2a41",
}  # fmt: skip
"""The colours of all but named activations, which are shades of green in the order in which a block makes them."""


_CAPACITY, _NEAR = "#cc3311", 4


def memory_table(parts: list[MemoryPart], compiled: CompiledBytes | None = None) -> Table:
    """Make a table of the parts with their sums, and of what the compiler says."""
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


def memory_figure(parts: list[MemoryPart], title: str, compiled: CompiledBytes | None = None, has: int = 0) -> Figure:
    """Draw bars of the parts predicted for device and host and of the compiler's account, and what a device has."""
    from matplotlib import colormaps  # imported late: a run imports this module, and its first step would wait
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

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
    shades = colormaps["YlGn"](np.linspace(0.25, 0.95, len(NAMES)))
    colors = _COLORS | dict(zip(NAMES, shades, strict=True))
    largest = max(sum(size for _, size in stack) for _, stack in bars)
    near = has <= _NEAR * largest  # a line far to the right would leave the bars no room
    largest = max(largest, has) if near else largest
    unit, letter = next(
        ((2**shift, name) for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**shift), (1, "B")
    )
    figure = Figure(figsize=(11, max(1.6 + 0.75 * len(bars), 0.8 + 0.18 * len(names))), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = set[str]()
    for at, (_, stack) in enumerate(bars):
        left = 0.0
        for name, size in stack:
            label = None if name in drawn else name
            drawn.add(name)
            axes.barh(at, size / unit, left=left, color=colors[name], edgecolor="white", linewidth=0.6, label=label)
            if size > (0.02 + 0.01 * len(name)) * largest:  # a letter is about a hundredth of the picture wide
                light = np.dot(np.square(to_rgb(colors[name])), (0.21, 0.72, 0.07))  # about as light as the eye sees it
                ink = "white" if light < 0.2 else "black"
                axes.text(left + size / unit / 2, at, name, ha="center", va="center", fontsize=8, color=ink)
            left += size / unit
        axes.text(left, at, f" {left:.3g}", va="center", fontsize=8)
    if has and not near:
        said = f"a device has {has / unit:.3g} {letter}: far to the right"
        axes.text(1, 1, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color=_CAPACITY)
    elif has:
        axes.axvline(has / unit, color=_CAPACITY, linestyle="--", linewidth=1, label=f"a device has {has / unit:.3g}")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel=f"{letter} of one device", title=title, xlim=(0, 1.12 * largest / unit))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def write_memory_account(folder: Path, parts: list[MemoryPart], title: str, compiled: CompiledBytes, has: int) -> None:
    """Write `memory.json` and `memory.png` into a run folder."""
    from jaxpar.show.figures import save_figure

    found = {"predicted": [part._asdict() for part in parts], "compiled": compiled._asdict(), "device_has": has}
    (folder / "memory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save_figure(memory_figure(parts, title, compiled, has), folder / "memory.png")
