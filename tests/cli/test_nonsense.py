"""Nonsense settings are refused in a sentence; `python tests/nonsense.py` has 500 train, where they
are accepted.
"""

from pathlib import Path

import pytest
from nonsense import settings, summary

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten

VALUES = (
    float("nan"),
    float("inf"),
    -1,
    0,
    2**70,
    1e308,
    "",
    "\u65e5",
    None,
    [],
    {},
    object(),
)


def test_through_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first settings of the list, parsed and checked."""
    monkeypatch.chdir(tmp_path)
    line, wrong = summary(settings()[:25], prove=False)
    print(line)
    assert not wrong and line.endswith("0 wrong")


@pytest.mark.parametrize("key", flatten(Config()))
def test_through_a_program(key: str) -> None:
    """Every key with every value, of the wrong types too: a config that passes has a number in its
    range.
    """
    for value in VALUES:
        try:
            config = check(override(Config(), {key: value}))
        except UserError as error:
            assert len(str(error)) < 1000
        else:
            default = flatten(Config())[key]
            # a rule that nobody wrote is a tuple of a type of its own
            kind = tuple if isinstance(default, tuple) else type(default)
            assert type(flatten(config)[key]) is kind
