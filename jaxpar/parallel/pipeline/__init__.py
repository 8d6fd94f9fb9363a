"""Pipeline parallelism inside one jit: schedules as data, and the code that runs them.

In the order in which to read: `schedule_table` says what a schedule is, and `schedules` makes the
schedules that have names; `layers` assigns layers to the stages; `program` turns a table into scans
over rounds, with a slot for everything that waits. `executor` runs a program: `stage_inputs` has
the arguments of a stage, `stage` runs its layers and keeps the arrays that `residuals` chooses,
`ticks` runs its ticks, and `shared_head` shares the head out over all stages. A model is a
`pipelined_model`, or made of functions (`model_functions`).
"""

from jaxpar.parallel.pipeline.executor import gradients, loss
from jaxpar.parallel.pipeline.layers import (
    Layers,
    check_stages,
    layers_in,
    layers_of,
    microbatches,
    pipeline_notes,
    reorder_layers,
    stored_order,
)
from jaxpar.parallel.pipeline.model_functions import value_and_grad
from jaxpar.parallel.pipeline.schedule_table import Table
from jaxpar.parallel.pipeline.schedules import register_schedule, schedule

__all__ = [
    "Layers",
    "Table",
    "check_stages",
    "gradients",
    "layers_in",
    "layers_of",
    "loss",
    "microbatches",
    "pipeline_notes",
    "register_schedule",
    "reorder_layers",
    "schedule",
    "stored_order",
    "value_and_grad",
]
