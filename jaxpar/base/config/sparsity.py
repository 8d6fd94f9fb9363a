"""Which matrices of a model are sparse, and in what form: the table `[model.sparsity]`.

What a form keeps is in `jaxpar.kernels.weight_forms`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from jaxpar.base.field_marks import Called, Idle, Rule, WholeConfig
from jaxpar.base.ranges import Range

MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrices of a block, by their names."""
_MOST = 64
"""The largest M of a form N:M, since all pairs of a group are compared."""
_FORM = re.compile(r"([1-9]\d?):([1-9]\d?)")
_DENSE = Idle(
    lambda c: not c.model.sparsity.form,
    "model.sparsity.form is empty, all matrices are dense",
    "add --model.sparsity.form 2:4",
)


def _n_of_m(config: WholeConfig) -> str:
    sparsity = config.model.sparsity
    kept, of = sparsity.counts
    if not sparsity.form or kept < of <= _MOST:
        return ""
    return (
        f"model.sparsity.form={sparsity.form!r} is not N:M with N below M and M up to {_MOST}: "
        'try "2:4"'
    )


def _two_sides(config: WholeConfig) -> str:
    block = config.model.sparsity.block
    if len(block) in (0, 2):
        return ""
    return (
        f"model.sparsity.block={list(block)} is not the rows and the columns of a block: try "
        "[128, 128]"
    )


def _blocks_of_pattern(config: WholeConfig) -> str:
    sparsity = config.model.sparsity
    if sparsity.pattern != "cyclic" or sparsity.block:
        return ""
    return (
        "model.sparsity.pattern=cyclic is a pattern of blocks: set model.sparsity.block, "
        "to [128, 128] for one"
    )


def _sparse_matrices(config: WholeConfig) -> str:
    return unknown_matrix("model.sparsity.targets", config.model.sparsity.targets)


def unknown_matrix(key: str, names: tuple[str, ...]) -> str:
    """Say which of some matrices that a setting names a block has not; empty = it has all.

    Args:
      key: the dotted key of the setting.
      names: its value.
    """
    unknown = [name for name in names if name not in MATRICES]
    if not unknown:
        return ""
    return f"{key}: no matrix {unknown[0]!r}: they are some of {', '.join(MATRICES)}"


_NOT_TRAINED = Idle(
    lambda c: not c.model.sparsity.trains_all,
    "what model.sparsity.pattern=cyclic leaves out is not trained",
    "leave the decay out",
)


@dataclass(frozen=True)
class Sparsity:
    """N:M sparsity: of each M neighbours along the dim that a matmul sums over, N multiply, and the
    others count as zero. Neighbours are entries or whole blocks: see docs/sparsity.md."""

    form: Annotated[
        str, Rule(_n_of_m), Called("sparsity nm_sparsity sparse_24 sparsity_pattern mask_structure")
    ] = ""
    """N:M, such as 2:4 or 1:4; empty = the matrices are dense."""
    targets: Annotated[tuple[str, ...], _DENSE, Rule(_sparse_matrices)] = ()
    """The matrices of every block that are sparse: some of q, k, v, out, gate, up, down; none named
    = all that there are.
    """
    block: Annotated[tuple[int, ...], Range(1, 65_536), _DENSE, Rule(_two_sides)] = ()
    """Rows and columns of the blocks that are kept or left out as a whole; empty = single entries.
    """
    pattern: Annotated[Literal["largest", "cyclic"], _DENSE, Rule(_blocks_of_pattern)] = "largest"
    """Which of the neighbours multiply: the largest, as they change in training, or cyclic, a fixed
    pattern of blocks, of which the others are not trained."""
    decay: Annotated[
        float,
        Range(0.0, 1.0),
        _DENSE,
        _NOT_TRAINED,
        Called("srste_decay sr_ste_lambda srste"),
    ] = 2e-4
    """SR-STE (arXiv:2102.04010, equation 8): so many times an entry that does not multiply is added
    to its gradient, once a step; 0 = the gradient passes straight through."""

    @property
    def counts(self) -> tuple[int, int]:
        """N and M; 1 and 1 where the matrices are dense."""
        found = _FORM.fullmatch(self.form)
        if found is None:
            return 1, 1
        return int(found[1]), int(found[2])

    @property
    def density(self) -> float:
        """The share of the entries of a sparse matrix that multiply."""
        kept, of = self.counts
        return kept / of

    @property
    def block_size(self) -> tuple[int, int]:
        """The rows and columns of a block; 1 and 1 where single entries are neighbours."""
        if len(self.block) != 2:
            return 1, 1
        return self.block[0], self.block[1]

    @property
    def multiple(self) -> int:
        """What a device's part of every dim of a sparse matrix is a multiple of."""
        _, of = self.counts
        rows, columns = self.block_size
        if self.pattern == "cyclic":
            columns *= of
        return math.lcm(of * rows, columns)

    @property
    def trains_all(self) -> bool:
        """Whether entries that do not multiply are trained."""
        return self.pattern == "largest"

    def names(self, matrices: tuple[str, ...] = MATRICES) -> tuple[str, ...]:
        """The sparse ones of some matrices, in the order of `MATRICES`."""
        if not self.form:
            return ()
        wanted = set(self.targets or MATRICES).intersection(matrices)
        return tuple(name for name in MATRICES if name in wanted)

    def keeps_as(self, other: Sparsity) -> bool:
        """Whether the same entries of the same matrices multiply as with other settings."""
        return replace(self, targets=self.names(), decay=0) == replace(
            other, targets=other.names(), decay=0
        )
