"""An open run, from an experiment and a folder to the last step.

Read `held_run` first: it holds the folder, has what is left trained, and gives the folder back.
`training` is one such call, and `steps` the loop itself, with the way back from a bad step. What
the steps work with are rooms of their own: a step, its batch and the place of that in the data
(`run_step`), the rows of metrics (`rows`), what is saved (`saves`), what is timed (`timing`), and
what is said at the end (`messages`).
"""

from jaxpar.train.guard.failures import STEP, CopiesDiffer, Diverged, OutOfMemory
from jaxpar.train.loop.held_run import Run, open_run, run
from jaxpar.train.loop.training import Result

__all__ = [
    "STEP",
    "CopiesDiffer",
    "Diverged",
    "OutOfMemory",
    "Result",
    "Run",
    "open_run",
    "run",
]
