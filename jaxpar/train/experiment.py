"""The experiment: what a config needs to run, made and checked once, and handed down as one value.

`jaxpar.train.experiments.make_experiment` makes one; the modules below take it and make no part of
it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from jaxpar.base.compiler import step_options
from jaxpar.base.config import Config
from jaxpar.base.hardware import lowering_platform
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import replicated_sharding
from jaxpar.models import AnyModel
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train.batch import batch_shapes
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer, as_optimizer, fingerprint_of
from jaxpar.train.state import TrainState, in_host, state_shapes

if TYPE_CHECKING:  # it needs grain, which a program without data need not have
    from jaxpar.data.corpus import Corpus


@dataclass(frozen=True)
class Experiment:
    """A config with its model and its plan.

    Attributes:
      config: every setting.
      model: the model that is trained: the config's own, one with parts of a program's, or a whole
        model of a program's.
      plan: the plan, by which it runs on the devices of its mesh.
      own_optimizer: the optimizer that a program gave, in place of the config's.
      corpus: the data, where they are loaded already.
    """

    config: Config
    model: AnyModel
    plan: Plan
    own_optimizer: AnyOptimizer = None
    corpus: Corpus | None = field(default=None, compare=False)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer that was given, or else the config's."""
        return as_optimizer(self.own_optimizer, self.config, self.plan)

    @cached_property
    def optimizer_fingerprint(self) -> dict[str, str] | None:
        """The fingerprint of an optimizer that a program gave; None for the config's, whose
        settings stand in a run's config.
        """
        if self.own_optimizer is None:
            return None
        model = self.model
        params = model.trained(model.shapes())
        in_own_order = as_optimizer(self.own_optimizer, self.config)
        return fingerprint_of(in_own_order, params, model.trained(model.axes))

    @cached_property
    def state(self) -> TrainState[jax.ShapeDtypeStruct]:
        """The training state as ShapeDtypeStructs with shardings."""
        return state_shapes(self.model, self.plan, self.optimizer)

    @cached_property
    def shardings(self) -> TrainState[NamedSharding]:
        """The sharding of each array of the training state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @cached_property
    def in_host(self) -> TrainState[bool]:
        """Whether each array of the training state lies in host memory."""
        return in_host(self.state, self.model, self.plan, self.optimizer)

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A training batch as ShapeDtypeStructs with shardings, each [B, S]."""
        return batch_shapes(self.config, self.plan)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of each array of a batch [B, S]."""
        return self.plan.sharding(TOKENS)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of a number that every device has."""
        return replicated_sharding(self.plan)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler's options for a training step: the library's for its devices, and the
        config's.
        """
        return step_options(self.plan.mesh, self.config.compiler.options)

    @cached_property
    def unigram_entropy(self) -> float:
        """The entropy of the text's unigrams in nats a token: the best loss without context. The
        data must be loaded.
        """
        from jaxpar.data.corpus import unigram_entropy

        assert self.corpus is not None
        return unigram_entropy(self.corpus.train.sample)

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the mesh, in its order."""
        return list(self.plan.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """The platform that the programs are lowered for: `cpu`, `cuda` or `tpu`."""
        return lowering_platform(self.devices[0])

    @property
    def pipeline_microbatches(self) -> int:
        """The microbatches that are in the pipeline together; 1 where there are no stages."""
        return pipelined_microbatches(self.plan)

    @property
    def sequences(self) -> int:
        """The sequences that go through a block at once, on all devices: of a microbatch of the
        pipeline, where there are stages.
        """
        return self.config.train.microbatch // self.pipeline_microbatches

    @property
    def tokens(self) -> int:
        """The tokens of one step, padding included."""
        return self.config.train.batch * self.config.data.seq_len


def pipelined_microbatches(plan: Plan) -> int:
    """Return the number of microbatches that are in a plan's pipeline together; 1 where it has no
    stages.
    """
    if plan.size("stage") > 1:
        return plan.pipeline.microbatches
    return 1
