import json

import pytest

from jaxpar.base.errors import UserError
from jaxpar.train.chat import ChatTemplate, completion_spans, load_template, render

pytest.importorskip("jinja2")

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + strftime_now("%d %b %Y") }}
{{- "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML = """{% if tools %}{{ tools | tojson }}
{% endif %}
{% for message in messages %}
    {% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}
    {% else %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}{% continue %}{% endif %}{% endfor %}"""
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = [*SPECIAL.values(), "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
         "<start_of_turn>", "<end_of_turn>"]  # fmt: skip

TALK = [
    {"role": "user", "content": "Wie geht's, café <b>?  "},
    {"role": "assistant", "content": "Gut 🙂🙂"},
    {"role": "user", "content": "  warum"},
    {"role": "assistant", "content": "weil\n\nes so ist ", "tool_calls": None},
]


def template_of(name):
    return ChatTemplate(TEMPLATES[name], SPECIAL, name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_spans_are_the_answers_with_what_closes_them(name):
    text, spans = completion_spans(TALK, template_of(name))
    assert text == render(TALK, template_of(name))
    closing = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>\n", "gemma": "<end_of_turn>\n", "mistral": "</s>"}[name]
    said = [message["content"] for message in TALK[1::2]]
    said = [answer.strip() for answer in said] if name in ("llama3", "gemma") else said
    assert [text[a:b].removeprefix(" ") for a, b in spans] == [answer + closing for answer in said]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [False, True])
def test_rendering_equals_transformers(name, prompted):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for talk in (TALK, TALK[:1], TALK[:3]):
        want, _ = utils.render_jinja_template(
            [talk], chat_template=TEMPLATES[name], add_generation_prompt=prompted, tools=[{"name": "é<"}], **SPECIAL
        )
        assert render(talk, template_of(name), prompted, tools=[{"name": "é<"}]) == want[0]


def test_a_template_is_found_beside_the_tokenizer(tmp_path):
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    with pytest.raises(UserError, match="has no chat template beside it"):
        load_template(tokenizer)
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None, "legacy": True}
    config.write_text(json.dumps(special | {"chat_template": "one {{ eos_token }}"}))
    assert load_template(tokenizer) == ("one {{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"}, str(config))
    assert render(TALK, load_template(tokenizer)) == "one </s>"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_template(tokenizer).text == "yes"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_template(tokenizer).text == "own"
    config.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_template(tokenizer)


def test_a_refused_conversation_says_why():
    with pytest.raises(UserError, match=r"chat template gemma refuses this conversation: System role not supported"):
        render([{"role": "system", "content": "x"}], template_of("gemma"))
    with pytest.raises(UserError, match="refuses this conversation"):
        render(TALK, ChatTemplate("{% for %}", {}, "broken"))
    rewriting = ChatTemplate("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}", {}, "counting")
    with pytest.raises(UserError, match="does not write turn 2 as an addition to those before it"):
        completion_spans(TALK, rewriting)
