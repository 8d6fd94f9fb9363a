"""The training step and what it is made of, for our loop and for one of your own; each takes an
`Experiment`.

`first_state` makes a state. `accumulate` has the loss and the gradients of a batch's microbatches,
and `train_step` and `eval_step` the jitted functions. The shapes of a state, and the order of its
layers, are in `train.state`; those of a batch are in `train.batch`.
"""

from jaxpar.train.state import reorder_state
from jaxpar.train.step.accumulate import dropout_key, gradient_axes, gradients, loss_weights
from jaxpar.train.step.eval_step import compile_eval_step, evaluation_params, make_eval_step
from jaxpar.train.step.first_state import init_state
from jaxpar.train.step.train_step import make_train_step, step_shapes

__all__ = [
    "compile_eval_step",
    "dropout_key",
    "evaluation_params",
    "gradient_axes",
    "gradients",
    "init_state",
    "loss_weights",
    "make_eval_step",
    "make_train_step",
    "reorder_state",
    "step_shapes",
]
