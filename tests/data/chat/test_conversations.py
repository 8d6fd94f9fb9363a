"""Conversations in the forms that people have, what of them is the assistant's, and templates that
come to no end.
"""

import json
import signal
import threading

import pytest

from jaxpar.base.errors import UserError
from jaxpar.data.chat.answers import ConversationWriter, open_writer
from jaxpar.data.chat.conversations import read_conversation
from jaxpar.data.chat.template import render as rendering
from jaxpar.data.chat.template.files import ChatTemplate, load_template
from jaxpar.data.chat.template.render import render

pytest.importorskip("jinja2")

from jaxpar.data.chat.template import worker


def spans_of(messages, template):
    """A conversation as text, and which characters of it are the assistant's."""
    found = ConversationWriter(template, {}).answers(
        read_conversation({"messages": list(messages)})
    )
    return found.text, found.spans


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TALK = [
    {"role": "user", "content": "Wie?  "},
    {"role": "assistant", "content": "Gut"},
    {"role": "user", "content": "  warum"},
    {"role": "assistant", "content": "so ist es "},
]
USER, ASSISTANT = (
    {"role": role, "content": said} for role, said in (("user", "Hi"), ("assistant", "Ho"))
)
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "w", "arguments": {"city": "Oslo ä"}},
}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
CALLING = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "4"},
    ASSISTANT,
]
SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
# In the words of public templates: the generation prompt opens a thought, the system message stands
# in the last user's turn, only the end of the conversation is closed by another token, the first
# message is looked at.
DISTILL = """{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% else %}[A]{{ m.content }}</s>
{%- endif %}{% endfor %}{% if add_generation_prompt %}[A]<think>
{% endif %}"""
INSERTS = """{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[I]{% if loop.last and
messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }}[/I]{% else %}{{ m.content }}</s>
{%- endif %}{% endfor %}"""
PHI = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""
LOOKS = """{% if messages[0].role != 'system' %}You help.{% endif %}{% for m in messages %}[{{ m.role }}]
{{- m.content }}<t>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.mark.parametrize(
    ("text", "talk", "answers"),
    [
        (DISTILL, [USER, ASSISTANT], ["Ho</s>"]),
        (DISTILL, [USER, ASSISTANT, USER, ASSISTANT], ["Ho</s>", "Ho</s>"]),
        (INSERTS, [SYSTEM, USER, ASSISTANT], ["Ho</s>"]),
        (INSERTS, [SYSTEM, USER, ASSISTANT, USER, ASSISTANT], ["Ho</s>", "Ho</s>"]),
        (PHI, [USER, ASSISTANT, USER, ASSISTANT], ["Ho<|end|>\n", "Ho<|end|>\n<|endoftext|>"]),
        (LOOKS, [ASSISTANT, USER, ASSISTANT], ["Ho<t>", "Ho<t>"]),
    ],
)
def test_answers_are_found_where_the_generation_prompt_is_not_what_precedes_them(
    text, talk, answers
):
    written, spans = spans_of(talk, ChatTemplate(text, {}, "t"))
    assert [written[begin:end] for begin, end in spans] == answers
    assert written == render(talk, ChatTemplate(text, {}, "t"))


def test_marks_of_what_is_generated_come_first():
    marked = DISTILL.replace(
        "[A]{{ m.content }}</s>", "[A]{% generation %}{{ m.content }}{% endgeneration %}</s>"
    )
    written, spans = spans_of(
        [USER, ASSISTANT, USER, ASSISTANT],
        ChatTemplate(marked, {}, "t"),
    )
    assert [written[begin:end] for begin, end in spans] == ["Ho", "Ho"]


CALLS = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{{- ARGUMENTS }}{% endfor %}<t>{% endfor %}"""


@pytest.mark.parametrize("given", ["object", "text"])
@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("c.function.arguments | tojson", '{"city": "Oslo ä"}'),
        ("c.function.arguments + ';'", '{"city": "Oslo ä"};'),  # as DeepSeek's
        ("c.function.arguments.values() | join", "Oslo ä"),
    ],
)
def test_a_call_is_written_whatever_form_its_arguments_have(given, written, wanted):
    arguments = {"city": "Oslo ä"}
    if given != "object":
        arguments = json.dumps(arguments, ensure_ascii=False)
    call = CALL | {"function": {"name": "w", "arguments": arguments}}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    writer = ConversationWriter(ChatTemplate(CALLS.replace("ARGUMENTS", written), {}, "t"), {})
    assert writer.answers(read_conversation(row)).text == f"[user]Hi<t>[assistant]{wanted}<t>"


def test_a_call_that_the_template_does_not_write_is_refused():
    writer = ConversationWriter(ChatTemplate(PHI, {}, "t"), {})
    with pytest.raises(UserError, match="message 2 calls tools"):
        writer.answers(read_conversation({"messages": CALLING}))


