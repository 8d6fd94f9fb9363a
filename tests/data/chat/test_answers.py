"""What of a conversation is learned: the answers with what closes them, all that they say, and
nothing else.
"""

import json

import pytest

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.chat import load_examples
from jaxpar.data.chat.answers import ConversationWriter, open_writer
from jaxpar.data.chat.conversations import read_conversation
from jaxpar.data.chat.template.files import ChatTemplate
from jaxpar.data.chat.template.render import names_read

pytest.importorskip("jinja2")

USER = {"role": "user", "content": "Where?"}
ANSWER = {"role": "assistant", "content": "Here."}
TOLD = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "4"}
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ "
    "c.function.arguments }}{% endfor %}",
)
# In the words of public templates. Only the last answer has a thought, which may be empty (Qwen
# 3's).
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.last and m.role == 'assistant' %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# A channel stands before an answer, and the last one is closed by another token (gpt-oss's).
CHANNEL = """{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|{{ 'return' if loop.last else 'end' }}|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
# Nothing but the next turn ends one (GLM 4.5's).
OPEN = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# The prompt opens a thought that a finished turn writes empty (Nemotron's), or not at all before a
# call (DeepSeek's).
OPENS = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}
{{- '' if m.tool_calls else '<think></think>' }}{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<|call|>{{ c.function.arguments + c.function.name }}{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif %}"""
# A call is written only where the content is null, and then nothing closes it (R1's distilled
# models).
NULL = """{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}
{%- elif m.role == 'tool' %}<T>{{ m.content }}
{%- elif m.content is none %}<A>{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}</call>
{%- endfor %}{% else %}<A>{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>
{% endif %}"""


