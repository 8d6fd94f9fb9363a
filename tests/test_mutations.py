"""The planted faults of `mutations.py` can be planted: each text stands once in its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation, planted

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_has_its_place(mutation: Mutation) -> None:
    text = planted(mutation)
    assert text is not None, "the text stands there once"
    compile(text, mutation.file, "exec")
    for word in mutation.likely.split(" -k ")[0].split():
        assert (ROOT / word.split("::")[0]).exists(), word
