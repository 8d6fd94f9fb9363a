"""Rehearsed plans: what the compiler of a target says of a plan that was drawn from the planner's
space, a row of a CSV file each.

A row says the plan by the keys of a config that it sets, so that the closed forms can price it
again at any time without a compiler.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.activation_names import Policy
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.bench.csv_rows import installed_text, parse_csv, read_csv
from jaxpar.bench.plans.pairs import pair_of
from jaxpar.plan.candidate import ONE_DEVICE, Candidate, Choices
from jaxpar.plan.layout_search.memory_choices import POLICIES

COLUMNS: tuple[str, ...] = (
    "pair",
    "drawn",
    "mesh",
    "across",
    "accumulation",
    "microbatches",
    "schedule",
    "virtual",
    "policy",
    "keep",
    "zero",
    "moments",
    "scanned",
    "loss_mib",
    "overlap",
    "step_seconds",
    "exposed_seconds",
    "memory_bytes",
    "refused",
)
"""The columns of a file of rehearsed plans. `mesh` has the devices of each axis inside a slice or
node and `across` the slices or nodes that it spans, such as `fsdp=8 tensor=2`; `keep` and
`overlap` the settings of these tables that differ from their defaults. A plan that the compiler
refuses has no seconds and no bytes, and `refused` says why.
"""


class RehearsedPlan(NamedTuple):
    """A plan and what its rehearsal says.

    Attributes:
      pair: the name of its pair (`pairs.PAIRS`).
      drawn: as what it was drawn (`pairs.draw_plans`).
      seconds: the seconds of a step; 0 = the compiler refused it.
      exposed: those in which compute waits for a collective.
      memory: the bytes of a device.
      refused: why the compiler refused it; empty = it did not.
    """

    pair: str
    drawn: str
    candidate: Candidate
    seconds: float = 0.0
    exposed: float = 0.0
    memory: int = 0
    refused: str = ""


def rehearsed_plans(file: Path | None = None) -> list[RehearsedPlan]:
    """Read rehearsed plans.

    Args:
      file: a CSV file that `write_row` made; None = the one that is installed with the package.

    Raises:
      UserError: the file cannot be read, a column is missing, or a row is no plan; the message
        names the line.
    """
    if file is None:
        text = installed_text("jaxpar.bench.plans", "rehearsed.csv")
        return parse_rehearsed(text, "the rehearsed plans")
    return [_plan(row.cells, row.place) for row in read_csv(file, COLUMNS)]


def parse_rehearsed(text: str, origin: str) -> list[RehearsedPlan]:
    """Read rehearsed plans from the text of a CSV file.

    Args:
      origin: the name of the file in messages.

    Raises:
      UserError: `rehearsed_plans` refuses it.
    """
    return [_plan(row.cells, row.place) for row in parse_csv(text, origin, COLUMNS)]


def write_row(file: Path, plan: RehearsedPlan) -> None:
    """Append a plan to a CSV file, which is made with its header if it is absent."""
    begins = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        if begins:
            writer.writeheader()
        writer.writerow(_row(plan))


def _row(plan: RehearsedPlan) -> dict[str, object]:
    one = plan.candidate
    return {
        "pair": plan.pair,
        "drawn": plan.drawn,
        "mesh": _axes_text(one.mesh),
        "across": _axes_text(one.dcn),
        "accumulation": one.accumulation,
        "microbatches": one.microbatches,
        "schedule": one.schedule,
        "virtual": one.virtual,
        "policy": one.policy,
        "keep": _choices_text(one.keep),
        "zero": "yes" if one.zero else "no",
        "moments": one.moments,
        "scanned": "yes" if one.scan else "no",
        "loss_mib": one.loss_mib,
        "overlap": _choices_text(one.overlap),
        "step_seconds": f"{plan.seconds:.6g}" if plan.seconds else "",
        "exposed_seconds": f"{plan.exposed:.6g}" if plan.seconds else "",
        "memory_bytes": plan.memory or "",
        "refused": plan.refused,
    }


def _plan(cells: dict[str, str], place: str) -> RehearsedPlan:
    refused = cells["refused"]
    policy = cells["policy"]
    if policy not in POLICIES:
        raise UserError(f"{place}: policy is {short(policy)}: there are {', '.join(POLICIES)}")
    candidate = Candidate(
        mesh=_sizes(cells["mesh"], place),
        dcn=_sizes(cells["across"], place),
        accumulation=_whole(cells, "accumulation", place),
        microbatches=_whole(cells, "microbatches", place),
        schedule=cells["schedule"],
        virtual=_whole(cells, "virtual", place),
        policy=cast(Policy, policy),
        keep=_choices(cells["keep"], place),
        zero=cells["zero"] == "yes",
        moments=cells["moments"],
        scan=cells["scanned"] == "yes",
        loss_mib=_whole(cells, "loss_mib", place),
        overlap=_choices(cells["overlap"], place),
    )
    return RehearsedPlan(
        pair=pair_of(cells["pair"]).name,
        drawn=cells["drawn"],
        candidate=candidate,
        seconds=0.0 if refused else _number(cells["step_seconds"], "step_seconds", place),
        exposed=0.0 if refused else float(cells["exposed_seconds"] or 0),
        memory=0 if refused else _whole(cells, "memory_bytes", place),
        refused=refused,
    )


def _axes_text(sizes: tuple[int, ...]) -> str:
    pairs = zip(MESH_AXES, sizes, strict=True)
    return " ".join(f"{axis}={size}" for axis, size in pairs if size > 1)


def _choices_text(choices: Choices) -> str:
    return " ".join(f"{name}={value}" for name, value in choices)


def _choices(text: str, place: str) -> Choices:
    """Read settings such as `gather=ring scatter=ring`."""
    found: list[tuple[str, str]] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UserError(f"{place}: {short(word)} is no setting: write NAME=VALUE")
        found.append((name, value))
    return tuple(sorted(found))


def _sizes(text: str, place: str) -> tuple[int, ...]:
    """Read the sizes of mesh axes, such as `fsdp=8 tensor=2`; those that are left out are 1."""
    sizes = list[int](ONE_DEVICE)
    for axis, value in _choices(text, place):
        if axis not in MESH_AXES:
            raise UserError(f"{place}: {short(axis)} is no mesh axis: there are {MESH_AXES}")
        sizes[MESH_AXES.index(axis)] = _count(value, axis, place)
    return tuple(sizes)


def _whole(cells: dict[str, str], column: str, place: str) -> int:
    return _count(cells[column], column, place)


def _count(text: str, name: str, place: str) -> int:
    number = _number(text, name, place)
    if number != math.floor(number):
        raise UserError(f"{place}: {name} is {short(text)}: it is a whole number above 0")
    return int(number)


_MOST = 2.0**50


def _number(text: str, name: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < _MOST:
        raise UserError(f"{place}: {name} is {short(text)}: it is a number above 0")
    return number


def by_pair(plans: Iterable[RehearsedPlan]) -> dict[str, list[RehearsedPlan]]:
    """Sort rehearsed plans by their pairs, in the order of the file."""
    found: dict[str, list[RehearsedPlan]] = {}
    for plan in plans:
        found.setdefault(plan.pair, []).append(plan)
    return found
