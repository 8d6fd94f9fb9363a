"""How tokens are corrupted for a masked language model: the shares, whole words, and that what
becomes of a row depends on its number alone, also where a run goes on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.corpus import Corpus, load_corpus, train_batches, val_batches
from jaxpar.data.masking import Masking, _first_of_word, corrupt, make_masking
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer

MASKED = DataConfig(source="text", objective="masked", seq_len=64, prefetch=0)
TEXT = "The quick brown fox jumps over the lazy dog, and 12 others do it too. " * 200
MASK = 256


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return replace(MASKED, path=str(file))


def masking_of(**changes: Any) -> Masking:
    made = make_masking(replace(MASKED, **changes), 300, BytesTokenizer())
    assert made is not None
    return made


def masking_for(data: DataConfig, corpus: Corpus) -> Masking | None:
    return make_masking(data, 300, corpus.tokenizer)


def rows(count: int, length: int = 256) -> dict[str, np.ndarray]:
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    whole = np.resize(ids, (count, length + 1))
    return {"tokens": whole[:, :-1], "labels": whole[:, 1:]}


def test_without_a_tokenizer_others_are_drawn_from_the_whole_vocabulary() -> None:
    in_the_middle = make_masking(replace(MASKED, mask_token=103), 30_522, None)
    last = make_masking(replace(MASKED, mask_token=256), 257, None)
    assert in_the_middle is not None and last is not None
    assert (in_the_middle.ids, last.ids) == (30_522, 256)


def test_of_those_chosen_most_are_hidden_some_replaced_and_some_stay() -> None:
    batch = rows(400)
    made = corrupt(batch, range(400), (0, 0), masking_of())
    chosen = made["labels"] >= 0
    np.testing.assert_array_equal(made["labels"][chosen], batch["tokens"][chosen])
    np.testing.assert_array_equal(made["tokens"][~chosen], batch["tokens"][~chosen])
    hidden = made["tokens"][chosen] == MASK
    same = made["tokens"][chosen] == batch["tokens"][chosen]
    count = chosen.sum()
    # Four standard deviations of a share of so many draws; a 256th of the replaced are the same.
    for share, expected, of in (
        (chosen.mean(), 0.15, chosen.size),
        (hidden.mean(), 0.8, count),
        (same.mean(), 0.1 + 0.1 / 256, count),
    ):
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / of)


def test_a_row_depends_on_its_number_and_nothing_beside_it() -> None:
    batch = rows(8)
    made = corrupt(batch, range(8), (3, 0), masking_of())
    some = {name: array[[5, 2]] for name, array in batch.items()}
    apart = corrupt(some, [5, 2], (3, 0), masking_of())
    for name in ("tokens", "labels"):
        np.testing.assert_array_equal(apart[name], made[name][[5, 2]])
    for numbers, seed in ((range(8, 16), (3, 0)), (range(8), (4, 0)), (range(8), (3, 1))):
        other = corrupt(batch, numbers, seed, masking_of())
        assert np.any(other["labels"] != made["labels"])


def test_words_are_corrupted_whole() -> None:
    batch = rows(50)
    made = corrupt(batch, range(50), (0, 0), masking_of(mask_whole_words=True))
    chosen = made["labels"] >= 0
    letters = np.vectorize(lambda id: chr(id).isalnum())(batch["tokens"])
    inside = letters[:, 1:] & letters[:, :-1]
    assert np.all(chosen[:, 1:][inside] == chosen[:, :-1][inside])
    assert 0.1 < chosen.mean() < 0.2
    assert np.any(chosen[:, 1:] != chosen[:, :-1])


def test_pieces_of_a_word_are_those_with_a_mark(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    from jaxpar.data.vocabulary.tokenizer import load_tokenizer

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "run", "##ning", "a"]
    vocab = {name: id for id, name in enumerate(names)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    inner.add_special_tokens(names[:5])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    made = make_masking(replace(MASKED, mask_whole_words=True, mask_rate=0.5), 8, tokenizer)
    assert made is not None
    assert made.hidden_id == vocab["[MASK]"]
    tokens = np.tile(np.array([2, 5, 6, 7, 5, 6, 6, 3], np.int32), (64, 1))
    labels = np.tile(np.array([5, 6, 7, 5, 6, 6, 3, 5], np.int32), (64, 1))
    chosen = corrupt({"tokens": tokens, "labels": labels}, range(64), (0, 0), made)["labels"] >= 0
    assert not chosen[:, [0, 7]].any()  # [CLS] and [SEP]
    assert np.all(chosen[:, 1] == chosen[:, 2])
    assert np.all(chosen[:, 4] == chosen[:, 5]) and np.all(chosen[:, 5] == chosen[:, 6])
    assert np.any(chosen[:, 1] != chosen[:, 3]) and np.any(chosen[:, 3] != chosen[:, 4])


WORDS_OF_PIECES = {
    "byte-level BPE with a heading of Markdown": (
        "BPE",
        ["Ġun", "believ", "able", "Ġdog", "##", "s"],
        [0, 1, 2, 3, 5, 4],
        [0, 0, 0, 3, 3, 5],
    ),
    "BPE with a mark of what goes on": (
        "BPE ##",
        ["un", "##able", "dog"],
        [0, 1, 2, 2],
        [0, 0, 2, 3],
    ),
    "BPE with a mark of what ends": (
        "BPE </w>",
        ["un", "able</w>", "dog</w>"],
        [0, 1, 2, 2],
        [0, 0, 2, 3],
    ),
    "SentencePiece with bytes": (
        "Unigram",
        ["\u2581un", "able", "\u2581", "##", "<0xC3>", "<0xA9>", "<0x0A>"],
        [0, 1, 2, 1, 3, 0, 4, 5, 6, 1],
        [0, 0, 2, 3, 4, 5, 5, 5, 8, 9],
    ),
    "whole words": ("WordLevel", ["dog", "##", "cat"], [0, 2, 1, 0], [0, 1, 2, 3]),
}


def saved_tokenizer(folder: Path, kind: str, pieces: list[str]) -> Any:
    """A tokenizer of pieces that no text is made into, as its file has it."""
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    from jaxpar.data.vocabulary.tokenizer import load_tokenizer

    vocab = {piece: id for id, piece in enumerate([*pieces, "<mask>"])}
    models = tokenizers.models
    model = {
        "BPE": lambda: models.BPE(vocab, []),
        "BPE ##": lambda: models.BPE(vocab, [], continuing_subword_prefix="##"),
        "BPE </w>": lambda: models.BPE(vocab, [], end_of_word_suffix="</w>"),
        "Unigram": lambda: models.Unigram([(piece, 0.0) for piece in vocab]),
        "WordLevel": lambda: models.WordLevel(vocab, unk_token="<mask>"),
    }[kind]()
    inner = tokenizers.Tokenizer(model)
    inner.add_special_tokens(["<mask>"])
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("name", WORDS_OF_PIECES)
def test_the_model_of_a_tokenizer_says_which_pieces_make_a_word(tmp_path: Path, name: str) -> None:
    kind, pieces, row, firsts = WORDS_OF_PIECES[name]
    tokenizer = saved_tokenizer(tmp_path, kind, pieces)
    made = make_masking(replace(MASKED, mask_whole_words=True), 16, tokenizer)
    assert made is not None
    batch = {"tokens": np.array([row], np.int32)}
    assert _first_of_word(batch, made).tolist() == [firsts]


def test_pieces_that_say_nothing_of_words_are_refused(tmp_path: Path) -> None:
    tokenizer = saved_tokenizer(tmp_path, "BPE", ["un", "able", "dog"])
    with pytest.raises(UserError, match="where a word begins"):
        make_masking(replace(MASKED, mask_whole_words=True), 16, tokenizer)
    assert make_masking(MASKED, 16, tokenizer) is not None


def test_padding_is_left_alone_and_a_short_text_has_one_token_to_say() -> None:
    batch = rows(64, 16)
    batch["labels"] = batch["labels"].copy()
    batch["labels"][:, 4:] = -1  # five tokens of text, and padding
    batch["labels"][0] = -1  # nothing at all
    made = corrupt(batch, range(64), (0, 0), masking_of())
    counts = (made["labels"] >= 0).sum(axis=1)
    assert counts[0] == 0 and np.all(counts[1:] >= 1)
    assert not (made["labels"][:, 5:] >= 0).any()
    packed = rows(64, 16) | {"segments": np.where(np.arange(16) < 5, 1, 0) + np.zeros((64, 1), int)}
    made = corrupt(packed, range(64), (0, 0), masking_of())
    assert not (made["labels"][:, 5:] >= 0).any()


def test_a_run_goes_on_with_the_same_corruption(data: DataConfig) -> None:
    corpus = load_corpus(data, 300)

    def batches(rows: Any = range(4)) -> Any:
        return train_batches(corpus.train, data, 4, rows, 300, masking_for(data, corpus))

    first = batches()
    read = [next(first) for _ in range(60)]  # more than an epoch of 50 batches
    again = batches()
    for _ in range(7):
        next(again)
    resumed = batches()
    resumed.set_state(json.loads(json.dumps(again.get_state())))
    np.testing.assert_array_equal(next(resumed)["tokens"], read[7]["tokens"])
    part = batches([2, 3])
    for batch in read[:3]:
        np.testing.assert_array_equal(next(part)["labels"], batch["labels"][2:])
    seen = {batch["labels"].tobytes() for batch in read}
    assert len(seen) == len(read)


def test_documents_go_on_with_the_same_corruption(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the data extra is not installed")
    lines = [f"{TEXT[i : i + 90]}" for i in range(0, 9000, 45)]
    datasets.Dataset.from_dict({"text": lines}).to_parquet(str(tmp_path / "a.parquet"))
    data = replace(MASKED, source="parquet", path=str(tmp_path / "a.parquet"), pack=True)
    corpus = load_corpus(data, 300)
    first = train_batches(corpus.train, data, 4, range(4), 300, masking_for(data, corpus))
    read = []
    for _ in range(5):
        read.append(next(first))
        if len(read) == 2:
            state = json.loads(json.dumps(first.get_state()))
    resumed = train_batches(corpus.train, data, 4, range(4), 300, masking_for(data, corpus))
    resumed.set_state(state)
    for batch in read[2:]:
        found = next(resumed)
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)
    assert all((batch["tokens"] == MASK).any() for batch in read)


def test_validation_is_corrupted_the_same_each_time_whatever_the_batch(data: DataConfig) -> None:
    data = replace(data, val_fraction=0.5)
    corpus = load_corpus(data, 300)
    assert corpus.val is not None
    by = {}
    for size in (4, 6):
        found = val_batches(
            corpus.val, data, size, range(size), 300, masking=masking_for(data, corpus)
        )
        labels = np.concatenate([batch["labels"] for batch in found])
        by[size] = labels[(labels >= 0).any(axis=1)]
    np.testing.assert_array_equal(by[4], by[6])
    assert 0.1 < (by[4] >= 0).mean() < 0.2


@pytest.mark.parametrize(
    ("changes", "vocab_size", "why"),
    [
        ({}, 256, "try model.vocab_size=257"),
        ({"mask_token": 400}, 300, "by the id 400"),
        ({"source": "chat"}, 300, "take data.source=text"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(
    data: DataConfig, changes: dict[str, Any], vocab_size: int, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        load_corpus(replace(data, **changes), vocab_size)


def test_tokens_that_follow_are_never_given_for_corrupted_ones(data: DataConfig) -> None:
    corpus = load_corpus(data, 300)
    with pytest.raises(UserError, match="make_masking makes of this config"):
        train_batches(corpus.train, data, 4, range(4), 300)
    assert corpus.val is not None
    with pytest.raises(UserError, match="make_masking makes of this config"):
        next(val_batches(corpus.val, data, 4, range(4), 300))
