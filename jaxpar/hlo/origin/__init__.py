"""The origin of a task: the model's named scopes, the phase (forward or backward), and the line of
Python. To be read in this order: scope and phase, from the path that jax writes (`path`); the line,
from the frames of a stack (`line`); both for one instruction, also a fusion (`instruction`); and
the origin of what the compiler made itself, which a neighbour gives (`inherited`).
"""

from jaxpar.hlo.origin.inherited import inherit
from jaxpar.hlo.origin.instruction import origin_of
from jaxpar.hlo.origin.line import OWN, PackageDirs, default_dirs, source_line
from jaxpar.hlo.origin.path import UPDATE, decode

__all__ = [
    "OWN",
    "UPDATE",
    "PackageDirs",
    "decode",
    "default_dirs",
    "inherit",
    "origin_of",
    "source_line",
]
