"""A compiler's refusal of a step is told in one line: by how much it does not fit, or what the compiler says."""

from __future__ import annotations

import re

from jaxpar.base.console import bytes_text
from jaxpar.base.jax_compat import compiler_message

_SIZE = r"([\d.]+)([KMGT]?)"
# XLA:TPU has one message for when it sees before scheduling that nothing will help (its "temporaries" count the
# arguments too), and another for when it has tried.
_MESSAGES = (
    rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needs_and_has(message: str) -> tuple[int, int] | None:
    """The bytes that a step takes and those that a device has, by a compiler's refusal; None if it names none."""
    for pattern in _MESSAGES:
        if match := re.search(pattern, message):
            return round(float(match[1]) * _UNITS[match[2]]), round(float(match[3]) * _UNITS[match[4]])
    return None


def refusal(message: str, target: str, advice: str = "") -> str:
    """Tell the user of a compiler's refusal in one line; `advice` is what would help a step that does not fit."""
    found = needs_and_has(message)
    if found is None:
        return f"the compiler for {target} refuses this step: {compiler_message(message)}"
    needs, has = found
    over = f"it needs {bytes_text(needs)} a device, {bytes_text(needs - has)} more than its {bytes_text(has)}"
    return f"this step does not fit {target}: {over}" + (f"; {advice}" if advice else "")
