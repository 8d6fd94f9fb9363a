"""Training: the state and the step, checkpoints and the loop; also evaluation, text generation and
conversion.

    with train.open_run(plan.resolve(experiment), folder) as run:
        run.train(hooks=[...])

An open run holds its folder from first to last; `run` is these two lines. Hooks are what a program
does besides at steps. `config_of` reads the model of a Hugging Face folder, `export_run` writes
one, and `open_trained` loads either to generate. The other names serve a program's own loop: they
make an experiment of a config, its state, the jitted step, and what the model makes of a prompt.

Read the modules in this order: `optimizer`, the shapes of a `state` and of a `batch`, and
`experiment`, which is what a config needs to run; `metrics`, what is measured of a run, and
`sinks`, where that goes. Then the folders `step`, which computes, and `experiments`, which makes an
experiment; `activations` and `state_memory` say what memory it takes and what makes that less.
`guard` and `goodput` watch a training. `runs` keeps it in a folder, `restore` loads what a folder
has, and `distil` is its teacher, with `teacher_memory` for the teacher's memory. `run_data` is what
a run reads besides, and `opening` puts all of this together. `evaluate` measures what is trained,
`hooks` do what is due at steps beside training, and `loop`, the last of these, trains.

docs/trainer.py does the same in one file. Its `step` is `step.train_step`, its loop
`loop.steps.Steps`, its `checkpoints.save` `loop.saves.Saves`, what it restores
`opening.first_step`, and its batches come from `opening` too.

For a model that was trained there are `generation`, which loads it for text, and `pruned_run`,
which prunes it at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.train.batch import batch_rows, put_batch
    from jaxpar.train.experiment import Experiment
    from jaxpar.train.experiments import make_experiment, make_plan
    from jaxpar.train.generation import generate
    from jaxpar.train.generation.trained import open_trained
    from jaxpar.train.hooks import Hook, OnRow
    from jaxpar.train.loop import Run, open_run, run
    from jaxpar.train.optimizer import Optimizer, decay_mask
    from jaxpar.train.optimizer.learning_rate import register_rate
    from jaxpar.train.optimizer.named_optimizers import OptimizerSettings, register_optimizer
    from jaxpar.train.optimizer.per_matrix import muon_dimensions
    from jaxpar.train.restore import config_of, export_run
    from jaxpar.train.runs.stores import CheckpointStore
    from jaxpar.train.step import init_state, make_eval_step, make_train_step

_MODULES = {
    "CheckpointStore": "runs.stores",
    "Experiment": "experiment",
    "Hook": "hooks",
    "OnRow": "hooks",
    "Optimizer": "optimizer",
    "OptimizerSettings": "optimizer.named_optimizers",
    "Run": "loop",
    "batch_rows": "batch",
    "config_of": "restore",
    "decay_mask": "optimizer",
    "export_run": "restore",
    "generate": "generation",
    "init_state": "step",
    "make_eval_step": "step",
    "make_experiment": "experiments",
    "make_plan": "experiments",
    "make_train_step": "step",
    "muon_dimensions": "optimizer.per_matrix",
    "open_run": "loop",
    "open_trained": "generation.trained",
    "put_batch": "batch",
    "register_optimizer": "optimizer.named_optimizers",
    "register_rate": "optimizer.learning_rate",
    "run": "loop",
}
__all__ = [
    "CheckpointStore",
    "Experiment",
    "Hook",
    "OnRow",
    "Optimizer",
    "OptimizerSettings",
    "Run",
    "batch_rows",
    "config_of",
    "decay_mask",
    "export_run",
    "generate",
    "init_state",
    "make_eval_step",
    "make_experiment",
    "make_plan",
    "make_train_step",
    "muon_dimensions",
    "open_run",
    "open_trained",
    "put_batch",
    "register_optimizer",
    "register_rate",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, because `run` imports data and
    checkpoints.
    """
    if name in _MODULES:
        return getattr(import_module(f"jaxpar.train.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
