"""The reader that makes a task graph of a compiled program's text. To be read in this order: one
instruction as a task (`one_task`), what an instruction's result depends on (`values`), and the walk
through a program that makes a list of tasks, loops and waits of both (`reader`).
"""

from jaxpar.hlo.read.reader import read_program

__all__ = ["read_program"]
