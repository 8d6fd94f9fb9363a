"""What `make gpu PIECES=prices` writes is what a rehearsal reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from on_gpu.prices import write_prices

from jaxpar.base.errors import UserError
from jaxpar.base.prices import AttentionShare, read_prices

FACTS = {"date": "2026-11-29", "device": "NVIDIA A100", "jax": "0.12.0"}
CASES: dict[str, dict[str, Any]] = {
    "matmuls, bfloat16": {"status": "measured", "rows": [{"share": x} for x in (0.7, 0.8, 0.9)]},
    "memory": {
        "status": "measured",
        "rows": [
            {"kernel": "copy", "share": 1.2},
            {"kernel": "norm", "share": 0.7},
            {"kernel": "sum", "share": 0.8},
        ],
    },
    "attention, head_dim 64, 1024 tokens": {
        "status": "measured",
        "rows": [
            {"kernel": "cudnn", "head_dim": 64, "tokens": 1024, "forward": 0.3, "backward": 0.2}
        ],
    },
    "matmuls, float32": {"status": "failed", "why": "killed after 200 s"},
}


def test_what_is_written_is_read_again(tmp_path: Path):
    text = write_prices(CASES, FACTS, tmp_path / "prices.toml")
    found = read_prices(tmp_path / "prices.toml")
    assert (found.matmul, found.memory) == (0.8, 0.75)
    assert found.copies == 1.0, "what a cache has made faster than the memory is no more than all"
    assert found.attention == (AttentionShare("cudnn", 64, 1024, 0.3, 0.2),)
    assert "NVIDIA A100" in text and "float32" not in text, "what failed has no figure"


def test_where_nothing_was_found_nothing_is_said(tmp_path: Path):
    write_prices({}, FACTS, tmp_path / "prices.toml")
    assert read_prices(tmp_path / "prices.toml").matmul == 1.0
    with pytest.raises(UserError):
        read_prices(tmp_path / "other.toml")