# A turn has two marks.
MARKS = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content[:-1] }}{% endgeneration %}-
{%- generation %}{{ m.content[-1] }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


def writer_of(text, **names):
    return ConversationWriter(ChatTemplate(text, {}, "t"), names)


def learned(text, row):
    found = writer_of(text).answers(read_conversation(row))
    return [found.text[begin:end] for begin, end in found.spans]


def call(arguments="{}", name="look"):
    return {
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def calling(*calls, **more):
    return {"role": "assistant", "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (THINKS, ["Here.<|im_end|>\n", "<think>\n\n</think>\n\nHere.<|im_end|>\n"]),
        (
            CHANNEL,
            [
                "<|channel|>final<|message|>Here.<|end|>",
                "<|channel|>final<|message|>Here.<|return|>",
            ],
        ),
        (OPEN, ["Here.<|user|>", "Here."]),
        (OPENS, ["</think>Here.<|end|>"] * 2),
    ],
)
def test_an_answer_is_all_after_the_generation_prompt_with_what_ends_it(text, answers):
    assert learned(text, {"messages": [USER, ANSWER] * 2}) == answers


def test_what_is_learned_in_two_forms_or_without_an_end_is_said():
    def notes(text, turns):
        return " ".join(
            writer_of(text).answers(read_conversation({"messages": [USER, ANSWER] * turns})).notes
        )

    assert "begins an earlier answer otherwise than the last" in notes(THINKS, 2)
    assert "nothing that closes an answer" in notes(OPEN, 1)
    assert not notes(THINKS, 1) + notes(CHANNEL, 2) + notes(CHATML, 2)


def test_a_thought_that_an_earlier_answer_loses_is_refused():
    thought = ANSWER | {"reasoning_content": "Hm, where?"}
    with pytest.raises(UserError, match=r"turn 2 .*: split the conversation"):
        learned(THINKS, {"messages": [USER, thought, USER, thought]})
    wanted = ["<think>\nHm, where?\n</think>\n\nHere.<|im_end|>\n"]
    assert learned(THINKS, {"prompt": [USER, thought, USER], "completion": [thought]}) == wanted


def test_a_marker_that_only_begins_as_the_prompt_does_is_learned_whole():
    row = {"messages": [USER, calling(call()), USER, ANSWER]}
    assert learned(OPENS, row) == ["<|call|>{}look<|end|>", "</think>Here.<|end|>"]


@pytest.mark.parametrize(
    "content",
    [{"content": None}, {"content": ""}, {}],
)
def test_a_call_is_written_by_a_template_that_needs_its_content_null(content):
    row = {"messages": [USER, calling(call(), **content), TOLD, ANSWER]}
    assert learned(NULL, row) == ["<call>look{}</call>", "Here.</s>"]


def test_arguments_are_objects_for_a_template_that_prints_a_text_as_it_is():
    text = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}
{{- a if a is string else a.items() | map('join', ':') | join }}{% endfor %}.{% endfor %}"""
    row = {"messages": [USER, calling(call('{"city": "Oslo"}'))]}
    assert writer_of(text).answers(read_conversation(row)).text == "Where?.city:Oslo."
    kept = {"messages": [USER, calling(call('{"city":"Oslo"}'))]}
    both = text.replace("a.items() | map('join', ':') | join", "a | tojson")
    assert '{"city":"Oslo"}' in writer_of(both).answers(read_conversation(kept)).text, (
        "as it was given"
    )


def test_an_answer_with_an_empty_list_of_calls_is_an_answer():
    text = CHATML.replace("m.content", "m.tool_calls[0] if 'tool_calls' in m else m.content")
    assert learned(text, {"messages": [USER, ANSWER | {"tool_calls": []}]}) == ["Here.<|im_end|>\n"]


def test_an_older_call_is_a_call_and_its_functions_are_tools():
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "look", "arguments": "{}"},
    }
    row = {
        "functions": [{"name": "look"}],
        "messages": [USER, older, {"role": "function", "content": "4"}, ANSWER],
    }
    found = read_conversation(row)
    assert found.names == {"tools": [{"type": "function", "function": {"name": "look"}}]}
    assert [message["role"] for message in found.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert learned(CALLS, row)[0] == "look{}<|im_end|>\n"
    with pytest.raises(UserError, match="message 2 calls tools"):
        learned(CHATML, row)


def test_an_older_call_may_be_text_and_stand_beside_itself():
    function = {"name": "look", "arguments": "{}"}
    for more in (
        {"content": "I look: ", "function_call": json.dumps(function)},
        {"content": "I look: ", "function_call": json.dumps([function])},
        {"content": "I look: ", "function_call": function, "tool_calls": [call()]},
        {"content": "I look: ", "function_call": function, "tool_calls": [function]},
        {"content": "I look: ", "function_call": None, "tool_calls": [call()]},
    ):
        row = {"messages": [USER, {"role": "assistant", **more}]}
        assert learned(CALLS.replace("c.function", "(c.function or c)"), row) == [
            "I look: look{}<|im_end|>\n"
        ]


@pytest.mark.parametrize(
    ("text", "message", "said"),
    [
        (
            CHATML,
            {"role": "assistant", "reasoning_content": "Hm."},
            "message 2 has reasoning_content, which the chat",
        ),
        (
            NULL,
            calling(call(), content="I look."),
            "message 2 has a call",
        ),
        (
            CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            calling(call(), call(name="b")),
            "a call",
        ),
        (
            CHATML.replace("m.content", "m.text"),
            ANSWER,
            "message 2 has the content",
        ),
    ],
)
def test_an_answer_that_the_template_does_not_write_is_refused(text, message, said):
    with pytest.raises(UserError, match=said):
        learned(text, {"messages": [USER, message]})


def test_what_else_the_template_does_not_write_is_said():
    text = CHATML.replace("for m in messages", "for m in messages if m.role != 'developer'")
    row = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            USER,
            ANSWER | {"reasoning_content": "Hm."},
        ]
    }
    drops = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    thinks = {"messages": [USER, {"role": "assistant", "content": "<think>Hm.</think>Here."}]}
    (note,) = writer_of(drops).answers(read_conversation(thinks)).notes
    assert (
        note == "its chat template does not write the thought in the content of assistant messages"
    )
    notes = writer_of(text).answers(read_conversation(row)).notes
    assert notes == {
        "its chat template does not write reasoning_content of assistant messages",
        "its chat template does not write the content of developer messages",
    }


LONG = "She asked where it is, and it is here."


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (ANSWER | {"reasoning_content": LONG}, "reasoning_content of assistant"),
        (
            {"role": "assistant", "content": f"<think>{LONG}</think>{LONG}"},
            "the thought in the content of assistant",
        ),
        ({"role": "developer", "content": LONG}, "the content of developer"),
    ],
)
def test_what_is_not_written_is_said_also_where_another_says_the_same(message, what):
    text = CHATML.replace("m.content", "m.content.split('</think>')[-1]").replace(
        "for m in messages", "for m in messages if m.role != 'developer'"
    )
    row = {"messages": [{"role": "user", "content": LONG}, message, USER, ANSWER]}
    notes = writer_of(text).answers(read_conversation(row)).notes
    assert notes == {f"its chat template does not write {what} messages"}


def test_a_learned_answer_in_the_words_of_the_question_is_not_taken_for_written():
    text = CHATML.replace("m.content", "m.content if m.role == 'user' else 'Yes.'")
    row = {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]}
    with pytest.raises(UserError, match="message 2 has the content"):
        learned(text, row)


def test_a_template_that_looks_at_the_end_of_words_is_not_misled_by_a_mark():
    """Without the mark it leaves out what follows a question mark."""
    text = (
        "{% set ns = namespace(asked=false) %}{% for m in messages %}[{{ m.role }}]"
        "{{ '' if ns.asked else m.content }}<t>{% set ns.asked = m.content.endswith('?') %}"
        "{% endfor %}"
    )
    row = {"messages": [USER, {"role": "tool", "content": LONG}, ANSWER]}
    notes = writer_of(text).answers(read_conversation(row)).notes
    assert notes == {"its chat template does not write the content of tool messages"}


def test_a_long_conversation_is_looked_at_in_one_more_writing(monkeypatch):
    writer = writer_of(CHATML.replace("m.content", "m.content | trim"))
    spaced = ANSWER | {"content": "<think>\nHm. \n</think>\n\nHere.\n"}
    row = read_conversation({"messages": [USER, spaced] * 20})
    asked = []
    write = writer.write
    monkeypatch.setattr(
        writer, "write", lambda talks, names: asked.extend(talks) or write(talks, names)
    )
    writer.answers(row, find=False)
    assert len(asked) == 1


def test_tools_and_documents_that_the_template_does_not_write_are_said():
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = {"messages": [USER, ANSWER], "tools": tools, "documents": [{"text": "Here."}], "id": 7}
    looks = "{% if tools %}{% endif %}"
    both = "{{ tools | tojson }}{{ documents | tojson }}"
    for text, wanted in (
        (CHATML, {"tools", "documents"}),
        (looks + CHATML, {"tools", "documents"}),
        ("{{ documents }}" + CHATML, {"tools"}),
        (both + CHATML, set()),
    ):
        notes = writer_of(text).answers(read_conversation(row)).notes
        assert notes == {f"its chat template does not write {what}" for what in wanted}
    assert not writer_of(CHATML).answers(read_conversation({"messages": [USER, ANSWER]})).notes


def test_a_system_text_beside_messages_is_their_first():
    rows = (
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
    )
    for row in rows:
        found = writer_of(CHATML).answers(read_conversation({"system": "Be brief.", **row}))
        assert found.text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
        assert [found.text[begin:end] for begin, end in found.spans] == ["Here.<|im_end|>\n"]


def test_an_answer_of_weight_0_is_not_learned():
    bad = {"role": "assistant", "content": "Nowhere.", "weight": 0}
    row = {
        "messages": [
            USER | {"weight": 0.5},
            bad,
            USER,
            ANSWER | {"weight": 1.0},
        ]
    }
    assert learned(CHATML, row) == ["Here.<|im_end|>\n"]
    assert learned(MARKS, row) == ["Here", "."]
    for weight in (0.5, "0", [1], float("nan")):
        with pytest.raises(UserError, match=r"message 2 has the weight .*, where an answer has 1"):
            read_conversation({"messages": [USER, ANSWER | {"weight": weight}]})


def test_of_several_marks_in_a_turn_those_of_a_completion_are_learned():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert learned(MARKS, row) == ["Here", "."]
    rewriting = "{% if messages | length < 4 %}x{% endif %}" + MARKS
    with pytest.raises(UserError, match="cannot be told"):
        learned(rewriting, row)


def test_only_names_that_come_from_outside_are_read(tmp_path):
    text = """{% macro show(a, b=depth) %}{{ later(a) }}{{ b }}{% endmacro %}{% macro later(a) %}{{ a }}{% endmacro %}
{% if not tools is defined %}{% set tools = none %}{% endif %}{% set mood = mood | default('glad') %}
{% for m in messages %}{% if m.role == 'user' %}{% set said = m.content %}{% elif loop.last %}{% set said = '' %}
{% else %}{{ raise_exception('no') }}{% endif %}{{ show(said) }}{% set ns = namespace(a=1) %}{% for x in said %}
{% set ns.a = x %}{% endfor %}{{ mood }}{% endfor %}{% set wrapped %}{{ place }}{% endset %}{{ wrapped }}"""
    assert names_read(ChatTemplate(text, {}, "t")) == {
        "depth",
        "tools",
        "mood",
        "messages",
        "place",
    }
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(UserError, match=r"said: .*depth, mood, place, tools$"):
        open_writer(tmp_path / "tokenizer.json", ("said=1",))


def test_notes_of_templates_are_counted_in_the_description_of_the_data(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: n for n, letter in enumerate(sorted(set(CHATML + "Where?Here." + "Hm.")))}
    tokenizers.Tokenizer(tokenizers.models.BPE(letters, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    thought = {"messages": [USER, ANSWER | {"reasoning_content": "Hm."}]}
    rows = [thought, {"messages": [USER, ANSWER]}, thought]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(source="chat", tokenizer=str(tmp_path / "tokenizer.json"), seq_len=128)
    (found,), _ = load_examples(
        [str(tmp_path / "a.jsonl")],
        data,
        len(letters),
    )
    said = (
        "its chat template does not write reasoning_content of assistant messages: 2 of 3 examples"
    )
    assert found.amount.endswith(f"({said})")
