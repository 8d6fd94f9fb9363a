"""The memory of a step, predicted part by part, beside what the compiler says."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from jaxpar.base.console import bytes_text
from jaxpar.plan.memory_account import MemoryPart
from jaxpar.rehearse.report.memory import CompiledBytes


def memory_table(parts: list[MemoryPart], compiled: CompiledBytes | None = None, has: int = 0) -> Table:
    """Make a table of the parts with their sums, of what the compiler says, and of what a device has (0 = unknown)."""
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
    if has:
        row("a device has", "", has, 0)
    return table


def write_memory_account(folder: Path, parts: list[MemoryPart], compiled: CompiledBytes, has: int) -> None:
    """Write `memory.json` into a run folder."""
    found = {"predicted": [part._asdict() for part in parts], "compiled": compiled._asdict(), "device_has": has}
    (folder / "memory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
