"""What follows the last block of a transformer: a norm, what an encoder does to the stream before
it is scored, and the vocabulary matrix.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.models.families import family_of
from jaxpar.models.norms import NORMS
from jaxpar.models.parameters import ACTIVATIONS, normal, param, vocab_rows, vocab_table, zeros
from jaxpar.models.parts import HeadOutput
from jaxpar.parallel.mesh_ops import ops_without_plan
from jaxpar.parallel.ops import Ops


class Transform(nnx.Module):
    """A linear, the activation of the MLP and a norm, which encoders have before the vocabulary
    matrix (Devlin et al. 2019, arXiv:1810.04805).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        D = config.embed
        self.activation = ACTIVATIONS[family.activation]
        self.dense = param(rngs, normal(config.init_std), embed=D, _transformed=D)
        if "transform" in family.biases:
            self.bias = param(rngs, zeros, embed=D)
        else:
            self.bias = None
        self.norm = NORMS[family.norm](config, rngs)

    def __call__(self, x_BSD: Float[Array, "B S D"], ops: Ops) -> Float[Array, "B S D"]:
        """Transform the residual stream, whose sequence stays where it is."""
        bias = None if self.bias is None else self.bias[...]
        y_BSD = ops.column_linear(x_BSD, self.dense[...], (None,), bias, "residual_seq")
        return self.norm(self.activation(y_BSD))


class Head(nnx.Module):
    """A final norm and a transform, as far as the family has them, and the vocabulary matrix, which
    is the embedding's own if the head is tied, otherwise another.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        family = family_of(config)
        self.norm = NORMS[family.norm](config, rngs) if family.final_norm else None
        self.transform = Transform(config, rngs) if family.transforms else None
        if config.tied_head:
            self.table = None
        else:
            self.table = vocab_table(config, rngs)
        if "vocab" in family.biases:
            self.bias = param(rngs, zeros, vocab=vocab_rows(config))
        else:
            self.bias = None

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        embedding_VD: Float[Array, "V D"] | None = None,
        ops: Ops | None = None,
    ) -> HeadOutput:
        """Return the stream that is scored, and the vocabulary matrix and bias that score it.

        Raises:
          UserError: the head is tied, and the embedding has no parameter `tokens`.
        """
        if self.table is not None:
            table_VD = self.table[...]
        elif embedding_VD is not None:
            table_VD = embedding_VD
        else:
            raise UserError(
                "model.tied_head=true: the head takes the embedding's parameter `tokens`, and "
                "there is none of that name: set it to false"
            )
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        if self.transform is not None:
            x_BSD = self.transform(x_BSD, ops or ops_without_plan(x_BSD.dtype.name))
        bias_V = None if self.bias is None else self.bias[...]
        return HeadOutput(x_BSD, table_VD, bias_V)
