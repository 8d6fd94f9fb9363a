"""Bytes of ids are those of their text, however windows cut it and whatever kind of tokenizer made
them.
"""

import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.data.streams.tokens import Tokens
from jaxpar.data.vocabulary.text_bytes import count_bytes, unknown_id
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, CharsTokenizer, load_tokenizer
from jaxpar.train.evaluate import bits_per_byte

TEXT = "Käse für 3 €, bitte! 🙂🙂 Ja, gern. naïve"


def made(kind, tmp_path):
    """A tokenizer of a kind, and the text as it decodes it."""
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "chars":
        return CharsTokenizer("".join(sorted(set(TEXT))))
    tokenizers = pytest.importorskip("tokenizers")
    models = tokenizers.models
    decoders = tokenizers.decoders
    trainers = tokenizers.trainers
    pre_tokenizers = tokenizers.pre_tokenizers
    special = ["<s>", "</s>", "[UNK]"]
    if kind == "byte-level":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=280, special_tokens=special, initial_alphabet=alphabet
        )
    elif kind == "byte fallback":  # as LLaMA 2's
        vocab = {
            name: i
            for i, name in enumerate(
                [*special, *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abernfgtJ"]
            )
        }
        inner = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="[UNK]")
        )
        steps = [
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581"),
        ]
        inner.normalizer = tokenizers.normalizers.Sequence(steps)
        undo = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        inner.decoder = decoders.Sequence(undo)
        trainer = None
    else:
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.pre_tokenizer, inner.decoder = (
            pre_tokenizers.WhitespaceSplit(),
            decoders.WordPiece(cleanup=False),
        )
        trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special)
    if trainer is None:
        inner.add_special_tokens(special)
    else:
        inner.train_from_iterator([TEXT] * 3, trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bytes", "chars", "byte-level", "byte fallback", "word pieces"])
def test_windows_of_any_length_have_the_bytes_of_the_text(kind, tmp_path):
    tokenizer = made(kind, tmp_path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    begin = 0 if kind not in ("bytes", "chars") else int(ids[0])  # <s>, after which a text begins
    before = np.append([begin], ids[:-1]).astype(np.int32)
    for length in (1, 2, 3, len(ids)):
        cut = range(0, len(ids), length)
        total = sum(
            count_bytes(tokenizer, before[i : i + length], ids[i : i + length]) for i in cut
        )
        assert total == len(TEXT.encode())


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "word pieces"])
def test_special_tokens_and_ids_beyond_the_vocabulary_add_none(kind, tmp_path):
    tokenizer = made(kind, tmp_path)
    ids = np.array([0, 1, tokenizer.vocab_size + 5, 1], np.int32)
    assert count_bytes(tokenizer, np.roll(ids, 1), ids) == 0


def test_text_that_a_tokenizer_does_not_know_is_told(tmp_path):
    """Of word pieces and Unigram; bytes are known to the others."""
    for kind in ("bytes", "chars", "byte-level", "byte fallback"):
        assert unknown_id(made(kind, tmp_path)) is None
    tokenizers = pytest.importorskip("tokenizers")
    unigram = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [("a", -1.0), ("<unk>", -9.0)],
            unk_id=1,
        )
    )
    unigram.save(str(tmp_path / "tokenizer.json"))
    assert unknown_id(load_tokenizer(tmp_path / "tokenizer.json")) == 1
    tokenizer = made("word pieces", tmp_path)
    said = []
    ids = tokenizer.encode("\N{SNOWMAN} 3 3 3 \N{SNOWMAN} 3 3 3 3")
    assert list(ids).count(2) == 2 and unknown_id(tokenizer) == 2
    config = override(Config(), {"data.seq_len": 8, "train.batch": 1})
    found = bits_per_byte(1.0, Tokens(ids, None, "here"), tokenizer, config, said.append)
    assert found is not None
    (line,) = said
    assert line.startswith(
        "1 of 8 scored tokens are '[UNK]', which stands for text of a length that is not known"
    )
