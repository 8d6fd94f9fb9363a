"""The transformer that all families share, written with logical axes only: a parameter's
declaration, norms, rotary positions, a vocabulary table; and of these an embedding, a block and a
head.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.sharding import Axes, LogicalAxis
from jaxpar.models.families import family_of
from jaxpar.models.masks import has_window, layer_masks
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import dropout
from jaxpar.parallel.ops import Ops
from jaxpar.parallel.remat import named

zeros = nnx.initializers.zeros
ones = nnx.initializers.ones
normal = nnx.initializers.normal


def lora_scale(config: ModelConfig) -> float:
    """The weight of a LoRA product (arXiv:2106.09685, section 4.1)."""
    return config.lora.alpha / max(config.lora.rank, 1)


def param(
    rngs: nnx.Rngs,
    init: Callable[..., Array],
    **dims: int,
) -> nnx.Param:
    """Declare a float32 parameter: `param(rngs, normal(0.02), embed=64, mlp=256)` is [64, 256] over
    those logical axes.

    A dim whose name starts with `_` has no logical axis and is never split.
    """
    axes = tuple(None if name.startswith("_") else name for name in dims)
    return nnx.Param(
        init(rngs.params(), tuple(dims.values()), jnp.float32),
        axes=axes,
    )


class LayerNorm(nnx.Module):
    """Layer normalisation with scale and bias, in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, embed=config.embed)
        self.bias = param(rngs, zeros, embed=config.embed)

    def __call__(self, x_BSD: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        x = x_BSD.astype(jnp.float32)
        x -= jnp.mean(x, axis=-1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...] + self.bias[...]).astype(x_BSD.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with scale, in float32 (Zhang & Sennrich 2019,
    arXiv:1910.07467).

    It is over `embed`, or over the last dim that is given: `head_dim=64`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, **dim: int):
        self.eps = config.norm_eps
        self.scale = param(rngs, ones, **(dim or {"embed": config.embed}))

    def __call__(self, x_BSD: Float[Array, "B S *D"]) -> Float[Array, "B S *D"]:
        x = x_BSD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...]).astype(x_BSD.dtype)


_NORMS = {"layer": LayerNorm, "rms": RMSNorm}


def rotary_frequencies(config: ModelConfig, local: bool = False) -> Float[Array, " h/2"]:
    """Return the angle per position of each pair of features, extended where `rope_factor` > 1.

    RoPE is Su et al. 2021, arXiv:2104.09864. The linear extension divides all by the factor. That
    of llama3 keeps wavelengths below original/high_freq_factor, divides those above
    original/low_freq_factor, and blends in between (Llama 3.1 release, `apply_scaling`). Layers
    with a window (`local`) have `rope_local_theta`, if there is one.
    """
    head_dim = config.head_size
    local = local and config.rope_local_theta > 0
    if local:
        theta = config.rope_local_theta
    else:
        theta = config.rope_theta
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if config.rope_factor == 1 or local:
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    low = config.rope_low_freq_factor
    high = config.rope_high_freq_factor
    turns = config.rope_original_seq_len * frequencies / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_factor)


def rotate(
    x_BSHh: Float[Array, "B S H h"],
    positions_BS: Int[Array, "B S"],
    frequencies: Float[Array, " h/2"],
    scale: float = 1.0,
) -> Float[Array, "B S H h"]:
    """Apply rotary position embedding, pairing feature i with i + h/2 (the order of Hugging Face
    checkpoints), and multiply by `scale` before rounding."""
    angles_BS1h = (positions_BS[..., None].astype(jnp.float32) * frequencies)[:, :, None, :]
    cos, sin = (jnp.tile(part(angles_BS1h), 2) for part in (jnp.cos, jnp.sin))
    # On a TPU, swapping halves of 128 lanes goes through memory; the matrix unit does it at almost
    # no cost.
    turned = jax.lax.platform_dependent(x_BSHh, tpu=_quarter_turn_by_matmul, default=_quarter_turn)
    rotated = x_BSHh.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin
    return (rotated if scale == 1 else rotated * scale).astype(x_BSHh.dtype)


