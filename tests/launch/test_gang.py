"""What a process of Ray's makes of a job, without Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.launch import gang


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
