"""Pipeline parallelism inside one jit: schedules as data, and what runs them."""

from jaxpar.pipeline.executor import gradients as gradients
from jaxpar.pipeline.executor import loss as loss
from jaxpar.pipeline.layers import Layers as Layers
from jaxpar.pipeline.layers import check_stages as check_stages
from jaxpar.pipeline.layers import layers_in as layers_in
from jaxpar.pipeline.layers import layers_of as layers_of
from jaxpar.pipeline.layers import microbatches as microbatches
from jaxpar.pipeline.layers import reorder_layers as reorder_layers
from jaxpar.pipeline.layers import stored_order as stored_order
from jaxpar.pipeline.notes import pipeline_notes as pipeline_notes
from jaxpar.pipeline.schedules import Table as Table
from jaxpar.pipeline.schedules import schedule as schedule
