"""In what form a stored matrix multiplies: which of its entries count, by their values.

Shapes: I and O the dims that a matmul sums over and makes, each taken together; G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class WeightForm(Protocol):
    """What is made of a stored matrix [..., I, O] before it multiplies.

    It is static: two equal ones make the same program. Entries are read in `unit`s, and one never
    depends on the entries of another, so that each device makes of its own part what one device
    makes of the whole.
    """

    @property
    def unit(self) -> tuple[int, int]:
        """The rows and columns that are read together, of which a device has whole ones."""
        ...

    @property
    def name(self) -> str:
        """What a message calls it."""
        ...

    def read(self, weight_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return what multiplies. The gradient of the stored matrix is that of what is returned."""
        ...


@dataclass(frozen=True)
class NOfM:
    """N:M sparsity (Mishra et al. 2021, arXiv:2104.08378): of each M neighbours along the dim that
    is summed over, the N of the largest magnitude multiply. Of equals the first is larger.
    """

    n: int
    m: int

    @property
    def unit(self) -> tuple[int, int]:
        """A group: M rows of a column."""
        return self.m, 1

    @property
    def name(self) -> str:
        """Such as `2:4`."""
        return f"{self.n}:{self.m}"

    def mask(self, weight_IO: Float[Array, "... I O"]) -> Bool[Array, "... I O"]:
        """Tell which entries multiply; they follow from the values alone.

        Args:
          weight_IO: matrices, whose I is a multiple of M.

        Returns:
          A boolean for each entry, N of every group True.
        """
        *outer, rows, columns = weight_IO.shape
        sizes_GMO = jnp.abs(weight_IO).reshape(*outer, rows // self.m, self.m, columns)
        own = sizes_GMO[..., :, None, :]
        other = sizes_GMO[..., None, :, :]
        place = jnp.arange(self.m)
        before = (place[None, :] < place[:, None])[..., None]
        # by comparisons, which need no sort: they fuse with what reads the mask
        beaten_by = jnp.sum((other > own) | ((other == own) & before), axis=-2, dtype=jnp.int32)
        return (beaten_by < self.n).reshape(weight_IO.shape)

    def read(self, weight_IO: Float[Array, "... I O"]) -> Float[Array, "... I O"]:
        """Return the matrices with zeros for the entries that do not multiply."""
        return jnp.where(self.mask(weight_IO), weight_IO, 0)
