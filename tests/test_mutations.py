"""The planted faults of `mutations.py` can be planted: each text stands once in its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_has_its_place(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text("utf-8").count(mutation.old) == 1
    for word in mutation.likely.split(" -k ")[0].split():
        assert (ROOT / word.split("::")[0]).exists(), word
