"""Which arrays of a scheduled program are in a device's memory at each time. To be read in this
order: the result (`arrays`); which result may be written in an operand's place (`in_place`); and
the walk that finds the arrays and what the program says of their places, with the rules of what
counts once (`liveness`).
"""

from jaxpar.hlo.live.arrays import LiveArray, Schedule
from jaxpar.hlo.live.liveness import live_arrays

__all__ = ["LiveArray", "Schedule", "live_arrays"]
