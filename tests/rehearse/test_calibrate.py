"""Calibration: a few small programs timed here, the figures made of them, and the file they are kept in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import pytest

from jaxpar.base.hardware import Hardware
from jaxpar.hlo.tasks import Collective, Task
from jaxpar.rehearse import calibrate as subject
from jaxpar.rehearse.calibrate import (
    Calibration,
    calibrate,
    calibration_file,
    find_calibration,
    load_calibration,
    machine,
    save_calibration,
)
from jaxpar.rehearse.cost.probes import PROBES, Probe, initial, training_step
from jaxpar.rehearse.cost.speeds import Sample
from jaxpar.rehearse.link_costs import collective_time
from jaxpar.rehearse.targets import Position, load_target

KNOWN = Calibration(
    {"platform": "cpu", "processor": "Z80", "cores": "2"},
    (
        Sample("matmul dot f32", (0.0, 7.0, 7.0, 7.0), 1e11),
        Sample("matmul ynn f32", (0.0, 9.0, 9.0, 9.0), 2e11),
        Sample("fusion plain f32", (10.0, -1.0), 9e10),
        Sample("fusion plain f32", (25.0, -1.0), 3e10),
    ),
    launch=1e-6, devices=8, collective_start=1e-4, collective_bandwidth=1e9,
)  # fmt: skip


def test_a_small_calibration_measures_this_machine(monkeypatch):
    monkeypatch.setattr(subject, "PROBES", {"one": Probe(4, 64, 64, 256, 256)})
    said: list[str] = []
    found = calibrate(rounds=2, say=said.append)
    assert {item.sort.split(" ")[0] for item in found.samples} >= {"matmul", "fusion"}
    for item in found.samples:  # FLOP/s and bytes/s: from a slow, busy core to more than any machine has
        assert 1e3 < item.rate < 1e15, item
    assert 0 <= found.launch < 1e-3
    assert found.devices == len(jax.devices()) == 8
    assert 0 < found.collective_start < 10
    assert 1e5 < found.collective_bandwidth < 1e13
    assert said[-1] == "timing collectives"
    dot = Task("dot", "dot", "matmul", flops=2.0 * 256**3, dtype="f32", shape="f32[256,256]")
    assert found.speeds().seconds(dot) == pytest.approx(found.speeds(8).seconds(dot) / 8)  # type: ignore[operator]


@pytest.mark.parametrize("name", PROBES)
def test_a_step_that_is_timed_trains(name):
    probe = PROBES[name]._replace(batch=2, seq=16, embed=64, mlp=64, vocab=64)
    (state, tokens), step, losses = initial(probe), jax.jit(training_step, static_argnums=0), []
    for _ in range(12):
        state, loss = step(probe, state, tokens)
        losses.append(float(loss))
    assert abs(losses[0] - math.log(64)) < 0.5 and losses[-1] < losses[0] - 0.1


def test_figures_are_the_best_that_was_measured():
    found = KNOWN.hardware(Hardware())
    assert (found.chip, found.peak_flops.float32, found.launch_overhead) == ("Z80", 2e11, 1e-6)
    assert found.hbm_bandwidth == 3e10  # of the largest, which no cache holds
    known = Hardware(chip="H100", hbm_bandwidth=3e12)
    assert dataclasses.replace(KNOWN, samples=(), devices=1).hardware(known).hbm_bandwidth == 3e12


def test_the_network_takes_the_measured_links():
    target = load_target("here")
    target = dataclasses.replace(target, hardware=KNOWN.hardware(target.hardware))
    gather = Collective("all-gather", (tuple(range(8)),), 8_000_000, "f32")
    found = collective_time(gather, tuple(Position(0, (i,)) for i in range(8)), target)
    assert found.seconds == pytest.approx(1e-4 + 7e6 / 1e9)
    assert found.resources == ("memory",)


def test_what_is_kept_is_what_is_loaded(cache):
    assert load_calibration() is None
    file = save_calibration(KNOWN)
    assert file.parent == cache / "jaxpar"
    assert load_calibration() == KNOWN


def test_another_machine_version_or_flag_has_another_file(cache, monkeypatch):
    here = calibration_file()
    for key in ("processor", "cores", "platform", "jax", "flags"):
        other: dict[str, Any] = machine() | {key: "another"}
        with monkeypatch.context() as patch:
            patch.setattr(subject, "machine", lambda other=other: other)
            assert calibration_file() != here
    assert calibration_file() == here


def test_a_kept_calibration_is_taken_and_only_its_collectives_timed_anew(cache, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(subject, "calibrate", lambda say: dataclasses.replace(KNOWN, devices=4))
    monkeypatch.setattr(subject, "_collectives", lambda: (2e-4, 2e9))
    assert find_calibration(said.append).devices == 4
    anew = find_calibration(said.append)
    assert anew == dataclasses.replace(KNOWN, devices=8, collective_start=2e-4, collective_bandwidth=2e9)
    assert find_calibration(said.append) == load_calibration() == anew
    assert [line.partition(":")[0] for line in said] == [
        "no calibration of this machine yet", "timing collectives among 8 devices",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"samples": [], "of": "another version"}', '{"samples": [1]}'])
def test_a_file_that_cannot_be_read_is_no_calibration(cache, text):
    calibration_file().parent.mkdir()
    calibration_file().write_text(text)
    assert load_calibration() is None
