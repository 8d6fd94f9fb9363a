"""Comparisons of two or more ways to do one thing, in turns, in one run.

`alternate` times candidates by turns and makes the table of medians and ratios; every other module names candidates.
What measures the project itself on a GPU stands with the tests (`tests/on_gpu`).
"""
