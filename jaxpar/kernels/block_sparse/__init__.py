"""Matmuls with a matrix of which whole blocks are zero, on one device: only the other blocks are
read and multiplied, forward and in both backwards.

    y_TO = block_sparse.matmul(x_TI, weight_IO, blocks_MN)

`blocks` lists the blocks that are kept. `_matmul` takes the kernel that serves, and has the
`reference` that tests compare each with; `tpu` and `triton` have the same two products: `multiply`
and `weight_gradient`.
"""

from jaxpar.kernels.block_sparse._matmul import block_map, matmul, reference

__all__ = ["block_map", "matmul", "reference"]
