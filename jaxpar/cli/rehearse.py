"""The command `jaxpar rehearse`, which settles a config, compiles its training step, simulates it,
and shows and writes the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import RenderableType

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config, load_config
from jaxpar.base.console import check_folders, check_pictures, console
from jaxpar.base.errors import UserError, visible
from jaxpar.base.prices import read_prices
from jaxpar.cli.arguments import ConfigArgs, config_args
from jaxpar.launch.other_compiler import read_packages, rehearse_with, requirements
from jaxpar.plan import resolve_and_compile
from jaxpar.plan.choose_order import choose_order, order_parts
from jaxpar.rehearse.graph.graph_tables import graph_parts
from jaxpar.rehearse.graph.report import write_graph
from jaxpar.rehearse.of_config import (
    MeasuredStep,
    measured_step,
    on_target,
    rehearse,
    target_of,
    unfused,
)
from jaxpar.rehearse.report.alive import alive_table
from jaxpar.rehearse.report.comparison import compare, read_report
from jaxpar.rehearse.report.comparison_tables import comparison_parts
from jaxpar.rehearse.report.gate import Condition, failures, read_fail_on
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.report.report_tables import finding_lines, report_parts
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.trace import write_trace
from jaxpar.rehearse.targets import Target


@dataclass(frozen=True)
class RehearseArgs(ConfigArgs):
    """Compile the training step for hardware that is not here: does it fit, what takes the time,
    what is exposed.
    """

    target: str = ""
    """v5p-64 (chips), v5e-8, v5p-128x4 (four slices), v5p:4x4x8 (a shape), h100x64, ...:
    docs/targets.md lists them. here = this machine.
    """
    trace: str = ""
    """Write the timeline as a Chrome trace, which ui.perfetto.dev and TensorBoard open;
    NAME.json.gz compresses it.
    """
    picture: str = ""
    """Draw the timeline, a row for each lane of a device: FILE.png or FILE.svg."""
    memory: str = ""
    """Draw what is in a device's memory over the step, and list the arrays at the peak: FILE.png or
    FILE.svg.
    """
    graph: str = ""
    """The step as a task graph: print critical path, slack, the bound of any schedule and a list
    schedule, and write tasks and edges: FILE.json.
    """
    graph_picture: str = ""
    """Draw the task graph: the compiler's order beside a list schedule, and a loop's body as a
    graph: FILE.png or FILE.svg.
    """
    unfused: bool = False
    """With --graph, compile once more without XLA's fusion passes, and say how many tasks there
    are then, and what they move.
    """
    order: str = ""
    """Impose an order: compile the step with other settings of XLA's scheduler, and with the prices
    of the rehearsal for its profile, and rehearse the fastest. FILE.pbtxt gets that profile.
    """
    json: str = ""
    """Write the report as JSON; - = print it, and nothing else."""
    against: str = ""
    """Compare with a report that --json wrote (FILE.json), with a config as it stands, which is
    rehearsed on the same target, or with this config by another compiler (libtpu==0.0.41).
    """
    prices: str = ""
    """Price by what a GPU of yours was measured to reach: the prices.toml of `make gpu
    PIECES=prices`, in place of the shares of the chip's file.
    """
    measured: str = ""
    """Scale the seconds of compute by a step that was measured on this target: a run folder, or
    the time of a step of CONFIG without the flags that change it, such as 1.453s or 850ms.
    """
    fail_on: str = ""
    """Conditions that exit with 1: unplanned-collective,does-not-fit, or any rule of the linter;
    step+3% or memory+2%, with --against; step>450ms or memory>14GiB.
    """
    compiler: str = ""
    """Rehearse with a compiler of another version, in an environment that is made for it and kept:
    libtpu==0.0.41, jax==0.10.1, or both with a comma.
    """


def rehearse_command(words: list[str]) -> int:
    """jaxpar rehearse CONFIG --target T [--trace|--picture|--memory|--graph|--json FILE]
    [--against OTHER] [--fail-on CONDITIONS] [--section.key value ...]
    """
    name, args = config_args(rehearse_command.__doc__, RehearseArgs, words)
    if not args.target:
        raise UserError(
            "rehearse needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them"
        )
    quiet = args.json == "-"
    say: Callable[[RenderableType], None] = (lambda line: None) if quiet else console().print
    rules, conditions = read_fail_on(args.fail_on)
    _require_effect(args, conditions)
    target = target_of(args.config, args.target, say)
    if args.prices:
        hardware = replace(target.hardware, prices=read_prices(Path(args.prices)))
        target = replace(target, hardware=hardware)
    packages = _packages("--compiler", args.compiler, target)
    outputs = _outputs(args)
    check_folders(*outputs, args.order)
    check_pictures(args.picture, args.memory, args.graph_picture)
    measured = None
    if args.measured:
        measured = measured_step(args.measured, load_config(name))
    command = " ".join(["jaxpar rehearse", *words])
    earlier = _earlier(args, name, target, command, say, measured)
    try:
        if packages:
            report = rehearse_with(packages, args.config, name, target, say)
            report["command"] = command
        else:
            report = _report_of(args.config, name, target, command, say, args, measured)
    except DoesNotFit as refused:
        if "does-not-fit" not in rules:
            raise
        print(f"jaxpar: failed: error: does-not-fit: {refused}", file=sys.stderr)
        return 1
    before = earlier()
    for part in _parts(report, args):
        say(part)
    if before is not None:
        for part in comparison_parts(compare(before, report)):
            say(part)
    if quiet:
        print(json.dumps(report, allow_nan=False))
    for path, write in outputs.items():
        try:
            write(report, Path(path))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        say(f"wrote {path}")
    broken = finding_lines([row for row in report["findings"] if row["rule"] in rules])
    broken += failures(report, conditions, before)
    for line in broken:
        print(f"jaxpar: failed: {visible(line)}", file=sys.stderr)
    return 1 if broken else 0


def _require_effect(args: RehearseArgs, conditions: Sequence[Condition]) -> None:
    """Refuse flags that would change nothing, or that lack another one.

    Raises:
      UserError: there is such a flag.
    """
    held = [one.text for one in conditions if one.relative]
    if args.json == "-" and args.against and not held:
        raise UserError("--against has no effect: --json - prints the report and nothing else")
    if held and not args.against:
        raise UserError(
            f"--fail-on {held[0]} needs --against FILE.json, the rehearsal to hold it against"
        )
    if args.unfused and not args.graph:
        raise UserError("--unfused has no effect without --graph FILE.json, which it adds to")
    if args.compiler:
        for flag in ("graph", "graph_picture", "order", "prices", "measured"):
            if getattr(args, flag):
                raise UserError(
                    f"--{flag.replace('_', '-')} has no effect with --compiler: what that compiler "
                    "made is in its own environment"
                )


def _packages(flag: str, text: str, target: Target) -> dict[str, str]:
    """Read the versions of a compiler, which must be one for the target; empty where none is asked
    for.
    """
    if not text:
        return {}
    if target.here:
        raise UserError(
            f"{flag} {text} has no effect on target here, which is what this process runs on"
        )
    packages = read_packages(flag, text)
    requirements(packages, target.platform)
    return packages


def _earlier(
    args: RehearseArgs,
    name: str,
    target: Target,
    command: str,
    say: Callable[[RenderableType], None],
    measured: MeasuredStep | None,
) -> Callable[[], Rehearsal | None]:
    """Check what `--against` names, before anything is compiled.

    Returns:
      A function that makes or reads the rehearsal to compare with; None where there is none.

    Raises:
      UserError: there is no such file or config, or it is none.
    """
    if not args.against:
        return lambda: None
    if args.against.endswith(".json"):
        report = read_report(args.against)
        return lambda: report
    if "==" in args.against:
        packages = _packages("--against", args.against, target)
        return lambda: rehearse_with(packages, args.config, name, target, say)
    other = load_config(args.against)

    def rehearse_other() -> Rehearsal:
        say(f"and {args.against}, to compare with")
        if args.compiler:
            packages = read_packages("--compiler", args.compiler)
            return rehearse_with(packages, other, args.against, target, say)
        return _report_of(other, args.against, target, command, say, measured=measured)

    return rehearse_other


def _outputs(args: RehearseArgs) -> dict[str, Callable[[Rehearsal, Path], None]]:
    """Collect the functions that write the files that were asked for."""
    outputs = {
        args.trace: write_trace,
        args.picture: _draw,
        args.memory: _draw_memory,
        args.graph: write_graph,
        args.graph_picture: _draw_graph,
        args.json: _write_json,
    }
    return {path: write for path, write in outputs.items() if path not in ("", "-")}


def _parts(report: Rehearsal, args: RehearseArgs) -> list[RenderableType]:
    """Collect the parts of a report that are printed."""
    parts = report_parts(report)
    if args.memory and "alive" in report:
        parts += alive_table(report["alive"])
    if "graph" in report:
        parts += graph_parts(report["graph"])
    return parts


def _report_of(
    config: Config,
    name: str,
    target: Target,
    command: str,
    say: Callable[[RenderableType], None],
    args: RehearseArgs | None = None,
    measured: MeasuredStep | None = None,
) -> Rehearsal:
    """Settle a config for a target, and rehearse it, with its task graph where that was asked
    for.
    """
    experiment, program = resolve_and_compile(on_target(config, target), target, say)
    if args is not None and args.order:
        tried = choose_order(experiment, target, Path(args.order), say)
        for part in order_parts(tried):
            say(part)
        experiment = tried[0].experiment
        program = tried[0].program
    graph = args is not None and bool(args.graph or args.graph_picture)
    if measured is not None:
        made, _ = resolve_and_compile(on_target(measured.config, target), target, say)
        measured = measured._replace(config=made.config)
    report = rehearse(experiment, target, Path(name).stem, command, say, program, graph, measured)
    if args is not None and args.unfused and "graph" in report:
        try:
            report["graph"]["unfused"] = unfused(experiment, target, say)
        except UserError as refused:  # the report stands without it
            report["notes"].append(f"without XLA's fusion passes: {refused}")
    return report


def _write_json(report: Rehearsal, file: Path) -> None:
    write_whole(file, json.dumps(report, allow_nan=False) + "\n")


def _draw(report: Rehearsal, file: Path) -> None:
    from jaxpar.show.figures import save_figure  # matplotlib, for a picture alone
    from jaxpar.show.timeline import timeline_figure

    save_figure(timeline_figure(report), file)


def _draw_memory(report: Rehearsal, file: Path) -> None:
    from jaxpar.show.figures import save_figure  # matplotlib, for a picture alone
    from jaxpar.show.memory_timeline import memory_timeline_figure

    save_figure(memory_timeline_figure(report), file)


def _draw_graph(report: Rehearsal, file: Path) -> None:
    from jaxpar.show.figures import save_figure  # matplotlib, for a picture alone
    from jaxpar.show.task_graph import task_graph_figure

    save_figure(task_graph_figure(report), file)