def _quarter_turn(x_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
    """Turn each pair by a quarter: (a, b) becomes (-b, a)."""
    a, b = jnp.split(x_BSHh, 2, axis=-1)
    return jnp.concatenate([-b, a], axis=-1)


def _quarter_turn_by_matmul(x_BSHh: Float[Array, "B S H h"]) -> Float[Array, "B S H h"]:
    """Do the same by a matmul; each sum has only one term that is not zero, so nothing is
    rounded.
    """
    turn_hh = _quarter_turn(jnp.eye(x_BSHh.shape[-1], dtype=x_BSHh.dtype))
    return jnp.matmul(x_BSHh, turn_hh, precision="highest")


def vocab_table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Make a vocabulary table [V, D]: the input embedding or the output head.

    The vocabulary is rounded up so that a mesh axis can divide it. Rows past the vocabulary are
    never read.
    """
    rows = -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple
    return param(rngs, normal(config.init_std), vocab=rows, embed=config.embed)


_HEADS: tuple[LogicalAxis, ...] = ("heads", "head_dim")
_KV_HEADS: tuple[LogicalAxis, ...] = ("kv_heads", "head_dim")
_MATRICES = ("q", "k", "v", "out", "gate", "up", "down")


class Embed(nnx.Module):
    """Token embedding, with a learned position embedding added where the family has one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.dropout = config.dropout
        self.learned = family.positions == "learned"
        self.scale = math.sqrt(config.embed) if family.scaled_embedding else 1.0
        self.tokens = vocab_table(config, rngs)
        if self.learned:
            self.positions = param(
                rngs, normal(config.init_std), _positions=config.max_seq_len, embed=config.embed
            )

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        ops: Ops,
        key: jax.Array | None,
    ) -> Float[Array, "B S D"]:
        x_BSD = ops.lookup(self.tokens[...], tokens_BS, "vocab")
        if self.scale != 1:
            x_BSD = x_BSD * jnp.asarray(self.scale, x_BSD.dtype)
        if self.learned:
            x_BSD += ops.lookup(self.positions[...], positions_BS, None)
        return dropout(x_BSD, self.dropout, key)


