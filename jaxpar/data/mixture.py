"""Several parts of a corpus of one kind, read as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.data.part import Part
from jaxpar.data.skipped import Skipped
from jaxpar.data.streams.tokens import Tokens

SAMPLED = 2**24
"""The most tokens of a sample of all parts together: a part may be a file that no memory holds."""


@dataclass(frozen=True)
class Mixture:
    """Parts of one kind, mixed in each batch so that each has its share of the sequences.

    Raises:
      UserError: some parts are `Tokens`, of which windows are cut, and others give whole rows.
    """

    parts: tuple[Part, ...]
    weights: tuple[float, ...]
    """The shares of the parts, which add up to 1."""

    def __post_init__(self) -> None:
        windowed = [isinstance(part, Tokens) for part in self.parts]
        if any(windowed) and not all(windowed):
            kinds = ", ".join(f"{part.origin} as {type(part).__name__}" for part in self.parts)
            raise UserError(
                f"a mixture has Tokens in all of its parts or in none, and data.source gives "
                f"{kinds}: give all of them as one kind"
            )

    @property
    def origin(self) -> str:
        return " + ".join(
            f"{part.origin} {weight:.3g}"
            for part, weight in zip(self.parts, self.weights, strict=True)
        )

    @property
    def size(self) -> int | None:
        sizes = [part.size for part in self.parts if part.size is not None]
        if len(sizes) == len(self.parts):
            return sum(sizes)
        return None

    @property
    def sample(self) -> np.ndarray:
        samples = [part.sample for part in self.parts]
        fit = min(
            SAMPLED,
            *(len(sample) / weight for sample, weight in zip(samples, self.weights, strict=True)),
        )
        return np.concatenate(
            [s[: max(int(fit * w), 1)] for s, w in zip(samples, self.weights, strict=True)]
        )

    @property
    def amount(self) -> str:
        return " + ".join(part.amount for part in self.parts)


def skipped_records(stream: Part | Mixture) -> list[Skipped]:
    """List the counts of records that are no text, for parts that are read while a run goes on."""
    if isinstance(stream, Mixture):
        parts = stream.parts
    else:
        parts = (stream,)
    counts = [part.skipped for part in parts]
    return [count for count in counts if count is not None]


Stream = Part | Mixture
"""The data that a run reads. Each has an `origin` and an `amount` for messages, a `size` that a
resumed run must find again (None = not known), and a `sample` of ids for their frequencies."""
