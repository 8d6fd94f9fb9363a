"""Matmuls of rows that belong to different experts, on one device: each row is multiplied by its
expert's matrix.

    order = expert_order(counts_ME, len(x_RI))      # of rows that came in several buffers
    y_RO = grouped_matmul(x_RI, weight_EIO, counts_ME)
    dweight_EIO = grouped_weight_gradient(x_RI, dy_RO, counts_ME)

Rows lie in the order of the experts (`order`), and `counts_ME` says how many each buffer has for
each expert. `products` takes what serves: XLA's own ragged matmul, or on GPUs the kernels of
`triton`.
"""

from jaxpar.kernels.grouped_matmul.order import expert_order, inverse
from jaxpar.kernels.grouped_matmul.products import grouped_matmul, grouped_weight_gradient

__all__ = ["expert_order", "grouped_matmul", "grouped_weight_gradient", "inverse"]
