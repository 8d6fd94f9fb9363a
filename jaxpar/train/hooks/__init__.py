"""What is done at steps of a run, by the library and by a program of one's own, beside training.

`hook` is what both are made of; `given` refuses a program's own that could not be called alike on
all processes, and has what a checkpoint keeps of them. The library's own are one room each:
the trace of some steps (`profile`), the comparison of copies (`copies`) and the validation losses
(`evaluations`). The loop calls, in this order, `profile`, `copies`, the program's own as they were
given, and `evaluations`, which so takes the parameters that they give. What is no hook, and why, is
a table of docs/architecture.md.
"""

from jaxpar.train.hooks.hook import Hook, HookedRun, OnRow

__all__ = ["Hook", "HookedRun", "OnRow"]
