import builtins
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.base.errors import UserError
from jaxpar.data.rows import read_text
from jaxpar.data.vocabulary.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    encode_document,
    encode_files,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
)

WORDS = {"hello": 0, "world": 1, "<|endoftext|>": 2, "[UNK]": 3}
text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def hf_file(tmp_path):
    """A word-level tokenizer.json that, like a classifier's, cuts texts to two tokens and pads
    them.
    """
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "$A <|endoftext|>", None, [("<|endoftext|>", 2)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "hf.json"))
    return tmp_path / "hf.json"


@given(text)
def test_bytes_round_trip(sample):
    ids = BytesTokenizer().encode(sample)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(sample.encode())
    assert BytesTokenizer().decode(ids) == sample


def test_bytes_decode_what_is_no_text():
    assert BytesTokenizer().decode([104, 105, 255, 300, 33]) == "hi\ufffd\ufffd!"
    assert BytesTokenizer().decode(list("é".encode()[:1])) == "\ufffd"


@given(text.filter(len))
def test_chars_round_trip_and_are_ordered_as_nanogpt(sample):
    tokenizer = make_tokenizer("chars", [sample[:2], sample])
    stoi = {char: i for i, char in enumerate(sorted(set(sample)))}
    ids = tokenizer.encode(sample)
    assert tokenizer.vocab_size == len(stoi)
    assert ids.dtype == np.int32
    assert ids.tolist() == [stoi[char] for char in sample]
    assert tokenizer.decode(ids) == sample


@pytest.mark.parametrize("unknown", ["!", "c", "z", "\U0001f600", "\ud800"])
def test_chars_name_the_unknown_character_and_its_place(unknown):
    with pytest.raises(UserError) as error:
        CharsTokenizer("abd").encode("ab" + unknown + "d")
    assert f"character {unknown!r} at position 2" in str(error.value)


def test_chars_decode_ids_beyond_the_vocabulary():
    assert CharsTokenizer("ab").decode([1, 0, 7]) == "ba\ufffd"


def test_hf_adds_nothing_and_cuts_nothing(hf_file):
    tokenizer = make_tokenizer(str(hf_file))
    assert tokenizer.vocab_size == 4
    assert tokenizer.end_of_text == 2
    ids = tokenizer.encode("hello world hello")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 0]
    assert tokenizer.decode([0, 1, 2]) == "hello world <|endoftext|>"


def test_an_id_that_no_vocabulary_has_is_refused(tmp_path):
    """To write it, the package goes through all ids below it."""
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    text = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    ).to_str()
    file.write_text(text.replace('"b":1', f'"b":{2**31}'))
    with pytest.raises(UserError, match="2147483648 for 'b'"):
        load_tokenizer(file)


def test_vocabulary_of_hf_reaches_its_largest_id(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 41}, unk_token="a")).save(
        str(tmp_path / "gap.json")
    )
    tokenizer = load_tokenizer(tmp_path / "gap.json")
    assert tokenizer.vocab_size == 42
    assert tokenizer.end_of_text is None


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), CharsTokenizer('\n "\\aé\U0001f600')])
def test_saved_tokenizer_loads_equal(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert type(loaded) is type(tokenizer)
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.decode(loaded.encode("a \n")) == "a \n"


def test_a_special_token_that_the_model_lacks_is_refused_where_it_occurs(hf_file):
    inner = load_tokenizer(hf_file).inner
    inner.add_special_tokens(["<image>"])
    inner.save(str(hf_file))
    assert load_tokenizer(hf_file).vocab_size == 5
    tokenizer = load_tokenizer(hf_file, vocab_size=4)
    assert tokenizer.vocab_size == 4 and tokenizer.encode("hello").tolist() == [0]
    with pytest.raises(
        UserError, match="the text has '<image>', id 4, and the model only 4 tokens"
    ):
        tokenizer.encode("hello <image>")
    # words count, and so it does not fit
    assert load_tokenizer(hf_file, vocab_size=1).vocab_size == 4


def test_saved_hf_tokenizer_is_still_one_of_hugging_face(hf_file, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "saved.json").write_text(load_tokenizer(hf_file).to_json(), encoding="utf-8")
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "saved.json")).token_to_id("world") == 1
    assert load_tokenizer(tmp_path / "saved.json").encode("world hello").tolist() == [1, 0]


