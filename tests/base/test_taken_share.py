"""How often a branch is taken, as a scope says it."""

from __future__ import annotations

import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.taken_share import taken, taken_share


@pytest.mark.parametrize(
    ("path", "share"),
    [
        ("jit(step)/while/body/taken_2_of_8/cond", 0.25),
        ("jit(step)/transpose(jvp(taken_2_of_8))/cond", 0.25),
        ("forward_tick/taken_0_of_3", 0.0),
        ("jit(step)/while/body/cond", None),
        ("taken_2_of_8/cond/branch_1_fun/inner/cond", None),
        ("taken_1_of_2/cond/branch_1_fun/taken_1_of_3/cond", 1 / 3),
        ("taken_1_of_0/cond", None),
        ("", None),
    ],
)
def test_the_last_scope_counts(path: str, share: float | None) -> None:
    assert taken_share(path) == share


@pytest.mark.parametrize(("times", "of"), [(3, 2), (-1, 2), (0, 0)])
def test_no_branch_is_taken_more_often_than_it_is_met(times: int, of: int) -> None:
    with pytest.raises(UserError, match="branch is taken"):
        taken(times, of)
