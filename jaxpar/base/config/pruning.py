"""When, how far and by what criterion a training sets weights to zero: the table `[pruning]`.

What it does to a step is in `jaxpar.train.optimizer.pruning`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.ranges import MOST_STEPS, Range


@dataclass(frozen=True)
class Pruning:
    """Weights that are set to zero while they are trained, and stay there until a method lets them
    grow again. Which ones is state beside the optimizer's: see docs/sparsity.md."""

    method: Literal["none", "magnitude", "movement", "rigl"] = "none"
    """magnitude: more and more of the smallest (Zhu & Gupta 2017, arXiv:1710.01878). movement: more
    and more of those that training moves towards zero (Sanh et al. 2020, arXiv:2005.07683). rigl:
    as many from the first step on, of which some are dropped and others grow (Evci et al. 2019,
    arXiv:1911.11134)."""
    sparsity: Annotated[float, Range(0.0, 0.9999)] = 0.75
    """The share of the entries of all pruned matrices that is zero in the end."""
    distribution: Literal["uniform", "erdos_renyi"] = "uniform"
    """How much of each matrix: all alike, or those with a small side less, as Erdos-Renyi graphs
    (arXiv:1911.11134, section 3): the share that is kept goes with (rows + columns) / (rows x
    columns)."""
    sparsity_by_depth: tuple[Annotated[float, Range(0.0, 0.9999)], ...] = ()
    """In place of `sparsity`: shares at even distances from the first layer to the last, with
    straight lines between them; as many as there are layers are one of each."""
    targets: tuple[str, ...] = ()
    """The matrices of every block that are pruned: some of q, k, v, out, gate, up, down; none named
    = all that there are.
    """
    begin: Annotated[int, Range(0, MOST_STEPS)] = 0
    """The step after which the first weights are set to zero."""
    end: Annotated[int, Range(0, MOST_STEPS)] = 0
    """The step after which nothing is chosen any more; 0 = three quarters of `train.steps`."""
    every: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Steps from one choice to the next."""
    regrow: Annotated[float, Range(0.0, 1.0)] = 0.3
    """Of rigl: the share of the weights that is dropped and grown at first; it falls to zero as a
    cosine.
    """

    def names(self, matrices: tuple[str, ...] = MATRICES) -> tuple[str, ...]:
        """The pruned ones of some matrices, in the order of `MATRICES`."""
        if self.method == "none":
            return ()
        wanted = set(self.targets or MATRICES).intersection(matrices)
        return tuple(name for name in MATRICES if name in wanted)

    def last(self, steps: int) -> int:
        """The step after which nothing is chosen any more, of a training of so many steps."""
        return self.end or 3 * steps // 4

    def sparsity_at(self, layer: int, layers: int) -> float:
        """The share of a layer's entries that is zero in the end.

        Args:
          layer: its number, from 0.
          layers: how many there are.
        """
        given = self.sparsity_by_depth
        if not given:
            return self.sparsity
        place = layer / max(layers - 1, 1) * (len(given) - 1)
        before = math.floor(place)
        after = min(before + 1, len(given) - 1)
        return given[before] + (place - before) * (given[after] - given[before])

    def kept(self, sizes: dict[str, tuple[int, int]], sparsity: float) -> dict[str, float]:
        """The share of each matrix of a layer that is not zero in the end.

        Args:
          sizes: rows and columns of each pruned matrix of a layer, by its name.
          sparsity: the share of the layer's entries that is zero.

        Returns:
          The shares by the same names. Where Erdos-Renyi would keep more than all of a matrix, that
          is kept whole, and the others share what is left.
        """
        density = 1 - sparsity
        if self.distribution == "uniform":
            return dict.fromkeys(sizes, density)
        left = density * sum(math.prod(size) for size in sizes.values())
        found = dict[str, float]()
        while len(found) < len(sizes):
            open_sizes = {name: size for name, size in sizes.items() if name not in found}
            scale = left / sum(sum(size) for size in open_sizes.values())
            shares = {
                name: scale * sum(size) / math.prod(size) for name, size in open_sizes.items()
            }
            whole = [name for name, share in shares.items() if share >= 1]
            if not whole:
                return found | shares
            found |= dict.fromkeys(whole, 1.0)
            left -= sum(math.prod(sizes[name]) for name in whole)
        return found

    def contradictions(self, steps: int, layers: int) -> Iterator[str]:
        """Say what is wrong with the values for a training of so many steps and a model of so many
        layers, a message each."""
        if self.method == "none":
            return
        if len(self.sparsity_by_depth) > layers:
            yield (
                f"pruning.sparsity_by_depth has {len(self.sparsity_by_depth)} shares, and "
                f"model.layers={layers}: give a share for each layer, or fewer"
            )
        if self.begin >= self.last(steps):
            yield (
                f"pruning.begin={self.begin} is not before the last choice, after step "
                f"{self.last(steps)}: set pruning.end above it, or more train.steps"
            )
        unknown = [name for name in self.targets if name not in MATRICES]
        if unknown:
            yield (
                f"pruning.targets: no matrix {unknown[0]!r}: they are some of {', '.join(MATRICES)}"
            )