def test_unknown_tokenizers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer 'byte' \(did you mean 'bytes'\?\)"):
        make_tokenizer("byte")
    with pytest.raises(UserError, match=r"cannot read .*missing\.json: No such file"):
        make_tokenizer(str(tmp_path / "missing.json"))
    for content, message in (
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"tokenizer": "chars"}', "is no tokenizer"),
    ):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(tmp_path / "bad.json")


def test_broken_hf_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text(json.dumps({"model": {"type": "no such model"}}))
    with pytest.raises(UserError, match=r"cannot load .*bad\.json"):
        load_tokenizer(tmp_path / "bad.json")


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "hf.json").write_text('{"model": {}}')
    real_import = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(UserError, match=r"pip install 'jaxpar\[hf\]'"):
        load_tokenizer(tmp_path / "hf.json")


def test_each_file_is_closed_by_end_of_text(hf_file, tmp_path):
    (tmp_path / "1.txt").write_text("hello world")
    (tmp_path / "2.txt").write_text("world")
    files = [tmp_path / "1.txt", tmp_path / "2.txt"]
    first, second = encode_files(files, load_tokenizer(hf_file))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [1, 2])
    assert first.dtype == np.uint16
    assert [ids.tolist() for ids in encode_files(files[1:], BytesTokenizer())] == [list(b"world")]


def test_unknown_character_names_the_file(tmp_path):
    (tmp_path / "odd.txt").write_text("ax")
    with pytest.raises(UserError, match=r"odd\.txt: character 'x' at position 1"):
        list(encode_files([tmp_path / "odd.txt"], CharsTokenizer("a")))


def test_ids_are_stored_in_the_smallest_of_two_dtypes():
    assert (token_dtype(2**16), token_dtype(2**16 + 1)) == (np.uint16, np.uint32)


def test_a_document_without_text_has_no_end(hf_file, tmp_path):
    """White space is no text, nor is what a tokenizer takes nothing of."""
    tokenizer = load_tokenizer(hf_file)
    assert [len(encode_document(text, tokenizer)) for text in ("", " \n\t", "\u3000", "hello")] == [
        0,
        0,
        0,
        2,
    ]
    inner = tokenizer.inner
    inner.normalizer = pytest.importorskip("tokenizers").normalizers.Replace("\u200b", "")
    assert len(encode_document("\u200b", tokenizer)) == 0
    (tmp_path / "blank.txt").write_text("\n")
    assert [ids.tolist() for ids in encode_files([tmp_path / "blank.txt"], tokenizer)] == [[]]


def test_a_byte_order_mark_is_no_part_of_a_text(hf_file, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi\r\n")
    assert read_text(tmp_path / "a.txt") == "hi\r\n"
    hf_file.write_bytes(b"\xef\xbb\xbf" + hf_file.read_bytes())
    assert load_tokenizer(hf_file).encode("hello").tolist() == [0]
    (tmp_path / "a.txt").write_bytes("hi".encode("utf-16"))
    with pytest.raises(UserError, match=r"a\.txt is UTF-16 text.*: save it as UTF-8"):
        read_text(tmp_path / "a.txt")


def test_text_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\nb".encode())
    assert read_text(tmp_path / "a.txt") == "é\r\nb"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\0c", r"is binary \(NUL at byte 2\), not text: ids .* --data\.source tokens"),
        (b"ab\xe9", r"is not UTF-8 text \(.* at byte 2\): convert it"),
    ],
)
def test_what_is_not_text_is_refused(content, message, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_text(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["tokenizer.json", "another.json"])
def test_an_older_form_of_a_tokenizer_is_named(name, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(WORDS))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt .* older .*save_pretrained"):
        load_tokenizer(tmp_path / name)


def test_file_that_is_gone_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.txt: No such file"):
        read_text(tmp_path / "gone.txt")
