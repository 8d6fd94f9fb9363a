"""A run in a bucket: each process works in a copy of its own on this machine. To be read in this
order: what the objects of a run are called (`layout`), how what changes here is sent (`sender`),
the copy, into which the arrays of a step are fetched when they are first read (`copy`), and the
functions by which all others come to a run, in a bucket or not (`remote_runs`).
"""

from jaxpar.train.runs.bucket.remote_runs import (
    copy_of,
    folder_here,
    run_here,
    send,
    writing_folder,
)

__all__ = ["copy_of", "folder_here", "run_here", "send", "writing_folder"]
