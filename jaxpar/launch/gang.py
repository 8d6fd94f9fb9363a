"""Several processes of one run under Ray Train, which starts all of them again when one has
died.
"""

from __future__ import annotations

import io
import math
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import jax

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import RESOLVED, Config, parse
from jaxpar.base.config.checks import check
from jaxpar.base.console import console
from jaxpar.base.errors import UserError, require_local
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.base.process.multihost import run_together
from jaxpar.base.process.runtime import start
from jaxpar.base.toml import to_toml
from jaxpar.launch.elastic import Sizes, count_places, elastic_sizes, fit_elastic, read_range
from jaxpar.launch.local import train_config
from jaxpar.launch.preemption import NOWHERE, fit, say_where
from jaxpar.launch.ray_cluster import Cluster, ray_started, room_requested
from jaxpar.rehearse.targets import Target, check_mesh
from jaxpar.train.guard.failures import CopiesDiffer, PeerLost
from jaxpar.train.hooks import OnRow

if TYPE_CHECKING:
    from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]


class ProcessesFailed(UserError):
    """The processes failed more often than they may start again."""


def launch(
    config: Config,
    folder: Path,
    workers: int = 0,
    target: Target | None = None,
    max_failures: int = 0,
    address: str = "",
    elastic: str = "",
    at_size: Mapping[int, Config] | None = None,
) -> dict[str, Any]:
    """Train a config in several processes, which start again together from the last checkpoint when
    one has died.

    Args:
      config: the experiment. Its mesh is over all processes.
      folder: the run folder, on storage that all hosts share.
      workers: processes on simulated CPU devices. With a target there is one for each of its hosts.
      target: the TPU slices or GPU nodes of the cluster to run on; None = CPU.
      max_failures: how often they start again after a crash. What the user must mend is not tried
        again.
      address: see `ray_started`.
      elastic: the fewest and the most processes, `1:4`: they start again with as many as there is
        room for (see `jaxpar.launch.elastic`); empty = as many as before.
      at_size: the config of some of these numbers of processes.

    Returns:
      The step that the run reached, its last losses, and whether it was told to stop, as the first
      process returned them to Ray.

    Raises:
      ProcessesFailed: they failed more often than `max_failures`.
      KeyboardInterrupt, SystemExit: it was told to stop where there was nothing to save.
      UserError: `check` refuses the config, its mesh is not the target's or does not divide over
        the workers, no number of `elastic` can serve, Ray is not there (see `ray_started`), or the
        run ended with one (see `jaxpar.train.run`).
    """
    require_local(folder)
    config = check(_over_processes(config, target))
    if elastic:
        fewest, most = read_range(elastic)
        own = {size: _over_processes(other, target) for size, other in (at_size or {}).items()}
        sizes = elastic_sizes(config, fewest, most, target, own)
        for size, why in sizes.refused.items():
            console().print(f"{size} processes cannot serve: {why}")
        places = _places(target, most)
    else:
        _require_processes(config, workers, target)
        sizes = None
        most = workers
        places = _places(target, workers)
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_started(address, most))
        # the mark is the name of a file that all processes must see
        job = {**job_of(config, folder), "mark": uuid4().hex, "lines": cluster.lines}
        if sizes is None:
            _say_what_is_missing(cluster, places)
            train = _trainer(cluster, job, places, {"max_failures": max_failures}).fit
        else:
            train = _elastic(cluster, job, places, max_failures, sizes, config.mesh.join_seconds)
            stack.enter_context(room_requested(_needed(places), most))
        try:
            found = fit(cluster.ray, train, cluster.stops).return_value or {}
        except cluster.ray.train.TrainingFailedError as error:
            raise _failed(error, max_failures) from error
    if "error" in found:
        error = UserError(found["error"])
        error.exit_code = found["exit_code"]
        raise error
    return found


def _failed(error: Exception, max_failures: int) -> ProcessesFailed:
    """What to say where the processes may not start again, with the exit code of what they met."""
    if (failure := getattr(error, "controller_failure", None)) is not None:
        # met before a process trains, as a module that cannot be imported: not tried again
        failed = ProcessesFailed(f"the processes could not begin: {_last_line(failure)}")
        failed.exit_code = 1
        return failed
    told = getattr(error, "worker_failures", {}).values()
    # Ray wraps what its look at a process has met
    found = [getattr(failure, "health_check_failure", failure) for failure in told]
    said = f"the processes failed, and {max_failures} restarts were allowed"
    code = 1
    if any(isinstance(failure, CopiesDiffer) for failure in found):
        code = CopiesDiffer.exit_code
        said += ": a device computes wrongly, leave it out"
    elif any(isinstance(failure, PeerLost) or _has_ended(failure) for failure in found):
        code = PeerLost.exit_code
        said += ": the same command goes on from the last checkpoint"
    failed = ProcessesFailed(said)
    failed.exit_code = code
    return failed


