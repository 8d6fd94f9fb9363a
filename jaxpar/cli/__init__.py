"""The commands of `jaxpar`: each turns its words into a call, and prints the result.

`main` finds a command by its first word, without importing JAX, and turns a `UserError` into one
line and exit code 2. `arguments`, with `flags`, reads the words into a dataclass, whose docstrings
are the `help`. The other modules call the wings: `commands` has the commands that need no module of
their own, and there are `rehearse`, `plan`, `launch`, `trained` (to generate and to evaluate),
`convert`, `prune`, `checkpoints`, `goodput`, `compose`, `bench` and `doctor`.
"""
