"""Measures on a GPU what no CPU can tell: kernels, speeds and predictions (`make gpu`).

`pieces` runs them, and goes on where it was stopped. What is timed is long enough to be timed, and
every figure is the median of several turns.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from experiments import experiment_of
from on_gpu.attention import MASKS, attention_rows
from on_gpu.block_sparse import Product, sparse_rows
from on_gpu.pieces import Found, Piece, Say, read_piece, report, run_piece
from on_gpu.plans import COUNT, judge_plans, plan_rows
from on_gpu.prices import ATTENTION, matmul_rows, memory_rows, share_rows, write_prices
from on_gpu.stopwatch import durations, ready_step, time_once
from on_gpu.tiles import OTHERS, tile_rows
from on_gpu.training import guard_rows, killed_rows, loop_rows, repeated_rows

from jaxpar.base import registry
from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.console import console
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.hardware import CHIPS, load_chip, peak_flops
from jaxpar.base.jax_compat import NO_CUDA_GRAPHS
from jaxpar.base.toml import presets
from jaxpar.bench.measure import BenchRow, bench_step
from jaxpar.cli.arguments import parse_words
from jaxpar.cli.main import fail
from jaxpar.hlo.program.tasks import Task
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call, Unserved, reference
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Causal, Mask
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.rehearse.targets import Target, load_target
from jaxpar.rehearse.timeline import simulate
from jaxpar.train.experiments import make_plan
from jaxpar.train.metrics import device_memory


@dataclasses.dataclass(frozen=True)
class GpuArgs:
    """Kernels, attention, GPT-2's step, predictions and a trace, on the GPU that is here."""

    out: str = "build/gpu"
    """Folder of the results, JSON by piece, and of report.md. What has a result there is not run
    again.
    """
    pieces: tuple[str, ...] = ()
    """Those to run; none = all, the most telling first."""
    small: bool = False
    """All of it in a tiny form on the CPU, kernels interpreted: a test, no figure of it means
    anything.
    """


# Kernels: values and gradients against the float32 reference.

KERNELS = ("cudnn", "pallas_gpu")
BOUNDS = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-7, 2**-6),
}
"""Of values and gradients, as parts of the largest entry. float32: some tens of roundings. bfloat16
rounds by up to 2^-8: twice on the way to a value (a weight, the value), four times to a gradient
(the output inside delta, a weight, its gradient, the gradient itself). Log-sum-exp stays in
float32."""


def _kernel_name(kernel: str, mask: str, h: int, dtype: str = "bfloat16") -> str:
    return f"{kernel}, {mask}, head_dim {h}, {dtype}"


def _kernel(
    kernel: str, mask_name: str, h: int, dtype: str, small: bool, out: Path, say: Say
) -> list[BenchRow]:
    """The largest errors, each as a part of what is allowed; grouped queries throughout."""
    B, S, H, K = (1, 45, 2, 1) if small else (2, 1024, 8, 2)
    odd = mask_name == "odd lengths"
    S, T = (S - 13, S + 7) if odd else (S, S)
    mask = Causal(T - S) if odd else MASKS[mask_name](B, S)
    pair = registry.KERNELS[kernel]
    ours = pair.merges
    rng = np.random.default_rng(0)
    call = Call(interpret=small and ours)
    shapes = (
        (B, S, H, h),
        (B, T, K, h),
        (B, T, K, h),
        (
            B,
            S,
            H,
            h,
        ),
    )
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    dlse = jnp.asarray(rng.standard_normal((B, H, S)), jnp.float32) * ours
    on = "gpu" if ours else jax.default_backend()  # ours are interpreted on a CPU, cuDNN is not
    if why := dispatch.refusal(
        kernel,
        AttentionRequest(given[0], given[1], mask, call, ours),
        on,
    ):
        raise Unserved(why)

    def found(
        q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
    ) -> tuple[jax.Array | None, ...]:
        if not ours:
            out, pull = jax.vjp(lambda q, k, v: pair.forward(q, k, v, mask, call), q, k, v)
            return out, None, *pull(dout)
        out, lse = pair.forward(q, k, v, mask, call)
        delta = (
            jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32)) - dlse
        )
        return (
            out,
            lse,
            *pair.backward(
                q,
                k,
                v,
                dout,
                lse,
                delta,
                mask,
                call,
            ),
        )

    with jax.default_matmul_precision("highest"):  # on a GPU float32 is TF32 else
        want, means = _exact(
            *(x.astype(jnp.float32) for x in given),
            dlse,
            mask,
        )
    value, gradient = BOUNDS[dtype]
    bounds = {
        "out": value,
        "lse": BOUNDS["float32"][0],
        "dq": gradient,
        "dk": gradient,
        "dv": gradient,
    }
    sizes = means, *want[1:]  # weights are rounded before values cancel
    errors = {
        name: float(
            jnp.max(jnp.abs(x.astype(jnp.float32) - right)) / jnp.max(jnp.abs(size)) / bounds[name]
        )
        for name, x, right, size in zip(
            bounds,
            jax.jit(found)(*given),
            want,
            sizes,
            strict=True,
        )
        if x is not None
    }
    # NaN is wrong
    return [
        {
            **errors,
            "verdict": "right" if np.max([*errors.values()]) <= 1 else "wrong",
        }
    ]


