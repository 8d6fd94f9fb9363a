"""Two or more ways to do one thing, timed in turns in one run.

`alternate` times candidates in turns and makes the table of medians and ratios; `step` has a training step for them.
The measurements of the project itself on a GPU stand with the tests (`tests/on_gpu`).
"""
