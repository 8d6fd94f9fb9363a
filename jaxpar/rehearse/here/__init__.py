"""This machine as a target: what its processors do, measured in seconds and kept.

Its rooms, in the order in which they are read: `figures` are what is known of a machine, and where
they are kept; `measure` takes them; and `hardware` has them in the form of a chip's.
"""

from jaxpar.rehearse.here.figures import WIDE, CpuFigures, CpuRates, rate_at
from jaxpar.rehearse.here.hardware import chip_here, hardware_of_cpus
from jaxpar.rehearse.here.measure import cpu_figures

__all__ = [
    "WIDE",
    "CpuFigures",
    "CpuRates",
    "chip_here",
    "cpu_figures",
    "hardware_of_cpus",
    "rate_at",
]
