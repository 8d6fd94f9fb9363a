"""Modules of Flax NNX, taken apart into a graph, which is static, and a plain dict of arrays, and
put together again where they are called. So a model holds no arrays, and jit, scan, shard_map and
checkpoints see nothing but a dict of dicts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import PyTree
from jaxpar.models.hidden import Projections
from jaxpar.models.parameters import declared_axes, require_float32
from jaxpar.models.part_protocols import GIVEN, Maker, OpsMaker, Params, Parts, part_name


@dataclass(frozen=True)
class Split:
    """A part of a model, taken apart.

    Attributes:
      graph: the part without its arrays.
      form: the parameters' tree with Flax's own keys, which are numbers in an `nnx.List`.
      axes: the logical axes of every parameter, a tuple with a name or None for each dim, in a dict
        of the parameters' form.
      names: the names of the parameters, in the order in which the part declares them.
      takes: the arguments that it takes by name.
      name: the part's name in messages.
    """

    graph: nnx.GraphDef
    form: PyTree
    axes: Params
    names: tuple[str, ...]
    takes: frozenset[str]
    name: str

    def __call__(self, params: Params, first: Array, **others: Any) -> Any:
        """Call the part with these parameters, and with those of the arguments that it takes."""
        module: Any = nnx.merge(self.graph, with_keys_of(self.form, params))
        taken = {name: x for name, x in others.items() if name in self.takes}
        return module(first, **taken)


class SplitModel(NamedTuple):
    """A model, taken apart: the arguments of its forward pass beside arrays and a plan.

    Attributes:
      config: the sizes of the model.
      parts: its parts by name, in the order of the forward pass: `embed`, `blocks`, perhaps
        `query`, and `head`.
      ops: makes the ops that the parts call from a plan.
      numbers_layers: whether a block is told the number of its layer.
      projections: the projections through which it learns a teacher's hidden states; None = it
        learns none.
    """

    config: ModelConfig
    parts: Mapping[str, Split]
    ops: OpsMaker
    numbers_layers: bool
    projections: Projections | None = None


def make_part(
    config: ModelConfig,
    name: str,
    maker: Maker,
    rngs: nnx.Rngs,
) -> nnx.Module:
    """Make a part of a model, with its arrays.

    A part does not say where its arrays lie: Flax would place a parameter with names at once, on
    the mesh axes of these names.

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
    """Turn a state into a dict of dicts with `of(variable)` for each variable (None = its array),
    in which all keys are words.
    """
    return _with_words(nnx.to_pure_dict(state, of))


# Cached, because a budget asks for the same model some hundred times.
@lru_cache(maxsize=64)
def split_parts(config: ModelConfig, parts: Parts) -> Mapping[str, Split]:
    """Take the parts of a model apart, by their names.

    Raises:
      UserError: one is no such part, or does not take an argument that the config needs
        (`BlockPart`).
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
      name: the name of the part: `embed`, `blocks`, `query` or `head`.
      maker: makes the part.

    Raises:
      UserError: the maker makes no such part.
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
    """Read the logical axes of all variables of a state, as a dict of dicts."""
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
    """Yield the names of the parameters of a module, in the order of its attributes."""
    for key, value in vars(module).items():
        path = (*before, str(key))
        if isinstance(value, nnx.Param):
            yield ".".join(path)
        elif isinstance(value, nnx.Pytree):
            yield from _declared_names(value, path)


def _arguments(module: Any, name: str, word: str) -> frozenset[str]:
    """Find the arguments that a part takes by name, among those that it may be given."""
    given = GIVEN[name]
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
    """Return a dict of dicts with its keys as words: a checkpoint has no other keys."""
    if isinstance(tree, dict):
        return {str(key): _with_words(part) for key, part in tree.items()}
    return tree


def with_keys_of(form: PyTree, tree: PyTree) -> PyTree:
    """Return a dict of dicts with the keys of `form`, from a dict with these keys as words."""
    if isinstance(form, dict):
        return {key: with_keys_of(part, tree[str(key)]) for key, part in form.items()}
    return tree
