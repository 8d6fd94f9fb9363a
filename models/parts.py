"""What a model is made of: an embedding, a block and a head, each of anyone's making.

Here is what the library calls them with, and how a module of Flax NNX is taken apart into a graph,
which is static, and a plain dict of arrays, which jit, scan and shard_map see.

Shapes: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import PyTree
from jaxpar.models.parameters import declared_axes, require_float32
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.ops import Ops

Params: TypeAlias = dict[str, PyTree]
Maker = Callable[[ModelConfig, nnx.Rngs], nnx.Module]
"""Makes a part of a model: a class of `nnx.Module`, or any other callable that returns one."""


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

    @property
    def biases(self) -> dict[str, Array]:
        """The bias as ops take it, by name; without one there is none, so that ops of one's own
        need not know it.
        """
        return {} if self.bias_V is None else {"bias_V": self.bias_V}


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
          ops: `jaxpar.parallel.Ops`, or a class with the same methods: matmuls, lookups,
            attention and experts under the plan. Attention through `ops.attention` has its cache
            in generation.
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
_GIVEN: dict[str, frozenset[str]] = {
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


@dataclass(frozen=True)
class Split:
    """A part, taken apart.

    Attributes:
      graph: the part without its arrays.
      form: the parameters' tree with Flax's own keys, which are numbers in an `nnx.List`.
      axes: the logical axes of every parameter, a tuple with a name or None for each dim, in a dict
        of the parameters' form.
      names: those of the parameters, in the order in which the part declares them.
      takes: the arguments that it takes by name.
      name: what a message calls it.
    """

    graph: nnx.GraphDef
    form: PyTree
    axes: Params
    names: tuple[str, ...]
    takes: frozenset[str]
    name: str

    def __call__(self, params: Params, first: Array, **others: Any) -> Any:
        """Call the part, made of these parameters, with what it takes of the arguments."""
        module: Any = nnx.merge(self.graph, with_keys_of(self.form, params))
        taken = {name: x for name, x in others.items() if name in self.takes}
        return module(first, **taken)


def make_part(
    config: ModelConfig,
    name: str,
    maker: Maker,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Make a part of a model, with its arrays.

    Where its arrays lie is not the part's to say: Flax would place a parameter with names at once,
    on the mesh axes of these names.

    Raises:
      UserError: the maker is a module itself, takes other arguments, or makes no module of Flax
        NNX.
    """
    if isinstance(maker, nnx.Module):
        made_already = type(maker).__name__
        raise UserError(
            f"{name}= takes what makes a module, since each layer has its own, and was given a "
            f"{made_already} that is made already: give the class {made_already}"
        )
    try:
        inspect.signature(maker).bind(config, rngs)
    except TypeError as error:
        raise UserError(
            f"{name}={part_name(maker)} is called with a ModelConfig and an nnx.Rngs: {error}: let "
            "it take (config, rngs)"
        ) from error
    with nnx.use_eager_sharding(False):
        made = maker(config, rngs)
    if not isinstance(made, nnx.Module):
        raise UserError(
            f"{name}={part_name(maker)} made a {type(made).__name__}: a part of a model is an "
            "nnx.Module (a Linen module has a training step of its own, see docs/your_block.md)"
        )
    return made


def init_part(config: ModelConfig, name: str, maker: Maker, key: Array) -> Params:
    """Make fresh parameters of a part."""
    made = make_part(config, name, maker, nnx.Rngs(key))
    return plain_dict(nnx.state(made, nnx.Param))


def plain_dict(
    state: nnx.State,
    of: Callable[[Any], Any] | None = None,
) -> Params:
    """Return a dict of dicts with `of(variable)` of each variable (None = its array), in which all
    keys are words.
    """
    return _with_words(nnx.to_pure_dict(state, of))


