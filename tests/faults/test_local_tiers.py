"""Checkpoints in two tiers, in the run folder and on the disk of a machine: the newest that is whole
is taken, and said, and a run that is killed or loses a tier ends as one that was not.

`python tests/faults/test_local_tiers.py --trials 100` is the long form of the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

STEPS = 20
FLAGS = [
    "--mesh.platform=cpu",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--data.max-bytes=200000",
    "--train.batch=8",
    "--train.warmup-steps=1",
    "--train.eval-every=0",
    "--train.eval-batches=1",
    "--train.final-eval-batches=1",
    "--checkpoint.every=8",
    "--checkpoint.keep=1",
    "--checkpoint.local-every=3",
    "--metrics.log-every=1",
]
BEGIN = re.compile(r"goes on after step (\d+) of (checkpoint\.local)?")


def local_of(run: Path) -> Path:
    return run.with_name(f"{run.name}_local")


def start(
    run: Path, *flags: str, processes: int = 1, local: bool = True
) -> list[subprocess.Popen[str]]:
    """Begin a training, or go on with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "jaxpar.cli.main", "train", "tiny", f"--run={run}", *FLAGS]
    command += [f"--mesh.fsdp={processes}", "--mesh.data=1", "--mesh.tensor=1"]
    command += [f"--mesh.distributed={processes > 1}", *flags]
    if local:
        command.append(f"--checkpoint.local={local_of(run)}")
    else:
        command = [word for word in command if "local-every" not in word]
    begun = []
    for index in range(processes):
        environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"}
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(index),
            }
        begun.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        )
    return begun


def train(run: Path, *flags: str, processes: int = 1, local: bool = True) -> str:
    """Train to the end, and return what was said."""
    said = [
        process.communicate(timeout=300)[0]
        for process in start(run, *flags, processes=processes, local=local)
    ]
    assert all("Traceback" not in text and "done in" in said[0] for text in said), said
    return " ".join("".join(said).split())


def newest(checkpoints: Path) -> int:
    """The newest step of a folder that has its manifest; 0 = none."""
    found = [0]
    for file in checkpoints.glob("*/manifest.json"):
        if file.parent.name.isdecimal():
            found.append(json.loads(file.read_text())["step"])
    return max(found)


def final(run: Path) -> list[np.ndarray]:
    """All parameters at the end of a run."""
    import jax

    from jaxpar.train.experiments import make_experiment
    from jaxpar.train.restore import load_run
    from jaxpar.train.runs.folder.run_folder import read_run_config

    config = read_run_config(run)
    experiment = make_experiment(_on_one_device(config), jax.devices()[:1])
    step, params = load_run(run, STEPS, experiment)
    assert step == STEPS
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def _on_one_device(config):
    from dataclasses import replace

    return replace(config, mesh=replace(config.mesh, fsdp=1, distributed=False))


def require_equal(run: Path, wanted: Path) -> None:
    """Compare the ends of two runs in every bit."""
    for one, other in zip(final(run), final(wanted), strict=True):
        assert one.tobytes() == other.tobytes()


def train_with_kills(run: Path, kills: int, draw: random.Random) -> tuple[int, int]:
    """Train a run to its end, and kill it so often before, at random times after its first row.
    Whenever it goes on, it is with the newest step that is whole.

    Returns:
      How often it was killed, and how often it went on from the local tier.
    """
    killed = 0
    from_local = 0
    while True:
        here = newest(local_of(run) / "0" / "checkpoints")
        there = newest(run / "checkpoints")
        (process,) = start(run, f"--train.steps={STEPS}")
        if killed < kills:
            log = run / "metrics.jsonl"
            before = log.stat().st_mtime_ns if log.exists() else 0
            # `before` changes when the log is opened
            while process.poll() is None:
                if log.exists() and log.stat().st_mtime_ns != before:
                    break
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.8))
            process.kill()
        said = " ".join(process.communicate(timeout=300)[0].split())
        assert "Traceback" not in said and "damaged" not in said, said
        begun = BEGIN.search(said)
        if begun:
            assert int(begun[1]) == max(here, there), said
            assert bool(begun[2]) == (here > there), said
            from_local += bool(begun[2])
        if process.returncode >= 0:
            assert process.returncode == 0, said
            return killed, from_local
        killed += 1


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_newest_step_of_both_tiers_to_the_bit(tmp_path: Path) -> None:
    train(tmp_path / "whole", f"--train.steps={STEPS}", local=False)
    killed, _ = train_with_kills(tmp_path / "run", 2, random.Random(0))
    assert killed >= 1
    require_equal(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_local_step_with_a_flipped_bit_is_said_and_another_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, f"--train.steps={STEPS}", "--train.stop-at=13", "--checkpoint.keep=2")
    shutil.rmtree(run / "checkpoints" / "13")
    assert newest(run / "checkpoints") == 8
    local = local_of(run) / "0" / "checkpoints"
    for step, taken in ((12, "step 9 of checkpoint.local="), (9, "step 8 of ")):
        for file in (local / str(step) / "state").rglob("*"):
            if file.is_file() and file.stat().st_size > 1000:
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
        # a copy, as what was taken first is not to be gone on from
        copy = tmp_path / f"copy_{step}"
        shutil.copytree(run, copy)
        shutil.copytree(local_of(run), local_of(copy))
        said = train(copy, f"--train.steps={STEPS}", "--checkpoint.keep=2")
        assert f"/{step} is damaged (" in said and f"goes on after {taken}" in said, said
    require_equal(tmp_path / "copy_12", tmp_path / "copy_9")


