"""How often a branch of a program is taken, written into the program by who knows it.

A compiled `lax.cond` has its branches and no word on how often each runs. A scope around it says so
(`taken`), which the compiler keeps as a name, and `taken_share` reads it back.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jaxpar.base.errors import UserError

TAKEN = re.compile(r"taken_(\d+)_of_(\d+)")
_LAST = re.compile(TAKEN.pattern + r"\)*(?:/cond)?$")


def taken(times: int, of: int) -> Any:
    """Say of the `lax.cond` inside this scope how often its costlier branch is taken, for the
    rehearsal of a program that has it in a loop. The program computes the same without it.

        with rehearse.taken(2, 8):  # in 2 of the 8 trips of the loop around it
            x = jax.lax.cond(is_due, evaluate, lambda x: x, x)

    Raises:
      UserError: it is not taken that often: `times` is negative or more than `of`.
    """
    if not 0 <= times <= of or not of:
        raise UserError(f"a branch is taken {times} times of {of}: from 0 to all of 1 or more")
    return jax.named_scope(f"taken_{times}_of_{of}")


def taken_share(path: str) -> float | None:
    """Read how often the conditional at a path of scopes takes its costlier branch, as a share;
    None = nobody has said.
    """
    said = _LAST.search(path)
    if said is None or not int(said[2]):
        return None
    return int(said[1]) / int(said[2])
