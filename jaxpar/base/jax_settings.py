"""Settings of JAX with which no training step can be traced or run: each is said by its name, where
JAX's own error would name an operation of a model.
"""

from __future__ import annotations

import jax

from jaxpar.base.errors import UserError

_DISALLOWED = ("disallow", "disallow_explicit")
_REFUSED = {
    "jax_disable_jit": (True,),
    "jax_numpy_dtype_promotion": ("strict",),
    "jax_numpy_rank_promotion": ("raise",),
    "jax_transfer_guard": _DISALLOWED,
    "jax_transfer_guard_host_to_device": _DISALLOWED,
    "jax_transfer_guard_device_to_device": _DISALLOWED,
    "jax_transfer_guard_device_to_host": _DISALLOWED,
}
"""The values of each that are refused."""


def require_usual_settings() -> None:
    """Refuse settings of JAX that a program or a shell has, and a model cannot be run with.

    Raises:
      UserError: there is one.
    """
    for name, refused in _REFUSED.items():
        value = jax.config.values.get(name)
        if value in refused:
            raise UserError(
                f"{name}={value} is set, and jaxpar's steps do not run with it: unset "
                f"{name.upper()} in the environment, or leave jax.config.update({name!r}, ...) out"
            )
