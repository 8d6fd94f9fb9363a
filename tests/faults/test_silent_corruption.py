"""A device that computes wrongly and says nothing: `train.check_replicas` names it, and nothing that
it has spoilt is saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import make_mesh
from jaxpar.train.experiments import make_experiment
from jaxpar.train.guard.failures import CopiesDiffer
from jaxpar.train.loop import run
from jaxpar.train.metrics import read_metrics
from jaxpar.train.runs.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("keeps_programs")]


def small(**mesh: int) -> Config:
    """A tiny training on the standard library's text."""
    return override(
        config_of("llama", **mesh),
        {
            "data.max_bytes": 200_000,
            "train.steps": 12,
            "train.warmup_steps": 1,
            "train.eval_every": 0,
            "train.check_replicas": 3,
            "checkpoint.every": 2,
            "metrics.log_every": 1,
            "mesh.platform": "cpu",
        },
    )


def spoilt_by(config: Config, number: int, at: int) -> optax.GradientTransformation:
    """SGD in which the device `number` along the mesh axis `data` computes one gradient wrongly, in
    one step."""
    mesh = make_mesh(config.mesh, jax.devices()[:4])

    def spoil(grad: jax.Array, step: jax.Array) -> jax.Array:
        def here(grad: jax.Array, step: jax.Array) -> jax.Array:
            wrong = (jax.lax.axis_index("data") == number) & (step == at)
            return jnp.where(wrong, grad * (1 + 1e-6), grad)

        place = jax.shard_map(here, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        return place(grad, step)

    def init(params: Any) -> Any:
        return jnp.zeros((), jnp.int32)

    def update(grads: Any, step: Any, params: Any = None) -> Any:
        grads["blocks"]["up"] = spoil(grads["blocks"]["up"], step)
        return jax.tree.map(lambda grad: -1e-2 * grad, grads), step + 1

    return optax.GradientTransformation(init, update)


def test_a_gradient_that_one_device_gets_wrong_is_named_and_not_saved(tmp_path: Path) -> None:
    """The 5th step, after the checkpoint of the 4th, and before the comparison after the 6th."""
    config = small(data=4)
    spoilt = make_experiment(config, optimizer=spoilt_by(config, 2, 4))
    device = spoilt.plan.mesh.devices.flat[2]
    said = f"step 6 .*cpu:{device.id} of process 0 .*blocks.up .*4 .*step 4 is kept"
    with pytest.raises(CopiesDiffer, match=said) as error:
        run(spoilt, tmp_path / "run")
    assert error.value.exit_code == 77
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == 4
    assert len(read_metrics(tmp_path / "run")) == 5  # the loss says nothing of it


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path, capsys) -> None:
    result = run(make_experiment(small(data=2, fsdp=2)), tmp_path / "run")
    assert result.step == 12
    assert "train.check_replicas compares all" in capsys.readouterr().out
