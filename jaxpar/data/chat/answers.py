"""The characters of a written conversation that its assistant has to write.

    messages   user: Hi, assistant: Yes
    text       <user>Hi</s><bot>Yes</s>
    spans      [(17, 24)], which is Yes</s>: the answer, and what closes it

A template may mark them itself, by `{% generation %}` (`ConversationWriter._marked`). Without marks
they are found by writing the conversation up to each answer (`turns`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json, suggest
from jaxpar.data.chat.conversations import Conversation
from jaxpar.data.chat.dropped_content import find_unwritten
from jaxpar.data.chat.template.files import ChatTemplate, load_template
from jaxpar.data.chat.template.forms import Forms, find_forms, shape_messages
from jaxpar.data.chat.template.render import GIVEN, Message, Rendered, Span, names_read, try_render
from jaxpar.data.chat.turns import Turns

_REWRITTEN = (
    "its chat template begins an earlier answer otherwise than the last, and each is learned as "
    "it stands there; split "
    "into one for each answer, a conversation has the last one's form alone"
)
_OPEN = (
    "its chat template writes nothing that closes an answer, so that the model does not "
    "learn to end one"
)
_TOLD = frozenset({"tools", "documents"})
"""The names beside a line's messages that are a part of the conversation."""


class Answers(NamedTuple):
    """A conversation as text, and which characters [begin, end) of it the assistant writes."""

    text: str
    spans: list[Span]
    undefined: tuple[str, ...]
    """Names that the template wrote and that nothing defines."""
    notes: frozenset[str] = frozenset()
    """Other things the template did that a user should know, in words that follow a description of
    the data.
    """


class ConversationWriter:
    """A writer of conversations by one template.

    Args:
      names: other names that the template may read in every conversation.
      today: the date that `strftime_now` writes; None = this moment.
    """

    def __init__(
        self,
        template: ChatTemplate,
        names: Mapping[str, Any],
        today: date | None = None,
    ):
        self.template = template
        self.names = dict(names)
        self.today = today

    @cached_property
    def forms(self) -> Forms:
        return find_forms(self.template, self.names)

    def prompt(self, conversation: Conversation) -> Rendered:
        """Write a conversation with what comes before an answer.

        Raises:
          UserError: the template refuses it.
        """
        messages = shape_messages(conversation.messages, self.forms, self.template.origin)
        return self._whole(messages, self._names(conversation), prompted=True)[1]

    def answers(self, conversation: Conversation, find: bool = True) -> Answers:
        """Write a conversation, and find what of it the assistant has to write.

        The template marks it by `{% generation %}`. Without marks it is what an assistant's turn
        adds to the conversation before it with the generation prompt, so also what closes the turn.
        Where the template writes that conversation in another way, it is what stands between the
        generation prompt and the end of the answer, with what closes it, which is found by writing
        the conversation with another answer there.

        Args:
          conversation: at least one message of it is the assistant's.
          find: False = there is no need for the spans.

        Raises:
          UserError: the template refuses the conversation, does not write what would be learned, or
            it cannot be told what an answer is.
        """
        messages = shape_messages(conversation.messages, self.forms, self.template.origin)
        names = self._names(conversation)
        messages, whole = self._whole(messages, names, prompted=False)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [i for i in turns if conversation.is_learned(i)]
        origin = self.template.origin
        write = partial(self.write, names=names)
        unwritten = find_unwritten(messages, learned, whole.text, write, origin)
        unwritten |= self._unwritten_names(conversation, messages, whole.text)
        notes = {f"its chat template does not write {what}" for what in unwritten}
        if not find:
            if learned:
                spans = [(0, len(whole.text))]
            else:
                spans = []
        elif whole.generated:
            spans = self._marked(whole, messages, names, learned)
        else:
            found = Turns(messages, whole.text, write, self.forms, origin).find(learned)
            spans = [turn.span for turn in found]
            notes |= {_REWRITTEN} if any(turn.rewritten for turn in found) else set()
            notes |= {_OPEN} if any(turn.is_open for turn in found) else set()
        return Answers(whole.text, spans, whole.undefined, frozenset(notes))

    def _render(
        self, asked: Sequence[tuple[Sequence[Message], bool]], names: Mapping[str, Any]
    ) -> list[Rendered | str]:
        """Write several conversations by `try_render`, each with or without a generation prompt."""
        return try_render(self.template, asked, names, self.today)

    def _names(self, conversation: Conversation) -> dict[str, Any]:
        """Return the names that the template is given beside the messages; a line's own only if it
        reads them.
        """
        read = names_read(self.template)
        own = {key: value for key, value in conversation.names.items() if key in read}
        return self.names | own

    def _unwritten_names(
        self, conversation: Conversation, messages: Sequence[Message], text: str
    ) -> set[str]:
        """Return which of a conversation's tools and documents make no difference to what is
        written.
        """
        names = self._names(conversation)
        found: set[str] = set()
        for name in _TOLD.intersection(conversation.names):
            if name in names:
                (without,) = self.write([(messages, False)], {**names, name: None})
            else:
                without = text
            if without == text:
                found.add(name)
        return found

    def _whole(
        self, messages: list[Message], names: Mapping[str, Any], prompted: bool
    ) -> tuple[list[Message], Rendered]:
        """Write a conversation; if it is refused, try an empty and a null content where there is
        none.
        """
        (found,) = self._render([(messages, prompted)], names)
        if isinstance(found, Rendered):
            return messages, found
        if any(message.get("content") is None for message in messages):
            filled = [_fill(messages, content) for content in ("", None)]
            again = self._render([(talk, prompted) for talk in filled], names)
            for talk, written in zip(filled, again, strict=True):
                if isinstance(written, Rendered):
                    return talk, written
        raise UserError(
            f"the chat template {self.template.origin} refuses this conversation: {found}"
        )

    def _marked(
        self,
        whole: Rendered,
        messages: Sequence[Message],
        names: Mapping[str, Any],
        learned: Sequence[int],
    ) -> list[Span]:
        """Return the marked spans of the turns that are learned from; a turn may have several.

        Of two turns, of which the second is learned, where the first has a thought and an answer
        that are marked each:

            generated   [thought, answer, answer of the second]
            firsts      [0, 2]: before the first turn nothing is marked, before the second two are
            spans       [answer of the second]
        """
        generated = list(whole.generated or ())
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(learned) == len(turns):
            return generated
        firsts = self._first_marks(generated, [messages[:i] for i in turns], names)
        if firsts is None and len(generated) == len(turns):
            firsts = list(range(len(turns)))
        if firsts is None:
            raise UserError(
                f"the chat template {self.template.origin} marks "
                f"{len(generated)} answers in {len(turns)} turns, "
                "so which are those of the completion cannot be told: "
                "take a template with one {% generation %} for each turn"
            )
        ends = [*firsts[1:], len(generated)]
        found: list[Span] = []
        for turn, first, end in zip(turns, firsts, ends, strict=True):
            found += generated[first:end] if turn in learned else []
        return found

    def _first_marks(
        self, generated: list[Span], before: Sequence[Sequence[Message]], names: Mapping[str, Any]
    ) -> list[int] | None:
        """Return which of a conversation's marks is the first of each turn, by what is marked
        before it.

        None where the template marks something else before a turn that nothing follows.
        """
        firsts: list[int] = []
        for written in self._render([(talk, True) for talk in before], names):
            if isinstance(written, Rendered):
                earlier = list(written.generated or ())
            else:
                earlier = None
            if earlier is None or earlier != generated[: len(earlier)]:
                return None
            firsts.append(len(earlier))
        return firsts

    def write(
        self, asked: Sequence[tuple[Sequence[Message], bool]], names: Mapping[str, Any]
    ) -> list[str | None]:
        """Write several conversations; None where the template refuses one."""
        found = self._render(asked, names)
        return [one.text if isinstance(one, Rendered) else None for one in found]


