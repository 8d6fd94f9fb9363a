"""The decay that SR-STE adds to a gradient, for the entries of sparse matrices that do not
multiply.

With the gradient passed straight through, an entry may be chosen and left out in turn. Zhou et al.
2021 (arXiv:2102.04010, equation 8) pull the entries that are left out towards zero, so that the
choice settles. The decay is added here, to the mean gradient of a step, and so once a step, however
many microbatches it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import optax

from jaxpar.base.config import ModelConfig
from jaxpar.base.layout.sharding import Axes, KeyPath, path_name
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.models.sparsity import form_of_parameter, read_stacked
from jaxpar.train.optimizer.definition import Optimizer


def with_sparse_decay(optimizer: Optimizer, model: ModelConfig) -> Optimizer:
    """Wrap an optimizer so that the decay of sparse matrices is added to its gradients.

    The decay comes after clipping, and before all that the optimizer makes of a gradient. The state
    is the optimizer's own.

    Args:
      model: the sizes of the model, whose `sparsity` says which matrices are sparse, and how much
        they decay.

    Returns:
      The optimizer; the one that was given where nothing decays.
    """
    sparsity = model.sparsity
    if not sparsity.form or not sparsity.decay or not sparsity.trains_all:
        return optimizer

    def make(axes: Params) -> optax.GradientTransformation:
        inner = optimizer.make(axes)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            decayed = jax.tree_util.tree_map_with_path(
                lambda path, names, grad, param: _with_decay(path, names, grad, param, model),
                axes,
                updates,
                params,
                is_leaf=is_axes,
            )
            return inner.update(decayed, state, params)

        return optax.GradientTransformation(inner.init, update)

    return replace(optimizer, make=make)


def _with_decay(
    path: KeyPath, axes: Axes, grad: jax.Array, param: jax.Array, model: ModelConfig
) -> jax.Array:
    """Add the decay of the entries that do not multiply to the gradient of a parameter."""
    form = form_of_parameter(model, path_name(path))
    if form is None:
        return grad
    left_out = param - read_stacked(param, form, axes)
    return grad + (model.sparsity.decay * left_out).astype(grad.dtype)
