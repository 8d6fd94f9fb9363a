"""The forms in which a chat template is given a message: text or parts, arguments of calls as text
or as objects.

Some templates take either, some only one, and write nothing, or Python's own form of a dictionary,
where they are given the other. So each is tried on conversations whose words are known:

    template        {{ m.role }}: {{ m.content }}
    given text      user: Questionword
    given parts     user: [{'type': 'text', 'text': 'Questionword'}]

The second is Python's form of a list, so this template needs text: `Forms.needs_text` has all
roles, and `needs_parts` none. Calls of tools are tried alike, with arguments as an object and as
JSON; it writes none, so `Forms.arguments` is empty. `shape_messages` then gives it what it can
write:

    {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    {"role": "user", "content": "Hi"}
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json
from jaxpar.data.chat.template.files import ChatTemplate
from jaxpar.data.chat.template.render import Message, plain_message, try_render

_WORDS = {"system": "Instructionword", "user": "Questionword", "assistant": "Answerword"}
_VALUE = "Argumentword"
_ARGUMENTS = {"argumentname": _VALUE}
_AS_TEXT = json.dumps(_ARGUMENTS)
_ID = "callnumb1"
"""Mistral's templates take the ids of calls only in this form: nine letters or digits."""
_NAME = "toolname"
_TOOL = {
    "name": _NAME,
    "description": "A tool.",
    "parameters": {"type": "object", "properties": {}},
}
ABSENT: Any = object()
"""The content of a message that has no such key."""
NO_CONTENT = (None, ABSENT, "")
"""The contents that a message may have that says nothing."""


class Forms(NamedTuple):
    """The forms in which a template takes messages and calls."""

    needs_parts: frozenset[str]
    """The roles whose content has to be a list of parts."""
    needs_text: frozenset[str]
    """The roles whose content has to be text."""
    arguments: frozenset[type]
    """The types that the arguments of a call may have: `dict`, `str` (JSON) or both; empty where
    the template writes no calls.
    """
    no_content: tuple[Any, ...]
    """The members of `NO_CONTENT` with which the template writes a call."""
    closes: bool
    """Whether the template writes something after an answer that ends the conversation."""


class _Calls(NamedTuple):
    """The texts that a template makes of a call in each form of its arguments, by what stands in
    place of the content.
    """

    as_object: dict[Any, str]
    as_text: dict[Any, str]


def find_forms(template: ChatTemplate, more: Mapping[str, Any]) -> Forms:
    """Find the forms that a template can write, given other names (`more`).

    Raises:
      UserError: the template does not come to an end, or the `hf` extra is missing.
    """
    others = {key: value for key, value in more.items() if key not in ("tools", "documents")}
    plain = [{"role": role, "content": _WORDS[role]} for role in ("user", "assistant")]
    system = {"role": "system", "content": _WORDS["system"]}
    talks = (plain, [system, *plain])
    as_text = _written(template, talks, others)
    as_parts = _written(
        template, [[_in_parts(message) for message in talk] for talk in talks], others
    )
    text = _roles(as_text)
    parts = _roles(as_parts)
    calls = _written_calls(template, others)
    arguments = _arguments(calls)
    by_form = [
        by_content
        for kind, by_content in ((dict, calls.as_object), (str, calls.as_text))
        if kind in arguments
    ]
    no_content = [
        content for content in NO_CONTENT if all(content in by_content for by_content in by_form)
    ]
    ends = [
        text.rpartition(_WORDS["assistant"])[2]
        for text in as_text + as_parts
        if _WORDS["assistant"] in text
    ]
    return Forms(
        needs_parts=parts - text,
        needs_text=frozenset(_WORDS) - parts,
        arguments=arguments,
        no_content=tuple(no_content),
        closes=all(ends),
    )


def _written(
    template: ChatTemplate, talks: Sequence[Sequence[Message]], more: Mapping[str, Any]
) -> list[str]:
    """Write conversations by a template; the text of one that it refuses is empty."""
    found = try_render(template, [(talk, False) for talk in talks], more)
    return ["" if isinstance(one, str) else one.text for one in found]


