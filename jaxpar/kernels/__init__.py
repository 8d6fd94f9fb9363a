"""Attention kernels behind one function."""

from jaxpar.kernels.dispatch import attention

__all__ = ["attention"]
