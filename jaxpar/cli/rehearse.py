"""`jaxpar rehearse`: a config settled, its training step compiled and played, the report shown and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config, flatten, load_config
from jaxpar.base.console import check_folders, console
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import start
from jaxpar.plan import resolve_and_compile
from jaxpar.rehearse.of_config import mesh_here, on_target, rehearse
from jaxpar.rehearse.report import lint
from jaxpar.rehearse.report.conditions import failures, parse_conditions
from jaxpar.rehearse.report.difference import difference
from jaxpar.rehearse.report.page import write_page
from jaxpar.rehearse.report.schema import Rehearsal, read_rehearsal
from jaxpar.rehearse.report.tables import difference_parts, report_parts
from jaxpar.rehearse.targets import Target, load_target


def rehearse_words(name: str, config: Config, args: Any, command: str) -> int:
    """The `rehearse` command: report, files, comparison; its exit code.

    Args:
      name: of the config, a preset or a path.
      config: with the overrides.
      args: `target`, `html`, `json`, `against`, `fail_on`, `tokens`, `no_timeline` of the command line.
      command: as typed.

    Raises:
      UserError: see `rehearse`; a condition or a file that cannot be read or written.
    """
    if not args.target:
        raise UserError("rehearse needs --target: v5p-64, v5e-8, h100x64, here, ...: docs/targets.md lists them")
    if args.target == "here":
        start(
            mesh_here(config.mesh), "off"
        )  # the target counts the devices, and would start JAX without simulated ones
    target = load_target(args.target)
    conditions = parse_conditions(args.fail_on, lint.RULES, bool(args.against))
    baseline, other = None, None
    if args.against.endswith(".json"):
        baseline = read_rehearsal(Path(args.against))
    elif args.against:
        other = load_config(args.against)
    check_folders(args.html, "" if args.json == "-" else args.json)
    quiet = args.json == "-"
    say = (lambda line: None) if quiet else console().print
    report = _rehearsed(config, target, Path(name).stem, command, args.tokens, say)
    before = flatten(load_config(name))
    report["overrides"] = {key: value for key, value in flatten(config).items() if before[key] != value}
    if other:
        say(f"and {args.against}, to compare with")
        baseline = _rehearsed(other, target, Path(args.against).stem, command, args.tokens, say)
    if not quiet:
        for part in report_parts(report):
            console().print(part)
        if baseline is not None:
            for part in difference_parts(difference(report, baseline)):
                console().print(part)
    _write(report, args)
    broken = failures(conditions, report, baseline)
    for line in broken:
        print(f"jaxpar: failed: {line}", file=sys.stderr)
    return 1 if broken else 0


def _write(report: Rehearsal, args: Any) -> None:
    """The page and the JSON that were asked for."""
    try:
        if args.html:
            write_page(report, Path(args.html))
        if args.json:
            kept = {key: value for key, value in report.items() if key != "timeline" or not args.no_timeline}
            text = json.dumps(kept, indent=1 if args.no_timeline else None, allow_nan=False)
            print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    for name in (args.html, args.json):
        if name not in ("", "-") and args.json != "-":
            console().print(f"wrote {name}")


def _rehearsed(
    config: Config, target: Target, name: str, command: str, tokens: float, say: Callable[[str], None]
) -> Rehearsal:
    """The report of a config, its budget and its open forms of overlap settled for the target."""
    config, program = resolve_and_compile(on_target(config, target)[0], target, say)
    return rehearse(config, target, name, command, tokens, say, program)
