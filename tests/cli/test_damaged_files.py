"""Damaged files of every kind end in one line that names the place: a few trials of each reader of
`fuzz_readers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_readers import trials
from fuzzed_files import READERS, Reader, make_files, wait_for_nobody
from tiers import some

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("damaged")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        wait_for_nobody(patch, folder / "cache")
        make_files(folder)
        yield folder


@pytest.mark.parametrize(
    "reader", some([one for one in READERS if one.quick], 2), ids=lambda reader: reader.name
)
def test_what_is_damaged_is_refused_in_one_line_that_names_it(files: Path, reader: Reader) -> None:
    faults = [
        f"{outcome.kind} at --only {reader.name!r} --seed {number}: {outcome.said}"
        for number, _, outcome in trials(reader, reader.quick, seed=0)
        if outcome.kind not in ("taken", "refused")
    ]
    assert not faults
