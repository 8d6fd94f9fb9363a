"""This package reads a compiled program's text: instructions, loop trips, collectives and their
groups, FLOPs, bytes.

It knows no config, no model and no mesh: a collective names its devices by their position in the
program.
"""
