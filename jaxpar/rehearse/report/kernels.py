"""The kernels that a program has in place of those that its target would run."""

from __future__ import annotations

from jaxpar.kernels.attention.libraries import stand_ins_in
from jaxpar.rehearse.report.schema import KernelRow
from jaxpar.rehearse.targets import cudnn_packages


def stand_ins(text: str) -> list[KernelRow]:
    """List what a compiled program runs in place of the kernels of its target (attention without
    cuDNN, where the target has it), with the command that installs what is missing.
    """
    install = f"pip install {' '.join(cudnn_packages())}"
    return [
        {"op": "attention", "priced": name, "runs": "cuDNN", "install": install}
        for name in stand_ins_in(text)
    ]
