"""Tables and pictures of a plan show its parameters, a layer, the pipeline's schedule, masks and memory."""
