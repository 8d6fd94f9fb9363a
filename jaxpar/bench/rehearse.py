"""Predicted against measured: training steps of many shapes on one device of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.hlo.tasks import Collective
from jaxpar.rehearse.calibrate import ready_step
from jaxpar.rehearse.cost.cost import Speeds
from jaxpar.rehearse.cost.stopwatch import Lull, elapsed
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.rehearse.timeline.timeline import step_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # a picture's, and not needed to measure

_SHAKESPEARE: dict[str, Any] = {
    "model.layers": 4, "model.embed": 128, "model.heads": 4, "model.mlp": 512, "model.vocab_size": 65,
    "model.vocab_multiple": 1, "model.scan_layers": False, "data.seq_len": 64, "train.batch": 12,
}  # fmt: skip
_LLAMA = {"model.family": "llama", "model.tied_head": False, "model.mlp": 384}
_CHANGES: dict[str, dict[str, Any]] = {
    "gpt2 2 x 64, batch 4": {"model.layers": 2, "model.embed": 64, "model.heads": 2, "model.mlp": 256,
                             "train.batch": 4},
    "gpt2 1 x 128, batch 8": {"model.layers": 1, "train.batch": 8},
    "gpt2 4 x 128 (Shakespeare)": {},
    "  8 layers": {"model.layers": 8},
    "  embed 256": {"model.embed": 256, "model.heads": 8, "model.mlp": 1024},
    "  sequence 256, batch 4": {"data.seq_len": 256, "train.batch": 4},
    "  batch 48": {"train.batch": 48},
    "  vocabulary 8192": {"model.vocab_size": 8192},
    "  scan over layers": {"model.scan_layers": True},
    "  full recompute": {"memory.policy": "full"},
    "  accumulation 3": {"train.accumulation": 3},
    "llama 2 x 128, batch 8": _LLAMA | {"model.layers": 2, "train.batch": 8},
    "llama 4 x 128": _LLAMA,
    "  grouped queries, 4 x 256, sequence 128": _LLAMA | {"model.embed": 256, "model.heads": 8, "model.kv_heads": 2,
                                                          "model.mlp": 768, "data.seq_len": 128, "train.batch": 4},
    "  scan, full recompute, sequence 512": _LLAMA | {"model.scan_layers": True, "memory.policy": "full",
                                                      "data.seq_len": 512, "train.batch": 2},
    "gpt2 6 x 384, sequence 128, batch 8": {"model.layers": 6, "model.embed": 384, "model.heads": 6,
                                            "model.mlp": 1536, "data.seq_len": 128, "train.batch": 8},
}  # fmt: skip


def configs() -> dict[str, Config]:
    """Shapes to compare at, none of them among those of the calibration; indented names change the one above."""
    return {name: override(Config(), _SHAKESPEARE | changes) for name, changes in _CHANGES.items()}


class Prediction(NamedTuple):
    """One config's step in seconds."""

    name: str
    predicted: float
    fastest: float
    """Of the measured steps."""
    median: float
    predicted_bytes: int = 0
    """Of device memory, by the compiler's account."""

    @property
    def ratio(self) -> float:
        """Predicted / fastest."""
        return self.predicted / self.fastest


def compare_predictions(
    shapes: Mapping[str, Config],
    hardware: Hardware,
    speeds: Speeds | None = None,
    rounds: int = 6,
    patience: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """Predict and measure one-device training steps; the configs take turns, so that a busy moment hits them alike.

    Args:
      shapes: configs by name.
      hardware: figures of a device here, measured or published.
      speeds: of its tasks, where they were measured.
      rounds: turns; in each a config runs for about a fifth of a second.
      patience: seconds to wait, all in all, for moments in which nothing else runs.
      say: told what is going on, a line at a time.
    """
    predicted, ready, taken = {}, {}, {}
    for name, config in shapes.items():
        say(f"compiling {name.strip()}")
        ready[name] = ready_step(config, "compared")
        predicted[name] = step_time(ready[name].program, hardware, no_links, speeds).seconds
        taken[name] = CompiledBytes.of(ready[name].stats).total
    lull = Lull(patience)
    times: dict[str, list[float]] = {name: [] for name in shapes}
    for i in range(rounds):
        say(f"timing, round {i + 1}/{rounds}")
        for name, step in ready.items():
            lull.wait()
            times[name] += [elapsed(step.run) for _ in range(int(np.clip(0.2 / step.seconds, 1, 20)))]
    return [
        Prediction(name, predicted[name], min(times[name]), float(np.median(times[name])), taken[name])
        for name in shapes
    ]


def no_links(collective: Collective) -> Any:
    """For `step_time`, on one device.

    Raises:
      UserError: always.
    """
    raise UserError(
        f"a step on one device moves data between devices ({collective.kind}): compare configs without a mesh"
    )


def rank_correlation(rows: Sequence[Prediction]) -> float:
    """Spearman's, of predicted and fastest: 1 = every pair of configs is in the right order."""
    first, second = (
        np.argsort(np.argsort(column)) for column in zip(*((r.predicted, r.fastest) for r in rows), strict=True)
    )
    return 1 - 6 * float(np.sum((first - second) ** 2)) / (len(rows) * (len(rows) ** 2 - 1))


def prediction_table(rows: Sequence[Prediction]) -> str:
    """A Markdown table, and a line that sums it up."""
    head = "| config | predicted, ms | measured, ms (fastest) | median | predicted / fastest |\n|---|---|---|---|---|"
    lines = [
        f"| {row.name.replace('  ', '&nbsp;&nbsp;')} | {1e3 * row.predicted:.1f} | {1e3 * row.fastest:.1f} | "
        f"{1e3 * row.median:.1f} | {row.ratio:.2f} |"
        for row in rows
    ]
    errors = np.array([abs(row.ratio - 1) for row in rows])
    worst = max(rows, key=lambda row: abs(np.log(row.ratio)))
    summary = (
        f"Rank correlation (Spearman) {rank_correlation(rows):.3f} over {len(rows)} configs; error "
        f"{100 * np.median(errors):.0f} % at the median, {100 * np.mean(errors):.0f} % on average, worst "
        f"{worst.ratio:.2f} x ({worst.name.strip()})."
    )
    return "\n".join([head, *lines, "", summary])


def prediction_figure(rows: Sequence[Prediction], title: str) -> Figure:
    """Predicted over measured, both logarithmic; the band is within a quarter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    predicted, measured = (
        [1e3 * value for value in column] for column in zip(*(row[1:3] for row in rows), strict=True)
    )
    ends = np.array([0.8 * min(measured + predicted), 1.25 * max(measured + predicted)])
    axes.fill_between(ends, ends / 1.25, ends * 1.25, color="#777777", alpha=0.15, linewidth=0, label="within 25 %")
    axes.plot(ends, ends, color="#777777", linewidth=1)
    axes.scatter(measured, predicted, color="#4477aa", s=20, zorder=3)
    # Numbers stand left and right of the line in turn: steps of like length would hide one another's.
    for i, (x, y) in enumerate(zip(measured, predicted, strict=True)):
        axes.annotate(str(i + 1), (x, y), ((5, -9), (-11, 4))[i % 2], textcoords="offset points", fontsize=8)
    names = "\n".join(f"{i + 1:2d}  {row.name}" for i, row in enumerate(rows))
    axes.text(1.03, 1.0, names, transform=axes.transAxes, fontsize=8, va="top", linespacing=1.5)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title, box_aspect=1)
    axes.set(xlabel="measured step, ms (fastest)", ylabel="predicted step, ms")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
