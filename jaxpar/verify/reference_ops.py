"""Defines the parallel ops as plain mathematics on one device, which `verify` takes as the truth.

There is no mesh, no kernel, no tiling and no derivative written by hand: JAX differentiates these
functions. The arguments are those of `jaxpar.parallel.Ops`; where they name a logical axis it does
not matter, since one device has everything.

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
from jaxpar.parallel import (
    AttentionCall,
    ExpertsCall,
    LogitsCall,
    LossCall,
    Ops,
    TopK,
)
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear.weight_view import Weight
from jaxpar.verify.reference_weights import weight_array


@dataclass(frozen=True)
class ReferenceOps(Ops):
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
        return table_VD.astype(self.plan.dtype)[ids_BS]

    def attention(self, call: AttentionCall) -> Array:
        """Compute attention over all scores at once, in float32. Dropout is never on here, and in a
        document of its own a token's place counts from its first.
        """
        S, H, h = call.q_BSHh.shape[1:]
        T = call.k_BTKh.shape[1]
        k_BTHh, v_BTHh = (
            jnp.repeat(x, H // x.shape[2], axis=2) for x in (call.k_BTKh, call.v_BTKh)
        )
        scores_BHST = jnp.einsum(
            "BSHh,BTHh->BHST", call.q_BSHh, k_BTHh, preferred_element_type=jnp.float32
        ) / math.sqrt(h)
        if call.softcap:
            scores_BHST = call.softcap * jnp.tanh(scores_BHST / call.softcap)
        if call.segments_BT is None:
            visible = call.mask.visible(
                jnp.arange(S)[:, None] + (call.q_start + self.offset),
                jnp.arange(T),
            )
        else:
            keys_BT = call.segments_BT
            queries_BS = keys_BT[:, call.q_start :]
            places_BT = _places_in_document(keys_BT)
            of_document = call.mask.visible(
                places_BT[:, call.q_start :, None] + self.offset,
                places_BT[:, None, :],
            )
            visible = (of_document & (queries_BS[:, :, None] == keys_BT[:, None, :]))[:, None]
        weights_BHST = jax.nn.softmax(
            jnp.where(visible, scores_BHST, -1e30),
            axis=-1,
        )
        return jnp.einsum("BHST,BTHh->BSHh", weights_BHST.astype(v_BTHh.dtype), v_BTHh)

    def expert_mlp(self, call: ExpertsCall) -> tuple[Array, RouterSums]:
        """Run every expert on every token, with weight zero where it is not chosen."""
        x_BSD = call.x_BSD
        text_BS = call.text_BS
        experts_per_token = call.experts_per_token
        E = call.router_DE.shape[1]
        logits_BSE = jnp.matmul(
            x_BSD.astype(jnp.float32), call.router_DE, precision=jax.lax.Precision.HIGHEST
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
        if call.router == "expert_choice":
            weights_BSE = _weights_by_experts(probabilities_BSE, text_BS, experts_per_token)
        x_BSD = x_BSD.astype(self.plan.dtype)
        gate, up, down = (
            weight_array(weight, range(1, 2)).astype(self.plan.dtype)
            for weight in (call.gate_EDF, call.up_EDF, call.down_EFD)
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
        if call.router == "expert_choice":  # every expert has as many tokens as any other
            balance = jnp.sum(text_BS, dtype=jnp.float32)
        z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
        return y_BSD, RouterSums(balance, jnp.sum(jnp.where(text_BS, z_BS, 0)))

    def linear_cross_entropy(self, call: LossCall) -> LossSums:
        """Sum the cross-entropy over all scores at once, each token's against a distribution of the
        whole vocabulary.
        """
        logits_BSV = self.logits(call.scores)
        lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        counts_BS = call.labels_BS >= 0
        vocab_size = call.scores.vocab_size
        smoothing = call.label_smoothing
        labels_BSV = jax.nn.one_hot(call.labels_BS, vocab_size, dtype=jnp.float32)
        smooth_BSV = (1 - smoothing) * labels_BSV + smoothing / vocab_size
        loss_BS = _cross_entropy(logits_BSV, smooth_BSV)
        if call.soft is not None:
            # `one_hot` of an id that is no entry of the vocabulary is zero everywhere.
            ids_BSkV = jax.nn.one_hot(call.soft.ids, vocab_size, dtype=jnp.float32)
            soft_BSV = jnp.sum(call.soft.weights[..., None] * ids_BSkV, axis=2)
            of_soft_BS = _cross_entropy(logits_BSV / call.temperature, soft_BSV)
            soft_weight = call.alpha * call.temperature**2
            loss_BS = (1 - call.alpha) * loss_BS + soft_weight * of_soft_BS
        loss_BS = loss_BS + call.z_loss * jnp.square(lse_BS)
        loss = jnp.sum(jnp.where(counts_BS, loss_BS, 0))
        nll_BS = _cross_entropy(logits_BSV, labels_BSV)
        nll = jnp.sum(jnp.where(counts_BS, nll_BS, 0))
        return LossSums(loss, nll, jnp.sum(counts_BS, dtype=jnp.float32))

    def linear_top_k(self, call: LogitsCall, k: int) -> TopK:
        """Find the k largest log-probabilities among all."""
        logits_BSV = self.logits(call)
        log_probs_BSk, ids_BSk = jax.lax.top_k(jax.nn.log_softmax(logits_BSV), k)
        return TopK(ids_BSk, log_probs_BSk)

    def logits(self, call: LogitsCall) -> Array:
        """Return the scores of the true vocabulary, without padding."""
        x_BSD = call.x_BSD.astype(self.plan.dtype)
        head_VD = call.head_VD[: call.vocab_size].astype(self.plan.dtype)
        logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, head_VD, preferred_element_type=jnp.float32)
        if call.bias_V is not None:
            logits_BSV += call.bias_V[: call.vocab_size]
        if call.softcap:
            return call.softcap * jnp.tanh(logits_BSV / call.softcap)
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
