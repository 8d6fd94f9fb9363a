"""One layer of a model under a plan, drawn: where each array lies, and which collectives run between.

Top to bottom: the embedding, the parts of one block, the head. Everything is read from the parameters' shapes and
logical axes and from the rows of `jaxpar.plan.communication`, so a model of other matrices has another picture.

Lengths are in inches, downwards from the top left corner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.mesh import MESH_AXES
from jaxpar.base.plan import Plan, param_dtype
from jaxpar.base.sharding import LogicalAxis
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.plan.communication import Array, Site, one_block, part_of, sublayers, turns, with_a_stage

_COLORS = {
    "all-gather": "#0077bb", "reduce-scatter": "#cc3311", "all-reduce": "#aa3377", "all-to-all": "#009988",
    "ppermute": "#ee7733",
}  # fmt: skip
_NAMES = {"ppermute": "ring (ppermute)"}
_ACTIVATION, _WEIGHT, _OPERATION, _LINE = "#e8f1fa", "#fdf3d8", "#ffffff", "#777777"
_BETWEEN = {"attention": "attention's output", "mlp": "after activation"}

# Columns: left edge and width.
_WEIGHTS, _FLOW, _BACK = (0.2, 3.7), (4.45, 3.9), (8.9, 4.4)
_WIDTH, _LINE_HEIGHT, _GAP, _MARGIN = 13.5, 0.18, 0.17, 0.2
_FONT = 9.0


class _Drawn(NamedTuple):
    """An array as a box: its name, then its shape, its split and its bytes in words."""

    lines: tuple[str, ...]
    color: str


class _Move(NamedTuple):
    """A collective, as a coloured label."""

    kind: str
    text: str


class _Row(NamedTuple):
    """One thing of the flow, with what comes to it from the left."""

    thing: _Drawn | _Move | str
    """A str is an operation."""
    weights: tuple[_Drawn | _Move, ...] = ()


class _Section(NamedTuple):
    name: str
    rows: list[_Row]
    back: list[_Move]


def layer_figure(
    parameters: Mapping[str, Array], sites: Sequence[Site], config: Config, plan: Plan, title: str
) -> Figure:
    """The picture.

    Args:
      parameters: of the model, from `communication.arrays`.
      sites: of the plan, from `communication.sites`.
      config: whose microbatch and sequence length count.
      plan: mesh, rules and the rest.
      title: of the figure.
    """
    sections = list(_sections(parameters, sites, config, plan))
    height = 1.42 + sum(_section_height(section) + _MARGIN for section in sections)
    figure = Figure(figsize=(_WIDTH, height), dpi=100)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    top = _heading(axes, title, {site.kind for site in sites}, _example(_Sketch(plan, (1, 1, 1), 1)))
    before: float | None = None
    for section in sections:
        before = _draw_section(axes, section, top, before)
        top += _section_height(section) + _MARGIN
    return figure


# What is drawn.


def _sections(parameters: Mapping[str, Array], sites: Sequence[Site], config: Config, plan: Plan) -> Iterator[_Section]:
    embed, head = part_of(parameters, "embed"), part_of(parameters, "head")
    blocks, layers = one_block(parameters), config.model.layers
    batch = config.train.batch // config.train.accumulation // turns(config, plan).microbatches
    sketch = _Sketch(plan, (batch, config.data.seq_len, config.model.embed), layers)

    yield sketch.embedding(embed, [site for site in sites if site.scope == "embed"])
    for part, columns, rows in sublayers(blocks):
        here = [site for site in sites if f"{site.scope}/".startswith(f"block/{part}/")]
        yield sketch.part(part, columns, rows, here)
    if experts := {name: array for name, array in blocks.items() if array.axes[0] == "experts"}:
        routers = {name: array for name, array in blocks.items() if array.axes == ("embed", None)}
        yield sketch.experts(routers, experts, [site for site in sites if site.scope.startswith("block/mlp/")])
    table = next(item for item in (*head.items(), *embed.items()) if item[1].axes[0] == "vocab")
    last = sketch._replace(stream=with_a_stage(sketch.stream, plan))
    yield last.head(dict([table]), [site for site in sites if site.scope in ("share", "head", "loss")])
    vectors = [site for site in sites if site.scope == "block"]
    if vectors:
        yield _Section(f"norms and biases, one of {layers} layers", [], sketch.labels(vectors))
    between = [site for site in sites if site.scope == "send"]
    if between:
        yield _Section(f"between the {plan.size('stage')} stages, each tick", [], sketch.labels(between))
        ends = sketch.labels(site for site in sites if site.scope == "sum")
        yield _Section("sums of all stages, after the last tick", [], ends)
    update = [site for site in sites if site.scope == "update"]
    if update:
        yield _Section("update, once a step", [], sketch.labels(update))


class _Sketch(NamedTuple):
    """Makes what is drawn, for a plan and the stream [B, S, D] of a microbatch."""

    plan: Plan
    stream: tuple[int, int, int]
    layers: int

    def embedding(self, tables: dict[str, Array], sites: list[Site]) -> _Section:
        forward = [site for site in sites if site.phase == "forward"]
        weights: list[_Drawn | _Move] = []
        for name, table in tables.items():
            weights += self.weights({name: table})
            for move in self.moves(site for site in forward if site.what == f"{name} table"):
                weights.append(move._replace(text=f"{name}: {move.text}") if len(tables) > 1 else move)
        found = [site for site in forward if not site.what.endswith("table")]
        rows = [
            _Row(self.array("tokens", Array(self.stream[:2], GATHERED[:2]), 4)),
            _Row("look up", tuple(weights)),
            *(_Row(move) for move in self.moves(found)),
            _Row(self.residual()),
        ]
        return _Section("embedding", rows, self.back(sites))

    def part(self, part: str, columns: dict[str, Array], out: dict[str, Array], sites: list[Site]) -> _Section:
        """A column linear, what lies between, and a row linear."""
        into, outs = ", ".join(columns), ", ".join(out)
        forward = [site for site in sites if site.phase == "forward"]
        known = [f"{into} input", f"{into} weights", f"{outs} weights", f"{outs} output"]
        at = {what: self.moves(site for site in forward if site.what == what) for what in known}
        inside = self.moves(site for site in forward if site.what not in known)
        made = [self.array(names, self.output(array), self.width) for names, array in _alike(columns)]
        rows = [
            _Row("norm"),
            *self.gathered(at[f"{into} input"]),
            _Row("matmul", (*self.weights(columns), *at[f"{into} weights"])),
            *(_Row(thing) for thing in (*made, *inside)),
            _Row(self.array(_BETWEEN.get(part, part), self.input(next(iter(out.values()))), self.width)),
            _Row("matmul", (*self.weights(out), *at[f"{outs} weights"])),
            *(_Row(move) for move in at[f"{outs} output"]),
            _Row(self.residual()),
        ]
        return _Section(f"{part}, one of {self.layers} layers", rows, self.back(sites))

    def experts(self, routers: dict[str, Array], experts: dict[str, Array], sites: list[Site]) -> _Section:
        """A router, the way to the experts, their two linears, and the way back."""
        forward = [site for site in sites if site.phase == "forward"]

        def at(step: str, weights: bool = False) -> list[_Move]:
            here = [site for site in forward if site.scope == f"block/mlp/{step}"]
            return self.moves(
                site for site in here if weights == (site.what.endswith("weights") or site.what == "router")
            )

        out = {name: array for name, array in experts.items() if array.axes[-1] == "embed"}
        into = {name: array for name, array in experts.items() if name not in out}
        sent = [site for site in forward if site.scope == "block/mlp/dispatch"]
        buffers = [
            _Drawn(
                (f"rows for the experts, {bytes_text(site.bytes)}", "on each device, zeros where empty"), _ACTIVATION
            )
            for site in sent
        ]
        rows = [
            _Row("norm"),
            _Row("route", (*self.weights(routers), *at("router", weights=True))),
            *(_Row(thing) for thing in (*at("router"), *buffers, *at("dispatch"))),
            *(_Row(move) for move in at("experts") if move.kind == "all-gather"),
            _Row("matmul, expert by expert", (*self.weights(into), *at("experts", weights=True))),
            _Row("matmul, expert by expert", tuple(self.weights(out))),
            *(_Row(move) for move in at("experts") if move.kind != "all-gather"),
            *(_Row(move) for move in at("combine")),
            _Row("weigh and add"),
            _Row(self.residual()),
        ]
        return _Section(f"experts, one of {self.layers} layers", rows, self.back(sites))

    def head(self, table: dict[str, Array], sites: list[Site]) -> _Section:
        forward = [site for site in sites if site.phase == "forward" and site.asked]
        known = ["head input", "head table"]
        into, weights = (self.moves(site for site in forward if site.what == what) for what in known)
        shared = self.moves(site for site in forward if site.scope == "share")
        after = self.moves(site for site in forward if site.what not in known and site.scope != "share")
        rows = [
            *(_Row(move) for move in shared),
            _Row("norm"),
            *self.gathered(into),
            _Row("matmul and loss", (*self.weights(table), *weights)),
            *(_Row(move) for move in after),
        ]
        aside = self.labels(site for site in sites if site.phase != "forward" or not site.asked)
        return _Section("head and loss", rows, aside)

    @property
    def width(self) -> int:
        return self.plan.dtype.itemsize

    def residual(self) -> _Drawn:
        return self.array("residual stream", Array(self.stream, STORED), self.width)

    def gathered(self, moves: list[_Move]) -> list[_Row]:
        """How the stream comes to a matmul, and how it lies there if it lies otherwise."""
        gathered = self.array("gathered", Array(self.stream, GATHERED), self.width)
        return [*(_Row(move) for move in moves), _Row(gathered)] if moves else []

    def output(self, weight: Array) -> Array:
        return Array((*self.stream[:2], *weight.shape[1:]), (*GATHERED[:2], *weight.axes[1:]))

    def input(self, weight: Array) -> Array:
        return Array((*self.stream[:2], *weight.shape[:-1]), (*GATHERED[:2], *weight.axes[:-1]))

    def weights(self, arrays: Mapping[str, Array]) -> list[_Drawn]:
        plan = self.plan
        return [
            self.array(names, array, param_dtype(array.axes, plan).itemsize, _WEIGHT) for names, array in _alike(arrays)
        ]

    def array(self, name: str, array: Array, width: int, color: str = _ACTIVATION) -> _Drawn:
        """A box: `each` where the name is of several arrays."""
        size = bytes_text(array.entries(self.plan) * width) + (" each" if ", " in name else "")
        split = " x ".join(self.dim(axis, place) for place, axis in enumerate(array.axes))
        return _Drawn((f"{name} {list(array.shape)}, {size}", split), color)

    def dim(self, axis: LogicalAxis | None, place: int) -> str:
        """`seq / tensor=4`: a dim, and the mesh axes it is cut over. Without a logical axis are a table's rows, a
        router's experts, the stream's features."""
        over = " ".join(f"{mesh_axis}={self.plan.mesh.shape[mesh_axis]}" for mesh_axis in self.plan.mesh_axes(axis))
        name = (axis or ("rows", "experts", "embed")[place]).removeprefix("residual_")
        return f"{name} / {over}" if over else name

    def moves(self, sites: Iterable[Site]) -> list[_Move]:
        """Labels of collectives, with what one of them sends."""
        return [_Move(site.kind, self.collective(site)) for site in sites]

    def back(self, sites: Iterable[Site]) -> list[_Move]:
        """Labels of the backward's collectives, with what they are for."""
        return self.labels(site for site in sites if site.phase != "forward")

    def labels(self, sites: Iterable[Site]) -> list[_Move]:
        again = {"recomputed": " (recomputed)"}
        return [_Move(site.kind, f"{site.what}{again.get(site.phase, '')}: {self.collective(site)}") for site in sites]

    def collective(self, site: Site) -> str:
        over = " x ".join(axis for axis in MESH_AXES if axis in site.axes)
        return f"{_NAMES.get(site.kind, site.kind)} over {over}, {bytes_text(site.sent_once)}"


