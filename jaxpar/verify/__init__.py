"""The check that a layout gives the same answer: the loss and every gradient are compared with one
device's, and wrong ones are explained.

    verdict = verify.gradients(loss, reference, params, batch, (param_shardings, batch_shardings))
    print(verdict)

`gradients` takes anyone's loss, and `config` the plan of a config. `mistakes` explains a gradient
that differs.

Its rooms, in the order in which they are read: `reference_ops`, with `reference_weights`, are the
ops in plain mathematics. `mistakes` knows what a wrong gradient may be, `report` writes down what
was found, `comparison` compares two answers, and `explain` asks why they differ. `given` checks
what is given, and `_gradients` puts all of it together for any function, as `of_config` does for
the plan of a config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.verify._gradients import gradients
from jaxpar.verify.report import GradientRow, Verdict

if TYPE_CHECKING:
    from jaxpar.verify.of_config import verify as config

__all__ = ["GradientRow", "Verdict", "config", "gradients"]


def __getattr__(name: str) -> object:
    """Import `config` when it is first asked for, because it imports the models and the
    training step.
    """
    if name == "config":
        from jaxpar.verify.of_config import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
