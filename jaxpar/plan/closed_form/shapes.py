"""The facts of a model, its optimizer and its batch from which a step's cost follows under any
plan: found once, by tracing one block on one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import NAMES
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.layout.plan import gradient_dtype, is_matrix, param_dtype
from jaxpar.base.layout.rules import ShardingRules
from jaxpar.base.layout.sharding import LogicalAxis
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import AnyModel
from jaxpar.models.masks import mean_keys
from jaxpar.train.activations import activations, unnamed_bytes
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment

_Axes = tuple[LogicalAxis | None, ...]


class Parameter(NamedTuple):
    """A parameter of the model, or those of all layers under one name.

    Attributes:
      name: its name in its part.
      part: its part of the model: `blocks`, `embed`, `head`.
      shape: the sizes of its dims, without that of the layers.
      axes: their logical axes.
      layers: the number of layers that have one; 0 = it is not stacked over layers.
      width: the bytes of an entry as it is stored.
      sums_width: the bytes of an entry of the sums of its gradients; 0 = it is not trained.
      state_width: the bytes of the optimizer's state for an entry, by the dtype of first moments.
      matrix: whether it maps from one space to another.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    axes: _Axes
    layers: int
    width: int
    sums_width: int
    state_width: tuple[tuple[str, float], ...]
    matrix: bool

    @property
    def entries(self) -> int:
        """The entries of one layer."""
        return math.prod(self.shape)


class NamedShape(NamedTuple):
    """A named activation of one block.

    Attributes:
      name: its name in `activation_names.NAMES`.
      entry_bytes: the bytes of an entry.
      entries: the entries for each token of the batch.
      axes: the logical axes of its dims.
      of_experts: whether it has a row for each place in the experts' buffers.
    """

    name: str
    entry_bytes: int
    entries: float
    axes: _Axes
    of_experts: bool

    @property
    def token_bytes(self) -> float:
        """The bytes for each token of the batch, of all devices together."""
        return self.entry_bytes * self.entries


@dataclass(frozen=True, eq=False)
class StepShapes:
    """What a training step computes, whatever the plan.

    It is compared by identity, so that what is found of it can be remembered; `with_batch` makes
    another.

    Attributes:
      batch: the sequences of a step.
      seq_len: the tokens of a sequence.
      parameters: every parameter.
      named: the named activations of a block, in the order in which it makes them.
      unnamed: the bytes for each token of what else a block keeps under the policy `none`.
      rules: the sharding rules of the config, with none for ZeRO-1 unless the config's own embed
        is split over data.
      keys: the mean number of keys that a query sees.
      dtype_bytes: the bytes of an entry in the compute dtype.
      compute: the compute dtype.
      model_flops: the model FLOPs of a step.
    """

    batch: int
    seq_len: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    experts_per_token: int
    parallel_sublayers: bool
    parameters: tuple[Parameter, ...]
    named: tuple[NamedShape, ...]
    unnamed: float
    rules: ShardingRules
    keys: float
    dtype_bytes: int
    compute: str
    model_flops: float
    strategy: str
    stash_of_stage: bool

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.seq_len

    def with_batch(self, batch: int) -> StepShapes:
        """Return the shapes of a step of another number of sequences."""
        flops = self.model_flops * batch / self.batch
        return replace(self, batch=batch, model_flops=flops)


