"""What a model is made of: an embedding, a block and a head, each of anyone's making. Here is what
the library calls each of them with, and what it takes back.

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
"""Makes a part of a model: a class of `nnx.Module`, or any other callable that returns one."""
OpsMaker = Callable[[Plan], Ops]
"""Makes the ops that the parts call from a plan, such as the class `MeshOps`."""


class HeadOutput(NamedTuple):
    """What a head makes: scores are `x @ table.T + bias`.

    Attributes:
      x_BSD: the stream that is scored.
      table_VD: the vocabulary matrix.
      bias_V: what is added to the scores; None = nothing is.
    """

    x_BSD: Float[Array, "B S D"]
    table_VD: Float[Array, "V D"]
    bias_V: Float[Array, " V"] | None = None

    def scores(self, config: ModelConfig) -> LogitsCall:
        """What the ops are given that make the scores, or a loss of them."""
        return LogitsCall(
            self.x_BSD, self.table_VD, config.vocab_size, config.logit_softcap, self.bias_V
        )


class EmbedPart(Protocol):
    """What turns tokens into the residual stream.

    It is called as a block is (see `BlockPart`): the first argument by its place, and of the others
    those that it has, by their names.
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

    `x_BSD` comes by its place and the rest by name, and only what the block has among its
    arguments: `def __call__(self, x_BSD, ops)` is a block. The library refuses a config that needs
    what the block does not take: packed documents `segments_BS`, `model.dropout` a `key`, and
    layers of several masks a `kind`.
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
          key: the key of dropout; None = no dropout.
          kind: the layer's number modulo `config.kinds`, which says which of the masks is its own.
          text_BS: which tokens are no padding; None = all are. Routers count these.
          layer: the layer's number, from 0, which is not known while the program is traced.

        Returns:
          The residual stream, of the shape and dtype of `x_BSD`; or a pair of that and the router's
          `RouterSums`.
        """
        ...


class HeadPart(Protocol):
    """What follows the last block: the stream that multiplies a vocabulary matrix, and that matrix;
    and perhaps, third, a bias of the vocabulary.

    It is called as a block is. `embedding_VD` is the embedding's parameter `tokens`, for a head
    that is tied to it; None where the embedding has none of that name.
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
    """What a message calls the maker of a part."""
    return getattr(maker, "__name__", type(maker).__name__)


class Parts(NamedTuple):
    """What makes the parts of a model; the names are those of their parameters."""

    embed: Maker
    blocks: Maker
    head: Maker
