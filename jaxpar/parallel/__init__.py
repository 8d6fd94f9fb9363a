"""What a model calls for a matmul, a lookup, attention, experts and a loss, and what those are made
of.

Each op takes a `jaxpar.Layout` and keyword options, is trainable, and works inside any jitted
function. A model is given `Ops`, of which `MeshOps` are these, bound to a plan.

Read `collectives` first: every op is two functions of local arrays, which it joins. Then come the
folders, each by itself: `linear`, `cross_entropy`, `experts`, and `context`, attention over a split
sequence, whose tokens are in the order of `zigzag`. Beside them are the ops that need no folder
(`_lookup`, `_dropout`, `_attention` with `_choose_attention`, `padding`). `ops` says what a model
calls, and `mesh_ops` binds all of these to a plan. `attention_state` lets attention leave something
for a later call: `sequence_halves` the keys of a half, where a block runs on the halves of a batch
in turn (`domino`), and `cache` those of a text that is written. What is kept for the backward, and
where, is in `remat` and `host_memory`.
`pipeline` comes last, with `cpu_collective_order`, by which it keeps XLA:CPU's collectives in
order.
"""

from jaxpar.parallel._attention import attention
from jaxpar.parallel._choose_attention import choose_attention, fit_heads
from jaxpar.parallel._dropout import dropout
from jaxpar.parallel._lookup import lookup
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets, linear_cross_entropy
from jaxpar.parallel.cross_entropy.top_k import TopK, linear_top_k
from jaxpar.parallel.experts import RouterSums, expert_mlp
from jaxpar.parallel.linear import column_linear, logits, rank_linear, row_linear
from jaxpar.parallel.linear.weight_view import WeightView
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import (
    AttentionCall,
    ExpertsCall,
    LogitsCall,
    LossCall,
    Ops,
    WrappedOps,
)
from jaxpar.parallel.remat import named
from jaxpar.parallel.zigzag import in_natural_order, in_order

__all__ = [
    "AttentionCall",
    "ExpertsCall",
    "LogitsCall",
    "LossCall",
    "LossSums",
    "MeshOps",
    "Ops",
    "RouterSums",
    "SoftTargets",
    "TopK",
    "WeightView",
    "WrappedOps",
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
