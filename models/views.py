"""The parameters of a model as they multiply, for export and generation: LoRA's pairs are merged,
and sparse matrices have their zeros.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax

from jaxpar.base.config import Lora, ModelConfig
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.models.lora import merge_lora
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params
from jaxpar.models.sparsity import read_stacked, weight_form


def base_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model with matrices that multiply as they are stored: without
    LoRA, and dense.
    """
    return replace(config, lora=Lora(), sparsity=Sparsity())


def base_model(model: Model) -> Model:
    """Return the same model with matrices that multiply as they are stored, and without the
    projections that only training needs.
    """
    return model.with_config(base_config(model.config)).with_projections(None)


def fold_views(params: Params, model: Model) -> Params:
    """Replace stored matrices by the matrices that multiply.

    Args:
      params: the parameters of the model; the arrays of matrices that change are donated.
      model: the model, with LoRA or sparse matrices, or without.

    Returns:
      The parameters of `base_model`.
    """
    params = merge_lora(params, model.config)
    blocks = dict(params["blocks"])
    axes = model.axes["blocks"]
    for name in blocks:
        form = weight_form(model.config, name)
        if form is not None:
            blocks[name] = _read(blocks[name], form, axes[name])
    return params | {"blocks": blocks}


_read = partial(jax.jit, donate_argnums=0, static_argnums=(1, 2))(read_stacked)
