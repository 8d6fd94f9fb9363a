import gzip
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.chat.answers import ConversationWriter, open_writer
from jaxpar.data.chat.conversations import read_conversation
from jaxpar.data.chat.template.files import ChatTemplate, load_template
from jaxpar.data.chat.template.render import render
from jaxpar.data.corpus import load_corpus, train_batches, val_batches

pytest.importorskip("jinja2")


def spans_of(messages, template):
    """A conversation as text, and which characters of it are the assistant's."""
    found = ConversationWriter(template, {}).answers(
        read_conversation({"messages": list(messages)})
    )
    return found.text, found.spans


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
{% if message.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}
{%- generation %}{{ message.content | trim + '<end_of_turn>\\n' }}{% endgeneration %}
{% else %}{{ '<start_of_turn>user\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}{% continue %}{% endif %}{% endfor %}"""
TEMPLATES = {"llama3": LLAMA3, "chatml": CHATML, "gemma": GEMMA, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = [
    *SPECIAL.values(),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
]

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
    text, spans = spans_of(TALK, template_of(name))
    assert text == render(TALK, template_of(name))
    closing = {
        "llama3": "<|eot_id|>",
        "chatml": "<|im_end|>\n",
        "gemma": "<end_of_turn>\n",
        "mistral": "</s>",
    }[name]
    said = [message["content"] for message in TALK[1::2]]
    if name in ("llama3", "gemma"):
        said = [answer.strip() for answer in said]
    assert [text[a:b].removeprefix(" ") for a, b in spans] == [answer + closing for answer in said]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [False, True])
def test_rendering_equals_transformers(name, prompted):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for talk in (TALK, TALK[:1], TALK[:3]):
        want, _ = utils.render_jinja_template(
            [talk],
            chat_template=TEMPLATES[name],
            add_generation_prompt=prompted,
            tools=[{"name": "é<"}],
            **SPECIAL,
        )
        assert render(talk, template_of(name), prompted, tools=[{"name": "é<"}]) == want[0]


def test_a_template_is_found_beside_the_tokenizer(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(UserError, match="no chat template beside"):
        load_template(tokenizer)
    special = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "legacy": True,
    }
    config.write_text(json.dumps(special | {"chat_template": "one {{ eos_token }}"}))
    found = load_template(tokenizer)
    assert found[:3] == (
        "one {{ eos_token }}",
        {"bos_token": "<s>", "eos_token": "</s>"},
        str(config),
    )
    assert render(TALK, load_template(tokenizer)) == "one </s>"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_template(tokenizer).text == "yes"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_template(tokenizer).text == "own"
    config.write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_template(tokenizer)


def test_a_refused_conversation_says_why():
    with pytest.raises(UserError, match=r"gemma refuses .*: System role not supported"):
        render([{"role": "system", "content": "x"}], template_of("gemma"))
    with pytest.raises(UserError, match="refuses this conversation"):
        render(TALK, ChatTemplate("{% for %}", {}, "broken"))
    text = (
        "{% for m in messages %}{{ m.content if loop.last else '<' + m.content + m.content + "
        "'>' }}{% endfor %}"
    )
    rewriting = ChatTemplate(text, {}, "twice")
    with pytest.raises(UserError, match=r"turn 2 .*data\.loss_on=all"):
        spans_of(TALK, rewriting)
    text = (
        "{% for m in messages %}{{ m.content if loop.last else m.content.split('|')[-1] "
        "}}\n{% endfor %}"
    )
    said = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "thought|said"})
    with pytest.raises(UserError, match=r"turn 2 .*: split the conversation"):
        spans_of(said * 2, ChatTemplate(text, {}, "forgetful"))
    assert spans_of(said, ChatTemplate(text, {}, "forgetful"))[1] == [(2, 15)], (
        "and that advice is true"
    )


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level tokenizer with merges, as GPT-2's, and the templates' marks as special
    tokens.
    """
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["Wie geht's, café? Gut, gut! warum weil es so ist"] * 9, trainer)
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made.save(str(file))
    return file


@pytest.fixture
def chat(bpe, tmp_path):
    """`chat(rows, template="chatml", **changes)`: the config of a JSONL file of these rows, and of
    that template.
    """

    def write(rows, template="chatml", **changes):
        (tmp_path / "tokenizer.json").write_text(bpe.read_text())
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[template])
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
        found = {
            "path": str(tmp_path / "talk.jsonl"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
        } | changes
        return DataConfig(**({"source": "chat", "seq_len": 64, "val_fraction": 0.0} | found))

    return write


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_mask_equal_transformers(name, chat):
    """transformers marks the answers by the template's own tags; ours are what the assistant's
    turns add.
    """
    transformers = pytest.importorskip("transformers")
    train = load_corpus(chat([{"messages": TALK}], name, seq_len=200), 400).train
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(chat([]).tokenizer), **SPECIAL)
    want = theirs.apply_chat_template(
        TALK, chat_template=TEMPLATES[name], return_dict=True, return_assistant_tokens_mask=True
    )
    np.testing.assert_array_equal(
        np.append(train.ids, train.labels[-1]),
        want["input_ids"],
    )
    mask = np.array(want["assistant_masks"], bool)
    np.testing.assert_array_equal(
        train.labels,
        np.where(mask, want["input_ids"], -1)[1:],
    )


def test_loss_on_all_counts_every_token(chat):
    train = load_corpus(chat([{"messages": TALK}], loss_on="all"), 400).train
    assert (train.labels != -1).all()
    np.testing.assert_array_equal(train.ids[1:], train.labels[:-1])


def test_what_follows_an_answer_does_not_count_where_no_token_has_the_space_between(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"Q": 0, "a": 1, "b": 2}, unk_token="b")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ 'Q ' if m.role == 'user' else '' }}{{ m.content }}\n{% endfor %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    data = DataConfig(
        source="chat", path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert load_corpus(replace(data, val_fraction=0.0), 3).train.labels.tolist() == [
        -1,
        2,
        -1,
        -1,
        2,
    ]


def test_a_prompt_and_its_completion_need_no_template(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab\u2028", "completion": "cé"}\n\n', "utf-8")
    data = DataConfig(source="chat", path=str(tmp_path), seq_len=9, val_fraction=0.0)
    train = load_corpus(data, 256).train
    assert bytes(train.ids.astype(np.uint8)) == "ab\u2028c".encode() + "é".encode()[:1]
    assert train.labels.tolist() == [
        -1,
        -1,
        -1,
        -1,
        *"cé".encode(),
    ]


def test_an_example_of_a_tokenizer_of_characters_has_a_token_for_each(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"tokenizer": "chars", "chars": "abcé"}')
    (tmp_path / "a.jsonl").write_text('{"prompt": "éa", "completion": "éb"}', "utf-8")
    data = DataConfig(
        source="chat", path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert load_corpus(replace(data, val_fraction=0.0), 4).train.labels.tolist() == [-1, 3, 1]


def test_a_token_that_reaches_into_a_completion_counts(tmp_path):
    """Without its label nothing teaches the completion's first letter."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: n for n, letter in enumerate("abcd")}
    pairs = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            letters | {"bc": 4},
            [("b", "c")],
        )
    )
    pairs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "aab", "completion": "cd"}')
    data = DataConfig(
        source="chat", path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    train = load_corpus(replace(data, val_fraction=0.0), 5).train
    assert train.ids[:3].tolist() == [0, 0, 4]
    assert train.labels[:3].tolist() == [-1, 4, 3]


def talks(count, length=5):
    rng = np.random.default_rng(0)
    return [
        {"prompt": f"{i}?", "completion": "x" * int(n)}
        for i, n in enumerate(rng.integers(1, length, count), 100)
    ]


@pytest.mark.parametrize("pack", [False, True])
def test_examples_stay_whole_and_the_position_is_exact(chat, pack):
    data = replace(
        chat(talks(50, 12)),
        tokenizer="bytes",
        seq_len=32,
        pack=pack,
        prefetch=0,
    )
    train = load_corpus(data, 256).train
    iterator = train_batches(train, data, 4, range(4), 256)
    states, whole = zip(
        *[(json.dumps(iterator.get_state()), next(iterator)) for _ in range(40)], strict=True
    )
    resumed = train_batches(
        train,
        replace(data, prefetch=2),
        4,
        [1, 3],
        256,
    )
    for step in (0, 1, 7, 23, 36):
        resumed.set_state(json.loads(states[step]))
        for batch in whole[step : step + 3]:
            for key, array in next(resumed).items():
                np.testing.assert_array_equal(array, batch[key][[1, 3]])
    seen = []
    for batch in whole:
        assert all(array.dtype == np.int32 and array.shape == (4, 32) for array in batch.values())
        for row in range(4):
            if pack:
                segments = batch["segments"][row]
            else:
                segments = (np.arange(32) < (batch["tokens"][row] != 0).sum()).astype(int)
            assert (batch["labels"][row][segments == 0] == -1).all()
            for segment in range(1, segments.max() + 1):
                place = segments == segment
                seen.append(bytes(batch["tokens"][row][place].astype(np.uint8)))
                if pack:
                    assert batch["positions"][row][place].tolist() == list(range(place.sum()))
                assert (batch["labels"][row][place] == ord("x")).sum() == seen[-1].count(b"x") + 1
    texts = {(row["prompt"] + row["completion"])[:-1].encode() for row in talks(50, 12)}
    times = [seen.count(text) for text in texts]
    assert max(times) - min(times) <= 2 and sum(times) == len(seen), "an epoch has each once"
    assert pack or seen[:50] != seen[50:100], "an epoch has an order of its own"
    assert not pack or np.mean([batch["segments"] > 0 for batch in whole]) > 0.85


def test_the_last_examples_are_held_out_and_each_is_read_once(chat):
    data = replace(chat(talks(21)), tokenizer="bytes", seq_len=16, val_fraction=0.3)
    corpus = load_corpus(data, 256)
    assert (corpus.train.size, corpus.val.size) == (14, 7)
    read = list(val_batches(corpus.val, data, 4, range(4), 256))
    assert [int((batch["labels"] != -1).any(axis=1).sum()) for batch in read] == [4, 3]
    assert bytes(read[0]["tokens"][0][:4].astype(np.uint8)) == b"114?"
    with pytest.raises(UserError, match="single example"):
        load_corpus(replace(chat(talks(1)), val_fraction=0.1), 400)


def test_too_long_examples_are_cut_and_counted(chat):
    rows = [
        {"prompt": "p" * 30, "completion": "c"},
        {"prompt": "p", "completion": "c" * 30},
        *talks(2),
    ]
    train = load_corpus(replace(chat(rows), tokenizer="bytes", seq_len=16), 256).train
    assert (
        train.size == 3
        and "(2 were longer than data.seq_len and cut, 1 of them left out" in train.amount
    )
    with pytest.raises(UserError, match=r"no example .*data\.seq_len=16"):
        load_corpus(replace(chat(rows[:1]), tokenizer="bytes", seq_len=16), 256)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', "is not valid JSON: "),
        ('{"prompt": ' + "9" * 5000 + "}", "is not valid JSON: .*digits"),
        ('{"messages": ' + "[" * 200_000, "is not valid JSON: its lists and objects are too deep"),
        (
            {"messages": TALK, "tools": "[" * 200_000},
            "the text of tools is not valid JSON: its lists",
        ),
        ("7", "found 7, not messages, or prompt and completion as text"),
        ({"prompt": "a"}, "found the keys prompt, not messages"),
        ({"messages": []}, "messages is no list with a message in it"),
        (
            {"messages": [{"role": "user"}]},
            "message 1 is no object with a role and a content that is text",
        ),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 1 has the role 'bot', not one of system, ",
        ),
        ('{"prompt": "a", "completion": "\\ud800"}', "surrogates"),
        ({"messages": TALK[:1]}, "nothing to learn: no assistant message"),
        ({"prompt": "a", "completion": ""}, "nothing to learn: "),
        ({"messages": [{"role": "system", "content": "x"}, *TALK]}, "System role not supported"),
    ],
)
def test_a_broken_line_is_named_with_its_number(chat, row, message):
    data = chat([{"messages": TALK}, "", row], "gemma")
    with pytest.raises(UserError, match=rf"talk\.jsonl, line 3.*{message}") as refused:
        load_corpus(data, 400)
    assert "\n" not in str(refused.value)


