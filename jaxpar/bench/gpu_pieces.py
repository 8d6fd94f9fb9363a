"""Measurements in pieces that can be taken up again, each piece a list of cases.

Processes of their own run the cases and write OUT/PIECE.json after each; who asks for them only watches, and touches no
GPU. A case that hangs or crashes is recorded, and the others go on in a fresh process, since an error on a GPU spoils
the process that it happened in.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_said
from jaxpar.base.runtime import write_whole
from jaxpar.kernels.attention.call import Unserved

Found = dict[str, Any]
"""Of a case: `rows` by column for the report, `notes`, a `status` if it is not just measured."""
Case = Callable[[bool, Path], Found]
"""Given whether it is the small form, and the folder of the results."""
PIECE_SECONDS = 8 * 60.0


class Piece(NamedTuple):
    """A part of the half hour, of at most PIECE_SECONDS.

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
    """What a piece has found: `facts`, `cases` by name, and the case that is `running`."""
    try:
        return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"facts": {}, "cases": {}, "running": ""}


def _write_piece(out: Path, name: str, found: Found) -> None:
    write_whole(out / f"{name}.json", json.dumps(found, indent=1))


def check_folder(out: Path, names: Iterable[str], here: Found) -> None:
    """Make the folder of the results.

    Raises:
      UserError: it has results of another device, another jax, or of the other form, small or not.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        then = read_piece(out, name)["facts"]
        for fact in ("device", "jax", "small"):
            if then and then[fact] != here[fact]:
                raise UserError(f"{out} has results of {fact} {then[fact]}, and here it is {here[fact]}: try --out DIR")


def run_piece(piece: Piece, name: str, at: str, out: Path, here: Found, say: Callable[[str], None]) -> bool:
    """Run the cases of a piece that have no result yet; whether all of them now have one.

    Args:
      at: the dict of pieces that it stands in under its name, as `module.NAME`.
      here: of `facts_here`.
    """
    found = read_piece(out, name) | {"facts": here, "running": ""}
    _write_piece(out, name, found)
    module, _, table = at.rpartition(".")
    words = _python(f"from {module} import {table}; end_with_parent(); sys.exit(work({table}, {name!r}, {str(out)!r}))")
    environment = {**piece.environment, **_platform(here["small"])}
    deadline, ended, before = time.time() + PIECE_SECONDS, "", -1
    # As long as it gets further: a process that has done its work may still crash while it ends.
    while len(found["cases"]) > before and ended != "exit code 0" and not ended.startswith("out of"):
        before = len(found["cases"])
        ended = watch(words, environment, out / f"{name}.json", deadline, piece.case_seconds)
        found = read_piece(out, name)
        if found["running"] and not ended.startswith("out of"):
            say(f"{name}: {found['running']}: failed: {ended}")
            found["cases"][found["running"]] = {"status": "failed", "why": ended}
            _write_piece(out, name, found | {"running": ""})
    if ended != "exit code 0":
        say(f"{name}: {ended}, not finished: the same command goes on with it")
    return ended == "exit code 0"


def _python(line: str) -> list[str]:
    """A process that runs a line of this module, which it finds as this one did and not in the folder it stands in."""
    return [sys.executable, "-P", "-c", f"import sys; from {__name__} import end_with_parent, facts, work; {line}"]


def watch(words: Sequence[str], environment: Mapping[str, str], file: Path, deadline: float, silence: float) -> str:
    """Run a process to its end, the deadline, or so many seconds in which it has not written the file; says which."""
    # A group of its own, with whatever it starts; by the pipe it sees this process end.
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, **environment}, start_new_session=True)
    began = time.time()
    try:
        while process.poll() is None:
            if time.time() > deadline:
                return f"out of the {PIECE_SECONDS:.0f} s of a piece"
            if time.time() - max(began, file.stat().st_mtime) > silence:
                return f"killed after {silence:.0f} s"
            time.sleep(0.1)
        return f"exit code {process.returncode}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may hang in the driver even then
            process.communicate(timeout=20)


def end_with_parent() -> None:
    """End this process and those that it started when the one that started it has ended."""

    def wait() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def work(pieces: Mapping[str, Piece], name: str, folder: str) -> int:
    """Run the cases of a piece that have no result, in this process; its exit code: 3 leaves some to a fresh one."""
    out, found, piece = Path(folder), read_piece(Path(folder), name), pieces[name]
    small = found["facts"]["small"]
    names = list(piece.cases)[: piece.small if small else None]
    left = [case for case in names if case not in found["cases"]]
    for case in left:
        _write_piece(out, name, found | {"running": case})
        began, result = time.time(), run_case(partial(piece.cases[case], small, out))
        found["cases"][case] = result | {"took, s": time.time() - began, "clock": _nvidia("clocks.sm,temperature.gpu")}
        _write_piece(out, name, found)
        why = f": {result['why']}" if "why" in result else ""
        print(f"{name} {len(found['cases'])}/{len(names)}: {case}: {result['status']}{why}", flush=True)
        if case != left[-1] and (piece.alone or result["status"] == "failed"):
            return 3
    return 0


def run_case(case: Callable[[], Found]) -> Found:
    """What it found, with its `status`: measured, right, wrong; or refused or failed, and `why`."""
    try:
        found = {"status": "measured", **case()}
        jnp.zeros(()).block_until_ready()  # raises where the case went on after an error of the GPU
        return found
    except (Unserved, UserError) as refused:
        return {"status": "refused", "why": str(refused)}
    except Exception as error:  # whatever it is, the others go on
        return {"status": "failed", "why": f"{type(error).__name__}: {compiler_said(str(error) or '?')}"}


# Where it runs.


def _platform(small: bool) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu"} if small else {}


def facts_here(small: bool) -> Found:
    """What `facts` prints, in a process of its own: the one that starts JAX holds the GPU's memory."""
    words = _python(f"facts({small})")
    done = subprocess.run(words, env=os.environ | _platform(small), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"JAX does not start here: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def facts(small: bool) -> None:
    """Print what this runs on, as JSON."""
    device = jax.devices()[0]
    names = re.compile("jaxlib|jax.cuda|nvidia.cudnn|flax|optax|torch ")
    libraries = {text for x in distributions() if names.match(text := f"{x.name} {x.version}")}
    print(json.dumps({
        "date": datetime.date.today().isoformat(), "device": device.device_kind, "platform": device.platform,
        "driver": _nvidia("name,driver_version,clocks.max.sm,power.limit"), "python": platform.python_version(),
        "jax": jax.__version__, "small": small, "libraries": sorted(libraries),
    }))  # fmt: skip


def _nvidia(query: str) -> str:
    """What nvidia-smi says of the first GPU; empty where it cannot."""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.partition("\n")[0].strip()


# What is read.


def report(out: Path, names: Iterable[str], most: int = 60) -> str:
    """Markdown of everything in the folder: where it ran, a table for each piece, and what was refused or failed."""
    found = {name: read_piece(out, name) for name in names}
    where = next((piece["facts"] for piece in found.values() if piece["facts"]), {})
    parts = [", ".join(f"{key}: {_text(value)}" for key, value in where.items())]
    for name, piece in found.items():
        rows = [
            {"case": case, **row, **({"": one["status"]} if one["status"] in ("right", "wrong") else {})}
            for case, one in piece["cases"].items() for row in one.get("rows", [])
        ]  # fmt: skip
        said = [
            f"- {case}: {text}" for case, one in piece["cases"].items()
            for text in [*one.get("notes", []), *([f"{one['status']}: {one['why']}"] if "why" in one else [])]
        ]  # fmt: skip
        parts += [f"### {name}", *_table(rows[:most]), *(["\n".join(said)] if said else [])] if piece["cases"] else []
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[Found]) -> list[str]:
    """In Markdown; of no rows, nothing."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([_text(row.get(key)) for key in head] for row in rows)]
    return ["\n".join("| " + " | ".join(line) + " |" for line in lines)] if head else []


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
