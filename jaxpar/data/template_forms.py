"""Which forms of a message a chat template can write: text or parts, arguments of calls as text or as objects.

Some templates take either, some only one, and write nothing, or Python's own form of a dictionary, where they are given
the other. So each is tried on conversations whose words are known.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json
from jaxpar.data.chat_template import ChatTemplate, Message, plain_message, try_render

_WORDS = {"system": "Instructionword", "user": "Questionword", "assistant": "Answerword"}
_VALUE = "Argumentword"
_ARGUMENTS = {"argumentname": _VALUE}
_ID = "callnumb1"
"""Mistral's templates take the ids of calls only in this form: nine letters or digits."""
_NAME = "toolname"
_TOOL = {"name": _NAME, "description": "A tool.", "parameters": {"type": "object", "properties": {}}}


NO_CONTENT = ("", None)
"""What may stand in place of the content of a message that has none, for a template that cannot do without."""


class Forms(NamedTuple):
    """What a template can write."""

    text: frozenset[str]
    """The roles whose content may be text."""
    parts: frozenset[str]
    """The roles whose content may be a list of parts."""
    argument_text: bool
    """Whether the arguments of a call may be text, which is JSON."""
    argument_object: bool
    """Whether they may be an object."""


def find_forms(template: ChatTemplate, more: Mapping[str, Any]) -> Forms:
    """Find what a template can write, with the other names that it is given.

    Raises:
      UserError: it does not come to an end, or the `hf` extra is missing.
    """
    others = {key: value for key, value in more.items() if key not in ("tools", "documents")}
    plain = [{"role": role, "content": _WORDS[role]} for role in ("user", "assistant")]
    system = {"role": "system", "content": _WORDS["system"]}
    talks = (plain, [system, *plain])
    as_text = _written(template, talks, others)
    as_parts = _written(template, [[_in_parts(message) for message in talk] for talk in talks], others)
    tools = {"tools": [{"type": "function", "function": _TOOL}]}
    by_text = _written(template, _calling(json.dumps(_ARGUMENTS)), {**others, **tools})
    by_object = _written(template, _calling(_ARGUMENTS), {**others, **tools})
    return Forms(
        text=_roles(as_text),
        parts=_roles(as_parts),
        argument_text=any(json.dumps(_ARGUMENTS) in text for text in by_text),
        argument_object=any(_VALUE in text and str(_ARGUMENTS) not in text for text in by_object),
    )


def _written(template: ChatTemplate, talks: Sequence[Sequence[Message]], more: Mapping[str, Any]) -> list[str]:
    """Return what a template makes of conversations, nothing where it refuses one."""
    found = try_render(template, [(talk, False) for talk in talks], more)
    return ["" if isinstance(one, str) else one.text for one in found]


def _roles(texts: Sequence[str]) -> frozenset[str]:
    """Return the roles whose word stands in a text, and not in Python's form of a list of parts, or in JSON."""
    found = {role for role, word in _WORDS.items() for text in texts if word in text}
    printed = {role for role in found for text in texts if _printed_part(_WORDS[role], text)}
    return frozenset(found - printed)


def _printed_part(word: str, text: str) -> bool:
    return any(f"{quote}text{quote}: {quote}{word}" in text for quote in "'\"")


def _in_parts(message: Message) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _calling(arguments: Any) -> list[list[Message]]:
    """Return a conversation with a call, whose turn has no content in each way in which it may have none."""
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    asked = {"role": "user", "content": _WORDS["user"]}
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "A result."}
    said = {"role": "assistant", "content": _WORDS["assistant"]}
    return [[asked, one, result, said] for one in (turn, *({**turn, "content": content} for content in NO_CONTENT))]


def shape_messages(messages: Sequence[Message], forms: Forms, origin: str) -> list[Message]:
    """Return messages in the forms that a template can write; `origin` names it.

    Raises:
      UserError: a message calls tools, and the template does not write calls.
    """
    return [_shape(number, message, forms, origin) for number, message in enumerate(messages, 1)]


def _shape(number: int, message: Message, forms: Forms, origin: str) -> Message:
    shaped = plain_message(message)
    content = message.get("content")
    role = message["role"] if message["role"] in _WORDS else "user"
    if isinstance(content, str) and role in forms.parts - forms.text:
        shaped["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list) and role not in forms.parts:
        shaped["content"] = "".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        if not (forms.argument_text or forms.argument_object):
            raise UserError(
                f"message {number} calls tools, which the chat template {origin} does not write: take a template that "
                "does, or leave such conversations out"
            )
        shaped["tool_calls"] = [_shape_call(call, forms) for call in calls]
    return shaped


def _shape_call(call: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    """Return a call, which may be OpenAI's or the function alone, with arguments that the template can write."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _shape_call(call["function"], forms)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and not forms.argument_text:
        with contextlib.suppress(UserError):  # what is no JSON stays the text that it is
            arguments = parse_json(arguments, "arguments")
    elif isinstance(arguments, dict) and not forms.argument_object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return dict(call) if arguments is None else {**call, "arguments": arguments}
