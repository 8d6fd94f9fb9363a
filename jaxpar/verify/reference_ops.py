"""Defines the parallel ops as plain mathematics on one device, which `verify` takes as the truth.

There is no mesh, no kernel, no tiling and no derivative written by hand: JAX differentiates these
functions. Each method has the name and the arguments of the method of `jaxpar.parallel.Ops` that it
replaces.

Shapes: B batch, S query length, T key length, D embed, H heads, K kv heads, h head_dim, V vocab,
F mlp, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, LogicalAxis
from jaxpar.kernels.masks import Mask
from jaxpar.parallel import TopK
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear.weight_view import Weight
from jaxpar.verify.reference_weights import weight_array


@dataclass(frozen=True)
class ReferenceOps:
    """The ops that a model calls when its answer is to be the reference.

    Attributes:
      plan: a plan for one device; only its compute dtype matters.
      offset: in attention the token at t sees what the mask shows to t + offset. It is 0 except to
        diagnose a mask that is off by one. A token that sees nothing takes the mean of all values.
    """

    plan: Plan
    offset: int = 0

    def column_linear(
        self,
        x_BSD: Array,
        weights: Any,
        axes: Any,
        biases: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    ) -> Any:
        """Return `x @ w` for one weight, or for each of several, plus its bias.

        Args:
          x_BSD: the input.
          weights: one weight [D, ...], or a list or tuple of them.
          axes: the logical axes of the weights, which do not matter on one device.
          biases: a bias for each weight, or None for no bias.
          seq: the logical axis of the sequence, which does not matter here either.

        Returns:
          An output [B, S, ...] for one weight, or a tuple of them, in the compute dtype.
        """
        if not isinstance(weights, list | tuple):
            return self._linear(x_BSD, weights, 1, biases)
        biases = biases or [None] * len(weights)
        return tuple(
            self._linear(x_BSD, weight, 1, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )

    def row_linear(
        self,
        h_BSI: Any,
        weight: Any,
        axes: Any,
        bias: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
        to: LogicalAxis = "embed",
    ) -> Array:
        """Return `h @ w` over all dims of h but the first two, plus the bias; of several, their
        sum.

        Args:
          h_BSI: the input, [B, S, ...] with one or more dims that are summed over, or several.
          weight: the weight, those dims first and then D, or one for each input.
          axes: the logical axes of the weight, which do not matter on one device.
          bias: the bias [D], or None, or one for each input.
          seq: the logical axis of the sequence, which does not matter here.
          to: the logical axis of the output's last dim, which does not matter here.

        Returns:
          The output [B, S, D] in the compute dtype.
        """
        if not isinstance(h_BSI, list | tuple):
            return self._linear(h_BSI, weight, h_BSI.ndim - 2, bias)
        biases = bias or [None] * len(h_BSI)
        return functools.reduce(
            jnp.add,
            (
                self._linear(h, one, h.ndim - 2, added)
                for h, one, added in zip(h_BSI, weight, biases, strict=True)
            ),
        )

    def rank_linear(
        self, u_BSr: Array, weight: Array, axes: Axes, seq: LogicalAxis = "seq"
    ) -> Array:
        """Return `u @ w`."""
        return self._linear(u_BSr, weight, 1, None)

    def _linear(
        self,
        x: Array,
        weight: Weight,
        dims: int,
        bias: Array | None,
    ) -> Array:
        y = jnp.tensordot(
            x.astype(self.plan.dtype),
            weight_array(weight, range(dims)).astype(self.plan.dtype),
            dims,
        )
        if bias is None:
            return y
        return y + bias.astype(y.dtype)

    def lookup(self, table_VD: Array, ids_BS: Array, axis: LogicalAxis | None) -> Array:
        """Look up rows of a table, in the compute dtype.

        Args:
          table_VD: the table.
          ids_BS: the number of a row of the table for each token.
          axis: the logical axis of the table's rows, which does not matter on one device.

        Returns:
          The rows, [B, S, D].
        """
        return table_VD.astype(self.plan.dtype)[ids_BS]

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        mask: Mask,
        segments_BS: Array | None = None,
        dropout_rate: float = 0.0,
        key: Array | None = None,
        softcap: float = 0.0,
        q_start: int = 0,
    ) -> Array:
        """Compute attention over all scores at once, S = T; dropout is never on here.

        A token sees what the mask shows it of its own document (`segments_BS`), as if that were
        alone: places count from the document's first token.

        Args:
          q_BSHh: the queries.
          k_BSKh: the keys, of which H / K query heads share one.
          v_BSKh: the values.
          mask: what each token sees, by its place and that of the other.
          segments_BS: the document of each token; None = a row is one document.
          dropout_rate: not used.
          key: not used.
          softcap: scores are softcap * tanh(scores / softcap); 0 = they are taken as they are.
          q_start: 0; the reference cuts no sequence into halves.

        Returns:
          The mean of the values by the softmax of the scores, [B, S, H, h], in the dtype of the
          values. Scores and softmax are float32.
        """
        assert q_start == 0, "the reference cuts no sequence into halves"
        S, H, h = q_BSHh.shape[1:]
        k_BTHh, v_BTHh = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k_BSKh, v_BSKh))
        scores_BHST = jnp.einsum(
            "BSHh,BTHh->BHST", q_BSHh, k_BTHh, preferred_element_type=jnp.float32
        ) / math.sqrt(h)
        if softcap:
            scores_BHST = softcap * jnp.tanh(scores_BHST / softcap)
        if segments_BS is None:
            visible = mask.visible(
                jnp.arange(S)[:, None] + self.offset,
                jnp.arange(S),
            )
        else:
            places_BS = _places_in_document(segments_BS)
            of_document = mask.visible(
                places_BS[:, :, None] + self.offset,
                places_BS[:, None, :],
            )
            visible = (of_document & (segments_BS[:, :, None] == segments_BS[:, None, :]))[:, None]
        weights_BHST = jax.nn.softmax(
            jnp.where(visible, scores_BHST, -1e30),
            axis=-1,
        )
        return jnp.einsum("BHST,BTHh->BSHh", weights_BHST.astype(v_BTHh.dtype), v_BTHh)

    def expert_mlp(
        self,
        x_BSD: Array,
        router_DE: Array,
        gate_EDF: Weight,
        up_EDF: Weight,
        down_EFD: Weight,
        experts_per_token: int,
        text_BS: Array | None = None,
        router: str = "token_choice",
    ) -> tuple[Array, RouterSums]:
        """Run every expert on every token, with weight zero where it is not chosen; padding is in
        no sum.

        Args:
          x_BSD: the input.
          router_DE: the weight that scores the experts.
          gate_EDF: each expert's weight whose output goes through SiLU.
          up_EDF: each expert's weight whose output is multiplied by it.
          down_EFD: each expert's weight back to D.
          experts_per_token: how many experts a token is sent to. Where they are several, their
            weights are scaled to a sum of 1.
          text_BS: True where a token is text; None = everywhere.
          router: `token_choice`, or `expert_choice`, where each expert takes the tokens of each
            sequence whose probabilities of it are largest, and these are the weights.

        Returns:
          The output [B, S, D] in the compute dtype, and the router's sums of the batch in float32.
        """
        E = router_DE.shape[1]
        logits_BSE = jnp.matmul(
            x_BSD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST
        )
        probabilities_BSE = jax.nn.softmax(logits_BSE, axis=-1)
        if text_BS is None:
            text_BS = jnp.ones(x_BSD.shape[:2], bool)
        largest_BSK, chosen_BSK = jax.lax.top_k(probabilities_BSE, experts_per_token)
        choices_BSKE = jax.nn.one_hot(chosen_BSK, E, dtype=jnp.float32)
        total_BS1 = jnp.sum(largest_BSK, axis=-1, keepdims=True)
        if experts_per_token == 1:
            weights_BSK = largest_BSK
        else:
            weights_BSK = largest_BSK / total_BS1
        weights_BSE = jnp.einsum("BSK,BSKE->BSE", weights_BSK, choices_BSKE)
        if router == "expert_choice":
            weights_BSE = _weights_by_experts(probabilities_BSE, text_BS, experts_per_token)
        x_BSD = x_BSD.astype(self.plan.dtype)
        gate, up, down = (
            weight_array(weight, range(1, 2)).astype(self.plan.dtype)
            for weight in (gate_EDF, up_EDF, down_EFD)
        )
        gates_BSEF, ups_BSEF = (jnp.einsum("BSD,EDF->BSEF", x_BSD, weight) for weight in (gate, up))
        answers_BSED = jnp.einsum("BSEF,EFD->BSED", jax.nn.silu(gates_BSEF) * ups_BSEF, down)
        y_BSD = jnp.sum(weights_BSE[..., None] * answers_BSED.astype(jnp.float32), axis=2).astype(
            self.plan.dtype
        )
        sizes_B = jnp.sum(text_BS, axis=1)
        mean_BS = text_BS / jnp.maximum(sizes_B, 1)[:, None]
        shares_BE = jnp.einsum("BS,BSKE->BE", mean_BS, choices_BSKE) / experts_per_token
        balances_B = E * jnp.sum(
            shares_BE * jnp.einsum("BS,BSE->BE", mean_BS, probabilities_BSE), axis=-1
        )
        balance = jnp.sum(sizes_B * balances_B)
        if router == "expert_choice":  # every expert has as many tokens as any other
            balance = jnp.sum(text_BS, dtype=jnp.float32)
        z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
        return y_BSD, RouterSums(balance, jnp.sum(jnp.where(text_BS, z_BS, 0)))

    def linear_cross_entropy(
        self,
        x_BSD: Array,
        head_VD: Array,
        labels_BS: Array,
        vocab_size: int,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        bias_V: Array | None = None,
        label_smoothing: float = 0.0,
        soft: SoftTargets | None = None,
        alpha: float = 1.0,
        temperature: float = 1.0,
    ) -> LossSums:
        """Sum the cross-entropy over all scores at once, each token's against a distribution of the
        whole vocabulary; a label below zero does not count.

        Args:
          x_BSD: the input of the head.
          head_VD: the weight of the head, V at least `vocab_size`.
          labels_BS: the token that is right at each place.
          vocab_size: the size of the true vocabulary, without padding.
          z_loss: the weight of the square of the logarithm of the softmax's denominator.
          softcap: as for `logits`.
          bias_V: as for `logits`.
          label_smoothing: the share of a label's mass that is spread evenly over the vocabulary.
          soft: weighted entries of the vocabulary; None = there are none.
          alpha: their share of the loss; the label has the rest.
          temperature: what the scores are divided by where they are held against `soft`.

        Returns:
          The loss with all that is added, the cross-entropy of the labels alone, and the number of
          labels that count: float32 scalars, sums over the batch.
        """
        logits_BSV = self.logits(x_BSD, head_VD, vocab_size, softcap, bias_V)
        lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        counts_BS = labels_BS >= 0
        labels_BSV = jax.nn.one_hot(labels_BS, vocab_size, dtype=jnp.float32)
        smooth_BSV = (1 - label_smoothing) * labels_BSV + label_smoothing / vocab_size
        loss_BS = _cross_entropy(logits_BSV, smooth_BSV)
        if soft is not None:
            # `one_hot` of an id that is no entry of the vocabulary is zero everywhere.
            ids_BSkV = jax.nn.one_hot(soft.ids, vocab_size, dtype=jnp.float32)
            soft_BSV = jnp.sum(soft.weights[..., None] * ids_BSkV, axis=2)
            of_soft_BS = _cross_entropy(logits_BSV / temperature, soft_BSV)
            loss_BS = (1 - alpha) * loss_BS + alpha * temperature**2 * of_soft_BS
        loss_BS = loss_BS + z_loss * jnp.square(lse_BS)
        loss = jnp.sum(jnp.where(counts_BS, loss_BS, 0))
        nll_BS = _cross_entropy(logits_BSV, labels_BSV)
        nll = jnp.sum(jnp.where(counts_BS, nll_BS, 0))
        return LossSums(loss, nll, jnp.sum(counts_BS, dtype=jnp.float32))

    def linear_top_k(
        self,
        x_BSD: Array,
        head_VD: Array,
        k: int,
        vocab_size: int,
        softcap: float = 0.0,
    ) -> TopK:
        """Find the k largest log-probabilities among all.

        Args:
          x_BSD: the input of the head.
          head_VD: the weight of the head, V at least `vocab_size`.
          k: how many.
          vocab_size: the size of the true vocabulary, without padding.
          softcap: as for `logits`.

        Returns:
          The entries and their log-probabilities [B, S, k], the largest first.
        """
        logits_BSV = self.logits(x_BSD, head_VD, vocab_size, softcap)
        log_probs_BSk, ids_BSk = jax.lax.top_k(jax.nn.log_softmax(logits_BSV), k)
        return TopK(ids_BSk, log_probs_BSk)

    def logits(
        self,
        x_BSD: Array,
        head_VD: Array,
        vocab_size: int,
        softcap: float = 0.0,
        bias_V: Array | None = None,
    ) -> Array:
        """Return the float32 scores of the true vocabulary, without padding.

        Args:
          x_BSD: the input of the head.
          head_VD: the weight of the head, V at least `vocab_size`.
          vocab_size: the size of the true vocabulary.
          softcap: scores are softcap * tanh(scores / softcap); 0 = they are taken as they are.
          bias_V: what is added to the scores before that; None = nothing is.

        Returns:
          The scores, [B, S, vocab_size].
        """
        x_BSD = x_BSD.astype(self.plan.dtype)
        head_VD = head_VD[:vocab_size].astype(self.plan.dtype)
        logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, head_VD, preferred_element_type=jnp.float32)
        if bias_V is not None:
            logits_BSV += bias_V[:vocab_size]
        if softcap:
            return softcap * jnp.tanh(logits_BSV / softcap)
        return logits_BSV


def _cross_entropy(logits_BSV: Array, weights_BSV: Array) -> Array:
    """The cross-entropy [B, S] of scores against weights, which need not add up to one."""
    return -jnp.sum(weights_BSV * jax.nn.log_softmax(logits_BSV, axis=-1), axis=-1)


def _weights_by_experts(probabilities_BSE: Array, text_BS: Array, experts_per_token: int) -> Array:
    """The probabilities of the tokens that each expert takes of each sequence, and 0 elsewhere."""
    _, S, E = probabilities_BSE.shape
    taken = min(S, math.ceil(S * experts_per_token / E))
    scores_BSE = jnp.where(text_BS[..., None], probabilities_BSE, -1)
    best_BEC = jax.lax.top_k(scores_BSE.swapaxes(1, 2), taken)[1]
    chosen_BSE = jnp.sum(jax.nn.one_hot(best_BEC, S, dtype=jnp.float32), axis=2).swapaxes(1, 2)
    return probabilities_BSE * chosen_BSE * text_BS[..., None]


def _places_in_document(segments_BS: Array) -> Array:
    """Count the tokens before each one in its document, whose tokens lie together."""
    row_S = jnp.arange(segments_BS.shape[1])
    begins_BS = jnp.diff(segments_BS, axis=1, prepend=segments_BS[:, :1] - 1) != 0
    return row_S - jax.lax.cummax(jnp.where(begins_BS, row_S, 0), axis=1)
