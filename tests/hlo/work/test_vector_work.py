"""The elementwise work of programs for CPUs, counted by hand."""

from __future__ import annotations

import pytest

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work.vector_work import ALL_THREADS, VectorWork, vector_work

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[12,64]) -> f32[12,64] {
  %p = f32[12,64]{1,0} parameter(0)
  %one = f32[] constant(1)
  %ones = f32[12,64]{1,0} broadcast(%one), dimensions={}
  %exponential = f32[12,64]{1,0} exponential(%p)
  ROOT %more = f32[12,64]{1,0} add(%exponential, %ones)
}

%sliced (q: f32[4,64]) -> f32[1,64] {
  %q = f32[4,64]{1,0} parameter(0)
  %tanh = f32[4,64]{1,0} tanh(%q)
  ROOT %slice = f32[1,64]{1,0} slice(%tanh), slice={[0:1], [0:64]}
}

ENTRY %main (x: f32[12,64], w: f32[64,64], y: f32[4,64]) -> f32[64,12] {
  %x = f32[12,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %y = f32[4,64]{1,0} parameter(2)
  %zero = f32[] constant(0)
  %split = f32[12,64]{1,0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"outer_dimension_partitions":["2"]}
  %part = f32[1,64]{1,0} fusion(%y), kind=kLoop, calls=%sliced
  %dot = f32[12,64]{1,0} dot(%split, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %library = f32[12,64]{1,0} fusion(%dot), kind=kCustom, calls=%fused, backend_config={"fusion_config":{"kind":"__ynn_fusion"},"outer_dimension_partitions":[]}
  %reduce = f32[12]{0} reduce(%library, %zero), dimensions={1}, to_apply=%add
  %turned = f32[12,64]{0,1} copy(%library)
  %same = f32[12,64]{1,0} copy(%library)
  %heads = f32[3,4,64]{2,1,0} bitcast(%library)
  %heads_dot = f32[3,4,4]{2,1,0} dot(%heads, %heads), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}
  %rows = f32[4,3,64]{2,1,0} transpose(%heads), dimensions={1,0,2}
  ROOT %transposed = f32[64,12]{1,0} transpose(%library), dimensions={1,0}
}
"""
ALL = 12 * 64


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("split", VectorWork(simple=ALL, costly=ALL, threads=2)),
        ("part", VectorWork(simple=64, costly=64)),
        ("dot", VectorWork(threads=ALL_THREADS, narrowest=12)),
        ("heads_dot", VectorWork(threads=ALL_THREADS, narrowest=4)),
        ("library", VectorWork(simple=ALL, costly=ALL, threads=ALL_THREADS)),
        ("reduce", VectorWork(simple=ALL)),
        ("turned", VectorWork(strided=ALL)),
        ("same", VectorWork(simple=ALL)),
        ("rows", VectorWork(simple=ALL)),  # what lies side by side still does
        ("transposed", VectorWork(strided=ALL)),
    ],
)
def test_each_instruction(name, expected):
    assert vector_work(parse_module(PROGRAM))[name] == expected


def test_what_stands_inside_a_fusion_is_counted_there_alone():
    found = vector_work(parse_module(PROGRAM))
    assert "exponential" not in found and "sum" not in found and "x" not in found