@jax.jit  # here, so that all kernels of a case share what it compiles
def _exact(
    q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, dlse: jax.Array, mask: Mask
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(out, lse, dq, dk, dv), and the means of the sizes of values."""
    out_lse, pull = jax.vjp(
        lambda q, k, v: reference(q, k, v, mask),
        q,
        k,
        v,
    )
    return (*out_lse, *pull((dout, dlse))), reference(q, k, abs(v), mask)[0]


# Attention: speed.


def _attention(
    mask: str,
    h: int,
    S: int,
    small: bool,
    out: Path,
    say: Say,
) -> list[BenchRow]:
    """In turns, at the sizes of FlashAttention's own figures: 16k tokens, heads that make 2,048
    wide.
    """
    kernels = read_piece(out, "kernels")["cases"]
    h, S, heads, tokens = (16, 64, 2, 128) if small else (h, S, 2048 // h, 16384)
    names = [name for name in KERNELS if _is_usable(kernels.get(_kernel_name(name, mask, h)))]
    for name in set(KERNELS) - set(names):
        say(f"not {name}: wrong, or failed, in the piece before")
    rows = attention_rows(
        mask,
        S,
        h,
        (*names, "chunked"),
        tokens,
        heads,
        2 if small else 9,
        say,
    )
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16")
    if peak:
        for row, way in product(rows, ("forward", "both")):
            row[f"{way}, % of peak"] = 1e14 * float(row[f"{way}, TFLOP/s"] or 0) / peak
    return rows


def _is_usable(case: Found | None) -> bool:
    """Whether a kernel was right in a case, or was not tried."""
    if case is None:
        return True
    wrong = any(row["verdict"] == "wrong" for row in case.get("rows", ()))
    return case["status"] != "failed" and not wrong


# Tiles of the Triton kernels.


def _tiles(kernel: str, h: int, small: bool, out: Path, say: Say) -> list[BenchRow]:
    """One sequence of 8,192 tokens, and heads that make 2,048 wide."""
    if small:
        return tile_rows(kernel, h, 48, 1, 2, say, Call(interpret=True))
    return tile_rows(kernel, h, 8192, 2048 // h, 9, say)


# Block-sparse matmuls.


def _sparse(
    block: int,
    kept: float,
    small: bool,
    out: Path,
    say: Say,
) -> list[BenchRow]:
    """Of 8,192 rows by an MLP's matrix of LLaMA-3 8B."""
    if small:
        rows = sparse_rows(Product(16, 2 * block, 4 * block), block, 0.5, "pallas_gpu", 2, True)
    else:
        rows = sparse_rows(Product(8192, 4096, 14336), block, kept, "pallas_gpu", 9)
    if not max(float(row["worst error of what is allowed"] or 0) for row in rows) <= 1:
        say("wrong")
    return rows


# GPT-2's step, beside PyTorch's.

_GPT2 = "gpt2_124m"
Changes = dict[str, object]
"""Of a config, by dotted key."""
_BASE: Changes = {"train.accumulation": 1, "train.batch": 32, "train.warmup_steps": 0}
_TINY: Changes = {
    "model.layers": 2,
    "model.embed": 32,
    "model.heads": 2,
    "model.mlp": 64,
    "model.vocab_size": 96,
    "model.vocab_multiple": 1,
    "model.max_seq_len": 32,
    "data.seq_len": 32,
    "train.batch": 4,
}


def _config(preset: str, changes: Changes, small: bool) -> Config:
    """One microbatch of 32 and no warm-up, but for the changes; in the small form a tiny GPT-2."""
    return check(override(load_config(preset), _BASE | changes | (_TINY if small else {})))


def _step(
    changes: Changes,
    beside_torch: bool,
    small: bool,
    out: Path,
    say: Say,
) -> list[BenchRow]:
    """Ten steps of GPT-2 124M, then ten of PyTorch's, in turns."""
    config = _config(_GPT2, changes, small)
    (rounds, steps) = (3, 2) if small else (7, 10)
    return bench_step(
        experiment_of(config, make_plan(config, jax.devices()[:1])),
        rounds,
        steps,
        beside_torch,
        say,
    )


# Predicted against measured: steps, lines.


def _prediction(
    preset: str,
    changes: Changes,
    small: bool,
    out: Path,
    say: Say,
) -> list[BenchRow]:
    """The time and memory of a step as a rehearsal for this GPU has them, beside those of a second
    of steps.
    """
    target = _target(small)
    step = ready_step(_config(preset, changes, small))
    predicted = simulate(step.text, step.mesh, target).seconds
    taken = CompiledBytes.of(step.stats, target.platform).total
    times = [time_once(step.run) for _ in range(int(np.clip(1 / step.seconds, 5, 100)))]
    peak = device_memory(jax.devices()[:1])
    return [
        {
            "target": target.name,
            "predicted, ms": 1e3 * predicted,
            "fastest, ms": 1e3 * min(times),
            "median, ms": 1e3 * float(np.median(times)),
            "predicted / fastest": predicted / min(times),
            "predicted, GiB": taken / 2**30,
            "peak, GiB": peak and peak / 2**30,
            "predicted / peak": peak and taken / peak,
        }
    ]


def _target(small: bool) -> Target:
    """This GPU as a target, in the small form an H100.

    Raises:
      UserError: no file of meshes/chips has figures of it.
    """
    kind = jax.devices()[0].device_kind
    for chip in ("h100",) if small else presets(CHIPS):
        if small or kind in load_chip(chip).hardware.device_kinds:
            return load_target(f"{chip}x1")
    raise UserError(
        f"no figures of {kind}, so nothing is predicted: a file of meshes/chips would have them"
    )


# Prices: what programs reach of the peaks.


def _matmuls(dtype: str, small: bool, out: Path, say: Say) -> list[BenchRow]:
    return matmul_rows(_target(small).hardware, dtype, 2 if small else 9, small)


def _memory(small: bool, out: Path, say: Say) -> list[BenchRow]:
    return memory_rows(_target(small).hardware, 2 if small else 9, small)


def _shares(h: int, tokens: int, small: bool, out: Path, say: Say) -> list[BenchRow]:
    return share_rows(_target(small).hardware, h, tokens, 2 if small else 9, small, say)


# Plans of one model: the closed forms, a rehearsal and the clock.


def _plan(number: int, small: bool, out: Path, say: Say) -> list[BenchRow]:
    config = _config("gpt2_355m", {"train.batch": 16, "mesh.data": 1}, small)
    return plan_rows(number, config, _target(small), say)


def _trace(small: bool, out: Path, say: Say) -> list[BenchRow]:
    """Times of each line of the model, by the profiler and by the prices of a rehearsal; the
    profile is kept.
    """
    target = _target(small)
    step = ready_step(_config(_GPT2, {}, small))
    count = 3

    def run() -> None:
        for _ in range(count):
            step.run()

    measured = durations(run, out / "profile")
    if not measured:
        raise UserError(f"the profiler named no instruction that ran: look at {out / 'profile'}")
    seconds = {name: sum(times) / count for (_, name), times in measured.items()}
    timeline = simulate(step.text, step.mesh, target)
    lines: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def line(task: Task) -> list[float]:
        return lines[task.origin.source, task.origin.scope, task.origin.phase, task.kind]

    for row in timeline.tasks:
        line(row.task)[1] += row.seconds
        line(row.task)[0] += seconds.pop(row.task.name, 0.0)
    lines["no task", "", "", ""] = [sum(seconds.values()), 0.0]
    took, price = (1e3 * sum(times) for times in zip(*lines.values(), strict=True))
    say(
        f"a step took {1e3 * step.seconds:.2f} ms, its instructions {took:.2f}; "
        f"predicted {1e3 * timeline.seconds:.2f}, its tasks {price:.2f}"
    )
    return [
        {
            "line": source,
            "scope": scope,
            "phase": phase,
            "kind": kind,
            "ms": 1e3 * took,
            "predicted, ms": 1e3 * price,
        }
        for (source, scope, phase, kind), (took, price) in sorted(
            lines.items(), key=lambda item: -item[1][0]
        )
    ]


# Trainings: the guard, the loop, kills.


def _guard(small: bool, out: Path, say: Say) -> list[BenchRow]:
    """GPT-2 124M's step, with its numbers read each time and without, in turns."""
    (turns, steps) = (2, 2) if small else (9, 10)
    return guard_rows(_config(_GPT2, {"mesh.data": 1}, small), turns, steps)


def _repeated(kernel: str, small: bool, out: Path, say: Say) -> list[BenchRow]:
    """GPT-2 124M's step, twenty times and twenty times again."""
    changes: Changes = {"train.batch": 8, "kernels.attention": "chunked" if small else kernel}
    return repeated_rows(_config(_GPT2, changes, small), 2 if small else 20, say)


_REPEATED: dict[str, Callable[[bool, Path, Say], list[BenchRow]]] = {
    f"gpt2_124m, batch 8, {kernel}": partial(_repeated, kernel)
    for kernel in ("pallas_gpu", "cudnn", "chunked")
}
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"
"""No operation whose result may differ from run to run."""
_KERNELS = [
    (kernel, mask, h, "bfloat16")
    for mask in ("causal", "window", "documents", "bigbird", "odd lengths", "full")
    for h in (64, 128, 256)
    for kernel in KERNELS
    # last: XLA takes a minute to compile products outside the tensor cores
] + [("pallas_gpu", "causal", 64, "float32")]
_ATTENTION = [
    ("causal", 64, 1024),
    ("causal", 128, 4096),
    ("causal", 64, 4096),
    ("full", 128, 4096),
    ("causal", 128, 16384),
    ("window", 128, 8192),
    ("documents", 128, 8192),
    ("bigbird", 128, 8192),
    ("causal", 256, 4096),
]
_SPARSE = [(block, kept) for block in (64, 128, 256) for kept in (0.5, 0.25, 0.125)]
_STEPS: dict[str, tuple[Changes, bool]] = {
    "batch 32": ({}, True),
    "batch 32, pallas_gpu": ({"kernels.attention": "pallas_gpu"}, False),
    "batch 32, unrolled layers": ({"model.scan_layers": False}, False),
    "batch 8": ({"train.batch": 8}, False),
}
_PREDICTED: dict[str, tuple[str, Changes]] = {
    "gpt2_124m, batch 32": (_GPT2, {}),
    "gpt2_124m, batch 8": (_GPT2, {"train.batch": 8}),
    "gpt2_124m, batch 32, full recompute": (_GPT2, {"memory.policy": "full"}),
    "gpt2_124m, batch 32, accumulation 4": (_GPT2, {"train.accumulation": 4}),
    "gpt2_124m, 4096 tokens, batch 8": (
        _GPT2,
        {"data.seq_len": 4096, "model.max_seq_len": 4096, "train.batch": 8},
    ),
    "gpt2_355m, batch 16": ("gpt2_355m", {"train.batch": 16, "memory.policy": "none"}),
    "gpt2_355m, batch 16, optimizer offloaded": (
        "gpt2_355m",
        {"train.batch": 16, "memory.policy": "none", "memory.optimizer": "offload"},
    ),
    "gpt2_355m, batch 16, updated by the host": (
        "gpt2_355m",
        {"train.batch": 16, "memory.policy": "none", "memory.optimizer": "host"},
    ),
    "llama32_1b, 2048 tokens, batch 4, full recompute": (
        "llama32_1b",
        {"data.seq_len": 2048, "train.batch": 4, "memory.policy": "full"},
    ),
    "gpt2_124m, float32, batch 8": (
        _GPT2,
        {"precision.compute": "float32", "kernels.attention": "chunked", "train.batch": 8},
    ),
}
PIECES: dict[str, Piece] = {
    "kernels": Piece(
        {_kernel_name(*x): partial(_kernel, *x) for x in _KERNELS}, len(KERNELS), case_seconds=100.0
    ),
    "attention": Piece(
        {"{}, head_dim {}, {} tokens".format(*x): partial(_attention, *x) for x in _ATTENTION}
    ),
    "tiles": Piece({"{}, head_dim {}".format(*x): partial(_tiles, *x) for x in OTHERS}),
    "sparse": Piece(
        {"blocks of {}, {:.3g} kept".format(*x): partial(_sparse, *x) for x in _SPARSE}
    ),
    # PyTorch is beside it: jax must not take three quarters of the memory when it starts.
    "step": Piece(
        {name: partial(_step, *x) for name, x in _STEPS.items()},
        alone=True,
        case_seconds=300.0,
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "rehearse": Piece(
        {name: partial(_prediction, *x) for name, x in _PREDICTED.items()}, alone=True
    ),
    "plans": Piece(
        {f"plan {number}": partial(_plan, number) for number in range(COUNT)},
        small=3,
        alone=True,
    ),
    "prices": Piece(
        {
            "matmuls, bfloat16": partial(_matmuls, "bfloat16"),
            "memory": _memory,
            **{
                "attention, head_dim {}, {} tokens".format(*x): partial(_shares, *x)
                for x in ATTENTION
            },
            "matmuls, float32": partial(_matmuls, "float32"),
        },
        small=3,
    ),
    # A training has a process of its own, beside the one that asks for it.
    "training": Piece(
        {
            **_REPEATED,
            "the guard": _guard,
            "killed": partial(killed_rows, "auto"),
            "the loop": loop_rows,
        },
        small=5,
        alone=True,
        case_seconds=300.0,
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    "deterministic": Piece(
        {
            "gpt2_124m, batch 8, pallas_gpu": _REPEATED["gpt2_124m, batch 8, pallas_gpu"],
            "killed": partial(killed_rows, "pallas_gpu"),
            **_REPEATED,
        },
        alone=True,
        case_seconds=300.0,
        environment={
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip(),
        },
    ),
    "trace": Piece(
        {"gpt2_124m, batch 32": _trace},
        environment={"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + f" --{NO_CUDA_GRAPHS}="},
    ),
}


def measure(args: GpuArgs, say: Say = lambda line: None) -> str:
    """Run what has no result yet, and write report.md, which is returned.

    Raises:
      UserError: an unknown piece, or what `run_piece` raises.
    """
    for name in args.pieces:
        if name not in PIECES:
            raise UserError(
                f"make gpu has no piece {name!r}{suggest(name, PIECES)}: there are "
                f"{', '.join(PIECES)}"
            )
    out = Path(args.out)
    text = ""
    for name in args.pieces or PIECES:
        run_piece(PIECES[name], name, "on_gpu.measure.PIECES", out, args.small, say)
        if name == "prices":
            found = read_piece(out, name)
            write_prices(found["cases"], found["facts"], out / "prices.toml")
            say(f"wrote {out / 'prices.toml'}")
        if name == "plans":
            say(judge_plans(read_piece(out, name)["cases"]))
        text = report(out, PIECES)
        (out / "report.md").write_text(text, encoding="utf-8")
    return text


def main(words: list[str]) -> int:
    """python tests/on_gpu/measure.py [--out DIR] [--pieces NAME ...] [--small]"""
    try:
        console().print(
            measure(
                parse_words(main.__doc__, GpuArgs(), words),
                console().print,
            )
        )
    except UserError as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
