"""What a person sees of a run: its first lines, progress and numbers. Tables and pictures are in
`jaxpar.show`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Column

from jaxpar.base.errors import UserError, require_local, visible, with_urls, without_passwords
from jaxpar.base.hardware import has_bfloat16
from jaxpar.base.layout.mesh import describe
from jaxpar.base.layout.plan import Plan
from jaxpar.base.machine import versions
from jaxpar.base.version import jaxpar_version

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class PlainConsole(Console):
    """A rich console that takes every text as it is: names have no markup, what a terminal would
    obey is shown, and copies of what lies in a bucket have the names that they have there.
    """

    def __init__(self, **options: Any):
        # a path may be `data:train:test`
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Say that the reader of the output has gone, as an error that a training saves its steps
        for; rich would end the program. What is printed afterwards goes nowhere.
        """
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=visible(without_passwords(with_urls(segment.text))))


def console() -> Console:
    """A rich console on standard output. In a pipe nothing is wrapped or coloured."""
    out = PlainConsole(soft_wrap=True)
    if not out.is_terminal:
        out.width = 1000  # rich takes 80 where it cannot ask, and would cut the columns of a table
    return out


def check_folders(*files: str | Path) -> None:
    """Refuse, before minutes of work, output files whose folders are not there.

    Args:
      *files: the paths; empty = no file.

    Raises:
      UserError: a path is a URL, or its folder is not there.
    """
    require_local(*files)
    for file in files:
        if file and not Path(file).parent.is_dir():
            raise UserError(f"cannot write {file}: there is no folder {Path(file).parent}")


def check_pictures(*files: str | Path) -> None:
    """Refuse, before minutes of work, pictures that cannot be written.

    Args:
      *files: the paths; empty = no picture.

    Raises:
      UserError: a path is a URL, its folder is not there, or it ends in neither `.png` nor `.svg`.
    """
    check_folders(*files)
    for file in files:
        if file and Path(file).suffix not in (".png", ".svg"):
            raise UserError(f"cannot draw {file}: a picture is a .png or an .svg")


def banner(plan: Plan, facts: Mapping[str, str]) -> list[str]:
    """Write the first lines of a run: versions, devices, mesh and precision, and what else is
    given.

    Args:
      facts: further texts by what they are of.
    """
    devices = list(plan.mesh.devices.ravel())
    platform = devices[0].platform
    name = devices[0].device_kind
    if name == platform:
        kind = platform
    else:
        kind = f"{platform} ({name})"
    processes = f"{jax.process_count()} process{'es' if jax.process_count() > 1 else ''}"
    if devices[0].platform == "cpu" and len(devices) > 1:
        simulated = ", simulated"
    else:
        simulated = ""
    in_float32 = plan.compute == "bfloat16" and not has_bfloat16(devices[0])
    if in_float32:
        slow = " (multiplied in float32: this GPU has no bfloat16)"
    else:
        slow = ""
    installed = {"jaxpar": jaxpar_version()} | versions(PACKAGES)
    lines = {
        "versions": ", ".join(f"{name} {found}" for name, found in installed.items()),
        "devices": f"{len(devices)} x {kind}{simulated}, {processes}",
        "mesh": describe(dict(plan.mesh.shape)),
        "precision": f"{plan.compute} compute{slow}, {plan.params} parameters, "
        f"{plan.moments_text} moments, float32 "
        "reductions",
        **facts,
    }
    return [f"{name:<12} {text}" for name, text in lines.items()]


class ProgressLine:
    """Progress of a run: a bar with the latest numbers on a terminal, and lines elsewhere. It is a
    context manager.
    """

    def __init__(self, total: int, done: int, active: bool = True):
        self._console = console() if active else Console(quiet=True)
        # On a narrow terminal the bar is left out, and the numbers go on in more lines.
        numbers = TextColumn("{task.fields[numbers]}", table_column=Column(overflow="fold"))
        if self._console.width >= 110:
            bar = [BarColumn(bar_width=24)]
        else:
            bar = []
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *bar,
            TextColumn("ETA {task.fields[eta]} "),
            numbers,
            console=self._console,
            transient=True,
            disable=not (active and self._console.is_terminal),
        )
        self._task = self._bar.add_task(
            "step",
            total=total,
            completed=done,
            numbers="",
            eta="-",
        )
        self._total = total

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(
        self,
        step: int,
        numbers: Mapping[str, float | None],
        eta_seconds: float,
    ) -> None:
        """Show the numbers of a step.

        Args:
          step: the number of the step.
          numbers: what is known of it, which `numbers_text` writes.
          eta_seconds: the seconds that are left of the run.
        """
        text = numbers_text(numbers)
        if self._bar.disable:
            self._console.print(
                f"step {step}/{self._total}  {text}  ETA {duration_text(eta_seconds)}"
            )
        else:
            self._bar.update(
                self._task, completed=step, numbers=text, eta=duration_text(eta_seconds)
            )

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line)


def numbers_text(numbers: Mapping[str, float | None]) -> str:
    """Write the numbers of a step in one line: `loss 2.345  grad 0.81  lr 1.0e-03  12.3K tok/s`.

    Args:
      numbers: the numbers by name, as in metrics.jsonl: bytes, seconds, or shares of 1. None = it
        is not known, and left out.

    Returns:
      Those that a line has room for, in a fixed order.
    """
    forms = {
        "loss": lambda x: f"loss {x:.4f}",
        "objective": lambda x: f"objective {x:.4f}",
        "hidden_distance": lambda x: f"hidden {x:.4f}",
        "grad_norm": lambda x: f"grad {x:.3g}",
        "learning_rate": lambda x: f"lr {x:.2e}",
        "router_balance": lambda x: f"balance {x:.3f}",
        "tokens_per_second": lambda x: f"{count_text(x)} tok/s",
        "tflops_per_device": lambda x: f"{x:.1f} TFLOP/s/device",
        "mfu": lambda x: f"MFU {100 * x:.1f} %",
        "device_memory": lambda x: f"mem {bytes_text(x)}",
        "data_wait": lambda x: f"data wait {100 * x:.0f} %",
    }
    known = {key: value for key, value in numbers.items() if value is not None}
    return "  ".join(form(known[key]) for key, form in forms.items() if key in known)


def duration_text(seconds: float) -> str:
    """Write a duration as `1:02:03` or `2:03`.

    Args:
      seconds: the duration; one below zero counts as zero.

    Returns:
      The text, to whole seconds.
    """
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def bytes_text(count: float) -> str:
    """Write a size as `1.41 GiB`.

    Args:
      count: the number of bytes.

    Returns:
      The text, in units of 1,024.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def count_text(count: float) -> str:
    """Write a count as `124.4M`.

    Args:
      count: the number.

    Returns:
      The text, in units of 1,000.
    """
    for unit in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g}T"
