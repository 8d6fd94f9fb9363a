"""The report of a comparison: a row for each parameter, a table and a line of text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from jaxpar.base.console import console
from jaxpar.verify.mistakes import Finding


class GradientRow(NamedTuple):
    """One parameter's gradient.

    Attributes:
      name: the parameter's path in the tree, such as `blocks.up`.
      shape: the shape of the array.
      error: |got - want| / max(|want|, floor) of the worst copy, by root mean squares; infinite for
        NaN.
      tolerance: the largest error allowed.
      finding: how the gradient differs; None where it does not.
      layers: the layers that differ; None where the gradient does not differ or is not stacked over
        layers.
      too_small: whether the whole gradient is within the tolerance, so that zeros in its place
        would not be told.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    tolerance: float
    finding: Finding | None = None
    layers: tuple[int, ...] | None = None
    too_small: bool = False

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    @property
    def says(self) -> str:
        """The finding in words, such as `sign, it is minus the reference`."""
        if self.finding:
            return f"{self.finding.kind}, it is {self.finding.says}"
        return "not explained"

    def as_json(self) -> dict[str, Any]:
        """Write this gradient as an object of JSON, as in `Verdict.as_json`."""
        if self.finding:
            mistake = self.finding.kind
        else:
            mistake = ""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "error": _finite(self.error),
            "limit": self.tolerance,
            "equal": self.ok,
            "too_small": self.too_small,
            "mistake": mistake,
            "says": "" if self.ok else self.says,
            "layers": None if self.layers is None else list(self.layers),
        }


@dataclass(frozen=True)
class Verdict:
    """One comparison of a program's loss and gradients with the reference's.

    Attributes:
      name: `float32`, `bfloat16`, or `float32 as run` where the device computes float32 less
        precisely by default.
      loss_error, loss_tolerance: the relative error of the loss, and the largest one allowed.
      rows: the parameters in the order of the model, or of the tree.
      tokens_agree: whether both count the same number of labels, where the program reports how
        many.
      origin: the wrong gradient that lies nearest to the loss, where that is known. A mistake there
        is passed back to the others.
      on_one_device: whether the library's ops differ as much on one device, so that the mesh is not
        the cause.
      of_update: whether it compares how an optimizer moves the parameters, and not gradients.
    """

    name: str
    loss_error: float
    loss_tolerance: float
    rows: tuple[GradientRow, ...]
    tokens_agree: bool = True
    origin: str = ""
    on_one_device: bool = False
    of_update: bool = False

    @property
    def loss_ok(self) -> bool:
        return self.loss_error <= self.loss_tolerance and self.tokens_agree

    @property
    def equal(self) -> bool:
        return self.loss_ok and not self.wrong

    @property
    def wrong(self) -> tuple[GradientRow, ...]:
        """The parameters whose gradients differ."""
        return tuple(row for row in self.rows if not row.ok)

    @property
    def difference(self) -> str:
        """What differs: the loss, how many gradients and of which kinds, and the first of these
        gradients.
        """
        if not self.loss_ok:
            loss = [f"the loss, by {self.loss_error:.1e}"]
        else:
            loss = []
        if not self.wrong:
            return "".join(loss)
        if self.of_update:
            first = max(self.wrong, key=lambda row: row.error)
            return (
                f"{len(self.wrong)} of {len(self.rows)} parameters move otherwise; most of all "
                f"{first.name} [{_sizes(first)}], off by {first.error:.1e} of its way"
            )
        kinds = Counter(row.finding.kind for row in self.wrong if row.finding)
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
        first = self.wrong[0]
        said = " and ".join([*loss, f"{len(self.wrong)} of {len(self.rows)} gradients ({listed})"])
        said += f"; first {first.name} [{_sizes(first)}], off by {first.error:.1e}: {first.says}"
        # otherwise the forward pass is already wrong, or the tokens differ
        if self.loss_ok and self.origin:
            nearest = next(row for row in self.wrong if row.name == self.origin.split()[0])
            said += f"; nearest to the loss: {self.origin}" + (
                f", {nearest.says}" if nearest != first else ""
            )
        return said + (
            "; on one device the library's ops differ likewise" if self.on_one_device else ""
        )

    def __str__(self) -> str:
        if self.equal:
            allowed = max(row.tolerance for row in self.rows)
            small = ", ".join(row.name for row in self.rows if row.too_small)
            if small:
                untold = f"; too small beside the whole gradient to tell: {small}"
            else:
                untold = ""
            return f"EQUAL: loss and {len(self.rows)} gradients, to {allowed:.1e}{untold}"
        return f"DIFFERS: {self.difference}"

    def as_json(self) -> dict[str, Any]:
        """Write this comparison as an object of JSON: `name`, `equal`, the `loss` and a list of
        `gradients`, each with its `error` and the `limit` that it is held to. An error that is no
        finite number is null.
        """
        return {
            "name": self.name,
            "equal": self.equal,
            "loss": {
                "error": _finite(self.loss_error),
                "limit": self.loss_tolerance,
                "equal": self.loss_ok,
                "tokens_agree": self.tokens_agree,
            },
            "gradients": [row.as_json() for row in self.rows],
            "nearest_to_the_loss": self.origin,
            "on_one_device": self.on_one_device,
            "says": self.difference,
        }

    def show(self) -> None:
        """Print every parameter's error and kind of mistake on the terminal, and then the verdict
        in one line.
        """
        console().print(table([self]))
        console().print(str(self))


def table(verdicts: Sequence[Verdict]) -> Table:
    """Lay verdicts out in a table of the loss and every parameter.

    Args:
      verdicts: at least one verdict, each with the same rows in the same order.

    Returns:
      The table for a terminal. It has each error and tolerance, and the kind of mistake of the
      first verdict in which a parameter differs.
    """
    out = Table("parameter", "shape", box=None, pad_edge=False)
    for name in [name for verdict in verdicts for name in (verdict.name, "tolerance")]:
        out.add_column(name, justify="right")
    out.add_column("")
    losses = [
        f"{x:.1e}" for verdict in verdicts for x in (verdict.loss_error, verdict.loss_tolerance)
    ]
    out.add_row(
        "loss", "", *losses, "ok" if all(verdict.loss_ok for verdict in verdicts) else "DIFFERS"
    )
    for rows in zip(*(verdict.rows for verdict in verdicts), strict=True):
        errors = [f"{x:.1e}" for row in rows for x in (row.error, row.tolerance)]
        wrong = [row for row in rows if not row.ok]
        if wrong and wrong[0].finding:
            kind = f": {wrong[0].finding.kind}"
        else:
            kind = ""
        told = zip(verdicts, rows, strict=True)
        if all(row.too_small for verdict, row in told if not verdict.of_update):
            right = "ok, too small to tell"
        else:
            right = "ok"
        out.add_row(
            rows[0].name,
            _sizes(rows[0]),
            *errors,
            f"DIFFERS{kind}" if wrong else right,
        )
    return out


def _sizes(row: GradientRow) -> str:
    return " x ".join(map(str, row.shape))


def _finite(error: float) -> float | None:
    """Convert an error for JSON, which knows no infinity."""
    return error if math.isfinite(error) else None
