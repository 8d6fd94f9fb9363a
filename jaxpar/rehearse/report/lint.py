"""The linter, which says in the model's words what is wrong with a rehearsed step; each rule is a
function that is registered by its name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.layout.placements import Placement
from jaxpar.base.layout.plan import Plan
from jaxpar.base.registry import Registry, registering
from jaxpar.hlo.program.tasks import Origin
from jaxpar.rehearse.report.schema import CollectiveRow, KernelRow, LintFinding, Memory
from jaxpar.rehearse.timeline import TaskTime

_LARGE_PARAMETER = 2**20  # bytes
_COPY_SHARE = 0.005  # of the step


@dataclass(frozen=True)
class LintedStep:
    """A rehearsed step as the linter looks at it."""

    memory: Memory | None = None
    collectives: Sequence[CollectiveRow] = ()
    kernels: Sequence[KernelRow] = ()
    """Kernels that were priced in place of those that the target would run."""
    tasks: Sequence[TaskTime] = ()
    seconds: float = 0.0
    """The seconds of the step."""
    plan: Plan | None = None
    """The plan of one of our configs; None for another program."""
    parameters: Sequence[Placement] = ()
    """The places of the parameters of a config's model."""


class Finding(NamedTuple):
    """A finding at one place in a step.

    Attributes:
      message: what is wrong and what to try, in a sentence.
      scope: the part of the model; empty = all of it.
      source: the line, `FILE:NUMBER`.
      bytes: the bytes that it concerns.
      seconds: the time that it takes.
    """

    message: str
    scope: str = ""
    source: str = ""
    bytes: float = 0.0
    seconds: float = 0.0


Find: TypeAlias = Callable[[LintedStep], Iterable[Finding]]
Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True)
class Lint:
    """A rule of the linter."""

    find: Find
    severity: Severity


LINTS: Registry[Lint] = Registry("a rule of the linter")


def register_lint(rule: str, severity: Severity) -> Callable[[Find], Find]:
    """Register a rule of the linter: every rehearsal has its findings, and `--fail-on` takes its
    name.

    It is a decorator of a function from a `LintedStep` to its findings. For a program that is not
    one of our configs, `plan` is None and `parameters` are empty.

    Args:
      rule: the name of the rule, a word.

    Raises:
      UserError: the severity is none, or the name is refused by `registering`.
    """
    if severity not in get_args(Severity):
        raise UserError(
            f"a rule of the linter is an error or a warning, and {rule!r} has the severity "
            f"{short(severity)}"
        )
    return registering(LINTS, rule, lambda find: Lint(find, severity), ("step",))


def find(rule: str, step: LintedStep) -> list[LintFinding]:
    """Find what one rule has to say, in its order.

    Args:
      rule: the name of a rule that is registered.

    Raises:
      UserError: no rule has this name, or the rule returns something else than findings.
    """
    lint = LINTS[rule]
    findings = lint.find(step)
    if findings is None or isinstance(findings, Finding):
        raise UserError(
            f"the rule {rule!r} of the linter returned {short(findings)}: let it yield each Finding"
        )
    return [
        {
            "rule": rule,
            "severity": lint.severity,
            "message": found.message,
            "scope": found.scope,
            "source": found.source,
            "bytes": float(found.bytes),
            "seconds": found.seconds,
        }
        for found in map(partial(_require_finding, rule), findings)
    ]


def _require_finding(rule: str, found: object) -> Finding:
    if not isinstance(found, Finding):
        raise UserError(
            f"the rule {rule!r} of the linter yields a Finding each, and yielded {short(found)}"
        )
    return found


def find_all(step: LintedStep) -> list[LintFinding]:
    """Find what every rule has to say: errors first, and then by what they cost.

    Raises:
      UserError: a rule returns something else than findings.
    """
    found = [finding for rule in LINTS.names() for finding in find(rule, step)]
    return sorted(
        found,
        key=lambda row: (row["severity"], -row["seconds"], -row["bytes"]),
    )


def parse_rules(text: str) -> list[str]:
    """Read the rules of the linter in `--fail-on`, before anything is compiled: their names, in
    order.

    Args:
      text: the value of the flag without conditions on figures, `does-not-fit,large-copy`.

    Raises:
      UserError: a name is unknown.
    """
    names = [part for part in map(str.strip, text.split(",")) if part]
    known = LINTS.names()
    for name in names:
        if name not in known:
            guess = suggest(name, known)
            raise UserError(
                f"--fail-on {name}: unknown condition{guess}: it may be {', '.join(known)}, or a "
                "figure that has grown, as step+3% and memory>14GiB"
            )
    return names


