"""How a Transformer layer, and 24 of them, scale over CPU workers: `python docs/scaling_study.py`.

It measures on as many processes as this machine has cores, each on a core of its own, and simulates
larger counts from what one core and one pair of processes were measured to do. It prints two
tables, and writes a picture and `scaling.json`; docs/scaling.md says what they mean.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = 5
WORKERS = (1, 2, 4, 8, 16)
LAYERS = (1, 24)
PASSES = ("forward", "training")
PUBLISHED = {1: 7.42, 24: 4.82}
"""The speedups at 8 processes, forward only, of the public report that docs/scaling.md names."""


class Sizes(NamedTuple):
    """Those of the report; it states no length of the sequence."""

    embed: int = 512
    mlp: int = 2048
    heads: int = 8
    batch: int = 10
    seq: int = 128


class Share(NamedTuple):
    """What one of several workers of a layer has."""

    workers: int = 1
    by_rows: bool = False
    """Whether attention is split over its queries, because there are more workers than heads."""


def axes_of_layer() -> dict[str, tuple[str, ...]]:
    """Logical axes of a layer's parameters."""
    heads = ("embed", "heads", "head_dim")
    return {
        "q": heads,
        "k": heads,
        "v": heads,
        "out": ("heads", "head_dim", "embed"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }


ALONE = Share()


def shapes_of_layer(sizes: Sizes, share: Share = ALONE) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters, or of one worker's part of them."""
    heads = sizes.heads if share.by_rows else sizes.heads // share.workers
    head_dim = sizes.embed // sizes.heads
    mlp = sizes.mlp // share.workers
    into = (sizes.embed, heads, head_dim)
    return {
        "q": into,
        "k": into,
        "v": into,
        "out": (heads, head_dim, sizes.embed),
        "up": (sizes.embed, mlp),
        "down": (mlp, sizes.embed),
    }


def parameters(shapes: dict[str, tuple[int, ...]], layers: int) -> dict[str, Any]:
    """Random parameters of several layers, stacked."""
    import numpy as np

    rng = np.random.default_rng(0)
    return {
        name: (0.02 * rng.standard_normal((layers, *shape))).astype(np.float32)
        for name, shape in shapes.items()
    }


def norm(x_BSD: Any) -> Any:
    """RMS norm without a scale (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    import jax
    import jax.numpy as jnp

    return x_BSD * jax.lax.rsqrt(jnp.mean(jnp.square(x_BSD), -1, keepdims=True) + 1e-6)


def layer(layout: Any, params: dict[str, Any], x_BSD: Any) -> Any:
    """One layer over a layout: Megatron's split of heads and MLP, with the sequence split between.

    Args:
      layout: a `jaxpar.Layout`, of which `tensor` counts the workers.
      params: one layer's parameters.
      x_BSD: the residual stream.

    Returns:
      The residual stream after the layer.
    """
    import jax

    from jaxpar import parallel
    from jaxpar.kernels import masks

    weights = [params[name] for name in ("q", "k", "v")]
    axes = [axes_of_layer()[name][1:] for name in ("q", "k", "v")]
    q, k, v = parallel.column_linear(norm(x_BSD), weights, axes, layout)
    mixed = parallel.attention(q, k, v, masks.Causal(), layout)
    x_BSD = x_BSD + parallel.row_linear(mixed, params["out"], ("heads", "head_dim"), layout)
    hidden = jax.nn.gelu(parallel.column_linear(norm(x_BSD), params["up"], ("mlp",), layout))
    return x_BSD + parallel.row_linear(hidden, params["down"], ("mlp",), layout)


def part_of_layer(share: Share, params: dict[str, Any], x_BsD: Any) -> Any:
    """What one worker of several computes of a layer, with copies in place of its messages.

    Args:
      share: how many workers there are, and what each has.
      params: the worker's part of the parameters.
      x_BsD: its part of the residual stream, S / workers rows.

    Returns:
      An array of the same shape. Its values mean nothing: what others would send is missing.
    """
    import jax
    import jax.numpy as jnp

    n = share.workers

    def gather(x: Any) -> Any:
        return jnp.tile(x, (1, n) + (1,) * (x.ndim - 2))

    def scatter(x: Any) -> Any:
        return x[:, : x.shape[1] // n]

    normed = norm(x_BsD)
    rows = normed if share.by_rows else gather(normed)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", rows, params[name]) for name in ("q", "k", "v"))
    if share.by_rows:
        k = gather(k)
        v = gather(v)
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool), k.shape[1] - q.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    mixed = jnp.einsum("bhst,bthk->bshk", weights, v)
    out = jnp.einsum("bshk,hkd->bsd", mixed, params["out"])
    x_BsD = x_BsD + (out if share.by_rows else scatter(out))
    hidden = jax.nn.gelu(gather(norm(x_BsD)) @ params["up"])
    return x_BsD + scatter(hidden @ params["down"])


def passes(one_layer: Callable[[Any, Any], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """The forward of stacked layers, and the gradients of its mean square."""
    import jax
    import jax.numpy as jnp

    def forward(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (one_layer(layer, x), None), x, params)[0]

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(forward(params, x)))

    return {"forward": forward, "training": jax.grad(loss, (0, 1))}


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, after one that compiles."""
    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# What one process does.


def layout_of(workers: int, heads: int) -> Any:
    """A layout of so many workers along `tensor`, which split the heads, or else the queries."""
    import jax

    import jaxpar
    from jaxpar import parallel

    mesh = jaxpar.make_mesh(devices=jax.devices()[:workers], tensor=workers)
    return parallel.fit_heads(jaxpar.Layout(mesh), heads, heads)


def order_of(layout: Any, seq: int) -> Any:
    """Where each row of the stream stands in a sequence: rings take it in zigzag."""
    import numpy as np

    from jaxpar import parallel

    places = np.arange(seq, dtype=np.int32)[None]
    return np.asarray(parallel.in_order({"tokens": places}, layout)["tokens"])[0]


def programs(sizes: Sizes, layers: int, workers: int) -> dict[str, tuple[Any, Any, Any]]:
    """For each pass its jitted function, and the parameters and stream as they lie."""
    import jax
    import numpy as np

    layout = layout_of(workers, sizes.heads)
    params = parameters(shapes_of_layer(sizes), layers)
    axes = {name: ("layers", *names) for name, names in axes_of_layer().items()}
    x = np.random.default_rng(1).standard_normal((sizes.batch, sizes.seq, sizes.embed))
    stream = layout.sharding(("batch", "residual_seq", "embed"))
    places = layout.sharding(axes, params)
    laid = {
        name: jax.make_array_from_callback(
            value.shape, places[name], lambda index, value=value: value[index]
        )
        for name, value in params.items()
    }
    x = x.astype(np.float32)[:, order_of(layout, sizes.seq)]
    rows = jax.make_array_from_callback(x.shape, stream, lambda index: x[index])
    found = passes(functools.partial(layer, layout))
    outputs = {"forward": stream, "training": (places, stream)}
    return {
        name: (jax.jit(run, out_shardings=outputs[name]), laid, rows) for name, run in found.items()
    }


def measure_layers(sizes: Sizes, workers: int, rounds: int) -> dict[str, float]:
    """Seconds of each pass of each number of layers, over all processes."""
    return {
        f"{name} of {layers}": seconds(functools.partial(run, params, x), rounds)
        for layers in LAYERS
        for name, (run, params, x) in programs(sizes, layers, workers).items()
    }


def measure_messages(sizes: Sizes, workers: int, rounds: int) -> dict[str, float]:
    """Seconds of a gather of the whole stream and of one of a 64th of it."""
    import jax
    import numpy as np

    layout = layout_of(workers, sizes.heads)
    found = {}
    for name, batch in (("large", sizes.batch), ("small", 1)):
        seq = sizes.seq if name == "large" else max(workers, sizes.seq * sizes.batch // 64)
        x = np.ones((batch, seq, sizes.embed), np.float32)
        split = layout.sharding(("batch", "residual_seq", "embed"))
        rows = jax.make_array_from_callback(x.shape, split, lambda index, x=x: x[index])
        whole = layout.sharding((None, None, None))
        gather = jax.jit(lambda x: x + 1, out_shardings=whole)
        found[name] = seconds(functools.partial(gather, rows), rounds)
        found[f"{name} bytes"] = x.nbytes
    return found


def measure_shares(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Seconds of one worker's part of a layer, and of the layers of one stage for one sequence."""
    import jax
    import numpy as np

    found = {}
    for workers in WORKERS:
        share = Share(workers, by_rows=workers > sizes.heads)
        params = parameters(shapes_of_layer(sizes, share), 1)
        x = np.ones((sizes.batch, sizes.seq // workers, sizes.embed), np.float32)
        for name, run in passes(functools.partial(part_of_layer, share)).items():
            jitted = jax.jit(run)
            found[f"{name} of 1/{workers}"] = seconds(functools.partial(jitted, params, x), rounds)
        largest_stage = -(-LAYERS[-1] // workers)
        params = parameters(shapes_of_layer(sizes), largest_stage)
        x = np.ones((1, sizes.seq, sizes.embed), np.float32)
        for name, run in passes(functools.partial(part_of_layer, ALONE)).items():
            jitted = jax.jit(run)
            found[f"{name} of stage/{workers}"] = seconds(
                functools.partial(jitted, params, x), rounds
            )
    return found


def work(args: argparse.Namespace) -> None:
    """Measure as one of several processes, on a core of its own."""
    os.sched_setaffinity(0, {args.rank})  # before JAX counts the cores for its pool of threads
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if args.workers > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{args.port}", args.workers, args.rank)
    sizes = Sizes(*json.loads(args.sizes))
    if args.work == "layers":
        found = measure_layers(sizes, args.workers, args.rounds)
    elif args.work == "messages":
        found = measure_messages(sizes, args.workers, args.rounds)
    else:
        found = measure_shares(sizes, args.rounds)
    if args.rank == 0:
        print(json.dumps(found))


# What starts them, and simulates.


def run_workers(kind: str, workers: int, sizes: Sizes, rounds: int) -> dict[str, float]:
    """Start the processes of one measurement and read what the first found."""
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, __file__, "--work", kind, "--workers", str(workers)]
    words += ["--port", str(port), "--rounds", str(rounds), "--sizes", json.dumps(sizes)]
    processes = [
        subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process of {kind} on {workers} workers failed: see above")
    return json.loads(outputs[0].splitlines()[-1])  # gloo says on the same screen who is connected


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over several runs."""
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


class Link(NamedTuple):
    """The time of a message between two processes: a start and a rate."""

    start: float
    per_byte: float

    def seconds(self, size: float) -> float:
        """Of one message of so many bytes."""
        return self.start + size * self.per_byte


def link_of(messages: dict[str, float]) -> Link:
    """Fit a link to two gathers between two processes, each of which sends half."""
    sizes = messages["large bytes"] / 2, messages["small bytes"] / 2
    per_byte = max(0.0, (messages["large"] - messages["small"]) / (sizes[0] - sizes[1]))
    return Link(max(0.0, messages["small"] - sizes[1] * per_byte), per_byte)


def message_seconds(sizes: Sizes, workers: int, name: str, link: Link) -> float:
    """Seconds of all collectives that one layer's program has, as rings.

    The program is compiled for so many simulated devices, and its collectives are read from it.

    Args:
      sizes: those of the layer.
      workers: how many devices there are.
      name: the pass.
      link: the time of a message.

    Returns:
      The seconds, one collective after the other.
    """
    from jaxpar.hlo.program.tasks import walk
    from jaxpar.hlo.read import read_program

    run, params, x = programs(sizes, 1, workers)[name]
    text = run.lower(params, x).compile().as_text()
    total = 0.0
    for task, count in walk(read_program(text).nodes):
        if task.collective:
            turns = workers - 1 if task.collective.kind != "ppermute" else 1
            sent = task.collective.sent_bytes
            total += count * (turns * link.start + sent * link.per_byte)
    return total


def simulated_layer(sizes: Sizes, one: dict[str, float], shares: dict[str, float], link: Link):
    """Speedups of one layer by the part of one worker and the messages of all.

    Args:
      sizes: those of the layer.
      one: seconds of the layer on one process.
      shares: seconds of one worker's part.
      link: the time of a message.

    Returns:
      For each pass and number of workers its speedup.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in PASSES}
    for name in PASSES:
        alone = shares[f"{name} of 1/1"]
        for workers in WORKERS:
            sent = message_seconds(sizes, workers, name, link) if workers > 1 else 0.0
            found[name][workers] = alone / (shares[f"{name} of 1/{workers}"] + sent)
    return found


def simulated_stack(sizes: Sizes, shares: dict[str, float], link: Link):
    """Speedups of 24 layers in a pipeline of one stage a worker, a sequence a microbatch.

    Args:
      sizes: those of a layer.
      shares: seconds of a stage's layers for one sequence.
      link: the time of a message.

    Returns:
      For each pass and number of workers its speedup over all layers in one process, a sequence at
      a time.
    """
    from jaxpar.parallel.pipeline.schedules import Times, schedule, simulate_schedule

    M = sizes.batch
    message = link.seconds(4 * sizes.seq * sizes.embed)
    found: dict[str, dict[int, float]] = {name: {} for name in PASSES}
    for workers in WORKERS:
        forward = shares[f"forward of stage/{workers}"]
        backward = shares[f"training of stage/{workers}"] - forward
        table = schedule("gpipe", workers, M)
        simulation = simulate_schedule(table, Times(forward, backward, message))
        kinds = [{action.kind for action in tick if action is not None} for tick in table.ticks]
        last = max(i for i, kind in enumerate(kinds) if "forward" in kind)
        ends = {"forward": simulation.starts[last] + forward, "training": simulation.makespan}
        for name in PASSES:
            found[name][workers] = M * shares[f"{name} of stage/1"] / ends[name]
    return found


def formula(workers: int, microbatches: int) -> float:
    """The speedup of a pipeline of equal stages and no messages: m p / (m + p - 1)."""
    return microbatches * workers / (microbatches + workers - 1)


def whole_batch_gain(one: dict[str, float], shares: dict[str, float], M: int, name: str) -> float:
    """How many times faster one worker takes a batch through 24 layers at once than sequence by
    sequence, which is what stages are compared with.
    """
    return M * shares[f"{name} of stage/1"] / one[f"{name} of 24"]


def table_of(
    measured: dict[int, dict[str, float]],
    simulated: dict[int, Any],
    shares: dict[str, float],
    M: int,
) -> str:
    """The two tables as Markdown."""
    gains = {name: whole_batch_gain(measured[1], shares, M, name) for name in PASSES}
    lines = ["| measured | workers | " + " | ".join(PASSES) + " |", "|---|---|---|---|"]
    for layers in LAYERS:
        for workers, times in measured.items():
            cells = []
            for name in PASSES:
                key = f"{name} of {layers}"
                ratio = measured[1][key] / times[key]
                cells.append(f"{1e3 * times[key]:.1f} ms, {ratio:.2f}x")
            lines.append(f"| {layers} layers | {workers} | " + " | ".join(cells) + " |")
    heads = ("simulated", "workers", *PASSES, "over the whole batch at once")
    lines += ["", "| " + " | ".join((*heads, "m p / (m + p - 1)", "published")) + " |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for layers in LAYERS:
        for workers in WORKERS:
            cells = [f"{simulated[layers][name][workers]:.2f}x" for name in PASSES]
            over = [f"{simulated[layers][name][workers] / gains[name]:.2f}x" for name in PASSES]
            cells.append(", ".join(over) if layers > 1 else "")
            cells.append(f"{formula(workers, M):.2f}x" if layers > 1 else "")
            cells.append(f"{PUBLISHED[layers]}x" if workers == 8 else "")
            lines.append(f"| {layers} layers | {workers} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(
    measured: dict[int, dict[str, float]], simulated: dict[int, Any], M: int, file: Path
) -> None:
    """Draw what was measured and what was simulated, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {1: "#0072b2", 24: "#e69f00"}
    styles = {"forward": "-", "training": "--"}
    for layers in LAYERS:
        for name in PASSES:
            look = {"color": colours[layers], "linestyle": styles[name], "marker": "o"}
            label = f"{layers} layer{'s' * (layers > 1)}, {name}"
            key = f"{name} of {layers}"
            speedups = [measured[1][key] / times[key] for times in measured.values()]
            left.plot([*measured], speedups, label=label, **look)
            right.plot(WORKERS, [*simulated[layers][name].values()], label=label, **look)
        published = {"color": colours[layers], "marker": "*", "s": 120, "zorder": 3}
        right.scatter(8, PUBLISHED[layers], label=f"published, {layers}, forward", **published)
    right.plot(
        WORKERS,
        [formula(workers, M) for workers in WORKERS],
        color="#777777",
        label="m p / (m + p - 1)",
    )
    for axes, title in (
        (left, "measured: a core for each process"),
        (right, "simulated from one core and a pair of processes"),
    ):
        axes.plot(WORKERS, WORKERS, color="#cccccc", zorder=0)
        axes.set(title=title, xlabel="workers", ylabel="speedup")
        axes.legend(fontsize=8)
    left.set(xlim=(0.9, max(measured) + 0.1), ylim=(0.9, max(measured) + 0.1))
    left.set_xticks([*measured])
    right.set(xlim=(0, 17), ylim=(0, 12))
    right.set_xticks(WORKERS)
    figure.savefig(file, dpi=110)


def study(args: argparse.Namespace) -> None:
    """Measure, simulate, and write both."""
    sizes = Sizes(seq=args.seq)
    cores = len(os.sched_getaffinity(0))
    counts = [workers for workers in WORKERS if workers <= cores]
    taken: dict[int, list[dict[str, float]]] = {workers: [] for workers in counts}
    for turn in range(args.turns):  # in turns, so that what else the machine does meets all alike
        for workers in counts:
            print(f"turn {turn + 1} of {args.turns}: {workers} processes", file=sys.stderr)
            taken[workers].append(run_workers("layers", workers, sizes, args.rounds))
    measured = {workers: medians(found) for workers, found in taken.items()}
    print("parts of a layer and stages on one core", file=sys.stderr)
    shares = run_workers("shares", 1, sizes, args.rounds)
    if cores < 2:
        raise SystemExit("one core: messages between two processes cannot be measured")
    link = link_of(run_workers("messages", 2, sizes, args.rounds))

    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", max(WORKERS))
    simulated = {
        1: simulated_layer(sizes, measured[1], shares, link),
        24: simulated_stack(sizes, shares, link),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    kept = {"measured": measured, "simulated": simulated, "shares": shares, "link": link}
    (args.out / "scaling.json").write_text(json.dumps(kept, indent=1))
    draw(measured, simulated, sizes.batch, args.out / "scaling.png")
    print(table_of(measured, simulated, shares, sizes.batch))
    rate = 1e-9 / link.per_byte if link.per_byte else float("inf")
    print(f"\na message: {1e6 * link.start:.0f} us and {rate:.2f} GB/s")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/scaling"))
    parser.add_argument("--seq", type=int, default=Sizes().seq, help="length of the sequence")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--work", choices=["layers", "messages", "shares"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--sizes")
    args = parser.parse_args()
    if args.work:
        work(args)
    else:
        study(args)


if __name__ == "__main__":
    main()
