"""How many processes a run may have: the config of each number, and the choice among them before
each start.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxpar.base.config import CompilerConfig, Config, KernelsConfig, incompatible_changes
from jaxpar.base.errors import Say, UserError
from jaxpar.base.layout.mesh import MeshSpec, axis_sizes, describe, devices_needed, resolve
from jaxpar.base.process.runtime import start
from jaxpar.rehearse.targets import Target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment


class Sizes(NamedTuple):
    """The numbers of processes with which a run can go on.

    Attributes:
      fewest: the smallest number that was asked for.
      most: the largest.
      configs: the config of each number that can serve, the largest first.
      refused: why the others cannot.
    """

    fewest: int
    most: int
    configs: dict[int, Config]
    refused: dict[int, str]

    def largest(self, places: int) -> int:
        """Return the largest number that can serve where there is room for so many processes; 0 =
        none can.
        """
        return max((size for size in self.configs if size <= places), default=0)

    def describe(self, size: int) -> str:
        """Say what a number of processes runs as: `mesh data=2, train.accumulation=2`."""
        config = self.configs[size]
        sizes = {axis: count for axis, count in axis_sizes(config.mesh).items() if count != 1}
        mesh = describe(sizes) if sizes else "of 1 device"
        return f"mesh {mesh}, train.accumulation={config.train.accumulation}"


def read_range(text: str) -> tuple[int, int]:
    """Read `1:4`, the fewest and the most processes of a run.

    Raises:
      UserError: they are no such numbers.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(
            f"--elastic is {text!r}: give the fewest and the most processes, such as --elastic 1:4"
        )
    return int(found[1]), int(found[2])


def elastic_sizes(
    config: Config,
    fewest: int,
    most: int,
    target: Target | None = None,
    at_size: Mapping[int, Config] | None = None,
) -> Sizes:
    """Make the config of each number of processes, and look which of them can serve.

    The mesh axis of -1 takes the devices that there are. On simulated CPU devices each process has
    as many as the other axes multiply to; a mesh without such an axis keeps its devices, which the
    processes share. `train.batch` stays, and so does the order of the data. Where fewer devices
    would each have more sequences of a microbatch than with the most processes,
    `train.accumulation` grows until they have not, so that activations need no more memory than
    before; not with experts or dropout, which would give another answer.

    Args:
      config: the experiment, whose mesh is over all processes.
      target: the GPU nodes to run on, one for each of the most processes; None = CPU devices.
      at_size: the config of some numbers of processes, used as it is.

    Returns:
      The numbers that can serve, with their configs.

    Raises:
      UserError: the target is of TPUs or has another number of hosts, `at_size` names a number that
        is outside or makes another experiment, or no number can serve.
    """
    given = at_size or {}
    for size, own in given.items():
        if not fewest <= size <= most:
            raise UserError(f"--at-size {size} is not among the processes of {fewest}:{most}")
        if changes := incompatible_changes(config, own):
            raise UserError(
                f"--at-size {size} makes another experiment ({changes[0]}): only the layout may "
                "change, as mesh and train.accumulation"
            )
    _require_nodes(target, most)
    counts = dict[int, int]()
    configs = dict[int, Config]()
    refused = dict[int, str]()
    fits = 0  # sequences of a microbatch that a device is known to hold
    for size in range(most, fewest - 1, -1):
        try:
            counts[size] = _device_count(given.get(size, config).mesh, size, target)
        except UserError as error:
            refused[size] = str(error)
    devices = start(MeshSpec(platform="cpu", data=max(counts.values(), default=1)))
    for size, count in counts.items():
        own = given.get(size, config)
        try:
            made = _experiment(own, size, devices[:count], 0 if size in given else fits)
        except UserError as error:
            refused[size] = str(error)
            continue
        fits = fits or _sequences(made)
        mesh = replace(own.mesh, **axis_sizes(made.config.mesh))
        train = replace(own.train, accumulation=made.config.train.accumulation)
        configs[size] = replace(own, mesh=mesh, train=train)
    if not configs:
        raise UserError(f"no number of processes of {fewest}:{most} can serve: {refused[most]}")
    return Sizes(fewest, most, configs, refused)


def _require_nodes(target: Target | None, most: int) -> None:
    """Refuse a target that does not lose one host at a time, or that has another number of them."""
    if target is None:
        return
    if target.platform == "tpu":
        raise UserError(
            f"--elastic is for processes on CPUs and on GPU nodes: {target.name} loses whole "
            "slices, so leave it out"
        )
    if target.hosts != most:
        raise UserError(f"{target.name} has {target.hosts} nodes: give --elastic N:{target.hosts}")


