"""This machine as a target, with invented figures of its processors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from made_up_cpu import FIGURES

from jaxpar import rehearse
from jaxpar.base.errors import UserError
from jaxpar.rehearse import targets
from jaxpar.rehearse.here import CpuFigures
from jaxpar.rehearse.targets import load_target, target_here


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine is the one above; a sum over several devices takes 1 ms and 1 GB/s."""

    def figures(devices, say, anew, rates) -> CpuFigures:
        if len(devices) == 1:
            return FIGURES
        return replace(
            FIGURES, devices=len(devices), collective_start=1e-3, collective_bandwidth=1e9
        )

    monkeypatch.setattr(targets, "cpu_figures", figures)


def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w)


def test_a_strangers_function_on_one_device():
    x = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    report = rehearse.step(jax.jit(multiply), x, x, target="here")
    assert report["target"]["name"] == "here" and report["target"]["chip"] == "CPU"
    call = 10e-6 + 2 * 2e-6
    assert report["time"]["step"] == pytest.approx(2e9 / 100e9 + call + 1e-6)
    assert report["time"]["by_category"] == {"matmul": pytest.approx(0.02)}
    assert report["memory"]["fits"] and "of this machine" in report["memory"]["basis"]
    assert report["program"]


def test_a_function_on_simulated_devices_shares_the_cores_and_waits_for_sums():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    whole = jax.ShapeDtypeStruct((1000, 1000), jnp.float32, sharding=NamedSharding(mesh, P()))
    split = whole.update(sharding=NamedSharding(mesh, P(None, "data")))
    other = whole.update(sharding=NamedSharding(mesh, P("data")))
    report = rehearse.step(
        jax.jit(multiply, out_shardings=whole.sharding), split, other, target="here"
    )
    assert report["target"]["name"] == "here:4"
    assert report["time"]["by_category"]["matmul"] == pytest.approx(0.02)
    (row,) = report["collectives"]
    assert row["kind"] == "all-reduce"
    assert row["exposed"] == pytest.approx(1e-3 + 2 * 3 / 4 * 4e6 / 1e9, rel=1e-3)
    assert any("4 simulated devices share 2 cores" in note for note in report["notes"])


def test_a_number_of_simulated_devices():
    target = load_target("here:4")
    assert target.devices() == jax.devices()[:4] and target.device_count == 4
    assert target.name == "here:4" and target.hosts == 1
    with pytest.raises(UserError, match="is 4000 simulated"):
        load_target("here:4000")


def test_a_chip_without_figures_is_named():
    class Chip:
        platform = "gpu"
        device_kind = "GeForce 256"

    with pytest.raises(UserError, match="no figures of GeForce"):
        target_here([Chip()])  # pyright: ignore[reportArgumentType]
    Chip.platform = "tpu"
    with pytest.raises(UserError, match="name its slice"):
        target_here([Chip()])  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_config_on_this_machine(tmp_path, monkeypatch, capsys):
    """The figures are measured, and kept for the next process."""
    from jaxpar.cli.main import main
    from jaxpar.rehearse.here import measure

    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "_KNOWN", {})
    for number, said in enumerate([True, False]):
        assert main(["rehearse", "tiny", "--target", "here"]) == 0
        out = capsys.readouterr().out
        assert ("measuring what this machine does as 8 devices" in out) == said, number
        assert "here:8: 8 x CPU" in out and "tokens/s" in out
        measure._KNOWN.clear()
