"""The names that Orbax gives what a checkpoint has on the disk, none of which it promises. They
were seen in orbax-checkpoint 0.12.8, and `pyproject.toml` takes no other minor release.

A step is a folder of its number. While it is written, its name has an ending:

    12.orbax-checkpoint-tmp-.../
    12/_CHECKPOINT_METADATA          when it was begun, and when it was whole
    12/state/...                     the arrays, and what they are
    12/data/metadata                 what is saved beside them, as JSON
    12/metrics/metrics               its validation loss, in runs of earlier versions
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

UNFINISHED = ".orbax-checkpoint-tmp"
"""What the name of a step ends in while it is written; a number may follow."""
STEP_METADATA = "_CHECKPOINT_METADATA"
"""Says when a step was begun and when it was whole; it is written just before the step gets its
name."""
STATE = "state"
"""The folder of the arrays of a step."""
DATA = "data"
"""The folder of what is saved beside the arrays."""
DATA_FILE = PurePosixPath(DATA, "metadata")
METRICS = "metrics"
"""The folder of a validation loss, which earlier versions had saved as Orbax's metric."""
METRICS_FILE = PurePosixPath(METRICS, "metrics")
CHUNK = re.compile(rf"{STATE}/.*/\d+(\.\d+)*")
"""A part of an array, which the process that holds it writes where several do. Other files all
write alike."""
OF_ZARR = (".zarray", ".zgroup", ".zattrs")
"""Hidden files in which Zarr says what an array is."""
