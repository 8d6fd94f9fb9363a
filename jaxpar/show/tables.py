"""Tables of a plan show where its parameters live, what becomes of its activations and what its devices send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

from rich.table import Table

from jaxpar.base.activation_names import NAMES
from jaxpar.base.console import bytes_text
from jaxpar.base.sharding import Placement
from jaxpar.plan.communication import StepCollective
from jaxpar.train.saved_activations import Activation


def sharding_table(rows: Sequence[Placement]) -> Table:
    """List every parameter's name, shape, logical axes, spec and bytes per device, and the sum."""
    table = Table("parameter", "shape", "logical axes", "spec", "bytes/device", box=None, pad_edge=False)
    table.columns[-1].justify = "right"
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        axes = ", ".join(axis or "-" for axis in row.axes)
        table.add_row(row.name, " x ".join(map(str, row.shape)), axes, str(row.spec), bytes_text(row.bytes_per_device))
    table.add_row("all", "", "", "", bytes_text(sum(row.bytes_per_device for row in rows)))
    return table


def activation_table(rows: Sequence[Activation]) -> Table:
    """List what becomes of each named activation, and its bytes in one layer and in all that exist at a time."""
    table = Table(
        "activation", "what", "a layer's shape", "kept", "bytes/layer", "device", "host", box=None, pad_edge=False
    )
    for column in table.columns[4:]:
        column.justify = "right"
    for row in rows:
        device, host = (bytes_text(row.kept_bytes) if row.action == action else "" for action in ("save", "offload"))
        shape = " x ".join(map(str, row.shape)) + f" {row.dtype}"
        table.add_row(row.name, NAMES[row.name].what, shape, row.action, bytes_text(row.bytes), device, host)
    sums = [sum(row.kept_bytes for row in rows if row.action == action) for action in ("save", "offload")]
    table.add_row("all", f"{rows[0].blocks} layers" if rows else "", "", "", "", *map(bytes_text, sums))
    return table


def communication_table(collectives: Sequence[StepCollective], most: int = 3) -> Table:
    """List what one device sends in a step by collective and mesh axes, the most first, with the scopes and phases in
    which most of it is sent."""
    groups: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in collectives:
        groups[one.kind, " x ".join(one.axes)][f"{one.scope} {one.phase}"] += one.step_bytes
    table = Table("collective", "over", "sent a step", "where", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for (kind, over), parts in sorted(groups.items(), key=lambda item: -sum(item[1].values())):
        whole = sum(parts.values())
        shares = [f"{where} {100 * size / whole:.0f} %" for where, size in nlargest(most, parts.items(), itemgetter(1))]
        table.add_row(kind, over, bytes_text(whole), "; ".join([*shares, *["..."] * (len(parts) > most)]))
    total = bytes_text(sum(one.step_bytes for one in collectives))
    table.add_row("all", "", total, "and what XLA adds for norms and biases")
    return table
