"""Draws the pictures of docs/mechanisms.md: `python docs/draw_mechanisms.py` writes
docs/mechanisms/*.svg.

Schedules and masks are the library's own, as it would run them; the other pictures are drawn by
hand.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxpar.kernels.masks import (
    Causal,
    Dilated,
    First,
    Mask,
    Tiles,
    Window,
    bigbird,
    dense,
    tile_states,
)
from jaxpar.parallel.pipeline.schedules import Times, schedule, simulate_schedule

FOLDER = Path(__file__).parent / "mechanisms"
DEVICES = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
)  # of Okabe and Ito, which all kinds of colour vision tell apart
COMPUTE = "#0072b2"
BACKWARD = "#e69f00"
LINK = "#cc79a7"
NOTHING = "#eeeeee"
INK = "#333333"


def canvas(height: float, columns: int = 1, **options: object) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, height), layout="constrained")
    found = list(np.atleast_1d(figure.subplots(1, columns, **options)).flat)
    for axes in found:
        axes.set_axis_off()
    return figure, found


def box(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, text: str = ""
) -> None:
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=1)
    )
    dark = sum(matplotlib.colors.to_rgb(color)) < 1.7
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        color="white" if dark else INK,
        fontsize=8,
    )


def arrow(
    axes: Axes,
    x: float,
    to: float,
    y: float,
    text: str,
) -> None:
    axes.annotate(
        "",
        (to, y),
        (x, y),
        arrowprops={
            "arrowstyle": "->",
            "color": LINK,
            "linewidth": 1.8,
        },
    )
    axes.text(
        (x + to) / 2,
        y + 0.12,
        text,
        ha="center",
        va="bottom",
        color=INK,
        fontsize=8,
    )


def legend(figure: Figure, **colors: str) -> None:
    patches = [
        Patch(facecolor=color, label=label.replace("__", ", ").replace("_", " "))
        for label, color in colors.items()
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8
    )


def lanes(axes: Axes, rows: dict[str, list[tuple[float, float, str, str]]], until: float) -> None:
    """Bars (start, length, color, text) in a row for each lane, the first on top."""
    for i, (name, bars) in enumerate(rows.items()):
        y = len(rows) - 1 - i
        axes.text(
            -0.15,
            y + 0.4,
            name,
            ha="right",
            va="center",
            color=INK,
            fontsize=8,
        )
        for start, length, color, text in bars:
            box(axes, start, y, length, 0.8, color, text)
    axes.set(
        xlim=(-2.2, until),
        ylim=(-0.15, len(rows)),
    )


def fsdp() -> Figure:
    """What a device holds of three layers, and when weights are gathered (G) and gradients
    scattered (S).
    """
    figure, (store, time) = canvas(2.2, 2, width_ratios=[1, 2.4])
    for layer in range(3):
        for device, color in enumerate(DEVICES):
            box(store, device, 2 - layer, 1, 0.8, color)
        store.text(
            -0.2, 2.4 - layer, f"layer {layer}", ha="right", va="center", color=INK, fontsize=8
        )
    store.text(2, 3, "a quarter on each device", ha="center", fontsize=8, color=INK)
    store.set(xlim=(-1.6, 4), ylim=(-0.2, 3.3))
    work = [(1 + i, 1, COMPUTE, f"F{i}") for i in range(3)] + [
        (8 - 2 * i, 2, BACKWARD, f"B{i}") for i in range(3)
    ]
    sent = (
        (0, "G0"),
        (1, "G1"),
        (2, "G2"),
        (3, "G2"),
        (4, "G1"),
        (6, "S2"),
        (7, "G0"),
        (8, "S1"),
        (10, "S0"),
    )
    lanes(
        time,
        {
            "compute": work,
            "links": [(start, 0.95, LINK, text) for start, text in sent],
        },
        11,
    )
    legend(
        figure, forward=COMPUTE, backward=BACKWARD, gather_of_weights_G__scatter_of_gradients_S=LINK
    )
    return figure


def tensor() -> Figure:
    """The arrays between and inside two linears, on four devices: rows are tokens, columns
    features.
    """
    figure, (axes,) = canvas(2.3)

    def rows(x: float) -> None:
        for i, color in enumerate(DEVICES):
            box(axes, x, 1.5 - i / 2, 1.6, 0.5, color)

    def columns(x: float) -> None:
        for i, color in enumerate(DEVICES):
            box(axes, x + i * 0.6, 0, 0.6, 2, color)

    def copies(x: float, text: str) -> None:
        for i, color in reversed(list(enumerate(DEVICES))):
            box(
                axes,
                x + i * 0.16,
                i * 0.16 - 0.2,
                1.6,
                2,
                color,
                text if i == 0 else "",
            )

    rows(0)
    arrow(axes, 1.7, 2.9, 1, "all-gather")
    copies(3, "all tokens,\non each")
    arrow(axes, 5.3, 6.5, 1, "column\nlinear")
    columns(6.6)
    arrow(axes, 9.1, 10.3, 1, "row\nlinear")
    copies(10.4, "a term of\nthe sum,\non each")
    arrow(axes, 12.7, 13.9, 1, "reduce-\nscatter")
    rows(14)
    for x, text in (
        (0.8, "residual stream:\na piece of the sequence"),
        (7.8, "heads or MLP columns:\na part each"),
        (14.8, "residual stream"),
    ):
        axes.text(
            x,
            -0.35,
            text,
            ha="center",
            va="top",
            fontsize=8,
            color=INK,
        )
    axes.set(xlim=(-0.6, 16.2), ylim=(-1.1, 2.6))
    return figure


def collective_matmul() -> Figure:
    """A gather and its matmul, whole and in chunks that travel beside the parts of the matmul."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    whole, ring, both = figure.subplots(3, 1, height_ratios=[2, 2, 3])
    lanes(
        whole, {"compute": [(3, 4, COMPUTE, "matmul")], "links": [(0, 3, LINK, "all-gather")]}, 7.2
    )
    parts = [(i, 1, COMPUTE, f"chunk {i}") for i in range(4)]
    lanes(
        ring,
        {
            "compute": parts,
            "links": [(i, 0.97, LINK, f"chunk {i + 1}") for i in range(3)],
        },
        7.2,
    )
    halves = [(i / 2, 0.48, LINK, f"half {i + 1}") for i in range(3)]
    lanes(both, {"compute": parts, "links, one way": halves, "the other way": halves}, 7.2)
    for axes, title in ((whole, "xla"), (ring, "ring"), (both, "bidirectional")):
        axes.set_axis_off()
        axes.set_title(title, fontsize=9, color=INK, loc="left")
    return figure


