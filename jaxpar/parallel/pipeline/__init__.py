"""Pipeline parallelism inside one jit: schedules as data, and the code that runs them."""

from jaxpar.parallel.pipeline.executor import gradients as gradients
from jaxpar.parallel.pipeline.executor import loss as loss
from jaxpar.parallel.pipeline.layers import Layers as Layers
from jaxpar.parallel.pipeline.layers import check_stages as check_stages
from jaxpar.parallel.pipeline.layers import layers_in as layers_in
from jaxpar.parallel.pipeline.layers import layers_of as layers_of
from jaxpar.parallel.pipeline.layers import microbatches as microbatches
from jaxpar.parallel.pipeline.layers import pipeline_notes as pipeline_notes
from jaxpar.parallel.pipeline.layers import reorder_layers as reorder_layers
from jaxpar.parallel.pipeline.layers import stored_order as stored_order
from jaxpar.parallel.pipeline.model_functions import value_and_grad as value_and_grad
from jaxpar.parallel.pipeline.schedules import Table as Table
from jaxpar.parallel.pipeline.schedules import register_schedule as register_schedule
from jaxpar.parallel.pipeline.schedules import schedule as schedule
