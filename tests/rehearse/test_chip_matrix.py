"""Tiny training steps compiled for every kind of chip that has a file: on one device, on 2 x 2 x 2,
as a pipeline and with experts, with every kernel of the platform among them.

A version that refuses a chip, an option or a kernel is known by the row that fails. `make
test-newest` runs those with the marker `matrix`: every chip on 2 x 2 x 2, and every program on a
TPU and on a GPU. The others are slow tests, of which CI draws some for each commit.
"""

from __future__ import annotations

import math

import pytest
from tiers import MARKS

from jaxpar.base.config import Config, override
from jaxpar.base.hardware import CHIPS, load_chip
from jaxpar.base.jax_compat import SCOPED_VMEM
from jaxpar.base.toml import presets
from jaxpar.kernels.attention import libraries
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.targets import load_target

pytestmark = pytest.mark.slow

SMALL = {
    "model.family": "llama",
    "model.layers": 2,
    "model.embed": 128,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.head_dim": 128,  # the least that jax's splash takes
    "model.mlp": 128,
    "model.vocab_size": 128,
    "data.seq_len": 128,
    "train.batch": 8,
    "train.warmup_steps": 0,
    "precision.compute": "bfloat16",
    "optimizer.name": "sgd",
}
PROGRAMS = {
    "one device": {  # its matrices have blocks of zeros, for which there is a kernel too
        "model.layers": 1,
        "model.sparsity.form": "1:2",
        "model.sparsity.block": (128, 128),
        "model.embed": 256,
        "model.mlp": 256,
    },
    "2 x 2 x 2": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "pipeline": {"mesh.stage": 2, "mesh.fsdp": 4, "pipeline.microbatches": 2},
    "experts": {
        "model.layers": 1,
        "model.experts": 4,
        "model.experts_per_token": 2,
        "mesh.data": 1,
        "mesh.fsdp": 2,
        "mesh.expert": 4,
    },
}
KERNELS = {"tpu": ("splash", "pallas_tpu", "chunked"), "cuda": ("cudnn", "pallas_gpu", "chunked")}
"""The kernels of attention, which the programs take in turn."""


def rows() -> list[object]:
    found = []
    for chip in presets(CHIPS):
        platform = "tpu" if load_chip(chip).slices.name else "cuda"
        for number, program in enumerate(PROGRAMS):
            kernel = _serving(chip, KERNELS[platform][number % 3])
            marks = [*MARKS[platform]]
            if program == "2 x 2 x 2" or chip in ("v5p", "h100"):
                marks.append(pytest.mark.matrix)
            found.append(
                pytest.param(chip, program, kernel, id=f"{chip}, {program}, {kernel}", marks=marks)
            )
    return found


def _serving(chip: str, kernel: str) -> str:
    """The kernel, or the one that serves in its place, so that a row is named by what it runs."""
    if chip == "t4":
        return "chunked"  # older than the kernels
    if kernel == "cudnn" and not libraries.has_cudnn():
        return "pallas_gpu"  # cuDNN is no part of the extra `rehearse`
    return kernel


def target_of(chip: str, devices: int) -> str:
    slices = load_chip(chip).slices
    if not slices.name:
        return f"{chip}x{devices}"
    per_chip = load_chip(chip).hardware.devices_per_chip
    shape = {1: slices.shapes[0], 8: next(s for s in slices.shapes if chips_of(s) * per_chip == 8)}
    return f"{chip}:{shape[devices]}"


def chips_of(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


@pytest.mark.parametrize(("chip", "program", "kernel"), rows())
def test_a_tiny_step_compiles(
    chip: str, program: str, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = PROGRAMS[program]
    meshed = {key: size for key, size in sizes.items() if key.startswith("mesh.")}
    target = load_target(target_of(chip, 8 if meshed else 1))
    changes = SMALL | sizes
    if not meshed:
        changes["mesh.data"] = target.device_count
    changes["kernels.attention"] = kernel
    if target.platform == "tpu":
        changes["compiler.options"] = (f"{SCOPED_VMEM}=16384",)  # compiles sooner
    compiled = compile_step(override(Config(), changes), target).compiled
    assert "is_scheduled=true" in compiled.text
    assert not [record for record in caplog.records if "left out" in record.getMessage()]
