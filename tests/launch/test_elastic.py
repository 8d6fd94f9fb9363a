"""The numbers of processes that a run may have: the mesh and the microbatches of each."""

from __future__ import annotations

import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch.elastic import Sizes, elastic_sizes, read_range
from jaxpar.rehearse.targets import load_target
from jaxpar.train.runs.folder.run_folder import resized_note


def small(**changes: object) -> Config:
    """A config whose batch is over all devices that there are."""
    free = {"train.batch": 8, "mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_config("tiny"), free | given)


def layouts(sizes: Sizes) -> dict[int, str]:
    return {size: sizes.describe(size) for size in sizes.configs}


def test_fewer_devices_take_as_many_sequences_at_a_time_in_more_microbatches() -> None:
    sizes = elastic_sizes(small(), 1, 4)
    assert layouts(sizes) == {
        4: "mesh data=4, train.accumulation=1",
        2: "mesh data=2, train.accumulation=2",
        1: "mesh of 1 device, train.accumulation=4",
    }
    assert "3 data-parallel shards do not divide" in sizes.refused[3]
    assert [sizes.largest(places) for places in (0, 1, 2, 3, 4, 9)] == [0, 1, 2, 2, 4, 4]
    assert {config.train.batch for config in sizes.configs.values()} == {8}
    dropped = elastic_sizes(small(model__dropout=0.1), 1, 4)
    assert layouts(dropped)[1] == "mesh of 1 device, train.accumulation=1"


def test_a_mesh_without_a_free_axis_keeps_its_devices() -> None:
    sizes = elastic_sizes(load_config("tiny"), 1, 4)
    assert set(layouts(sizes).values()) == {"mesh data=2 x fsdp=2 x tensor=2, train.accumulation=1"}
    assert list(sizes.configs) == [4, 2, 1] and "do not divide the 8 devices" in sizes.refused[3]


def test_a_number_of_processes_has_settings_of_its_own() -> None:
    own = small(mesh__data=1, mesh__fsdp=2)
    assert layouts(elastic_sizes(small(), 2, 4, at_size={2: own}))[2] == (
        "mesh fsdp=2, train.accumulation=1"
    )


def test_a_process_of_a_target_has_the_gpus_of_a_node() -> None:
    config = small(mesh__data=1, mesh__fsdp=-1, mesh__platform="gpu", kernels__attention="cudnn")
    (size,) = (sizes := elastic_sizes(config, 1, 1, load_target("h100x8"))).configs.values()
    assert sizes.describe(1) == "mesh fsdp=8, train.accumulation=1"
    assert (size.mesh.platform, size.kernels.attention) == ("gpu", "cudnn")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train.batch": 7}, "no number of processes of 2:2 can serve: train.batch=7"),
        ({"mesh.tensor": 3}, "no number of processes of 2:2 can serve: .*tensor=3"),
    ],
)
def test_a_run_that_no_number_can_serve_is_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        elastic_sizes(override(small(), change), 2, 2)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="v5p-64 loses whole slices"):
        elastic_sizes(small(), 1, 4, load_target("v5p-64"))
    with pytest.raises(UserError, match="h100x64 has 8 nodes: give --elastic N:8"):
        elastic_sizes(small(), 1, 4, load_target("h100x64"))
    with pytest.raises(UserError, match="--at-size 1 is not among"):
        elastic_sizes(small(), 2, 4, at_size={1: small()})
    with pytest.raises(UserError, match="another experiment"):
        elastic_sizes(small(), 2, 4, at_size={2: small(train__batch=4)})
    for text in ("4", "4:1", "0:2", "a:b"):
        with pytest.raises(UserError, match="such as --elastic 1:4"):
            read_range(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--elastic 1:4", "--max-failures=0, which starts nothing again"),
        ("--elastic 1:4 --workers 2 --max-failures 1", "--workers has no effect"),
        ("--workers 2 --at-size 2", "--at-size has no effect"),
        ("--elastic 1:4 --max-failures 1 --at-size two", "--at-size is 'two'"),
    ],
)
def test_flags_without_effect_are_refused(flags: str, said: str, capsys) -> None:
    assert main(["launch", "ray", "tiny", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_run_says_that_its_layout_is_another() -> None:
    now = small(mesh__data=2, train__accumulation=2)
    assert resized_note(small(mesh__data=4), now) == (
        "the run goes on in another layout: mesh.data 4 -> 2, train.accumulation 1 -> 2; "
        "train.batch=8 and the order of the data stay"
    )
    assert not resized_note(now, now)
