"""The transformer that all families share: an embedding, a block and a head, written with logical axes only.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.sharding import Axes, LogicalAxis
from jaxpar.models.families import family_of
from jaxpar.models.layers import (
    RMSNorm,
    lora_scale,
    normal,
    param,
    rotary_frequencies,
    rotate,
    uniform,
    vocab_table,
    zeros,
)
from jaxpar.models.masks import has_window, layer_masks
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import dropout
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named

_HEADS: tuple[LogicalAxis, ...] = ("heads", "head_dim")
_KV_HEADS: tuple[LogicalAxis, ...] = ("kv_heads", "head_dim")
_MATRICES = ("q", "k", "v", "out", "gate", "up", "down")


class Embed(nnx.Module):
    """Token embedding, with a learned position embedding added where the family has one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.dropout, self.learned = config.dropout, family.positions == "learned"
        self.scale = math.sqrt(config.embed) if family.scaled_embedding else 1.0
        self.tokens = vocab_table(config, rngs)
        if self.learned:
            self.positions = param(rngs, normal(config.init_std), _positions=config.max_seq_len, embed=config.embed)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], positions_BS: Int[Array, "B S"], ops: Ops, key: jax.Array | None
    ) -> Float[Array, "B S D"]:
        x_BSD = ops.lookup(self.tokens[...], tokens_BS, "vocab")
        x_BSD = x_BSD if self.scale == 1 else x_BSD * jnp.asarray(self.scale, x_BSD.dtype)
        if self.learned:
            x_BSD += ops.lookup(self.positions[...], positions_BS, None)
        return dropout(x_BSD, self.dropout, key)


