"""What a process of Ray's makes of a job, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.launch import gang
from jaxpar.train.guard.failures import CopiesDiffer, PeerLost


@pytest.mark.quick
def test_a_config_that_is_not_read_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_world_size=lambda: 1, get_world_rank=lambda: 0)
    train = SimpleNamespace(get_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.chdir(tmp_path)
    job = {"here": str(tmp_path), "config": "[train]\nstpes = 3\n", "folder": "run"}
    found = gang._work(job)
    assert "stpes" in found["error"] and found["exit_code"] == 2


class FailedInRay(Exception):
    """As Ray raises where the processes may not start again."""

    def __init__(self, *failures: Exception):
        self.worker_failures = dict(enumerate(failures))


class RayError(Exception):
    """Ray's word for a process that is gone."""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("met", "code"),
    [
        ((PeerLost("gone"), CopiesDiffer("device 3")), 77),
        ((PeerLost("gone"),), 75),
        ((ValueError("a module"), RayError("a process")), 75),
        ((ValueError("a module"),), 1),
    ],
)
def test_where_none_may_start_again_the_exit_code_is_of_what_was_met(
    met: tuple[Exception, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exceptions = SimpleNamespace(RayError=RayError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    failed = gang._failed(FailedInRay(*met), 2)
    assert failed.exit_code == code
    assert "2 restarts were allowed" in str(failed)
