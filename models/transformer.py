"""The transformer that all families share: an embedding, a block and a head, written with logical axes only.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import math

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.sharding import LogicalAxis
from jaxpar.models.families import family_of
from jaxpar.models.layers import normal, param, rotary_frequencies, rotate, vocab_table, zeros
from jaxpar.parallel.embedding import dropout
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named

_HEADS: tuple[LogicalAxis, ...] = ("heads", "head_dim")
_KV_HEADS: tuple[LogicalAxis, ...] = ("kv_heads", "head_dim")


class Embed(nnx.Module):
    """Token embedding, with a learned position embedding added where the family has one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dropout, self.learned = config.dropout, family_of(config).positions == "learned"
        self.tokens = vocab_table(config, rngs)
        if self.learned:
            self.positions = param(rngs, normal(config.init_std), _positions=config.max_seq_len, embed=config.embed)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"], ops: Ops, key: jax.Array | None
    ) -> Float[Array, "B S D"]:
        x_BSD = ops.lookup(self.tokens[...], tokens_BS, "vocab")
        if self.learned:
            x_BSD += ops.lookup(self.positions[...], positions_BS, None)
        return dropout(x_BSD, self.dropout, key)


class Block(nnx.Module):
    """Pre-norm attention, followed by a pre-norm MLP or experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, self.family = config, family_of(config)
        D, H, F = config.embed, config.heads, config.mlp
        K, h = config.kv_head_count, config.head_size
        kv = {"kv_heads": K} if self.family.grouped else {"heads": H}
        init = normal(config.init_std)
        init_residual = normal(config.init_std / math.sqrt(2 * config.layers))  # GPT-2 report, section 2.3
        self.attention_norm = self.family.norm(config, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, **kv, head_dim=h)
        self.v = param(rngs, init, embed=D, **kv, head_dim=h)
        self._add_bias("q", rngs, heads=H, head_dim=h)
        self._add_bias("k", rngs, **kv, head_dim=h)
        self._add_bias("v", rngs, **kv, head_dim=h)
        self.out = param(rngs, init_residual, heads=H, head_dim=h, embed=D)
        self._add_bias("out", rngs, embed=D)
        self.mlp_norm = self.family.norm(config, rngs)
        expert: dict[str, int] = {}
        if config.experts:
            self.router = param(rngs, init, embed=D, _experts=config.experts)
            expert = {"experts": config.experts}
        if self.family.gated:
            self.gate = param(rngs, init, **expert, embed=D, mlp=F)
        self.up = param(rngs, init, **expert, embed=D, mlp=F)
        self._add_bias("up", rngs, mlp=F)
        self.down = param(rngs, init_residual, **expert, mlp=F, embed=D)
        self._add_bias("down", rngs, embed=D)

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
            q_BSHh, k_BSKh, v_BSKh = self._project(named(self.attention_norm(x_BSD), "attention_norm"), ops)
            if self.family.positions == "rotary":
                frequencies = rotary_frequencies(self.config)
                q_BSHh, k_BSKh = rotate(q_BSHh, positions_BS, frequencies), rotate(k_BSKh, positions_BS, frequencies)
            q_BSHh, k_BSKh, v_BSKh = named(q_BSHh, "q"), named(k_BSKh, "k"), named(v_BSKh, "v")
            mixed_BSHh = ops.attention(q_BSHh, k_BSKh, v_BSKh, segments_BS, rate, weights_key, self.config.window)
            out_BSD = ops.row_linear(mixed_BSHh, self.out[...], _HEADS, self._bias("out"), "attention_seq")
            x_BSD = named(x_BSD + dropout(out_BSD, rate, attention_key), "mlp_input")
        with jax.named_scope("mlp"):
            y_BSD, routed = self._mlp(named(self.mlp_norm(x_BSD), "mlp_norm"), ops)
            return x_BSD + dropout(y_BSD, rate, mlp_key), routed

    def _project(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Array, ...]:
        kv_heads = _KV_HEADS if self.family.grouped else _HEADS
        weights, biases = (self.q[...], self.k[...], self.v[...]), [self._bias(name) for name in "qkv"]
        return ops.column_linear(x_BSD, weights, (_HEADS, kv_heads, kv_heads), biases, "attention_seq")

    def _mlp(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        down, up_bias, down_bias = self.down[...], self._bias("up"), self._bias("down")
        if not self.family.gated:
            (up_BSF,) = ops.column_linear(x_BSD, (self.up[...],), (("mlp",),), (up_bias,))
            hidden_BSF = jax.nn.gelu(named(up_BSF, "up"), approximate=True)
        elif self.config.experts:
            chosen, factor = self.config.experts_per_token, self.config.capacity_factor
            return ops.expert_mlp(x_BSD, self.router[...], self.gate[...], self.up[...], down, chosen, factor)
        else:
            weights, biases = (self.gate[...], self.up[...]), (self._bias("gate"), up_bias)
            gate_BSF, up_BSF = ops.column_linear(x_BSD, weights, (("mlp",), ("mlp",)), biases)
            hidden_BSF = jax.nn.silu(named(gate_BSF, "gate")) * named(up_BSF, "up")
        return ops.row_linear(named(hidden_BSF, "mlp_hidden"), down, ("mlp",), down_bias), None

    def _add_bias(self, name: str, rngs: nnx.Rngs, **dims: int) -> None:
        if name in self.family.biases:
            setattr(self, f"{name}_bias", param(rngs, zeros, **dims))

    def _bias(self, name: str) -> Array | None:
        bias: nnx.Param | None = getattr(self, f"{name}_bias", None)
        return None if bias is None else bias[...]


class Head(nnx.Module):
    """A final norm and the vocabulary matrix, which is the embedding's own if the head is tied, otherwise another."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = family_of(config).norm(config, rngs)
        if not config.tied_head:
            self.table = vocab_table(config, rngs)

    def __call__(self, x_BSD: Float[Array, "B S D"], embedding_VD: Float[Array, "V D"]) -> tuple[Array, Array]:
        return self.norm(x_BSD), self.table[...] if hasattr(self, "table") else embedding_VD
