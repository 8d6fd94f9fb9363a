"""Where the bytes of a training step are: predicted part by part from shapes, beside what the compiler says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from jaxpar.activations import NAMES
from jaxpar.config import Config
from jaxpar.footprint import activations, loss_cut, unnamed_bytes
from jaxpar.metrics import bytes_text
from jaxpar.models import Model
from jaxpar.rehearsal.memory import CompiledBytes, by_memory, local_bytes
from jaxpar.sharding import Plan, gradient_dtype, state_axes
from jaxpar.step import in_host, param_shapes, state_shapes, step_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    "parameters": "#2f6fd0", "optimizer": "#6a51c7", "gradients": "#4fb0c6", "batch": "#1b2a41", "no name": "#9aa0a6",
    "work": "#e8a33d", "arguments": "#30497a", "temporaries": "#c96f2e", "program": "#1b2a41",
}  # fmt: skip
"""Of what is no named activation; those are shades of green, in the order in which a block makes them."""


_CAPACITY, _NEAR = "#cc3311", 4


class Part(NamedTuple):
    """A part of what a step holds, bytes of one device."""

    name: str
    what: str
    device: int
    host: int = 0


def ledger(config: Config, plan: Plan, platform: str) -> list[Part]:
    """The parts of a step, from shapes alone; the last is a guess.

    What a block works with, the loss, and the update are not there at once: the larger counts.

    Args:
      config: the experiment.
      plan: of the config.
      platform: on `cpu` host memory is the device's own.
    """
    state, work = state_of(config, plan, platform), work_bytes(config, plan)
    kept = [
        Part(one.name, NAMES[one.name].what, one.kept if one.action == "save" or platform == "cpu" else 0,
             one.kept if one.action == "offload" and platform != "cpu" else 0)
        for one in activations(config, plan) if one.kept
    ]  # fmt: skip
    if unnamed := unnamed_bytes(config, plan):
        kept.append(Part("no name", "what else the backward is given", unnamed))
    held = sum(part.device for part in kept)
    more = max(work, state.update - held)
    what = "what a block and the loss work with" if work >= state.update - held else "what the update works with"
    return [
        Part("parameters", f"{plan.params}", state.parameters, state.host_parameters),
        Part("optimizer", f"moments, {plan.moments}", state.optimizer, state.host_optimizer),
        Part("gradients", "", state.gradients, state.host_gradients),
        Part("batch", "", state.batch),
        *kept,
        Part("work", what + ", a guess", more),
    ]


def ledger_table(parts: list[Part], compiled: CompiledBytes | None = None) -> Table:
    """The parts with their sums, and the compiler's."""
    table = Table("memory", "what", "device", "host", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"

    def row(name: str, what: str, device: int, host: int) -> None:
        table.add_row(name, what, *(bytes_text(size) if size else "" for size in (device, host)))

    for part in parts:
        row(*part)
    total, host = (sum(getattr(part, where) for part in parts) for where in ("device", "host"))
    row("predicted", "", total, host)
    if compiled is not None:
        off = f"predicted {100 * (total / compiled.total - 1):+.0f} %"
        row("compiled", off, compiled.total, compiled.host)
    return table


def ledger_figure(parts: list[Part], title: str, compiled: CompiledBytes | None = None, has: int = 0) -> Figure:
    """Stacked bars: the predicted parts of a device and of the host, the compiler's account, and what a device has."""
    from matplotlib import colormaps  # here: a run imports this module, and its first step would wait
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    bars: list[tuple[str, list[tuple[str, int]]]] = [
        ("device, predicted", [(part.name, part.device) for part in parts if part.device])
    ]
    if compiled is not None:
        sizes = compiled._asdict()
        del sizes["host"]
        bars.append(("device, compiled", [(name, size) for name, size in sizes.items() if size]))
    if host := [(part.name, part.host) for part in parts if part.host]:
        bars.append(("host, predicted", host))
    names = list(dict.fromkeys(name for _, stack in bars for name, _ in stack))
    shades = colormaps["YlGn"](np.linspace(0.25, 0.95, len(NAMES)))
    colors = _COLORS | dict(zip(NAMES, shades, strict=True))
    largest = max(sum(size for _, size in stack) for _, stack in bars)
    near = has <= _NEAR * largest  # a line further away would leave the bars no room
    largest = max(largest, has) if near else largest
    unit, letter = next(
        ((2**shift, name) for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**shift), (1, "B")
    )
    figure = Figure(figsize=(11, max(1.6 + 0.75 * len(bars), 0.8 + 0.18 * len(names))), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = set[str]()
    for at, (_, stack) in enumerate(bars):
        left = 0.0
        for name, size in stack:
            label = None if name in drawn else name
            drawn.add(name)
            axes.barh(at, size / unit, left=left, color=colors[name], edgecolor="white", linewidth=0.6, label=label)
            if size > (0.02 + 0.01 * len(name)) * largest:  # a letter is about a hundredth of the picture wide
                light = np.dot(np.square(to_rgb(colors[name])), (0.21, 0.72, 0.07))  # to the eye, about
                ink = "white" if light < 0.2 else "black"
                axes.text(left + size / unit / 2, at, name, ha="center", va="center", fontsize=8, color=ink)
            left += size / unit
        axes.text(left, at, f" {left:.3g}", va="center", fontsize=8)
    if has and not near:
        said = f"a device has {has / unit:.3g} {letter}: far to the right"
        axes.text(1, 1, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color=_CAPACITY)
    elif has:
        axes.axvline(has / unit, color=_CAPACITY, linestyle="--", linewidth=1, label=f"a device has {has / unit:.3g}")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel=f"{letter} of one device", title=title, xlim=(0, 1.12 * largest / unit))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def write_ledger(folder: Path, parts: list[Part], title: str, compiled: CompiledBytes, has: int) -> None:
    """`memory.json` and `memory.png` in a run folder."""
    from jaxpar.picture import save_figure

    found = {"predicted": [part._asdict() for part in parts], "compiled": compiled._asdict(), "device_has": has}
    (folder / "memory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save_figure(ledger_figure(parts, title, compiled, has), folder / "memory.png")


class State(NamedTuple):
    """Bytes a device of what a step holds besides activations, and seconds of streaming it through.

    Attributes:
      parameters, optimizer, gradients, batch: on the device.
      host_parameters, host_optimizer, host_gradients: in host memory.
      update: what the optimizer's step works with on the device.
      moved: seconds in a step, which nothing hides.
    """

    parameters: int
    optimizer: int
    gradients: int
    batch: int
    host_parameters: int
    host_optimizer: int
    host_gradients: int
    update: int
    moved: float

    @property
    def host(self) -> int:
        return self.host_parameters + self.host_optimizer + self.host_gradients

    @property
    def device(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.batch


def state_of(config: Config, plan: Plan, platform: str, link: float = math.inf) -> State:
    """The state of a step, from shapes alone.

    Args:
      config: the experiment.
      plan: of the config.
      platform: on `cpu` host memory is the device's own.
      link: bytes/s to host memory.
    """
    model = Model(config.model)
    state, batch = step_shapes(model, config, plan)
    flags = in_host(state_shapes(model, config, plan), model, plan) if platform != "cpu" else None
    there, away = by_memory(state, flags)
    sums = config.train.accumulation > 1 or plan.size("stage") > 1
    own = _gradient_bytes(state.params, model, plan, sums=False)
    gradients = _gradient_bytes(state.params, model, plan, sums=True) if sums else own
    gradients += own if config.train.accumulation > 1 and plan.size("stage") == 1 else 0
    streamed = away.params if not sums else 0  # gradients of layers in host memory are made there
    parts = config.train.accumulation
    # Parameters come in for every forward and backward, and in and out for the update; gradients that are made in host
    # memory go out, and come in for their norm and for the update.
    moved = (2 * parts + 2 + (0 if sums else 3)) * away.params + 2 * away.opt_state
    return State(
        there.params, there.opt_state, max(gradients - streamed, 0), local_bytes(batch),
        away.params, away.opt_state, streamed, _update_bytes(state.params, model, plan), moved / link,
    )  # fmt: skip


def _update_bytes(params: Any, model: Model, plan: Plan) -> int:
    """What the update works with besides the state itself: a layer's moments and those of the tables in float32.

    A state that stays on the device in floats is updated where it is.
    """
    if not plan.streams:
        return 0

    def entries(param: Any, axes: Any) -> int:
        return math.prod(plan.sharding(state_axes(axes), param.shape).shard_shape(param.shape))

    sizes = {name: jax.tree.leaves(jax.tree.map(entries, part, model.axes[name])) for name, part in params.items()}
    tables = [size for name, found in sizes.items() if name != "blocks" for size in found]
    layer = sum(sizes["blocks"]) // model.config.layers
    # Fetched: both moments, and a parameter, of all tables at once; unpacked: both moments of one after another.
    of_tables = 12 * sum(tables) if plan.optimizer == "offload" else 8 * max(tables) if plan.moments == "int8" else 0
    return of_tables + 8 * layer


def work_bytes(config: Config, plan: Plan) -> int:
    """A first guess of what a block's backward or the loss works with, whichever is more; the compiler corrects it.

    A block: a gradient of everything that has a name, what of that is not on the device, and its weights where they are
    gathered. The loss: scores of some tokens in float32 and in the compute dtype, and the gathered vocabulary matrix
    with its gradient. The lookup: the gathered table with its gradient.
    """
    model = Model(config.model)
    shapes = param_shapes(model, plan)
    layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(shapes["blocks"]))
    gathered = layer * plan.dtype.itemsize // plan.size("mlp") if plan.mesh.size > 1 else 0
    block = sum(one.bytes * (1 if one.action == "save" else 2) for one in activations(config, plan)) + gathered
    (tokens, rows, D, (chunks, slices)), width = loss_cut(config, plan), plan.dtype.itemsize
    table = rows * D * (width + 4) if plan.size("embed") > 1 else 0
    return max(block, table, (rows * -(-tokens // chunks) * (4 + width) + table) // slices)


def _gradient_bytes(params: Any, model: Model, plan: Plan, sums: bool) -> int:
    """Bytes a device of all gradients: of a microbatch's, in the parameters' dtypes, or of their sums."""

    def one(param: Any, axes: Any) -> int:
        shape = plan.sharding(state_axes(axes), param.shape).shard_shape(param.shape)
        return math.prod(shape) * (gradient_dtype(axes, plan) if sums else param.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, params, model.axes)))
