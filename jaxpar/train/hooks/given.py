"""What the library asks of hooks that a program gives, and keeps of them: those that could not be
called alike on all processes are refused, and a checkpoint has their states beside its own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar.base.errors import Say, UserError, short
from jaxpar.base.process.multihost import number_from_first, run_together
from jaxpar.train.hooks.hook import Hook


def require_hooks(hooks: Sequence[Hook]) -> None:
    """Refuse hooks that could not be called alike on all processes. All processes must call this.

    Raises:
      UserError: one is no hook; two that are saved have one name, or a name that no file of a
        checkpoint can have; or the processes were given other hooks.
    """
    run_together(lambda: _require_names(hooks))
    names = json.dumps([hook.name for hook in hooks])
    own = int.from_bytes(hashlib.sha256(names.encode()).digest()[:3], "big")
    first = number_from_first(own)

    def require_same() -> None:
        if own != first:
            raise UserError(
                f"the processes of this run were given different hooks (process "
                f"{jax.process_index()} has {names}): give all of them the same, in the same "
                "order, and let one that is for the first alone ask jax.process_index()"
            )

    run_together(require_same)


def _require_names(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(
                f"hooks= takes objects of classes of jaxpar.train.Hook, found {short(hook)}: for a "
                "function of each row write hooks=[OnRow(function)]"
            )
    saved = [hook.name for hook in hooks if is_saved(hook)]
    for name, count in Counter(saved).items():
        if count > 1:
            raise UserError(
                f"{count} hooks are called {name}, and what is saved of one would be taken for the "
                "other's: let their property `name` tell them apart"
            )
        if not name.isidentifier():
            raise UserError(
                f"a hook is called {name!r}, by which its state cannot be saved: let its `name` be "
                "of letters, digits and underscores"
            )


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
