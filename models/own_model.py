"""A model that is not made of an embedding, blocks and a head: functions over a dict of arrays.

It takes the place of `Model` in an experiment, which trains, verifies, rehearses, saves and resumes
it. Features that need the parts of a model are refused: pipeline stages, offloaded layers,
generation.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import KeyPath, Layout, ShardingRules, path_name
from jaxpar.base.layout.specs import is_axes
from jaxpar.models.model import Model
from jaxpar.models.parameters import require_float32
from jaxpar.models.part_protocols import Params
from jaxpar.models.split import axes_of, plain_dict, with_keys_of
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights
from jaxpar.parallel.padding import TokenCounts

Batch = Mapping[str, Array]
Init = Callable[[Array], Params]
"""A function that makes fresh parameters, a dict of dicts of float32 arrays, from a key."""
Loss = Callable[[Params, Batch, Layout, "Array | None"], "tuple[Array, Array] | LossSums"]
"""A function of parameters, a batch, the layout and a dropout key (None = no dropout) that returns
the summed negative log-likelihood in nats of the labels that count, and their number. The batch has
int32 arrays [B, S]: `tokens`, `labels` (below zero = does not count), and for packed documents
`positions` and `segments`."""


@dataclass(frozen=True)
class OwnModel:
    """A whole model of one's own.

    Attributes:
      name: the model's name in the run folder and in messages.
      init_params: makes its parameters.
      loss_of: computes its loss.
      axes: the logical axes of every parameter, in a dict of the parameters' form: a tuple with a
        name or None for each dim.
      vocab_size: how many tokens its vocabulary has.
      max_seq_len: the longest sequence that it takes.
      dropout: whether `loss_of` is given a key in training.
    """

    name: str
    init_params: Init
    loss_of: Loss
    axes: Params = field(compare=False)
    vocab_size: int
    max_seq_len: int
    dropout: bool = False

    has_blocks = False

    def __post_init__(self) -> None:
        """Check that the axes fit the parameters.

        Raises:
          UserError: `init_params` makes something else than a dict of dicts of float32 arrays, the
            axes do not fit it, or a function takes other arguments than it is given.
        """
        _require_arguments(self.init_params, "init_params(key)")
        _require_arguments(self.loss_of, "loss_of(params, batch, layout, key)")
        shapes = self.shapes()
        if not isinstance(shapes, dict) or not shapes:
            raise UserError(
                f"{self.name}: init returns a dict of parameters by name, and returned "
                f"{type(shapes).__name__}"
            )
        named = jax.tree_util.tree_leaves_with_path(self.axes, is_leaf=is_axes)
        dims = {path_name(path): axes for path, axes in named}
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            axes = dims.pop(path_name(path), None)
            if axes is None or len(axes) != len(leaf.shape):
                raise UserError(
                    f"{self.name}: {path_name(path)} of shape {leaf.shape} has the axes {axes}: "
                    "name each dim by a logical axis or None"
                )
            require_float32(leaf.dtype, f"{self.name}: {path_name(path)}")
        if dims:
            raise UserError(f"{self.name}: axes of {', '.join(dims)}, which init does not make")

    @property
    def config(self) -> ModelConfig:
        """The section `model` of a config for it, in which the sizes of blocks and heads mean
        nothing.
        """
        return ModelConfig(
            family=self.name,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            layers=1,
            embed=1,
            heads=1,
            mlp=1,
            vocab_multiple=1,
            dropout=0.5 if self.dropout else 0.0,
        )

    def own_parts(self) -> dict[str, str]:
        """Return the names of the parts that are not the library's, which a checkpoint records."""
        return {"model": self.name}

    def with_config(self, config: ModelConfig, ops: object = None) -> OwnModel:
        """Return the model itself, whose sizes are its own.

        Raises:
          UserError: `config` is not the model's own.
        """
        if config != self.config:
            raise UserError(
                f"{self.name} has sizes of its own, which [model] of a config does not set"
            )
        return self

    def fit_rules(
        self, rules: ShardingRules, sizes: Mapping[str, int]
    ) -> tuple[ShardingRules, list[str]]:
        """Return the rules as they are: there are no heads that devices could be too many for."""
        return rules, []

    def init(self, key: Array, order: Sequence[int] | None = None) -> Params:
        """Make fresh parameters. `order` is not used, as there are no stacked layers."""
        return self.init_params(key)

    def shapes(self, order: Sequence[int] | None = None) -> Params:
        """Return the parameters as ShapeDtypeStructs."""
        return jax.eval_shape(self.init_params, jax.random.key(0))

    def trained(self, tree: Params) -> Params:
        """Return the part of a tree of the parameters' form that is trained: all of it."""
        return tree

    @staticmethod
    def merge(params: Params, trained: Params) -> Params:
        """Return the parameters with the `trained` ones put in their places."""
        return trained

    def parameter_names(self) -> list[str]:
        """List the names of all parameters."""
        leaves = jax.tree_util.tree_leaves_with_path(self.shapes())
        return [path_name(path) for path, _ in leaves]

    def loss(
        self,
        params: Params,
        batch: Batch,
        plan: Plan,
        key: Array | None = None,
        weights: LossWeights = LIKELIHOOD,
        counts: TokenCounts | None = None,
    ) -> LossSums:
        """Compute the summed loss of a batch. There is no term beside the likelihood to weigh.

        Raises:
          UserError: the model's own loss returns something else than a sum and a number of labels.
        """
        found = self.loss_of(params, batch, plan, key)
        if isinstance(found, LossSums):
            return found
        if not isinstance(found, tuple) or len(found) != 2 or any(map(jnp.ndim, found)):
            raise UserError(
                f"{self.name}: loss returns two scalars, the sum over the labels that count and "
                f"their number, and returned {_form_of(found)}"
            )
        # In 16 bits a count of a batch's labels would be rounded, or infinite.
        nll, tokens = (jnp.asarray(one).astype(jnp.float32) for one in found)
        return LossSums(nll, jax.lax.stop_gradient(nll), tokens)

    def parameter_count(self) -> int:
        """Count the parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes()))

    def flops_per_token(self, seq_len: int) -> float:
        """Count 6 FLOPs for each parameter and token (arXiv:2001.08361, section 2.1): other work,
        such as attention's, is not known, nor which parameters are only looked up.
        """
        return 6.0 * self.parameter_count()


def _form_of(found: Any) -> str:
    """Describe the value that a loss returned, by its shape."""
    if isinstance(found, tuple | list):
        return f"{len(found)} values: {', '.join(map(_form_of, found))}"
    if hasattr(found, "shape"):
        return f"an array of shape {jnp.shape(found)}"
    return short(found)


AnyModel = Model | OwnModel
"""The model of an experiment."""


def in_parts(model: AnyModel, what: str) -> Model:
    """Return a model that is made of an embedding, blocks and a head.

    Raises:
      UserError: the model has no such parts; the message begins with `what`, the feature that needs
        them.
    """
    if isinstance(model, Model):
        return model
    raise UserError(
        f"{what} needs a model of an embedding, blocks and a head, and {model.name} is a whole "
        "model of your own"
    )


def nnx_model(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[..., tuple[Array, Array]],
    *,
    vocab_size: int,
    max_seq_len: int,
    dropout: bool = False,
    name: str = "",
) -> OwnModel:
    """Make a whole model of one's own from a module of Flax NNX.

    Args:
      make: makes the module; its parameters are `nnx.Param`, whose dims have the names that Flax's
        metadata gives them (`nnx.with_partitioning`). A parameter without names that `nnx.vmap`
        stacks beside parameters with a dim `layers` has that dim too.
      loss: `(module, batch, layout, key) -> (nll, tokens)`: the summed negative log-likelihood in
        nats of the labels that count, and their number.
      vocab_size: how many tokens its vocabulary has.
      max_seq_len: the longest sequence that it takes.
      dropout: whether `loss` is given a key in training.
      name: the model's name in the run folder and in messages; empty = the module's class.

    Raises:
      UserError: the module keeps variables that are no `nnx.Param`, or names dims otherwise than
        one by one; or a function takes other arguments than it is given.
    """
    _require_arguments(make, "make(rngs)")
    _require_arguments(loss, "loss(module, batch, layout, key)")

    def fresh(key: Array) -> nnx.Module:
        with nnx.use_eager_sharding(False):  # the layout says where arrays lie
            return make(nnx.Rngs(key))

    module = nnx.eval_shape(partial(fresh, jax.random.key(0)))
    name = name or type(module).__name__
    graph, state, others = nnx.split(module, nnx.Param, ...)
    if kept := nnx.to_flat_state(others):
        path, variable = kept[0]
        raise UserError(
            f"{name} has {'.'.join(map(str, path))}, a {type(variable).__name__}: nothing but "
            "nnx.Param is kept between steps (a norm keeps no statistics, as LayerNorm does; for "
            "dropout `loss` is given a key)"
        )
    form = nnx.to_pure_dict(state, lambda leaf: None)

    def init(key: Array) -> Params:
        return plain_dict(nnx.state(fresh(key), nnx.Param))

    def loss_of(params: Params, batch: Batch, layout: Layout, key: Array | None) -> Any:
        made = nnx.merge(graph, with_keys_of(form, params))
        return loss(made, batch, layout, key)

    axes = _with_stacks(axes_of(state, name), plain_dict(state))
    return OwnModel(name, init, loss_of, axes, vocab_size, max_seq_len, dropout)


def _with_stacks(axes: Params, shapes: Params) -> Params:
    """Name the dim `layers` of parameters without names that are stacked beside others with names.

    `nnx.vmap` notes the name of the dim that it adds in the metadata of those parameters only that
    have names already, so that a stacked bias without names would pass for a matrix. Those with
    names that are nearest to it in the tree were stacked by the same call.

    Args:
      axes: the names of each parameter's dims, in a dict of dicts.
      shapes: the parameters' shapes, in a dict of the same form.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)
    sizes = [leaf.shape for leaf in structure.flatten_up_to(shapes)]
    named = {path: names for path, names in leaves if any(names)}
    stacked = {
        path: (names.index("layers"), size[names.index("layers")])
        for (path, names), size in zip(leaves, sizes, strict=True)
        if "layers" in names
    }

    def stack_beside(path: KeyPath) -> tuple[int, int] | None:
        """Find the dim and the size of the stack that the nearest parameters with names are in."""
        for length in range(len(path) - 1, -1, -1):
            beside = [other for other in named if other[:length] == path[:length]]
            if beside:
                stacks = {stacked.get(other) for other in beside}
                return stacks.pop() if len(stacks) == 1 else None
        return None

    found = []
    for (path, names), size in zip(leaves, sizes, strict=True):
        stack = None if any(names) else stack_beside(path)
        if stack is not None and size[stack[0] : stack[0] + 1] == (stack[1],):
            dim, _ = stack
            names = (*names[:dim], "layers", *names[dim + 1 :])
        found.append(names)
    return jax.tree.unflatten(structure, found)


def _require_arguments(function: Callable[..., Any], call: str) -> None:
    """Refuse a function that cannot be called as `call` says, such as "loss(params, batch)".

    Raises:
      UserError: the function takes more, or fewer, arguments by position.
    """
    word, _, inner = call.rstrip(")").partition("(")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is not written in Python
        return
    try:
        signature.bind(*inner.split(", "))
    except TypeError:
        raise UserError(
            f"{word} is called as {call}, by position, and the one that was given takes "
            f"{signature}: give it these arguments, of which it need not use all"
        ) from None
