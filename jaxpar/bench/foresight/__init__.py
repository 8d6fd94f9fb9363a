"""Foresight held against measurements: published training steps, each rehearsed as it ran, with
the error of the prediction by chip.

Its rooms, in the order in which they are read: `rows` reads the published measurements. `translate`
makes a config and a target of each, with `families` for its model and `remat` for what it keeps.
`programs` compiles each step once and prices it as often as prices change. `figures` says how good
predictions are, and `board` puts all of this together.
"""
