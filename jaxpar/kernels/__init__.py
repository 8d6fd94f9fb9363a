"""Attention kernels behind one function."""

from jaxpar.kernels.attention.dispatch import attention

__all__ = ["attention"]