class Block(nnx.Module):
    """Pre-norm attention, followed by a pre-norm MLP or experts; where the family has post-norms, what they add is
    normed too."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, self.family, self.masks = config, family_of(config), layer_masks(config)
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
        if self.family.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(config, rngs, head_dim=h), RMSNorm(config, rngs, head_dim=h)
        self.mlp_norm = self.family.norm(config, rngs)
        if self.family.post_norms:
            self.attention_post_norm = self.family.norm(config, rngs)
            self.mlp_post_norm = self.family.norm(config, rngs)
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
        for name in config.lora.targets if config.lora.rank else ():
            self._add_lora(name, rngs)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None,
        kind: int = 0,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        config, family, rate = self.config, self.family, self.config.dropout
        weights_key, attention_key, mlp_key = (None,) * 3 if key is None else jax.random.split(key, 3)
        x_BSD = named(x_BSD, "block_input")
        with jax.named_scope("attention"):
            q_BSHh, k_BSKh, v_BSKh = self._project(named(self.attention_norm(x_BSD), "attention_norm"), ops)
            if family.qk_norm:  # whose backward starts from what the matmul made, so that is what bears the name
                q_BSHh, k_BSKh = self.q_norm(named(q_BSHh, "q")), self.k_norm(named(k_BSKh, "k"))
            if family.positions == "rotary":
                frequencies = rotary_frequencies(config, has_window(config.masks[kind]))
                scale = config.query_scale * math.sqrt(config.head_size) or 1.0
                q_BSHh = rotate(q_BSHh, positions_BS, frequencies, scale)
                k_BSKh = rotate(k_BSKh, positions_BS, frequencies)
            if not family.qk_norm:
                q_BSHh, k_BSKh = named(q_BSHh, "q"), named(k_BSKh, "k")
            mixed_BSHh = ops.attention(
                q_BSHh, k_BSKh, named(v_BSKh, "v"), self.masks[kind], segments_BS, rate, weights_key,
                config.attention_softcap,
            )  # fmt: skip
            out_BSD = self._row(mixed_BSHh, "out", _HEADS, ops, "attention_seq")
            if family.post_norms:
                out_BSD = self.attention_post_norm(named(out_BSD, "attention_proj"))
            x_BSD = named(x_BSD + dropout(out_BSD, rate, attention_key), "mlp_input")
        with jax.named_scope("mlp"):
            y_BSD, routed = self._mlp(named(self.mlp_norm(x_BSD), "mlp_norm"), ops)
            if family.post_norms:
                y_BSD = self.mlp_post_norm(named(y_BSD, "mlp_out"))
            return x_BSD + dropout(y_BSD, rate, mlp_key), routed

    def _project(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Array, ...]:
        kv_heads = _KV_HEADS if self.family.grouped else _HEADS
        return self._columns(x_BSD, {"q": _HEADS, "k": kv_heads, "v": kv_heads}, ops, "attention_seq")

    def _mlp(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        if not self.family.gated:
            (up_BSF,) = self._columns(x_BSD, {"up": ("mlp",)}, ops)
            hidden_BSF = jax.nn.gelu(named(up_BSF, "up"), approximate=True)
        elif self.config.experts:
            weights = self.router[...], self.gate[...], self.up[...], self.down[...]
            return ops.expert_mlp(x_BSD, *weights, self.config.experts_per_token)
        else:
            gate_BSF, up_BSF = self._columns(x_BSD, {"gate": ("mlp",), "up": ("mlp",)}, ops)
            activation = jax.nn.silu if self.family.activation == "silu" else jax.nn.gelu
            hidden_BSF = activation(named(gate_BSF, "gate")) * named(up_BSF, "up")
        return self._row(named(hidden_BSF, "mlp_hidden"), "down", ("mlp",), ops), None

    def _columns(
        self, x_BSD: Float[Array, "B S D"], names: dict[str, Axes], ops: Ops, seq: LogicalAxis = "seq"
    ) -> tuple[Array, ...]:
        """Multiply x by several matrices, given with the axes of their outputs; the A's of LoRA share its gather."""
        adapted = [name for name in names if hasattr(self, f"{name}_lora_a")]
        weights = [*names, *(f"{name}_lora_a" for name in adapted)]
        low: Axes = ("rank",)
        axes = [*names.values(), *[low] * len(adapted)]
        biases = [self._bias(name) for name in weights]
        found = ops.column_linear(x_BSD, [getattr(self, name)[...] for name in weights], axes, biases, seq)
        ys = dict(zip(weights, found, strict=True))
        for name in adapted:
            ys[name] += self._expand(name, ys[f"{name}_lora_a"], names[name], ops, seq)
        return tuple(ys[name] for name in names)

    def _row(self, h_BSI: Array, name: str, axes: Axes, ops: Ops, seq: LogicalAxis = "seq") -> Float[Array, "B S D"]:
        """Multiply a hidden array by a matrix to the residual stream."""
        y_BSD = ops.row_linear(h_BSI, getattr(self, name)[...], axes, self._bias(name), seq)
        if not hasattr(self, f"{name}_lora_a"):
            return y_BSD
        low_BSr = ops.row_linear(h_BSI, getattr(self, f"{name}_lora_a")[...], axes, None, seq, "rank")
        return y_BSD + self._expand(name, low_BSr, ("embed",), ops, "residual_seq")

    def _expand(self, name: str, low_BSr: Array, axes: Axes, ops: Ops, seq: LogicalAxis) -> Array:
        weight = getattr(self, f"{name}_lora_b")[...]
        return ops.rank_linear(lora_scale(self.config) * low_BSr, weight, axes, seq)

    def _add_lora(self, name: str, rngs: nnx.Rngs) -> None:
        """Declare A and B beside a matrix, with the values that PEFT gives them: A is uniform within 1 / sqrt(inputs),
        and B is zero."""
        experts = {"gate", "up", "down"} if self.config.experts else set()
        there = [name for name in _MATRICES if hasattr(self, name) and name not in experts]
        if name not in there:
            why = f"{name} is a matrix of experts" if name in experts else f"no matrix {name!r}{suggest(name, there)}"
            raise UserError(f"model.lora.targets: {why}: LoRA may be beside {', '.join(there)} of this model")
        weight, rank = getattr(self, name), self.config.lora.rank
        dims = list(zip(weight.get_metadata("axes"), weight.shape, strict=True))
        ins = len(dims) - 1 if dims[-1][0] == "embed" else 1
        bound = 1 / math.sqrt(math.prod(size for _, size in dims[:ins]))
        setattr(self, f"{name}_lora_a", param(rngs, uniform(bound), **dict(dims[:ins]), rank=rank))
        setattr(self, f"{name}_lora_b", param(rngs, zeros, rank=rank, **dict(dims[ins:])))

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
