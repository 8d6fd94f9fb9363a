"""Compiled steps of published rows: each is compiled once, in a process of its own, and priced from
its text as often as prices change. Those of the library's own rows come with it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError, read_bytes, read_json
from jaxpar.base.machine import versions
from jaxpar.base.toml import flatten
from jaxpar.bench.foresight.translate import Translation
from jaxpar.plan import resolve_and_compile
from jaxpar.rehearse.of_config import compile_step, on_target, report_of_step
from jaxpar.rehearse.program_report import lines_of
from jaxpar.rehearse.report.schema import Line
from jaxpar.rehearse.targets import Position, load_target, places
from jaxpar.rehearse.timeline import price_at_places, replay

_FORMAT = 2
"""The version of what stands in a folder."""
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n\n", re.M | re.S)
_METADATA = re.compile(r'(?<=, )metadata=\{(op_name="[^"]*")?[^}]*\}')


class StoredProgram(NamedTuple):
    """A compiled step that a folder has.

    Attributes:
      report: what the rehearsal said when it was compiled: its time, its memory and the kernels in
        place of others; empty if refused.
      refused: why there is no step; empty = there is one.
      text: the file of the program's text, compressed by xz.
      places: the places of the program's devices, in its order, which its compiler knew.
      versions: the versions of JAX and of the compilers that made it.
    """

    report: dict[str, Any]
    refused: str
    text: Path
    places: tuple[Position, ...]
    versions: dict[str, str]


class Priced(NamedTuple):
    """The seconds of a step by the prices of today, and the lines of the model that take them."""

    seconds: float
    exposed: float
    """The seconds in which compute waits for collectives."""
    lines: list[Line]


def program_name(step: Translation) -> str:
    """Name the program of a step: the same config and target have the same name. In what machines a
    target's GPUs are, no compiler asks.
    """
    target = _compiled_target(step)
    values = json.dumps(_changes(step.config), sort_keys=True, default=str)
    said = f"{_FORMAT} {values} {target}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    return f"{target.replace(':', '_')}-{step.config.model.family}-{digest}"


def _changes(config: Config) -> dict[str, Any]:
    """List what a config says that is not the standard; so a key that is new changes no name."""
    standard = flatten(Config())
    return {key: value for key, value in flatten(config).items() if value != standard[key]}


def _compiled_target(step: Translation) -> str:
    return step.target.name.partition("@")[0]


def find_program(step: Translation, folder: Path) -> StoredProgram | None:
    """Find the program of a step by the compilers at hand in a folder; None = it has not been
    compiled there.

    Raises:
      UserError: its file is damaged.
    """
    found = _read_program(folder / f"{program_name(step)}.json")
    return found if found is not None and found.versions == versions() else None


def kept_program(step: Translation) -> StoredProgram | None:
    """Find the program of a step among those that come with the library, whatever compiler made it;
    None = there is none.
    """
    kept = resources.files("jaxpar.bench.foresight").joinpath("published", "programs")
    return _read_program(Path(str(kept)) / f"{program_name(step)}.json")


def _read_program(file: Path) -> StoredProgram | None:
    if not file.exists():
        return None
    form = {
        "report": dict[str, Any],
        "refused": str,
        "places": list[list[Any]],
        "versions": dict[str, str],
    }
    found = read_json(file, form)
    return StoredProgram(
        found.get("report", {}),
        found.get("refused", ""),
        file.with_suffix(".hlo.xz"),
        tuple(_read_place(place) for place in found.get("places", [])),
        found.get("versions", {}),
    )


def _read_place(place: list[Any]) -> Position:
    slice, coords, core = place
    return Position(slice, tuple(coords), core)


def compile_program(step: Translation, folder: Path) -> StoredProgram:
    """Compile the step in a process of its own, which gives its memory back, and store program and
    report.

    Raises:
      UserError: the process failed, or was killed, which a machine with too little memory does;
        then nothing is stored.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            pool.submit(
                _compile, _changes(step.config), _compiled_target(step), folder, program_name(step)
            ).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"the process that compiled for {step.target.name} was killed: this machine may "
                "have too little memory for it"
            ) from error
        except Exception as error:  # a fault of this library or of a compiler: the board goes on
            raise UserError(
                f"compiling for {step.target.name} failed: {type(error).__name__}: {error}"
            ) from error
    found = find_program(step, folder)
    assert found is not None, "the process has written it"
    return found


def _compile(changes: dict[str, Any], target_name: str, folder: Path, name: str) -> None:
    """Compile a step, and store its program and its report, or the reason why there is none."""
    config = override(Config(), changes)
    target = load_target(target_name)
    kept: dict[str, Any] = {"refused": "", "report": {}, "target": target_name, "changes": changes}
    kept["places"] = []
    kept["versions"] = versions()
    began = time.perf_counter()
    try:
        experiment, program = resolve_and_compile(on_target(config, target), target)
        made = compile_step(experiment, target, program=program)
        report = report_of_step(made, name)
    except UserError as refused:
        kept["refused"] = str(refused)
    else:
        text = without_places(made.compiled.text).encode()
        write_whole(folder / f"{name}.hlo.xz", lzma.compress(text, preset=9))
        kept["places"] = places(made.compiled.mesh.devices.flat, target)
        kept["report"] = {
            "time": {key: report["time"][key] for key in ("step", "mfu")},
            "memory": {key: report["memory"][key] for key in ("total", "fits")},
            "kernels": report.get("kernels", []),
        }
    kept["seconds"] = time.perf_counter() - began
    write_whole(folder / f"{name}.json", json.dumps(kept, allow_nan=False) + "\n")


def without_places(text: str) -> str:
    """Leave out where each instruction stands in the source, which no price asks for and which is
    most of a program's text; the scopes stay.
    """
    bare = _TABLES.sub("", text)
    return _METADATA.sub(lambda found: f"metadata={{{found[1] or ''}}}", bare)


def price_program(step: Translation, stored: StoredProgram) -> Priced:
    """Price a stored program by the figures that the target has today, without a compiler.

    Raises:
      UserError: the file cannot be read or is damaged.
    """
    try:
        program = lzma.decompress(read_bytes(stored.text)).decode()
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise UserError(
            f"{stored.text} is damaged ({error}): remove it, and it is compiled again"
        ) from error
    priced = price_at_places(program, stored.places, step.target)
    timeline = replay(priced.program, priced.costs)
    return Priced(timeline.seconds, timeline.exposed_communication, lines_of(timeline.tasks))
