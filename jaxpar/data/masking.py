"""Corruption of tokens for a masked language model, which learns to say what stood there (Devlin et
al. 2019, arXiv:1810.04805, section 3.1).

What becomes of a row depends on `data.seed` and the row's number in the order of the data alone. So
it is another in each epoch, the same on any number of processes, and a resumed run goes on with it.

Shapes: B rows, S sequence length, V ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.streams.tokens import HostBatch
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, CharsTokenizer, HFTokenizer, Tokenizer

_HIDDEN = 0.8
_ALTERED = 0.1
_MASKS = ("[MASK]", "<mask>")
"""The names that tokenizers give to the token that hides another."""
_SPACES = "\u0120\u010a\u0109\u010d\u2581"
"""The signs that pieces have for a space, a line's end or a tab in front: of byte-level BPE, and
the last of SentencePiece.
"""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""SentencePiece's form of a byte of a character that it has no piece for."""


@dataclass(frozen=True)
class Masking:
    """The settings by which tokens are corrupted."""

    rate: float
    """The share of the tokens that are corrupted."""
    hidden_id: int
    """The id that hides a token."""
    ids: int
    """The bound below which other tokens are drawn."""
    special_V: np.ndarray
    """Which ids are never corrupted, bool."""
    words: Words | None
    """Which tokens make a word, where whole words are corrupted; None = single tokens are."""


@dataclass(frozen=True)
class Words:
    """Which tokens make a word: two neighbours do if the first may end inside a word, and the
    second begin there.
    """

    begins_inside_V: np.ndarray
    ends_inside_V: np.ndarray


def make_masking(data: DataConfig, vocab_size: int, tokenizer: Tokenizer | None) -> Masking | None:
    """Make the masking of a config; None where `data.objective` does not corrupt tokens.

    Args:
      tokenizer: the tokenizer of the data; None = it is not known.

    Raises:
      UserError: the model has no id for the mask, or what is asked for takes a tokenizer and there
        is none.
    """
    if data.objective != "masked":
        return None
    if tokenizer is None and data.mask_token < 0:
        raise UserError(
            "data.objective=masked needs an id that hides a token, and these tokens come without a "
            "tokenizer: set data.mask_token"
        )
    hidden_id = data.mask_token
    if tokenizer is not None and hidden_id < 0:
        hidden_id = _hidden_id(tokenizer)
    if hidden_id >= vocab_size:
        raise UserError(
            f"data.objective=masked hides tokens by the id {hidden_id}, and "
            f"model.vocab_size={vocab_size}: try model.vocab_size={hidden_id + 1}, or set "
            "data.mask_token"
        )
    special_V = np.zeros(vocab_size, bool)
    special_V[hidden_id] = True
    if tokenizer is None:
        if data.mask_whole_words:
            raise UserError(
                "data.mask_whole_words=true needs the tokenizer, and these tokens come without "
                "one: leave it out"
            )
        ids = vocab_size
        if hidden_id and hidden_id == vocab_size - 1:  # no text has it
            ids = hidden_id
        return Masking(data.mask_rate, hidden_id, ids, special_V, None)
    special_V[[id for id in _special_ids(tokenizer) if id < vocab_size]] = True
    words = _words(tokenizer, vocab_size) if data.mask_whole_words else None
    return Masking(data.mask_rate, hidden_id, tokenizer.vocab_size, special_V, words)


def corrupt(
    batch: HostBatch, numbers_B: Sequence[int] | np.ndarray, seed: Sequence[int], masking: Masking
) -> HostBatch:
    """Corrupt some tokens of rows, and label these tokens alone, with what stood there.

    Of those chosen, 80 % are hidden, 10 % become another token, and 10 % stay as they are. A row
    with text has at least one of them.

    Args:
      batch: rows [B, S] of `tokens` and `labels` as next-token prediction has them; where no label
        is near, a token is padding.
      numbers_B: the numbers of the rows in the order of the data.
      seed: two numbers, of the data and of what they are read for.

    Returns:
      The batch with other tokens, and labels that are the tokens that stood there, or -1.
    """
    tokens_BS = batch["tokens"]
    S = tokens_BS.shape[1]
    choice_BS, fate_BS, other_BS = _draws(numbers_B, S, seed, masking.ids)
    may_BS = _text(batch) & ~masking.special_V[tokens_BS]
    if masking.words is not None:
        choice_BS = np.take_along_axis(choice_BS, _first_of_word(batch, masking), axis=1)
    choice_BS = np.where(may_BS, choice_BS, np.inf)
    least_B1 = np.min(choice_BS, axis=1, keepdims=True)
    chosen_BS = may_BS & ((choice_BS < masking.rate) | (choice_BS == least_B1))
    altered_BS = np.where(fate_BS < _HIDDEN + _ALTERED, other_BS, tokens_BS)
    corrupted_BS = np.where(fate_BS < _HIDDEN, masking.hidden_id, altered_BS)
    return batch | {
        "tokens": np.where(chosen_BS, corrupted_BS, tokens_BS).astype(np.int32),
        "labels": np.where(chosen_BS, tokens_BS, -1).astype(np.int32),
    }


