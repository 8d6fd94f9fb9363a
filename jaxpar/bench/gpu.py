"""`jaxpar bench gpu`: what half an hour with a GPU is for, in pieces that can be taken up again.

`bench_pieces` runs them. What is timed is waited for, long enough to be timed, and the median of several turns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.config import Config, check, load_config, override
from jaxpar.base.errors import UserError, nearest
from jaxpar.base.hardware import Hardware, hardware_of, load_chip, peak_flops
from jaxpar.base.jax_compat import NO_CUDA_GRAPHS
from jaxpar.bench.alternate import alternate, mean_seconds, train_steps
from jaxpar.bench.attention import LEAST_SECONDS, MASKS, AttentionBenchArgs, bench_attention
from jaxpar.bench.gpu_pieces import Found, Piece, check_folder, facts_here, read_piece, report, run_piece
from jaxpar.bench.rehearse import compare_predictions, no_links
from jaxpar.hlo.tasks import Task, walk
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call, Unserved
from jaxpar.kernels.attention.reference import reference
from jaxpar.kernels.masks import Causal, Mask
from jaxpar.models import Model
from jaxpar.rehearse.calibrate import ready_step
from jaxpar.rehearse.cost.stopwatch import durations, elapsed
from jaxpar.rehearse.timeline.timeline import step_time
from jaxpar.train.metrics import device_memory, mfu
from jaxpar.train.plans import make_plan


@dataclasses.dataclass(frozen=True)
class GpuBenchArgs:
    """Kernels, attention, GPT-2's step, predictions, matmuls and a trace, on the GPU that is here."""

    out: str = "build/gpu"
    """Folder of the results, JSON by piece, and of report.md. What has a result there is not run again."""
    pieces: tuple[str, ...] = ()
    """Those to run; none = all, the most telling first."""
    small: bool = False
    """All of it in a tiny form on the CPU, kernels interpreted: a test, no figure of it means anything."""


# Kernels: values and gradients against the float32 reference.

KERNELS = ("cudnn", "pallas_gpu", "pallas_hopper")
BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (2**-7, 2**-6)}
"""Of values and gradients, as parts of the largest entry. float32: some tens of roundings. bfloat16 rounds by up to
2^-8: twice on the way to a value (a weight, the value), four times to a gradient (the output inside delta, a weight,
its gradient, the gradient itself). Log-sum-exp stays in float32."""


def _kernel_name(kernel: str, mask: str, h: int, dtype: str = "bfloat16") -> str:
    return f"{kernel}, {mask}, head_dim {h}, {dtype}"


def _kernel(kernel: str, mask_name: str, h: int, dtype: str, small: bool, out: Path) -> Found:
    """The largest errors, each as a part of what is allowed; grouped queries throughout."""
    B, S, H, K = (1, 45, 2, 1) if small else (2, 1024, 8, 2)
    odd = mask_name == "odd lengths"
    S, T = (S - 13, S + 7) if odd else (S, S)
    mask = Causal(T - S) if odd else MASKS[mask_name](B, S)
    ours, rng = kernel in dispatch.PAIRS, np.random.default_rng(0)
    call = Call(interpret=small and ours)
    shapes = (B, S, H, h), (B, T, K, h), (B, T, K, h), (B, S, H, h)
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    dlse = jnp.asarray(rng.standard_normal((B, H, S)), jnp.float32) * ours
    on = "gpu" if ours else jax.default_backend()  # ours are interpreted on a CPU, cuDNN is not
    if why := dispatch.refusal(kernel, dispatch.Asked(given[0], given[1], mask, call, ours), on):
        raise Unserved(why)

    def found(q: Any, k: Any, v: Any, dout: Any) -> Any:
        if not ours:
            out, pull = jax.vjp(lambda q, k, v: dispatch.LIBRARIES[kernel](q, k, v, mask, call), q, k, v)
            return out, None, *pull(dout)
        pair = dispatch.pair(kernel)
        out, lse = pair.forward(q, k, v, mask, call)
        delta = jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32)) - dlse
        return out, lse, *pair.backward(q, k, v, dout, lse, delta, mask, call)

    with jax.default_matmul_precision("highest"):  # on a GPU float32 is TF32 else
        want, means = _exact(*(x.astype(jnp.float32) for x in given), dlse, mask)
    value, gradient = BOUNDS[dtype]
    bounds = {"out": value, "lse": BOUNDS["float32"][0], "dq": gradient, "dk": gradient, "dv": gradient}
    sizes = means, *want[1:]  # weights are rounded before values cancel
    row = {
        name: float(jnp.max(jnp.abs(x.astype(jnp.float32) - right)) / jnp.max(jnp.abs(size)) / bounds[name])
        for name, x, right, size in zip(bounds, jax.jit(found)(*given), want, sizes, strict=True) if x is not None
    }  # fmt: skip
    return {"rows": [row], "status": "right" if np.max([*row.values()]) <= 1 else "wrong"}  # NaN is wrong


