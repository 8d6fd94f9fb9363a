"""A file of prices that a user measured is read, and refused where it can be none."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.prices import AttentionShare, read_prices


def test_a_file_of_prices_is_read(tmp_path: Path):
    file = tmp_path / "prices.toml"
    file.write_text(
        "matmul = 0.7\nattention = [\n"
        '    { kernel = "cudnn", head_dim = 64, tokens = 1024, forward = 0.3, backward = 0.2 },\n]\n'
    )
    found = read_prices(file)
    assert (found.matmul, found.memory) == (0.7, 1.0)
    assert found.attention == (AttentionShare("cudnn", 64, 1024, 0.3, 0.2),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("matmul = 79", "no share of a"),
        ("memory = 0.0", "no share of a"),
        ("matmull = 0.7", "matmull"),
        ('attention = [{ kernel = "cudnn", head_dim = 64, tokens = 1, forward = 2.0 }]', "forward"),
        ("matmul = ", "prices.toml"),
    ],
)
def test_what_are_no_prices_is_refused(text: str, says: str, tmp_path: Path):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_prices(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing\.toml"):
        read_prices(tmp_path / "nothing.toml")