def test_a_turn_without_content_suits_templates_that_need_one_or_null():
    for needs in ("m.content + ''", "'' if m['content'] is none else m.content", "m.content or ''"):
        text = (
            "{% for m in messages %}[{{ NEEDS }}]{{ m.tool_calls | tojson if m.tool_calls "
            "}}{% endfor %}"
        )
        writer = ConversationWriter(ChatTemplate(text.replace("NEEDS", needs), {}, "t"), {})
        assert writer.answers(read_conversation({"messages": CALLING})).text.count('"w"') == 1


@pytest.mark.parametrize(
    "row",
    [
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Ho"},
            ]
        },
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
        },
        {"conversations": [SYSTEM, USER, ASSISTANT]},
        {"messages": None, "conversations": [SYSTEM, USER, ASSISTANT]},
        {"messages": None, "prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        {"system": "Be brief.", "messages": [SYSTEM, USER, ASSISTANT]},
        {
            "messages": [
                SYSTEM | {"from": None, "value": None},
                {"from": "human", "value": "Hi", "role": None, "content": None},
                ASSISTANT,
            ]
        },
        {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        {"messages": [SYSTEM, {"role": "user", "content": PARTS}, ASSISTANT]},
    ],
)
def test_other_forms_of_a_conversation_are_the_same_conversation(row):
    template = ChatTemplate(CHATML, {}, "t")
    found = ConversationWriter(template, {}).answers(read_conversation(row))
    assert (found.text, found.spans) == spans_of([SYSTEM, USER, ASSISTANT], template)


def test_of_a_prompt_with_a_completion_only_the_completion_is_learned():
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    for text in (CHATML, PHI):
        found = ConversationWriter(ChatTemplate(text, {}, "t"), {}).answers(read_conversation(row))
        _, every = spans_of([USER, ASSISTANT] * 2, ChatTemplate(text, {}, "t"))
        assert found.spans == every[1:]


def test_a_template_of_parts_gets_parts():
    parts = (
        "{% for m in messages %}[{% for p in m.content %}{{ p.text if p.type == 'text' }}{% "
        "endfor %}]{% endfor %}"
    )
    assert ConversationWriter(ChatTemplate(parts, {}, "t"), {}).answers(
        read_conversation({"messages": TALK})
    ).text == ("".join(f"[{message['content']}]" for message in TALK))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1 has a part 'image_url'"),
        (
            {"role": "assistant", "tool_calls": ["a"]},
            "message 1 has tool_calls",
        ),
        ({"role": "user", "content": 7}, "message 1 is no object"),
        ({"from": "nobody", "value": "a"}, "message 1 has the role 'nobody'"),
        ({"from": ["gpt"], "value": "a"}, "message 1 has the role \"\\['gpt'\\]\", not one of"),
        ({"role": {"a": 1}, "content": "a"}, "message 1 has the role"),
        (
            ASSISTANT | {"function_call": "look"},
            "message 1 has a function_call .*JSON",
        ),
        (ASSISTANT | {"function_call": ["a"]}, "message 1 has a function_call that is no object"),
        (
            ASSISTANT | {"function_call": {"name": "w"}, "tool_calls": [CALL]},
            "message 1 has a function_call beside other tool_calls",
        ),
    ],
)
def test_a_message_that_is_none_is_refused(message, said):
    with pytest.raises(UserError, match=said):
        read_conversation({"messages": [message]})


def test_a_system_text_beside_another_system_message_is_refused():
    for row in (
        {"messages": [SYSTEM, USER, ASSISTANT]},
        {"prompt": [{"from": "system", "value": "Be brief."}, USER], "completion": [ASSISTANT]},
    ):
        with pytest.raises(UserError, match="another system message"):
            read_conversation({"system": "Be long.", **row})


def test_what_has_no_messages_but_null_is_no_conversation():
    assert read_conversation({"messages": None, "prompt": "a", "completion": "b"}) is None


