"""Measured plans: the iteration time of a plan of a model on some A100s, a row of a CSV file each.

The rows that are installed are the validation data of vTrain (VIA-Research/vTrain on GitHub, commit
f8dda8473a48, data/ground_truth_single.csv and ground_truth_multi.csv): Megatron-DeepSpeed in fp16,
each layer computed whole again, 1F1B.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.errors import UserError, short
from jaxpar.bench.csv_rows import CsvRow, installed_text, parse_csv, read_csv

MOST = 2**40


class MeasuredPlan(NamedTuple):
    """A plan and the seconds of its iteration.

    Attributes:
      layers, embed, heads, head_dim, mlp, vocab, seq_len: the model and its sequences.
      global_batch_seqs: the sequences of an iteration.
      chips: the GPUs.
      dp, tp, pp: the devices that share the batch, each layer, and the layers.
      microbatch: the sequences of a microbatch of one data-parallel rank.
      accumulation: the microbatches of an iteration that follow one another.
      step_seconds: the seconds that were measured.
    """

    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int
    seq_len: int
    global_batch_seqs: int
    chips: int
    dp: int
    tp: int
    pp: int
    microbatch: int
    accumulation: int
    step_seconds: float

    @property
    def group(self) -> str:
        """The model, the batch and the number of GPUs, within which plans are ranked."""
        return (
            f"L{self.layers} h{self.embed}, {self.global_batch_seqs} sequences, {self.chips} GPUs"
        )

    @property
    def plan(self) -> str:
        """The plan in a few words."""
        return f"dp={self.dp} tp={self.tp} pp={self.pp} microbatch={self.microbatch}"


def measured_plans(file: Path | None = None) -> list[MeasuredPlan]:
    """Read measured plans.

    Args:
      file: a CSV file with a column for each attribute of `MeasuredPlan`; None = those that are
        installed with the package.

    Raises:
      UserError: the file cannot be read, a column is missing, or a row is no plan; the message
        names the line.
    """
    if file is None:
        text = installed_text("jaxpar.bench.plans", "measured.csv")
        return parse_plans(text, "the measured plans")
    return [_plan(row) for row in read_csv(file, MeasuredPlan._fields)]


def parse_plans(text: str, origin: str) -> list[MeasuredPlan]:
    """Read measured plans from the text of a CSV file.

    Args:
      origin: the name of the file in messages.

    Raises:
      UserError: `measured_plans` refuses it.
    """
    return [_plan(row) for row in parse_csv(text, origin, MeasuredPlan._fields)]


def _plan(row: CsvRow) -> MeasuredPlan:
    numbers = {
        column: _number(row.cells[column], column, row.place) for column in MeasuredPlan._fields
    }
    seconds = numbers.pop("step_seconds")
    whole = {column: int(number) for column, number in numbers.items()}
    plan = MeasuredPlan(**whole, step_seconds=seconds)
    _require_plan(plan, row.place)
    return plan


def _number(text: str, column: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    whole = number == math.floor(number) if math.isfinite(number) else False
    if not 0 < number < MOST or not (whole or column == "step_seconds"):
        wanted = "seconds" if column == "step_seconds" else "a whole number"
        raise UserError(f"{place}: {column} is {short(text)}: it is {wanted} above 0")
    return number


def _require_plan(plan: MeasuredPlan, place: str) -> None:
    """Refuse a plan whose parts do not multiply to its devices and its batch."""
    devices = plan.dp * plan.tp * plan.pp
    if devices != plan.chips:
        raise UserError(
            f"{place}: dp x tp x pp is {devices}, and chips is {plan.chips}: they are the same"
        )
    sequences = plan.dp * plan.microbatch * plan.accumulation
    if sequences != plan.global_batch_seqs:
        raise UserError(
            f"{place}: dp x microbatch x accumulation is {sequences}, and global_batch_seqs is "
            f"{plan.global_batch_seqs}: they are the same"
        )
    if plan.heads % plan.tp or plan.layers < plan.pp:
        raise UserError(
            f"{place}: {plan.heads} heads and {plan.layers} layers do not go over tp={plan.tp} "
            f"and pp={plan.pp}: tp divides the heads, and each stage has a layer"
        )


def by_group(rows: list[MeasuredPlan]) -> dict[str, list[MeasuredPlan]]:
    """Sort measured plans by their groups, in the order of the file."""
    found: defaultdict[str, list[MeasuredPlan]] = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    return dict(found)
