"""The digest of a program: what changes it, and what does not."""

from __future__ import annotations

import pytest

from jaxpar.hlo.program.digest import program_digest

PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused.2 (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p.3, %p.3), metadata={op_name="jit(step)/add{}" stack_frame_id=4}
}

ENTRY %main.9 (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT %fusion.7 = f32[8]{0} fusion(%x.1), kind=kLoop, calls=%fused.2, metadata={op_name="add"}
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stack_frame_id=4", "stack_frame_id=5"),
        ("jit(step)/add{}", "jit(step)/block/add{}"),
        ("%fusion.7", "%add_fusion"),
        ("fused.2", "fused_computation.77"),
        ("jit_step", "jit_other"),
        ("x.1", "state"),
        (', metadata={op_name="add"}', ""),
        ("parameter(0), metadata", "/*index=0*/parameter(0), metadata"),
    ],
)
def test_names_and_metadata_do_not_count(old, new):
    assert old in PROGRAM
    assert program_digest(PROGRAM.replace(old, new)) == program_digest(PROGRAM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add(%p.3, %p.3)", "multiply(%p.3, %p.3)"),
        ("f32[8]", "f32[16]"),
        ("kind=kLoop", "kind=kInput"),
        ("is_scheduled=true", "is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }"),
    ],
)
def test_what_runs_counts(old, new):
    assert program_digest(PROGRAM.replace(old, new)) != program_digest(PROGRAM)
