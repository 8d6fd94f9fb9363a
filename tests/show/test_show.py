"""`show`: the parameter table of a config and its picture, on simulated devices; and the schedule
of its pipeline.
"""

import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from matplotlib.figure import Figure

from jaxpar.base.config import Config, load_config
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import DcnSpec, MeshSpec
from jaxpar.base.layout.plan import Pipeline
from jaxpar.cli.main import main
from jaxpar.models import Model
from jaxpar.show.figures import save_figure
from jaxpar.show.show import show, show_schedule

TINY = load_config("tiny")


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "tiny.png"


def row_of(name: str, config: Config, picture, capsys) -> list[str]:
    """A parameter's row of the table: its name, shape, axes, spec and bytes per device."""
    show(config, picture)
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return next(row for row in rows if row[0] == name)


def test_the_table_and_the_picture(picture, capsys):
    show(TINY, picture)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2, 446K parameters, on data=2 x fsdp=2 x tensor=2"
    (row,) = [" ".join(line.split()) for line in lines if line.startswith("blocks.up ")]
    assert row == "blocks.up 2 x 128 x 512 layers, embed, mlp P(None, 'fsdp', 'tensor') 128.00 KiB"
    assert lines[-1] == f"picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [show, show_schedule])
def test_a_picture_that_cannot_be_written_is_said_first(draw, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*x\.png: there is no folder .*nowhere"):
        draw(TINY, tmp_path / "nowhere" / "x.png")
    (tmp_path / "x_layer.svg").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*x_layer\.svg: Is a directory"):
        save_figure(Figure(), tmp_path / "x_layer.svg")


def test_the_other_pictures(tmp_path, capsys):
    names = ("out", "layer", "masks", "memory")
    files = [tmp_path / f"{name}.png" for name in names]
    words = [
        word for name, file in zip(names, files, strict=True) for word in (f"--{name}", str(file))
    ]
    assert main(["show", "tiny", *words]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    for file in files:
        assert f"picture: {file}" in said
        assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["show", "tiny", "--mesh.stage", "2", "--schedule", "--masks", "x.png"]) == 2
    assert "--masks has no effect: --schedule draws the schedule alone" in capsys.readouterr().err
    assert main(["show", "tiny", "--layer", str(tmp_path / "no" / "x.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_what_each_device_sends(picture, capsys):
    show(replace(TINY, mesh=MeshSpec(data=2)), picture)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in words if line[:2] == ["all-reduce", "data"]]
    # of which the position table's and all others' gradients are summed
    count = Model(TINY.model).parameter_count()
    size = float(row[2]) * {"MiB": 2**20, "KiB": 2**10}[row[3]]
    assert size == pytest.approx(
        4 * (count + TINY.model.vocab_size * TINY.model.embed),
        rel=0.01,
    )


def test_one_device_sends_nothing(picture, capsys):
    show(replace(TINY, mesh=MeshSpec()), picture)
    assert "no collectives: one device" in capsys.readouterr().out.splitlines()


def test_a_mesh_for_another_platform_is_simulated(picture, capsys):
    tpu = replace(
        TINY,
        mesh=MeshSpec(fsdp=4, tensor=2, platform="tpu", distributed=True),
    )
    assert row_of("blocks.up", tpu, picture, capsys)[-1] == "64.00 KiB"


def test_what_is_left_is_one_device(picture, capsys):
    left = replace(TINY, mesh=MeshSpec(data=-1, fsdp=2))
    assert row_of("blocks.up", left, picture, capsys)[3] == "P(None, 'fsdp')"


def test_a_mesh_that_the_model_does_not_fit_is_refused(picture):
    with pytest.raises(
        UserError, match=r"blocks\.down: dim 1 \(mlp\) has size 512, which tensor=3 does not divide"
    ):
        show(replace(TINY, mesh=MeshSpec(tensor=3)), picture)
    assert not picture.exists()


@pytest.mark.slow
def test_more_devices_than_heads_are_said(picture, capsys):
    show(replace(TINY, mesh=MeshSpec(tensor=8)), picture)
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "tensor=8 does not divide 4 heads: attention is split over the sequence"


def test_slices_are_simulated_too(picture, capsys):
    two_slices = replace(
        TINY,
        mesh=MeshSpec(fsdp=2, tensor=2, dcn=DcnSpec(data=2)),
    )
    assert row_of("blocks.up", two_slices, picture, capsys)[-1] == "128.00 KiB"


def test_a_pipeline_has_its_layers_as_they_are_stored(picture, capsys):
    """Of three layers two on a stage, and one with an empty place."""
    config = staged(MeshSpec(stage=2, fsdp=2), layers=3, microbatches=4)
    show(config, picture)
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "blocks.up 4 x 128 x 512 layers, embed, mlp P('stage', 'fsdp') 256.00 KiB" in words
    assert any(
        line.startswith("ppermute stage ") and "send forward 50 %; send backward 50 %" in line
        for line in words
    )
    assert any(
        line.startswith("reduce-scatter stage ") and "share forward" in line for line in words
    )
    assert any(line.startswith("all-reduce stage ") and "sum forward" in line for line in words)


# The schedule of a pipeline.


def staged(mesh: MeshSpec, layers: int = 8, **pipeline) -> Config:
    return replace(
        TINY, mesh=mesh, model=replace(TINY.model, layers=layers), pipeline=Pipeline(**pipeline)
    )


@pytest.fixture
def no_devices(monkeypatch):
    def touched(*_):
        raise AssertionError("a schedule needs no devices")

    monkeypatch.setattr("jaxpar.train.experiments.make.start", touched)
    monkeypatch.setattr(jax, "devices", touched)


def test_the_schedule_and_its_picture(picture, capsys, no_devices):
    show_schedule(staged(MeshSpec(stage=4), microbatches=8), picture)
    title, _, *rest = capsys.readouterr().out.splitlines()
    rows = rest[:4]
    (said, last) = rest[4:]
    assert title == "1f1b, 4 stages, 8 microbatches, 2 layers in each stage"
    assert rows[3].split() == [
        "stage",
        "3",
        *[
            ".",
            ".",
            ".",
            "F0",
            "B0",
            "F1",
            "B1",
            "F2",
            "B2",
            "F3",
            "B3",
        ],
        *[
            "F4",
            "B4",
            "F5",
            "B5",
            "F6",
            "B6",
            "F7",
            "B7",
            ".",
            ".",
            ".",
        ],
        "keeps",
        "1",
    ]
    assert said.startswith("22 ticks, bubble 27.3 %; ")
    drawn = picture.with_name("tiny_schedule.png")
    assert last == f"picture: {drawn}"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert not picture.exists()


def test_microbatches_are_as_many_as_the_batch_allows(picture, capsys, no_devices):
    """Four a stage, where the batch and its shards divide."""
    config = staged(MeshSpec(stage=2, data=2))
    show_schedule(replace(config, train=replace(config.train, batch=32)), picture)
    assert capsys.readouterr().out.startswith("1f1b, 2 stages, 8 microbatches")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TINY, "mesh.stage=1: .*try mesh.stage=4"),
        (staged(MeshSpec(stage=-1)), "mesh.stage=-1: "),
        (staged(MeshSpec(stage=2), virtual=2), "1f1b has one virtual"),
        (staged(MeshSpec(stage=2), schedule="looped", virtual=0), "found 2, .*, 0"),
        (staged(MeshSpec(stage=16)), "model.layers=8 are fewer than 16 stages"),
    ],
)
def test_a_pipeline_that_there_cannot_be(config, message, picture):
    with pytest.raises(UserError, match=message):
        show_schedule(config, picture)
    assert not list(picture.parent.iterdir())


@pytest.mark.parametrize("flag", ["--layer", "--masks", "--memory", "--out"])
def test_a_picture_is_a_png_or_an_svg(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "tiny", flag, str(tmp_path / "layer.txt")]) == 2
    assert "layer.txt: a picture is a .png or an .svg" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
