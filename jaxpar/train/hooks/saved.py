"""What a checkpoint keeps of hooks beside the state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.base.errors import Say, UserError
from jaxpar.train.hooks.hook import Hook


def keeps_params(hook: Hook) -> bool:
    """Whether a hook has arrays that are saved, now or later."""
    return type(hook).params is not Hook.params


def is_saved(hook: Hook) -> bool:
    """Whether a hook has anything that is saved, now or later."""
    return type(hook).state_dict is not Hook.state_dict or keeps_params(hook)


def states_of(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Return the state of each hook that has one, by name, as it is saved.

    Raises:
      UserError: a state is of something that would not come back as it was.
    """
    found = {}
    for hook in hooks:
        state = hook.state_dict()
        if state is None:
            continue
        try:
            copy = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError):
            copy = None
        if copy != state:
            raise UserError(
                f"the state of the hook {hook.name} would not come back from JSON as it was: let "
                "its state_dict return finite numbers, texts, lists and dicts with texts as keys"
            )
        found[hook.name] = copy  # the hook may go on to change what it returned
    return found


def load_states(hooks: Sequence[Hook], saved: Mapping[str, Any], say: Say) -> None:
    """Give each hook the state that a checkpoint has of it.

    Args:
      saved: the states by name, as `states_of` returned them.
      say: gets a line for each hook without a state, and for each state without a hook.
    """
    for hook in hooks:
        if hook.name in saved:
            hook.load_state_dict(saved[hook.name])
        elif hook.state_dict() is not None:
            say(f"warning: the checkpoint has no state of the hook {hook.name}, which starts anew")
    names = {hook.name for hook in hooks}
    for name in saved:
        if name not in names:
            say(f"warning: the checkpoint has a state of {name}, and no such hook is given")
