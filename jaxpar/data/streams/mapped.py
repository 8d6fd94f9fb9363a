"""A check of files that are mapped into memory, before each read: the system kills a process that
reads behind the end of a file that was cut, without a word.
"""

from __future__ import annotations

import mmap

import numpy as np

from jaxpar.base.errors import UserError


def require_uncut(array: np.ndarray, origin: str) -> None:
    """Require that the file of a memory-mapped array is as long as it was when it was mapped.

    One call of the system, on the file itself, whatever has its name by now. What is cut in the
    instant between this and the reading is not seen.

    Args:
      array: any array, or a part of one; an array that is not mapped always passes.
      origin: the name of the file in messages.

    Raises:
      UserError: the file is shorter.
    """
    mapped = array.base
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    # numpy maps from the start of a page, for whose begin the file is long enough
    if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):
        raise UserError(
            f"{origin} was cut while it was read: it had {len(mapped):,} bytes and has "
            f"{mapped.size():,}: bring it back, and start again"
        )
