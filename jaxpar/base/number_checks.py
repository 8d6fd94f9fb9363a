"""Numbers that a caller gives a function, checked before anything is traced: what is wrong is a
sentence.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxpar.base.errors import UserError, short


def require_whole(
    what: str, name: str, value: Any, least: int | None = None, most: int | None = None
) -> None:
    """Refuse an argument that is not a whole number.

    Args:
      what: what takes the argument, for the message.
      value: what was given.
      least: the least that it may be; None = any number.
      most: the most that it may be; None = any number.

    Raises:
      UserError: the value is no whole number, or out of its range.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if whole and (least is None or value >= least) and (most is None or value <= most):
        return
    wanted = "a whole number"
    if least is not None and most is not None:
        wanted += f" from {least} to {most}"
    elif least is not None:
        wanted += f" of at least {least}"
    elif most is not None:
        wanted += f" of at most {most}"
    raise UserError(f"{what} takes {name} as {wanted}, and was given {name}={short(value)}")


def require_number(
    what: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Refuse an argument that is not a finite number which is known while tracing.

    Args:
      what: what takes the argument, for the message.
      value: what was given.
      least: the least that it may be.
      above: what it must be larger than.
      below: what it must be less than.
      most: the most that it may be.

    Raises:
      UserError: the value is no number, is not finite, or is out of its range.
    """
    try:
        if isinstance(value, str | bytes | bool):
            number = math.nan
        else:
            number = float(value)
    except (TypeError, ValueError, OverflowError):  # a list, a traced number, one past any float
        number = math.nan
    too_small = (least is not None and number < least) or (above is not None and number <= above)
    too_large = (below is not None and number >= below) or (most is not None and number > most)
    if math.isfinite(number) and not too_small and not too_large:
        return
    if least is None:
        bounds = []
    else:
        bounds = [f"of at least {least:g}"]
    bounds += [] if above is None else [f"above {above:g}"]
    bounds += [] if below is None else [f"below {below:g}"]
    bounds += [] if most is None else [f"at most {most:g}"]
    wanted = " ".join(["a finite number", " and ".join(bounds)]).rstrip()
    raise UserError(f"{what} takes {name} as {wanted}, and was given {name}={short(value)}")