def test_other_bad_input_is_refused(chat):
    with pytest.raises(UserError, match=r"talk\.jsonl has no example"):
        load_corpus(chat([""]), 400)
    with pytest.raises(UserError, match=r"has \d+ tokens, model\.vocab_size=270"):
        load_corpus(chat([{"messages": TALK}]), 270)
    with pytest.raises(UserError, match=r"needs data\.path"):
        load_corpus(replace(chat([]), path=""), 400)


def test_what_a_line_and_a_setting_name_reaches_the_template(chat, tmp_path):
    tools = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
    own = {"tools": tools, "mood": "glad", "id": 7, "chat_template_kwargs": {"deep": 1}}
    data = chat([{"messages": TALK} | own])
    text = "{{ mood }} {{ deep }} {{ loud }} {{ tools[0].function.name }} {{ documents }}" + CHATML
    (tmp_path / "chat_template.jinja").write_text(text)
    data = replace(data, template_args=("loud=false", "mood=sad"))
    conversation = read_conversation(json.loads((tmp_path / "talk.jsonl").read_text()))
    writer = open_writer(data.tokenizer, data.template_args)
    for found in (writer.answers(conversation), writer.prompt(conversation)):
        assert found.text.startswith("glad 1 False w None")
    assert load_corpus(replace(data, seq_len=512), 400).train.size == 1
    for wrong, said in (
        (
            "loudly=1",
            "loudly .*'loud'.*: .*deep, documents, loud, .*tools",
        ),
        ("loud", "takes NAME=VALUE"),
        ("messages=1", "does not read messages"),
        ("chat_template=rag", "has no chat template 'rag'.*: it has default"),
    ):
        with pytest.raises(UserError, match=said):
            open_writer(data.tokenizer, (wrong,))


