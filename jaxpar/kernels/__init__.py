"""Attention behind one function, the masks that it takes, and matmuls of grouped rows and with
block-sparse matrices. No kernel knows of a mesh.

    mask = masks.Causal() & masks.Window(1023)
    out_BSHh, lse_BHS = kernels.attention(q_BSHh, k_BTKh, v_BTKh, mask)

`masks` is an algebra of what a query may see, which the reference, the kernels and context
parallelism share. In `attention`, `dispatch` takes the first implementation that can serve; each is
held against `call.reference`, and a program adds its own by `register_kernel`. `block_sparse` takes
masks as maps of a matrix's blocks, and `grouped_matmul` serves experts. `weight_forms` says which
entries of a stored matrix count.
"""

from jaxpar.kernels.attention import implementations as _ours  # noqa: F401 (before anyone's)
from jaxpar.kernels.attention.dispatch import attention
from jaxpar.kernels.attention.kernel import register_kernel

__all__ = ["attention", "register_kernel"]
