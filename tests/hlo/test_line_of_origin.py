"""Places for what the compiler made: from the nearest neighbour that has one."""

from __future__ import annotations

import pytest

from jaxpar.hlo.line_of_origin import borrow_lines, inherit
from jaxpar.hlo.tasks import Loop, Node, Place, Task, Wait

pytestmark = pytest.mark.quick

MLP = Place("block/mlp", "models/llama.py:77", "forward")
HEAD = Place("head", "models/llama.py:94", "backward")
NOWHERE = Place()
DIRS = (("/repo/models", "models"), ("/repo/jaxpar", "jaxpar"))


def task(place: Place, *depends: int, kind: str = "copy", flops: float = 0.0) -> Task:
    return Task("t", "copy", kind, place, depends, flops)  # pyright: ignore[reportArgumentType]


def places(*nodes: Node, around: Place = NOWHERE, fed=None, made=None) -> list[Place | None]:
    found = inherit(list(nodes), fed or {}, made or {}, around)
    return [None if isinstance(node, Wait) else node.place for node in found]


def test_a_copy_belongs_to_what_it_feeds() -> None:
    assert places(task(HEAD), task(NOWHERE, 0), task(MLP, 1))[1] == MLP


def test_through_a_chain_of_copies() -> None:
    assert places(task(NOWHERE), task(NOWHERE, 0), task(MLP, 1)) == [MLP, MLP, MLP]


def test_else_to_what_feeds_it() -> None:
    assert places(task(HEAD), task(NOWHERE, 0)) == [HEAD, HEAD]


def test_a_matmul_belongs_to_the_latest_of_its_operands() -> None:
    gradient = Place("block/mlp", "models/llama.py:81", "backward")
    assert places(task(MLP), task(gradient), task(NOWHERE, 0, 1, kind="matmul"), task(MLP, 2))[2] == gradient
    assert places(task(NOWHERE, kind="matmul"), task(MLP, 0))[0] == MLP


def test_a_matmul_belongs_to_the_neighbour_in_the_innermost_scope() -> None:
    core = Place("block/attention/core", "models/llama.py:74", "forward")
    assert places(task(HEAD), task(NOWHERE, 0, kind="matmul"), task(MLP, 1), task(core, 1))[1] == core
    assert places(task(core), task(MLP), task(NOWHERE, 0, 1, kind="matmul"), task(MLP, 2))[2] == core


def test_waits_are_passed_over() -> None:
    assert places(task(NOWHERE), Wait("w", 0), task(MLP, 0)) == [MLP, None, MLP]


def test_a_phase_and_a_line_of_its_own_are_kept_and_neighbours_of_that_phase_preferred() -> None:
    slice_ = Place("", "models/model.py:114", "backward")
    found = places(task(slice_), task(MLP, 0), task(HEAD, 0))
    assert found[0] == Place("head", "models/model.py:114", "backward")


def test_bookkeeping_and_loops_give_nothing_and_the_loop_around_gives_what_is_left() -> None:
    loop = Loop("while", 2, (task(MLP),), (0,), place=HEAD)
    assert places(task(NOWHERE), loop)[0] == NOWHERE
    assert places(task(NOWHERE), task(MLP, 0, kind="control"))[0] == NOWHERE
    assert places(task(NOWHERE), around=HEAD)[0] == HEAD


def test_neighbours_inside_a_loop() -> None:
    assert places(task(NOWHERE), fed={0: [MLP]})[0] == MLP
    assert places(task(NOWHERE), made={0: [HEAD]})[0] == HEAD


def test_what_belongs_to_no_scope_by_its_own_line_stays_there() -> None:
    schedule = Place("", "jaxpar/train/step.py:140", "other")
    assert places(task(schedule), task(MLP, 0))[0] == schedule


def test_a_backward_without_a_model_line_borrows_the_only_one_of_its_scope() -> None:
    lost = Place("block/mlp", "jaxpar/parallel/linear.py:118", "backward")
    forward = task(MLP, kind="matmul", flops=1)
    nodes = borrow_lines((forward, Loop("w", 2, (task(lost),))), DIRS)
    loop = nodes[1]
    assert isinstance(loop, Loop) and isinstance(loop.body[0], Task)
    assert loop.body[0].place == Place("block/mlp", "models/llama.py:77", "backward")


def test_two_lines_in_a_scope_leave_the_choice_open() -> None:
    lost = task(Place("block/mlp", "jaxpar/parallel/linear.py:118", "backward"))
    other = task(Place("block/mlp", "models/llama.py:81", "forward"), kind="matmul", flops=1)
    assert borrow_lines((task(MLP, kind="matmul", flops=1), other, lost), DIRS)[2] == lost