def test_names_of_all_files_reach_the_template_and_a_missing_one_is_said(chat, tmp_path):
    data = chat([{"messages": TALK}], seq_len=512)
    config = SPECIAL | {"extra_special_tokens": {"image_token": "<img>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"sep_token": {"content": "<sep>"}})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ image_token }}{{ sep_token }}{{ video_token }}" + CHATML
    )
    found = open_writer(data.tokenizer, ()).answers(read_conversation({"messages": TALK}))
    assert found.text.startswith("<img><sep><|im_start|>")
    assert found.undefined == ("video_token",)
    assert "its chat template writes video_token, which no file and no setting defines" in (
        load_corpus(data, 400).train.amount
    )


QUESTIONS = [{"prompt": f"Q{i}:", "completion": f" answer {i}"} for i in range(3)]
TALKS = [{"messages": TALK, "tools": None}, {"messages": TALK[:2], "tools": None}]


def forms_of(rows):
    """The content of files with some rows, by name."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as opened:
        opened.write(lines)
    return {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": packed.getvalue().to_pybytes(),
        "a.json": json.dumps(rows).encode(),
        "pretty.json": json.dumps(rows, indent=2).encode(),
        "pretty.json.gz": gzip.compress(json.dumps(rows, indent=2).encode()),
        "a.parquet": table.getvalue(),
    }


@pytest.mark.parametrize("rows", [QUESTIONS, TALKS], ids=["prompts", "messages"])
def test_conversations_are_read_in_every_form_of_a_file(chat, tmp_path, rows):
    data = chat(rows, seq_len=256)
    expected = load_corpus(data, 400).train
    folder = tmp_path / "all"
    folder.mkdir()
    forms = forms_of(rows)
    for name, content in forms.items():
        (folder / name).write_bytes(content)
        found = load_corpus(replace(data, path=str(folder / name)), 400).train
        np.testing.assert_array_equal(found.ids, expected.ids, name)
        np.testing.assert_array_equal(found.labels, expected.labels, name)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    whole = load_corpus(replace(data, path=str(folder)), 400).train
    assert whole.size == len(forms) * len(rows)
    assert "(files that are neither JSON nor Parquet, left out: picture.png)" in whole.amount


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps([*QUESTIONS, {"prompt": "a"}]).encode(), "element 4: found the keys prompt"),
        (b'[{"prompt": "a"', r"talk is not valid JSON"),
        (b'{"prompt": \n"a"}', "talk: found .*prompt"),
        (b"PK\x03\x04", "talk is a zip file"),
        (gzip.compress(b'{"prompt": "a"}\n{', mtime=0), "talk, line 1: found the keys prompt"),
        (gzip.compress(b"x" * 999, mtime=0)[:-9], "talk: its gzip stream"),
        (b"\x89PNG\0\0", "talk: .*no text"),
        (b"ab\0c", "talk, line 1 has a NUL"),
        (b"PAR1\x15\0PAR1", "cannot read .*talk as Parquet"),
    ],
)
def test_a_file_without_conversations_is_named_as_what_it_is(chat, tmp_path, content, message):
    (tmp_path / "talk").write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        load_corpus(replace(chat([]), path=str(tmp_path / "talk")), 400)
    assert "\n" not in str(refused.value)
