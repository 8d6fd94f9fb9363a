"""Conversations as examples to learn. The folder `template` is read first: the chat template of a
tokenizer, which writes them as text. Then, in this order: the rows that hold them
(`conversations`), what an assistant's turn has said (`turns`) and what is not written
(`dropped_content`); by these one knows which characters are answers (`answers`) and with which
token a turn ends (`end_of_turn`). `examples` puts them together.
"""

from jaxpar.data.chat.examples import (
    load_examples,
)

__all__ = [
    "load_examples",
]
