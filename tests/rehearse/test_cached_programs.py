"""A target's program that JAX's cache of programs holds."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiers import needs_libtpu

import jaxpar
from jaxpar import rehearse


@needs_libtpu
@pytest.mark.slow
def test_a_function_is_rehearsed_again_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX writes programs of absent devices to its cache, and warns that it cannot read them."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    target = jaxpar.load_target("v5e-8")
    layout = jaxpar.Layout(jaxpar.make_mesh(data=8, devices=target.devices()))
    x = jax.ShapeDtypeStruct(
        (8, 128),
        jnp.float32,
        sharding=layout.sharding(("batch", None)),
    )
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        first = rehearse.step(jax.jit(jnp.sin), x, target=target)
        jax.clear_caches()  # as a new process is
        again = rehearse.step(jax.jit(jnp.sin), x, target=target)
        assert first["time"] == again["time"] and list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
