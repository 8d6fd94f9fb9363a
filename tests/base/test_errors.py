"""The hint in an error message, and paths that are URLs."""

from pathlib import Path

import pytest

from jaxpar.base.errors import UserError, require_local, suggest


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "train"),
        ("tokenise", "tokenize"),
        ("eval", "eval"),
    ],
)
def test_the_closest_choice_is_named(word, hint):
    assert suggest(word, ["train", "eval", "tokenize"]) == f" (did you mean {hint!r}?)"


def test_nothing_is_named_when_nothing_is_close():
    assert suggest("xyz", ["train", "eval"]) == ""
    assert suggest("train", []) == ""


@pytest.mark.parametrize(
    "url", ["gs://bucket/run", "s3://bucket", "hf://datasets/x", "file:///tmp/x", "HTTPS://x.y/z"]
)
def test_a_url_is_refused_also_where_it_has_become_a_path(url):
    scheme, rest = url.split("://")
    for path in (url, Path(url)):
        with pytest.raises(UserError, match=f"^{scheme}://{rest.lstrip('/')} is a URL"):
            require_local("here", path)


@pytest.mark.parametrize("name", ["wikitext:wikitext-103-raw-v1:train", "data:train", "s3:x/y"])
def test_names_with_a_colon_are_paths_but_with_two_slashes_after_it(name):
    require_local("", name, Path(name), Path("C:/texts"), "a b 0.7", "data/:train", "/tmp/s3:/x")
    url = name.replace(":", "://", 1)
    with pytest.raises(UserError, match=f"^{url} is a URL"):
        require_local("", url)
