"""Measures what programs reach of this GPU's peaks, and writes it as a chip's file has it: matmuls
by shape, fusions and copies, attention by kernel, head_dim and length.

`jaxpar rehearse --prices FILE` takes the file that comes out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from on_gpu.attention import attention_rows, visible_places
from on_gpu.pieces import Found, Say

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.hardware import Hardware
from jaxpar.bench.measure import BenchRow, alternate
from jaxpar.kernels.masks import Causal

MATMULS = [
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 8192, 8192),
    (32768, 3072, 768),
    (32768, 768, 3072),
    (1024, 50304, 768),
]
"""Rows, columns and what is summed over: layers of LLaMA and of GPT-2, and its logits."""
ATTENTION = [(64, 1024), (64, 4096), (128, 2048), (128, 4096), (128, 16384)]
KERNELS = ("cudnn", "pallas_gpu")


def matmul_rows(hardware: Hardware, dtype: str, rounds: int, small: bool) -> list[BenchRow]:
    """A row for each shape, with the share of the dtype's peak."""
    peak = getattr(hardware.peak_flops, dtype)
    shapes = [(32, 16, 8)] if small else MATMULS
    ready: dict[str, Callable[[], object]] = {}
    for rows, columns, inner in shapes:
        left = jnp.ones((rows, inner), dtype)
        right = jnp.ones((inner, columns), dtype)
        ready[f"{rows} x {inner} x {columns}"] = _call(jnp.matmul, left, right)
    timings = alternate(ready, rounds)
    found: list[BenchRow] = []
    for (name, timing), (rows, columns, inner) in zip(timings.items(), shapes, strict=True):
        speed = 2 * rows * columns * inner / timing.seconds
        found.append({"matmul": name, "TFLOP/s": speed / 1e12, "share": speed / peak})
    return found


def memory_rows(hardware: Hardware, rounds: int, small: bool) -> list[BenchRow]:
    """A row each for a copy, a sum, an activation and a norm, with the share of the memory's
    bandwidth.
    """
    shape = (64, 32) if small else (65536, 4096)
    x = jnp.ones(shape, jnp.bfloat16)
    size = x.size * x.dtype.itemsize
    programs: dict[str, tuple[Callable[..., jax.Array], int]] = {
        "copy": (lambda x: jnp.flip(x, 0), 2 * size),
        "sum": (lambda x: x + x.sum(axis=1, keepdims=True), 3 * size),
        "activation": (jax.nn.gelu, 2 * size),
        "norm": (_norm, 3 * size),
    }
    ready: dict[str, Callable[[], object]] = {
        name: _call(program, x) for name, (program, _) in programs.items()
    }
    timings = alternate(ready, rounds)
    found: list[BenchRow] = []
    for name, timing in timings.items():
        speed = programs[name][1] / timing.seconds
        found.append({"kernel": name, "GB/s": speed / 1e9, "share": speed / hardware.hbm_bandwidth})
    return found


def share_rows(
    hardware: Hardware, head_dim: int, tokens: int, rounds: int, small: bool, say: Say
) -> list[BenchRow]:
    """A row for each kernel of causal attention that serves, with its shares as
    `jaxpar.base.prices` counts them.
    """
    h, S, heads, all_tokens = (
        (16, 64, 2, 128) if small else (head_dim, tokens, 2048 // head_dim, 16384)
    )
    kernels = ("chunked",) if small else KERNELS
    rows = attention_rows("causal", S, h, kernels, all_tokens, heads, rounds, say)
    half = 0.5 * S * S / visible_places(Causal(), 1, S)  # of the places that the rows count
    peak = hardware.peak_flops.bfloat16 / 1e12
    found: list[BenchRow] = []
    for row in rows:
        forward = float(row["forward, TFLOP/s"] or 0)
        both = float(row["both, TFLOP/s"] or 0)
        backward = 2.5 / max(3.5 / both - 1 / forward, 1e-9)
        found.append(
            {
                "kernel": row["implementation"],
                "head_dim": h,
                "tokens": S,
                "forward": half * forward / peak,
                "backward": half * backward / peak,
            }
        )
    return found


def write_prices(cases: Mapping[str, Found], facts: Mapping[str, str], file: Path) -> str:
    """Write what the cases have found so far as TOML, and return the text."""
    note = (
        f"measured {facts.get('date', '')} on {facts.get('device', '')}, jax {facts.get('jax', '')}"
    )
    shares = {
        "matmul": _median(cases, "matmuls, bfloat16"),
        "matmul_float32": _median(cases, "matmuls, float32"),
        "memory": _median(cases, "memory", lambda row: row["kernel"] != "copy"),
        "copies": _median(cases, "memory", lambda row: row["kernel"] == "copy"),
    }
    lines = [f"{name} = {share:.3g}  # {note}" for name, share in shares.items() if share]
    table = [
        f'    {{ kernel = "{row["kernel"]}", head_dim = {row["head_dim"]}, tokens = '
        f"{row['tokens']}, forward = {row['forward']:.3f}, backward = {row['backward']:.3f} }},"
        for name, case in cases.items()
        if name.startswith("attention")
        for row in case.get("rows", ())
    ]
    if table:
        lines += [f"attention = [  # {note}", *table, "]"]
    text = "\n".join(lines) + "\n"
    write_whole(file, text)
    return text


def _median(
    cases: Mapping[str, Found],
    name: str,
    counts: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> float:
    """Return the median share of a case's rows, at most 1; 0 where it found none."""
    rows: Sequence[dict[str, Any]] = cases.get(name, {}).get("rows", ())
    shares = [row["share"] for row in rows if counts(row)]
    return min(statistics.median(shares), 1.0) if shares else 0.0


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def _call(program: Callable[..., jax.Array], *arrays: jax.Array) -> Callable[[], object]:
    """Return a call of the compiled program, which has run once."""
    compiled = jax.jit(program)
    jax.block_until_ready(compiled(*arrays))
    return lambda: compiled(*arrays)
