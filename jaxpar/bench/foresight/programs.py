"""Compiled steps of published rows in a folder: each is compiled once, in a process of its own, and
priced from its text as often as prices change.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError, read_bytes, read_json
from jaxpar.base.layout.mesh import make_mesh
from jaxpar.base.machine import versions
from jaxpar.base.toml import flatten
from jaxpar.bench.foresight.translate import Translation
from jaxpar.plan import resolve_and_compile
from jaxpar.rehearse.of_config import compile_step, on_target, rehearse
from jaxpar.rehearse.program_report import lines_of
from jaxpar.rehearse.report.schema import Line
from jaxpar.rehearse.targets import load_target
from jaxpar.rehearse.timeline import read_and_price, replay

_FORMAT = 1
"""The version of what stands in a folder."""


class StoredProgram(NamedTuple):
    """A compiled step that a folder has.

    Attributes:
      report: what the rehearsal said when it was compiled, without its timeline; empty if refused.
      refused: why there is no step; empty = there is one.
      text: the file of the program's text, gzipped.
    """

    report: dict[str, Any]
    refused: str
    text: Path


class Priced(NamedTuple):
    """The seconds of a step by the prices of today, and the lines of the model that take them."""

    seconds: float
    exposed: float
    """The seconds in which compute waits for collectives."""
    lines: list[Line]


def program_name(step: Translation) -> str:
    """Name the program of a step: the same config, target and compilers have the same name."""
    values = json.dumps(flatten(step.config), sort_keys=True, default=str)
    said = f"{_FORMAT} {values} {step.target.name} {sorted(versions().items())}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    shape = step.target.name.replace(":", "_")
    return f"{shape}-{step.config.model.family}-{digest}"


def find_program(step: Translation, folder: Path) -> StoredProgram | None:
    """Find the program of a step in a folder; None = it has not been compiled there.

    Raises:
      UserError: its file is damaged.
    """
    file = folder / f"{program_name(step)}.json"
    text = file.with_suffix(".hlo.gz")
    if not file.exists():
        return None
    found = read_json(file, {"report": dict[str, Any], "refused": str})
    return StoredProgram(found.get("report", {}), found.get("refused", ""), text)


def compile_program(step: Translation, folder: Path) -> StoredProgram:
    """Compile the step in a process of its own, which gives its memory back, and store program and
    report.

    Raises:
      UserError: the process was killed, which a machine with too little memory does.
    """
    changed = flatten(step.config)
    standard = flatten(Config())
    changes = {key: value for key, value in changed.items() if value != standard[key]}
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            pool.submit(_compile, changes, step.target.name, folder, program_name(step)).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"the process that compiled for {step.target.name} was killed: this machine may "
                "have too little memory for it"
            ) from error
    found = find_program(step, folder)
    assert found is not None, "the process has written it"
    return found


def _compile(changes: dict[str, Any], target_name: str, folder: Path, name: str) -> None:
    """Compile a step, and store its program and its report, or the reason why there is none."""
    config = override(Config(), changes)
    target = load_target(target_name)
    kept: dict[str, Any] = {"refused": "", "report": {}, "target": target_name, "changes": changes}
    began = time.perf_counter()
    try:
        experiment, program = resolve_and_compile(on_target(config, target), target)
        compiled = compile_step(experiment, target, program=program).compiled
        report = rehearse(experiment, target, name, program=compiled.program)
    except UserError as refused:
        kept["refused"] = str(refused)
    else:
        write_whole(folder / f"{name}.hlo.gz", gzip.compress(compiled.text.encode(), 6))
        large = ("timeline", "alive", "graph")
        kept["report"] = {key: value for key, value in report.items() if key not in large}
    kept["seconds"] = time.perf_counter() - began
    write_whole(folder / f"{name}.json", json.dumps(kept, allow_nan=False) + "\n")


def price_program(step: Translation, text: Path) -> Priced:
    """Price a stored program by the figures that the target has today.

    Raises:
      UserError: the file cannot be read or is damaged.
    """
    try:
        program = gzip.decompress(read_bytes(text)).decode()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{text} is damaged ({error}): remove it, and it is compiled again"
        ) from error
    spec = replace(step.config.mesh, distributed=False)
    mesh = make_mesh(spec, step.target.devices())
    priced = read_and_price(program, mesh, step.target)
    timeline = replay(priced.program, priced.costs)
    return Priced(timeline.seconds, timeline.exposed_communication, lines_of(timeline.tasks))