def _last_line(error: Exception) -> str:
    """The last line of what an error says: of one that Ray hands on, what was raised there."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _has_ended(failure: Exception) -> bool:
    """Whether a failure is Ray's word for a process that is gone."""
    from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

    return isinstance(failure, RayError)


def _over_processes(config: Config, target: Target | None) -> Config:
    """The config with a mesh over all processes, of the target's devices or of CPU devices."""
    if target is None:
        platform = "cpu"
    elif target.platform == "tpu":
        platform = "tpu"
    else:
        platform = "gpu"
    return replace(config, mesh=replace(config.mesh, platform=platform, distributed=True))


def _require_processes(config: Config, workers: int, target: Target | None) -> None:
    """Refuse a mesh that is not the target's, or that does not divide over the workers."""
    if target is not None:
        check_mesh(config.mesh, target)
        return
    if workers < 1:
        raise UserError(
            "how many processes? --workers 2 for CPU devices of a mesh, or --target for TPUs or "
            "GPUs"
        )
    devices = devices_needed(config.mesh)
    if devices % workers:
        raise UserError(f"--workers {workers} does not divide the {devices} devices of the mesh")


def _say_what_is_missing(cluster: Cluster, places: Mapping[str, Any]) -> None:
    """Say what a cluster has too few of; it may be one that grows."""
    for kind, count in _needed(places).items():
        needed = count * places["num_workers"]
        here = int(cluster.ray.cluster_resources().get(kind, 0))
        if here < needed:
            cluster.lines.put(f"waiting for {needed} {kind}s: the Ray cluster has {here}")


def _trainer(
    cluster: Cluster,
    job: Mapping[str, Any],
    places: Mapping[str, Any],
    failures: Mapping[str, int],
) -> Any:
    """Ray's trainer of a job, with the processes of `_places`.

    Args:
      cluster: where they are to be.
      job: what each of them needs.
      places: how many they are, and what each has.
      failures: how often Ray may start them again, in the words of `ray.train.FailureConfig`.
    """
    from ray.train.v2.jax import JaxTrainer  # pyright: ignore[reportMissingImports]

    train = cluster.ray.train
    return JaxTrainer(
        train_loop_per_worker=_work,
        train_loop_config=dict(job),
        scaling_config=train.ScalingConfig(**places),
        run_config=train.RunConfig(
            storage_path=cluster.records,
            failure_config=train.FailureConfig(**failures),
            callbacks=[_tell_of_failures(cluster.lines)],
        ),
    )


def _elastic(
    cluster: Cluster,
    job: Mapping[str, Any],
    places: Mapping[str, Any],
    max_failures: int,
    sizes: Sizes,
    join_seconds: int,
) -> Callable[[], Any]:
    """Return what trains a job with as many processes as there is room for."""
    # a node that has just gone is still counted, for seconds: then all are counted again
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    needed = _needed(places)
    once = {"max_failures": 0, "controller_failure_limit": 0}

    def make_trainer(size: int) -> Any:
        own = {**job, "config": to_toml(sizes.configs[size], RESOLVED)}
        return _trainer(cluster, own, {**places, "num_workers": size}, once)

    return lambda: fit_elastic(
        make_trainer,
        sizes,
        lambda free_only: count_places(cluster.ray, needed, free_only),
        max_failures,
        join_seconds,
        cluster.lines.put,
    )


def job_of(config: Config, folder: Path) -> dict[str, Any]:
    """Return what a process of Ray needs to train a config.

    Returns:
      A dict of strings, which `read_job` reads there.
    """
    return {
        "config": to_toml(config, RESOLVED),
        "folder": str(folder.absolute()),
        "here": os.getcwd(),
    }


