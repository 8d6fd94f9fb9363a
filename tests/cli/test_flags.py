"""Flags as values: every field of a config is read back as it was written, and help lists each."""

import re

import pytest

from jaxpar.base.config import Config, load_config
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten, presets
from jaxpar.cli.arguments import config_args, parse_words
from jaxpar.cli.commands import TrainArgs
from jaxpar.cli.flags import flags_of, read_flags, replace_fields
from jaxpar.cli.main import main
from jaxpar.cli.trained import GenerateArgs


def words_of(config: Config) -> list[str]:
    """A config as the words of a command line, true and false as TOML has them."""
    words = list[str]()
    for key, value in flatten(config).items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, tuple):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            words.append(f"{flag}={str(value).lower()}")
        else:
            words.append(f"{flag}={value}")
    return words


@pytest.mark.parametrize("name", presets("jaxpar.configs"))
def test_every_field_is_read_back_as_it_was_written(name):
    """Of the right types: `1 == 1.0 == True` would hide another."""
    config = load_config(name)
    values, left = read_flags(flags_of(TrainArgs), words_of(config))
    assert not left
    read = flatten(replace_fields(TrainArgs(Config()), values).config)
    wanted = flatten(config)
    for key, value in wanted.items():
        assert read[key] == value, key
        assert isinstance(read[key], tuple if isinstance(value, tuple) else type(value)), key


def test_help_lists_every_flag_and_no_other(capsys):
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--help", "all"])
    listed = set(re.findall(r"^\W*(--[a-z].*?)(?=\s)", capsys.readouterr().out, re.MULTILINE))
    ours = {"--" + key.replace("_", "-") for key in flags_of(TrainArgs)}
    assert listed == ours


def test_what_a_flag_takes():
    """A switch nothing, a list all words up to the next flag, a repeated flag one each time."""
    args = parse_words(
        "jaxpar generate RUN",
        GenerateArgs(),
        ["--json", "--template-args", "a=1", "b=2", "--prompt", "x", "--prompt=--y"],
    )
    assert args.json and not args.chat
    assert args.template_args == ("a=1", "b=2")
    assert args.prompt == ("x", "--y")


def test_a_negative_number_is_a_value_and_a_flag_is_none():
    _, args = config_args("jaxpar train", TrainArgs, ["tiny", "--mesh.data", "-1", "--verify"])
    assert args.config.mesh.data == -1 and args.verify
    with pytest.raises(UserError, match=r"--mesh\.data takes a value, and none follows"):
        config_args("jaxpar train", TrainArgs, ["tiny", "--mesh.data", "--verify"])


def test_a_message_is_one_sentence_on_any_terminal():
    """It was cut out of a box, whose lines an ASCII terminal draws in other signs."""
    with pytest.raises(UserError) as refused:
        parse_words("jaxpar train CONFIG", TrainArgs(Config()), ["--train.steps", "x"])
    assert str(refused.value) == "--train.steps is a whole number, found 'x'"