@jax.jit  # here, so that all kernels of a case share what it compiles
def _exact(q: Any, k: Any, v: Any, dout: Any, dlse: Any, mask: Mask) -> Any:
    """(out, lse, dq, dk, dv), and the means of the sizes of values."""
    out_lse, pull = jax.vjp(lambda q, k, v: reference(q, k, v, mask), q, k, v)
    return (*out_lse, *pull((dout, dlse))), reference(q, k, abs(v), mask)[0]


# Attention: speed.


def _attention(mask: str, h: int, S: int, small: bool, out: Path) -> Found:
    """In turns, at the sizes of FlashAttention's own figures: 16k tokens, heads that make 2,048 wide."""
    kernels, notes = read_piece(out, "kernels")["cases"], list[str]()
    h, S, heads, tokens = (16, 64, 2, 128) if small else (h, S, 2048 // h, 16384)
    names = [
        name for name in (*KERNELS, "chunked")
        if kernels.get(_kernel_name(name, mask, h), {}).get("status") not in ("wrong", "failed")
    ]  # fmt: skip
    asked = AttentionBenchArgs((S,), (h,), (mask,), tuple(names), tokens, heads, heads, rounds=2 if small else 9)
    rows = []
    for row in bench_attention(asked, notes.append):
        of_row = {"by": row.implementation}
        for name, ms, rate in zip(("forward", "both"), (1e3 * row.forward, 1e3 * row.both), row.rates, strict=True):
            of_row |= {f"{name}, ms": ms, f"{name}, TFLOP/s": rate, f"{name}, % of peak": _share(1e12 * rate)}
        rows.append(of_row)
    left_out = [f"not {name}: wrong, or failed, in the piece before" for name in KERNELS if name not in names]
    return {"rows": rows, "notes": left_out + [note.partition(": ")[2] for note in notes if ": not " in note]}


def _share(rate: float) -> float | None:
    """FLOP/s as a percentage of the chip's dense peak in bfloat16, where that is known."""
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16")
    return 100 * rate / peak if peak else None


# GPT-2's step, beside PyTorch's.

_GPT2 = "gpt2_124m"
_BASE: dict[str, Any] = {"train.accumulation": 1, "train.batch": 32, "train.warmup_steps": 0}
_TINY = {
    "model.layers": 2, "model.embed": 32, "model.heads": 2, "model.mlp": 64, "model.vocab_size": 96,
    "model.vocab_multiple": 1, "model.max_seq_len": 32, "data.seq_len": 32, "train.batch": 4,
}  # fmt: skip


def _config(preset: str, changes: dict[str, Any], small: bool) -> Config:
    """One microbatch of 32 and no warm-up, but for the changes; in the small form a tiny GPT-2."""
    return check(override(load_config(preset), _BASE | changes | (_TINY if small else {})))


def _step(changes: dict[str, Any], beside_torch: bool, small: bool, out: Path) -> Found:
    """Ten steps of GPT-2 124M, then ten of PyTorch's, in turns."""
    config, devices = _config(_GPT2, changes, small), jax.devices()[:1]
    rounds, steps = (3, 2) if small else (7, 10)
    run, tokens = train_steps(config, make_plan(config, devices)), config.train.batch * config.data.seq_len
    flops = Model(config.model).flops_per_token(config.data.seq_len)

    def row(by: str, seconds: float, **more: Any) -> Found:
        used = mfu(tokens / seconds, flops, devices, config.precision.compute)
        return {"by": by, "ms": 1e3 * seconds, "tokens/s": tokens / seconds, "MFU, %": used and 100 * used, **more}

    first, notes = run(1), list[str]()
    torch = _torch(config, small) if beside_torch else None
    try:
        if torch is None:
            raise ChildProcessError("not asked for")
        torch(1)
        both = alternate(("jaxpar", "torch"), lambda: run(steps), lambda: torch(steps), rounds, 1)
        times = [seconds / steps for seconds in both.seconds]
        quartiles = " to ".join(f"{ratio:.3f}" for ratio in both.ratio_quartiles)
        notes.append(f"jaxpar / torch {both.ratio:.3f} (quartiles {quartiles}, {rounds} rounds of {steps} steps)")
        theirs = [row(seconds=times[1], **torch(1))]
    except ChildProcessError as missing:
        notes.append(f"not beside PyTorch: {missing}")
        times, theirs = [float(np.median([mean_seconds(lambda: run(steps), 1) / steps for _ in range(rounds)]))], []
    finally:
        if torch:
            torch(0)
    peak, last = device_memory(devices), run(1)
    if not last < first:  # nor NaN
        raise ValueError(f"the loss does not fall: {first} at first, {last} at last")
    ours = row("jaxpar", times[0], loss=last, **{"peak, GiB": peak and peak / 2**30})
    return {"rows": [ours, *theirs], "notes": notes}


def _torch(config: Config, small: bool) -> Callable[[int], Found]:
    """`run(n)` takes n steps of PyTorch's and says what it is, its loss and memory; `run(0)` ends it.

    In a process of its own, as the CUDA libraries that it brings are not jax's. ChildProcessError where it cannot.
    """
    asked = {**vars(config.model), **vars(config.train), "seq_len": config.data.seq_len, "small": small}
    words = [sys.executable, "-P", str(Path(__file__).with_name("torch_step.py")), json.dumps(asked)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(steps: int) -> Found:
        if not steps:
            return {"ended": process.kill()}
        if process.poll() is None:
            print(steps, file=process.stdin, flush=True)
        said = json.loads((process.stdout and process.stdout.readline()) or '{"missing": "its process ended"}')
        if "missing" in said:
            raise ChildProcessError(said["missing"])
        return said

    return run


# Predicted against measured: steps, matmuls, lines.


def _prediction(preset: str, changes: dict[str, Any], small: bool, out: Path) -> Found:
    figures, notes = _figures(small)
    (row,) = compare_predictions({"": _config(preset, changes, small)}, figures, patience=0.0)
    peak = device_memory(jax.devices()[:1])
    return {"notes": notes, "rows": [{
        "predicted, ms": 1e3 * row.predicted, "fastest, ms": 1e3 * row.fastest, "median, ms": 1e3 * row.median,
        "predicted / fastest": row.ratio, "predicted, GiB": row.predicted_bytes / 2**30,
        "peak, GiB": peak and peak / 2**30, "predicted / peak": peak and row.predicted_bytes / peak,
    }]}  # fmt: skip


def _figures(small: bool) -> tuple[Hardware, list[str]]:
    """Published figures of the GPU, and what is to be said of them; in the small form those of an H100."""
    kind = jax.devices()[0].device_kind
    if known := load_chip("h100").hardware if small else hardware_of(kind):
        return known, []
    return Hardware(), [f"no figures of {kind}, so nothing is predicted: a file of meshes/chips would have them"]


_FORMS: dict[str, Callable[..., jax.Array]] = {
    "forward": lambda x, w, dy: x @ w,
    "input gradient": lambda x, w, dy: dy @ w.T,
    "weight gradient": lambda x, w, dy: x.T @ dy,
}


def _matmul(T: int, K: int, N: int, small: bool, out: Path) -> Found:
    """Several in one program, each on arrays of its own, which together no cache holds, and after the one before."""
    T, K, N = (64, 32, 48) if small else (T, K, N)
    count = 2 if small else int(np.clip(256e6 / (2 * (T * K + K * N + T * N)), 2, 24))
    keys = iter(jax.random.split(jax.random.key(0), 3 * count))
    shapes = (T, K), (K, N), (T, N)
    arrays = [[jax.random.normal(next(keys), shape, jnp.bfloat16) for shape in shapes] for _ in range(count)]

    def chained(form: Callable[..., jax.Array], arrays: Any) -> list[jax.Array]:
        done: list[jax.Array] = []
        for three in arrays:
            three, _ = jax.lax.optimization_barrier((three, done[-1:]))
            done.append(form(*three))
        return done

    row: Found = {}
    for name, form in _FORMS.items():
        run = partial(jax.jit(partial(chained, form)), arrays)
        mean_seconds(run, 2)
        calls = int(np.clip(LEAST_SECONDS / mean_seconds(run, 1), 1, 50))
        seconds = float(np.median([mean_seconds(run, calls) for _ in range(2 if small else 9)])) / count
        rate = 2.0 * T * K * N / seconds
        row |= {f"{name}, us": 1e6 * seconds, f"{name}, TFLOP/s": rate / 1e12, f"{name}, % of peak": _share(rate)}
    return {"rows": [row]}


def _trace(small: bool, out: Path) -> Found:
    """Times of each line of the model, by the profiler and by the prices of a rehearsal; the profile is kept."""
    step, count = ready_step(_config(_GPT2, {}, small), "traced"), 3
    wall = float(np.median([elapsed(step.run) for _ in range(5)]))

    def run() -> None:
        for _ in range(count):
            step.run()

    measured = durations(run, out / "profile")
    if not measured:
        raise UserError(f"the profiler named no instruction that ran: look at {out / 'profile'}")
    seconds = {name: sum(times) / count for (_, name), times in measured.items()}
    figures, notes = _figures(small)
    timeline = step_time(step.program, figures, no_links)
    lines: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def line(task: Task) -> list[float]:
        return lines[task.place.source, task.place.scope, task.place.phase, task.kind]

    for row in timeline.tasks:
        line(row.task)[1] += row.seconds
    for task, _ in walk(step.program.nodes):
        line(task)[0] += seconds.pop(task.name, 0.0)
    lines["no task", "", "", ""] = [sum(seconds.values()), 0.0]
    most = ", ".join(f"{name} {1e3 * seconds[name]:.2f}" for name in nlargest(5, seconds, key=seconds.__getitem__))
    sums = [1e3 * sum(times) for times in zip(*lines.values(), strict=True)]
    rows = [
        {"line": source, "scope": scope, "phase": phase, "kind": kind, "ms": 1e3 * took, "predicted, ms": 1e3 * price}
        for (source, scope, phase, kind), (took, price) in sorted(lines.items(), key=lambda item: -item[1][0])
    ]
    notes.append(
        f"a step took {1e3 * wall:.2f} ms, its instructions {sums[0]:.2f}; predicted {1e3 * timeline.seconds:.2f}, its "
        f"tasks {sums[1]:.2f}; no task are {most}"
    )
    return {"rows": rows, "notes": notes}


_KERNELS = [
    (kernel, mask, h, "bfloat16")
    for mask in ("causal", "window", "documents", "bigbird", "odd lengths", "full")
    for h in (64, 128, 256)
    for kernel in KERNELS
] + [("pallas_gpu", "causal", 64, "float32")]  # last: XLA takes a minute to compile products outside the tensor cores
_ATTENTION = [
    ("causal", 64, 1024), ("causal", 128, 4096), ("causal", 64, 4096), ("full", 128, 4096), ("causal", 128, 16384),
    ("window", 128, 8192), ("documents", 128, 8192), ("bigbird", 128, 8192), ("causal", 256, 4096),
]  # fmt: skip
_STEPS: dict[str, tuple[dict[str, Any], bool]] = {
    "batch 32": ({}, True),
    "batch 32, pallas_gpu": ({"kernels.attention": "pallas_gpu"}, False),
    "batch 32, pallas_hopper": ({"kernels.attention": "pallas_hopper"}, False),
    "batch 32, unrolled layers": ({"model.scan_layers": False}, False),
    "batch 8": ({"train.batch": 8}, False),
}
_PREDICTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2_124m, batch 32": (_GPT2, {}),
    "gpt2_124m, batch 8": (_GPT2, {"train.batch": 8}),
    "gpt2_124m, batch 32, full recompute": (_GPT2, {"memory.policy": "full"}),
    "gpt2_124m, batch 32, accumulation 4": (_GPT2, {"train.accumulation": 4}),
    "gpt2_124m, 4096 tokens, batch 8": (_GPT2, {"data.seq_len": 4096, "model.max_seq_len": 4096, "train.batch": 8}),
    "gpt2_355m, batch 16": ("gpt2_355m", {"train.batch": 16}),
    "llama32_1b, 2048 tokens, batch 4, full recompute": ("llama32_1b", {"data.seq_len": 2048, "train.batch": 4}),
    "gpt2_124m, float32, batch 8": (_GPT2, {"precision.compute": "float32", "kernels.attention": "chunked",
                                            "train.batch": 8}),
}  # fmt: skip
_MATMULS = [  # of linear layers of GPT-2, LLaMA 1B and 8B
    *((8192, K, N) for K, N in ((768, 768), (768, 3072), (3072, 768), (768, 50304), (2048, 8192), (8192, 2048),
                                (4096, 4096), (4096, 14336), (14336, 4096))),
    *((T, K, K) for K in (768, 4096) for T in (1024, 32768)),
]  # fmt: skip
PIECES: dict[str, Piece] = {
    "kernels": Piece({_kernel_name(*x): partial(_kernel, *x) for x in _KERNELS}, len(KERNELS), case_seconds=100.0),
    "attention": Piece({"{}, head_dim {}, {} tokens".format(*x): partial(_attention, *x) for x in _ATTENTION}),
    # PyTorch is beside it: jax must not take three quarters of the memory when it starts.
    "step": Piece({name: partial(_step, *x) for name, x in _STEPS.items()}, alone=True, case_seconds=300.0,
                  environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    "rehearse": Piece({name: partial(_prediction, *x) for name, x in _PREDICTED.items()}, alone=True),
    "matmul": Piece({"{} tokens, {} in, {} out".format(*x): partial(_matmul, *x) for x in _MATMULS}),
    "trace": Piece({"gpt2_124m, batch 32": _trace}, environment={
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + f" --{NO_CUDA_GRAPHS}="}),
}  # fmt: skip


def bench_gpu(args: GpuBenchArgs, say: Callable[[str], None] = lambda line: None) -> bool:
    """Run what has no result yet and write report.md; whether every case that was asked for now has a result.

    Raises:
      UserError: no GPU and not the small form, an unknown piece, or a folder with results of another machine or jax.
    """
    for name in args.pieces:
        if name not in PIECES:
            raise UserError(f"bench gpu has no piece {name!r}{nearest(name, PIECES)}: there are {', '.join(PIECES)}")
    out, here = Path(args.out), facts_here(args.small)
    if here["platform"] != "gpu" and not args.small:
        raise UserError(
            f"bench gpu needs an NVIDIA GPU; JAX {here['jax']} finds {here['device']}, nvidia-smi "
            f"{here['driver'] or 'nothing'}: install jax's CUDA plugin where there is a GPU, or try the tiny form that "
            "runs on a CPU, --small (make gpu SMALL=1)"
        )
    check_folder(out, PIECES, here)
    done = []
    for name in args.pieces or PIECES:
        done.append(run_piece(PIECES[name], name, f"{__name__}.PIECES", out, here, say))
        (out / "report.md").write_text(report(out, PIECES), encoding="utf-8")
    return all(done)