def read_job(job: dict[str, Any]) -> tuple[Config, Path]:
    """Read a job of `job_of`, in the process that does it.

    The process goes where paths of data are relative to, if that is here.

    Returns:
      The config and the run folder.

    Raises:
      UserError: the config is of another version, which this one does not read.
    """
    if Path(job["here"]).is_dir():
        os.chdir(job["here"])
    return parse(job["config"], "the config"), Path(job["folder"])


def _tell_of_failures(lines: Queue) -> Any:
    """Make what Ray calls when processes have failed: it says which, with the last line of what
    they said.
    """
    from ray.train import UserCallback  # pyright: ignore[reportMissingImports]

    class Failures(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            lines.put(NOWHERE)
            for rank, error in sorted(worker_exceptions.items()):
                lines.put(
                    f"process {rank} failed: "
                    f"{str(error).strip().splitlines()[-1].partition('. ')[0][:200]}"
                )

    return Failures()


class _Lines(io.TextIOBase):
    """A standard output whose lines go to a queue."""

    def __init__(self, lines: Queue):
        self._lines = lines
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._lines.put(line)
        return len(text)


def _places(target: Target | None, workers: int) -> dict[str, Any]:
    """Say how many processes there are, and what each has, in the words of
    `ray.train.ScalingConfig`.
    """
    if target is None:
        return {"num_workers": workers}
    name = target.platform.upper().replace("CUDA", "GPU")
    places: dict[str, Any] = {
        "num_workers": target.hosts,
        "resources_per_worker": {name: math.prod(target.host_shape)},
    }
    if name == "GPU":
        return places | {"use_gpu": True}
    kind = "TPU-" + target.vendor_name.partition("-")[0].upper()
    return places | {"use_tpu": True, "topology": target.topology, "accelerator_type": kind}


def _needed(places: Mapping[str, Any]) -> Mapping[str, float]:
    """What each process has of the cluster, by the resource's name."""
    return places.get("resources_per_worker", {"CPU": 1})


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """What each process does; Ray hands the first one's dict back. A mistake of the user's is
    returned, not raised: Ray would start all processes again."""
    import ray.train  # pyright: ignore[reportMissingImports]

    context = ray.train.get_context()
    try:
        config, folder = read_job(job)
    except UserError as error:
        return _mistake(error)
    try:
        if config.mesh.platform == "cpu":
            _say_who(context.get_world_rank(), context.get_world_size())
        start(config.mesh)
        if context.get_world_rank() == 0:
            say_where(job["lines"])
        with redirect_stdout(_Lines(job["lines"])):
            _require_shared(folder, job["mark"])
            result = train_config(config, folder, hooks=[OnRow(_report)])
        return result._asdict()
    except (PeerLost, CopiesDiffer):
        raise  # Ray starts all again
    except UserError as error:
        return _mistake(error)
    finally:
        if config.mesh.platform == "cpu":
            jax.distributed.shutdown()


def _mistake(error: UserError) -> dict[str, Any]:
    """What is returned of a mistake of the user's."""
    return {"error": str(error), "exit_code": error.exit_code}


def _report(step: int, row: Mapping[str, float]) -> None:
    """Give Ray a row of metrics."""
    import ray.train  # pyright: ignore[reportMissingImports]

    ray.train.report({"step": step, **row})


def _say_who(rank: int, count: int) -> None:
    """Set what `base.process.runtime.start` joins by; on TPUs and GPUs Ray has joined the processes
    already.
    """
    from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]
    from ray.util import get_node_ip_address  # pyright: ignore[reportMissingImports]

    address = ""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{get_node_ip_address()}:{free.getsockname()[1]}"
    os.environ["JAX_COORDINATOR_ADDRESS"] = str(broadcast_from_rank_zero(address))
    os.environ["JAX_NUM_PROCESSES"] = str(count)
    os.environ["JAX_PROCESS_ID"] = str(rank)


def _require_shared(folder: Path, mark: str) -> None:
    """Check that all processes see a file that the first writes beside the run folder: `mark` makes
    its name unique.
    """
    file = folder.parent / f".{folder.name}.{mark}"
    first = jax.process_index() == 0

    def look() -> None:
        if not file.exists():
            what = (
                f"host {socket.gethostname()} does not see what process 0 writes in {folder.parent}"
            )
            raise UserError(f"{what}: give --run on storage that all hosts share")

    run_together(lambda: write_whole(file, "") if first else None)
    try:
        run_together(look)
    finally:
        if first:
            file.unlink(missing_ok=True)
