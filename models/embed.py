"""The embedding: tokens, and where the family has them their positions and types, as the residual
stream.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.models.families import family_of
from jaxpar.models.norms import NORMS
from jaxpar.models.parameters import normal, param, vocab_table
from jaxpar.models.positions import count_positions
from jaxpar.parallel import dropout
from jaxpar.parallel.mesh_ops import ops_without_plan
from jaxpar.parallel.ops import Ops


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
