"""Training: state and step, data, checkpoints, the loop; evaluation, text, conversion.

`loop.run` trains a config in a run folder; `step` has the state, its shardings and the jitted step, for a loop of one's
own.
"""
