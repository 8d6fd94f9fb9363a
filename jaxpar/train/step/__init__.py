"""The state of a training and its step, for a loop of your own as for ours.

Read `state` first: the shapes of a state and where its arrays live. `first_state` makes one, and
`reorder` puts its layers in another order. `batch` has what a step is given, `accumulate` the loss
and the gradients of its microbatches, and `train_step` and `eval_step` the jitted functions.
"""

from jaxpar.train.step.accumulate import dropout_key, gradients, loss_weights
from jaxpar.train.step.batch import (
    batch_rows,
    batch_shapes,
    cut_microbatches,
    empty_batch,
    put_batch,
    token_arrays,
)
from jaxpar.train.step.eval_step import compile_eval_step, evaluation_params, make_eval_step
from jaxpar.train.step.first_state import init_state
from jaxpar.train.step.reorder import reorder_state
from jaxpar.train.step.state import (
    Shape,
    TrainState,
    gradient_axes,
    in_host,
    param_shapes,
    param_shardings,
    state_shapes,
    state_shardings,
)
from jaxpar.train.step.train_step import make_train_step, step_shapes

__all__ = [
    "Shape",
    "TrainState",
    "batch_rows",
    "batch_shapes",
    "compile_eval_step",
    "cut_microbatches",
    "dropout_key",
    "empty_batch",
    "evaluation_params",
    "gradient_axes",
    "gradients",
    "in_host",
    "init_state",
    "loss_weights",
    "make_eval_step",
    "make_train_step",
    "param_shapes",
    "param_shardings",
    "put_batch",
    "reorder_state",
    "state_shapes",
    "state_shardings",
    "step_shapes",
    "token_arrays",
]