@register_lint("does-not-fit", "error")
def does_not_fit(step: LintedStep) -> Iterator[Finding]:
    """Find that the step takes more memory than a device has, or than JAX's pool may take of a
    GPU's.
    """
    memory = step.memory
    if memory is None or memory["fits"]:
        return
    has = memory["hbm_bytes"]
    usable = memory["usable_bytes"]
    if usable == has:
        what = "HBM"
    else:
        what = f"{bytes_text(has)}, which is what JAX's pool may take"
    over = memory["total"] - usable
    yield Finding(f"more than {bytes_text(usable)} of {what}", bytes=over)


@register_lint("unplanned-collective", "error")
def unplanned_collectives(step: LintedStep) -> Iterator[Finding]:
    """Find collectives that are not the plan's."""
    for row in step.collectives:
        if row.get("planned", True):
            continue
        axes = " x ".join(row["axes"]) or "no axis"
        yield Finding(
            f"{row['kind']} of {bytes_text(row['bytes'])} over {axes}, {row['count']} a step: "
            f"{row.get('reason')}",
            scope=row["scope"],
            source=row["source"],
            bytes=row["sent_bytes"],
            seconds=row["exposed"],
        )


@register_lint("other-kernel", "warning")
def other_kernels(step: LintedStep) -> Iterator[Finding]:
    """Find kernels that were priced in place of those that the target would run."""
    for row in step.kernels:
        if row.get("time", row["priced"]) == row["runs"]:
            how = f"with the time of {row['runs']}'s, but with its own memory and copies around it"
        else:
            how = "and priced as that"
        yield Finding(
            f"{row['op']} is compiled as {row['priced']}, {how}, because {row['runs']} is not on "
            f"this machine; the target runs {row['runs']} where it is installed. To compile that: "
            f"{row['install']}"
        )


@register_lint("replicated-parameter", "warning")
def replicated_parameters(step: LintedStep) -> Iterator[Finding]:
    """Find parameters larger than a vector that no mesh axis splits, where the rules could split
    them.
    """
    plan = step.plan
    if plan is None:
        return
    usable = {
        *plan.mesh_axes("embed"),
        *plan.mesh_axes("mlp"),
        *plan.mesh_axes("vocab"),
    }
    for row in step.parameters:
        if "layers" in row.axes:
            stages = plan.size("stage")
        else:
            stages = 1
        whole = row.bytes // stages
        of_stage = " of a stage" if stages > 1 else ""
        matrix = sum(axis != "layers" for axis in row.axes) > 1
        if not usable or not matrix or row.bytes_per_device < whole or whole < _LARGE_PARAMETER:
            continue
        axes = ", ".join(axis or "-" for axis in row.axes)
        yield Finding(
            f"{row.name} {list(row.shape)} ({axes}) is whole on every device{of_stage}, "
            f"{bytes_text(whole)}: no rule splits any of its dims over "
            f"{' or '.join(sorted(usable))}",
            scope=row.name,
            bytes=whole,
        )


@register_lint("replicated-activation", "warning")
def whole_residual_stream(step: LintedStep) -> Iterator[Finding]:
    """Find mesh axes that split neither the batch, nor the residual stream's sequence, nor the
    layers.
    """
    plan = step.plan
    if plan is None:
        return
    # a stage has a microbatch of its own
    names = ("batch", "residual_seq", "stage")
    used = {axis for name in names for axis in plan.mesh_axes(name)}
    for axis, size in plan.mesh.shape.items():
        if size > 1 and axis not in used:
            yield Finding(
                f"the residual stream is whole over {axis}={size}: add it to rules.residual_seq"
            )


@register_lint("large-copy", "warning")
def large_copies(step: LintedStep) -> Iterator[Finding]:
    """Find the lines whose synchronous copies and layout changes take more than half a percent of
    the step.
    """
    lines: defaultdict[Origin, list[TaskTime]] = defaultdict(list)
    for row in step.tasks:
        if row.task.kind == "copy" and not row.task.asynchronous:
            lines[row.task.origin].append(row)
    for origin, rows in lines.items():
        seconds = sum(row.seconds for row in rows)
        if seconds < _COPY_SHARE * step.seconds:
            continue
        largest = max(rows, key=lambda row: row.seconds)
        yield Finding(
            f"copies of the {origin.phase} pass take {100 * seconds / step.seconds:.1f} % of the "
            f"step, most of it {largest.task.name}, {largest.task.shape}, {largest.count} times",
            scope=origin.scope,
            source=origin.source,
            bytes=sum(row.task.bytes * row.count for row in rows),
            seconds=seconds,
        )
