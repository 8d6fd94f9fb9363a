"""`overlap auto`: what is tried, what is kept, and that a trial is of the blocks that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from tiers import needs_libtpu

from jaxpar.base.config import Config, override
from jaxpar.base.layout.plan import Overlap
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.plan import choose_overlap as auto
from jaxpar.plan.choose_overlap import SITES, choose_overlap, time_forms, trial, words
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment


def config_of(overlap: Overlap, **changes: Any) -> Config:
    sizes = {
        "model.layers": 2,
        "model.embed": 32,
        "model.mlp": 64,
        "data.seq_len": 32,
        "train.batch": 8,
    }
    mesh = {"mesh.data": 2, "mesh.tensor": 4}
    return dataclasses.replace(override(Config(), sizes | mesh | changes), overlap=overlap)


def priced(
    monkeypatch: pytest.MonkeyPatch,
    gains: dict[tuple[str, str], float],
) -> list[Overlap]:
    """Trials that cost ten seconds, less what each site's form gains; returns the forms in the
    order of the trials.
    """
    tried: list[Overlap] = []

    def trial(experiment: Experiment, target: Any) -> float:
        tried.append(experiment.plan.overlap)
        forms = vars(experiment.plan.overlap).items()
        return 10.0 - sum(gains.get(item, 0.0) for item in forms)

    monkeypatch.setattr(auto, "trial", trial)
    return tried


def chosen(config: Config, say: Callable[[str], None] = lambda line: None) -> Overlap:
    return choose_overlap(make_experiment(config), say=say).config.overlap


def test_each_site_takes_its_fastest_form(monkeypatch):
    gains = {
        ("mlp_scatter", "bidirectional"): 2.0,
        ("mlp_scatter", "ring"): 1.0,
        ("heads_gather", "ring"): -1.0,
        ("heads_scatter", "ring"): 0.5,
        ("domino", "on"): -0.1,
    }
    tried = priced(monkeypatch, gains)
    said = list[str]()
    config = config_of(Overlap("auto", "auto", domino="auto"))
    found = chosen(config, said.append)
    assert found == Overlap("xla", "xla", heads_scatter="ring", mlp_scatter="bidirectional")
    assert len(tried) == len(set(tried)) == 1 + len(ring_forms()) * len(SITES) + 2, (
        "each site once with each ring, and Domino with and without rings"
    )
    assert said[0] == "overlap auto: xla: 10000.00 ms a block"
    assert said[-1] == "overlap auto: mlp_scatter bidirectional, heads_scatter ring, else xla"


def test_what_is_not_open_is_left_alone(monkeypatch):
    tried = priced(
        monkeypatch,
        {
            ("mlp_gather", "ring"): 5.0,
            ("mlp_scatter", "ring"): 1.0,
            ("domino", "on"): 5.0,
        },
    )
    asked = Overlap("bidirectional", "auto", heads_scatter="ring")
    assert chosen(config_of(asked)) == dataclasses.replace(asked, scatter="xla", mlp_scatter="ring")
    assert len(tried) == 1 + len(ring_forms()), "one site is open, and Domino is off"
    closed = make_experiment(config_of(Overlap("ring")))
    assert choose_overlap(closed) is closed


def test_without_a_ring_only_domino_is_open(monkeypatch):
    tried = priced(monkeypatch, {("domino", "on"): 1.0, ("domino", "sequence"): 1.0})
    everything = Overlap("auto", "auto", domino="auto")
    config = override(config_of(everything), {"mesh.data": 8, "mesh.tensor": 1, "train.batch": 16})
    assert chosen(config) == Overlap(domino="on")
    alone = override(config, {"train.batch": 8})
    assert chosen(alone) == Overlap(domino="sequence"), "one sequence a device is cut itself"
    ahead = override(alone, {"model.masks": ("full",)})
    assert chosen(ahead) == Overlap(), "a mask that looks ahead leaves no half to run first"
    assert len(tried) == 5


def test_blocks_are_timed_on_the_devices_at_hand(monkeypatch):
    monkeypatch.setattr(auto, "_CALLS", 2)
    config = config_of(Overlap("xla", "ring"))
    assert trial(make_experiment(config, jax.devices()), None) > 0


@needs_libtpu
def test_blocks_are_played_for_a_target():
    target = load_target("v5e-8")
    asked = Overlap("xla", "auto", heads_scatter="xla")
    config = override(config_of(asked), {"model.embed": 256, "model.mlp": 512, "model.heads": 8})
    found = time_forms(make_experiment(config, target.devices()), target)
    tried = ["", "mlp_scatter ring, ", "mlp_scatter bidirectional, "]
    assert [words(overlap) for overlap in found] == [
        f"{site}heads_scatter xla, else xla" for site in tried
    ]
    assert min(found.values()) > 0
