"""Is it the same answer? Loss and every gradient against one device, and how a wrong one is wrong.

    verdict = verify.gradients(loss, reference, params, batch, (param_shardings, batch_shardings))
    print(verdict)

`gradients` takes anyone's loss, `config` a config's plan. A gradient that differs is explained by `mistakes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpar.verify._gradients import gradients
from jaxpar.verify.report import GradientRow, Verdict

if TYPE_CHECKING:
    from jaxpar.verify.of_config import verify as config

__all__ = ["GradientRow", "Verdict", "config", "gradients"]


def __getattr__(name: str) -> object:
    """`config`, when it is first asked for: it brings the models and the training step along."""
    if name == "config":
        from jaxpar.verify.of_config import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