def ring_attention() -> Figure:
    """Which device computes which tile of causal scores, and how many: pieces in order, and in
    zigzag order.
    """
    figure, axes = canvas(3.3, 4, width_ratios=[3, 2, 3, 2])
    states = tile_states(
        Causal(), Tiles(S=64, T=64, block_q=8, block_k=8)
    )  # 0 empty, 1 partial, 2 full
    orders = (
        ("two chunks in a row each", (0, 0, 1, 1, 2, 2, 3, 3)),
        ("zigzag: chunks i and 7 - i", (0, 1, 2, 3, 3, 2, 1, 0)),
    )
    for (name, owner), grid, bars in zip(
        orders,
        axes[::2],
        axes[1::2],
        strict=True,
    ):
        for q, k in np.ndindex(states.shape):
            box(
                grid,
                k,
                7 - q,
                1,
                1,
                DEVICES[owner[q]] if states[q, k] else NOTHING,
            )
        for device, color in enumerate(DEVICES):
            work = sum(states[q].sum() for q in range(8) if owner[q] == device) / 2
            box(bars, 0, 6.4 - 2 * device, work, 1.2, color)
            bars.text(
                work + 0.4,
                7 - 2 * device,
                f"{work:g}",
                va="center",
                fontsize=8,
                color=INK,
            )
        grid.set(
            xlim=(-0.1, 8.1),
            ylim=(-0.1, 8.1),
            aspect="equal",
        )
        grid.set_title(name, fontsize=9, color=INK)
        bars.set(
            xlim=(-1, 17),
            ylim=(-0.1, 8.1),
            box_aspect=1.4,
        )
        bars.set_title("tiles a device", fontsize=9, color=INK)
    return figure


