"""A run in a bucket: each process works in a copy of its own on this machine. Read the modules in
this order: the names of a run's objects (`layout`), how changes are sent (`sender`), the copy, into
which the arrays of a step are fetched when they are first read (`copy`), and the functions by which
all others reach a run, in a bucket or not (`remote_runs`).
"""

from jaxpar.train.runs.bucket.remote_runs import (
    copy_of,
    folder_here,
    run_here,
    send,
    writing_folder,
)

__all__ = ["copy_of", "folder_here", "run_here", "send", "writing_folder"]