def _experiment(config: Config, size: int, devices: list[jax.Device], fits: int) -> Experiment:
    """Make the experiment of a number of processes, on simulated devices, to see whether it can
    serve; `fits` sequences at most are on a device at a time, 0 = as many as come.

    Raises:
      UserError: it cannot.
    """
    count = len(devices)
    sizes = resolve(config.mesh, count, f"{_count_text(size)} have {count}")
    mesh = replace(config.mesh, platform="cpu", distributed=False, **sizes)
    # kernels and compiler are those of the hardware, and divide nothing
    config = replace(config, mesh=mesh, kernels=KernelsConfig(), compiler=CompilerConfig())
    made = make_experiment(config, devices)
    # experts are balanced, and dropout is drawn, for a microbatch: another one is another answer
    keeps = config.model.experts > 0 or config.model.dropout > 0
    if keeps or not fits or _sequences(made) <= fits:
        return made
    batch = config.train.batch
    for accumulation in range(config.train.accumulation + 1, batch + 1):
        if batch % accumulation:
            continue
        train = replace(config.train, accumulation=accumulation)
        try:
            made = make_experiment(replace(config, train=train), devices)
        except UserError:
            continue
        if _sequences(made) <= fits:
            return made
    raise UserError(
        f"train.batch={batch} does not split into microbatches of {fits} sequences a device on "
        f"{count} devices: give this number its own --at-size"
    )


def _device_count(mesh: MeshSpec, size: int, target: Target | None) -> int:
    """The devices that so many processes have together."""
    if target is not None:
        return target.device_count // target.hosts * size
    if -1 in axis_sizes(mesh).values():
        return devices_needed(mesh) * size
    if devices_needed(mesh) % size:
        raise UserError(
            f"{size} processes do not divide the {devices_needed(mesh)} devices of the mesh: give "
            "one axis -1, as in mesh.data=-1"
        )
    return devices_needed(mesh)


def _count_text(size: int) -> str:
    return "1 process" if size == 1 else f"{size} processes"


def _sequences(experiment: Experiment) -> int:
    """How many sequences a device has at a time."""
    return experiment.sequences // experiment.plan.size("batch")


def fit_elastic(
    make_trainer: Callable[[int], Any],
    sizes: Sizes,
    count_places: Callable[[bool], int],
    max_failures: int,
    join_seconds: float,
    say: Say,
) -> Any:
    """Train with as many processes as there is room for, and again after each failure.

    The places are counted before each start, and the largest number that can serve is taken. The
    first start waits for the most. While processes run, nothing is changed.

    Args:
      make_trainer: makes Ray's trainer of a number of processes, which starts them once.
      sizes: the numbers that can serve.
      count_places: counts the places of the cluster; with True those that nobody has.
      max_failures: how many failures are followed by another start.
      join_seconds: how long the first start waits for the most.
      say: gets a line where the number changes, or is waited for.

    Returns:
      What the trainer's `fit` returned.

    Raises:
      ray.train.TrainingFailedError: they failed more often, or could not begin.
    """
    from ray.train import TrainingFailedError  # pyright: ignore[reportMissingImports]

    until = time.monotonic() + join_seconds
    failures = 0
    before = 0
    free_only = False
    while True:
        places = partial(count_places, free_only)
        size = _wait_for_room(sizes, before, places, until, say)
        try:
            return make_trainer(size).fit()
        except TrainingFailedError as error:
            free_only = _had_no_room(error)
            if free_only:  # as if it had not been tried
                continue
            failures += 1
            before = size
            could_not_begin = hasattr(error, "controller_failure")
            if could_not_begin or failures > max_failures:
                raise


def _wait_for_room(
    sizes: Sizes, before: int, count_places: Callable[[], int], until: float, say: Say
) -> int:
    """Wait until a number of processes that can serve has room, and return it.

    Args:
      sizes: the numbers that can serve.
      before: the number of the last start that had room; 0 = there was none.
      until: until when the first start waits for the most, by `time.monotonic`.
    """
    said = ""
    while True:
        places = min(count_places(), sizes.most)
        size = sizes.largest(places)
        wanted = min(sizes.configs)
        if not before and time.monotonic() < until:
            wanted = max(sizes.configs)
        if size >= wanted:
            break
        line = f"waiting for {_count_text(wanted)}: the Ray cluster has room for {places}"
        if line != said:
            say(line)
        said = line
        time.sleep(1)
    if size < places:
        say(f"{_count_text(places)} have room and cannot serve ({sizes.refused[places]})")
    if size != before:
        instead = f" in place of {before}" if before else ""
        say(f"{_count_text(size)}{instead}: {sizes.describe(size)}")
    return size


def _had_no_room(error: Exception) -> bool:
    """Whether processes could not be placed in time, as on a node that had just gone and was still
    counted. Ray has no public names for these two.
    """
    failure = type(getattr(error, "controller_failure", None)).__name__
    return failure in ("WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError")


def count_places(ray: Any, needed: Mapping[str, float], free_only: bool) -> int:
    """Count the processes that a cluster of Ray has room for.

    Args:
      needed: what each process has, by the resource's name.
      free_only: whether what others have is left out. Of the nodes together, that is: which node
        has it, Ray does not say.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = sum(_times(needed, node) for node in nodes)
    if free_only:
        places = min(places, _times(needed, ray.available_resources()))
    return places


def _times(needed: Mapping[str, float], there: Mapping[str, float]) -> int:
    return int(min(there.get(kind, 0) // count for kind, count in needed.items()))
