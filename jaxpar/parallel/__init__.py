"""What a model calls for a matmul, a lookup, attention, experts and a loss, and what those are made
of.

Each op takes a `jaxpar.Layout` and keyword options, is trainable, and works inside any jitted
function. `Ops` binds them to a plan. Behind them are collectives inside `shard_map` (`collectives`,
`ring_matmul`), attention over a split sequence (`context`, `token_order`), recomputation (`remat`),
host memory and the pipeline.
"""

from jaxpar.parallel._attention import attention, choose_attention, fit_heads
from jaxpar.parallel._dropout import dropout
from jaxpar.parallel._lookup import lookup
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets, linear_cross_entropy
from jaxpar.parallel.cross_entropy.top_k import TopK, linear_top_k
from jaxpar.parallel.experts import RouterSums, expert_mlp
from jaxpar.parallel.linear import column_linear, logits, rank_linear, row_linear
from jaxpar.parallel.linear.weight_view import WeightView
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named
from jaxpar.parallel.token_order import in_natural_order, in_order

__all__ = [
    "LossSums",
    "Ops",
    "RouterSums",
    "SoftTargets",
    "TopK",
    "WeightView",
    "attention",
    "choose_attention",
    "column_linear",
    "dropout",
    "expert_mlp",
    "fit_heads",
    "in_natural_order",
    "in_order",
    "linear_cross_entropy",
    "linear_top_k",
    "logits",
    "lookup",
    "named",
    "rank_linear",
    "row_linear",
]