def test_the_template_for_tools_and_others_by_name_are_taken(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    by_name = {"default": "plain", "tool_use": "tools", "rag": "{{ documents }}"}
    listed = [{"name": name, "template": text} for name, text in by_name.items()]
    listed.append({"name": ["no", "name"], "template": "never"})
    for given in (by_name, listed):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert render(TALK, load_template(tokenizer)) == "plain"
        assert render(TALK, load_template(tokenizer), tools=TOOLS) == "tools"
        assert open_writer(tokenizer, ("chat_template=rag",)).template.text == "{{ documents }}"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xef\xbb\xbffile")
    with pytest.raises(UserError, match=r"has no chat template 'default'.*: it has tool_use"):
        load_template(tokenizer)
    (tmp_path / "chat_template.jinja").write_text("own")
    assert render(TALK, load_template(tokenizer), tools=TOOLS) == "file"


def test_the_date_of_a_template_is_told(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    conversation = read_conversation({"messages": TALK})
    assert (
        open_writer(tmp_path / "tokenizer.json", (), "2020-02-29").prompt(conversation).text
        == "29 Feb 2020"
    )
    with pytest.raises(UserError, match=r"data\.template_date=tomorrow is no date"):
        open_writer(tmp_path / "tokenizer.json", (), "tomorrow")


def test_a_renderer_that_somebody_ends_is_started_again():
    template = ChatTemplate("{{ messages[0].role }}", {}, "t")
    assert render(TALK[:1], template) == "user"
    rendering._worker()._process.terminate()
    assert render(TALK[:1], template) == "user"


@pytest.fixture
def stopped_renderer():
    """The process that renders, stopped: a question waits for its answer until the process is
    continued.
    """
    render(TALK[:1], ChatTemplate("started", {}, "t"))
    process = rendering._worker()._process
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()


def test_an_interrupted_question_leaves_no_answer_to_the_next(stopped_renderer, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            render(TALK[:1], ChatTemplate("first", {}, "t"))
    finally:
        signal.signal(signal.SIGALRM, before)
    stopped_renderer.send_signal(signal.SIGCONT)  # nothing, where the process has ended
    assert render(TALK[:1], ChatTemplate("second", {}, "t")) == "second"


def test_a_killed_renderer_is_no_template_without_end(stopped_renderer):
    threading.Timer(0.05, stopped_renderer.kill).start()
    assert render(TALK[:1], ChatTemplate("written", {}, "t")) == "written"


def test_the_time_is_that_of_each_writing(monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "_limit_time", lambda seconds: seen.append("limit"))
    monkeypatch.setattr(worker, "_answer", lambda template, names: seen.append(names))
    asked = {"template": "", "names": [1, 2], "now": "2026-01-31T00:00:00", "seconds": 20}
    worker._reply(json.dumps(asked))
    assert seen == ["limit", "limit", 1, "limit", 2, "limit"]


def test_a_line_that_the_memory_does_not_hold_is_answered(monkeypatch):
    def full(line):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(worker.json, "loads", full)
        reply = worker._reply("{}")
    assert json.loads(reply) == {"error": "it takes more than 2 GiB of memory"}
    monkeypatch.setattr(rendering._worker(), "_exchange", lambda line: (reply + "\n", None))
    with pytest.raises(UserError, match=r"refuses .*2 GiB"):
        render(TALK, ChatTemplate("a", {}, "t"))


def test_conversations_are_asked_for_in_lines_that_the_process_can_hold(monkeypatch):
    monkeypatch.setattr(rendering, "_BATCH", 100)
    monkeypatch.setattr(rendering, "_LONGEST", 1000)
    lines = []
    exchange = rendering._worker()._exchange
    monkeypatch.setattr(
        rendering._worker(), "_exchange", lambda line: lines.append(line) or exchange(line)
    )
    talks = [[{"role": "user", "content": str(i) * 45}] for i in range(5)]
    found = rendering.try_render(
        ChatTemplate("{{ messages[0].content }}", {}, "t"), [(talk, False) for talk in talks], {}
    )
    assert [one.text for one in found] == [talk[0]["content"] for talk in talks]
    assert 2 <= len(lines) <= 5
    assert rendering.try_render(ChatTemplate("a", {}, "t"), [], {}) == []
    with pytest.raises(UserError, match=r"a conversation of 1,\d\d\d characters, as JSON, is too"):
        render([{"role": "user", "content": "a" * 1000}], ChatTemplate("a", {}, "t"))


def test_a_line_may_have_a_name_that_is_ours(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{{ today }} {{ strftime_now('%Y') }} {{ template }}"
    )
    row = {"messages": TALK, "today": "Monday", "template": "sonnet"}
    writer = open_writer(tmp_path / "tokenizer.json", (), "2020-02-29")
    assert writer.prompt(read_conversation(row)).text == "Monday 2020 sonnet"
    assert render(TALK, writer.template, today="Monday", template="ode")[:7] == "Monday "


LOOP = "{% for i in range(10 ** 5) %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endless", "said"),
    [
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 'x' * 10 ** 12 }}", "takes more than 2 GiB of memory"),
        ("{{ 10 ** (10 ** 10) }}", "stopped after 1 seconds"),
        (f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}", "comes to no end"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_a_template_without_end_is_stopped_in_a_line(endless, said, monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 1)
    with pytest.raises(UserError, match=said) as refused:
        render(TALK, ChatTemplate(endless, {}, "t"))
    assert "\n" not in str(refused.value)
    assert render(TALK[:1], ChatTemplate("{{ messages[0].role }}", {}, "t")) == "user", (
        "others are written after it"
    )
