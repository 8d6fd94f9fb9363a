"""The commands of `jaxpar`: words to a call, the result to a screen.

`main` finds a command by its first word, without importing JAX, and turns a `UserError` into one
line and exit code 2. `arguments`, with `flags`, makes the words a dataclass, whose docstrings are
the `help`. The other modules call the wings: `commands` has those commands that need no module of
their own, and there are `rehearse`, `launch`, `trained` (to generate and to evaluate), `convert`,
`prune`, `checkpoints`, `goodput`, `compose`, `bench` and `doctor`.
"""
