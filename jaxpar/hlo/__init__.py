"""This package reads a compiled program's text: instructions, loop trips, collectives and their
groups, FLOPs, bytes.

It knows no config, no model and no mesh: a collective names its devices by their position in the
program.

Its rooms, in the order in which they are read: `module` has the typed data that `parse` makes of a
text (by `text`), and `tasks` what a program is made into. `opcodes` and `kinds` say what an
instruction is, `flops` and `memory_traffic` what it computes and moves, `trips` how often a loop
runs, `collectives` what goes between which devices, `origin` which line of the model it is from.
`read` puts them together. `live` finds what is in memory at each time. `fusions`, `host_compute`
and `collective_order` answer one question each.
"""
