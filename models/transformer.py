"""The block of every family, written with logical axes only: attention and an MLP or experts, with
the norms that stand before or after them.

What sets families apart is asked of their row in `jaxpar.models.families`; no name of one stands
here.

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, E experts.
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
from jaxpar.models.parameters import ACTIVATIONS, Initializer, normal, param, zeros
from jaxpar.models.positions import count_positions, rotary_frequencies, rotate
from jaxpar.models.sparsity import weight_form
from jaxpar.parallel import dropout
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.mesh_ops import ops_without_plan
from jaxpar.parallel.ops import AttentionCall, ExpertsCall, Ops
from jaxpar.parallel.remat import named


class Block(nnx.Module):
    """Attention, followed by an MLP or experts. A norm is before each, or after what each adds is
    added; where the family has post-norms, what they add is normed too. Or attention beside the
    MLP, both from one norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.config = config
        self.family = family
        self.masks = layer_masks(config)
        norm = NORMS[family.norm]
        # The order is that in which parameters draw their random numbers, and are listed.
        if not family.norm_after:
            self.attention_norm = norm(config, rngs)
        self._declare_attention(rngs)
        if family.norm_after:
            self.attention_norm = norm(config, rngs)
        elif config.sublayers == "serial":
            self.mlp_norm = norm(config, rngs)
        if family.post_norms:
            self.attention_post_norm = norm(config, rngs)
            self.mlp_post_norm = norm(config, rngs)
        self._declare_mlp(rngs)
        if family.norm_after:
            self.mlp_norm = norm(config, rngs)
        names = ["q", "k", "v", "out", *self._mlp_input_names(), "down"]
        self.lora = lora_pairs({name: getattr(self, name) for name in names}, config, rngs)

    def _declare_attention(self, rngs: nnx.Rngs) -> None:
        """Declare the matrices of attention, their biases, and the norms of queries and keys."""
        config = self.config
        D = config.embed
        H = config.heads
        h = config.head_size
        kv = {"kv_heads": config.kv_head_count} if self.family.grouped else {"heads": H}
        init = normal(config.init_std)
        bias = partial(_bias, self.family, rngs)
        self.q = param(rngs, init, embed=D, heads=H, head_dim=h)
        self.k = param(rngs, init, embed=D, **kv, head_dim=h)
        self.v = param(rngs, init, embed=D, **kv, head_dim=h)
        self.q_bias = bias("q", heads=H, head_dim=h)
        self.k_bias = bias("k", **kv, head_dim=h)
        self.v_bias = bias("v", **kv, head_dim=h)
        self.out = param(rngs, self._init_residual(), heads=H, head_dim=h, embed=D)
        self.out_bias = bias("out", embed=D)
        if self.family.qk_norm:
            self.q_norm = RMSNorm(config, rngs, head_dim=h)
            self.k_norm = RMSNorm(config, rngs, head_dim=h)

    def _declare_mlp(self, rngs: nnx.Rngs) -> None:
        """Declare the matrices of the MLP and its biases, or the router and the experts."""
        config = self.config
        D = config.embed
        F = config.mlp
        init = normal(config.init_std)
        init_residual = self._init_residual()
        bias = partial(_bias, self.family, rngs)
        expert: dict[str, int] = {}
        if config.experts:
            self.router = param(rngs, init, embed=D, _experts=config.experts)
            expert = {"experts": config.experts}
        if self.family.gated:
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

    def _init_residual(self) -> Initializer:
        """What a matrix begins with that adds to the stream (GPT-2 report, section 2.3)."""
        return normal(self.config.init_std / math.sqrt(2 * self.config.layers))

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
        if self.config.sublayers == "parallel":
            with jax.named_scope("sublayers"):
                normed_BSD = named(self.attention_norm(x_BSD), "attention_norm")
                y_BSD = self.together(normed_BSD, positions_BS, segments_BS, ops, weights_key, kind)
                return x_BSD + self._dropout(y_BSD, mlp_key)
        with jax.named_scope("attention"):
            normed_BSD = self._attention_input(x_BSD, layer)
            out_BSD = self.attention(normed_BSD, positions_BS, segments_BS, ops, weights_key, kind)
            if self.family.post_norms:
                out_BSD = self.attention_post_norm(named(out_BSD, "attention_proj"))
            x_BSD = named(x_BSD + self._dropout(out_BSD, attention_key), "mlp_input")
            if self.family.norm_after:
                x_BSD = named(self.attention_norm(x_BSD), "mlp_norm")
        with jax.named_scope("mlp"):
            y_BSD, routed = self._mlp_or_experts(x_BSD, text_BS, ops)
            if self.family.post_norms:
                y_BSD = self.mlp_post_norm(named(y_BSD, "mlp_out"))
            x_BSD = x_BSD + self._dropout(y_BSD, mlp_key)
            if self.family.norm_after:
                x_BSD = self.mlp_norm(named(x_BSD, "mlp_out"))
        if routed is None:
            return x_BSD
        return (x_BSD, routed)

    def _dropout(self, x_BSD: Float[Array, "B S D"], key: jax.Array | None) -> Array:
        """What a sublayer adds, after dropout."""
        return dropout(x_BSD, self.config.dropout, key)

    def _attention_input(
        self, x_BSD: Float[Array, "B S D"], layer: Int[Array, ""] | int | None
    ) -> Float[Array, "B S D"]:
        """What attention reads: the stream after its norm, or as it is."""
        if self.family.norm_after:
            return x_BSD
        normed_BSD = self.attention_norm(x_BSD)
        if not self.family.first_norm:
            normed_BSD = jnp.where(_number(layer) == 0, x_BSD, normed_BSD)
        return named(normed_BSD, "attention_norm")

    def _mlp_or_experts(
        self, x_BSD: Float[Array, "B S D"], text_BS: Bool[Array, "B S"] | None, ops: Ops
    ) -> tuple[Float[Array, "B S D"], RouterSums | None]:
        """Compute what the MLP adds to the stream, or the experts with those that are shared."""
        if self.family.norm_after:
            normed_BSD = x_BSD
        else:
            normed_BSD = named(self.mlp_norm(x_BSD), "mlp_norm")
        if not self.config.experts:
            return self.mlp(normed_BSD, ops), None
        y_BSD, routed = self.experts(normed_BSD, text_BS, ops)
        if self.config.shared_experts:
            with jax.named_scope("shared"):
                y_BSD += self.mlp(normed_BSD, ops, "shared_")
        return y_BSD, routed

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
        call = self.attention_call(q_BSHh, k_BSKh, v_BSKh, positions_BS, segments_BS, key, kind)
        mixed_BSHh = ops.attention(call)
        return row_linear(mixed_BSHh, self.linear("out"), ops, "attention_seq")

    def attention_call(
        self,
        q_BSHh: Float[Array, "B S H h"],
        k_BSKh: Float[Array, "B S K h"],
        v_BSKh: Float[Array, "B S K h"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        key: jax.Array | None,
        kind: int,
    ) -> AttentionCall:
        """Norm and turn queries and keys as the family does: what attention is asked.

        Args:
          q_BSHh: the queries as the matmul made them.
          k_BSKh: the keys likewise.
          v_BSKh: the values likewise.
          positions_BS: the place of each token in its document.
          segments_BS: the number of each token's document; None = a row is one.
          key: the key of dropout; None = no dropout.
          kind: the number of the layer modulo `config.kinds`.

        Returns:
          The call, whose answer is the mixed values of each head.
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
        return AttentionCall(
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
        call = self.attention_call(q_BSHh, k_BSKh, v_BSKh, positions_BS, segments_BS, key, kind)
        mixed_BSHh = ops.attention(call)
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
        """The matrices with which an MLP reads the stream."""
        return [self.linear(f"{prefix}{name}") for name in self._mlp_input_names()]

    def _mlp_input_names(self) -> list[str]:
        """Gate and up, or up alone."""
        return ["gate", "up"] if self.family.gated else ["up"]

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
        call = ExpertsCall(
            x_BSD,
            self.router[...],
            self.linear("gate").view,
            self.linear("up").view,
            self.linear("down").view,
            self.config.experts_per_token,
            text_BS,
            self.config.router,
        )
        return ops.expert_mlp(call)


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
