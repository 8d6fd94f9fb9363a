"""Objects of a program whose state is saved beside each checkpoint, and given back to them when the
run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxpar.base.errors import UserError

STATEFUL = "stateful"
"""What their states are called beside a checkpoint."""


class Stateful(Protocol):
    """An object that gives its state, and takes it back: a callback that counts, a curriculum, an
    early stop."""

    def state_dict(self) -> Any:
        """Return the state, of what JSON holds: numbers, texts, lists, dicts by text."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Take a state that `state_dict` returned."""
        ...


def states_of(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of each object, as it is saved.

    Args:
      objects: the objects by name.

    Raises:
      UserError: a state is of something that would not come back as it was.
    """
    found = {}
    for name, thing in objects.items():
        state = thing.state_dict()
        try:
            copy = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            copy = None
        if copy != state:
            raise UserError(
                f"the state of {name} (stateful=) would not come back from JSON as it was: let its "
                "state_dict return finite numbers, texts, lists and dicts with texts as keys"
            )
        found[name] = copy  # the object may go on to change what it returned
    return found


def load_states(
    objects: Mapping[str, Stateful], saved: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Give each object the state that a checkpoint has of it.

    Args:
      objects: the objects by name.
      saved: the states by name, as `states_of` returned them.
      say: gets a line for each object without a state, and for each state without an object.
    """
    for name, thing in objects.items():
        if name in saved:
            thing.load_state_dict(saved[name])
        else:
            say(f"warning: the checkpoint has no state of {name} (stateful=), which starts anew")
    for name in saved:
        if name not in objects:
            say(f"warning: the checkpoint has a state of {name}, and no such object is given")