class Block(nnx.Module):
    """Pre-norm attention, followed by a pre-norm MLP or experts; where the family has post-norms,
    what they add is normed too."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config, self.family, self.masks = config, family_of(config), layer_masks(config)
        D = config.embed
        H = config.heads
        F = config.mlp
        K = config.kv_head_count
        h = config.head_size
        if self.family.grouped:
            kv = {"kv_heads": K}
        else:
            kv = {"heads": H}
        init = normal(config.init_std)
        # GPT-2 report, section 2.3
        init_residual = normal(config.init_std / math.sqrt(2 * config.layers))
        norm = _NORMS[self.family.norm]
        self.attention_norm = norm(config, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, **kv, head_dim=h)
        self.v = param(rngs, init, embed=D, **kv, head_dim=h)
        self._add_bias("q", rngs, heads=H, head_dim=h)
        self._add_bias("k", rngs, **kv, head_dim=h)
        self._add_bias("v", rngs, **kv, head_dim=h)
        self.out = param(rngs, init_residual, heads=H, head_dim=h, embed=D)
        self._add_bias("out", rngs, embed=D)
        if self.family.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config, rngs, head_dim=h),
                RMSNorm(config, rngs, head_dim=h),
            )
        self.mlp_norm = norm(config, rngs)
        if self.family.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(config, rngs), norm(config, rngs)
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
        text_BS: Bool[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        config = self.config
        family = self.family
        rate = self.config.dropout
        weights_key, attention_key, mlp_key = (
            (None,) * 3 if key is None else jax.random.split(key, 3)
        )
        x_BSD = named(x_BSD, "block_input")
        with jax.named_scope("attention"):
            kv_heads = _KV_HEADS if family.grouped else _HEADS
            outputs: dict[str, Axes] = {"q": _HEADS, "k": kv_heads, "v": kv_heads}
            normed_BSD = named(self.attention_norm(x_BSD), "attention_norm")
            q_BSHh, k_BSKh, v_BSKh = self._columns(normed_BSD, outputs, ops, "attention_seq")
            # whose backward starts from what the matmul made, so that is what bears the name
            if family.qk_norm:
                q_BSHh = self.q_norm(named(q_BSHh, "q"))
                k_BSKh = self.k_norm(named(k_BSKh, "k"))
            if family.positions == "rotary":
                frequencies = rotary_frequencies(config, has_window(config.masks[kind]))
                scale = config.query_scale * math.sqrt(config.head_size) or 1.0
                q_BSHh = rotate(q_BSHh, positions_BS, frequencies, scale)
                k_BSKh = rotate(k_BSKh, positions_BS, frequencies)
            if not family.qk_norm:
                q_BSHh = named(q_BSHh, "q")
                k_BSKh = named(k_BSKh, "k")
            mixed_BSHh = ops.attention(
                q_BSHh,
                k_BSKh,
                named(v_BSKh, "v"),
                self.masks[kind],
                segments_BS,
                rate,
                weights_key,
                config.attention_softcap,
            )
            out_BSD = self._row(mixed_BSHh, "out", _HEADS, ops, "attention_seq")
            if family.post_norms:
                out_BSD = self.attention_post_norm(named(out_BSD, "attention_proj"))
            x_BSD = named(x_BSD + dropout(out_BSD, rate, attention_key), "mlp_input")
        with jax.named_scope("mlp"):
            y_BSD, routed = self._mlp(named(self.mlp_norm(x_BSD), "mlp_norm"), text_BS, ops)
            if family.post_norms:
                y_BSD = self.mlp_post_norm(named(y_BSD, "mlp_out"))
            return x_BSD + dropout(y_BSD, rate, mlp_key), routed

    def _mlp(
        self, x_BSD: Float[Array, "B S D"], text_BS: Bool[Array, "B S"] | None, ops: Ops
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        if not self.family.gated:
            (up_BSF,) = self._columns(x_BSD, {"up": ("mlp",)}, ops)
            hidden_BSF = jax.nn.gelu(named(up_BSF, "up"), approximate=True)
        elif self.config.experts:
            weights = self.router[...], self.gate[...], self.up[...], self.down[...]
            return ops.expert_mlp(x_BSD, *weights, self.config.experts_per_token, text_BS)
        else:
            gate_BSF, up_BSF = self._columns(
                x_BSD,
                {"gate": ("mlp",), "up": ("mlp",)},
                ops,
            )
            if self.family.activation == "silu":
                activation = jax.nn.silu
            else:
                activation = jax.nn.gelu
            hidden_BSF = activation(named(gate_BSF, "gate")) * named(up_BSF, "up")
        return self._row(named(hidden_BSF, "mlp_hidden"), "down", ("mlp",), ops), None

    def _columns(
        self,
        x_BSD: Float[Array, "B S D"],
        names: dict[str, Axes],
        ops: Ops,
        seq: LogicalAxis = "seq",
    ) -> tuple[Array, ...]:
        """Multiply x by several matrices, given with the axes of their outputs; the A's of LoRA
        share its gather.
        """
        adapted = [name for name in names if hasattr(self, f"{name}_lora_a")]
        weights = [*names, *(f"{name}_lora_a" for name in adapted)]
        low: Axes = ("rank",)
        axes = [*names.values(), *[low] * len(adapted)]
        biases = [self._bias(name) for name in weights]
        found = ops.column_linear(
            x_BSD, [getattr(self, name)[...] for name in weights], axes, biases, seq
        )
        ys = dict(zip(weights, found, strict=True))
        for name in adapted:
            ys[name] += self._expand(
                name,
                ys[f"{name}_lora_a"],
                names[name],
                ops,
                seq,
            )
        return tuple(ys[name] for name in names)

    def _row(
        self, h_BSI: Array, name: str, axes: Axes, ops: Ops, seq: LogicalAxis = "seq"
    ) -> Float[Array, "B S D"]:
        """Multiply a hidden array by a matrix to the residual stream."""
        y_BSD = ops.row_linear(
            h_BSI,
            getattr(self, name)[...],
            axes,
            self._bias(name),
            seq,
        )
        if not hasattr(self, f"{name}_lora_a"):
            return y_BSD
        low_BSr = ops.row_linear(
            h_BSI, getattr(self, f"{name}_lora_a")[...], axes, None, seq, "rank"
        )
        return y_BSD + self._expand(name, low_BSr, ("embed",), ops, "residual_seq")

    def _expand(
        self,
        name: str,
        low_BSr: Array,
        axes: Axes,
        ops: Ops,
        seq: LogicalAxis,
    ) -> Array:
        weight = getattr(self, f"{name}_lora_b")[...]
        return ops.rank_linear(lora_scale(self.config) * low_BSr, weight, axes, seq)

    def _add_lora(self, name: str, rngs: nnx.Rngs) -> None:
        """Declare A and B beside a matrix, with the values that PEFT gives them: A is uniform
        within 1 / sqrt(inputs), and B is zero."""
        if self.config.experts:
            experts = {"gate", "up", "down"}
        else:
            experts = set()
        there = [name for name in _MATRICES if hasattr(self, name) and name not in experts]
        if name not in there:
            if name in experts:
                why = f"{name} is a matrix of experts"
            else:
                why = f"no matrix {name!r}{suggest(name, there)}"
            raise UserError(
                f"model.lora.targets: {why}: LoRA may be beside {', '.join(there)} of this model"
            )
        weight = getattr(self, name)
        rank = self.config.lora.rank
        dims = list(zip(weight.get_metadata("axes"), weight.shape, strict=True))
        ins = len(dims) - 1 if dims[-1][0] == "embed" else 1
        bound = 1 / math.sqrt(math.prod(size for _, size in dims[:ins]))
        uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
        setattr(
            self,
            f"{name}_lora_a",
            param(rngs, uniform, **dict(dims[:ins]), rank=rank),
        )
        setattr(
            self,
            f"{name}_lora_b",
            param(rngs, zeros, rank=rank, **dict(dims[ins:])),
        )

    def _add_bias(self, name: str, rngs: nnx.Rngs, **dims: int) -> None:
        if name in self.family.biases:
            setattr(self, f"{name}_bias", param(rngs, zeros, **dims))

    def _bias(self, name: str) -> Array | None:
        bias: nnx.Param | None = getattr(self, f"{name}_bias", None)
        return None if bias is None else bias[...]


class Head(nnx.Module):
    """A final norm and the vocabulary matrix, which is the embedding's own if the head is tied,
    otherwise another.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.norm = _NORMS[family_of(config).norm](config, rngs)
        if not config.tied_head:
            self.table = vocab_table(config, rngs)

    def __call__(
        self, x_BSD: Float[Array, "B S D"], embedding_VD: Float[Array, "V D"]
    ) -> tuple[Array, Array]:
        return self.norm(x_BSD), self.table[...] if hasattr(self, "table") else embedding_VD
