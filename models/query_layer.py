"""The layer on top of the blocks that asks for the next token by its position alone: the query
layer of PanGu-alpha (Zeng et al. 2021, arXiv:2104.12369, section 3.1).

Shapes: B batch, S sequence, D embed, H heads, h head_dim.
"""

from __future__ import annotations

from dataclasses import replace

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.models.linears import column_linears, row_linear
from jaxpar.models.parameters import normal, param
from jaxpar.models.transformer import Block
from jaxpar.parallel.ops import Ops

_KEY = 2**31 - 1
"""Folded into a key for the query layer; those of the other parts and layers come by `split`."""


def query_key_of(key: jax.Array) -> jax.Array:
    """Return the key of the query layer, given that of a model's parameters, or of the dropout of
    its blocks.
    """
    return jax.random.fold_in(key, _KEY)


class QueryLayer(Block):
    """A block whose queries are made of an embedding of the next position, and not of the residual
    stream; keys, values and what it adds to are those of a block.

    It is one layer, beside the stack, and so it has neither LoRA's pairs nor sparse matrices.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(replace(config, lora=Lora(), sparsity=Sparsity()), rngs)
        self.next_positions = param(
            rngs,
            normal(config.init_std),
            _positions=config.max_seq_len,
            embed=config.embed,
        )

    def attention(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: jax.Array | None = None,
        kind: int = 0,
    ) -> Float[Array, "B S D"]:
        """Compute what attention adds to the residual stream; see `Block.attention`.

        Row t of the table is the embedding of the position after t, which a token at t predicts.
        """
        next_BSD = ops.lookup(self.next_positions[...], positions_BS, None)
        (q_BSHh,) = column_linears(next_BSD, [self.linear("q")], ops, "attention_seq")
        of_stream = [self.linear("k"), self.linear("v")]
        k_BSHh, v_BSHh = column_linears(x_BSD, of_stream, ops, "attention_seq")
        call = self.attention_call(q_BSHh, k_BSHh, v_BSHh, positions_BS, segments_BS, key, kind)
        mixed_BSHh = ops.attention(call)
        return row_linear(mixed_BSHh, self.linear("out"), ops, "attention_seq")
