"""The part of a corpus that a source gives for one path: `Tokens`, `Documents`, `Examples`, or a
class of one's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.range_cache import RangedFile
from jaxpar.data.skipped import Skipped

if TYPE_CHECKING:
    import grain


class Part(Protocol):
    """The data at one path. A class of one's own inherits what it leaves out from
    `PartDefaults`.
    """

    @property
    def origin(self) -> str:
        """The path, or another name, for messages."""
        ...

    @property
    def files(self) -> tuple[Path | RangedFile, ...]:
        """The files that the data were read from, if any: a resumed run compares them."""
        ...

    @property
    def skipped(self) -> Skipped | None:
        """The count of the records that are no text, where they are read while a run goes on."""
        ...

    @property
    def size(self) -> int | None:
        """The number of tokens, documents or examples, which a resumed run must find again; None =
        not known.
        """
        ...

    @property
    def sample(self) -> np.ndarray:
        """Ids [N] whose frequencies are those of the text: all of it, or its beginning."""
        ...

    @property
    def amount(self) -> str:
        """The size in words, for the log: `1,000 documents`."""
        ...

    def rows(
        self,
        data: DataConfig,
        seed: int,
        endless: bool,
    ) -> grain.IterDataset[Any]:
        """Return rows [S] of `tokens` and `labels`, in the order that `seed` gives, again and again
        if `endless`. `Tokens` has windows in their place.
        """
        ...

    def split(self, val_fraction: float) -> tuple[Part, Part]:
        """Split off the last `val_fraction` for validation, where the source says `holds_out`."""
        ...

    def identifying(self) -> tuple[np.ndarray, int | None]:
        """Return ids by which data without files are known again, and the number of their tokens,
        documents or examples.
        """
        ...

    def require_enough(self, data: DataConfig, what: str, fix: str) -> None:
        """Refuse a part that has too little for one sequence, or lacks what the config asks for.

        Args:
          what: what the part is for, for the message: `training`.
          fix: what to do, for the message.

        Raises:
          UserError: there is not enough.
        """
        ...


class PartDefaults:
    """The properties and methods that most parts have in common."""

    files: tuple[Path | RangedFile, ...] = ()
    skipped: Skipped | None = None

    def rows(
        self: Part,
        data: DataConfig,
        seed: int,
        endless: bool,
    ) -> grain.IterDataset[Any]:
        """Refuse: this part has no rows."""
        raise UserError(f"{self.origin} has no rows: data.source={data.source} makes none")

    def split(self: Part, val_fraction: float) -> tuple[Part, Part]:
        """Refuse: no part of this is held out."""
        raise UserError(f"no part of {self.origin} is held out: give data.val_path")

    def identifying(self: Part) -> tuple[np.ndarray, int | None]:
        """Return the sample and the size."""
        return self.sample, self.size

    def require_enough(self: Part, data: DataConfig, what: str, fix: str) -> None:
        """Refuse fewer tokens than a sequence and its last label."""
        count = len(self.sample)
        if count < data.seq_len + 1:
            raise UserError(
                f"{self.origin} has {count} {what} tokens, one window takes data.seq_len + 1 = "
                f"{data.seq_len + 1}: {fix}, or try data.seq_len={max(count - 1, 1)}"
            )
