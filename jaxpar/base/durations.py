"""Durations as settings write them, `11h45m`, and how long this process has run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from jaxpar.base.errors import UserError

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_FORM = re.compile(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?")
LONGEST = 365 * 86_400
"""Seconds of the longest duration that a setting takes, a year."""


def seconds_of(key: str, text: str) -> int:
    """Read a duration.

    Args:
      key: the setting that it is of, for messages.
      text: numbers of days, hours, minutes and seconds in this order, such as `1d6h`, `11h45m` or
        `90s`.

    Returns:
      Its seconds.

    Raises:
      UserError: it is written otherwise, nothing, or longer than a year.
    """
    found = _FORM.fullmatch(text)
    parts = [part for part in (found.groups() if found else ()) if part]
    if not parts:
        raise UserError(f"{key}={text} is no duration: try {key}=11h45m, 90m or 1d6h")
    seconds = sum(int(part[:-1]) * _SECONDS[part[-1]] for part in parts)
    if not 1 <= seconds <= LONGEST:
        raise UserError(f"{key}={text} is not between a second and a year: try {key}=11h45m")
    return seconds


def process_began() -> float:
    """When this process began, in the seconds of `time.monotonic`.

    Where the system does not say (it is not Linux), it is the time of the call.
    """
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        # field 22 of proc(5), in ticks since the machine started
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)
