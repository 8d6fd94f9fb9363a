"""What is saved comes back to the bit on any mesh; the newest and the best are kept; damage is
said.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils

from jaxpar.base.config import CheckpointConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import replicated_sharding
from jaxpar.train.restore import load_run
from jaxpar.train.restore.metadata import read_metadata
from jaxpar.train.runs import orbax_options, stores, training_checkpoints
from jaxpar.train.runs.checkpoints import Checkpoints
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints


def state_on(plan: Plan, scale: float = 1.0) -> dict[str, Any]:
    weight = scale * jax.random.normal(
        jax.random.key(0),
        (8, 16),
    )
    return {
        "step": jax.device_put(jnp.int32(3), replicated_sharding(plan)),
        "w": jax.device_put(weight, plan.sharding(("embed", "mlp"))),
    }


def shapes_on(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated_sharding(plan)),
        "w": jax.ShapeDtypeStruct(
            (8, 16),
            jnp.float32,
            sharding=plan.sharding(("embed", "mlp")),
        ),
    }


def test_a_state_comes_back_to_the_bit_on_another_mesh(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    state = state_on(plan_of(fsdp=4, tensor=2))
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, state, {"iterator": {"next_index": 7}}, 1.5)
    checkpoints.close()
    other = plan_of(fsdp=2, tensor=4)
    again = Checkpoints(tmp_path)
    assert again.latest() == again.best() == 3
    restored = again.restore(3, shapes_on(other))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored["w"].sharding.is_equivalent_to(other.sharding(("embed", "mlp")), 2)
    assert restored["step"].sharding.is_fully_replicated
    assert again.data(3) == {"iterator": {"next_index": 7}}


def test_the_newest_are_kept_and_the_best_is_too(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    state = state_on(plan_of())
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(keep=2))
    for step, loss in ((1, 2.0), (2, 1.0), (3, math.nan), (4, None), (5, 4.0)):
        checkpoints.save(step, state, {}, loss)
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 4, 5]
    assert Checkpoints(tmp_path).best() == 2
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    checkpoints.save(6, state, {}, 9.0)
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [6]


def test_a_save_that_takes_too_long_blames_no_process_that_is_not_there(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(), seconds=1.0)

    def wait_in_vain(*_: object) -> None:  # as Orbax ends a write that takes too long
        raise TimeoutError("in vain")

    monkeypatch.setattr(training_checkpoints, "write_manifest", wait_in_vain)
    checkpoints.save(1, state_on(plan_of()), {})
    with pytest.raises(UserError, match=r"not written to .*\(1 s\)"):
        checkpoints.wait()


def test_a_save_may_take_as_long_as_its_bytes_on_a_slow_disk(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(data=2, tensor=4)
    whole = jax.ShapeDtypeStruct((8, 1_000_000), np.float32, sharding=plan.sharding((None, None)))
    split = jax.ShapeDtypeStruct((8, 1_000_000), np.float32, sharding=plan.sharding(("mlp", None)))
    # a process that has all devices holds either once
    assert orbax_options.held_at_most({"a": whole, "b": split}) == 2 * 32e6
    assert orbax_options.longest_save({"a": whole}) == 1200 + 3.2


def test_a_save_does_not_ask_jaxs_preemption_service(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service stops all processes at a number that each call gives it: those of a run count
    its looks, and the step of a save among them put the stop off, or past it.
    """
    assert hasattr(ocp.CheckpointManager, "reached_preemption"), "Orbax asks it elsewhere now"
    asked: list[int] = []
    for module in (multihost_utils, ocp.utils):
        for name in ("reached_preemption_sync_point", "reached_preemption"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda step: bool(asked.append(step)))
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())
    for step in (1, 2):
        checkpoints.save(step, state_on(plan_of()), {})
    checkpoints.close()
    assert checkpoints.latest() == 2
    assert asked == []


def test_a_reader_leaves_alone_what_a_run_is_writing(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """A save under way is a folder that ends in `-tmp`; who writes clears away those that a killed
    run left.
    """
    state = state_on(plan_of())
    running = TrainingCheckpoints(tmp_path, CheckpointConfig())
    running.save(1, state, {}, 1.0)
    running.close()
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    reader = Checkpoints(tmp_path)
    assert reader.latest() == reader.best() == 1 and reader.data(1) == {}
    assert unfinished.exists()
    resumed = TrainingCheckpoints(tmp_path, CheckpointConfig())
    resumed.save(3, state, {}, None)  # which waits until the folder is cleared up
    resumed.close()
    assert not unfinished.exists()
    assert Checkpoints(tmp_path / "none").steps() == [] and not (tmp_path / "none").exists()


def test_a_step_that_is_there_is_left_alone(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, state_on(plan), {}, None)
    checkpoints.save(1, state_on(plan, scale=2.0), {}, None)
    restored = checkpoints.restore(1, shapes_on(plan))
    np.testing.assert_array_equal(restored["w"], state_on(plan)["w"])
    checkpoints.close()


DAMAGES = {
    "missing": (
        "cannot be read .*: try again if a run or a copy is writing there, or take another step"
    ),
    "another shape": (
        r"w is float32\[8, 16\] there and float32\[8, 12\] here.* take those of "
        r"its run's config"
    ),
    "another dtype": (
        r"w is float32\[8, 16\] there and bfloat16\[8, 16\] here.* take those of "
        r"its run's config"
    ),
    "another name": r"v is absent there and float32\[8, 16\] here.* take those of its run's config",
}


def test_a_step_below_the_newest_is_refused_at_once(tmp_path: Path) -> None:
    """Orbax saves none, and the next save said that the disk is full."""
    state = {"w": np.zeros(3, np.float32)}
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(keep=3))
    checkpoints.save(5, state, {})
    with pytest.raises(UserError, match=r"^step 3 is not saved: .* has step 5, and only newer"):
        checkpoints.save(3, state, {})
    checkpoints.save(6, state, {})
    checkpoints.close()
    assert Checkpoints(tmp_path).steps() == [5, 6]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_read_is_said_with_a_way_out(
    tmp_path: Path, plan_of: Callable[..., Plan], damage: str
) -> None:
    plan = plan_of()
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, state_on(plan), {}, None)
    checkpoints.close()
    shapes = shapes_on(plan)
    if damage == "missing":
        for file in (tmp_path / "1" / "state").rglob("*"):
            if file.is_file():
                file.unlink()
    else:
        shape = (8, 12) if "shape" in damage else (8, 16)
        if "dtype" in damage:
            dtype = jnp.bfloat16
        else:
            dtype = jnp.float32
        leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated_sharding(plan))
        shapes = {"step": shapes["step"], "v" if "name" in damage else "w": leaf}
    with pytest.raises(UserError, match=DAMAGES[damage]):
        Checkpoints(tmp_path).restore(1, shapes)


