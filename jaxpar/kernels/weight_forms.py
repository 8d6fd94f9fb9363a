"""The forms in which a stored matrix multiplies: which of its entries count, by their values or by
their places.

Shapes: I and O the dims in and the dims out of a matmul, each merged into one; G groups of M
blocks, N columns of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


class WeightForm(ABC):
    """The form of a stored matrix [..., I, O] in which it multiplies.

    A form is static and hashable, such as a frozen dataclass: two equal forms make the same
    program. Entries are read in `unit`s, and a unit never depends on the entries of another, so
    that each device makes of its own part what one device makes of the whole.
    """

    @property
    @abstractmethod
    def unit(self) -> tuple[int, int]:
        """The rows and columns that are read together; a device has a whole number of units."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the form in messages."""

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of the blocks that are zero as a whole, which kernels may skip; 1
        and 1 = entries are zero one by one, or no entry is.
        """
        return 1, 1

    def known_blocks(self, rows: int, columns: int) -> Bool[np.ndarray, "M N"] | None:
        """Return which blocks of a matrix of whole units multiply, where this is known without the
        values; None = it is not known.
        """
        return None

    @abstractmethod
    def read(self, weight_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return the matrix that multiplies, of the same shape and dtype."""

    def pull(self, gradient_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Turn the gradient of the matrix that multiplies into the gradient of the stored matrix:
        the same, straight through (Bengio et al. 2013, arXiv:1308.3432), unless a form says
        otherwise.
        """
        return gradient_IO


@dataclass(frozen=True)
class NOfM(WeightForm):
    """N:M sparsity (Mishra et al. 2021, arXiv:2104.08378): of each M neighbours along the dim that
    is summed over, the N of the largest magnitude multiply. Of equals the first is larger.

    Neighbours are entries, or blocks of `rows` by `columns` entries, which are compared by their
    sums of squares.
    """

    n: int
    m: int
    rows: int = 1
    columns: int = 1

    @property
    def unit(self) -> tuple[int, int]:
        """A group: M blocks above each other."""
        return self.m * self.rows, self.columns

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of a block."""
        return self.rows, self.columns

    @property
    def name(self) -> str:
        """The name of the form in messages: `2:4`, or `1:4 of blocks 16 x 16`."""
        return f"{self.n}:{self.m}{_of_blocks(self.block)}"

    def mask(self, weight_IO: Float[Array, "... I O"]) -> Bool[Array, "... I O"]:
        """Find the entries that multiply, which follow from the values alone.

        Args:
          weight_IO: matrices that have whole units.

        Returns:
          A boolean for each entry, True in N blocks of every group.
        """
        sizes_MN = self._sizes(weight_IO)
        *outer, rows, columns = sizes_MN.shape
        sizes_GMN = sizes_MN.reshape(*outer, rows // self.m, self.m, columns)
        own = sizes_GMN[..., :, None, :]
        other = sizes_GMN[..., None, :, :]
        place = jnp.arange(self.m)
        before = (place[None, :] < place[:, None])[..., None]
        # by comparisons, which need no sort: they fuse with what reads the mask
        beaten_by = jnp.sum((other > own) | ((other == own) & before), axis=-2, dtype=jnp.int32)
        return _entries((beaten_by < self.n).reshape(sizes_MN.shape), self.block)

    def _sizes(self, weight_IO: Array) -> Array:
        """Compute the number by which blocks are compared, for each block."""
        if self.block == (1, 1):
            return jnp.abs(weight_IO)
        *outer, rows, columns = weight_IO.shape
        blocks = weight_IO.reshape(
            *outer, rows // self.rows, self.rows, columns // self.columns, self.columns
        )
        return jnp.sum(jnp.square(blocks.astype(jnp.float32)), axis=(-3, -1))

    def read(self, weight_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return the matrices with zeros for the entries that do not multiply."""
        return jnp.where(self.mask(weight_IO), weight_IO, 0)


@dataclass(frozen=True)
class CyclicBlocks(WeightForm):
    """A fixed pattern of places: of the blocks of `rows` by `columns` entries, the block in row i
    and column j multiplies where (i - j) modulo M is below N. Entries that do not multiply are not
    trained.

    Every row and every column of blocks keeps N of M. Fixed patterns of blocks are compared by Dao
    et al. 2021 (arXiv:2112.00029).
    """

    n: int
    m: int
    rows: int
    columns: int

    @property
    def unit(self) -> tuple[int, int]:
        """A period of the pattern, so that every device has it from its beginning."""
        return self.m * self.rows, self.m * self.columns

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of a block."""
        return self.rows, self.columns

    @property
    def name(self) -> str:
        """The name of the form in messages, such as `cyclic 1:4 of blocks 16 x 16`."""
        return f"cyclic {self.n}:{self.m}{_of_blocks(self.block)}"

    def mask(self, weight_IO: Float[Array, "... I O"]) -> Bool[Array, "I O"]:
        """Find the entries that multiply in matrices of this shape."""
        return _entries(jnp.asarray(self.known_blocks(*weight_IO.shape[-2:])), self.block)

    def known_blocks(self, rows: int, columns: int) -> Bool[np.ndarray, "M N"]:
        """Return which blocks of a matrix of so many rows and columns multiply."""
        i = np.arange(rows // self.rows)[:, None]
        j = np.arange(columns // self.columns)
        return (i - j) % self.m < self.n

    def read(self, weight_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return the matrices with zeros for the blocks that do not multiply."""
        return jnp.where(self.mask(weight_IO), weight_IO, 0)

    def pull(self, gradient_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return the gradient with zeros for the blocks that do not multiply."""
        return jnp.where(self.mask(gradient_IO), gradient_IO, 0)


def _of_blocks(block: tuple[int, int]) -> str:
    if block == (1, 1):
        return ""
    return f" of blocks {block[0]} x {block[1]}"


def _entries(map_MN: Bool[Array, "... M N"], block: tuple[int, int]) -> Bool[Array, "... I O"]:
    """Spread a map of blocks over their entries."""
    rows, columns = block
    return jnp.repeat(jnp.repeat(map_MN, rows, axis=-2), columns, axis=-1)
