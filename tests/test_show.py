"""`show`: the parameter table of a config and its picture, on simulated devices."""

import json
from dataclasses import replace

import pytest

from jaxpar.config import Config, load_config
from jaxpar.errors import UserError
from jaxpar.mesh import DcnSpec, MeshSpec
from jaxpar.models import Model
from jaxpar.show import show

pytestmark = pytest.mark.quick

TINY = load_config("tiny")


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "tiny.png"


def table(config: Config, picture, capsys) -> dict[str, dict]:
    show(config, picture, as_json=True)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_the_table_and_the_picture(picture, capsys):
    show(TINY, picture)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2, 446K parameters, on data=2 x fsdp=2 x tensor=2"
    assert any(line.startswith("blocks.up ") and "P(None, 'fsdp', 'tensor')" in line for line in lines)
    layer = picture.with_name("tiny_layer.svg")
    assert lines[-2:] == [f"one layer: {layer}", f"picture: {picture}"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "gradients of up" in layer.read_text()


def test_what_each_device_sends(picture, capsys):
    show(replace(TINY, mesh=MeshSpec(data=2)), picture)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in words if line[:2] == ["all-reduce", "data"]]
    count = Model(TINY.model).parameter_count()  # of which the position table's and all others' gradients are summed
    size = float(row[2]) * {"MiB": 2**20, "KiB": 2**10}[row[3]]
    assert size == pytest.approx(4 * (count + TINY.model.vocab_size * TINY.model.embed), rel=0.01)


def test_one_device_sends_nothing(picture, capsys):
    show(replace(TINY, mesh=MeshSpec()), picture)
    assert "no collectives: one device" in capsys.readouterr().out.splitlines()


def test_the_rows_as_json(picture, capsys):
    row = table(TINY, picture, capsys)["blocks.up"]
    assert row == {
        "name": "blocks.up", "shape": [2, 128, 512], "axes": ["layers", "embed", "mlp"],
        "spec": [None, "fsdp", "tensor"], "bytes_per_device": 2 * 64 * 256 * 4,
    }  # fmt: skip


def test_a_mesh_for_another_platform_is_simulated(picture, capsys):
    tpu = replace(TINY, mesh=MeshSpec(fsdp=4, tensor=2, platform="tpu", distributed=True))
    assert table(tpu, picture, capsys)["blocks.up"]["bytes_per_device"] == 2 * 32 * 256 * 4


def test_what_is_left_is_one_device(picture, capsys):
    assert table(replace(TINY, mesh=MeshSpec(data=-1, fsdp=2)), picture, capsys)["blocks.up"]["spec"] == [None, "fsdp"]


def test_a_mesh_that_the_model_does_not_fit_is_refused(picture):
    with pytest.raises(UserError, match=r"blocks\.down: dim 1 \(mlp\) has size 512, which tensor=3 does not divide"):
        show(replace(TINY, mesh=MeshSpec(tensor=3)), picture)
    assert not picture.exists()


def test_more_devices_than_heads_are_said(picture, capsys):
    show(replace(TINY, mesh=MeshSpec(tensor=8)), picture)
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "tensor=8 does not divide 4 heads: attention is split over the sequence"


def test_slices_are_simulated_too(picture, capsys):
    two_slices = replace(TINY, mesh=MeshSpec(fsdp=2, tensor=2, dcn=DcnSpec(data=2)))
    assert table(two_slices, picture, capsys)["blocks.up"]["bytes_per_device"] == 2 * 64 * 256 * 4