def step_shapes(experiment: Experiment | Config) -> StepShapes:
    """Find the facts of a step by tracing one block on one device, which takes seconds.

    Args:
      experiment: the experiment, or its config. Its mesh, accumulation, pipeline and memory policy
        do not matter.

    Raises:
      UserError: `make_experiment` refuses the config on one device, or the model is a whole model
        of one's own, of whose blocks nothing is known.
    """
    if isinstance(experiment, Experiment):
        config = experiment.config
        model = experiment.model
        optimizer = experiment.own_optimizer
    else:
        config = experiment
        model = None
        optimizer = None
    alone = make_experiment(_on_one_device(config), jax.devices()[:1], model, optimizer)
    if not alone.model.has_blocks:
        raise UserError(
            "a plan is found from the shapes of a model's blocks, and this model is one function: "
            "give its blocks to jaxpar.models.Model, or choose its mesh by rehearsals"
        )
    model_config = alone.config.model
    S = config.data.seq_len
    rows = alone.sequences * S
    masks = [mean_keys(word, S) for word in model_config.masks[: model_config.kinds]]
    return StepShapes(
        batch=config.train.batch,
        seq_len=S,
        layers=model_config.layers,
        embed=model_config.embed,
        heads=model_config.heads,
        kv_heads=model_config.kv_head_count,
        head_dim=model_config.head_size,
        vocab=-(-model_config.vocab_size // model_config.vocab_multiple)
        * model_config.vocab_multiple,
        experts=model_config.experts,
        experts_per_token=model_config.experts_per_token,
        parallel_sublayers=model_config.sublayers == "parallel",
        parameters=_parameters(alone),
        named=_named(alone, rows),
        unnamed=unnamed_bytes(alone) / max(rows * model_config.layers, 1),
        rules=_without_zero(config.rules),
        keys=sum(masks) / max(len(masks), 1),
        dtype_bytes=alone.plan.dtype.itemsize,
        compute=alone.plan.compute,
        model_flops=alone.model.flops_per_token(S) * config.train.batch * S,
        strategy=config.context.strategy,
        stash_of_stage=config.pipeline.stash == "stage",
    )


def _on_one_device(config: Config) -> Config:
    """Return a config with everything kept on one device, for one sequence."""
    changes: dict[str, Any] = {f"mesh.{axis}": 1 for axis in MESH_AXES}
    changes |= {f"mesh.dcn.{axis}": 1 for axis in MESH_AXES}
    changes |= {
        "mesh.platform": "auto",
        "mesh.distributed": False,
        "train.batch": 1,
        "train.accumulation": 1,
        "pipeline.virtual": 1,
        "pipeline.layers": (),
        "memory.policy": "none",
        "memory.budget": "",
        "memory.optimizer": "device",
        "memory.parameters": "device",
        "overlap.gather": "xla",
        "overlap.scatter": "xla",
        "overlap.domino": "off",
    }
    changes |= {f"memory.keep.{name}": "policy" for name in vars(config.memory.keep)}
    return override(config, changes)


def _without_zero(rules: ShardingRules) -> ShardingRules:
    """Return the rules without ZeRO-1, which a candidate says."""
    if "data" in rules.state_embed and "data" not in rules.embed:
        return replace(rules, state_embed=())
    return rules


def _named(alone: Experiment, tokens: int) -> tuple[NamedShape, ...]:
    """List the named activations of a block."""
    found = []
    for one in activations(alone):
        of_experts = alone.config.model.experts > 0 and len(one.shape) == 4
        of_experts = of_experts and one.name not in ("q", "k", "v", "attention_out")
        axes = NAMES[one.name].axes
        if of_experts and axes[-1] == "mlp":
            axes = ("batch", "seq", None, "mlp")
        entries = math.prod(one.shape)
        width = one.bytes // entries
        found.append(NamedShape(one.name, width, entries / tokens, axes, of_experts))
    return tuple(found)


def _parameters(alone: Experiment) -> tuple[Parameter, ...]:
    """List the parameters of a model."""
    model = alone.model
    plan = alone.plan
    shapes = model.shapes()
    trained = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(model.trained(shapes))
    }
    states = {moments: _state_bytes(alone, model, moments) for moments in ("float32", "bfloat16")}
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(model.axes, is_leaf=is_axes)
    for (path, leaf), axes in zip(leaves, names, strict=True):
        key = jax.tree_util.keystr(path)
        stacked = bool(axes) and axes[0] == "layers"
        entries = math.prod(leaf.shape)
        found.append(
            Parameter(
                name=str(getattr(path[-1], "key", path[-1])),
                part=str(getattr(path[0], "key", path[0])),
                shape=tuple(leaf.shape[1:] if stacked else leaf.shape),
                axes=tuple(axes[1:] if stacked else axes),
                layers=leaf.shape[0] if stacked else 0,
                width=param_dtype(axes, plan).itemsize,
                sums_width=gradient_dtype(axes, plan).itemsize if key in trained else 0,
                state_width=tuple(
                    (moments, of.get(key, 0) / entries) for moments, of in states.items()
                ),
                matrix=is_matrix(axes),
            )
        )
    return tuple(found)


def _state_bytes(alone: Experiment, model: AnyModel, moments: str) -> dict[str, int]:
    """Add up the bytes of the optimizer's state by the path of the parameter that it belongs to.

    An optimizer without first moments has the same state for each of their dtypes.
    """
    config = override(alone.config, {"precision.moments": moments})
    if moments == "bfloat16" and not config.optimizer.rounds_first_moments:
        config = alone.config
    experiment = make_experiment(config, alone.devices, model, alone.own_optimizer)
    shapes = model.trained(model.shapes())
    axes = model.trained(model.axes)
    arrays = experiment.optimizer.state_arrays(shapes, axes)
    described = jax.tree.leaves(arrays, is_leaf=lambda x: hasattr(x, "parameter"))
    stored = jax.tree.leaves(experiment.state.opt_state)
    found: dict[str, int] = {}
    for array, leaf in zip(described, stored, strict=True):
        if array.parameter is None:
            continue
        key = jax.tree_util.keystr(array.parameter)
        found[key] = found.get(key, 0) + math.prod(leaf.shape) * leaf.dtype.itemsize
    return found
