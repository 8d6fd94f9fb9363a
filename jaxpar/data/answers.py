"""Which characters of a written conversation its assistant has to write."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json, suggest
from jaxpar.data.chat_template import (
    GIVEN,
    ChatTemplate,
    Message,
    Rendered,
    Span,
    load_template,
    names_read,
    try_render,
)
from jaxpar.data.conversations import Conversation
from jaxpar.data.template_forms import NO_CONTENT, Forms, find_forms, shape_messages

_STAND_IN = "\ue0ef"
"""A character for private use that stands for an answer."""
_BY_MARKS = "mark its answers by {% generation %} and {% endgeneration %} in the template"


class Answers(NamedTuple):
    """A conversation as text, and which characters [begin, end) of it the assistant writes."""

    text: str
    spans: list[Span]
    undefined: tuple[str, ...]
    """Names that the template wrote and that nothing defines."""


class ConversationWriter:
    """Writes conversations by one template.

    Args:
      template: the chat template.
      names: other names that it may read in every conversation.
      today: what `strftime_now` writes; None = this moment.
    """

    def __init__(self, template: ChatTemplate, names: Mapping[str, Any], today: date | None = None):
        self.template = template
        self.names = dict(names)
        self.today = today

    @cached_property
    def forms(self) -> Forms:
        return find_forms(self.template, self.names)

    def prompt(self, conversation: Conversation) -> Rendered:
        """Write a conversation with what comes before an answer.

        Raises:
          UserError: the template refuses it; see `chat_template.render`.
        """
        messages = shape_messages(conversation.messages, self.forms, self.template.origin)
        return self._whole(messages, self._names(conversation), prompted=True)[1]

    def answers(self, conversation: Conversation, find: bool = True) -> Answers:
        """Write a conversation, and say what of it the assistant has to write.

        That is what the template marks by `{% generation %}`. Without marks it is what an assistant's turn adds to the
        conversation before it with the generation prompt, so also what closes the turn. Where the template writes
        those otherwise, it is what stands in the place of the answer, with what closes it, which is found by writing
        the conversation with another answer there.

        Args:
          conversation: at least one message of it is the assistant's.
          find: False = there is no need for the spans.

        Raises:
          UserError: the template refuses the conversation, or it cannot be told what an answer is.
        """
        messages = shape_messages(conversation.messages, self.forms, self.template.origin)
        names = self._names(conversation)
        messages, whole = self._whole(messages, names, prompted=False)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [i for i in turns if i >= conversation.learned_from]
        if not find:
            spans = [(0, len(whole.text))] if learned else []
        elif whole.generated:
            spans = self._marked(whole.generated, turns, learned)
        else:
            spans = list(_Turns(self, messages, names, whole.text).spans(learned))
        return Answers(whole.text, spans, whole.undefined)

    def _render(
        self, asked: Sequence[tuple[Sequence[Message], bool]], names: Mapping[str, Any]
    ) -> list[Rendered | str]:
        """Write several conversations, each with or without a generation prompt; see `try_render`."""
        return try_render(self.template, asked, names, self.today)

    def _names(self, conversation: Conversation) -> dict[str, Any]:
        """Return all that the template is given but the messages; of a line's own names those that it reads."""
        read = names_read(self.template)
        own = {key: value for key, value in conversation.names.items() if key in read}
        return self.names | own

    def _whole(
        self, messages: list[Message], names: Mapping[str, Any], prompted: bool
    ) -> tuple[list[Message], Rendered]:
        """Write a conversation; one that is refused is tried with an empty or a null content where there is none."""
        (found,) = self._render([(messages, prompted)], names)
        if isinstance(found, Rendered):
            return messages, found
        if not all("content" in message for message in messages):
            filled: list[list[Message]] = [
                [{"content": content, **message} for message in messages] for content in NO_CONTENT
            ]
            again = self._render([(talk, prompted) for talk in filled], names)
            for talk, written in zip(filled, again, strict=True):
                if isinstance(written, Rendered):
                    return talk, written
        raise UserError(f"the chat template {self.template.origin} refuses this conversation: {found}")

    def _marked(self, generated: Sequence[Span], turns: Sequence[int], learned: Sequence[int]) -> list[Span]:
        """Return the marked spans of the turns that are learned from."""
        if len(learned) == len(turns):
            return list(generated)
        if len(generated) != len(turns):
            raise UserError(
                f"the chat template {self.template.origin} marks {len(generated)} answers of {len(turns)} turns, so "
                "which are those of the completion cannot be told: write the lines with messages"
            )
        return [span for turn, span in zip(turns, generated, strict=True) if turn in learned]

    def write(self, asked: Sequence[tuple[Sequence[Message], bool]], names: Mapping[str, Any]) -> list[str | None]:
        """Write several conversations; None where the template refuses one."""
        found = self._render(asked, names)
        return [one.text if isinstance(one, Rendered) else None for one in found]

    def stand_in(self) -> Message:
        """Return an assistant's message with another answer."""
        message = {"role": "assistant", "content": _STAND_IN}
        return shape_messages([message], self.forms, self.template.origin)[0]


