"""Finds the token with which a chat template closes the assistant's turn, so that what is generated ends there."""

from __future__ import annotations

import re

from jaxpar.base.errors import UserError
from jaxpar.data.chat_template import ChatTemplate, render
from jaxpar.data.tokenizer import HFTokenizer, Tokenizer

_MARK = "An answer, which stands for any other"
_ASKED, _ANSWERED = {"role": "user", "content": "A question?"}, {"role": "assistant", "content": _MARK}


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id that a template writes after an answer, or None where no single token closes it.

    A conversation is written whose last turn is an answer that is known; what follows it closes the turn. Where nothing
    does at the end of a conversation, it is what stands between the answer and the next turn.
    """
    for conversation in ([_ASKED, _ANSWERED], [_ASKED, _ANSWERED, _ASKED]):
        try:
            text = render(conversation, template)
        except UserError:  # a template may refuse these turns, and then it says so where others are written
            continue
        _, mark, after = text.rpartition(_MARK)
        found = _first_token(after, tokenizer) if mark else None
        if found is not None:
            return found
    return None


def _first_token(text: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the added token that a text begins with, or of the one token that it is."""
    text = text.strip()
    if isinstance(tokenizer, HFTokenizer):
        added = {token.content.strip(): id for id, token in tokenizer.inner.get_added_tokens_decoder().items()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        match = re.match("|".join(map(re.escape, longest_first)), text) if added else None
        if match and added[match.group()] < tokenizer.vocab_size:
            return added[match.group()]
    try:
        ids = tokenizer.encode(text) if text else ()
    except UserError:  # a character that the tokenizer does not know
        return None
    return int(ids[0]) if len(ids) == 1 else None
