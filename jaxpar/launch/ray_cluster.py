"""A cluster of Ray that this process is connected to, or has started on this machine."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.launch.preemption import Place, Stops

if TYPE_CHECKING:
    from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]

_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    # a process that reports a row waits until Ray has read the one before
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the behaviour that Ray's warning says will come
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    # of a cluster that is started here: at Ray's 15 a training waits for whatever else runs
    "RAY_worker_niceness": "0",
}


class Cluster(NamedTuple):
    """A cluster of Ray that this process is connected to."""

    ray: Any
    """The module, with `ray.train` and `ray.tune`."""
    records: str
    """A folder for what Ray writes, which is removed at the end."""
    lines: Queue
    """What is put there, anywhere in the cluster, is a line on this screen."""
    stops: Stops
    """What this process is told, and where the processes are that are to be told of it."""


@contextmanager
def ray_started(address: str, cpus: int = 0) -> Iterator[Cluster]:
    """Connect to a cluster of Ray, or start one on this machine, and leave it at the end.

    Ray's own log is kept from the screen.

    Args:
      address: the cluster's, as `ray.init` takes it; empty = $RAY_ADDRESS, or this machine if that
        is not set.
      cpus: how many processes shall have a place on this machine.

    Yields:
      The cluster.

    Raises:
      UserError: Ray is not installed, or the cluster cannot be reached.
    """
    for key, value in _SETTINGS.items():
        os.environ.setdefault(key, value)
    try:
        import ray.train  # pyright: ignore[reportMissingImports]
        import ray.tune  # pyright: ignore[reportMissingImports]
        from ray.util.queue import Queue  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            NodeAffinitySchedulingStrategy,
        )
    except ImportError as error:
        raise UserError(f"this needs Ray, and {error}: pip install 'jaxpar[ray]'") from error
    address = address or os.environ.get("RAY_ADDRESS", "local")
    with tempfile.TemporaryDirectory() as folder:
        if address == "local":
            here = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        else:
            here = {}
        # or Ray reads all that libtpu has ever logged on this machine
        os.environ.setdefault("TPU_LOG_DIR", folder)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except ConnectionError as error:
            raise UserError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from error
        try:
            # it lives where this process does, also where the head has no CPU for it: another node
            # may go away
            here_only = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), False
            )
            lines = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here_only})
            stops = Stops()
            printing = Thread(target=_print_lines, args=(lines, stops), daemon=True)
            printing.start()
            yield Cluster(ray, folder, lines, stops)
            lines.put(None)
            printing.join()
        finally:
            ray.shutdown()


def _print_lines(lines: Queue, stops: Stops) -> None:
    """Print what processes say until one says None, or Ray ends, and note where they are."""
    out = console()
    while True:
        try:
            line = lines.get()
        except Exception:
            return
        if line is None:
            return
        if isinstance(line, Place):
            stops.place = line if line.pid else None
        else:
            out.print(line)


@contextmanager
def room_requested(needed: Mapping[str, float], processes: int) -> Iterator[None]:
    """Ask a cluster that grows for room for so many processes, until the end.

    Ray keeps the request until another is made, so it is taken back by the thread that a signal
    ends too, not by the one that trains.

    Args:
      needed: what each process has, by the resource's name.
      processes: how many they are.
    """
    from ray.autoscaler.sdk import request_resources  # pyright: ignore[reportMissingImports]

    request_resources(bundles=[dict(needed)] * processes)
    try:
        yield
    finally:
        request_resources(bundles=[])