def open_writer(tokenizer: str | Path, args: Sequence[str], today: str = "") -> ConversationWriter:
    """Return what writes conversations by the chat template beside a tokenizer.json.

    Args:
      tokenizer: that file.
      args: names that the template reads, each with its value: `enable_thinking=false`. A value is JSON, or else text;
        the name `chat_template` takes the template of that name, where there are several.
      today: the date that the template writes as today's, as in 2026-01-31; empty = today's.

    Raises:
      UserError: there is no template, it reads no such name, or a value is none.
    """
    given = dict(map(_split_argument, args))
    name = given.pop("chat_template", "")
    template = load_template(tokenizer, str(name))
    read = names_read(template) - set(GIVEN) if given else frozenset()
    for key in given:
        if key not in read:
            named = ", ".join(sorted(read - template.special_tokens.keys())) or "no others"
            raise UserError(
                f"data.template_args: the chat template {template.origin} does not read {key}{suggest(key, read)}: "
                f"it reads {named}"
            )
    return ConversationWriter(template, given, _date(today) if today else None)


def _split_argument(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or not name.strip().isidentifier():
        raise UserError(
            f"data.template_args has {argument!r}, where it takes NAME=VALUE, such as enable_thinking=false"
        )
    try:
        value = parse_json(text, name)
    except UserError:
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return name.strip(), value


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"data.template_date={text} is no date: write it as in 2026-01-31") from error


def missing_names(names: Collection[str]) -> str:
    """Return the note on names that a template wrote and that nothing defines."""
    listed = ", ".join(sorted(names))
    return f"its chat template writes {listed}, which no file and no setting defines: nothing is written there"


class _Turns:
    """The assistant's turns of a conversation whose template marks none."""

    def __init__(self, writer: ConversationWriter, messages: list[Message], names: Mapping[str, Any], text: str):
        self.writer, self.messages, self.names, self.text = writer, messages, names, text

    def spans(self, turns: Sequence[int]) -> Iterator[Span]:
        """Yield the characters of each of these turns.

        Raises:
          UserError: those of one cannot be told.
        """
        asked = [pair for i in turns for pair in ((self.messages[:i], True), (self.messages[: i + 1], False))]
        found = self.writer.write(asked, self.names)
        for i, before, after in zip(turns, found[::2], found[1::2], strict=True):
            added = before is not None and after is not None and after.startswith(before)
            if added and self.text.startswith(after):  # pyright: ignore[reportArgumentType]
                yield len(before), len(after)  # pyright: ignore[reportArgumentType]
            else:
                yield self._replaced(i)

    def _replaced(self, i: int) -> Span:
        """Find an answer as what changes where another stands in its place; the rest must not change."""
        other = self.writer.stand_in()
        until, after = self.messages[:i], self.messages[i + 1 :]
        asked = [[*until, other, *after], [*until, other], self.messages[: i + 1]]
        whole, last, own_last = self.writer.write([(talk, False) for talk in asked], self.names)
        placed = _place(whole, self.text)
        if placed is None:
            raise self._unknown(i)
        begin, end = placed
        if not after:
            return begin, len(self.text)
        body, rest = self.text[begin:end], self.text[end:]
        if own_last is None:  # the template refuses a conversation that ends here, so what closes the turn is not known
            return begin, end
        placed_last = _place(last, own_last)
        if placed_last is None or own_last[placed_last[0] : placed_last[1]] != body:
            raise UserError(
                f"the chat template {self.writer.template.origin} writes turn {i + 1} otherwise once others follow it, "
                "so that what would be learned is not what it answers: split the conversation, into one for each "
                f"answer that ends with it, or {_BY_MARKS}"
            )
        closes = _closing_length(own_last[placed_last[1] :], rest)
        if closes is None:
            raise self._unknown(i)
        return begin, end + closes

    def _unknown(self, i: int) -> UserError:
        return UserError(
            f"what of turn {i + 1} is its answer cannot be told in what the chat template "
            f"{self.writer.template.origin} writes: {_BY_MARKS}, or set data.loss_on=all"
        )


def _place(replaced: str | None, text: str) -> tuple[int, int] | None:
    """Return where [begin, end) the text has something else than the answer that replaced it.

    None where that cannot be told: nothing but the answer, and white space before it, may differ.
    """
    if replaced is None or replaced.count(_STAND_IN) != 1:
        return None
    before, rest = replaced.split(_STAND_IN)
    begin = _shared_length(before, text)
    end = len(text) - len(rest)
    if before[begin:].strip() or not text.endswith(rest) or end < begin:
        return None
    return begin, end


def _closing_length(at_the_end: str, within: str) -> int | None:
    """Return how much of what follows an answer closes its turn: what follows it at a conversation's end and within it.

    The two may differ only from where each begins another marker, such as `<|endoftext|>` and `<|user|>`. None where
    they share a part of something else.
    """
    shared = at_the_end[: _shared_length(at_the_end, within)]
    if within.startswith(at_the_end.rstrip()):
        return len(shared)
    whole = len(re.sub(r"[<\[][^>\]\s]*$", "", shared))
    next_characters = {at_the_end[whole : whole + 1], within[whole : whole + 1]}
    return whole if not whole or next_characters <= {"<", "[", ""} else None


def _shared_length(left: str, right: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    differs = (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differs, min(len(left), len(right)))


def completion_spans(messages: Sequence[Message], template: ChatTemplate, **more: Any) -> tuple[str, list[Span]]:
    """Write a conversation, and say which characters [begin, end) of it the assistant has to write.

    `more` are other names that the template may read; see `ConversationWriter.answers`.

    Raises:
      UserError: the template refuses the conversation, or it cannot be told what an answer is.
    """
    found = ConversationWriter(template, more).answers(Conversation(list(messages), {}))
    return found.text, found.spans
