"""What a model calls in place of a matmul, a lookup, attention, experts and a loss, and what those are made of.

Linear layers with their collectives (`linear`, `ring_matmul`), attention over a split sequence (`context`,
`ring_attention`, `zigzag`), `experts`, the loss (`cross_entropy`), recomputation (`remat`), host memory, the pipeline.
"""
