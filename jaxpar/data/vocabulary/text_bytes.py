"""The bytes of text that stand for token ids, where ids may begin or end within a character.

Shapes: N tokens, P pairs of a token and the one before it, V vocabulary.
"""

from __future__ import annotations

import json
import re

import numpy as np

from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, CharsTokenizer, HFTokenizer, Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte, which SentencePiece falls back on."""


def count_bytes(tokenizer: Tokenizer, before_N: np.ndarray, ids_N: np.ndarray) -> int:
    """Count the UTF-8 bytes of text that ids add to what stands before each.

    Special tokens add none, and a token that is a part of a character adds the bytes that it has.
    What stands for text that the tokenizer does not know adds none either, as its length is not
    known (`unknown_id`).

    Args:
      before_N: the id before each, which may decide whether a space stands between them.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return len(ids_N)
    if isinstance(tokenizer, CharsTokenizer):
        return _sum_of(
            np.array(
                [len(char.encode()) for char in tokenizer.chars],
                np.int64,
            ),
            ids_N,
        )
    sizes_V = _byte_level_sizes(tokenizer)
    if sizes_V is not None:
        return _sum_of(sizes_V, ids_N)
    pairs_P, times_P = np.unique(
        np.stack([before_N, ids_N]),
        axis=1,
        return_counts=True,
    )
    return int((_added_bytes(tokenizer, *pairs_P) * times_P).sum())


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that stands for any text that a tokenizer does not know; None where it knows
    all text.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return None
    model = json.loads(tokenizer.inner.to_str())["model"]
    if model.get("byte_fallback"):
        return None
    if isinstance(model.get("unk_id"), int):  # of Unigram
        return model["unk_id"]
    token = model.get("unk_token")
    if token is None:
        return None
    return tokenizer.inner.token_to_id(token)


def _sum_of(sizes_V: np.ndarray, ids_N: np.ndarray) -> int:
    """Sum the sizes of ids, of which those beyond the vocabulary have none."""
    return int(sizes_V[ids_N[ids_N < len(sizes_V)]].sum())


def _special_ids(tokenizer: HFTokenizer) -> set[int]:
    return {id for id, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}


def _byte_level_sizes(tokenizer: HFTokenizer) -> np.ndarray | None:
    """Return the bytes of each id [V] of a tokenizer whose tokens are bytes, each written as a
    character.

    None where it is of another kind.
    """
    decoder = json.dumps(json.loads(tokenizer.inner.to_str()).get("decoder"))
    if '"ByteLevel"' not in decoder:
        return None
    added = tokenizer.inner.get_added_tokens_decoder()
    vocab = tokenizer.inner.get_vocab()
    sizes_V = np.zeros(
        max(vocab.values(), default=-1) + 1,
        np.int64,
    )
    for token, id in vocab.items():
        sizes_V[id] = len(token) if id not in added else len(token.encode())
    sizes_V[list(_special_ids(tokenizer))] = 0
    return sizes_V


def _added_bytes(tokenizer: HFTokenizer, before_P: np.ndarray, ids_P: np.ndarray) -> np.ndarray:
    """Count the bytes that each id [P] adds to the text of the one before it, by decoding both.

    After a special token a text begins.
    """
    inner = tokenizer.inner
    special = _special_ids(tokenizer)
    contexts = [[] if int(id) in special else [int(id)] for id in before_P]
    together = [[*context, int(id)] for context, id in zip(contexts, ids_P, strict=True)]
    first_P = tokenizer.decode_all(contexts)
    both_P = tokenizer.decode_all(together)
    sizes_P = np.zeros(len(ids_P), np.int64)
    for place, id in enumerate(ids_P):
        if int(id) in special:
            continue
        is_byte = _BYTE.fullmatch(inner.id_to_token(int(id)) or "")
        sizes_P[place] = (
            1 if is_byte else len(both_P[place].encode()) - len(first_P[place].encode())
        )
    return sizes_P
