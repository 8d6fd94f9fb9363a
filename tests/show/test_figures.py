"""Pictures: that they are written whole, and show what is so."""

import itertools
import re
from math import prod

import jax
import matplotlib.figure
import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import placements
from jaxpar.show.figures import (
    loss_figure,
    memory_figure,
    mesh_figure,
    ring_figure,
    save_figure,
    sweep_figure,
)

ROWS = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.5, "val_loss": 2.75},
    {"step": 3, "val_loss": 2.0},
]


def test_the_loss_curve_has_every_point_and_reference():
    (axes,) = loss_figure(ROWS, "a run", {"unigram entropy": 3.25}).axes
    train, val, reference = axes.lines
    assert train.get_xydata().tolist() == [[1, 3.0], [2, 2.5]]
    assert val.get_xydata().tolist() == [[2, 2.75], [3, 2.0]]
    assert list(reference.get_ydata()) == [3.25, 3.25]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["train (last 2.500)", "validation (last 2.000)", "unigram entropy (3.250)"]


def test_a_single_point_is_seen():
    (axes,) = loss_figure(ROWS[:1], "a run").axes
    (train,) = axes.lines
    assert train.get_marker() == "."


def test_a_run_without_a_row_still_has_a_picture():
    (axes,) = loss_figure([], "a run").axes
    assert not axes.lines
    assert axes.get_legend() is None


def test_parts_of_a_device_stand_one_after_another_in_one_order_and_add_up():
    bars = {
        "full": {"work": 3 << 30, "parameters": 2 << 30, "q": 0},
        "none": {"parameters": 2 << 30, "q": 4 << 30},
    }
    figure = memory_figure(bars, "a step", has=5 << 30)
    (axes,) = figure.axes
    drawn = {
        str(part.get_label()): [(bar.get_x(), bar.get_width()) for bar in part]
        for part in axes.containers
    }
    assert drawn == {
        "parameters": [(0, 2), (0, 2)],
        "q": [(2, 0), (2, 4)],
        "work": [(2, 3), (6, 0)],
    }
    assert {" 5", " 6"} <= {text.get_text() for text in axes.texts}
    (line,) = axes.lines
    assert line.get_label() == "a device has 5 GiB" and line.get_xdata()[0] == 5


def test_what_a_device_has_far_beyond_the_bars_is_words_alone():
    figure = memory_figure({"a device": {"parameters": 2 << 30}}, "a step", has=95 << 30)
    (axes,) = figure.axes
    assert not axes.lines
    assert axes.get_xlim()[1] < 3
    assert "a device has 95 GiB, far to the right" in [text.get_text() for text in axes.texts]


def test_every_run_of_a_sweep_has_a_curve_and_a_bar():
    rates = {"mesh.tensor=1": 5, "mesh.tensor=2": 7}
    curves, bars = sweep_figure(dict.fromkeys(rates, ROWS), rates).axes
    first, second = curves.lines
    assert (
        first.get_linewidth() > second.get_linewidth() and first.get_color() != second.get_color()
    )
    assert [bar.get_width() for bar in bars.patches] == [5, 7]
    assert [tick.get_text() for tick in bars.get_yticklabels()] == [
        "mesh.tensor=1",
        "mesh.tensor=2",
    ]


