"""The numbers of processes that a run may have: the mesh and the microbatches of each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.launch.elastic import Sizes, count_places, elastic_sizes, fit_elastic, read_range
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


def node(alive: bool = True, **has: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": has}


@pytest.mark.parametrize(
    ("needed", "free_only", "places"),
    [
        ({"CPU": 1}, False, 7),
        ({"CPU": 1}, True, 5),
        ({"GPU": 8}, False, 1),  # eight of one node, not four of each of two
        ({"GPU": 8}, True, 0),
        ({"GPU": 4, "CPU": 2}, False, 3),
        ({"TPU": 4}, False, 0),
    ],
)
def test_places_are_those_of_the_nodes_that_are_there(
    needed: dict[str, float], free_only: bool, places: int
) -> None:
    nodes = [node(CPU=4.0, GPU=8.0), node(CPU=3.0, GPU=4.0), node(False, CPU=9.0, GPU=9.0)]
    free = {"CPU": 5.0, "GPU": 4.0}
    ray = SimpleNamespace(nodes=lambda: nodes, available_resources=lambda: free)
    assert count_places(ray, needed, free_only) == places


class Cluster:
    """A cluster whose places and failures are told beforehand, one after another."""

    def __init__(self, places: list[int], failures: list[Exception | None]):
        self.places = places
        self.failures = failures
        self.counted_free: list[bool] = []
        self.started: list[int] = []
        self.said: list[str] = []

    def count(self, free_only: bool) -> int:
        self.counted_free.append(free_only)
        return self.places.pop(0)

    def trainer(self, size: int) -> SimpleNamespace:
        def fit() -> str:
            self.started.append(size)
            failure = self.failures.pop(0)
            if failure is not None:
                raise failure
            return "done"

        return SimpleNamespace(fit=fit)

    def fit(self, max_failures: int, join_seconds: float = 60.0) -> str:
        sizes = elastic_sizes(small(), 1, 4)
        return fit_elastic(
            self.trainer, sizes, self.count, max_failures, join_seconds, self.said.append
        )


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exception]:
    """Ray's failures: of processes, or of what its controller met, by the name of its class."""
    train = pytest.importorskip("ray.train")
    # the names that no public module has: gone with a version of Ray, they fail here
    own = pytest.importorskip("ray.train.v2._internal.exceptions")
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def make(controller: str = "") -> Exception:
        if not controller:
            return train.WorkerGroupError("gone", {0: RuntimeError("gone")})
        if controller.startswith("WorkerGroup"):
            kind = getattr(own, controller)
            return train.ControllerError(kind.__new__(kind))
        return train.ControllerError(ModuleNotFoundError("mine"))

    return make


def test_each_start_takes_the_largest_number_that_has_room(failures) -> None:
    lost, no_room = failures(), failures("WorkerGroupStartupTimeoutError")
    cluster = Cluster([2, 4, 3, 4, 1, 9], [lost, lost, no_room, lost, None])
    assert cluster.fit(max_failures=3) == "done"
    assert cluster.started == [4, 2, 4, 1, 4]
    # after a start that found no room, what others have is left out
    assert cluster.counted_free == [False, False, False, False, True, False]
    assert cluster.said == [
        "waiting for 4 processes: the Ray cluster has room for 2",
        "4 processes: mesh data=4, train.accumulation=1",
        f"3 processes have room and cannot serve ({elastic_sizes(small(), 1, 4).refused[3]})",
        "2 processes in place of 4: mesh data=2, train.accumulation=2",
        "4 processes in place of 2: mesh data=4, train.accumulation=1",
        "1 process in place of 2: mesh of 1 device, train.accumulation=4",
        "4 processes in place of 1: mesh data=4, train.accumulation=1",
    ]


@pytest.mark.parametrize(
    "no_room", ["WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError"]
)
def test_a_first_start_that_found_no_room_still_waits_for_the_most(failures, no_room: str) -> None:
    cluster = Cluster([4, 2, 2, 4], [failures(no_room), None])
    assert cluster.fit(max_failures=0) == "done"
    assert cluster.started == [4, 4]
    assert cluster.counted_free == [False, True, True, True]
    assert "waiting for 4 processes: the Ray cluster has room for 2" in cluster.said


def test_the_first_start_waits_no_longer_than_it_may_and_a_later_one_until_one_can_serve(
    failures,
) -> None:
    cluster = Cluster([2, 0, 0, 1], [failures(), None])
    assert cluster.fit(max_failures=1, join_seconds=0.0) == "done"
    assert cluster.started == [2, 1]
    assert cluster.said.count("waiting for 1 process: the Ray cluster has room for 0") == 1


def test_what_fails_too_often_or_cannot_begin_is_raised(failures) -> None:
    lost = failures()
    cluster = Cluster([4] * 3, [lost] * 3)
    with pytest.raises(type(lost)):
        cluster.fit(max_failures=2)
    assert cluster.started == [4, 4, 4]
    broken = failures("ModuleNotFoundError")
    cluster = Cluster([4], [broken])
    with pytest.raises(type(broken)):
        cluster.fit(max_failures=2)
