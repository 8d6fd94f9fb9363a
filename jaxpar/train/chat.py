"""Chat templates: a conversation becomes the text that a model was taught to see, by the template of its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.train.tokenizer import read_text

TEMPLATE, SPECIAL_TOKENS = "chat_template.jinja", "tokenizer_config.json"
Message = Mapping[str, Any]
"""At least `role` and `content`, as in OpenAI's and Hugging Face's chat formats."""


class ChatTemplate(NamedTuple):
    """A template in Jinja, the special tokens that it may write (`{"bos_token": "<s>"}`), and its file."""

    text: str
    special_tokens: dict[str, str]
    origin: str


def load_template(tokenizer: str | Path) -> ChatTemplate:
    """Load the chat template that lies beside a tokenizer.json: chat_template.jinja, or else the `chat_template` of
    tokenizer_config.json.

    Raises:
      UserError: there is none, or a file cannot be read.
    """
    file, own = (Path(tokenizer).with_name(name) for name in (SPECIAL_TOKENS, TEMPLATE))
    config, special = _tokenizer_config(file), special_tokens(tokenizer)
    if own.exists():
        return ChatTemplate(read_text(own), special, str(own))
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    if not isinstance(template, str):
        raise UserError(
            f"{tokenizer} has no chat template beside it (chat_template.jinja, or chat_template in {file.name}): "
            "take those of the model's own folder"
        )
    return ChatTemplate(template, special, str(file))


def special_tokens(tokenizer: str | Path) -> dict[str, str]:
    """Return the special tokens that lie beside a tokenizer.json: `{"bos_token": "<s>"}`; there may be none.

    Raises:
      UserError: tokenizer_config.json cannot be read.
    """
    config = _tokenizer_config(Path(tokenizer).with_name(SPECIAL_TOKENS))
    # A token is its text, or an object with it as `content`.
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    named = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in named.items() if isinstance(value, str)}


def _tokenizer_config(file: Path) -> dict[str, Any]:
    try:
        return json.loads(read_text(file)) if file.exists() else {}
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error


def render(
    messages: Sequence[Message], template: ChatTemplate, add_generation_prompt: bool = False, **more: Any
) -> str:
    """Write a conversation as the template does, as `transformers.apply_chat_template(tokenize=False)` would.

    Args:
      messages: the turns.
      template: from `load_template`.
      add_generation_prompt: also write what comes before an answer, so that the model gives one.
      more: other names that the template may read, such as `tools`.

    Raises:
      UserError: the template refuses the messages or is not Jinja, or the `hf` extra is missing.
    """
    try:
        import jinja2
    except ImportError as error:
        raise UserError("a chat template needs the jinja2 package: pip install 'jaxpar[hf]'") from error
    turns = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return _compile(template.text).render(
            messages=turns, add_generation_prompt=add_generation_prompt, **template.special_tokens, **more
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"the chat template {template.origin} refuses this conversation: {error}") from error


@lru_cache
def _compile(text: str) -> Any:
    """Compile a template in the sandbox and with the names that transformers gives it."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, **{"ensure_ascii": False, **options})

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    # transformers marks the answers with a tag of its own, which writes what is inside.
    text = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", text)
    return made.from_string(re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", text))


def completion_spans(
    messages: Sequence[Message], template: ChatTemplate, **more: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Write a conversation, and say which characters [begin, end) of it the assistant has to write.

    An answer is what its turn adds to the conversation before it with the generation prompt, and so includes what
    closes the turn.

    Raises:
      UserError: the template writes earlier turns otherwise once later ones follow; or see `render`.
    """
    text, spans = render(messages, template, **more), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:i], template, add_generation_prompt=True, **more)
        after = render(messages[: i + 1], template, **more)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"the chat template {template.origin} does not write turn {i + 1} as an addition to those before it, "
                "so which tokens are its answer cannot be told: end each conversation with its only assistant turn"
            )
        spans.append((len(before), len(after)))
    return text, spans
