"""Invented figures of a machine with two processors."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.rehearse.here import CpuFigures, CpuRates

RATES = CpuRates(
    matmul_float32=((1e6, 100e9),),
    narrow_float32=((1e6, 25e9),),
    matmul_bfloat16=((1e6, 50e9),),
    narrow_bfloat16=((1e6, 5e9),),
    memory=((1e6, 20e9),),
    strided=((1e6, 0.5e9),),
    simple=10e9,
    costly=1e9,
    tasks=1e6,
)
FIGURES = CpuFigures(
    cores=2,
    alone=RATES,
    together=replace(RATES, simple=20e9, costly=2e9, strided=((1e6, 1e9),), tasks=2e6),
    call=10e-6,
    argument=2e-6,
)
