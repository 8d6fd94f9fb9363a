"""A teacher of a training: the program by which a model answers batches (`answers`), what a
training reads of it, beside or from disk (`teacher`), and what writes its answers to disk
(`to_disk`).
"""

from jaxpar.train.distil.teacher import Teacher, open_teacher
from jaxpar.train.distil.to_disk import write_top_k

__all__ = [
    "Teacher",
    "open_teacher",
    "write_top_k",
]