def ulysses() -> Figure:
    """The split of the sequence becomes one of the heads, and back."""
    figure, (axes,) = canvas(2.2)
    for x, by_heads, text in (
        (0, False, "q, k, v:\na piece of the sequence"),
        (4.6, True, "attention:\nsome heads"),
        (9.2, False, "the output:\na piece again"),
    ):
        for row, column in np.ndindex(4, 4):
            box(
                axes,
                x + column * 0.6,
                1.5 - row / 2,
                0.6,
                0.5,
                DEVICES[column if by_heads else row],
            )
        axes.text(
            x + 1.2,
            -0.2,
            text,
            ha="center",
            va="top",
            fontsize=8,
            color=INK,
        )
    arrow(axes, 2.6, 4.4, 1, "all-to-all")
    arrow(axes, 7.2, 9.0, 1, "all-to-all")
    axes.text(
        -0.2,
        1,
        "sequence",
        ha="right",
        va="center",
        rotation=90,
        fontsize=8,
        color=INK,
    )
    axes.text(1.2, 2.1, "heads", ha="center", fontsize=8, color=INK)
    axes.set(xlim=(-2.4, 14), ylim=(-1, 2.5))
    return figure


def experts() -> Figure:
    """Tokens of four devices go to four experts and back: buffers have room for every token, and
    are not full.
    """
    figure, (axes,) = canvas(2.7)
    chosen = np.random.default_rng(3).integers(0, 4, (4, 6))
    for device in range(4):
        y = 3 - device
        for token, expert in enumerate(chosen[device]):
            box(axes, token * 0.4, y, 0.4, 0.7, DEVICES[expert])
            box(axes, 12.4 + token * 0.4, y, 0.4, 0.7, DEVICES[expert])
        for sender in range(4):
            sent = int((chosen[sender] == device).sum())
            for place in range(6):
                if place < sent:
                    color = DEVICES[device]
                else:
                    color = NOTHING
                box(axes, 4.6 + sender * 1.5 + place * 0.23, y, 0.23, 0.7, color)
        axes.text(
            -0.2, y + 0.35, f"device {device}", ha="right", va="center", fontsize=8, color=INK
        )
    arrow(axes, 2.6, 4.4, 2, "all-to-all")
    arrow(axes, 10.6, 12.2, 2, "all-to-all")
    for x, text in (
        (1.2, "tokens, by the\nexpert chosen"),
        (7.5, "a buffer\nfrom each device"),
        (13.6, "answers, weighted\nand summed"),
    ):
        axes.text(
            x,
            -0.2,
            text,
            ha="center",
            va="top",
            fontsize=8,
            color=INK,
        )
    axes.set(xlim=(-1.6, 15), ylim=(-1, 3.9))
    return figure


