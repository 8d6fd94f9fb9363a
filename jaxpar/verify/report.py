"""What a verification says: a table, a line, and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
from rich.table import Table

from jaxpar.base.mesh import describe, total_sizes
from jaxpar.verify.of_config import GradientRow, Verification


def table(found: Verification) -> Table:
    """The loss and every parameter: for each check the error and its tolerance, and how it differs if it does."""
    out = Table("parameter", "shape", box=None, pad_edge=False)
    for run in found.checks:
        out.add_column(run.name, justify="right")
        out.add_column("tolerance", justify="right")
    out.add_column("")
    losses = [_numbers(run.loss_error, run.loss_tolerance) for run in found.checks]
    out.add_row("loss", "", *sum(losses, ()), "ok" if all(run.loss_ok for run in found.checks) else "DIFFERS")
    for rows in zip(*(run.rows for run in found.checks), strict=True):
        numbers, wrong = [_numbers(row.error, row.tolerance) for row in rows], [row for row in rows if not row.ok]
        said = "ok" if not wrong else "DIFFERS" + (f": {wrong[0].finding.kind}" if wrong[0].finding else "")
        out.add_row(rows[0].name, " x ".join(map(str, rows[0].shape)), *sum(numbers, ()), said)
    return out


def _numbers(error: float, tolerance: float) -> tuple[str, ...]:
    return f"{error:.1e}", f"{tolerance:.1e}"


def verdict(found: Verification) -> str:
    """One line: equal, or the first parameter that differs, and how."""
    failed, count = found.failed, len(found.checks[0].rows)
    mesh, devices = found.setup.config.mesh, found.setup.devices
    on = f"{describe(total_sizes(mesh))} ({len(devices)} x {devices[0].device_kind})"
    if failed is None:
        names = ", ".join(run.name for run in found.checks)
        return f"EQUAL: loss and {count} gradients on {on} as on one device; {names}; {found.seconds:.0f} s"
    wrong = [row for row in failed.rows if not row.ok]
    said = [f"the loss, by {failed.loss_error:.1e}"] if not failed.loss_ok else []
    said += [f"{len(wrong)} of {count} gradients"] if wrong else []
    text = f"DIFFERS on {on}, {failed.name}: {' and '.join(said)}"
    if not wrong:
        return text
    kinds = Counter(row.finding.kind for row in wrong if row.finding is not None)
    listed = ", ".join(f"{number} x {kind}" for kind, number in kinds.most_common())
    text += f" ({listed}); first {_how(wrong[0])}"
    if failed.loss_ok and failed.origin:  # else the forward pass is wrong already, or the tokens are not the same
        nearest = next(row for row in wrong if row.name == failed.origin.split()[0])
        text += f"; nearest to the loss: {failed.origin}" + (f", {_said(nearest)}" if nearest != wrong[0] else "")
    return text + ("; on one device the library's ops differ likewise" if failed.on_one_device else "")


def _how(row: GradientRow) -> str:
    return f"{row.name} [{' x '.join(map(str, row.shape))}], off by {row.error:.1e}: {_said(row)}"


def _said(row: GradientRow) -> str:
    return "not diagnosed" if row.finding is None else f"{row.finding.kind}, it is {row.finding.says}"


def as_json(found: Verification) -> dict[str, Any]:
    """The whole result for `--json`; docs/verify.md describes it. An error that is not finite is the string "inf"."""

    def number(error: float) -> float | str:
        return error if math.isfinite(error) else "inf"

    def row(row: GradientRow) -> dict[str, Any]:
        finding = None if row.finding is None else row.finding._asdict() | {"fits": row.finding.fits}
        return {**row._asdict(), "error": number(row.error), "ok": row.ok, "finding": finding}

    failed, model = found.failed, dataclasses.asdict(found.setup.config.model)
    return {
        "equal": found.equal,
        "verdict": verdict(found),
        "first": failed.first.name if failed and failed.first else None,
        "nearest_to_loss": failed.origin if failed else None,
        "on_one_device": failed.on_one_device if failed else None,
        "platform": found.setup.devices[0].platform,
        "device_kind": found.setup.devices[0].device_kind,
        "devices": len(found.setup.devices),
        "mesh": total_sizes(found.setup.config.mesh),
        "mesh_asked": total_sizes(found.setup.asked),
        "notes": list(found.setup.notes),
        "model": model,
        "batch": found.setup.config.train.batch,
        "accumulation": found.setup.config.train.accumulation,
        "seq_len": found.setup.config.data.seq_len,
        "packed": found.setup.config.data.pack,
        "remat": found.setup.config.memory.policy,
        "overlap": dataclasses.asdict(found.setup.config.overlap),
        "context": found.setup.config.context.strategy,
        "jax": jax.__version__,
        "seconds": round(found.seconds, 2),
        "checks": [
            {
                "name": run.name,
                "ok": run.ok,
                "loss": number(run.loss),
                "reference_loss": run.reference_loss,
                "loss_error": number(run.loss_error),
                "loss_tolerance": run.loss_tolerance,
                "tokens_agree": run.tokens_agree,
                "parameters": [row(entry) for entry in run.rows],
            }
            for run in found.checks
        ],
    }
