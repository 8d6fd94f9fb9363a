"""Settings of JAX that a shell may have, and no step runs with."""

from __future__ import annotations

import jax
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.jax_settings import require_usual_settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (jax.disable_jit, True),
        (jax.numpy_dtype_promotion, "strict"),
        (jax.numpy_rank_promotion, "raise"),
        (jax.transfer_guard, "disallow"),
        (jax.transfer_guard_host_to_device, "disallow_explicit"),
    ],
)
def test_a_setting_that_no_step_runs_with_is_named(setting, value) -> None:
    require_usual_settings()
    with setting(value), pytest.raises(UserError, match=f"={value} is set.*unset JAX_"):
        require_usual_settings()


@pytest.mark.parametrize(
    ("setting", "value"),
    [(jax.transfer_guard, "log"), (jax.numpy_rank_promotion, "warn"), (jax.enable_x64, True)],
)
def test_others_are_the_users_own(setting, value) -> None:
    with setting(value):
        assert require_usual_settings() is None, "nothing is refused"
