"""`jaxpar rehearse`: a config settled, its training step compiled and played, the report shown and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType

from jaxpar.base.console import check_folders, console
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import write_whole
from jaxpar.cli.arguments import RehearseArgs
from jaxpar.plan import resolve_and_compile
from jaxpar.rehearse.of_config import on_target, rehearse
from jaxpar.rehearse.report.lint import parse_rules
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.tables import finding_lines, report_parts
from jaxpar.rehearse.report.trace import write_trace
from jaxpar.rehearse.targets import load_target


def rehearse_words(name: str, args: RehearseArgs, command: str) -> int:
    """The `rehearse` command: report and files; its exit code.

    Args:
      name: of the config, a preset or a path.
      args: the flags, with the config and its overrides among them.
      command: as typed.

    Raises:
      UserError: see `rehearse`; a condition or a file that cannot be read or written.
    """
    if not args.target:
        raise UserError("rehearse needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them")
    target = load_target(args.target)
    rules = parse_rules(args.fail_on)
    quiet = args.json == "-"
    check_folders(args.trace, args.picture, "" if quiet else args.json)
    say: Callable[[RenderableType], None] = (lambda line: None) if quiet else console().print
    config, program = resolve_and_compile(on_target(args.config, target)[0], target, say)
    report = rehearse(config, target, Path(name).stem, command, say, program)
    for part in report_parts(report):
        say(part)
    for file in _write(report, args):
        say(f"wrote {file}")
    broken = [row for row in report["findings"] if row["rule"] in rules]
    for line in finding_lines(broken):
        print(f"jaxpar: failed: {line}", file=sys.stderr)
    return 1 if broken else 0


def _write(report: Rehearsal, args: RehearseArgs) -> list[str]:
    """Write the files that were asked for, print the JSON if that was, and return the names of the files."""
    text = json.dumps(report, allow_nan=False) if args.json else ""
    if args.json == "-":
        print(text)
    writers: list[tuple[str, Callable[[Path], None]]] = [
        (args.trace, lambda file: write_trace(report, file)),
        (args.picture, lambda file: _draw(report, file)),
        ("" if args.json == "-" else args.json, lambda file: write_whole(file, text + "\n")),
    ]
    asked = [(file, write) for file, write in writers if file]
    for file, write in asked:
        try:
            write(Path(file))
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}") from error
    return [file for file, _ in asked]


def _draw(report: Rehearsal, file: Path) -> None:
    from jaxpar.show.figures import save_figure  # matplotlib, for a picture alone
    from jaxpar.show.timeline import timeline_figure

    save_figure(timeline_figure(report), file)
