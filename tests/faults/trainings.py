"""What the loops of this folder share: a training that is so small that it takes seconds, started as
one process or as several that meet, and how the ends of two trainings are compared.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

# the loops read what the trainings wrote, on whatever machine they run
os.environ.setdefault("JAX_PLATFORMS", "cpu")

ONE_DEVICE = ["--mesh.data=1", "--mesh.fsdp=1", "--mesh.tensor=1"]
SMALL = [
    "--mesh.platform=cpu",
    *ONE_DEVICE,
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--train.batch=8",
    "--train.warmup-steps=1",
]
"""The smallest model of the preset `tiny` that is worth a checkpoint. What comes later in a command
line counts, so a test may set any of it anew."""
TEXT = ["--data.max-bytes=200000"]
"""The preset's own text, of which little is tokenized."""
PROGRAM = ("-m", "jaxpar.cli.main")
PIPE = subprocess.PIPE


def token_file(file: Path) -> list[str]:
    """Write a file of random token ids; return the flags that have it trained on."""
    ids = np.random.default_rng(0).integers(0, 200, 40_000).astype(np.uint16)
    ids.tofile(file)
    return ["--data.source=tokens", f"--data.path={file}", "--data.val-fraction=0.1"]


def free_address() -> str:
    """An address of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def identities(processes: int) -> list[dict[str, str]]:
    """What the environment says to each of the processes of one run, so that they meet; nothing
    where there is one.
    """
    if processes == 1:
        return [{}]
    shared = {
        "JAX_COORDINATOR_ADDRESS": free_address(),
        "JAX_NUM_PROCESSES": str(processes),
    }
    return [shared | {"JAX_PROCESS_ID": str(index)} for index in range(processes)]


def start(
    run: str | Path,
    flags: Sequence[str],
    processes: int = 1,
    program: Sequence[str] = PROGRAM,
    environment: Mapping[str, str] = os.environ,
    stdout: int = PIPE,
    stderr: int = PIPE,
) -> list[subprocess.Popen[str]]:
    """Begin a training, or go on with it.

    Args:
      run: its folder, or URL.
      flags: those of `jaxpar train tiny`; the last of one name counts.
      processes: how many there are, each with one device; all but one divide the batch.
      program: what Python runs in place of `jaxpar`.
      environment: that of each process. Compiled programs are kept, as a user's are.
      stdout: where each prints to.
      stderr: where each says what is wrong.

    Returns:
      The processes, the first of the run first.
    """
    command = [sys.executable, *program, "train", "tiny", f"--run={run}", *flags]
    if processes > 1:
        command += [f"--mesh.data={processes}", "--mesh.distributed=True"]
    kept = {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    return [
        subprocess.Popen(
            command,
            env={**environment, **kept, **identity},
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        for identity in identities(processes)
    ]


class End(NamedTuple):
    """What a run came to.

    Attributes:
      step: its last.
      losses: each loss in its metrics, by its step and name.
      arrays: all of the state of its last step, by name.
    """

    step: int
    losses: dict[tuple[int, str], float]
    arrays: dict[str, np.ndarray]


LOSSES = ("loss", "val_loss", "final_val_loss")


def end_of(run: str | Path) -> End:
    """Read what a run came to, on one device, from its folder or its bucket."""
    import jax

    from jaxpar.base.config import override
    from jaxpar.base.layout.sharding import path_name
    from jaxpar.train.experiments import make_experiment
    from jaxpar.train.metrics import read_metrics
    from jaxpar.train.restore import restore_state
    from jaxpar.train.runs.bucket import folder_here
    from jaxpar.train.runs.checkpoints import Checkpoints
    from jaxpar.train.runs.folder.run_folder import finished_steps, read_run_config

    folder = folder_here(str(run))
    alone = {"mesh.data": 1, "mesh.distributed": False}
    experiment = make_experiment(override(read_run_config(folder), alone), jax.devices()[:1])
    step = finished_steps(folder)[-1]
    state, _ = restore_state(Checkpoints(folder / "checkpoints"), step, experiment)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {path_name(path): np.asarray(leaf) for path, leaf in leaves}
    losses = {
        (row["step"], name): row[name]
        for row in read_metrics(folder)
        for name in LOSSES
        if name in row
    }
    return End(step, losses, arrays)


def differences(found: End, wanted: End) -> list[str]:
    """Say how the end of a run differs from that of another: in its step, a loss, or any bit."""
    said = []
    if found.step != wanted.step:
        said.append(f"it ended at step {found.step}, and not at {wanted.step}")
    losses = found.losses.items() ^ wanted.losses.items()
    if losses:
        said.append(f"its metrics differ in {sorted({place for place, _ in losses})}")
    names = found.arrays.keys() ^ wanted.arrays.keys()
    unlike = [
        name
        for name in found.arrays.keys() & wanted.arrays.keys()
        if found.arrays[name].tobytes() != wanted.arrays[name].tobytes()
    ]
    if names or unlike:
        said.append(f"arrays that differ: {sorted([*names, *unlike])}")
    return said
