"""A token file that is cut while it is read is a line, where the system would kill the process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.data.streams.token_files import open_tokens
from jaxpar.data.streams.tokens import read_windows


@pytest.mark.parametrize("part", ["all", "validation"])
def test_a_token_file_that_is_cut_is_refused_before_it_is_read(tmp_path: Path, part: str) -> None:
    file = tmp_path / "a.bin"
    np.arange(40_000, dtype="<u2").tofile(file)
    stream = open_tokens(file)
    if part == "validation":
        stream = stream.split(0.1)[1]
    starts = np.array([0, 3_000])
    read_windows(stream, starts, 8, pack=False, vocab_size=2**16)
    os.truncate(file, 4096)
    with pytest.raises(UserError, match=r"a.bin was cut .*80,000 bytes"):
        read_windows(stream, starts, 8, pack=False, vocab_size=2**16)


def test_another_file_under_the_name_does_not_matter(tmp_path: Path) -> None:
    """As where it is tokenized again: what is mapped stays what it was."""
    file = tmp_path / "a.bin"
    np.arange(40_000, dtype="<u2").tofile(file)
    stream = open_tokens(file)
    (tmp_path / "b.bin").write_bytes(b"12")
    (tmp_path / "b.bin").replace(file)
    rows = read_windows(stream, np.array([5]), 8, pack=False, vocab_size=2**16)
    assert rows["tokens"][0].tolist() == list(range(5, 13))