def test_a_figure_is_written_as_a_whole_png(tmp_path):
    path = tmp_path / "loss.png"
    save_figure(loss_figure(ROWS, "a run"), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def full_disk(self, file, **_):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*loss\.png: No space left"):
        save_figure(loss_figure(ROWS, "a run"), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


ARRAYS = {
    "matrix": ((16, 8), ("embed", "mlp"), 8),
    "table": ((64, 4), ("vocab", None), 2),
    "stacked": (
        (3, 8, 6, 4),
        ("layers", "embed", "heads", None),
        8,
    ),
    "bias": ((16,), ("embed",), 4),
    "scalar": ((), (), 1),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_cut_into_its_shards_each_labelled_with_its_devices(plan_of, name):
    shape, names, shards = ARRAYS[name]
    plan = plan_of(fsdp=4, tensor=2)
    rows = placements(
        {name: jax.ShapeDtypeStruct(shape, np.float32)},
        {name: names},
        plan,
    )
    (axes,) = mesh_figure(rows, plan, "a mesh").axes
    assert len(axes.patches) == len(axes.texts) == shards
    labels = [[int(i) for i in re.findall(r"\d+", text.get_text())] for text in axes.texts]
    assert sorted(i for label in labels for i in label) == list(range(8))
    drawn = sum(patch.get_width() * patch.get_height() for patch in axes.patches)
    assert drawn == abs(np.diff(axes.get_xlim())[0] * np.diff(axes.get_ylim())[0])
    assert axes.get_title().startswith(name)


UNROLLED = {  # shape, logical axes, mesh axes, labels of y and x, ticks of y and x
    "gate": (
        (
            (4, 8, 16),
            ("layers", "embed", "mlp"),
            {"stage": 2, "fsdp": 2, "tensor": 2},
        ),
        ("layers over stage, then embed over fsdp", "mlp over tensor", [0, 2, 4], [0, 16]),
    ),
    "out": (
        (
            (4, 4, 6, 8),
            ("layers", "heads", None, "embed"),
            {"stage": 2, "fsdp": 2, "tensor": 2},
        ),
        ("layers over stage, then heads over tensor", "embed over fsdp", [0, 2, 4], [0, 8]),
    ),
    "experts": (
        (
            (4, 2, 8, 16),
            ("layers", "experts", "embed", "mlp"),
            {"stage": 2, "expert": 2, "fsdp": 2},
        ),
        ("layers over stage, then experts over expert", "embed over fsdp", [0, 2, 4], [0, 8]),
    ),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_shards_of_an_array_split_over_three_dims_are_drawn_apart(plan_of, name):
    (shape, names, sizes), (ylabel, xlabel, yticks, xticks) = UNROLLED[name]
    plan = plan_of(**sizes)
    rows = placements(
        {name: jax.ShapeDtypeStruct(shape, np.float32)},
        {name: names},
        plan,
    )
    (axes,) = mesh_figure(rows, plan, "a mesh").axes
    assert len(axes.patches) == len(axes.texts) == 8
    for one, other in itertools.combinations(
        [patch.get_bbox() for patch in axes.patches],
        2,
    ):
        wide = min(one.x1, other.x1) - max(one.x0, other.x0)
        high = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert wide <= 0 or high <= 0, (one, other)
    drawn = sum(patch.get_width() * patch.get_height() for patch in axes.patches)
    assert drawn == xticks[-1] * yticks[-1]
    assert len({text.get_text() for text in axes.texts}) == 8
    assert (axes.get_ylabel(), axes.get_xlabel()) == (ylabel, xlabel)
    assert (axes.get_yticks().tolist(), axes.get_xticks().tolist()) == (yticks, xticks)
    # devices lie by stage first
    half = [int(text.get_text().removeprefix("device ")) // 4 for text in axes.texts]
    assert half == [int(text.get_position()[1] > shape[0] / 2) for text in axes.texts]


def test_labels_stay_inside_their_shards(plan_of):
    plan = plan_of(fsdp=8)
    rows = placements(
        {"w": jax.ShapeDtypeStruct((4, 8), np.float32)},
        {"w": (None, "embed")},
        plan,
    )
    figure = mesh_figure(rows, plan, "a mesh")
    (axes,) = figure.axes
    figure.canvas.draw()
    for patch, text in zip(axes.patches, axes.texts, strict=True):
        shard = patch.get_window_extent()
        label = text.get_window_extent()
        assert shard.x0 <= label.x0 <= label.x1 <= shard.x1
        assert shard.y0 <= label.y0 <= label.y1 <= shard.y1


def test_shards_are_coloured_by_their_first_device_and_named_by_their_axes(plan_of):
    plan = plan_of(fsdp=4, tensor=2)
    rows = placements(
        {"w": jax.ShapeDtypeStruct((16, 8), np.float32)}, {"w": ("embed", "mlp")}, plan
    )
    (axes,) = mesh_figure(rows, plan, "a mesh").axes
    assert len({patch.get_facecolor() for patch in axes.patches}) == 8
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("embed over fsdp", "mlp over tensor")


def test_only_the_largest_arrays_are_drawn(plan_of):
    plan = plan_of(tensor=2)
    arrays = {f"w{i}": jax.ShapeDtypeStruct((i, 4), np.float32) for i in range(1, 9)}
    rows = placements(arrays, dict.fromkeys(arrays, (None, "mlp")), plan)
    figure = mesh_figure(rows, plan, "a mesh", most=4)
    shown = [axes.get_title().split()[0] for axes in figure.axes if axes.get_visible()]
    assert shown == ["w8", "w7", "w6", "w5"]
    assert prod(rows[0].shape) == 4


def test_a_ring_in_zigzag_has_the_same_work_for_every_device_in_every_step(plan_of):
    in_turn, zigzag, below, even = ring_figure(plan_of(context=4)).axes
    assert len(in_turn.patches) == len(zigzag.patches) == 8 * 9 / 2
    assert {bar.get_height() for bar in even.patches} == {2}
    assert sorted({bar.get_height() for bar in below.patches}) == [0, 2, 4]
    assert "steps last 14 pairs, a device works on 8" in in_turn.get_title()
    with pytest.raises(UserError, match="2 to 8 devices, found 1"):
        ring_figure(plan_of(data=2))
