"""GPT-2 (Radford et al. 2019): learned positions, biases, GELU, and a head tied to the embedding.

Shapes: B batch, S sequence, D embed, H heads, h head_dim, F mlp.
"""

from __future__ import annotations

import math

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.sharding import LogicalAxis
from jaxpar.models.layers import LayerNorm, VocabHead, normal, param, vocab_table, zeros
from jaxpar.parallel.embedding import dropout
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named

_HEADS: tuple[LogicalAxis, ...] = ("heads", "head_dim")


class Embed(nnx.Module):
    """Token embedding plus learned position embedding."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        rope = [
            name for name, value in vars(ModelConfig()).items() if "rope" in name and getattr(config, name) != value
        ]
        if config.kv_heads not in (0, config.heads) or rope:
            found = " and ".join(f"model.{name}" for name in rope or ["kv_heads"])
            raise UserError(f"gpt2 has neither grouped kv heads nor RoPE: leave {found} alone")
        if config.experts:
            raise UserError(f"gpt2 has no experts, found model.experts={config.experts}: set it to 0")
        self.dropout = config.dropout
        self.tokens = vocab_table(config, rngs)
        self.positions = param(rngs, normal(config.init_std), _positions=config.max_seq_len, embed=config.embed)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"], ops: Ops, key: jax.Array | None
    ) -> Float[Array, "B S D"]:
        x_BSD = ops.lookup(self.tokens[...], tokens_BS, "vocab")
        x_BSD += ops.lookup(self.positions[...], positions_BS, None)
        return dropout(x_BSD, self.dropout, key)


class Block(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, H, F = config.embed, config.heads, config.mlp
        h = config.head_dim or D // H
        init = normal(config.init_std)
        init_residual = normal(config.init_std / math.sqrt(2 * config.layers))  # GPT-2 report, section 2.3
        self.dropout, self.window = config.dropout, config.window
        self.attention_norm = LayerNorm(config, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.v = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.q_bias = param(rngs, zeros, heads=H, head_dim=h)
        self.k_bias = param(rngs, zeros, heads=H, head_dim=h)
        self.v_bias = param(rngs, zeros, heads=H, head_dim=h)
        self.out = param(rngs, init_residual, heads=H, head_dim=h, embed=D)
        self.out_bias = param(rngs, zeros, embed=D)
        self.mlp_norm = LayerNorm(config, rngs)
        self.up = param(rngs, init, embed=D, mlp=F)
        self.up_bias = param(rngs, zeros, mlp=F)
        self.down = param(rngs, init_residual, mlp=F, embed=D)
        self.down_bias = param(rngs, zeros, embed=D)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None,
    ) -> tuple[Float[Array, "B S D"], None]:
        weights_key, attention_key, mlp_key = (None,) * 3 if key is None else jax.random.split(key, 3)
        x_BSD = named(x_BSD, "block_input")
        with jax.named_scope("attention"):
            normed_BSD = named(self.attention_norm(x_BSD), "attention_norm")
            q, k, v = ops.column_linear(
                normed_BSD, (self.q[...], self.k[...], self.v[...]), (_HEADS, _HEADS, _HEADS),
                (self.q_bias[...], self.k_bias[...], self.v_bias[...]), "attention_seq",
            )  # fmt: skip
            q, k, v = named(q, "q"), named(k, "k"), named(v, "v")
            mixed_BSHh = ops.attention(q, k, v, segments_BS, self.dropout, weights_key, self.window)
            out_BSD = ops.row_linear(mixed_BSHh, self.out[...], _HEADS, self.out_bias[...], "attention_seq")
            x_BSD = named(x_BSD + dropout(out_BSD, self.dropout, attention_key), "mlp_input")
        with jax.named_scope("mlp"):
            normed_BSD = named(self.mlp_norm(x_BSD), "mlp_norm")
            (up_BSF,) = ops.column_linear(normed_BSD, (self.up[...],), (("mlp",),), (self.up_bias[...],))
            hidden_BSF = named(jax.nn.gelu(named(up_BSF, "up"), approximate=True), "mlp_hidden")
            down_BSD = ops.row_linear(hidden_BSF, self.down[...], ("mlp",), self.down_bias[...])
            return x_BSD + dropout(down_BSD, self.dropout, mlp_key), None


class Head(VocabHead):
    """Final LayerNorm and the vocabulary matrix."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, LayerNorm)
