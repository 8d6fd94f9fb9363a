"""A pipeline compiled by the real TPU compiler for absent chips: what travels beside what.
Compiled, not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.targets import load_target

pytest.importorskip("libtpu", reason="the TPU compiler is not here: pip install 'jaxpar[rehearse]'")
pytestmark = pytest.mark.slow

SMALL = {
    "model.layers": 8,
    "model.embed": 1024,
    "model.heads": 8,
    "model.kv_heads": 8,
    "model.mlp": 2048,
    "data.seq_len": 2048,
    "model.vocab_size": 4096,
    "train.batch": 16,
    "mesh.distributed": False,
    "mesh.tensor": 2,
    "mesh.fsdp": 2,
    "pipeline.microbatches": 8,
}


def between(computation: Computation, start: Instruction) -> list[Instruction]:
    """What stands in the schedule from a transfer's start to its end."""
    ordered = list(computation.instructions.values())
    if start.opcode == "send":  # between slices: what is received ends a transfer
        end = start.name.replace("send", "recv-done")
    else:
        end = next(
            one.name
            for one in ordered
            if one.opcode == f"{start.base}-done" and start.name in one.operands
        )
    names = [one.name for one in ordered]
    return ordered[names.index(start.name) + 1 : names.index(end)]


def rounds(module: Module) -> Iterator[Computation]:
    """The bodies of rounds with both ticks: with the loops over the layers of a forward and of a
    backward.
    """
    for computation in module.computations.values():
        loops = [one.op_name for one in computation.instructions.values() if one.opcode == "while"]
        if all(
            any(f"/{tick}_tick/while" in loop for loop in loops) for tick in ("forward", "backward")
        ):
            yield computation


def compiled(target: str, stage: dict[str, int]) -> Module:
    return parse_module(
        compile_step(
            override(load_config("llama3_8b"), SMALL | stage), load_target(target)
        ).compiled.text
    )


def test_what_a_stage_sends_travels_beside_its_compute() -> None:
    """Activations travel beside the loops over the layers of the backward, cotangents beside the
    forward tick: the compiler starts them as late as it thinks they may be, so it may be the loss
    alone that covers them."""
    (body,) = rounds(compiled("v5e-16", {"mesh.stage": 4}))
    sends = [
        one
        for one in body.instructions.values()
        if one.base == "collective-permute" and "/send/" in one.op_name
    ]
    assert all(one.opcode == "collective-permute-start" for one in sends)
    (activation,) = [one for one in sends if "/forward_tick/send/" in one.op_name]
    (cotangent,) = [one for one in sends if "/forward_tick/send/" not in one.op_name]
    assert any(
        "/backward_tick/while" in one.op_name
        for one in between(body, activation)
        if one.opcode == "while"
    )
    beside = [one.op_name for one in between(body, cotangent) if one.opcode in ("while", "fusion")]
    assert any(
        "/forward_tick/while" in name or "/forward_tick/jvp(loss)" in name for name in beside
    )


@pytest.mark.long
def test_stages_on_four_slices_send_beside_their_compute() -> None:
    (body,) = rounds(compiled("v5p-4x4", {"mesh.dcn.stage": 4}))
    rows = SMALL["data.seq_len"] // SMALL["mesh.tensor"]
    sends = [
        one
        for one in body.instructions.values()
        if one.opcode == "send" and next(one.shape.leaves()).dims == (1, rows, SMALL["model.embed"])
    ]
    loops = [
        [other.op_name for other in between(body, one) if other.opcode == "while"] for one in sends
    ]
    assert sum(any("/backward_tick/while" in name for name in names) for names in loops) == 1
    assert sum(any("/forward_tick/while" in name for name in names) for names in loops) == 1


def test_layers_one_after_another_compile() -> None:
    """Layers that are not scanned, unlike `SMALL`'s: a loop that XLA unrolls by itself ended this
    compiler.
    """
    small = {"mesh.platform": "auto", "mesh.data": 1, "mesh.stage": 2, "pipeline.schedule": "1f1b"}
    config = override(load_config("tiny"), small | {"model.layers": 4})
    assert not config.model.scan_layers
    assert "collective-permute" in compile_step(config, load_target("v5e-8")).compiled.text
