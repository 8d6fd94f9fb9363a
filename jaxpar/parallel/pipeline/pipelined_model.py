"""What a pipeline needs of a model, which `models.Model` has, and three functions of one's own too
(`model_functions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree
from jaxpar.parallel.cross_entropy import LossSums, LossWeights, SoftTargets
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.experts import RouterSums

Params = dict[str, PyTree]


class PipelinedModel(Protocol):
    """The parts of a model, each a function of its parameters. Of its config a pipeline reads
    `layers`, `experts`, `scan_layers`, `kinds` and `query_layer`.
    """

    @property
    def axes(self) -> PyTree: ...
    @property
    def config(self) -> Any: ...
    @property
    def numbers_layers(self) -> bool: ...
    def trained(self, tree: PyTree) -> PyTree: ...
    def embed(
        self,
        params: Params,
        tokens_BS: Array,
        positions_BS: Array,
        plan: Plan,
        key: Any = None,
        types_BS: Array | None = None,
    ) -> Array: ...
    def layer(
        self,
        layer: PyTree,
        xs: tuple[Array, ...],
        places: Sequence[Places],
        plan: Plan,
        info: LayerInfo,
    ) -> tuple[tuple[Array, ...], RouterSums | None]: ...
    def query(
        self, params: Params, x_BSD: Array, places: Places, plan: Plan, key: Any
    ) -> Array: ...
    def score(
        self,
        params: Params,
        x_BSD: Array,
        labels_BS: Array,
        plan: Plan,
        weights: LossWeights,
        soft: SoftTargets | None,
    ) -> LossSums: ...
