"""The examples that stand in the docstrings of `data.chat` are true."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxpar.data.chat.answers import ConversationWriter
from jaxpar.data.chat.conversations import read_conversation
from jaxpar.data.chat.template import worker
from jaxpar.data.chat.template.files import ChatTemplate
from jaxpar.data.chat.template.forms import find_forms, shape_messages
from jaxpar.data.chat.template.render import render
from jaxpar.data.chat.turns import (
    STAND_IN,
    _closing_length,
    _place,
    _Prompt,
    _whole_markers,
)

pytest.importorskip("jinja2")

MARKED = "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def writer(text: str) -> ConversationWriter:
    return ConversationWriter(ChatTemplate(text, {}, "t"), {})


def conversation(*messages: dict):
    found = read_conversation({"messages": list(messages)})
    assert found is not None
    return found


def test_a_rendered_conversation():
    text = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = ChatTemplate(text, {}, "t")
    messages = [{"role": "user", "content": "Hi"}]
    assert render(messages, template) == "<|user|>Hi<|end|>"
    assert render(messages, template, True) == "<|user|>Hi<|end|><|assistant|>"


def test_lines_of_the_worker():
    asked = {
        "template": "{{ greeting }} {{ who }}",
        "names": [{"greeting": "Hi"}, {"who": 7}],
        "now": "2026-01-31T00:00:00",
        "seconds": 20,
    }
    lines = "".join(json.dumps(line) + "\n" for line in (asked, {**asked, "names": None}))
    answered = subprocess.run(
        [sys.executable, "-P", str(worker.__file__)],
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in answered.stdout.splitlines()] == [
        [
            {"text": "Hi ", "generated": None, "undefined": ["who"]},
            {"text": " 7", "generated": None, "undefined": ["greeting"]},
        ],
        [{"names": ["greeting", "who"]}],
    ]


def test_the_forms_of_a_message():
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    forms = find_forms(ChatTemplate(text, {}, "t"), {})
    assert forms.needs_text == {"system", "user", "assistant"}
    assert not forms.needs_parts and not forms.arguments
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert shape_messages([parts], forms, "t") == [{"role": "user", "content": "Hi"}]


def test_the_spans_of_answers():
    found = writer(MARKED).answers(
        conversation({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"})
    )
    assert (found.text, found.spans) == ("<user>Hi</s><bot>Yes</s>", [(17, 24)])


def test_where_an_answer_stands():
    prompt = _Prompt("<user>Q</s><bot>", "<user>Q</s>")
    text = "<user>Q</s><bot>A</s><user>R</s><bot>B</s>"
    found = _place(text, text.replace("A", STAND_IN), prompt)
    assert found is not None
    assert (found.answer, found.rest) == ("A", "</s><user>R</s><bot>B</s>")
    text = "<user>Q</s><bot><think></think>A</s>"
    found = _place(text, text.replace("A", STAND_IN), prompt)
    assert found is not None
    assert text[: found.begin] == "<user>Q</s><bot>"
    assert found[1:] == ("<think></think>A", "A", "</s>")


@pytest.mark.parametrize(
    "at_the_end, within, closes",
    [
        ("<|end|>", "<|end|><|user|>R", "<|end|>"),
        ("<|end|><|endoftext|>", "<|end|><|user|>R", "<|end|>"),
        ("", "<|user|>R", "<|user|>"),
        ("bye", "but <|user|>R", None),
    ],
)
def test_what_closes_a_turn(at_the_end, within, closes):
    found = _closing_length(at_the_end, within)
    assert found == (None if closes is None else len(closes))


def test_a_part_of_a_marker():
    assert _whole_markers("</s><|us") == "</s>"


def test_a_thought_that_is_not_written():
    found = writer(MARKED).answers(
        conversation(
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        )
    )
    assert found.notes == {
        "its chat template does not write reasoning_content of assistant messages"
    }


def test_marks_of_two_turns():
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
        "{% if m.thinking %}{% generation %}{{ m.thinking }}{% endgeneration %};{% endif %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}"
        "{% else %}<user>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    talk = conversation(
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "thinking": "hm"},
        {"role": "user", "content": "R"},
        {"role": "assistant", "content": "B"},
    )
    found = writer(text).answers(talk._replace(learned_from=2))
    assert [found.text[begin:end] for begin, end in found.spans] == ["B</s>"]