def _roles(texts: Sequence[str]) -> frozenset[str]:
    """Find the roles whose word stands in a text, but not in a list of parts that is printed by
    Python or as JSON.
    """
    found = {role for role, word in _WORDS.items() for text in texts if word in text}
    printed = {role for role in found for text in texts if _printed_part(_WORDS[role], text)}
    return frozenset(found - printed)


def _printed_part(word: str, text: str) -> bool:
    return any(f"{quote}text{quote}: {quote}{word}" in text for quote in "'\"")


def _in_parts(message: Message) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _written_calls(template: ChatTemplate, more: Mapping[str, Any]) -> _Calls:
    """Write a call in every form; a form in which it does not stand in the text is left out."""
    names = {**more, "tools": [{"type": "function", "function": _TOOL}]}
    asked = list(itertools.product((_ARGUMENTS, _AS_TEXT), NO_CONTENT))
    texts = _written(
        template, [_calling(arguments, content) for arguments, content in asked], names
    )
    found = _Calls({}, {})
    # A null that the template writes as a word, as `{{ message.content }}` does, is none.
    fewest = min(
        (text.count("None") for text in texts if _VALUE in text),
        default=0,
    )
    for (arguments, content), text in zip(asked, texts, strict=True):
        if text.count("None") > fewest:
            continue
        if arguments is _AS_TEXT and _AS_TEXT in text:
            found.as_text[content] = text
        elif arguments is _ARGUMENTS and _VALUE in text and str(_ARGUMENTS) not in text:
            found.as_object[content] = text
    return found


def _arguments(calls: _Calls) -> frozenset[type]:
    """Return the types that the arguments of a call may have; `str` only if text is written as the
    object is.
    """
    if not calls.as_object:
        return frozenset({str} if calls.as_text else ())
    both = calls.as_object.keys() & calls.as_text.keys()
    same = both and all(calls.as_object[content] == calls.as_text[content] for content in both)
    return frozenset({dict, str} if same else {dict})


def _calling(arguments: Any, content: Any) -> list[Message]:
    """Make a conversation with a call."""
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    turn = _with_content({"role": "assistant", "tool_calls": [call]}, content)
    asked = {"role": "user", "content": _WORDS["user"]}
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "A result."}
    said = {"role": "assistant", "content": _WORDS["assistant"]}
    return [asked, turn, result, said]


def _with_content(message: Mapping[str, Any], content: Any) -> dict[str, Any]:
    others = {key: value for key, value in message.items() if key != "content"}
    if content is ABSENT:
        return others
    return {**others, "content": content}


def shape_messages(messages: Sequence[Message], forms: Forms, origin: str) -> list[Message]:
    """Convert messages to the forms that a template can write; `origin` is its file, for messages.

    Raises:
      UserError: a message calls tools, and the template does not write calls.
    """
    return [_shape(number, message, forms, origin) for number, message in enumerate(messages, 1)]


def _shape(number: int, message: Message, forms: Forms, origin: str) -> Message:
    shaped = plain_message(message)
    content = message.get("content")
    if message["role"] in _WORDS:
        role = message["role"]
    else:
        role = "user"
    if isinstance(content, str) and role in forms.needs_parts:
        shaped["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list) and role in forms.needs_text:
        shaped["content"] = "".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        if not forms.arguments:
            raise UserError(
                f"message {number} calls tools, which the chat template {origin} does not "
                "write: take a template that "
                "does, or leave such conversations out"
            )
        shaped["tool_calls"] = [_shape_call(call, forms) for call in calls]
        own = message.get("content", ABSENT)
        if own in NO_CONTENT:
            if own in forms.no_content:
                choices = [own]
            else:
                choices = forms.no_content
            shaped = _with_content(shaped, next(iter(choices), own))
    return shaped


def _shape_call(call: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    """Convert a call, OpenAI's or the function alone, to have arguments that the template can
    write.
    """
    if isinstance(call.get("function"), dict):
        return {**call, "function": _shape_call(call["function"], forms)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and str not in forms.arguments:
        with contextlib.suppress(UserError):  # what is no JSON stays the text that it is
            arguments = parse_json(arguments, "arguments")
    elif isinstance(arguments, dict) and dict not in forms.arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is None:
        return dict(call)
    return {**call, "arguments": arguments}