def _draws(
    numbers_B: Sequence[int] | np.ndarray, S: int, seed: Sequence[int], ids: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw for each token what decides whether it is chosen and what becomes of it, both in [0, 1),
    and another id.
    """
    choice_BS = np.empty((len(numbers_B), S))
    fate_BS = np.empty((len(numbers_B), S))
    other_BS = np.empty((len(numbers_B), S), np.int32)
    for row, number in enumerate(numbers_B):
        bits = np.random.Philox(key=list(seed), counter=[0, 0, 0, int(number)])
        generator = np.random.Generator(bits)
        choice_BS[row] = generator.random(S)
        fate_BS[row] = generator.random(S)
        other_BS[row] = generator.integers(0, ids, S)
    return choice_BS, fate_BS, other_BS


def _text(batch: HostBatch) -> np.ndarray:
    """Find which tokens are text: those that have a label or are one, and of packed documents
    all.
    """
    if "segments" in batch:
        labelled_B1 = np.any(batch["labels"] >= 0, axis=1, keepdims=True)
        return (batch["segments"] > 0) & labelled_B1
    labelled_BS = batch["labels"] >= 0
    text_BS = labelled_BS.copy()
    text_BS[:, 1:] |= labelled_BS[:, :-1]
    return text_BS


def _first_of_word(batch: HostBatch, masking: Masking) -> np.ndarray:
    """Find the place of the first token of each token's word, [B, S]."""
    words = masking.words
    assert words is not None
    tokens_BS = batch["tokens"]
    joins_BS = np.zeros(tokens_BS.shape, bool)
    ends_inside = words.ends_inside_V[tokens_BS[:, :-1]]
    joins_BS[:, 1:] = words.begins_inside_V[tokens_BS[:, 1:]] & ends_inside
    if "segments" in batch:
        joins_BS[:, 1:] &= batch["segments"][:, 1:] == batch["segments"][:, :-1]
    places_S = np.arange(tokens_BS.shape[1])
    return np.maximum.accumulate(np.where(joins_BS, 0, places_S), axis=1)


def _hidden_id(tokenizer: Tokenizer) -> int:
    """Find the id of the tokenizer's own mask, or the first that it leaves free."""
    if isinstance(tokenizer, HFTokenizer):
        for name in _MASKS:
            found = tokenizer.inner.token_to_id(name)
            if found is not None:
                return found
    return tokenizer.vocab_size


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    """List the ids that are no text."""
    ids = [id for id in (tokenizer.begin_of_text, tokenizer.end_of_text) if id is not None]
    if isinstance(tokenizer, HFTokenizer):
        added = tokenizer.inner.get_added_tokens_decoder()
        ids += [id for id, token in added.items() if token.special]
    return ids


def _words(tokenizer: Tokenizer, vocab_size: int) -> Words:
    """Find which ids may begin, and which may end, inside a word.

    Raises:
      UserError: the tokenizer's pieces do not say where a word begins.
    """
    pieces = _pieces(tokenizer)
    begins_V = np.zeros(vocab_size, bool)
    ends_V = np.zeros(vocab_size, bool)
    special = set(_special_ids(tokenizer))
    mark = ""
    if isinstance(tokenizer, HFTokenizer):
        if _has_whole_words(tokenizer):
            return Words(begins_V, ends_V)
        mark = _mark_inside(tokenizer)
        if not mark:
            _require_marks(tokenizer, pieces)
    for id, piece in pieces.items():
        if id >= vocab_size or id in special or not piece:
            continue
        if mark:
            begins_V[id] = piece.startswith(mark)
            ends_V[id] = True
        else:
            begins_V[id] = _in_word(piece[0])
            ends_V[id] = _in_word(piece[-1])
    return Words(begins_V, ends_V)


def _has_whole_words(tokenizer: HFTokenizer) -> bool:
    """Return whether each id is a word."""
    from tokenizers import models

    return isinstance(tokenizer.inner.model, models.WordLevel)


def _mark_inside(tokenizer: HFTokenizer) -> str:
    """Return the mark of pieces that go on with a word, as `##` in WordPiece; empty = there is
    none.

    The model says so. Its pieces do not: GPT-2's have a `##` that is a heading of Markdown.
    """
    from tokenizers import models

    model = tokenizer.inner.model
    if isinstance(model, models.WordPiece | models.BPE):
        return model.continuing_subword_prefix or ""
    return ""


def _require_marks(tokenizer: HFTokenizer, pieces: dict[int, str]) -> None:
    """Refuse pieces of which none has a space or a sign for it: a whole line would be a word."""
    from tokenizers import models

    model = tokenizer.inner.model
    if isinstance(model, models.BPE) and model.end_of_word_suffix:
        return
    if any(char.isspace() or char in _SPACES for piece in pieces.values() for char in piece):
        return
    raise UserError(
        "data.mask_whole_words=true needs to know where a word begins, and no piece of this "
        "tokenizer has a space or a mark of one: leave it out"
    )


def _pieces(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each id; a byte past ASCII becomes a letter."""
    if isinstance(tokenizer, BytesTokenizer):
        return {id: _char_of(id) for id in range(tokenizer.vocab_size)}
    if isinstance(tokenizer, CharsTokenizer):
        return dict(enumerate(tokenizer.chars))
    found = {id: piece for piece, id in tokenizer.inner.get_vocab().items()}
    for id, piece in found.items():
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            found[id] = _char_of(int(byte[1], 16))
    return found


def _char_of(byte: int) -> str:
    """Return a byte's character, or some letter for a byte past ASCII."""
    if byte < 128:
        return chr(byte)
    return "\u00e9"


def _in_word(char: str) -> bool:
    """Return whether a character of a piece is part of a word; byte-level BPE writes a byte past
    ASCII as some character past it.
    """
    if char in _SPACES:
        return False
    return char.isalnum() or char == "_" or ord(char) >= 128