def pipeline() -> Figure:
    """Four schedules of the library, four stages and eight microbatches, a backward as long as two
    forwards.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    for axes, (name, chunks) in zip(
        figure.subplots(4, 1, sharex=True),
        (
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("looped", 2),
        ),
        strict=True,
    ):
        table = schedule(name, stages=4, microbatches=8, virtual=chunks)
        times = Times(1 / chunks, 2 / chunks)
        found = simulate_schedule(table, times)
        for tick, stage in np.ndindex(len(table.ticks), 4):
            if action := table.ticks[tick][stage]:
                if action.kind == "forward":
                    color = COMPUTE
                else:
                    color = BACKWARD
                light = "55" if action.chunk else ""
                start = found.starts[tick]
                length = times.of(action.kind)
                axes.barh(
                    stage,
                    length,
                    0.86,
                    start,
                    align="center",
                    color=color + light,
                    edgecolor="white",
                )
                if light or color == BACKWARD:
                    ink = INK
                else:
                    ink = "white"
                axes.text(
                    start + length / 2,
                    stage,
                    action.microbatch,
                    ha="center",
                    va="center",
                    fontsize=5.5,
                    color=ink,
                )
        kept = max(found.stash)
        axes.set_title(
            f"{name}: bubble {found.bubble:.0%}, at most {kept} inputs kept",
            fontsize=9,
            loc="left",
            color=INK,
        )
        axes.set(yticks=range(4), ylabel="stage")
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=7, length=0)
    axes.set_xlabel("time", fontsize=8)
    legend(figure, forward=COMPUTE, backward=BACKWARD, second_chunk_of_layers="#aaaaaa")
    return figure


def loss() -> Figure:
    """The scores of some tokens at a time, a part of the vocabulary on each device."""
    figure, (axes,) = canvas(2.4)
    for chunk, device in np.ndindex(4, 4):
        color = DEVICES[device] if chunk == 1 else NOTHING
        box(
            axes,
            device * 1.5,
            1.8 - chunk * 0.6,
            1.5,
            0.6,
            color,
            "scores" if chunk == 1 else "",
        )
    axes.text(
        -0.2,
        1.2,
        "tokens,\nin chunks",
        ha="right",
        va="center",
        fontsize=8,
        color=INK,
    )
    axes.text(3, 2.5, "vocabulary, a part on each device", ha="center", fontsize=8, color=INK)
    arrow(axes, 6.2, 8.0, 1.5, "all-reduce")
    for i, text in enumerate(("the maximum", "the sum of exponentials", "the label's score")):
        box(axes, 8.2, 2.0 - i * 0.55, 3.4, 0.45, NOTHING, text)
    axes.text(
        9.9,
        0.35,
        "three numbers a token, and the chunk's\ngradients at once: no scores are kept",
        ha="center",
        va="center",
        fontsize=8,
        color=INK,
    )
    axes.set(xlim=(-1.6, 12), ylim=(-0.2, 2.9))
    return figure


def memory() -> Figure:
    """Activations on a device through a forward and a backward of eight layers, in layers'
    worth.
    """
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    layers = 8
    kept = {"none": 1.0, "attention_out": 0.2, "full": 0.1, "full, block_input offloaded": 0.0}
    for (name, share), color in zip(kept.items(), DEVICES, strict=True):
        levels = [share * layer for layer in range(layers + 1)]
        back = [value for left in reversed(levels[:-1]) for value in (left + 1.0, left)]
        times = [
            *range(layers + 1),
            *(layers + 1 + i for i in range(2 * layers)),
        ]
        axes.step(times, levels + back, where="post", color=color, label=name)
    axes.axvline(layers + 0.5, color="#999999", linewidth=0.8, linestyle="--")
    axes.text(layers / 2, 8.3, "forward", ha="center", fontsize=8, color=INK)
    axes.text(
        2 * layers + 1,
        8.3,
        "backward",
        ha="center",
        fontsize=8,
        color=INK,
    )
    axes.set(ylabel="activations kept, in layers", xticks=[], ylim=(0, 9))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center right")
    axes.tick_params(labelsize=8)
    return figure


def masks() -> Figure:
    """Six masks of 96 tokens, and what their tiles of 16 are: empty ones are never computed, full
    ones take no mask.
    """
    shown: Iterable[tuple[str, Mask]] = (
        ("Causal()", Causal()),
        ("Causal() & Window(20)", Causal() & Window(20)),
        ("Causal() | First(24)", Causal() | First(24)),
        ("Causal() & bigbird(96, 3, 1, 1)", Causal() & bigbird(96, 3, 1, 1, 0, 8)),
        ("Dilated(6, 8)", Dilated(6, 8)),
        ("Causal() & (Window(8) | Dilated(12, 8))", Causal() & (Window(8) | Dilated(12, 8))),
    )
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    for axes, (name, mask) in zip(
        figure.subplots(2, 3).flat,
        shown,
        strict=True,
    ):
        tiles = Tiles(S=96, T=96, block_q=16, block_k=16)
        states = tile_states(mask, tiles)
        seen = np.asarray(dense(mask, tiles)) * 1.0
        ground = matplotlib.colors.ListedColormap([NOTHING, DEVICES[1], DEVICES[0]])
        axes.imshow(
            np.kron(np.asarray(states), np.ones((16, 16))),
            cmap=ground,
            vmin=0,
            vmax=2,
        )
        axes.imshow(
            np.ma.masked_equal(seen, 0),
            cmap="Greys",
            vmin=0,
            vmax=1.6,
            alpha=0.5,
        )
        axes.set_title(f"{name}\n{(states > 0).mean():.0%} of tiles", fontsize=8, color=INK)
        axes.set_axis_off()
    legend(figure, empty=NOTHING, partial=DEVICES[1], full=DEVICES[0])
    return figure


PICTURES: tuple[Callable[[], Figure], ...] = (
    fsdp,
    tensor,
    collective_matmul,
    ring_attention,
    ulysses,
    experts,
    pipeline,
    loss,
    memory,
    masks,
)

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        form = "png" if draw is masks else "svg"  # single places, which a browser would blur
        with matplotlib.rc_context(
            {"svg.hashsalt": "jaxpar", "axes.labelcolor": INK, "axes.labelsize": 8}
        ):
            draw().savefig(
                FOLDER / f"{draw.__name__}.{form}",
                dpi=150,
                metadata={"Date": None} if form == "svg" else None,
            )
