"""One call of `run`, from an experiment and a folder to the last step.

Read `call` first: it opens the folder, runs the steps, and gives the folder back. What it hands to
them is in `parts`. `steps` has the loop itself, and `bad_steps` the way back from a bad one. What
they work with (`tools`) are rooms of their own: the batches and their places in the data
(`batches`), a step (`run_step`), the rows of metrics (`rows`), what is saved (`saves`), what is
timed (`timing`), and what is said at the end (`messages`).
"""

from jaxpar.train.guard.failures import STEP, CopiesDiffer, Diverged, OutOfMemory
from jaxpar.train.loop.call import Result, run
from jaxpar.train.loop.parts import Watch

__all__ = [
    "STEP",
    "CopiesDiffer",
    "Diverged",
    "OutOfMemory",
    "Result",
    "Watch",
    "run",
]
