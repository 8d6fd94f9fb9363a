"""Tables and pictures of a plan: parameters, a layer, the pipeline's schedule, masks, memory."""
