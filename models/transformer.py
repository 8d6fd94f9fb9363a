"""The transformer that all families share, written with logical axes only: norms, rotary
positions; and of these an embedding and a block. Norms and the head have rooms of their own.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab, E experts.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.models.families import Family, family_of
from jaxpar.models.linears import Linear, column_linears, row_linear, row_linears
from jaxpar.models.lora import lora_pairs
from jaxpar.models.masks import has_window, layer_masks
from jaxpar.models.norms import NORMS, RMSNorm
from jaxpar.models.parameters import ACTIVATIONS, normal, param, vocab_table, zeros
from jaxpar.models.sparsity import weight_form
from jaxpar.parallel import dropout
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.ops import Ops, ops_without_plan
from jaxpar.parallel.remat import named


def rotary_frequencies(config: ModelConfig, local: bool = False) -> Float[Array, " h/2"]:
    """Compute the angle per position of each pair of features, extended where `rope_factor` > 1.

    RoPE is Su et al. 2021, arXiv:2104.09864. The linear extension divides all by the factor. That
    of llama3 keeps wavelengths below original/high_freq_factor, divides those above
    original/low_freq_factor, and blends in between (Llama 3.1 release, `apply_scaling`).

    Args:
      config: the sizes of the model.
      local: whether it is for layers with a window, which have `rope_local_theta` if there is one.

    Returns:
      The angles [h/2], in radians.
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
    checkpoints).

    Args:
      x_BSHh: queries or keys.
      positions_BS: the places of the tokens.
      frequencies: the angle per position of each pair, in radians.
      scale: a factor of the result, applied before it is rounded.

    Returns:
      An array of the shape and dtype of `x_BSHh`.
    """
    angles_BSh = positions_BS[..., None].astype(jnp.float32) * frequencies
    angles_BS1h = angles_BSh[:, :, None, :]
    cos = jnp.tile(jnp.cos(angles_BS1h), 2)
    sin = jnp.tile(jnp.sin(angles_BS1h), 2)
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


def count_positions(x_BS: Array) -> Int[Array, "B S"]:
    """The places of the tokens of rows [B, S, ...] that are one document each."""
    rows, length = x_BS.shape[:2]
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))


class Embed(nnx.Module):
    """Token embedding, to which a learned embedding of the position and of the token's type are
    added where the family has them, and a norm of the sum.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.dropout = config.dropout
        self.scale = math.sqrt(config.embed) if family.scaled_embedding else 1.0
        self.tokens = vocab_table(config, rngs)
        if family.positions == "learned":
            init = normal(config.init_std)
            self.positions = param(rngs, init, _positions=config.max_seq_len, embed=config.embed)
        else:
            self.positions = None
        if config.token_types:
            init = normal(config.init_std)
            self.types = param(rngs, init, _types=config.token_types, embed=config.embed)
        else:
            self.types = None
        self.norm = NORMS[family.norm](config, rngs) if family.embedding_norm else None

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"] | None = None,
        ops: Ops | None = None,
        key: jax.Array | None = None,
        types_BS: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return the residual stream.

        Args:
          tokens_BS: token ids.
          positions_BS: the place of each token in its document; None = 0, 1, 2 and so on.
          ops: the ops of a plan; None = plain mathematics in float32.
          key: the key of dropout; None = no dropout.
          types_BS: the types of the tokens; None = all are of type 0.

        Raises:
          UserError: types are given, and the model has none.
        """
        ops = ops or ops_without_plan()
        x_BSD = ops.lookup(self.tokens[...], tokens_BS, "vocab")
        if self.scale != 1:
            x_BSD = x_BSD * jnp.asarray(self.scale, x_BSD.dtype)
        if self.positions is not None:
            if positions_BS is None:
                places_BS = count_positions(tokens_BS)
            else:
                places_BS = positions_BS
            x_BSD += ops.lookup(self.positions[...], places_BS, None)
        if self.types is not None:
            if types_BS is None:
                types_BS = jnp.zeros_like(tokens_BS)
            x_BSD += ops.lookup(self.types[...], types_BS, None)
        elif types_BS is not None:
            raise UserError(
                "the batch has token_types, and the model has no types of tokens: leave them out, "
                "or set model.token_types"
            )
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return dropout(x_BSD, self.dropout, key)


class Block(nnx.Module):
    """Attention, followed by an MLP or experts. A norm is before each, or after what each adds is
    added; where the family has post-norms, what they add is normed too. Or attention beside the
    MLP, both from one norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.config = config
        self.family = family
        self.masks = layer_masks(config)
        D = config.embed
        H = config.heads
        F = config.mlp
        h = config.head_size
        if family.grouped:
            kv = {"kv_heads": config.kv_head_count}
        else:
            kv = {"heads": H}
        init = normal(config.init_std)
        # GPT-2 report, section 2.3
        init_residual = normal(config.init_std / math.sqrt(2 * config.layers))
        norm = NORMS[family.norm]
        bias = partial(_bias, family, rngs)
        if not family.norm_after:
            self.attention_norm = norm(config, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, **kv, head_dim=h)
        self.v = param(rngs, init, embed=D, **kv, head_dim=h)
        self.q_bias = bias("q", heads=H, head_dim=h)
        self.k_bias = bias("k", **kv, head_dim=h)
        self.v_bias = bias("v", **kv, head_dim=h)
        self.out = param(rngs, init_residual, heads=H, head_dim=h, embed=D)
        self.out_bias = bias("out", embed=D)
        if family.qk_norm:
            self.q_norm = RMSNorm(config, rngs, head_dim=h)
            self.k_norm = RMSNorm(config, rngs, head_dim=h)
        if family.norm_after:
            self.attention_norm = norm(config, rngs)
        elif config.sublayers == "serial":
            self.mlp_norm = norm(config, rngs)
        if family.post_norms:
            self.attention_post_norm = norm(config, rngs)
            self.mlp_post_norm = norm(config, rngs)
        expert: dict[str, int] = {}
        if config.experts:
            self.router = param(rngs, init, embed=D, _experts=config.experts)
            expert = {"experts": config.experts}
        if family.gated:
            self.gate = param(rngs, init, **expert, embed=D, mlp=F)
        self.up = param(rngs, init, **expert, embed=D, mlp=F)
        self.up_bias = bias("up", mlp=F)
        self.down = param(rngs, init_residual, **expert, mlp=F, embed=D)
        self.down_bias = bias("down", embed=D)
        if config.shared_experts:
            wide = config.shared_experts * F
            self.shared_gate = param(rngs, init, embed=D, mlp=wide)
            self.shared_up = param(rngs, init, embed=D, mlp=wide)
            self.shared_down = param(rngs, init_residual, mlp=wide, embed=D)
        if family.norm_after:
            self.mlp_norm = norm(config, rngs)
        matrices = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "out": self.out,
        }
        matrices |= {"gate": self.gate} if family.gated else {}
        matrices |= {"up": self.up, "down": self.down}
        self.lora = lora_pairs(matrices, config, rngs)

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"] | None = None,
        segments_BS: Int[Array, "B S"] | None = None,
        ops: Ops | None = None,
        key: jax.Array | None = None,
        kind: int = 0,
        text_BS: Bool[Array, "B S"] | None = None,
        layer: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "B S D"] | tuple[Float[Array, "B S D"], RouterSums]:
        """Run the layer; see `jaxpar.models.parts.BlockPart` for what it is given and returns.

        Called with `x_BSD` alone it is plain mathematics in the dtype of `x_BSD`, on one document a
        row, whose tokens are in their order, without dropout.
        """
        ops = ops or ops_without_plan(x_BSD.dtype.name)
        if positions_BS is None:
            positions_BS = count_positions(x_BSD)
        attention_key = None
        mlp_key = None
        weights_key = None
        if key is not None:
            weights_key, attention_key, mlp_key = jax.random.split(key, 3)
        rate = self.config.dropout
        if self.config.sublayers == "parallel":
            with jax.named_scope("sublayers"):
                normed_BSD = named(self.attention_norm(x_BSD), "attention_norm")
                y_BSD = self.together(normed_BSD, positions_BS, segments_BS, ops, weights_key, kind)
                return x_BSD + dropout(y_BSD, rate, mlp_key)
        with jax.named_scope("attention"):
            if self.family.norm_after:
                normed_BSD = x_BSD
            else:
                normed_BSD = self.attention_norm(x_BSD)
                if not self.family.first_norm:
                    normed_BSD = jnp.where(_number(layer) == 0, x_BSD, normed_BSD)
                normed_BSD = named(normed_BSD, "attention_norm")
            out_BSD = self.attention(normed_BSD, positions_BS, segments_BS, ops, weights_key, kind)
            if self.family.post_norms:
                out_BSD = self.attention_post_norm(named(out_BSD, "attention_proj"))
            x_BSD = named(x_BSD + dropout(out_BSD, rate, attention_key), "mlp_input")
            if self.family.norm_after:
                x_BSD = named(self.attention_norm(x_BSD), "mlp_norm")
        with jax.named_scope("mlp"):
            if self.family.norm_after:
                normed_BSD = x_BSD
            else:
                normed_BSD = named(self.mlp_norm(x_BSD), "mlp_norm")
            routed = None
            if self.config.experts:
                y_BSD, routed = self.experts(normed_BSD, text_BS, ops)
                if self.config.shared_experts:
                    with jax.named_scope("shared"):
                        y_BSD += self.mlp(normed_BSD, ops, "shared_")
            else:
                y_BSD = self.mlp(normed_BSD, ops)
            if self.family.post_norms:
                y_BSD = self.mlp_post_norm(named(y_BSD, "mlp_out"))
            x_BSD = x_BSD + dropout(y_BSD, rate, mlp_key)
            if self.family.norm_after:
                x_BSD = self.mlp_norm(named(x_BSD, "mlp_out"))
        if routed is None:
            return x_BSD
        return (x_BSD, routed)

    def linear(self, name: str) -> Linear:
        """A matrix of the block as it multiplies, by its name."""
        bias = getattr(self, f"{name}_bias", None)
        form = weight_form(self.config, name)
        return Linear(getattr(self, name), bias, self.lora.beside(name), form, name)

    def attention(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None = None,
        kind: int = 0,
    ) -> Float[Array, "B S D"]:
        """Compute what attention adds to the residual stream.

        Args:
          x_BSD: the residual stream after its norm.
          positions_BS: as for a block.
          segments_BS: as for a block.
          ops: as for a block.
          key: as for a block.
          kind: as for a block.

        Returns:
          What is added, in the layout of the stream.
        """
        linears = [self.linear("q"), self.linear("k"), self.linear("v")]
        q_BSHh, k_BSKh, v_BSKh = column_linears(x_BSD, linears, ops, "attention_seq")
        mixed_BSHh = self.attend(q_BSHh, k_BSKh, v_BSKh, positions_BS, segments_BS, ops, key, kind)
        return row_linear(mixed_BSHh, self.linear("out"), ops, "attention_seq")

    def attend(
        self,
        q_BSHh: Float[Array, "B S H h"],
        k_BSKh: Float[Array, "B S K h"],
        v_BSKh: Float[Array, "B S K h"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None,
        kind: int,
    ) -> Float[Array, "B S H h"]:
        """Norm and turn queries and keys as the family does, and attend.

        Args:
          q_BSHh: the queries as the matmul made them, and so are the keys and values.
          k_BSKh: see there.
          v_BSKh: see there.
          positions_BS: as for a block.
          segments_BS: as for a block.
          ops: as for a block.
          key: as for a block.
          kind: as for a block.

        Returns:
          The mixed values of each head.
        """
        config = self.config
        family = self.family
        # A norm's backward starts from what the matmul made, so that is what bears the name.
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
        return ops.attention(
            q_BSHh,
            k_BSKh,
            named(v_BSKh, "v"),
            self.masks[kind],
            segments_BS,
            config.dropout,
            key,
            config.attention_softcap,
        )

    def together(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None,
        kind: int,
    ) -> Float[Array, "B S D"]:
        """Compute what attention and the MLP add to the residual stream, from the same input.

        All matrices that read the stream share its gather, and what both sublayers add is summed
        before it is scattered.

        Args:
          x_BSD: the residual stream after its norm.
          positions_BS: as for a block.
          segments_BS: as for a block.
          ops: as for a block.
          key: as for a block.
          kind: as for a block.

        Returns:
          What is added, in the layout of the stream.
        """
        of_heads = [self.linear("q"), self.linear("k"), self.linear("v")]
        of_mlp = self.mlp_inputs()
        seqs = ["attention_seq"] * 3 + ["seq"] * len(of_mlp)
        found = column_linears(x_BSD, of_heads + of_mlp, ops, seqs)
        q_BSHh, k_BSKh, v_BSKh, *wide_BSF = found
        mixed_BSHh = self.attend(q_BSHh, k_BSKh, v_BSKh, positions_BS, segments_BS, ops, key, kind)
        hidden_BSF = self.mlp_hidden(wide_BSF)
        return row_linears(
            [mixed_BSHh, hidden_BSF],
            [self.linear("out"), self.linear("down")],
            ops,
            ["attention_seq", "seq"],
        )

    def mlp(
        self,
        x_BSD: Float[Array, "B S D"],
        ops: Ops,
        prefix: str = "",
    ) -> Float[Array, "B S D"]:
        """Compute what an MLP without experts adds to the residual stream.

        Args:
          x_BSD: the residual stream after its norm.
          ops: as for a block.
          prefix: what the names of its matrices and activations begin with.

        Returns:
          What is added, in the layout of the stream.
        """
        wide_BSF = column_linears(x_BSD, self.mlp_inputs(prefix), ops)
        hidden_BSF = self.mlp_hidden(wide_BSF, prefix)
        return row_linear(hidden_BSF, self.linear(f"{prefix}down"), ops)

    def mlp_inputs(self, prefix: str = "") -> list[Linear]:
        """The matrices with which an MLP reads the stream: gate and up, or up alone."""
        names = ["gate", "up"] if self.family.gated else ["up"]
        return [self.linear(f"{prefix}{name}") for name in names]

    def mlp_hidden(
        self, wide_BSF: list[Float[Array, "B S F"]], prefix: str = ""
    ) -> Float[Array, "B S F"]:
        """Compute the hidden features of an MLP from what `mlp_inputs` made."""
        if self.config.activation == "family":
            activation = ACTIVATIONS[self.family.activation]
        else:
            activation = ACTIVATIONS[self.config.activation]
        *gates_BSF, up_BSF = wide_BSF
        if gates_BSF:
            gate_BSF = named(gates_BSF[0], f"{prefix}gate")
            hidden_BSF = activation(gate_BSF) * named(up_BSF, f"{prefix}up")
        else:
            hidden_BSF = activation(named(up_BSF, f"{prefix}up"))
        return named(hidden_BSF, f"{prefix}mlp_hidden")

    def experts(
        self, x_BSD: Float[Array, "B S D"], text_BS: Bool[Array, "B S"] | None, ops: Ops
    ) -> tuple[Float[Array, "B S D"], RouterSums]:
        """Compute what the experts add to the residual stream.

        Args:
          x_BSD: the residual stream after its norm.
          text_BS: which tokens are text; None = all are.
          ops: as for a block.

        Returns:
          What is added, in the layout of the stream, and the router's sums.
        """
        return ops.expert_mlp(
            x_BSD,
            self.router[...],
            self.linear("gate").view,
            self.linear("up").view,
            self.linear("down").view,
            self.config.experts_per_token,
            text_BS,
            self.config.router,
        )


def _number(layer: Int[Array, ""] | int | None) -> Int[Array, ""] | int:
    """The number of a layer, which a family asks for whose first layer differs."""
    if layer is None:
        raise UserError(
            "the first layer of this family is another than those after it, and the block was not "
            "told its number: give it `layer`"
        )
    return layer


def _bias(
    family: Family,
    rngs: nnx.Rngs,
    name: str,
    **dims: int,
) -> nnx.Param | None:
    """Declare the bias of a linear, if the family has one there."""
    if name in family.biases:
        return param(rngs, zeros, **dims)
    return None
