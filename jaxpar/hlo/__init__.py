"""This package reads a compiled program's text: instructions, loop trips, collectives and their
groups, FLOPs, bytes.

It takes no config, no model and no mesh: a collective names its devices by their position in the
program. Of the library it knows where its own folders lie, and that `models/linears.py` is passed
over for the line that calls it, since each task is told a line of the model (`origin`).

Its folders, in the order in which they are read: `program` has the typed data that a text is read
into and the tasks that it is made into, and `work` what one instruction computes, moves and sends.
`origin` says which line of the model a task is from, and `read` puts all of it together. `live`
finds what is in memory at each time. Then `fusions` and `collective_order` answer one question
each.
"""
