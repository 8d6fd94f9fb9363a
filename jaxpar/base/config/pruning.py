"""When, how far and by what criterion a training sets weights to zero: the table `[pruning]`.

What it does to a step is in `jaxpar.train.optimizer.pruning`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.config.sparsity import MATRICES, unknown_matrix
from jaxpar.base.field_marks import Called, Idle, Rule, WholeConfig
from jaxpar.base.ranges import MOST_STEPS, Range

_NOT_PRUNED = Idle(
    lambda c: c.pruning.method == "none",
    "pruning.method is none",
    "add --pruning.method magnitude",
)


def _shares_of_layers(config: WholeConfig) -> str:
    shares = len(config.pruning.sparsity_by_depth)
    layers = config.model.layers
    if config.pruning.method == "none" or shares <= layers:
        return ""
    return (
        f"pruning.sparsity_by_depth has {shares} shares, and model.layers={layers}: give a share "
        "for each layer, or fewer"
    )


def _begins_before_end(config: WholeConfig) -> str:
    pruning = config.pruning
    last = pruning.last(config.train.steps)
    if pruning.method == "none" or pruning.begin < last:
        return ""
    return (
        f"pruning.begin={pruning.begin} is not before the last choice, after step {last}: set "
        "pruning.end above it, or more train.steps"
    )


def _pruned_matrices(config: WholeConfig) -> str:
    if config.pruning.method == "none":
        return ""
    return unknown_matrix("pruning.targets", config.pruning.targets)


def _beside_sparsity(config: WholeConfig) -> str:
    method = config.pruning.method
    form = config.model.sparsity.form
    if method == "none" or not form:
        return ""
    return (
        f"pruning.method={method} with model.sparsity.form={form}: both choose which entries "
        "count: use one of them"
    )


def _beside_lora(config: WholeConfig) -> str:
    method = config.pruning.method
    rank = config.model.lora.rank
    if method == "none" or rank <= 0:
        return ""
    return (
        f"pruning.method={method} with model.lora.rank={rank}: what would be pruned is frozen "
        "beside LoRA: use one of them"
    )


def _on_device(config: WholeConfig) -> str:
    method = config.pruning.method
    memory = config.memory
    streamed = [name for name in ("optimizer", "parameters") if getattr(memory, name) == "offload"]
    if method == "none" or not streamed:
        return ""
    return (
        f"pruning.method={method} with memory.{streamed[0]}=offload: the choice looks at all "
        f"layers at once, and they pass the device one by one: try memory.{streamed[0]}=device"
    )


_BY_DEPTH = Idle(
    lambda c: bool(c.pruning.sparsity_by_depth),
    "pruning.sparsity_by_depth is given and takes its place",
    "give only one of the two",
)
_NOTHING_GROWS = Idle(
    lambda c: c.pruning.method not in ("none", "rigl"),
    "pruning.method is not rigl, which alone drops weights and grows others",
    "add --pruning.method rigl",
)


@dataclass(frozen=True)
class Pruning:
    """Weights that are set to zero while they are trained, and stay there until a method lets them
    grow again. Which ones is state beside the optimizer's: see docs/sparsity.md."""

    method: Annotated[
        Literal["none", "magnitude", "movement", "rigl"],
        Rule(_beside_sparsity, training=True),
        Rule(_beside_lora, training=True),
        Rule(_on_device, training=True),
        Called("prune pruner pruning_method sparse_training"),
    ] = "none"
    """magnitude: more and more of the smallest (Zhu & Gupta 2017, arXiv:1710.01878). movement: more
    and more of those that training moves towards zero (Sanh et al. 2020, arXiv:2005.07683). rigl:
    as many from the first step on, of which some are dropped and others grow (Evci et al. 2019,
    arXiv:1911.11134)."""
    sparsity: Annotated[
        float,
        Range(0.0, 0.9999),
        _NOT_PRUNED,
        _BY_DEPTH,
        Called("target_sparsity final_sparsity prune_ratio sparsity_ratio"),
    ] = 0.75
    """The share of the entries of all pruned matrices that is zero in the end."""
    distribution: Annotated[Literal["uniform", "erdos_renyi"], _NOT_PRUNED] = "uniform"
    """How much of each matrix: all alike, or those with a small side less, as Erdos-Renyi graphs
    (arXiv:1911.11134, section 3): the share that is kept goes with (rows + columns) / (rows x
    columns)."""
    sparsity_by_depth: Annotated[
        tuple[Annotated[float, Range(0.0, 0.9999)], ...],
        _NOT_PRUNED,
        Rule(_shares_of_layers, training=True),
    ] = ()
    """In place of `sparsity`: shares at even distances from the first layer to the last, with
    straight lines between them; as many as there are layers are one of each."""
    targets: Annotated[tuple[str, ...], _NOT_PRUNED, Rule(_pruned_matrices, training=True)] = ()
    """The matrices of every block that are pruned: some of q, k, v, out, gate, up, down; none named
    = all that there are.
    """
    begin: Annotated[
        int, Range(0, MOST_STEPS), _NOT_PRUNED, Rule(_begins_before_end, training=True)
    ] = 0
    """The step after which the first weights are set to zero."""
    end: Annotated[int, Range(0, MOST_STEPS), _NOT_PRUNED] = 0
    """The step after which nothing is chosen any more; 0 = three quarters of `train.steps`."""
    every: Annotated[int, Range(1, MOST_STEPS), _NOT_PRUNED] = 100
    """Steps from one choice to the next."""
    regrow: Annotated[
        float,
        Range(0.0, 1.0),
        _NOT_PRUNED,
        _NOTHING_GROWS,
    ] = 0.3
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
