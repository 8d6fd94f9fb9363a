"""Refuses hooks of a program that could not be called alike on all processes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import jax

from jaxpar.base.errors import UserError, short
from jaxpar.base.process.multihost import number_from_first, run_together
from jaxpar.train.hooks.hook import Hook
from jaxpar.train.hooks.saved import is_saved


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
