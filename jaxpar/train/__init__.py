"""Training: state and step, data, checkpoints, the loop; evaluation, text, conversion.

    train.run(plan.resolve(config), folder)

`run` trains a config in a run folder; `step` has the state, its shardings and the jitted step, for a loop of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpar.train.loop import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    """`run`, when it is first asked for: it brings data and checkpoints along."""
    if name == "run":
        from jaxpar.train.loop import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
