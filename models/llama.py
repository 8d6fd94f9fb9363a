"""LLaMA 2 and 3 (arXiv:2307.09288, arXiv:2407.21783): RMSNorm, RoPE, grouped-query attention, SwiGLU; with
experts in place of the one MLP it is Mixtral (arXiv:2401.04088).

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, E experts.
"""

from __future__ import annotations

import math

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.sharding import LogicalAxis
from jaxpar.models.layers import RMSNorm, VocabHead, normal, param, rotary_frequencies, rotate, vocab_table
from jaxpar.parallel.embedding import dropout
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named

_HEADS: tuple[LogicalAxis, ...] = ("heads", "head_dim")
_KV_HEADS: tuple[LogicalAxis, ...] = ("kv_heads", "head_dim")


class Embed(nnx.Module):
    """Token embedding."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.tokens = vocab_table(config, rngs)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"], ops: Ops, key: jax.Array | None
    ) -> Float[Array, "B S D"]:
        return dropout(ops.lookup(self.tokens[...], tokens_BS, "vocab"), self.dropout, key)


class Block(nnx.Module):
    """Pre-norm grouped-query attention with rotary positions, and a SwiGLU MLP (arXiv:2002.05202) or experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, H, F = config.embed, config.heads, config.mlp
        K, h = config.kv_heads or H, config.head_dim or D // H
        init = normal(config.init_std)
        init_residual = normal(config.init_std / math.sqrt(2 * config.layers))
        self.config = config
        self.attention_norm = RMSNorm(config, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, kv_heads=K, head_dim=h)
        self.v = param(rngs, init, embed=D, kv_heads=K, head_dim=h)
        self.out = param(rngs, init_residual, heads=H, head_dim=h, embed=D)
        self.mlp_norm = RMSNorm(config, rngs)
        expert: dict[str, int] = {}
        if config.experts:
            self.router = param(rngs, init, embed=D, _experts=config.experts)
            expert = {"experts": config.experts}
        self.gate = param(rngs, init, **expert, embed=D, mlp=F)
        self.up = param(rngs, init, **expert, embed=D, mlp=F)
        self.down = param(rngs, init_residual, **expert, mlp=F, embed=D)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        rate = self.config.dropout
        weights_key, attention_key, mlp_key = (None,) * 3 if key is None else jax.random.split(key, 3)
        x_BSD = named(x_BSD, "block_input")
        with jax.named_scope("attention"):
            q_BSHh, k_BSKh, v_BSKh = ops.column_linear(
                named(self.attention_norm(x_BSD), "attention_norm"),
                (self.q[...], self.k[...], self.v[...]),
                (_HEADS, _KV_HEADS, _KV_HEADS),
                seq="attention_seq",
            )
            frequencies = rotary_frequencies(self.config)
            q_BSHh, k_BSKh = rotate(q_BSHh, positions_BS, frequencies), rotate(k_BSKh, positions_BS, frequencies)
            q_BSHh, k_BSKh, v_BSKh = named(q_BSHh, "q"), named(k_BSKh, "k"), named(v_BSKh, "v")
            mixed_BSHh = ops.attention(q_BSHh, k_BSKh, v_BSKh, segments_BS, rate, weights_key, self.config.window)
            out_BSD = ops.row_linear(mixed_BSHh, self.out[...], _HEADS, seq="attention_seq")
            x_BSD = named(x_BSD + dropout(out_BSD, rate, attention_key), "mlp_input")
        with jax.named_scope("mlp"):
            y_BSD, routed = self._mlp(named(self.mlp_norm(x_BSD), "mlp_norm"), ops)
            return x_BSD + dropout(y_BSD, rate, mlp_key), routed

    def _mlp(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        if self.config.experts:
            chosen, factor = self.config.experts_per_token, self.config.capacity_factor
            return ops.expert_mlp(x_BSD, self.router[...], gate, up, down, chosen, factor)
        gate_BSF, up_BSF = ops.column_linear(x_BSD, (gate, up), (("mlp",), ("mlp",)))
        gate_BSF, up_BSF = named(gate_BSF, "gate"), named(up_BSF, "up")
        return ops.row_linear(named(jax.nn.silu(gate_BSF) * up_BSF, "mlp_hidden"), down, ("mlp",)), None


class Head(VocabHead):
    """Final RMSNorm and the vocabulary matrix."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, RMSNorm)
