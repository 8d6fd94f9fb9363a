"""The token with which a chat template closes the assistant's turn, so that what is generated ends
there.
"""

from __future__ import annotations

import re

from jaxpar.base.errors import UserError
from jaxpar.data.chat.answers import ConversationWriter
from jaxpar.data.chat.template.forms import shape_messages
from jaxpar.data.vocabulary.tokenizer import HFTokenizer, Tokenizer

_MARK = "An answer, which stands for any other"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_ASKED = {"role": "user", "content": "A question?"}
_ANSWERED = {"role": "assistant", "content": _MARK}


def ends_of_turn(writer: ConversationWriter, tokenizer: Tokenizer) -> list[int]:
    """Find the ids with which a template closes an answer: one or none, and with tools perhaps
    another.

    Args:
      writer: writes the conversations whose turns are to end.

    Raises:
      UserError: the template comes to no end.
    """
    found = [end_of_turn(writer, tokenizer)]
    if writer.template.tool_use:  # which a conversation with tools is written by
        with_tools = ConversationWriter(writer.template, {**writer.names, "tools": [_TOOL]})
        found.append(end_of_turn(with_tools, tokenizer))
    return sorted({id for id in found if id is not None})


def end_of_turn(writer: ConversationWriter, tokenizer: Tokenizer) -> int | None:
    """Find the id of the token that a template writes after an answer; None where no single token
    closes it.

    A conversation is written whose last turn is an answer that is known; what follows it closes the
    turn. Where nothing does at the end of a conversation, it is what stands between the answer and
    the next turn.

    Args:
      writer: writes the conversations whose turns are to end.

    Raises:
      UserError: the template comes to no end.
    """
    for conversation in ([_ASKED, _ANSWERED], [_ASKED, _ANSWERED, _ASKED]):
        shaped = shape_messages(conversation, writer.forms, writer.template.origin)
        (text,) = writer.write([(shaped, False)], writer.names)
        # a template may refuse these turns, and then it says so where others are written
        if text is None:
            continue
        _, mark, after = text.rpartition(_MARK)
        if mark:
            found = _first_token(after, tokenizer)
        else:
            found = None
        if found is not None:
            return found
    return None


def _first_token(text: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the added token that a text begins with, or of the one token that it is."""
    text = text.strip()
    if isinstance(tokenizer, HFTokenizer):
        added = {
            token.content.strip(): id
            for id, token in tokenizer.inner.get_added_tokens_decoder().items()
        }
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        if added:
            match = re.match("|".join(map(re.escape, longest_first)), text)
        else:
            match = None
        if match and added[match.group()] < tokenizer.vocab_size:
            return added[match.group()]
    try:
        ids = tokenizer.encode(text) if text else ()
    except UserError:  # a character that the tokenizer does not know
        return None
    return int(ids[0]) if len(ids) == 1 else None
