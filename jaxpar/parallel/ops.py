"""What a model calls for a matmul, a lookup, attention, experts and a loss: the `Ops` that every
implementation has, and the records of what its longer calls are given.

A model is given its ops and knows no plan. The implementations are `MeshOps`, which follow a plan;
`jaxpar.verify.reference_ops`, which are plain mathematics; and `WrappedOps`, which are those of
another but for what a class derived from it changes.

Shapes: B batch, S sequence, T keys, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab,
E experts, k entries of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.layout.sharding import Axes, LogicalAxis
from jaxpar.kernels.masks import Mask
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets
from jaxpar.parallel.cross_entropy.top_k import TopK
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.experts.layer import RouterName
from jaxpar.parallel.linear.weight_view import Weight


class AttentionCall(NamedTuple):
    """What attention is given."""

    q_BSHh: Float[Array, "B S H h"]
    """The queries; H is a multiple of K."""
    k_BTKh: Float[Array, "B T K h"]
    """The keys."""
    v_BTKh: Float[Array, "B T K h"]
    """The values."""
    mask: Mask
    """What a query sees, by its place and the key's."""
    segments_BT: Int[Array, "B T"] | None = None
    """The number of each key's document; None = a row is one document. A token sees what the mask
    shows it of its own document, as if that were alone."""
    dropout_rate: float = 0.0
    """The share of the attention weights that is dropped, from 0 to below 1."""
    key: jax.Array | None = None
    """The key of the dropout; None = nothing is dropped."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0 = they are taken as they are."""
    q_start: int = 0
    """The place of the first query among the keys; the last query stands where the last key
    does."""


class ExpertsCall(NamedTuple):
    """What a mixture of experts is given."""

    x_BSD: Float[Array, "B S D"]
    """The residual stream after its norm."""
    router_DE: Float[Array, "D E"]
    """The weight that scores the experts."""
    gate_EDF: Weight
    """Each expert's weight whose output goes through SiLU."""
    up_EDF: Weight
    """Each expert's weight whose output is multiplied by that."""
    down_EFD: Weight
    """Each expert's weight back to the residual stream."""
    experts_per_token: int
    """How many experts a token is sent to; in the mean, where experts choose. The weights of
    several are scaled to a sum of 1."""
    text_BS: Bool[Array, "B S"] | None = None
    """True where a token is text; padding is in none of the router's sums. None = all are text."""
    router: RouterName = "token_choice"
    """Who chooses: each token its experts, or each expert its tokens of each sequence."""


class LogitsCall(NamedTuple):
    """What scores the vocabulary: `x @ head.T + bias`."""

    x_BSD: Float[Array, "B S D"]
    """The final hidden states, in the residual stream's layout."""
    head_VD: Float[Array, "V D"]
    """The vocabulary matrix; its rows past `vocab_size` are padding."""
    vocab_size: int
    """The size of the true vocabulary."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0 = they are taken as they are."""
    bias_V: Float[Array, " V"] | None = None
    """What is added to the score of each entry, before the cap; None = nothing is."""


class LossCall(NamedTuple):
    """What a loss is given: scores, and what they are held against."""

    scores: LogitsCall
    """What makes the scores."""
    labels_BS: Int[Array, "B S"]
    """For each token the entry that should follow; one below zero does not count."""
    z_loss: float = 0.0
    """The weight of the square of the softmax's log-normaliser."""
    label_smoothing: float = 0.0
    """The share of a label's mass that is spread evenly over the true vocabulary."""
    soft: SoftTargets | None = None
    """Weighted entries of the vocabulary beside the labels; None = the labels alone."""
    alpha: float = 1.0
    """The share of the soft targets in the loss; the labels have the rest."""
    temperature: float = 1.0
    """What scores are divided by where they are held against the soft targets."""


