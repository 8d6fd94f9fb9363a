"""A training step whose matrices have whole blocks of zeros, compiled for chips that are not here:
its linears skip the blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tiers import needs_cuda, needs_libtpu

from jaxpar.base.config import Config, override
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.targets import load_target

TOKENS = 2 * 256
WIDTH = 512
SMALL: dict[str, Any] = {
    "model.layers": 2,
    "model.embed": WIDTH,
    "model.heads": 4,
    "model.mlp": WIDTH,
    "model.vocab_size": 512,
    "model.max_seq_len": 256,
    "data.seq_len": 256,
    "train.batch": 2,
    "model.sparsity.form": "1:4",
    "model.sparsity.block": [128, 128],
    "precision.compute": "bfloat16",
}
DENSE = 2.0 * TOKENS * WIDTH * WIDTH
"""The FLOPs of one product with a whole matrix."""
LINEARS = 6
"""The matrices of a block of GPT-2, all of them of WIDTH by WIDTH here."""


def assert_skips(target: str, pattern: str) -> None:
    """In the loop over layers each linear has a kernel forward and one for its input's gradient,
    whose work is known where the pattern is.
    """
    config = override(Config(), SMALL | {"model.sparsity.pattern": pattern})
    if target.startswith("h100"):  # where cuDNN is installed, auto has two kernels and not three
        config = override(config, {"kernels.attention": "pallas_gpu"})
    step = compile_step(config, load_target(target))
    program = read_program(step.compiled.text)
    kernels = Counter(task.flops for task, _ in walk(program.nodes) if task.kind == "kernel")
    each = DENSE / 4 if pattern == "cyclic" else DENSE
    assert kernels[each] == 2 * LINEARS
    assert sum(kernels.values()) == 2 * LINEARS + 3  # and attention, of which two are backward


@needs_libtpu
@pytest.mark.parametrize("pattern", ["cyclic", "largest"])
def test_a_step_for_an_absent_tpu_skips_blocks(pattern: str) -> None:
    assert_skips("v5e-1", pattern)


@needs_cuda
def test_a_step_for_an_absent_gpu_skips_blocks() -> None:
    assert_skips("h100x1", "largest")
