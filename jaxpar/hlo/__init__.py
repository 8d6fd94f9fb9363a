"""This package reads a compiled program's text: instructions, loop trips, collectives and their
groups, FLOPs, bytes.

It takes no config, no model and no mesh: a collective names its devices by their position in the
program. Of the library it knows where its own folders lie, and that `models/linears.py` is passed
over for the line that calls it, since each task is told a line of the model (`origin`).

Two folders are read first: `program`, the typed data that a text is read into and the tasks that it
is made into, and `work`, what one instruction computes, moves and sends. Then, in this order:
`origin` says which line of the model a task is from, and `read` puts all of it together. `live`
finds what is in memory at each time. `fusions` and `collective_order` answer one question each.
"""
