"""The states of a program's own objects, beside a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.base.errors import UserError
from jaxpar.train.stateful import load_states, states_of


def with_state(state: Any, taken: list[Any] | None = None) -> Any:
    take = (lambda found: None) if taken is None else taken.append
    return SimpleNamespace(state_dict=lambda: state, load_state_dict=take)


@pytest.mark.parametrize("state", [(1, 2), {1: "a"}, float("nan"), object(), b"x", {"a": {3}}])
def test_a_state_that_would_come_back_otherwise_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match=r"the state of mine .* would not come back"):
        states_of({"mine": with_state(state)})


def test_states_go_back_by_name_and_others_are_told() -> None:
    taken: list[Any] = []
    said: list[str] = []
    saved = states_of({"one": with_state({"n": [1, 2.5, None]}), "gone": with_state("x")})
    load_states({"one": with_state(0, taken), "new": with_state(0)}, saved, said.append)
    assert taken == [{"n": [1, 2.5, None]}]
    assert ["no state of new" in said[0], "a state of gone" in said[1], len(said)] == [
        True,
        True,
        2,
    ]
