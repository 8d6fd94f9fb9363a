"""A store of one's own goes in where ours do: a run saves in it, goes on from it to the bit, and is
evaluated through it.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strangers.own_store import Files, InMemory
from traced_steps import config_of

from jaxpar.base.config import CheckpointConfig, Config, override
from jaxpar.base.errors import UserError
from jaxpar.train.evaluate import evaluate_folder
from jaxpar.train.experiments import make_experiment
from jaxpar.train.loop import open_run, run
from jaxpar.train.restore import load_run
from jaxpar.train.runs import stores
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

STATE = {"w": jnp.arange(12.0).reshape(3, 4)}
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


@pytest.fixture
def kept() -> dict[int, Files]:
    return {}


def save(folder: Path, kept: dict[int, Files], *steps: int, keep_best: bool = True) -> None:
    config = CheckpointConfig(keep=2, keep_best=keep_best)
    checkpoints = TrainingCheckpoints(folder, config, store=partial(InMemory, kept=kept))
    for step in steps:
        checkpoints.save(step, {"w": step * STATE["w"]}, {"place": step}, 1 / step)
    checkpoints.close()


def test_steps_are_kept_in_memory_and_removed_with_the_others(
    tmp_path: Path, kept: dict[int, Files]
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, kept, 1, 2, 3, keep_best=False)
    assert sorted(kept) == [2, 3] and not list(folder.rglob("state"))
    assert sorted(int(path.name) for path in folder.iterdir()) == [2, 3]
    shutil.rmtree(folder)  # a new machine
    checkpoints = Checkpoints(folder, store=partial(InMemory, kept=kept))
    assert checkpoints.steps() == [2, 3] and checkpoints.best() == 3
    assert checkpoints.data(2) == {"place": 2}
    manifest = checkpoints.require_whole(2)
    assert manifest is not None and manifest.step == 2
    np.testing.assert_array_equal(checkpoints.restore(2, SHAPES)["w"], 2 * STATE["w"])
    save(folder, kept, 4, keep_best=False)
    assert sorted(kept) == [3, 4]


def test_what_was_damaged_in_memory_is_moved_aside_and_the_step_before_is_taken(
    tmp_path: Path, kept: dict[int, Files]
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, kept, 1, 2)
    arrays = [name for name in kept[2] if name.startswith("state/d/")]
    name = max(arrays, key=lambda name: len(kept[2][name]))
    kept[2][name] = kept[2][name][:-1] + b"?"
    said = list[str]()
    store = partial(InMemory, kept=kept)
    with pytest.raises(DamagedCheckpoint, match="other bytes"):
        Checkpoints(folder, store=store).require_whole(2)
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(), {}, said.append, store=store)
    assert checkpoints.newest_whole().step == 1
    checkpoints.close()
    assert sorted(kept) == [1] and (tmp_path / "damaged" / "2").exists() and len(said) == 1


def test_a_step_that_could_not_be_kept_leaves_the_older_ones(
    tmp_path: Path, kept: dict[int, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, kept, 1, 2)

    def fail(*_: object) -> None:
        raise OSError("the memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(InMemory, "write", fail)
        with pytest.raises(UserError, match=r"\(the memory is full\)"):
            save(folder, kept, 3)
    assert sorted(kept) == [1, 2]
    store = partial(InMemory, kept=kept)
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=2), store=store)
    assert checkpoints.newest_whole().step == 2 and checkpoints.steps() == [1, 2]
    checkpoints.save(3, {"w": 3 * STATE["w"]}, {}, 0.1)
    checkpoints.close()
    assert sorted(kept) == [2, 3]


def test_which_processes_write_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.jax, "process_index", lambda: 1)
    of_second = {
        kind.disk: (kind(tmp_path).writes, kind(tmp_path).hashes)
        for kind in (stores.CheckpointStore, stores.OwnDiskStore, InSomeCopy)
    }
    assert of_second == {"shared": (False, False), "own": (True, True), "copy": (True, False)}


class InSomeCopy(stores.CheckpointStore):
    disk: stores.Disk = "copy"


def config() -> Config:
    return override(
        config_of("llama", data=2, fsdp=2),
        {
            "data.max_bytes": 200_000,
            "train.steps": 6,
            "train.warmup_steps": 1,
            "train.eval_every": 2,
            "train.eval_batches": 1,
            "train.final_eval_batches": 1,
            "checkpoint.every": 2,
            "checkpoint.keep": 1,
            "metrics.log_every": 1,
            "mesh.platform": "cpu",
        },
    )


@pytest.mark.usefixtures("keeps_programs")
def test_a_run_is_found_in_memory_where_its_disk_is_lost(
    tmp_path: Path, kept: dict[int, Files]
) -> None:
    store = partial(InMemory, kept=kept)
    run(override(config(), {"train.stop_at": 3}), tmp_path / "run", store=store)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with open_run(config(), tmp_path / "run", store=store) as opened:
        assert opened.after == 3 and sorted(kept) == [3]


@pytest.mark.slow
@pytest.mark.usefixtures("keeps_programs")
def test_a_run_goes_on_from_memory_to_the_bit_and_is_evaluated_through_it(
    tmp_path: Path, kept: dict[int, Files]
) -> None:
    store = partial(InMemory, kept=kept)
    whole = run(config(), tmp_path / "whole")
    run(override(config(), {"train.stop_at": 3}), tmp_path / "run", store=store)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with open_run(config(), tmp_path / "run", store=store) as opened:
        assert opened.after == 3
        result = opened.train()
    assert result.val_loss == whole.val_loss and 6 in kept
    experiment = make_experiment(config())
    _, params = load_run(tmp_path / "run", 6, experiment, store)
    _, wanted = load_run(tmp_path / "whole", 6, experiment)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    found = evaluate_folder(config(), tmp_path / "run", store=store)
    assert found == evaluate_folder(config(), tmp_path / "whole")
