"""The hint in an error message."""

import pytest

from jaxpar.base.errors import suggest

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("word", "hint"), [("trian", "train"), ("tokenise", "tokenize"), ("eval", "eval")])
def test_the_closest_choice_is_named(word, hint):
    assert suggest(word, ["train", "eval", "tokenize"]) == f" (did you mean {hint!r}?)"


def test_nothing_is_named_when_nothing_is_close():
    assert suggest("xyz", ["train", "eval"]) == ""
    assert suggest("train", []) == ""
