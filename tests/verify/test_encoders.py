"""`verify` for encoders, on every parallelism: their masks look ahead, and their ends are others."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import refused_by_newest_cpu
from verified_tables import print_table

from jaxpar.base.config import Config, override
from jaxpar.verify.of_config import checks as verify

BERT = {"model.family": "bert", "model.masks": ("full",), "model.token_types": 2}
MODERN = {
    "model.family": "modernbert",
    "model.masks": ("full", "local(40)", "local(40)"),
    "model.rope_local_theta": 100.0,
    "model.layers": 7,
}
PIPED = {"pipeline.schedule": "1f1b", "pipeline.microbatches": 4}
COMMON = {"model.heads": 8, "model.vocab_size": 250, "train.batch": 48}
MESHES: dict[str, dict[str, Any]] = {
    "data": {"mesh.data": 4, "train.accumulation": 3},
    "fsdp-tensor": {"mesh.fsdp": 2, "mesh.tensor": 4, "precision.compute": "bfloat16"},
    "ring": {"mesh.data": 2, "mesh.context": 2, "mesh.tensor": 2},
    "ulysses": {"mesh.fsdp": 2, "mesh.context": 2, "context.strategy": "ulysses"},
    "packed": {"mesh.context": 2, "mesh.tensor": 2, "data.pack": True, "memory.policy": "dots"},
    "stage": {"mesh.stage": 2, "mesh.tensor": 2, "memory.policy": "full"} | PIPED,
    "stage-context": {"mesh.stage": 2, "mesh.context": 2} | PIPED,
}


MODERN_STAGES = {"model.layers": 12, "pipeline.layers": (6, 6)}
"""Stages begin with the first of three kinds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [pytest.param(name, marks=[pytest.mark.users_flags] * (name == "data")) for name in MESHES],
)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_gives_the_gradients_of_one_device(family: str, mesh: str) -> None:
    with refused_by_newest_cpu():
        found = verified(family, mesh)
    assert found.equal, str(found)


def verified(family: str, mesh: str) -> verify.Verification:
    model = BERT
    if family == "modernbert":
        model = MODERN | (MODERN_STAGES if "stage" in mesh else {})
    return verify.verify(override(Config(), COMMON | model | MESHES[mesh]))


@pytest.mark.long
def test_the_table_of_encoders(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the encoders' table of docs/verified.md."""
    rows = (
        ([family, *words(mesh)], verified(family, mesh))
        for family in ("bert", "modernbert")
        for mesh in MESHES
    )
    assert not print_table(["model", "mesh", "with"], rows, capsys)


def words(mesh: str) -> tuple[str, str]:
    """A mesh and its other settings in a table's cells."""
    sizes = []
    others = []
    for name, value in MESHES[mesh].items():
        table, key = name.split(".")
        if table == "mesh":
            sizes.append(f"{key}={value}")
        else:
            others.append(f"{key} {str(value).lower()}")
    return " x ".join(sizes), ", ".join(others)