def _alike(arrays: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Arrays of one shape together: their names, and one of them."""
    together = groupby(arrays.items(), lambda item: item[1])
    return [(", ".join(name for name, _ in group), array) for array, group in together]


# How it is drawn.


def _height(thing: _Drawn | _Move | str) -> float:
    return _LINE_HEIGHT * len(thing.lines) + 0.1 if isinstance(thing, _Drawn) else 0.25


def _stack_height(things: Sequence[_Drawn | _Move | str], gap: float = _GAP) -> float:
    return sum(_height(thing) + gap for thing in things) - gap if things else 0.0


def _section_height(section: _Section) -> float:
    placed = _placed(section)
    flow = max((top + _height(thing) for thing, _, top in placed), default=0.0)
    back = sum(len(_two_lines(move)) * _LINE_HEIGHT + 0.08 for move in section.back)
    return 0.45 + max(flow, back)


def _placed(section: _Section) -> list[tuple[_Drawn | _Move | str, tuple[float, float], float]]:
    """What is drawn, its column, and how far below the section's first line it begins.

    Weights stand beside their operation, or as far up as those before leave room.
    """
    placed, down, free = [], 0.0, 0.0
    for row in section.rows:
        placed.append((row.thing, _FLOW, down))
        tall = _stack_height(row.weights, 0.06)
        left = max(free, down + (_height(row.thing) - tall) / 2)
        for thing in row.weights:
            placed.append((thing, _WEIGHTS, left))
            left += _height(thing) + 0.06
        free = left + _GAP if row.weights else free
        down += _height(row.thing) + _GAP
    return placed


def _two_lines(move: _Move) -> list[str]:
    return move.text.split(": ")


def _example(sketch: _Sketch) -> str:
    """A dim of the picture that is cut, and what its words mean; empty on one device."""
    plan = sketch.plan
    cut: LogicalAxis | None = next((axis for axis in ("residual_seq", "batch", "embed") if plan.size(axis) > 1), None)
    if cut is None:
        return ""
    over = " and ".join(plan.mesh_axes(cut))
    return f" “{sketch.dim(cut, 0)}”: cut into {plan.size(cut)} over {over}."


def _heading(axes: Any, title: str, kinds: set[str], example: str) -> float:
    """Title and legend; how far down they reach."""
    axes.text(_WIDTH / 2, 0.3, title, ha="center", va="center", fontsize=14, weight="bold")
    notes = [
        "Boxes: the shape of a whole microbatch's array (or a stored one), and the bytes of it on each device."
        + example,
        "Colours: a collective, and the bytes that one device sends for it, once a layer and microbatch.",
    ]
    for i, note in enumerate(notes):
        axes.text(_WIDTH / 2, 0.6 + 0.19 * i, note, ha="center", va="center", fontsize=_FONT, color="#444444")
    labels = [("activations", _ACTIVATION, "black"), ("weights, as stored", _WEIGHT, "black")]
    labels += [(_NAMES.get(kind, kind), color, "white") for kind, color in _COLORS.items() if kind in kinds]
    step = 1.75
    left = (_WIDTH - step * len(labels)) / 2
    for i, (label, color, ink) in enumerate(labels):
        _box(axes, (left + i * step, step - 0.15), 1.0, 0.25, [label], color, ink)
    return 1.42


def _draw_section(axes: Any, section: _Section, top: float, before: float | None) -> float | None:
    """A section: its frame and name, weights | flow | backward. `before` is where the flow before it ends, if any."""
    axes.add_patch(_rounded(0.08, top, _WIDTH - 0.16, _section_height(section), "none", "#cccccc"))
    axes.text(_WEIGHTS[0], top + 0.17, section.name, va="center", fontsize=_FONT + 1.5, weight="bold")
    start = before
    first, middle = top + 0.33, _FLOW[0] + _FLOW[1] / 2
    for thing, column, below in _placed(section):
        _draw(axes, thing, column, first + below)
        if column == _FLOW:
            if before is not None:
                _arrow(axes, (middle, before), (middle, first + below))
            before = first + below + _height(thing)
    for i, row in enumerate(section.rows):
        if row.weights:
            down = first + _stack_height([above.thing for above in section.rows[: i + 1]]) - _height(row.thing) / 2
            _arrow(axes, (sum(_WEIGHTS), down), (_FLOW[0] + _FLOW[1] / 6, down))
    last = section.rows[-1].thing if section.rows else None
    if before is not None and start is not None and isinstance(last, _Drawn):
        side, right, quarter = sum(_FLOW) + 0.2, sum(_FLOW), _height(last) / 4  # the stream goes past, and is added to
        end = before - 3 * quarter
        axes.plot([right, side, side], [start - quarter, start - quarter, end], color=_LINE, linewidth=1)
        _arrow(axes, (side, end), (right, end))
    _draw_back(axes, section, top)
    return before


def _draw_back(axes: Any, section: _Section, top: float) -> None:
    """The collectives of the backward; of a section without a flow, all of them."""
    if not section.back:
        return
    (left, width), down = _BACK if section.rows else _FLOW, top + 0.17
    if section.rows:
        axes.text(left, down, "in the backward", va="center", fontsize=_FONT, style="italic")
    for move in section.back:
        down += 0.08
        first = down + _LINE_HEIGHT / 2
        for line in _two_lines(move):
            down += _LINE_HEIGHT
            size = _fitting(line, width - 0.2)
            axes.text(left + 0.15, down, line, va="center", fontsize=size, color=_COLORS[move.kind])
        axes.plot([left + 0.03] * 2, [first, down + _LINE_HEIGHT / 2], color=_COLORS[move.kind], linewidth=3)


def _draw(axes: Any, thing: _Drawn | _Move | str, column: tuple[float, float], top: float) -> None:
    if isinstance(thing, _Drawn):
        _box(axes, column, top, _height(thing), list(thing.lines), thing.color, "black")
    elif isinstance(thing, _Move):
        _box(axes, column, top, _height(thing), [thing.text], _COLORS[thing.kind], "white")
    else:
        inset = (column[0] + column[1] / 6, column[1] * 2 / 3)
        _box(axes, inset, top, _height(thing), [thing], _OPERATION, "black")


def _box(
    axes: Any, column: tuple[float, float], top: float, height: float, lines: list[str], color: str, ink: str
) -> None:
    left, width = column
    axes.add_patch(_rounded(left, top, width, height, color, _LINE))
    step = height / (len(lines) + (0.4 if len(lines) > 1 else 0.0))
    for i, line in enumerate(lines):
        weight = "bold" if i == 0 and len(lines) > 1 else "normal"
        down = top + height / 2 + (i - (len(lines) - 1) / 2) * step
        size = _fitting(line, width - 0.15)
        axes.text(left + width / 2, down, line, ha="center", va="center", fontsize=size, color=ink, weight=weight)


def _fitting(line: str, width: float) -> float:
    """The font size, smaller where the line would not fit: a letter is about 0.62 of its size wide."""
    return min(_FONT, width * 72 / (0.62 * len(line)))


def _rounded(left: float, top: float, width: float, height: float, color: str, edge: str) -> FancyBboxPatch:
    style = "round,pad=0,rounding_size=0.06"
    return FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=color, edgecolor=edge, linewidth=0.8)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _LINE, "shrinkA": 0, "shrinkB": 0})