def test_a_reader_takes_another_where_a_run_has_removed_the_one_it_chose(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The run beside removes step 1 while it is read; what stays and cannot be read is refused."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / "state").mkdir(parents=True)
    tried = list[int]()

    class Reader(Checkpoints):
        def best(self, without: Container[int] = ()) -> int | None:
            return min(self.steps())

    def restore(checkpoints: Checkpoints, step: int, *_: Any, **__: Any) -> Any:
        tried.append(step)
        if step == 1:
            shutil.rmtree(tmp_path / "checkpoints" / "1")
            raise DamagedCheckpoint("cannot be read")
        return SimpleNamespace(params="those of 2"), {}

    monkeypatch.setattr("jaxpar.train.restore.which_step.Checkpoints", Reader)
    monkeypatch.setattr("jaxpar.train.restore.load.restore_state", restore)
    assert load_run(tmp_path, 0, Any) == (2, "those of 2")  # pyright: ignore[reportArgumentType]
    assert tried == [1, 2]


def test_no_line_of_orbax_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for name, count in (
        ("/site-packages/orbax/checkpoint/x.py", 0),
        ("/site-packages/grain/y.py", 1),
    ):
        logging.getLogger("absl").handle(
            logging.LogRecord(
                "absl",
                40,
                name,
                1,
                "raw",
                (),
                None,
            )
        )
        assert len(caplog.records) == count


@pytest.mark.parametrize(
    ("order", "right"),
    [
        ([0, -1, 2, -1, 1], True),
        ([0, 1, 1], False),
        ([0, -1, 2], False),
    ],
)
def test_an_order_of_layers_has_each_once_and_perhaps_empty_places(
    order: list[int], right: bool
) -> None:
    """Uneven stages leave a place empty, which is saved as -1."""
    saved = {"iterator": None, "training_tokens": None, "layer_order": order}
    checkpoints = SimpleNamespace(folder=Path("checkpoints"), data=lambda step: saved)
    if right:
        assert read_metadata(checkpoints, 1, layers=3) == saved  # pyright: ignore[reportArgumentType]
    else:
        with pytest.raises(UserError, match=r"layer_order .*3 layers"):
            read_metadata(checkpoints, 1, layers=3)  # pyright: ignore[reportArgumentType]


def test_a_save_that_failed_on_another_process_is_raised_on_this_one_too(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, state_on(plan_of()), {})

    def fail_elsewhere(run: Callable[[], Any]) -> None:
        run()
        raise UserError("process 1 cannot go on")

    monkeypatch.setattr(training_checkpoints, "run_together", fail_elsewhere)
    with pytest.raises(UserError, match="process 1 cannot go on"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.close()


def test_old_steps_are_removed_as_the_first_process_says(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = TrainingCheckpoints(tmp_path, CheckpointConfig(keep=2))
    for step in (1, 2):
        checkpoints.save(step, state_on(plan_of()), {})
    # the first process removes step 1: here both would be kept
    monkeypatch.setattr(training_checkpoints, "numbers_from_first", lambda _: [1])
    checkpoints.remove_old()
    assert checkpoints.steps() == [2]
    monkeypatch.undo()
    checkpoints.close()


def test_of_copies_on_several_devices_one_counts_for_the_room_of_a_save(
    plan_of: Callable[..., Plan],
) -> None:
    # `step` has a copy on each of the 8 devices, and `w` two copies of each of its parts
    state = state_on(plan_of(data=2, fsdp=4))
    assert stores.bytes_to_write(state, "copy") == 4 + 8 * 16 * 4
    assert stores.bytes_to_write(state, "own") == 4 + 8 * 16 * 4
    assert stores.bytes_to_write(state, "shared") == 4 + 8 * 16 * 4


def test_each_process_with_a_copy_of_its_own_asks_its_disk_for_room(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(stores, "require_space", lambda folder, size, disk: asked.append(size))
    monkeypatch.setattr(stores.jax, "process_index", lambda: 1)
    state = state_on(plan_of(fsdp=8))
    stores.CheckpointStore(tmp_path).require_room(state)
    assert not asked, "the first process asks the disk that all write to"
    stores.OwnDiskStore(tmp_path).require_room(state)
    assert asked == [4 + 8 * 16 * 4]