# Cached, because a budget asks for the same model some hundred times.
@lru_cache(maxsize=64)
def split_parts(config: ModelConfig, parts: Parts) -> Mapping[str, Split]:
    """Take the parts of a model apart.

    Raises:
      UserError: one is no such part, or takes nothing of what the config needs: see `BlockPart`.
    """
    makers = parts._asdict()
    found = {name: split_part(config, name, maker) for name, maker in makers.items()}
    needs = {"kind": config.kinds > 1, "key": config.dropout > 0}
    whys = {
        "kind": f"model.masks has {config.kinds} masks in turn",
        "key": f"model.dropout={config.dropout}",
    }
    for argument, needed in needs.items():
        if needed and argument not in found["blocks"].takes:
            raise UserError(f"{whys[argument]}, and {found['blocks'].name} takes no `{argument}`")
    return found


def split_part(config: ModelConfig, name: str, maker: Maker) -> Split:
    """Take a part apart, without making its arrays.

    Args:
      config: the sizes of the model.
      name: what the part is: `embed`, `blocks`, `query` or `head`.
      maker: makes it.

    Returns:
      The part.

    Raises:
      UserError: it is no such part.
    """
    names = list[str]()

    def make() -> nnx.Module:
        made = make_part(config, name, maker, nnx.Rngs(0))
        names[:] = _declared_names(made, ())  # here, since Flax sorts what it returns
        return made

    module = nnx.eval_shape(make)
    graph, state, others = nnx.split(module, nnx.Param, ...)
    word = f"{name}={part_name(maker)}"
    if kept := nnx.to_flat_state(others):
        path, variable = kept[0]
        raise UserError(
            f"{word} has {'.'.join(map(str, path))}, a {type(variable).__name__}: nothing but "
            "nnx.Param is kept between steps (a norm keeps no statistics, as LayerNorm does; "
            "dropout is jaxpar.parallel.dropout, with the `key` that a part is given)"
        )
    form = nnx.to_pure_dict(state, lambda leaf: None)
    axes = axes_of(state, word)
    takes = _arguments(module, name, word)
    return Split(graph, form, axes, tuple(names), takes, word)


def axes_of(state: Mapping[Any, Any], name: str) -> Params:
    """The logical axes of all variables of a state, as a dict of dicts."""
    found = {}
    for key, one in state.items():
        path = f"{name}.{key}"
        if isinstance(one, nnx.Variable):
            found[str(key)] = declared_axes(one, path)
            require_float32(one.dtype, path)
        else:
            found[str(key)] = axes_of(one, path)
    return found


def _declared_names(module: nnx.Pytree, before: tuple[str, ...]) -> Iterator[str]:
    """The names of the parameters of a module, in the order of its attributes."""
    for key, value in vars(module).items():
        path = (*before, str(key))
        if isinstance(value, nnx.Param):
            yield ".".join(path)
        elif isinstance(value, nnx.Pytree):
            yield from _declared_names(value, path)


def _arguments(module: Any, name: str, word: str) -> frozenset[str]:
    """The arguments that a part takes by name, of those that it may be given."""
    given = _GIVEN[name]
    parameters = list(inspect.signature(module.__call__).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return given
    later = parameters[1:]
    required = [one.name for one in later if one.default is one.empty]
    unknown = [argument for argument in required if argument not in given]
    if not parameters or unknown:
        raise UserError(
            f"{word} is called with an array first, and by name with {', '.join(sorted(given))}: "
            f"found {', '.join(one.name for one in parameters) or 'no argument'}"
        )
    return given.intersection(one.name for one in later)


def _with_words(tree: PyTree) -> PyTree:
    """Return a dict of dicts with its keys as words: a checkpoint has no other."""
    if isinstance(tree, dict):
        return {str(key): _with_words(part) for key, part in tree.items()}
    return tree


def with_keys_of(form: PyTree, tree: PyTree) -> PyTree:
    """Return a dict of dicts with the keys of `form`, from one with these as words."""
    if isinstance(form, dict):
        return {key: with_keys_of(part, tree[str(key)]) for key, part in form.items()}
    return tree
