"""What one process of several cannot do, none does: tests/train/loop/test_multiprocess.py has it with
real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError
from jaxpar.base.process.multihost import Batches, numbers_from_first, run_together
from jaxpar.base.process.processes import process_start


def failing() -> Iterator[int]:
    yield 1
    raise UserError("the second cannot be read")


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`several(other_says)`: this is process 0 of two, and the error of the other one, if any."""

    def pretend(other_says: str) -> None:
        other = np.frombuffer(other_says.encode().ljust(500), np.uint8)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(
            multihost_utils, "process_allgather", lambda mine: np.stack([mine, other])
        )

    return pretend


def test_one_process_alone_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost_utils, "process_allgather", pytest.fail)
    assert run_together(lambda: 3) == 3
    batches = Batches(failing(), 0)
    assert next(batches) == 1
    with pytest.raises(UserError, match="second"):
        next(batches)
    batches.require()


def test_an_error_here_or_there_is_raised_on_both(several: Callable[..., None]) -> None:
    several(other_says="")
    assert run_together(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_together(lambda: 1 // 0)
    several(other_says="no file")
    with pytest.raises(UserError, match=r"process 1 .*: no file"):
        run_together(lambda: 3)
    with pytest.raises(ZeroDivisionError):
        run_together(lambda: 1 // 0)


def test_the_first_process_also_says_how_many_numbers_there_are(
    several: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    several(other_says="")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    said = iter([np.int32(2), np.array([5, 7], np.int32), np.int32(0)])
    shapes = list[tuple[int, ...]]()

    def broadcast(mine: np.ndarray) -> np.ndarray:
        shapes.append(mine.shape)
        return next(said)

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    assert numbers_from_first([1, 2, 3]) == [5, 7]
    assert numbers_from_first([4]) == []
    assert shapes == [(), (2,), ()]


def test_the_bytes_of_the_first_process_are_numbers(
    several: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    several(other_says="")
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda mine: mine)
    assert bytes(numbers_from_first(b"\x00run\xff")) == b"\x00run\xff"


def test_batches_go_on_empty_until_all_have_stopped(several: Callable[..., None]) -> None:
    several(other_says="")
    asked = list[str]()
    batches = Batches(failing(), 0, lambda: asked.append("to stop"))
    assert [next(batches) for _ in range(4)] == [1, 0, 0, 0] and asked == ["to stop"]
    with pytest.raises(UserError, match="second"):
        batches.require()
    assert list(Batches(iter([1, 2]), 0)) == [1, 2]


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70])
def test_no_process_has_a_number_that_is_none(pid: int) -> None:
    """As in a lock that is damaged; to `kill` those below 1 are groups of processes."""
    assert process_start(pid) is None
