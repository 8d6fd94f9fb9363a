"""Host memory: refused where it is wrong or absent, and a check that sees a wrong gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from experiments import experiment_of
from traced_steps import config_of

from jaxpar.base.config import override
from jaxpar.base.errors import UserError
from jaxpar.parallel import host_memory as offload
from jaxpar.parallel.host_memory import (
    check_offload,
    gradient_error,
    known_problem,
    require_right_gradients,
)
from jaxpar.train.experiments import make_plan, plan_notes


class Device:
    """A device of another kind: what `check_offload` asks of one."""

    device_kind = "a chip"

    def __init__(self, platform: str, *kinds: str):
        self.platform = platform
        self._kinds = kinds

    def addressable_memories(self) -> list[Any]:
        if not self._kinds:
            raise NotImplementedError("an absent device")
        return [type("Memory", (), {"kind": kind}) for kind in self._kinds]


def test_the_gradient_here_is_right():
    assert gradient_error(jax.devices()[0]) == 0


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in openxla/xla#46231: the backward pass reads another layer's activations."""
    own = offload.checkpoint_name

    @jax.custom_vjp
    def shifted(x):
        return x

    shifted.defvjp(
        lambda x: (x, None),
        lambda _, dx: (jnp.roll(dx, 1, axis=0),),
    )
    asked = []

    def named(x, name):
        asked.append(name)
        # the second program is the offloaded one
        if len(asked) == 1:
            return own(x, name)
        return shifted(own(x, name))

    monkeypatch.setattr(offload, "checkpoint_name", named)


def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    require_right_gradients(jax.devices()[0], said.append)
    assert len(said) == 1 and "the same" in said[0]
    wrong(monkeypatch)
    with pytest.raises(UserError, match=r"wrong gradients here .*offload nothing"):
        require_right_gradients(jax.devices()[0], said.append)
    monkeypatch.setattr(offload, "gradient_error", lambda device: float("nan"))
    with pytest.raises(UserError, match=r"wrong gradients here .*offload nothing"):
        require_right_gradients(jax.devices()[0], said.append)
    assert len(said) == 1


def test_known_bad_versions_are_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "46231" in known_problem("gpu", "0.11.0")
    assert not known_problem("gpu", "0.11.1") and not known_problem("tpu", "0.11.0")
    monkeypatch.setattr(offload, "version", lambda name: "0.11.0")
    gpu = Device("gpu", "device", "pinned_host")
    with pytest.raises(UserError, match=r"46231.*memory.offload_anyway"):
        check_offload("memory.keep.up = offload", gpu, anyway=False)
    check_offload("memory.keep.up = offload", gpu, anyway=True)
    check_offload("memory.keep.up = offload", Device("tpu", "device", "pinned_host"), anyway=False)


def test_a_device_without_host_memory_is_refused() -> None:
    with pytest.raises(UserError, match=r"no host memory .*only device"):
        check_offload("memory.keep.up = offload", Device("tpu", "device"), anyway=False)
    # an absent one does not say
    check_offload("memory.keep.up = offload", Device("tpu"), anyway=False)


def test_a_plan_asks_and_its_notes_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(config_of("llama", "full"), {"memory.keep.block_input": "offload"})
    plan = make_plan(config, jax.devices()[:1])
    assert plan.offloads == ("block_input",)
    (note,) = [note for note in plan_notes(experiment_of(config, plan)) if "host memory" in note]
    assert "on CPU" in note
    monkeypatch.setattr(offload, "KNOWN_BAD", {("cpu", offload.version("jaxlib")): "it is wrong"})
    with pytest.raises(UserError, match=r"memory\.keep\.block_input = offload: .*it is wrong"):
        make_plan(config, jax.devices()[:1])
    make_plan(override(config, {"memory.offload_anyway": True}), jax.devices()[:1])
