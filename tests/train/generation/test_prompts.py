"""Prompts of a file: what the model is given, and what is left for it to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.data.chat.conversations import Conversation
from jaxpar.data.vocabulary.tokenizer import load_tokenizer
from jaxpar.train.generation.prompts import read_prompts, stop_ids
from jaxpar.train.generation.trained import Trained

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "SECRET"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "4"}
LINES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    # The line of a file, and the messages that are left of it.
    "a completion": ({"prompt": [ASKED], "completion": [ANSWERED]}, [ASKED]),
    "a completion after an answer": (
        {"prompt": [ASKED, {"role": "assistant", "content": "Yes?"}], "completion": [ANSWERED]},
        [ASKED, {"role": "assistant", "content": "Yes?"}],
    ),
    "a completion that calls": (
        {"prompt": [SYSTEM, ASKED], "completion": [CALL, RESULT, ANSWERED]},
        [SYSTEM, ASKED],
    ),
    "no completion": ({"prompt": [ASKED], "completion": None}, [ASKED]),
    "messages": ({"messages": [ASKED, ANSWERED]}, [ASKED]),
    "two answers": ({"messages": [ASKED, CALL, ANSWERED]}, [ASKED]),
    "an earlier answer": (
        {"messages": [ASKED, CALL, RESULT, ANSWERED]},
        [ASKED, CALL, RESULT],
    ),
    "no answer": ({"messages": [SYSTEM, ASKED]}, [SYSTEM, ASKED]),
    "ShareGPT's form": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "SECRET"}]},
        [ASKED],
    ),
}


@pytest.mark.parametrize("shape", LINES)
def test_the_answer_of_a_line_is_no_part_of_its_prompt(shape: str, tmp_path: Path) -> None:
    line, left = LINES[shape]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps(line) + "\n" + json.dumps({"prompt": "a text", "completion": "SECRET"})
    )
    talk, text = read_prompts(file)
    assert isinstance(talk, Conversation) and talk.messages == left
    assert text == "a text"


def test_an_answer_alone_and_other_objects_are_refused_by_the_number_of_their_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [ANSWERED]}))
    with pytest.raises(UserError, match=r"prompts\.jsonl line 1: it has an answer"):
        read_prompts(file)
    file.write_text('{"text": "a"}')
    with pytest.raises(
        UserError, match=r'line 1 has neither "prompt", .*nor "messages" or "conversations"'
    ):
        read_prompts(file)


TURNS = "{% for m in messages %}{{ m.content }}{{ 'c' if long else 'b' }}{% endfor %}"
STOPS: dict[str, tuple[dict[str, str], list[str], list[int]]] = {
    # The templates by name, `data.template_args`, and the ids at which an answer stops.
    "the default": ({"default": TURNS}, [], [1]),
    "with a name that it reads": ({"default": TURNS}, ["long=true"], [2]),
    "one of several": (
        {"default": TURNS, "rag": TURNS.replace("'b'", "'a'")},
        ["chat_template=rag"],
        [0],
    ),
    "one without a default": (
        {"rag": TURNS, "other": TURNS.replace("'b'", "'a'")},
        ["chat_template=rag"],
        [1],
    ),
    "one for tools": (
        {"default": TURNS, "tool_use": TURNS.replace("'b'", "'a' if tools else 'c'")},
        [],
        [0, 1],
    ),
    "of parts": ({"default": TURNS.replace("m.content", "m.content[0].text")}, [], [1]),
    "none by default": ({"rag": TURNS}, [], []),
    "no template": ({}, [], []),
}


@pytest.mark.parametrize("case", STOPS)
def test_an_answer_stops_where_the_template_that_is_taken_closes_it(
    case: str, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    templates, args, ids = STOPS[case]
    (tmp_path / "tokenizer.json").write_text('{"tokenizer": "chars", "chars": "abc"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    config = override(Config(), {"data.source": "chat", "data.template_args": args})
    generator: Any = None  # nothing is generated
    trained = Trained(tmp_path, config, generator, load_tokenizer(tmp_path / "tokenizer.json"))
    assert stop_ids(trained, chat=True) == ids
    assert stop_ids(trained, chat=False) == []