class Ops(Protocol):
    """What a model calls. All arrays are global, and the same on any mesh; the axes that are named
    are logical.
    """

    def column_linear(
        self,
        x_BSD: Array,
        weights: Any,
        axes: Any,
        biases: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    ) -> Any:
        """Multiply the residual stream by a weight, or by several that share its gather.

        Args:
          x_BSD: the stream.
          weights: one weight [D, *out], an array or a `WeightView`; or a list or tuple of them.
          axes: the logical axes of the output's dims after the second, of each weight.
          biases: a bias [*out] of each weight, or None for no bias.
          seq: the logical axis of the output's sequence, or one for each weight.

        Returns:
          The output [B, S, *out] in the compute dtype, or a tuple of them.
        """
        ...

    def row_linear(
        self,
        h_BSI: Any,
        weight: Any,
        axes: Any,
        bias: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
        to: LogicalAxis = "embed",
    ) -> Array:
        """Multiply hidden features by a weight back to the residual stream; of several, sum the
        products before they are scattered.

        Args:
          h_BSI: the features [B, S, *in], or a list or tuple of several.
          weight: the weight [*in, D], an array or a `WeightView`, of each.
          axes: the logical axes of its dims but the last, of each.
          bias: the bias [D], or None for no bias, of each.
          seq: the logical axis of the features' sequence, or one for each.
          to: the logical axis of the output's last dim.

        Returns:
          The sum [B, S, D] in the compute dtype.
        """
        ...

    def rank_linear(
        self, u_BSr: Array, weight: Array, axes: Axes, seq: LogicalAxis = "seq"
    ) -> Array:
        """Multiply a narrow array, such as LoRA's, that each device has whole.

        Args:
          u_BSr: the array.
          weight: the weight [r, *out].
          axes: the logical axes of the output's dims after the second.
          seq: the logical axis of the sequence.

        Returns:
          The output [B, S, *out] in the compute dtype.
        """
        ...

    def lookup(self, table_VD: Array, ids_BS: Array, axis: LogicalAxis | None) -> Array:
        """Look up rows of a table.

        Args:
          table_VD: the table.
          ids_BS: the number of a row for each token.
          axis: the logical axis of the table's rows.

        Returns:
          The rows [B, S, D] in the compute dtype and the residual stream's layout.
        """
        ...

    def attention(self, call: AttentionCall) -> Array:
        """Return the mean of the values by the softmax of the scores, [B, S, H, h]."""
        ...

    def expert_mlp(self, call: ExpertsCall) -> tuple[Array, RouterSums]:
        """Return the weighted sum of the SwiGLUs of each token's experts, [B, S, D], and the
        router's sums of the batch.
        """
        ...

    def linear_cross_entropy(self, call: LossCall) -> LossSums:
        """Return the sums of the loss over the labels that count."""
        ...

    def linear_top_k(self, call: LogitsCall, k: int) -> TopK:
        """Return the k largest log-probabilities of each token, [B, S, k], and their entries."""
        ...

    def logits(self, call: LogitsCall) -> Array:
        """Return the float32 scores [B, S, V]; those past the true vocabulary may be there, and
        mean nothing.
        """
        ...


class WrappedOps(Ops):
    """The ops of another; a class derived from it says which of them it changes.

    Attributes:
      ops: the others.
    """

    def __init__(self, ops: Ops):
        self.ops = ops

    def column_linear(self, x_BSD: Array, weights: Any, axes: Any, *rest: Any, **named: Any) -> Any:
        return self.ops.column_linear(x_BSD, weights, axes, *rest, **named)

    def row_linear(self, h_BSI: Any, weight: Any, axes: Any, *rest: Any, **named: Any) -> Array:
        return self.ops.row_linear(h_BSI, weight, axes, *rest, **named)

    def rank_linear(
        self, u_BSr: Array, weight: Array, axes: Axes, *rest: Any, **named: Any
    ) -> Array:
        return self.ops.rank_linear(u_BSr, weight, axes, *rest, **named)

    def lookup(self, table_VD: Array, ids_BS: Array, axis: LogicalAxis | None) -> Array:
        return self.ops.lookup(table_VD, ids_BS, axis)

    def attention(self, call: AttentionCall) -> Array:
        return self.ops.attention(call)

    def expert_mlp(self, call: ExpertsCall) -> tuple[Array, RouterSums]:
        return self.ops.expert_mlp(call)

    def linear_cross_entropy(self, call: LossCall) -> LossSums:
        return self.ops.linear_cross_entropy(call)

    def linear_top_k(self, call: LogitsCall, k: int) -> TopK:
        return self.ops.linear_top_k(call, k)

    def logits(self, call: LogitsCall) -> Array:
        return self.ops.logits(call)
