"""Tables of a plan: where its parameters live, what is kept of a layer, what devices send, and what
a step holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from heapq import nlargest
from operator import itemgetter

from rich.table import Column, Table

from jaxpar.base.console import bytes_text
from jaxpar.base.layout.activation_names import NAMES
from jaxpar.base.layout.placements import Placement
from jaxpar.plan.communication import StepCollective
from jaxpar.plan.memory_account import MemoryPart
from jaxpar.train.activations import Activation

_table = partial(Table, box=None, pad_edge=False)
_number = partial(Column, justify="right")


def sharding_table(rows: Sequence[Placement]) -> Table:
    """List every parameter's name, shape, logical axes, spec and bytes per device, and the sum."""
    table = _table("parameter", "shape", "logical axes", "spec", _number("bytes/device"))
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        axes = ", ".join(axis or "-" for axis in row.axes)
        table.add_row(
            row.name,
            " x ".join(map(str, row.shape)),
            axes,
            str(row.spec),
            bytes_text(row.bytes_per_device),
        )
    table.add_row(
        "all",
        "",
        "",
        "",
        bytes_text(sum(row.bytes_per_device for row in rows)),
    )
    return table


def activation_table(rows: Sequence[Activation]) -> Table:
    """List what becomes of each named activation, and its bytes in one layer and in all that exist
    at a time.

    Args:
      rows: the activations of a layer, in the order in which they are made.

    Returns:
      A table whose columns `device` and `host` are the bytes that are saved or offloaded on one
      device, summed in its last row.
    """
    table = _table(
        "activation",
        "what",
        "a layer's shape",
        "kept",
        *map(_number, ("bytes/layer", "device", "host")),
    )
    for row in rows:
        kept = (
            bytes_text(row.kept_bytes) if row.action == action else ""
            for action in ("save", "offload")
        )
        shape = " x ".join(map(str, row.shape)) + f" {row.dtype}"
        table.add_row(
            row.name, NAMES[row.name].what, shape, row.action, bytes_text(row.bytes), *kept
        )
    sums = (
        sum(row.kept_bytes for row in rows if row.action == action)
        for action in ("save", "offload")
    )
    table.add_row(
        "all", f"{rows[0].blocks} layers" if rows else "", "", "", "", *map(bytes_text, sums)
    )
    return table


def communication_table(collectives: Sequence[StepCollective], most: int = 3) -> Table:
    """List what one device sends in a step by collective and mesh axes, the most first, with the
    scopes and phases in which most of it is sent.

    Args:
      collectives: the collectives of one step.
      most: how many places are named for each kind and axes.
    """
    groups: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in collectives:
        groups[one.kind, " x ".join(one.axes)][f"{one.scope} {one.phase}"] += one.step_bytes
    table = _table("collective", "over", _number("sent a step"), "where")
    for (kind, over), parts in sorted(
        groups.items(),
        key=lambda item: -sum(item[1].values()),
    ):
        whole = sum(parts.values())
        shares = [
            f"{where} {100 * size / whole:.0f} %"
            for where, size in nlargest(most, parts.items(), itemgetter(1))
        ]
        table.add_row(
            kind, over, bytes_text(whole), "; ".join([*shares, *["..."] * (len(parts) > most)])
        )
    total = bytes_text(sum(one.step_bytes for one in collectives))
    table.add_row("all", "", total, "and what XLA adds for norms and biases")
    return table


def memory_table(parts: Sequence[MemoryPart], has: int = 0) -> Table:
    """List the parts of what a step holds, their sum, and what a device has.

    Args:
      parts: the parts, in bytes of one device and of its part of the host.
      has: the bytes of a device's memory; 0 = not known, and there is no such row.
    """
    table = _table("memory", "what", _number("device"), _number("host"))
    sums = MemoryPart(
        "predicted", "", sum(part.device for part in parts), sum(part.host for part in parts)
    )
    for name, what, *sizes in (
        *parts,
        sums,
        *([MemoryPart("a device has", "", has)] if has else []),
    ):
        table.add_row(name, what, *(bytes_text(size) if size else "" for size in sizes))
    return table
