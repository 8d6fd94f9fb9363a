"""`jaxpar bench presets` rehearses every preset on its target with the compilers at hand, and
compares the answers with those of other versions.

So a new jax, libtpu or CUDA plugin is judged: the old version's table stands beside the new one's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from jaxpar.base.config import load_config
from jaxpar.base.errors import Say, UserError, suggest
from jaxpar.base.machine import versions
from jaxpar.bench.measure import BenchRow
from jaxpar.rehearse.of_config import rehearse

PRESET_TARGETS = {
    "bert_base": "h100x8",
    "gemma2_9b": "v5p-16",
    "gemma3_1b": "b200x8",
    "gpt2_124m": "v5e-8",
    "gpt2_355m": "a100x8",
    "gpt2_774m": "h100x8",
    "gpt2_1558m": "h100x8",
    "llama2_7b": "v4-64",
    "llama32_1b": "h100x8",
    "llama3_70b": "v5p-512",
    "llama3_8b": "v5p-64",
    "llama3_8b_1m": "v5p-64",
    "mistral_7b": "h200x16",
    "mixtral_8x7b": "v5p-64",
    "modernbert_base": "h200x8",
    "qwen25_7b": "h100x16",
    "qwen3_8b": "tpu7x-8",
    "shakespeare_char_cpu": "l4x1",
    "tiny": "v5e-8",
    "tiny_bert": "t4x1",
    "tiny_moe": "v6e-8",
}
"""The target of each preset: the one that its file names, or else one of each kind in turn."""


class PresetRow(TypedDict):
    """What one preset takes on its target. Numbers are 0 where the compiler refused it."""

    preset: str
    target: str
    seconds: float
    """The seconds of a step, as the rehearsal plays it."""
    exposed: float
    """The seconds in which compute waits for collectives."""
    bytes: int
    """The memory that a device needs."""
    fits: bool
    compiling: float
    """The seconds that tracing, compiling and reading took."""
    refused: str
    """The reason why there is no step; empty = there is one."""


class PresetTable(TypedDict):
    """The rows, and the packages that made them."""

    versions: dict[str, str]
    rows: list[PresetRow]


def rehearse_presets(names: Sequence[str] = (), say: Say = lambda line: None) -> PresetTable:
    """Rehearse presets, each on its target.

    Args:
      names: the presets; none = all.
      say: is called with a line before each.

    Returns:
      A row for each, also for those that a compiler refuses.

    Raises:
      UserError: there is no preset of a name.
    """
    for name in names:
        if name not in PRESET_TARGETS:
            raise UserError(f"no preset {name!r}{suggest(name, PRESET_TARGETS)}")
    rows = list[PresetRow]()
    chosen = list(names or PRESET_TARGETS)
    for number, name in enumerate(chosen, 1):
        say(f"{number}/{len(chosen)}: {name} on {PRESET_TARGETS[name]}")
        rows.append(_row(name))
    return {"versions": versions(), "rows": rows}


def _row(name: str) -> PresetRow:
    target = PRESET_TARGETS[name]
    began = time.perf_counter()
    row: PresetRow = {
        "preset": name,
        "target": target,
        "seconds": 0.0,
        "exposed": 0.0,
        "bytes": 0,
        "fits": False,
        "compiling": 0.0,
        "refused": "",
    }
    try:
        report = rehearse(load_config(name), target, name)
    except UserError as error:
        row["refused"] = str(error)
    else:
        row["seconds"] = report["time"]["step"]
        row["exposed"] = report["time"]["exposed_communication"]
        row["bytes"] = report["memory"]["total"]
        row["fits"] = report["memory"]["fits"]
    row["compiling"] = time.perf_counter() - began
    return row


def read_presets(file: Path) -> PresetTable:
    """Read the table that an earlier `jaxpar bench presets --json` wrote.

    Raises:
      UserError: the file cannot be read, or is no such table.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = {row["preset"]: row for row in found["rows"]}
        if all(PresetRow.__required_keys__ <= set(row) for row in rows.values()):
            return {"versions": dict(found["versions"]), "rows": list(rows.values())}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{file} is no table of jaxpar bench presets --json")


def preset_rows(now: PresetTable, before: PresetTable | None = None) -> list[BenchRow]:
    """Make the lines of a table that a person reads.

    Args:
      now: the table.
      before: an earlier one, whose figures stand beside those of `now`.

    Returns:
      A line a preset: milliseconds of a step and of what it waits for collectives, GiB of a device,
      and the ratio of the two steps.
    """
    earlier = {row["preset"]: row for row in before["rows"]} if before else {}
    lines = list[BenchRow]()
    for row in now["rows"]:
        line: BenchRow = {"preset": row["preset"], "target": row["target"]}
        old = earlier.get(row["preset"])
        if before:
            line |= {f"{key}, before": value for key, value in _figures(old).items()}
        line |= _figures(row)
        if before:
            line["ratio"] = _ratio(row, old)
        line["compiling, s"] = round(row["compiling"])
        line["refused"] = row["refused"][:120]
        lines.append(line)
    return lines


def _figures(row: PresetRow | None) -> BenchRow:
    if row is None or row["refused"]:
        return {"ms": None, "exposed, ms": None, "GiB": None}
    return {
        "ms": _digits(1e3 * row["seconds"]),
        "exposed, ms": _digits(1e3 * row["exposed"]),
        "GiB": _digits(row["bytes"] / 2**30),
    }


def _ratio(now: PresetRow, before: PresetRow | None) -> float | None:
    if before is None or not (now["seconds"] and before["seconds"]):
        return None
    return round(now["seconds"] / before["seconds"], 3)


def _digits(number: float) -> float:
    """Round a number to three digits."""
    return float(f"{number:.3g}")
