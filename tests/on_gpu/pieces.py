"""Measurements in pieces that can be taken up again, each piece a list of cases.

Processes of their own run the cases and hand over what they find; the one that asks writes
OUT/PIECE.json after each, and touches no GPU. A case that hangs or crashes is recorded, and the
others go on in a fresh process, since an error on a GPU spoils the process that it happened in.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.machine import versions
from jaxpar.bench.measure import BenchRow, table
from jaxpar.kernels.attention.call import Unserved

Found = dict[str, Any]
"""JSON: of a case its `status`, and its `rows` for the report and `notes`, or `why` it has none."""
Say = Callable[[str], None]
Case = Callable[[bool, Path, Say], list[BenchRow]]
"""Given whether it is the small form, the folder of the results, and what takes a note."""
START_SECONDS = 120.0


class Piece(NamedTuple):
    """A part of the measurements.

    Attributes:
      cases: in order.
      small: how many of them the small form has.
      alone: each has a process of its own, and so a peak of memory of its own.
      case_seconds: after which a case is taken to hang.
      environment: of the process.
    """

    cases: Mapping[str, Case]
    small: int = 1
    alone: bool = False
    case_seconds: float = 200.0
    environment: Mapping[str, str] = {}


def read_piece(out: Path, name: str) -> Found:
    """What a piece has found: the `facts` of where it ran, and `cases` by name."""
    try:
        return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"facts": {}, "cases": {}}


def run_piece(
    piece: Piece,
    name: str,
    at: str,
    out: Path,
    small: bool,
    say: Say,
) -> None:
    """Run the cases of a piece that have no result yet.

    Args:
      piece: what to run.
      name: of the piece.
      at: the dict of pieces that it stands in under its name, as `module.NAME`.
      out: folder of the results.
      small: whether to run the small form.
      say: told of each case.

    Raises:
      UserError: JAX does not start; there is no GPU, and it is not the small form; or the folder
        has results of another device, another jax, or of the other form.
    """
    names = list(piece.cases)[: piece.small if small else None]
    (module, _, pieces) = at.rpartition(".")
    environment = {
        **os.environ,
        **piece.environment,
        **({"JAX_PLATFORMS": "cpu"} if small else {}),
    }
    while left := [case for case in names if case not in read_piece(out, name)["cases"]]:
        if piece.alone:
            left = left[:1]
        line = (
            f"from {module} import {pieces}; work({pieces}[{name!r}], {left!r}, {small}, "
            f"{str(out)!r})"
        )
        words = [sys.executable, "-P", "-c", f"from {__name__} import work; {line}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            facts = read_line(process, START_SECONDS)
            if "why" in facts:
                raise UserError(
                    f"JAX does not start here ({facts['why']}): what it printed above says why"
                )
            found = read_piece(out, name)
            check_facts(facts, found["facts"], out)
            for case in left:
                result = read_line(process, piece.case_seconds)
                found = {"facts": facts, "cases": found["cases"] | {case: result}}
                write_whole(out / f"{name}.json", json.dumps(found, indent=1))
                if "why" in result:
                    why = f": {result['why']}"
                else:
                    why = ""
                say(f"{name} {len(found['cases'])}/{len(names)}: {case}: {result['status']}{why}")
                if result["status"] == "failed":
                    break
        finally:
            process.kill()
            process.communicate()


def read_line(process: subprocess.Popen[str], seconds: float) -> Found:
    """The next line of JSON of a process; a failure where it ends first, or is killed after so many
    seconds.
    """
    assert process.stdout
    late = threading.Event()
    timer = threading.Timer(seconds, lambda: (late.set(), process.kill()))
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if line:
        return json.loads(line)
    return {
        "status": "failed",
        "why": f"killed after {seconds:.0f} s" if late.is_set() else f"exit code {process.wait()}",
    }


def work(
    piece: Piece,
    cases: list[str],
    small: bool,
    out: str,
) -> None:
    """Run cases in this process up to the first that fails; print as JSON where it runs and then
    what each finds.
    """
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)  # what else is printed must not stand between the lines
        print(json.dumps(facts_here(small)), file=results, flush=True)
        for name in cases:
            result = run_case(partial(piece.cases[name], small, Path(out)))
            print(json.dumps(result), file=results, flush=True)
            if result["status"] == "failed":
                return


def run_case(case: Callable[[Say], list[BenchRow]]) -> Found:
    """What a case found, with its `status`: measured; or refused or failed, and `why`."""
    notes: list[str] = []
    try:
        rows = case(notes.append)
        jnp.zeros(()).block_until_ready()  # raises where the case went on after an error of the GPU
        return {"status": "measured", "rows": rows, "notes": notes}
    except (Unserved, UserError) as refused:
        return {"status": "refused", "why": str(refused)}
    except Exception as error:  # whatever it is, the others go on
        return {
            "status": "failed",
            "why": f"{type(error).__name__}: {compiler_message(str(error) or '?')}",
        }


def facts_here(small: bool) -> dict[str, str]:
    """What this process runs on."""
    device = jax.devices()[0]
    words = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    try:
        driver = subprocess.run(
            words, capture_output=True, text=True, timeout=20, check=True
        ).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = ""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "platform": device.platform,
        "driver": driver,
        "python": platform.python_version(),
        "form": "small" if small else "whole",
        **versions(),
        "jax": jax.__version__,
    }


def check_facts(
    here: Mapping[str, str],
    then: Mapping[str, str],
    out: Path,
) -> None:
    """Whether what runs here may stand beside the results that a folder has.

    Raises:
      UserError: see `run_piece`.
    """
    if here["platform"] != "gpu" and here["form"] != "small":
        raise UserError(
            f"make gpu needs an NVIDIA GPU; JAX {here['jax']} finds {here['device']}, nvidia-smi "
            f"{here['driver'] or 'nothing'}: install jax's CUDA plugin where there is a GPU, or "
            "try the tiny form that "
            "runs on a CPU, --small (make gpu SMALL=1)"
        )
    for fact in ("device", "jax", "form"):
        if then and then[fact] != here[fact]:
            raise UserError(
                f"{out} has results of {fact} {then[fact]}, and here it is {here[fact]}: try "
                "--out DIR"
            )


def report(out: Path, names: Iterable[str], most: int = 60) -> str:
    """Markdown of everything in the folder: where it ran, a table for each piece, and what was
    refused or failed.
    """
    found = {name: read_piece(out, name) for name in names}
    where = next(
        (piece["facts"] for piece in found.values() if piece["facts"]),
        {},
    )
    parts = [", ".join(f"{key}: {value}" for key, value in where.items())]
    for name, piece in found.items():
        rows = list[BenchRow]()
        said = list[str]()
        for case, one in piece["cases"].items():
            rows += [{"case": case, **row} for row in one.get("rows", [])]
            said += [f"- {case}: {note}" for note in one.get("notes", [])]
            said += [f"- {case}: {one['status']}: {one['why']}"] if "why" in one else []
        if piece["cases"]:
            parts += [part for part in (f"### {name}", table(rows[:most]), "\n".join(said)) if part]
    return "\n\n".join(parts) + "\n"
