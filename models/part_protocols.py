"""The parts of a model: an embedding, a block and a head, each of anyone's making. This module has
the protocols by which the library calls them, with their arguments and results.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.ops import LogitsCall, Ops

Params: TypeAlias = dict[str, PyTree]
Maker = Callable[[ModelConfig, nnx.Rngs], nnx.Module]
"""The maker of a part of a model: a class of `nnx.Module`, or any other callable that returns one.
"""
OpsMaker = Callable[[Plan], Ops]
"""The maker of the ops that the parts call, from a plan: the class `MeshOps`, for example."""


class HeadOutput(NamedTuple):
    """The output of a head: scores are `x @ table.T + bias`.

    Attributes:
      x_BSD: the stream that is scored.
      table_VD: the vocabulary matrix.
      bias_V: the bias of the scores; None = nothing is added.
    """

    x_BSD: Float[Array, "B S D"]
    table_VD: Float[Array, "V D"]
    bias_V: Float[Array, " V"] | None = None

    def scores(self, config: ModelConfig) -> LogitsCall:
        """Make the call of the ops that compute the scores, or a loss of them."""
        return LogitsCall(
            self.x_BSD, self.table_VD, config.vocab_size, config.logit_softcap, self.bias_V
        )


class EmbedPart(Protocol):
    """The part that turns tokens into the residual stream.

    It is called as a block is (`BlockPart`): with the first argument by position, and with those of
    the others that it has, by name.
    """

    def __call__(
        self,
        tokens_BS: Int[Array, "B S"],
        positions_BS: Int[Array, "B S"],
        ops: Ops,
        key: Array | None,
        types_BS: Int[Array, "B S"] | None,
    ) -> Float[Array, "B S D"]: ...


class BlockPart(Protocol):
    """One layer of a model, as the library calls it.

    `blocks(config, rngs)` makes it, once for each layer, and all layers have the same parameters.
    These are `nnx.Param`, and name their dims as Flax does, by logical axes:
    `nnx.Param(x, out_sharding=("embed", "mlp"))`, or an initializer in `nnx.with_partitioning`. A
    dim without a name is replicated. No variable of another kind is kept between steps, so that
    there can be none.

    `x_BSD` comes by position and the rest by name, and only the arguments that the block has: `def
    __call__(self, x_BSD, ops)` is a block. The library refuses a config that needs an argument that
    the block does not take: packed documents need `segments_BS`, `model.dropout` needs a `key`, and
    layers of several masks need a `kind`.
    """

    def __call__(
        self,
        x_BSD: Float[Array, "B S D"],
        positions_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"] | None,
        ops: Ops,
        key: Array | None,
        kind: int,
        text_BS: Bool[Array, "B S"] | None,
        layer: Int[Array, ""] | int | None,
    ) -> Float[Array, "B S D"] | tuple[Float[Array, "B S D"], RouterSums | None]:
        """Run the layer.

        Args:
          x_BSD: the residual stream, in the plan's compute dtype; it is split over `batch` and
            `residual_seq`.
          positions_BS: int32, the place of each token in its document. A mesh may give the tokens
            of a sequence in another order, and generation gives one token at a time: a block that
            counts places itself is wrong there.
          segments_BS: int32, the number of each token's document; None = a row is one document.
          ops: matmuls, lookups, attention and experts under the plan. Attention through
            `ops.attention` has its cache in generation.
          key: the random key of dropout; None = no dropout.
          kind: the layer's number modulo `config.kinds`, which says which of the masks is its own.
          text_BS: which tokens are text and no padding; None = all are. Routers count the text.
          layer: the layer's number, from 0, which is known at run time only.

        Returns:
          The residual stream, of the shape and dtype of `x_BSD`; or a pair of the stream and the
          router's `RouterSums`.
        """
        ...


class HeadPart(Protocol):
    """The part after the last block, which returns the stream that is scored, the vocabulary matrix
    that scores it, and perhaps, third, a bias of the vocabulary.

    It is called as a block is. `embedding_VD` is the embedding's parameter `tokens`, for a head
    that is tied to it; None where the embedding has no parameter of that name.
    """

    def __call__(
        self, x_BSD: Float[Array, "B S D"], embedding_VD: Float[Array, "V D"] | None, ops: Ops
    ) -> (
        HeadOutput
        | tuple[Float[Array, "B S D"], Float[Array, "V D"]]
        | tuple[Float[Array, "B S D"], Float[Array, "V D"], Float[Array, " V"] | None]
    ): ...


_OF_BLOCKS = frozenset({"positions_BS", "segments_BS", "ops", "key", "kind", "text_BS", "layer"})
GIVEN: dict[str, frozenset[str]] = {
    "embed": frozenset({"positions_BS", "ops", "key", "types_BS"}),
    "blocks": _OF_BLOCKS,
    "query": _OF_BLOCKS,
    "head": frozenset({"embedding_VD", "ops"}),
}
"""The arguments that each part is given by name, after the first."""


def part_name(maker: Maker) -> str:
    """Return the name of a part's maker for messages."""
    return getattr(maker, "__name__", type(maker).__name__)


class Parts(NamedTuple):
    """The makers of a model's parts. The fields have the names of the parts' parameters."""

    embed: Maker
    blocks: Maker
    head: Maker