def _fill(messages: Sequence[Message], content: str | None) -> list[Message]:
    """Give messages without content this content."""
    return [
        {**message, "content": content} if message.get("content") is None else message
        for message in messages
    ]


def open_writer(
    tokenizer: str | Path,
    args: Sequence[str],
    today: str = "",
) -> ConversationWriter:
    """Make a writer of conversations by the chat template beside a tokenizer.json.

    Args:
      args: names that the template reads, each with its value: `enable_thinking=false`. A value is
        JSON, or else text; the name `chat_template` takes the template of that name, where there
        are several.
      today: the date that the template writes as today's, as in 2026-01-31; empty = today's.

    Raises:
      UserError: there is no template, it reads no such name, or a value is none.
    """
    given = dict(map(_split_argument, args))
    name = given.pop("chat_template", "")
    template = load_template(tokenizer, str(name))
    if given:
        read = names_read(template) - set(GIVEN)
    else:
        read = frozenset()
    for key in given:
        if key not in read:
            named = ", ".join(sorted(read - template.special_tokens.keys())) or "no others"
            raise UserError(
                f"data.template_args: the chat template {template.origin} does not read "
                f"{key}{suggest(key, read)}: "
                f"it reads {named}"
            )
    return ConversationWriter(template, given, _date(today) if today else None)


def _split_argument(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or not name.strip().isidentifier():
        raise UserError(
            f"data.template_args has {argument!r}, where it takes NAME=VALUE, such as "
            "enable_thinking=false"
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
        raise UserError(
            f"data.template_date={text} is no date: write it as in 2026-01-31"
        ) from error


def missing_names(names: Collection[str]) -> str:
    """Write the note on names that a template wrote and that nothing defines."""
    listed = ", ".join(sorted(names))
    return (
        f"its chat template writes {listed}, which no file and no setting defines: nothing "
        "is written there"
    )