@pytest.mark.long
def test_of_two_processes_that_train_one_loses_its_local_tier(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = (f"--train.steps={STEPS}", "--checkpoint.keep=2")
    train(run, *flags, "--train.stop-at=13", processes=2)
    shutil.rmtree(run / "checkpoints" / "13")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.copytree(local_of(run), local_of(copy))
    said = train(run, *flags, processes=2)
    assert "goes on after step 12 of checkpoint.local=" in said, said
    shutil.rmtree(local_of(copy) / "1")
    said = train(copy, *flags, processes=2)
    assert re.search(r"goes on after step 8 of .* has none .* of process 1", said), said
    require_equal(run, copy)


def save_and_lose(folder: Path) -> None:
    """What one of two processes does, without a training: save two steps, go on from the second,
    and look again once the second process has lost it. Prints what it finds.
    """
    import jax

    from jaxpar.base.config import CheckpointConfig
    from jaxpar.base.layout.mesh import MeshSpec, make_mesh
    from jaxpar.base.process.runtime import start as start_jax
    from jaxpar.train.runs.local_tier import LocalTier, note_start

    spec = MeshSpec(data=2, platform="cpu", distributed=True)
    mesh = make_mesh(spec, start_jax(spec))
    rows = np.arange(8.0, dtype=np.float32)
    shardings = {
        name: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
        for name, axis in (("split", "data"), ("on_both", None))
    }

    def state(times: int) -> dict[str, jax.Array]:
        return {
            name: jax.make_array_from_callback((8,), sharding, lambda at: times * rows[at])
            for name, sharding in shardings.items()
        }

    def open_tier() -> LocalTier:
        return LocalTier(str(folder / "local"), folder / "run", shapes, None)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(1)
    )
    tier = open_tier()
    tier.open(0, CheckpointConfig(), {})
    if jax.process_index() == 0:
        note_start(folder / "run", 0)
    for step in (2, 4):
        tier.checkpoints.save(step, state(step), {"place": step})
    tier.checkpoints.close()
    tier.release()
    tier = open_tier()
    tier.open(4, CheckpointConfig(), {})
    for array in tier.checkpoints.restore(4, shapes).values():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, 4 * rows[shard.index])
    print(tier.steps, tier.checkpoints.data(4), flush=True)
    tier.checkpoints.close()
    tier.release()
    if jax.process_index() == 1:
        shutil.rmtree(folder / "local" / "1" / "checkpoints" / "4")
    tier = open_tier()
    tier.open(2, CheckpointConfig(), {})
    print(tier.steps, tier.checkpoints.steps(), flush=True)
    tier.checkpoints.close()
    tier.release()


@pytest.mark.slow
def test_of_two_processes_one_loses_its_newest_local_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, "--save-and-lose", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    for text in said:
        assert "[2, 4] {'place': 4}\n[2] [2]" in text, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100, help="kills in all")
    parser.add_argument("--kills", type=int, default=4, help="kills of each run")
    parser.add_argument("--save-and-lose", type=Path)
    args = parser.parse_args()
    if args.save_and_lose:
        save_and_lose(args.save_and_lose)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        train(whole, f"--train.steps={STEPS}", local=False)
        total = 0
        local = 0
        number = 0
        while total < args.trials:
            run = Path(folder) / f"run{number}"
            killed, from_local = train_with_kills(run, args.kills, random.Random(number))
            require_equal(run, whole)
            total += max(killed, 1)
            local += from_local
            number += 1
            print(f"run {number}: {killed} kills, equal to the bit", flush=True)
    print(f"{total} kills in {number} runs, {local} times the local tier was newer; all equal")


if __name__ == "__main__":
    main()
