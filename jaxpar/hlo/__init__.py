"""A compiled program, read from its text: instructions, trips of loops, collectives and their groups, FLOPs, bytes.

It knows no config, no model and no mesh: a collective names its devices by their position in the program.
"""
